"""What a configuration with `fsdp:` layouts is refused for, without torch."""

from __future__ import annotations

import pytest

from fivefold.config import ConfigError, RunConfig
from fivefold.config.validate import validate
from fivefold.plan.check import check
from tests.support.tiny_models import make_model

RUN = ["model.path=m", "data.train=[d.parquet]", "data.prompts_per_step=8", "policy.backend=fsdp:d2", "policy.dtype=float32"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["policy.backend=fsdp:d2p2"], "fsdp has no pipeline: got p2; use megatron:"),
        (["policy.backend=fsdp:(attn:d2t2|ffn:t2)"], "does not shard single experts, so t in an ffn part must be 1"),
        (["policy.backend=fsdp:d4e4", "policy.fsdp.replicas=2"], "e4 must divide the 2 ranks of d·t in a copy"),
        (["policy.backend=fsdp:d3e2"], "a multiple of t that divides d·t: got e2 for d3 t1; choose one of 1, 3"),
        (["policy.backend=fsdp:d2t2e3"], "got e3 for d2 t2; choose one of 1, 2, 4"),
        (["policy.backend=fsdp:d4", "policy.fsdp.replicas=3"], "policy.fsdp.replicas must divide d: got 3 for fsdp:d4t1"),
        (["policy.lora.rank=8"], ": adapters are not built for fsdp"),
        (["policy.router_replay=R2"], ": router replay is not built for fsdp"),
        (["policy.router_balance=config"], ": balance losses of routers are not built for fsdp"),
        (["policy.mtp.train=true"], ": multi-token prediction is not built for fsdp"),
        (["policy.recompute=selective"], "must be none or full with fsdp"),
        (["policy.megatron.ddp={overlap_grad_reduce: true}"], "policy.megatron is for megatron: layouts"),
        (["policy.backend=megatron:d2", "reference.backend=fsdp:d2", "reference.megatron.bridge_type=mbridge"], "reference.megatron is for"),
        (["policy.backend=vllm:d2"], "must be a layout of a trainer, megatron or fsdp"),
    ],
)  # fmt: skip
def test_what_fsdp_lacks_is_refused_with_a_sentence(words, says):
    with pytest.raises(ConfigError) as error:
        RunConfig.from_overrides([*RUN, *words])
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (["policy.recompute=selective", "algorithm.kl.coef=0.1"], ["policy.recompute"]),
        (["policy.recompute=selective", "algorithm.name=ppo", "critic.recompute=none"], ["policy.recompute"]),
        (["critic.recompute=selective", "algorithm.name=ppo"], ["critic.recompute"]),
        (["policy.fsdp.replicas=3", "algorithm.kl.coef=0.1"], ["policy.fsdp.replicas"]),
        (["reference.fsdp.replicas=3", "algorithm.kl.coef=0.1"], ["reference.fsdp.replicas"]),
        (["critic.lora.rank=4", "algorithm.name=ppo"], ["critic.lora.rank"]),
    ],
)
def test_a_message_names_the_key_that_sets_what_the_model_has(words, keys):
    with pytest.raises(ConfigError) as error:
        RunConfig.from_overrides([*RUN, *words])
    assert [line.split()[0].rstrip(":") for line in str(error.value).splitlines()] == keys


def test_a_reference_may_have_any_recomputation_as_it_computes_nothing_again():
    words = [
        "policy.backend=megatron:d2",
        "policy.recompute=selective",
        "reference.backend=fsdp:d2",
        "algorithm.kl.coef=0.1",
    ]
    assert RunConfig.from_overrides([*RUN, *words]).roles["reference"].layout.backend == "fsdp"


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (["policy.backend=fsdp:d1t2", "policy.sequence_parallel=false"], ["policy.sequence_parallel"]),
        (["policy.backend=fsdp:d1t2", "policy.sequence_parallel=false", "reference.backend=megatron:t2"], []),
        (["policy.backend=megatron:d2", "algorithm.name=ppo", "critic.fsdp.keep_gathered=true"], ["critic.fsdp.keep_gathered"]),
        (["policy.backend=megatron:d2", "reference.fsdp.cpu_adam=true"], ["reference.fsdp.cpu_adam"]),
        (["policy.backend=megatron:d2", "policy.fsdp.cpu_adam=true", "reference.backend=fsdp:d2"], []),
        (["algorithm.name=ppo", "critic.backend=megatron:d2", "critic.fsdp.compile=true"], ["critic.fsdp.compile"]),
    ],
)  # fmt: skip
def test_a_key_of_a_backend_that_no_model_has_is_reported(words, keys):
    findings = validate(RunConfig.from_overrides([*RUN, "algorithm.kl.coef=0.1", *words]))
    assert [key for key, _ in findings.ignored if "fsdp" in key or "sequence" in key] == keys


