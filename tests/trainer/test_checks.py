"""Checks that end a run."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from fivefold.columns import Column
from fivefold.types import TokenBatch

VERSION = 4


class Scorer:
    """The models of a run whose trainer is `gap` below the engine."""

    def __init__(self, gap: float) -> None:
        self.policy, self.gap, self.scored = SimpleNamespace(version=VERSION), gap, []

    def annotate(self, batch: TokenBatch, needs: frozenset[Column]) -> None:
        assert needs == {Column.OLD_LOGPROBS}
        self.scored += batch.sample_index_N
        batch[Column.OLD_LOGPROBS] = batch[Column.ROLLOUT_LOGPROBS] - self.gap


def batch_of(versions: list[int]) -> TokenBatch:
    """Two samples of a prompt's token and two responses'; `versions` of the first's, the second has the older."""
    return TokenBatch(
        torch.tensor([5, 6, 7] * 2),
        torch.tensor([False, True, True] * 2),
        [3, 3],
        [0, 1],
        columns={
            Column.ROLLOUT_LOGPROBS: torch.tensor([0.0, -1.0, -1.0] * 2),
            Column.VERSION: torch.tensor([0, *versions, 0, 3, 3]),
        },
    )


def compared(
    mesh,
    gap: float,
    versions: list[int],
    skipped: list[bool] | None = None,
    steps: int = 1,
    kl: float = 1e-3,
    diff: float | None = None,
):
    """(what the gate still needs, what it has logged, with which error it ended the run, what was scored for it)."""
    from fivefold.trainer.checks import Bounds, LogprobGate

    messages: list[str] = []
    gate = LogprobGate(mesh.ranks, Bounds(kl, diff), is_open=False, log=messages.append)
    assert gate.needs
    models = Scorer(gap)
    stats = SimpleNamespace(skipped_N=None if skipped is None else torch.tensor(skipped))
    try:
        for _ in range(steps):
            batch = batch_of(versions)
            batch[Column.OLD_LOGPROBS] = batch[Column.ROLLOUT_LOGPROBS] - gap
            if skipped is not None:
                # As the trainer leaves it: no log-probs of what it does not train on.
                batch[Column.OLD_LOGPROBS] = torch.where(
                    torch.tensor(skipped).repeat_interleave(3), 0.0, batch[Column.OLD_LOGPROBS]
                )
            gate.check(batch, stats, models)
    except RuntimeError as error:
        return list(gate.needs), messages, str(error), models.scored
    return list(gate.needs), messages, "", models.scored


@pytest.mark.parametrize(
    ("gap", "versions", "says"),
    [
        (0.0, [4, 4], ""),
        (0.5, [4, 4], f"a KL divergence of {math.exp(-0.5) - 0.5:.3g} a token, 0.5 on average, over 2 tokens"),
        (0.5, [4, 3], "over 1 tokens, more than engine.max_logprob_kl = 0.001"),
        (math.nan, [4, 4], "a KL divergence of nan"),
    ],
)
def test_what_the_latest_weights_have_sampled_is_compared_once(cluster, gap, versions, says):
    ((needs, messages, error, scored),) = cluster.run(compared, "megatron:d1", gap, versions, None, 2)
    assert needs == [] and says in error and bool(says) == bool(error) and not scored
    assert len(messages) == (not says)


def test_one_token_that_is_far_off_counts_as_one_nat(cluster):
    ((_, _, error, _),) = cluster.run(compared, "megatron:d1", -9.0, [4, 4])
    assert f"a KL divergence of {math.e - 2:.3g} a token, 9 on average" in error


def test_the_mean_difference_is_looked_at_where_it_has_a_bound(cluster):
    for most, is_above in ((0.06, False), (0.04, True)):
        ((_, _, error, _),) = cluster.run(compared, "megatron:d1", 0.05, [4, 4], None, 1, 0.1, most)
        assert ("more than engine.max_logprob_diff = 0.04:" in error) is is_above


def test_a_step_of_older_weights_leaves_the_gate_armed(cluster):
    ((needs, messages, error, scored),) = cluster.run(compared, "megatron:d1", 0.5, [3, 3], None, 2)
    assert needs == [Column.OLD_LOGPROBS] and not (messages or error or scored)


def test_a_step_without_an_advantage_has_some_of_its_samples_compared(cluster):
    """Its log-probs are computed for that, of what the latest weights have sampled alone."""
    ((needs, _, error, scored),) = cluster.run(compared, "megatron:d1", 0.5, [4, 4], [True, True])
    assert needs == [] and "0.5 on average, over 2 tokens" in error and scored == [0]
    ((needs, messages, error, _),) = cluster.run(compared, "megatron:d1", 0.0, [4, 4], [True, True])
    assert needs == [] and len(messages) == 1 and not error


