"""siiRL: a descendant of verl with defaults of its own, started as `python3 -m siirl.main_dag key=value ...`.

What its Megatron path does not do was read in siiRL af00a77; a note has the place.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from fivefold.config.dialects import shared, verl, verl_algorithm, verl_layout, verl_prime, verl_rewards, verl_training
from fivefold.config.dialects.known import known
from fivefold.config.dialects.source import Source
from fivefold.config.dialects.table import Row, Section, Table, below, fixed, lacks, slower, used
from fivefold.config.dialects.translator import dialect
from fivefold.config.dialects.verl_defaults import DEFAULTS as VERL
from fivefold.config.dialects.verl_rows import SECTIONS

_A, _R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
_MODELS = "actor_rollout_ref.model. critic.model. reward_model.model."
_NOWHERE = "siiRL reads it nowhere on the path of language models"

PROGRAMS = ("siirl.main_dag", "siirl.client.main_dag")
CONFIG_NAMES = ("ppo_trainer", "ppo_megatron_trainer")
VARIABLES = {
    "TENSORBOARD_DIR": "TensorBoard's files are in `tensorboard` of trainer.run_dir",
    "SIIRL_LOG_VERBOSITY": "the terminal has one line for each step",
    "SIIRL_LOGGING_FILENAME": "what each rank prints is in `logs` of trainer.run_dir",
}
"""Variables that a script exports -> where what they are about is here."""
DEFAULTS: dict[str, Any] = VERL | {
    _A + "strategy": "fsdp",
    _A + "optim.lr_decay_style": "linear",
    _A + "ppo_micro_batch_size_per_gpu": 1,
    _A + "megatron.expert_tensor_parallel_size": 1,
    _A + "megatron.param_offload": True,
    _A + "tis_imp_ratio_cap": -1,
    _R + "tensor_model_parallel_size": 1,
    _R + "max_num_seqs": 1024,
    _R + "enforce_eager": True,
    "critic.optim.lr_decay_style": "linear",
    "critic.megatron.param_offload": True,
    "algorithm.filter_groups.metric": "acc",
    "algorithm.filter_groups.max_num_gen_batches": 10,
    "trainer.max_actor_ckpt_to_keep": 100,
    "trainer.project_name": "siirl_examples",
    "trainer.default_local_dir": "checkpoints/siirl_examples/gsm8k",
    "trainer.seed": 1,
}
for _key in ("critic.ppo_epochs", "critic.ppo_mini_batch_size", "critic.use_dynamic_bsz"):
    # siiRL's critic does not follow the actor.
    DEFAULTS[_key] = {"critic.ppo_epochs": 1, "critic.ppo_mini_batch_size": 256, "critic.use_dynamic_bsz": False}[_key]


def program(source: Source) -> dict[str, Any]:
    if source.text("-m") not in (None, *PROGRAMS):
        source.lacks("-m", f"a program that is not siiRL's: known here are {', '.join(PROGRAMS)}")
    return {}


def layout(source: Source) -> dict[str, Any]:
    found = verl_layout.layout(source)
    if verl_layout.is_megatron(source):
        # Whatever the key says: tensor parallelism has sequence parallelism there.
        source.fixed(_A + "megatron.sequence_parallel", "siiRL shards sequences wherever tensor parallelism is above 1")
        found["policy.sequence_parallel"] = True
    return found


def optimizer(source: Source) -> dict[str, Any]:
    """verl's, with the rate that siiRL's Megatron path has."""
    found = verl_training.optimizer(source)
    if verl_layout.is_megatron(source):
        # No scheduler is ever stepped (megatron_workers.py): the rate stays what it is at step 0.
        if found["policy.optimizer.warmup_steps"]:
            source.lacks(
                _A + "optim.lr_warmup_steps",
                "siiRL never steps the schedule of its Megatron path, so that with a warm-up the rate stays 0: leave it out",
            )
        for name in ("lr_decay_style", "lr_decay_steps", "min_lr", "lr_warmup_init"):
            source.fixed(f"{_A}optim.{name}", "siiRL never steps the schedule of its Megatron path: the rate stays the same")
        found |= {
            "policy.optimizer.schedule": "constant",
            "policy.optimizer.min_lr": None,
            "policy.optimizer.decay_steps": None,
        }
    return found


def memory(source: Source) -> dict[str, Any]:
    found = verl_layout.memory(source)
    if verl_layout.is_megatron(source):
        source.fixed(
            "actor_rollout_ref.model.enable_gradient_checkpointing",
            "siiRL's Megatron path sets a method without a granularity (megatron/worker.py:93), so nothing is recomputed; "
            "override_transformer_config.recompute_granularity decides",
        )
    return found


def rewards(source: Source) -> dict[str, Any]:
    found = verl_rewards.rewards(source)
    return found | ({"reward.chosen_as": "siirl"} if "reward.chosen_as" in found else {})


def is_cpgd(source: Source) -> bool:
    """By any of the keys that ask for it; the program of 2025 has no loss_mode."""
    named = "cpgd" in (source.text("algorithm.adv_estimator"), source.text(_A + "policy_loss.loss_mode"))
    return named or source.flag(_A + "use_cpgd_loss")


def advantage(source: Source) -> dict[str, Any]:
    if source.text("algorithm.adv_estimator") != "cpgd":
        return verl_algorithm.advantage(source)
    weight = source.text("algorithm.weight_factor_in_cpgd") or "STD_weight"
    normalize = {"STD_weight": "group", "naive": "none"}.get(weight)
    if normalize is None:
        source.lacks("algorithm.weight_factor_in_cpgd", f"the weight {weight} of advantages: known are STD_weight, naive")
    found: dict[str, Any] = {"name": "cpgd", "advantage": "group", "normalize": normalize}
    if source.count(_R + "n") == 1:
        # A group of one has mean 0 and deviation 1 there.
        found |= {"advantage": "reward", "normalize": "none"}
    return {f"algorithm.{key}": value for key, value in (found | {"whiten": False, "credit": "response"}).items()}


def loss(source: Source) -> dict[str, Any]:
    if not is_cpgd(source):
        return verl_algorithm.loss(source)
    said, asked = source.under(_A), source.text("algorithm.adv_estimator") == "cpgd"
    mode = said.text("policy_loss.loss_mode")
    if mode not in (None, "vanilla", "cpgd"):
        said.lacks("policy_loss.loss_mode", f"CPGD with the loss {mode}")
    if verl_layout.is_megatron(source):
        source.lacks(
            "algorithm.adv_estimator" if asked else _A + "use_cpgd_loss", "CPGD, which siiRL's Megatron actor lacks"
        )
    program = source.text("-m") or ""
    if mode != "cpgd" and not asked and not program.startswith("siirl.client"):
        said.lacks("use_cpgd_loss", "PPO's clip with CPGD's drift, as siiRL has it since 2025-10: loss_mode: cpgd is CPGD")
    mean = said.text("loss_agg_mode") or "token-mean"
    if mean not in shared.AGGREGATES:
        said.lacks("loss_agg_mode", f"the mean {mean}: known here are {', '.join(shared.AGGREGATES)}")
    drifts = asked or said.flag("use_cpgd_loss")
    common = said.number("clip_ratio")
    bounds = {name: said.number(name.replace("clip_", "clip_ratio_")) for name in ("clip_low", "clip_high")}
    found = {
        "surrogate": "cpgd",
        "drift_coef": (said.number("policy_drift_coeff") or 0.0) if drifts else 0.0,
        "aggregate": shared.AGGREGATES.get(mean),
        **{name: common if bound is None else bound for name, bound in bounds.items()},
    }
    return {f"algorithm.{key}": value for key, value in found.items()}


def batch(source: Source) -> dict[str, Any]:
    if (source.text("algorithm.workflow_type") or "default") == "dapo" and not source.has("algorithm.filter_groups.enable"):
        source.lacks("algorithm.workflow_type", "DAPO's workflow without algorithm.filter_groups.enable: say it")
    if verl_layout.is_megatron(source) and (source.whole(_A + "ppo_epochs") or 1) > 1:
        source.lacks(_A + "ppo_epochs", "siiRL's Megatron actor goes through a rollout once whatever it says: say 1")
    return verl_training.batch(source)


_OWN = Section.of(
    "siiRL's own keys",
    lacks("algorithm.algorithm_name", "embodied and multi-agent methods", ["grpo", "dapo", "ppo", "gae", "gspo", "cpgd"]),
    used("algorithm.workflow_type", "algorithm.dynamic_sampling"),
    used(
        f"{_A}use_cpgd_loss {_A}policy_drift_coeff",
        "algorithm.surrogate algorithm.drift_coef",
        "CPGD (2505.12504), as the program of 2025 has it: adv_estimator=cpgd asks for the loss too. Since 2025-10 its "
        "advantage fails (core_algos.py:1475), and the drift is added to whatever loss_mode names: with another than cpgd "
        "it is refused.",
    ),
    used(
        "algorithm.weight_factor_in_cpgd", "algorithm.normalize", "STD_weight or naive; clip_filter_like_weight is refused."
    ),
    fixed(
        f"{_A}recompute_old_log_prob algorithm.share_reward_in_agent",
        "old log-probs are the trainer's, computed before the updates",
    ),
    fixed(
        (
            "data.auto_repeat data.num_loader_workers data.force_on_the_fly data.dataset_type "
            "data.streaming data.preprocessing_batch_size data.preprocessing_num_workers data.overwrite_cache "
            "data.dataset_cache_dir data.buffer_size data.cutoff_len data.tokenized_path data.filter_overlong_prompt "
            "data.mask_history data.train_on_prompt data.tool_format"
        ),
        "how data are read: the same prompts come out",
    ),
    fixed(
        f"{_A}param_offload {_A}grad_offload {_A}optimizer_offload {_A}profile {_A}embodied_type "
        f"{_A}action_chunks_len {_A}action_token_len {_A}traj_mini_batch_size critic.profile "
        f"algorithm.pf_ppo critic.use_critic_model critic.fsdp_config.** {_R}trust_remote_code {_R}micro_batch_size",
        _NOWHERE,
    ),
    lacks("data.mix_strategy", "data sets interleaved by probability", ["concat"]),
    fixed("data.interleave_probs", "read with data.mix_strategy only"),
    lacks("data.multi_agent", "several agents", [False]),
    lacks("dag.workflow_path dag.custom_pipeline_fn dag.environment_path", "a graph of stages of one's own"),
    lacks("dag.env_enable", "environments", [False]),
    fixed("dag.enable_perf dag.backend_threshold profiler.**", shared.SHOWN),
    fixed(
        below(
            _MODELS,
            "image_max_pixels image_min_pixels video_max_pixels video_min_pixels video_fps video_maxlen cache_dir "
            "model_revision hf_hub_token use_fast_tokenizer split_special_tokens model_max_length new_special_tokens "
            "resize_vocab gradient_checkpointing_kwargs rm_tokenizer megatron.**",
        )
        + below("actor_rollout_ref.model. critic.model.", "input_tokenizer")
        + below("actor_rollout_ref.model. reward_model.", "fsdp_config.**")
        + below("actor_rollout_ref.ref. reward_model.", "shuffle data_loader_seed profile")
        + below("actor_rollout_ref.ref.", "grad_offload optimizer_offload recompute_old_log_prob embodied_type"),
        _NOWHERE,
    ),
    lacks("reward_model.model.lora_rank", "adapters of a reward model", [0]),
    fixed("reward_model.model.lora_alpha reward_model.model.target_modules", "read with lora_rank only"),
    fixed("reward_model.model.use_liger", shared.KERNELS),
    slower("reward_model.model.enable_activation_offload", "activations that wait on the host", [False]),
    fixed("actor_rollout_ref.actor.checkpoint critic.checkpoint", shared.WHOLE_STATE),
    lacks(below(_MODELS, "model_type"), "embodied models", ["llm"]),
    fixed("actor_rollout_ref.embodied.** algorithm.embodied_sampling.** data.processor.*", "read by embodied models only"),
    fixed("trainer.should_log trainer.should_save", "siiRL sets them itself"),
)

_OF_OTHER_PROGRAMS = re.compile(
    r"async_training\..*|(actor_rollout_ref\.)?rollout\.(nnodes|n_gpus_per_node|total_rollout_steps|test_freq)|"
    r"trainer\.n_training_gpus_per_node|.*\.ppo_micro_batch_size|.*\.sppo_eta|"
    + "|".join(re.escape(row.key) for row in (*verl_prime.REWARDS, *verl_prime.FILTER))
)
"""Keys of verl's programs besides main_ppo, which siiRL lacks."""


