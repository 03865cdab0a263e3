"""Runs a model on its own layout, on the policy's ranks or on others: samples go to its replicas, and its results come back.

All ranks of the run call it. Those on the policy's replicas have a TokenBatch each and get the numbers of their own tokens.
The others have an empty batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from fivefold.columns import Column
from fivefold.distributed.balance import balance
from fivefold.distributed.ranks import Ranks
from fivefold.interfaces import FrozenModel, Model
from fivefold.summed_files import DamagedFile
from fivefold.types import LossFn, StepReport, TokenBatch

T = TypeVar("T")
_READ_BY_FORWARD = {Column.ROUTES}
"""Columns of a batch that a forward pass depends on."""


def on_replicas_of(ranks: Ranks, model: Model | None, model_ranks: Ranks) -> Model:
    """Returns the model, which is on the layout of `model_ranks`, for callers on the replicas of `ranks`.

    `model` is None on ranks that hold no part of it.
    """
    if model is not None and model_ranks.is_everywhere and torch.equal(ranks.dp_of_rank, model_ranks.dp_of_rank):
        # Only the parallelism within a replica differs: the samples stay where they are.
        return model
    return RedealtModel(ranks, model, model_ranks)


@dataclass(frozen=True)
class Pass(Generic[T]):
    """A pass over a batch in two parts, so that models on separate ranks compute at the same time.

    When it is created, the samples have been sent to the model. All ranks do both parts, and those of several passes in the
    same order.
    """

    compute: Callable[[], None]
    """Computes on the ranks of the model; the other ranks continue at once."""
    result: Callable[[], T]
    """Returns the result of `compute` on every rank. Call it once; it waits if the result is computed on other ranks."""


def begin_forward(model: FrozenModel, batch: TokenBatch) -> Pass[Tensor]:
    """Begins `model.forward` of the batch as a `Pass`."""
    if isinstance(model, RedealtModel):
        return model.begin_forward(batch)
    results: list[Tensor] = []
    return Pass(lambda: results.append(model.forward(batch)), results.pop)


def begin_train_step(model: Model, batch: TokenBatch, loss_fn: LossFn) -> Pass[StepReport]:
    """Begins `model.train_step` of the batch as a `Pass`."""
    if isinstance(model, RedealtModel):
        return model.begin_train_step(batch, loss_fn)
    reports: list[StepReport] = []
    return Pass(lambda: reports.append(model.train_step(batch, loss_fn)), reports.pop)


class RedealtModel:
    """A model whose replicas differ from those of its callers; samples are sent over the host, as bytes.

    On ranks without the model, it returns the results of the model's own ranks.
    """

    def __init__(self, ranks: Ranks, model: Model | None, model_ranks: Ranks) -> None:
        """`ranks` are in the callers' layout, `model_ranks` in the model's layout."""
        self._ranks, self._model, self._model_ranks = ranks, model, model_ranks
        self._moves = not torch.equal(ranks.dp_of_rank, model_ranks.dp_of_rank)
        self._version = 0
        """The model's version, as last received by this rank."""

    @property
    def version(self) -> int:
        return self._version if self._model is None else self._model.version

    def forward(self, batch: TokenBatch) -> Tensor:
        return _whole(self.begin_forward(batch))

    def begin_forward(self, batch: TokenBatch) -> Pass[Tensor]:
        """Begins `forward` as a `Pass`."""
        # Columns that the model does not read stay where they are.
        part = batch.with_columns(dict.fromkeys(batch.columns.keys() - _READ_BY_FORWARD))
        deal = self._deal(batch) if self._moves else None
        if deal is not None:
            part = deal.there(part)
        results: list[Tensor] = []

        def compute() -> None:
            results.append(torch.zeros(0) if self._model is None else self._model.forward(part))
            self._pass_by()

        def result() -> Tensor:
            if batch.records_routes:
                assert deal is None, "routes are recorded by the model whose replicas have the samples"
                batch.columns |= part.columns
            return results.pop() if deal is None else deal.back(results.pop())

        return Pass(compute, result)

    def train_step(self, batch: TokenBatch, loss_fn: LossFn) -> StepReport:
        return _whole(self.begin_train_step(batch, loss_fn))

    def begin_train_step(self, batch: TokenBatch, loss_fn: LossFn) -> Pass[StepReport]:
        """Begins `train_step` as a `Pass`."""
        part = self._deal(batch).there(batch) if self._moves else batch
        reports: list[StepReport | None] = []

        def compute() -> None:
            reports.append(None if self._model is None else self._model.train_step(part, loss_fn))
            self._pass_by()

        def result() -> StepReport:
            report = reports.pop()
            if report is None or not self._model_ranks.is_everywhere:
                content: dict[str, Any] | None = asdict(report) if report is not None else None
                report = StepReport(**self._model_ranks.broadcast_from_leader(content))
                self._version += not report.skipped
            return report

        return Pass(compute, result)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return iter(()) if self._model is None else self._model.weights()

    def verify(self) -> None:
        if self._model is not None:
            self._model.verify()

    def offload(self, parameters: bool = True) -> dict[str, int]:
        return {} if self._model is None else self._model.offload(parameters)

    def prepare_offload(self) -> None:
        if self._model is not None:
            self._model.prepare_offload()

    def onload(self) -> None:
        if self._model is not None:
            self._model.onload()

    def prepare_snapshots(self) -> None:
        if self._model is not None:
            self._model.prepare_snapshots()

    def snapshot(self, copies: bool) -> Callable[[Path], list[Path]]:
        return (lambda path: []) if self._model is None else self._model.snapshot(copies)

    def load(self, path: Path) -> None:
        fault = None
        try:
            if self._model is not None:
                self._model.load(path)
        except DamagedFile as error:
            # All ranks of the model raise it; the others still wait for the version, so it is raised after the broadcast.
            fault = error
        if not self._model_ranks.is_everywhere:
            self._version = self._model_ranks.broadcast_from_leader(self.version)
        if fault is not None:
            raise fault

    def _pass_by(self) -> None:
        """Counts a pass on ranks without the model, as the model's ranks count it."""
        if self._model is None:
            self._model_ranks.heartbeat.begin()

    def _deal(self, batch: TokenBatch) -> Deal:
        """Assigns the samples of all callers' replicas to the model's replicas, balanced by tokens. Compared samples stay
        together. Collective."""
        rows_N2 = torch.tensor([batch.lengths_N, batch.sample_index_N], dtype=torch.long).T.contiguous()
        everyone = self._ranks.all_gather_replicas(rows_N2)
        held_N = torch.cat([torch.full((len(rows),), replica) for replica, rows in enumerate(everyone)])
        lengths_N, index_N = torch.cat(everyone).T
        size = batch.samples_per_comparison
        work_U = lengths_N.view(-1, size).sum(1).tolist()
        owner_U = torch.zeros(len(work_U), dtype=torch.long)
        for replica, units in enumerate(balance(work_U, self._model_ranks.layout.dp)):
            owner_U[units] = replica
        return Deal(self._ranks, self._model_ranks, lengths_N, index_N, held_N, owner_U.repeat_interleave(size))


