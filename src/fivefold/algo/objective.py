"""An objective is one choice on each axis; a published method is a row of METHODS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fivefold.algo import kl
from fivefold.algo.advantages import Advantage, GroupMeanScaled, GroupNorm, LeaveOneOut, LengthWeighted, Ones
from fivefold.algo.aggregate import AGGREGATES
from fivefold.algo.ratios import RATIOS
from fivefold.algo.surrogates import CISPO, LogLikelihood, PPOClip, SoftGate, Surrogate
from fivefold.types import LossOutput, TokenBatch


@dataclass(frozen=True)
class Objective:
    """What is maximised: Σ weights · (surrogate - kl_coef · KL + entropy_coef · entropy)."""

    advantage: Advantage
    surrogate: Surrogate
    aggregate: str = "seq-mean-token-mean"
    kl_estimator: str = "k3"
    kl_coef: float = 0.0
    ratio: str = "token"
    """The ratio to the old policy: of each token, or of its whole response (GSPO)."""
    entropy_coef: float = 0.0

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef != 0

    def override(
        self,
        *,
        by_std: bool | None = None,
        clip_low: float | None = None,
        clip_high: float | None = None,
        aggregate: str | None = None,
        kl_estimator: str | None = None,
        kl_coef: float | None = None,
        dual_clip: float | None = None,
        ratio: str | None = None,
        entropy_coef: float | None = None,
    ) -> Objective:
        """This objective with the given choices; raises ValueError for one that the method does not have."""
        advantage, surrogate = self.advantage, self.surrogate
        if by_std is not None:
            if not isinstance(advantage, GroupNorm):
                raise ValueError("normalize_by_std belongs to group advantages, which this method does not use")
            advantage = replace(advantage, by_std=by_std)
        if clip_low is not None or clip_high is not None:
            if not isinstance(surrogate, (PPOClip, CISPO)):
                raise ValueError("clip_low and clip_high belong to a clipped ratio, which this method does not use")
            surrogate = replace(
                surrogate,
                clip_low=surrogate.clip_low if clip_low is None else clip_low,
                clip_high=surrogate.clip_high if clip_high is None else clip_high,
            )
            if not (0 <= surrogate.clip_low <= 1 and surrogate.clip_high >= 0):
                raise ValueError(
                    f"clip_low must be in [0, 1] and clip_high at least 0: got {surrogate.clip_low}, {surrogate.clip_high}"
                )
        if dual_clip is not None:
            if not isinstance(surrogate, PPOClip):
                raise ValueError("dual_clip belongs to PPO's clipped ratio, which this method does not use")
            if dual_clip <= 1 + surrogate.clip_high:
                raise ValueError(f"dual_clip must be above 1 + clip_high = {1 + surrogate.clip_high:g}: got {dual_clip:g}")
            surrogate = replace(surrogate, dual_clip=dual_clip)
        if ratio is not None and not surrogate.needs_old_logprobs:
            raise ValueError("ratio belongs to methods that compare with the policy before the update; this one does not")
        return Objective(
            advantage=advantage,
            surrogate=surrogate,
            aggregate=self.aggregate if aggregate is None else aggregate,
            kl_estimator=self.kl_estimator if kl_estimator is None else kl_estimator,
            kl_coef=self.kl_coef if kl_coef is None else kl_coef,
            ratio=self.ratio if ratio is None else ratio,
            entropy_coef=self.entropy_coef if entropy_coef is None else entropy_coef,
        )

    def weights(self, response_lengths_N: Tensor, max_response_tokens: int) -> Tensor:
        """Weight of each sample's tokens in the loss of one update."""
        return AGGREGATES[self.aggregate](response_lengths_N, max_response_tokens)

    def loss(self, logprobs_T: Tensor, entropy_T: Tensor, batch: TokenBatch) -> LossOutput:
        """This micro-batch's share of the loss and of the step's metrics (a LossFn)."""
        assert batch.loss_weights_T is not None and batch.advantages_T is not None
        mask_T = batch.loss_mask_T
        # One update on fresh samples: the log-probs before the update are these.
        old_T = logprobs_T.detach() if batch.old_logprobs_T is None else batch.old_logprobs_T
        log_ratio_T = RATIOS[self.ratio](logprobs_T, old_T, mask_T, batch.lengths_N)
        objective_T = self.surrogate(log_ratio_T, logprobs_T, batch.advantages_T)
        share_T = mask_T / max(batch.update_tokens, 1)
        now_T = logprobs_T.detach()
        sums = {"policy/entropy": (entropy_T.detach() * share_T).sum(), "policy/logprob_mean": (now_T * share_T).sum()}
        maxima = {}
        if self.needs_reference:
            assert batch.ref_logprobs_T is not None
            kl_T = kl.ESTIMATORS[self.kl_estimator](logprobs_T, batch.ref_logprobs_T)
            objective_T = objective_T - self.kl_coef * kl_T
            sums["policy/kl_reference"] = (kl.k3(now_T, batch.ref_logprobs_T) * share_T).sum()
        if self.entropy_coef:
            objective_T = objective_T + self.entropy_coef * entropy_T
        if self.surrogate.needs_old_logprobs:
            ratio_T = log_ratio_T.detach().exp()
            sums["policy/ratio_mean"] = (ratio_T * share_T).sum()
        if isinstance(self.surrogate, PPOClip):
            clipped_T = (ratio_T < 1 - self.surrogate.clip_low) & (batch.advantages_T < 0)
            clipped_T = clipped_T | ((ratio_T > 1 + self.surrogate.clip_high) & (batch.advantages_T > 0))
            sums["policy/clip_fraction"] = (clipped_T * share_T).sum()
        if batch.rollout_logprobs_T is not None:
            difference_T = (old_T - batch.rollout_logprobs_T) * mask_T
            sums["rollout/logprob_diff_mean"] = (difference_T.abs() * share_T).sum()
            # Samples come from the engine, so k3 of (engine, trainer) estimates KL(engine || trainer).
            sums["rollout/kl"] = (kl.k3(batch.rollout_logprobs_T, old_T) * share_T).sum()
            maxima["rollout/logprob_diff_max"] = difference_T.abs().max() if len(difference_T) else difference_T.sum()
        # Gains cancel: summed in float64 the reported loss does not depend on how they were cut.
        loss = -(objective_T * batch.loss_weights_T).sum(dtype=torch.float64)
        return LossOutput(loss=loss, sums=sums, maxima=maxima)


