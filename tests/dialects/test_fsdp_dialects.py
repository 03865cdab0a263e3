"""Configurations of other systems that train with FSDP keep it; where `fsdp:` lacks something, Megatron-Core trains, with a note."""

from __future__ import annotations

import pytest

from tests.support.dialects import config, translated

VERL = ["data.train_files=/d/a.parquet", "actor_rollout_ref.model.path=m", "trainer.n_gpus_per_node=8", "trainer.nnodes=1"]
VERL += [
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.name=vllm",
    "data.train_batch_size=64",
    "actor_rollout_ref.actor.ppo_mini_batch_size=64",
]
SFT = [
    "data.train_files=/d/a.parquet",
    "model.path=m",
    "trainer.n_gpus_per_node=8",
    "data.train_batch_size=64",
    "data.max_length=64",
]
SFT += ["data.prompt_key=q", "data.response_key=a"]
SKYRL = ["data.train_data=['/d/a.parquet']", "trainer.policy.model.path=m", "trainer.placement.policy_num_gpus_per_node=8"]
SKYRL += ["generator.inference_engine.num_engines=8", "generator.inference_engine.run_engines_locally=true"]
AREAL = """
actor: {path: m, kl_ctl: 0, backend: "fsdp:d4"}
rollout: {backend: "vllm:d4"}
gconfig: {n_samples: 4, max_new_tokens: 64}
train_dataset: {path: /d/a.parquet, batch_size: 16, type: rl}
"""
TRINITY = """
mode: both
algorithm: {algorithm_type: grpo, repeat_times: 4}
model: {model_path: m, max_prompt_tokens: 64, max_response_tokens: 64}
cluster: {node_num: 1, gpu_per_node: 8}
buffer:
  batch_size: 8
  explorer_input: {taskset: {path: /d, split: train, format: {prompt_key: q, response_key: a}}}
explorer: {rollout_model: {engine_num: 4, tensor_parallel_size: 1}}
trainer: {trainer_strategy: fsdp}
"""
ROLL = """
pretrain: m
adv_estimator: grpo
num_return_sequences_in_group: 8
rollout_batch_size: 8
prompt_length: 64
response_length: 64
actor_train:
  device_mapping: list(range(0,8))
  data_args: {file_name: [/d/a.jsonl]}
  strategy_args: {strategy_name: fsdp2_train, strategy_config: {fsdp_size: 4}}
  model_args: {ulysses_size: 2}
actor_infer: {device_mapping: "list(range(0,8))", strategy_args: {strategy_name: vllm}}
reference: {device_mapping: "list(range(0,8))", strategy_args: {strategy_name: fsdp2_infer}}
"""
_A = "actor_rollout_ref.actor."


def keys_of(system: str, *words: str, tree: str = "") -> tuple[dict[str, object], list[str]]:
    """Keys of the models in the translation, which is not refused, and its notes."""
    translation = translated(system, *words, tree=tree)
    assert not [outcome for outcome in translation.outcomes if outcome.kind == "unknown"]
    return {line.key: line.value for line in translation.lines}, translation.notes


