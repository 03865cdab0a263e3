"""Which parameters got a gradient on this rank: ranks must train the same ones, and parts that a rank skips are named."""

from __future__ import annotations

import zlib

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fivefold.distributed.objects import all_gather_json
from fivefold.errors import RunError
from fivefold.fsdp.mesh import Mesh
from fivefold.fsdp.packed_model import PackedModel, fsdp_modules
from fivefold.fsdp.parameters import LocalTensor, own_name

_MOST = 4
"""Number of names in a message."""


class UsedParameters:
    """Watches the backward passes of a model and reports parameters without a gradient, once for each set of them."""

    def __init__(self, model: PackedModel, tensors: list[LocalTensor], mesh: Mesh) -> None:
        self._tensors, self._mesh = tensors, mesh
        self._used: set[str] = set()
        self._watched: set[int] = set()
        self._complete: set[int] = set()
        """Units of which every trained parameter is watched."""
        self._reported: set[str] = set()
        self._prefixes = {id(module): f"{name}." if name else "" for name, module in model.named_modules()}
        for unit in fsdp_modules(model):
            unit.register_forward_pre_hook(self._watch)

    def _watch(self, unit: torch.nn.Module, inputs: object) -> None:
        """Watch the gathered parameters of a unit: FSDP keeps the same objects for all passes."""
        if not torch.is_grad_enabled() or id(unit) in self._complete:
            return
        trained = [(name, parameter) for name, parameter in unit.named_parameters() if parameter.requires_grad]
        if not any(isinstance(parameter, DTensor) for _, parameter in trained):
            self._complete.add(id(unit))
        for name, parameter in trained:
            if isinstance(parameter, DTensor) or id(parameter) in self._watched:
                continue
            self._watched.add(id(parameter))
            whole_name = own_name(self._prefixes[id(unit)] + name)
            parameter.register_post_accumulate_grad_hook(lambda _, whole_name=whole_name: self._used.add(whole_name))

    def begin(self) -> None:
        """Raise RunError if the ranks do not train the same parameters, before they wait for each other. Collective."""
        self._used.clear()
        trained = self._trained()
        number = zlib.crc32("\n".join(trained).encode())
        both = torch.tensor([number, -number])
        dist.all_reduce(both, dist.ReduceOp.MAX, group=self._mesh.ranks.members)
        if int(both[0]) == -int(both[1]):
            return
        names = all_gather_json(trained, self._mesh.ranks.members)
        every = set().union(*names)
        frozen = {name: [rank for rank, theirs in enumerate(names) if name not in theirs] for name in sorted(every)}
        raise RunError(f"all ranks must train the same parameters: {_named({n: r for n, r in frozen.items() if r})}")

    def finish(self) -> None:
        """Report parameters that got no gradient on some rank: its share of their gradient is 0. Collective."""
        lacking = [name for name in self._trained() if name not in self._used]
        count = torch.tensor(len(lacking))
        dist.all_reduce(count, group=self._mesh.ranks.members)
        if not count:
            return
        names = all_gather_json(lacking, self._mesh.ranks.members)
        ranks = {name: [rank for rank, theirs in enumerate(names) if name in theirs] for name in sorted(set().union(*names))}
        new = {name: places for name, places in ranks.items() if name not in self._reported}
        self._reported |= set(new)
        if new and self._mesh.ranks.leads:
            print(f"note     no gradient, so their share counts as 0: {_named(new)}", flush=True)

    def _trained(self) -> list[str]:
        return [tensor.name for tensor in self._tensors if tensor.parameter is not None and tensor.parameter.requires_grad]


def _named(ranks: dict[str, list[int]]) -> str:
    listed = [
        f"{name} (not on rank{'s' * (len(places) > 1)} {', '.join(map(str, places))})" for name, places in ranks.items()
    ]
    return ", ".join(listed[:_MOST]) + (f" and {len(listed) - _MOST} more" if len(listed) > _MOST else "")
