"""One update: TokenBatch -> micro-batches -> forward and backward of a sharded model -> gradients, summed over all ranks.

This is the only file of this backend where a factor of d, c, t or the number of micro-batches could be wrong:

- The loss of an update is Σ over all tokens of weight · per-token loss, so micro-batches and ranks add up. FSDP's
  reduce-scatter sums, and nothing divides.
- Context-parallel ranks compute the same loss of whole sequences, from log-probs summed over the ranks. Each rank passes
  back the gradient of its own tokens only, so the sum over the ranks is the gradient of one loss.
- Tensor-parallel ranks compute the same loss too. Gradients of split weights and of weights that all ranks use alike are
  whole on each of them; those of `Split.is_summed` are parts, which are added here.
- A rank's experts are passed the tokens of all ranks that divide experts among them, and their gradient is that of all
  these tokens. FSDP sums it over the ranks that hold the same experts, which have other tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.backend.micro_batches import BatchingConfig, MicroBatch, MicroBatches
from fivefold.backend.totals import Gradients, Totals
from fivefold.fsdp.collectives import sum_over
from fivefold.fsdp.current import packed
from fivefold.fsdp.mesh import Mesh
from fivefold.fsdp.packed_model import PackedModel, fsdp_modules
from fivefold.fsdp.parameters import LocalTensor
from fivefold.types import LossFn, LossOutput, TokenBatch


def _whole(values_2S: Tensor, micro: MicroBatch, mesh: Mesh) -> Tensor:
    """[2, T] numbers of all tokens of the micro-batch on every context-parallel rank; 0 where none was requested."""
    spread_2T = values_2S.new_zeros(2, len(micro.batch.token_ids_T)).index_copy(1, micro.output_index_S, values_2S)
    return sum_over(spread_2T, mesh.cp)


@torch.no_grad()
def forward_only(model: PackedModel, batch: TokenBatch, batching: BatchingConfig, mesh: Mesh) -> Tensor:
    """[T] log-probs of the response tokens, or values, on the host of every rank of the replica."""
    parts = MicroBatches(batch, batching, sequences=batching.sequences)
    values_T = torch.zeros(len(batch.token_ids_T), dtype=torch.float32)
    places, results = [], []
    for micro in _drawn(parts):
        with packed(micro.packing, mesh):
            places.append(micro.token_index_T)
            results.append(_whole(model(micro), micro, mesh)[0])
    batching.ranks.heartbeat.check_items(parts.count)
    # FSDP keeps some parameters gathered after a forward pass, for a backward pass that does not come.
    for module in fsdp_modules(model):
        module.reshard()
    values_T[torch.cat(places)] = torch.cat(results).cpu()
    return values_T


def forward_backward(
    model: PackedModel,
    batch: TokenBatch,
    loss_fn: LossFn,
    batching: BatchingConfig,
    mesh: Mesh,
    keep_gathered: bool,
    loss_scale: float = 1.0,
) -> Gradients:
    """Compute the gradients of the whole update, times `loss_scale`, summed over replicas and sharded as the parameters.

    Without `keep_gathered` every micro-batch is reduced at once; with it they add up on each rank, and the last is reduced.
    """
    parts = MicroBatches(batch, batching)
    counts = torch.tensor([parts.tokens, len(batch.lengths_N), parts.filled])
    dist.all_reduce(counts, group=mesh.ranks.dp)
    tokens, sequences, update_micro_batches = counts.tolist()
    outputs: list[LossOutput] = []
    for number, micro in enumerate(_drawn(parts)):
        is_last = number + 1 == parts.count
        for module in fsdp_modules(model):
            module.set_is_last_backward(is_last)
            module.set_requires_gradient_sync(is_last or not keep_gathered, recurse=False)
            module.set_requires_all_reduce(is_last, recurse=False)
        with packed(micro.packing, mesh):
            output_T, entropy_T = _whole(model(micro), micro, mesh)
            share = loss_fn(output_T, entropy_T, replace(micro.batch, update_micro_batches=update_micro_batches))
            (share.loss * loss_scale).backward()
        outputs.append(LossOutput(share.loss.detach(), share.sums, share.maxima))
    batching.ranks.heartbeat.check_items(parts.count)
    return Gradients(Totals.of(outputs), parts.count, tokens, sequences)


def _drawn(parts: MicroBatches) -> Iterator[MicroBatch]:
    for _, micro in zip(range(parts.count), parts.iterators(), strict=False):
        yield micro


@torch.no_grad()
def finish_gradients(tensors: list[LocalTensor], mesh: Mesh) -> list[tuple[LocalTensor, Tensor]]:
    """Return this rank's gradient of each trained tensor, with the parts of tensor-parallel ranks added up. Collective."""
    gradients = []
    for tensor in tensors:
        if tensor.parameter is None or not tensor.parameter.requires_grad:
            continue
        grad = tensor.parameter.grad
        if grad is None:
            continue
        local = grad.to_local()  # type: ignore[attr-defined]
        if tensor.split.is_summed:
            # With `cpu_adam` gradients are on the host, and the group communicates on the device.
            summed = local.to(mesh.device)
            dist.all_reduce(summed, group=mesh.tp)
            local.copy_(summed)
        gradients.append((tensor, local))
    return gradients


@torch.no_grad()
def gradient_norm(gradients: list[tuple[LocalTensor, Tensor]], mesh: Mesh) -> float:
    """Return the norm of the whole gradient: every element counts once, whatever ranks hold it. Collective."""
    counted = [grad for tensor, grad in gradients if grad.numel() and (tensor.is_apart or mesh.tp.rank() == 0)]
    square = torch.zeros((), dtype=torch.float64, device=mesh.device)
    if counted:
        square += torch.stack(torch._foreach_norm(counted)).double().square().sum().to(mesh.device)
    dist.all_reduce(square, group=mesh.one_copy)
    return float(square.sqrt())
