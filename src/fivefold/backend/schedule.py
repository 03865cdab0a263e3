"""The learning rate of each optimizer step."""

from __future__ import annotations

import math
from typing import Any, Protocol

from fivefold.config.learners import OptimizerConfig


class HasGroups(Protocol):
    """An optimizer, or several of them with one list of parameter groups."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...


class Schedule:
    """Sets the rate of every parameter group after each optimizer step, for the next one.

    Of w warm-up steps, step k is k/w of the way from `warmup_init_lr` to `lr`, or (k - 1)/w with `warmup_from: 0`. A group
    may have a rate (`max_lr`, `min_lr`) or a factor of the weight decay (`wd_mult`) of its own.
    """

    def __init__(
        self, optimizer: HasGroups, settings: OptimizerConfig, total_updates: int, updates_per_step: int = 1
    ) -> None:
        self.optimizer, self._settings, self._updates_per_step = optimizer, settings, updates_per_step
        counts = {"update": 1, "step": updates_per_step}
        self._updates_per_count = counts[per] if isinstance(per := settings.schedule_per, str) else per
        total = total_updates // self._updates_per_count
        self._warmup = int(settings.warmup_steps if settings.warmup_steps >= 1 else settings.warmup_steps * total)
        decay_steps = total if settings.decay_steps is None else settings.decay_steps
        self._decay = max(decay_steps, self._warmup + 1)
        self.num_steps = 0
        """Optimizer steps taken."""
        self._position = 0.0
        """`num_steps`, converted to this run's `updates_per_step` if the run before a resume had another."""
        self.step(0)

    def step(self, updates: int) -> None:
        """Count optimizer steps and set the rates of the next one."""
        self.num_steps += updates
        self._position += updates
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate(group.get("max_lr", self._settings.lr), group.get("min_lr", self._settings.min_lr))
            group["weight_decay"] = self._settings.weight_decay * group.get("wd_mult", 1.0)

    def _rate(self, highest: float, lowest: float) -> float:
        """Return the rate of update number `_position`."""
        settings = self._settings
        count = max(0, math.ceil(self._position / self._updates_per_count) - 1 + settings.warmup_from)
        if self._warmup > 0 and count <= self._warmup:
            return settings.warmup_init_lr + (highest - settings.warmup_init_lr) * float(count) / float(self._warmup)
        if settings.schedule == "constant":
            return highest
        if count > self._decay:
            return lowest
        share = float(count - self._warmup) / float(self._decay - self._warmup)
        left = 1.0 - share if settings.schedule == "linear" else 0.5 * (math.cos(math.pi * share) + 1.0)
        return lowest + left * (highest - lowest)

    def state_dict(self) -> dict[str, float]:
        """Return the state that a checkpoint stores; everything else comes from the configuration."""
        return {"num_steps": self.num_steps, "position": self._position, "updates_per_step": self._updates_per_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the schedule to a saved state; if it counts in steps, to the same step with another `updates_per_step`."""
        self.num_steps = int(state["num_steps"])
        self._position = float(self.num_steps)
        if "position" in state and (self._settings.schedule_per == "step" or self._settings.depends_on_length):
            self._position = state["position"] * self._updates_per_step / state["updates_per_step"]
        self.step(0)
