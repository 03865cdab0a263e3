"""One update: TokenBatch -> micro-batches -> Megatron-Core's schedule -> gradients that were finalized once.

The only file where a factor of dp, tp, pp or the number of micro-batches could be wrong:

- the loss of an update is Σ over all tokens of weight · per-token loss, so micro-batches and replicas add up;
- with `calculate_per_token_loss`, Megatron-Core sums gradients over micro-batches and data-parallel ranks and
  `finalize_model_grads` divides them by the sum of the token counts that the loss function returned;
- therefore the loss function returns (share of the loss · tokens of the update, its own tokens): the division by the
  tokens of the update undoes the factor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from fivefold.batch import micro_batches_needed, plan_micro_batches
from fivefold.megatron.attention import Packing, make_packing
from fivefold.megatron.mesh import Mesh
from fivefold.types import LossFn, LossOutput, TokenBatch


@dataclass(frozen=True)
class MicroBatch:
    """One forward-backward of this replica, on the device."""

    token_ids_T: Tensor
    """Padded at the end to what the layout divides; the padding is a sequence of its own."""
    packing: Packing
    predicted_S: Tensor
    """Positions in T of the tokens whose log-prob is wanted."""
    batch: TokenBatch
    token_index_T: Tensor
    """Where its tokens lie in the batch it was cut from."""


@dataclass(frozen=True)
class Terms:
    """What every step of one model has in common."""

    mesh: Mesh
    budget: int
    """Most tokens of a micro-batch."""
    vocab: int
    """Vocabulary without padding."""
    fused: bool
    """Layers are Transformer Engine's."""


class MicroBatches:
    """The micro-batches of a batch: the same number on every data-parallel replica."""

    def __init__(self, batch: TokenBatch, terms: Terms) -> None:
        needed = torch.tensor(micro_batches_needed(batch.lengths_N, terms.budget))
        dist.all_reduce(needed, dist.ReduceOp.MAX, group=terms.mesh.ranks.dp)
        self.count = int(needed)
        self._batch, self._mesh, self._fused = batch, terms.mesh, terms.fused
        self._plan = plan_micro_batches(batch.lengths_N, self.count)

    def __iter__(self) -> Iterator[MicroBatch]:
        device, multiple = self._mesh.device, self._mesh.layout.tp
        for samples in self._plan:
            cut = self._batch.select(samples)
            tokens = sum(cut.lengths_N)
            # A replica without samples takes part with padding only, or the others would wait for it for ever.
            padding = -tokens % multiple if tokens else multiple
            packing = make_packing(cut.lengths_N + ([padding] if padding else []), device, self._fused)
            yield MicroBatch(
                token_ids_T=torch.cat([cut.token_ids_T, torch.zeros(padding, dtype=torch.long)]).to(
                    device, non_blocking=True
                ),
                packing=packing,
                predicted_S=cut.loss_mask_T.nonzero()[:, 0].to(device, non_blocking=True),
                batch=cut.to(device),
                token_index_T=self._batch.token_index(samples),
            )

    @property
    def longest(self) -> int:
        """A sequence length for Megatron-Core's schedule, which takes the real shapes from the stage before."""
        return self._mesh.layout.tp


