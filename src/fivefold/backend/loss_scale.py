"""Dynamic loss scale for float16, so that small gradients do not vanish."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

_GROWTH, _BACKOFF = 2.0, 0.5
CONSTANT = sys.maxsize
"""Window of a scale that never grows."""


class LossScale:
    """The factor of the loss: one for all optimizers of a model.

    It is halved after `hysteresis` overflows of the gradients, and doubled after `window` updates without one.
    """

    def __init__(self, initial: float, lowest: float, window: int, hysteresis: int, device: torch.device) -> None:
        self.scale = torch.tensor([initial], dtype=torch.float32, device=device)
        self._initial, self._lowest, self._window, self._hysteresis = initial, lowest, window, hysteresis
        self._growth_tracker, self._hysteresis_tracker = 0, hysteresis

    @property
    def inv_scale(self) -> Tensor:
        return self.scale.double().reciprocal().float()

    def update(self, found_inf: bool) -> None:
        """Ignore Megatron-Core's call for each of its optimizers: `follow` moves the scale once per update."""

    def follow(self, overflowed: bool) -> None:
        """Move the scale after an update, depending on whether its gradients overflowed."""
        if overflowed:
            self._growth_tracker = 0
            self._hysteresis_tracker -= 1
            if self._hysteresis_tracker <= 0:
                self.scale = (self.scale * _BACKOFF).clamp(min=self._lowest)
            return
        self._growth_tracker += 1
        if self._growth_tracker == self._window:
            self._growth_tracker, self._hysteresis_tracker = 0, self._hysteresis
            self.scale = self.scale * _GROWTH

    @property
    def can_fall(self) -> bool:
        return float(self.scale) > self._lowest

    def state(self) -> dict[str, float]:
        """Return the state that a checkpoint stores."""
        return {
            "initial": self._initial,
            "scale": float(self.scale),
            "growth_tracker": float(self._growth_tracker),
            "hysteresis_tracker": float(self._hysteresis_tracker),
        }

    def load_state(self, state: dict[str, float]) -> None:
        """Continue with a saved scale, unless this run sets a constant or another initial one."""
        if self._window == CONSTANT or state.get("initial", self._initial) != self._initial:
            return
        self.scale.fill_(state["scale"])
        self._growth_tracker, self._hysteresis_tracker = int(state["growth_tracker"]), int(state["hysteresis_tracker"])
