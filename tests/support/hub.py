"""A hub on this machine: what the clients of Hugging Face and ModelScope use of their hubs' protocols, both on one address.

Large files are on another host, as those of both hubs are: the hub redirects to it, and it takes requests for a range.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = (".safetensors", ".bin")
"""Ends of the names of files that are on the other host."""
MEMBER, STRANGER = "hf_member", "hf_stranger"
"""Tokens: of an account with access to what is gated, and of one without."""


class Hub:
    """Repositories: kind/owner/name -> revisions, oldest first, each a commit with its files."""

    def __init__(self, refuses: int | None = None) -> None:
        self.refuses = refuses
        """Status of every request to create a repository."""
        self.repositories: dict[str, dict[str, dict[str, bytes]]] = {}
        self.names_no_commits = False
        """ModelScope's lists of files have no commits."""
        self.tags: dict[str, str] = {}
        """Name of a branch or tag -> commit."""
        self.gated: set[str] = set()
        self.requests: list[str] = []
        """Method and path of every request; a request for a range ends in its header."""
        self.tokens: set[str] = set()
        self.tokens_elsewhere: set[str] = set()
        """Tokens that the host of large files was sent: both clients must keep them from it."""
        self.cuts: list[int] = []
        """The next downloads of large files each end after so many bytes, as if the cable were cut."""
        self.seconds_per_piece = 0.0
        """Pause after each 64 KiB of a large file."""
        self.status = 0
        """Status of all answers, unless 0."""
        self.created: list[dict[str, Any]] = []
        self.objects: dict[str, bytes] = {}
        self.url = self.storage = ""

    def push(self, repository: str, files: dict[str, bytes], kind: str = "datasets", tag: str | None = None) -> str:
        """Add a commit and return it."""
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.repositories.setdefault(f"{kind}/{repository}", {})[commit] = files
        if tag is not None:
            self.tags[tag] = commit
        return commit

    def downloads(self, repository: str, kind: str = "datasets") -> list[str]:
        """Requests for files that the hub has itself."""
        path = repository if kind == "models" else f"{kind}/{repository}"
        return [request for request in self.requests if request.startswith(f"GET /{path}/resolve/")]

    def large_downloads(self) -> list[str]:
        return [request for request in self.requests if request.startswith("GET /large/")]

    def files(self, repository: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        commits = self.repositories.get(repository)
        if not commits:
            return None
        commit = list(commits)[-1] if revision in ("main", "master") else self.tags.get(revision, revision)
        return (commit, commits[commit]) if commit in commits else None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: object) -> None: ...

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def json(self, value: Any, status: int = 200, **headers: str) -> None:
        self.answer(status, json.dumps(value).encode(), Content_Type="application/json", **headers)

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            pieces = []
            while size := int(self.rfile.readline(), 16):
                pieces.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(pieces)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    @property
    def token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def respond(self) -> None:
        body, address = self.body(), urlsplit(self.path)
        path = unquote(address.path)
        span = self.headers.get("Range")
        self.hub.requests.append(f"{self.command} {path}" + (f" {span}" if span else ""))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.route(path, {name: values[0] for name, values in parse_qs(address.query).items()}, body)

    def route(self, path: str, query: dict[str, str], body: bytes) -> None:
        raise NotImplementedError

    do_GET = do_HEAD = do_POST = do_PUT = lambda self: self.respond()


class _Storage(_Handler):
    """The host of large files."""

    def route(self, path: str, query: dict[str, str], body: bytes) -> None:
        hub = self.hub
        if self.token or self.headers.get("Cookie"):
            hub.tokens_elsewhere.add(self.token or self.headers["Cookie"])
        if self.command == "PUT":
            hub.objects[path.rpartition("/")[2]] = body
            return self.json({})
        data = hub.objects[path.rpartition("/")[2]]
        span = self.headers.get("Range")
        begin = int(span.removeprefix("bytes=").partition("-")[0]) if span else 0
        self.send_response(206 if span else 200)
        self.send_header("Content-Length", str(len(data) - begin))
        self.send_header("Content-Type", "application/octet-stream")
        if span:
            self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        end = begin + hub.cuts.pop(0) if hub.cuts else len(data)
        for place in range(begin, min(end, len(data)), 1 << 16):
            self.wfile.write(data[place : min(place + (1 << 16), end)])
            time.sleep(hub.seconds_per_piece)
        if end < len(data):
            self.close_connection = True


