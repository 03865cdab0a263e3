"""Draws the tokens of all requests with a random key in one launch; vLLM launches a kernel for each of them in every step.

No vLLM is imported before `draw_at_once` is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fivefold.backend.kernels import serve

PER_DRAW = 4
"""How far a draw advances the offset of a request's generator: vLLM takes as much back if it discards a token."""


class DrawsAtOnce:
    """Takes the place of `random_sample` in vLLM's sampler.

    A token depends on the key of its request and on the number of tokens drawn before it, whatever else is in the batch, as
    with vLLM's own loop, but the numbers are others than vLLM's.
    """

    def __init__(self, original: Callable[..., Tensor]) -> None:
        self._original = original

    def __call__(self, probs_RV: Tensor, generators: Mapping[int, torch.Generator], *options: Any, **named: Any) -> Tensor:
        """Returns the drawn token of each row; `generators`: row -> the generator of its request, which is advanced."""
        if not generators or any(options) or any(named.values()) or not serve(probs_RV):
            return self._original(probs_RV, generators, *options, **named)
        from fivefold.backend.kernels.noise import divide_by_noise

        offsets = [generator.get_offset() for generator in generators.values()]
        divide_by_noise(probs_RV, [*generators], [one.initial_seed() for one in generators.values()], offsets)
        for generator, offset in zip(generators.values(), offsets, strict=True):
            generator.set_offset(offset + PER_DRAW)
        if others := [row for row in range(len(probs_RV)) if row not in generators]:
            index = torch.tensor(others).to(probs_RV.device, non_blocking=True)
            rest = probs_RV.index_select(0, index)
            probs_RV.index_copy_(0, index, rest / torch.empty_like(rest).exponential_())
        return probs_RV.argmax(dim=-1)


def draw_at_once() -> None:
    """Let vLLM's sampler in this process draw for all requests with a key at once, on GPUs with Triton."""
    from vllm.v1.sample.ops import topk_topp_sampler as sampler

    original = getattr(sampler, "random_sample", None)
    if original is not None and not isinstance(original, DrawsAtOnce):
        sampler.random_sample = DrawsAtOnce(original)
