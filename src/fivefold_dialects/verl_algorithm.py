"""Translate verl's method: advantage, loss, KL, rollout correction, reward shaping and dynamic sampling."""

from __future__ import annotations

from typing import Any

from fivefold_dialects import shared
from fivefold_dialects.legacy import verl as legacy
from fivefold_dialects.legacy import verl_recipes as recipes
from fivefold_dialects.source import Source, UnreadableError, finite
from fivefold_dialects.table import choices, fields, load
from fivefold_dialects.verl_async import bypasses, is_v1

_A, _R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."

CHOICES, FIELDS = choices("verl"), fields("verl")
_ESTIMATOR, _LOSS, _MEAN = "algorithm.adv_estimator", _A + "policy_loss.loss_mode", _A + "loss_agg_mode"


def estimator(source: Source) -> str:
    """Return the name of the advantage estimator; it is `sppo` for the recipe of SPPO."""
    # `settings` first: so `-m` is not recorded as a source for other programs.
    if source.settings.get("-m") == recipes.SPPO == source.text("-m"):
        return "sppo"
    return source.text("algorithm.adv_estimator") or "gae"


def has_penalty(actor: Source) -> bool:
    """Return whether the loss has a KL or an entropy term next to the policy gradient."""
    return bool((actor.flag("use_kl_loss") and actor.number("kl_loss_coef")) or actor.number("entropy_coeff"))


def advantage(source: Source) -> dict[str, Any]:
    if estimator(source) == "sppo":
        return recipes.sppo(source, has_penalty(source.under(_A)))
    ours, group = CHOICES[_ESTIMATOR].read(source), source.count(_R + "n")
    if not ours:
        return {}
    kind = ours["advantage"]
    if kind in ("group", "pass_at_k") and "normalize" not in ours:
        ours["normalize"] = "group" if source.flag("algorithm.norm_adv_by_std_in_grpo") else "none"
    if kind == "nonzero_scaled" and group == 1:
        source.lacks(_ESTIMATOR, "gpg with one sample per prompt, which has no other sample to compare with")
    if kind in ("group", "leave_one_out", "length_weighted") and group == 1:
        # verl gives a group of one the mean 0 and the deviation 1: the advantage is the reward.
        ours |= {"advantage": "reward", "normalize": "none"}
    if ours.get("token_baseline") and group == 1:
        ours["token_baseline"] = False
    ours = {"whiten": False, "credit": "response", **ours}
    return {f"algorithm.{key}": value for key, value in ours.items()}


def loss(source: Source, actor_of: str = "verl until 0.7") -> dict[str, Any]:
    if estimator(source) == "sppo":
        return {}
    actor, bypassed = source.under(_A), source.under("algorithm.rollout_correction.")
    if not (ours := CHOICES[_LOSS].read(source)):
        return {}
    is_reinforce = bypasses(source) and bypassed.text("loss_type") == "reinforce"
    if is_reinforce:
        # bypass_mode replaces loss_mode; the weight has no gradient, as in CISPO.
        ours = {"surrogate": "cispo" if bypassed.text("rollout_is") is not None else "log_likelihood"}
    surrogate = ours["surrogate"]
    if surrogate in ("ppo_clip", "gmpo", "cispo", "clip_cov", "dppo"):
        common = actor.number("clip_ratio", 0.0)
        ours |= {f"clip_{side}": actor.number(f"clip_ratio_{side}", common) for side in ("low", "high")}
        # A ratio is never below 0, so a clip_low of 1 is no bound.
        ours["clip_low"] = min(ours["clip_low"], 1.0)
        if is_reinforce:
            ours |= {"clip_low": 1.0, "clip_high": (bypassed.number("rollout_is_threshold") or 2.0) - 1}
        if surrogate == "gmpo":
            ours["clip_low"] = actor.number("clip_ratio_low")
    if ours.get("dual_clip") is not None and ours["dual_clip"] <= 1 + ours["clip_high"]:
        actor.lacks("clip_ratio_c", f"a bound below that of the ratio, {1 + ours['clip_high']:g}")
    for key in ("tau_pos", "tau_neg") if surrogate == "sapo" else ():
        if actor.has(f"policy_loss.{key}") and actor.number(f"policy_loss.{key}") != actor.number(key):
            actor.lacks(f"policy_loss.{key}", f"verl's loss reads actor.{key}: set that key")
    mean = CHOICES[_MEAN].read(source)
    if "aggregate" not in ours:
        ours["aggregate"] = mean
        # The newer workers average over all tokens of an update.
        is_newer = is_v1(source) or source.text("trainer.use_legacy_worker_impl") == "disable"
        if mean == "token-mean" and not is_newer:
            source.note(shared.TEXTS["mean_of_micro_batches"].format(f"with token-mean the actor of {actor_of}"))
    elif has_penalty(actor):
        ours["penalty_aggregate"] = mean
    return {f"algorithm.{key}": value for key, value in ours.items()}


