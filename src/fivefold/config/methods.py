"""The field's methods as rows of one table: a method is a choice on each axis. No torch here, so that `check` can refuse.

docs/methods.md names the paper of each row and the source of each number.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar

from fivefold.user_code import check_user_code, is_user_code

C = TypeVar("C", bound="Choices | KLConfig | CorrectionConfig")


@dataclass(frozen=True)
class KLConfig:
    """A penalty on the distance to the reference; each choice by method when left out."""

    estimator: str | None = None
    """k1, k2, k3 or abs; with + its value has the gradient of k2; or `path.py:function`."""
    coef: float | None = None
    """0 turns the penalty off."""
    place: Literal["loss", "reward"] | None = None
    """In the loss of each token, or taken off the reward before advantages are made."""
    target: float | None = None
    """With a target the coefficient moves so that the KL comes near it; fixed when left out."""
    horizon: int | None = None
    """Samples over which the coefficient moves by about the relative distance to the target."""


@dataclass(frozen=True)
class CorrectionConfig:
    """What is done about the difference of engine and trainer; each choice by name when left out."""

    name: Literal["none", "tis", "mis", "icepop", "sequence_tis", "sequence_mis", "geometric", "decoupled"] | None = None
    """A row of CORRECTIONS, which the other keys change."""
    weight: str | None = None
    """Weight of a token: trainer / engine of the token, the product over its response (sequence), or the geometric mean of
    that; none; or `path.py:function`."""
    low: float | None = None
    high: float | None = None
    """Bounds of the weight."""
    outside: Literal["truncate", "mask"] | None = None
    """A weight outside the bounds is put on the bound, or is 0."""
    reject: Literal["none", "token", "sequence", "geometric"] | None = None
    """The ratio by which tokens or whole responses are left out; they keep their place in the denominators."""
    reject_low: float | None = None
    reject_high: float | None = None
    old_logprobs_from: Literal["trainer", "engine"] | None = None
    """Whose log-probs are the old ones: the trainer's before the step's updates, or the engine's."""


@dataclass(frozen=True)
class Choices:
    """A choice on each axis; None is the method's."""

    advantage: str | None = None
    """How rewards of samples are compared: one of ADVANTAGES, or `path.py:function`."""
    normalize: Literal["group", "batch", "none"] | None = None
    """Divide advantages by the standard deviation of the rewards in the group, or in the whole step."""
    credit: str | None = None
    """How a response's advantage comes to its tokens: all the same (response), as discounted return, or by GAE with a
    critic; or `path.py:function`."""
    gamma: float | None = None
    """Discount of a token (discounted, gae)."""
    lam: float | None = None
    """λ of GAE: 1 trusts returns only, 0 values only."""
    whiten: bool | None = None
    """Shift and scale advantages to mean 0 and variance 1 over all tokens of the step."""
    advantage_clip: float | None = None
    """Advantages are kept within ± this."""
    importance_sampling_level: str | None = None
    """Compare with the old policy by token, sequence or sequence-token; or `path.py:function`."""
    surrogate: str | None = None
    """What a token adds to the objective: one of SURROGATES, or `path.py:function`."""
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    """c of dual-clip PPO; off when left out."""
    temperature_positive: float | None = None
    temperature_negative: float | None = None
    """Steepness of SAPO's gate where the advantage is above 0, and elsewhere."""
    cov_fraction: float | None = None
    """Share of the update's tokens that clip_cov leaves out or kl_cov pulls back."""
    cov_low: float | None = None
    cov_high: float | None = None
    """Covariances between which clip_cov takes them."""
    cov_kl_coef: float | None = None
    beta: float | None = None
    """β of DPO."""
    label_smoothing: float | None = None
    """Share of pairs that DPO takes to be labelled the wrong way round."""
    aggregate: str | None = None
    """How tokens are weighted in the loss: one of AGGREGATES, or `path.py:function`."""
    entropy_coef: float | None = None
    kl: KLConfig = field(default_factory=KLConfig)
    rollout_correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    reward_clip: float | None = None
    """Rewards are kept within ± this."""
    overlong_buffer: float | None = None
    """Tokens before `data.max_response_tokens` over which a penalty grows to `overlong_penalty`; below 1 a share of that
    length, 0 for none."""
    overlong_penalty: float | None = None
    overlong_filter: bool | None = None
    """Responses that were cut off carry no loss and do not count in its denominators."""
    dynamic_sampling: bool | None = None
    """Sample further prompts in the place of those whose responses all have the same reward."""