def _of_siirl(row: Row) -> Row:
    """The row in siiRL's table: what only verl's other programs use is read by none of siiRL's."""
    if row.form != "used" or not _OF_OTHER_PROGRAMS.fullmatch(row.key):
        return row
    return replace(row, form="fixed", ours=(), note=shared.NO_CUT if "micro_batch" in row.key else _NOWHERE)


_REPLACED: dict[Any, Any] = {
    verl.program: program,
    verl_algorithm.advantage: advantage,
    verl_algorithm.loss: loss,
    verl_layout.layout: layout,
    verl_layout.memory: memory,
    verl_training.optimizer: optimizer,
    verl_rewards.rewards: rewards,
    verl_training.batch: batch,
}

TABLE = Table(
    "siiRL",
    (*(replace(section, rows=tuple(map(_of_siirl, section.rows))) for section in SECTIONS), _OWN),
    tuple(_REPLACED.get(function, function) for function in verl.DERIVED if function is not verl.say_which_entropy),
    DEFAULTS,
    known=known("verl", "siirl"),
    command=(
        "`fivefold train --from siirl run_qwen3-8b-megatron.sh`, or the arguments of `python3 -m "
        "siirl.main_dag` as they are."
    ),
    loses=(
        "multi-agent graphs, tools and embodied models",
        "images",
    ),
    gains=(
        "gradients that are summed over replicas: siiRL's Megatron path leaves `finalize_model_grads` out",
        "a learning rate that follows its schedule",
        "misspelt keys that are refused instead of dropped",
        "sequence parallelism, recomputation and offload that do what their keys say",
    ),
)

translate = dialect(TABLE)
