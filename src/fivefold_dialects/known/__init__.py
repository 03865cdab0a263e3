"""List the keys that other systems have, so that a row with a wildcard does not accept a misspelt key.

Each system has a file, which benchmarks/dialect_keys.py writes from the system's own defaults; `verl-2025-04` has the keys
of verl d6821a051 (2025-04-16) and of its recipe DAPO. A line is a section and its keys, `a.b: c d`; `*` matches any name,
and `**` everything below a section where the system takes any mapping.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files


@dataclass(frozen=True)
class KnownKeys:
    """The keys of one or several systems."""

    names: frozenset[str]
    open: frozenset[str]
    """Sections below which every key is known."""

    def __contains__(self, key: str) -> bool:
        return any(form in self.names or not self.open.isdisjoint(sections(form)) for form in _forms(key))

    def with_below(self, start: str, other: KnownKeys) -> KnownKeys:
        """Return these keys together with those of another system below `start`."""
        names, opened = ({f"{start}.{key}" for key in keys} for keys in (other.names, other.open))
        return KnownKeys(self.names | names, self.open | opened)

    @cached_property
    def sections(self) -> KnownKeys:
        """Return the sections of these keys, and of sections themselves."""
        return KnownKeys(frozenset(itertools.chain.from_iterable(map(sections, self.names))) | self.open, self.open)


def sections(key: str) -> Iterator[str]:
    """Yield the sections of a key: `a` and `a.b` for `a.b.c`."""
    parts = key.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts)))


def _forms(key: str) -> Iterator[str]:
    """Yield the key, and the key with each one of its parts replaced by `*`, which matches any name."""
    yield key
    parts = key.split(".")
    for place in range(len(parts)):
        yield ".".join([*parts[:place], "*", *parts[place + 1 :]])


NONE = KnownKeys(frozenset(), frozenset())


@cache
def known(*systems: str) -> KnownKeys:
    """Return the keys that these systems have."""
    keys: set[str] = set()
    for system in systems:
        for line in files(__name__).joinpath(f"{system}.txt").read_text().splitlines():
            section, _, names = line.partition(":")
            keys.update(f"{section}.{name}".lstrip(".") for name in names.split())
    opened = frozenset(key.removesuffix(".**") for key in keys if key.endswith(".**"))
    return KnownKeys(frozenset(key for key in keys if not key.endswith(".**")), opened)
