"""Environments of Gymnasium: `gymnasium:ID`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from .common import Refusal, library, named, with_observation

_NUMBER = re.compile(r"-?\d+")
_COLORED = re.compile(r"\x1b\[[0-9;]+m(.*?)\x1b\[0m", re.S)
"""What a drawing shows in color, such as the place of the player: the model reads it in brackets."""


def load(name: str, settings: dict[str, Any]) -> Callable[[], Any]:
    """Return what makes an environment; makes one first, since only that shows whether the arguments are right."""
    gymnasium = library("gymnasium", "gymnasium")
    options = settings["options"]
    try:
        probe = gymnasium.make(name, **options)
        probe.close()
    except Exception as error:
        raise Refusal(
            f"environment.class: gymnasium cannot make {name} with environment.options {options}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if "render_mode" not in options and "ansi" in probe.metadata.get("render_modes", []):
        options = {**options, "render_mode": "ansi"}
    return partial(Environment, gymnasium, name, options)


class Environment:
    """An environment whose actions are read from text: an integer, a text, or JSON, as its space of actions says."""

    replayable = True

    def __init__(self, gymnasium: Any, name: str, options: dict[str, Any]) -> None:
        self._made = gymnasium.make(name, **options)
        self._spaces = gymnasium.spaces
        self._draws = options.get("render_mode") == "ansi"

    def reset(self, task: dict[str, Any], seed: int) -> list[dict[str, Any]]:
        """Return the row's prompt with the first observation."""
        self._state: str | None = None
        observation, _ = self._made.reset(seed=seed)
        return with_observation(task["prompt"], self._text(observation))

    def step(self, message: dict[str, Any]) -> dict[str, Any]:
        """Take the action that a message names; without one the environment stays as it is."""
        try:
            action = self._action(message["content"])
        except (ValueError, KeyError, IndexError, TypeError):
            return {"messages": f"That is no action. An action is {self._about()}.", "state": self._state}
        observation, reward, is_terminated, is_truncated, _ = self._made.step(action)
        done = bool(is_terminated or is_truncated)
        self._state = named(self._json(observation))
        return {"messages": self._text(observation), "reward": float(reward), "done": done, "state": self._state}

    def close(self) -> None:
        """Close the environment."""
        self._made.close()

    def _action(self, text: str) -> Any:
        space = self._made.action_space
        if isinstance(space, self._spaces.Discrete):
            # What comes last is what the model has decided on.
            action: Any = int(_NUMBER.findall(text)[-1])
        elif isinstance(space, self._spaces.Text):
            action = text.strip()
        else:
            (action,) = space.from_jsonable([json.loads(text)])
        if not space.contains(action):
            raise ValueError
        return action

    def _about(self) -> str:
        space = self._made.action_space
        if isinstance(space, self._spaces.Discrete):
            return f"an integer from {space.start} to {space.start + space.n - 1}"
        return f"JSON for {space}"

    def _text(self, observation: Any) -> str:
        return _COLORED.sub(r"[\1]", str(self._made.render())).strip() if self._draws else self._json(observation)

    def _json(self, observation: Any) -> str:
        return json.dumps(self._made.observation_space.to_jsonable([observation])[0], default=str)
