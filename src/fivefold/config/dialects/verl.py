"""verl: Hydra's keys of `verl.trainer.main_ppo` and the recipes over it, and of its SFT trainers.

verl_rows.py has what becomes of each key; here is what several of them say together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fivefold.config.dialects import shared, verl_sft
from fivefold.config.dialects.known import known
from fivefold.config.dialects.shared import EVERY_CHECKPOINT
from fivefold.config.dialects.source import Source, UnreadableError
from fivefold.config.dialects.table import Table
from fivefold.config.dialects.translator import dialect
from fivefold.config.dialects.verl_rows import SECTIONS

_A, _R, _M, _C = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model.", "critic."

DEFAULTS: dict[str, Any] = {
    "data.prompt_key": "prompt",
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.train_batch_size": 1024,
    "data.shuffle": True,
    "data.filter_overlong_prompts": False,
    "data.truncation": "error",
    "data.gen_batch_size": None,
    _A + "ppo_mini_batch_size": 256,
    _A + "ppo_epochs": 1,
    _A + "use_dynamic_bsz": False,
    _A + "ppo_max_token_len_per_gpu": 16384,
    _A + "clip_ratio": 0.2,
    _A + "clip_ratio_low": 0.2,
    _A + "clip_ratio_high": 0.2,
    _A + "clip_ratio_c": 3.0,
    _A + "loss_agg_mode": "token-mean",
    _A + "entropy_coeff": 0,
    _A + "use_kl_loss": False,
    _A + "kl_loss_coef": 0.001,
    _A + "kl_loss_type": "low_var_kl",
    _A + "policy_loss.loss_mode": "vanilla",
    _A + "policy_loss.clip_cov_ratio": 2e-4,
    _A + "policy_loss.clip_cov_lb": 1.0,
    _A + "policy_loss.clip_cov_ub": 5.0,
    _A + "policy_loss.kl_cov_ratio": 2e-4,
    _A + "policy_loss.ppo_kl_coef": 0.1,
    _A + "tau_pos": 1.0,
    _A + "tau_neg": 1.05,
    _A + "grad_clip": 1.0,
    _A + "ulysses_sequence_parallel_size": 1,
    _A + "optim.lr": 1e-6,
    _A + "optim.betas": [0.9, 0.999],
    _A + "optim.weight_decay": 0.01,
    _A + "optim.clip_grad": 1.0,
    _A + "optim.lr_warmup_steps": -1,
    _A + "optim.lr_warmup_steps_ratio": 0.0,
    _A + "optim.lr_scheduler_type": "constant",
    _A + "optim.lr_decay_style": "constant",
    _A + "optim.min_lr": 0.0,
    _A + "optim.min_lr_ratio": 0.0,
    _A + "megatron.tensor_model_parallel_size": 1,
    _A + "megatron.pipeline_model_parallel_size": 1,
    _A + "megatron.context_parallel_size": 1,
    _A + "megatron.expert_model_parallel_size": 1,
    _A + "megatron.sequence_parallel": True,
    _A + "megatron.seed": 42,
    _M + "enable_gradient_checkpointing": True,
    _M + "lora_rank": 0,
    _M + "lora.rank": 0,
    _R + "n": 1,
    _R + "temperature": 1.0,
    _R + "top_k": -1,
    _R + "top_p": 1,
    _R + "tensor_model_parallel_size": 2,
    _R + "gpu_memory_utilization": 0.5,
    _R + "max_num_seqs": 256,
    _R + "expert_parallel_size": 1,
    _R + "enforce_eager": False,
    _R + "val_kwargs.temperature": 0,
    _R + "val_kwargs.top_p": 1.0,
    _R + "val_kwargs.n": 1,
    _R + "val_kwargs.do_sample": False,
    _R + "val_kwargs.top_k": -1,
    _R + "max_num_batched_tokens": 8192,
    "critic.optim.lr": 1e-5,
    "critic.optim.betas": [0.9, 0.999],
    "critic.optim.weight_decay": 0.01,
    "critic.optim.lr_warmup_steps": -1,
    "critic.optim.lr_warmup_steps_ratio": 0.0,
    "critic.cliprange_value": 0.5,
    "critic.optim.clip_grad": 1.0,
    "critic.grad_clip": 1.0,
    "critic.optim.lr_scheduler_type": "constant",
    "critic.optim.lr_decay_style": "constant",
    "critic.optim.min_lr": 0.0,
    "critic.optim.min_lr_ratio": 0.0,
    "critic.ppo_max_token_len_per_gpu": 32768,
    "critic.model.enable_gradient_checkpointing": True,
    "critic.ppo_epochs": "${oc.select:actor_rollout_ref.actor.ppo_epochs,1}",
    "critic.ppo_mini_batch_size": "${oc.select:actor_rollout_ref.actor.ppo_mini_batch_size,256}",
    "critic.use_dynamic_bsz": "${oc.select:actor_rollout_ref.actor.use_dynamic_bsz,false}",
    "critic.loss_agg_mode": "${oc.select:actor_rollout_ref.actor.loss_agg_mode,token-mean}",
    "algorithm.adv_estimator": "gae",
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.target_kl": 0.1,
    "algorithm.kl_ctrl.horizon": 10000,
    "algorithm.rollout_correction.rollout_is_threshold": 2.0,
    "algorithm.rollout_correction.loss_type": "ppo_clip",
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.total_epochs": 30,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.val_before_train": True,
    "trainer.resume_mode": "auto",
    "trainer.logger": ["console", "wandb"],
    "trainer.critic_warmup": 0,
    "trainer.max_actor_ckpt_to_keep": None,
    "trainer.project_name": "verl_examples",
    "trainer.experiment_name": "gsm8k",
    "trainer.default_local_dir": "checkpoints/${trainer.project_name}/${trainer.experiment_name}",
}

ESTIMATORS: dict[str, dict[str, Any]] = {
    "gae": shared.PPO,
    "grpo": {"name": "grpo", "advantage": "group"},
    "grpo_vectorized": {"name": "grpo", "advantage": "group"},
    "grpo_passk": {"name": "grpo", "advantage": "pass_at_k"},
    "rloo": shared.RLOO,
    "rloo_vectorized": shared.RLOO,
    "reinforce_plus_plus": shared.REINFORCE_PLUS_PLUS,
    "reinforce_plus_plus_baseline": {
        "name": "reinforce_plus_plus_baseline",
        "advantage": "group",
        "whiten": True,
        "normalize": "none",
    },
    "remax": {"name": "remax", "advantage": "greedy_baseline", "normalize": "none"},
    "opo": {"name": "opo", "advantage": "length_weighted", "normalize": "none"},
    "gpg": {"name": "gpg", "advantage": "nonzero_scaled", "normalize": "none"},
}
"""algorithm.adv_estimator -> a method and its choices."""
LOSSES: dict[str, dict[str, Any]] = {
    "vanilla": {"surrogate": "ppo_clip"},
    "gspo": {"surrogate": "ppo_clip", "importance_sampling_level": "sequence-token", "aggregate": "seq-mean-token-mean"},
    "sapo": {"surrogate": "sapo", "aggregate": "seq-mean-token-mean"},
    "gpg": {"surrogate": "log_likelihood"},
    "clip_cov": {"surrogate": "clip_cov"},
    "kl_cov": {"surrogate": "kl_cov"},
    "geo_mean": {"surrogate": "gmpo", "aggregate": "seq-mean-token-mean"},
    "cispo": {"surrogate": "cispo"},
    "dppo_tv": {"surrogate": "dppo", "divergence": "tv"},
    "dppo_kl": {"surrogate": "dppo", "divergence": "kl"},
}
"""actor.policy_loss.loss_mode -> a surrogate and what it is fixed with."""
PROGRAMS = (
    "verl.trainer.main_ppo",
    "recipe.dapo.main_dapo",
    "recipe.dapo.src.main_dapo",
    "verl.trainer.main_ppo_sync",
    "siirl.main_dag",
    "siirl.client.main_dag",
)
"""Programs whose configuration says all of what they do."""
ONE_STEP_OFF = ("recipe.one_step_off_policy.main_ppo", "verl.experimental.one_step_off_policy.main_ppo")
"""Of those, the ones that sample a step ahead, on GPUs of their own."""


def is_megatron(source: Source) -> bool:
    """The actor trains with Megatron-Core: by its strategy, or by the configuration that it starts from."""
    for key in (_A + "strategy", "model_engine"):
        if source.has(key) and (chosen := source.text(key)) is not None:
            return chosen in ("megatron", "mindspeed")
    named = [source.text("--config-name") or "", *source.texts("defaults")]
    return any("megatron" in name for name in named) or source.text(_A + "strategy") == "megatron"


def gpus(source: Source) -> int:
    return source.count("trainer.nnodes") * source.count("trainer.n_gpus_per_node")


def program(source: Source) -> dict[str, Any]:
    name = source.text("-m")
    if name is not None and name not in (*PROGRAMS, *ONE_STEP_OFF):
        source.lacks("-m", "another program than verl.trainer.main_ppo: it may do what no key says")
    if source.has(_R + "nnodes") and source.whole(_R + "nnodes"):
        source.lacks(_R + "nnodes", "GPUs of their own for sampling, of another program than one_step_off_policy")
    if name in ONE_STEP_OFF:
        return shared.ahead(1, "finish")
    if source.has("rollout.nnodes") and source.whole("rollout.nnodes"):
        source.lacks("rollout.nnodes", "GPUs of their own for sampling, of another program than one_step_off_policy")
    return {}


def layout(source: Source) -> dict[str, Any]:
    if not is_megatron(source):
        cp = source.whole(_A + "ulysses_sequence_parallel_size") or 1
        if source.has(_A + "fsdp_config.ulysses_sequence_parallel_size"):
            cp = max(cp, source.whole(_A + "fsdp_config.ulysses_sequence_parallel_size") or 1)
        return {"policy.backend": str(shared.world_layout(gpus(source), cp=cp))}
    sizes = shared.parallel_sizes(source.under(_A + "megatron."))
    return {"policy.backend": str(shared.world_layout(gpus(source), **sizes))}


def megatron(source: Source) -> dict[str, Any]:
    if not is_megatron(source):
        return {}
    section = source.under(_A + "megatron.")
    found: dict[str, Any] = {"policy.sequence_parallel": section.flag("sequence_parallel")}
    virtual = section.whole("virtual_pipeline_model_parallel_size")
    if virtual is not None and virtual > 1:
        found["policy.megatron.pipeline.virtual_pipeline_model_parallel_size"] = virtual
    found |= shared.megatron_options(source, _A + "megatron.override_transformer_config", "policy.megatron")
    return found


def memory(source: Source) -> dict[str, Any]:
    """Recomputation and offload."""
    if is_megatron(source):
        found = shared.recompute(source, _A + "megatron.override_transformer_config", "policy")
        parts = {"parameters": "param", "gradients": "grad", "optimizer": "optimizer"}
        found |= {
            f"policy.offload.{part}": True for part, name in parts.items() if source.flag(f"{_A}megatron.{name}_offload")
        }
        optimizer = source.under(_A + "optim.override_optimizer_config.")
        for key in optimizer.keys(""):
            if optimizer.value(key) is None:
                continue
            if key not in (
                "optimizer_cpu_offload",
                "optimizer_offload_fraction",
                "overlap_cpu_optimizer_d2h_h2d",
                "use_precision_aware_optimizer",
            ):
                optimizer.lacks(key, "another setting of Megatron's optimizer: policy.megatron.optimizer has its fields")
            else:
                value = optimizer.value(key)
                if value not in (False, None) and optimizer.flag("optimizer_cpu_offload") | (key.startswith("use_")):
                    found[f"policy.megatron.optimizer.{key}"] = float(value) if key.endswith("fraction") else value
        return found
    found = {"policy.recompute": "full"} if source.flag(_M + "enable_gradient_checkpointing") else {}
    if source.flag(_A + "fsdp_config.param_offload"):
        found["policy.offload.parameters"] = True
    if source.flag(_A + "fsdp_config.optimizer_offload"):
        found["policy.offload.optimizer"] = True
    return found


def longest(source: Source) -> int:
    return source.count("data.max_prompt_length") + source.count("data.max_response_length")


def micro_batch(source: Source) -> dict[str, Any]:
    """A token budget as it is, times the ranks that share a sequence; a number of sequences at their longest."""
    tokens = longest(source)
    if source.flag(_A + "use_dynamic_bsz"):
        shared_by = _A + ("megatron.context_parallel_size" if is_megatron(source) else "ulysses_sequence_parallel_size")
        budget = source.count(_A + "ppo_max_token_len_per_gpu") * (source.whole(shared_by) or 1)
        return {"policy.tokens_per_micro_batch": max(budget, tokens)}
    sequences = source.whole(_A + "ppo_micro_batch_size_per_gpu")
    if sequences is None and (total := source.whole(_A + "ppo_micro_batch_size")) is not None:
        sequences = max(1, total // gpus(source))
    return {"policy.tokens_per_micro_batch": (sequences or 1) * tokens}


def batch(source: Source) -> dict[str, Any]:
    prompts, mini = source.count("data.train_batch_size"), source.count(_A + "ppo_mini_batch_size")
    if not 0 < mini <= prompts:
        raise UnreadableError(f"{_A}ppo_mini_batch_size = {mini} must be in 1 to data.train_batch_size = {prompts}")
    updates, rest = divmod(prompts, mini)
    if rest:
        source.lacks(
            _A + "ppo_mini_batch_size", f"updates of unequal size: data.train_batch_size = {prompts} is no multiple of it"
        )
    return {"data.prompts_per_step": prompts, "algorithm.updates_per_step": updates}


def advantage(source: Source) -> dict[str, Any]:
    name, group = source.text("algorithm.adv_estimator") or "gae", source.count(_R + "n")
    if name not in ESTIMATORS:
        source.lacks("algorithm.adv_estimator", f"the advantage {name}: known here are {', '.join(ESTIMATORS)}")
        return {}
    found = dict(ESTIMATORS[name])
    if found["advantage"] in ("group", "pass_at_k") and "normalize" not in found:
        found["normalize"] = "group" if source.flag("algorithm.norm_adv_by_std_in_grpo") else "none"
    if found["advantage"] == "nonzero_scaled" and group == 1:
        source.lacks("algorithm.adv_estimator", "gpg with one sample per prompt, which compares with nothing")
    if found["advantage"] in ("group", "leave_one_out", "length_weighted") and group == 1:
        # A group of one has mean 0 and deviation 1 there: the advantage is the reward.
        found |= {"advantage": "reward", "normalize": "none"}
    if found.get("credit") in ("gae", "discounted"):
        found["gamma"] = source.number("algorithm.gamma")
    if found.get("credit") == "gae":
        found["lam"] = source.number("algorithm.lam")
    found.setdefault("whiten", False)
    found.setdefault("credit", "response")
    return {f"algorithm.{key}": value for key, value in found.items()}


def loss(source: Source) -> dict[str, Any]:
    mode, actor = source.text(_A + "policy_loss.loss_mode") or "vanilla", source.under(_A)
    if mode not in LOSSES:
        source.lacks(_A + "policy_loss.loss_mode", f"the loss {mode}: known here are {', '.join(LOSSES)}")
        return {}
    found = dict(LOSSES[mode])
    bypassed = source.under("algorithm.rollout_correction.")
    if bypassed.flag("bypass_mode") and bypassed.text("loss_type") == "reinforce":
        # bypass_mode takes the place of loss_mode; the weight has no gradient, as CISPO's.
        weighted = bypassed.text("rollout_is") is not None
        found = {"surrogate": "cispo"} if weighted else {"surrogate": "log_likelihood"}
    surrogate = found["surrogate"]
    if surrogate in ("ppo_clip", "gmpo", "cispo", "clip_cov", "dppo"):
        common = actor.number("clip_ratio")
        for key in ("clip_low", "clip_high"):
            bound = actor.number(key.replace("clip_", "clip_ratio_"))
            # Below 0 no ratio falls: 1 is no bound.
            found[key] = min(bound if bound is not None else common or 0.0, 1.0 if key == "clip_low" else 1e9)
        if bypassed.flag("bypass_mode") and bypassed.text("loss_type") == "reinforce":
            found |= {"clip_low": 1.0, "clip_high": (bypassed.number("rollout_is_threshold") or 2.0) - 1}
        if surrogate == "gmpo":
            found["clip_low"] = actor.number("clip_ratio_low")
    if mode == "vanilla" and surrogate == "ppo_clip":
        found["dual_clip"] = actor.number("clip_ratio_c")
        if found["dual_clip"] is not None and found["dual_clip"] <= 1 + found["clip_high"]:
            actor.lacks("clip_ratio_c", f"a bound below that of the ratio, {1 + found['clip_high']:g}")
    if surrogate == "dppo":
        found["ratio_cap"] = actor.number("clip_ratio_c")
    if surrogate == "sapo":
        found |= {"temperature_positive": actor.number("tau_pos"), "temperature_negative": actor.number("tau_neg")}
        for key in ("tau_pos", "tau_neg"):
            if actor.has(f"policy_loss.{key}") and actor.number(f"policy_loss.{key}") != actor.number(key):
                actor.lacks(f"policy_loss.{key}", f"verl's loss reads actor.{key}: say it there")
    if surrogate == "clip_cov":
        section = actor.under("policy_loss.clip_cov_")
        found |= {"cov_fraction": section.number("ratio"), "cov_low": section.number("lb"), "cov_high": section.number("ub")}
    if surrogate == "kl_cov":
        section = actor.under("policy_loss.")
        found |= {"cov_fraction": section.number("kl_cov_ratio"), "cov_kl_coef": section.number("ppo_kl_coef")}
    mean = actor.text("loss_agg_mode") or "token-mean"
    if mean not in shared.AGGREGATES:
        actor.lacks("loss_agg_mode", f"the mean {mean}: known here are {', '.join(shared.AGGREGATES)}")
    elif "aggregate" not in found:
        found["aggregate"] = shared.AGGREGATES[mean]
    elif (actor.flag("use_kl_loss") and actor.number("kl_loss_coef")) or actor.number("entropy_coeff"):
        found["penalty_aggregate"] = shared.AGGREGATES[mean]
    return {f"algorithm.{key}": value for key, value in found.items()}


def kl(source: Source) -> dict[str, Any]:
    in_loss, in_reward = source.flag(_A + "use_kl_loss"), source.flag("algorithm.use_kl_in_reward")
    if in_loss and in_reward and source.number(_A + "kl_loss_coef") and source.number("algorithm.kl_ctrl.kl_coef"):
        source.lacks("algorithm.use_kl_in_reward", "a KL in the loss and another in the reward")
    if in_reward and source.number("algorithm.kl_ctrl.kl_coef"):
        name, control = source.text("algorithm.kl_penalty") or "kl", source.under("algorithm.kl_ctrl.")
        found: dict[str, Any] = {
            "place": "reward",
            "estimator": _estimator(source, "algorithm.kl_penalty", name).removesuffix("+"),
            "coef": control.number("kl_coef"),
        }
        if control.text("type") == "adaptive":
            found |= {"target": control.number("target_kl"), "horizon": control.whole("horizon")}
    elif in_loss and source.number(_A + "kl_loss_coef"):
        name = source.text(_A + "kl_loss_type") or "low_var_kl"
        found = {
            "place": "loss",
            "estimator": _estimator(source, _A + "kl_loss_type", name),
            "coef": source.number(_A + "kl_loss_coef"),
        }
    else:
        found = {"coef": 0.0}
    return {f"algorithm.kl.{key}": value for key, value in found.items()}


def _estimator(source: Source, key: str, name: str) -> str:
    if name not in shared.ESTIMATORS:
        source.lacks(key, f"the estimator {name}: known here are {', '.join(shared.ESTIMATORS)}")
    return shared.ESTIMATORS.get(name, "k3")


_REJECTED = {"token_k1": "token", "seq_sum_k1": "sequence", "seq_mean_k1": "geometric"}
_DIVERGENCES = {
    **{f"token_{k}": f"token_{k}" for k in ("k2", "k3")},
    **{f"seq_{over}_{k}": f"{over}_{k}" for over in ("sum", "mean", "max") for k in ("k2", "k3")},
}


def correction(source: Source) -> dict[str, Any]:
    if source.number(_A + "tis_imp_ratio_cap") is not None and (source.number(_A + "tis_imp_ratio_cap") or 0) > 0:
        cap = source.number(_A + "tis_imp_ratio_cap")
        return {"algorithm.rollout_correction.name": "tis", "algorithm.rollout_correction.high": cap}
    said = source.under("algorithm.rollout_correction.")
    found: dict[str, Any] = {}
    if said.flag("bypass_mode"):
        weighted, reinforce = said.text("rollout_is"), said.text("loss_type") == "reinforce"
        if reinforce and weighted is None:
            if said.text("rollout_rs") is not None:
                said.lacks("rollout_rs", "rejection beside REINFORCE without a weight")
            return {}
        found["old_logprobs_from"] = "engine"
        if said.text("loss_type") not in ("ppo_clip", "reinforce"):
            said.lacks("loss_type", f"the loss {said.text('loss_type')}")
        if reinforce and (weighted != "token" or (said.number("rollout_is_threshold") or 2.0) < 1):
            said.lacks("rollout_is", "REINFORCE weighted by whole responses, or by less than 1")
        if weighted is not None and not reinforce:
            said.fixed("rollout_is", "with bypass_mode and ppo_clip verl multiplies by no weight: the ratio has it")
    elif (level := said.text("rollout_is")) is not None:
        if level not in ("token", "sequence"):
            said.lacks("rollout_is", f"the weight {level}")
        low, _, high = str(said.raw("rollout_is_threshold")).strip("'\"").rpartition("_")
        if low:
            # Two bounds: what is outside of them has weight 0 (verl since 2026-03; before, it was an error).
            found |= {"weight": level, "low": _bound(low), "high": _bound(high), "outside": "mask"}
        else:
            found |= {"weight": level, "high": said.number("rollout_is_threshold"), "outside": "truncate"}
    if (rejected := said.text("rollout_rs")) is not None:
        found |= rejection(said, [part.strip() for part in rejected.split(",") if part.strip()])
    return {f"algorithm.rollout_correction.{key}": value for key, value in found.items()}


def _bound(text: str) -> float:
    try:
        if (number := float(text)) > 0:
            return number
    except ValueError:
        pass
    raise UnreadableError(f"bounds of algorithm.rollout_correction must be numbers above 0: got {text!r}")


def rejection(said: Source, names: list[str]) -> dict[str, Any]:
    """What is left out by one of several statistics, each with its bounds (rollout_corr_helper.py:156)."""
    bounds = (said.text("rollout_rs_threshold") or "").split(",")
    bounds = bounds * len(names) if len(bounds) == 1 else bounds
    known = sum(name in _REJECTED for name in names)
    if known > 1 or len(bounds) != len(names) or any(name not in (*_REJECTED, *_DIVERGENCES) for name in names):
        said.lacks(
            "rollout_rs", f"rejection by {', '.join(names)}: known here are {', '.join(_DIVERGENCES)}, and one of "
            f"{', '.join(_REJECTED)}"
        )  # fmt: skip
        return {}
    found: dict[str, Any] = {}
    divergences: dict[str, float] = {}
    for name, bound in zip(names, bounds, strict=True):
        low, _, high = bound.strip().rpartition("_")
        upper = _bound(high)
        lower = _bound(low) if low else 1 / upper
        if name in _DIVERGENCES:
            divergences[_DIVERGENCES[name]] = upper
        else:
            # verl compares -log(trainer / engine) with the logarithms of the bounds.
            found |= {"reject": _REJECTED[name], "reject_low": 1 / upper, "reject_high": 1 / lower}
    return found | ({"reject_divergence": divergences} if divergences else {})


def overlong(source: Source) -> dict[str, Any]:
    """DAPO's penalty, in the three places where verl has had its keys."""
    for start in (
        "reward.reward_kwargs.overlong_buffer_cfg.",
        "reward_model.reward_kwargs.overlong_buffer_cfg.",
        "reward_model.overlong_buffer.",
    ):
        said = source.under(start)
        if said.flag("enable"):
            buffer, penalty = said.whole("len"), said.number("penalty_factor")
            return {"algorithm.overlong_buffer": buffer, "algorithm.overlong_penalty": 1.0 if penalty is None else penalty}
    return {"algorithm.overlong_buffer": 0}


