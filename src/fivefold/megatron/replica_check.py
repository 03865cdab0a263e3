"""Compares the copies of Megatron-Core's parameters that must be equal on several ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from fivefold.backend.copies import differences, digest, raise_together
from fivefold.distributed.objects import all_gather_json
from fivefold.megatron.layers.layer_spec import PolicyModel
from fivefold.megatron.mesh import Mesh


@torch.no_grad()
def verify_copies(chunks: list[PolicyModel], mesh: Mesh) -> None:
    """Raise ReplicaError on all ranks if copies differ: over replicas, tensor-parallel duplicates, tied embeddings."""
    named = {
        f"{number}.{name}" if len(chunks) > 1 else name: tensor
        for number, chunk in enumerate(chunks)
        for name, tensor in [*chunk.named_parameters(), *_router_biases(chunk)]
    }
    dense = {name for name, tensor in named.items() if getattr(tensor, "allreduce", True)}
    duplicated = {name for name in dense if not getattr(named[name], "tensor_model_parallel", False)}
    comparisons = [
        ("data-parallel replicas", mesh.dp, dense),
        ("expert replicas", mesh.expert_dp, named.keys() - dense),
        ("tensor-parallel duplicates", mesh.tp, duplicated),
    ]
    faults = differences(named, comparisons, mesh.device)
    ends = [chunk for chunk in chunks if _has_end(chunk)]
    if mesh.layout.pp > 1:
        # Every rank of the pipeline takes part; ranks that hold neither end contribute an empty list.
        local = [digest(chunk.shared_embedding_or_output_weight()).tolist() for chunk in ends]
        everyone = all_gather_json(local, mesh.ranks.pp)
        held = {rank: values for rank, values in zip(mesh.stage_ranks, everyone, strict=True) if values}
        if len({str(value) for values in held.values() for value in values}) > 1:
            faults.append(f"the tied embedding differs between the pipeline's ends, ranks {sorted(held)}")
    raise_together(faults, mesh.ranks.members)


def _has_end(chunk: PolicyModel) -> bool:
    """Whether the chunk holds an embedding that is also the output layer, or that multi-token prediction copies."""
    tied = chunk.share_embeddings_and_output_weights and (chunk.pre_process or chunk.post_process)
    return tied or bool(chunk.config.mtp_num_layers and (chunk.pre_process or chunk.mtp_process))


def _router_biases(chunk: PolicyModel) -> list[tuple[str, Tensor]]:
    return [(name, buffer) for name, buffer in chunk.named_buffers() if name.endswith("router.expert_bias")]
