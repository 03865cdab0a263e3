"""One GRPO step of transformers' models, the same on every `fsdp:` layout: loss, gradient norm and every updated parameter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fivefold.config.fsdp_checks import PROVEN_TENSOR_PARALLEL
from fivefold.config.learners import FSDPConfig, PolicyConfig
from tests.support.cluster import Together
from tests.support.two_steps import BOUNDS, POLICY, assert_equal, difference, expected, fsdp_step, run_step

FAMILIES = {
    "qwen2": "qwen2", "qwen3": "qwen3", "llama": "llama", "mistral_window": "mistral", "gemma2": "gemma2",
    "gemma3": "gemma3_text", "phi3": "phi3", "olmo2": "olmo2", "olmo3": "olmo3", "smollm3": "smollm3",
}  # fmt: skip
"""Variant of a tiny model -> its family."""
EXPERTS = ("qwen3_moe", "deepseek_v3", "glm4_moe", "gpt_oss")
"""Variants with experts, which have no t and no e here."""
LAYOUTS = ["d2", "d4", "c2", "d2c2", "t2", "d2t2", "d4 replicas"]
FAST = [("qwen3", "d2"), ("qwen3", "d2t2"), ("qwen3", "d4 replicas"), ("gemma2", "d2"), ("gemma2", "c2"), ("phi3", "t2")]
CASES = [
    pytest.param(name, layout, budget, marks=() if (name, layout) in FAST and budget == 32 else pytest.mark.fsdp)
    for name in FAMILIES
    for layout in LAYOUTS
    for budget in ((1000, 32) if layout in ("d2", "c2", "t2") else (32,))
]
CASES += [
    pytest.param(name, layout, 32, marks=() if (name, layout) == ("qwen3_moe", "d2") else pytest.mark.fsdp)
    for name in EXPERTS
    for layout in ("d2", "c2", "d2c2", "d4 replicas")
]


def policy_of(layout: str, budget: int = 32, **options: object) -> PolicyConfig:
    replicas = 2 if "replicas" in layout else 1
    return replace(POLICY, tokens_per_micro_batch=budget, fsdp=FSDPConfig(replicas=replicas), **options)


@pytest.fixture(scope="module")
def steps(cluster, models):
    """Results by (model, layout, budget)."""

    def call(name: str, layout: str, budget: int):
        directory = models(name)
        return f"fsdp:{layout.split()[0]}", fsdp_step, directory, policy_of(layout, budget), expected(directory)[2]

    return Lazily(cluster, call)


class Lazily:
    """The cases of one layout are computed together, those that are selected only."""

    def __init__(self, cluster, call) -> None:
        self._cluster, self._call, self.wanted = cluster, call, []
        self._together: Together | None = None

    def __getitem__(self, case):
        if self._together is None:
            self._together = Together(self._cluster, {each: self._call(*each) for each in self.wanted})
        return self._together[case]


@pytest.fixture(scope="module", autouse=True)
def _selected(request, steps):
    steps.wanted += [
        tuple(item.callspec.params[key] for key in ("name", "layout", "budget"))
        for item in request.session.items
        if getattr(item, "originalname", "") == "test_a_step_is_the_same_on_every_layout" and item.module is request.module
    ]


@pytest.mark.parametrize(("name", "layout", "budget"), CASES, ids=str)
def test_a_step_is_the_same_on_every_layout(steps, models, name, layout, budget):
    """Clipped gains and KL, over packed sequences; the oracle computes one sequence at a time in one process."""
    assert_equal(steps[name, layout, budget], expected(models(name)))


def test_the_families_with_tensor_parallelism_are_those_that_are_compared_here():
    assert set(FAMILIES.values()) == PROVEN_TENSOR_PARALLEL


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("d2c2", {"recompute": "full"}),
        ("d2", {"fsdp": FSDPConfig(keep_gathered=True)}),
        pytest.param("d4", {"fsdp": FSDPConfig(keep_gathered=True, replicas=2)}, marks=pytest.mark.fsdp),
        pytest.param("d8", {}, marks=pytest.mark.fsdp),
    ],
)
def test_recomputation_gathered_gradients_and_idle_replicas_change_nothing(cluster, models, layout, options):
    policy = replace(policy_of(layout), **options)
    assert_equal(run_step(cluster, f"fsdp:{layout}", models("qwen3"), policy), expected(models("qwen3")))


# --- planted faults: each must be seen by the comparison above, or by the check at start ------------------------------


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

    def each_rank(gradients, own):
        found = original(gradients, own)
        twice = torch.stack([grad.square().sum() for tensor, grad in gradients if tensor.split.dim is None]).sum()
        torch.distributed.all_reduce(twice, group=own.shard)
        return float((found**2 + twice * (own.tp.size() - 1)) ** 0.5)

    step.gradient_norm = each_rank
    return fsdp_step(mesh, *arguments)


def tensor_missing(mesh, *arguments):
    from fivefold.fsdp import model

    original = model.stream_weights
    model.stream_weights = lambda *given: (item for item in original(*given) if "layers.2.mlp.up" not in item[0])
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
    (tensor_missing, "d2", "qwen3"),
]


@pytest.mark.fsdp
@pytest.mark.parametrize(("fault", "layout", "name"), FAULTS, ids=lambda value: getattr(value, "__name__", None))
def test_a_planted_fault_is_seen(cluster, models, fault, layout, name):
    oracle = expected(models(name))
    try:
        results = run_step(cluster, f"fsdp:{layout}", models(name), policy_of(layout), fault)
    except RuntimeError as error:
        # The check at start sees some of them.
        assert "PackingError" in str(error)
        return
    if fault is tensor_missing:
        assert all(len(weights) < len(oracle[1]) for _, weights in results)
        return
    found = difference(results, oracle)
    assert any(value > 10 * bound for value, bound in zip(found, BOUNDS, strict=True)), found