def dynamic_sampling(source: Source) -> dict[str, Any]:
    said = source.under("algorithm.filter_groups.")
    if not said.flag("enable"):
        return {"algorithm.dynamic_sampling": False}
    rounds = said.whole("max_num_gen_batches") or 0
    found: dict[str, Any] = {"algorithm.dynamic_sampling": True}
    # 0 is no bound there.
    found["algorithm.sampling_rounds"] = rounds if rounds > 0 else 1000
    found["algorithm.prompts_per_round"] = source.whole("data.gen_batch_size")
    # acc and score are without the penalty of long responses, seq_reward is with it, seq_final_reward with the KL too.
    metric = said.text("metric") or ""
    if metric == "seq_final_reward" and source.flag("algorithm.use_kl_in_reward"):
        said.lacks("metric", "groups compared by rewards with their KL: say metric=seq_reward")
    if metric.startswith("seq_") and overlong(source)["algorithm.overlong_buffer"]:
        found["algorithm.dynamic_sampling_by"] = "shaped_reward"
    return found


def optimizer(source: Source, role: str = _A, ours: str = "policy.optimizer") -> dict[str, Any]:
    said = source.under(role + "optim.")
    uses_megatron = is_megatron(source)
    found: dict[str, Any] = {"lr": said.number("lr"), "weight_decay": said.number("weight_decay")}
    if not uses_megatron:
        # verl does not hand betas to Megatron's optimizer, whose own are 0.9 and 0.999.
        found["betas"] = [float(beta) for beta in said.items("betas")]
        found["eps"] = said.number("eps")
        # The newer engine reads optim.clip_grad, the older workers grad_clip: whichever is set.
        set_there = said.has("clip_grad") and not source.has(role + "grad_clip")
        found["clip_grad"] = said.number("clip_grad") if set_there else source.number(role + "grad_clip")
    else:
        found |= {"betas": [0.9, 0.999], "clip_grad": said.number("clip_grad")}
    style = (
        said.text("lr_decay_style") if uses_megatron else said.text("warmup_style") or said.text("lr_scheduler_type")
    ) or "constant"
    if style not in ("constant", "linear", "cosine"):
        said.lacks("lr_decay_style" if uses_megatron else "lr_scheduler_type", f"the schedule {style}")
        style = "constant"
    found["schedule"] = style
    found |= {"schedule_per": "step", "warmup_from": 0}
    if style != "constant":
        lowest = said.number("min_lr") if uses_megatron else (said.number("min_lr_ratio") or 0) * (found["lr"] or 0)
        found["min_lr"] = lowest
        if uses_megatron and (steps := said.whole("lr_decay_steps")):
            found["decay_steps"] = steps
    steps = said.whole("lr_warmup_steps")
    if steps is None or steps < 0 or (uses_megatron and steps == 0):
        found["warmup_steps"] = said.number("lr_warmup_steps_ratio") or 0
    else:
        found["warmup_steps"] = steps
    return {f"{ours}.{key}": value for key, value in found.items()}