ADVANTAGES: dict[str, bool] = {
    "reward": False,
    "group": True,
    "leave_one_out": True,
    "length_weighted": True,
    "group_scaled": True,
    "pass_at_k": True,
    "greedy_baseline": False,
    "given": False,
}
"""Advantage -> whether it compares the samples of a group."""

NORMALIZED = ("group", "leave_one_out", "pass_at_k")
"""Advantages that `normalize` applies to."""

SURROGATES: dict[str, tuple[str, ...]] = {
    "ppo_clip": ("clip_low", "clip_high", "dual_clip"),
    "gmpo": ("clip_low", "clip_high"),
    "cispo": ("clip_low", "clip_high"),
    "sapo": ("temperature_positive", "temperature_negative"),
    "clip_cov": ("clip_low", "clip_high", "cov_fraction", "cov_low", "cov_high"),
    "kl_cov": ("cov_fraction", "cov_kl_coef"),
    "log_likelihood": (),
    "dpo": ("beta", "label_smoothing"),
}
"""Surrogate -> the numbers it takes; their defaults stand on its fields in algo/surrogates.py."""

NO_RATIO = ("log_likelihood", "dpo")
"""Surrogates that do not compare with the old policy."""

CREDITS = ("response", "discounted", "gae")
WEIGHTS = ("none", "token", "sequence", "geometric")
RATIOS = ("token", "sequence", "sequence-token")
ESTIMATORS = ("k1", "k2", "k3", "abs", "k1+", "k3+", "abs+")
LEGACY_AGGREGATE = "micro-batch-token-mean"
AGGREGATES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant-length", LEGACY_AGGREGATE)

OFFLINE_METHODS = ("sft", "dpo")
"""Methods that learn from responses in the data instead of sampling."""

CORRECTIONS: dict[str, CorrectionConfig] = {
    "none": CorrectionConfig(weight="none"),
    "tis": CorrectionConfig(weight="token", high=2.0),
    "mis": CorrectionConfig(weight="token", high=2.0, outside="mask"),
    "icepop": CorrectionConfig(weight="token", low=0.5, high=5.0, outside="mask"),
    "sequence_tis": CorrectionConfig(weight="sequence", high=2.0),
    "sequence_mis": CorrectionConfig(weight="sequence", high=2.0, outside="mask"),
    "geometric": CorrectionConfig(weight="none", reject="geometric", reject_low=0.999, reject_high=1.001),
    "decoupled": CorrectionConfig(weight="token", high=5.0, outside="mask"),
}

_USUAL = Choices(
    advantage="group",
    normalize="none",
    credit="response",
    whiten=False,
    importance_sampling_level="token",
    surrogate="ppo_clip",
    aggregate="token-mean",
    entropy_coef=0.0,
    kl=KLConfig(estimator="k3", coef=0.0, place="loss", horizon=10000),
    rollout_correction=CorrectionConfig(
        name="none", weight="none", low=0.0, high=2.0, outside="truncate", reject="none", reject_low=0.0, reject_high=2.0,
        old_logprobs_from="trainer",
    ),
    overlong_buffer=0.0,
    overlong_penalty=1.0,
    overlong_filter=False,
    dynamic_sampling=False,
)  # fmt: skip
"""What a row does not name."""

_GROUP = Choices(normalize="group")

