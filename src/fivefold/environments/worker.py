"""One environment process: requests in, answers out. An EnvironmentPool starts it.

It needs the standard library alone, since it runs under `environment.python`, which may have none of Fivefold's packages.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib.util
import inspect
import json
import math
import os
import resource
import signal
import socket
import sys
import traceback
import types
import typing
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

LONGEST = 64 << 20
"""Largest number of bytes of one message."""
_LONGEST_ERROR = 4000
"""Number of characters of a traceback that are kept, from its end."""
_THREADS = 256
"""Plain functions that run at the same time."""
_PR_SET_PDEATHSIG = 1
_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object", type(None): "null"}


class Worker:
    """The environments of this process by number, and the tools."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._class: Any = None
        self._tools: dict[str, Any] = {}
        self._environments: dict[int, Any] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def begin(self, request: dict[str, Any]) -> None:
        """Answer a request while others are answered too."""
        if request["do"] == "cancel":
            if (task := self._tasks.get(request["of"])) is not None:
                task.cancel()
            return
        task = asyncio.create_task(self._answer(request))
        self._tasks[request["id"]] = task
        task.add_done_callback(lambda _: self._tasks.pop(request["id"], None))

    async def _answer(self, request: dict[str, Any]) -> None:
        answer: dict[str, Any] = {"id": request["id"]}
        try:
            answer["value"] = await getattr(self, f"do_{request['do']}")(**request["arguments"])
            text = json.dumps(answer, allow_nan=False)
        except asyncio.CancelledError:
            text = json.dumps({"id": request["id"], "error": "it was cancelled"})
        except BaseException:
            # SystemExit of a user's class costs this trajectory its reward, like any other error.
            text = json.dumps({"id": request["id"], "error": traceback.format_exc()[-_LONGEST_ERROR:]})
        self._writer.write(text.encode() + b"\n")
        await self._writer.drain()

    async def do_load(self, name: str | None, tools: list[str], memory_mb: int) -> dict[str, Any]:
        """Load the class and the tools, and return the tools' schemas."""
        limit = memory_mb * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if name is not None:
            self._class = _load(name)
            for method in ("reset", "step"):
                if not callable(getattr(self._class, method, None)):
                    raise TypeError(f"{name} must have a method {method}")
        for tool in tools:
            function = _load(tool)
            if function.__name__ in self._tools:
                raise TypeError(f"two tools are called {function.__name__}: rename one")
            self._tools[function.__name__] = function
        return {"tools": [schema_of(function) for function in self._tools.values()]}

    async def do_reset(self, environment: int, task: dict[str, Any], seed: int) -> Any:
        """Make an environment and return its first context."""
        made = self._environments[environment] = self._class()
        return await _run(made.reset, task, seed)

    async def do_step(self, environment: int, message: dict[str, Any]) -> dict[str, Any]:
        """Take a step, and return what it gave."""
        return _step(await _run(self._environments[environment].step, message))

    async def do_call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool and return its answer as text."""
        value = await _run(self._tools[name], **arguments)
        return value if isinstance(value, str) else json.dumps(value, default=str)

    async def do_close(self, environment: int) -> None:
        """Close an environment and forget it."""
        made = self._environments.pop(environment, None)
        if made is not None and hasattr(made, "close"):
            await _run(made.close)


async def _run(function: Any, *arguments: Any, **named: Any) -> Any:
    """Call a coroutine function, or a plain one in a thread, so that it holds up no other environment."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments, **named)
    return await asyncio.to_thread(function, *arguments, **named)


def _step(step: Any) -> dict[str, Any]:
    """Return what `step` gave as a mapping: a mapping, or an object with these attributes."""
    get = step.get if isinstance(step, dict) else lambda key, default: getattr(step, key, default)
    messages, reward, done, state = get("messages", []), get("reward", 0.0), get("done", False), get("state", None)
    if isinstance(reward, bool) or not isinstance(reward, (int, float)) or not math.isfinite(reward):
        raise ValueError(f"the reward of a step is a finite number: got {reward!r}")
    if not done and not messages:
        raise ValueError("a step without messages must be done: the model would have nothing to answer")
    return {
        "messages": messages,
        "reward": float(reward),
        "done": bool(done),
        "state": None if state is None else str(state),
    }


def schema_of(function: Any) -> dict[str, Any]:
    """Return the schema of a plain function as chat templates take it, from its annotations and docstring."""
    hints, name = typing.get_type_hints(function), function.__name__
    about, described = _docstring(function)
    properties, required = {}, []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise TypeError(f"the tool {name} takes arguments by name: got {parameter}")
        if parameter.name not in hints:
            raise TypeError(f"the tool {name} needs an annotation for its argument {parameter.name}")
        properties[parameter.name] = _schema(hints[parameter.name], f"{name}, {parameter.name}") | (
            {"description": described[parameter.name]} if parameter.name in described else {}
        )
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


def _docstring(function: Any) -> tuple[str, dict[str, str]]:
    """Return the description of a function, and those of its arguments in a section `Args:`."""
    about, _, arguments = (inspect.getdoc(function) or "").partition("Args:")
    described = {}
    for line in arguments.partition("\n\n")[0].splitlines():
        name, colon, text = line.partition(":")
        if colon:
            described[name.partition("(")[0].strip()] = text.strip()
    return about.strip(), described


def _schema(hint: Any, where: str) -> dict[str, Any]:
    """Return the JSON schema of an annotation."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint in _TYPES:
        return {"type": _TYPES[hint]}
    if origin is typing.Literal:
        return {"type": _TYPES[type(inner[0])], "enum": list(inner)}
    if origin is list:
        return {"type": "array", "items": _schema(inner[0], where)}
    if origin is dict:
        return {"type": "object"}
    if origin in (typing.Union, types.UnionType):
        return {"type": [_schema(each, where)["type"] for each in inner]}
    raise TypeError(f"the tool {where}: an argument is str, int, float, bool, list, dict, Literal or None: got {hint!r}")


def _load(name: str) -> Any:
    """Return the class or function of `path/to/file.py:name`."""
    path, _, own = name.rpartition(":")
    file = Path(path).resolve()
    module_name = f"fivefold_user_{file.stem}_{zlib.crc32(bytes(file)):08x}"
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, file)
        assert spec is not None and spec.loader is not None
        module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
        # The last place in sys.path: a file next to it must not replace a library of the same name.
        sys.path.append(str(file.parent))
        spec.loader.exec_module(module)
    return getattr(sys.modules[module_name], own)


def _end_with_parent() -> None:
    """Let the kernel end this process with the one that started it."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent or parent == 1:
            sys.exit(1)


async def serve(descriptor: int) -> None:
    """Answer requests until the other end is gone."""
    # A call that never returns keeps its thread.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS))
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor), limit=LONGEST)
    worker = Worker(writer)
    while line := await reader.readline():
        worker.begin(json.loads(line))
    os._exit(0)


if __name__ == "__main__":
    # Modules of a user must not be shadowed by those next to this file.
    sys.path.pop(0)
    _end_with_parent()
    asyncio.run(serve(int(sys.argv[1])))
