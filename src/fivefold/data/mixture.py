"""Domains of a data set, mixed in fixed shares in every step: a pure function of seed and position, like PromptLoader."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np

from fivefold.errors import UserError

T = TypeVar("T")


class MixedLoader(Generic[T]):
    """Goes through each domain epoch by epoch, reshuffled in each epoch, and takes a fixed number of each into every step.

    Every item of a domain comes once in each epoch of that domain. The domain's next epoch may start within a step. In a
    step the domains are spread evenly, so that each optimizer step has its share of all of them.
    """

    def __init__(
        self, items: Sequence[T], places: Mapping[str, Sequence[int]], counts: Mapping[str, int], seed: int, shuffle: bool
    ) -> None:
        """`places`: indices in `items` by domain; `counts`: prompts per step by domain.

        Raises ValueError for a domain that has fewer items than a step takes.
        """
        for name, count in counts.items():
            if len(places.get(name, ())) < count:
                raise UserError(
                    f"data.mixture: a step takes {count} prompts of {name!r}, of which there are {len(places.get(name, ()))}"
                )
        self.per_step = sum(counts.values())
        self._items, self._seed, self._shuffle = items, seed, shuffle
        self._places = {name: np.asarray(places[name]) for name in counts}
        self._counts = dict(counts)
        # Item k of n has position (k + 1/2) / n within the step.
        slots = sorted(
            ((2 * k + 1) / (2 * count), order, name, k)
            for order, (name, count) in enumerate(counts.items())
            for k in range(count)
        )
        self._slots = [(name, k) for _, _, name, k in slots]
        self._orders: dict[str, tuple[int, np.ndarray]] = {}

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps that take as many prompts as all domains have together."""
        return sum(map(len, self._places.values())) // self.per_step

    def epoch(self, position: int) -> int:
        """Return the epoch, from 0, of the item at `position` in the whole run."""
        return position // (self.steps_per_epoch * self.per_step)

    def take(self, position: int, count: int) -> list[T]:
        """Return `count` items from `position` on, counted over the whole run."""
        return [self._at(place) for place in range(position, position + count)]

    def _at(self, position: int) -> T:
        step, slot = divmod(position, self.per_step)
        name, k = self._slots[slot]
        places = self._places[name]
        epoch, place = divmod(step * self._counts[name] + k, len(places))
        if name not in self._orders or self._orders[name][0] != epoch:
            order = places.copy()
            if self._shuffle:
                # Seed by the domain's name, so that its order does not depend on the other domains.
                np.random.default_rng([self._seed, epoch, zlib.crc32(name.encode())]).shuffle(order)
            self._orders[name] = (epoch, order)
        return self._items[int(self._orders[name][1][place])]


def places_by_domain(sources: Iterable[str], domain_of: Callable[[str], str]) -> dict[str, list[int]]:
    """Return domain -> indices of its items; `sources` has the data_source of each item."""
    places: dict[str, list[int]] = {}
    for place, source in enumerate(sources):
        places.setdefault(domain_of(source), []).append(place)
    return places
