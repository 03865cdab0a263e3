"""SkyRL's method: advantage, loss, KL, rollout correction, shaping of rewards and dynamic sampling."""

from __future__ import annotations

from typing import Any

from fivefold.config.dialects import shared
from fivefold.config.dialects.source import Source

_ALGORITHM = "trainer.algorithm."

ADVANTAGES: dict[str, dict[str, Any]] = {
    "grpo": {"name": "grpo", "advantage": "group"},
    "maxrl": {"name": "maxrl", "advantage": "group", "normalize": "mean"},
    "gae": shared.PPO,
    "rloo": shared.RLOO,
    "reinforce++": shared.REINFORCE_PLUS_PLUS,
    # examples/.../main_custom_adv_est.py: less the mean of the whole batch.
    "simple_baseline": {"name": "grpo", "advantage": "step_mean", "normalize": "none"},
}
LOSSES = {
    "regular": {"surrogate": "ppo_clip"},
    "dual_clip": {"surrogate": "ppo_clip"},
    "sapo": {"surrogate": "sapo"},
    "gspo": {"surrogate": "ppo_clip", "importance_sampling_level": "sequence-token"},
    "cispo": {"surrogate": "cispo"},
    "clip_cov": {"surrogate": "clip_cov"},
    "kl_cov": {"surrogate": "kl_cov"},
    "rollout_is": {"surrogate": "rec", "clip_mode": "two_sided", "token_weight": "ratio"},
    "dppo": {"surrogate": "dppo"},
    "reinforce": {"surrogate": "log_likelihood", "aggregate": "constant-length"},
}
REDUCTIONS = {
    "token_mean": "token-mean",
    "sequence_mean": "seq-mean-token-mean",
    "seq_mean_token_sum_norm": "constant-length",
    "token_mean_legacy": "micro-batch-token-mean",
}


OLDER_CORRECTION = _ALGORITHM + "rollout_correction."
"""off_policy_correction, as it was called in January 2026."""
TOKEN_MEAN = "skyrl.token_mean"
"""What the release takes token_mean for; no key of SkyRL's, so nobody can set it."""


def is_before_2026_04(source: Source) -> bool:
    """Losses are averaged over micro-batches, as until #1296 (2026-03-31)."""
    return bool(source.defaults[TOKEN_MEAN] == "micro-batch-token-mean")


def has_kl_loss(source: Source) -> bool:
    said = source.under(_ALGORITHM)
    return said.flag("use_kl_loss") and bool(said.number("kl_loss_coef"))


def aggregate(source: Source, mean: str) -> str:
    """A mean by its name. That of micro-batches is one of sequences where each has one; it is for all of the loss or none
    here, and the KL's never was one: beside a KL it is token-mean."""
    found = REDUCTIONS["token_mean_legacy" if mean == "token_mean" and is_before_2026_04(source) else mean]
    if found != "micro-batch-token-mean":
        return found
    if source.count("trainer.micro_train_batch_size_per_gpu") == 1:
        return "seq-mean-token-mean"
    return "token-mean" if mean == "token_mean" and has_kl_loss(source) else found


def constant_scale(source: Source) -> float:
    """How much smaller SkyRL's loss is than that of constant-length: what it is divided by over the longest response."""
    said = source.under(_ALGORITHM)
    if said.text("loss_reduction") != "seq_mean_token_sum_norm" or said.text("policy_loss_type") == "reinforce":
        return 1.0
    response = source.count("generator.sampling_params.max_generate_length")
    prompt = source.whole("generator.max_input_length") or source.count("trainer.max_prompt_length")
    return (said.whole("max_seq_len") or prompt + response) / response


def is_dapo(source: Source) -> bool:
    return (source.text("-m") or "").endswith(("main_dapo", "main_tis_dapo", "main_dapo_fully_async", "main_dapo_flashrl"))


