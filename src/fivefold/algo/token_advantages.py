"""Rewards of a step -> advantages_T: how responses are compared, and how their tokens share in that."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Literal

from fivefold.algo.advantages import (
    ADVANTAGES,
    NORMALIZED,
    NORMALIZED_BY_MEAN,
    SCALED,
    Advantage,
    AdvantageInputs,
    make_advantage,
)
from fivefold.algo.correction import Correction
from fivefold.algo.credit import CREDITS, Credit, UserCredit, make_credit, optimal_token_baseline, whiten
from fivefold.algo.part import Case, Part, chosen_function, usual
from fivefold.algo.segments import Segments
from fivefold.algo.turns import places_of_turns, turn_returns
from fivefold.columns import Column
from fivefold.keys.ranges import NameOrCode, above, within
from fivefold.lazy import Tensor, torch
from fivefold.user_code import is_user_code, load_user_code

if TYPE_CHECKING:
    from collections.abc import Callable

    from fivefold.types import RolloutStats, TokenBatch, Turns


@dataclass(frozen=True)
class TokenAdvantages(Part):
    """Advantage, credit, baselines and whitening."""

    advantage: Annotated[str, NameOrCode(ADVANTAGES)] = usual("group")
    """Comparison of the rewards of samples: one of ADVANTAGES, or `path.py:function`."""
    normalize: Literal["group", "batch", "mean", "none"] = usual("none")
    """Divisor of the advantages: the standard deviation of the rewards in the group (group) or the whole step (batch), or
    the mean reward of the group (mean)."""
    baseline_shift: Annotated[float, within("[-1000, 1000]")] | None = None
    """Added to the group's mean reward, the baseline; below 0, good responses weigh more than bad ones."""
    baseline_temperature: Annotated[float, above(0)] | None = None
    """τ of log_mean_exp: near 0 the baseline is the best reward of the group, for large τ the mean. step_log_mean_exp uses
    the whole step instead of the group."""
    credit: Annotated[str, NameOrCode(CREDITS)] = usual("response")
    """How a response's advantage is assigned to its tokens: the same for all (response), as return of each turn (turns), as
    discounted return, or by GAE with a critic; or `path.py:function`."""
    gamma: Annotated[float, within("[0, 1]")] | None = None
    """Discount per token (discounted, gae) or per turn (turns)."""
    lam: Annotated[float, within("[0, 1]")] | None = None
    """λ of GAE: 1 uses returns only, 0 values only."""
    bootstrap_truncated: bool = usual(False)
    """Whether GAE continues a truncated response with the critic's value of its whole text, as in AReaL. Otherwise it ends
    with 0, as in verl, siiRL, SkyRL, ROLL and Trinity-RFT."""
    token_baseline: bool = usual(False)
    """Subtract from each token's return the minimum-variance baseline over the responses to the prompt that have such a
    token."""
    turn_coef: Annotated[float, within("[0, 1000]")] = usual(0.0)
    """ω: weight of the advantage of a turn, its return compared with those of the other turns of the group that answer the
    same state (gigpo)."""
    turn_gamma: Annotated[float, within("[0, 1]")] = usual(0.95)
    """Discount per turn of the returns that `turn_coef` compares."""
    whiten: bool = usual(False)
    """Shift and scale advantages to mean 0 and variance 1 over all tokens of the step."""
    whiten_by: Literal["step", "domain", "group"] = usual("step")
    """Set of tokens to whiten over: the whole step, each domain (`data.domains`), or the responses to each prompt."""
    advantage_clip: Annotated[float, above(0)] | None = None
    """Clip advantages to ± this."""

    @cached_property
    def comparison(self) -> Advantage:
        """Formula of the advantage of each response."""
        return chosen_function(
            self.advantage,
            lambda name: make_advantage(name, self.normalize, self.baseline_shift, self.baseline_temperature),
        )

    @cached_property
    def assignment(self) -> Credit:
        """Formula that assigns the advantage of a response to its tokens."""
        if is_user_code(self.credit):
            return UserCredit(load_user_code(self.credit))
        return make_credit(self.credit, self.gamma, self.lam, self.bootstrap_truncated)

    def needs(self, updates: int) -> frozenset[Column]:
        wanted = {
            Column.VALUES: self.assignment.needs_critic,
            Column.OLD_LOGPROBS: self.token_baseline,
            Column.HALF_TEMPERATURE_LOGPROBS: self.token_baseline,
        }
        return frozenset(column for column, needed in wanted.items() if needed)

    def compare(self, inputs: AdvantageInputs) -> Tensor:
        """[N] advantages of the sampled responses, compared among themselves; 1 for an expert's response."""
        if (expert_N := inputs.expert_N) is None:
            return self.comparison(inputs)
        advantages_N = torch.ones(len(expert_N), dtype=torch.float64)
        advantages_N[~expert_N] = self.comparison(inputs.select(~expert_N)).double()
        return advantages_N

    def of_turns(
        self, batch: TokenBatch, stats: RolloutStats, turns: Turns, inputs: AdvantageInputs, scale: float
    ) -> Tensor:
        """[T] ω times the advantage of each token's turn: GiGPO (2505.10978). A state that one turn alone answers gives 0.

        `inputs` have a row per trajectory, `scale` is the factor of its turns' own rewards.
        """
        returns_U = turn_returns(turns, stats.trajectory_of_N, inputs.rewards_N, self.turn_gamma, scale)
        is_known_U = turns.state_U >= 0
        _, group_U = turns.state_U[is_known_U].unique(return_inverse=True)
        lengths_U = (turns.end_U - turns.begin_U)[is_known_U]
        advantages_U = torch.zeros(len(returns_U))
        advantages_U[is_known_U] = self.comparison(AdvantageInputs(returns_U[is_known_U], group_U, lengths_U))
        place_S, turn_S = places_of_turns(batch, stats, turns)
        gains_T = torch.zeros(len(batch.token_ids_T))
        gains_T[place_S] = self.turn_coef * advantages_U[turn_S]
        return gains_T * batch.loss_mask_T

    def baseline(
        self,
        batch: TokenBatch,
        samples: Segments,
        row_N: list[int],
        returns_T: Tensor,
        inputs: AdvantageInputs,
        correction: Correction,
        total: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """[T] baseline of least variance that `token_baseline` subtracts; `total` sums over replicas.

        `row_N` has the rows of `samples` in `inputs`.
        """
        longest_G = torch.zeros(int(inputs.group_N.max()) + 1 if len(inputs.group_N) else 0, dtype=torch.long)
        longest_G = longest_G.scatter_reduce(0, inputs.group_N, inputs.lengths_N.long(), "amax")
        squares_T = self._squared_scores(batch, Segments.of(batch), correction)
        return optimal_token_baseline(returns_T, squares_T, samples, inputs.group_N[row_N], longest_G, total)

    def _squared_scores(self, batch: TokenBatch, samples: Segments, correction: Correction) -> Tensor:
        """[T] |e - π|² = 1 - 2π + Σπ² of each token under the old policy: the squared norm of its gradient with respect to
        the logits. It is multiplied by the square of the token's correction weight."""
        old_T, half_T = batch[Column.OLD_LOGPROBS], batch[Column.HALF_TEMPERATURE_LOGPROBS]
        # With Z(τ) = Σ e^(z/τ), 2 log π(τ) - log π(τ/2) of a token is log Z(τ/2) - 2 log Z(τ), which is log Σ π(τ)².
        squares_T = (1 - 2 * old_T.exp() + (2 * old_T - half_T).exp()).clamp(min=0)
        if Column.ROLLOUT_LOGPROBS in batch and correction.is_active:
            weight_T, _ = correction((old_T - batch[Column.ROLLOUT_LOGPROBS]) * batch.loss_mask_T, samples)
            squares_T = squares_T * weight_T.square()
        return squares_T

    def parts(self, stats: RolloutStats) -> Tensor | None:
        """[N] number, from 0, of the part of the step that each sample is whitened with; None if that is the whole step."""
        if self.whiten_by == "step":
            return None
        return stats.domain_N if self.whiten_by == "domain" else stats.group_N

    def scaled(
        self,
        advantages_T: Tensor,
        samples: Segments,
        row_N: list[int],
        kept_N: Tensor | None,
        part_N: Tensor | None,
        total: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """[T] whitened and clipped advantages; `kept_N` and `part_N` cover the whole step, with rows `row_N` for `samples`,
        `total` sums over replicas."""
        if self.whiten:
            sample_T = samples.sample_T
            counted_T = samples.mask_T
            if kept_N is not None:
                counted_T = counted_T & kept_N[row_N][sample_T]
            part_T = None if part_N is None else part_N[row_N][sample_T]
            advantages_T = whiten(advantages_T, counted_T, total, part_T, 1 if part_N is None else int(part_N.max()) + 1)
        if self.advantage_clip is not None:
            advantages_T = advantages_T.clamp(-self.advantage_clip, self.advantage_clip)
        return advantages_T

    @classmethod
    def check(cls, case: Case) -> None:
        overrides, chosen, findings = case.overrides, cls.of(case.chosen), case.findings
        case.require_off(
            "advantage",
            "credit",
            "turn_coef",
            "token_baseline",
            "whiten",
            "whiten_by",
            "advantage_clip",
            "bootstrap_truncated",
        )
        if overrides.normalize not in (None, "none"):
            message = f"belongs to advantages {', '.join(NORMALIZED)}: got {overrides.normalize} with {chosen.advantage}"
            findings.require(chosen.advantage in NORMALIZED, "normalize", message)
        message = f": {chosen.advantage} compares over the whole step, so write batch or none: got group"
        findings.require(chosen.advantage != "step_mean" or chosen.normalize != "group", "normalize", message)
        findings.require(
            case.group_size > 1 or case.offline or not ADVANTAGES.get(chosen.advantage, False),
            "group_size",
            f"must be at least 2: {chosen.advantage} compares the samples of a prompt, and one alone gives advantage 0",
        )
        if chosen.normalize == "mean":
            message = f": mean belongs to advantages {', '.join(NORMALIZED_BY_MEAN)}: got {chosen.advantage}"
            findings.require(chosen.advantage in NORMALIZED_BY_MEAN, "normalize", message)
            lowers = {
                "kl.place: reward": case.chosen.kl.is_in_reward,
                "overlong_buffer": case.chosen.overlong_buffer > 0,
                "reward_shift": case.chosen.reward_shift < 0,
            }
            for key in (key for key, is_set in lowers.items() if is_set):
                message = f": mean divides by the mean reward, and {key} makes rewards negative; leave it out"
                findings.require(False, "normalize", message)
        users = {"baseline_shift": ("group",), "baseline_temperature": ("log_mean_exp", "step_log_mean_exp")}
        for key, takers in users.items():
            message = f"belongs to advantage {' or '.join(takers)}: got {chosen.advantage}"
            findings.require(getattr(overrides, key) is None or chosen.advantage in takers, key, message)
        if chosen.token_baseline:
            cls._check_token_baseline(case)
        if chosen.credit == "response":
            findings.require(overrides.gamma is None, "gamma", "belongs to credit: turns, discounted or gae")
        cls._check_turns(case)
        findings.require(overrides.lam is None or chosen.credit == "gae", "lam", "belongs to credit: gae")
        findings.require(
            not overrides.bootstrap_truncated or chosen.credit == "gae",
            "bootstrap_truncated",
            f"belongs to credit: gae, whose critic has a value of the text that was cut off: got credit: {chosen.credit}",
        )
        if overrides.whiten_by is not None and not chosen.whiten:
            findings.ignore("whiten_by", "whiten is off")

    @staticmethod
    def _check_turns(case: Case) -> None:
        overrides, chosen, findings = case.overrides, case.chosen, case.findings
        case.require_turns("turn_coef", chosen.turn_coef > 0, f": {case.name} compares the turns of trajectories")
        case.require_turns("credit", chosen.credit == "turns", ": turns gives each turn of a trajectory its own return")
        if chosen.credit == "turns" or (case.has_turns and chosen.credit == "gae"):
            message = (
                f"{chosen.credit} adds rewards of turns to the advantage of their trajectory, which must have their unit"
            )
            is_scaled = chosen.normalize != "none" or chosen.advantage in SCALED
            findings.require(
                not is_scaled,
                "credit",
                f": {message}: got advantage {chosen.advantage} with normalize {chosen.normalize}; set normalize: none and "
                "another advantage, or credit: response",
            )
        findings.require(
            not chosen.turn_coef or ADVANTAGES.get(chosen.advantage, True),
            "turn_coef",
            f"needs an advantage that compares the samples of a group: got {chosen.advantage}",
        )
        findings.require(
            not chosen.turn_coef or chosen.credit == "response",
            "turn_coef",
            f"needs credit: response, since both assign the rewards of turns to tokens: got {chosen.credit}",
        )
        if overrides.turn_gamma is not None and not chosen.turn_coef:
            findings.ignore("turn_gamma", "turn_coef is 0")

    @staticmethod
    def _check_token_baseline(case: Case) -> None:
        chosen, correction, findings = case.chosen, case.chosen.rollout_correction, case.findings
        findings.require(
            chosen.advantage == "reward" and chosen.credit == "discounted",
            "token_baseline",
            "needs advantage: reward and credit: discounted, the return from each token on: got "
            f"{chosen.advantage} and {chosen.credit}",
        )
        message = "needs a group_size of at least 2: one response has none to be compared with"
        findings.require(case.group_size > 1, "token_baseline", message)
        findings.require(
            correction.old_logprobs_from == "trainer" and correction.reject == "none" and not correction.reject_divergence,
            "token_baseline",
            "weighs responses by the trainer's log-probs of all their tokens: leave rollout_correction.reject, "
            "reject_divergence and old_logprobs_from: engine out",
        )
