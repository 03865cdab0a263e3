"""ROLL's advantages, losses and optimizers -> ours."""

from __future__ import annotations

from typing import Any

from fivefold.config.dialects import shared
from fivefold.config.dialects.adapters import adapters, refuse
from fivefold.config.dialects.roll_roles import TRAIN, kind, role, samples_a_group, uses_critic
from fivefold.config.dialects.source import Source


def method(source: Source) -> dict[str, Any]:
    if kind(source) == "sft":
        return {
            "algorithm.name": "sft",
            # The loader of sft_pipeline.py does not shuffle.
            "data.shuffle": False,
            "data.prompt_key": source.text("prompt_key") or "instruction",
            "data.response_key": source.text("response_key") or "output",
            "data.query_key": source.text("query_key"),
            "data.system_key": source.text("system_key"),
        }
    if kind(source) == "dpo":
        if source.flag("ipo"):
            source.lacks("ipo", "the loss IPO")
        return {
            "algorithm.name": "dpo",
            "algorithm.beta": source.number("beta"),
            "algorithm.label_smoothing": source.number("label_smoothing"),
            "data.prompt_key": source.text("prompt_key"),
            "data.chosen_key": source.text("chosen_key"),
            "data.rejected_key": source.text("rejected_key"),
        }
    name = source.text("adv_estimator") or "gae"
    found: dict[str, Any] = {
        "whiten": source.flag("whiten_advantages"),
        "advantage_clip": source.number("advantage_clip") or None,
        "overlong_filter": source.flag("max_len_mask"),
        "overlong_buffer": 0,
        "dynamic_sampling": False,
    }
    if source.flag("difficulty_mask") and samples_a_group(source) > 1:
        found |= {
            "difficulty_low": source.number("difficulty_low_threshold"),
            "difficulty_high": source.number("difficulty_high_threshold"),
        }
    masked = [key for key in ("max_len_mask", "difficulty_mask") if source.flag(key)]
    if masked and source.number("entropy_loss_coef"):
        source.lacks(masked[0], "responses without loss that the entropy still counts (actor_worker.py:128)")
    mean, deviation = source.text("norm_mean_type"), source.text("norm_std_type")
    if name == "grpo":
        mean = deviation = "group"
    elif source.text("reward_norm") in ("group", "batch"):
        mean = mean or source.text("reward_norm")
        deviation = deviation or (source.text("reward_norm") if source.flag("reward_scale") else None)
    if mean == "group":
        found |= {"advantage": "group", "normalize": deviation or "none"}
    elif mean is None and deviation is None:
        found |= {"advantage": "reward", "normalize": "none"}
    elif mean == "batch" and deviation in (None, "batch", "group"):
        domains = {key.split(".")[1] for key in source.keys("rewards.")}
        if len(domains) > 1:
            source.lacks("norm_mean_type", "rewards with the mean of the batch, which ROLL takes of each of several domains")
        found |= {"advantage": "step_mean", "normalize": deviation or "none"}
    else:
        source.lacks("norm_mean_type", "rewards with the mean of the whole run, or with none over a deviation")
    if name == "gae":
        found |= {"name": "ppo", "credit": "gae", "gamma": source.number("gamma"), "lam": source.number("lambd")}
    elif name in ("reinforce", "grpo"):
        found |= {"name": "grpo" if name == "grpo" else "reinforce_plus_plus"}
        # With γ = 1 and no KL on tokens the return of every token is the response's.
        is_response = name == "grpo" and source.number("gamma") == 1 and not token_kl(source)
        found |= {"credit": "response"} if is_response else {"credit": "discounted", "gamma": source.number("gamma")}
    else:
        source.lacks("adv_estimator", f"the advantage {name}: known here are gae, reinforce, grpo")
    if (bound := source.number("reward_clip")) and mean is not None:
        source.fixed(
            "reward_clip", "behind the normalization in a group, where no advantage of fewer than 100 samples is beyond 10"
        ) if bound >= 10 else source.lacks("reward_clip", "a bound of normalized rewards")
    elif bound:
        found["reward_clip"] = bound
    return {f"algorithm.{key}": value for key, value in found.items()}


def token_kl(source: Source) -> float:
    """The coefficient of the KL that each token's reward loses; 0 without."""
    return (source.number("init_kl_coef") or 0.0) if source.flag("add_token_level_kl") else 0.0


def kl(source: Source) -> dict[str, Any]:
    """In the loss, off each token's reward when rewards have been normalized (rlvr_pipeline.py, compute_token_reward), or
    both."""
    in_loss = (source.number("kl_loss_coef") or 0.0) if source.flag("use_kl_loss") else 0.0
    of_tokens, target = token_kl(source), source.number("target_kl")
    found: dict[str, Any] = {"coef": in_loss}
    if in_loss:
        found |= {"place": "loss", "estimator": "k3"}
    if not of_tokens:
        return found
    if (name := source.text("kl_penalty") or "kl") not in shared.ESTIMATORS:
        source.lacks("kl_penalty", f"the estimator {name}: known here are {', '.join(shared.ESTIMATORS)}")
    estimator = shared.ESTIMATORS.get(name, "k1")
    if not in_loss:
        found = {"coef": of_tokens, "place": "reward", "estimator": estimator}
        return found | ({} if target is None else {"target": target, "horizon": source.whole("kl_horizon")})
    if target is not None:
        source.lacks("target_kl", "two penalties of which one has a coefficient that moves")
    return found | {"reward_coef": of_tokens, "reward_estimator": estimator}


