"""What `plan` proposes for a run on `fsdp:` layouts, and what its time and memory follow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.plan_accuracy import UPDATES, sharded
from fivefold.config.learners import FSDPConfig
from fivefold.layout import ParallelLayout
from fivefold.models.families import spec_from_config
from fivefold.plan.efficiency import Efficiencies
from fivefold.plan.hardware import Cluster
from fivefold.plan.measured import MEASURED, Rate
from fivefold.plan.memory import Sharded
from fivefold.plan.step_time import Batch, update_time
from tests.plan.test_search import space
from tests.plan.test_step_time import BATCH, H200, RATES, SPEC
from tests.support.public_shapes import SHAPES

ROUND = {"node_link": 100.0, "host_copy": 10.0, "host_adam": 40.0, "fsdp_host": 0.0, "expert_host": 0.0, "update_host": 0.0}
"""Rates with which times can be computed by hand: GB/s, and microseconds of the host."""


def update(text: str = "d8", budget: int = 16384, **options):
    layout = ParallelLayout.parse(f"fsdp:{text}")
    model = Sharded(SPEC, layout, tokens_per_micro_batch=budget, fsdp=FSDPConfig(**options))
    # A host that is slower than its GPU would cover what is sent.
    rates = Efficiencies([*(row for row in MEASURED if row.kind != "fsdp_host"), Rate("fsdp_host", 0, 0.0, H200, "")], H200)
    return update_time(model, BATCH, Cluster(H200, layout.world_size, min(8, layout.world_size)), rates)


def round_update(shape: str, text: str, batch: Batch, **options):
    """An update at round rates, with as many tokens in a micro-batch as a replica has sequences of."""
    rows = [row for row in MEASURED if row.kind not in ROUND]
    rates = Efficiencies([*rows, *(Rate(kind, 0, rate, H200, "") for kind, rate in ROUND.items())], H200)
    layout = ParallelLayout.parse(f"fsdp:{text}")
    model = Sharded(spec_from_config(SHAPES[shape]), layout, tokens_per_micro_batch=16384, fsdp=FSDPConfig(**options))
    cluster = Cluster(H200, layout.world_size, min(8, layout.world_size))
    return update_time(model, batch, cluster, rates, imbalance=1.0)


def test_experts_over_more_ranks_take_the_time_of_the_tokens_that_are_exchanged():
    """Qwen3-30B-A3B: 48 layers of width 2048; each of eight neighbors has 16384 tokens, in two bytes a number.

    Each layer gathers 8 · 16384 · 2048 · 2 bytes and adds up as many, forward and backward, at 100 GB/s; 7 of 8 parts are
    sent: 48 · 4 · 0.5369 GB · 7 / 8 / 100 GB/s = 0.9019 s. With t2 as many ranks have half as many tokens, of four neighbors.
    """
    batch = Batch(8 * 16384, 1024, 1024, 1.0)
    times = {text: round_update("Qwen3-30B-A3B", text, batch) for text in ("d8", "d8e8", "d4t2", "d4t2e8")}
    assert [times[text].micro_batches for text in times] == [1, 1, 2, 2]
    assert times["d8e8"].parts["expert parallel"] == pytest.approx(0.9019, rel=1e-3)
    # Two micro-batches of 4 · 16384 tokens, of which 3 of 4 parts are sent.
    assert times["d4t2e8"].parts["expert parallel"] == pytest.approx(2 * 48 * 4 * 0.26844 * 3 / 4 / 100, rel=1e-3)
    assert times["d8"].parts["expert parallel"] == times["d4t2"].parts["expert parallel"] == 0
    # Attention's and the experts' results are added up over t: an all-reduce each, forward and backward, of 67 MB; and the
    # rows of the embedding and the states at the head.
    assert times["d4t2"].parts["tensor parallel"] == pytest.approx(2 * (48 * 8 + 4) * 0.067109 / 2 / 100, rel=1e-3)
    assert times["d4t2e8"].parts["tensor parallel"] == times["d4t2"].parts["tensor parallel"]


@pytest.mark.parametrize(("text", "experts"), [("d8", 28.99 * 7 / 8), ("d8e2", 28.99 / 2 * 3 / 4), ("d8e4", 28.99 / 4 / 2)])
def test_a_rank_gathers_its_own_experts_only(text, experts):
    """Qwen3-30B-A3B has 28.99e9 parameters in experts and 1.543e9 in the rest; the micro-batch is small.

    Of the experts of d8e4 a rank has a quarter, and shares it with one other rank. Gathers of 2 bytes a number before forward
    and backward and a reduction of 4 bytes, at 100 GB/s, less the time that computing covers.
    """
    update = round_update("Qwen3-30B-A3B", text, Batch(64 * 64, 64, 64, 1.0))
    covered = sum(update.parts[name] for name in ("forward", "backward", "expert parallel", "waiting for the host"))
    assert update.micro_batches == 1
    assert update.parts["gathering"] == pytest.approx((1.543 * 7 / 8 + experts) * 8 / 100 - covered, rel=1e-3)


def test_shards_and_gathered_layers_are_copied_in_each_micro_batch():
    """Qwen3-8B, 8.191e9 parameters over 8 ranks, two micro-batches, at 4,000 GB/s.

    Before forward and backward 6 bytes of the shard and 4 of all; 6 bytes of all gradients, 12 of the shard's.
    """
    rates = [*(row for row in MEASURED if row.kind != "elementwise"), Rate("elementwise", 0, 4000.0, H200, "")]
    layout, spec = ParallelLayout.parse("fsdp:d8"), spec_from_config(SHAPES["Qwen3-8B"])
    batch, cluster = Batch(8 * 2 * 16384, 1024, 1024, 1.0), Cluster(H200, 8, 8)

    def copies(**options) -> float:
        model = Sharded(spec, layout, tokens_per_micro_batch=16384, fsdp=FSDPConfig(**options))
        update = update_time(model, batch, cluster, Efficiencies(rates, H200), imbalance=1.0)
        assert update.micro_batches == 2
        return update.parts["copies of FSDP"]

    whole, shard = 8.191, 8.191 / 8
    assert copies() == pytest.approx(2 * (2 * (4 * whole + 6 * shard) + 6 * whole + 12 * shard) / 4000, rel=1e-3)
    once = copies(reshard_after_forward=False)
    assert once == pytest.approx(2 * (4 * whole + 6 * shard + 6 * whole + 12 * shard) / 4000, rel=1e-3)
    assert copies(keep_gathered=True) > copies()


def test_the_host_of_an_fsdp_layout_takes_longer_for_each_layer_of_a_micro_batch():
    """1.7B in six micro-batches on one H200: 1.9 to 2.1 s were measured, of which kernels take 0.9."""
    small, large = (row for row in UPDATES if row.layout == "fsdp:d1")
    small, large = sorted((small, large), key=lambda row: row.budget)
    times = []
    for row in (small, large):
        model, batch, cluster = sharded(row)
        times.append(update_time(model, batch, cluster, RATES, 1.0))
        assert times[-1].total == pytest.approx(row.seconds, rel=0.15)
    assert times[0].parts["waiting for the host"] > 0.5 > times[1].parts["waiting for the host"]


def test_the_host_s_adam_takes_as_long_as_its_memory():
    """Qwen3-8B, 8.191e9 parameters over 8 ranks: 40 bytes of each at 40 GB/s, and 12 bytes a micro-batch at 10 GB/s."""
    batch = Batch(8 * 64, 64, 64, 1.0)
    device, host = (round_update("Qwen3-8B", "d8", batch, cpu_adam=chosen) for chosen in (False, True))
    shard = 8.191 / 8
    assert host.parts["optimizer"] == pytest.approx(shard * 40 / 40, rel=1e-3)
    assert device.parts["optimizer"] == pytest.approx(shard * 34 / 4190, rel=1e-3)
    assert host.micro_batches == 1
    assert host.parts["gathering"] - device.parts["gathering"] == pytest.approx(shard * 12 / 10, rel=1e-3)


def test_experts_are_proposed_to_be_divided_over_the_ranks_of_a_copy():
    searched = space("Qwen3-30B-A3B", 8, policy={"backend": "fsdp:d8", "fsdp": {"replicas": 2}})
    layouts = {str(layout) for layout, _ in searched.layouts(8)}
    assert {"fsdp:d8t1", "fsdp:d8t1e2", "fsdp:d8t1e4", "fsdp:d4t2", "fsdp:d4t2e4"} <= layouts
    assert not {text for text in layouts if text.endswith("e8")}, "each copy has four ranks"
    assert {layout.ep for layout, _ in space("Qwen3-8B", 8, policy={"backend": "fsdp:d8"}).layouts(8)} == {1}


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
    assert small.parts["gathering"] > 0.05 * small.total


def test_options_change_the_time_as_they_change_what_is_sent():
    """In small micro-batches, which do not cover it: two gathers and a reduction each."""
    plain, kept, summed = (
        update("d16", budget=2048, **options) for options in ({}, {"reshard_after_forward": False}, {"keep_gathered": True})
    )
    assert plain.parts["gathering"] > kept.parts["gathering"] and plain.parts["gathering"] > summed.parts["gathering"]
    within = update("d16", budget=2048, replicas=2)
    assert within.parts["gathering"] < plain.parts["gathering"], "each copy is gathered within a node"
