"""One GRPO step, the same on every layout: loss, gradient norm and every updated parameter."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from tests.support.cluster import Together
from tests.support.layout_cases import MODELS, VPP2, Case
from tests.support.two_steps import (
    BOUNDS,
    DENSE_MODELS,
    POLICY,
    assert_equal,
    difference,
    expected,
    megatron_step,
    policy_of,
    run_step,
)

CASES = [
    (name, case, budget)
    for name, cases in MODELS.items()
    for case in cases
    for budget in ([1000, 32] if name in DENSE_MODELS else [32])
    if case.ci
]
TIED = [
    *((name, Case(layout), 32) for name in ("qwen2_tied", "qwen3_tied") for layout in ("t2", "p2", "p4", "d2t2p2")),
    *(("qwen3_tied", Case(layout, VPP2), 32) for layout in ("p2", "p2c2")),
]


@pytest.fixture(scope="module")
def steps(cluster, models):
    """Results by (model, str(case), budget)."""

    def call(name: str, case: Case, budget: int):
        policy = policy_of(name, case, budget)
        return f"megatron:{case.layout}", megatron_step, models(name), policy, expected(models(name), policy)[2]

    return Together(cluster, {(name, str(case), budget): call(name, case, budget) for name, case, budget in CASES + TIED})


@pytest.mark.parametrize(("name", "case", "budget"), CASES, ids=str)
def test_a_step_is_the_same_on_every_layout(steps, models, name, case, budget):
    """Clipped gains, KL, routers' balance and z-losses, moving router biases. `make test-layouts` runs every layout."""
    assert_equal(steps[name, str(case), budget], expected(models(name), policy_of(name, case, budget)))


@pytest.mark.parametrize(("name", "case", "budget"), TIED, ids=str)
def test_a_step_is_the_same_with_tied_embeddings(steps, models, name, case, budget):
    assert_equal(steps[name, str(case), budget], expected(models(name), policy_of(name, case, budget)))


def test_more_replicas_than_samples_neither_hangs_nor_changes_the_step(cluster, models):
    """d8 over 8 samples with a budget of 32: one replica has a sample of two tokens and needs fewer micro-batches."""
    policy = replace(POLICY, tokens_per_micro_batch=32)
    assert_equal(run_step(cluster, "d8", models("qwen3"), policy), expected(models("qwen3")))


# --- injected faults: each must be seen by the comparison above -------------------------------------------------------


def patched(owner, name: str, value):
    """Put `value` in the place of a function; ranks are processes of their own, so it needs no undoing."""
    setattr(owner, name, value)


def without_finalize(mesh, *arguments):
    from fivefold.megatron import step

    def only_scale(model, num_tokens, **kwargs):
        total = num_tokens.clone()
        torch.distributed.all_reduce(total, group=mesh.dp)
        torch.distributed.broadcast(total, mesh.stage_ranks[-1], group=mesh.pp)
        for chunk in model:
            chunk.scale_gradients(1.0 / float(total))

    patched(step, "finalize_model_grads", only_scale)
    return megatron_step(mesh, *arguments)


def a_factor_of_dp(mesh, *arguments):
    from fivefold.megatron import step

    original = step.finalize_model_grads

    def twice(model, num_tokens, **kwargs):
        original(model, num_tokens, **kwargs)
        for chunk in model:
            chunk.scale_gradients(1.0 / mesh.layout.dp)

    patched(step, "finalize_model_grads", twice)
    return megatron_step(mesh, *arguments)


def cp_counted_twice(mesh, *arguments):
    """The gradient of the log-probs summed over context-parallel ranks, which all computed the same loss."""
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

    from fivefold.megatron import step

    def summed(values_2T, group):
        pieces = gather_from_sequence_parallel_region(values_2T, group=group)
        return pieces.view(group.size(), *values_2T.shape).sum(0)

    patched(step, "reduce_from_tensor_model_parallel_region", summed)
    return megatron_step(mesh, *arguments)


def zig_zag_lost(mesh, *arguments):
    """Keys taken in the order in which the ranks hold them."""
    from fivefold.megatron import model

    original = model.make_packing

    def in_rank_order(*given, **kwargs):
        packing = original(*given, **kwargs)
        for bucket in packing.buckets:
            inside = bucket.keys >= 0
            bucket.keys[inside] = bucket.keys[inside].sort().values
        return packing

    patched(model, "make_packing", in_rank_order)
    return megatron_step(mesh, *arguments)


def positions_by_rank(mesh, *arguments):
    """Rotary positions that count each rank's own tokens; counting through a packed batch alone would shift sequences as
    a whole, which relative positions do not show.
    """
    from fivefold.megatron import model

    original = model.make_packing

    def counting_on(*given, **kwargs):
        packing = original(*given, **kwargs)
        packing.positions_T = torch.arange(len(packing.positions_T))
        packing.max_seqlen_q = packing.max_seqlen_kv = len(packing.positions_T)
        return packing

    patched(model, "make_packing", counting_on)
    return megatron_step(mesh, *arguments)


def _finalize_module():
    return sys.modules["megatron.core.distributed.finalize_model_grads"]


def norms_not_reduced(mesh, *arguments):
    patched(_finalize_module(), "_allreduce_non_tensor_model_parallel_grads", lambda *args, **kwargs: None)
    return megatron_step(mesh, *arguments)


