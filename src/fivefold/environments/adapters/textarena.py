"""Games of TextArena for one player: `textarena:ID`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from .common import Refusal, library, named, with_observation


def load(name: str, settings: dict[str, Any]) -> Callable[[], Any]:
    """Return what makes a game; plays the beginning of one first."""
    textarena = library("textarena", "textarena")
    try:
        Environment(textarena, name, settings["options"]).reset({"prompt": ""}, 0)
    except Exception as error:
        raise Refusal(
            f"environment.class: textarena cannot make a game {name} for one player with environment.options "
            f"{settings['options']}: {type(error).__name__}: {error}"
        ) from error
    return partial(Environment, textarena, name, settings["options"])


class Environment:
    """A game; the model reads what is new, where the library's own wrappers write everything again at each turn."""

    replayable = True

    def __init__(self, textarena: Any, name: str, options: dict[str, Any]) -> None:
        self._player_action = textarena.ObservationType.PLAYER_ACTION
        self._made = self._game = textarena.make(name, **options)
        while isinstance(self._game, textarena.Wrapper):
            self._game = self._game.env

    def reset(self, task: dict[str, Any], seed: int) -> list[dict[str, Any]]:
        """Return the row's prompt with that of the game."""
        self._made.reset(num_players=1, seed=seed)
        return with_observation(task["prompt"], self._new())

    def step(self, message: dict[str, Any]) -> dict[str, Any]:
        """Play a move; the last one has the reward of the game."""
        done, _ = self._made.step(action=message["content"])
        text = self._new()
        if not done:
            return {"messages": text or "Continue.", "state": named(text)}
        rewards, _ = self._game.close()
        return {"messages": text, "reward": float((rewards or {}).get(0, 0.0)), "done": True, "state": named(text)}

    def _new(self) -> str:
        _, observations = self._game.get_observation()
        return "\n".join(text for _, text, kind in observations if kind is not self._player_action)
