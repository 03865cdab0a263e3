"""Tensor parallelism by transformers' plans: module names -> shards of their weights, and communication around them.

The plan of a model says which linear layers are split by output and which by input. We apply it ourselves: a rank holds its
part of each weight as a plain tensor, so the same code serves many releases of transformers. FSDP shards the parts further.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.errors import UserError
from fivefold.fsdp.collectives import copy_to, gather_last, split_last, sum_over
from fivefold.fsdp.mesh import Split

_STYLES = {
    "colwise": (0, False),
    "colwise_gather_output": (0, True),
    "colwise_rep": (0, True),
    "rowwise": (1, False),
    "rowwise_split_input": (1, True),
    "rowwise_rep": (1, True),
}
"""Style of a linear layer -> dimension of its weight that is split, and whether its other side is whole on every rank."""
_SUMMED = "replicated_with_grad_allreduce"
"""Style of a module that every rank holds whole but applies to its own heads only: ranks have parts of its gradient."""
_IGNORED = ("lm_head", "embed_tokens")
"""Modules that are ours: the head splits the vocabulary itself."""
_ROWS = "rows"
"""Style of a parameter that is split by its first dimension, and read by its module without communication."""
_NORMS = {"q_norm": "q_proj", "k_norm": "k_proj"}
"""Norms of single heads, which some plans lack -> the projection whose style says that ranks have their own heads."""
OURS = {
    "gpt_oss": {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.sinks": _ROWS,
        "layers.*.self_attn.o_proj": "rowwise",
    }
}
"""Plans of families for which transformers has none, by names inside the base model."""


def rules_of(model: Any) -> dict[str, str]:
    """Return the plan of a model of transformers: patterns of module names -> styles; raises UserError without one."""
    family = model.config.get_text_config().model_type
    rules = {name: style for name, style in (model.tp_plan or {}).items() if not name.endswith(_IGNORED)}
    rules = rules or {f"{model.base_model_prefix}.{name}": style for name, style in OURS.get(family, {}).items()}
    if not rules:
        raise UserError(f"t must be 1 for {family}: transformers has no tensor-parallel plan for it; use d, or c")
    for name, style in list(rules.items()):
        parent, _, last = name.rpartition(".")
        for norm, projection in _NORMS.items():
            if last == projection and style == "colwise":
                rules.setdefault(f"{parent}.{norm}", _SUMMED)
    return rules


def apply(model: Any, group: dist.ProcessGroup, experts: Collection[str] = ()) -> dict[int, Split]:
    """Split the model's weights, which have no values yet, and put communication around them; id of parameter -> Split.

    `experts` are names of modules that are divided otherwise.
    """
    if group.size() == 1:
        return {}
    rules, splits = rules_of(model), dict[int, Split]()
    for name, module in model.named_modules():
        style = rules.get(pattern_of(name))
        if style is None or name in experts:
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
    for name, _ in list(model.named_parameters()):
        if rules.get(pattern_of(name)) == _ROWS:
            split = split_rows(model, name, group, "t")
            splits[id(split)] = Split(0)
    return splits


def split_rows(model: Any, name: str, group: dist.ProcessGroup, letter: str) -> torch.nn.Parameter:
    """Replace a parameter without values by this rank's part of its first dimension, and return that."""
    parent, _, last = name.rpartition(".")
    module = model.get_submodule(parent)
    whole = getattr(module, last)
    if len(whole) % group.size():
        raise UserError(f"{letter} must divide the first dimension of {name}, {len(whole)}: got {letter}{group.size()}")
    part = torch.nn.Parameter(whole.new_empty(len(whole) // group.size(), *whole.shape[1:], device="meta"))
    setattr(module, last, part)
    return part


def pattern_of(name: str) -> str:
    """Return the name of a module or parameter as plans have it, with `*` for the number of a layer."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


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
