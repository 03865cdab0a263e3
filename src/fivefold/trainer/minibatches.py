"""Batch of a step -> one mini-batch per optimizer step, with each token's share of its loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fivefold.algo.correction import beyond_second_moment
from fivefold.algo.objective import Objective
from fivefold.columns import Column
from fivefold.distributed.ranks import Ranks
from fivefold.interfaces import Model
from fivefold.rollout.stats import deal_to_updates
from fivefold.types import RolloutStats, TokenBatch


@dataclass(frozen=True)
class MiniBatch:
    """Data of one optimizer step.

    Example: the second of two optimizer steps on four samples, of which this replica owns the last: `rows_N = [2, 3]`,
    `batch.sample_index_N = [3]`, `number = 1`.
    """

    batch: TokenBatch
    """Tokens of this replica, with their loss weights."""
    rows_N: Tensor
    """Rows in the step's stats of all its samples, over all replicas."""
    number: int
    """Index within the step, counted over all epochs."""
    stats: RolloutStats
    source: TokenBatch
    """The step's batch, from which this one is selected."""
    places: list[int]
    """Indices of its samples in `source`."""


@dataclass(frozen=True)
class MiniBatches:
    """Divides a step's batch into optimizer steps, repeated `ppo_epochs` times."""

    objective: Objective
    ppo_epochs: int = 1

    def __call__(self, batch: TokenBatch, stats: RolloutStats, step: int = 0) -> Iterator[MiniBatch]:
        """Yield the mini-batches of a step, which is counted from 0."""
        number_N = stats.minibatch_N[batch.sample_index_N]
        for epoch in range(self.ppo_epochs):
            for number in range(stats.minibatches):
                rows_N = (stats.minibatch_N == number).nonzero()[:, 0]
                places = [int(place) for place in (number_N == number).nonzero()[:, 0]]
                place = epoch * stats.minibatches + number
                update = (step * self.ppo_epochs + epoch) * stats.minibatches + number + 1
                weighted = self._weighted(batch.select(places), rows_N, stats, update)
                yield MiniBatch(weighted, rows_N, place, stats, batch, places)

    def _weighted(self, part: TokenBatch, rows_N: Tensor, stats: RolloutStats, update: int) -> TokenBatch:
        """Return the tokens with loss weights normalized over all replicas; `update` counts the run's optimizer steps from
        1."""
        trajectories, row_M = stats.trajectories, stats.trajectory_of_N[rows_N].unique()
        lengths_N = trajectories.response_lengths_N[row_M]

        def on_tokens(weights_M: Tensor | None) -> Tensor | None:
            if weights_M is None:
                return None
            all_M = torch.zeros(len(trajectories), dtype=torch.float64)
            all_M[row_M] = weights_M
            return part.expand_to_tokens(all_M[stats.trajectory_of_N[part.sample_index_N]])

        kept_N, expert_N = self.objective.kept(stats), trajectories.expert_N
        kept_N, expert_N = (None if marked_N is None else marked_N[row_M] for marked_N in (kept_N, expert_N))
        arguments = (lengths_N, stats.max_response_tokens, kept_N, expert_N)
        return replace(
            part.with_columns(
                {
                    Column.LOSS_WEIGHTS: on_tokens(self.objective.loss_weights(*arguments, update)),
                    Column.PENALTY_WEIGHTS: on_tokens(self.objective.penalty_weights(*arguments)),
                    Column.VALUE_WEIGHTS: on_tokens(self.objective.value_weights(*arguments[:3])),
                }
            ),
            update_tokens=int(lengths_N.sum()),
            expert_tokens=0 if expert_N is None else int(lengths_N[expert_N].sum()),
            per_micro_batch=self.objective.aggregation.per_micro_batch,
        )


def divided(batch: TokenBatch, stats: RolloutStats, updates: int) -> Iterator[tuple[Tensor, list[int]]]:
    """Yield (rows of all samples, indices of this replica's samples in the batch) for each of at most `updates` optimizer
    steps.

    Each takes whole groups. This is for a model whose number of optimizer steps differs from the policy's.
    """
    number_N = deal_to_updates(stats.group_N, updates)
    local_N = number_N[batch.sample_index_N]
    for number in range(int(number_N.max()) + 1):
        yield (number_N == number).nonzero()[:, 0], (local_N == number).nonzero()[:, 0].tolist()


