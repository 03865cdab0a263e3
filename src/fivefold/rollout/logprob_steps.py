"""Decides in which steps the engine returns log-probs, for `engine.logprobs: tenth_step`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from fivefold.types import Sampling

TENTH = 10
"""Number of steps of which one has log-probs."""


@dataclass
class LogprobSteps:
    """Requests log-probs in every tenth step, while the gate is armed, and in the first step after a start or restart."""

    is_armed: Callable[[], bool]
    """Returns whether the gate still has to compare log-probs."""
    restarts: Callable[[], int]
    """Returns how often the engine's servers were started again; the same on all ranks."""
    _decided: dict[int, bool] = field(default_factory=dict, init=False)
    """Step -> whether it has log-probs: a step is decided once, as its samples are compared together."""
    _restarts: int | None = field(default=None, init=False)

    def of(self, sampling: Sampling, step: int) -> Sampling:
        """Return the sampling parameters for this step. Collective: every rank decides the same."""
        if step not in self._decided:
            restarts = self.restarts()
            self._decided[step] = step % TENTH == 0 or self.is_armed() or restarts != self._restarts
            self._restarts = restarts
        return replace(sampling, logprobs=self._decided[step])