@pytest.mark.parametrize(
    ("system", "words", "expected"),
    [
        ("verl", [*VERL], {"backend": "fsdp:d8t1"}),
        ("verl", [*VERL, f"{_A}strategy=fsdp2", f"{_A}ulysses_sequence_parallel_size=2"], {"backend": "fsdp:d4t1c2"}),
        ("verl", [*VERL, f"{_A}fsdp_config.fsdp_size=4"], {"backend": "fsdp:d8t1", "fsdp.replicas": 2}),
        ("verl", [*VERL, f"{_A}fsdp_config.fsdp_size=-1"], {"backend": "fsdp:d8t1", "fsdp.replicas": None}),
        ("verl", [*VERL, f"{_A}fsdp_config.fsdp_size=3"], {"backend": "fsdp:d8t1", "fsdp.replicas": None}),
        (
            "verl",
            [*VERL, f"{_A}fsdp_config.fsdp_size=4", f"{_A}ulysses_sequence_parallel_size=2"],
            {"backend": "fsdp:d4t1c2", "fsdp.replicas": 2},
        ),
        (
            "verl",
            [*(word.replace("nnodes=1", "nnodes=3") for word in VERL), f"{_A}fsdp_config.fsdp_size=2", f"{_A}ulysses_sequence_parallel_size=8"],
            {"backend": "fsdp:d3t1c8", "fsdp.replicas": 3},
        ),
        (
            "verl",
            [*VERL, f"{_A}fsdp_config.offload_policy=True", f"{_A}fsdp_config.reshard_after_forward=False"],
            {"fsdp.cpu_adam": True, "fsdp.reshard_after_forward": False},
        ),
        (
            "verl",
            [*VERL, f"{_A}fsdp_config.param_offload=True", "actor_rollout_ref.model.enable_gradient_checkpointing=True"],
            {"backend": "fsdp:d8t1", "offload.parameters": True, "recompute": "full"},
        ),
        ("verl", [*VERL, f"{_A}strategy=megatron"], {"backend": "megatron:d8t1p1"}),
        ("verl", [*VERL, f"{_A}strategy=veomni"], {"backend": "megatron:d8t1p1"}),
        ("verl", [*SFT, "engine=fsdp"], {"backend": "fsdp:d8t1"}),
        ("verl", [*SFT, "engine=fsdp", "engine.fsdp_size=2"], {"backend": "fsdp:d8t1", "fsdp.replicas": 4}),
        ("verl", [*SFT, "engine=torchtitan"], {"backend": "megatron:d8t1p1"}),
        ("siirl", [*VERL], {"backend": "fsdp:d8t1"}),
        ("siirl", [*VERL, f"{_A}strategy=fsdp2", f"{_A}fsdp_config.fsdp_size=2"], {"backend": "fsdp:d8t1", "fsdp.replicas": 4}),
        ("skyrl", [*SKYRL], {"backend": "fsdp:d8t1"}),
        (
            "skyrl",
            [*SKYRL, "trainer.strategy=fsdp2", "trainer.policy.fsdp_config.fsdp_size=4", "trainer.policy.fsdp_config.cpu_offload=true"],
            {"backend": "fsdp:d8t1", "fsdp.replicas": 2, "fsdp.cpu_adam": True},
        ),
        ("skyrl", [*SKYRL, "trainer.strategy=megatron"], {"backend": "megatron:d8t1p1"}),
    ],
)  # fmt: skip
def test_a_run_with_fsdp_keeps_it_with_its_options(system, words, expected):
    values, _ = keys_of(system, *words)
    assert {key: values.get(f"policy.{key}") for key in expected} == expected
    config(system, *words)


@pytest.mark.parametrize(
    ("system", "tree", "expected"),
    [
        ("areal", AREAL, {"policy.backend": "fsdp:d4t1"}),
        ("areal", AREAL.replace("fsdp:d4", "fsdp:d2c2"), {"policy.backend": "fsdp:d2t1c2"}),
        ("areal", AREAL.replace("fsdp:d4", "megatron:d4"), {"policy.backend": "megatron:d4t1p1"}),
        ("areal", AREAL + "ref: {path: m, backend: 'fsdp:d4'}", {"reference.backend": None}),
        ("areal", AREAL + "ref: {path: m, backend: 'megatron:d2t2'}", {"reference.backend": "megatron:d2t2p1"}),
        ("areal", AREAL.replace('"fsdp:d4"}', '"fsdp:d4", fsdp: {offload_params: true}}'), {"policy.fsdp.cpu_adam": True}),
        ("areal", "allocation_mode: vllm.d4+d4\n" + AREAL.replace(', backend: "fsdp:d4"', ""), {"policy.backend": "fsdp:d4t1"}),
        ("trinity", TRINITY, {"policy.backend": "fsdp:d4t1"}),
        ("trinity", TRINITY.replace("strategy: fsdp", "strategy: megatron"), {"policy.backend": "megatron:d4t1p1"}),
        ("roll", ROLL, {"policy.backend": "fsdp:d4t1c2", "policy.fsdp.replicas": 2, "reference.backend": None}),
        (
            "roll",
            ROLL.replace("fsdp2_infer", "megatron_infer, strategy_config: {tensor_model_parallel_size: 2}"),
            {"policy.backend": "fsdp:d4t1c2", "reference.backend": "megatron:d4t2p1"},
        ),
        ("roll", ROLL.replace("fsdp2_train", "deepspeed_train"), {"policy.backend": "megatron:d4t1p1c2"}),
    ],
)  # fmt: skip
def test_a_file_with_fsdp_keeps_it_for_each_model(system, tree, expected):
    values, _ = keys_of(system, tree=tree)
    assert {key: values.get(key) for key in expected} == expected
    config(system, tree=tree)


