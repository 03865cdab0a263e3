"""logprobs, old_logprobs -> log-ratio of each token, by token, by turn or by whole response."""

from __future__ import annotations

from collections.abc import Callable

from fivefold.algo.segments import Segments
from fivefold.lazy import Tensor

Ratio = Callable[["Tensor", "Tensor", Segments], "Tensor"]
"""logprobs_T, old_logprobs_T, samples -> log_ratio_T."""


def token(logprobs_T: Tensor, old_logprobs_T: Tensor, samples: Segments) -> Tensor:
    """log π - log π_old of each token."""
    return logprobs_T - old_logprobs_T


def sequence(logprobs_T: Tensor, old_logprobs_T: Tensor, samples: Segments) -> Tensor:
    """Mean log-ratio over the response, at each of its tokens: GSPO (2507.18071) equation 7."""
    return samples.means(logprobs_T - old_logprobs_T)[samples.sample_T]


def sequence_token(logprobs_T: Tensor, old_logprobs_T: Tensor, samples: Segments) -> Tensor:
    """Value of `sequence` with the gradient of the token itself: GSPO-token (2507.18071) equation 14."""
    return logprobs_T - logprobs_T.detach() + sequence(logprobs_T.detach(), old_logprobs_T, samples)


def turn(logprobs_T: Tensor, old_logprobs_T: Tensor, samples: Segments) -> Tensor:
    """Mean log-ratio over the turn, at each of its tokens: `sequence` with a turn in place of the response."""
    return samples.turn_means(logprobs_T - old_logprobs_T)


RATIOS: dict[str, Ratio] = {"token": token, "turn": turn, "sequence": sequence, "sequence-token": sequence_token}