def test_an_ffn_part_of_whole_experts_is_the_layout_with_e():
    words = ["policy.backend=fsdp:(attn:d4t2|ffn:e4)", "model.path=m"]
    assert RunConfig.from_overrides([*RUN, *words]).layout.is_same(
        RunConfig.from_overrides([*RUN, "policy.backend=fsdp:d4t2e4"]).layout
    )


def test_options_of_fsdp_next_to_megatron_alone_are_reported():
    config = RunConfig.from_overrides([*RUN, "policy.backend=megatron:d2", "policy.fsdp.keep_gathered=true"])
    assert ("policy.fsdp.keep_gathered", "no model that reads it has an fsdp: layout") in validate(config).ignored


@pytest.mark.parametrize(
    ("name", "backend", "says"),
    [
        ("gemma2", "megatron:d2", "unknown model family 'gemma2'"),
        ("gemma2", "fsdp:d2", ""),
        ("gemma2", "fsdp:d1t2", ""),
        ("gpt_oss", "fsdp:d2", ""),
        ("gpt_oss", "fsdp:d2t2e4", ""),
        ("gpt_oss", "fsdp:d8e8", "got 4 for ep=8 in fsdp:d8t1e8; choose an ep that divides 4"),
        ("qwen3_moe", "fsdp:d2e2", ""),
        ("mixtral", "fsdp:t2", "t must be 1: it is not proven for mixtral; use d, or set policy.fsdp.unproven: true"),
        ("minimax_m2", "fsdp:d2e2", ""),
    ],
)
def test_check_knows_families_without_a_file_here(tmp_path, name, backend, says):
    directory = make_model(name, tmp_path / "model")
    words = [f"model.path={directory}", f"policy.backend={backend}"]
    errors = check(
        RunConfig.from_overrides([*RUN, *words, "data.max_response_tokens=64", "data.max_prompt_tokens=64"])
    ).errors
    # The directory has no tokenizer, and there are no data.
    faults = [text for text in errors if "tokenizer" not in text and not text.startswith("data.")]
    assert any(says in text for text in faults) if says else not faults, errors


def test_another_release_of_transformers_is_refused_with_the_line_that_installs_one(tmp_path, monkeypatch):
    """The range is that of Fivefold's own requirements."""
    import importlib.metadata

    directory, original = make_model("qwen3", tmp_path / "model"), importlib.metadata.version
    words = [*RUN, f"model.path={directory}", "data.max_response_tokens=64", "data.max_prompt_tokens=64"]
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.57.1" if name == "transformers" else original(name))
    errors = check(RunConfig.from_overrides(words)).errors
    assert any(
        "policy.backend: fsdp needs its models: transformers 4.57.1 is installed, supported is" in text
        and "pip install 'transformers" in text
        for text in errors
    ), errors
    errors = check(RunConfig.from_overrides([*words, "policy.backend=megatron:d2"])).errors
    assert not any("transformers 4.57.1" in text for text in errors)


@pytest.mark.parametrize(
    ("name", "backend", "says"),
    [
        ("qwen3", "fsdp:d1t3", "attention heads must be divisible by tp: got 8 for tp=3 in fsdp:d1t3; choose a tp that divides 8"),
        ("qwen3", "fsdp:t8", "key/value heads must be divisible by tp: got 4 for tp=8"),
        ("gemma2", "fsdp:t3", "attention heads must be divisible by tp: got 8 for tp=3"),
    ],
)  # fmt: skip
def test_heads_that_t_does_not_divide_are_refused_with_what_divides(tmp_path, name, backend, says):
    directory = make_model(name, tmp_path / "model")
    words = [*RUN, f"model.path={directory}", f"policy.backend={backend}", "data.max_response_tokens=64"]
    errors = check(RunConfig.from_overrides([*words, "data.max_prompt_tokens=64", "data.prompts_per_step=9"])).errors
    assert any(says in text for text in errors), errors


def test_offload_next_to_state_in_host_memory_is_reported():
    words = [*RUN, "policy.fsdp.cpu_adam=true", "policy.offload.optimizer=true", "algorithm.kl.coef=0.1"]
    ignored = [entry for entry in validate(RunConfig.from_overrides(words)).ignored if "offload" in entry[0]]
    assert ignored == [("policy.offload", "with policy.fsdp.cpu_adam this state is in host memory all the time")]
