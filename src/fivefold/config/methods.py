"""Methods and surrogates as rows of two tables. No torch here, so that `check` can refuse.

A method is a choice on each axis plus what it learns from. A surrogate's row has its parameters with defaults and ranges,
and what its ratio compares with; its formula is in algo/surrogates.py under the same name. methods_page.py writes
docs/methods.md from these rows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from typing import Annotated, Any, Literal, TypeVar

from fivefold.config.ranges import OneOf, Range, above, at_least, within
from fivefold.user_code import is_user_code

C = TypeVar("C", bound="Choices | KLConfig | CorrectionConfig | ExpertConfig | ProcessRewardConfig")


@dataclass(frozen=True)
class KLConfig:
    """A penalty on the distance to the reference; each choice that is left out is the method's."""

    estimator: str | None = None
    """Estimator of the KL: k1, k2, k3 or abs, or `path.py:function`. A trailing + keeps the value but uses the gradient of
    k2."""
    coef: Annotated[float, at_least(0)] | None = None
    """Weight of the penalty; 0 turns it off."""
    place: Literal["loss", "reward"] | None = None
    """Place of the penalty: in the loss of each token, or subtracted from the reward before advantages are computed."""
    target: Annotated[float, above(0)] | None = None
    """Target for the KL: the coefficient adapts to reach it. The coefficient is fixed if left out."""
    horizon: Annotated[int, above(0)] | None = None
    """Number of samples over which the coefficient changes by about the relative distance to the target."""
    ratio_weighted: bool | None = None
    """Multiply the penalty of a token by π / π_old: samples of the old policy then give an unbiased estimate of the new
    policy's KL (DeepSeek-V3.2, 2512.02556)."""
    reward_coef: Annotated[float, at_least(0)] | None = None
    """Weight of a second penalty, subtracted from the reward in addition to the one in the loss; 0 (none) if left out."""
    reward_estimator: str | None = None
    """Estimator of the second penalty (`reward_coef`): k1 (if left out), k2, k3, abs, or `path.py:function`."""


@dataclass(frozen=True)
class CorrectionConfig:
    """Correction of the mismatch between engine and trainer; each choice that is left out is that of `name`."""

    name: Annotated[str, OneOf(CORRECTIONS)] | None = None
    """A row of CORRECTIONS, which the other keys override."""
    weight: str | None = None
    """Importance weight of a token: the ratio trainer / engine of the token (token), its product over the response
    (sequence), or the geometric mean of that product (geometric); none; or `path.py:function`."""
    low: Annotated[float, at_least(0)] | None = None
    high: Annotated[float, at_least(0)] | None = None
    """Bounds of the importance weight."""
    outside: Literal["truncate", "mask"] | None = None
    """Treatment of a weight outside the bounds: set to the bound (truncate), or to 0 (mask)."""
    reject: Literal["none", "token", "sequence", "geometric"] | None = None
    """Ratio that decides which tokens or whole responses are left out; they still count in the denominators."""
    reject_low: Annotated[float, at_least(0)] | None = None
    reject_high: Annotated[float, at_least(0)] | None = None
    """Bounds of the `reject` ratio."""
    reject_divergence: dict[str, Annotated[float, above(0)]] | None = None
    """Upper bounds of further statistics of d = log (trainer / engine), each a row of DIVERGENCES; tokens or responses
    beyond one are left out. k2 = d²/2 and k3 = e^d - 1 - d of a token, or their sum, mean or maximum in a response. max_drop
    is the largest -d in a response (9.21: no token may be 10,000 times less likely under the trainer). second_moment leaves
    out the tokens with the largest d² until the mean is below the bound: M2PO (2510.01161)."""
    old_logprobs_from: Literal["trainer", "engine", "loglinear"] | None = None
    """Source of the old log-probs: the trainer before the step's updates, the engine, or loglinear. loglinear needs no extra
    pass: it interpolates between the engine's and the current log-probs (A-3PO, 2512.06547). A token sampled s steps ago is
    (s - 1) / s of the way to the current one."""


