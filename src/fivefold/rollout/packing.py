"""Groups on the ranks that sampled them -> the packed TokenBatch of each replica; samples are exchanged as tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from fivefold.algo.turns import places_of_turns
from fivefold.columns import Column
from fivefold.distributed.ranks import Ranks
from fivefold.rollout.stats import BatchPlan, scored
from fivefold.routes import decode_routes, encode_routes, route_columns
from fivefold.types import Group, RolloutStats, Sample, TokenBatch, Turns

_FIELDS = 4
"""Numbers sent per token: token id, loss mask, log-prob (its bits), version. The numbers of its routes follow."""


def pack(groups: list[Group], stats: RolloutStats, ranks: Ranks, plan: BatchPlan) -> TokenBatch:
    """Return the samples that this replica owns, in the order of `stats`, on all its ranks. Collective.

    Tokens go from the rank that sampled them to one rank of the owner (all-to-all over replicas), and from there to the
    other ranks of the replica (all-gather). So every token crosses each of the two process groups once. `stats` determines
    all sources and sizes, so no sizes are exchanged.

    Example: with `owner_N = [0, 1, 1]` and prompts of one token, replica 1 gets `token_ids_T = [p1, a, b, p2, c]`,
    `lengths_N = [3, 2]`, `sample_index_N = [1, 2]`, wherever the samples came from.
    """
    replicas, replica = ranks.layout.dp, ranks.coords.dp
    source_N, place_N = ranks.dp_of_rank[stats.rank_N], ranks.place_of_rank[stats.rank_N]
    row_N = torch.arange(len(stats))

    def rows(chosen_N: Tensor, *keys: Tensor) -> list[int]:
        """The chosen rows, ordered by the first key, then by the next."""
        ordered_rows = row_N[chosen_N]
        for key_N in reversed(keys):
            ordered_rows = ordered_rows[key_N[ordered_rows].argsort(stable=True)]
        return [int(row) for row in ordered_rows]

    def tokens_by_replica(chosen: list[int], replica_N: Tensor) -> list[int]:
        counts = torch.zeros(replicas, dtype=torch.long).index_add(0, replica_N[chosen], stats.lengths_N[chosen])
        return [int(count) for count in counts]

    used = sorted((group for group in groups if group.is_used), key=lambda group: group.index)
    samples = [(group, sample) for group in used for sample in scored([group])]
    encoded = dict(zip(rows(stats.rank_N == ranks.rank), (_encode(one, plan) for one in samples), strict=True))
    outgoing = rows(stats.rank_N == ranks.rank, stats.owner_N)
    tokens_TF = torch.cat([encoded[row] for row in outgoing] or [_nothing(plan)])
    arrived = outgoing
    if replicas > 1:
        arrived = rows((stats.owner_N == replica) & (place_N == ranks.replica.rank()), source_N)
        counts = tokens_by_replica(outgoing, stats.owner_N)
        tokens_TF = ranks.all_to_all_replicas(tokens_TF, counts, tokens_by_replica(arrived, source_N))
    if ranks.layout.replica_size > 1:
        arrived = rows(stats.owner_N == replica, place_N, source_N)
        tokens_TF = torch.cat(ranks.all_gather_within_replica(tokens_TF))
    pieces = dict(zip(arrived, tokens_TF.split([int(length) for length in stats.lengths_N[arrived]]), strict=True))
    ordered = sorted(arrived)
    return _batch(torch.cat([pieces[row] for row in ordered] or [_nothing(plan)]), ordered, stats, plan)


def pack_dataset(groups: list[Group], plan: BatchPlan) -> TokenBatch:
    """Return the batch of dataset responses that are all on this replica, in their order; no communication."""
    samples = [(group, sample) for group in groups for sample in group.samples]
    pieces = [_encode(one, plan) for one in samples]
    tokens_TF = torch.cat(pieces or [_nothing(plan)])
    return TokenBatch(
        token_ids_T=tokens_TF[:, 0].long(),
        loss_mask_T=tokens_TF[:, 1].bool(),
        lengths_N=[len(piece) for piece in pieces],
        temperature=plan.temperature,
        samples_per_comparison=plan.samples_per_comparison,
    )


def _nothing(plan: BatchPlan) -> Tensor:
    return torch.zeros(0, _FIELDS + (0 if plan.routes is None else route_columns(plan.routes)), dtype=torch.int32)


def _encode(one: tuple[Group, Sample], plan: BatchPlan) -> Tensor:
    """[tokens, fields] of one sample, prompt before response; log-probs keep their bits."""
    group, sample = one
    context = group.context_of(sample)
    prompt, response = len(context), len(sample.token_ids)
    fields = torch.zeros(prompt + response, _FIELDS, dtype=torch.int32)
    fields[:, 0] = torch.tensor(context + sample.token_ids, dtype=torch.int32)
    fields[prompt:, 1] = 1 if sample.loss_mask is None else torch.tensor(sample.loss_mask, dtype=torch.int32)
    if sample.logprobs:
        assert len(sample.logprobs) == response
        logprobs = torch.tensor(sample.logprobs, dtype=torch.float32).view(torch.int32)
        # No engine has sampled an observation: whatever stands there must not reach the loss.
        fields[prompt:, 2] = logprobs * fields[prompt:, 1]
    fields[:, 3] = sample.policy_version
    if sample.token_versions is not None:
        assert len(sample.token_versions) == response
        fields[prompt:, 3] = torch.tensor(sample.token_versions, dtype=torch.int32)
    if plan.routes is not None:
        fields = torch.cat([fields, encode_routes(sample.routes_TLK, prompt + response, plan.routes)], 1)
    return fields


def _batch(tokens_TF: Tensor, rows: list[int], stats: RolloutStats, plan: BatchPlan) -> TokenBatch:
    batch = TokenBatch(
        token_ids_T=tokens_TF[:, 0].long(),
        loss_mask_T=tokens_TF[:, 1].bool(),
        lengths_N=[int(length) for length in stats.lengths_N[rows]],
        sample_index_N=rows,
        temperature=plan.temperature,
        samples_per_comparison=plan.samples_per_comparison,
    )
    return batch.with_columns(
        {
            Column.ROLLOUT_LOGPROBS: tokens_TF[:, 2].contiguous().view(torch.float32) if stats.has_logprobs else None,
            Column.VERSION: tokens_TF[:, 3].long() if stats.versions_differ else None,
            Column.TURN: None if stats.turns is None else _turns(batch, stats, stats.turns),
            Column.ROUTES: None if plan.routes is None else decode_routes(tokens_TF[:, _FIELDS:], plan.routes),
            Column.EXPERT: None if stats.expert_N is None else stats.expert_N[rows].repeat_interleave(stats.lengths_N[rows]),
        }
    )


def _turns(batch: TokenBatch, stats: RolloutStats, turns: Turns) -> Tensor:
    place_S, turn_S = places_of_turns(batch, stats, turns)
    turn_T = torch.full_like(batch.token_ids_T, -1)
    turn_T[place_S] = turns.number_U[turn_S]
    return torch.where(batch.loss_mask_T, turn_T, -1)
