"""logprobs, ref_logprobs -> estimate of KL(policy || reference) at each token (Schulman, "Approximating KL Divergence")."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Estimator = Callable[[Tensor, Tensor], Tensor]


def k1(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """log π - log π_ref: unbiased, can be negative."""
    return logprobs_T - ref_logprobs_T


def k2(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """Half the squared log-ratio; its gradient is that of the KL."""
    return 0.5 * (logprobs_T - ref_logprobs_T).square()


def k3(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """e^-d + d - 1 with d = log π - log π_ref: unbiased and never negative (GRPO, 2402.03300 equation 4).

    d is clamped to ±20, so that the exponential stays finite; the penalty is already extreme there.
    """
    log_ratio_T = (logprobs_T - ref_logprobs_T).clamp(-20, 20)
    return (-log_ratio_T).expm1() + log_ratio_T


def absolute(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """|log π - log π_ref|: a distance that some systems offer, not an estimate of the KL."""
    return (logprobs_T - ref_logprobs_T).abs()


def straight_through(value: Estimator) -> Estimator:
    """Return an estimator with the value of `value` and the gradient of k2, which is that of the KL; k1's would be 0 on
    average."""

    def estimate(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
        gradient_T = k2(logprobs_T, ref_logprobs_T)
        return gradient_T - gradient_T.detach() + value(logprobs_T, ref_logprobs_T).detach()

    return estimate


ESTIMATORS: dict[str, Estimator] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "abs": absolute,
    "k1+": straight_through(k1),
    "k3+": straight_through(k3),
    "abs+": straight_through(absolute),
}


def adapt(coef: float, kl: float, target: float, samples: int, horizon: int) -> float:
    """Return the adapted coefficient, coef · (1 + clip(KL / target - 1, ±0.2) · samples / horizon): 1909.08593 section
    2.2."""
    return coef * (1 + min(max(kl / target - 1, -0.2), 0.2) * samples / horizon)
