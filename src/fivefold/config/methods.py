"""The field's methods and surrogates as rows of two tables. No torch here, so that `check` can refuse.

A method is a choice on each axis and what it learns from. A surrogate's row has its parameters with defaults and ranges, and
what its ratio compares with; its formula, under the same name, stands in algo/surrogates.py. The rows of
docs/methods.md are made of these by methods_page.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from typing import Annotated, Any, Literal, TypeVar

from fivefold.config.ranges import OneOf, Range, above, at_least, within

C = TypeVar("C", bound="Choices | KLConfig | CorrectionConfig")


@dataclass(frozen=True)
class KLConfig:
    """A penalty on the distance to the reference; each choice by method when left out."""

    estimator: str | None = None
    """k1, k2, k3 or abs; with + its value has the gradient of k2; or `path.py:function`."""
    coef: Annotated[float, at_least(0)] | None = None
    """0 turns the penalty off."""
    place: Literal["loss", "reward"] | None = None
    """In the loss of each token, or taken off the reward before advantages are made."""
    target: Annotated[float, above(0)] | None = None
    """With a target the coefficient moves so that the KL comes near it; fixed when left out."""
    horizon: Annotated[int, above(0)] | None = None
    """Samples over which the coefficient moves by about the relative distance to the target."""


@dataclass(frozen=True)
class CorrectionConfig:
    """What is done about the difference of engine and trainer; each choice by name when left out."""

    name: Annotated[str, OneOf(CORRECTIONS)] | None = None
    """A row of CORRECTIONS, which the other keys change."""
    weight: str | None = None
    """Weight of a token: trainer / engine of the token, the product over its response (sequence), or the geometric mean of
    that; none; or `path.py:function`."""
    low: Annotated[float, at_least(0)] | None = None
    high: Annotated[float, at_least(0)] | None = None
    """Bounds of the weight."""
    outside: Literal["truncate", "mask"] | None = None
    """A weight outside the bounds is put on the bound, or is 0."""
    reject: Literal["none", "token", "sequence", "geometric"] | None = None
    """The ratio by which tokens or whole responses are left out; they keep their place in the denominators."""
    reject_low: Annotated[float, at_least(0)] | None = None
    reject_high: Annotated[float, at_least(0)] | None = None
    """Bounds of the ratio that `reject` looks at."""
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
    gamma: Annotated[float, within("[0, 1]")] | None = None
    """Discount of a token (discounted, gae)."""
    lam: Annotated[float, within("[0, 1]")] | None = None
    """λ of GAE: 1 trusts returns only, 0 values only."""
    whiten: bool | None = None
    """Shift and scale advantages to mean 0 and variance 1 over all tokens of the step."""
    advantage_clip: Annotated[float, above(0)] | None = None
    """Advantages are kept within ± this."""
    importance_sampling_level: str | None = None
    """Compare with the old policy by token, sequence or sequence-token; or `path.py:function`."""
    surrogate: str | None = None
    """What a token adds to the objective: one of SURROGATES, or `path.py:function`. Its parameters follow, each with the
    default and the range of the surrogate's row."""
    clip_low: float | None = None
    clip_high: float | None = None
    """Bounds of the ratio below and above 1 (gmpo: of its logarithm)."""
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
    """Weight of the penalty that pulls kl_cov's tokens back."""
    beta: float | None = None
    """β of DPO."""
    label_smoothing: float | None = None
    """Share of pairs that DPO takes to be labelled the wrong way round."""
    aggregate: str | None = None
    """How tokens are weighted in the loss: one of AGGREGATES, or `path.py:function`."""
    penalty_aggregate: str | None = None
    """How tokens are weighted in the KL and the entropy of the loss; as by `aggregate` when left out."""
    entropy_coef: Annotated[float, within("[-1000, 1000]")] | None = None
    """Weight of the entropy bonus."""
    kl: KLConfig = field(default_factory=KLConfig)
    rollout_correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    reward_clip: Annotated[float, above(0)] | None = None
    """Rewards are kept within ± this."""
    overlong_buffer: Annotated[float, at_least(0)] | None = None
    """Tokens before `data.max_response_tokens` over which a penalty grows to `overlong_penalty`; below 1 a share of that
    length, 0 for none."""
    overlong_penalty: Annotated[float, at_least(0)] | None = None
    """The penalty of a response of the longest length."""
    overlong_filter: bool | None = None
    """Responses that were cut off carry no loss and do not count in its denominators."""
    dynamic_sampling: bool | None = None
    """Sample further prompts in the place of those whose responses all have the same reward."""


