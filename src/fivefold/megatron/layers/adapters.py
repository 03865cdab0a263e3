"""Low-rank adapters beside Megatron-Core's linear maps: y = W x + alpha / rank · B A x, W frozen (LoRA, 2106.09685, eq. 3).

A product that Megatron-Core fuses (queries, keys and values; gate and up) has an A and a B for each map in it, so that every
adapter is one of PEFT's. Tensor-parallel ranks divide B where they divide what the map gives, A where they divide what it
reads; the other one all of them hold. Between the two there are `rank` numbers a token, and only those are exchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from fivefold.megatron.layers.mla import ReplicatedLinear
from fivefold.models.adapters import Adapter, LoraSpec
from fivefold.models.parameters import Sharding


class Pair(torch.nn.Module):
    """A and B of one map, as far as this rank holds them."""

    def __init__(self, lora_A: Tensor, lora_B: Tensor) -> None:
        super().__init__()
        self.lora_A, self.lora_B = torch.nn.Parameter(lora_A), torch.nn.Parameter(lora_B)


class Adapters(torch.nn.Module):
    """The adapters of one linear module of Megatron-Core: what it reads -> what is added to what it gives."""

    def __init__(self, linear: Any, maps: Sequence[Adapter], lora: LoraSpec, groups: int, tp: dist.ProcessGroup) -> None:
        """`maps` are all that the module computes, in their order, in as many `groups` as this rank has of them."""
        super().__init__()
        self.is_on = True
        self._scale, self._groups, self._tp = lora.scale, groups, tp
        self._sequence_parallel = bool(linear.config.sequence_parallel)
        self._sharding, weight = maps[0].sharding, linear.weight
        is_divided, parts = self._sharding is not Sharding.REPLICATE, tp.size()
        self._out = {each.name: each.out // (parts if is_divided and not each.is_row_parallel else 1) for each in maps}
        """[rows of this rank] of each map."""
        for each in maps:
            if not each.is_adapted:
                continue
            into = each.into // (parts if each.is_row_parallel else 1)
            pair = Pair(weight.new_empty(lora.rank, into), weight.new_empty(self._out[each.name], lora.rank))
            whole, divided = (pair.lora_B, pair.lora_A) if each.is_row_parallel else (pair.lora_A, pair.lora_B)
            # What all ranks hold sees the tokens of its own part of the sequence only: Megatron-Core sums its gradient.
            _mark(whole, sequence_parallel=self._sequence_parallel)
            if is_divided:
                axis = 1 if each.is_row_parallel else 0
                _mark(divided, tensor_model_parallel=True, partition_dim=axis, partition_stride=1)
            else:
                _mark(divided, sequence_parallel=self._sequence_parallel)
            self.add_module(each.name, pair)

    @property
    def pairs(self) -> dict[str, Pair]:
        """By the map's name, as far as it is adapted."""
        return {name: pair for name, pair in self.named_children() if isinstance(pair, Pair)}

    def forward(self, x: Tensor) -> Tensor:
        """What the adapters add to the output of this rank."""
        pairs = list(self.pairs.values())
        low = F.linear(x, torch.cat([pair.lora_A for pair in pairs])) * self._scale
        if self._sharding is Sharding.ROW:
            if self._sequence_parallel:
                low = reduce_scatter_to_sequence_parallel_region(low, group=self._tp)
            else:
                low = reduce_from_tensor_model_parallel_region(low, group=self._tp)
        elif self._sharding is not Sharding.REPLICATE:
            if self._sequence_parallel:
                low = gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True, group=self._tp)
            else:
                low = copy_to_tensor_model_parallel_region(low, group=self._tp)
        parts = low.chunk(len(pairs), -1)
        return self._join([F.linear(part, pair.lora_B) for part, pair in zip(parts, pairs, strict=True)])

    @torch.no_grad()
    def merge(self, weight: Tensor) -> Tensor:
        """W + alpha / rank · B A of this rank, computed in float32, in the dtype of W."""
        added = self._join([(pair.lora_B.float() @ pair.lora_A.float()).t() for pair in self.pairs.values()])
        return torch.add(weight.detach().float(), added.t(), alpha=self._scale).to(weight.dtype)

    def _join(self, adapted: list[Tensor]) -> Tensor:
        """[..., rows of a map] each -> [..., rows of the module]: group by group, 0 for maps without an adapter."""
        given, first = dict(zip(self.pairs, adapted, strict=True)), adapted[0]
        every = [given[name] if name in given else first.new_zeros(*first.shape[:-1], n) for name, n in self._out.items()]
        if len(every) == 1:
            return every[0]
        return torch.cat([part.unflatten(-1, (self._groups, -1)) for part in every], -1).flatten(-2)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Each tensor by the axis along which ranks divide it."""
        tensors = self.state_dict(prefix="", keep_vars=True)
        axes = {name: axis for name, each in tensors.items() if (axis := getattr(each, "partition_dim", -1)) >= 0}
        groups = {"tp_group": self._tp, "dp_cp_group": (metadata or {})["dp_cp_group"]}
        found: dict[str, Any] = make_sharded_tensors_for_checkpoint(tensors, prefix, axes, sharded_offsets, **groups)
        return found


def _mark(parameter: Tensor, **marks: Any) -> None:
    for name, value in marks.items():
        setattr(parameter, name, value)


class _Adapted:
    """A linear module with adapters; its weight is what they are added to."""

    adapters: Adapters

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(x, *args, **kwargs)  # type: ignore[misc]
        return output + self.adapters(x) if self.adapters.is_on else output, bias

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        # The module takes all that is in it for its own and whole on every rank.
        found: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        return found | self.adapters.sharded_state_dict(f"{prefix}adapters.", sharded_offsets, metadata)


class AdaptedColumn(_Adapted, ColumnParallelLinear):
    pass


class AdaptedRow(_Adapted, RowParallelLinear):
    pass


class AdaptedReplicated(_Adapted, ReplicatedLinear):
    pass


_ADAPTED: dict[type, type] = {
    ColumnParallelLinear: AdaptedColumn,
    RowParallelLinear: AdaptedRow,
    ReplicatedLinear: AdaptedReplicated,
}


def adapt(linear: torch.nn.Module, maps: Sequence[Adapter], lora: LoraSpec, groups: int, tp: dist.ProcessGroup) -> None:
    """Put adapters beside a linear module; their content is not yet set."""
    kind = type(linear)
    if kind not in _ADAPTED or getattr(linear, "explicit_expert_comm", False):
        raise ValueError(
            f"policy.lora: {maps[0].linear} is a {kind.__name__} that has no adapters here: leave "
            "megatron.transformer_impl and megatron.transformer.moe_shared_expert_overlap as they are by default"
        )
    # Same weight, same checkpoint key; what it computes is ours.
    linear.__class__ = _ADAPTED[kind]
    linear.add_module("adapters", Adapters(linear, maps, lora, groups, tp))


def is_adapter(name: str) -> bool:
    """A parameter of that name is an adapter's."""
    return ".adapters." in name


def adapters_in(model: torch.nn.Module) -> Iterator[tuple[str, Adapters]]:
    """(name of the linear module, its adapters)."""
    for name, module in model.named_modules():
        if isinstance(module, _Adapted):
            yield name, module.adapters


@contextmanager
def switched_off(models: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Models compute without their adapters meanwhile."""
    found = [adapters for model in models for _, adapters in adapters_in(model)]
    for adapters in found:
        adapters.is_on = False
    try:
        yield
    finally:
        for adapters in found:
            adapters.is_on = True