def kl(source: Source) -> dict[str, Any]:
    control, loss_coef = source.under("algorithm.kl_ctrl."), source.number(_A + "kl_loss_coef")
    in_loss = source.flag(_A + "use_kl_loss") and bool(loss_coef)
    # The recipe PRIME loads the reference but subtracts no KL from rewards.
    in_reward = kl_in_reward(source) and bool(control.number("kl_coef")) and not recipes.is_prime(source)
    if not (in_reward or in_loss) and control.has("kl_coef") and control.number("kl_coef") and not recipes.is_prime(source):
        legacy.say_where_kl_was(source)
    loss, reward = dict[str, Any](), dict[str, Any]()
    is_adaptive = control.text("type") == "adaptive"
    if in_loss:
        loss = {"estimator": shared.estimator(source, _A + "kl_loss_type", "low_var_kl"), "coef": loss_coef}
    if in_reward:
        name = shared.estimator(source, "algorithm.kl_penalty", "kl").removesuffix("+")
        reward = {"estimator": name, "coef": control.number("kl_coef")}
        if is_adaptive:
            reward |= {"target": control.number("target_kl"), "horizon": control.whole("horizon")}
    return shared.penalties(source, loss, reward, "algorithm.kl_ctrl.type")


def kl_in_reward(source: Source) -> bool:
    """Return whether the KL is subtracted from rewards; releases without this key do so if it is not in the loss."""
    if (value := source.raw("algorithm.use_kl_in_reward")) == legacy.UNLESS_IN_LOSS:
        return not source.flag(_A + "use_kl_loss")
    return value is not None and source.flag("algorithm.use_kl_in_reward")


_REJECTED, _DIVERGENCES = (dict(load("verl")["rejection"][kind]) for kind in ("ratios", "divergences"))


def correction(source: Source) -> dict[str, Any]:
    if (cap := source.number(_A + "tis_imp_ratio_cap")) is not None and cap > 0:
        return {"algorithm.rollout_correction.name": "tis", "algorithm.rollout_correction.high": cap}
    section = source.under("algorithm.rollout_correction.")
    ours: dict[str, Any] = {}
    if bypasses(source):
        weighted, reinforce = section.text("rollout_is"), section.text("loss_type") == "reinforce"
        if reinforce and weighted is None:
            for key in ("rollout_rs", "rollout_token_veto_threshold"):
                if section.has(key) and section.text(key) is not None:
                    section.lacks(key, "rejection with REINFORCE without a weight")
            return {}
        ours["old_logprobs_from"] = "engine"
        if section.text("loss_type") not in ("ppo_clip", "reinforce"):
            section.lacks("loss_type", f"the loss {section.text('loss_type')}")
        if reinforce and (weighted != "token" or (section.number("rollout_is_threshold") or 2.0) < 1):
            section.lacks("rollout_is", "REINFORCE weighted by whole responses, or by less than 1")
        if weighted is not None and not reinforce:
            for key in ("rollout_is", "rollout_is_batch_normalize"):
                section.fixed(key, "with bypass_mode and ppo_clip verl applies no weight: the ratio already contains it")
    elif (level := section.text("rollout_is")) is not None:
        if level not in ("token", "sequence"):
            section.lacks("rollout_is", f"the weight {level}")
        low, _, high = str(section.raw("rollout_is_threshold")).strip("'\"").rpartition("_")
        if low:
            # With two bounds, tokens outside of them have weight 0 (verl since 2026-03; an error before).
            ours |= {"weight": level, "low": _bound(low), "high": _bound(high), "outside": "mask"}
        else:
            ours |= {"weight": level, "high": section.number("rollout_is_threshold"), "outside": "truncate"}
    if (rejected := section.text("rollout_rs")) is not None:
        older = rejected in legacy.LEVELS
        names = [part.strip() for part in rejected.split(",") if part.strip()]
        ours |= legacy.rejection(section, rejected) if older else rejection(section, names)
    if vetoed := legacy.veto(section):
        ours["reject_divergence"] = {**ours.get("reject_divergence", {}), **vetoed["reject_divergence"]}
    return {f"algorithm.rollout_correction.{key}": value for key, value in ours.items()}


