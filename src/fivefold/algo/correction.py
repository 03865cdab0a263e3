"""old_logprobs, rollout_logprobs -> token weights that correct for samples from a policy other than the trainer's.

Truncated importance sampling (TIS): Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"
(2025); masked (MIS) and sequence-level forms: Liu et al., "When Speed Kills Stability" (2025); IcePop: Ring-1T (2510.18855);
decoupled PPO: AReaL (2505.24298).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

from fivefold.algo.part import Case, Part, chosen_function, usual
from fivefold.algo.segments import Segments
from fivefold.algo.surrogates import surrogate_class
from fivefold.keys.ranges import NameOrCode, OneOf, above, at_least
from fivefold.lazy import Tensor, torch

Level = Callable[["Tensor", Segments], "Tensor"]
"""log trainer - log engine of each token, samples -> the ratio that a token is weighted by."""
WEIGHTS = ("none", "token", "turn", "sequence", "geometric")
SECOND_MOMENT = "second_moment"
DIVERGENCES = (*(f"{over}_{k}" for over in ("token", "sum", "mean", "max") for k in ("k2", "k3")), "max_drop", SECOND_MOMENT)
"""Statistics, besides the ratio, by which tokens or responses are left out."""


@dataclass(frozen=True)
class Correction(Part):
    """Correction of the mismatch between engine and trainer; each choice that is left out is that of `name`."""

    section = "rollout_correction"
    name: Annotated[str, OneOf(CORRECTIONS)] = usual("none")
    """A row of CORRECTIONS, which the other keys override."""
    weight: Annotated[str, NameOrCode(WEIGHTS)] = usual("none")
    """Importance weight of a token: the ratio trainer / engine of the token (token), its product over the turn (turn) or the
    response (sequence), or the geometric mean of the latter (geometric); none; or `path.py:function`."""
    low: Annotated[float, at_least(0)] = usual(0.0)
    high: Annotated[float, at_least(0)] = usual(2.0)
    """Bounds of the importance weight."""
    outside: Literal["truncate", "mask"] = usual("truncate")
    """Treatment of a weight outside the bounds: set to the bound (truncate), or to 0 (mask)."""
    reject: Literal["none", "token", "sequence", "geometric"] = usual("none")
    """Ratio that decides which tokens or whole responses are left out; they still count in the denominators."""
    reject_low: Annotated[float, at_least(0)] = usual(0.0)
    reject_high: Annotated[float, at_least(0)] = usual(2.0)
    """Bounds of the `reject` ratio."""
    reject_divergence: dict[str, Annotated[float, above(0)]] = usual({})
    """Upper bounds of further statistics of d = log (trainer / engine), each a row of DIVERGENCES; tokens or responses
    beyond one are left out. k2 = d²/2 and k3 = e^d - 1 - d of a token, or their sum, mean or maximum in a response. max_drop
    is the largest -d in a response (9.21: no token may be 10,000 times less likely under the trainer). second_moment leaves
    out the tokens with the largest d² until the mean is below the bound: M2PO (2510.01161)."""
    old_logprobs_from: Literal["trainer", "engine", "loglinear"] = usual("trainer")
    """Source of the old log-probs: the trainer before the step's updates, the engine, or loglinear. loglinear needs no extra
    pass: it interpolates between the engine's and the current log-probs (A-3PO, 2512.06547). A token sampled s steps ago is
    (s - 1) / s of the way to the current one."""

    @cached_property
    def level(self) -> str | Level:
        """Level of the weight: a name of WEIGHTS, or the user's function."""
        return chosen_function(self.weight, str)

    @property
    def is_active(self) -> bool:
        return self.weight != "none" or self.reject != "none" or bool(self.reject_divergence)

    @property
    def second_moment(self) -> float | None:
        """Upper bound of the mean of (log trainer - log engine)² over the kept tokens of an update; None without one."""
        return self.reject_divergence.get(SECOND_MOMENT)

    def __call__(self, log_ratio_T: Tensor, samples: Segments) -> tuple[Tensor, Tensor]:
        """(weight_T of the surrogate, kept_T) from log trainer - log engine; neither has a gradient.

        Loss denominators do not change: masked and rejected tokens still count in them.
        """
        weight_T = torch.ones_like(log_ratio_T)
        if self.weight != "none":
            raw_T = ratio_at(self.level, log_ratio_T, samples)
            weight_T = raw_T.clamp(self.low, self.high)
            if self.outside == "mask":
                weight_T = torch.where((raw_T >= self.low) & (raw_T <= self.high), raw_T, 0.0)
        kept_T = torch.ones_like(samples.mask_T)
        if self.reject != "none":
            raw_T = ratio_at(self.reject, log_ratio_T, samples)
            kept_T = (raw_T >= self.reject_low) & (raw_T <= self.reject_high)
        for name, bound in self.reject_divergence.items():
            if name == SECOND_MOMENT:
                assert samples.selected_T is not None
                kept_T = kept_T & ~samples.selected_T
            else:
                kept_T = kept_T & (divergence(name, log_ratio_T, samples) <= bound)
        return weight_T, kept_T

    def metrics(self, log_ratio_T: Tensor, weight_T: Tensor, kept_T: Tensor, samples: Segments) -> dict[str, Tensor]:
        """Return values per token; their mean over tokens is reported."""
        level = next((name for name in (self.level, self.reject) if name != "none"), "token")
        raw_T = ratio_at(level, log_ratio_T, samples)
        final_T = weight_T * kept_T
        return {
            "rollout_correction/ratio_mean": raw_T,
            "rollout_correction/weight_mean": final_T,
            "rollout_correction/weight_square_mean": final_T.square(),
            "rollout_correction/bounded_fraction": ((raw_T < self.low) | (raw_T > self.high)).float()
            * (self.weight != "none"),
            "rollout_correction/masked_fraction": (weight_T == 0).float(),
            "rollout_correction/rejected_fraction": (~kept_T).float(),
        }

    @classmethod
    def check(cls, case: Case) -> None:
        correction, overrides, surrogate = (
            case.chosen.rollout_correction,
            case.overrides.rollout_correction,
            case.chosen.surrogate,
        )
        below = case.findings.at(cls.section)
        case.require_turns(f"{cls.section}.weight", correction.weight == "turn", ": turn needs turns of trajectories")
        if case.offline:
            message = f"has nothing to act on: {case.name} does not sample"
            case.findings.require(overrides == cls(), cls.section, message)
        for low, high in (("low", "high"), ("reject_low", "reject_high")):
            first, last = getattr(correction, low), getattr(correction, high)
            below.require(first < last, f"{low} and {high}", f"must satisfy 0 <= low < high: got {first} and {last}")
        for name in correction.reject_divergence:
            if fault := OneOf(DIVERGENCES).fault(name):
                below.error("reject_divergence", fault)
        kind, by_moment = surrogate_class(surrogate), SECOND_MOMENT in correction.reject_divergence
        below.require(
            not (by_moment and kind.selects),
            "reject_divergence",
            f": second_moment leaves out tokens among the whole update, and so does {surrogate}: choose one",
        )
        source = correction.old_logprobs_from
        if source != "trainer":
            below.require(
                kind.ratio_reference == "old",
                "old_logprobs_from",
                f": {source} changes the ratio, which {surrogate} does not have",
            )
        if source == "engine":
            below.require(
                correction.weight == "none" and not by_moment,
                "old_logprobs_from",
                ": engine puts the engine's log-probs into the ratio itself: leave weight none and second_moment out",
            )
        if source == "loglinear":
            below.require(
                not kind.selects and not by_moment,
                "old_logprobs_from",
                ": loglinear leaves out the pass by which clip_cov, kl_cov and second_moment choose tokens among the update",
            )
        if correction.weight == "none" and (overrides.low, overrides.high, overrides.outside) != (None, None, None):
            below.ignore("low, high and outside", "weight is none")
        if correction.reject == "none" and (overrides.reject_low, overrides.reject_high) != (None, None):
            below.ignore("reject_low and reject_high", "reject is none")


