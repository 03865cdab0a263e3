"""A strict HTTP/1.1 server on asyncio: requests in, JSON and event streams out, and whether an answer was read.

It serves programs that speak to a model, so it takes no more of HTTP than they send: no upgrades, no ranges, no compression.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import select
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

LARGEST_BODY = 64 << 20
_LARGEST_HEAD, _MOST_HEADERS, _LONGEST_CHUNK_LINE = 64 << 10, 128, 4096
_HEAD_SECONDS, _IDLE_SECONDS, _BODY_SECONDS, _LINGER_SECONDS = 60.0, 3600.0, 600.0, 2.0
"""Seconds for the head of a request, between two requests, for a body, and for an answer to arrive before the connection is
closed with bytes that were not read."""
_MOST_STRANGERS, _STRANGER_SECONDS = 256, 5.0
"""Connections without a request that was admitted, and for how long one is kept where there are more of them."""
_AHEAD = 1 << 20
"""Bytes that a client may send while its request is being answered."""
_LINE = re.compile(rb"([A-Z]{1,16}) (/[!-~]*) HTTP/(\d)\.(\d)")
_HEADER = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([\t -~\x80-\xff]*)")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,16})(?:[ \t]*;[\t -~\x80-\xff]*)?")
_SINGLE = ("content-length", "transfer-encoding", "host", "authorization")
"""Headers of which a second one would make a request ambiguous."""


class HttpError(Exception):
    """Raised to answer a request with an error, in the form of OpenAI's API."""

    def __init__(self, status: HTTPStatus, message: str, code: str | None = None, headers: Mapping[str, str] | None = None):
        super().__init__(message)
        self.status, self.code, self.headers = status, code, dict(headers or {})

    @property
    def payload(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


class _GoneError(Exception):
    """Raised if the client has closed the connection."""


@dataclass(frozen=True)
class Head:
    """A request without its body."""

    method: str
    path: str
    headers: dict[str, str]
    """Lower-case name -> value."""
    is_old: bool = False
    """Whether the client speaks HTTP/1.0, which has neither chunks nor connections that stay open."""


@dataclass
class Answer:
    """The answer to one request, as far as it is written."""

    _connection: _Connection
    _head: Head
    is_begun: bool = False
    is_whole: bool = False
    on_reset: Callable[[], None] | None = field(default=None, repr=False)
    """Is called if the client drops the connection with bytes of this answer unread."""

    @property
    def lost(self) -> asyncio.Future[None]:
        """Future that is done once the client has closed the connection."""
        return self._connection.lost

    async def send(self, payload: Any, status: HTTPStatus = HTTPStatus.OK, headers: Mapping[str, str] | None = None) -> bool:
        """Send a whole answer as JSON; return whether all of it was handed to the client's connection."""
        body = json.dumps(payload, ensure_ascii=False).encode(errors="surrogatepass")
        self._begin(status, {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}, body)
        return await self._end()

    def begin_events(self) -> None:
        """Begin a stream of server-sent events."""
        framing = {} if self._head.is_old else {"transfer-encoding": "chunked"}
        self._begin(HTTPStatus.OK, {"content-type": "text/event-stream", "cache-control": "no-cache", **framing})

    def event(self, data: Any) -> None:
        """Send an event; a text is sent as it is."""
        self._connection.write(self._framed(_event(data)))

    def comment(self) -> None:
        """Send a comment, which clients skip: their time limit for a silent connection begins again."""
        self._connection.write(self._framed(b": waiting\n\n"))

    async def end_events(self, *last: Any) -> bool:
        """Send the last events and end the stream; return whether all of it was handed to the client's connection.

        A client that stops at the last event has then received the end of the stream with it.
        """
        events = self._framed(b"".join(map(_event, last))) if last else b""
        self._connection.write(events + (b"" if self._head.is_old else b"0\r\n\r\n"))
        return await self._end()

    def _begin(self, status: HTTPStatus, headers: Mapping[str, str], body: bytes = b"") -> None:
        assert not self.is_begun
        self.is_begun = True
        lines = [f"HTTP/1.1 {status.value} {status.phrase}", *(f"{name}: {value}" for name, value in headers.items())]
        self._connection.write("\r\n".join((*lines, "\r\n")).encode("latin-1") + body)

    def _framed(self, data: bytes) -> bytes:
        return data if self._head.is_old else b"%x\r\n%s\r\n" % (len(data), data)

    async def _end(self) -> bool:
        self.is_whole = await self._connection.is_drained()
        return self.is_whole


def _event(data: Any) -> bytes:
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return f"data: {text}\n\n".encode(errors="surrogatepass")


Admit = Callable[[Head], None]
"""Raises HttpError for a request that is refused before its body is read."""
Handle = Callable[[Head, bytes, Answer], Awaitable[None]]
"""Answers a request."""


class HttpServer:
    """Listens on an address; its coroutines run in the loop in which it is opened."""

    def __init__(self, admit: Admit, handle: Handle) -> None:
        self._admit, self._handle = admit, handle
        self._connections: set[_Connection] = set()
        self._strangers: dict[_Connection, float] = {}
        """Connections without a request that was admitted -> when they came, the oldest first."""

    async def open(self, host: str, port: int) -> int:
        """Listen, and return the port; 0 takes a free one."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._connect, host, port, backlog=4096)
        return int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        """Close the port and all connections."""
        self._server.close()
        for connection in list(self._connections):
            connection.abort()

    def _connect(self) -> _Connection:
        now = time.monotonic()
        while len(self._strangers) >= _MOST_STRANGERS:
            oldest, since = next(iter(self._strangers.items()))
            if now - since < _STRANGER_SECONDS:
                break
            # Clients without a key must not use up the files that this process can open.
            del self._strangers[oldest]
            oldest.abort()
        connection = _Connection(self._admit_known, self._handle, self._forget)
        self._connections.add(connection)
        self._strangers[connection] = now
        return connection

    def _admit_known(self, connection: _Connection, head: Head) -> None:
        self._admit(head)
        self._strangers.pop(connection, None)

    def _forget(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        self._strangers.pop(connection, None)


class _Connection(asyncio.Protocol):
    """Connection of one client, whose requests are answered one after another."""

    def __init__(
        self, admit: Callable[[_Connection, Head], None], handle: Handle, forget: Callable[[_Connection], None]
    ) -> None:
        """`forget` is called once the connection is gone."""
        self._admit, self._handle, self._forget = admit, handle, forget
        self._buffer = bytearray()
        self._arrived, self._drained = asyncio.Event(), asyncio.Event()
        self._drained.set()
        self._discards = False
        self._is_admitted = False
        self._is_broken = False
        """Whether some of what was written cannot arrive."""
        self._last: Answer | None = None
        self.lost = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        # Nothing counts as sent while it is in this process.
        transport.set_write_buffer_limits(high=0)
        self._task = asyncio.get_running_loop().create_task(self._serve())

    def data_received(self, data: bytes) -> None:
        if self._discards:
            return
        self._buffer += data
        if len(self._buffer) > _AHEAD and self._arrived.is_set():
            self._transport.pause_reading()
        self._arrived.set()

    def eof_received(self) -> None:
        self._leave()

    def pause_writing(self) -> None:
        self._drained.clear()

    def resume_writing(self) -> None:
        self._drained.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._forget(self)
        self._is_broken = self._is_broken or error is not None
        self._leave()
        if error is not None and self._last is not None and self._last.on_reset is not None:
            self._last.on_reset()

    def _leave(self) -> None:
        if not self.lost.done():
            self.lost.set_result(None)
        self._arrived.set()
        self._drained.set()

    def write(self, data: bytes) -> None:
        if self._transport.is_closing() or self._is_half_closed():
            self._is_broken = True
            return
        self._transport.write(data)
        self._is_broken = self._is_broken or self._transport.is_closing()

    async def is_drained(self) -> bool:
        """Return whether the client's connection has taken everything that was written, once it has or is closed."""
        while not self.lost.done() and self._transport.get_write_buffer_size():
            await self._drained.wait()
        return not (self._is_broken or self._transport.get_write_buffer_size())

    def abort(self) -> None:
        self._transport.abort()
        self._task.cancel()

    def _is_half_closed(self) -> bool:
        """Return whether the client has closed its side, which the loop may not have seen yet."""
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
        return bool(poll.poll(0))

    async def _serve(self) -> None:
        with contextlib.suppress(_GoneError, TimeoutError):
            while await self._serve_one():
                pass
        self._transport.close()

    async def _serve_one(self) -> bool:
        """Answer the next request, and return whether another one may follow on the connection."""
        head, is_read = Head("", "", {}), False
        answer = Answer(self, head)
        try:
            head = await self._head()
            # A further request shows that the answer before it was read.
            answer = self._last = Answer(self, head)
            refused: HttpError | None = None
            try:
                self._admit(self, head)
                self._is_admitted = True
            except HttpError as error:
                refused = error
            async with asyncio.timeout(_BODY_SECONDS):
                body = await self._body(head, refused is None)
            is_read = True
            if refused is not None:
                raise refused
            await self._handle(head, body, answer)
        except HttpError as error:
            if answer.is_begun:
                return False
            await answer.send(error.payload, error.status, {**error.headers, **({} if is_read else {"connection": "close"})})
            if not is_read:
                await self._linger()
        return is_read and answer.is_whole and not head.is_old and head.headers.get("connection", "").lower() != "close"

    async def _head(self) -> Head:
        async with asyncio.timeout(_IDLE_SECONDS if self._is_admitted else _HEAD_SECONDS):
            await self._more(0)
        async with asyncio.timeout(_HEAD_SECONDS):
            raw = await self._until(b"\r\n\r\n", _LARGEST_HEAD)
        first, *lines = raw.split(b"\r\n")
        if (match := _LINE.fullmatch(first)) is None:
            raise HttpError(HTTPStatus.BAD_REQUEST, "the request line must be METHOD /path HTTP/1.1")
        if match[3] != b"1":
            raise HttpError(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "this server speaks HTTP/1.1")
        if len(lines) > _MOST_HEADERS:
            raise HttpError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"a request has at most {_MOST_HEADERS} headers")
        headers: dict[str, str] = {}
        for line in lines:
            if (pair := _HEADER.fullmatch(line)) is None:
                raise HttpError(HTTPStatus.BAD_REQUEST, "a header must be NAME: value on one line")
            name, value = pair[1].decode().lower(), pair[2].decode("latin-1").strip()
            if name in headers and name in _SINGLE:
                raise HttpError(HTTPStatus.BAD_REQUEST, f"a request has one header {name}: got two")
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
        is_old = match[4] == b"0"
        if not is_old and "host" not in headers:
            raise HttpError(HTTPStatus.BAD_REQUEST, "a request of HTTP/1.1 has the header host")
        return Head(match[1].decode(), match[2].decode(), headers, is_old)

    async def _body(self, head: Head, is_kept: bool) -> bytes:
        """Read the body of a request; without `is_kept` it is dropped as it arrives."""
        length, encoding = head.headers.get("content-length"), head.headers.get("transfer-encoding")
        if encoding is not None:
            if length is not None or encoding.lower() != "chunked" or head.is_old:
                raise HttpError(HTTPStatus.BAD_REQUEST, "a body has either a content-length or chunks, in HTTP/1.1")
        elif length is not None and re.fullmatch(r"[0-9]{1,18}", length) is None:
            raise HttpError(HTTPStatus.BAD_REQUEST, "content-length must be a number of bytes")
        if length is not None and int(length) > LARGEST_BODY:
            raise _too_large()
        if head.headers.get("expect", "").lower() == "100-continue" and not head.is_old:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if encoding is None:
            return await self._exactly(int(length or 0), is_kept)
        body = bytearray()
        total = 0
        while True:
            line = _CHUNK.fullmatch(await self._until(b"\r\n", _LONGEST_CHUNK_LINE))
            if line is None:
                raise HttpError(HTTPStatus.BAD_REQUEST, "a chunk begins with its size in hexadecimal")
            if not (size := int(line[1], 16)):
                break
            if (total := total + size) > LARGEST_BODY:
                raise _too_large()
            body += await self._exactly(size, is_kept)
            if await self._exactly(2) != b"\r\n":
                raise HttpError(HTTPStatus.BAD_REQUEST, "a chunk ends with a line break after its bytes")
        for _ in range(_MOST_HEADERS):
            if not await self._until(b"\r\n", _LONGEST_CHUNK_LINE):
                return bytes(body)
        raise HttpError(HTTPStatus.BAD_REQUEST, f"a body has at most {_MOST_HEADERS} trailers")

    async def _linger(self) -> None:
        """Drop what the client still sends: closing with unread bytes would take the answer from it."""
        self._discards = True
        self._buffer.clear()
        self._transport.resume_reading()
        await asyncio.wait({self.lost}, timeout=_LINGER_SECONDS)

    async def _until(self, mark: bytes, most: int) -> bytes:
        """Read up to a mark, and return what is before it."""
        begin = 0
        while (end := self._buffer.find(mark, begin)) < 0:
            if len(self._buffer) > most:
                raise HttpError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"a head has at most {most} bytes")
            begin = max(0, len(self._buffer) - len(mark) + 1)
            await self._more(len(self._buffer))
        content = bytes(self._buffer[:end])
        del self._buffer[: end + len(mark)]
        return content

    async def _exactly(self, length: int, is_kept: bool = True) -> bytes:
        dropped = 0
        while len(self._buffer) < length - dropped:
            if not is_kept:
                dropped += len(self._buffer)
                self._buffer.clear()
            await self._more(len(self._buffer))
        content = bytes(memoryview(self._buffer)[: length - dropped]) if is_kept else b""
        del self._buffer[: length - dropped]
        return content

    async def _more(self, than: int) -> None:
        """Wait until the buffer has more bytes than this."""
        while len(self._buffer) <= than:
            if self.lost.done():
                raise _GoneError
            self._arrived.clear()
            self._transport.resume_reading()
            await self._arrived.wait()


def _too_large() -> HttpError:
    return HttpError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body has at most {LARGEST_BODY >> 20} MiB")
