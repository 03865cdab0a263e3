"""A stand-in for the hub's API on this machine: what huggingface_hub's client needs to create a repository and upload."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hub:
    """Repositories by name, each with its files; `refuses` is the status of every request to create one."""

    def __init__(self, refuses: int | None = None) -> None:
        self.refuses = refuses
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.created: list[dict[str, Any]] = []
        self.tokens: set[str] = set()
        self.objects: dict[str, bytes] = {}


@contextmanager
def hub_api(refuses: int | None = None) -> Iterator[tuple[str, Hub]]:
    """(address, what it holds) while the server runs."""
    hub = Hub(refuses)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: Any) -> None: ...

        def _answer(self, body: Any, status: int = 200) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") == "chunked":
                pieces = []
                while size := int(self.rfile.readline(), 16):
                    pieces.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(pieces)
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        def do_PUT(self) -> None:
            hub.objects[self.path.rpartition("/")[2]] = self._body()
            self._answer({})

        def do_GET(self) -> None:
            self._answer({"error": "not found"}, 404)

        def do_POST(self) -> None:
            body = self._body()
            address = f"http://{self.headers['Host']}"
            hub.tokens.add(self.headers.get("Authorization", ""))
            path = self.path.partition("?")[0]
            if path == "/api/repos/create":
                asked = json.loads(body)
                if hub.refuses:
                    return self._answer(
                        {"error": "You don't have the rights to create a model under this namespace"}, hub.refuses
                    )
                name = f"{asked['organization']}/{asked['name']}"
                hub.created.append(asked)
                hub.repositories.setdefault(name, {})
                return self._answer({"url": f"{address}/{name}", "name": name})
            if path == "/api/validate-yaml":
                return self._answer({"errors": [], "warnings": []})
            if path.endswith("/preupload/main"):
                files = json.loads(body)["files"]
                modes = [
                    {"path": file["path"], "shouldIgnore": False,
                     "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular"}
                    for file in files
                ]  # fmt: skip
                return self._answer({"files": modes})
            if path.endswith("/info/lfs/objects/batch"):
                objects = [
                    {"oid": one["oid"], "size": one["size"], "actions": {"upload": {"href": f"{address}/lfs/{one['oid']}"}}}
                    for one in json.loads(body)["objects"]
                ]
                return self._answer({"transfer": "basic", "objects": objects})
            assert path.endswith("/commit/main"), path
            name = path.removeprefix("/api/models/").removesuffix("/commit/main")
            files = hub.repositories[name]
            for line in body.splitlines():
                row = json.loads(line)
                value = row["value"]
                if row["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif row["key"] == "lfsFile":
                    files[value["path"]] = hub.objects[value["oid"]]
            return self._answer({"success": True, "commitOid": "0" * 40, "commitUrl": f"{address}/{name}/commit/{'0' * 40}"})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", hub
    finally:
        server.shutdown()
        server.server_close()
