"""Agents: a function of a user's file, or a command, that samples its turns through an endpoint and returns its reward."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import re
import reprlib
import shlex
import signal
import sys
from typing import Any

from .common import Refusal, finite, load_code, run

_CODE = re.compile(r"[^:]+\.py:\w+")
_LONGEST_OUTPUT = 1 << 20
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


class _RewardError(Refusal):
    """Raised for what an agent returned that is no reward."""


class Agent:
    """An agent of one trajectory."""

    def __init__(self, function: Any) -> None:
        self._function = function

    async def reset(self, task: dict[str, Any], seed: int) -> None:
        """Take the row; an agent draws as it likes."""
        self._task = {**task, "seed": seed}

    async def run(self, base_url: str, api_key: str) -> dict[str, float] | str | None:
        """Run the agent, and return its rewards by name, or why it has none; one without a name is called `reward`."""
        try:
            return rewards_of(await run(self._function, self._task, base_url, api_key))
        except _RewardError as error:
            return str(error)


def load(name: str, settings: dict[str, Any]) -> Any:
    """Return what makes the agent of a trajectory, of `path/to/file.py:function` or a command."""
    function = load_code(name) if _CODE.fullmatch(name) else Command(name).run
    if not callable(function):
        raise Refusal(f"environment.agent must be a function that takes (task, base_url, api_key): got {function!r}")
    return lambda: Agent(function)


def rewards_of(returned: Any) -> dict[str, float] | None:
    """Return what an agent returned as rewards by name; None if it returned none."""
    if returned is None:
        return None
    named = returned if isinstance(returned, dict) else {"reward": returned}
    rewards = {str(name): number for name, value in named.items() if (number := finite(value)) is not None}
    if not named or len(rewards) != len(named):
        shown = reprlib.repr(returned) if named else "none"
        raise _RewardError(f"an agent returns a finite number, or several by name: got {shown}")
    return rewards


class Command:
    """A program that reads the task as JSON and writes its reward as the last line of its output, also as JSON.

    It gets the address and the key as OPENAI_BASE_URL and OPENAI_API_KEY.
    """

    def __init__(self, text: str) -> None:
        self._words = shlex.split(text)

    async def run(self, task: dict[str, Any], base_url: str, api_key: str) -> Any:
        """Run the program once."""
        process = await asyncio.create_subprocess_exec(
            *self._words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=_LONGEST_OUTPUT,
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            env={**os.environ, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key},
        )
        try:
            output, errors = await process.communicate(json.dumps(task, default=str).encode() + b"\n")
        finally:
            if process.returncode is None:
                process.kill()
        if process.returncode:
            last = errors.decode(errors="replace").strip()[-4000:]
            raise Refusal(f"the agent {self._words[0]} ended with exit code {process.returncode}: {last}")
        lines = output.decode(errors="replace").strip().splitlines()
        try:
            return json.loads(lines[-1]) if lines else None
        except ValueError:
            raise _RewardError(
                f"the agent's last line is its reward, a number or several by name as JSON: got {lines[-1][:200]!r}"
            ) from None


def _end_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
