"""The parameters of all ranks -> (Hugging Face name, full tensor), in buckets, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.distributed.objects import all_gather_json
from fivefold.megatron.bridge.sharding import SHARDERS
from fivefold.megatron.mesh import Mesh
from fivefold.models.families import parameters_of
from fivefold.models.parameters import MappedParameter
from fivefold.models.spec import ModelSpec


@dataclass(frozen=True)
class _Piece:
    """One parameter of this rank, and the parameters of the model that gathering it over ranks yields."""

    stage: int
    shape: torch.Size
    dtype: torch.dtype
    parameters: tuple[MappedParameter, ...]
    """One entry for a dense parameter; for experts, one entry per expert-parallel rank, in rank order."""


class WeightStream:
    """Streams full tensors from a model sharded over a mesh; the plan is made once and is the same on every rank."""

    def __init__(
        self,
        named: Callable[[], dict[str, Tensor]],
        spec: ModelSpec,
        mesh: Mesh,
        bucket_mb: int,
        parameters: Iterable[MappedParameter] | None = None,
    ) -> None:
        """Plan the stream; `parameters` describe what `named` returns in the whole model (default: all its weights)."""
        self._named, self._spec, self._mesh = named, spec, mesh
        layout = mesh.layout
        local = {name: (list(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in named().items()}
        held = {
            name: (stage, tuple(sizes), getattr(torch, dtype))
            for stage, names in enumerate(all_gather_json(local, mesh.ranks.pp))
            for name, (sizes, dtype) in reversed(names.items())
        }
        pieces: list[_Piece] = []
        experts: dict[str, list[MappedParameter]] = {}
        per_rank = spec.moe.num_experts // layout.ep if spec.moe is not None else 0
        for item in parameters_of(spec) if parameters is None else parameters:
            if item.expert is None:
                stage, sizes, dtype = self._place(held, item)
                pieces.append(_Piece(stage, torch.Size(sizes), dtype, (item,)))
                continue
            # Expert i of every expert-parallel rank is gathered at once.
            group = experts.setdefault(f"{item.row}.{item.layer}.{item.expert % per_rank}", [])
            group.append(item)
            if len(group) == layout.ep:
                stage, sizes, dtype = self._place(held, group[mesh.ranks.coords.ep])
                pieces.append(_Piece(stage, torch.Size(sizes), dtype, tuple(group)))
        self._buckets: list[list[_Piece]] = []
        filling = 0
        for piece in pieces:
            ranks = self._ranks(piece)
            limit = bucket_mb * 2**20 // ranks
            size = piece.shape.numel() * piece.dtype.itemsize
            last = self._buckets[-1][-1] if self._buckets else None
            alike = last is not None and (last.stage, last.dtype, self._is_expert(last)) == (
                piece.stage,
                piece.dtype,
                self._is_expert(piece),
            )
            if not alike or filling + size > limit:
                self._buckets.append([])
                filling = 0
            self._buckets[-1].append(piece)
            filling += size

    @staticmethod
    def _place(
        held: dict[str, tuple[int, tuple[int, ...], torch.dtype]], item: MappedParameter
    ) -> tuple[int, tuple[int, ...], torch.dtype]:
        assert item.mcore in held, f"no pipeline stage holds {item.mcore}"
        return held[item.mcore]

    @staticmethod
    def _is_expert(piece: _Piece) -> bool:
        return piece.parameters[0].expert is not None

    def _ranks(self, piece: _Piece) -> int:
        return self._mesh.layout.ep * self._mesh.layout.etp if self._is_expert(piece) else self._mesh.layout.tp

    @torch.no_grad()
    def __call__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, full tensor); collective: every rank must iterate to the end."""
        mesh, named = self._mesh, self._named()
        for bucket in self._buckets:
            stage, expert, ranks = bucket[0].stage, self._is_expert(bucket[0]), self._ranks(bucket[0])
            if mesh.pp.rank() == stage:
                mine = mesh.ranks.coords.ep if expert else 0
                flat = torch.cat([named[piece.parameters[mine].mcore].detach().flatten() for piece in bucket])
            else:
                size = sum(piece.shape.numel() for piece in bucket)
                flat = torch.empty(size, dtype=bucket[0].dtype, device=mesh.device)
            if mesh.layout.pp > 1:
                dist.broadcast(flat, mesh.stage_ranks[stage], group=mesh.pp)
            everyone = flat[None]
            if ranks > 1:
                gathered = flat.new_empty(ranks * len(flat))
                dist.all_gather_into_tensor(gathered, flat, group=mesh.experts if expert else mesh.tp)
                everyone = gathered.view(ranks, -1)
            begin = 0
            for piece in bucket:
                end = begin + piece.shape.numel()
                shards = [row[begin:end].view(piece.shape) for row in everyone]
                per_whole = ranks // len(piece.parameters)
                for number, item in enumerate(piece.parameters):
                    shards_of_item = shards[number * per_whole : (number + 1) * per_whole]
                    yield from zip(item.hf, SHARDERS[item.sharding].merge(shards_of_item, self._spec), strict=True)
                begin = end
