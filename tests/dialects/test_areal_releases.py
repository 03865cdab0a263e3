"""What AReaL's releases mean by the same keys, each by the numbers of its own code."""

from __future__ import annotations

import pytest

from fivefold.config import ConfigError
from tests.support.dialects import config, translated

RUN = """
experiment_name: gsm8k
trial_name: one
allocation_mode: {layout}
gconfig: {{n_samples: 4, max_new_tokens: 1024}}
actor:
  path: m
  ppo_n_minibatches: 1
  kl_ctl: 0.0
  {actor}
train_dataset: {{path: d.parquet, batch_size: 256{rest}}}
"""
DOTS, COLONS = "sglang.d4p1t1+d4p1t1", "sglang:d4p1t1+fsdp:d4p1t1"
PAIR = """
experiment_name: dpo
trial_name: one
actor:
  backend: "fsdp:d8"
  path: m
  mb_spec: {max_tokens_per_mb: 4096}
  optimizer: {lr: 5.0e-6, lr_scheduler_type: cosine, warmup_steps_proportion: 0.1, min_lr_ratio: 0.1, gradient_clipping: 10.0}
  beta: 0.2
ref: {path: "${actor.path}", backend: "${actor.backend}"}
train_dataset: {path: d.parquet, type: dpo, batch_size: 64, max_length: 2048}
"""
IMITATION = """
experiment_name: sft
trial_name: one
mode: ray
recover_mode: auto
allocation_mode: d32p1m4
exp_ctrl: {total_train_epochs: 200, save_freq_steps: 10}
model:
  type: {_class: qwen2}
  path: m
  bf16: true
  optimizer: {type: adam, lr: 1.0e-5, warmup_steps_proportion: 0.03, weight_decay: 0.1, initial_loss_scale: 262144.0}
allocation: {mb_spec: {max_tokens_per_mb: 32768}}
dataset: {train_path: a.jsonl, valid_path: b.jsonl, max_seqlen: 32768, train_bs_n_seqs: 64, valid_bs_n_seqs: 64}
external_configs: {cluster_config: {fileroot: /s}, envs: {A: "1"}}
"""
"""Of main_sft.py, before 2025-08."""


def run(actor: str = "recompute_logprob: true", layout: str = COLONS, rest: str = "", more: str = "") -> str:
    return RUN.format(actor=actor, layout=layout, rest=rest) + more


def test_what_is_left_out_has_the_value_of_the_release_that_the_configuration_shows():
    old = config("areal", tree=run("group_adv_norm: true", DOTS))
    optimizer = old.policy.optimizer
    assert (optimizer.lr, optimizer.weight_decay, optimizer.betas, optimizer.eps) == (2e-5, 0.05, [0.9, 0.95], 1e-5)
    assert (old.policy.recompute, old.data.max_prompt_tokens) == ("full", 65536 - 1024)
    young = config("areal", tree=run())
    optimizer = young.policy.optimizer
    assert (optimizer.lr, optimizer.weight_decay, optimizer.betas, optimizer.eps) == (1e-3, 0.01, [0.9, 0.999], 1e-8)
    assert (young.policy.recompute, young.data.max_prompt_tokens) == ("none", 32768 - 1024)
    between = config("areal", tree=run(layout=DOTS))
    assert (between.policy.optimizer.lr, between.data.max_prompt_tokens) == (1e-3, 65536 - 1024)


@pytest.mark.parametrize("mark", [
    "group_reward_norm: true", "adv_norm: false", "fsdp: {ulysses_sp_size: 1}", "mb_spec: {max_tokens_per_gpu: 1024}",
])  # fmt: skip
def test_a_key_that_went_early_tells_the_release(mark):
    assert config("areal", tree=run(mark, DOTS)).policy.optimizer.lr == 2e-5