LearnsFrom = Literal["rollouts", "responses", "pairs"]
"""What a method learns from: responses that it samples, responses in the data, or pairs there, the better one first."""

COLUMNS: dict[LearnsFrom, tuple[str, ...]] = {
    "rollouts": (),
    "responses": ("response_key", "messages_key"),
    "pairs": ("chosen_key", "rejected_key"),
}
"""Keys of `data` that name the columns with what is learned."""


@dataclass(frozen=True)
class Method(Choices):
    """A published method; a choice that it leaves open is the usual one."""

    about: str = ""
    """Its paper, and where its numbers come from."""
    learns_from: LearnsFrom = "rollouts"

    @property
    def offline(self) -> bool:
        """It learns from responses in the data instead of sampling; they have reward 1, the worse one of a pair 0."""
        return self.learns_from != "rollouts"

    @property
    def samples_per_comparison(self) -> int:
        """Consecutive samples that stay together because the loss compares them."""
        return 2 if self.learns_from == "pairs" else 1

    @property
    def columns(self) -> tuple[str, ...]:
        """Keys of `data` that name the columns it learns from."""
        return COLUMNS[self.learns_from]

    @property
    def samples_in_evaluation(self) -> bool:
        """Evaluation samples responses where eval.generate is left out; of pairs the loss and the accuracy suffice."""
        return self.learns_from != "pairs"

    def samples_per_prompt(self, group_size: int) -> int:
        """Samples of each prompt in a step: as many as are drawn, or as stand in a row of the data."""
        return self.samples_per_comparison if self.offline else group_size


ADVANTAGES: dict[str, bool] = {
    "reward": False,
    "group": True,
    "leave_one_out": True,
    "length_weighted": True,
    "group_scaled": True,
    "pass_at_k": True,
    "greedy_baseline": False,
}
"""Advantage -> whether it compares the samples of a group."""

NORMALIZED = ("group", "leave_one_out", "pass_at_k")
"""Advantages that `normalize` applies to."""

CREDITS = ("response", "discounted", "gae")
WEIGHTS = ("none", "token", "sequence", "geometric")
RATIOS = ("token", "sequence", "sequence-token")
ESTIMATORS = ("k1", "k2", "k3", "abs", "k1+", "k3+", "abs+")
LEGACY_AGGREGATE = "micro-batch-token-mean"
AGGREGATES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant-length", LEGACY_AGGREGATE)

RatioReference = Literal["old", "reference", "nothing"]
"""What a ratio compares with: the policy before the step's updates, the reference, or nothing."""


@dataclass(frozen=True)
class Parameter:
    """A number that a surrogate takes from the key of the same name."""

    default: float | None
    """None: off."""
    range: Range


@dataclass(frozen=True)
class SurrogateRow:
    """Everything about a surrogate but its formula."""

    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    """Key of `algorithm` and field of the surrogate's class -> its default and range."""
    ratio_reference: RatioReference = "old"
    levels: tuple[str, ...] = RATIOS
    """Importance sampling levels that it can be computed at."""
    pairs: bool = False
    """It compares the two responses of a pair, so it belongs to methods that learn from pairs."""

    def numbers(self, chosen: Mapping[str, float | None]) -> dict[str, float | None]:
        """Every parameter: the chosen number, or its default."""
        return {
            name: parameter.default if chosen.get(name) is None else chosen[name]
            for name, parameter in self.parameters.items()
        }


def _clip(low: float, high: float) -> dict[str, Parameter]:
    """Bounds of a ratio: 1 - low and 1 + high."""
    return {"clip_low": Parameter(low, within("[0, 1]")), "clip_high": Parameter(high, at_least(0))}


