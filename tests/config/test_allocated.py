"""One string for the layouts of all roles."""

from __future__ import annotations

import pytest

from fivefold.config import ConfigError, RunConfig, dump_yaml


def made(allocation: str, **sections) -> RunConfig:
    return RunConfig.of(model={"path": "m"}, launch={"allocation": allocation}, **sections)


@pytest.mark.parametrize(
    ("text", "policy", "engine", "placement"),
    [
        ("vllm:d4t2+megatron:d2t4", "megatron:d2t4p1", "vllm:d4t2p1", "apart"),
        ("sglang:d1t2 + megatron:(attn:d1p2t2|ffn:d1p2t1e2)", "megatron:d1t2p2e2", "sglang:d1t2p1", "apart"),
        ("vllm:d4t2|megatron[actor]:d2t4", "megatron:d2t4p1", "vllm:d4t2p1", "colocated"),
        ("megatron[policy]:d2|vllm[rollout]:d1t2", "megatron:d2t1p1", "vllm:d1t2p1", "colocated"),
        ("megatron:d2p2", "megatron:d2t1p2", "transformers", "colocated"),
        ("megatron:d2+vllm:d1", "megatron:d2t1p1", "vllm:d1t1p1", "apart"),
    ],
)
def test_a_string_says_layouts_and_whether_they_share_gpus(text, policy, engine, placement):
    config = made(text)
    assert (config.policy.backend, config.engine.backend, config.engine.placement) == (policy, engine, placement)


def test_the_other_models_may_be_named_next_to_the_actor():
    config = made("vllm[rollout]:d1+megatron[actor]:t2|megatron[ref]:d2|megatron[critic]:p2|megatron[reward]:d2")
    assert (config.reference.backend, config.critic.backend) == ("megatron:d2t1p1", "megatron:d1t1p2")
    assert (config.reward.model.backend, config.engine.placement) == ("megatron:d2t1p1", "apart")


@pytest.mark.parametrize(
    ("text", "spans"),
    [
        ("megatron[actor]:d2+megatron[ref]:t2+megatron[critic]:d1", [range(2), range(2, 4), range(4, 5)]),
        # The policy has the first ranks, wherever it stands; what shares its ranks does so after it too.
        ("megatron[ref]:t2|megatron[critic]:d2+megatron[actor]:d3", [range(3), range(3, 5), range(3, 5)]),
        ("megatron[critic]:d1+megatron[actor]:d2|megatron[ref]:t2", [range(2), range(2), range(2, 3)]),
        # The engine's devices are after all of them.
        ("vllm[rollout]:d4+megatron[actor]:d2+megatron[ref]:d1", [range(2), range(2, 3), range(2)]),
    ],
)
def test_models_that_stand_apart_have_the_ranks_after_the_policy_s(text, spans):
    config = made(text, algorithm={"name": "ppo", "kl": {"coef": 0.1}})
    assert [config.roles[name].ranks for name in ("policy", "reference", "critic")] == spans
    assert config.roles.world_size == max(span.stop for span in spans)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("vllm:d2+sglang:d2", "engine.backend is set twice, by vllm:d2t1p1 and sglang:d2t1p1"),
        ("vllm:d2+megatron[boss]:d2", "no role is called 'boss'; known: reference, policy, critic,"),
        ("vllm[actor]:d2+megatron:d2", "actor is no engine: got vllm[actor]:d2"),
        ("megatron[critic]:d2+megatron[ref]:d2", "name its layout too, megatron[actor]:..."),
        ("megatron[actor]:d2+megatron[ref]:d2|vllm[rollout]:d2", "the engine shares the policy's ranks or has devices"),
        ("vllm:d2|megatron:d2", "after a | each layout needs a name in brackets"),
        ("vllm:d2|megatron[actor]:d4", "layouts joined by | share their ranks"),
        ("vlm:d2", "unknown backend 'vlm'"),
        ("", "a layout names its backend before a colon"),
    ],
)
def test_a_string_that_cannot_be_is_refused_with_what_would_be(text, says):
    with pytest.raises(ConfigError) as refused:
        made(text)
    assert str(refused.value).startswith("launch.allocation: ") and says in str(refused.value), str(refused.value)


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        (
            {"engine": {"backend": "vllm:d2t4"}},
            "engine.backend and launch.allocation say different things, 'vllm:d2t4' and 'vllm:d4t2p1'",
        ),
        (
            {"policy": {"backend": "megatron:d8"}},
            "policy.backend and launch.allocation say different things, 'megatron:d8' and 'megatron:d2t4p1'",
        ),
        (
            {"engine": {"placement": "colocated"}},
            "engine.placement and launch.allocation say different things, 'colocated' and 'apart'",
        ),
    ],
)
def test_a_key_that_says_otherwise_is_refused_with_both(sections, says):
    with pytest.raises(ConfigError) as refused:
        made("vllm:d4t2+megatron:d2t4", **sections)
    assert says in str(refused.value)


def test_keys_that_say_the_same_are_fine_and_the_whole_tree_reads_back(tmp_path):
    config = made("vllm:d4t2+megatron:d2t4", engine={"backend": "vllm:t2d4"}, policy={"backend": "megatron:t4d2p1c1"})
    (tmp_path / "run.yaml").write_text(dump_yaml(config))
    assert RunConfig.from_yaml(tmp_path / "run.yaml") == config


@pytest.mark.parametrize("policy", [3, ["a"], None])
def test_a_section_that_is_none_is_refused_as_such(policy):
    with pytest.raises(ConfigError, match="policy"):
        made("vllm:d4t2+megatron:d2t4", policy=policy)


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        (
            {"reference": {"backend": "megatron:d4"}},
            "reference.backend shares the policy's ranks, so d·t·p·c must be 2: megatron:d4t1p1 has 4; write for example "
            "megatron:d2, or leave it out for megatron:d2t1p1; or give it ranks of its own, reference.first_rank: 2",
        ),
        (
            {"reference": {"first_rank": 1}},
            "reference.first_rank must be 0, where policy begins, with as many ranks, or leave ranks 0-1 to it: got 1 for "
            "ranks 1-2",
        ),
        (
            {"reference": {"first_rank": 2}, "critic": {"first_rank": 2, "backend": "megatron:d1"}},
            "critic.first_rank must be 2, where reference begins, with as many ranks, or leave ranks 2-3 to it: got 2 for "
            "rank 2",
        ),
        (
            {"reference": {"first_rank": 2}, "critic": {"first_rank": 5}},
            "critic.first_rank leaves rank 4 without a model: got critic.first_rank 5 after the policy's ranks 0-1; number "
            "them without a gap",
        ),
        (
            {"reference": {"first_rank": 2}, "engine": {"backend": "vllm:d2"}},
            "engine.mode must be server where a model has ranks of its own",
        ),
        ({"reference": {"first_rank": -1}}, "reference.first_rank must be"),
    ],
)
def test_ranks_that_cannot_be_shared_so_are_refused(sections, says):
    usual = {"policy": {"backend": "megatron:d2"}, "algorithm": {"name": "ppo", "kl": {"coef": 0.1}}}
    with pytest.raises(ConfigError) as refused:
        RunConfig.of(model={"path": "m"}, **usual, **sections)
    assert says in str(refused.value), str(refused.value)


def test_ranks_of_a_model_that_the_run_does_not_have_are_not_there():
    config = RunConfig.of(model={"path": "m"}, reference={"first_rank": 1}, algorithm={"name": "grpo", "kl": {"coef": 0}})
    assert config.roles.world_size == 1
