"""What a step learns from comes back from a checkpoint with every field that it had."""

from __future__ import annotations

import dataclasses

import torch

from fivefold.rollout.stats import BatchPlan
from fivefold.trainer import step_work
from fivefold.types import RolloutStats, TokenBatch
from tests.support.cluster import Cluster


def test_a_field_that_is_added_to_batches_or_stats_is_kept_between_two_updates(tmp_path, cluster: Cluster, monkeypatch):
    (again, work) = cluster.run(written_and_read, "megatron:d1", tmp_path)[0]
    assert again.temperature == 0.5 and again.tool_calls == 3 and again.per_micro_batch
    assert torch.equal(again.bonus_T, torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0]))
    assert work.rounds == 4 and torch.equal(work.turns_N, torch.tensor([2, 1]))


def written_and_read(mesh, directory):
    """A batch and stats of classes with fields of their own, written as a checkpoint's `work` and read again."""
    Batch = dataclasses.make_dataclass(
        "Batch", [("bonus_T", torch.Tensor | None, None), ("tool_calls", int, 0)], bases=(TokenBatch,)
    )
    Stats = dataclasses.make_dataclass(
        "Stats", [("turns_N", torch.Tensor | None, None), ("rounds", int, 0)], bases=(RolloutStats,), frozen=True
    )
    step_work.TokenBatch, step_work.RolloutStats = Batch, Stats
    batch = Batch(
        torch.arange(5), torch.tensor([False, True, True, False, True]), [3, 2], temperature=0.5, per_micro_batch=True,
        bonus_T=torch.arange(5) / 4, tool_calls=3,
    )  # fmt: skip
    columns = {item.name: torch.tensor([0, 0]) for item in dataclasses.fields(RolloutStats) if item.type == "Tensor"}
    columns |= {"response_lengths_N": torch.tensor([2, 1]), "lengths_N": torch.tensor([3, 2])}
    stats = Stats(
        **columns, versions_differ=False, max_response_tokens=2, has_logprobs=True, turns_N=torch.tensor([2, 1]), rounds=4
    )
    directory.mkdir(exist_ok=True)
    step_work.StepWork(stats, batch, []).writer(mesh.ranks, {})(directory)
    work = step_work.read_work(directory, mesh.ranks, BatchPlan(temperature=0.9))
    # The classes are this function's: plain numbers go back to the test.
    names = [item.name for item in dataclasses.fields(Batch)]
    return (
        _Plain({name: getattr(work.batch, name) for name in names}),
        _Plain({"rounds": work.stats.rounds, "turns_N": work.stats.turns_N}),
    )


class _Plain:
    def __init__(self, values):
        self.__dict__.update(values)
