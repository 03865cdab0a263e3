"""logprobs, old_logprobs -> log-ratio of each token, of the token itself or of its whole response."""

from __future__ import annotations

import torch
from torch import Tensor


def token_log_ratio(logprobs_T: Tensor, old_logprobs_T: Tensor, mask_T: Tensor, lengths_N: list[int]) -> Tensor:
    """log π - log π_old of each token."""
    return logprobs_T - old_logprobs_T


def sequence_log_ratio(logprobs_T: Tensor, old_logprobs_T: Tensor, mask_T: Tensor, lengths_N: list[int]) -> Tensor:
    """The mean over its response, at each of its tokens: GSPO (2507.18071) equation 7, in the form of its equation 14.

    Its value is that of the response; its gradient goes through the token, so that weights of tokens stay a plain sum.
    """
    lengths = torch.tensor(lengths_N, dtype=torch.long, device=logprobs_T.device)
    sample_T = torch.repeat_interleave(torch.arange(len(lengths_N), device=logprobs_T.device), lengths)
    sums_N = logprobs_T.new_zeros(2, len(lengths_N))
    difference_T = (logprobs_T - old_logprobs_T).detach() * mask_T
    sums_N = sums_N.index_add(1, sample_T, torch.stack([difference_T, mask_T.to(difference_T.dtype)]))
    mean_N = sums_N[0] / sums_N[1].clamp(min=1)
    return logprobs_T - logprobs_T.detach() + mean_N[sample_T]


RATIOS = {"token": token_log_ratio, "sequence": sequence_log_ratio}
