"""Patterns of a shell (`*`, `?`, `[a-z]`), matched in time that grows with text times pattern: nothing is tried twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

_Accepts = Callable[[str], bool]
_STAR = "*"


class Glob:
    """A pattern as an automaton: bit i of a state is set where the first i tokens fit what was read."""

    def __init__(self, pattern: str | Sequence[str | _Accepts]) -> None:
        self.tokens = list(_tokens(pattern)) if isinstance(pattern, str) else list(pattern)
        self._stars = sum(1 << place for place, token in enumerate(self.tokens) if token == _STAR)
        self._accepting: dict[str, int] = {}

    @cached_property
    def backwards(self) -> Glob:
        """The pattern that fits a reversed text."""
        return Glob(self.tokens[::-1])

    def cost(self, text: str, start: int = 0) -> int:
        """Steps of one pass over a text, which end with the pattern where it has no star."""
        length = len(text) - start
        return (length if self._stars else min(length, len(self.tokens))) * (1 + len(self.tokens) // 64)

    def fits(self, text: str) -> bool:
        """Whether the whole text fits."""
        return any(end == len(text) for end in self.ends(text))

    def ends(self, text: str, start: int = 0) -> Iterator[int]:
        """Every place where a match that begins at `start` may end, the nearest first."""
        last, state = 1 << len(self.tokens), self._closed(1)
        if state & last:
            yield start
        for place in range(start, len(text)):
            state = self._closed((state & self._mask(text[place])) << 1 | state & self._stars)
            if not state:
                return
            if state & last:
                yield place + 1

    def _closed(self, state: int) -> int:
        """A star may stand for nothing; two in a row are one."""
        return state | (state & self._stars) << 1

    def _mask(self, letter: str) -> int:
        if letter not in self._accepting:
            self._accepting[letter] = sum(
                1 << place
                for place, token in enumerate(self.tokens)
                if (token(letter) if callable(token) else token == letter) and not self._stars >> place & 1
            )
        return self._accepting[letter]


def _tokens(pattern: str) -> Iterator[str | _Accepts]:
    i, before = 0, ""
    while i < len(pattern):
        letter, end = pattern[i], pattern.find("]", i + 2 + pattern.startswith(("[!", "[^"), i))
        if letter == "*":
            if before != "*":
                yield _STAR
        elif letter == "?":
            yield lambda _: True
        elif letter == "[" and end > 0:
            yield _class(pattern[i + 1 : end])
            i = end
        elif letter == "\\" and i + 1 < len(pattern):
            i += 1
            yield _literal(pattern[i])
        else:
            yield _literal(letter)
        before, i = letter, i + 1


def _literal(letter: str) -> str | _Accepts:
    return letter if letter != _STAR else lambda other: other == _STAR


def _class(inside: str) -> _Accepts:
    """`a-z0` of `[a-z0]`; `!` or `^` before it is all others."""
    negated = inside.startswith(("!", "^"))
    inside = inside[negated:]
    singles, ranges, i = set(), [], 0
    while i < len(inside):
        if inside[i + 1 : i + 2] == "-" and i + 2 < len(inside):
            ranges.append((inside[i], inside[i + 2]))
            i += 3
        else:
            singles.add(inside[i])
            i += 1

    def accepts(letter: str) -> bool:
        return (letter in singles or any(low <= letter <= high for low, high in ranges)) != negated

    return accepts