def probed(mesh, gap: float, versions: list[int]):
    """(what the gate still needs, batches that were sampled for it, error) after two steps of older samples."""
    from fivefold.trainer.checks import Bounds, LogprobGate

    sampled = []

    def probe():
        sampled.append(batch_of(versions))
        return sampled[-1], SimpleNamespace(skipped_N=None)

    gate = LogprobGate(mesh.ranks, Bounds(1e-3), is_open=False, log=lambda line: None, probe=probe)
    error = ""
    try:
        for _ in range(2):
            gate.probe(Scorer(gap))
            older = batch_of([3, 3])
            older[Column.OLD_LOGPROBS] = older[Column.ROLLOUT_LOGPROBS] + 9
            gate.check(older, SimpleNamespace(skipped_N=None), Scorer(gap))
    except RuntimeError as fault:
        error = str(fault)
    return list(gate.needs), len(sampled), error


@pytest.mark.parametrize(
    ("gap", "versions", "wanted"), [(0.0, [4, 4], (1, "")), (0.5, [4, 4], (1, "0.5 on average")), (0.5, [3, 3], (2, ""))]
)
def test_a_run_of_older_samples_is_compared_by_a_probe_before_its_first_step(cluster, gap, versions, wanted):
    """Again before the next one where the probe had nothing to compare."""
    ((needs, sampled, error),) = cluster.run(probed, "megatron:d1", gap, versions)
    assert sampled == wanted[0] and wanted[1] in error and bool(wanted[1]) == bool(error)
    assert needs == ([Column.OLD_LOGPROBS] if versions == [3, 3] else [])


# --- adapters --------------------------------------------------------------------------------------------------------


def guarded(mesh, lost: float | None, max_lost: float | None, version: int):
    from fivefold.trainer.checks import AdapterGuard

    messages, metrics, error = [], {}, ""
    guard = AdapterGuard(lambda: lost, mesh.ranks, max_lost, "bfloat16", metrics.update, messages.append)
    try:
        guard.check(version)
    except RuntimeError as fault:
        error = str(fault)
    return metrics, messages, error


@pytest.mark.parametrize(
    ("numbers", "wanted"),
    [
        ((None, 0.2, 10), (None, False, False)),
        ((0.05, None, 3), (0.05, False, False)),
        ((0.62, None, 30), (0.62, True, False)),
        ((0.96, 0.2, 9), (0.96, True, False)),
        ((0.62, 0.2, 10), (0.62, True, True)),
        ((0.14, 0.2, 10), (0.14, True, False)),
    ],
)
def test_a_loss_of_adapters_is_recorded_reported_and_ends_a_run_where_asked(cluster, numbers, wanted):
    ((metrics, messages, error),) = cluster.run(guarded, "megatron:d1", *numbers)
    value, is_said, ends = wanted
    assert metrics == ({} if value is None else {"rollout/lora_lost": value})
    assert bool(messages) == is_said and all(f"{value:.0%} of what the adapters add is lost" in line for line in messages)
    assert ("policy.lora.max_lost = 0.2 ends the run" in error) is ends


def compared_by_turn(mesh, gaps: list[float], kl: float) -> str:
    """The gate's error, or what it logs, for two samples of two turns of one token with these gaps."""
    from fivefold.trainer.checks import Bounds, LogprobGate

    messages: list[str] = []
    batch = batch_of([VERSION, VERSION])
    batch[Column.VERSION] = torch.full((6,), VERSION)
    batch[Column.TURN] = torch.tensor([-1, 0, 1] * 2)
    batch[Column.OLD_LOGPROBS] = batch[Column.ROLLOUT_LOGPROBS] - torch.tensor([9.0, *gaps] * 2)
    gate = LogprobGate(mesh.ranks, Bounds(kl), is_open=False, log=messages.append)
    try:
        gate.check(batch, SimpleNamespace(skipped_N=None), Scorer(0.0))
    except RuntimeError as error:
        return str(error)
    return messages[0]


def test_the_first_turn_beyond_the_bound_is_named(cluster):
    def k3(gap: float) -> str:
        return f"{math.exp(-gap) - 1 + gap:.3g}"

    (error,) = cluster.run(compared_by_turn, "megatron:d1", [0.0, 0.5], 0.06)
    # Over both turns the divergence is half of that, and below the bound.
    assert f"differ from turn 2 on from the trainer's by a KL divergence of {k3(0.5)} a token" in error
    (error,) = cluster.run(compared_by_turn, "megatron:d1", [0.5, 0.5], 0.06)
    assert "from turn 1 on" in error and "over 2 tokens" in error
    (error,) = cluster.run(compared_by_turn, "megatron:d1", [0.1, 0.1], 0.06)
    assert f"agree with the trainer's: a KL divergence of {k3(0.1)} a token, 0.1 on average, over 4 tokens" in error