METHODS: dict[str, Choices] = {
    "ppo": Choices(advantage="reward", credit="gae", whiten=True),
    "grpo": replace(_GROUP, aggregate="seq-mean-token-mean", kl=KLConfig(coef=0.001)),
    "dr_grpo": Choices(aggregate="constant-length"),
    "dapo": replace(_GROUP, clip_high=0.28, overlong_buffer=0.2, dynamic_sampling=True),
    "gspo": replace(
        _GROUP, importance_sampling_level="sequence", clip_low=3e-4, clip_high=4e-4, aggregate="seq-mean-token-mean"
    ),
    "cispo": replace(_GROUP, surrogate="cispo"),
    "sapo": replace(_GROUP, surrogate="sapo", aggregate="seq-mean-token-mean"),
    "rloo": Choices(advantage="leave_one_out", surrogate="log_likelihood", aggregate="seq-mean-token-sum"),
    "reinforce_plus_plus": Choices(
        advantage="reward", credit="discounted", whiten=True, kl=KLConfig(estimator="k1", coef=0.001, place="reward")
    ),
    "reinforce_plus_plus_baseline": Choices(whiten=True, kl=KLConfig(estimator="k2", coef=0.001)),
    "remax": Choices(advantage="greedy_baseline", surrogate="log_likelihood", aggregate="seq-mean-token-sum"),
    "opo": Choices(advantage="length_weighted", surrogate="log_likelihood"),
    "gpg": Choices(advantage="group_scaled", surrogate="log_likelihood"),
    "gmpo": replace(_GROUP, surrogate="gmpo", aggregate="seq-mean-token-mean"),
    "clip_cov": replace(_GROUP, surrogate="clip_cov"),
    "kl_cov": replace(_GROUP, surrogate="kl_cov"),
    "sft": Choices(advantage="given", surrogate="log_likelihood"),
    "dpo": Choices(advantage="given", surrogate="dpo", aggregate="seq-mean-token-mean"),
}


def _over(base: C, top: Any) -> C:
    """`base` with what `top` chooses."""
    changes: dict[str, Any] = {}
    for item in fields(base):
        own, overrides = getattr(base, item.name), getattr(top, item.name)
        if isinstance(own, (KLConfig, CorrectionConfig)):
            changes[item.name] = _over(own, overrides)
        elif overrides is not None:
            changes[item.name] = overrides
    return replace(base, **changes)


def resolve(name: str, overrides: Choices | None = None) -> Choices:
    """The method's row with what is `given` over it: every axis has a choice, a surrogate's numbers where one was named."""
    overrides = overrides or Choices()
    row = _over(METHODS[name], overrides)
    kind = row.rollout_correction.name or "none"
    # A named correction stands below the keys that change it.
    correction = _over(_over(_USUAL.rollout_correction, CORRECTIONS[kind]), row.rollout_correction)
    chosen = replace(_over(_USUAL, row), rollout_correction=correction)
    if chosen.surrogate == (own := METHODS[name].surrogate or str(_USUAL.surrogate)):
        return chosen
    # The row's numbers were its own surrogate's.
    return replace(chosen, **{key: getattr(overrides, key) for key in SURROGATES[own]})


