"""TokenBatch -> micro-batches of a token budget: the same number on every data-parallel replica, padded for the layout."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.backend.packing import Packing, chunk_multiple, local_positions, make_packing
from fivefold.backend.routing import MoELayers, Routing
from fivefold.backend.shared_prefix import make_pieces, make_units, place_copies, prefixes_of
from fivefold.columns import Column
from fivefold.distributed.balance import micro_batches_needed, plan_micro_batches
from fivefold.distributed.ranks import Ranks
from fivefold.distributed.threads import one_thread
from fivefold.types import TokenBatch, to_device


@dataclass(frozen=True)
class Ahead:
    """Inputs and targets of one layer of multi-token prediction, for a micro-batch on this rank."""

    token_ids_T: Tensor
    """Token whose embedding each local token's hidden state is joined with; 0 past the end of its sample."""
    source_index_S: Tensor
    """Indices of the local tokens whose prediction counts."""
    targets_S: Tensor
    """Tokens to be predicted at `source_index_S`."""


@dataclass(frozen=True)
class MicroBatch:
    """One forward-backward of this replica: this rank's part of its sequences, on the device."""

    token_ids_T: Tensor
    """Local tokens: each piece padded so that context parallelism divides it, then a sequence of padding."""
    packing: Packing
    routing: Routing | None
    """Real tokens and given routes of the local tokens, by piece; None for models without experts."""
    source_index_S: Tensor
    """Indices of the local tokens that predict a response token, or whose value is needed."""
    targets_S: Tensor
    """The predicted tokens; with a value head the tokens themselves, which the head ignores."""
    output_index_S: Tensor
    """Index of each result among the tokens of `batch`."""
    batch: TokenBatch
    """The complete samples of this micro-batch."""
    token_index_T: Tensor
    """Index of each token of `batch` in the whole batch of this replica."""
    place_T: Tensor
    """Local index of each token of `batch`; -1 if the token is on another rank."""
    ahead: tuple[Ahead, ...] = ()
    """Inputs and targets of each layer of multi-token prediction; empty unless these layers are trained."""


@dataclass(frozen=True)
class BatchingConfig:
    """Settings that all steps of one model share."""

    ranks: Ranks
    device: torch.device
    budget: int
    """Maximum number of tokens in a micro-batch."""
    vocab: int
    """Vocabulary size without padding."""
    value_head: bool
    """The model ends in a value head."""
    experts: MoELayers | None = None
    """The layers with experts, for models whose routes are recorded or replayed."""
    make_packing: Callable[..., Packing] = make_packing
    """Builds the packing as the model's layers need it."""
    virtual: int = 1
    """Number of virtual stages in each pipeline stage."""
    round_of: int = 1
    """Number of micro-batches that interleaved stages process per round; their total is a multiple of it."""
    fixed_length: bool = False
    """Every micro-batch is padded to the budget, so that stages know its size in advance."""
    equal_length: bool = False
    """Replicas pad micro-batches to the longest one among them, because they gather each other's tokens."""
    share_prefix: bool = False
    """A prompt shared by several samples of one micro-batch is computed once."""
    mtp_layers: int = 0
    """Number of layers of multi-token prediction that are trained."""
    mtp_factor: float = 0.0
    """Factor on the mean loss of the layers of multi-token prediction."""
    sequences: int | None = None
    """Number of sequences in a micro-batch of a pass without gradient, in place of `budget`."""


