"""What this package prints: text of others (errors of rewards, models, servers) steers no terminal and shows no password."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""All but tab and newline; also what changes the direction of a line, or ends it for some programs."""
_PASSWORD = re.compile(r"(\w://)[^/\s@]*:[^/\s@]*@")


def plain(text: str) -> str:
    """The text with control characters as \\uXXXX, as JSON has them, and addresses without passwords."""
    text = _PASSWORD.sub(r"\1...@", text.replace("\r\n", "\n").replace("\r", "\n"))
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class _PlainStream:
    """A stream that writes plain text only; everything else is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        return self.stream.write(plain(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def plain_output() -> Iterator[None]:
    """Within this block, what this process writes to standard output and standard error is plain."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_PlainStream(raw(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def raw(stream: TextIO) -> TextIO:
    """The stream itself, for displays that draw with control characters of their own."""
    return stream.stream if isinstance(stream, _PlainStream) else stream
