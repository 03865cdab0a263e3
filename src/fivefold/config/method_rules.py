"""Rules for combinations of choices: a method and its overrides -> Findings. No torch here."""

from __future__ import annotations

from operator import attrgetter

from fivefold.config.findings import Findings
from fivefold.config.methods import (
    ADVANTAGES,
    DIVERGENCES,
    LEGACY_AGGREGATE,
    METHODS,
    NAMES,
    NORMALIZED,
    NORMALIZED_BY_MEAN,
    PARAMETERS,
    RATIOS,
    SECOND_MOMENT,
    SURROGATES,
    Choices,
    CorrectionConfig,
    ExpertConfig,
    ProcessRewardConfig,
    resolve,
    surrogate_row,
)
from fivefold.config.ranges import OneOf
from fivefold.user_code import check_user_code, is_user_code


def check_method(findings: Findings, name: str, overrides: Choices, group_size: int, updates: int = 1) -> None:
    """Record unusable choices, choices without effect, and notes; `updates` is the number of optimizer steps per rollout.

    Each value must already be within its range.
    """
    chosen = resolve(name, overrides)
    if not _names_exist(findings, chosen):
        return
    _check_surrogate(findings, name, overrides, chosen)
    _check_advantage(findings, name, overrides, chosen, group_size)
    if METHODS[name].offline:
        _check_offline(findings, name, overrides)
    _check_kl(findings, name, overrides, chosen)
    _check_penalty(findings, name, overrides, chosen)
    _check_correction(findings, overrides, chosen)
    _check_expert(findings, name, overrides, chosen)
    _check_process_reward(findings, name, overrides, chosen, group_size)
    unlike = chosen.surrogate in ("log_likelihood", "opmd") and chosen.rollout_correction.weight == "none"
    if unlike and updates > 1 and not METHODS[name].offline:
        findings.note(
            f"{name} has no ratio to the policy that sampled: of {updates} updates a step all but the first are off-policy; "
            "algorithm.updates_per_step: 1, or a correction, makes up for it"
        )


def _names_exist(findings: Findings, chosen: Choices) -> bool:
    before = len(findings.errors)
    for axis, known in NAMES.items():
        choice = attrgetter(axis)(chosen)
        assert choice is not None
        if is_user_code(choice):
            try:
                check_user_code(choice)
            except ValueError as error:
                findings.error(axis, f": {error}")
        else:
            message = f"must be one of {', '.join(known)} or path.py:function: got {choice!r}"
            findings.require(choice in known, axis, message)
    return len(findings.errors) == before


def _check_surrogate(findings: Findings, name: str, overrides: Choices, chosen: Choices) -> None:
    surrogate, level = str(chosen.surrogate), chosen.importance_sampling_level
    row = surrogate_row(surrogate)
    for key in PARAMETERS:
        value = getattr(chosen, key)
        if value is None:
            continue
        if key in row.parameters:
            if fault := row.parameters[key].range.fault(value):
                findings.error(key, fault)
        else:
            users = ", ".join(other for other, its in SURROGATES.items() if key in its.parameters)
            findings.error(key, f"belongs to {users}, not to {surrogate}: leave it out or choose another surrogate")
    if chosen.dual_clip is not None and chosen.clip_high is not None:
        bound = 1 + chosen.clip_high
        message = f"must be above 1 + clip_high = {bound:g}: got {chosen.dual_clip:g}"
        findings.require(not 1 < chosen.dual_clip <= bound, "dual_clip", message)
    if chosen.proximal_coef and level != "token":
        findings.error("proximal_coef", f"is the squared log-ratio of each token: importance_sampling_level is {level}")
    if row.ratio_reference != "old":
        findings.require(
            overrides.importance_sampling_level is None,
            "importance_sampling_level",
            f"belongs to methods that compare with the policy before the update: {name} does not",
        )
    elif level in RATIOS:
        findings.require(
            level in row.levels,
            "importance_sampling_level",
            f"must be {' or '.join(row.levels)} for {surrogate}, which looks at tokens itself: got {level}",
        )
    if row.pairs:
        learners = " or ".join(method for method, its in METHODS.items() if its.learns_from == "pairs")
        message = f": {surrogate} compares pairs that stand in the data: write name: {learners}"
        findings.require(METHODS[name].learns_from == "pairs", "surrogate", message)