class FinalizeOnce:
    """Megatron-Core's `finalize_model_grads`, counted: an update without it or with two of it is wrong."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.calls += 1
        finalize_model_grads(*args, **kwargs)


def _spread(values_S: Tensor, micro: MicroBatch) -> Tensor:
    """Numbers at predicted tokens -> one number a token, 0 elsewhere."""
    return values_S.new_zeros(len(micro.batch.token_ids_T)).index_put((micro.predicted_S,), values_S)


def _forward(iterator: Iterator[MicroBatch], model: Any, valid_vocab: int) -> tuple[MicroBatch, Any]:
    micro = next(iterator)
    output = model(
        token_ids_T=micro.token_ids_T,
        packing=micro.packing,
        predicted_S=micro.predicted_S,
        valid_vocab=valid_vocab,
        temperature=micro.batch.temperature,
    )
    return micro, output


@torch.no_grad()
def forward_only(model: Any, batch: TokenBatch, terms: Terms) -> Tensor:
    """[T] log-probs of the response tokens, on the host of every rank of the replica."""
    mesh, micro_batches = terms.mesh, MicroBatches(batch, terms)

    def step(iterator: Iterator[MicroBatch], model: Any) -> tuple[Any, Any]:
        micro, output = _forward(iterator, model, terms.vocab)

        def collect(output: tuple[Tensor, Tensor], non_loss_data: bool = True) -> tuple[MicroBatch, Tensor]:
            return micro, _spread(output[0], micro)

        return output, collect

    results = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(micro_batches),
        model=[model],
        num_microbatches=micro_batches.count,
        seq_length=micro_batches.longest,
        micro_batch_size=1,
        forward_only=True,
        collect_non_loss_data=True,
    )
    logprobs_T = torch.zeros(len(batch.token_ids_T), dtype=torch.float32)
    if mesh.is_last_stage:
        for micro, values_T in results:
            logprobs_T[micro.token_index_T] = values_T.cpu()
    if mesh.layout.pp > 1:
        dist.broadcast(logprobs_T, mesh.stage_ranks[-1], group=mesh.ranks.pp)
    return logprobs_T


@dataclass(frozen=True)
class Gradients:
    """What a forward-backward over the whole batch left behind, besides the gradients."""

    loss: float
    metrics: dict[str, float]
    micro_batches: int
    tokens: int
    sequences: int


def forward_backward(model: Any, finalize: FinalizeOnce, batch: TokenBatch, loss_fn: LossFn, terms: Terms) -> Gradients:
    """Gradients of the whole update on every rank, reduced and finalized."""
    mesh, micro_batches = terms.mesh, MicroBatches(batch, terms)

    def step(iterator: Iterator[MicroBatch], model: Any) -> tuple[Any, Any]:
        micro, output = _forward(iterator, model, terms.vocab)

        def loss(output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, LossOutput]:
            logprobs_S, entropy_S = output
            share = loss_fn(_spread(logprobs_S, micro), _spread(entropy_S, micro), micro.batch)
            own_tokens = torch.tensor(len(micro.predicted_S), dtype=torch.int, device=mesh.device)
            return share.loss * batch.update_tokens, own_tokens, LossOutput(share.loss.detach(), share.sums, share.maxima)

        return output, loss

    calls = finalize.calls
    outputs: list[LossOutput] = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(micro_batches),
        model=[model],
        num_microbatches=micro_batches.count,
        seq_length=micro_batches.longest,
        micro_batch_size=1,
        forward_only=False,
    )
    assert finalize.calls == calls + 1, f"gradients must be finalized once an update, were {finalize.calls - calls} times"
    loss, metrics = _reduce(outputs, mesh)
    counts = torch.tensor([sum(batch.lengths_N), len(batch.lengths_N)])
    dist.all_reduce(counts, group=mesh.ranks.dp)
    return Gradients(loss, metrics, micro_batches.count, int(counts[0]), int(counts[1]))


def _reduce(outputs: list[LossOutput], mesh: Mesh) -> tuple[float, dict[str, float]]:
    """Loss and metrics over micro-batches and replicas, on every rank: two collectives whatever their number."""
    report: list[Any] = [None]
    if mesh.is_last_stage:
        names, highest = sorted(outputs[0].sums), sorted(outputs[0].maxima)
        rows = [torch.stack([output.loss] + [output.sums[name] for name in names]) for output in outputs]
        sums = torch.stack(rows).double().sum(0).cpu()
        dist.all_reduce(sums, group=mesh.ranks.dp)
        metrics = dict(zip(names, sums[1:].tolist(), strict=True))
        if highest:
            maxima = torch.stack([torch.stack([output.maxima[name] for name in highest]) for output in outputs])
            maxima = maxima.double().amax(0).cpu()
            dist.all_reduce(maxima, dist.ReduceOp.MAX, group=mesh.ranks.dp)
            metrics.update(zip(highest, maxima.tolist(), strict=True))
        report = [(float(sums[0]), metrics)]
    if mesh.layout.pp > 1:
        dist.broadcast_object_list(report, mesh.stage_ranks[-1], group=mesh.ranks.pp)
    loss, metrics = report[0]
    return loss, metrics