def _whole(parts: Pass[T]) -> T:
    parts.compute()
    return parts.result()


@dataclass(frozen=True)
class Deal:
    """Assignment of each sample of a batch to replicas of two layouts; the same on every rank.

    Example: the samples of the callers' replicas 0, 0, 1 go to the model's replicas 1, 0, 0 of two: `held_N = [0, 0, 1]`,
    `owner_N = [1, 0, 0]`.
    """

    ranks: Ranks
    """Ranks in the callers' layout."""
    model_ranks: Ranks
    """Ranks in the model's layout."""
    lengths_N: Tensor
    index_N: Tensor
    """`TokenBatch.sample_index_N` of each sample."""
    held_N: Tensor
    """The callers' replica of each sample."""
    owner_N: Tensor
    """The model's replica of each sample."""

    def there(self, batch: TokenBatch) -> TokenBatch:
        """Returns the batch of the model's replica, with every column of this batch. Collective."""
        tensors = batch.tensors()
        rows_TB = torch.cat([_bytes(value_T) for value_T in tensors.values()], 1)
        rows_TB = _move(rows_TB, self.lengths_N, (self.ranks, self.held_N), (self.model_ranks, self.owner_N))
        parts = rows_TB.split([_row_bytes(value_T) for value_T in tensors.values()], 1)
        moved = batch.fields_of(
            {name: _numbers(part_TB, value_T) for (name, value_T), part_TB in zip(tensors.items(), parts, strict=True)}
        )
        kept_N = self.owner_N == self.model_ranks.coords.dp
        return replace(
            batch, lengths_N=self.lengths_N[kept_N].tolist(), sample_index_N=self.index_N[kept_N].tolist(), **moved
        )

    def back(self, numbers_T: Tensor) -> Tensor:
        """Returns [T] for the callers' replica, from the numbers that the model's replica has for its samples.
        Collective."""
        rows_TB = _move(_bytes(numbers_T), self.lengths_N, (self.model_ranks, self.owner_N), (self.ranks, self.held_N))
        return _numbers(rows_TB, numbers_T)