def problems(name: str, overrides: Choices, group_size: int) -> list[str]:
    """Why these choices make no sense together, one sentence each."""
    found: list[str] = []

    def need(holds: bool, message: str) -> None:
        if not holds:
            found.append(f"algorithm.{message}")

    chosen = resolve(name, overrides)
    for axis, choice, known in (
        ("advantage", chosen.advantage, ADVANTAGES),
        ("credit", chosen.credit, CREDITS),
        ("importance_sampling_level", chosen.importance_sampling_level, RATIOS),
        ("surrogate", chosen.surrogate, SURROGATES),
        ("aggregate", chosen.aggregate, AGGREGATES),
        ("kl.estimator", chosen.kl.estimator, ESTIMATORS),
        ("rollout_correction.weight", chosen.rollout_correction.weight, WEIGHTS),
    ):
        assert choice is not None
        if is_user_code(choice):
            try:
                check_user_code(choice)
            except ValueError as error:
                need(False, f"{axis}: {error}")
        else:
            need(choice in known, f"{axis} must be one of {', '.join(known)} or path.py:function: got {choice!r}")
    if found:
        return found
    advantage, surrogate, kl, correction = chosen.advantage, str(chosen.surrogate), chosen.kl, chosen.rollout_correction
    sampled = name not in OFFLINE_METHODS
    own_keys = SURROGATES.get(surrogate, ())
    for key in sorted({key for keys in SURROGATES.values() for key in keys} - set(own_keys)):
        need(
            getattr(overrides, key) is None,
            f"{key} belongs to {_users(key)}, not to {surrogate}: leave it out or choose another surrogate",
        )
    low, high = chosen.clip_low, chosen.clip_high
    if surrogate in ("ppo_clip", "clip_cov", "cispo"):
        need(low is None or 0 <= low <= 1, f"clip_low must be in [0, 1]: got {low}")
    need(low is None or low >= 0, f"clip_low must not be negative: got {low}")
    need(high is None or high >= 0, f"clip_high must not be negative: got {high}")
    if chosen.dual_clip is not None:
        bound = 1 + (0.2 if high is None else high)
        need(chosen.dual_clip > bound, f"dual_clip must be above 1 + clip_high = {bound:g}: got {chosen.dual_clip:g}")
    for key in ("temperature_positive", "temperature_negative", "beta", "advantage_clip", "reward_clip", "cov_kl_coef"):
        value = getattr(chosen, key)
        need(value is None or value > 0, f"{key} must be above 0: got {value}")
    fraction, smoothing = chosen.cov_fraction, chosen.label_smoothing
    need(fraction is None or 0 < fraction <= 1, f"cov_fraction must be in (0, 1]: got {fraction}")
    need(smoothing is None or 0 <= smoothing < 0.5, f"label_smoothing must be in [0, 0.5): got {smoothing}")
    if overrides.importance_sampling_level is not None:
        need(
            surrogate not in NO_RATIO,
            f"importance_sampling_level belongs to methods that compare with the policy before the update: {name} does not",
        )
    if surrogate in ("gmpo", "clip_cov", "kl_cov"):
        need(
            chosen.importance_sampling_level == "token",
            f"importance_sampling_level must be token for {surrogate}, which looks at tokens itself: got {chosen.importance_sampling_level}",
        )
    if overrides.normalize not in (None, "none"):
        need(
            advantage in NORMALIZED,
            f"normalize belongs to advantages {', '.join(NORMALIZED)}: got {overrides.normalize} with {advantage}",
        )
    need(
        group_size > 1 or not (sampled and ADVANTAGES.get(str(advantage), False)),
        f"group_size must be at least 2: {advantage} compares the samples of a prompt, and one alone gives advantage 0",
    )
    if chosen.credit == "response":
        for key in ("gamma", "lam"):
            need(
                getattr(overrides, key) is None, f"{key} belongs to credit: {'gae' if key == 'lam' else 'discounted or gae'}"
            )
    need(overrides.lam is None or chosen.credit == "gae", "lam belongs to credit: gae")
    for key in ("gamma", "lam"):
        value = getattr(chosen, key)
        need(value is None or 0 <= value <= 1, f"{key} must be in [0, 1]: got {value}")
    need(
        advantage != "given" or not sampled,
        f"advantage: given belongs to {' and '.join(OFFLINE_METHODS)}, which do not sample",
    )
    if surrogate == "dpo":
        need(advantage == "given" and not sampled, "surrogate: dpo compares given pairs: write name: dpo")
    if not sampled:
        _offline_problems(name, overrides, need)
    need((kl.coef or 0) >= 0, f"kl.coef must not be negative: got {kl.coef}")
    if kl.place == "reward":
        need(
            not str(kl.estimator).endswith("+"),
            f"kl.estimator: {kl.estimator} changes the gradient, which a reward has not: write {str(kl.estimator)[:-1]}",
        )
    if kl.target is not None:
        need(kl.target > 0, f"kl.target must be above 0: got {kl.target}")
        need((kl.coef or 0) > 0, "kl.target moves kl.coef, which must start above 0")
    need((kl.horizon or 1) > 0, f"kl.horizon must be above 0: got {kl.horizon}")
    _correction_problems(correction, surrogate, need)
    buffer = chosen.overlong_buffer or 0
    need(buffer >= 0, f"overlong_buffer must not be negative: got {buffer}")
    need(
        not chosen.dynamic_sampling or group_size > 1,
        "dynamic_sampling needs a group_size of at least 2: one sample alone never differs from the others",
    )
    return found


