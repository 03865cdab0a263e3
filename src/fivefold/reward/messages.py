"""JSON objects over a socket, one per line, with time limits.

Both ends of a reward process use this module, which imports only the standard library.
"""

from __future__ import annotations

import json
import math
import socket
import time
from typing import Any

LONGEST = 64 << 20
"""Largest number of bytes of one message: more than any response or test, less than what would fill a machine."""


class Messages:
    """One end of a socket pair. Time limits are set on the socket object; its file number has none."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._received = bytearray()

    def send(self, message: dict[str, Any], seconds: float = math.inf) -> None:
        """Send a message; raise TimeoutError if the other end does not take it, OSError if it is gone."""
        self._socket.settimeout(None if seconds == math.inf else seconds)
        self._socket.sendall(json.dumps(message, default=str).encode() + b"\n")

    def receive(self, seconds: float = math.inf) -> dict[str, Any] | None:
        """Return the next message, or None if the other end is gone.

        Raises TimeoutError, and ValueError for an invalid message.
        """
        deadline, searched = time.monotonic() + seconds, 0
        while (end := self._received.find(b"\n", searched)) < 0:
            searched = len(self._received)
            if len(self._received) > LONGEST:
                raise ValueError(f"a message has at most {LONGEST} bytes")
            # A limit of 0 would mean no waiting at all.
            self._socket.settimeout(None if seconds == math.inf else max(deadline - time.monotonic(), 1e-3))
            try:
                piece = self._socket.recv(1 << 16)
            except ConnectionError:
                piece = b""
            if not piece:
                return None
            self._received += piece
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError(f"a message is a JSON object: got {line[:100]!r}")
        return message

    def close(self) -> None:
        self._socket.close()
