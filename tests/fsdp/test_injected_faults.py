"""Injected faults of `fsdp:` layouts: each must be seen by the comparison of steps, or by the check at start."""

from __future__ import annotations

import pytest
import torch

from tests.support.fsdp import policy_of
from tests.support.two_steps import BOUNDS, difference, expected, fsdp_step, run_step


def divided_by_d(mesh, *arguments):
    from torch.distributed.fsdp import FSDPModule

    original = FSDPModule.set_gradient_divide_factor
    FSDPModule.set_gradient_divide_factor = lambda self, factor: original(self, factor * mesh.layout.dp)
    return fsdp_step(mesh, *arguments)


def norms_not_summed(mesh, *arguments):
    """The gradients of the norms of queries and keys, of which each tensor-parallel rank has a part."""
    from fivefold.fsdp import packed_model, tensor_parallel

    original = tensor_parallel.apply
    packed_model.tensor_parallel.apply = lambda *given: {
        number: split for number, split in original(*given).items() if not split.is_summed
    }
    return fsdp_step(mesh, *arguments)


def cp_counted_twice(mesh, *arguments):
    """The gradient of the log-probs summed over context-parallel ranks, which all computed the same loss."""
    from fivefold.fsdp import step
    from fivefold.fsdp.collectives import copy_to, sum_over

    step.sum_over = lambda x, group: sum_over(copy_to(x, group), group)
    return fsdp_step(mesh, *arguments)


def sequences_leak(mesh, *arguments):
    from fivefold.backend.packing import make_packing
    from fivefold.fsdp import attention

    original = attention.attend

    def one_sequence(query, key, value, packing, *rest):
        return original(query, key, value, make_packing([len(query)], query.device), *rest)

    attention.attend = one_sequence
    return fsdp_step(mesh, *arguments)


def positions_by_rank(mesh, *arguments):
    from fivefold.fsdp.packed_model import PackedModel

    original = PackedModel.forward

    def counting_on(self, micro, *rest):
        if micro is not None:
            micro.packing.positions_T = torch.arange(len(micro.token_ids_T))
        return original(self, micro, *rest)

    PackedModel.forward = counting_on
    return fsdp_step(mesh, *arguments)


def cap_of_scores_left_out(mesh, *arguments):
    from fivefold.fsdp import attention

    original = attention.attend
    attention.attend = lambda q, k, v, packing, window, scale, cap, sinks: original(
        q, k, v, packing, window, scale, None, sinks
    )
    return fsdp_step(mesh, *arguments)


def cap_of_logits_left_out(mesh, *arguments):
    from fivefold.fsdp import packed_model

    original = packed_model.log_probs
    packed_model.log_probs = lambda *given, cap=None: original(*given)
    return fsdp_step(mesh, *arguments)


def shard_counted_twice(mesh, *arguments):
    """Tensors that every tensor-parallel rank holds whole, counted by each of them."""
    from fivefold.fsdp import step

    original = step.gradient_norm

    def each_rank(gradients, mesh_of_step):
        norm = original(gradients, mesh_of_step)
        twice = torch.stack([grad.square().sum() for tensor, grad in gradients if tensor.split.dim is None]).sum()
        torch.distributed.all_reduce(twice, group=mesh_of_step.shard)
        return float((norm**2 + twice * (mesh_of_step.tp.size() - 1)) ** 0.5)

    step.gradient_norm = each_rank
    return fsdp_step(mesh, *arguments)


def expert_gradient_divided_twice(mesh, *arguments):
    """By the ranks that divide experts, as if each of them had the gradient of all its tokens."""
    from fivefold.fsdp import model

    original = model.step.finish_gradients

    def divided(tensors, mesh_of_step):
        gradients = original(tensors, mesh_of_step)
        for tensor, grad in gradients:
            if tensor.split.by_expert:
                grad /= mesh_of_step.experts.size()
        return gradients

    model.step.finish_gradients = divided
    return fsdp_step(mesh, *arguments)


def experts_counted_twice(mesh, *arguments):
    """In the norm, by every rank that could hold them if they were not divided."""
    from fivefold.fsdp import step

    original = step.gradient_norm

    def again(gradients, mesh_of_step):
        twice = torch.stack([grad.square().sum() for tensor, grad in gradients if tensor.split.by_expert]).sum()
        torch.distributed.all_reduce(twice, group=mesh_of_step.one_copy)
        return float((original(gradients, mesh_of_step) ** 2 + twice * (mesh_of_step.experts.size() - 1)) ** 0.5)

    step.gradient_norm = again
    return fsdp_step(mesh, *arguments)