def _check_advantage(findings: Findings, name: str, overrides: Choices, chosen: Choices, group_size: int) -> None:
    advantage, sampled = str(chosen.advantage), not METHODS[name].offline
    if overrides.normalize not in (None, "none"):
        findings.require(
            advantage in NORMALIZED,
            "normalize",
            f"belongs to advantages {', '.join(NORMALIZED)}: got {overrides.normalize} with {advantage}",
        )
    findings.require(
        group_size > 1 or not (sampled and ADVANTAGES.get(advantage, False)),
        "group_size",
        f"must be at least 2: {advantage} compares the samples of a prompt, and one alone gives advantage 0",
    )
    findings.require(
        group_size > 1 or not chosen.dynamic_sampling,
        "dynamic_sampling",
        "needs a group_size of at least 2: one sample alone never differs from the others",
    )
    if chosen.normalize == "mean":
        takers = NORMALIZED_BY_MEAN
        message = f": mean belongs to advantages {', '.join(takers)}: got {advantage}"
        findings.require(advantage in takers, "normalize", message)
    for key, users in (("baseline_shift", ("group",)), ("baseline_temperature", ("log_mean_exp", "step_log_mean_exp"))):
        message = f"belongs to advantage {' or '.join(users)}: got {advantage}"
        findings.require(getattr(overrides, key) is None or advantage in users, key, message)
    low, high = chosen.difficulty_low, chosen.difficulty_high
    if low is not None and high is not None:
        message = f"must satisfy difficulty_low < difficulty_high: got {low:g} and {high:g}"
        findings.require(low < high, "difficulty_low and difficulty_high", message)
    if chosen.token_baseline:
        correction = chosen.rollout_correction
        usable = advantage == "reward" and chosen.credit == "discounted"
        message = f"needs advantage: reward and credit: discounted, the return from each token on: got {advantage} and "
        findings.require(usable, "token_baseline", message + str(chosen.credit))
        message = "needs a group_size of at least 2: one response has none to be compared with"
        findings.require(group_size > 1, "token_baseline", message)
        plain = (
            correction.old_logprobs_from == "trainer" and correction.reject == "none" and not correction.reject_divergence
        )
        message = "weighs responses by the trainer's log-probs of all their tokens: leave rollout_correction.reject, "
        findings.require(plain, "token_baseline", message + "reject_divergence and old_logprobs_from: engine out")
    if chosen.credit == "response":
        findings.require(overrides.gamma is None, "gamma", "belongs to credit: discounted or gae")
    findings.require(overrides.lam is None or chosen.credit == "gae", "lam", "belongs to credit: gae")
    findings.require(
        not overrides.bootstrap_truncated or chosen.credit == "gae",
        "bootstrap_truncated",
        f"belongs to credit: gae, whose critic has a value of the text that was cut off: got credit: {chosen.credit}",
    )
    if overrides.overlong_penalty is not None and not chosen.overlong_buffer:
        findings.ignore("overlong_penalty", "overlong_buffer is 0")
    if overrides.whiten_by is not None and not chosen.whiten:
        findings.ignore("whiten_by", "whiten is off")
    if overrides.difficulty_by is not None and low is None and high is None:
        findings.ignore("difficulty_by", "neither difficulty_low nor difficulty_high is set")
    low, high = chosen.dynamic_sampling_low, chosen.dynamic_sampling_high
    if low is not None and high is not None:
        message = f"must satisfy dynamic_sampling_low <= dynamic_sampling_high: got {low:g} and {high:g}"
        findings.require(low <= high, "dynamic_sampling_low and dynamic_sampling_high", message)
    for key in ("dynamic_sampling_low", "dynamic_sampling_high", "dynamic_sampling_max_tokens"):
        if getattr(overrides, key) is not None and not chosen.dynamic_sampling:
            findings.ignore(key, "dynamic_sampling is off")
    if overrides.dynamic_sampling_by is not None and not chosen.dynamic_sampling:
        findings.ignore("dynamic_sampling_by", "dynamic_sampling is off")
    elif overrides.dynamic_sampling_by == "shaped_reward" and not chosen.overlong_buffer and chosen.reward_clip is None:
        findings.ignore("dynamic_sampling_by", "neither overlong_buffer nor reward_clip changes a reward")