CORRECTIONS: dict[str, Correction] = {
    "none": Correction(weight="none"),
    "tis": Correction(weight="token", high=2.0),
    "mis": Correction(weight="token", high=2.0, outside="mask"),
    "icepop": Correction(weight="token", low=0.5, high=5.0, outside="mask"),
    "sequence_tis": Correction(weight="sequence", high=2.0),
    "sequence_mis": Correction(weight="sequence", high=2.0, outside="mask"),
    "geometric": Correction(weight="none", reject="geometric", reject_low=0.999, reject_high=1.001),
    "decoupled": Correction(weight="token", high=5.0, outside="mask"),
}


def interpolation(age_T: Tensor, updates: int) -> Tensor:
    """[T] (s - 1) / s for tokens that are s steps old, 0 for s <= 1.

    If log-probs change equally in each step, this is the position of the previous step's policy between the policy that
    sampled the token and the current one (A-3PO, 2512.06547). `age_T` counts optimizer steps; a step has `updates` of them.
    """
    return ((age_T - updates).double() / age_T.clamp(min=1)).clamp(min=0.0).float()


def divergence(name: str, log_ratio_T: Tensor, samples: Segments) -> Tensor:
    """[T] statistic of each token, or its sum, mean or maximum over the response, by a row of DIVERGENCES."""
    over, _, estimator = name.partition("_")
    bounded_T = log_ratio_T.clamp(-20, 20)
    if estimator == "k2":
        value_T = bounded_T.square() / 2
    else:
        value_T = -bounded_T if estimator == "drop" else bounded_T.expm1() - bounded_T
    if over == "token":
        return value_T
    return {"sum": samples.sums, "mean": samples.means, "max": samples.maxima}[over](value_T)[samples.sample_T]


def beyond_second_moment(log_ratio_S: Tensor, bound: float) -> Tensor:
    """[S] smallest set of tokens to leave out so that the mean (log ratio)² is below `bound`: M2PO (2510.01161).

    It takes those with the largest (log ratio)², and at least one token is kept.
    """
    square_S, order_S = log_ratio_S.double().square().sort(descending=True, stable=True)
    rest_S = square_S.flip(0).cumsum(0).flip(0) / torch.arange(len(square_S), 0, -1, device=square_S.device)
    below = (rest_S < bound).nonzero()
    count = int(below[0]) if len(below) else max(len(square_S) - 1, 0)
    left_out_S = torch.zeros_like(square_S, dtype=torch.bool)
    left_out_S[order_S[:count]] = True
    return left_out_S


def ratio_at(level: str | Level, log_ratio_T: Tensor, samples: Segments) -> Tensor:
    """[T] trainer / engine of each token, or the product over its turn or response, or the geometric mean of the latter."""
    if not isinstance(level, str):
        return level(log_ratio_T, samples)
    if level == "turn":
        log_ratio_T = samples.turn_sums(log_ratio_T)
    elif level == "sequence":
        log_ratio_T = samples.sums(log_ratio_T)[samples.sample_T]
    elif level == "geometric":
        log_ratio_T = samples.means(log_ratio_T)[samples.sample_T]
    return log_ratio_T.clamp(-20, 20).exp()