def megatron_checkpoints(source: Source) -> dict[str, Any]:
    """Weights of policy and reference that are not those of the Hugging Face directory."""
    if not is_megatron(source):
        return {}
    weights: dict[str, Any] = {}
    has_reference = source.flag(_A + "use_kl_loss") or source.flag("algorithm.use_kl_in_reward")
    roles = [("model.path", _A), *([("reference.path", "actor_rollout_ref.ref.")] if has_reference else [])]
    for ours, role in roles:
        if source.flag(f"{role}megatron.use_dist_checkpointing"):
            weights[ours] = source.text(f"{role}megatron.dist_checkpointing_path")
    if not weights:
        return {}
    directory = shared.path(source, _M + "path")
    if has_reference and "reference.path" not in weights:
        weights["reference.path"] = directory
    return {**weights, "model.config": directory}


def critic(source: Source) -> dict[str, Any]:
    if (source.text("algorithm.adv_estimator") or "gae") != "gae":
        return {}
    said = source.under(_C)
    found: dict[str, Any] = {
        "critic.path": shared.path(source, "critic.model.path"),
        "critic.value_clip": said.number("cliprange_value"),
    }
    found |= optimizer(source, _C, "critic.optimizer")
    for key, of_actor in (("ppo_mini_batch_size", _A), ("ppo_epochs", _A), ("loss_agg_mode", _A)):
        if said.raw(key) is not None and str(said.raw(key)) != str(source.raw(of_actor + key)):
            said.lacks(key, "the critic learns in the policy's updates")
    if (warmup := source.whole("trainer.critic_warmup") or 0) > 1:
        found["critic.warmup_steps"] = warmup - 1
    if said.flag("use_dynamic_bsz") and (budget := said.whole("ppo_max_token_len_per_gpu")):
        found["critic.tokens_per_micro_batch"] = max(budget, longest(source))
    elif sequences := said.whole("ppo_micro_batch_size_per_gpu"):
        found["critic.tokens_per_micro_batch"] = sequences * longest(source)
    if not is_megatron(source):
        found["critic.recompute"] = "full" if said.flag("model.enable_gradient_checkpointing") else "none"
        parts = {"parameters": "model.fsdp_config.param_offload", "optimizer": "model.fsdp_config.optimizer_offload"}
    else:
        parts = {
            name: f"megatron.{key}_offload"
            for name, key in (("parameters", "param"), ("gradients", "grad"), ("optimizer", "optimizer"))
        }
    return found | {f"critic.offload.{part}": True for part, key in parts.items() if said.flag(key)}


