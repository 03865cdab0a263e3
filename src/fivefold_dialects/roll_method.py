"""Translate ROLL's advantages, losses and optimizers to our keys."""

from __future__ import annotations

from typing import Any

from fivefold_dialects import shared
from fivefold_dialects.legacy import roll as legacy
from fivefold_dialects.roll_placement import TRAIN, kind, role, samples_a_group, samples_an_update, uses_critic
from fivefold_dialects.source import Source
from fivefold_dialects.table import choices, fields

CHOICES, FIELDS = choices("roll"), fields("roll")


def method(source: Source) -> dict[str, Any]:
    if kind(source) == "sft":
        return FIELDS["sft"](source)
    if kind(source) == "dpo":
        return FIELDS["dpo"](source)
    name = source.text("adv_estimator") or "gae"
    ours = FIELDS["advantage"](source)
    if source.flag("difficulty_mask") and samples_a_group(source) > 1:
        ours |= FIELDS["difficulty"](source)
    masked = [key for key in ("max_len_mask", "difficulty_mask") if source.flag(key)]
    if masked and source.number("entropy_loss_coef"):
        source.lacks(masked[0], "responses that are left out of the loss but not of the entropy (actor_worker.py:128)")
    mean, deviation = source.text("norm_mean_type"), source.text("norm_std_type")
    if name == "grpo":
        mean = deviation = "group"
    else:
        mean, deviation = legacy.normalization(source, mean, deviation)
    if mean == "group":
        ours |= {"advantage": "group", "normalize": deviation or "none"}
    elif mean is None and deviation is None:
        ours |= {"advantage": "reward", "normalize": "none"}
    elif mean == "batch" and deviation in (None, "batch"):
        if len({key.split(".")[1] for key in source.keys("rewards.")}) > 1:
            source.lacks("norm_mean_type", "rewards less the mean of the batch, which ROLL computes per domain")
        ours |= {"advantage": "step_mean", "normalize": deviation or "none"}
    else:
        reason = "the mean of the whole run, a deviation without a mean, or batch and group, at which ROLL itself ends"
        source.lacks("norm_mean_type", reason)
    ours |= CHOICES["adv_estimator"].read(source)
    if name == "grpo" and source.number("gamma") == 1 and not token_kl(source):
        # With γ = 1 and no KL on tokens the return of every token is the response's reward.
        ours |= {"credit": "response", "gamma": None}
    bound = source.number("reward_clip")
    if bound and mean is None:
        ours["reward_clip"] = bound
    elif bound and bound >= 10:
        reason = "acts after the normalization in a group, where no advantage of fewer than 100 samples is above 10"
        source.fixed("reward_clip", reason)
    elif bound:
        source.lacks("reward_clip", "a bound on normalized rewards")
    return {f"algorithm.{key}": value for key, value in ours.items()}


def token_kl(source: Source) -> float:
    """Return the coefficient of the KL that is subtracted from each token's reward; 0 if there is none."""
    return (source.number("init_kl_coef") or 0.0) if source.flag("add_token_level_kl") else 0.0


def kl(source: Source) -> dict[str, Any]:
    """Return our keys of the KL in the loss, and in tokens' rewards after their normalization (compute_token_reward)."""
    coef = (source.number("kl_loss_coef") or 0.0) if source.flag("use_kl_loss") else 0.0
    of_tokens, target = token_kl(source), source.number("target_kl")
    reward: dict[str, Any] = {}
    if of_tokens:
        reward = {"estimator": shared.estimator(source, "kl_penalty", "kl"), "coef": of_tokens}
        reward |= {} if target is None else {"target": target, "horizon": source.whole("kl_horizon")}
    return shared.penalties(source, {"estimator": "k3", "coef": coef} if coef else {}, reward, "target_kl")