@pytest.mark.parametrize(
    ("system", "words", "tree", "what"),
    [
        ("verl", [*VERL, "actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.rollout.load_format=safetensors"], "", "adapters"),
        (
            "verl",
            [*VERL, "actor_rollout_ref.model.lora_rank=8", f"{_A}fsdp_config.fsdp_size=4", f"{_A}fsdp_config.offload_policy=True"],
            "",
            "adapters",
        ),
        ("skyrl", [*SKYRL, "trainer.policy.model.lora.rank=8"], "", "adapters"),
        ("areal", [], AREAL.replace("path: m,", "path: m, use_lora: true,", 1), "adapters"),
    ],
)  # fmt: skip
def test_a_run_with_what_fsdp_lacks_trains_on_megatron_core_and_says_so(system, words, tree, what):
    values, notes = keys_of(system, *words, tree=tree)
    assert str(values["policy.backend"]).startswith("megatron:") and values["policy.lora.rank"]
    assert not [key for key in values if ".fsdp." in key]
    assert [note for note in notes if note.startswith(f"{what} is not built for fsdp: layouts, so Megatron-Core")]
    assert bool(values.get("policy.megatron.optimizer.optimizer_cpu_offload")) == any(
        "offload_policy" in word for word in words
    )
    config(system, *words, tree=tree)


def test_adam_of_float32_parameters_is_offloaded_where_megatron_core_cannot_run_it():
    """Megatron-Core moves the float32 copies of parameters, which float32 parameters do not have."""
    words = ["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.rollout.load_format=safetensors"]
    words += [f"{_A}fsdp_config.offload_policy=True", f"{_A}fsdp_config.dtype=float32"]
    values, _ = keys_of("verl", *VERL, *words)
    assert (values["policy.dtype"], values["policy.offload.optimizer"]) == ("float32", True)
    assert "policy.megatron.optimizer.optimizer_cpu_offload" not in values
    config("verl", *VERL, *words)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("fsdp:d2t2", "fsdp:d2t2"),
        ("fsdp:d4e2", "fsdp:d4t1e2"),
        ("fsdp:d2t2e4", "fsdp:d2t2e4"),
        ("fsdp:(attn:d4|ffn:d2e2)", "fsdp:d4t1e2"),
        ("fsdp:(attn:d2t2|ffn:d1e4)", "fsdp:d2t2e4"),
    ],
)
def test_layers_that_areal_splits_with_fsdp_stay_so_and_the_other_trainer_is_named(theirs, ours):
    values, notes = keys_of("areal", tree=AREAL.replace("fsdp:d4", theirs))
    assert values["policy.backend"] == ours
    assert any("docs/fsdp.md" in note and "`-- policy.backend=megatron:" in note for note in notes)
    reference = AREAL.replace("fsdp:d4", "megatron:d4") + f"ref: {{path: m, backend: '{theirs}'}}"
    assert keys_of("areal", tree=reference)[0]["reference.backend"] == ours
    config("areal", tree=AREAL.replace("fsdp:d4", theirs))


def test_split_layers_with_adapters_keep_their_sizes_on_megatron_core():
    tree = AREAL.replace("fsdp:d4", "fsdp:d2t2").replace("path: m,", "path: m, use_lora: true,", 1)
    assert keys_of("areal", tree=tree)[0]["policy.backend"] == "megatron:d2t2p1"


@pytest.mark.parametrize(
    ("theirs", "reason"),
    [
        ("fsdp:(attn:d2t2|ffn:d2t2)", "fsdp does not shard single experts, so t in an ffn part must be 1"),
        ("fsdp:d2t2e1p2", "fsdp has no pipeline"),
        ("fsdp:(attn:d1t4|ffn:d2e2)", "e must be 1 or a multiple of t that divides d·t"),
    ],
)
def test_layouts_that_fsdp_cannot_have_are_refused_with_the_reason(theirs, reason):
    refusals = translated("areal", tree=AREAL.replace("fsdp:d4", theirs)).refusals
    assert any(reason in refusal for refusal in refusals), refusals
