"""Maps tokens to their samples: TokenBatch -> sums and means over responses."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from fivefold.columns import Column
from fivefold.lazy import Tensor, torch

if TYPE_CHECKING:
    from fivefold.types import TokenBatch


@dataclass(frozen=True)
class Segments:
    """The samples packed end to end in T, prompts included."""

    mask_T: Tensor
    """True on response tokens."""
    lengths_N: list[int]
    selected_T: Tensor | None = None
    """Tokens that the surrogate or the correction selected among all tokens of the update."""

    @classmethod
    def of(cls, batch: TokenBatch) -> Segments:
        return cls(batch.loss_mask_T, batch.lengths_N, batch.columns.get(Column.SELECTED))

    @cached_property
    def sample_T(self) -> Tensor:
        """Index of the sample that a token belongs to."""
        device = self.mask_T.device
        lengths = torch.tensor(self.lengths_N, dtype=torch.long, device=device)
        return torch.repeat_interleave(torch.arange(len(self.lengths_N), device=device), lengths)

    def sums(self, values_T: Tensor) -> Tensor:
        """[N] sum over the response tokens of each sample."""
        zeros_N = values_T.new_zeros(len(self.lengths_N))
        return zeros_N.index_add(0, self.sample_T, torch.where(self.mask_T, values_T, 0.0))

    def maxima(self, values_T: Tensor) -> Tensor:
        """[N] largest value over the response tokens of each sample; 0 without tokens."""
        lowest_N = values_T.new_full((len(self.lengths_N),), -torch.inf)
        own_T = torch.where(self.mask_T, values_T, -torch.inf)
        found_N = lowest_N.scatter_reduce(0, self.sample_T, own_T, "amax")
        return torch.where(found_N.isfinite(), found_N, 0.0)

    def means(self, values_T: Tensor) -> Tensor:
        """[N] mean over the response tokens of each sample; 0 without tokens."""
        return self.sums(values_T) / self.sums(torch.ones_like(values_T)).clamp(min=1)
