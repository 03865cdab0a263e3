"""Order of the prompts: a pure function of seed and position, so that a resumed run takes the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np

from fivefold.errors import UserError

T = TypeVar("T")


class Loader(Protocol[T]):
    """Provides the items of a run by their position, over all epochs."""

    @property
    def steps_per_epoch(self) -> int: ...
    def epoch(self, position: int) -> int: ...
    def take(self, position: int, count: int) -> list[T]: ...


class PromptLoader(Generic[T]):
    """Goes through the items epoch by epoch, reshuffled in each; items that do not fill a step at the end are left out.

    Without `shuffle` they are the same ones in every epoch.
    """

    def __init__(self, items: Sequence[T], per_step: int, seed: int, shuffle: bool) -> None:
        if len(items) < per_step:
            raise UserError(
                f"data.prompts_per_step must not be larger than the training set: got {per_step} for {len(items)} prompts"
            )
        self.per_step = per_step
        self._items, self._seed, self._shuffle = items, seed, shuffle
        self._order: tuple[int, np.ndarray] | None = None

    @property
    def steps_per_epoch(self) -> int:
        return len(self._items) // self.per_step

    def epoch(self, position: int) -> int:
        """Return the epoch, from 0, of the item at `position` in the whole run."""
        return position // (self.steps_per_epoch * self.per_step)

    def take(self, position: int, count: int) -> list[T]:
        """Return `count` items from `position` on, counted over all epochs."""
        return [self._at(place) for place in range(position, position + count)]

    def _at(self, position: int) -> T:
        epoch, place = divmod(position, self.steps_per_epoch * self.per_step)
        if self._order is None or self._order[0] != epoch:
            order = np.arange(len(self._items))
            if self._shuffle:
                np.random.default_rng([self._seed, epoch]).shuffle(order)
            self._order = (epoch, order)
        return self._items[int(self._order[1][place])]
