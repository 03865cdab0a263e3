"""Domains of a data set, mixed in given shares in every step: a pure function of seed and position, as PromptLoader is."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np

T = TypeVar("T")


class MixedLoader(Generic[T]):
    """Goes through each domain epoch by epoch, shuffled anew for each, and takes as many of each into every step.

    Every item of a domain comes once in each epoch of that domain, whose next one follows within the step. In a step the
    domains are spread evenly, so that each optimizer step of it has its part of all.
    """

    def __init__(
        self, items: Sequence[T], places: Mapping[str, Sequence[int]], counts: Mapping[str, int], seed: int, shuffle: bool
    ) -> None:
        """`places`: of each domain's items in `items`; `counts`: of the domains in a step. Raises ValueError for a domain
        that has fewer items than a step takes."""
        for name, count in counts.items():
            if len(places.get(name, ())) < count:
                raise ValueError(
                    f"data.mixture: a step takes {count} prompts of {name!r}, of which there are {len(places.get(name, ()))}"
                )
        self.per_step = sum(counts.values())
        self._items, self._seed, self._shuffle = items, seed, shuffle
        self._places = {name: np.asarray(places[name]) for name in counts}
        self._counts = dict(counts)
        # The k-th of n stands at (k + 1/2) / n of the step.
        slots = sorted(
            ((2 * k + 1) / (2 * count), order, name, k)
            for order, (name, count) in enumerate(counts.items())
            for k in range(count)
        )
        self._slots = [(name, k) for _, _, name, k in slots]
        self._orders: dict[str, tuple[int, np.ndarray]] = {}

    @property
    def steps_per_epoch(self) -> int:
        """Steps that take as many prompts as the domains have together."""
        return sum(map(len, self._places.values())) // self.per_step

    def epoch(self, position: int) -> int:
        """Epoch, from 0, of the item at `position` of the whole run."""
        return position // (self.steps_per_epoch * self.per_step)

    def take(self, position: int, count: int) -> list[T]:
        """`count` items from `position` on, counted over the whole run."""
        return [self._at(place) for place in range(position, position + count)]

    def _at(self, position: int) -> T:
        step, slot = divmod(position, self.per_step)
        name, k = self._slots[slot]
        places = self._places[name]
        epoch, place = divmod(step * self._counts[name] + k, len(places))
        if name not in self._orders or self._orders[name][0] != epoch:
            order = places.copy()
            if self._shuffle:
                # By the domain's name: its order does not depend on the others.
                np.random.default_rng([self._seed, epoch, zlib.crc32(name.encode())]).shuffle(order)
            self._orders[name] = (epoch, order)
        return self._items[int(self._orders[name][1][place])]


def places_by_domain(sources: Iterable[str], domain_of: Callable[[str], str]) -> dict[str, list[int]]:
    """Domain -> the places of its items, of which `sources` has the data_source of each."""
    found: dict[str, list[int]] = {}
    for place, source in enumerate(sources):
        found.setdefault(domain_of(source), []).append(place)
    return found