def _bound(text: str) -> float:
    if (number := finite("a bound of algorithm.rollout_correction", text)) <= 0:
        raise UnreadableError(f"bounds of algorithm.rollout_correction must be above 0: got {text!r}")
    return number


def rejection(section: Source, names: list[str]) -> dict[str, Any]:
    """Return our keys of rejecting samples by several statistics, each with its bounds (rollout_corr_helper.py:156)."""
    bounds = (section.text("rollout_rs_threshold") or "").split(",")
    bounds = bounds * len(names) if len(bounds) == 1 else bounds
    known = sum(name in _REJECTED for name in names)
    if known > 1 or len(bounds) != len(names) or any(name not in (*_REJECTED, *_DIVERGENCES) for name in names):
        listed = f"{', '.join(_DIVERGENCES)}, and one of {', '.join(_REJECTED)}"
        section.lacks("rollout_rs", f"rejection by {', '.join(names)}: known here are {listed}")
        return {}
    ours, divergences = dict[str, Any](), dict[str, float]()
    for name, bound in zip(names, bounds, strict=True):
        low, _, high = bound.strip().rpartition("_")
        upper = _bound(high)
        lower = _bound(low) if low else 1 / upper
        if name in _DIVERGENCES:
            divergences[_DIVERGENCES[name]] = upper
        else:
            # verl compares -log(trainer / engine) with the logarithms of the bounds.
            ours |= {"reject": _REJECTED[name], "reject_low": 1 / upper, "reject_high": 1 / lower}
    return ours | ({"reject_divergence": divergences} if divergences else {})


MANAGERS = ("reward.reward_manager.name", *legacy.MANAGERS)
_WITHOUT_PENALTY = ("naive", "prime", "batch")
"""Reward managers without a penalty for long responses (workers/reward_manager)."""


def overlong(source: Source) -> dict[str, Any]:
    """Return our keys of DAPO's penalty for long responses, which some reward managers ignore."""
    named = [key for key in MANAGERS if source.has(key)] or ["reward_model.reward_manager"]
    if source.text(named[0]) in _WITHOUT_PENALTY:
        return {"algorithm.overlong_buffer": 0}
    for start in ("reward.reward_kwargs.overlong_buffer_cfg.", *legacy.OVERLONG):
        section = source.under(start)
        if section.flag("enable"):
            buffer, penalty = section.count("len"), section.number("penalty_factor", 1.0)
            longest = shared.response_tokens(source)
            counted_from = start.replace("overlong_buffer_cfg.", "max_resp_len")
            end = (source.whole(counted_from) if source.has(counted_from) else None) or longest
            if end - buffer >= longest:
                # The penalty would begin after the longest response.
                break
            if end != longest:
                source.lacks(counted_from, "a penalty that ends at another length than data.max_response_length")
            return {"algorithm.overlong_buffer": buffer, "algorithm.overlong_penalty": penalty}
    return {"algorithm.overlong_buffer": 0}


def dynamic_sampling(source: Source) -> dict[str, Any]:
    groups = source.under("algorithm.filter_groups.")
    if not groups.flag("enable"):
        return {"algorithm.dynamic_sampling": False}
    rounds = groups.whole("max_num_gen_batches") or 0
    prompts = source.whole("data.gen_batch_size")
    ours: dict[str, Any] = {"algorithm.dynamic_sampling": True, "algorithm.prompts_per_round": prompts}
    # In verl 0 means no bound.
    ours["algorithm.sampling_rounds"] = rounds if rounds > 0 else 1000
    # acc and score are without the penalty for long responses, seq_reward is with it, seq_final_reward also with the KL.
    metric = groups.text("metric") or ""
    if metric == "seq_final_reward" and kl_in_reward(source):
        groups.lacks("metric", "groups compared by rewards that include the KL: set metric=seq_reward")
    if metric.startswith("seq_") and overlong(source)["algorithm.overlong_buffer"]:
        ours["algorithm.dynamic_sampling_by"] = "shaped_reward"
    return ours