def sampling(source: Source) -> dict[str, Any]:
    said = source.under(_R)
    return {
        "engine.sampling.temperature": said.number("temperature"),
        "engine.sampling.top_p": said.number("top_p"),
        "engine.sampling.top_k": max(0, said.whole("top_k") or 0),
    }


def engine(source: Source) -> dict[str, Any]:
    said, name = source.under(_R), source.text(_R + "name") or "vllm"
    if name == "hf":
        return {"engine.backend": "transformers"}
    tp, ep = said.whole("tensor_model_parallel_size") or 1, said.whole("expert_parallel_size") or 1
    ep, is_apart = ep if ep == tp else 1, source.text("-m") in ONE_STEP_OFF
    if is_apart:
        placed = shared.engine_apart(source.count("rollout.nnodes") * source.count("rollout.n_gpus_per_node"), tp, ep)
    else:
        placed = {"engine.backend": shared.engine_layout(gpus(source), tp, ep)}
    found: dict[str, Any] = {
        **placed,
        "engine.memory_fraction": said.number("gpu_memory_utilization"),
        "engine.max_num_seqs": said.whole("max_num_seqs"),
    }
    if (length := said.whole("max_model_len")) is not None:
        found["engine.max_model_len"] = max(length, longest(source))
    if said.has("free_cache_engine") and not is_apart:
        found["engine.sleep"] = said.flag("free_cache_engine")
    if name == "vllm":
        options: dict[str, Any] = {"enforce_eager": said.flag("enforce_eager") or None}
        for key in ("enable_chunked_prefill", "enable_prefix_caching"):
            options[key] = said.flag(key) if said.has(key) else None
        options["max_num_batched_tokens"] = (
            said.whole("max_num_batched_tokens") if said.has("max_num_batched_tokens") else None
        )
        found |= {f"engine.vllm.{key}": value for key, value in options.items()}
    return found


