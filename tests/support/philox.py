"""Draws by Philox as its paper writes it down, on a CPU and without Triton: what the kernel of draws must give."""

from __future__ import annotations

import numpy as np
import torch


def philox(seed: int, columns: int, offset: int) -> np.ndarray:
    """The 32 bits of each column by Philox4x32-10 (Salmon et al. 2011, section 3.3)."""
    quarter, low = -(-columns // 4), np.uint64(0xFFFFFFFF)
    counters = [np.arange(quarter, dtype=np.uint64), *(np.full(quarter, part, np.uint64) for part in (offset, 0, 0))]
    keys = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        products = np.uint64(0xD2511F53) * counters[0], np.uint64(0xCD9E8D57) * counters[2]
        highs = [product >> np.uint64(32) for product in products]
        counters = [
            highs[1] ^ counters[1] ^ np.uint64(keys[0]), products[1] & low,
            highs[0] ^ counters[3] ^ np.uint64(keys[1]), products[0] & low,
        ]  # fmt: skip
        keys = [(keys[0] + 0x9E3779B9) & 0xFFFFFFFF, (keys[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return np.concatenate(counters)[:columns]


def scores_of(logits_RV: torch.Tensor, seeds_R, offsets_R) -> torch.Tensor:
    """What each token has in the draw of its row: the largest one is drawn. float64."""
    pairs = zip(map(int, seeds_R), map(int, offsets_R), strict=True)
    noise = np.stack([-np.log1p(-(philox(seed, logits_RV.shape[1], offset) + 0.5) / 2**32) for seed, offset in pairs])
    return logits_RV.double() - torch.from_numpy(noise).log()


def draw_tokens(logits_RV: torch.Tensor, seeds_R, offsets_R) -> torch.Tensor:
    """Takes the place of the kernel's function of this name."""
    tokens_R = scores_of(logits_RV, seeds_R, offsets_R).argmax(-1)
    logprobs_R = logits_RV.log_softmax(-1).gather(1, tokens_R[:, None])[:, 0]
    return torch.stack([tokens_R.int(), logprobs_R.view(torch.int32)])


class Key:
    """A seed and an offset with the methods of a CUDA generator."""

    def __init__(self, device: object = None) -> None:
        self.seed, self.offset = 0, 0

    def manual_seed(self, seed: int) -> Key:
        self.seed, self.offset = seed, 0
        return self

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset
