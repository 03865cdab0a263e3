"""Stand-ins for compiled packages that a library imports and that the project never calls.

Megatron-Bridge imports Transformer Engine for the layers of its own models and adapters, and Triton for Mamba. Only its
tables of weights are used here, so their names are enough.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, MutableSequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import FunctionType, ModuleType
from typing import Any


@contextmanager
def stand_ins(*packages: str) -> Iterator[None]:
    """Let `import` find those of `packages` that are not installed, within this block only."""
    absent = {package for package in packages if find_spec(package) is None}
    finder = _Finder(absent)
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] in absent]:
            del sys.modules[name]


class _AnyName(type):
    """A class whose attributes are such classes; as a decorator it returns the function."""

    def __getattr__(cls, name: str) -> Any:
        return _stand_in(name)

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        function = arguments[0] if arguments else None
        return function if isinstance(function, FunctionType) else type.__call__(cls)


def _stand_in(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _AnyName(name, (), {})


class _Package(ModuleType):
    __path__: MutableSequence[str] = []  # noqa: RUF012
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        return _stand_in(name)


class _Finder(MetaPathFinder, Loader):
    def __init__(self, packages: set[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self._packages else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Package(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is executed: names are made when they are read."""