def tied_not_reduced(mesh, *arguments):
    patched(_finalize_module(), "_allreduce_word_embedding_grads", lambda *args, **kwargs: None)
    return megatron_step(mesh, *arguments)


def biases_not_streamed(mesh, *arguments):
    """Weights streamed from named parameters only: the routers' biases are buffers."""
    from fivefold.megatron import weights

    original = weights.named_weights
    calls, first = [], {}

    def frozen(chunks):
        streamed = original(chunks)
        calls.append(streamed)
        for name in streamed if len(calls) > 1 else ():
            if name.endswith("expert_bias"):
                streamed[name] = first.setdefault(name, streamed[name].clone())
        return streamed

    patched(weights, "named_weights", frozen)
    return megatron_step(mesh, *arguments)


def biases_by_local_counts(mesh, *arguments):
    """Routers' biases moved by each rank's own tokens."""

    def own_counts(tokens, bias, rate):
        return bias + torch.sign(tokens.mean(-1, keepdim=True) - tokens) * rate

    patched(_finalize_module(), "get_updated_expert_bias", own_counts)
    return megatron_step(mesh, *arguments)


def aux_loss_not_divided(mesh, *arguments):
    """Each rank's balance loss counted as if its tokens were all of the update."""
    from fivefold.megatron.layers.moe import _AddLoss

    original = _AddLoss.apply
    patched(_AddLoss, "apply", lambda activations, loss: original(activations, loss * mesh.stage.size()))
    return megatron_step(mesh, *arguments)


def padding_routed(mesh, *arguments):
    """Padding counted among the tokens of the first sequence."""
    from fivefold.megatron.layers.layer_spec import PolicyModel

    original = PolicyModel.forward

    def forward(self, *, routing, **kwargs):
        mask_ST = routing.sequence_mask_ST.clone()
        mask_ST[0] |= ~mask_ST.any(0)
        return original(self, routing=replace(routing, sequence_mask_ST=mask_ST), **kwargs)

    patched(PolicyModel, "forward", forward)
    return megatron_step(mesh, *arguments)


def experts_reduced_as_dense(mesh, *arguments):
    """Experts' gradients reduced over the data-parallel replicas of dense parameters."""
    from fivefold.megatron.layers.moe import GroupedExperts

    original = GroupedExperts.__init__

    def plain(self, *args, **kwargs):
        original(self, *args, **kwargs)
        for parameter in self.parameters():
            parameter.allreduce = True

    patched(GroupedExperts, "__init__", plain)
    return megatron_step(mesh, *arguments)


def sent_tensors_freed(mesh, *arguments):
    """What this comparison found: over Gloo interleaved stages send what took the place of a freed tensor.

    Which of two threads is first decides whether it happens: here another content is sent always.
    """
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    original, kept = P2PCommunicator.send_forward_recv_forward, []

    def send(self, output_tensor, *given, **kwargs):
        kept.append(None if output_tensor is None else torch.zeros_like(output_tensor))
        return original(self, kept[-1], *given, **kwargs)

    patched(P2PCommunicator, "send_forward_recv_forward", send)
    return megatron_step(mesh, *arguments)


def marks_lost(mesh, *arguments):
    """Parameters without the mark that they are cut over tensor-parallel ranks, as when nothing initialises them."""
    from fivefold.megatron import model

    original = model.build_chunks

    def unmarked(*args):
        chunks = original(*args)
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.tensor_model_parallel = False
        return chunks

    patched(model, "build_chunks", unmarked)
    return megatron_step(mesh, *arguments)


FAULTS = [
    (without_finalize, "d2", "qwen3", {}),
    (a_factor_of_dp, "d2", "qwen3", {}),
    (cp_counted_twice, "c2", "qwen3", {}),
    (zig_zag_lost, "c2", "qwen3", {}),
    (positions_by_rank, "c2", "qwen3", {}),
    (norms_not_reduced, "t2", "qwen3", {}),
    (marks_lost, "t2", "qwen3", {}),
    (tied_not_reduced, "p2", "qwen3_tied", {}),
    (sent_tensors_freed, "p2", "qwen3", {**VPP2, "variable_seq_lengths": False}),
    (biases_not_streamed, "d1", "deepseek_v3", {}),
    (biases_by_local_counts, "d2e2", "deepseek_v3", {}),
    (aux_loss_not_divided, "d2e2", "qwen3_moe", {}),
    (padding_routed, "c2", "qwen3_moe", {}),
    (experts_reduced_as_dense, "t2", "qwen3_moe", {}),
]


@pytest.mark.parametrize(("fault", "layout", "name", "pipeline"), FAULTS, ids=lambda value: getattr(value, "__name__", None))
def test_an_injected_fault_is_seen(cluster, models, fault, layout, name, pipeline):
    policy = policy_of(name, Case(layout, pipeline), 32)
    try:
        results = run_step(cluster, layout, models(name), policy, fault)
    except RuntimeError as error:
        # Some end the run by themselves: they are seen as well.
        assert "failed" in str(error)
        return
    differences = difference(results, expected(models(name), policy))
    assert any(value > 10 * bound for value, bound in zip(differences, BOUNDS, strict=True)), differences
