"""Prints text from other sources (errors of rewards, models, servers) without control characters or passwords."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""All control characters except tab and newline, those that change text direction or end a line in some programs, and halves
of characters, which no file or terminal takes."""
_LETTER = r"""(?!\w://)[^\s"'<>`]"""
_PASSWORD = re.compile(rf"(\w://)(?:(?:(?![/?#:@\[]){_LETTER})*:(?!\d+[/?#])(?:{_LETTER})*|(?:(?![/?#]){_LETTER})*)@")
"""User, password or token before the host of an address. After a colon that begins no port it ends at the last @, because
a password may contain / and @; an address without one may have a token instead. No part of a text is read for two
addresses."""


def plain(text: str) -> str:
    """Return the text with control characters as \\uXXXX, as in JSON, and URLs without passwords."""
    text = _PASSWORD.sub(r"\1...@", text.replace("\r\n", "\n").replace("\r", "\n"))
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


class _PlainStream:
    """A stream that writes plain text; all other methods are those of the wrapped stream."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        return self.stream.write(plain(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def plain_output() -> Iterator[None]:
    """Within this block, the process writes only plain text to standard output and standard error."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_PlainStream(raw(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def raw(stream: TextIO) -> TextIO:
    """Return the wrapped stream, for displays that draw with control characters."""
    return stream.stream if isinstance(stream, _PlainStream) else stream
