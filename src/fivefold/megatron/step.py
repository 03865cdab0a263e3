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

from fivefold.backend import micro_batches
from fivefold.backend.micro_batches import MicroBatch, MicroBatches, targets_ahead
from fivefold.backend.routing import RouteRecord
from fivefold.backend.totals import Gradients, Totals
from fivefold.columns import Column
from fivefold.distributed.objects import broadcast_json
from fivefold.megatron.layers.moe import Router
from fivefold.megatron.mesh import Mesh
from fivefold.types import LossFn, LossOutput, TokenBatch


@dataclass(frozen=True, kw_only=True)
class BatchingConfig(micro_batches.BatchingConfig):
    """Settings that all steps of one model share."""

    mesh: Mesh


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
    mesh, parts = batching.mesh, MicroBatches(batch, batching, sequences=batching.sequences)
    record = RouteRecord(batching.experts) if batch.records_routes and batching.experts is not None else None

    def step(iterator: Iterator[MicroBatch], model: Any, recomputes: bool | None = None) -> tuple[Any, Any]:
        micro, output = _forward(iterator, model, batching)
        if record is not None and micro.routing is not None:
            record.add(micro.routing, micro.place_T, micro.token_index_T)

        def collect(output: Tensor, non_loss_data: bool = True) -> tuple[MicroBatch, Tensor]:
            return micro, _whole(output, micro, mesh)[0]

        return output, collect

    results = _run_schedule(step, parts, models, batching, forward_only=True, collect_non_loss_data=True)
    mesh.ranks.heartbeat.check_items(parts.count)
    if record is not None:
        batch[Column.ROUTES] = record.whole(len(batch.token_ids_T), mesh.tp, mesh.ranks.replica)
    values_T = torch.zeros(len(batch.token_ids_T), dtype=torch.float32)
    if mesh.is_last_stage:
        index_T = torch.cat([micro.token_index_T for micro, _ in results])
        values_T[index_T] = torch.cat([numbers_T for _, numbers_T in results]).cpu()
    if mesh.layout.pp > 1:
        dist.broadcast(values_T, mesh.stage_ranks[-1], group=mesh.ranks.pp)
    return values_T


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
    mesh, parts = batching.mesh, MicroBatches(batch, batching, batching.mtp_layers)
    ahead = [len(targets_ahead(batch, depth)) for depth in range(batching.mtp_layers)]
    counts = torch.tensor([parts.tokens, len(batch.lengths_N), parts.filled, *ahead])
    dist.all_reduce(counts, group=mesh.ranks.dp)
    tokens, sequences, update_micro_batches, *ahead = counts.tolist()
    for router in routers:
        router.update_scale = loss_scale / max(1, tokens) if batch.update_tokens else 0.0

    def step(iterator: Iterator[MicroBatch], model: Any, recomputes: bool | None = None) -> tuple[Any, Any]:
        with _recomputing(model, recomputes):
            micro, output = _forward(iterator, model, batching)

        def loss(output: Tensor) -> tuple[Tensor, Tensor, LossOutput]:
            sizes = [len(micro.targets_S), *(len(target.targets_S) for target in micro.ahead)]
            output, *numbers = output.split(sizes, dim=1)
            output_T, entropy_T = _whole(output, micro, mesh)
            share = loss_fn(output_T, entropy_T, replace(micro.batch, update_micro_batches=update_micro_batches))
            # Megatron-Core expects a token count for a division that is not made here.
            none = torch.zeros((), dtype=torch.int, device=mesh.device)
            if not numbers:
                return share.loss, none, LossOutput(share.loss.detach(), share.sums, share.maxima)
            means = [-logprobs[0].sum() / max(1, count) for logprobs, count in zip(numbers, ahead, strict=True)]
            # Forward sums over ranks, each of which has its own tokens; backward is the identity.
            mtp = reduce_from_tensor_model_parallel_region(torch.stack(means).mean(), group=mesh.cp)
            sums = share.sums | {"policy/mtp_loss": mtp.detach()}
            return share.loss + batching.mtp_factor * mtp, none, LossOutput(share.loss.detach(), sums, share.maxima)

        return output, loss

    calls = finalize.calls
    outputs: list[LossOutput] = _run_schedule(step, parts, models, batching, forward_only=False)
    assert finalize.calls == calls + 1, f"gradients must be finalized once an update, were {finalize.calls - calls} times"
    mesh.ranks.heartbeat.check_items(parts.count)
    totals = Totals.of(outputs) if mesh.is_last_stage else None
    return Gradients(totals, parts.count, tokens, sequences)


def loss_and_metrics(gradients: Gradients, mesh: Mesh) -> tuple[float, dict[str, float]]:
    """Return loss and metrics of the whole update, on every rank; waits for the device."""
    report = None if gradients.totals is None else gradients.totals.reduce(mesh.ranks.dp)
    if mesh.layout.pp > 1:
        report = broadcast_json(report, mesh.stage_ranks[-1], mesh.ranks.pp)
    assert report is not None
    loss, metrics = report
    return loss, metrics
