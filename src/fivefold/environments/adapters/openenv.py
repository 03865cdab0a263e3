"""Environments on an OpenEnv server: `openenv:URL`, over a WebSocket of its protocol.

The client is written here (RFC 6455), so that no package is needed: a session is a few JSON messages.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import ssl
import struct
from collections.abc import Callable
from functools import partial
from http.client import HTTPConnection, HTTPSConnection
from typing import Any
from urllib.parse import SplitResult, urlsplit

from .common import Refusal, named, with_observation

_LONGEST = 64 << 20
_CLOSE_SECONDS = 2.0
_TEXT, _CLOSE, _PING, _PONG = 1, 8, 9, 10
_ABOUT = ("done", "reward", "metadata")
"""Fields of every observation, which the model does not read."""


def load(name: str, settings: dict[str, Any]) -> Callable[[], Any]:
    """Return what makes a session, once the server has described its actions."""
    url = urlsplit(name)
    try:
        action = _schema(url, settings["seconds"])["action"]
    except Exception as error:
        raise Refusal(
            f"environment.class: the OpenEnv server at {name} must answer at /schema: {type(error).__name__}: {error}; "
            "start it, or correct the address"
        ) from error
    properties = {key: about for key, about in action.get("properties", {}).items() if key != "metadata"}
    texts = [key for key, about in properties.items() if about.get("type") == "string"]
    return partial(
        Environment, url, settings["options"], texts[0] if len(properties) == len(texts) == 1 else None, properties
    )


def _schema(url: SplitResult, seconds: float) -> Any:
    kind = HTTPSConnection if url.scheme == "https" else HTTPConnection
    connection = kind(url.hostname or "", url.port, timeout=seconds)
    try:
        connection.request("GET", f"{url.path.rstrip('/')}/schema")
        return json.loads(connection.getresponse().read(_LONGEST))
    finally:
        connection.close()


class Environment:
    """A session. The model's message is the action's only field if that is a text, and else JSON with its fields."""

    def __init__(self, url: SplitResult, options: dict[str, Any], field: str | None, properties: dict[str, Any]) -> None:
        self._url, self._options, self._field, self._properties = url, options, field, properties
        self._socket: _WebSocket | None = None

    async def reset(self, task: dict[str, Any], seed: int) -> list[dict[str, Any]]:
        """Begin a session, and return the row's prompt with the first observation."""
        self._socket = await _WebSocket.open(self._url)
        result = await self._ask("reset", {**self._options, "seed": seed})
        return with_observation(task["prompt"], self._text(result))

    async def step(self, message: dict[str, Any]) -> dict[str, Any]:
        """Take the action that a message is; without one the environment stays as it is."""
        action = {self._field: message["content"]} if self._field is not None else None
        if action is None:
            with contextlib.suppress(ValueError):
                action = json.loads(message["content"])
            if not isinstance(action, dict):
                return {"messages": f"That is no action. An action is JSON with the fields {', '.join(self._properties)}."}
        result = await self._ask("step", action)
        text = self._text(result)
        done = bool(result.get("done"))
        return {"messages": text, "reward": float(result.get("reward") or 0.0), "done": done, "state": named(text)}

    async def close(self) -> None:
        """End the session."""
        if self._socket is not None:
            await self._socket.close()

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        assert self._socket is not None
        await self._socket.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(await self._socket.receive())
        if answer["type"] == "error":
            raise RuntimeError(f"the OpenEnv server reports: {answer['data']}")
        content: dict[str, Any] = answer["data"]
        return content

    @staticmethod
    def _text(result: dict[str, Any]) -> str:
        observation = {key: value for key, value in result.get("observation", {}).items() if key not in _ABOUT}
        if len(observation) == 1 and isinstance(text := next(iter(observation.values())), str):
            return text
        return json.dumps(observation)


class _WebSocket:
    """Text messages over a WebSocket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, url: SplitResult) -> _WebSocket:
        """Connect to the path `/ws` below an address."""
        is_safe = url.scheme in ("https", "wss")
        port = url.port or (443 if is_safe else 80)
        context = ssl.create_default_context() if is_safe else None
        reader, writer = await asyncio.open_connection(url.hostname, port, ssl=context, limit=_LONGEST)
        lines = (
            f"GET {url.path.rstrip('/')}/ws HTTP/1.1",
            f"Host: {url.hostname}:{port}",
            "Upgrade: websocket",
            "Connection: Upgrade",
            f"Sec-WebSocket-Key: {base64.b64encode(os.urandom(16)).decode()}",
            "Sec-WebSocket-Version: 13",
        )
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
        head = (await reader.readuntil(b"\r\n\r\n")).decode(errors="replace")
        if " 101 " not in head.partition("\r\n")[0]:
            writer.close()
            raise ConnectionError(f"no WebSocket at {url.geturl()}: {head.partition(chr(13))[0]}")
        return cls(reader, writer)

    async def send(self, text: str, kind: int = _TEXT) -> None:
        """Send a message, masked as a client must."""
        data = text.encode()
        size = len(data)
        if size < 126:
            head = struct.pack("!BB", 0x80 | kind, 0x80 | size)
        elif size < 1 << 16:
            head = struct.pack("!BBH", 0x80 | kind, 0x80 | 126, size)
        else:
            head = struct.pack("!BBQ", 0x80 | kind, 0x80 | 127, size)
        mask = os.urandom(4)
        pad = (mask * (size // 4 + 1))[:size]
        masked = (int.from_bytes(data, "big") ^ int.from_bytes(pad, "big")).to_bytes(size, "big")
        self._writer.write(head + mask + masked)
        await self._writer.drain()

    async def receive(self) -> str:
        """Return the next message, of one frame or several."""
        message = b""
        while True:
            first, second = await self._reader.readexactly(2)
            size = second & 0x7F
            if size >= 126:
                size = int.from_bytes(await self._reader.readexactly(2 if size == 126 else 8), "big")
            if size + len(message) > _LONGEST:
                raise ConnectionError(f"the server's message is longer than {_LONGEST} bytes")
            data, kind = await self._reader.readexactly(size), first & 0x0F
            if kind == _CLOSE:
                raise ConnectionError("the server has closed the session")
            if kind == _PING:
                await self.send(data.decode(errors="replace"), _PONG)
            elif kind != _PONG:
                message += data
                if first & 0x80:
                    return message.decode()

    async def close(self) -> None:
        """End the session, and close the connection once the server has."""
        with contextlib.suppress(OSError, EOFError):
            await self.send(json.dumps({"type": "close"}))
            # The server's own close frame ends this with an error.
            await asyncio.wait_for(self.receive(), _CLOSE_SECONDS)
        with contextlib.suppress(OSError):
            await self.send("", _CLOSE)
        self._writer.close()