@dataclass(frozen=True)
class ExpertConfig:
    """Weight of the responses in `data.expert`, which are imitated in addition to the sampled ones; each choice is the
    method's if left out."""

    weight: Annotated[float, within("[0, 1]")] | None = None
    """μ: the loss is (1 - μ) of the sampled responses' loss plus μ of the expert's cross-entropy. No expert if left out,
    unless the method has one."""
    final_weight: Annotated[float, within("[0, 1]")] | None = None
    """μ after its decay; constant if left out."""
    warmup_updates: Annotated[int, at_least(0)] | None = None
    """Number of optimizer steps over which μ rises from 0."""
    decay_updates: Annotated[int, at_least(0)] | None = None
    """Number of optimizer steps after the warm-up over which μ decays to `final_weight`, along a cosine."""
    token_weight: Literal["none", "phi"] | None = None
    """Token weight; phi: p (1 - p), where p is the token's probability."""
    aggregate: str | None = None
    """Aggregation of the expert's tokens: one of AGGREGATES."""


@dataclass(frozen=True)
class ProcessRewardConfig:
    """Token rewards from an implicit process reward model: a language model (`prm`) that learns with the policy from
    outcomes alone, PRIME (2502.01456). Each choice is the method's if left out."""

    coef: Annotated[float, at_least(0)] | None = None
    """Weight of the token rewards in the advantages, each compared with those of the other responses to the prompt; 0: no
    process reward model."""
    outcome_coef: Annotated[float, at_least(0)] | None = None
    """Weight of the outcome rewards of responses, compared in the same way."""
    beta: Annotated[float, above(0)] | None = None
    """β: the reward of a token is β (log π_prm - log π_ref), the score of a response their sum."""
    reference: Literal["initial", "policy"] | None = None
    """π_ref: the initial model (or `prm.reference_path`), or the policy before the step's updates."""
    granularity: Literal["token", "response"] | None = None
    """Granularity of the rewards: one per token except the last of a response, which has the outcome; or their sum at that
    last token."""
    normalize: Literal["step", "none"] | None = None
    """Divide the rewards by the largest absolute return in the whole step, the sum of the rewards from a token on."""
    loss: Literal["ce", "dpo"] | None = None
    """Loss of the process reward model: cross-entropy of σ(score) and the outcome, or DPO of a response's score. DPO
    compares it with the mean score, before the step's updates, of the prompt's responses with a worse outcome (for a wrong
    response: better)."""
    target: Literal["correct", "reward"] | None = None
    """The outcome: whether a response is correct, or its reward, which must then be between 0 and 1."""
    update: Literal["before", "after"] | None = None
    """Whether the model learns from the step's responses before or after it rewards their tokens."""