def loss(source: Source) -> dict[str, Any]:
    if kind(source) != "rlvr":
        return {}
    ranged = source.flag("use_pg_clip_range")
    low, high = (
        (source.number("pg_clip_low"), source.number("pg_clip_high"))
        if ranged
        else (source.number("pg_clip"), source.number("pg_clip"))
    )
    level = {"token": "token", "seq": "sequence"}.get(source.text("importance_sampling") or "token")
    mean = source.text("loss_agg_mode") or "seq-mean-token-mean"
    if mean not in shared.AGGREGATES:
        source.lacks("loss_agg_mode", f"the mean {mean}: known here are {', '.join(shared.AGGREGATES)}")
    found: dict[str, Any] = {
        "surrogate": "ppo_clip",
        "clip_low": low,
        "clip_high": high,
        "importance_sampling_level": level,
        "aggregate": shared.AGGREGATES.get(mean),
        "dual_clip": 1 + 2 * (source.number("pg_clip") or 0.0) if source.flag("dual_clip_loss") else None,
        "entropy_coef": source.number("entropy_loss_coef"),
    }
    found |= variant(source)
    if found["dual_clip"] is not None and found["dual_clip"] <= 1 + (high or 0.0):
        source.lacks("dual_clip_loss", "a bound below that of the ratio")
    return {f"algorithm.{key}": value for key, value in found.items()} | {
        f"algorithm.kl.{key}": value for key, value in kl(source).items()
    }


_WORKERS = ("roll.pipeline.rlvr.actor_worker.ActorWorker", "roll.pipeline.base_worker.ActorWorker")
"""With the loss that `loss` reads."""
_PG_WORKER = "roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker"


def variant(source: Source) -> dict[str, Any]:
    """What the worker ActorPGWorker has in the place of PPO's loss (actor_pg_worker.py); other workers do not read it."""
    said = source.under(TRAIN)
    worker = said.text("worker_cls") or _WORKERS[0]
    if worker not in (*_WORKERS, _PG_WORKER):
        said.lacks("worker_cls", "a worker of your own, whose loss no key says")
    if worker != _PG_WORKER:
        return {}
    name = said.text("pg_variant")
    if name == "ppo":
        return {"importance_sampling_level": "token"}
    found: dict[str, Any] = {"importance_sampling_level": "token", "clip_low": None, "clip_high": None, "dual_clip": None}
    if name == "vanilla":
        return found | {"surrogate": "log_likelihood", "importance_sampling_level": None}
    if name == "tis":
        low, high = said.number("tis_lower_bound") or 0.0, said.number("tis_upper_bound") or 0.0
        if low > 1 or high < 1:
            said.lacks("tis_upper_bound", "bounds of the ratio that leave 1 out")
        return found | {"surrogate": "cispo", "clip_low": 1 - low, "clip_high": high - 1}
    if name == "topr":
        if (said.number("topr_positive_weight"), said.number("topr_negative_weight")) != (1.0, 1.0):
            said.lacks("topr_positive_weight", "weights of good and bad responses")
        if source.flag("whiten_advantages"):
            source.lacks("whiten_advantages", "TOPR by the sign of the reward, where whitening moves that of the advantage")
        return found | {"surrogate": "topr"}
    if name == "cispo":
        if said.flag("cispo_use_unified_mask"):
            said.lacks("cispo_use_unified_mask", "a mask besides the bounds of the weight")
        bounds = {side: said.number(f"cispo_epsilon_{side.removeprefix('clip_')}") for side in ("clip_low", "clip_high")}
        return found | {"surrogate": "cispo", **bounds}
    if name == "kimi15":
        # -A log π + τ/2 (log ρ)²
        tau = said.number("kimi15_tau") or 0.0
        return found | {"surrogate": "rec", "clip_mode": "none", "token_weight": "none", "proximal_coef": tau / 2}
    said.lacks("pg_variant", f"the loss {name}: known here are vanilla, ppo, tis, topr, cispo, kimi15")
    return found


def optimizer(source: Source, start: str = "", ours: str = "policy.optimizer") -> dict[str, Any]:
    said = source.under((start or role(source)) + "training_args.")
    style = said.text("lr_scheduler_type") or "linear"
    if style not in ("constant", "constant_with_warmup", "linear", "cosine"):
        said.lacks("lr_scheduler_type", f"the schedule {style}")
        style = "constant"
    steps, share = said.number("warmup_steps"), said.number("warmup_ratio")
    found = {
        "lr": said.number("learning_rate"),
        "weight_decay": said.number("weight_decay"),
        "betas": [said.number("adam_beta1"), said.number("adam_beta2")],
        "clip_grad": source.number("max_grad_norm"),
        "schedule": style.removesuffix("_with_warmup"),
        "warmup_steps": steps or share or 0,
        "warmup_from": 0,
    }
    return {f"{ours}.{key}": value for key, value in found.items()}


def critic(source: Source) -> dict[str, Any]:
    if kind(source) != "rlvr" or not uses_critic(source):
        return {}
    return {
        "critic.path": shared.path(source, "reward_pretrain"),
        "critic.value_clip": source.number("value_clip"),
    } | optimizer(source, "critic.", "critic.optimizer")


def low_rank(source: Source) -> dict[str, Any]:
    """Adapters are there where lora_target is; its alpha is twice the rank when left out (model_args.py, __post_init__)."""
    said = f"{role(source)}model_args."
    if not source.texts(said + "lora_target"):
        return {}
    keys = {"rank": said + "lora_rank", "alpha": said + "lora_alpha", "targets": said + "lora_target"}
    found = adapters(source, "policy", path=said + "adapter_name_or_path", **keys)
    if found and found["policy.lora.alpha"] is None:
        found["policy.lora.alpha"] = 2.0 * found["policy.lora.rank"]
    refuse(source, said + "lora_dropout", "dropout of adapters", (0, 0.0))
    refuse(source, said + "additional_target", "weights that are trained beside adapters", ())
    return found