SURROGATES: dict[str, SurrogateRow] = {
    "ppo_clip": SurrogateRow({**_clip(0.2, 0.2), "dual_clip": Parameter(None, above(1))}),
    "gmpo": SurrogateRow(
        {"clip_low": Parameter(0.4, at_least(0)), "clip_high": Parameter(0.4, at_least(0))}, levels=("token",)
    ),
    # 1: the weight is not bounded below, as in the paper, which names no upper bound; 0.2 is what PPO takes.
    "cispo": SurrogateRow(_clip(1.0, 0.2)),
    "sapo": SurrogateRow(
        {"temperature_positive": Parameter(1.0, above(0)), "temperature_negative": Parameter(1.05, above(0))}
    ),
    "clip_cov": SurrogateRow(
        {
            **_clip(0.2, 0.2),
            "cov_fraction": Parameter(2e-4, within("(0, 1]")),
            "cov_low": Parameter(1.0, Range()),
            "cov_high": Parameter(5.0, Range()),
        },
        levels=("token",),
    ),
    "kl_cov": SurrogateRow(
        {"cov_fraction": Parameter(2e-4, within("(0, 1]")), "cov_kl_coef": Parameter(1.0, above(0))}, levels=("token",)
    ),
    "log_likelihood": SurrogateRow(ratio_reference="nothing", levels=()),
    "dpo": SurrogateRow(
        {"beta": Parameter(0.1, above(0)), "label_smoothing": Parameter(0.0, within("[0, 0.5)"))},
        ratio_reference="reference",
        levels=(),
        pairs=True,
    ),
}

PARAMETERS = tuple(sorted({key for row in SURROGATES.values() for key in row.parameters}))
"""Keys of `algorithm` that are parameters of surrogates."""

USER_SURROGATE = SurrogateRow()
"""The row of a function of the user's."""


def surrogate_row(surrogate: str) -> SurrogateRow:
    """The row of a surrogate's name or of `path.py:function`."""
    return SURROGATES.get(surrogate, USER_SURROGATE)


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

NAMES: dict[str, Collection[str]] = {
    "advantage": ADVANTAGES,
    "credit": CREDITS,
    "importance_sampling_level": RATIOS,
    "surrogate": SURROGATES,
    "aggregate": AGGREGATES,
    "penalty_aggregate": AGGREGATES,
    "kl.estimator": ESTIMATORS,
    "rollout_correction.weight": WEIGHTS,
}
"""Axis -> the names that it takes besides `path.py:function`."""

