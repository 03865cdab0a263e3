"""The search: what it proposes can be sharded, fits, is the fastest of what it looked at, and is there at once."""

from __future__ import annotations

import time

import pytest

from fivefold.config import RunConfig
from fivefold.config.validate import validate
from fivefold.layout import ParallelLayout
from fivefold.models.families import load_spec, spec_from_config
from fivefold.plan.efficiency import Efficiencies
from fivefold.plan.estimate import Lengths, step_estimate
from fivefold.plan.hardware import Cluster
from fivefold.plan.measured import MEASURED
from fivefold.plan.roles import memory_of
from fivefold.plan.search import Space
from fivefold.plan.stage_cuts import even_split, stage_cuts
from tests.support.public_shapes import SHAPES, write_shape

H100 = "h100-80g"


def space(name: str, gpus: int, gpu: str = H100, node: int = 8, **sections) -> Space:
    data = {"train": ["x"], "prompts_per_step": 64, "max_prompt_tokens": 1024, "max_response_tokens": 3072}
    config = RunConfig.of(
        model={"path": "here"}, data=data, launch={"gpu": gpu}, **{"algorithm": {"kl": {"coef": 0}}, **sections}
    )
    cluster = Cluster(gpu, gpus, min(node, gpus))
    return Space(spec_from_config(SHAPES[name]), config, cluster, Efficiencies(MEASURED, gpu), Lengths.of(config.data))


@pytest.fixture(scope="module")
def thirty() -> tuple[Space, list]:
    searched = space("Qwen3-30B-A3B", 16)
    return searched, searched.search(8)


def test_everything_proposed_can_be_sharded_starts_and_fits(thirty):
    searched, candidates = thirty
    assert len(candidates) == 8
    for one in candidates:
        config, engine = one.config, one.config.engine
        searched.spec.check_layout(config.layout, config.policy.megatron.pipeline_split)
        assert validate(config).errors == []
        trainer, sampler = config.layout.world_size, engine.layout.world_size
        assert (trainer + sampler if engine.is_apart else trainer) == 16
        memory = memory_of(config, searched.spec)
        assert memory == one.estimate.memory and memory.total <= searched.cluster.room
        assert config.policy.tokens_per_micro_batch >= config.max_sequence_tokens


def test_proposals_are_in_order_and_each_says_what_check_says(thirty):
    searched, candidates = thirty
    seconds = [one.estimate.seconds for one in candidates]
    assert seconds == sorted(seconds)
    assert len({(one.config.policy.backend, one.config.engine.placement) for one in candidates}) == len(candidates)
    for one in candidates:
        again = step_estimate(one.config, searched.spec, searched.cluster, searched.rates, searched.lengths)
        assert again == one.estimate


def test_the_first_is_faster_than_what_its_neighbours_would_be(thirty):
    """The layouts that people take for this model: none of those that fit is faster."""
    searched, candidates = thirty
    for text in ("d2t2p2c2e4", "d4t4e8", "d16e8", "d2t8e4", "d4p4e4"):
        layout = ParallelLayout.parse(f"megatron:{text}")
        for recompute in ("none", "full"):
            policy = {"backend": str(layout), "recompute": recompute, "tokens_per_micro_batch": 8192}
            other = RunConfig.of(
                model={"path": "here"}, policy=policy, engine={"backend": "vllm:d8t2", "memory_fraction": 0.4},
                algorithm={"kl": {"coef": 0}}, launch={"gpu": H100},
                data={"train": ["x"], "prompts_per_step": 64, "max_prompt_tokens": 1024, "max_response_tokens": 3072},
            )  # fmt: skip
            estimate = step_estimate(other, searched.spec, searched.cluster, searched.rates, searched.lengths)
            if estimate.memory.total <= searched.room:
                assert estimate.seconds >= candidates[0].estimate.seconds, text


def test_every_layout_that_is_looked_at_obeys_the_rules_of_layouts():
    searched = space("Qwen3-235B-A22B", 64)
    layouts = [layout for layout, _ in searched.layouts(64)]
    assert len(layouts) == len(set(layouts)) > 50
    for layout, split in searched.layouts(64):
        assert layout.world_size == 64 and layout.tp <= 8
        searched.spec.check_layout(layout, split)
    # Four key/value heads.
    assert max(layout.tp for layout in layouts) == 4
    assert {layout.etp for layout in layouts} > {1} and max(layout.ep for layout in layouts) > 8