def evaluation(source: Source) -> dict[str, Any]:
    said = source.under(_R + "val_kwargs.")
    if source.has(_R + "n_val") or source.has(_R + "val_temperature"):
        # rLLM's verl, which knows no val_kwargs: its top_p is a number of the code.
        temperature = source.number(_R + "val_temperature") if source.has(_R + "val_temperature") else 0.6
        if not temperature:
            return {"eval.samples": 0}
        return {
            "eval.samples": source.count(_R + "n_val") if source.has(_R + "n_val") else 8,
            "eval.temperature": temperature,
            "eval.top_p": 0.95,
        }
    if not said.flag("do_sample"):
        return {"eval.samples": 0}
    if (said.whole("top_k") or 0) > 0:
        said.lacks("top_k", "top-k in evaluation")
    if not said.number("temperature"):
        return {"eval.samples": 0}
    return {
        "eval.samples": said.whole("n"),
        "eval.temperature": said.number("temperature"),
        "eval.top_p": said.number("top_p"),
    }


def rewards(source: Source) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for start in ("reward.custom_reward_function.", "custom_reward_function."):
        if (file := source.text(start + "path")) is not None:
            found["reward.functions"] = {f"{file}:{source.text(start + 'name') or 'compute_score'}": 1.0}
    for enabled, model in (
        ("reward_model.enable", "reward_model.model.path"),
        ("reward.reward_model.enable", "reward.reward_model.model_path"),
    ):
        if source.flag(enabled):
            found["reward.model.path"] = shared.path(source, model)
            if "reward.functions" in found:
                source.lacks(enabled, "a reward model that a reward function asks: here their scores would be summed")
    for key in ("reward.reward_manager.name", "reward_model.reward_manager", "reward_manager.name"):
        name = source.text(key)
        if source.has(key) and name not in (None, "naive", "dapo", "prime", "batch"):
            source.lacks(key, f"the reward manager {name}")
    return found


