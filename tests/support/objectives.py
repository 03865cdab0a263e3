"""What tests of objectives share: which surrogate, ratio and aggregation go together, one replica, a batch as plain lists."""

from __future__ import annotations

from fivefold.algo.aggregate import AGGREGATES
from fivefold.algo.surrogates import SURROGATES
from fivefold.columns import Column
from fivefold.types import TokenBatch

WITHOUT_RATIO = [name for name, row in SURROGATES.items() if row.ratio_reference != "old"]
COMBINATIONS = [
    (surrogate, ratio, aggregate)
    for surrogate, row in SURROGATES.items()
    if not row.pairs
    for ratio in (row.levels or ["token"])
    for aggregate in AGGREGATES
]


class Alone:
    """One replica."""

    def all_reduce_sum(self, sums):
        return sums

    def all_reduce_max(self, number):
        return number


def as_lists(batch: TokenBatch, now=None, entropy=None) -> list[dict[str, list]]:
    now = batch[Column.OLD_LOGPROBS].double() if now is None else now
    samples, start = [], 0
    for length in batch.lengths_N:
        tokens = [t for t in range(start, start + length) if batch.loss_mask_T[t]]
        samples.append(
            {
                "now": [now[t] for t in tokens],
                "old": [float(batch[Column.OLD_LOGPROBS][t]) for t in tokens],
                "ref": [float(batch[Column.REF_LOGPROBS][t]) for t in tokens],
                "engine": [float(batch[Column.ROLLOUT_LOGPROBS][t]) for t in tokens],
                "advantage": [float(batch[Column.ADVANTAGES][t]) for t in tokens],
                "entropy": [0.0 if entropy is None else float(entropy[t]) for t in tokens],
                "marked": [bool(batch[Column.SELECTED][t]) for t in tokens],
            }
        )
        start += length
    return samples
