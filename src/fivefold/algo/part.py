"""Parts of an objective: keys of `algorithm` with their usual values and rules, and the formulas that use them.

A part is one frozen dataclass. The configuration has its fields as keys (choices.py), and its own methods compute.
"""

from __future__ import annotations

import importlib
import pkgutil
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from fivefold.columns import Column
from fivefold.keys.findings import Findings
from fivefold.keys.identity import hints_of
from fivefold.user_code import is_user_code, load_user_code

if TYPE_CHECKING:
    from typing import Self


C = TypeVar("C")


def usual(value: Any) -> Any:
    """Declare a key that may be left out (None): the method's choice then applies, or else `value`."""
    return field(default=None, metadata={"usual": value})


def chosen_function(name: str, built_in: Callable[[str], C]) -> C:
    """Return the user's function for `path.py:function`, or what `built_in` returns for another name."""
    return load_user_code(name) if is_user_code(name) else built_in(name)


class Chosen:
    """Choices by key: of a configuration, of a method's row, or as resolved. choices.py adds the keys of all parts."""

    if TYPE_CHECKING:

        def __init__(self, **choices: Any) -> None: ...

        def __getattr__(self, key: str) -> Any: ...


@dataclass(frozen=True)
class Part:
    """Keys that belong together, and what they do.

    In a configuration, None stands for the method's choice. In resolved choices every key with a usual value has a value.
    """

    section = ""
    """Section of `algorithm` with the keys; empty if they are keys of `algorithm` itself."""
    reports = tuple[tuple[str, ...], ...]()
    """(name, unit, meaning), and perhaps a label, of each metric that only this part reports: rows of docs/metrics.md."""

    @classmethod
    def of(cls, chosen: Chosen) -> Self:
        """Return this part of the choices."""
        values = chosen if not cls.section else getattr(chosen, cls.section)
        return cls(**{item.name: getattr(values, item.name) for item in fields(cls)})

    @classmethod
    def usual_values(cls) -> Self:
        """Return the values for keys that neither the configuration nor the method's row sets."""
        return cls(**{item.name: item.metadata.get("usual", item.default) for item in fields(cls)})

    def needs(self, updates: int) -> frozenset[Column]:
        """Return the columns of the batch that must be filled in before `updates` optimizer steps on it."""
        return frozenset()

    @classmethod
    def check(cls, case: Case) -> None:
        """Record values that cannot be used together, and keys without effect."""


@dataclass(frozen=True)
class Case:
    """A method and the choices made for it, which rules check; each value is already within its range."""

    findings: Findings
    name: str
    """Name of the method."""
    methods: Mapping[str, Chosen]
    overrides: Chosen
    """Choices of the configuration; None for those that it leaves out."""
    chosen: Chosen
    """Choices as resolved: every axis has a value."""
    group_size: int
    updates: int = 1
    """Number of optimizer steps per rollout."""
    has_turns: bool | None = None
    """Whether trajectories may have several turns; None: not known."""

    @property
    def offline(self) -> bool:
        """Whether the method learns from responses in the data and does not sample."""
        return bool(self.methods[self.name].offline)

    def require_off(self, *keys: str) -> None:
        """Record an error for each key that is set although the method does not sample."""
        for key in keys:
            self.findings.require(
                not self.offline or getattr(self.overrides, key) in (None, False),
                key,
                f"has nothing to act on: {self.name} does not sample",
            )

    def require_turns(self, key: str, needed: bool, message: str) -> None:
        """Record an error for a key that acts on the turns of a trajectory, if responses have none."""
        self.findings.require(
            not needed or self.has_turns is not False,
            key,
            f"{message}, and every response has one: name an environment (environment.class or environment.tools)",
        )


def find_classes(package: str, path: list[str], base: type[C]) -> Iterator[type[C]]:
    """Yield the subclasses of `base` that the modules of a package define: by module, in the order of its file."""
    for entry in pkgutil.iter_modules(path):
        module = importlib.import_module(f"{package}.{entry.name}")
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, base) and kind.__module__ == module.__name__:
                yield kind


def with_keys_of(*parts: type[Any]) -> Callable[[type[C]], type[C]]:
    """Return a decorator that adds the keys of `parts` to a frozen dataclass, each with None for the method's choice.

    A key of two parts is added once. The parameters of a surrogate keep their ranges to themselves: they differ.
    """
    added: dict[str, tuple[str, Any, Any]] = {}
    for part in parts:
        if issubclass(part, Part) and part.section:
            added[part.section] = (part.section, part, field(default_factory=part))
            continue
        hints = hints_of(part) if issubclass(part, Part) else typing.get_type_hints(part)
        for item in fields(part):
            added.setdefault(item.name, (item.name, hints[item.name] | None, None))

    def extended(kind: type[C]) -> type[C]:
        namespace = {"__module__": kind.__module__, "__doc__": kind.__doc__, "__qualname__": kind.__qualname__}
        extended_kind: type[C] = make_dataclass(
            kind.__name__, list(added.values()), bases=(kind,), frozen=True, namespace=namespace
        )
        return extended_kind

    return extended
