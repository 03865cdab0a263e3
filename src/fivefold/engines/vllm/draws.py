"""Draws the tokens of all requests with a random key in one launch; vLLM launches a kernel for each of them in every step.

No vLLM is imported before `draw_at_once` is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fivefold.backend.kernels import serve

PER_DRAW = 4
"""How far a draw advances the offset of a request's generator: vLLM takes as much back if it discards a token."""
MARK = 1 << 40
"""Offset of a generator whose own offset is kept here: another one shows what vLLM has taken back since."""
_FEWEST = 4096
"""Number of generators that are kept at least, counting those of requests that have ended."""


class DrawsAtOnce:
    """Takes the place of `random_sample` in vLLM's sampler.

    A token depends on the key of its request and on the number of tokens drawn before it, whatever else is in the batch, as
    with vLLM's own loop, but the numbers are others than vLLM's. Offsets of generators are counted in one array: to set each
    of them in every step takes longer than to draw.
    """

    def __init__(self, original: Callable[..., Tensor]) -> None:
        self._original = original
        self._slots: dict[torch.Generator, int] = {}
        self._seeds, self._offsets = np.zeros(0, np.uint64), np.zeros(0, np.int64)
        self._drawn: list[torch.Generator] = []
        self._drawn_slots = np.zeros(0, np.int64)

    def __call__(self, probs_RV: Tensor, generators: Mapping[int, torch.Generator], *options: Any, **named: Any) -> Tensor:
        """Returns the drawn token of each row; `generators`: row -> the generator of its request, which is advanced."""
        if not generators or any(options) or any(named.values()) or not serve(probs_RV):
            return self._original(probs_RV, generators, *options, **named)
        from fivefold.backend.kernels.noise import divide_by_noise

        slots = self._slots_of([*generators.values()])
        divide_by_noise(probs_RV, [*generators], self._seeds[slots], self._offsets[slots])
        self._offsets[slots] += PER_DRAW
        if len(generators) < len(probs_RV):
            others = [row for row in range(len(probs_RV)) if row not in generators]
            index = torch.tensor(others).to(probs_RV.device, non_blocking=True)
            rest = probs_RV.index_select(0, index)
            probs_RV.index_copy_(0, index, rest / torch.empty_like(rest).exponential_())
        return probs_RV.argmax(dim=-1)

    def _slots_of(self, generators: list[torch.Generator]) -> np.ndarray:
        """Returns the places of seeds and offsets of these generators, without what vLLM has discarded."""
        if generators != self._drawn:
            if len(self._slots) > max(_FEWEST, 4 * len(generators)):
                self._forget()
            if added := [one for one in generators if one not in self._slots]:
                self._add(added)
            self._drawn_slots = np.fromiter((self._slots[one] for one in generators), np.int64, len(generators))
            self._drawn = generators
        shown = [one.get_offset() for one in generators]
        if shown.count(MARK) < len(shown):
            for one, slot, offset in zip(generators, self._drawn_slots, shown, strict=True):
                if offset != MARK:
                    self._offsets[slot] += offset - MARK
                    one.set_offset(MARK)
        return self._drawn_slots

    def _add(self, generators: list[torch.Generator]) -> None:
        self._slots |= {one: len(self._slots) + place for place, one in enumerate(generators)}
        seeds, offsets = [one.initial_seed() for one in generators], [one.get_offset() for one in generators]
        self._seeds = np.append(self._seeds, np.array(seeds, np.uint64))
        self._offsets = np.append(self._offsets, np.array(offsets, np.int64))
        for one in generators:
            one.set_offset(MARK)

    def _forget(self) -> None:
        """Give all generators their offsets back: a request that was interrupted comes with its own again."""
        for one, slot in self._slots.items():
            one.set_offset(int(self._offsets[slot]) + one.get_offset() - MARK)
        self._slots, self._seeds, self._offsets = {}, self._seeds[:0], self._offsets[:0]


def draw_at_once() -> None:
    """Let vLLM's sampler in this process draw for all requests with a key at once, on GPUs with Triton."""
    from vllm.v1.sample.ops import topk_topp_sampler as sampler

    original = getattr(sampler, "random_sample", None)
    if original is not None and not isinstance(original, DrawsAtOnce):
        sampler.random_sample = DrawsAtOnce(original)
