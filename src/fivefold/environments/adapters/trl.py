"""Classes for TRL's `environment_factory`: `trl:FILE:CLASS`.

Their public methods are tools, `reset` gets the columns of the row, and `get_reward` scores the trajectory.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from typing import Any

from .common import Refusal, load_code, run, with_observation
from .functions import schema_of

_OWN = ("reset", "get_reward")


def load(name: str, settings: dict[str, Any]) -> Callable[[], Any]:
    """Return what makes an environment."""
    user_class = load_code(name)
    if not callable(getattr(user_class, "reset", None)):
        raise Refusal(f"environment.class: {name} must have a method reset")
    probe = user_class(**settings["options"])
    tools = [
        method
        for method, _ in inspect.getmembers(type(probe), inspect.isfunction)
        if method[0] != "_" and method not in _OWN
    ]
    return _Factory(user_class, settings["options"], [schema_of(getattr(probe, tool)) for tool in tools])


class _Factory:
    def __init__(self, user_class: Any, options: dict[str, Any], schemas: list[dict[str, Any]]) -> None:
        self._class, self._options, self.schemas = user_class, options, schemas
        self.replayable = bool(getattr(user_class, "replayable", False))
        self.score = hasattr(user_class, "get_reward")

    def __call__(self) -> Environment:
        return Environment(self._class(**self._options))


class Environment:
    """An environment that ends with a message without tool calls."""

    def __init__(self, instance: Any) -> None:
        self._instance = instance

    async def reset(self, task: dict[str, Any], seed: int) -> list[dict[str, Any]] | None:
        """Return the row's prompt with what `reset` returned, which comes last in its last message."""
        takes = inspect.signature(self._instance.reset).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())
        columns = {key: value for key, value in {**task, "seed": seed}.items() if takes_any or key in takes}

        def begin() -> Any:
            # The interface has no seed: classes that draw from `random` alone start alike this way.
            random.seed(seed)
            return self._instance.reset(**columns)

        observation = await (
            run(self._instance.reset, **columns) if inspect.iscoroutinefunction(self._instance.reset) else run(begin)
        )
        if observation is None:
            return None
        return with_observation(task["prompt"], str(observation), between="")

    def step(self, message: dict[str, Any]) -> dict[str, Any]:
        """End the trajectory."""
        return {"done": True}

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Call a method as a tool."""
        return await run(getattr(self._instance, name), **arguments)

    async def score(self) -> float:
        """Return the reward of the trajectory, 0 where other functions give it."""
        return float(await run(self._instance.get_reward)) if hasattr(self._instance, "get_reward") else 0.0