USUAL = Choices(
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

_GROUP = Method(normalize="group")

METHODS: dict[str, Method] = {
    "ppo": Method(
        about=(
            "Schulman et al. 1707.06347, GAE 1506.02438. γ = 1 is the field's; λ = 1 is that of verl, siiRL, SkyRL, "
            "AReaL and slime (the paper and ROLL: 0.95). Advantages are whitened over the step, as in verl, siiRL and "
            "SkyRL. The critic: [below](#ppo-with-a-critic)."
        ),
        advantage="reward",
        credit="gae",
        gamma=1.0,
        lam=1.0,
        whiten=True,
    ),
    "grpo": replace(
        _GROUP,
        about=(
            "DeepSeekMath, 2402.03300, equation 3: unbiased standard deviation, ε 1e-6 (verl and five others; TRL "
            "1e-4). The paper's KL coefficient is 0.04; 0.001 is verl's, siiRL's, SkyRL's and Trinity's."
        ),
        aggregate="seq-mean-token-mean",
        kl=KLConfig(coef=0.001),
    ),
    "dr_grpo": Method(
        about=(
            "Understanding R1-Zero-Like Training, 2503.20783: no division by the standard deviation or by a response's "
            "own length."
        ),
        aggregate="constant-length",
    ),
    "dapo": replace(
        _GROUP,
        about=(
            "2503.14476: clip-higher 0.28, tokens count alike (equation 8), soft overlong punishment (equation 13) "
            "over the last fifth of a response (the paper: 4096 of 20480 tokens), dynamic sampling (section 3.2)."
        ),
        clip_high=0.28,
        overlong_buffer=0.2,
        dynamic_sampling=True,
    ),
    "gspo": replace(
        _GROUP,
        about=(
            "2507.18071, equation 5; bounds of section 5.1. `importance_sampling_level: sequence-token` is its "
            "GSPO-token (equation 14): the same gradient unless the tokens of a response have different advantages."
        ),
        importance_sampling_level="sequence",
        clip_low=3e-4,
        clip_high=4e-4,
        aggregate="seq-mean-token-mean",
    ),
    "cispo": replace(
        _GROUP,
        about="MiniMax-M1, 2506.13585, equation 4: not bounded below; the paper names no upper bound, 0.2 is PPO's.",
        surrogate="cispo",
    ),
    "sapo": replace(
        _GROUP,
        about="2511.20347: τ 1.0 where the advantage is positive, 1.05 elsewhere.",
        surrogate="sapo",
        aggregate="seq-mean-token-mean",
    ),
    "rloo": Method(
        about=(
            "Back to Basics, 2402.14740: REINFORCE on whole responses against the mean of the others. With `normalize: "
            "group` and `aggregate: token-mean` it is NeMo-RL's leave-one-out with standard deviation."
        ),
        advantage="leave_one_out",
        surrogate="log_likelihood",
        aggregate="seq-mean-token-sum",
    ),
    "reinforce_plus_plus": Method(
        about=(
            "2501.03262: return from each token on, KL in the reward (k1), whitened over the step. The paper names no "
            "coefficient; 0.001 is the one of the other rows."
        ),
        advantage="reward",
        credit="discounted",
        gamma=1.0,
        whiten=True,
        kl=KLConfig(estimator="k1", coef=0.001, place="reward"),
    ),
    "reinforce_plus_plus_baseline": Method(
        about=(
            "2501.03262, section on the baseline form: the group's mean as baseline, whitened over the step, KL as a "
            "loss of its own (k2)."
        ),
        whiten=True,
        kl=KLConfig(estimator="k2", coef=0.001),
    ),
    "remax": Method(
        about=(
            "2310.10505: the most likely response to each prompt is sampled besides, and its reward is the baseline. "
            "The paper draws one sample per prompt: `group_size: 1`."
        ),
        advantage="greedy_baseline",
        surrogate="log_likelihood",
        aggregate="seq-mean-token-sum",
    ),
    "opo": Method(
        about="2505.23585: the baseline of least variance, weighted by length; exact on-policy, so one update per step.",
        advantage="length_weighted",
        surrogate="log_likelihood",
    ),
    "gpg": Method(
        about="2504.02546: centered rewards, scaled up by samples / samples of groups with reward variance.",
        advantage="group_scaled",
        surrogate="log_likelihood",
    ),
    "gmpo": replace(
        _GROUP,
        about="2507.20673: the geometric mean of clipped ratios, bounds e^-0.4 and e^0.4.",
        surrogate="gmpo",
        aggregate="seq-mean-token-mean",
    ),
    "clip_cov": replace(
        _GROUP,
        about=(
            "2505.22617; share and bounds as in the authors' code in verl. Covariance and choice are over the whole "
            "update, so later updates of a step cost one more forward pass."
        ),
        surrogate="clip_cov",
    ),
    "kl_cov": replace(
        _GROUP,
        about="2505.22617; share and coefficient as in the authors' code in verl. It costs what clip_cov does.",
        surrogate="kl_cov",
    ),
    "sft": Method(
        about="Cross-entropy on the responses of the data, mean over tokens.",
        learns_from="responses",
        advantage="reward",
        surrogate="log_likelihood",
    ),
    "dpo": Method(
        about=(
            "2305.18290, equation 7, β = 0.1 as in its experiments; `label_smoothing` is the conservative form. Every "
            "pair counts alike."
        ),
        learns_from="pairs",
        advantage="reward",
        surrogate="dpo",
        aggregate="seq-mean-token-mean",
    ),
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
    """The method's row with `overrides` over it: every axis has a choice, and every parameter of the surrogate a number."""
    method, overrides = METHODS[name], overrides or Choices()
    chosen = reduce(_over, (method, overrides), USUAL)
    # A named correction stands below the keys that change it.
    named = CORRECTIONS[chosen.rollout_correction.name or "none"]
    correction = reduce(_over, (named, method.rollout_correction, overrides.rollout_correction), USUAL.rollout_correction)
    # The row's numbers are those of its own surrogate.
    same = chosen.surrogate == (method.surrogate or USUAL.surrogate)
    numbers = {key: getattr(chosen if same else overrides, key) for key in PARAMETERS}
    numbers |= surrogate_row(str(chosen.surrogate)).numbers(numbers)
    penalty_aggregate = chosen.penalty_aggregate or chosen.aggregate
    return replace(chosen, rollout_correction=correction, penalty_aggregate=penalty_aggregate, **numbers)