def advantage(source: Source) -> dict[str, Any]:
    said = source.under(_ALGORITHM)
    name = said.text("advantage_estimator") or "grpo"
    if name not in ADVANTAGES:
        said.lacks("advantage_estimator", f"the advantage {name}: known here are {', '.join(ADVANTAGES)}")
        return {}
    found = {"whiten": False, "credit": "response", **ADVANTAGES[name]}
    if found["advantage"] == "group":
        found.setdefault("normalize", "group" if said.flag("grpo_norm_by_std") else "none")
        if source.count("generator.n_samples_per_prompt") == 1:
            found |= {"advantage": "reward", "normalize": "none"}
    if found["credit"] != "response":
        found["gamma"] = said.number("gamma")
    if found["credit"] == "gae":
        found["lam"] = said.number("lambd")
    return {f"algorithm.{key}": value for key, value in found.items()}


def loss(source: Source) -> dict[str, Any]:
    said = source.under(_ALGORITHM)
    name, mean = said.text("policy_loss_type") or "regular", said.text("loss_reduction") or "token_mean"
    if name not in LOSSES:
        said.lacks("policy_loss_type", f"the loss {name}: known here are {', '.join(LOSSES)}")
        return {}
    if mean not in REDUCTIONS:
        said.lacks("loss_reduction", f"the mean {mean}: known here are {', '.join(REDUCTIONS)}")
        return {}
    found: dict[str, Any] = {"aggregate": aggregate(source, mean), **LOSSES[name]}
    if name == "reinforce" and not is_before_2026_04(source):
        said.lacks(
            "policy_loss_type", "REINFORCE whose advantages were divided by loss_reduction before: @2026-03 has it whole"
        )
    if found["surrogate"] in ("ppo_clip", "clip_cov", "rec"):
        found |= {"clip_low": said.number("eps_clip_low"), "clip_high": said.number("eps_clip_high")}
    if name == "dual_clip":
        found["dual_clip"] = said.number("clip_ratio_c")
    if name == "sapo":
        found |= {"temperature_positive": said.number("sapo.tau_pos"), "temperature_negative": said.number("sapo.tau_neg")}
    if name == "cispo":
        found |= {"clip_low": said.number("cispo.cispo_eps_clip_low"), "clip_high": said.number("cispo.cispo_eps_clip_high")}
        if said.text("cispo.cispo_anchor") == "rollout":
            found["rollout_correction.old_logprobs_from"] = "engine"
    if name == "dppo":
        bounds = said.under("dppo.")
        kind = {"binary_tv": "tv", "binary_kl": "kl"}.get(bounds.text("dppo_type") or "")
        if kind is None:
            bounds.lacks("dppo_type", f"the divergence {bounds.text('dppo_type')}")
        found |= {"divergence": kind, "clip_low": bounds.number("delta_low"), "clip_high": bounds.number("delta_high")}
    if name in ("rollout_is", "dppo"):
        found["rollout_correction.old_logprobs_from"] = "engine"
    if name == "clip_cov":
        cov = said.under("clip_cov.")
        found |= {
            "cov_fraction": cov.number("clip_ratio"),
            "cov_low": cov.number("clip_cov_lb"),
            "cov_high": cov.number("clip_cov_ub"),
        }
    if name == "kl_cov":
        found |= {"cov_fraction": said.number("kl_cov.kl_cov_frac"), "cov_kl_coef": said.number("kl_cov.ppo_kl_coef")}
    if said.flag("use_entropy_loss"):
        said.lacks("use_entropy_loss", "an entropy that is averaged over the tokens of each micro-batch")
    return {f"algorithm.{key}": value for key, value in found.items()}