def _row_bytes(value_T: Tensor) -> int:
    return value_T.shape[1:].numel() * value_T.element_size()


def _bytes(value_T: Tensor) -> Tensor:
    """Returns [T, bytes]: one row for each token."""
    return value_T.contiguous().view(-1).view(torch.uint8).view(len(value_T), _row_bytes(value_T))


def _numbers(rows_TB: Tensor, like_T: Tensor) -> Tensor:
    """Returns the byte rows as numbers with the dtype and row shape of `like_T`."""
    # A slice of one row is contiguous already, but may begin at an address that is not aligned for this dtype.
    return rows_TB.clone(memory_format=torch.contiguous_format).view(-1).view(like_T.dtype).view(-1, *like_T.shape[1:])


def _move(rows_TB: Tensor, lengths_N: Tensor, giver: tuple[Ranks, Tensor], taker: tuple[Ranks, Tensor]) -> Tensor:
    """Sends this rank its samples by `taker`, from ranks that have them by `giver`; returns the rows in order of samples.
    Collective.

    `giver` and `taker` are each a layout and the replica of each sample in it; every rank of a replica has all tokens of its
    samples. A rank that has a sample by both keeps it. The other ranks take turns in receiving from the ranks of the giving
    replica.
    """
    (ranks, giver_N), (others, taker_N) = giver, taker
    members = [(ranks.dp_of_rank == replica).nonzero()[:, 0] for replica in range(ranks.layout.dp)]
    replica, world = ranks.coords.dp, len(ranks.dp_of_rank)

    def source(rank: int, replica: int) -> int:
        """Returns the rank from which `rank` receives samples of the replica."""
        if ranks.dp_of_rank[rank] == replica:
            return rank
        return int(members[replica][rank % len(members[replica])])

    held_N = giver_N == replica
    places = torch.arange(len(rows_TB)).split(lengths_N[held_N].tolist())
    outgoing, counts = [], [0] * world
    for rank in range(world):
        if ranks.holds and source(rank, replica) == ranks.rank:
            chosen = (taker_N[held_N] == others.dp_of_rank[rank]).nonzero()[:, 0].tolist()
            outgoing += [places[sample] for sample in chosen]
            counts[rank] = sum(len(places[sample]) for sample in chosen)
    wanted = (taker_N == others.coords.dp).nonzero()[:, 0]
    source_N = torch.tensor([source(ranks.rank, replica) for replica in range(ranks.layout.dp)])[giver_N[wanted]]
    expected = torch.zeros(world, dtype=torch.long).index_add(0, source_N, lengths_N[wanted]).tolist()
    index_T = torch.cat(outgoing) if outgoing else torch.zeros(0, dtype=torch.long)
    arrived_TB = others.all_to_all_world(rows_TB[index_T], counts, expected)
    # The samples arrive in order of their source ranks.
    order = source_N.argsort(stable=True)
    pieces = dict(zip(order.tolist(), arrived_TB.split(lengths_N[wanted][order].tolist()), strict=True))
    return torch.cat([pieces[place] for place in range(len(wanted))]) if pieces else arrived_TB
