"""Lets SGLang's server start on a CPU without its compiled companions: a dense float32 model calls nothing of them.

Python runs this at the start of every process that has this folder in PYTHONPATH; only servers, what they start, and the
check that SGLang can be imported get the stand-ins.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import types
from typing import Any

COMPILED = ("triton", "IPython", "torchvision", "sgl_kernel")
_MARK = "FIVEFOLD_TEST_SGLANG"


class _Member(type):
    """A class whose attributes are there, as those of an enumeration."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Anything(metaclass=_Member):
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __init_subclass__(cls, **_: Any) -> None:
        super().__init_subclass__()


class _StandIn(types.ModuleType):
    """A module that has whatever is asked of it; decorators of it give the function back."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__file__ = __file__
        self.__version__ = "0.0.0"
        self.__spec__ = importlib.machinery.ModuleSpec(name, FINDER, is_package=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        if name[:1].isupper():
            member: Any = _Member(name, (_Anything,), {"__module__": self.__name__})
        else:
            full = f"{self.__name__}.{name}"
            member = sys.modules.setdefault(full, _StandIn(full))
        setattr(self, name, member)
        return member

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if len(arguments) == 1 and callable(arguments[0]) and not named:
            return arguments[0]
        return lambda function: function

    def __getitem__(self, _: Any) -> Any:
        return self

    __or__ = __ror__ = __getitem__


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        is_wanted = name.partition(".")[0] in COMPILED
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_wanted else None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


FINDER = _Finder()
if "fivefold.engines.sglang.serve" in sys.orig_argv or sys.orig_argv[-1] == "sglang":
    os.environ[_MARK] = "1"
if _MARK in os.environ:
    # Last: what is really installed wins.
    sys.meta_path.append(FINDER)
    os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