def kl(source: Source) -> dict[str, Any]:
    said = source.under(_ALGORITHM)
    in_loss, in_reward, coef = said.flag("use_kl_loss"), said.flag("use_kl_in_reward"), said.number("kl_loss_coef")
    if not coef or not (in_loss or in_reward):
        return {"algorithm.kl.coef": 0.0}
    if in_loss and in_reward:
        said.lacks("use_kl_in_reward", "a KL in the loss and another in the reward, which SkyRL refuses too: say one")
    name = said.text("kl_estimator_type") or "k3"
    if name not in shared.ESTIMATORS:
        said.lacks("kl_estimator_type", f"the estimator {name}")
        return {}
    # Where the rest of the loss is divided by another constant, the KL weighs as much more.
    scale = 1.0 if in_reward else constant_scale(source)
    place = "reward" if in_reward else "loss"
    found: dict[str, Any] = {"estimator": shared.ESTIMATORS[name], "coef": coef * scale, "place": place}
    if in_reward and said.text("kl_ctrl.type") == "adaptive":
        found |= {"target": said.number("kl_ctrl.kl_target"), "horizon": said.whole("kl_ctrl.horizon")}
    result = {f"algorithm.kl.{key}": value for key, value in found.items()}
    mean = said.text("loss_reduction") or "token_mean"
    if not in_reward and mean in REDUCTIONS and aggregate(source, mean) in ("token-mean", "constant-length"):
        result["algorithm.penalty_aggregate"] = "seq-mean-token-mean"
    return result


def correction(source: Source) -> dict[str, Any]:
    said = source.under(_ALGORITHM)
    if said.flag("use_tis"):
        return {
            "algorithm.rollout_correction.name": "tis",
            "algorithm.rollout_correction.high": said.number("tis_imp_ratio_cap"),
        }
    is_older = bool(source.keys(OLDER_CORRECTION))
    off = source.under(OLDER_CORRECTION if is_older else _ALGORITHM + "off_policy_correction.")
    bound = "cap" if is_older else "clip"
    found: dict[str, Any] = {}
    if (level := off.text("tis_ratio_type")) is not None:
        found |= {"weight": level, "high": off.number(f"{level}_tis_ratio_{bound}_high"), "outside": "truncate"}
    if (metric := off.text("sequence_mask_metric")) is not None:
        short, name = {"geometric": ("geo", "geometric"), "product": ("product", "sequence")}.get(metric, ("", ""))
        if not short:
            off.lacks("sequence_mask_metric", f"the mask {metric}")
        else:
            found |= {
                "reject": name,
                "reject_low": off.number(f"{short}_mask_low"),
                "reject_high": off.number(f"{short}_mask_high"),
            }
    return {f"algorithm.rollout_correction.{key}": value for key, value in found.items()}


def shaping(source: Source) -> dict[str, Any]:
    """DAPO's penalty, in the recipe whose program applies it; responses that were cut off."""
    said, nested = source.under(_ALGORITHM), source.has(_ALGORITHM + "overlong_buffer.len")
    found: dict[str, Any] = {
        "algorithm.overlong_filter": source.flag("generator.apply_overlong_filtering"),
        "algorithm.overlong_buffer": 0,
    }
    start = "overlong_buffer." if nested else "overlong_buffer_"
    if is_dapo(source) or nested:
        found |= {
            "algorithm.overlong_buffer": said.whole(start + "len"),
            "algorithm.overlong_penalty": said.number(start + "penalty_factor"),
        }
    return found


def dynamic_sampling(source: Source) -> dict[str, Any]:
    said = source.under(_ALGORITHM + "dynamic_sampling.")
    kind = said.text("type")
    if kind not in (None, "filter"):
        said.lacks("type", f"dynamic sampling by {kind}: known here is filter")
    if kind is None:
        return {"algorithm.dynamic_sampling": False}
    rounds = said.whole("max_sample_batches") or -1
    found: dict[str, Any] = {"algorithm.dynamic_sampling": True, "algorithm.sampling_rounds": rounds if rounds > 0 else 1000}
    if shaping(source)["algorithm.overlong_buffer"]:
        found["algorithm.dynamic_sampling_by"] = "shaped_reward"
    return found