@dataclass(frozen=True)
class Choices:
    """One choice per axis; None stands for the method's choice."""

    advantage: str | None = None
    """Comparison of the rewards of samples: one of ADVANTAGES, or `path.py:function`."""
    normalize: Literal["group", "batch", "mean", "none"] | None = None
    """Divisor of the advantages: the standard deviation of the rewards in the group (group) or the whole step (batch), or
    the mean reward of the group (mean)."""
    baseline_shift: Annotated[float, within("[-1000, 1000]")] | None = None
    """Added to the group's mean reward, the baseline; below 0, good responses weigh more than bad ones."""
    baseline_temperature: Annotated[float, above(0)] | None = None
    """τ of log_mean_exp: near 0 the baseline is the best reward of the group, for large τ the mean. step_log_mean_exp uses
    the whole step instead of the group."""
    credit: str | None = None
    """How a response's advantage is assigned to its tokens: the same for all (response), as discounted return, or by GAE
    with a critic; or `path.py:function`."""
    gamma: Annotated[float, within("[0, 1]")] | None = None
    """Discount per token (discounted, gae)."""
    lam: Annotated[float, within("[0, 1]")] | None = None
    """λ of GAE: 1 uses returns only, 0 values only."""
    bootstrap_truncated: bool | None = None
    """Whether GAE continues a truncated response with the critic's value of its whole text, as in AReaL. Otherwise it ends
    with 0, as in verl, siiRL, SkyRL, ROLL and Trinity-RFT."""
    token_baseline: bool | None = None
    """Subtract from each token's return the minimum-variance baseline over the responses to the prompt that have such a
    token."""
    whiten: bool | None = None
    """Shift and scale advantages to mean 0 and variance 1 over all tokens of the step."""
    whiten_by: Literal["step", "domain", "group"] | None = None
    """Set of tokens to whiten over: the whole step, each domain (`data.domains`), or the responses to each prompt."""
    advantage_clip: Annotated[float, above(0)] | None = None
    """Clip advantages to ± this."""
    importance_sampling_level: str | None = None
    """Level of the ratio to the old policy: token, sequence or sequence-token; or `path.py:function`."""
    surrogate: str | None = None
    """Per-token objective: one of SURROGATES, or `path.py:function`. Its parameters follow; the surrogate's row has their
    defaults and ranges."""
    clip_low: float | None = None
    clip_high: float | None = None
    """Bounds of the ratio below and above 1 (gmpo: of its logarithm)."""
    dual_clip: float | None = None
    """c of dual-clip PPO; off if left out."""
    temperature_positive: float | None = None
    temperature_negative: float | None = None
    """Steepness of SAPO's gate for advantages above 0, and for all others."""
    cov_fraction: float | None = None
    """Share of the update's tokens that clip_cov leaves out or kl_cov penalizes."""
    cov_low: float | None = None
    cov_high: float | None = None
    """Range of the covariance from which clip_cov chooses tokens."""
    cov_kl_coef: float | None = None
    """Weight of kl_cov's penalty on its tokens."""
    beta: float | None = None
    """β of DPO."""
    label_smoothing: float | None = None
    """Share of pairs that DPO assumes to be labeled the wrong way round."""
    tau: float | None = None
    """τ of OPMD: the objective is divided by 1 + τ."""
    eta: float | None = None
    """η of sppo: the log-ratio of a response is pulled toward η times its advantage."""
    clip_mode: str | None = None
    """Tokens that rec leaves out. none: no tokens; one_sided: those whose ratio is beyond the bound in the direction of
    their advantage; two_sided: those outside either bound; ring: as two_sided, but tokens far out on the other side stay."""
    ring_low: float | None = None
    ring_high: float | None = None
    """Distance of the ring's outer edge below and above a ratio of 1."""
    token_weight: str | None = None
    """Token weight of rec: none; ratio; or advantage, e^(A / weight_temperature)."""
    weight_temperature: float | None = None
    likelihood_coef: float | None = None
    """Weight of the log-likelihood of all samples, which rec adds."""
    proximal_coef: float | None = None
    """Weight of the squared log-ratio to the old policy, which rec subtracts."""
    drift_coef: float | None = None
    """Weight of cpgd's pull toward the old policy."""
    divergence: str | None = None
    """Divergence that dppo bounds by clip_low and clip_high: the total variation (tv) or the KL (kl) of a token against all
    others."""
    ratio_cap: float | None = None
    """Maximum ratio in dppo's token weights; off if left out."""
    aggregate: str | None = None
    """Weighting of tokens in the loss: one of AGGREGATES, or `path.py:function`."""
    penalty_aggregate: str | None = None
    """Aggregation for the KL and entropy terms; `aggregate` if left out."""
    entropy_coef: Annotated[float, within("[-1000, 1000]")] | None = None
    """Weight of the entropy bonus."""
    kl: KLConfig = field(default_factory=KLConfig)
    rollout_correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    expert: ExpertConfig = field(default_factory=ExpertConfig)
    process_reward: ProcessRewardConfig = field(default_factory=ProcessRewardConfig)
    reward_shift: Annotated[float, within("[-1e6, 1e6]")] | None = None
    """Shift added to every reward, after the overlong penalty."""
    reward_scale: Annotated[float, within("(0, 1e6]")] | None = None
    """Factor of every reward, after `reward_shift`."""
    reward_clip: Annotated[float, above(0)] | None = None
    """Clip rewards to ± this."""
    overlong_buffer: Annotated[float, at_least(0)] | None = None
    """Number of tokens before `data.max_response_tokens` over which a penalty grows to `overlong_penalty`; below 1 a share
    of that length, 0 for none."""
    overlong_penalty: Annotated[float, at_least(0)] | None = None
    """Penalty of a response of maximum length."""
    overlong_filter: bool | None = None
    """Leave truncated responses out of the loss and its denominators."""
    overlong_zero: bool | None = None
    """Give truncated responses with reward 0 the advantage 0; they still count in means and denominators."""
    difficulty_low: Annotated[float, within("[-1e9, 1e9]")] | None = None
    difficulty_high: Annotated[float, within("[-1e9, 1e9]")] | None = None
    """Bounds on a prompt's mean reward: only prompts above the one and below the other count. Responses to all others carry
    no loss and do not count in the denominators. Off if left out."""
    difficulty_by: Literal["reward", "correct", "spread"] | None = None
    """Quantity that `difficulty_low` and `difficulty_high` bound: the mean reward, the mean correctness (1 or 0), or the
    spread. The spread is the difference between the best and the worst reward, as the method shapes rewards; with it,
    prompts are left out after `whiten`."""
    dynamic_sampling: bool | None = None
    """Replace prompts whose responses all have the same reward: sample further prompts."""
    dynamic_sampling_by: Literal["reward", "shaped_reward"] | None = None
    """Reward that dynamic sampling compares: the reward itself, or as the method shapes it (`overlong_buffer`,
    `reward_clip`)."""
    dynamic_sampling_low: Annotated[float, within("[-1e9, 1e9]")] | None = None
    dynamic_sampling_high: Annotated[float, within("[-1e9, 1e9]")] | None = None
    """Bounds of dynamic sampling on a prompt's mean reward, instead of equal rewards: keep prompts not below the one and not
    above the other."""
    dynamic_sampling_max_tokens: Annotated[int, above(0)] | None = None
    """Maximum response length for dynamic sampling, in tokens: prompts with a longer response are not kept."""