def _users(key: str) -> str:
    return ", ".join(surrogate for surrogate, keys in SURROGATES.items() if key in keys)


def _offline_problems(name: str, overrides: Choices, need: Any) -> None:
    """Choices that learning from given responses does not have."""
    for key in ("advantage", "credit", "whiten", "advantage_clip", "reward_clip", "overlong_buffer", "overlong_penalty",
                "overlong_filter", "dynamic_sampling"):  # fmt: skip
        need(getattr(overrides, key) in (None, False), f"{key} has nothing to act on: {name} does not sample")
    need(overrides.surrogate is None, f"surrogate of {name} cannot be changed: choose another method")
    need(
        overrides.rollout_correction == CorrectionConfig(),
        f"rollout_correction has nothing to act on: {name} does not sample",
    )
    need(overrides.kl.place != "reward", f"kl.place: reward has nothing to act on: {name} has no rewards")
    need(name != "dpo" or not overrides.kl.coef, "kl.coef: dpo has the reference in its loss already, weighted by beta")
    need(
        name != "dpo" or overrides.aggregate in (None, "seq-mean-token-mean"),
        "aggregate must be seq-mean-token-mean for dpo: every pair counts alike",
    )


def _correction_problems(correction: CorrectionConfig, surrogate: str, need: Any) -> None:
    low, high = correction.low or 0.0, correction.high or 0.0
    need(0 <= low < high, f"rollout_correction.low and high must satisfy 0 <= low < high: got {low} and {high}")
    low, high = correction.reject_low or 0.0, correction.reject_high or 0.0
    need(
        0 <= low < high, f"rollout_correction.reject_low and reject_high must satisfy 0 <= low < high: got {low} and {high}"
    )
    if correction.old_logprobs_from == "engine":
        need(
            correction.weight == "none" and correction.reject == "none",
            "rollout_correction.old_logprobs_from: engine puts the engine's log-probs into the ratio itself: leave weight and reject none",
        )
        need(
            surrogate not in NO_RATIO,
            f"rollout_correction.old_logprobs_from: engine changes the ratio, which {surrogate} does not have",
        )


def notes(name: str, overrides: Choices, updates: int) -> list[str]:
    """What is worth knowing of these choices; `updates` are the optimizer steps of a rollout."""
    chosen = resolve(name, overrides)
    if (
        name not in OFFLINE_METHODS
        and chosen.surrogate == "log_likelihood"
        and updates > 1
        and chosen.rollout_correction.weight == "none"
    ):
        return [
            f"{name} has no ratio to the policy that sampled: of {updates} updates a step all but the first are off-policy; "
            "algorithm.updates_per_step: 1, or a correction, makes up for it"
        ]
    return []


def ignored_keys(name: str, overrides: Choices) -> list[tuple[str, str]]:
    """(key, reason) of each key of algorithm that was set and changes nothing."""
    chosen, found = resolve(name, overrides), []
    kl = overrides.kl
    if not chosen.kl.coef and name not in OFFLINE_METHODS and any((kl.estimator, kl.place, kl.target, kl.horizon)):
        found.append(("algorithm.kl", "its coef is 0"))
    if kl.horizon is not None and chosen.kl.target is None:
        found.append(("algorithm.kl.horizon", "without kl.target the coefficient is fixed"))
    correction = overrides.rollout_correction
    if chosen.rollout_correction.weight == "none" and (correction.low, correction.high, correction.outside) != (
        None,
        None,
        None,
    ):
        found.append(("algorithm.rollout_correction.low, high and outside", "weight is none"))
    if chosen.rollout_correction.reject == "none" and (correction.reject_low, correction.reject_high) != (None, None):
        found.append(("algorithm.rollout_correction.reject_low and reject_high", "reject is none"))
    if overrides.overlong_penalty is not None and not chosen.overlong_buffer:
        found.append(("algorithm.overlong_penalty", "overlong_buffer is 0"))
    return found