class _Front(_Handler):
    """The hub itself."""

    def route(self, path: str, query: dict[str, str], body: bytes) -> None:
        hub, parts = self.hub, path.strip("/").split("/")
        if self.token:
            hub.tokens.add(f"Bearer {self.token}")
        if hub.status:
            return self.json({"error": "out of order"}, hub.status)
        if self.token and not self.token.startswith("hf_"):
            return self.json({}, 401, X_Error_Message="Invalid credentials in Authorization header")
        if self.command == "POST" and "paths-info" not in parts:
            return self.upload(path, body)
        if parts[:2] == ["api", "v1"]:
            return self.modelscope("/".join(parts[2:5]), parts[5:], query)
        if parts[0] == "api" and parts[1] in ("datasets", "models"):
            return self.api(f"{parts[1]}/{'/'.join(parts[2:4])}", parts[4:], query, body)
        if "resolve" in parts:
            kind, words = ("datasets", parts[1:]) if parts[0] == "datasets" else ("models", parts)
            return self.resolve(f"{kind}/{'/'.join(words[:2])}", words[3], "/".join(words[4:]))
        self.json({}, 404)

    def absent(self, repository: str) -> None:
        """Answer as the hub does: a visitor is not told whether a repository is private or none."""
        if repository in self.hub.repositories:
            return self.json({"error": "Invalid rev id"}, 404, X_Error_Code="RevisionNotFound")
        self.json({"error": "Repository not found"}, 404 if self.token else 401, X_Error_Code="RepoNotFound")

    def api(self, repository: str, rest: list[str], query: dict[str, str], body: bytes) -> None:
        revision = self.hub.files(
            repository, "/".join(rest[1:]) if rest[:1] == ["revision"] else rest[1] if rest[1:] else "main"
        )
        if revision is None:
            return self.absent(repository)
        if rest[:1] == ["auth-check"]:
            return None if self.is_refused(repository) else self.json({})
        commit, files = revision
        entries = [self.entry(name, data) for name, data in files.items()]
        folders = {str(PurePosixPath(name).parent) for name in files} - {"."}
        entries += [{"type": "directory", "path": name, "oid": "0" * 40} for name in sorted(folders)]
        if rest[:1] == ["tree"]:
            is_recursive, folder = query.get("recursive", "").lower() == "true", "/".join(rest[2:])
            below = [entry for entry in entries if not folder or entry["path"].startswith(f"{folder}/")]
            near = [entry for entry in below if str(PurePosixPath(entry["path"]).parent) == (folder or ".")]
            return self.json(below if is_recursive else near)
        if rest[:1] == ["paths-info"]:
            wanted = json.loads(body) if body.startswith(b"{") else parse_qs(body.decode())
            paths = wanted["paths"] if isinstance(wanted["paths"], list) else [wanted["paths"]]
            return self.json([entry for entry in entries if entry["path"] in paths])
        gated = "manual" if repository in self.hub.gated else False
        self.json(
            {"id": repository.partition("/")[2], "sha": commit, "private": False, "gated": gated, "disabled": False,
             "downloads": 0, "likes": 0, "tags": [], "siblings": [{"rfilename": name} for name in files],
             "lastModified": "2026-01-01T00:00:00.000Z"}
        )  # fmt: skip

    @staticmethod
    def entry(name: str, data: bytes) -> dict[str, Any]:
        entry = {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
        if name.endswith(LARGE):
            entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
        return entry

    def is_refused(self, repository: str) -> bool:
        """Answer for what is gated, unless the token may read it."""
        if repository not in self.hub.gated or self.token == MEMBER:
            return False
        message = f"Access to {repository} is restricted."
        self.json({"error": message}, 403 if self.token else 401, X_Error_Code="GatedRepo", X_Error_Message=message)
        return True

    def elsewhere(self, name: str, data: bytes, **headers: str) -> None:
        key = hashlib.sha256(data).hexdigest()
        self.hub.objects[key] = data
        self.answer(302, b"", Location=f"{self.hub.storage}/large/{PurePosixPath(name).name}/{key}", **headers)

    def resolve(self, repository: str, revision: str, name: str) -> None:
        version = self.hub.files(repository, revision)
        if version is None:
            return self.absent(repository)
        if self.is_refused(repository):
            return
        commit, data = version[0], version[1].get(name)
        if data is None:
            return self.answer(404, b"", X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
        if name.endswith(LARGE):
            linked = f'"{hashlib.sha256(data).hexdigest()}"'
            return self.elsewhere(name, data, X_Repo_Commit=commit, X_Linked_Size=str(len(data)), X_Linked_ETag=linked)
        self.answer(200, data, ETag=f'"{hashlib.sha1(data).hexdigest()}"', X_Repo_Commit=commit)

    def last_change(self, repository: str, commit: str, name: str) -> dict[str, Any]:
        """The commit that wrote a file, and its time, which is that of the place in the history."""
        history = list(self.hub.repositories[repository].items())
        history = history[: [earlier for earlier, _ in history].index(commit) + 1]
        data, change = history[-1][1][name], {}
        for second, (one, files) in reversed(list(enumerate(history))):
            if files.get(name) != data:
                break
            change = {"Revision": one, "CommittedDate": 1_700_000_000 + second}
        return change

    def modelscope(self, repository: str, rest: list[str], query: dict[str, str]) -> None:
        hub, version = self.hub, self.hub.files(repository, query.get("Revision", "master"))
        if version is None:
            missing = "revision" if repository in self.hub.repositories else "model"
            return self.json({"Code": 10010205001, "Message": f"{missing} not found", "Success": False}, 404)
        if repository in self.hub.gated and self.token != MEMBER:
            return self.json({"Code": 10010202002, "Message": "access denied", "Success": False}, 403 if self.token else 401)
        commit, files = version
        if rest in (["repo", "files"], ["repo", "tree"]):
            entries = [
                {"Path": name, "Name": name, "Type": "blob", "Size": len(data), "Sha256": hashlib.sha256(data).hexdigest(),
                 **({} if hub.names_no_commits else self.last_change(repository, commit, name))}
                for name, data in files.items()
            ]  # fmt: skip
            if rest == ["repo", "tree"]:
                # Data sets, page by page.
                size, page = int(query["PageSize"]), int(query["PageNumber"])
                entries = entries[size * (page - 1) : size * page]
            return self.json({"Code": 200, "Data": {"Files": entries}, "Success": True})
        if rest == ["repo"]:
            name = query["FilePath"]
            return self.elsewhere(name, files[name]) if name.endswith(LARGE) else self.answer(200, files[name])
        self.json({"Code": 200, "Data": {"Name": repository}, "Success": True})

    def upload(self, path: str, body: bytes) -> None:
        hub = self.hub
        if path == "/api/repos/create":
            created = json.loads(body)
            if hub.refuses:
                message = "You don't have the rights to create a model under this namespace"
                return self.json({"error": message}, hub.refuses)
            name = f"{created['organization']}/{created['name']}"
            hub.created.append(created)
            hub.repositories.setdefault(f"models/{name}", {})
            return self.json({"url": f"{hub.url}/{name}", "name": name})
        if path == "/api/validate-yaml":
            return self.json({"errors": [], "warnings": []})
        if path.endswith("/preupload/main"):
            modes = [
                {"path": file["path"], "shouldIgnore": False,
                 "uploadMode": "lfs" if file["path"].endswith(LARGE) else "regular"}
                for file in json.loads(body)["files"]
            ]  # fmt: skip
            return self.json({"files": modes})
        if path.endswith("/info/lfs/objects/batch"):
            objects = [
                {"oid": one["oid"], "size": one["size"], "actions": {"upload": {"href": f"{hub.storage}/lfs/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            return self.json({"transfer": "basic", "objects": objects})
        if not path.endswith("/commit/main"):
            return self.json({}, 404)
        name, files = path.removeprefix("/api/models/").removesuffix("/commit/main"), {}
        for line in body.splitlines():
            row = json.loads(line)
            value = row["value"]
            if row["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif row["key"] == "lfsFile":
                files[value["path"]] = hub.objects[value["oid"]]
        commit = hub.push(name, files, "models")
        self.json({"success": True, "commitOid": commit, "commitUrl": f"{hub.url}/{name}/commit/{commit}"})


@contextmanager
def serving(refuses: int | None = None) -> Iterator[Hub]:
    """A hub while the block runs; its large files are on another address of this machine."""
    hub = Hub(refuses)
    servers = [
        ThreadingHTTPServer((host, 0), type("Handler", (kind,), {"hub": hub}))
        for host, kind in (("127.0.0.1", _Front), ("127.0.0.2", _Storage))
    ]
    hub.url, hub.storage = (f"http://{server.server_address[0]}:{server.server_port}" for server in servers)  # type: ignore[str-bytes-safe]
    for server in servers:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield hub
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