def overlong_prompts(source: Source) -> dict[str, Any]:
    if source.flag("data.filter_overlong_prompts"):
        return {"data.overlong_prompts": "drop"}
    # Where prompts would be cut off or refused, the run is refused if there is such a prompt: nothing is cut silently.
    return {"data.overlong_prompts": "refuse"}


def template(source: Source) -> dict[str, Any]:
    start = "data.apply_chat_template_kwargs."
    found = {key.removeprefix(start): source.value(key) for key in source.keys(start)}
    return {"data.chat_template_kwargs": found} if found else {}


def run(source: Source) -> dict[str, Any]:
    mode = (source.text("trainer.resume_mode") or "auto").lower()
    resume = {"auto": "auto", "disable": "never", "off": "never"}.get(mode)
    if mode == "resume_path":
        resume = source.text("trainer.resume_from_path")
    elif resume is None:
        source.lacks("trainer.resume_mode", f"{mode}: known here are auto, disable, resume_path")
    keep = source.whole("trainer.max_actor_ckpt_to_keep")
    return {"trainer.resume": resume, "trainer.keep": keep if keep and keep > 0 else EVERY_CHECKPOINT}


def length_of_run(source: Source) -> dict[str, Any]:
    steps = source.whole("trainer.total_training_steps")
    return {"trainer.steps": steps} if steps and steps > 0 else {"trainer.epochs": source.count("trainer.total_epochs")}


