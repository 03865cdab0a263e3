"""Spellings of older releases, and scripts that start scripts: what they become here, by hand."""

from __future__ import annotations

import pytest
import yaml

from fivefold.config import ConfigError
from tests.support.dialects import HOME, config, translate_words, translated

GRPO = [
    "data.train_files=/d/a.parquet", "actor_rollout_ref.model.path=m", "actor_rollout_ref.rollout.name=vllm",
    "algorithm.adv_estimator=grpo", "data.train_batch_size=1024", "actor_rollout_ref.rollout.n=4",
]  # fmt: skip
AREAL = """
rollout: {backend: "sglang:d4t1", max_head_offpolicyness: 0}
gconfig: {n_samples: 4, max_new_tokens: 1024}
actor: {backend: "fsdp:d4", path: m, kl_ctl: 0.0, recompute_logprob: true}
train_dataset: {path: d.parquet, batch_size: 256, max_length: 1024}
"""
ROLL = """
pretrain: m
rollout_batch_size: 64
num_return_sequences_in_group: 8
adv_estimator: reinforce
norm_mean_type: batch
norm_std_type: batch
rewards: {math_rule: {worker_cls: a.MathRuleRewardWorker}}
actor_train:
  data_args: {file_name: [d.jsonl]}
  training_args: {per_device_train_batch_size: 1, gradient_accumulation_steps: 64}
  strategy_args: {strategy_name: megatron_train}
  device_mapping: list([0,1,2,3]) + list(range(4,8))
actor_infer: {strategy_args: {strategy_name: vllm}}
"""


def test_a_script_that_starts_another_gives_it_its_arguments_and_what_it_exports(tmp_path):
    """By the name from its own directory or from one above; what it does not export is not there."""
    inner = "python3 -m verl.trainer.main_ppo " + " ".join(GRPO) + " trainer.nnodes=$NODES data.seed=${SEED:-3} $@\n"
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/inner.sh").write_text("source ./common.sh\n" + inner)
    (tmp_path / "lib/common.sh").write_text('NODES=${NODES:-1}\n[ "$QUIET" = 1 ] || set -x\n')
    for called in ("lib/inner.sh", '"$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/lib/inner.sh"'):
        outer = tmp_path / "outer.sh"
        outer.write_text(f"export NODES=2\nSEED=9\nbash {called} data.train_batch_size=512 2>&1 | tee log\n")
        translation = translate_words("verl", [str(outer)], HOME)
        plain = translate_words("verl", [*GRPO, "trainer.nnodes=2", "data.seed=3", "data.train_batch_size=512"], HOME)
        assert translation.tree == plain.tree
    (tmp_path / "circle.sh").write_text(f"bash {tmp_path}/circle.sh a.b=1\n")
    with pytest.raises(ConfigError, match="starts itself"):
        translate_words("verl", [str(tmp_path / "circle.sh")], HOME)


