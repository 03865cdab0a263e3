"""Why a rank ended, as it says itself: over a pipe to the process that started it, since its disk may be full."""

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
"""Characters, from the end: a pipe takes their bytes before anybody reads."""


@dataclass(frozen=True)
class Words:
    """What a rank said."""

    kind: str
    """`error`, or `lost` where another rank has the reason."""
    when: int
    """Nanoseconds since 1970."""
    text: str


def leave(text: str, kind: str) -> bool:
    """Say it; whether there is somebody who reads."""
    file = os.environ.get(VARIABLE)
    if file is None:
        return False
    said = json.dumps([kind, time.time_ns(), plain(text)[-_LONGEST:]], ensure_ascii=False).encode(errors="replace")
    with contextlib.suppress(OSError):
        os.write(int(file), said + b"\n")
    return True


class LastWords:
    """The other end: of one rank."""

    def __init__(self, record: Path) -> None:
        """`record` is the file, but for its suffix, in which they stay where the disk takes them."""
        self._end, self.file = os.pipe()
        os.set_blocking(self._end, False)
        self._record, self._said = record, b""
        self._words: list[Words] = []

    def read(self) -> list[Words]:
        """What the rank has said so far."""
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(self._end, 1 << 16):
                self._said += piece
        *lines, self._said = self._said.split(b"\n")
        for line in lines:
            words = Words(*json.loads(line))
            self._words.append(words)
            with contextlib.suppress(OSError):
                self._record.with_suffix(f".{words.kind}").write_text(words.text, encoding="utf-8")
        return self._words

    def close(self) -> None:
        os.close(self._end)
