"""logprobs, ref_logprobs -> estimate of KL(policy || reference) at each token (Schulman, "Approximating KL Divergence")."""

from __future__ import annotations

from torch import Tensor


def k1(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """log π - log π_ref: unbiased, can be negative."""
    return logprobs_T - ref_logprobs_T


def k2(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """Half the squared log-ratio: its gradient is that of the KL."""
    return 0.5 * (logprobs_T - ref_logprobs_T).square()


def k3(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """e^-d + d - 1 with d = log π - log π_ref: unbiased and never negative (GRPO, 2402.03300 equation 4)."""
    log_ratio_T = logprobs_T - ref_logprobs_T
    return (-log_ratio_T).expm1() + log_ratio_T


def absolute(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """|log π - log π_ref|: no estimate of the KL, but a distance that some systems offer."""
    return (logprobs_T - ref_logprobs_T).abs()


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3, "abs": absolute}
