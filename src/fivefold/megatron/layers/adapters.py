"""Low-rank adapters on Megatron-Core's linear modules: y = W x + alpha / rank · B A x, W frozen (LoRA, 2106.09685, eq. 3).

A product that Megatron-Core fuses (queries, keys and values; gate and up) has an A and a B for each linear map in it, so
that every adapter matches one of PEFT's. Tensor-parallel ranks divide B if they divide the map's output, and A if they
divide its input. Every rank holds the other matrix whole. Only the `rank` numbers per token between A and B are exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from fivefold.errors import UserError
from fivefold.layout import Coordinates
from fivefold.megatron.layers.mla import ReplicatedLinear
from fivefold.megatron.layers.moe import GroupedExperts
from fivefold.megatron.layers.recompute import LastLinear
from fivefold.models.adapters import Adapter, LoraSpec
from fivefold.models.parameters import Sharding


class Pair(torch.nn.Module):
    """A and B of one adapter, as far as this rank holds them."""

    def __init__(self, lora_A: Tensor, lora_B: Tensor) -> None:
        super().__init__()
        self.lora_A, self.lora_B = torch.nn.Parameter(lora_A), torch.nn.Parameter(lora_B)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return A and B; if parameters are gathered during the forward pass, this call waits for them."""
        return self.lora_A, self.lora_B


class LostToRounding:
    """Sums over merged weights, on the device: how much of what adapters add is lost in the dtype of their readers."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        """Start both sums at 0; `dtype` is what an engine or a file stores the weights in."""
        self.dtype = dtype
        self.sums_2 = torch.zeros(2, dtype=torch.float64, device=device)
        """[2] scalar products with what adapters add: of the part that is lost, and of all of it."""

    def add(self, weight: Tensor, merged: Tensor, share: Tensor) -> None:
        """Count one weight: compare `share` with the difference that the adapters make to the reader's weight."""
        arrives = merged.to(self.dtype).float() - weight.to(self.dtype).float()
        self.sums_2 += torch.stack([(part * share).sum(dtype=torch.float64) for part in (share - arrives, share)])


MANTISSA_LACKS = {torch.bfloat16: 16, torch.float16: 13}
"""Dtype -> number of mantissa bits of float32 that it lacks."""
HASHED = {0: -25033, 1: 30903, 41: -14057}
"""Offset of a weight from the one that is rounded -> factor of its bits in the hash, modulo 2^16."""


def stochastically_rounded(exact: Tensor, weight: Tensor, axis: int) -> Tensor:
    """Round `exact`, a float32 tensor, to the dtype of `weight` by stochastic rounding (1502.02551, section 3.1).

    Adapters add less than half the distance of two bfloat16 numbers to most weights, and rounding to the nearest removes
    that. Here the probability of rounding up is the distance to the lower number, so the mean is exact. The random number
    of a weight is a hash of the weight and two others along `axis`, which no rank divides: it is the same on every layout
    and after every update. One other weight is not enough where weights were quantized in blocks. Numbers that the dtype
    can represent stay. In float16, numbers below 6e-5 are rounded to the nearest.
    """
    lacking = MANTISSA_LACKS.get(weight.dtype)
    if lacking is None:
        return exact.to(weight.dtype)
    bits = weight.view(torch.int16)
    # Products overflow; their upper bits depend on all bits of the weights.
    drawn = bits * HASHED[0]
    for distance, factor in HASHED.items():
        if distance:
            drawn.add_(bits.roll(distance, axis).mul_(factor))
    upward = drawn.int().bitwise_and_(0xFFFF).bitwise_right_shift_(16 - lacking).add_(exact.view(torch.int32))
    return upward.bitwise_right_shift_(lacking).bitwise_left_shift_(lacking).view(torch.float32).to(weight.dtype)


@dataclass(frozen=True)
class Merge:
    """Merges an adapter into a weight, W -> W + alpha / rank · B A, computed in float32 and returned in the dtype of W.

    A weight in float32 gets numbers that its readers' dtype has: they would round to the nearest.
    """

    product: Callable[[], Tensor]
    """Function that returns B A, as far as this rank holds it."""
    scale: float
    whole_axis: int
    """Axis of the weight that no rank divides."""
    is_counted: bool
    """This rank counts the weight in sums over all ranks."""

    @torch.no_grad()
    def __call__(self, weight: Tensor, lost: LostToRounding) -> Tensor:
        """Return the merged weight; `lost` has its readers' dtype and counts what rounding takes away from the adapters."""
        product, weight = self.product(), weight.detach()
        base = weight.to(lost.dtype) if weight.dtype == torch.float32 else weight
        exact = torch.add(base.float(), product, alpha=self.scale)
        merged = stochastically_rounded(exact, base, self.whole_axis).to(weight.dtype)
        if self.is_counted:
            lost.add(weight, merged, product * self.scale)
        return merged


