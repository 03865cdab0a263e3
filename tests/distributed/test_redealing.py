from __future__ import annotations

import pytest
import torch

from fivefold.columns import Column
from fivefold.layout import ParallelLayout
from fivefold.types import LossOutput, StepReport, TokenBatch
from tests.support.cluster import Together

PAIRS = [
    ("d4", "d2t2"),
    ("d4", "t4"),
    ("d2t2", "d2p2"),
    ("d2p2", "t4"),
    ("t4", "d4"),
    ("p4", "d2c2"),
    ("d2t2", "d4"),
    ("d4", "p2t2"),
    # On other ranks than the callers', whom some ranks are neither of.
    ("d2", "t2@2"),
    ("t2", "d2@2"),
    ("d1", "d3@1"),
    ("p2", "d1@2"),
    ("d3", "d1@3"),
    ("t2", "t2"),
]
"""(the callers' layout, the model's and its first rank), of four ranks."""
CASES = [(9, 1), (12, 2), (1, 1), (30, 1)]
"""(samples, how many are compared with each other)."""


def whole(samples: int, size: int) -> TokenBatch:
    """A batch with every kind of field, whose numbers name sample and position."""
    generator = torch.Generator().manual_seed(samples)
    lengths = torch.randint(1, 40, (samples,), generator=generator).tolist()
    total = sum(lengths)
    return TokenBatch(
        torch.arange(total),
        torch.rand(total, generator=generator) > 0.4,
        lengths,
        sample_index_N=list(range(100, 100 + samples)),
        temperature=0.7,
        update_tokens=55,
        per_micro_batch=True,
        samples_per_comparison=size,
        columns={
            Column.LOSS_WEIGHTS: torch.rand(total, generator=generator),
            Column.RETURNS: torch.randn(total, generator=generator, dtype=torch.float64),
            Column.EXPERT: torch.rand(total, generator=generator) > 0.4,
            Column.ROUTES: torch.randint(0, 99, (total, 3, 2), generator=generator, dtype=torch.int16),
            Column.VERSION: torch.arange(total) % 7,
        },
    )


def numbers_of(batch: TokenBatch) -> torch.Tensor:
    """A number of each token that no other token has."""
    return (batch.token_ids_T.double() + 0.1).float().sin()


class Recorder:
    """A model that keeps what it was given."""

    version = 3

    def __init__(self) -> None:
        self.batches: list[TokenBatch] = []

    def forward(self, batch: TokenBatch) -> torch.Tensor:
        self.batches.append(batch)
        return numbers_of(batch)

    def train_step(self, batch: TokenBatch, loss_fn) -> StepReport:
        self.batches.append(batch)
        return StepReport(1.0, 2.0, 3.0, {}, 1, 2, 3)


def loss(output_T, entropy_T, batch) -> LossOutput:
    raise AssertionError("the recorder does not compute")


def travel(mesh, callers: str, layout: str):
    from fivefold.distributed.redealing import on_replicas_of

    parts = [(one.partition("@")[0], int(one.partition("@")[2] or 0)) for one in (callers, layout)]
    ranks, model_ranks = (mesh.ranks.on_layout(ParallelLayout.parse(f"megatron:{one}"), first) for one, first in parts)
    journeys_of_rank = []
    for samples, size in CASES:
        # Most are the first replica's; of four replicas two have none.
        owner_U = [int(unit % 5 == 4) if ranks.layout.dp > 1 else 0 for unit in range(samples // size)]
        held = [unit for unit, owner in enumerate(owner_U) if owner == ranks.coords.dp]
        batch = whole(samples, size).select([size * unit + place for unit in held for place in range(size)])
        recorder = Recorder()
        model = on_replicas_of(ranks, recorder if model_ranks.holds else None, model_ranks)
        numbers_T, report = model.forward(batch), model.train_step(batch, loss)
        # Who has no model counts the steps that it is told of.
        assert (model.version, report.loss) == (3 if model_ranks.holds else 1, 1.0)
        assert torch.equal(numbers_T, numbers_of(batch))
        journeys_of_rank.append((model_ranks.coords.dp, *recorder.batches) if model_ranks.holds else None)
    return journeys_of_rank


@pytest.fixture(scope="module")
def journeys(cluster):
    """What every rank's model was given, by pair; all pairs in one start of the ranks."""
    return Together(cluster, {pair: ("megatron:d4", travel, *pair) for pair in PAIRS})


@pytest.mark.parametrize(("callers", "layout"), PAIRS)
def test_replicas_of_another_layout_get_whole_samples_and_return_every_number(journeys, callers, layout):
    results = journeys[callers, layout]
    for number, (samples, size) in enumerate(CASES):
        batch = whole(samples, size)
        by_replica: dict[int, TokenBatch] = {}
        for replica, read, trained in filter(None, (result[number] for result in results)):
            assert set(read.columns) == {Column.ROUTES}
            assert torch.equal(read.token_ids_T, trained.token_ids_T)
            # All ranks of a replica have the same.
            assert torch.equal(by_replica.setdefault(replica, trained).token_ids_T, trained.token_ids_T)
            places = [index - 100 for index in trained.sample_index_N]
            expected = batch.select(places)
            assert set(trained.tensors()) == set(batch.tensors())
            for name, value_T in expected.tensors().items():
                assert torch.equal(trained.tensors()[name], value_T), name
                assert trained.tensors()[name].dtype == value_T.dtype
            assert trained.lengths_N == expected.lengths_N
            assert (trained.temperature, trained.update_tokens, trained.per_micro_batch) == (0.7, 55, True)
            # Those that are compared stay together.
            assert all(places[i] % size == i % size for i in range(len(places)))
        everywhere = sorted(index for part in by_replica.values() for index in part.sample_index_N)
        assert everywhere == list(range(100, 100 + samples))
        loads = [sum(part.lengths_N) for part in by_replica.values()]
        if samples == 30:
            assert max(loads) - min(loads) <= max(batch.lengths_N)