def GRPO() -> Objective:
    """DeepSeekMath, 2402.03300, equation 3; the KL coefficient is the field's usual 0.001 (the paper's is 0.04)."""
    return Objective(advantage=GroupNorm(), surrogate=PPOClip(), aggregate="seq-mean-token-mean", kl_coef=0.001)


def DrGRPO() -> Objective:
    """Understanding R1-Zero-Like Training, 2503.20783: no division by std or by the response's own length, no KL."""
    return Objective(advantage=GroupNorm(by_std=False), surrogate=PPOClip(), aggregate="constant-length", kl_coef=0.0)


def SFT() -> Objective:
    """Cross-entropy on given completions, mean over tokens."""
    return Objective(advantage=Ones(), surrogate=LogLikelihood(), aggregate="token-mean", kl_coef=0.0)


def RLOO() -> Objective:
    """Back to Basics, 2402.14740: leave-one-out baseline, REINFORCE on whole responses, no KL by default."""
    return Objective(advantage=LeaveOneOut(), surrogate=LogLikelihood(), aggregate="seq-mean-token-sum")


def OPO() -> Objective:
    """On-Policy RL with Optimal Reward Baseline, 2505.23585: length-weighted baseline, exact on-policy, no KL."""
    return Objective(advantage=LengthWeighted(), surrogate=LogLikelihood(), aggregate="token-mean")


def GPG() -> Objective:
    """Group Policy Gradient, 2504.02546: centred rewards, scaled for groups that tell nothing; no ratio, no KL."""
    return Objective(advantage=GroupMeanScaled(), surrogate=LogLikelihood(), aggregate="token-mean")


def GSPO() -> Objective:
    """Group Sequence Policy Optimization, 2507.18071, section 5.1: ratio of responses, clipped at 3e-4 and 4e-4, no KL."""
    surrogate = PPOClip(clip_low=3e-4, clip_high=4e-4)
    return Objective(advantage=GroupNorm(), surrogate=surrogate, aggregate="seq-mean-token-mean", ratio="sequence")


def CISPOMethod() -> Objective:
    """MiniMax-M1, 2506.13585: bounded importance weights without a gradient of their own, mean over tokens, no KL."""
    return Objective(advantage=GroupNorm(), surrogate=CISPO(), aggregate="token-mean")


def SAPO() -> Objective:
    """Soft Adaptive Policy Optimization, 2511.20347: a smooth gate in the place of clipping, no KL."""
    return Objective(advantage=GroupNorm(), surrogate=SoftGate(), aggregate="seq-mean-token-mean")


METHODS: dict[str, Callable[[], Objective]] = {
    "grpo": GRPO,
    "dr_grpo": DrGRPO,
    "rloo": RLOO,
    "opo": OPO,
    "gpg": GPG,
    "gspo": GSPO,
    "cispo": CISPOMethod,
    "sapo": SAPO,
    "sft": SFT,
}