class Adapters(torch.nn.Module):
    """The adapters of one linear module of Megatron-Core: the module's input -> what is added to its output."""

    def __init__(self, linear: Any, maps: Sequence[Adapter], lora: LoraSpec, groups: int, tp: dist.ProcessGroup) -> None:
        """Create the adapters; `maps` are all linear maps of the module in order, in as many `groups` as this rank holds."""
        super().__init__()
        self.is_on = True
        self._scale, self._groups, self._tp = lora.scale, groups, tp
        self._sequence_parallel = bool(linear.config.sequence_parallel)
        self._sharding, weight = maps[0].sharding, linear.weight
        is_divided, parts = self._sharding is not Sharding.REPLICATE, tp.size()
        self._out = {
            adapter.name: adapter.out // (parts if is_divided and not adapter.is_row_parallel else 1) for adapter in maps
        }
        """Number of this rank's rows of each map."""
        for adapter in maps:
            if not adapter.is_adapted:
                continue
            into = adapter.into // (parts if adapter.is_row_parallel else 1)
            pair = Pair(weight.new_empty(lora.rank, into), weight.new_empty(self._out[adapter.name], lora.rank))
            full, divided = (pair.lora_B, pair.lora_A) if adapter.is_row_parallel else (pair.lora_A, pair.lora_B)
            # A matrix that all ranks hold sees only this rank's part of the sequence: Megatron-Core sums its gradient.
            _mark(full, sequence_parallel=self._sequence_parallel)
            if is_divided:
                axis = 1 if adapter.is_row_parallel else 0
                _mark(divided, tensor_model_parallel=True, partition_dim=axis, partition_stride=1)
            else:
                _mark(divided, sequence_parallel=self._sequence_parallel)
            self.add_module(adapter.name, pair)

    @property
    def pairs(self) -> dict[str, Pair]:
        """Name of an adapted linear layer -> its A and B."""
        return {name: pair for name, pair in self.named_children() if isinstance(pair, Pair)}

    def forward(self, x: Tensor) -> Tensor:
        """Return what the adapters add to the output of this rank."""
        pairs = [pair() for pair in self.pairs.values()]
        low = F.linear(x, torch.cat([a for a, _ in pairs])) * self._scale
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
        return self._join([F.linear(part, b) for part, (_, b) in zip(parts, pairs, strict=True)])

    def merges(self, place: Coordinates) -> Iterator[tuple[str, Merge]]:
        """Yield (`weight`, its Merge); among ranks that hold the same weight, one counts it."""
        is_counted = place.dp == place.cp == 0 and (self._sharding is not Sharding.REPLICATE or place.tp == 0)
        yield "weight", Merge(self._product, self._scale, 0 if self._sharding is Sharding.ROW else 1, is_counted)

    def _product(self) -> Tensor:
        """Return B A of this rank, in float32."""
        return self._join([(pair.lora_B.float() @ pair.lora_A.float()).t() for pair in self.pairs.values()]).t()

    def _join(self, adapted: list[Tensor]) -> Tensor:
        """Join [..., rows of a map] to [..., rows of the module], group by group; maps without an adapter give 0."""
        by_name, first = dict(zip(self.pairs, adapted, strict=True)), adapted[0]
        every = [
            by_name[name] if name in by_name else first.new_zeros(*first.shape[:-1], n) for name, n in self._out.items()
        ]
        if len(every) == 1:
            return every[0]
        return torch.cat([part.unflatten(-1, (self._groups, -1)) for part in every], -1).flatten(-2)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the sharded tensors, each with the axis along which ranks divide it."""
        tensors = self.state_dict(prefix="", keep_vars=True)
        axes = {name: axis for name, tensor in tensors.items() if (axis := getattr(tensor, "partition_dim", -1)) >= 0}
        groups = {"tp_group": self._tp, "dp_cp_group": (metadata or {})["dp_cp_group"]}
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(tensors, prefix, axes, sharded_offsets, **groups)
        return sharded


def _mark(parameter: Tensor, **marks: Any) -> None:
    for name, value in marks.items():
        setattr(parameter, name, value)


class _Adapted:
    """A linear module with adapters, whose output is added to the module's."""

    adapters: Adapters

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(x, *args, **kwargs)  # type: ignore[misc]
        return output + self.adapters(x) if self.adapters.is_on else output, bias

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        # The module would treat everything in it as its own, replicated on every rank.
        sharded: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        return sharded | self.adapters.sharded_state_dict(f"{prefix}adapters.", sharded_offsets, metadata)


