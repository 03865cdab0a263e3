"""`fivefold report --serve`: a report page that requests updates from this server. Page, data and raw files of its runs."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from fivefold.errors import UserError
from fivefold.observability.report import Have, news, page
from fivefold.observability.run_view import RunView

_OWN_NAMES = {"localhost", "127.0.0.1", "[::1]"}
_HAVE = re.compile(r"(\d{1,9}\.\d{1,9}\.\d{1,9})(,\d{1,9}\.\d{1,9}\.\d{1,9})*")
_RAW = re.compile(r"raw/(\d{1,4})/(metrics\.jsonl|samples\.jsonl|run\.yaml)")
"""Address of a run's raw file: the run's place, and the file's name."""
_CHUNK = 2**20
_POLICY = "default-src 'none'; frame-ancestors 'none'"


class ReportServer(ThreadingHTTPServer):
    """Serves a page of runs on an address of this machine."""

    daemon_threads = True

    def __init__(self, run_dirs: Sequence[Path], host: str, port: int) -> None:
        """Bind the server; port 0 takes a free one. Raise ValueError if a directory or the address is not available."""
        self.views = [RunView(run_dir) for run_dir in run_dirs]
        self.reading = threading.Lock()
        self.is_own = _is_own(host)
        self.token = secrets.token_urlsafe(24)
        """Random token in the page's address: only programs that received the address can read the runs."""
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise UserError(
                f"--host and --port must be an address that is free on this machine: {host}:{port}: {error}"
            ) from None

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]!s}:{self.server_address[1]}/{self.token}/"


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        """Return the page at /TOKEN/, updates at /TOKEN/data and files at /TOKEN/raw/RUN/NAME; nothing else is found."""
        if self.server.is_own and not self._asks_this_machine():
            # A foreign page can point its own host name to this machine's address (DNS rebinding), and would read the runs.
            self._send(HTTPStatus.FORBIDDEN, "text/plain", "this server answers to localhost and 127.0.0.1")
            return
        address = urlsplit(self.path)
        token, _, page_name = address.path.removeprefix("/").partition("/")
        if not secrets.compare_digest(token.encode(), self.server.token.encode()):
            self._send(HTTPStatus.NOT_FOUND, "text/plain", "the address is http://HOST:PORT/TOKEN/, as it was printed")
        elif page_name == "":
            self._answer("text/html", lambda: page(self.server.views, is_live=True))
        elif page_name == "data":
            text = parse_qs(address.query).get("have", [""])[0]
            have = [_have(part) for part in text.split(",")] if _HAVE.fullmatch(text) else []
            self._answer("application/json", lambda: json.dumps(news(self.server.views, have), ensure_ascii=False))
        elif (raw := _RAW.fullmatch(page_name)) and int(raw[1]) < len(self.server.views):
            self._download(self.server.views[int(raw[1])], raw[2])
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", "there is nothing here but the page, its data and raw files")

    def _asks_this_machine(self) -> bool:
        host = self.headers.get("Host", "")
        return (host if host.endswith("]") else re.sub(r":\d+$", "", host)) in _OWN_NAMES

    def _answer(self, kind: str, make: Callable[[], str]) -> None:
        with self.server.reading:
            for view in self.server.views:
                view.refresh()
            content = make()
        self._send(HTTPStatus.OK, kind, content)

    def _download(self, view: RunView, name: str) -> None:
        """Send a file of a run as it is now; it may grow meanwhile."""
        try:
            # A link could lead to any file that this process can read.
            file = os.fdopen(os.open(view.run_dir / name, os.O_RDONLY | os.O_NOFOLLOW), "rb")
        except OSError:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", f"the run has no {name}")
            return
        with file:
            size = os.fstat(file.fileno()).st_size
            saved_as = re.sub(r"[^\w.-]+", "_", f"{view.name}-{name}", flags=re.ASCII)
            self._head(HTTPStatus.OK, "text/plain", size, {"Content-Disposition": f'attachment; filename="{saved_as}"'})
            while size > 0 and (chunk := file.read(min(size, _CHUNK))):
                self.wfile.write(chunk)
                size -= len(chunk)

    def _send(self, status: HTTPStatus, kind: str, content: str) -> None:
        body = content.encode("utf-8", errors="replace")
        self._head(status, kind, len(body))
        self.wfile.write(body)

    def _head(self, status: HTTPStatus, kind: str, size: int, more: Mapping[str, str] = {}) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(size), "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", **more,
        }.items():  # fmt: skip
            self.send_header(name, value)
        if kind != "text/html":
            # The page has its own policy, which names its script.
            self.send_header("Content-Security-Policy", _POLICY)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """Suppress the request log."""


def _have(text: str) -> Have:
    generation, rows, samples = (int(part) for part in text.split("."))
    return generation, rows, samples


def _is_own(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def serve(run_dirs: Sequence[Path], host: str, port: int, say: Callable[[str], None]) -> None:
    """Serve runs until Ctrl-C."""
    with ReportServer(run_dirs, host, port) as server:
        if not server.is_own:
            say(f"note     {host} can be reached from other machines: who reaches it reads prompts, responses and settings")
        say(f"serving {', '.join(map(str, run_dirs))} at {server.url} until Ctrl-C")
        server.serve_forever()
