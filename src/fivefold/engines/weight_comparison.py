"""Checks that an engine holds the weights that the policy sent, by sums of bits: of the received tensors and of the held
ones."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_EXPERT = re.compile(r"(?P<layer>.*\.)experts\.\d+\.(?P<part>\w+)\.weight")
_EXPERT_PARTS = {"gate_proj": "w13_weight", "up_proj": "w13_weight", "down_proj": "w2_weight"}
_EXPERT_PARTS |= {"w1": "w13_weight", "w3": "w13_weight", "w2": "w2_weight"}


class SentWeights:
    """Sums of the received tensors, by the engine's parameter that holds them."""

    def __init__(
        self, dtypes: Mapping[str, torch.dtype], fused: Mapping[str, Sequence[str]], copies: Mapping[str, int]
    ) -> None:
        """`dtypes`: of the engine's parameters; `fused`: name of a fused linear layer -> names of the layers in the files
        that it joins; `copies`: number of tensor-parallel ranks that hold the same key/value heads of a parameter."""
        self._dtypes, self._copies, self._places = dtypes, copies, Places(dtypes, fused)
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor by its name in Hugging Face files."""
        place = self._places.of(name)
        copies = self._copies.get(place, 1) if ".q_proj." not in name else 1
        bits = copies * bit_sum(tensor.to(self._dtypes.get(place, tensor.dtype)))
        self._sums[place] = self._sums[place] + bits if place in self._sums else bits

    def missing(self, names: Iterable[str]) -> list[str]:
        """Returns the engine's parameters for which no tensor was received."""
        return sorted(name for name in names if name not in self._sums)

    def faults(self, held: Iterable[tuple[str, Tensor]], group: Any, also_wrong: Collection[str] = ()) -> list[str]:
        """Returns the differences as messages for users. All tensor-parallel ranks of the engine (`group`) call this."""
        sums_of_held = {name: bit_sum(tensor) for name, tensor in held if name in self._sums}
        if unknown := sorted(set(self._sums) - set(sums_of_held)):
            return [f"{len(unknown)} tensors have no parameter to be compared with, the first: {unknown[:3]}"]
        names = sorted(sums_of_held)
        local, expected = (torch.stack([sums[name] for name in names]).cpu() for sums in (sums_of_held, self._sums))
        total = local.clone()
        dist.all_reduce(total, group=group)
        # A parameter is either sharded over the tensor-parallel ranks or replicated on each.
        is_wrong = (expected != local) & (expected != total)
        wrong = [*(name for name, differs in zip(names, is_wrong.tolist(), strict=True) if differs), *also_wrong]
        return [f"{len(wrong)} of {len(names)} parameters are not what was sent, the first: {wrong[:3]}"] if wrong else []


def bit_sum(tensor: Tensor) -> Tensor:
    """Returns the sum of all bit patterns, modulo 2^64: independent of a kernel's order of the numbers and of zero
    padding."""
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    # Adding 0 turns -0 into 0, as a product may do.
    return (tensor.detach() + 0).contiguous().view(kind).sum(dtype=torch.int64)


class Places:
    """Lookup of the engine's parameter that holds a tensor of the files; vLLM and SGLang use the same names."""

    def __init__(self, names: Collection[str], fused: Mapping[str, Sequence[str]]) -> None:
        """`fused`: name of a fused linear layer -> names of the layers in the files that it joins, as the engine's models
        define them."""
        self._names = names
        self._wholes = [(f".{part}.", f".{joined}.") for joined, parts in {**_FUSED, **fused}.items() for part in parts]
        self._experts = {
            (name.partition("experts.")[0], end): name
            for name in names
            for end in ("w13_weight", "w2_weight")
            if name.endswith(end)
        }

    def of(self, name: str) -> str:
        """Returns the parameter that holds the tensor `name`: the name itself if the tensor is not fused."""
        if expert := _EXPERT.fullmatch(name):
            return self._experts.get((expert["layer"], _EXPERT_PARTS.get(expert["part"], "")), name)
        for part, joined in self._wholes:
            if part in name and (held := name.replace(part, joined)) in self._names:
                return held
        return name