def evaluation_interval(source: Source) -> dict[str, Any]:
    if source.text("trainer.test_freq") == "after_each_epoch":
        source.lacks("trainer.test_freq", "evaluation after each epoch: say a number of steps", changes_result=False)
        return {}
    return {"trainer.eval_every": shared.interval(source, "trainer.test_freq") if source.items("data.val_files") else 0}


def profiler(source: Source) -> dict[str, Any]:
    asked = any(source.flag(f"actor_rollout_ref.{role}.profiler.enable") for role in ("actor", "rollout", "ref"))
    if (steps := source.items("global_profiler.steps")) and asked and source.text("global_profiler.tool") == "torch":
        return {"trainer.profile.steps": [int(step) for step in steps]}
    return {}


tracked = shared.tracked("trainer.logger", "trainer.project_name", "trainer.experiment_name")

DERIVED = (
    program,
    advantage,
    loss,
    kl,
    correction,
    overlong,
    dynamic_sampling,
    batch,
    overlong_prompts,
    template,
    layout,
    megatron,
    memory,
    micro_batch,
    optimizer,
    critic,
    megatron_checkpoints,
    sampling,
    engine,
    evaluation,
    rewards,
    run,
    length_of_run,
    evaluation_interval,
    profiler,
    tracked,
)

