"""Methods as rows of a table: a choice on each axis, and what the method learns from. No torch here.

What a row leaves out is the usual choice, which stands on the key's field. methods_page.py writes docs/methods.md from these
rows.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import reduce
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from fivefold.algo.choices import PARTS, Choices
from fivefold.algo.correction import CORRECTIONS, SECOND_MOMENT, Correction
from fivefold.algo.part import Case, Part
from fivefold.algo.surrogates import PARAMETERS, SURROGATES
from fivefold.algo.terms.imitation import Imitation
from fivefold.algo.terms.kl import KL
from fivefold.algo.terms.process_reward import ProcessReward
from fivefold.keys.findings import Findings

C = TypeVar("C", bound=Choices | Part)

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

    if TYPE_CHECKING:

        def __init__(self, **choices: Any) -> None: ...

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
    "grpo": Method(
        normalize="group",
        about=(
            "DeepSeekMath, 2402.03300, equation 3: unbiased standard deviation, ε 1e-6 (verl and five others; TRL "
            "1e-4). The paper's KL coefficient is 0.04; 0.001 is verl's, siiRL's, SkyRL's and Trinity's."
        ),
        aggregate="seq-mean-token-mean",
        kl=KL(coef=0.001),
    ),
    "dr_grpo": Method(
        about=(
            "Understanding R1-Zero-Like Training, 2503.20783: no division by the standard deviation or by a response's "
            "own length."
        ),
        aggregate="constant-length",
    ),
    "dapo": Method(
        normalize="group",
        about=(
            "2503.14476: clip-higher 0.28, tokens count alike (equation 8), soft overlong punishment (equation 13) "
            "over the last fifth of a response (the paper: 4096 of 20480 tokens), dynamic sampling (section 3.2)."
        ),
        clip_high=0.28,
        overlong_buffer=0.2,
        dynamic_sampling=True,
    ),
    "gspo": Method(
        normalize="group",
        about=(
            "2507.18071, equation 5; bounds of section 5.1. `importance_sampling_level: sequence-token` is its "
            "GSPO-token (equation 14): the same gradient unless the tokens of a response have different advantages."
        ),
        importance_sampling_level="sequence",
        clip_low=3e-4,
        clip_high=4e-4,
        aggregate="seq-mean-token-mean",
    ),
    "gigpo": Method(
        normalize="group",
        about=(
            "2505.10978: the advantage of the trajectory among those of its group, plus ω = 1 times that of the turn: its "
            "return (γ = 0.95 per turn) among the turns of the group that answer the same state of the environment. "
            "A state that one turn alone answers adds 0. ω, γ and the KL coefficient are those of the paper's experiments."
        ),
        turn_coef=1.0,
        turn_gamma=0.95,
        kl=KL(coef=0.01),
    ),
    "cispo": Method(
        normalize="group",
        about="MiniMax-M1, 2506.13585, equation 4: not bounded below; the paper names no upper bound, 0.2 is PPO's.",
        surrogate="cispo",
    ),
    "sapo": Method(
        normalize="group",
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
        kl=KL(estimator="k1", coef=0.001, place="reward"),
    ),
    "reinforce_plus_plus_baseline": Method(
        about=(
            "2501.03262, section on the baseline form: the group's mean as baseline, whitened over the step, KL as a "
            "loss of its own (k2)."
        ),
        whiten=True,
        kl=KL(estimator="k2", coef=0.001),
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
    "gmpo": Method(
        normalize="group",
        about="2507.20673: the geometric mean of clipped ratios, bounds e^-0.4 and e^0.4.",
        surrogate="gmpo",
        aggregate="seq-mean-token-mean",
    ),
    "clip_cov": Method(
        normalize="group",
        about=(
            "2505.22617; share and bounds as in the authors' code in verl. Covariance and choice are over the whole "
            "update, so later updates of a step cost one more forward pass."
        ),
        surrogate="clip_cov",
    ),
    "kl_cov": Method(
        normalize="group",
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
        kl=KL(estimator="k2", coef=0.001),
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
        kl=KL(estimator="k2", coef=0.001),
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
    "dppo": Method(
        normalize="group",
        about=(
            "2602.04879, equations 13 and 14: a token is left out where its probability, not its ratio, has moved beyond a "
            "bound of the total variation (or of the KL). The bounds 0.2 are PPO's."
        ),
        surrogate="dppo",
    ),
    "cpgd": Method(
        normalize="group",
        about=(
            "2505.12504: the log-prob of a token is weighted and clipped, and not its ratio, with a pull to the old policy "
            "whose weight is that of siiRL's scripts."
        ),
        surrogate="cpgd",
        drift_coef=0.001,
    ),
    "m2po": Method(
        normalize="group",
        about=(
            "2510.01161: tokens whose log-probs by engine and trainer are the furthest apart are left out until the mean "
            "of the squared distance is below 0.04."
        ),
        rollout_correction=Correction(reject_divergence={SECOND_MOMENT: 0.04}),
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
        process_reward=ProcessReward(coef=5.0, outcome_coef=5.0),
    ),
    "chord": Method(
        normalize="group",
        about=(
            "2508.11408: GRPO on what is sampled and cross-entropy on an expert's responses (`data.expert`) in the same "
            "update, 1 - μ to μ. CHORD-φ with μ = 0.1, the default of Trinity, whose authors are the paper's; with "
            "`token_weight: none` and a `final_weight` it is CHORD-μ, whose μ falls."
        ),
        expert=Imitation(weight=0.1, token_weight="phi"),
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


def _usual() -> Choices:
    values: dict[str, Any] = {}
    for part in PARTS:
        usual = part.usual_values()
        values |= {part.section: usual} if part.section else {item.name: getattr(usual, item.name) for item in fields(usual)}
    return Choices(**values)


USUAL = _usual()
"""Choices for axes that a method's row does not name."""