def tokens_of_others_left_out(mesh, *arguments):
    """An expert sees the tokens of its rank only."""
    from fivefold.fsdp import experts

    original = experts.gather_tokens

    def own_rows_only(rows, group):
        gathered = original(rows, group)
        if rows.dtype != torch.long:
            return gathered
        kept = torch.full_like(gathered, -1)
        place = slice(group.rank() * len(rows), (group.rank() + 1) * len(rows))
        kept[place] = gathered[place]
        return kept

    experts.gather_tokens = own_rows_only
    return fsdp_step(mesh, *arguments)


def state_continues(mesh, *arguments):
    """Linear attention runs over all tokens of a micro-batch."""
    from fivefold.fsdp import linear_attention

    linear_attention.current = lambda: None
    return fsdp_step(mesh, *arguments)


def tensor_missing(mesh, *arguments):
    from fivefold.fsdp import model

    original, names = model.stream_weights, ("layers.2.mlp.up", "layers.2.mlp.experts.5.up")
    model.stream_weights = lambda *given: (item for item in original(*given) if not any(name in item[0] for name in names))
    return fsdp_step(mesh, *arguments)


def rows_missing(mesh, *arguments):
    """A shard of a tensor in place of the whole one."""
    from fivefold.fsdp import model

    original = model.stream_weights
    model.stream_weights = lambda *given: (
        (name, tensor[: len(tensor) // 2] if name.endswith("layers.2.mlp.up_proj.weight") else tensor)
        for name, tensor in original(*given)
    )
    return fsdp_step(mesh, *arguments)


FAULTS = [
    (divided_by_d, "d2", "qwen3"),
    (norms_not_summed, "t2", "qwen3"),
    (cp_counted_twice, "c2", "qwen3"),
    (sequences_leak, "d2", "qwen3"),
    (positions_by_rank, "c2", "qwen3"),
    (cap_of_scores_left_out, "d2", "gemma2"),
    (cap_of_logits_left_out, "d2", "gemma2"),
    (shard_counted_twice, "t2", "qwen3"),
    (expert_gradient_divided_twice, "d2t2e4", "qwen3_moe"),
    (experts_counted_twice, "d2e2", "qwen3_moe"),
    (tokens_of_others_left_out, "d2e2", "qwen3_moe"),
    (state_continues, "d2", "qwen3_5"),
    (tensor_missing, "d2", "qwen3"),
    (tensor_missing, "d2e2", "qwen3_moe"),
    (rows_missing, "d2", "qwen3"),
]
ENDS = {
    tensor_missing: "streamed weights must be the tensors of the model's files: they lack model.layers.2.mlp.",
    rows_missing: "each once: got model.layers.2.mlp.up_proj.weight [48, 64]",
}
"""Faults that end a run in its stream of weights, with the message."""


@pytest.mark.fsdp
@pytest.mark.parametrize(("fault", "layout", "name"), FAULTS, ids=lambda value: getattr(value, "__name__", None))
def test_an_injected_fault_is_seen(cluster, models, fault, layout, name):
    oracle = expected(models(name))
    try:
        results = run_step(cluster, f"fsdp:{layout}", models(name), policy_of(layout), fault)
    except RuntimeError as error:
        # The check at start sees some of the others.
        assert ENDS.get(fault, "PackingError") in str(error)
        return
    assert fault not in ENDS
    differences = difference(results, oracle)
    assert any(value > 10 * bound for value, bound in zip(differences, BOUNDS, strict=True)), differences


@pytest.mark.fsdp
@pytest.mark.parametrize(
    ("fault", "layout", "name"),
    [(sequences_leak, "d2", "qwen3"), (positions_by_rank, "c2", "qwen3"), (state_continues, "d2", "qwen3_5")],
)
def test_the_check_at_start_sees_wrong_packing_in_16_bits(cluster, models, fault, layout, name):
    policy = policy_of(layout, dtype="bfloat16")
    with pytest.raises(RuntimeError, match=r"PackingError(.|\n)*half the mean square"):
        run_step(cluster, f"fsdp:{layout}", models(name), policy, fault)
