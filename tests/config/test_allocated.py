"""One string for the layouts of all roles."""

from __future__ import annotations

import pytest

from fivefold.config import ConfigError, RunConfig, dump_yaml, load_config


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


def test_the_other_models_may_be_named_beside_the_actor():
    config = made("vllm[rollout]:d1+megatron[actor]:t2|megatron[ref]:d2|megatron[critic]:p2|megatron[reward]:d2")
    assert (config.reference.backend, config.critic.backend) == ("megatron:d2t1p1", "megatron:d1t1p2")
    assert (config.reward.model.backend, config.engine.placement) == ("megatron:d2t1p1", "apart")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("vllm:d2+sglang:d2", "engine.backend is set twice, by vllm:d2t1p1 and sglang:d2t1p1"),
        ("vllm:d2+megatron[boss]:d2", "no role is called 'boss'; known: actor, policy, ref,"),
        ("vllm[actor]:d2+megatron:d2", "actor is no engine: got vllm[actor]:d2"),
        ("vllm[rollout]:d1+megatron[actor]:d2+megatron[ref]:d2", "every model of the trainer"),
        ("vllm:d2|megatron:d2", "behind a | each layout needs a name in brackets"),
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
    assert load_config(tmp_path / "run.yaml") == config


@pytest.mark.parametrize("policy", [3, ["a"], None])
def test_a_section_that_is_none_is_refused_as_such(policy):
    with pytest.raises(ConfigError, match="policy"):
        made("vllm:d4t2+megatron:d2t4", policy=policy)