def _check_offline(findings: Findings, name: str, overrides: Choices) -> None:
    """Record errors for choices that do not apply to methods that learn from responses in the data."""
    method = METHODS[name]
    nothing = f"has nothing to act on: {name} does not sample"
    for key in (
        "advantage", "credit", "token_baseline", "whiten", "whiten_by", "advantage_clip", "reward_shift", "reward_scale",
        "reward_clip", "overlong_buffer", "overlong_penalty", "overlong_filter", "overlong_zero", "dynamic_sampling",
        "dynamic_sampling_by", "dynamic_sampling_low", "dynamic_sampling_high", "dynamic_sampling_max_tokens",
        "difficulty_low", "difficulty_high", "difficulty_by", "bootstrap_truncated",
    ):  # fmt: skip
        findings.require(getattr(overrides, key) in (None, False), key, nothing)
    findings.require(overrides.surrogate is None, "surrogate", f"of {name} cannot be changed: choose another method")
    findings.require(overrides.rollout_correction == CorrectionConfig(), "rollout_correction", nothing)
    findings.require(overrides.kl.place != "reward", "kl.place", f": reward has nothing to act on: {name} has no rewards")
    findings.require(not overrides.kl.reward_coef, "kl.reward_coef", nothing)
    if surrogate_row(str(method.surrogate)).ratio_reference == "reference":
        message = f": {name} has the reference in its loss already, weighted by beta"
        findings.require(not overrides.kl.coef, "kl.coef", message)
    if method.learns_from == "pairs":
        message = f"must be {method.aggregate} for {name}: every pair counts alike"
        findings.require(overrides.aggregate in (None, method.aggregate), "aggregate", message)


def _check_kl(findings: Findings, name: str, overrides: Choices, chosen: Choices) -> None:
    kl, own = chosen.kl, overrides.kl
    if kl.place == "reward":
        findings.require(
            not str(kl.estimator).endswith("+"),
            "kl.estimator",
            f": {kl.estimator} changes the gradient, which a reward has not: write {str(kl.estimator)[:-1]}",
        )
    if kl.reward_coef:
        findings.require(
            kl.place == "loss" and bool(kl.coef),
            "kl.reward_coef",
            f"is a second penalty beside one in the loss: with kl.place {kl.place} and kl.coef {kl.coef:g} write "
            "kl: {place: reward, coef: ...}",
        )
        findings.require(
            not str(kl.reward_estimator).endswith("+"),
            "kl.reward_estimator",
            f": {kl.reward_estimator} changes the gradient, which a reward has not: write {str(kl.reward_estimator)[:-1]}",
        )
    elif own.reward_estimator is not None:
        findings.ignore("kl.reward_estimator", "kl.reward_coef is 0")
    if kl.ratio_weighted:
        findings.require(kl.place == "loss", "kl.ratio_weighted", f"belongs to place: loss: got {kl.place}")
        findings.require(
            surrogate_row(str(chosen.surrogate)).ratio_reference == "old",
            "kl.ratio_weighted",
            f"is the ratio to the old policy, with which {chosen.surrogate} does not compare",
        )
    if kl.target is not None:
        findings.require(bool(kl.coef), "kl.target", "moves kl.coef, which must start above 0")
    if (
        not kl.coef
        and not METHODS[name].offline
        and any((own.estimator, own.place, own.target, own.horizon, own.ratio_weighted))
    ):
        findings.ignore("kl", "its coef is 0")
    if own.horizon is not None and kl.target is None:
        findings.ignore("kl.horizon", "without kl.target the coefficient is fixed")


def _check_penalty(findings: Findings, name: str, overrides: Choices, chosen: Choices) -> None:
    if overrides.penalty_aggregate is None:
        return
    if not (chosen.kl.coef and chosen.kl.place == "loss") and not chosen.entropy_coef:
        findings.ignore("penalty_aggregate", "there is neither KL nor entropy in the loss")
    findings.require(
        LEGACY_AGGREGATE not in {chosen.aggregate, chosen.penalty_aggregate} or chosen.aggregate == chosen.penalty_aggregate,
        "penalty_aggregate",
        f": {LEGACY_AGGREGATE} is for all of the loss or none of it: got {chosen.penalty_aggregate} with {chosen.aggregate}",
    )


