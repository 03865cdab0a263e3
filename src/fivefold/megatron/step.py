"""One update: TokenBatch -> micro-batches -> Megatron-Core's schedule -> gradients, finalized exactly once.

This is the only file where a factor of dp, cp, tp, pp or the number of micro-batches could be wrong:

- The loss of an update is Σ over all tokens of weight · per-token loss, so micro-batches and replicas add up.
- With `calculate_per_token_loss`, Megatron-Core sums gradients over micro-batches, data- and context-parallel ranks. It
  leaves the division to `finalize_model_grads`, which divides by nothing here. The weights are shares already, and a
  division would read and write all gradients once more.
- Context-parallel ranks compute the same loss of whole sequences, from log-probs summed over the ranks. Each rank passes
  back the gradient of its own tokens only, so the sum over the ranks is the gradient of one loss.
- Router losses (balance, z-loss) are shares of the update's tokens as well.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.utils import get_model_config
from torch import Tensor

from fivefold.columns import Column
from fivefold.distributed.balance import micro_batches_needed, plan_micro_batches
from fivefold.distributed.objects import broadcast_json
from fivefold.megatron.layers.attention import Packing, chunk_multiple, local_positions, make_packing
from fivefold.megatron.layers.moe import Router
from fivefold.megatron.layers.mtp import Ahead
from fivefold.megatron.layers.routing import MoELayers, RouteRecord, Routing
from fivefold.megatron.mesh import Mesh
from fivefold.megatron.shared_prefix import make_pieces, make_units, place_copies, prefixes_of
from fivefold.types import LossFn, LossOutput, TokenBatch, to_device


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

    mesh: Mesh
    budget: int
    """Maximum number of tokens in a micro-batch."""
    vocab: int
    """Vocabulary size without padding."""
    value_head: bool
    """The model ends in a value head."""
    fused: bool
    """The layers come from Transformer Engine."""
    experts: MoELayers | None
    """The layers with experts; None if the model has none."""
    virtual: int
    """Number of virtual stages in each pipeline stage."""
    round_of: int
    """Number of micro-batches that interleaved stages process per round; their total is a multiple of it."""
    fixed_length: bool
    """Every micro-batch is padded to the budget, so that stages know its size in advance."""
    equal_length: bool
    """Replicas pad micro-batches to the longest one among them, because they gather each other's tokens."""
    share_prefix: bool
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
        batching.mesh.ranks.heartbeat.begin()
        layout = batching.mesh.layout
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
        dist.all_reduce(needed, dist.ReduceOp.MAX, group=batching.mesh.ranks.dp)
        self.count = -(-int(needed) // batching.round_of) * batching.round_of
        self._batch, self._batching = batch, batching
        self._plan = plan_micro_batches(weights, self.count, most)
        totals = torch.tensor([sum(sizes[unit] for unit in units) for units in self._plan])
        # A replica without samples takes part with padding only; otherwise the collectives of the others would hang.
        totals = -(-totals.clamp(min=1) // self._total_multiple) * self._total_multiple
        if sequences is not None and batching.fixed_length:
            longest = totals.amax()
            dist.all_reduce(longest, dist.ReduceOp.MAX, group=batching.mesh.ranks.dp)
            self._budget = int(longest)
        if batching.equal_length:
            dist.all_reduce(totals, dist.ReduceOp.MAX, group=batching.mesh.ranks.dp)
        self._totals = [self._budget] * self.count if batching.fixed_length else totals.tolist()
        self._least = self._budget if batching.fixed_length else self._total_multiple

    @property
    def filled(self) -> int:
        """Number of micro-batches of this replica that hold samples."""
        return sum(bool(units) for units in self._plan)

    def iterators(self) -> Any:
        """Return micro-batches for Megatron-Core's schedule: an iterator, or a list with one iterator per virtual stage."""
        waiting: list[deque[MicroBatch]] = [deque() for _ in range(self._batching.virtual)]
        several = [self._drawn(own, waiting) for own in waiting]
        return several if len(several) > 1 else several[0]

    def _drawn(self, own: deque[MicroBatch], waiting: list[deque[MicroBatch]]) -> Iterator[MicroBatch]:
        """Yield micro-batches: the first stage that needs one builds it; its memory is free after the last stage has it."""
        for number in range(self.count):
            if not own:
                made = self._make(number)
                for each in waiting:
                    each.append(made)
                del made
            yield own.popleft()

    def _padded(self, length: int) -> int:
        return -(-length // self._multiple) * self._multiple

    def _make(self, number: int) -> MicroBatch:
        mesh, layout = self._batching.mesh, self._batching.mesh.layout
        # When the run is stopping, the rest of the pass is padding, because every rank still waits for the others.
        is_done = mesh.ranks.heartbeat.item(number)
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
            positions = local_positions(size, layout.cp, mesh.ranks.coords.cp)
            starts.append(begin)
            local[begin : begin + len(positions)] = torch.where(positions < piece.length, piece.begin + positions, -1)
            owner[begin : begin + len(positions)] = torch.where(positions < piece.length, number_of_piece, -1)
            begin += len(positions)
        lengths, prefixes = sizes, prefixes_of(pieces, starts)
        if padding:
            lengths, prefixes = [*lengths, padding], [*prefixes, (0, 0)]
        packing = make_packing(
            lengths, mesh.device, self._batching.fused, layout.cp, mesh.ranks.coords.cp, prefixes=prefixes
        )
        real = local >= 0
        token_ids = torch.where(real, batch.token_ids_T[local.clamp(min=0)] if len(batch.token_ids_T) else 0, 0)
        place = torch.full((len(batch.token_ids_T),), -1)
        place[local[real]] = real.nonzero()[:, 0]
        place_copies(place, pieces)
        routing = None
        if (layers := self._batching.experts) is not None:
            routing = Routing(to_device(owner[None] == torch.arange(max(1, len(pieces)))[:, None], mesh.device))
            if batch.records_routes:
                routing.recorded = {}
            if Column.ROUTES in batch:
                routing.routes_TLK = to_device(layers.local(batch[Column.ROUTES], local), mesh.device)
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
                    to_device(torch.where(real, ids[local.clamp(min=0)] if len(ids) else 0, 0), mesh.device),
                    to_device(place[targets - 2 - depth], mesh.device),
                    to_device(batch.token_ids_T[targets], mesh.device),
                )
            )
        return MicroBatch(
            token_ids_T=to_device(token_ids, mesh.device),
            packing=packing,
            routing=routing,
            source_index_S=to_device(place[source], mesh.device),
            targets_S=to_device(batch.token_ids_T[output], mesh.device),
            output_index_S=to_device(output, mesh.device),
            batch=batch.with_columns({Column.ROUTES: None}).to(mesh.device),
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
    found, start = torch.zeros_like(batch.token_ids_T), 0
    for length in batch.lengths_N:
        found[start : start + max(0, length - steps)] = batch.token_ids_T[start + steps : start + length]
        start += length
    return found


def targets_ahead(batch: TokenBatch, depth: int) -> Tensor:
    """Indices of the tokens that layer `depth` of multi-token prediction learns to predict (DeepSeek-V3, eq. 24).

    These are response tokens whose sample also holds the token 2 + depth positions earlier.
    """
    lengths_N = torch.tensor(batch.lengths_N, dtype=torch.long)
    positions_T = torch.arange(len(batch.token_ids_T)) - torch.repeat_interleave(lengths_N.cumsum(0) - lengths_N, lengths_N)
    return (batch.loss_mask_T & (positions_T >= 2 + depth)).nonzero()[:, 0]


class FinalizeOnce:
    """Counts calls of Megatron-Core's `finalize_model_grads`: an update must make exactly one."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, models: list[Any], tokens: Tensor | None = None, **kwargs: Any) -> None:
        self.calls += 1
        finalize_model_grads(models, None, **kwargs)


def _whole(values_2S: Tensor, micro: MicroBatch, mesh: Mesh) -> Tensor:
    """[2, T] numbers of all tokens of the micro-batch on every context-parallel rank; 0 where none was requested."""
    spread_2T = values_2S.new_zeros(2, len(micro.batch.token_ids_T)).index_copy(1, micro.output_index_S, values_2S)
    # Forward sums over ranks, each with its own tokens. Backward is the identity: all ranks compute the same loss.
    summed: Tensor = reduce_from_tensor_model_parallel_region(spread_2T, group=mesh.cp)
    return summed


def _forward(iterator: Iterator[MicroBatch], model: Any, batching: BatchingConfig) -> tuple[MicroBatch, Any]:
    micro = next(iterator)
    output = model(
        token_ids_T=micro.token_ids_T,
        packing=micro.packing,
        routing=micro.routing,
        source_index_S=micro.source_index_S,
        targets_S=micro.targets_S,
        valid_vocab=batching.vocab,
        temperature=micro.batch.temperature,
        ahead=micro.ahead,
    )
    return micro, output


@contextmanager
def _recomputing(model: Any, wanted: bool | None) -> Iterator[None]:
    """Recompute the layers of a micro-batch only if `wanted`, which is None except with Megatron-Core's option
    `num_microbatches_with_partial_activation_checkpoints`."""
    config = get_model_config(model)
    granularity = config.recompute_granularity
    if wanted is False:
        config.recompute_granularity = None
    try:
        yield
    finally:
        config.recompute_granularity = granularity


def _run_schedule(step: Any, micro_batches: MicroBatches, models: list[Any], batching: BatchingConfig, **how: Any) -> Any:
    """Run `step` on every micro-batch by Megatron-Core's schedule for this model; return what the last stage collects.

    Megatron-Core reads the number of virtual stages from a global, which is set here because each model has its own.
    """
    parallel_state.set_virtual_pipeline_model_parallel_world_size(batching.virtual if batching.virtual > 1 else None)
    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=micro_batches.iterators(),
        model=models,
        num_microbatches=micro_batches.count,
        seq_length=micro_batches.length,
        micro_batch_size=1,
        **how,
    )


@torch.no_grad()
def forward_only(models: list[Any], batch: TokenBatch, batching: BatchingConfig) -> Tensor:
    """[T] log-probs of the response tokens, or values, on the host of every rank of the replica.

    With `batch.records_routes` this also fills in Column.ROUTES.
    """
    mesh, micro_batches = batching.mesh, MicroBatches(batch, batching, sequences=batching.sequences)
    record = RouteRecord(batching.experts) if batch.records_routes and batching.experts is not None else None

    def step(iterator: Iterator[MicroBatch], model: Any, recomputes: bool | None = None) -> tuple[Any, Any]:
        micro, output = _forward(iterator, model, batching)
        if record is not None and micro.routing is not None:
            record.add(micro.routing, micro.place_T, micro.token_index_T)

        def collect(output: Tensor, non_loss_data: bool = True) -> tuple[MicroBatch, Tensor]:
            return micro, _whole(output, micro, mesh)[0]

        return output, collect

    results = _run_schedule(step, micro_batches, models, batching, forward_only=True, collect_non_loss_data=True)
    mesh.ranks.heartbeat.check_items(micro_batches.count)
    if record is not None:
        batch[Column.ROUTES] = record.whole(len(batch.token_ids_T), mesh.tp, mesh.ranks.replica)
    found_T = torch.zeros(len(batch.token_ids_T), dtype=torch.float32)
    if mesh.is_last_stage:
        for micro, numbers_T in results:
            found_T[micro.token_index_T] = numbers_T.cpu()
    if mesh.layout.pp > 1:
        dist.broadcast(found_T, mesh.stage_ranks[-1], group=mesh.ranks.pp)
    return found_T


@dataclass(frozen=True)
class Gradients:
    """Results of a forward-backward over the whole batch, apart from the gradients."""

    totals: Totals | None
    """Loss and metrics of this replica; None except on the last pipeline stage."""
    micro_batches: int
    tokens: int
    """Number of tokens that all replicas computed, without padding."""
    sequences: int


@dataclass(frozen=True)
class Totals:
    """Loss and metrics of a replica's micro-batches, still on the device: reading them waits for the device."""

    names: list[str]
    sums: Tensor
    """float64: the loss, then the summed metrics."""
    highest: list[str]
    maxima: Tensor

    @classmethod
    def of(cls, outputs: list[LossOutput]) -> Totals:
        """Combine the outputs of all micro-batches."""
        names, highest = sorted(outputs[0].sums), sorted(outputs[0].maxima)
        rows = [torch.stack([output.loss] + [output.sums[name] for name in names]) for output in outputs]
        sums = torch.stack(rows).double().sum(0)
        maxima = [torch.stack([output.maxima[name] for output in outputs]).double().amax() for name in highest]
        return cls(names, sums, highest, torch.stack(maxima) if highest else sums[:0])

    def reduce(self, replicas: dist.ProcessGroup) -> tuple[float, dict[str, float]]:
        """Reduce over replicas with at most two collectives, whatever the number of metrics; return loss and metrics."""
        sums, maxima = self.sums.cpu(), self.maxima.cpu()
        dist.all_reduce(sums, group=replicas)
        if self.highest:
            dist.all_reduce(maxima, dist.ReduceOp.MAX, group=replicas)
        metrics = zip(self.names + self.highest, sums[1:].tolist() + maxima.tolist(), strict=True)
        return float(sums[0]), dict(metrics)


def forward_backward(
    models: list[Any],
    finalize: FinalizeOnce,
    batch: TokenBatch,
    loss_fn: LossFn,
    batching: BatchingConfig,
    routers: list[Router],
    loss_scale: float = 1.0,
) -> Gradients:
    """Compute the gradients of the whole update, times `loss_scale`, reduced and finalized on every rank.

    Megatron-Core multiplies the loss by `loss_scale` and divides the gradients by it later. Router losses are multiplied
    here.
    """
    mesh, micro_batches = batching.mesh, MicroBatches(batch, batching, batching.mtp_layers)
    ahead = [len(targets_ahead(batch, depth)) for depth in range(batching.mtp_layers)]
    counts = torch.tensor([micro_batches.tokens, len(batch.lengths_N), micro_batches.filled, *ahead])
    dist.all_reduce(counts, group=mesh.ranks.dp)
    tokens, sequences, update_micro_batches, *ahead = counts.tolist()
    for router in routers:
        router.update_scale = loss_scale / max(1, tokens) if batch.update_tokens else 0.0

    def step(iterator: Iterator[MicroBatch], model: Any, recomputes: bool | None = None) -> tuple[Any, Any]:
        with _recomputing(model, recomputes):
            micro, output = _forward(iterator, model, batching)

        def loss(output: Tensor) -> tuple[Tensor, Tensor, LossOutput]:
            sizes = [len(micro.targets_S), *(len(each.targets_S) for each in micro.ahead)]
            output, *numbers = output.split(sizes, dim=1)
            output_T, entropy_T = _whole(output, micro, mesh)
            share = loss_fn(output_T, entropy_T, replace(micro.batch, update_micro_batches=update_micro_batches))
            # Megatron-Core expects a token count for a division that is not made here.
            none = torch.zeros((), dtype=torch.int, device=mesh.device)
            if not numbers:
                return share.loss, none, LossOutput(share.loss.detach(), share.sums, share.maxima)
            means = [-own[0].sum() / max(1, count) for own, count in zip(numbers, ahead, strict=True)]
            # Forward sums over ranks, each of which has its own tokens; backward is the identity.
            mtp = reduce_from_tensor_model_parallel_region(torch.stack(means).mean(), group=mesh.cp)
            sums = share.sums | {"policy/mtp_loss": mtp.detach()}
            return share.loss + batching.mtp_factor * mtp, none, LossOutput(share.loss.detach(), sums, share.maxima)

        return output, loss

    calls = finalize.calls
    outputs: list[LossOutput] = _run_schedule(step, micro_batches, models, batching, forward_only=False)
    assert finalize.calls == calls + 1, f"gradients must be finalized once an update, were {finalize.calls - calls} times"
    mesh.ranks.heartbeat.check_items(micro_batches.count)
    totals = Totals.of(outputs) if mesh.is_last_stage else None
    return Gradients(totals, micro_batches.count, tokens, sequences)


def loss_and_metrics(gradients: Gradients, mesh: Mesh) -> tuple[float, dict[str, float]]:
    """Return loss and metrics of the whole update, on every rank; waits for the device."""
    report = None if gradients.totals is None else gradients.totals.reduce(mesh.ranks.dp)
    if mesh.layout.pp > 1:
        report = broadcast_json(report, mesh.stage_ranks[-1], mesh.ranks.pp)
    assert report is not None
    loss, metrics = report
    return loss, metrics
