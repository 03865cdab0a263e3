"""Match, cut and replace text by patterns of a shell (`*`, `?`, `[a-z]`)."""

from __future__ import annotations

import fnmatch
import re
from functools import lru_cache

from fivefold_dialects.bounds import Work


def fits(value: str, pattern: str, work: Work) -> bool:
    """Return whether the whole value matches the pattern."""
    work.spend(len(value))
    return _compiled(pattern).fullmatch(value) is not None


def trimmed(value: str, sign: str, pattern: str, work: Work) -> str:
    """Return `${name#pattern}`: `#` cuts off at the beginning, `%` at the end; a doubled sign cuts off the longest match."""
    lengths = range(_longest(value, pattern) + 1)
    work.spend(len(value) * len(lengths) // 100)
    for length in reversed(lengths) if len(sign) == 2 else lengths:
        place = length if sign[0] == "#" else len(value) - length
        kept, cut = (value[place:], value[:place]) if sign[0] == "#" else (value[:place], value[place:])
        if _compiled(pattern).fullmatch(cut):
            return kept
    return value


def replaced(value: str, pattern: str, other: str, every: bool, work: Work) -> str:
    """Return `${name/pattern/other}`, or with `every` `${name//pattern/other}`; matches are as long as possible."""
    regex, longest, kept, i = _compiled(pattern), _longest(value, pattern), "", 0
    work.spend(len(value) * longest * (1 + len(value) // 1000))
    while i < len(value):
        ends = range(min(i + longest, len(value)), i, -1)
        end = next((end for end in ends if regex.fullmatch(value, i, end)), i)
        if end > i and not every:
            return work.value(kept + other + value[end:], pattern)
        kept, i = (work.value(kept + other, pattern), end) if end > i else (kept + value[i], i + 1)
    return kept


def _longest(value: str, pattern: str) -> int:
    """Return how many letters of a value a match can have at most."""
    return len(value) if "*" in pattern else min(len(value), len(pattern))


@lru_cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """Return the regular expression of a pattern; it tries each star once, so matching is never slow."""
    plain = re.sub(r"\\(.)", lambda escaped: f"[{escaped[1]}]" if escaped[1] in "*?[" else escaped[1], pattern)
    return re.compile(fnmatch.translate(plain.replace("[^", "[!")))
