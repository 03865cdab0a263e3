"""The shares of the loss that the tokens of each optimizer step carry."""

from __future__ import annotations

import pytest
import torch

from fivefold.algo.methods import KL, Correction
from fivefold.algo.objective import make_objective
from fivefold.columns import Column
from fivefold.rollout.packing import pack
from fivefold.rollout.stats import gather_stats
from fivefold.trainer.minibatches import MiniBatches, select_tokens
from tests.rollout.test_packing import PLAN, make_groups
from tests.support import loops

SIZES = [4, 1, 3, 4, 2, 4]


def shares(mesh, penalty: str | None, value: str | None):
    """Of each optimizer step: (length, weight in the surrogate, in the KL, in the critic's loss) of this replica's samples."""
    aggregates = {"aggregate": "token-mean", "penalty_aggregate": penalty, "value_aggregate": value}
    objective = make_objective("ppo", **aggregates, kl=KL(coef=0.1))
    groups = make_groups(SIZES) if mesh.ranks.rank == 0 else []
    stats = gather_stats(groups, mesh.ranks, PLAN)
    batch = pack(groups, stats, mesh.ranks, PLAN)
    weights_of_steps = []
    for mini in MiniBatches(objective)(batch, stats):
        part, rows = mini.batch, []
        for sample in range(len(part.lengths_N)):
            response_T = part.token_index([sample])[part.loss_mask_T[part.token_index([sample])]]
            weights = [
                None if w is None else w[response_T].unique().tolist()
                for w in map(part.columns.get, (Column.LOSS_WEIGHTS, Column.PENALTY_WEIGHTS, Column.VALUE_WEIGHTS))
            ]
            rows.append((len(response_T), *weights))
        weights_of_steps.append(rows)
    return weights_of_steps


@pytest.mark.parametrize("layout", ["d1", "d2"])
def test_each_loss_has_the_denominators_of_the_whole_update(cluster, layout):
    """By hand: a token mean is 1 / tokens, a mean over sequences 1 / (samples x length), over all replicas."""
    replicas = cluster.run(shares, f"megatron:{layout}", "seq-mean-token-mean", "seq-mean-token-sum")
    for update in range(PLAN.updates_per_step):
        rows = [row for replica in replicas for row in replica[update]]
        tokens, samples = sum(length for length, *_ in rows), len(rows)
        for length, surrogate, penalty, value in rows:
            assert surrogate == pytest.approx([1 / tokens]) and penalty == pytest.approx([1 / (samples * length)])
            assert value == pytest.approx([1 / samples])


def left_out(mesh, bound: float):
    """Of each optimizer step: (row, log trainer - log engine, left out) of this replica's response tokens."""
    chosen = Correction(reject_divergence={"second_moment": bound})
    objective = make_objective("grpo", rollout_correction=chosen)
    groups = make_groups(SIZES) if mesh.ranks.rank == 0 else []
    stats = gather_stats(groups, mesh.ranks, PLAN)
    batch = pack(groups, stats, mesh.ranks, PLAN)
    assert Column.OLD_LOGPROBS in objective.needs(1)
    # By the token's own log-prob, so that it is the same on whatever replica it is.
    batch[Column.OLD_LOGPROBS] = (
        batch[Column.ROLLOUT_LOGPROBS] + 3 * torch.sin(40 * batch[Column.ROLLOUT_LOGPROBS]) * batch.loss_mask_T
    )
    tokens_of_samples = []
    for mini in MiniBatches(objective)(batch, stats):
        part = select_tokens(mini, objective, None, mesh.ranks, 0)
        gaps_T = part[Column.OLD_LOGPROBS] - part[Column.ROLLOUT_LOGPROBS]
        for place, row in enumerate(part.sample_index_N):
            response_T = [int(t) for t in part.token_index([place]) if part.loss_mask_T[t]]
            tokens_of_samples.append(
                (mini.number, row, gaps_T[response_T].tolist(), part[Column.SELECTED][response_T].tolist())
            )
    return tokens_of_samples


def test_the_tokens_that_are_left_out_are_those_of_the_whole_update_on_every_layout(cluster):
    rows = {
        layout: [row for replica in cluster.run(left_out, f"megatron:{layout}", 1.5) for row in replica]
        for layout in ("d1", "d2")
    }
    assert sorted(rows["d2"]) == sorted(rows["d1"])
    for update in range(PLAN.updates_per_step):
        rows_of_update = sorted(row for row in rows["d1"] if row[0] == update)
        gaps, gone = ([x for row in rows_of_update for x in row[column]] for column in (2, 3))
        assert gone == loops.beyond_second_moment(gaps, 1.5) and 0 < sum(gone) < len(gone) - 1


def test_one_aggregation_is_one_set_of_weights(cluster):
    ((first, *_),) = cluster.run(shares, "megatron:d1", None, None)
    assert all(penalty is None and value is None for *_, penalty, value in first)
    assert torch.tensor([length * weight for length, (weight,), *_ in first]).sum() == pytest.approx(1)
