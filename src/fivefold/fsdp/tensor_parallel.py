"""Tensor parallelism by transformers' plans: module names -> shards of their weights, and communication around them.

The plan of a model says which linear layers are split by output and which by input. We apply it ourselves: a rank holds its
part of each weight as a plain tensor, so the same code serves many releases of transformers. FSDP shards the parts further.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.errors import UserError
from fivefold.fsdp.collectives import copy_to, gather_last, split_last, sum_over

_STYLES = {
    "colwise": (0, False),
    "colwise_gather_output": (0, True),
    "colwise_rep": (0, True),
    "rowwise": (1, False),
    "rowwise_split_input": (1, True),
    "rowwise_rep": (1, True),
}
"""Style of a linear layer -> dimension of its weight that is split, and whether its other side is whole on every rank."""
_GATHERING = ("colwise_gather_output", "colwise_rep")
_SUMMED = "replicated_with_grad_allreduce"
"""Style of a module that every rank holds whole but applies to its own heads only: ranks have parts of its gradient."""
_IGNORED = ("lm_head", "embed_tokens")
"""Modules that are ours: the head splits the vocabulary itself."""
MENDED = {"layers.*.self_attn.q_norm": _SUMMED, "layers.*.self_attn.k_norm": _SUMMED}
"""Rules that some plans lack: norms of single heads, unless the plan gathers all heads before them."""


@dataclass(frozen=True)
class Split:
    """Way in which tensor-parallel ranks hold one parameter."""

    dim: int | None = None
    """Dimension that is split over them; None: every rank holds all of it."""
    is_summed: bool = False
    """Whether each rank has only a part of its gradient."""


def rules_of(model: Any) -> dict[str, str]:
    """Return the plan of a model of transformers: patterns of module names -> styles; raises UserError without one."""
    rules = {name: style for name, style in (model.tp_plan or {}).items() if not name.endswith(_IGNORED)}
    if not rules:
        raise UserError(
            f"t must be 1 for {model.config.model_type}: transformers has no tensor-parallel plan for it; use d, or c"
        )
    gathering = [name.rpartition(".")[0] for name, style in rules.items() if style in _GATHERING]
    prefix = next(iter(rules)).partition("layers.")[0]
    for name, style in MENDED.items():
        if f"{prefix}{name}".rpartition(".")[0] not in gathering:
            rules.setdefault(f"{prefix}{name}", style)
    return rules


def apply(model: Any, group: dist.ProcessGroup) -> dict[int, Split]:
    """Split the model's weights, which have no values yet, and put communication around them; id of parameter -> Split."""
    if group.size() == 1:
        return {}
    rules, splits = rules_of(model), dict[int, Split]()
    for name, module in model.named_modules():
        style = _style_of(name, rules)
        if style is None:
            continue
        if style == _SUMMED:
            splits |= {id(parameter): Split(None, True) for parameter in module.parameters()}
        elif style in _STYLES and isinstance(module, torch.nn.Linear):
            splits |= _split_linear(name, module, *_STYLES[style], group)
        else:
            raise UserError(
                f"t must be 1 for {model.config.model_type}: its plan has the style {style} for {name}, which is not built; "
                "use d, or c"
            )
    return splits


def _style_of(name: str, rules: dict[str, str]) -> str | None:
    return rules.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))


def _split_linear(
    name: str, module: torch.nn.Linear, dim: int, is_other_side_whole: bool, group: dist.ProcessGroup
) -> dict[int, Split]:
    parts, size = group.size(), module.weight.shape[dim]
    if size % parts:
        raise UserError(f"t must divide the {size} {'outputs' if dim == 0 else 'inputs'} of {name}: got t={parts}")
    shape = list(module.weight.shape)
    shape[dim] //= parts
    module.weight = torch.nn.Parameter(torch.empty(shape, dtype=module.weight.dtype, device="meta"))
    splits = {id(module.weight): Split(dim)}
    bias, linear = module.bias, module
    if dim == 0 and bias is not None:
        module.bias = torch.nn.Parameter(torch.empty(size // parts, dtype=bias.dtype, device="meta"))
        splits[id(module.bias)] = Split(0)

    def column(x: Tensor) -> Tensor:
        y = torch.nn.functional.linear(copy_to(x, group), linear.weight, linear.bias)
        return gather_last(y, group) if is_other_side_whole else y

    def row(x: Tensor) -> Tensor:
        x = split_last(x, group) if is_other_side_whole else x
        y = sum_over(torch.nn.functional.linear(x, linear.weight), group)
        return y if linear.bias is None else y + linear.bias

    module.forward = column if dim == 0 else row  # type: ignore[method-assign, assignment]
    return splits
