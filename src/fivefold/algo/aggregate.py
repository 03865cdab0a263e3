"""Response lengths of one update -> the weight of each sample's tokens, so that the loss is a plain sum.

The denominators cover the whole update over all replicas, so the split into micro-batches or ranks does not change the loss.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fivefold.config.methods import LEGACY_AGGREGATE

Aggregate = Callable[[Tensor, int], Tensor]
"""response_lengths_N of the whole update, max_response_tokens -> weight_N of every token of the sample."""


def token_mean(response_lengths_N: Tensor, max_response_tokens: int) -> Tensor:
    """Σ l / Σ tokens: every token has the same weight (DAPO, 2503.14476 equation 8)."""
    lengths_N = response_lengths_N.double()
    return torch.full_like(lengths_N, 1.0) / lengths_N.sum().clamp(min=1)


def seq_mean_token_mean(response_lengths_N: Tensor, max_response_tokens: int) -> Tensor:
    """Mean over samples of the mean over their tokens (GRPO, 2402.03300 equation 3)."""
    lengths_N = response_lengths_N.double()
    return 1.0 / (lengths_N.clamp(min=1) * max(len(lengths_N), 1))


def seq_mean_token_sum(response_lengths_N: Tensor, max_response_tokens: int) -> Tensor:
    """Mean over samples of Σ over their tokens: the likelihood of a response as a whole (RLOO, 2402.14740)."""
    return torch.full_like(response_lengths_N.double(), 1.0 / max(len(response_lengths_N), 1))


def constant_length(response_lengths_N: Tensor, max_response_tokens: int) -> Tensor:
    """Mean over samples of Σ l / longest response allowed (Dr. GRPO, 2503.20783 section 3.2)."""
    lengths_N = response_lengths_N.double()
    return torch.full_like(lengths_N, 1.0 / (max_response_tokens * max(len(lengths_N), 1)))


def micro_batch_token_mean(response_lengths_N: Tensor, max_response_tokens: int) -> Tensor:
    """Mean over micro-batches of Σ l / tokens of the micro-batch. The micro-batch divides by its tokens, so the weight here
    is 1.

    A token's weight then depends on the split into micro-batches. Use it only to reproduce verl's older actor or siiRL.
    """
    return torch.ones_like(response_lengths_N.double())


AGGREGATES: dict[str, Aggregate] = {
    "token-mean": token_mean,
    "seq-mean-token-mean": seq_mean_token_mean,
    "seq-mean-token-sum": seq_mean_token_sum,
    "constant-length": constant_length,
    LEGACY_AGGREGATE: micro_batch_token_mean,
}
