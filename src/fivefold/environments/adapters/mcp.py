"""Tools of an MCP server, as a program that is started or at an address; each trajectory has a session of its own.

The protocol is that of the version below: JSON-RPC, as lines of a program's standard input and output, or over HTTP as
"streamable HTTP" (https://modelcontextprotocol.io/specification/2025-06-18/basic/transports).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from itertools import count
from typing import Any
from urllib.parse import urlsplit

from .common import Refusal, Source, ToolError

_VERSION = "2025-06-18"
_CLIENT = {"protocolVersion": _VERSION, "capabilities": {}, "clientInfo": {"name": "fivefold", "version": "1"}}
_LONGEST = 64 << 20
"""Largest number of bytes of one message."""
_CLOSE_SECONDS = 2.0
"""Seconds for a server to end by itself."""
_NO_METHOD = -32601
_ODD = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""Exceptions of reading a message whose form is not the protocol's."""


async def load(tool: str, settings: dict[str, Any]) -> Server:
    """Return the source of a server's tools, `mcp:COMMAND` or `mcp+http://ADDRESS`; raises Refusal if it does not answer."""
    server, seconds = Server(tool, settings["seconds"]), settings["seconds"]
    try:
        server.schemas = await asyncio.wait_for(server.describe(), seconds)
    except (OSError, HTTPException, ToolError, *_ODD) as error:
        is_odd = isinstance(error, _ODD)
        # TimeoutError has no text of its own.
        reason = f"what it sends is not MCP ({error!r})" if is_odd else str(error) or f"no answer within {seconds:g} s"
        raise Refusal(
            f"environment.tools: the MCP server {tool} must answer: {reason}; start it by hand to see why, or correct the "
            "entry"
        ) from error
    return server


class Server(Source):
    """A source of tools that an MCP server describes."""

    is_stateless = False

    def __init__(self, tool: str, seconds: float) -> None:
        """Describe tools of the server `tool`; `seconds` limits the time for one answer."""
        self._tool, self._seconds = tool, seconds
        self._sessions: dict[int, asyncio.Task[_Session]] = {}
        self.schemas: list[dict[str, Any]] = []

    async def describe(self) -> list[dict[str, Any]]:
        """Return the schemas of the tools, in a session that ends with it."""
        session = await self._open()
        try:
            return [schema_of(tool) for tool in await session.tools()]
        finally:
            await session.close()

    async def call(self, environment: int, name: str, arguments: dict[str, Any]) -> str:
        """Return the text of a tool's answer; raises ToolError for an answer that is an error."""
        opening = self._sessions.get(environment)
        if opening is None or (opening.done() and (opening.cancelled() or opening.exception() is not None)):
            opening = self._sessions[environment] = asyncio.create_task(self._open())
        # Several calls of a turn wait for one session, which the end of one of them must not end.
        session = await asyncio.shield(opening)
        result = await session.request("tools/call", {"name": name, "arguments": arguments})
        text = text_of(result)
        if result.get("isError"):
            raise ToolError(text)
        return text

    async def leave(self, environment: int) -> None:
        """End the session of a trajectory."""
        if (opening := self._sessions.pop(environment, None)) is None:
            return
        if not opening.done():
            opening.cancel()
        with contextlib.suppress(asyncio.CancelledError, OSError, HTTPException, ToolError):
            await (await opening).close()

    async def _open(self) -> _Session:
        prefix, _, rest = self._tool.partition(":")
        session = _Program(rest) if prefix == "mcp" else _Address(f"{prefix.removeprefix('mcp+')}:{rest}", self._seconds)
        try:
            await session.begin()
        except BaseException:
            await session.close()
            raise
        return session


