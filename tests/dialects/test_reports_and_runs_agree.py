"""Reports of a translation name the keys and values that the run has, also for models other than the policy."""

from __future__ import annotations

import pytest

from fivefold.config import ConfigError, RunConfig
from fivefold.config.mcore_options import table as fields_of
from fivefold_dialects.shared import _OPTIONS
from tests.dialects import test_areal_data_and_intervals as areal_runs
from tests.dialects import test_roll_defaults as roll_runs
from tests.dialects.test_dialects import GRPO_VERL, ROLL_PAGE, SKYRL, outcome
from tests.support.dialects import config, translated

MEG, REF = "trainer.policy.megatron_config.", "trainer.ref.megatron_config."
MEGATRON = [*SKYRL, "trainer.strategy=megatron", MEG + "tensor_model_parallel_size=2", "trainer.algorithm.use_kl_loss=true"]
PPO = roll_runs.RUN.replace("adv_estimator: grpo", "adv_estimator: gae")
CRITIC = ["critic.training_args.per_device_train_batch_size=1", "critic.training_args.gradient_accumulation_steps=8",
          "critic.device_mapping=list(range(0,8))", "critic.strategy_args.strategy_name=megatron_train",
          "reference.strategy_args.strategy_name=megatron_infer", "use_kl_loss=true", "kl_loss_coef=0.1"]  # fmt: skip
OPTIONS = ".strategy_args.strategy_config."


# --- ROLL: rewards, updates and GPUs ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("worker", "reward"),
    [("MathRuleRewardWorker", {"math": 1.0}), ("LLMJudgeRewardWorker", {"judge": 1.0}), ("CodeSandboxRewardWorker", {"code": 1.0})],
)  # fmt: skip
def test_the_only_domain_of_roll_has_the_reward_of_its_worker(worker, reward):
    judge = ["judge_prompt=Qwen2.5-7B-Instruct-RLVR-prompt", "judge_model_type=api", "judge_api_url=http://host/v1",
             "judge_model_name=big"]  # fmt: skip
    words = [f"rewards.math_rule.{word}" for word in (f"worker_cls=a.{worker}", *judge)]
    translation = translated("roll", *words, tree=roll_runs.RUN)
    assert translation.refusals == [] and translation.tree["reward"]["functions"] == reward
    assert ("judge" in translation.tree["reward"]) == (reward == {"judge": 1.0})


def test_your_own_worker_of_rolls_only_domain_is_refused_not_taken_for_math():
    translation = translated("roll", "rewards.math_rule.worker_cls=my.OwnRewardWorker", tree=roll_runs.RUN)
    (refusal,) = translation.refusals
    assert "your own reward worker" in refusal and "functions" not in translation.tree.get("reward", {})


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ([], None),
        (["critic.training_args.gradient_accumulation_steps=4"], "gradient_accumulation_steps"),
        (["critic.training_args.per_device_train_batch_size=2"], "gradient_accumulation_steps"),
        # Twice the samples on each of half as many replicas.
        ([f"critic{OPTIONS}tensor_model_parallel_size=2"], "gradient_accumulation_steps"),
        ([f"critic{OPTIONS}tensor_model_parallel_size=2", "critic.training_args.gradient_accumulation_steps=16"], None),
        (["critic.device_mapping=list(range(8,12))"], "gradient_accumulation_steps"),
        (["ppo_epochs=2"], "ppo_epochs"),
    ],
)
def test_a_critic_of_roll_that_learns_in_other_updates_than_the_policy_is_refused(words, refused):
    refusals = translated("roll", *CRITIC, *words, tree=PPO).refusals
    assert [refusal.partition("=")[0].rpartition(".")[2] for refusal in refusals] == ([refused] if refused else [])


@pytest.mark.parametrize(
    ("system", "key", "words", "without", "tree", "steps_by_value"),
    [
        ("verl", "trainer.critic_warmup", [*GRPO_VERL, "critic.model.path=c", "actor_rollout_ref.actor.strategy=megatron"],
         "algorithm.adv_estimator=grpo", "", {0: 0, 1: 0, 5: 4}),
        ("roll", "critic_warmup", CRITIC, "adv_estimator=reinforce", PPO, {0: 0, 1: 1, 5: 5}),
    ],
)  # fmt: skip
def test_the_policy_learns_after_the_warm_up_and_without_a_critic_there_is_none(
    system, key, words, without, tree, steps_by_value
):
    """verl counts steps from 1, ROLL from 0 (rlvr_pipeline.py:774); both leave out the policy's updates in any run."""
    gae = [without.partition("=")[0] + "=gae"]
    for value, steps in steps_by_value.items():
        assert config(system, *words, *gae, f"{key}={value}", tree=tree).critic.warmup_steps == steps
        refusals = translated(system, *words, without, f"{key}={value}", tree=tree).refusals
        assert any("without a critic nothing learns" in refusal for refusal in refusals) == (steps > 0), refusals


