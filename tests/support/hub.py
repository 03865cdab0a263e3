"""A hub for data sets on this machine: the parts of the Hugging Face hub's protocol that its clients use to read files."""

from __future__ import annotations

import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


class Hub:
    """Repositories of data sets: id -> revisions, oldest first, each a commit with its files."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, dict[str, bytes]]] = {}
        self.requests: list[str] = []
        self.url = ""

    def push(self, repository: str, files: dict[str, bytes]) -> str:
        """Add a commit and return it."""
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.repositories.setdefault(repository, {})[commit] = files
        return commit

    def downloads(self, repository: str) -> list[str]:
        return [each for each in self.requests if each.startswith(f"GET /datasets/{repository}/resolve/")]

    def files(self, repository: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        commits = self.repositories.get(repository)
        if not commits:
            return None
        commit = list(commits)[-1] if revision == "main" else revision
        return (commit, commits[commit]) if commit in commits else None


@contextmanager
def serving():
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def answer(self, status: int, body: bytes, **headers: str) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def respond(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length)
            path = unquote(urlsplit(self.path).path)
            hub.requests.append(f"{self.command} {path}")
            parts = path.strip("/").split("/")
            if parts[:2] == ["api", "datasets"]:
                self.api("/".join(parts[2:4]), parts[4:], body)
            elif parts[0] == "datasets" and "resolve" in parts:
                self.resolve("/".join(parts[1:3]), parts[4], "/".join(parts[5:]))
            else:
                self.answer(404, b"{}")

        def api(self, repository: str, rest: list[str], body: bytes) -> None:
            found = hub.files(repository, rest[1] if len(rest) > 1 else "main")
            if found is None:
                kind = "RevisionNotFound" if repository in hub.repositories else "RepoNotFound"
                return self.answer(404, b'{"error": "not found"}', X_Error_Code=kind)
            commit, files = found
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in files.items()
            ]
            folders = {str(PurePosixPath(name).parent) for name in files} - {"."}
            entries += [{"type": "directory", "path": name, "oid": "0" * 40} for name in sorted(folders)]
            if rest[:1] == ["tree"]:
                whole, folder = "recursive=true" in self.path.lower(), "/".join(rest[2:])
                below = [each for each in entries if not folder or each["path"].startswith(f"{folder}/")]
                near = [each for each in below if str(PurePosixPath(each["path"]).parent) == (folder or ".")]
                return self.json(below if whole else near)
            if rest[:1] == ["paths-info"]:
                asked = json.loads(body) if body.startswith(b"{") else parse_qs(body.decode())
                paths = asked["paths"] if isinstance(asked["paths"], list) else [asked["paths"]]
                return self.json([each for each in entries if each["path"] in paths])
            return self.json(
                {
                    "id": repository,
                    "sha": commit,
                    "private": False,
                    "gated": False,
                    "disabled": False,
                    "downloads": 0,
                    "likes": 0,
                    "tags": [],
                    "siblings": [{"rfilename": name} for name in files],
                    "lastModified": "2026-01-01T00:00:00.000Z",
                }
            )

        def json(self, value: Any) -> None:
            self.answer(200, json.dumps(value).encode(), Content_Type="application/json")

        def resolve(self, repository: str, revision: str, name: str) -> None:
            found = hub.files(repository, revision)
            if found is None or name not in found[1]:
                kind = "RevisionNotFound" if found is None else "EntryNotFound"
                return self.answer(404, b"", X_Error_Code=kind)
            commit, data = found[0], found[1][name]
            self.answer(200, data, ETag=f'"{hashlib.sha1(data).hexdigest()}"', X_Repo_Commit=commit)

        do_GET = do_HEAD = do_POST = respond

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
