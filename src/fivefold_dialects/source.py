"""Read another system's settings as its program would: defaults, interpolations, types of words on a command line."""

from __future__ import annotations

import copy
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from fivefold.config.dialect import Outcome, Tree
from fivefold.config.loader import ConfigError, parse_value
from fivefold.config.packages import TRACKERS
from fivefold.errors import UserError, shown
from fivefold_dialects.bounds import Work

_VARIABLE = re.compile(r"\$\{([^${}]*)\}|\$([A-Za-z_][A-Za-z0-9_]*|[0-9@*#])")
_NONE = ("null", "none", "~", "")
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_WITHOUT_ACCOUNT = ("console", "tensorboard")
"""Loggers that write to this machine and need no account."""
EVERY_CHECKPOINT = 1_000_000
"""Value of trainer.keep for a system that keeps every checkpoint."""

NULL: Any = object()
"""Value of a translation for an explicit null of ours, where None keeps our default."""


class UnreadableError(UserError):
    """Value of a setting that cannot be used."""


@dataclass(frozen=True)
class Source:
    """Settings by full key; every read is recorded, which shows the keys that a value of ours comes from."""

    settings: Mapping[str, Any]
    """Full key -> value, for the keys that the configuration sets."""
    defaults: Mapping[str, Any]
    environment: Mapping[str, str]
    """Variables for `${NAME}` and `$NAME` -> their values."""
    prefix: str = ""
    read: set[str] = field(default_factory=set)
    """Full keys that were read."""
    outcomes: list[Outcome] = field(default_factory=list)
    """Outcomes of keys that functions have reported."""
    work: Work = field(default_factory=Work)
    notes: list[str] = field(default_factory=list)
    """Sentences about the run that functions have added."""

    def under(self, prefix: str) -> Source:
        """Return the same settings seen from a section: `prefix` is put before every key."""
        return replace(self, prefix=self.prefix + prefix)

    def recording(self) -> Source:
        """Return the same settings with a new record of the keys that are read."""
        return replace(self, read=set())

    def others(self, key: str) -> Iterator[Source]:
        """Yield the same settings without a full key, and with another value of it; each has new records."""
        others = [{name: value for name, value in self.settings.items() if name != key}]
        if (other := _other(self.settings[key])) != self.settings[key]:
            others.append({**self.settings, key: other})
        yield from (replace(self, settings=settings, read=set(), outcomes=[], notes=[]) for settings in others)

    def has(self, key: str) -> bool:
        """Return whether the configuration sets the key."""
        self.read.add(self.prefix + key)
        return self.prefix + key in self.settings

    def first(self, *keys: str) -> str:
        """Return the first of these keys that the configuration sets to a value, or else the first that has a default."""
        if len(keys) == 1:
            return keys[0]
        named = next((key for key in keys if self.has(key) and self.text(key) is not None), None)
        return named or next((key for key in keys if self.text(key) is not None), keys[-1])

    def keys(self, start: str) -> list[str]:
        """Return the keys below `start` that the configuration sets."""
        return [key.removeprefix(self.prefix) for key in self.settings if key.startswith(self.prefix + start)]

    def value(self, key: str) -> Any:
        """Return the value of the configuration or else the default, with YAML's type; None if there is neither."""
        raw = self.raw(key)
        return typed(raw) if isinstance(raw, str) else raw

    def raw(self, key: str) -> Any:
        """Return the value as it was written, with interpolations replaced by their values."""
        return self._resolved(self.prefix + key, 0)

    def text(self, key: str) -> str | None:
        """Return the value as text without the quotes around it; None if it is absent or null."""
        raw = self.raw(key)
        if raw is None or (isinstance(raw, str) and raw.strip().lower() in _NONE):
            return None
        return _unquoted(str(raw))

    def number(self, key: str, usual: float | None = None) -> float | None:
        """Return a finite number, or `usual` if the value is absent."""
        text = self.text(key)
        return usual if text is None else finite(self.prefix + key, text)

    def whole(self, key: str) -> int | None:
        if (number := self.number(key)) is None:
            return None
        if not number.is_integer():
            raise UnreadableError(f"{self.prefix}{key} must be a whole number: got {number}")
        return int(number)

    def count(self, key: str) -> int:
        """Return a whole number; raise UnreadableError if it is absent."""
        if (number := self.whole(key)) is None:
            raise UnreadableError(f"{self.prefix}{key} must be a whole number: got none")
        return number

    def flag(self, key: str) -> bool:
        """Return whether the value is true; an absent value is false."""
        word = (self.text(key) or "").strip().lower()
        if word not in (*_TRUE, *_FALSE, *_NONE):
            raise UnreadableError(f"{self.prefix}{key} must be true or false: got {self.raw(key)!r}")
        return word in _TRUE

    def items(self, key: str) -> list[Any]:
        """Return a list; a single value becomes a list of one."""
        value = self.value(key)
        if isinstance(value, str) and value[:1] in "[(":
            value = typed(value.replace("(", "[").replace(")", "]"))
        return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]

    def texts(self, key: str) -> list[str]:
        return [str(item) for item in self.items(key)]

    def numbers(self, key: str) -> list[float]:
        """Return the value as a list of finite numbers."""
        return [finite(self.prefix + key, item) for item in self.items(key)]

    def mapping(self, key: str) -> dict[str, Any]:
        """Return a mapping that a configuration sets as a whole, by single keys below it, or both."""
        whole = self.value(key) if self.has(key) else None
        below = {name.removeprefix(f"{key}."): self.value(name) for name in self.keys(f"{key}.")}
        return {**whole, **below} if isinstance(whole, dict) else below

    def tracked(self, key: str) -> bool:
        """Return whether the configuration names a tracker in the key that needs an account."""
        return self.has(key) and bool(set(self.texts(key)) & set(TRACKERS).difference(_WITHOUT_ACCOUNT))

    def loggers(self, key: str) -> list[str]:
        """Return the terminal and the supported trackers; metrics.jsonl is always written."""
        names = self.texts(key)
        known = [name for name in ("console", *TRACKERS) if name in names]
        if others := ", ".join(name for name in names if name not in known):
            self.lacks(key, f"{others}: metrics are in metrics.jsonl, from where any tool reads them", changes_result=False)
        if not self.has(key):
            # A default must not require a package or an account.
            known = [name for name in known if name in _WITHOUT_ACCOUNT]
        return known or ["console"]

    def kept(self, key: str) -> int:
        """Return how many checkpoints are kept; without a number above 0, all of them."""
        count = self.whole(key) or 0
        return count if count > 0 else EVERY_CHECKPOINT

    def path(self, key: str) -> str | None:
        """Return a path, with a leading ~ replaced by the home directory."""
        path = self.text(key)
        return path and self._at_home(path)

    def files(self, key: str) -> list[str] | None:
        """Return the paths of a key that has one path or a list; None if it has none."""
        return [self._at_home(name) for name in self.texts(key)] or None

    def interval(self, key: str) -> int:
        """Return the steps between two events; 0 if they are off (-1, null or false, which Python reads as 0; true is 1)."""
        word = str(self.raw(key)).strip("'\"").lower()
        return int(word == "true") if word in ("false", "true") else max(0, self.whole(key) or 0)

    def top_k(self, key: str) -> int:
        """Return top-k, with 0 for off, where other systems have -1."""
        return max(0, self.whole(key) or 0)

    def one_of(self, key: str, names: Collection[str], what: str, usual: str) -> str:
        """Return the key's value, one of `names`, or `usual` if it is left out; report another name as not supported."""
        if (name := self.text(key) or usual) in names:
            return name
        self.lacks(key, f"the {what} {name}: known here are {', '.join(names)}")
        return usual

    def lacks(self, key: str, reason: str, *, changes_result: bool = True) -> None:
        """Report that the value of a key needs something that is not supported."""
        full = self.prefix + key
        self.read.add(full)
        # A default that is not supported is named too: without it the run would be a different one.
        value = self.settings.get(full, f"{self.defaults.get(full)} (the default)")
        self.outcomes.append(Outcome(full, value, "unsupported", reason, changes_result=changes_result))

    def note(self, sentence: str) -> None:
        """Add a sentence about the run that its users should know and for which no key is refused."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def fixed(self, key: str, reason: str) -> None:
        """Report that the value of a key does not change any number of the run here."""
        full = self.prefix + key
        self.read.add(full)
        if full in self.settings:
            self.outcomes.append(Outcome(full, self.settings[full], "fixed", reason))

    def _at_home(self, name: str) -> str:
        return self.environment.get("HOME", os.path.expanduser("~")) + name[1:] if name.startswith("~") else name

    def _resolved(self, key: str, depth: int) -> Any:
        if depth > 20:
            raise UnreadableError(f"{key} refers to itself, or through more than 20 other keys")
        self.read.add(key)
        self.work.spend(20)
        value = self.settings[key] if key in self.settings else self.defaults.get(key)
        return self._interpolated(key, value, depth)

    def _interpolated(self, key: str, value: Any, depth: int) -> Any:
        if isinstance(value, list):
            return [self._interpolated(key, item, depth) for item in value]
        if not isinstance(value, str) or "$" not in value:
            return value
        if whole := _VARIABLE.fullmatch(value.strip()):
            return self._reference(key, whole, depth)
        while match := _VARIABLE.search(value):
            inner = self._reference(key, match, depth)
            self.work.value(value, key)
            value = value[: match.start()] + ("null" if inner is None else str(inner)) + value[match.end() :]
            if _VARIABLE.fullmatch(value.strip()):
                return self._interpolated(key, value, depth + 1)
        return value

    def _reference(self, key: str, match: re.Match[str], depth: int) -> Any:
        """Return the value of `${a.b}`, `${.b}`, `${oc.select:a.b,default}`, `${oc.env:NAME,default}` or `$NAME`."""
        name = match[1] if match[1] is not None else match[2]
        kind, colon, rest = name.partition(":")
        if colon and kind in ("oc.select", "oc.env"):
            place, comma, default = rest.partition(",")
            if kind == "oc.env":
                if place in self.environment:
                    return self.environment[place]
            elif (value := self._resolved(_sibling(key, place), depth + 1)) is not None:
                return value
            return self._interpolated(key, default.strip(), depth + 1) if comma else None
        if colon and kind not in self.environment and name not in self.environment:
            if rest.startswith(("-", "=")):
                return rest[1:]
            raise UnreadableError(f"{key}: ${{{name}}} is computed when the program runs: replace it by the value")
        place = _sibling(key, name)
        if place in self.settings or place in self.defaults:
            return self._resolved(place, depth + 1)
        if kind in self.environment:
            return self.environment[kind]
        if "." in place:
            return None
        raise UnreadableError(f"{key} needs ${{{name}}}, which has no known value: pass it with --env {name}=value")


def merged(trees: Iterable[Tree]) -> Tree:
    """Return one mapping of several: a later one overrides an earlier one, section by section."""
    result: Tree = {}
    for tree in trees:
        for key, value in tree.items():
            both = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = merged([result[key], value]) if both else value
    return result


def flatten(tree: Mapping[str, Any], start: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (full key, value) for each value of a nested mapping; an empty mapping is a value."""
    for name, value in tree.items():
        key = f"{start}.{name}" if start else str(name)
        if isinstance(value, Mapping) and value:
            yield from flatten(value, key)
        else:
            yield key, value