TABLE = Table(
    "verl",
    SECTIONS,
    DERIVED,
    DEFAULTS,
    known=known("verl"),
    command=(
        "`fivefold train --from verl KEY=VALUE ...`: the arguments of `python3 -m verl.trainer.main_ppo` as "
        "they are, `--config-name` "
        "included, or the script that has them: `fivefold train --from verl run.sh`."
    ),
    loses=(
        "adapters (LoRA)",
        "tools, several turns, images",
        "asynchronous training by parts of a step (fully_async_policy)",
        "sampling with quantized weights",
    ),
    gains=(
        "a batch vocabulary that is printed before the run starts",
        "numbers that no layout, no micro-batch and no number of GPUs changes",
        "checkpoints that any layout resumes",
        "every key that is read, or refused",
    ),
)


OTHER_TABLES = (verl_sft.TABLE,)
_APART = {"rollout.nnodes": 1, "rollout.n_gpus_per_node": 8}
_BYPASS = {"algorithm.rollout_correction.bypass_mode": True}
_AHEAD = {
    # The older one computes old log-probs (until 2025-11), the newer one takes the engine's.
    program: replace(TABLE, defaults=DEFAULTS | _APART | (_BYPASS if program.startswith("verl.") else {}))
    for program in ONE_STEP_OFF
}
"""Tables of programs whose configuration has other defaults."""


def table_of(settings: Mapping[str, Any]) -> Table:
    """The table of a program's settings: PPO's, or that of the SFT trainers."""
    is_rl = any(key.startswith(("actor_rollout_ref.", "algorithm.")) for key in settings)
    if (own := _AHEAD.get(str(settings.get("-m")))) is not None:
        return own
    return TABLE if is_rl or not verl_sft.looks_like(settings) else verl_sft.TABLE


translate = dialect(table_of)
