"""Draws the tokens of all requests with a random key at once, with their log-probs; vLLM launches a kernel for each of them.

No vLLM is imported before `keyed_sampler` is called.
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

Drawn = tuple[Tensor | None, Tensor | None]
"""Token of each row, and log-probs of all tokens of each row if they are needed."""


class KeyedSampler:
    """Takes the place of `forward` in vLLM's sampler, and hands over the log-prob of each drawn token.

    With requests that have keys on a GPU, a token depends on the key of its request and on the number of tokens drawn before
    it, whatever else is in the batch, as with vLLM's own loop, but the numbers are others than vLLM's. Offsets of generators
    are counted in one array: to set each of them in every step takes longer than to draw.
    """

    def __init__(self, forward: Callable[..., Any], truncate: Callable[..., Tensor], seed: int, draws: bool = True) -> None:
        """`forward`: vLLM's own; `truncate`: its top-k and top-p; `seed`: of requests without a key; `draws`: whether to
        draw here at all."""
        self.vllms_own, self._truncate, self._draws = forward, truncate, draws
        self._without_key = np.random.default_rng(seed)
        self._slots: dict[torch.Generator, int] = {}
        self._seeds, self._offsets = np.zeros(0, np.uint64), np.zeros(0, np.int64)
        self._drawn: list[torch.Generator] = []
        self._drawn_slots = np.zeros(0, np.int64)
        self._handed_over: Tensor | None = None
        self.needs_all = False
        """Whether vLLM returns log-probs of the next tokens itself."""

    def __call__(self, logits_RV: Tensor, generators: Mapping[int, torch.Generator], k: Any, p: Any) -> Drawn:
        """Returns the drawn token of each row; `generators`: row -> the generator of its request, which is advanced."""
        logprobs_RV = None
        if generators and self._draws and serve(logits_RV):
            from fivefold.backend.kernels.noise import draw_tokens

            logits_RV = self._truncate(logits_RV, k, p)
            drawn_2R = draw_tokens(logits_RV, *self._keys(len(logits_RV), generators))
            tokens_R = drawn_2R[0].long()
            if self.needs_all:
                logprobs_RV = logits_RV.log_softmax(-1)
        else:
            tokens_R, logprobs_RV = self.vllms_own(logits_RV, generators, k, p)
            if logprobs_RV is None:
                return tokens_R, None
            logprobs_R = logprobs_RV.gather(1, tokens_R.long()[:, None])[:, 0]
            drawn_2R = torch.stack([tokens_R.int(), logprobs_R.float().view(torch.int32)])
        self._handed_over = drawn_2R.to("cpu", non_blocking=True)
        return tokens_R, logprobs_RV

    def take(self) -> Tensor | None:
        """Returns int32 [2, R], tokens and the bits of their float32 log-probs, of the draw since the last call.

        The copy from a GPU may be under way: it is there when a later copy of vLLM is.
        """
        drawn_2R, self._handed_over = self._handed_over, None
        return drawn_2R

    def _keys(self, rows: int, generators: Mapping[int, torch.Generator]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the seed and the offset of each row, and advances the latter."""
        slots = self._slots_of([*generators.values()])
        seeds_R, offsets_R = np.empty(rows, np.uint64), np.zeros(rows, np.int64)
        if len(generators) < rows:
            seeds_R[:] = self._without_key.integers(0, 1 << 63, rows, np.uint64)
        keyed = np.fromiter(generators, np.int64, len(generators))
        seeds_R[keyed], offsets_R[keyed] = self._seeds[slots], self._offsets[slots]
        self._offsets[slots] += PER_DRAW
        return seeds_R, offsets_R

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


def keyed_sampler(runner: Any, seed: int) -> KeyedSampler | None:
    """Let the sampler of vLLM's model runner draw by keys and hand over log-probs from now on.

    Returns None for a runner that has another sampler, or that guesses tokens ahead: its rows are not one for each request.
    """
    sampler: Any = getattr(runner, "sampler", None)
    inner = getattr(sampler, "topk_topp_sampler", None)
    if inner is None or getattr(runner, "speculative_config", None) is not None:
        return None
    if isinstance(inner.forward, KeyedSampler):
        return inner.forward
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    keyed = KeyedSampler(inner.forward, apply_top_k_top_p, seed, draws=not getattr(inner, "use_fp64_gumbel", False))
    sample = sampler.sample

    def sample_noted(logits: Tensor, metadata: Any, *arguments: Any, **named: Any) -> Any:
        keyed.needs_all = metadata.max_num_logprobs is not None or bool(getattr(metadata, "logprob_token_ids", None))
        return sample(logits, metadata, *arguments, **named)

    sampler.sample, inner.forward = sample_noted, keyed
    return keyed
