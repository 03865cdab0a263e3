"""Adapters and multi-token prediction as each system asks for them, with its own defaults: what they become, by hand."""

from __future__ import annotations

import pytest

from fivefold.config import RunConfig
from fivefold.config.dialect import find_dialect
from fivefold.config.learners import LoraConfig, MTPConfig
from fivefold.config.loader import read_mapping

M = "actor_rollout_ref.model."
VERL = ["data.train_files=a.parquet", f"{M}path=m", "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.name=vllm"]
MEGATRON = [*VERL, "actor_rollout_ref.actor.strategy=megatron"]
SFT = ["data.train_files=a.parquet", "model.partial_pretrain=m", "trainer.n_gpus_per_node=1"]
SKYRL = ["data.train_data=['a.parquet']", "trainer.policy.model.path=m"]
ROLL = """
exp_name: x
pretrain: m
adv_estimator: grpo
actor_train:
  model_args: {lora_target: "o_proj,q_proj"%s}
  device_mapping: list(range(0,8))
  strategy_args: {strategy_name: megatron_train}
actor_infer:
  model_args: {lora_target: "o_proj,q_proj", lora_rank: 16}
  device_mapping: list(range(0,8))
  strategy_args: {strategy_name: vllm}
"""
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def lora_of(system: str, *words: str, tree: str = "", model: str = "policy"):
    translation = find_dialect(system)(read_mapping(tree, "a file"), list(words), environment={})  # type: ignore[call-arg]
    named = translation.tree.get(model, {}).get("lora", {})
    about = ("lora", "model", "peft")
    refused = [
        outcome.reason
        for outcome in translation.outcomes
        if outcome.is_refused and any(word in outcome.key for word in about)
    ]
    return RunConfig.of({"model": {"path": "m"}, "policy": {"lora": named}}).policy.lora, refused


@pytest.mark.parametrize(("system", "words", "tree", "wanted"), [
    ("verl", [*VERL, f"{M}lora_rank=32"], "", LoraConfig(32, 16.0)),
    ("siirl", [*VERL, f"{M}lora_rank=32"], "", LoraConfig(32, 16.0)),
    ("verl", [*VERL, f"{M}lora_rank=64", f"{M}lora_alpha=32", f"{M}target_modules=[q_proj,v_proj]", f"{M}exclude_modules=[layers.0.self_attn.q_proj]", f"{M}lora_adapter_path=/a"], "",
     LoraConfig(64, 32.0, ["q_proj", "v_proj"], ["layers.0.self_attn.q_proj"], path="/a")),
    ("verl", [*MEGATRON, f"{M}lora.rank=8"], "", LoraConfig(8, 32.0, SEVEN, init="xavier")),
    ("verl", [*MEGATRON, f"{M}lora.rank=8", f"{M}lora.alpha=8", f"{M}lora.target_modules=['linear_qkv','linear_proj']", f"{M}lora.lora_A_init_method=kaiming", f"{M}lora.merge=True", f"{M}lora_rank=99"], "",
     LoraConfig(8, 8.0, SEVEN[:4])),
    ("verl", [*VERL, f"{M}lora.rank=8"], "", LoraConfig()),
    ("verl", [*SFT, "model.lora_rank=32", "model.target_modules=all-linear"], "", LoraConfig(32, 16.0)),
    ("roll", [], ROLL % "", LoraConfig(8, 16.0, ["o_proj", "q_proj"])),
    ("roll", [], ROLL % ", lora_rank: 32, lora_alpha: 8", LoraConfig(32, 8.0, ["o_proj", "q_proj"])),
    ("trinity", [], "model: {model_path: m, lora_configs: [{name: lora}]}", LoraConfig(32, 32.0)),
    ("trinity", [], "model: {model_path: m, lora_configs: [{lora_rank: 4, lora_alpha: 6, path: /a}]}", LoraConfig(4, 6.0, path="/a")),
    ("skyrl", [*SKYRL, "trainer.policy.model.lora.rank=32"], "", LoraConfig(32, 16.0)),
    ("skyrl", [*SKYRL, "trainer.policy.model.lora.rank=32", "trainer.policy.model.lora.alpha=64", "trainer.policy.model.lora.init_method=xavier"], "", LoraConfig(32, 64.0, init="xavier")),
    ("areal", [], "actor: {path: m, use_lora: true, target_modules: [linear_qkv]}", LoraConfig(32, 16.0, SEVEN[:3])),
    ("areal", [], "actor: {path: m, use_lora: true, lora_rank: 4, lora_alpha: 4}", LoraConfig(4, 4.0)),
    ("areal", [], "actor: {path: m, lora_rank: 4}", LoraConfig()),
])  # fmt: skip
def test_adapters_are_those_that_the_other_system_would_train(system, words, tree, wanted):
    lora, refused = lora_of(system, *words, tree=tree)
    assert (lora, refused) == (wanted, [])


