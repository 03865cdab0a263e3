"""Critic loss: values_T and the micro-batch -> its share of the loss."""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.algo.credit import before
from fivefold.columns import Column
from fivefold.lazy import Tensor, torch
from fivefold.types import LossOutput, TokenBatch


@dataclass(frozen=True)
class ValueLoss:
    """½ max((V - R)², (clip(V, V_old ± clip) - R)²): PPO's released code (ppo2).

    Tokens have the weights of the policy's loss, or those of `algorithm.value_aggregate`.
    """

    clip: float | None = 0.5
    """Clip range of the value around V_old; None: ½ (V - R)², without clipping."""

    def __call__(self, values_T: Tensor, entropy_T: Tensor, batch: TokenBatch) -> LossOutput:
        """Return this micro-batch's share of the loss. `values_T` are the critic's values of the text up to and including
        each token."""
        mask_T, returns_T = batch.loss_mask_T, batch[Column.RETURNS]
        value_T, old_T = before(values_T) * mask_T, before(batch[Column.VALUES]) * mask_T
        error_T = (value_T - returns_T).square()
        share_T = mask_T / max(batch.update_tokens, 1)
        # Variances are differences of these sums, which float32 would compute with few correct digits.
        now_T, return_T = value_T.detach().double(), returns_T.double()
        means = {
            "critic/value_mean": now_T,
            "critic/return_mean": return_T,
            "critic/return_square_mean": return_T.square(),
            "critic/residual_mean": return_T - now_T,
            "critic/residual_square_mean": (return_T - now_T).square(),
        }
        if self.clip is not None:
            near_T = torch.maximum(torch.minimum(value_T, old_T + self.clip), old_T - self.clip)
            clipped_T = (near_T - returns_T).square()
            means["critic/clip_fraction"] = (clipped_T > error_T).detach().float()
            error_T = torch.maximum(error_T, clipped_T)
        loss = 0.5 * (error_T * batch.columns.get(Column.VALUE_WEIGHTS, batch.weights_T)).sum(dtype=torch.float64)
        return LossOutput(loss=loss, sums={name: (value_T * share_T).sum() for name, value_T in means.items()})

    def finalize_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return the metrics of a whole update, with 1 - Var(R - V) / Var(R) in place of the sums that it is computed
        from."""
        finalized = dict(metrics)
        residual, residual_square = finalized.pop("critic/residual_mean"), finalized.pop("critic/residual_square_mean")
        variance = finalized.pop("critic/return_square_mean") - finalized["critic/return_mean"] ** 2
        finalized["critic/return_std"] = max(variance, 0.0) ** 0.5
        left = residual_square - residual**2
        finalized["critic/explained_variance"] = 1 - left / variance if variance > 1e-12 else 0.0
        return finalized
