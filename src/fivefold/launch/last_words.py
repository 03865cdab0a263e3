"""Passes the reason why a rank ended to the process that started it, over a pipe, since the rank's disk may be full."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from fivefold.terminal import plain

VARIABLE = "FIVEFOLD_LAST_WORDS"
_LONGEST = 12_000
"""Most characters kept, counted from the end: the pipe must hold their bytes before any process reads them."""


@dataclass(frozen=True)
class Words:
    """A message that a rank left when it ended."""

    kind: str
    """`error`, or `lost` if another rank has the reason."""
    when: int
    """Time in nanoseconds since 1970."""
    text: str


def leave(text: str, kind: str) -> bool:
    """Write the message to the launcher's pipe; returns False if there is no launcher."""
    file = os.environ.get(VARIABLE)
    if file is None:
        return False
    line = json.dumps([kind, time.time_ns(), plain(text)[-_LONGEST:]], ensure_ascii=False).encode(errors="replace")
    with contextlib.suppress(OSError):
        os.write(int(file), line + b"\n")
    return True


class LastWords:
    """The launcher's end of the pipe, for one rank."""

    def __init__(self, record: Path) -> None:
        """`record`: the file, without its suffix, in which the messages are kept if the disk has room."""
        self._end, self.file = os.pipe()
        os.set_blocking(self._end, False)
        self._record, self._incomplete_line = record, b""
        self._words: list[Words] = []

    def read(self) -> list[Words]:
        """Returns all messages of the rank so far."""
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(self._end, 1 << 16):
                self._incomplete_line += piece
        *lines, self._incomplete_line = self._incomplete_line.split(b"\n")
        for line in lines:
            words = Words(*json.loads(line))
            self._words.append(words)
            with contextlib.suppress(OSError):
                self._record.with_suffix(f".{words.kind}").write_text(words.text, encoding="utf-8")
        return self._words

    def close(self) -> None:
        os.close(self._end)