def test_a_critic_of_roll_on_gpus_that_only_the_engine_shares_has_ranks_of_its_own():
    """ROLL's documented example of PPO: policy on 0 to 7, critic on 8 to 15, engine and reference on all of them."""
    words = ["num_gpus_per_node=8", "critic.device_mapping=list(range(8,16))", "actor_infer.device_mapping=list(range(0,16))",
             "reference.device_mapping=list(range(0,16))", "critic.strategy_args.strategy_name=fsdp2_train"]  # fmt: skip
    run = config("roll", *CRITIC, *words, tree=PPO)
    assert (run.policy.layout.world_size, run.critic.first_rank, run.critic.backend) == (8, 8, "megatron:d8t1p1")
    assert (run.launch.nodes, run.launch.gpus_per_node, run.roles.world_size) == (2, 8, 16)


@pytest.mark.parametrize(
    ("trained", "sampled", "launch"),
    [(8, 16, (1, 8)), (16, 16, (2, 8)), (12, 12, (2, 6)), (4, 8, (1, 4))],
)
def test_a_run_of_roll_is_started_on_the_gpus_that_its_layouts_take(trained, sampled, launch):
    words = ["num_gpus_per_node=8", "rollout_batch_size=48", f"actor_train.device_mapping=list(range(0,{trained}))",
             f"actor_infer.device_mapping=list(range(0,{sampled}))"]  # fmt: skip
    translation = translated("roll", *words, tree=roll_runs.RUN)
    chosen = translation.tree["launch"]
    assert (chosen["nodes"], chosen["gpus_per_node"]) == launch and ("backend" in chosen) == (launch[0] > 1)
    assert any("the engine has the policy's" in note for note in translation.notes) == (trained != sampled)


# --- Options of Megatron-Core -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "key", "ours"),
    [
        ("recompute_granularity", "full", "policy.recompute", "full"),
        ("moe_z_loss_coeff", 0.1, "policy.megatron.transformer.moe_z_loss_coeff", 0.1),
        ("optimizer_cpu_offload", True, "policy.megatron.optimizer.optimizer_cpu_offload", True),
        ("use_precision_aware_optimizer", True, "policy.megatron.optimizer.use_precision_aware_optimizer", True),
    ],
)
def test_additional_configs_of_roll_act_and_the_report_names_our_key(name, value, key, ours):
    word = f"actor_train{OPTIONS}additional_configs.{name}"
    translation = translated("roll", f"{word}={value}", tree=roll_runs.RUN)
    assert {line.key: line.value for line in translation.lines}[key] == ours
    assert key in outcome(translation, word).ours and translation.refusals == []


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("moe_z_loss_coeff=0.1", "write it below additional_configs"),
        ("additional_configs=more.json", "write them below this key"),
        ("additional_configs.context_parallel_size=2", "write it directly below strategy_config"),
        ("additional_configs.layernorm_epsilon=1e-4", "set model.overrides"),
    ],
)
def test_options_of_roll_in_the_wrong_place_are_refused_with_the_right_one(word, says):
    (refusal,) = translated("roll", f"actor_train{OPTIONS}{word}", tree=roll_runs.RUN).refusals
    assert says in refusal


def test_an_additional_config_that_rolls_own_argument_replaces_has_no_effect():
    word = f"actor_train{OPTIONS}additional_configs.moe_token_dispatcher_type"
    translation = translated("roll", f"{word}=allgather", tree=roll_runs.RUN)
    assert "replaces it" in outcome(translation, word).reason and "megatron" not in translation.tree["policy"]


