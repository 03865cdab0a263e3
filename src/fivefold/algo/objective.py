"""An objective is one choice on each axis; a published method is a row of METHODS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fivefold.algo import kl
from fivefold.algo.advantages import Advantage, GroupNorm, Ones
from fivefold.algo.aggregate import AGGREGATES
from fivefold.algo.surrogates import LogLikelihood, PPOClip, Surrogate
from fivefold.types import LossOutput, TokenBatch


@dataclass(frozen=True)
class Objective:
    """What is maximised: Σ weights · (surrogate - coef · KL)."""

    advantage: Advantage
    surrogate: Surrogate
    aggregate: str = "seq-mean-token-mean"
    kl_estimator: str = "k3"
    kl_coef: float = 0.0

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
    ) -> Objective:
        """This objective with the given choices; raises ValueError for one that the method does not have."""
        advantage, surrogate = self.advantage, self.surrogate
        if by_std is not None:
            if not isinstance(advantage, GroupNorm):
                raise ValueError("normalize_by_std belongs to group advantages, which this method does not use")
            advantage = replace(advantage, by_std=by_std)
        if clip_low is not None or clip_high is not None:
            if not isinstance(surrogate, PPOClip):
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
        return Objective(
            advantage=advantage,
            surrogate=surrogate,
            aggregate=self.aggregate if aggregate is None else aggregate,
            kl_estimator=self.kl_estimator if kl_estimator is None else kl_estimator,
            kl_coef=self.kl_coef if kl_coef is None else kl_coef,
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
        objective_T = self.surrogate(logprobs_T, old_T, batch.advantages_T)
        share_T = mask_T / max(batch.update_tokens, 1)
        now_T = logprobs_T.detach()
        sums = {"policy/entropy": (entropy_T.detach() * share_T).sum(), "policy/logprob_mean": (now_T * share_T).sum()}
        maxima = {}
        if self.needs_reference:
            assert batch.ref_logprobs_T is not None
            kl_T = kl.ESTIMATORS[self.kl_estimator](logprobs_T, batch.ref_logprobs_T)
            objective_T = objective_T - self.kl_coef * kl_T
            sums["policy/kl_reference"] = (kl.k3(now_T, batch.ref_logprobs_T) * share_T).sum()
        if isinstance(self.surrogate, PPOClip):
            ratio_T = (now_T - old_T).exp()
            clipped_T = (ratio_T < 1 - self.surrogate.clip_low) & (batch.advantages_T < 0)
            clipped_T = clipped_T | ((ratio_T > 1 + self.surrogate.clip_high) & (batch.advantages_T > 0))
            sums["policy/ratio_mean"] = (ratio_T * share_T).sum()
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


METHODS: dict[str, Callable[[], Objective]] = {"grpo": GRPO, "dr_grpo": DrGRPO, "sft": SFT}