def without_skipped(mini: MiniBatch) -> MiniBatch:
    """Return the mini-batch without the samples that add nothing to the policy's loss; the others keep their weights."""
    skipped_N, part = mini.stats.skipped_N, mini.batch
    if skipped_N is None or not skipped_N[mini.rows_N].any():
        return mini
    places: dict[bool, list[int]] = {False: [], True: []}
    for place, row in enumerate(part.sample_index_N):
        places[bool(skipped_N[row])].append(place)
    left_out = part.select(places[True])
    assert not (left_out[Column.ADVANTAGES] * left_out[Column.LOSS_WEIGHTS]).any(), (
        "a sample that has an advantage was to be skipped"
    )
    rows_N = mini.rows_N[~skipped_N[mini.rows_N]]
    update_tokens = int(mini.stats.response_lengths_N[rows_N].sum())
    return replace(mini, batch=replace(part.select(places[False]), update_tokens=update_tokens), rows_N=rows_N)


def skipped_share(mini: MiniBatch) -> dict[str, float]:
    """Metric: share of a mini-batch's tokens that the policy's passes skip; empty if none may be skipped."""
    if (skipped_N := mini.stats.skipped_N) is None:
        return {}
    lengths_N = mini.stats.lengths_N[mini.rows_N]
    return {"policy/skipped_fraction": float(lengths_N[skipped_N[mini.rows_N]].sum() / lengths_N.sum())}


def select_tokens(mini: MiniBatch, objective: Objective, policy: Model, ranks: Ranks, seed: int) -> TokenBatch:
    """Return the mini-batch with the tokens that the surrogate or the correction selects over all of it.

    The selection is the same on every layout. Tokens that the correction selects are left out of the loss. Collective.
    """
    gradient, part = objective.gradient, mini.batch
    bound = gradient.correction.second_moment
    if bound is not None:
        (difference_S,) = _gather(mini, (part[Column.OLD_LOGPROBS] - part[Column.ROLLOUT_LOGPROBS])[None], ranks)
        return part.with_columns({Column.SELECTED: _local_part(mini, beyond_second_moment(difference_S, bound))})
    if not gradient.surrogate.selects:
        return part
    # Before the first update the current and the old policy are the same; later updates need a new forward pass.
    now_T = part.columns.get(Column.OLD_LOGPROBS) if mini.number == 0 else None
    now_T = policy.forward(part) if now_T is None else now_T
    rows_3T = torch.stack([now_T, gradient.old_logprobs(now_T, part), part[Column.ADVANTAGES]])
    now_S, old_S, advantages_S = _gather(mini, rows_3T, ranks)
    uniform_S = torch.rand(len(now_S), generator=torch.Generator().manual_seed(seed))
    selected_T = _local_part(mini, gradient.surrogate.select_tokens(now_S, old_S, advantages_S, uniform_S))
    if mini.number == 0:
        # Current and old policy are the same here. Without old log-probs the loss compares the pass with itself. Those of
        # another pass differ by rounding, and the gradient of |log ratio| depends only on the sign of that difference.
        part = part.with_columns({Column.OLD_LOGPROBS: None})
    return part.with_columns({Column.SELECTED: selected_T})


def _gather(mini: MiniBatch, rows_KT: Tensor, ranks: Ranks) -> Tensor:
    """[K, S] response tokens of all replicas, in the order of the step's samples. Collective."""
    stats, rows_N = mini.stats, mini.rows_N
    gathered_SK = torch.cat(ranks.all_gather_replicas(rows_KT[:, mini.batch.loss_mask_T].T.contiguous()))
    by_owner_N = rows_N[stats.owner_N[rows_N].argsort(stable=True)]
    pieces = dict(zip(by_owner_N.tolist(), gathered_SK.split(stats.response_lengths_N[by_owner_N].tolist()), strict=True))
    return torch.cat([pieces[row] for row in rows_N.tolist()]).T


def _local_part(mini: MiniBatch, chosen_S: Tensor) -> Tensor:
    """[T] this replica's part of `chosen_S`, which covers all response tokens of the mini-batch."""
    part, rows_N = mini.batch, mini.rows_N
    chosen_by_row = dict(zip(rows_N.tolist(), chosen_S.split(mini.stats.response_lengths_N[rows_N].tolist()), strict=True))
    selected_T = torch.zeros_like(part.loss_mask_T)
    if part.sample_index_N:
        selected_T[part.loss_mask_T] = torch.cat([chosen_by_row[row] for row in part.sample_index_N])
    return selected_T
