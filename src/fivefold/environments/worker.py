"""One environment process: requests in, answers out. An EnvironmentPool starts it.

It needs the standard library alone, since it runs under `environment.python`, which may have none of Fivefold's packages.
"""

from __future__ import annotations

import asyncio
import ctypes
import difflib
import importlib
import importlib.util
import json
import os
import reprlib
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Mapping
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
_STEP: dict[str, Any] = {"messages": [], "reward": 0.0, "done": False, "state": None}
"""Key of a step -> its default."""
_TRUTH_VALUES = ("bool", "torch.bool")
"""Types of truth values in libraries, as their `dtype` is written."""
_ADAPTERS = "fivefold_adapters"
"""Name of the package that the files of `adapters/` are here."""


class Worker:
    """The environments of this process by number, and the tools."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._make: Any = None
        self._has_score = False
        self._sources: list[Any] = []
        """Where tools come from; see `Source` in `adapters/common.py`."""
        self._tools: dict[str, Any] = {}
        """Name of each tool -> its source, None if it is the environment's own."""
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
            if len(text) >= LONGEST:
                raise _refusal(
                    f"what an environment or a tool returns has at most {LONGEST >> 20} MiB: got {len(text)} bytes"
                )
        except asyncio.CancelledError:
            text = json.dumps({"id": request["id"], "error": "it was cancelled"})
        except BaseException as error:
            # SystemExit of a user's class costs this trajectory its reward, like any other error.
            text = json.dumps({"id": request["id"], "error": _reason(error, request["do"])})
        self._writer.write(text.encode() + b"\n")
        await self._writer.drain()

    async def do_load(self, kind: str, name: str | None, tools: list[str], settings: dict[str, Any]) -> dict[str, Any]:
        """Load the class and the tools; return the tools' schemas, and what the class can do."""
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        # The hard limit stays: servers of tools, which are programs of their own, have no limit.
        resource.setrlimit(resource.RLIMIT_AS, (settings["memory_mb"] * 2**20, hard))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        schemas: list[dict[str, Any]] = []
        if name is not None:
            self._make = await asyncio.to_thread(_adapter(kind).load, name, settings)
            for schema in getattr(self._make, "schemas", []):
                self._add(schema, None, schemas)
        for tool in tools:
            source = await _adapter(_tool_kind(tool)).load(tool, settings)
            self._sources.append(source)
            for schema in source.schemas:
                self._add(schema, source, schemas)
        keeps_nothing = all(source.is_stateless for source in self._sources)
        # An adapter may return a partial call of its class.
        made_by = getattr(self._make, "func", self._make)
        self._has_score = bool(getattr(made_by, "score", False))
        return {
            "tools": schemas,
            "is_stateless": keeps_nothing and made_by is None,
            "has_state": keeps_nothing and hasattr(made_by, "state"),
            "is_replayable": keeps_nothing and bool(getattr(made_by, "replayable", False)),
            "has_score": self._has_score,
        }

    def _add(self, schema: dict[str, Any], source: Any, schemas: list[dict[str, Any]]) -> None:
        name = schema["function"]["name"]
        if name in self._tools:
            raise _refusal(f"environment.tools: two tools are called {name}: rename one")
        self._tools[name] = source
        schemas.append(schema)

    async def do_reset(self, environment: int, task: dict[str, Any], seed: int, restore: dict[str, Any] | None) -> Any:
        """Make an environment, in a state that `do_state` returned if there is one, and return its first context."""
        for source in self._sources:
            source.enter(environment, task)
        if self._make is None:
            return None
        instance = self._environments[environment] = self._make()
        first = await _run(instance.reset, task, seed)
        if restore is not None:
            try:
                await _run(instance.restore, restore)
            except Exception as error:
                raise _refusal(f"the state of an environment must restore: {type(error).__name__}: {error}") from error
        return first

    async def do_run(self, environment: int, base_url: str, api_key: str) -> Any:
        """Run an agent and return its rewards."""
        return await self._environments[environment].run(base_url, api_key)

    async def do_step(self, environment: int, message: dict[str, Any]) -> dict[str, Any]:
        """Take a step, and return what it gave; the last one has the score of the whole trajectory too."""
        instance = self._environments[environment]
        step = _step(await _run(instance.step, message))
        if step["done"] and self._has_score:
            step["reward"] += _reward(await _run(instance.score))
        return step

    async def do_call(self, environment: int, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool and return its answer as text."""
        source = self._tools[name]
        if source is None:
            value = await _run(self._environments[environment].call, name, arguments)
        else:
            value = await source.call(environment, name, arguments)
        return value if isinstance(value, str) else json.dumps(value, default=str)

    async def do_state(self, environment: int) -> Any:
        """Return what the environment needs to continue in another process."""
        state = await _run(self._environments[environment].state)
        if not isinstance(state, dict):
            raise _refusal(f"`state` must return a dict that JSON can write: got {type(state).__name__}")
        return state

    async def do_score(self, environment: int) -> float:
        """Return the reward of a trajectory that ends before its environment does."""
        return _reward(await _run(self._environments[environment].score))

    async def do_close(self, environment: int) -> None:
        """Close an environment and forget it."""
        instance = self._environments.pop(environment, None)
        if instance is not None and hasattr(instance, "close"):
            await _run(instance.close)
        for source in self._sources:
            await source.leave(environment)


def _adapter(name: str) -> Any:
    """Return a file of `adapters/`, which lies next to this one."""
    if _ADAPTERS not in sys.modules:
        directory = Path(__file__).resolve().parent / "adapters"
        spec = importlib.util.spec_from_file_location(
            _ADAPTERS, directory / "__init__.py", submodule_search_locations=[str(directory)]
        )
        assert spec is not None and spec.loader is not None
        sys.modules[_ADAPTERS] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[_ADAPTERS])
    return importlib.import_module(f"{_ADAPTERS}.{name}")


def _refusal(sentence: str) -> Exception:
    refusal: Exception = _adapter("common").Refusal(sentence)
    return refusal


def _tool_kind(tool: str) -> str:
    if tool.startswith(("mcp:", "mcp+http:", "mcp+https:")):
        return "mcp"
    return "verl" if tool.startswith("verl:") else "functions"


async def _run(function: Any, *arguments: Any) -> Any:
    return await _adapter("common").run(function, *arguments)


def _reason(error: BaseException, do: str) -> str:
    """Return why a request failed: a sentence, or a traceback. A model reads the errors of its tools."""
    if isinstance(error, _adapter("common").Refusal):
        return str(error)
    if do == "call":
        return traceback.format_exception_only(error)[-1].strip()[-_LONGEST_ERROR:]
    return "".join(traceback.format_exception(error))[-_LONGEST_ERROR:]


def _reward(reward: Any) -> float:
    number: float | None = _adapter("common").finite(reward)
    if number is None:
        raise _refusal(f"the reward of a step is a finite number: got {reprlib.repr(reward)}")
    return number


def _step(step: Any) -> dict[str, Any]:
    """Return what `step` gave as a mapping: a mapping, or an object with these attributes."""
    if isinstance(step, Mapping):
        for key in step:
            if key not in _STEP:
                close = difflib.get_close_matches(str(key), _STEP, n=1)
                hint = f": did you mean {close[0]!r}?" if close else ""
                raise _refusal(f"a step has the keys {', '.join(_STEP)}: got {reprlib.repr(key)}{hint}")
        given = {**_STEP, **step}
    else:
        given = {key: getattr(step, key, default) for key, default in _STEP.items()}
    messages, reward, done, state = given.values()
    if not isinstance(done, bool) and str(getattr(done, "dtype", None)) not in _TRUTH_VALUES:
        raise _refusal(f"`done` of a step is True or False: got {reprlib.repr(done)}")
    if not done and not messages:
        raise _refusal("a step without messages must be done: the model would have nothing to answer")
    return {
        "messages": messages,
        "reward": _reward(reward),
        "done": bool(done),
        "state": None if state is None else str(state),
    }


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
    # Programs and copies that an environment starts must not keep the socket open when this process ends.
    os.set_inheritable(descriptor, False)
    os.register_at_fork(after_in_child=lambda: os.close(descriptor))
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