@pytest.mark.parametrize("launcher", [
    "HYDRA_FULL_ERROR=1 torchrun --nnodes 1 -m", "python3 -u -m torch.distributed.run --nproc_per_node=8 -m", "env A.B=1 python3 -m",
    "uv run --isolated --with transformers==4.53.3 -- python -m", "ray job submit --runtime-env-json '{\"a\": 1}' -- python3 -m",
])  # fmt: skip
def test_what_a_launcher_is_told_is_no_setting(launcher, tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(f"{launcher} verl.trainer.main_ppo {' '.join(GRPO)}\n")
    translation = translate_words("verl", [str(script)], HOME)
    assert [outcome.key for outcome in translation.outcomes if outcome.kind == "unknown"] == []
    assert translation.tree == translate_words("verl", GRPO, HOME).tree


_CORRECTED = "algorithm.rollout_correction."


@pytest.mark.parametrize(("words", "says"), [
    # 2025-10: weights up to 2; both bounds, the lower one the reciprocal; off without rollout_is.
    (["algorithm.rollout_is=True", "algorithm.rollout_is_threshold=2.0"], {"weight": "token", "high": 2.0, "outside": "truncate", "low": 0.0}),
    (
        ["algorithm.rollout_is=True", "algorithm.rollout_is_threshold=4", "algorithm.rollout_is_mode=mask", "algorithm.rollout_is_level=sequence"],
        {"weight": "sequence", "low": 0.25, "high": 4.0, "outside": "mask"},
    ),
    (["algorithm.rollout_is=False", "algorithm.rollout_is_threshold=2.0"], {"weight": "none"}),
    # 2025-11 to 2026-01: the ratio itself within its bounds.
    (
        [_CORRECTED + "rollout_rs=geometric", _CORRECTED + "rollout_rs_threshold=1.001", _CORRECTED + "rollout_rs_threshold_lower=0.99"],
        {"reject": "geometric", "reject_low": 0.99, "reject_high": 1.001},
    ),
    ([_CORRECTED + "rollout_rs=token", _CORRECTED + "rollout_rs_threshold=2"], {"reject": "token", "reject_low": 0.5, "reject_high": 2.0}),
    # A response with a token whose ratio is below e^-9 is left out.
    ([_CORRECTED + "rollout_token_veto_threshold=1.2340980408667956e-04"], {"reject_divergence": {"max_drop": 9.0}, "reject": "none"}),
])  # fmt: skip
def test_rollout_correction_of_verls_older_releases_is_that_of_today(words, says):
    chosen = config("verl", *GRPO, *words).algorithm.resolved.rollout_correction
    assert {key: getattr(chosen, key) for key in says} == says


def test_keys_of_verls_older_releases_act_as_they_did():
    """Gradients that leave the GPU, a stopped evaluation, the first rows of a file; what nothing reads must say the same."""
    run = config(
        "verl", *GRPO, "actor_rollout_ref.actor.fsdp_config.grad_offload=True", "trainer.test_freq=False", "data.train_max_samples=100"
    )  # fmt: skip
    assert run.policy.offload.gradients and run.trainer.eval_every == 0 and run.data.train == ["/d/a.parquet[:100]"]
    for words in (
        ["actor_rollout_ref.actor.clip_cov_ratio=0.3"],
        ["data.train_max_samples=100", "data.train_files=[a,b]"],
        [_CORRECTED + "rollout_token_veto_threshold=2"],
        ["algorithm.rollout_is=False", "algorithm.rollout_is_threshold=2.0", "algorithm.rollout_is_mode=mask"],
    ):
        assert translate_words("verl", [*GRPO, *words], HOME).refusals, words


@pytest.mark.parametrize(("norms", "says"), [
    # Until 2025-09: over all tokens unless it is switched off; group_* by prompt.
    ({"group_adv_norm": False}, {"advantage": "reward", "whiten": True, "whiten_by": "step"}),
    ({"group_adv_norm": True}, {"advantage": "reward", "whiten": True, "whiten_by": "group"}),
    ({"group_reward_norm": True, "adv_norm": False}, {"advantage": "group", "normalize": "group", "whiten": False}),
    # Today: the mean over a group's tokens is of rewards weighted by lengths.
    ({"adv_norm": {"mean_level": "group", "std_level": None}}, {"advantage": "length_weighted", "whiten": False}),
    ({"adv_norm": {"eps": 1e-5}}, {"advantage": "reward", "whiten": True}),
])  # fmt: skip
def test_areals_normalizations_of_every_age_are_ours(norms, says):
    tree = yaml.safe_load(AREAL)
    tree["actor"] |= norms
    chosen = config("areal", tree=yaml.safe_dump(tree)).algorithm.resolved
    assert {key: getattr(chosen, key) for key in says} == says


def test_archon_is_megatron_with_the_same_sizes():
    assert config("areal", "allocation_mode=", "actor.backend=archon:d2t2", tree=AREAL).policy.backend == "megatron:d2t2p1"


def test_rolls_mean_of_the_batch_is_that_of_the_step():
    """norm_mean_type and norm_std_type of batch; of several domains ROLL takes the mean of each."""
    run = config("roll", tree=ROLL)
    chosen = run.algorithm.resolved
    assert run.policy.backend == "megatron:d8t1p1"
    assert (chosen.advantage, chosen.normalize) == ("step_mean", "batch")
    several = ROLL.replace(
        "rewards: {", "rewards: {ifeval: {worker_cls: a.GeneralRuleRewardWorker, tag_included: [ifeval]}, "
    )
    assert "norm_mean_type" in {outcome.key for outcome in translated("roll", tree=several).outcomes if outcome.is_refused}
    # The deviation of each group has another shape in ROLL, which ends there.
    mixed = translated("roll", "norm_std_type=group", tree=ROLL)
    assert "norm_mean_type" in {outcome.key for outcome in mixed.outcomes if outcome.is_refused}


def test_the_names_of_trinitys_older_releases_are_those_of_today():
    """The expert's data of mix, the token budget, and lengths that model.max_model_len alone gives: half of it each."""
    tree = """
algorithm: {algorithm_type: mix, repeat_times: 4, sample_strategy_args: {expert_data_ratio: 0.2}, kl_loss_fn_args: {kl_coef: 0.0}, policy_loss_fn_args: {use_dynamic_bsz: true, ppo_mini_batch_size: 80, ppo_micro_batch_size_per_gpu: 4, ngpus_trainer: 4, train_batch_size_expert: 16, train_batch_size_usual: 64}}
model: {model_path: m, max_model_len: 3000}
cluster: {node_num: 1, gpu_per_node: 8}
buffer:
  batch_size: 16
  train_batch_size: 80
  explorer_input: {taskset: {name: t, storage_type: file, path: d.jsonl}, default_workflow_type: math_workflow}
  trainer_input: {sft_warmup_dataset: {name: e, storage_type: file, path: e.jsonl, format: {prompt_type: messages, messages_key: m}}}
explorer: {rollout_model: {engine_num: 4, tensor_parallel_size: 1}}
trainer: {ppo_max_token_len_per_gpu: 9000, use_dynamic_bsz: true}
"""
    run = config("trinity", tree=tree)
    assert (run.data.expert, run.data.messages_key) == (["e.jsonl"], "m")
    assert (run.data.max_prompt_tokens, run.data.max_response_tokens, run.policy.tokens_per_micro_batch) == (
        1500,
        1500,
        9000,
    )


@pytest.mark.parametrize("words", [
    ["generator.chat_template_kwargs={reasoning_effort:'low',enable_thinking:false}"],
    ["generator.chat_template_kwargs.reasoning_effort=low", "generator.chat_template_kwargs.enable_thinking=false"],
])  # fmt: skip
def test_variables_of_skyrls_chat_template_are_ours(words):
    plain = ["data.train_data=['a.parquet']", "trainer.policy.model.path=m", "generator.inference_engine.num_engines=1"]
    translation = translated("skyrl", *plain, *words)
    assert translation.tree["data"]["chat_template_kwargs"] == {"reasoning_effort": "low", "enable_thinking": False}


@pytest.mark.parametrize(("words", "refusal"), [
    ("infer_correction: false\ninfer_is_mode: token\nreport_length_and_rewards: true", ""),
    ("infer_correction: true\ninfer_is_threshold_max: 2.0", "correction of the engine's log-probs"),
    ("dynamic_sampling: false\nmax_prompts_ratio: 1\nautoscaling: false", ""),
    ("max_prompts_ratio: 1.25", "which start more of them than are used"),
    ("debug_max_steps: 20", "an end of the run before max_steps"),
])  # fmt: skip
def test_keys_of_rolls_forks_are_refused_by_name_where_they_act(words, refusal):
    translation = translated("roll", tree=f"{ROLL}{words}\n")
    assert not [outcome.key for outcome in translation.outcomes if outcome.kind == "unknown"]
    assert bool(translation.refusals) == bool(refusal) and all(refusal in text for text in translation.refusals)


def test_a_deepspeed_file_within_rolls_changes_no_number():
    """ROLL puts max_grad_norm and the batch size over its own (deepspeed_strategy.py:44)."""
    strategy = (
        "strategy_name: deepspeed_train, strategy_config: {gradient_clipping: 0.3, train_micro_batch_size_per_gpu: auto, "
        "bf16: {enabled: true}, zero_optimization: {stage: 2, overlap_comm: true}}"
    )
    run = config("roll", tree=ROLL.replace("strategy_name: megatron_train", strategy) + "max_grad_norm: 0.7\n")
    assert (run.policy.optimizer.clip_grad, run.layout.dp) == (0.7, 8)


@pytest.mark.parametrize(("system", "words", "every"), [
    ("verl", ["data.val_files=/d/b.parquet", "trainer.test_freq=-1"], "never"),
    ("verl", ["data.val_files=/d/b.parquet", "trainer.test_freq=False"], "never"),
    ("verl", ["data.val_files=/d/b.parquet", "trainer.test_freq=5"], 5),
    ("verl", ["trainer.test_freq=-1"], 0),
])  # fmt: skip
def test_verl_without_a_frequency_evaluates_at_the_end_neither(system, words, every):
    """ray_trainer.py evaluates where test_freq > 0 and the step is the last or due."""
    assert config(system, *GRPO, *words).trainer.eval_every == every
