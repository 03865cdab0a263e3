"""Compares what must be equal on several ranks: tensors -> nothing, or an error that names them and the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.distributed.objects import all_gather_json
from fivefold.errors import RunError

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


def raise_together(faults: list[str], members: dist.ProcessGroup) -> None:
    """Raise ReplicaError on all ranks of the model if one of them found a fault. Collective."""
    failed = all_gather_json("; ".join(faults), members)
    if any(failed):
        texts = sorted({text for text in failed if text})
        raise ReplicaError(
            f"copies of parameters that must be equal differ, so ranks train different models: {'; '.join(texts[:4])}"
            + (f"; and {len(texts) - 4} more" if len(texts) > 4 else "")
            + ". Go back to a checkpoint from before; trainer.guard.every sets how often this is compared"
        )


def differences(
    tensors: Mapping[str, Tensor], comparisons: Iterable[tuple[str, dist.ProcessGroup, Set[str]]], device: torch.device
) -> list[str]:
    """Return which parameters differ on which ranks, for each kind of copy: its name, its group, and the tensors' names.

    Costs one pass over the tensors that have copies and two small collectives for each kind. Collective.
    """
    copied = [(copies, group, names) for copies, group, names in comparisons if group.size() > 1]
    compared = set[str]().union(*(names for _, _, names in copied))
    digests = {name: digest(tensor).to(device) for name, tensor in tensors.items() if name in compared}
    faults = [
        _compare(copies, group, {name: digests[name] for name in digests if name in names})
        for copies, group, names in copied
    ]
    return [fault for fault in faults if fault]


def _compare(copies: str, group: dist.ProcessGroup, digests: dict[str, Tensor]) -> str:
    """Return which parameter differs on which ranks of the group; "" if all have the same digests."""
    if not digests:
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
        f"{names[first]} on ranks {odd} against {[rank for rank in ranks if rank not in odd]} ({copies}; "
        f"{len(differing)} of {len(names)} parameters differ)"
    )