def test_a_critic_of_verl_has_its_own_adapters():
    words = [*MEGATRON, "algorithm.adv_estimator=gae", f"{M}lora.rank=16", "critic.model.lora.rank=8", "critic.model.path=m"]
    assert lora_of("verl", *words)[0].rank == 16
    assert lora_of("verl", *words, model="critic") == (LoraConfig(8, 32.0, SEVEN, init="xavier"), [])


@pytest.mark.parametrize(("system", "words", "tree", "says"), [
    ("verl", [*MEGATRON, f"{M}lora.rank=8", f"{M}lora.dropout=0.1"], "", "dropout of adapters"),
    ("verl", [*MEGATRON, f"{M}lora.rank=8", f"{M}lora.type=dora"], "", "other adapters than LoRA"),
    ("verl", [*MEGATRON, f"{M}lora.rank=8", f"{M}lora.lora_A_init_method=normal"], "", "the initialization normal: known here are kaiming"),
    ("verl", [*VERL, f"{M}lora_rank=8", f"{M}target_modules=.*(q|v)_proj"], "", "a pattern of module names"),
    ("roll", [], ROLL % ", lora_dropout: 0.1", "dropout of adapters"),
    ("roll", [], ROLL % ", additional_target: embed_tokens", "weights that are trained in addition to adapters"),
    ("trinity", [], "model: {model_path: m, lora_configs: [{name: a}, {name: b}]}", "more than one adapter"),
    ("skyrl", [*SKYRL, "trainer.policy.model.lora.rank=8", "trainer.policy.model.lora.dropout=0.05"], "", "dropout of adapters"),
    ("areal", [], "actor: {path: m, use_lora: true, peft_type: dora}", "other adapters than LoRA"),
])  # fmt: skip
def test_what_adapters_cannot_do_is_refused_by_name(system, words, tree, says):
    refused = lora_of(system, *words, tree=tree)[1]
    assert any(says in reason for reason in refused), refused


MTP = f"{M}mtp."


@pytest.mark.parametrize(("system", "words", "wanted"), [
    ("verl", [], MTPConfig()),
    ("verl", [f"{MTP}enable=True"], MTPConfig()),
    ("verl", [f"{MTP}enable_train=True", f"{MTP}mtp_loss_scaling_factor=0.3"], MTPConfig()),
    ("verl", [f"{MTP}enable=True", f"{MTP}enable_train=True"], MTPConfig(train=True, loss_scaling_factor=0.1, detach_encoder=False)),
    ("verl", [f"{MTP}enable=True", f"{MTP}enable_train=True", f"{MTP}mtp_loss_scaling_factor=0.2", f"{MTP}detach_encoder=True"], MTPConfig(train=True, loss_scaling_factor=0.2, detach_encoder=True)),
    ("siirl", [f"{MTP}enable=True", f"{MTP}enable_train=True", f"{MTP}mtp_loss_scaling_factor=0"], MTPConfig(train=True, loss_scaling_factor=0.0)),
])  # fmt: skip
def test_the_layers_of_multi_token_prediction_learn_as_verl_says(system, words, wanted):
    translation = find_dialect(system)({}, [*MEGATRON, *words], environment={})  # type: ignore[call-arg]
    assert (
        RunConfig.of({"model": {"path": "m"}, "policy": {"mtp": translation.tree["policy"].get("mtp", {})}}).policy.mtp
        == wanted
    )
    assert not [outcome for outcome in translation.outcomes if outcome.is_refused and "mtp" in outcome.key]


def test_they_learn_in_sft_of_verl_too():
    words = ["data.train_files=a.parquet", "model.path=m", "engine=megatron", "optim.lr=1e-5", "model.mtp.enable=True",
             "model.mtp.enable_train=True", "model.mtp.detach_encoder=True"]  # fmt: skip
    translation = find_dialect("verl")({}, words, environment={})  # type: ignore[call-arg]
    assert translation.tree["algorithm"]["name"] == "sft"
    wanted = MTPConfig(train=True, loss_scaling_factor=0.1, detach_encoder=True)
    assert RunConfig.of({"model": {"path": "m"}, "policy": {"mtp": translation.tree["policy"]["mtp"]}}).policy.mtp == wanted


@pytest.mark.parametrize(("system", "words", "says"), [
    ("verl", [*MEGATRON, f"{MTP}enable=True", f"{MTP}enable_rollout=True"], "speculative decoding"),
    ("skyrl", [*SKYRL, "trainer.mtp.enabled=true", "trainer.mtp.loss_weight=0.2"], "is the same without them"),
    ("skyrl", [*SKYRL, "trainer.policy.megatron_config.mtp_num_layers=1"], "is the same without them"),
])  # fmt: skip
def test_what_only_makes_rollouts_faster_is_said_and_left_out(system, words, says):
    translation = find_dialect(system)({}, words, environment={})  # type: ignore[call-arg]
    (outcome,) = [outcome for outcome in translation.outcomes if says in outcome.reason]
    assert not outcome.changes_result and "mtp" not in translation.tree.get("policy", {})