@pytest.mark.parametrize(("layers", "pp"), [(94, 4), (94, 16), (36, 2), (28, 8), (48, 5)])
def test_stages_hold_all_layers_and_the_last_not_more_than_the_first(layers, pp):
    layout = ParallelLayout(pp=pp)
    splits = stage_cuts(layers, layout)
    assert splits and even_split(layers, pp) is not None
    for split in [even_split(layers, pp), *splits]:
        stages = split.split_layers(layers, layout)
        assert sorted(layer for stage in stages for chunk in stage for layer in chunk) == list(range(layers))
        counts = [sum(map(len, stage)) for stage in stages]
        assert counts[0] >= counts[-1] and max(counts) - min(counts) <= 6
        assert len({len(stage) for stage in stages}) == 1


def test_235_billion_parameters_on_256_gpus_take_seconds():
    searched, begin = space("Qwen3-235B-A22B", 256), time.process_time()
    candidates = searched.search(1)
    assert time.process_time() - begin < 10
    assert candidates[0].estimate.memory.total <= searched.room


def test_a_model_too_large_says_by_how_much_and_what_would_fit():
    """Parameters, gradients and Adam of 8 billion in bfloat16 are 18 bytes each, 137 GiB."""
    with pytest.raises(ValueError) as error:
        space("Qwen3-8B", 1).search(1)
    assert str(error.value) == (
        "8.2 billion parameters do not fit 1 x h100-80g on any layout: the smallest needs 137.3 GiB of each, 64.5 more than "
        "the 72.8 GiB that a run may fill; it fits 2 of them"
    )
    assert space("Qwen3-8B", 2).search(1)


def test_a_critic_next_to_the_policy_leaves_it_less_room(tmp_path):
    """Alone 8 billion parameters fit two GPUs, next to a critic of as many that stays on the device they need twice those."""
    critic = write_shape(tmp_path, "Qwen3-8B")
    sections = {
        "algorithm": {"name": "ppo", "kl": {"coef": 0}},
        "critic": {"path": str(critic), "offload": {"parameters": False}},
    }
    with pytest.raises(ValueError, match=r"do not fit 2 x h100-80g on any layout.*; it fits 4 of them"):
        space("Qwen3-8B", 2, **sections).search(1)
    (one,) = space("Qwen3-8B", 4, **sections).search(1)
    assert one.estimate.memory.others["critic"].state > 0 and one.estimate.parts["critic"] > 0


def test_a_reward_model_that_is_always_there_is_counted(tmp_path):
    judge = {"model": {"path": str(write_shape(tmp_path, "Qwen3-8B"))}}
    searched = space("Qwen3-8B", 4, reward=judge)
    for one in searched.search(3):
        assert one.estimate.memory.others["reward.model"].resident > 2**30
        assert one.estimate.memory.total <= searched.room
        assert one.estimate.parts["reward model"] > 0


def test_a_run_without_sampling_has_no_engine_searched():
    (one,) = space("Qwen3-8B", 8, algorithm={"name": "sft"}).search(1)
    assert one.config.engine.backend == "transformers" and "rollout" not in one.estimate.parts


def test_engines_apart_are_taken_where_they_sample_ahead():
    ahead = space("Qwen3-8B", 16, rollout={"max_staleness": 1}, algorithm={"kl": {"coef": 0}})
    (one,) = ahead.search(1)
    assert one.config.engine.is_apart and one.estimate.overlapped["rollout"] > 0


@pytest.mark.parametrize(("bridge", "backend"), [("megatron-bridge", "megatron"), ("native", "fsdp")])
def test_a_family_without_a_file_is_proposed_on_layouts_that_compute_it(models, bridge, backend):
    searched = space("Qwen3-30B-A3B", 4, policy={"megatron": {"bridge_type": bridge}})
    searched = Space(load_spec(models("nemotron")), searched.base, searched.cluster, searched.rates, searched.lengths)
    proposed = [one.config.policy for one in searched.search(8)]
    assert proposed and {policy.layout.backend for policy in proposed} == {backend}
    assert {policy.megatron.pipeline_split.virtual_stages(policy.layout) for policy in proposed} == {1}
