"""Addresses of servers: hosts, and sockets on this machine. No torch: `fivefold check` uses it too."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx

CONNECT_SECONDS, LONGEST_CALL = 10.0, 600.0
_IDLE_SECONDS = 1.0
"""Seconds after which an idle connection is not used again. Servers close theirs after 5 s, and a request on a connection
that is just being closed would look like a server that has ended."""
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_IDLE_SECONDS)


class _ResponseStream(httpx.AsyncByteStream):
    """A response's bytes, and what happens once they are read or given up."""

    def __init__(self, parts: httpx.AsyncByteStream, at_end: Callable[[], None]) -> None:
        self._parts, self._at_end = parts, at_end
        self._is_open = True

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._parts:
            yield part

    async def aclose(self) -> None:
        if self._is_open:
            self._is_open = False
            try:
                await self._parts.aclose()
            finally:
                self._at_end()


class _Connections(httpx.AsyncBaseTransport):
    """Any number of connections, each with a pool of its own.

    One pool of httpx looks at all its connections when a request begins and when it ends, and asks the kernel about each
    idle one: with a thousand requests at once this takes longer than their answers.
    """

    def __init__(self, uds: str | None) -> None:
        self._uds, self._tls = uds, httpx.create_ssl_context()
        self._idle: list[httpx.AsyncHTTPTransport] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        one = self._idle.pop() if self._idle else httpx.AsyncHTTPTransport(uds=self._uds, limits=_LIMITS, verify=self._tls)
        try:
            response = await one.handle_async_request(request)
        except BaseException:
            # A connection that failed has closed, and its pool opens the next one.
            self._idle.append(one)
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _ResponseStream(response.stream, lambda: self._idle.append(one))
        return response

    async def aclose(self) -> None:
        while self._idle:
            await self._idle.pop().aclose()


def base_of(address: str) -> tuple[str, str | None]:
    """Returns the base URL for requests, and the path of the socket for an address on this machine (unix:/path)."""
    if address.startswith("unix:"):
        return "http://server", address.removeprefix("unix:")
    return address, None


def ask(address: str, method: str, path: str, content: Any = None) -> httpx.Response:
    """Sends one short request."""
    base, uds = base_of(address)
    with httpx.Client(base_url=base, transport=httpx.HTTPTransport(uds=uds), timeout=CONNECT_SECONDS) as client:
        return client.request(method, path, json=content)


def answers(address: str, path: str) -> bool:
    """Returns whether a server is there and reports that it is healthy."""
    try:
        return ask(address, "GET", path).status_code == 200
    except httpx.TransportError:
        return False


def blocking_client(address: str, longest: float = LONGEST_CALL) -> httpx.Client:
    """Returns a client for calls that block; one without an answer for `longest` seconds is a transport error."""
    base, uds = base_of(address)
    timeout = httpx.Timeout(longest, connect=CONNECT_SECONDS)
    return httpx.Client(base_url=base, transport=httpx.HTTPTransport(uds=uds, limits=_LIMITS), timeout=timeout)


def streaming_client(address: str) -> httpx.AsyncClient:
    """Returns a client for responses. Their duration is unknown: the caller checks whether the server is still there."""
    base, uds = base_of(address)
    timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
    return httpx.AsyncClient(base_url=base, transport=_Connections(uds), timeout=timeout)


def own_address(other: str) -> str:
    """Returns this machine's address, as a server at `other` reaches it."""
    if other.startswith("unix:"):
        return "127.0.0.1"
    url = urlsplit(other)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((url.hostname, url.port or 80))
        return str(probe.getsockname()[0])