def _sibling(key: str, name: str) -> str:
    """Return the full key of an interpolation at `key`: one leading dot is its section, each further dot the one above."""
    dots = len(name) - len(name.lstrip("."))
    return ".".join([*key.split(".")[:-dots], name[dots:]]) if dots else name


def _other(value: Any) -> Any:
    """Return a value like this one: twice as many whole numbers in a list, or else each whole number doubled."""
    if isinstance(value, list) and value and all(isinstance(item, int) for item in value):
        return [*value, *(max(value) + 1 + place for place in range(len(value)))]
    # Python reads at most 4,300 digits as one number.
    return (
        re.sub(r"\d{1,18}", lambda number: str(2 * int(number[0])), str(value)) if re.search(r"[1-9]", str(value)) else value
    )


def _unquoted(text: str) -> str:
    text = text.strip()
    while len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    return text


def finite(name: str, value: Any) -> float:
    """Return a value of the setting `name` as a number; raise UnreadableError for infinity, NaN and what is no number."""
    with suppress(ValueError, TypeError, OverflowError):
        if math.isfinite(number := float(value)):
            return number
    raise UnreadableError(f"{name} must be a number: got {shown(value)}")


def typed(text: str) -> Any:
    """Return the value of a word as YAML reads it, and also None for `None` and a number for `1e-6`."""
    value = _typed(text)
    return copy.deepcopy(value) if isinstance(value, (list, dict)) else value


@lru_cache(1 << 14)
def _typed(text: str) -> Any:
    """Return the value of a word; results are cached, because functions are run many times and YAML is slow."""
    plain = _unquoted(text)
    if plain.lower() in _NONE:
        return None
    if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+", plain):
        return float(plain)
    with suppress(ConfigError):
        return parse_value(plain)
    return plain
