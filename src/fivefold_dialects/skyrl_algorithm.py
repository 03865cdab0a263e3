"""Translate SkyRL's method: advantage, loss, KL, rollout correction, reward shaping and dynamic sampling."""

from __future__ import annotations

from typing import Any

from fivefold_dialects import shared
from fivefold_dialects.legacy import skyrl as legacy
from fivefold_dialects.skyrl_model import CHOICES, FIELDS
from fivefold_dialects.source import Source

_ALGORITHM = "trainer.algorithm."


def aggregate(source: Source) -> str | None:
    """Return our name of the mean of the loss; None if SkyRL's name is unknown.

    A mean over micro-batches is a mean over sequences if each micro-batch has one sequence. Here it applies to the whole
    loss, but SkyRL's KL never had it: with a KL the mean is token-mean.
    """
    said = source.under(_ALGORITHM)
    found: str | None = CHOICES["loss_reduction"].read(said)
    is_default = found == "token-mean"
    if found != "micro-batch-token-mean" and not (is_default and legacy.is_before_2026_04(source)):
        return found
    if source.count("trainer.micro_train_batch_size_per_gpu") == 1:
        return "seq-mean-token-mean"
    has_kl = said.flag("use_kl_loss") and said.number("kl_loss_coef")
    return "token-mean" if is_default and has_kl else "micro-batch-token-mean"


def constant_scale(source: Source) -> float:
    """Return the factor by which SkyRL's loss is smaller than our constant-length loss: divisor / longest response."""
    said = source.under(_ALGORITHM)
    if said.text("loss_reduction") != "seq_mean_token_sum_norm" or said.text("policy_loss_type") == "reinforce":
        return 1.0
    response = source.count("generator.sampling_params.max_generate_length")
    prompt = source.whole("generator.max_input_length") or source.count("trainer.max_prompt_length")
    return (said.whole("max_seq_len") or prompt + response) / response


def advantage(source: Source) -> dict[str, Any]:
    said = source.under(_ALGORITHM)
    if not (chosen := CHOICES["advantage_estimator"].read(said)):
        return {}
    found = {"whiten": False, "credit": "response", **chosen}
    if found["advantage"] == "group":
        found.setdefault("normalize", "group" if said.flag("grpo_norm_by_std") else "none")
        if source.count("generator.n_samples_per_prompt") == 1:
            found |= {"advantage": "reward", "normalize": "none"}
    return {f"algorithm.{key}": value for key, value in found.items()}


def loss(source: Source) -> dict[str, Any]:
    said, chosen = source.under(_ALGORITHM), CHOICES["policy_loss_type"]
    if (name := chosen.name(said)) is None or (mean := aggregate(source)) is None:
        return {}
    found = {"aggregate": mean, **chosen.read(said)}
    if name == "reinforce" and not legacy.is_before_2026_04(source):
        reason = "REINFORCE with advantages that loss_reduction has divided; --from skyrl@2026-03 has the older loss"
        said.lacks("policy_loss_type", reason)
    if name == "dppo":
        found["divergence"] = CHOICES["dppo.dppo_type"].read(said)
    if name == "cispo" and said.text("cispo.cispo_anchor") == "rollout":
        found["rollout_correction.old_logprobs_from"] = "engine"
    if said.flag("use_entropy_loss"):
        said.lacks("use_entropy_loss", "an entropy that is averaged over each micro-batch's tokens")
    return {f"algorithm.{key}": value for key, value in found.items()}


def kl(source: Source) -> dict[str, Any]:
    said = source.under(_ALGORITHM)
    in_loss, in_reward, coef = said.flag("use_kl_loss"), said.flag("use_kl_in_reward"), said.number("kl_loss_coef")
    if not coef or not (in_loss or in_reward):
        return {"algorithm.kl.coef": 0.0}
    if in_loss and in_reward:
        said.lacks("use_kl_in_reward", "a KL in the loss and another in the reward, which SkyRL refuses too: use one")
    found: dict[str, Any] = {"estimator": shared.estimator(said, "kl_estimator_type", "k3"), "coef": coef, "place": "reward"}
    result: dict[str, Any] = {}
    if not in_reward:
        # SkyRL divides the rest of the loss by a larger constant, so here the KL needs a larger weight.
        found |= {"coef": coef * constant_scale(source), "place": "loss"}
        if aggregate(source) in ("token-mean", "constant-length"):
            result["algorithm.penalty_aggregate"] = "seq-mean-token-mean"
    elif said.text("kl_ctrl.type") == "adaptive":
        found |= {"target": said.number("kl_ctrl.kl_target"), "horizon": said.whole("kl_ctrl.horizon")}
    return result | {f"algorithm.kl.{key}": value for key, value in found.items()}


def correction(source: Source) -> dict[str, Any]:
    said, found = source.under(_ALGORITHM), dict[str, Any]()
    off, bound = legacy.correction(said) or (said.under("off_policy_correction."), "clip")
    if said.flag("use_tis"):
        found = {"name": "tis", "high": said.number("tis_imp_ratio_cap")}
    else:
        if (level := off.text("tis_ratio_type")) is not None:
            found = {"weight": level, "high": off.number(f"{level}_tis_ratio_{bound}_high"), "outside": "truncate"}
        metric = off.text("sequence_mask_metric")
        short, name = {"geometric": ("geo", "geometric"), "product": ("product", "sequence")}.get(metric or "", ("", ""))
        if short:
            low, high = (off.number(f"{short}_mask_{end}") for end in ("low", "high"))
            found |= {"reject": name, "reject_low": low, "reject_high": high}
        elif metric is not None:
            off.lacks("sequence_mask_metric", f"the mask {metric}")
    return {f"algorithm.rollout_correction.{key}": value for key, value in found.items()}


def shaping(source: Source) -> dict[str, Any]:
    """Return our keys of DAPO's penalty for long responses, which only the programs of this recipe apply."""
    said, nested = source.under(_ALGORITHM), source.has(_ALGORITHM + "overlong_buffer.len")
    start, program = "overlong_buffer." if nested else "overlong_buffer_", source.text("-m") or ""
    if not nested and not program.endswith(("main_dapo", "main_tis_dapo", "main_dapo_fully_async", "main_dapo_flashrl")):
        return {"algorithm.overlong_buffer": 0}
    return FIELDS["overlong"](said.under(start))


def dynamic_sampling(source: Source) -> dict[str, Any]:
    said = source.under(_ALGORITHM + "dynamic_sampling.")
    if (kind := said.text("type")) is None:
        return {"algorithm.dynamic_sampling": False}
    if kind != "filter":
        said.lacks("type", f"dynamic sampling by {kind}: known here is filter")
    rounds = said.whole("max_sample_batches") or -1
    found: dict[str, Any] = {"algorithm.dynamic_sampling": True, "algorithm.sampling_rounds": rounds if rounds > 0 else 1000}
    if shaping(source)["algorithm.overlong_buffer"]:
        found["algorithm.dynamic_sampling_by"] = "shaped_reward"
    return found


METHOD = (advantage, loss, kl, correction, shaping, dynamic_sampling)
