"""Implicit process reward model: its log-ratios to a reference are token rewards; it is trained on their sum per response.

Implicit rewards: 2412.01981, equation 3. PRIME trains this model together with the policy: 2502.01456. Constants and the
position of the last token follow the authors' code in verl (recipe/prime).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from fivefold.algo.credit import Table, returns_of
from fivefold.algo.part import Case, Part, usual
from fivefold.algo.segments import Segments
from fivefold.columns import Column
from fivefold.errors import RunError
from fivefold.keys.ranges import above, at_least
from fivefold.lazy import Tensor, torch

if TYPE_CHECKING:
    from fivefold.types import LossOutput, RolloutStats, TokenBatch

EPS = 1e-6


@dataclass(frozen=True)
class ProcessReward(Part):
    """Token rewards from an implicit process reward model: a language model (`prm`) that learns with the policy from
    outcomes alone, PRIME (2502.01456). Each choice is the method's if left out."""

    section = "process_reward"
    reports = (
        (
            "prm/accuracy",
            "fraction",
            "Responses whose score is above 0 where they came out well, below 0 otherwise.",
            "accuracy",
        ),
        ("prm/pair_accuracy", "fraction", "Pairs of a prompt with different outcomes whose scores are in that order."),
        ("prm/score_mean", "reward", "Mean score of the responses, β Σ (log π_prm - log π_ref)."),
    )
    coef: Annotated[float, at_least(0)] = usual(0.0)
    """Weight of the token rewards in the advantages, each compared with those of the other responses to the prompt; 0: no
    process reward model."""
    outcome_coef: Annotated[float, at_least(0)] = usual(1.0)
    """Weight of the outcome rewards of responses, compared in the same way."""
    beta: Annotated[float, above(0)] = usual(0.05)
    """β: the reward of a token is β (log π_prm - log π_ref), the score of a response their sum."""
    reference: Literal["initial", "policy"] = usual("initial")
    """π_ref: the initial model (or `prm.reference_path`), or the policy before the step's updates."""
    granularity: Literal["token", "response"] = usual("token")
    """Granularity of the rewards: one per token except the last of a response, which has the outcome; or their sum at that
    last token."""
    normalize: Literal["step", "none"] = usual("step")
    """Divide the rewards by the largest absolute return in the whole step, the sum of the rewards from a token on."""
    loss: Literal["ce", "dpo"] = usual("ce")
    """Loss of the process reward model: cross-entropy of σ(score) and the outcome, or DPO of a response's score. DPO
    compares it with the mean score, before the step's updates, of the prompt's responses with a worse outcome (for a wrong
    response: better)."""
    target: Literal["correct", "reward"] = usual("correct")
    """The outcome: whether a response is correct, or its reward, which must then be between 0 and 1."""
    update: Literal["before", "after"] = usual("before")
    """Whether the model learns from the step's responses before or after it rewards their tokens."""

    @property
    def is_active(self) -> bool:
        return bool(self.coef)

    @property
    def columns(self) -> frozenset[Column]:
        """Columns of the batch that the rewards of tokens are computed from."""
        return frozenset({Column.PRM_LOGPROBS, Column.PRM_REF_LOGPROBS} if self.is_active else ())

    def needs(self, updates: int) -> frozenset[Column]:
        # The model that learns fills in its own column, before or after it learns from the step.
        return self.columns - {Column.PRM_LOGPROBS}

    @classmethod
    def check(cls, case: Case) -> None:
        chosen, process, below = case.chosen, case.chosen.process_reward, case.findings.at(cls.section)
        if not process.coef:
            if case.overrides.process_reward != cls():
                case.findings.ignore("process_reward", "its coef is 0: there is no process reward model")
            return
        impossible = (
            (case.offline, f"{case.name} does not sample, and responses of the data have no outcomes to learn from"),
            (chosen.credit == "response", "credit: response gives all tokens the same: choose discounted or gae"),
            (case.group_size < 2, "rewards of tokens are compared with other responses to the prompt: group_size is 1"),
            (chosen.expert.weight is not None, "an expert's responses have no outcome"),
        )
        for is_so, reason in impossible:
            below.require(not is_so, "coef", f"must be 0: {reason}")
        message = ": dpo compares with scores before the step's updates: write update: after"
        below.require(process.loss == "ce" or process.update == "after", "loss", message)

    def log_ratios(self, batch: TokenBatch) -> Tensor:
        """[T] log π_prm - log π_ref of response tokens, 0 elsewhere."""
        return (batch[Column.PRM_LOGPROBS] - batch[Column.PRM_REF_LOGPROBS]) * batch.loss_mask_T

    def scores(self, batch: TokenBatch, samples: int, total: Callable[[Tensor], Tensor]) -> Tensor:
        """[N] β Σ log-ratio of every response of the step. `samples` is their number; `total` sums over replicas."""
        scores_N = torch.zeros(samples, dtype=torch.float64)
        scores_N[batch.sample_index_N] = self.beta * Segments.of(batch).sums(self.log_ratios(batch).double())
        return total(scores_N)

    def rewards(self, batch: TokenBatch, segments: Segments, largest: Callable[[float], float]) -> Tensor:
        """[T] reward of each token, 0 outside of responses; `largest` is the maximum over replicas.

        Granularity `token`: β log-ratio, and 0 at the last token, which carries the outcome. Granularity `response`: β Σ
        log-ratio at the last token. If normalized, rewards are divided by the largest |return| of any token in the step.
        """
        table = Table(segments)
        rewards_NL = self.beta * table.rows(self.log_ratios(batch))
        if self.granularity == "token":
            rewards_NL = torch.where(table.is_last_NL, 0.0, rewards_NL)
        else:
            rewards_NL = torch.where(table.is_last_NL, rewards_NL.sum(1, keepdim=True), 0.0)
        if self.normalize == "step":
            returns_NL = returns_of(rewards_NL, 1.0)
            rewards_NL = rewards_NL / (largest(float(returns_NL.abs().max()) if returns_NL.numel() else 0.0) + EPS)
        return table.flat(rewards_NL)

    def advantages(
        self,
        segments: Segments,
        row_N: list[int],
        group_N: Tensor,
        rewards_T: Tensor,
        total: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """[T] coef · (r_t n / (n - 1) - Σ mean r of each of the n responses to the prompt / (n - 1)).

        The mean over a response is its mean reward minus that of the other responses; a group of one gets 0. With one reward
        per response, the rewards of the responses are compared. `group_N` has the groups of all responses of the step, of
        which `segments` are those in `row_N`.
        """
        has_one = self.granularity == "response"
        means_N = torch.zeros(len(group_N), dtype=torch.float64)
        means_N[row_N] = (segments.sums if has_one else segments.means)(rewards_T.double())
        groups = int(group_N.max()) + 1 if len(group_N) else 0
        sums_G = torch.zeros(groups, dtype=torch.float64).index_add(0, group_N, total(means_N))
        count_N = torch.bincount(group_N, minlength=groups)[group_N][row_N].double()
        others_N = (count_N - 1).clamp(min=1)
        scale_N = torch.where(count_N > 1, self.coef / others_N, 0.0)
        compared_T = rewards_T.double() * count_N[segments.sample_T] - sums_G[group_N[row_N]][segments.sample_T]
        is_rewarded_T = self._last(segments) if has_one else segments.mask_T
        return (compared_T * scale_N[segments.sample_T] * is_rewarded_T).float()

    @staticmethod
    def _last(segments: Segments) -> Tensor:
        """[T] whether a token is the last of its response."""
        table = Table(segments)
        return table.flat(table.is_last_NL.double()).bool()

    def targets(self, stats: RolloutStats) -> Tensor:
        """[N] outcome of each response of the step, in [0, 1]. Raises RuntimeError for a reward outside of that range."""
        if self.target == "correct":
            return stats.correct_N.float()
        rewards_N = stats.rewards_N
        outside_N = (rewards_N < 0) | (rewards_N > 1)
        if outside_N.any():
            raise RunError(
                "algorithm.process_reward.target: reward needs rewards between 0 and 1, the probability that a response is "
                f"right: got {float(rewards_N[outside_N][0]):g}; scale the reward, or set target: correct"
            )
        return rewards_N.float()

    def model_loss(self, targets_N: Tensor, group_N: Tensor, scores_N: Tensor | None, samples: int) -> ImplicitRewardLoss:
        """Return the loss of an update of `samples` samples. `scores_N`: scores before the step's updates, needed for
        dpo."""
        others_N = None
        if self.loss == "dpo":
            assert scores_N is not None
            others_N = compared_scores(scores_N, targets_N, group_N).float()
        return ImplicitRewardLoss(self.beta, targets_N, samples, others_N)


@dataclass(frozen=True)
class ImplicitRewardLoss:
    """Cross-entropy of σ(score) and the outcome, mean over the responses of an update; score = β Σ (log π_prm - log π_ref).

    With `others_N` the loss is -log σ(±(score - others)) instead, + where the outcome is above 0. This is DPO against the
    mean score of the responses to the same prompt with a worse (for -: better) outcome.
    """

    beta: float
    targets_N: Tensor
    """Outcome of each sample of the step, in [0, 1]."""
    samples: int
    """Number of samples of the update, over all replicas."""
    others_N: Tensor | None = None

    def __call__(self, logprobs_T: Tensor, entropy_T: Tensor, batch: TokenBatch) -> LossOutput:
        """Return the loss share of this micro-batch, which must hold whole samples."""
        from fivefold.types import LossOutput

        score_N = self.beta * Segments.of(batch).sums(logprobs_T - batch[Column.PRM_REF_LOGPROBS])
        target_N = self.targets_N[batch.sample_index_N].to(score_N.device)
        if self.others_N is None:
            loss_N = torch.nn.functional.binary_cross_entropy_with_logits(score_N, target_N, reduction="none")
        else:
            other_N = self.others_N[batch.sample_index_N].to(score_N.device)
            loss_N = torch.nn.functional.softplus(-(score_N - other_N) * torch.where(target_N > 0, 1.0, -1.0))
        now_N, share = score_N.detach(), 1 / max(self.samples, 1)
        # An outcome of exactly 0.5 counts for neither class.
        right_N = (now_N.sign() == (2 * target_N - 1).sign()).float()
        return LossOutput(
            loss=loss_N.sum(dtype=torch.float64) * share,
            sums={"prm/accuracy": right_N.sum() * share, "prm/score_mean": now_N.sum() * share},
        )


def compared_scores(scores_N: Tensor, targets_N: Tensor, group_N: Tensor) -> Tensor:
    """[N] mean score of the responses to the same prompt with a worse outcome (outcome 0: a better one); 0 if none."""
    mean_N = torch.zeros(len(scores_N), dtype=torch.float64)
    for rows_G in _groups(group_N):
        target_G = targets_N[rows_G]
        before_GG, behind_GG = target_G[:, None], target_G[None]
        compared_GG = torch.where(before_GG > 0, behind_GG < before_GG, behind_GG > before_GG).double()
        mean_N[rows_G] = (compared_GG @ scores_N[rows_G].double()) / compared_GG.sum(1).clamp(min=1)
    return mean_N


def pair_accuracy(scores_N: Tensor, targets_N: Tensor, group_N: Tensor) -> float | None:
    """Share of response pairs of a prompt with different outcomes whose scores are in the same order as the outcomes. Each
    pair is weighted by the difference of its outcomes. None without such pairs."""
    right = total = 0.0
    for rows_G in _groups(group_N):
        apart_GG = (targets_N[rows_G][:, None] - targets_N[rows_G][None]).clamp(min=0)
        right += float((apart_GG * (scores_N[rows_G][:, None] > scores_N[rows_G][None])).sum())
        total += float(apart_GG.sum())
    return right / total if total else None


def _groups(group_N: Tensor) -> Iterator[Tensor]:
    """Yield the sample indices of each group."""
    for group in group_N.unique():
        yield (group_N == group).nonzero()[:, 0]
