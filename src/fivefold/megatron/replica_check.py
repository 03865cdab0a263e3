"""Compares what must be equal on several ranks: model -> nothing, or an error that names parameter and ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.distributed.objects import all_gather_json
from fivefold.errors import RunError
from fivefold.megatron.layers.layer_spec import PolicyModel
from fivefold.megatron.mesh import Mesh

_PIECE = 1 << 24
"""Number of elements processed at once: 64-bit copies of a whole parameter would not fit next to it."""


class ReplicaError(RunError):
    """Raised when copies of a parameter that must be equal differ."""


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """Return two 64-bit sums over the bits of a tensor, one weighted by position: equal tensors have equal digests."""
    flat = tensor.detach().contiguous().view(-1)
    numbers = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    sums = torch.zeros(2, dtype=torch.long, device=tensor.device)
    for number, bits in enumerate(numbers.split(_PIECE)):
        place = torch.arange(number * _PIECE + 1, number * _PIECE + len(bits) + 1, device=bits.device)
        sums += torch.stack([bits.sum(dtype=torch.long), (bits.long() * place).sum()])
    return sums


def verify_copies(chunks: list[PolicyModel], mesh: Mesh) -> None:
    """Raise ReplicaError on all ranks if copies differ: over replicas, tensor-parallel duplicates, tied embeddings.

    Costs one pass over the parameters and two small collectives for each kind of copy.
    """
    named = [
        (f"{number}.{name}" if len(chunks) > 1 else name, tensor, chunk)
        for number, chunk in enumerate(chunks)
        for name, tensor in [*chunk.named_parameters(), *_router_biases(chunk)]
    ]
    digests = {name: digest(tensor) for name, tensor, _ in named}
    dense = {name: digests[name] for name, tensor, _ in named if getattr(tensor, "allreduce", True)}
    experts = {name: digests[name] for name in digests if name not in dense}
    duplicates = {
        name: digests[name]
        for name, tensor, _ in named
        if name in dense and not getattr(tensor, "tensor_model_parallel", False)
    }
    ends = [chunk for chunk in chunks if _has_end(chunk)]
    comparisons = [("data-parallel replicas", mesh.dp, dense)]
    comparisons.append(("expert replicas", mesh.expert_dp, experts))
    comparisons.append(("tensor-parallel duplicates", mesh.tp, duplicates))
    faults = [text for what, group, part in comparisons if (text := _compare(what, group, part))]
    if mesh.layout.pp > 1:
        # Every rank of the pipeline takes part; ranks that hold neither end contribute an empty list.
        own = [digest(chunk.shared_embedding_or_output_weight()).tolist() for chunk in ends]
        everyone = all_gather_json(own, mesh.ranks.pp)
        held = {rank: values for rank, values in zip(mesh.stage_ranks, everyone, strict=True) if values}
        if len({str(value) for values in held.values() for value in values}) > 1:
            faults.append(f"the tied embedding differs between the pipeline's ends, ranks {sorted(held)}")
    failed = all_gather_json("; ".join(faults), mesh.ranks.members)
    if any(failed):
        found = sorted({text for text in failed if text})
        raise ReplicaError(
            f"copies of parameters that must be equal differ, so ranks train different models: {'; '.join(found[:4])}"
            + (f"; and {len(found) - 4} more" if len(found) > 4 else "")
            + ". Go back to a checkpoint from before; trainer.guard.every sets how often this is compared"
        )


def _has_end(chunk: PolicyModel) -> bool:
    """Whether the chunk holds an embedding that is also the output layer, or that multi-token prediction copies."""
    tied = chunk.share_embeddings_and_output_weights and (chunk.pre_process or chunk.post_process)
    return tied or bool(chunk.config.mtp_num_layers and (chunk.pre_process or chunk.mtp_process))


def _router_biases(chunk: PolicyModel) -> list[tuple[str, Tensor]]:
    return [(name, buffer) for name, buffer in chunk.named_buffers() if name.endswith("router.expert_bias")]


def _compare(what: str, group: dist.ProcessGroup, digests: dict[str, Tensor]) -> str:
    """ "" if all ranks of the group have the same digests, otherwise which parameter differs on which ranks."""
    if group.size() == 1 or not digests:
        return ""
    mine = torch.stack(list(digests.values()))
    lowest, highest = mine.clone(), mine.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN, group=group)
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    differing = (lowest != highest).any(1).nonzero()[:, 0].tolist()
    if not differing:
        return ""
    first = differing[0]
    values = [torch.empty_like(mine[first]) for _ in range(group.size())]
    dist.all_gather(values, mine[first].contiguous(), group=group)
    numbers = [tuple(value.tolist()) for value in values]
    usual = max(set(numbers), key=numbers.count)
    ranks = dist.get_process_group_ranks(group)
    odd = [rank for rank, value in zip(ranks, numbers, strict=True) if value != usual]
    names = list(digests)
    return (
        f"{names[first]} on ranks {odd} against {[rank for rank in ranks if rank not in odd]} ({what}; "
        f"{len(differing)} of {len(names)} parameters differ)"
    )
