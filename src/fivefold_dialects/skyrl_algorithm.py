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
    loss, but SkyRL's KL never had it: with a KL the mean is token-mean."""
    algorithm = source.under(_ALGORITHM)
    mean: str | None = CHOICES["loss_reduction"].read(algorithm)
    is_default = mean == "token-mean"
    if mean != "micro-batch-token-mean" and not (is_default and legacy.is_before_2026_04(source)):
        return mean
    if source.count("trainer.micro_train_batch_size_per_gpu") == 1:
        return "seq-mean-token-mean"
    has_kl = algorithm.flag("use_kl_loss") and algorithm.number("kl_loss_coef")
    return "token-mean" if is_default and has_kl else "micro-batch-token-mean"


def constant_scale(source: Source) -> float:
    """Return the factor by which SkyRL's loss is smaller than our constant-length loss: divisor / longest response."""
    algorithm = source.under(_ALGORITHM)
    if algorithm.text("loss_reduction") != "seq_mean_token_sum_norm" or algorithm.text("policy_loss_type") == "reinforce":
        return 1.0
    response = source.count("generator.sampling_params.max_generate_length")
    prompt = source.whole("generator.max_input_length") or source.count("trainer.max_prompt_length")
    return (algorithm.whole("max_seq_len") or prompt + response) / response


def advantage(source: Source) -> dict[str, Any]:
    algorithm = source.under(_ALGORITHM)
    if not (chosen := CHOICES["advantage_estimator"].read(algorithm)):
        return {}
    ours = {"whiten": False, "credit": "response", **chosen}
    if ours["advantage"] == "group":
        ours.setdefault("normalize", "group" if algorithm.flag("grpo_norm_by_std") else "none")
        if source.count("generator.n_samples_per_prompt") == 1:
            ours |= {"advantage": "reward", "normalize": "none"}
    return {f"algorithm.{key}": value for key, value in ours.items()}


def loss(source: Source) -> dict[str, Any]:
    algorithm, chosen = source.under(_ALGORITHM), CHOICES["policy_loss_type"]
    if (name := chosen.name(algorithm)) is None or (mean := aggregate(source)) is None:
        return {}
    ours = {"aggregate": mean, **chosen.read(algorithm)}
    if name == "reinforce" and not legacy.is_before_2026_04(source):
        reason = "REINFORCE with advantages that loss_reduction has divided; --from skyrl@2026-03 has the older loss"
        algorithm.lacks("policy_loss_type", reason)
    if name == "dppo":
        ours["divergence"] = CHOICES["dppo.dppo_type"].read(algorithm)
    if name == "cispo" and algorithm.text("cispo.cispo_anchor") == "rollout":
        ours["rollout_correction.old_logprobs_from"] = "engine"
    return {f"algorithm.{key}": value for key, value in ours.items()}


def kl(source: Source) -> dict[str, Any]:
    algorithm = source.under(_ALGORITHM)
    in_loss, in_reward = algorithm.flag("use_kl_loss"), algorithm.flag("use_kl_in_reward")
    coef = algorithm.number("kl_loss_coef")
    if not coef or not (in_loss or in_reward):
        return {"algorithm.kl.coef": 0.0}
    if in_loss and in_reward:
        algorithm.lacks("use_kl_in_reward", "a KL in the loss and another in the reward, which SkyRL refuses too: use one")
    estimator = shared.estimator(algorithm, "kl_estimator_type", "k3")
    ours: dict[str, Any] = {"estimator": estimator, "coef": coef, "place": "reward"}
    result: dict[str, Any] = {}
    if not in_reward:
        # SkyRL divides the rest of the loss by a larger constant, so here the KL needs a larger weight.
        ours |= {"coef": coef * constant_scale(source), "place": "loss"}
        if aggregate(source) in ("token-mean", "constant-length"):
            result["algorithm.penalty_aggregate"] = "seq-mean-token-mean"
    elif algorithm.text("kl_ctrl.type") == "adaptive":
        ours |= {"target": algorithm.number("kl_ctrl.kl_target"), "horizon": algorithm.whole("kl_ctrl.horizon")}
    return result | {f"algorithm.kl.{key}": value for key, value in ours.items()}


def correction(source: Source) -> dict[str, Any]:
    algorithm, ours = source.under(_ALGORITHM), dict[str, Any]()
    off, bound = legacy.correction(algorithm) or (algorithm.under("off_policy_correction."), "clip")
    if algorithm.flag("use_tis"):
        ours = {"name": "tis", "high": algorithm.number("tis_imp_ratio_cap")}
    else:
        if (level := off.text("tis_ratio_type")) is not None:
            ours = {"weight": level, "high": off.number(f"{level}_tis_ratio_{bound}_high"), "outside": "truncate"}
        metric = off.text("sequence_mask_metric")
        short, name = {"geometric": ("geo", "geometric"), "product": ("product", "sequence")}.get(metric or "", ("", ""))
        if short:
            low, high = (off.number(f"{short}_mask_{end}") for end in ("low", "high"))
            ours |= {"reject": name, "reject_low": low, "reject_high": high}
        elif metric is not None:
            off.lacks("sequence_mask_metric", f"the mask {metric}")
    return {f"algorithm.rollout_correction.{key}": value for key, value in ours.items()}


def shaping(source: Source) -> dict[str, Any]:
    """Return our keys of DAPO's penalty for long responses, which only the programs of this recipe apply."""
    algorithm, nested = source.under(_ALGORITHM), source.has(_ALGORITHM + "overlong_buffer.len")
    start, program = "overlong_buffer." if nested else "overlong_buffer_", source.text("-m") or ""
    if not nested and not program.endswith(("main_dapo", "main_tis_dapo", "main_dapo_fully_async", "main_dapo_flashrl")):
        return {"algorithm.overlong_buffer": 0}
    return FIELDS["overlong"](algorithm.under(start))


def dynamic_sampling(source: Source) -> dict[str, Any]:
    sampling = source.under(_ALGORITHM + "dynamic_sampling.")
    if (kind := sampling.text("type")) is None:
        return {"algorithm.dynamic_sampling": False}
    if kind != "filter":
        sampling.lacks("type", f"dynamic sampling by {kind}: known here is filter")
    rounds = sampling.whole("max_sample_batches") or -1
    ours: dict[str, Any] = {"algorithm.dynamic_sampling": True, "algorithm.sampling_rounds": rounds if rounds > 0 else 1000}
    if shaping(source)["algorithm.overlong_buffer"]:
        ours["algorithm.dynamic_sampling_by"] = "shaped_reward"
    return ours


METHOD = (advantage, loss, kl, correction, shaping, dynamic_sampling)
