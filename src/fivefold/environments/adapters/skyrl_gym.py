"""Environments of SkyRL-gym: `skyrl_gym:ID`, or `skyrl_gym:package.module:Class` for one that is not registered."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from .common import Refusal, library, messages_of


def load(name: str, settings: dict[str, Any]) -> Callable[[], Any]:
    """Return what makes an environment."""
    skyrl_gym, omegaconf = library("skyrl_gym", "skyrl-gym"), library("omegaconf", "omegaconf")
    registration = library("skyrl_gym.envs.registration", "skyrl-gym")
    try:
        if ":" in name and name not in registration.registry:
            skyrl_gym.register(id=name, entry_point=name)
        spec = registration.spec(name)
        if isinstance(spec.entry_point, str):
            registration.load_env_creator(spec.entry_point)
    except Exception as error:
        known = ", ".join(registration.registry)
        raise Refusal(
            f"environment.class: skyrl_gym has no environment {name} ({type(error).__name__}: {error}): take one of "
            f"{known}, or name one as skyrl_gym:package.module:Class"
        ) from error
    options = omegaconf.OmegaConf.create(settings["options"])
    return partial(Environment, partial(skyrl_gym.make, name, env_config=options), settings["max_turns"])


class Environment:
    """An environment that is made with the columns of its row."""

    replayable = True

    def __init__(self, make: Any, max_turns: int) -> None:
        self._make, self._max_turns = make, max_turns

    def reset(self, task: dict[str, Any], seed: int) -> list[dict[str, Any]]:
        """Make the environment, and return its first messages."""
        columns = {**task, "max_turns": self._max_turns}
        # Rows for SkyRL have it; those for others have the same answer under another name.
        columns.setdefault("reward_spec", {"method": "rule", "ground_truth": task["ground_truth"]})
        self._made = self._make(extras=columns)
        messages, _ = self._made.init(messages_of(task["prompt"]))
        return list(messages)

    def step(self, message: dict[str, Any]) -> dict[str, Any]:
        """Take a step. What an environment would put in the place of the model's text is left out: it was not sampled."""
        step = self._made.step(message["content"])
        return {"messages": step["observations"], "reward": float(step["reward"]), "done": bool(step["done"])}

    def close(self) -> None:
        """Close the environment."""
        self._made.close()