@pytest.mark.parametrize(("layout", "actor", "wanted"), [
    # One string of a layout: until 2026-03 the weight of the decoupled loss had no bound unless one was said.
    (COLONS, "use_decoupled_loss: true", ("token", 1e9, "mask")),
    (DOTS, "use_decoupled_loss: true\n  behav_imp_weight_cap: 3.0", ("token", 3.0, "mask")),
    (COLONS, "use_decoupled_loss: true\n  behave_imp_weight_mode: sequence_truncate\n  behave_imp_weight_cap: 2.0", ("geometric", 2.0, "truncate")),
    (COLONS, "use_decoupled_loss: true\n  behave_imp_weight_mode: token_mask", ("token", 5.0, "mask")),
    (COLONS, "use_decoupled_loss: true\n  behave_imp_weight_mode: token_mask\n  behave_imp_weight_cap: null", ("token", 1e9, "mask")),
    (COLONS, "use_decoupled_loss: true\n  behave_imp_weight_mode: disabled", ("none", 2.0, "truncate")),
    (COLONS, "recompute_logprob: true\n  behave_imp_weight_cap: 2.0", ("none", 2.0, "truncate")),
    # Since 2026-04 rejection_sampling says it, and without it there is none.
    ("", "use_decoupled_loss: true\n  backend: 'fsdp:d4'", ("none", 2.0, "truncate")),
    ("", "use_decoupled_loss: true\n  backend: 'fsdp:d4'\n  rejection_sampling: {level: token}", ("token", 5.0, "mask")),
    ("", "use_decoupled_loss: true\n  backend: 'fsdp:d4'\n  rejection_sampling: {level: sequence, action: clamp, lower: 0.5, upper: 2.0}", ("geometric", 2.0, "truncate")),
])  # fmt: skip
def test_the_weight_of_the_decoupled_loss_is_that_of_the_release(layout, actor, wanted):
    engine = "" if layout else "rollout: {backend: 'sglang:d4'}\n"
    correction = config("areal", tree=run(actor, layout or "''", more=engine)).algorithm.resolved.rollout_correction
    assert (correction.weight, correction.high, correction.outside) == wanted
    assert correction.old_logprobs_from == "trainer"


def test_rloo_compares_with_the_mean_of_the_others():
    actor = "recompute_logprob: true\n  reward_norm: {mean_level: group, mean_leave1out: true, std_level: %s}"
    chosen = config("areal", tree=run(actor % "null")).algorithm.resolved
    assert (chosen.advantage, chosen.normalize, chosen.whiten) == ("leave_one_out", "none", False)
    (refused,) = translated("areal", tree=run(actor % "group")).refusals
    assert "the deviation from the mean of the others" in refused


def test_areals_filter_leaves_out_prompts_that_say_nothing_and_samples_no_others():
    chosen = config("areal", tree=run("recompute_logprob: true\n  dynamic_sampling: true")).algorithm.resolved
    assert (chosen.difficulty_low, chosen.difficulty_high, chosen.difficulty_by) == (0.0, None, "spread")
    assert not chosen.dynamic_sampling
    assert config("areal", tree=run(more="dynamic_bs: true\n")).algorithm.resolved.difficulty_low is None


def test_replayed_routes_are_those_of_the_engine():
    tree = run(more="rollout: {return_routed_experts: true}\n")
    run_config = config("areal", tree=tree.replace("sglang", "vllm"))
    assert (run_config.policy.router_replay, run_config.engine.mode) == ("R3", "server")
    with pytest.raises(ConfigError, match="R2 with SGLang"):
        config("areal", tree=tree)


def test_preference_pairs_of_areal_are_learned_by_dpo():
    """64 pairs and one update a step; lr falls as a cosine to a tenth, from 0 over a tenth of the steps."""
    run_config = config("areal", tree=PAIR)
    optimizer = run_config.policy.optimizer
    assert (run_config.algorithm.name, run_config.algorithm.resolved.beta) == ("dpo", 0.2)
    assert (run_config.data.prompts_per_step, run_config.algorithm.updates_per_step) == (64, 1)
    assert (optimizer.lr, optimizer.schedule, optimizer.warmup_steps) == (5e-6, "cosine", 0.1)
    assert optimizer.min_lr == pytest.approx(5e-7)
    assert (optimizer.clip_grad, run_config.policy.backend) == (10.0, "fsdp:d8t1")
    (refused,) = translated("areal", "actor.loss_type=ipo", tree=PAIR).refusals
    assert "ipo" in refused


@pytest.mark.parametrize("section", ["actor", "model"])
def test_the_training_of_reward_models_is_refused_whatever_its_section_is_called(section):
    tree = f"""
allocation_mode: d4p1t1
{section}: {{path: m, is_critic: true}}
train_dataset: {{path: d, type: rw, batch_size: 256}}
"""
    assert any("the training of reward models" in refusal for refusal in translated("areal", tree=tree).refusals)


