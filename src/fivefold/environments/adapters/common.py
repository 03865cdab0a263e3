"""Code that several adapters need: import a user's code or a library, and make the first messages."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import math
import numbers
import os
import sys
import zlib
from asyncio import to_thread
from pathlib import Path
from typing import Any

_LONGEST_NAME = 200
"""Number of characters of a state's name, above which it is a digest."""


class Refusal(Exception):  # noqa: N818 - a sentence for the user
    """Raised with a sentence for the user, to be shown without a traceback."""


class ToolError(Refusal):
    """Raised with the text with which a tool reports an error to the model."""


class Source:
    """Source of tools: functions, a server, or a file for another system."""

    is_stateless = True
    """Whether it keeps nothing of a trajectory that its next calls depend on."""
    schemas: list[dict[str, Any]]
    """The tools, as chat templates take them."""

    def enter(self, environment: int, task: dict[str, Any]) -> None:
        """Take notice of a trajectory that begins, with its row."""

    async def call(self, environment: int, name: str, arguments: dict[str, Any]) -> Any:
        """Return what a tool answers to a trajectory."""
        raise NotImplementedError

    async def leave(self, environment: int) -> None:
        """Forget a trajectory."""


def load_code(name: str) -> Any:
    """Return the class or function of `path/to/file.py:name`."""
    path, _, attribute = name.rpartition(":")
    file = Path(path).resolve()
    module_name = f"fivefold_user_{file.stem}_{zlib.crc32(bytes(file)):08x}"
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, file)
        assert spec is not None and spec.loader is not None
        module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
        # The last place in sys.path: a file next to it must not replace a library of the same name.
        sys.path.append(str(file.parent))
        spec.loader.exec_module(module)
    return getattr(sys.modules[module_name], attribute)


def library(module: str, package: str) -> Any:
    """Return a module of a library; raises Refusal if this interpreter cannot import it."""
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise Refusal(
            f"environment.class needs the package {package}, which {sys.executable} cannot import "
            f"({type(error).__name__}: {error}): install it there, or name an interpreter that has it as environment.python"
        ) from error


async def run(function: Any, *arguments: Any, **named: Any) -> Any:
    """Call a coroutine function, or a plain one in a thread, so that it holds up no other environment.

    A copy of this process that the function has forked ends with the call: the original answers.
    """
    process = os.getpid()

    def call() -> Any:
        try:
            return function(*arguments, **named)
        finally:
            if os.getpid() != process:
                os._exit(0)

    if not inspect.iscoroutinefunction(function):
        return await to_thread(call)
    try:
        return await function(*arguments, **named)
    finally:
        if os.getpid() != process:
            os._exit(0)


def finite(value: Any) -> float | None:
    """Return a finite number as a float, None for anything else. Numbers of NumPy are numbers, and truth values are not."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def messages_of(prompt: Any) -> list[dict[str, Any]]:
    """Return the prompt of a row as messages."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(message) for message in prompt]


def with_observation(prompt: Any, text: str, between: str = "\n\n") -> list[dict[str, Any]]:
    """Return the prompt of a row with an observation at the end of its last message."""
    messages = messages_of(prompt)
    before = messages[-1]["content"]
    messages[-1]["content"] = f"{before}{between}{text}" if before else text
    return messages


def named(text: str) -> str:
    """Return the name of a state in which the model reads this text."""
    return text if len(text) <= _LONGEST_NAME else hashlib.sha256(text.encode()).hexdigest()