def loss(source: Source) -> dict[str, Any]:
    ends = ("_low", "_high") if source.flag("use_pg_clip_range") else ("", "")
    low, high = (source.number(f"pg_clip{end}") for end in ends)
    ours: dict[str, Any] = {
        **FIELDS["loss"](source),
        "clip_low": low,
        "clip_high": high,
        "importance_sampling_level": CHOICES["importance_sampling"].read(source),
        "aggregate": CHOICES["loss_agg_mode"].read(source),
        "dual_clip": 1 + 2 * (source.number("pg_clip") or 0.0) if source.flag("dual_clip_loss") else None,
    }
    ours |= variant(source)
    if ours["dual_clip"] is not None and ours["dual_clip"] <= 1 + (high or 0.0):
        source.lacks("dual_clip_loss", "a bound below that of the ratio")
    return {f"algorithm.{key}": value for key, value in ours.items()} | kl(source)


_WORKERS = ("roll.pipeline.rlvr.actor_worker.ActorWorker", "roll.pipeline.base_worker.ActorWorker")
"""Worker classes that compute the loss which `loss` translates."""
_PG_WORKER = "roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker"


def variant(source: Source) -> dict[str, Any]:
    """Return our keys of the loss of the worker ActorPGWorker (actor_pg_worker.py); empty for other workers."""
    section = source.under(TRAIN)
    worker = section.text("worker_cls") or _WORKERS[0]
    if worker not in (*_WORKERS, _PG_WORKER):
        section.lacks("worker_cls", "your own worker class: no key describes its loss")
    if worker != _PG_WORKER:
        return {}
    chosen = CHOICES["actor_train.pg_variant"]
    name, ours = chosen.name(source), {"importance_sampling_level": "token", **chosen.read(source)}
    if name != "ppo":
        ours = {"clip_low": None, "clip_high": None, "dual_clip": None, **ours}
    if name == "tis":
        low, high = section.number("tis_lower_bound") or 0.0, section.number("tis_upper_bound") or 0.0
        if low > 1 or high < 1:
            section.lacks("tis_upper_bound", "bounds of the ratio that do not contain 1")
        ours |= {"clip_low": 1 - low, "clip_high": high - 1}
    if name == "kimi15":
        # -A log π + τ/2 (log ρ)²
        ours["proximal_coef"] = (section.number("kimi15_tau") or 0.0) / 2
    return ours


def optimizer(source: Source, start: str = "", ours: str = "policy.optimizer") -> dict[str, Any]:
    training = source.under((start or role(source)) + "training_args.")
    styles = ("constant", "constant_with_warmup", "linear", "cosine")
    style = training.one_of("lr_scheduler_type", styles, "schedule", "linear")
    steps, share = training.number("warmup_steps"), training.number("warmup_ratio")
    values = {"schedule": style.removesuffix("_with_warmup"), "warmup_steps": steps or share or 0}
    values |= FIELDS["optimizer"](training) | FIELDS["clip"](source)
    return {f"{ours}.{key}": value for key, value in values.items()}


def critic(source: Source) -> dict[str, Any]:
    if not uses_critic(source):
        return shared.without_critic(source, "critic_warmup", 0)
    own_size, size = samples_an_update(source, "critic."), samples_an_update(source, role(source))
    if source.keys("critic.") and own_size != size:
        reason = f"updates of {own_size} samples: the critic is trained in the policy's updates, of {size}"
        source.lacks("critic.training_args.gradient_accumulation_steps", reason)
    if (source.whole("ppo_epochs") or 1) > 1:
        source.lacks("ppo_epochs", "the critic of ROLL learns once from each step: here as often as the policy")
    return FIELDS["critic"](source) | optimizer(source, "critic.", "critic.optimizer")


def low_rank(source: Source) -> dict[str, Any]:
    """Return our keys of LoRA if lora_target is set; alpha defaults to twice the rank (model_args.py, __post_init__)."""
    ours = shared.adapters(source.under(f"{role(source)}model_args."), "policy", "roll")
    if ours and ours["policy.lora.alpha"] is None:
        ours["policy.lora.alpha"] = 2.0 * ours["policy.lora.rank"]
    return ours