@pytest.mark.parametrize(
    ("name", "value", "key"),
    [
        ("overlap_grad_reduce", True, "ddp.overlap_grad_reduce"),
        ("ddp_bucket_size", 100, "ddp.bucket_size"),
        ("optimizer_cpu_offload", True, "optimizer.optimizer_cpu_offload"),
        ("moe_shared_expert_overlap", True, "transformer.moe_shared_expert_overlap"),
    ],
)
def test_options_of_rolls_critic_are_its_own_and_its_reference_takes_what_acts(name, value, key):
    words = [f"{role}{OPTIONS}{name}={value}" for role in ("critic", "reference")]
    run = config("roll", *CRITIC, *words, tree=PPO)
    section, field = key.split(".")
    assert getattr(run.critic.megatron, section) == {field: value} and run.policy.megatron.optimizer == {}
    of_reference = run.reference.megatron and getattr(run.reference.megatron, section)
    assert of_reference == ({field: value} if section == "transformer" else None)


def test_a_critic_of_roll_recomputes_as_its_own_section_says():
    run = config("roll", *CRITIC, f"critic{OPTIONS}recompute_granularity=full", tree=PPO)
    assert (run.policy.recompute, run.critic.recompute) == ("none", "full")
    run = config("roll", *CRITIC, f"actor_train{OPTIONS}recompute_granularity=full", tree=PPO)
    assert (run.policy.recompute, run.critic.recompute) == ("full", "none")


def test_true_is_not_the_number_1_that_turns_an_option_off():
    word = "critic.optim.override_optimizer_config.overlap_cpu_optimizer_d2h_h2d"
    words = ["critic.model.path=c", "algorithm.adv_estimator=gae", "actor_rollout_ref.actor.strategy=megatron"]
    for value, is_off in (("true", False), ("false", True), ("0", True), ("1", True)):
        assert outcome(translated("verl", *GRPO_VERL, *words, f"{word}={value}"), word).reason.startswith("off") == is_off


OPTIMIZER = [
    ("lr=3e-6", "policy.optimizer.lr", 3e-6), ("adam_beta1=0.8", "policy.optimizer.betas", [0.8, 0.999]),
    ("adam_eps=1e-6", "policy.optimizer.eps", 1e-6), ("clip_grad=0.5", "policy.optimizer.clip_grad", 0.5),
    ("decoupled_lr=1e-4", "policy.megatron.optimizer.decoupled_lr", 1e-4),
    ("exp_avg_dtype=bf16", "policy.megatron.optimizer.exp_avg_dtype", "bf16"),
    ("loss_scale=2.0", "policy.megatron.optimizer.loss_scale", 2.0),
]  # fmt: skip


@pytest.mark.parametrize(("word", "key", "value"), OPTIMIZER, ids=[row[0] for row in OPTIMIZER])
@pytest.mark.parametrize("start", ["trainer.policy.", ""], ids=["RL", "SFT"])
def test_options_of_skyrls_optimizer_act_under_our_keys(start, word, key, value):
    sft = ["-m=skyrl.train.main_sft", "strategy=megatron", "model.path=m", "max_length=8", "train_datasets=[o/a]",
           "train_dataset_splits=[train]", "placement.num_gpus_per_node=4", "num_steps=1", "batch_size=4"]  # fmt: skip
    word = f"{start}megatron_config.optimizer_config_kwargs.{word}"
    translation = translated("skyrl", *(MEGATRON if start else sft), word)
    assert {line.key: line.value for line in translation.lines}[key] == value
    assert outcome(translation, word.partition("=")[0]).ours == (key,)


@pytest.mark.parametrize(
    ("word", "says"),
    [("optimizer=sgd", "the optimizer is Adam"), ("nonsense=1", "have no nonsense"), ("main_params_dtype=fp16", "Transformer Engine")],
)  # fmt: skip
def test_other_options_of_skyrls_optimizer_are_refused_by_name(word, says):
    (refusal,) = translated("skyrl", *MEGATRON, f"{MEG}optimizer_config_kwargs.{word}").refusals
    assert says in refusal
    assert translated("skyrl", *MEGATRON, f"{MEG}optimizer_config_kwargs.optimizer=adam").refusals == []


def test_a_weight_decay_that_skyrls_schedule_replaces_is_said_to_have_no_effect():
    word = f"{MEG}optimizer_config_kwargs.weight_decay"
    translation = translated("skyrl", *MEGATRON, f"{word}=0.5")
    assert "optimizer_config.weight_decay in its place" in outcome(translation, word).reason
    assert RunConfig.from_tree(translation.tree).policy.optimizer.weight_decay == 0.01


