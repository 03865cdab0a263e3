"""What `plan` proposes for a run on `fsdp:` layouts, and what its time and memory follow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fivefold.config.learners import FSDPConfig
from fivefold.layout import ParallelLayout
from fivefold.plan.hardware import Cluster
from fivefold.plan.memory import Sharded
from fivefold.plan.step_time import update_time
from tests.plan.test_search import space
from tests.plan.test_step_time import BATCH, H200, RATES, SPEC


def update(text: str = "d8", budget: int = 16384, **options):
    layout = ParallelLayout.parse(f"fsdp:{text}")
    model = Sharded(SPEC, layout, tokens_per_micro_batch=budget, fsdp=FSDPConfig(**options))
    return update_time(model, BATCH, Cluster(H200, layout.world_size, min(8, layout.world_size)), RATES)


def test_a_run_on_fsdp_is_proposed_such_layouts_and_a_run_on_megatron_core_none():
    candidates = space("Qwen3-8B", 8, policy={"backend": "fsdp:d8"}).search(4)
    assert all(one.config.policy.layout.backend == "fsdp" for one in candidates) and len(candidates) > 1
    assert all(one.config.policy.recompute in ("none", "full") for one in candidates)
    assert all(one.config.policy.layout.backend == "megatron" for one in space("Qwen3-8B", 8).search(4))


def test_layouts_with_t_are_proposed_to_families_that_are_proven_only():
    searched = space("Qwen3-8B", 8, policy={"backend": "fsdp:d8"})
    assert {layout.tp for layout, _ in searched.layouts(8)} == {1, 2, 4, 8}
    unproven = replace(searched, spec=replace(searched.spec, family="cohere"))
    assert {layout.tp for layout, _ in unproven.layouts(8)} == {1}


def test_copies_divide_the_layouts_that_are_proposed():
    searched = space("Qwen3-8B", 8, policy={"backend": "fsdp:d8", "fsdp": {"replicas": 4}})
    assert {layout.dp for layout, _ in searched.layouts(8)} == {4, 8}


def test_a_model_that_does_not_fit_whole_on_a_gpu_fits_sharded():
    """14B on eight GPUs of 80 GB: with Megatron-Core's d alone, weights and gradients are whole on each."""
    config = space("Qwen3-14B", 8, policy={"backend": "fsdp:d8"})
    whole, sharded = (
        Sharded(config.spec, ParallelLayout.parse(text), recompute="full", tokens_per_micro_batch=4096).held(2)[0]
        for text in ("megatron:d8", "fsdp:d8")
    )
    sizes = [one.parameters + one.gradients + one.optimizer for one in (whole, sharded)]
    # 2 + 4 + 12 / 8 bytes a parameter against 16 / 8.
    assert sizes[0] / sizes[1] == pytest.approx(7.5 / 2, rel=0.02) and sizes[0] > config.room


def test_gathering_is_covered_by_computing_unless_micro_batches_are_small():
    large, small = update(budget=32768), update(budget=2048)
    assert small.micro_batches > 8 * large.micro_batches
    assert 0 < large.parts["gathering"] < 0.02 * large.total
    assert small.parts["gathering"] > 0.1 * small.total


def test_options_change_the_time_as_they_change_what_is_sent():
    """In small micro-batches, which do not cover it: two gathers and a reduction each."""
    plain, kept, summed = (
        update("d16", budget=2048, **options) for options in ({}, {"reshard_after_forward": False}, {"keep_gathered": True})
    )
    assert plain.parts["gathering"] > kept.parts["gathering"] and plain.parts["gathering"] > summed.parts["gathering"]
    within = update("d16", budget=2048, replicas=2)
    assert within.parts["gathering"] < plain.parts["gathering"], "each copy is gathered within a node"