class _Session:
    """A session of the protocol; how its messages travel is the subclass's."""

    def __init__(self) -> None:
        self._numbers = count(1)

    async def begin(self) -> None:
        """Begin the session with the first exchange of messages."""
        await self._connect()
        self._take(await self.request("initialize", _CLIENT))
        await self._notify("notifications/initialized", {})

    async def tools(self) -> list[dict[str, Any]]:
        """Return the descriptions of all tools."""
        descriptions: list[dict[str, Any]] = []
        cursor: dict[str, Any] = {}
        while True:
            page = await self.request("tools/list", cursor)
            descriptions += page["tools"]
            if not page.get("nextCursor"):
                return descriptions
            cursor = {"cursor": page["nextCursor"]}

    async def request(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        """Return the result of a request; raises ToolError for an error."""
        number = next(self._numbers)
        answer = await self._exchange({"jsonrpc": "2.0", "id": number, "method": method, "params": parameters}, number)
        if "error" in answer:
            error = answer["error"]
            raise ToolError(str(error.get("message", error) if isinstance(error, dict) else error))
        result = answer.get("result")
        if not isinstance(result, dict):
            raise ToolError(f"the server's answer to {method} has no result")
        return result

    async def _notify(self, method: str, parameters: dict[str, Any]) -> None:
        await self._post({"jsonrpc": "2.0", "method": method, "params": parameters})

    def _take(self, about: dict[str, Any]) -> None:
        """Take what the server says of itself."""

    async def close(self) -> None:
        """End the session."""
        raise NotImplementedError

    async def _connect(self) -> None:
        raise NotImplementedError

    async def _exchange(self, message: dict[str, Any], number: int) -> dict[str, Any]:
        raise NotImplementedError

    async def _post(self, message: dict[str, Any]) -> None:
        raise NotImplementedError


class _Program(_Session):
    """A session with a program of its own, over its standard input and output."""

    def __init__(self, command: str) -> None:
        super().__init__()
        self._command = command
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._stderr_end = b""
        """The end of its standard error."""
        self._process: asyncio.subprocess.Process | None = None

    async def _connect(self) -> None:
        pipe = asyncio.subprocess.PIPE
        # The memory limit of the environments is not the server's: Node reserves more than it needs.
        words = ["-c", f"ulimit -S -v unlimited 2> /dev/null; exec {self._command}"]
        self._process = await asyncio.create_subprocess_exec(
            "/bin/sh", *words, stdin=pipe, stdout=pipe, stderr=pipe, limit=_LONGEST
        )
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._listen())]

    async def _read(self) -> None:
        """Read answers and give each to the request that waits for it, until the program ends."""
        assert self._process is not None and self._process.stdout is not None
        # A line that is too long ends the session.
        try:
            while line := await self._process.stdout.readline():
                # A program may write other lines than messages.
                with contextlib.suppress(*_ODD):
                    message = json.loads(line)
                    if (reply := reply_to(message)) is not None:
                        await self._post(reply)
                    elif (waiting := self._waiting.get(message.get("id"))) is not None and not waiting.done():
                        waiting.set_result(message)
        except (OSError, ValueError):
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        await self._process.wait()
        # What it said last may explain its end.
        await asyncio.wait(self._tasks[1:], timeout=_CLOSE_SECONDS)
        last_line = self._stderr_end.decode(errors="replace").strip().rpartition("\n")[2]
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ToolError(f"the server ended with exit code {self._process.returncode}: {last_line}"))

    async def _listen(self) -> None:
        assert self._process is not None and self._process.stderr is not None
        while more := await self._process.stderr.read(1 << 16):
            self._stderr_end = (self._stderr_end + more)[-2000:]

    async def _exchange(self, message: dict[str, Any], number: int) -> dict[str, Any]:
        if self._tasks[0].done():
            raise ToolError("the server has ended")
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            await self._post(message)
            answer: dict[str, Any] = await waiting
            return answer
        except asyncio.CancelledError:
            with contextlib.suppress(OSError):
                await self._notify("notifications/cancelled", {"requestId": number})
            raise
        finally:
            del self._waiting[number]

    async def _post(self, message: dict[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        with contextlib.suppress(ConnectionError):
            await self._process.stdin.drain()

    async def close(self) -> None:
        """Close its input, and kill it if it does not end by itself."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), _CLOSE_SECONDS)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        for task in self._tasks:
            task.cancel()


class _Address(_Session):
    """A session over HTTP: each message is a request, whose answer is JSON or a stream of events."""

    def __init__(self, url: str, seconds: float) -> None:
        super().__init__()
        parts = urlsplit(url)
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._connection = lambda: kind(parts.hostname or "", parts.port, timeout=seconds)
        self._path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._seconds = seconds
        self._headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}

    async def _connect(self) -> None:
        pass

    def _take(self, about: dict[str, Any]) -> None:
        self._headers["MCP-Protocol-Version"] = about["protocolVersion"]

    async def _exchange(self, message: dict[str, Any], number: int) -> dict[str, Any]:
        answer = await asyncio.to_thread(self._send, message, number)
        if answer is None:
            raise ToolError("the server's answer ended without a result")
        return answer

    async def _post(self, message: dict[str, Any]) -> None:
        await asyncio.to_thread(self._send, message, None)

    def _send(self, message: dict[str, Any], number: int | None) -> dict[str, Any] | None:
        """Post a message, and return the answer to the request of this number."""
        connection = self._connection()
        try:
            connection.request("POST", self._path, json.dumps(message), self._headers)
            response = connection.getresponse()
            if response.status >= 300:
                raise ToolError(f"HTTP status {response.status}: {response.read(300).decode(errors='replace')}")
            if session := response.headers.get("Mcp-Session-Id"):
                self._headers["Mcp-Session-Id"] = session
            if number is None:
                return None
            for answer in self._answers(response):
                if (reply := reply_to(answer)) is not None:
                    self._send(reply, None)
                elif answer.get("id") == number:
                    return answer
            return None
        finally:
            connection.close()

    def _answers(self, response: HTTPResponse) -> Iterator[dict[str, Any]]:
        if not response.headers.get("Content-Type", "").startswith("text/event-stream"):
            yield json.loads(response.read(_LONGEST))
            return
        end, data = time.monotonic() + self._seconds, ""
        while line := response.readline(_LONGEST).decode():
            if time.monotonic() > end:
                raise ToolError(f"the server's answer took longer than {self._seconds:g} s")
            name, _, value = line.rstrip("\r\n").partition(":")
            if name == "data":
                data += value.removeprefix(" ") + "\n"
            elif not name and not value and data:
                yield json.loads(data)
                data = ""

    async def close(self) -> None:
        """Tell the server that the session ends, if it has named one."""
        if "Mcp-Session-Id" not in self._headers:
            return

        def delete() -> None:
            connection = self._connection()
            with contextlib.suppress(OSError, HTTPException):
                connection.request("DELETE", self._path, headers=self._headers)
                connection.getresponse().read(1)
            connection.close()

        await asyncio.to_thread(delete)


def reply_to(message: dict[str, Any]) -> dict[str, Any] | None:
    """Return the answer to a server's own request, None for any other message."""
    if "method" not in message or "id" not in message:
        return None
    if message["method"] == "ping":
        return {"jsonrpc": "2.0", "id": message["id"], "result": {}}
    error = {"code": _NO_METHOD, "message": f"this client has no {message['method']}"}
    return {"jsonrpc": "2.0", "id": message["id"], "error": error}


def schema_of(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool's schema as chat templates take it."""
    parameters = {"type": "object", "properties": {}, **tool.get("inputSchema", {})}
    # A schema may be `true`, which allows everything.
    schemas = parameters["properties"].items()
    parameters["properties"] = {name: schema if isinstance(schema, dict) else {} for name, schema in schemas}
    about = str(tool.get("description") or tool.get("title") or "")
    if not isinstance(tool["name"], str):
        raise TypeError(f"the name of a tool is a text: got {str(tool['name'])[:80]}")
    return {"type": "function", "function": {"name": tool["name"], "description": about, "parameters": parameters}}


def text_of(result: dict[str, Any]) -> str:
    """Return a tool's result as text; what is no text is named by its kind."""
    texts = []
    for part in result.get("content", []):
        resource = part.get("resource", {})
        texts.append(part.get("text") or resource.get("text") or ("" if "text" in part else f"[{part.get('type')}]"))
    if not texts and "structuredContent" in result:
        return json.dumps(result["structuredContent"])
    return "\n".join(texts)