@pytest.mark.parametrize(
    ("word", "backend", "refused"),
    [
        ("tensor_model_parallel_size=4", "megatron:d2t4p1", False),
        ("tensor_model_parallel_size=2", None, False),
        ("model_config_kwargs.model_config.rope_theta=1", None, True),
        ("transformer_config_kwargs.moe_router_dtype=fp64", None, True),
        ("transformer_config_kwargs.recompute_granularity=selective", None, False),
    ],
)
def test_the_reference_of_skyrl_has_its_own_layout_and_no_other_options(word, backend, refused):
    translation = translated("skyrl", *MEGATRON, REF + word)
    assert bool(translation.refusals) == refused
    assert translation.tree.get("reference", {}).get("backend") == backend
    both = translated("skyrl", *MEGATRON, REF + word, MEG + word)
    assert not any(refusal.startswith(REF) for refusal in both.refusals)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("moe_shared_expert_overlap", "policy.megatron.transformer.moe_shared_expert_overlap"),
        ("distribute_saved_activations", "policy.megatron.transformer.distribute_saved_activations"),
        ("use_precision_aware_optimizer", "policy.megatron.optimizer.use_precision_aware_optimizer"),
        ("overlap_param_gather_with_optimizer_step", None),
        ("moe_permute_fusion", None),
    ],
)
def test_options_of_areals_megatron_act_or_the_reason_names_no_key_that_refuses_them(name, key):
    word = f"actor.megatron.{name}"
    translation = translated("areal", f"{word}=true", tree=areal_runs.RL.replace("fsdp", "megatron"))
    told = outcome(translation, word)
    assert told.ours == ((key,) if key else ())
    assert key or (told.kind == "unsupported" and f"policy.megatron.{name}" not in told.reason)


FROM_CONFIG = {
    name for name, option in fields_of("transformer").items() if option.reason.startswith("it comes from the model's config")
}


@pytest.mark.parametrize("name", sorted(FROM_CONFIG - {"multi_latent_attention"}))
def test_fields_that_config_json_decides_are_refused_for_they_change_numbers(name):
    row = _OPTIONS.row(name)
    assert row is not None and row.form == "lacks" and row.off == (None,) and "model.overrides" in row.note


# --- Sources and reasons ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("system", "tree", "words", "key", "only"),
    [
        ("skyrl", "", MEGATRON, "trainer.placement.policy_num_gpus_per_node", {"policy.backend", "launch.gpus_per_node"}),
        ("skyrl", "", MEGATRON, "generator.inference_engine.num_engines", {"engine.backend"}),
        ("roll", ROLL_PAGE, [], "actor_train.device_mapping",
         {"policy.backend", "reference.backend", "engine.backend", "algorithm.updates_per_step", "launch.backend"}),
    ],
)  # fmt: skip
def test_only_values_that_change_with_a_required_key_name_it_as_their_source(system, tree, words, key, only):
    lines = translated(system, *words, tree=tree).lines
    assert {line.key for line in lines if key in line.sources} == only


def test_a_key_without_effect_has_no_note_about_runs_in_which_it_acts():
    unread = outcome(translated("roll", "kl_penalty=k3", "target_kl=0.1", tree=roll_runs.RUN), "kl_penalty")
    assert unread.reason == "it has no effect with these settings"
    usual = outcome(translated("skyrl", *SKYRL, "trainer.algorithm.advantage_estimator=gae",
                               "trainer.critic.model.path=c", "trainer.algorithm.value_clip=0.2"),
                    "trainer.algorithm.value_clip")  # fmt: skip
    assert usual.kind == "translated" or usual.reason == "no effect: this is already the default behavior"


def test_a_key_of_a_layout_that_is_refused_is_not_called_the_default():
    words = ["actor_rollout_ref.actor.strategy=megatron", "actor_rollout_ref.actor.megatron.context_parallel_size=3"]
    translation = translated("siirl", *GRPO_VERL, *words)
    assert outcome(translation, words[1].partition("=")[0]).reason == "what it decides is refused"
    assert any("cannot be divided into replicas" in fault for fault in translation.faults)
    with pytest.raises(ConfigError):
        RunConfig.from_tree({"refused": translation.refusals, **translation.tree})


def test_sequences_of_siirl_are_sharded_wherever_tensor_parallelism_is_above_1():
    words = ["actor_rollout_ref.actor.strategy=megatron", "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"]
    assert config("siirl", *GRPO_VERL, *words, words[1].replace("tensor_model_parallel_size=2", "sequence_parallel=false")
                  ).policy.sequence_parallel  # fmt: skip
