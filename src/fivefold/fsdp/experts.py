"""Experts divided over ranks: each rank holds whole experts, and computes them for the tokens of all ranks.

transformers' expert plan says which parameters are split by expert. The communication is ours: a rank gathers the tokens of
the ranks that have others, computes its experts, and each token's results are summed over the ranks. Tensor-parallel ranks
have the same tokens, and divide experts too, instead of the width of each expert.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fivefold.errors import UserError
from fivefold.fsdp.collectives import copy_to, gather_tokens, scatter_tokens, sum_over
from fivefold.fsdp.current import current
from fivefold.fsdp.mesh import Mesh, Split
from fivefold.fsdp.tensor_parallel import pattern_of, split_rows

_BY_EXPERT = "grouped_gemm"
"""Style of a parameter whose first dimension are the experts."""


def experts_of(model: Any) -> dict[str, Any]:
    """Return the modules of a model of transformers whose parameters its expert plan splits by expert, by name."""
    plan = model.config.get_text_config().base_model_ep_plan or {}
    # Names in the plan are those inside the base model.
    start = f"{model.base_model_prefix}."
    patterns = {start + name.rpartition(".")[0] for name, style in plan.items() if style == _BY_EXPERT}
    return {name: module for name, module in model.named_modules() if pattern_of(name) in patterns}


def divide(model: Any, mesh: Mesh) -> tuple[dict[str, Any], dict[int, Split]]:
    """Give each rank its experts, which have no values yet; the modules of experts by name, and id of parameter -> Split."""
    parts, family = mesh.experts.size(), model.config.get_text_config().model_type
    if parts == 1:
        return {}, {}
    modules, splits = experts_of(model), dict[int, Split]()
    if not modules and mesh.layout.ep > 1:
        raise UserError(f"e must be 1 for {family}: transformers has no plan that divides its experts; use d, or c")
    for name, module in modules.items():
        for parameter, _ in list(module.named_parameters()):
            part = split_rows(model, f"{name}.{parameter}", mesh.experts, "e" if mesh.layout.ep > 1 else "t")
            splits[id(part)] = Split(0, by_expert=True)
        module.num_experts //= parts
        module.forward = _exchanging(module, module.forward, mesh)
    return modules, splits


def _exchanging(module: Any, compute: Any, mesh: Mesh) -> Any:
    """Return the forward pass of all experts, with `compute` for those of this rank."""
    experts: int = module.num_experts
    first = mesh.experts.rank() * experts

    def forward(hidden_TD: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
        now, tokens = current(), len(hidden_TD)
        # Alone, without packing, each rank has the same sequence.
        padding = 0 if now is None else now.most_tokens - tokens
        hidden_ND, weights_NK = (
            gather_tokens(_padded(copy_to(tensor, mesh.tp), padding, 0), mesh.tokens) for tensor in (hidden_TD, weights_TK)
        )
        chosen_NK = gather_tokens(_padded(chosen_TK, padding, -1), mesh.tokens) - first
        token_M, place_M = ((chosen_NK >= 0) & (chosen_NK < experts)).nonzero(as_tuple=True)
        expert_M, weight_M = chosen_NK[token_M, place_M], weights_NK[token_M, place_M]
        if not len(token_M):
            # Parameters that take no part would have no gradient to reduce, while other ranks wait for it.
            token_M, expert_M, weight_M = token_M.new_zeros(1), expert_M.new_zeros(1), weights_NK[0, :1] * 0
        results_MD = compute(hidden_ND[token_M], expert_M[:, None], weight_M[:, None])
        summed_ND = torch.zeros_like(hidden_ND).index_add(0, token_M, results_MD)
        return sum_over(scatter_tokens(summed_ND, mesh.tokens), mesh.tp)[:tokens]

    return forward


def _padded(tensor_T: Tensor, rows: int, value: int) -> Tensor:
    return torch.nn.functional.pad(tensor_T, (0, 0, 0, rows), value=value) if rows else tensor_T