LearnsFrom = Literal["rollouts", "responses", "pairs"]
"""Data that a method learns from: sampled responses, responses in the data, or pairs in the data, the better one first."""

COLUMNS: dict[LearnsFrom, tuple[str, ...]] = {
    "rollouts": (),
    "responses": ("response_key", "messages_key"),
    "pairs": ("chosen_key", "rejected_key"),
}
"""Keys of `data` that name the columns to learn from."""


@dataclass(frozen=True)
class Method(Choices):
    """A published method; a choice that it leaves open is the usual one."""

    about: str = ""
    """The paper, and the source of its numbers."""
    learns_from: LearnsFrom = "rollouts"

    @property
    def offline(self) -> bool:
        """Whether the method learns from responses in the data and does not sample. These responses have reward 1, the worse
        one of a pair 0."""
        return self.learns_from != "rollouts"

    @property
    def samples_per_comparison(self) -> int:
        """Number of consecutive samples that stay together because the loss compares them."""
        return 2 if self.learns_from == "pairs" else 1

    @property
    def columns(self) -> tuple[str, ...]:
        """Keys of `data` that name the columns to learn from."""
        return COLUMNS[self.learns_from]

    @property
    def samples_in_evaluation(self) -> bool:
        """Whether evaluation samples responses if eval.generate is left out; for pairs, loss and accuracy suffice."""
        return self.learns_from != "pairs"

    def samples_per_prompt(self, group_size: int) -> int:
        """Number of samples per prompt in a step: those sampled, or those in a row of the data."""
        return self.samples_per_comparison if self.offline else group_size


ADVANTAGES: dict[str, bool] = {
    "reward": False,
    "group": True,
    "leave_one_out": True,
    "length_weighted": True,
    "group_scaled": True,
    "pass_at_k": True,
    "greedy_baseline": False,
    "log_mean_exp": True,
    "nonzero_scaled": True,
    "step_log_mean_exp": False,
    "step_mean": False,
}
"""Advantage -> whether it compares the samples of a group."""

NORMALIZED_BY_MEAN = ("group",)
"""Advantages that `normalize: mean` applies to."""
NORMALIZED = ("group", "leave_one_out", "pass_at_k", "step_mean")
"""Advantages that `normalize` applies to."""

SECOND_MOMENT = "second_moment"
DIVERGENCES = (*(f"{over}_{k}" for over in ("token", "sum", "mean", "max") for k in ("k2", "k3")), "max_drop", SECOND_MOMENT)
"""Statistics, besides the ratio, by which tokens or responses are left out."""
CREDITS = ("response", "discounted", "gae")
WEIGHTS = ("none", "token", "sequence", "geometric")
RATIOS = ("token", "sequence", "sequence-token")
ESTIMATORS = ("k1", "k2", "k3", "abs", "k1+", "k3+", "abs+")
LEGACY_AGGREGATE = "micro-batch-token-mean"
AGGREGATES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant-length", LEGACY_AGGREGATE)

