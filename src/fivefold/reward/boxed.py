"""Boxed answers of responses."""

from __future__ import annotations

import re

_BRACES = re.compile(r"\\boxed\{|[{}]")


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{...} whose braces close, or None."""
    opened: list[tuple[int, bool]] = []
    last: tuple[int, int] | None = None
    for brace in _BRACES.finditer(text):
        if brace[0] != "}":
            opened.append((brace.end(), brace[0] != "{"))
        elif opened:
            start, is_box = opened.pop()
            if is_box and (last is None or start > last[0]):
                last = (start, brace.start())
    return None if last is None else text[slice(*last)]
