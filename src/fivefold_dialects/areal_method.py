"""Translate AReaL's advantages, losses and optimizers to our keys."""

from __future__ import annotations

from typing import Any

from fivefold_dialects import shared
from fivefold_dialects.areal_placement import is_sampled, trainer
from fivefold_dialects.legacy import areal_spellings as older
from fivefold_dialects.source import Source
from fivefold_dialects.table import fields

FIELDS = fields("areal")


def advantage(source: Source) -> dict[str, Any]:
    if source.text("train_dataset.type") == "rw":
        source.lacks("train_dataset.type", "the training of reward models")
        return {}
    if not is_sampled(source):
        return {}
    actor, has_critic = source.under("actor."), bool(source.keys("critic."))
    ours: dict[str, Any] = {"name": "grpo", "advantage": "reward", "normalize": "none", "whiten": False}
    if source.keys("actor.reward_norm."):
        norm = actor.under("reward_norm.")
        mean, std = _level(norm, "mean_level"), _level(norm, "std_level")
        if mean != "group":
            norm.lacks("mean_level", "a mean of rewards that is not over the group")
        ours |= {"advantage": "group", "normalize": std or "none"}
        if norm.flag("mean_leave1out"):
            # A single response has no others to compare with: AReaL takes a mean of 0 (data.py:1143).
            ours["advantage"] = "leave_one_out" if source.count("gconfig.n_samples") > 1 else "reward"
            if std is not None:
                norm.lacks("std_level", "the deviation from the mean of the others")
    if has_critic:
        ours |= FIELDS["gae"](actor)
    else:
        ours |= credit(source)
    ours |= normalized(source, ours)
    shift, scale = actor.number("reward_bias") or 0.0, actor.number("reward_scaling") or 1.0
    if scale < 0:
        actor.lacks("reward_scaling", "rewards with their sign changed")
    elif shift or scale != 1.0:
        ours |= {"reward_shift": shift, "reward_scale": scale, "reward_clip": actor.number("reward_clip")}
    ours |= FIELDS["dynamic_sampling"](actor) | FIELDS["overlong"](actor)
    return {f"algorithm.{key}": value for key, value in ours.items()}


def _level(norm: Source, key: str) -> str | None:
    """Return the level of a normalization: `batch` if the key is left out (NormConfig), None if it is null."""
    return norm.text(key) if norm.has(key) else "batch"


def normalized(source: Source, chosen: dict[str, Any]) -> dict[str, Any]:
    """Return our keys of actor.adv_norm, which normalizes advantages by mean and deviation over tokens."""
    if not source.keys("actor.adv_norm."):
        return {}
    norm = source.under("actor.adv_norm.")
    mean, std = _level(norm, "mean_level"), _level(norm, "std_level")
    if norm.has("mean_leave1out") and norm.flag("mean_leave1out"):
        norm.lacks("mean_leave1out", "a mean over the tokens of the group's other responses")
    elif (mean, std) == ("batch", "batch"):
        return {"whiten": True}
    elif (mean, std) == ("group", "group"):
        return {"whiten": True, "whiten_by": "group"}
    elif (mean, std) == ("group", None) and chosen["advantage"] == "reward" and chosen["credit"] == "response":
        # The mean is over tokens, and each token has its response's reward: so responses are weighted by their lengths.
        return {"advantage": "length_weighted"}
    elif (mean, std) == ("group", "batch"):
        norm.lacks("mean_level", "advantages with the mean of each group over the deviation of the batch")
    elif (mean, std) != (None, None):
        norm.lacks("std_level", f"advantages less the mean of {mean} over the deviation of {std}")
    return {}


def credit(source: Source) -> dict[str, Any]:
    """Return our keys of credit without a critic: the advantage is the return, with KL penalties, discounted by γλ."""
    actor = source.under("actor.")
    decay = (actor.number("discount") or 0.0) * (actor.number("gae_lambda") or 0.0)
    if decay == 1.0 and not actor.number("kl_ctl"):
        return {"credit": "response"}
    return {"credit": "discounted", "gamma": decay}


def pairs(source: Source) -> dict[str, Any]:
    """Return our keys of DPO's loss, a mean over pairs (dpo_engine.py:194)."""
    if source.keys("ref.path") and source.path("ref.path") != source.path("actor.path"):
        source.lacks("ref.path", "a reference other than the initial policy")
    return {"algorithm.beta": source.number(source.first("actor.beta", "beta"), 0.1)}


def loss(source: Source) -> dict[str, Any]:
    actor = source.under("actor.")
    ours = FIELDS["loss"](actor)
    ours["clip_high"] = actor.number("eps_clip_higher", ours["clip_low"])
    ours |= FIELDS["cispo"](actor) | FIELDS["sapo"](actor)
    return {f"algorithm.{key}": value for key, value in ours.items()}