def _check_expert(findings: Findings, name: str, overrides: Choices, chosen: Choices) -> None:
    if chosen.expert.weight is None:
        if overrides.expert != ExpertConfig():
            findings.ignore("expert", "its weight is left out")
        return
    below = findings.at("expert")
    selects = SECOND_MOMENT in (chosen.rollout_correction.reject_divergence or {})
    impossible = (
        (METHODS[name].offline, f"{name} learns from responses in the data alone"),
        (chosen.surrogate in ("clip_cov", "kl_cov"), f"{chosen.surrogate} chooses tokens among all of the update"),
        (selects, "rollout_correction chooses tokens among all of the update"),
        (chosen.credit != "response", f"credit: {chosen.credit} has no rewards there"),
        (bool(chosen.whiten), "whiten is over all tokens of the step"),
        (str(chosen.advantage).startswith("step_"), f"{chosen.advantage} compares all rewards of the step"),
        (chosen.advantage == "greedy_baseline", "greedy_baseline asks for another response to each prompt"),
        (chosen.kl.place == "reward" or bool(chosen.kl.reward_coef), "a KL in the reward has no reward there"),
        (LEGACY_AGGREGATE in (chosen.aggregate, chosen.expert.aggregate), f"{LEGACY_AGGREGATE} is for all of the loss"),
    )
    for is_so, reason in impossible:
        below.require(not is_so, "weight", f"must be left out: {reason}")
    is_reached = chosen.expert.final_weight is None or bool(chosen.expert.decay_updates)
    below.require(is_reached, "final_weight", "is what weight comes to within decay_updates, which must be above 0")


def _check_process_reward(findings: Findings, name: str, overrides: Choices, chosen: Choices, group_size: int) -> None:
    process, below = chosen.process_reward, findings.at("process_reward")
    if not process.coef:
        if overrides.process_reward != ProcessRewardConfig():
            findings.ignore("process_reward", "its coef is 0: there is no process reward model")
        return
    impossible = (
        (METHODS[name].offline, f"{name} does not sample, and responses of the data have no outcomes to learn from"),
        (chosen.credit == "response", "credit: response gives all tokens the same: choose discounted or gae"),
        (group_size < 2, "rewards of tokens are compared with other responses to the prompt: group_size is 1"),
        (chosen.expert.weight is not None, "an expert's responses have no outcome"),
    )
    for is_so, reason in impossible:
        below.require(not is_so, "coef", f"must be 0: {reason}")
    message = ": dpo compares with scores before the step's updates: write update: after"
    below.require(process.loss == "ce" or process.update == "after", "loss", message)


def _check_correction(findings: Findings, overrides: Choices, chosen: Choices) -> None:
    correction, own = chosen.rollout_correction, overrides.rollout_correction
    below = findings.at("rollout_correction")
    for low, high in (("low", "high"), ("reject_low", "reject_high")):
        first, last = getattr(correction, low), getattr(correction, high)
        below.require(first < last, f"{low} and {high}", f"must satisfy 0 <= low < high: got {first} and {last}")
    for name in correction.reject_divergence or {}:
        if fault := OneOf(DIVERGENCES).fault(name):
            below.error("reject_divergence", fault)
    if correction.reject_divergence and SECOND_MOMENT in correction.reject_divergence:
        selects = [name for name in ("clip_cov", "kl_cov") if chosen.surrogate == name]
        below.require(
            not selects,
            "reject_divergence",
            f": second_moment leaves out tokens among the whole update, and so does {chosen.surrogate}: choose one",
        )
    if correction.old_logprobs_from == "engine":
        below.require(
            correction.weight == "none" and SECOND_MOMENT not in (correction.reject_divergence or {}),
            "old_logprobs_from",
            ": engine puts the engine's log-probs into the ratio itself: leave weight none and second_moment out",
        )
        below.require(
            surrogate_row(str(chosen.surrogate)).ratio_reference == "old",
            "old_logprobs_from",
            f": engine changes the ratio, which {chosen.surrogate} does not have",
        )
    if correction.old_logprobs_from == "loglinear":
        below.require(
            surrogate_row(str(chosen.surrogate)).ratio_reference == "old",
            "old_logprobs_from",
            f": loglinear changes the ratio, which {chosen.surrogate} does not have",
        )
        below.require(
            chosen.surrogate not in ("clip_cov", "kl_cov") and SECOND_MOMENT not in (correction.reject_divergence or {}),
            "old_logprobs_from",
            ": loglinear leaves out the pass by which clip_cov, kl_cov and second_moment choose tokens among the update",
        )
    if correction.weight == "none" and (own.low, own.high, own.outside) != (None, None, None):
        below.ignore("low, high and outside", "weight is none")
    if correction.reject == "none" and (own.reject_low, own.reject_high) != (None, None):
        below.ignore("reject_low and reject_high", "reject is none")