class AdaptedColumn(_Adapted, ColumnParallelLinear):
    pass


class AdaptedRow(_Adapted, RowParallelLinear):
    pass


class AdaptedLast(_Adapted, LastLinear):  # type: ignore[misc]
    pass


class AdaptedReplicated(_Adapted, ReplicatedLinear):  # type: ignore[misc]
    pass


_ADAPTED: dict[type, type] = {
    ColumnParallelLinear: AdaptedColumn,
    RowParallelLinear: AdaptedRow,
    LastLinear: AdaptedLast,
    ReplicatedLinear: AdaptedReplicated,
}


class ExpertAdapters(torch.nn.Module):
    """The adapters of a layer's routed experts on this rank: an A and a B for each expert and map, stacked like the weights.

    Ranks that divide an expert (etp) read all of its tokens and hold a part of its inner dimension. Each of them holds A of
    gate and up and B of down whole, and computes a part of their gradient.
    """

    def __init__(self, experts: GroupedExperts, maps: Sequence[Adapter], lora: LoraSpec) -> None:
        """Create the adapters; `maps` are one expert's, in order: all maps of each product that has an adapter."""
        super().__init__()
        self.is_on = True
        self._scale, self._experts = lora.scale, (experts,)
        rank, parts = experts.etp_group.rank(), experts.etp_group.size()
        self._maps = {part: tuple(adapter for adapter in maps if adapter.row.endswith(part)) for part in ("fc1", "fc2")}
        self._axes: dict[int, int | None] = {}
        """Axis along which an expert's ranks divide a parameter, by its id; None if every rank holds it whole."""
        for adapter in maps:
            if not adapter.is_adapted:
                continue
            out, into = (
                (adapter.out, adapter.into // parts) if adapter.is_row_parallel else (adapter.out // parts, adapter.into)
            )
            new = experts.fc1.new_empty
            pair = Pair(new(experts.count, lora.rank, into), new(experts.count, out, lora.rank))
            for parameter in pair.parameters():
                # Marked like experts' weights: they differ on every rank of a replica and are reduced over expert replicas.
                _mark(parameter, tensor_model_parallel=True, partition_dim=0, partition_stride=1, allreduce=False)
            full, divided, axis = (pair.lora_B, pair.lora_A, 2) if adapter.is_row_parallel else (pair.lora_A, pair.lora_B, 1)
            # A matrix that all ranks of an expert hold counts only once in the gradient norm.
            _mark(full, shared=rank > 0)
            self._axes |= {id(full): None, id(divided): axis}
            self.add_module(adapter.name, pair)

    def forward(self, x: Tensor, tokens_per_expert: Tensor, part: str) -> Tensor | float:
        """Return what the adapters add to the product `part` of tokens that are sorted by expert."""
        (experts,) = self._experts
        product, products = experts._product, list[Tensor | None]()
        for adapter in self._maps[part]:
            if not adapter.is_adapted:
                products.append(None)
                continue
            a, b = (self._summed(tensor) for tensor in self.get_submodule(adapter.name)())
            products.append(product(product(x, a, tokens_per_expert) * self._scale, b, tokens_per_expert))
        return _side_by_side(products)

    def _summed(self, parameter: Tensor) -> Tensor:
        """Return the parameter; its gradient is the sum over the ranks that hold it whole."""
        if self._axes[id(parameter)] is not None:
            return parameter
        summed: Tensor = copy_to_tensor_model_parallel_region(parameter, group=self._experts[0].etp_group)
        return summed

    def by_expert(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (`7.fc1.adapters.gate_proj.lora_A`, view) with the expert's number in the whole model."""
        (experts,) = self._experts
        first = experts.ep_group.rank() * experts.count
        for part, maps in self._maps.items():
            for adapter in maps:
                for name, parameter in self.named_parameters() if adapter.is_adapted else ():
                    if name.startswith(f"{adapter.name}."):
                        for index, view in enumerate(parameter.detach()):
                            yield f"{first + index}.{part}.adapters.{name}", view

    def merges(self, place: Coordinates) -> Iterator[tuple[str, Merge]]:
        """Yield (`7.fc1`, the Merge of that expert's weight) for the products that have adapters."""
        (experts,) = self._experts
        first = experts.ep_group.rank() * experts.count
        for part, maps in self._maps.items():
            if any(adapter.is_adapted for adapter in maps):
                axis = 0 if maps[0].is_row_parallel else 1
                for index in range(experts.count):
                    product = partial(self._product, index, maps)
                    yield f"{first + index}.{part}", Merge(product, self._scale, axis, place.edp == 0)

    def _product(self, index: int, maps: Sequence[Adapter]) -> Tensor:
        """Return B A of one expert, in float32."""
        products: list[Tensor | None] = []
        for adapter in maps:
            product = None
            if adapter.is_adapted:
                a, b = self.get_submodule(adapter.name)()
                product = (b[index].float() @ a[index].float()).t()
            products.append(product)
        added = _side_by_side(products)
        assert isinstance(added, Tensor)
        return added.t()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, ShardedTensor]:
        """Return the sharded tensors with the experts' numbers in the whole model, like the experts' weights."""
        (experts,), axes = self._experts, len(sharded_offsets)
        ep, etp = ((group.rank(), group.size()) for group in (experts.ep_group, experts.etp_group))
        sharded = {}
        for name, parameter in self.named_parameters():
            axis = self._axes[id(parameter)]
            sharded[f"{prefix}{name}"] = ShardedTensor.from_rank_offsets(
                f"{prefix}{name}",
                parameter,
                *sharded_offsets,
                (axes, *ep),
                *([] if axis is None else [(axes + axis, *etp)]),
                replica_id=(0, etp[0] if axis is None else 0, experts.dp_group.rank()),
                prepend_axis_num=axes,
            )
        return sharded


def _side_by_side(parts: Sequence[Tensor | None]) -> Tensor | float:
    """Concatenate [..., n] parts along the last axis, 0 for None; all maps of one product have the same size."""
    some = next((part for part in parts if part is not None), None)
    if some is None:
        return 0.0
    return torch.cat([torch.zeros_like(some) if part is None else part for part in parts], -1)


class AdaptedExperts(GroupedExperts):
    """Routed experts with adapters."""

    adapters: ExpertAdapters

    def _up(self, tokens_TD: Tensor, tokens_per_expert: Tensor) -> Tensor:
        output = super()._up(tokens_TD, tokens_per_expert)
        return output + self.adapters(tokens_TD, tokens_per_expert, "fc1") if self.adapters.is_on else output

    def _down(self, activated: Tensor, tokens_per_expert: Tensor) -> Tensor:
        output = super()._down(activated, tokens_per_expert)
        return output + self.adapters(activated, tokens_per_expert, "fc2") if self.adapters.is_on else output

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, ShardedTensor]:
        sharded = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return sharded | self.adapters.sharded_state_dict(f"{prefix}adapters.", sharded_offsets, metadata)