class MicroBatches:
    """The micro-batches of a batch: the same number on every data-parallel replica."""

    def __init__(
        self, batch: TokenBatch, batching: BatchingConfig, mtp_layers: int = 0, sequences: int | None = None
    ) -> None:
        """Plan the micro-batches; each carries the inputs of `mtp_layers` layers of multi-token prediction.

        With `sequences` each holds at most so many of them, whatever their lengths; otherwise the token budget limits it.
        """
        self._mtp_layers = mtp_layers
        batching.ranks.heartbeat.begin()
        layout = batching.ranks.layout
        self._multiple = chunk_multiple(layout.cp)
        # The local part must divide over the sequence-parallel ranks.
        self._total_multiple = math.lcm(self._multiple, layout.cp * layout.tp)
        self._budget = -(-batching.budget // self._total_multiple) * self._total_multiple
        self._units = make_units(batch, self._budget, batching.share_prefix)
        computed = [unit.computed(batch.lengths_N) for unit in self._units]
        self.tokens = sum(sum(lengths) for lengths in computed)
        """Number of tokens that this replica computes, without padding."""
        sizes = [sum(self._padded(length) for length in lengths) for lengths in computed]
        weights, most = (
            (sizes, self._budget) if sequences is None else ([len(unit.samples) for unit in self._units], sequences)
        )
        needed = torch.tensor(micro_batches_needed(weights, most))
        dist.all_reduce(needed, dist.ReduceOp.MAX, group=batching.ranks.dp)
        self.count = -(-int(needed) // batching.round_of) * batching.round_of
        self._batch, self._batching = batch, batching
        self._plan = plan_micro_batches(weights, self.count, most)
        totals = torch.tensor([sum(sizes[unit] for unit in units) for units in self._plan])
        # A replica without samples takes part with padding only; otherwise the collectives of the others would hang.
        totals = -(-totals.clamp(min=1) // self._total_multiple) * self._total_multiple
        if sequences is not None and batching.fixed_length:
            longest = totals.amax()
            dist.all_reduce(longest, dist.ReduceOp.MAX, group=batching.ranks.dp)
            self._budget = int(longest)
        if batching.equal_length:
            dist.all_reduce(totals, dist.ReduceOp.MAX, group=batching.ranks.dp)
        self._totals = [self._budget] * self.count if batching.fixed_length else totals.tolist()
        self._least = self._budget if batching.fixed_length else self._total_multiple

    @property
    def filled(self) -> int:
        """Number of micro-batches of this replica that hold samples."""
        return sum(bool(units) for units in self._plan)

    def iterators(self) -> Any:
        """Return micro-batches for Megatron-Core's schedule: an iterator, or a list with one iterator per virtual stage."""
        waiting: list[deque[MicroBatch]] = [deque() for _ in range(self._batching.virtual)]
        several = [self._drawn(queue, waiting) for queue in waiting]
        return several if len(several) > 1 else several[0]

    def _drawn(self, queue: deque[MicroBatch], waiting: list[deque[MicroBatch]]) -> Iterator[MicroBatch]:
        """Yield micro-batches: the first stage that needs one builds it; its memory is free after the last stage has it."""
        for number in range(self.count):
            if not queue:
                # The device waits meanwhile.
                with one_thread():
                    micro = self._make(number)
                for other in waiting:
                    other.append(micro)
                del micro
            yield queue.popleft()

    def _padded(self, length: int) -> int:
        return -(-length // self._multiple) * self._multiple

    def _make(self, number: int) -> MicroBatch:
        ranks, device, layout = self._batching.ranks, self._batching.device, self._batching.ranks.layout
        # When the run is stopping, the rest of the pass is padding, because every rank still waits for the others.
        is_done = ranks.heartbeat.item(number)
        planned, total = (self._plan[number], self._totals[number]) if is_done else ([], self._least)
        units = [self._units[unit] for unit in planned]
        samples = [sample for unit in units for sample in unit.samples]
        batch = self._batch.select(samples)
        pieces = make_pieces(batch.lengths_N, units)
        sizes = [self._padded(piece.length) for piece in pieces]
        padding = total - sum(sizes)
        assert padding >= 0, f"{sum(sizes)} tokens in a micro-batch of {total}"
        # `local`: index of each local token in the batch, -1 for padding. `owner`: the piece that it belongs to.
        local = torch.full((total // layout.cp,), -1)
        owner = local.clone()
        starts, begin = [], 0
        for number_of_piece, (piece, size) in enumerate(zip(pieces, sizes, strict=True)):
            positions = local_positions(size, layout.cp, ranks.coords.cp)
            starts.append(begin)
            local[begin : begin + len(positions)] = torch.where(positions < piece.length, piece.begin + positions, -1)
            owner[begin : begin + len(positions)] = torch.where(positions < piece.length, number_of_piece, -1)
            begin += len(positions)
        lengths, prefixes = sizes, prefixes_of(pieces, starts)
        if padding:
            lengths, prefixes = [*lengths, padding], [*prefixes, (0, 0)]
        packing = self._batching.make_packing(lengths, device, layout.cp, ranks.coords.cp, prefixes=prefixes)
        packing.real_lengths = (*(piece.length for piece in pieces), *lengths[len(pieces) :])
        real = local >= 0
        token_ids = torch.where(real, batch.token_ids_T[local.clamp(min=0)] if len(batch.token_ids_T) else 0, 0)
        place = torch.full((len(batch.token_ids_T),), -1)
        place[local[real]] = real.nonzero()[:, 0]
        place_copies(place, pieces)
        routing = None
        if (layers := self._batching.experts) is not None:
            routing = Routing(to_device(owner[None] == torch.arange(max(1, len(pieces)))[:, None], device))
            if batch.records_routes:
                routing.recorded = {}
            if Column.ROUTES in batch:
                routing.routes_TLK = to_device(layers.local(batch[Column.ROUTES], local), device)
        predicted = batch.loss_mask_T.nonzero()[:, 0]
        predicted = predicted[place[predicted - 1] >= 0]
        output, source = predicted, predicted - 1
        if self._batching.value_head:
            # Values are needed at the token before each response token, and at the last token of each sample.
            wanted = batch.loss_mask_T.roll(-1)
            wanted[torch.tensor(batch.lengths_N, dtype=torch.long).cumsum(0) - 1] = True
            output = source = (wanted & (place >= 0)).nonzero()[:, 0]

        ahead = []
        for depth in range(self._mtp_layers):
            targets, ids = targets_ahead(batch, depth), tokens_ahead(batch, depth + 1)
            targets = targets[place[targets - 2 - depth] >= 0]
            ahead.append(
                Ahead(
                    to_device(torch.where(real, ids[local.clamp(min=0)] if len(ids) else 0, 0), device),
                    to_device(place[targets - 2 - depth], device),
                    to_device(batch.token_ids_T[targets], device),
                )
            )
        return MicroBatch(
            token_ids_T=to_device(token_ids, device),
            packing=packing,
            routing=routing,
            source_index_S=to_device(place[source], device),
            targets_S=to_device(batch.token_ids_T[output], device),
            output_index_S=to_device(output, device),
            batch=batch.with_columns({Column.ROUTES: None}).to(device),
            token_index_T=self._batch.token_index(samples),
            place_T=place,
            ahead=tuple(ahead),
        )

    @property
    def length(self) -> int:
        """Sequence length for Megatron-Core's schedule; without a fixed one, a stage receives it from the stage before."""
        return self._budget if self._batching.fixed_length else self._total_multiple


def tokens_ahead(batch: TokenBatch, steps: int) -> Tensor:
    """[T] the token `steps` positions after each one; 0 past the end of its sample."""
    later_T, start = torch.zeros_like(batch.token_ids_T), 0
    for length in batch.lengths_N:
        later_T[start : start + max(0, length - steps)] = batch.token_ids_T[start + steps : start + length]
        start += length
    return later_T


def targets_ahead(batch: TokenBatch, depth: int) -> Tensor:
    """Indices of the tokens that layer `depth` of multi-token prediction learns to predict (DeepSeek-V3, eq. 24).

    These are response tokens whose sample also holds the token 2 + depth positions earlier.
    """
    lengths_N = torch.tensor(batch.lengths_N, dtype=torch.long)
    positions_T = torch.arange(len(batch.token_ids_T)) - torch.repeat_interleave(lengths_N.cumsum(0) - lengths_N, lengths_N)
    return (batch.loss_mask_T & (positions_T >= 2 + depth)).nonzero()[:, 0]