def kl(source: Source) -> dict[str, Any]:
    if not is_sampled(source) or source.text("train_dataset.type") == "rw":
        return {}
    ours: dict[str, Any] = {"coef": source.number("actor.kl_ctl") or 0.0}
    if ours["coef"] and not source.keys("ref."):
        reason = "a KL without a reference: AReaL then subtracts the log-prob itself from the reward (actor.py:192)"
        source.lacks("actor.kl_ctl", f"{reason}; set it to 0 or configure ref")
        return {}
    if ours["coef"]:
        name = source.text("actor.kl_estimator") or "k1"
        ours |= {"place": "reward", "estimator": shared.ESTIMATORS.get(name, name)}
    return {f"algorithm.kl.{key}": value for key, value in ours.items()}


def correction(source: Source) -> dict[str, Any]:
    actor = source.under("actor.")
    ours: dict[str, Any] = {}
    if not actor.flag("use_decoupled_loss"):
        return {} if actor.flag("recompute_logprob") else {"algorithm.rollout_correction.old_logprobs_from": "engine"}
    if (method := actor.text("prox_logp_method")) == "metrics":
        actor.fixed("prox_logp_method", "log-probs are computed; their estimates are only metrics (actor.py:745)")
    elif method == "loglinear":
        ours["old_logprobs_from"] = "loglinear"
    elif method == "reuse_train_logp" and actor.whole("ppo_n_minibatches") == 1:
        actor.fixed("prox_logp_method", "with one update, the log-probs in the update equal those before it")
    elif method not in (None, "recompute"):
        actor.lacks("prox_logp_method", f"log-probs that are estimated ({method}) instead of computed")
    ours |= rejection(actor) if source.keys("actor.rejection_sampling.") else older.behaviour(source)
    if (bound := actor.number("m2_threshold")) is not None:
        ours["reject_divergence"] = {"second_moment": bound}
    return {f"algorithm.rollout_correction.{key}": value for key, value in ours.items()}


def rejection(actor: Source) -> dict[str, Any]:
    """Return our keys of actor.rejection_sampling, which AReaL has since 2026-04-20 (functional.py:518)."""
    rule = actor.under("rejection_sampling.")
    level, action = rule.text("level") or "token", rule.text("action") or "mask"
    if level == "sequence" and (rule.text("agg") or "mean") != "mean":
        rule.lacks("agg", "a mean over a sequence that is not the geometric one")
    bounds = {"low": rule.number("lower"), "high": rule.number("upper", 5.0)}
    return {"weight": older.LEVELS[level], **bounds, "outside": older.OUTSIDE[action]}


def optimizer(source: Source, role: str = "", ours: str = "policy.optimizer") -> dict[str, Any]:
    optim = source.under(f"{role or trainer(source)}.optimizer.")
    style = optim.one_of("lr_scheduler_type", ("constant", "linear", "cosine"), "schedule", "constant")
    if optim.text("type") == "adam_bf16":
        optim.lacks("type", "moments in bfloat16: float32 here, which needs more memory", changes_result=False)
    elif optim.text("type") not in (None, "adam", "adamw"):
        optim.lacks("type", "another optimizer than AdamW")
    exact = optim.number("warmup_steps")
    values = FIELDS["optimizer"](optim) | {
        "schedule": style,
        "warmup_steps": optim.number("warmup_steps_proportion") if exact is None else exact,
    }
    # total_train_steps ends a run and leaves the schedule as long as the epochs (rl_trainer.py:553, fsdp_engine.py:1150).
    values["schedule_over"] = None if source.whole("total_train_steps") is None else "data"
    if style != "constant":
        values["min_lr"] = (optim.number("min_lr_ratio") or 0.0) * (values["lr"] or 0.0)
    return {f"{ours}.{key}": value for key, value in values.items()}


def critic(source: Source) -> dict[str, Any]:
    if trainer(source) == "model" or not source.keys("critic."):
        return {}
    if (value := source.whole("critic.ppo_n_minibatches")) is not None and value != source.whole("actor.ppo_n_minibatches"):
        source.lacks("critic.ppo_n_minibatches", "the critic is trained in the policy's updates: set the same number")
    learns = optimizer(source, "actor" if source.has("critic.optimizer") else "critic", "critic.optimizer")
    return FIELDS["critic"](source.under("critic.")) | low_rank(source, "critic", "critic") | learns


def low_rank(source: Source, role: str = "", ours: str = "policy") -> dict[str, Any]:
    return shared.adapters(source.under(f"{role or trainer(source)}."), ours, "areal")
