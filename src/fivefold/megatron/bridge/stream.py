"""The parameters of all ranks -> (Hugging Face name, full tensor), in buckets, on every rank."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.megatron.bridge.families import Mapped, mapped_names
from fivefold.megatron.mesh import Mesh
from fivefold.model_shape import ModelShape


class WeightStream:
    """Streams full tensors out of a model that is cut over a mesh; the plan is made once."""

    def __init__(
        self, parameters: dict[str, torch.nn.Parameter], shape: ModelShape, mesh: Mesh, dtype: torch.dtype, bucket_mb: int
    ) -> None:
        self._parameters, self._shape, self._mesh, self._dtype = parameters, shape, mesh, dtype
        own = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        everywhere: list[dict[str, tuple[int, ...]] | None] = [None] * mesh.layout.pp
        dist.all_gather_object(everywhere, own, group=mesh.ranks.pp)
        shapes = {name: size for stage in everywhere for name, size in (stage or {}).items()}
        limit = bucket_mb * 2**20 // dtype.itemsize // mesh.layout.tp
        self._buckets: list[list[tuple[Mapped, torch.Size]]] = []
        filling = 0
        for item in mapped_names(shape, mesh.layout.pp):
            size = torch.Size(shapes[item.mcore])
            new = not self._buckets or self._buckets[-1][-1][0].stage != item.stage or filling + size.numel() > limit
            if new:
                self._buckets.append([])
                filling = 0
            self._buckets[-1].append((item, size))
            filling += size.numel()

    @torch.no_grad()
    def __call__(self) -> Iterator[tuple[str, Tensor]]:
        """Collective: every rank must run it to its end."""
        mesh = self._mesh
        for bucket in self._buckets:
            stage = bucket[0][0].stage
            if mesh.pp.rank() == stage:
                flat = torch.cat([self._parameters[item.mcore].detach().flatten() for item, _ in bucket])
            else:
                flat = torch.empty(sum(size.numel() for _, size in bucket), dtype=self._dtype, device=mesh.device)
            if mesh.layout.pp > 1:
                dist.broadcast(flat, mesh.stage_ranks[stage], group=mesh.pp)
            everyone = flat[None]
            if mesh.layout.tp > 1:
                gathered = flat.new_empty(mesh.layout.tp * len(flat))
                dist.all_gather_into_tensor(gathered, flat, group=mesh.tp)
                everyone = gathered.view(mesh.layout.tp, -1)
            begin = 0
            for item, size in bucket:
                shards = [row[begin : begin + size.numel()].view(size) for row in everyone]
                yield from zip(item.hf, item.cut.merge(shards, self._shape), strict=True)
                begin += size.numel()