RatioReference = Literal["old", "reference", "nothing"]
"""The ratio's denominator: the policy before the step's updates, the reference, or nothing."""


@dataclass(frozen=True)
class Parameter:
    """A number or a name that a surrogate reads from the key of the same name."""

    default: float | str | None
    """Default value; None: off."""
    range: Range | OneOf


@dataclass(frozen=True)
class SurrogateRow:
    """All of a surrogate's data except its formula."""

    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    """Key of `algorithm` and field of the surrogate's class -> its default and range."""
    ratio_reference: RatioReference = "old"
    levels: tuple[str, ...] = RATIOS
    """Importance sampling levels that the surrogate supports."""
    pairs: bool = False
    """Whether it compares the two responses of a pair; it then belongs to methods that learn from pairs."""
    vanishes: bool = False
    """Whether a sample without advantages contributes exactly zero to value and gradient and does not affect other
    samples."""
    unless: tuple[str, ...] = ()
    """Parameters that prevent vanishing if they are not 0."""

    def numbers(self, chosen: Mapping[str, float | str | None]) -> dict[str, float | str | None]:
        """Return every parameter: the chosen value, or its default."""
        return {
            name: parameter.default if chosen.get(name) is None else chosen[name]
            for name, parameter in self.parameters.items()
        }


def _clip(low: float, high: float) -> dict[str, Parameter]:
    """Return the parameters for the bounds of a ratio, 1 - low and 1 + high."""
    return {"clip_low": Parameter(low, within("[0, 1]")), "clip_high": Parameter(high, at_least(0))}


