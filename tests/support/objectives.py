"""What tests of objectives share: which surrogate, ratio and aggregation go together, one replica, a batch as plain lists."""

from __future__ import annotations

from fivefold.config import methods
from fivefold.types import TokenBatch

WITHOUT_RATIO = [name for name, row in methods.SURROGATES.items() if row.ratio_reference != "old"]
COMBINATIONS = [
    (surrogate, ratio, aggregate)
    for surrogate, row in methods.SURROGATES.items()
    if not row.pairs
    for ratio in (row.levels or ["token"])
    for aggregate in methods.AGGREGATES
]


class Alone:
    """One replica."""

    def all_reduce_sum(self, sums):
        return sums

    def all_reduce_max(self, number):
        return number


def as_lists(batch: TokenBatch, now=None, entropy=None) -> list[dict[str, list]]:
    now = batch.old_logprobs_T.double() if now is None else now
    found, start = [], 0
    for length in batch.lengths_N:
        tokens = [t for t in range(start, start + length) if batch.loss_mask_T[t]]
        found.append(
            {
                "now": [now[t] for t in tokens],
                "old": [float(batch.old_logprobs_T[t]) for t in tokens],
                "ref": [float(batch.ref_logprobs_T[t]) for t in tokens],
                "engine": [float(batch.rollout_logprobs_T[t]) for t in tokens],
                "advantage": [float(batch.advantages_T[t]) for t in tokens],
                "entropy": [0.0 if entropy is None else float(entropy[t]) for t in tokens],
                "marked": [bool(batch.selected_T[t]) for t in tokens],
            }
        )
        start += length
    return found