def _over(base: C, top: Any) -> C:
    """Return `base`, overridden by the choices in `top`."""
    changes: dict[str, Any] = {}
    for item in fields(base):
        value, overrides = getattr(base, item.name), getattr(top, item.name)
        if isinstance(value, Part):
            changes[item.name] = _over(value, overrides)
        elif overrides is not None:
            changes[item.name] = overrides
    return replace(base, **changes)


def resolve(name: str, overrides: Choices | None = None) -> Choices:
    """Return the method's row overridden by `overrides`, with a value for every axis and every parameter of the
    surrogate."""
    method, overrides = METHODS[name], overrides or Choices()
    chosen = reduce(_over, (method, overrides), USUAL)
    # The keys of rollout_correction override the correction that `name` selects.
    named = CORRECTIONS[chosen.rollout_correction.name]
    correction = reduce(_over, (named, method.rollout_correction, overrides.rollout_correction), USUAL.rollout_correction)
    # The numbers in a method's row apply only to the row's own surrogate.
    same = chosen.surrogate == (method.surrogate or USUAL.surrogate)
    numbers = {key: getattr(chosen if same else overrides, key) for key in PARAMETERS}
    if chosen.surrogate in SURROGATES:
        defaults = SURROGATES[chosen.surrogate].parameters()
        numbers |= {key: default for key, default in defaults.items() if numbers[key] is None}
    changes = {
        "rollout_correction": correction,
        "penalty_aggregate": chosen.penalty_aggregate or chosen.aggregate,
        # None where it changes nothing, so that a run resumes from checkpoints that are older than the key.
        "value_aggregate": None if chosen.value_aggregate == chosen.aggregate else chosen.value_aggregate,
        **numbers,
    }
    return replace(chosen, **changes)


def check_method(
    findings: Findings, name: str, overrides: Choices, group_size: int, updates: int = 1, has_turns: bool | None = None
) -> None:
    """Record unusable choices, choices without effect, and notes; `updates` is the number of optimizer steps per rollout.

    Each value must already be within its range. `has_turns`: trajectories may have several turns; None if that is not known.
    """
    case = Case(findings, name, METHODS, overrides, resolve(name, overrides), group_size, updates, has_turns)
    for part in PARTS:
        part.check(case)
