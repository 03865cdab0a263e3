"""What a step learns from comes back from a checkpoint with every field that it had."""

from __future__ import annotations

import dataclasses

import torch

from fivefold.columns import Column
from fivefold.rollout.stats import BatchPlan
from fivefold.trainer import step_work
from fivefold.types import RolloutStats, Scoring, TokenBatch, Turns
from tests.support.cluster import Cluster

SCORING = Scoring({"format": 0.5}, failed=2, timed_out=1, group_size=3, trajectories={"trajectory/sequences": 1.5})
TURNS = Turns(*(torch.tensor([number, 2 * number]) for number in range(8)))


def test_every_column_and_added_field_is_kept_between_two_updates(tmp_path, cluster: Cluster, monkeypatch):
    (again, work) = cluster.run(written_and_read, "megatron:d1", tmp_path)[0]
    assert again.temperature == 0.5 and again.tool_calls == 3 and again.per_micro_batch
    assert again.columns.keys() == {column.value for column in Column}
    assert all(torch.equal(again.columns[column.value], numbers_of(column)) for column in Column)
    assert work.scoring == SCORING and work.rounds == 4 and torch.equal(work.turns_N, torch.tensor([2, 1]))
    assert repr(work.turns) == repr(TURNS) and work.trajectory_N.tolist() == [0, 0]


def numbers_of(column: Column) -> torch.Tensor:
    """Five tokens' numbers that differ between columns."""
    numbers = torch.arange(5 * 2 ** len(column.shape[1:])) + 7 * list(Column).index(column)
    return (numbers % 3).view(5, *[2] * len(column.shape[1:])).to(getattr(torch, column.dtypes[-1]))


def written_and_read(mesh, directory):
    """A batch and stats of classes with fields of their own, written as a checkpoint's `work` and read again."""
    Batch = dataclasses.make_dataclass("Batch", [("tool_calls", int, 0)], bases=(TokenBatch,))
    Stats = dataclasses.make_dataclass(
        "Stats", [("turns_N", torch.Tensor | None, None), ("rounds", int, 0)], bases=(RolloutStats,), frozen=True
    )
    step_work.TokenBatch, step_work.RolloutStats = Batch, Stats
    batch = Batch(
        torch.arange(5), torch.tensor([False, True, True, False, True]), [3, 2], temperature=0.5, per_micro_batch=True,
        columns={column: numbers_of(column) for column in Column}, tool_calls=3,
    )  # fmt: skip
    columns = {item.name: torch.tensor([0, 0]) for item in dataclasses.fields(RolloutStats) if item.type == "Tensor"}
    columns |= {"response_lengths_N": torch.tensor([2, 1]), "lengths_N": torch.tensor([3, 2])}
    stats = Stats(
        **columns, versions_differ=False, max_response_tokens=2, has_logprobs=True, turns_N=torch.tensor([2, 1]), rounds=4,
        scoring=SCORING, turns=TURNS, trajectory_N=torch.tensor([0, 0]),
    )  # fmt: skip
    directory.mkdir(exist_ok=True)
    step_work.StepWork(stats, batch, []).writer(mesh.ranks, {})(directory)
    work = step_work.read_work(directory, mesh.ranks, BatchPlan(temperature=0.9))
    # The classes are this function's: plain numbers go back to the test.
    names = [item.name for item in dataclasses.fields(Batch) if item.name != "columns"]
    columns = {column.value: value for column, value in work.batch.columns.items()}
    return (
        _Plain({name: getattr(work.batch, name) for name in names} | {"columns": columns}),
        _Plain(
            {"scoring": work.stats.scoring, "rounds": work.stats.rounds, "turns_N": work.stats.turns_N}
            | {"turns": work.stats.turns, "trajectory_N": work.stats.trajectory_N}
        ),
    )


class _Plain:
    def __init__(self, values):
        self.__dict__.update(values)