def adapt_experts(experts: GroupedExperts, maps: Sequence[Adapter], lora: LoraSpec) -> None:
    """Add adapters to routed experts, the same for each expert; their values are not set yet."""
    experts.__class__ = AdaptedExperts
    experts.add_module("adapters", ExpertAdapters(experts, maps, lora))


def adapt(linear: torch.nn.Module, maps: Sequence[Adapter], lora: LoraSpec, groups: int, tp: dist.ProcessGroup) -> None:
    """Add adapters to a linear module; their values are not set yet."""
    kind = type(linear)
    if kind not in _ADAPTED or getattr(linear, "explicit_expert_comm", False):
        raise UserError(
            f"policy.lora: {maps[0].linear} is a {kind.__name__} that has no adapters here: leave "
            "megatron.transformer_impl and megatron.transformer.moe_shared_expert_overlap as they are by default"
        )
    # The weight and its checkpoint key stay the same; only the computation changes.
    linear.__class__ = _ADAPTED[kind]
    linear.add_module("adapters", Adapters(linear, maps, lora, groups, tp))


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return ".adapters." in name


def adapters_in(model: torch.nn.Module) -> Iterator[tuple[str, Adapters | ExpertAdapters]]:
    """Yield (name of the module, its adapters)."""
    for name, module in model.named_modules():
        if isinstance(module, _Adapted | AdaptedExperts):
            yield name, module.adapters


@contextmanager
def switched_off(models: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Compute without adapters inside this context."""
    switched = [adapters for model in models for _, adapters in adapters_in(model)]
    for adapters in switched:
        adapters.is_on = False
    try:
        yield
    finally:
        for adapters in switched:
            adapters.is_on = True