def test_imitation_of_areal_before_2025_08_is_the_run_of_its_own_program():
    run_config = config("areal", tree=IMITATION)
    optimizer = run_config.policy.optimizer
    assert (run_config.algorithm.name, run_config.data.prompts_per_step, run_config.policy.backend) == (
        "sft",
        64,
        "megatron:d32t4p1",
    )
    assert (run_config.data.train, run_config.data.val, run_config.data.response_key) == (["a.jsonl"], ["b.jsonl"], "answer")
    assert (run_config.data.apply_chat_template, run_config.data.max_response_tokens) == (False, 32768)
    assert (optimizer.lr, optimizer.weight_decay, optimizer.betas, optimizer.eps) == (1e-5, 0.1, [0.9, 0.95], 1e-5)
    assert (optimizer.warmup_steps, optimizer.warmup_from, optimizer.schedule_per) == (0.03, 0, "step")
    assert (run_config.policy.dtype, run_config.trainer.epochs, run_config.trainer.save_every) == ("bfloat16", 200, 10)
    half = config("areal", "model.bf16=false", tree=IMITATION).policy
    assert (half.dtype, half.megatron.optimizer["initial_loss_scale"]) == ("float16", 262144.0)


@pytest.mark.parametrize(("words", "says"), [
    (["sglang.kv_cache_dtype=fp8_e5m2"], "a cache in 8 bits"),
    (["sglang.quantization=fp8"], "engines that quantize"),
    (["vllm.quantization=fp8"], "engines that quantize"),
    (["actor.optimizer.type=sgd"], "another optimizer than AdamW"),
    (["actor.aent.entropy_coeff=0.1"], "AEnt"),
    (["actor.enable_mtp_training=true"], "policy.mtp trains that layer too"),
    (["actor.prox_logp_method=reuse_train_logp", "actor.use_decoupled_loss=true", "actor.ppo_n_minibatches=2"], "estimated (reuse_train_logp)"),
    (["dynamic_hint.hint_delta=1"], "hints in prompts"),
])  # fmt: skip
def test_what_changes_the_result_is_refused_by_name(words, says):
    refusals = translated("areal", *words, tree=run()).refusals
    assert len(refusals) == 1 and says in refusals[0], refusals


@pytest.mark.parametrize(("words", "key", "wanted"), [
    (["actor.prox_logp_method=reuse_train_logp", "actor.use_decoupled_loss=true"], "rollout_correction.old_logprobs_from", "trainer"),
    (["actor.use_cispo_loss=true", "actor.eps_clip=1.0", "actor.eps_clip_higher=4.0"], "surrogate", "cispo"),
])  # fmt: skip
def test_newer_choices_become_ours(words, key, wanted):
    value = config("areal", *words, tree=run()).algorithm.resolved
    for name in key.split("."):
        value = getattr(value, name)
    assert value == wanted


def test_moments_in_bfloat16_are_kept_in_float32_and_said():
    translation = translated("areal", "actor.optimizer.type=adam_bf16", tree=run())
    assert not translation.refusals
    (about,) = [outcome for outcome in translation.outcomes if outcome.key == "actor.optimizer.type"]
    assert about.kind == "unsupported" and not about.changes_result


def test_steps_of_warmup_may_be_said_as_a_number():
    optimizer = config("areal", "actor.optimizer.warmup_steps=20", tree=run()).policy.optimizer
    assert (optimizer.warmup_steps, optimizer.schedule_per) == (20, "step")


@pytest.mark.parametrize("norm", ["", "reward_norm: {mean_level: group, std_level: group, group_size: 4}"])
def test_a_constant_and_a_factor_of_rewards_are_areal_s_whatever_follows_them(norm):
    actor = f"recompute_logprob: true\n  reward_bias: -0.5\n  reward_scaling: 10.0\n  {norm}"
    resolved = config("areal", tree=run(actor)).algorithm.resolved
    assert (resolved.reward_shift, resolved.reward_scale, resolved.reward_clip) == (-0.5, 10.0, 20.0)
    assert resolved.normalize == ("group" if norm else "none")
    plain = config("areal", tree=run()).algorithm.resolved
    assert (plain.reward_shift, plain.reward_scale, plain.reward_clip) == (0.0, 1.0, None)
    assert translated("areal", "actor.reward_scaling=-1", tree=run()).refusals