SURROGATES: dict[str, SurrogateRow] = {
    "ppo_clip": SurrogateRow({**_clip(0.2, 0.2), "dual_clip": Parameter(None, above(1))}, vanishes=True),
    "gmpo": SurrogateRow(
        {"clip_low": Parameter(0.4, at_least(0)), "clip_high": Parameter(0.4, at_least(0))},
        levels=("token",),
        vanishes=True,
    ),
    # 1: no lower bound, as in the paper, which gives no upper bound; 0.2 is PPO's.
    "cispo": SurrogateRow(_clip(1.0, 0.2), vanishes=True),
    "sapo": SurrogateRow(
        {"temperature_positive": Parameter(1.0, above(0)), "temperature_negative": Parameter(1.05, above(0))},
        vanishes=True,
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
    "log_likelihood": SurrogateRow(ratio_reference="nothing", levels=(), vanishes=True),
    "opmd": SurrogateRow({"tau": Parameter(1.0, at_least(0))}, ratio_reference="nothing", levels=(), vanishes=True),
    "topr": SurrogateRow(levels=("token",), vanishes=True),
    # Bounds, ring and coefficients are those of Trinity's default_args, whose authors are the paper's.
    "rec": SurrogateRow(
        {
            "clip_mode": Parameter("one_sided", OneOf(("none", "one_sided", "two_sided", "ring"))),
            **_clip(0.2, 0.2),
            "ring_low": Parameter(0.6, within("[0, 1]")),
            "ring_high": Parameter(2.0, at_least(0)),
            "token_weight": Parameter("none", OneOf(("none", "ratio", "advantage"))),
            "weight_temperature": Parameter(1.0, above(0)),
            "likelihood_coef": Parameter(0.0, at_least(0)),
            "proximal_coef": Parameter(0.0, at_least(0)),
        },
        levels=("token", "sequence"),
        vanishes=True,
        unless=("likelihood_coef", "proximal_coef"),
    ),
    "dppo": SurrogateRow(
        {
            "divergence": Parameter("tv", OneOf(("tv", "kl"))),
            "clip_low": Parameter(0.2, at_least(0)),
            "clip_high": Parameter(0.2, at_least(0)),
            "ratio_cap": Parameter(None, above(0)),
        },
        levels=("token",),
        vanishes=True,
    ),
    "cpgd": SurrogateRow(
        {**_clip(0.2, 0.2), "drift_coef": Parameter(0.0, at_least(0))},
        levels=("token",),
        vanishes=True,
        unless=("drift_coef",),
    ),
    "sppo": SurrogateRow({"eta": Parameter(1.0, above(0))}, levels=("token",)),
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
"""Row of a surrogate that is a user's function."""


def surrogate_row(surrogate: str) -> SurrogateRow:
    """Return the row for a surrogate's name or for `path.py:function`."""
    return SURROGATES.get(surrogate, USER_SURROGATE)


def vanishes(chosen: Choices) -> bool:
    """Whether the surrogate of a sample without advantages is zero; False if a user's function is involved."""
    row = surrogate_row(str(chosen.surrogate))
    parts = (chosen.advantage, chosen.importance_sampling_level, chosen.rollout_correction.weight)
    if any(is_user_code(str(part)) for part in parts):
        return False
    return row.vanishes and not any(getattr(chosen, name) for name in row.unless)


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
    "expert.aggregate": AGGREGATES,
    "kl.estimator": ESTIMATORS,
    "kl.reward_estimator": ESTIMATORS,
    "rollout_correction.weight": WEIGHTS,
}
"""Axis -> the names that it accepts besides `path.py:function`."""

USUAL = Choices(
    advantage="group",
    normalize="none",
    credit="response",
    bootstrap_truncated=False,
    token_baseline=False,
    whiten=False,
    whiten_by="step",
    importance_sampling_level="token",
    surrogate="ppo_clip",
    aggregate="token-mean",
    entropy_coef=0.0,
    kl=KLConfig(
        estimator="k3", coef=0.0, place="loss", horizon=10000, ratio_weighted=False, reward_coef=0.0, reward_estimator="k1",
    ),
    rollout_correction=CorrectionConfig(
        name="none", weight="none", low=0.0, high=2.0, outside="truncate", reject="none", reject_low=0.0, reject_high=2.0,
        reject_divergence={}, old_logprobs_from="trainer",
    ),
    expert=ExpertConfig(warmup_updates=0, decay_updates=0, token_weight="none", aggregate="token-mean"),
    process_reward=ProcessRewardConfig(
        coef=0.0, outcome_coef=1.0, beta=0.05, reference="initial", granularity="token", normalize="step", loss="ce",
        target="correct", update="before",
    ),
    reward_shift=0.0,
    reward_scale=1.0,
    overlong_buffer=0.0,
    overlong_penalty=1.0,
    overlong_filter=False,
    overlong_zero=False,
    difficulty_by="reward",
    dynamic_sampling=False,
    dynamic_sampling_by="reward",
)  # fmt: skip
"""Choices for axes that a method's row does not name."""

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
    "otb": Method(
        about=(
            "2602.07078: return from each token on, against the baseline of least variance: the mean of the returns of the "
            "responses to the prompt, weighted by the squared norm of their scores so far, Σ (1 - 2π + Σπ²). Where a "
            "response is the only one that is so long there is none, as in verl. Σπ² costs one more forward pass of the "
            "policy."
        ),
        advantage="reward",
        credit="discounted",
        gamma=1.0,
        token_baseline=True,
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
    "opmd": Method(
        about=(
            "Trinity-RFT, 2505.17826: REINFORCE against the mean of the group, divided by 1 + τ, which regularizes it "
            "toward the policy itself. `advantage: log_mean_exp` compares with τ log mean e^(r/τ) instead. Numbers are "
            "Trinity's."
        ),
        surrogate="opmd",
        kl=KLConfig(estimator="k2", coef=0.001),
    ),
    "asymre": Method(
        about=(
            "2506.20520: REINFORCE on samples of another policy, with a baseline below the mean reward, so that good "
            "responses weigh more than bad ones. Shift and τ are Trinity's."
        ),
        baseline_shift=-0.1,
        surrogate="opmd",
    ),
    "topr": Method(
        about=(
            "2503.14286, equation 8: bad responses are weighted by the ratio up to 1, good ones are imitated as they are. "
            "Good and bad is the sign of the advantage; weights are those of tokens, as in Trinity and ROLL."
        ),
        advantage="reward",
        surrogate="topr",
        kl=KLConfig(estimator="k2", coef=0.001),
    ),
    "rec": Method(
        about=(
            "2509.24203: REINFORCE against the mean of the group, which leaves out tokens by their ratio: clipped on one "
            "side, without importance weights. `clip_mode`, `token_weight`, `proximal_coef` (Kimi k1.5, 2501.12599) and "
            "`likelihood_coef` (AsymRE) give the paper's other forms."
        ),
        surrogate="rec",
    ),
    "maxrl": Method(
        about="2602.02710: (r - mean) / mean of the group, for rewards of 0 and 1 the gradient of the log of the pass rate.",
        normalize="mean",
    ),
    "dppo": replace(
        _GROUP,
        about=(
            "2602.04879, equations 13 and 14: a token is left out where its probability, not its ratio, has moved beyond a "
            "bound of the total variation (or of the KL). The bounds 0.2 are PPO's."
        ),
        surrogate="dppo",
    ),
    "cpgd": replace(
        _GROUP,
        about=(
            "2505.12504: the log-prob of a token is weighted and clipped, and not its ratio, with a pull to the old policy "
            "whose weight is that of siiRL's scripts."
        ),
        surrogate="cpgd",
        drift_coef=0.001,
    ),
    "m2po": replace(
        _GROUP,
        about=(
            "2510.01161: tokens whose log-probs by engine and trainer are the furthest apart are left out until the mean "
            "of the squared distance is below 0.04."
        ),
        rollout_correction=CorrectionConfig(reject_divergence={SECOND_MOMENT: 0.04}),
    ),
    "sppo": Method(
        about=(
            "2405.00675, as in verl's recipe: the log-ratio of a response is pulled to η times its reward less "
            "log mean e^r of the step's, the mean over responses."
        ),
        advantage="step_log_mean_exp",
        surrogate="sppo",
        aggregate="seq-mean-token-mean",
    ),
    "prime": Method(
        about=(
            "2502.01456: leave-one-out of the outcome and of every token's implicit process reward, the return from each "
            "token on, whitened over the step. Coefficients, β and normalization are those of the authors' code in verl. "
            "The process reward model: [below](#prime-and-its-process-reward-model). The paper samples prompts whose share "
            "of right responses is between 0.2 and 0.8: `dynamic_sampling_low` and `dynamic_sampling_high`."
        ),
        advantage="leave_one_out",
        credit="discounted",
        gamma=1.0,
        whiten=True,
        process_reward=ProcessRewardConfig(coef=5.0, outcome_coef=5.0),
    ),
    "chord": replace(
        _GROUP,
        about=(
            "2508.11408: GRPO on what is sampled and cross-entropy on an expert's responses (`data.expert`) in the same "
            "update, 1 - μ to μ. CHORD-φ with μ = 0.1, the default of Trinity, whose authors are the paper's; with "
            "`token_weight: none` and a `final_weight` it is CHORD-μ, whose μ falls."
        ),
        expert=ExpertConfig(weight=0.1, token_weight="phi"),
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
    """Return `base`, overridden by the choices in `top`."""
    changes: dict[str, Any] = {}
    for item in fields(base):
        own, overrides = getattr(base, item.name), getattr(top, item.name)
        if isinstance(own, (KLConfig, CorrectionConfig, ExpertConfig, ProcessRewardConfig)):
            changes[item.name] = _over(own, overrides)
        elif overrides is not None:
            changes[item.name] = overrides
    return replace(base, **changes)


def resolve(name: str, overrides: Choices | None = None) -> Choices:
    """Return the method's row overridden by `overrides`, with a value for every axis and every parameter of the
    surrogate."""
    method, overrides = METHODS[name], overrides or Choices()
    chosen = reduce(_over, (method, overrides), USUAL)
    # The keys of rollout_correction override the correction that `name` selects.
    named = CORRECTIONS[chosen.rollout_correction.name or "none"]
    correction = reduce(_over, (named, method.rollout_correction, overrides.rollout_correction), USUAL.rollout_correction)
    # The numbers in a method's row apply only to the row's own surrogate.
    same = chosen.surrogate == (method.surrogate or USUAL.surrogate)
    numbers = {key: getattr(chosen if same else overrides, key) for key in PARAMETERS}
    numbers |= surrogate_row(str(chosen.surrogate)).numbers(numbers)
    penalty_aggregate = chosen.penalty_aggregate or chosen.aggregate
    return replace(chosen, rollout_correction=correction, penalty_aggregate=penalty_aggregate, **numbers)
