"""Maps tokens to their samples: TokenBatch -> sums and means over responses."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    turn_T: Tensor | None = None
    """Column.TURN; None if every response is one turn."""

    @classmethod
    def of(cls, batch: TokenBatch) -> Segments:
        return cls(batch.loss_mask_T, batch.lengths_N, batch.columns.get(Column.SELECTED), batch.columns.get(Column.TURN))

    @classmethod
    def of_trajectories(cls, batch: TokenBatch, trajectory_N: Tensor | None) -> tuple[Segments, list[int]]:
        """Return the trajectories of a batch, whose sequences are neighbors, and the number of each in the step.

        `trajectory_N` has the trajectory of each sample of the step; None: every sample is a trajectory of its own.
        """
        samples = cls.of(batch)
        if trajectory_N is None:
            return samples, batch.sample_index_N
        numbers, counts = trajectory_N[batch.sample_index_N].unique_consecutive(return_counts=True)
        assert len(numbers.unique()) == len(numbers), "the sequences of a trajectory must be neighbors in its batch"
        lengths = torch.tensor(batch.lengths_N, dtype=torch.long).split(counts.tolist())
        return replace(samples, lengths_N=[int(lengths_of_one.sum()) for lengths_of_one in lengths]), numbers.tolist()

    @cached_property
    def sample_T(self) -> Tensor:
        """Index of the sample that a token belongs to."""
        device = self.mask_T.device
        lengths = torch.tensor(self.lengths_N, dtype=torch.long, device=device)
        return torch.repeat_interleave(torch.arange(len(self.lengths_N), device=device), lengths)

    def turn_sums(self, values_T: Tensor) -> Tensor:
        """[T] sum over the tokens with loss of the turn of each token; without turns, over its response."""
        if self.turn_T is None:
            return self.sums(values_T)[self.sample_T]
        # A turn's tokens follow one another, so that no turn of another sequence has the same number here.
        begins_T = (self.turn_T.diff(prepend=self.turn_T[:1]) != 0) | (self.sample_T.diff(prepend=self.sample_T[:1]) != 0)
        place_T = begins_T.cumsum(0)
        sums_T = torch.zeros_like(values_T).index_add(0, place_T, torch.where(self.mask_T, values_T, 0.0))
        return sums_T[place_T]

    def turn_means(self, values_T: Tensor) -> Tensor:
        """[T] mean over the tokens with loss of the turn of each token; without turns, over its response."""
        return self.turn_sums(values_T) / self.turn_sums(torch.ones_like(values_T)).clamp(min=1)

    def sums(self, values_T: Tensor) -> Tensor:
        """[N] sum over the response tokens of each sample."""
        zeros_N = values_T.new_zeros(len(self.lengths_N))
        return zeros_N.index_add(0, self.sample_T, torch.where(self.mask_T, values_T, 0.0))

    def maxima(self, values_T: Tensor) -> Tensor:
        """[N] largest value over the response tokens of each sample; 0 without tokens."""
        lowest_N = values_T.new_full((len(self.lengths_N),), -torch.inf)
        response_T = torch.where(self.mask_T, values_T, -torch.inf)
        maxima_N = lowest_N.scatter_reduce(0, self.sample_T, response_T, "amax")
        return torch.where(maxima_N.isfinite(), maxima_N, 0.0)

    def means(self, values_T: Tensor) -> Tensor:
        """[N] mean over the response tokens of each sample; 0 without tokens."""
        return self.sums(values_T) / self.sums(torch.ones_like(values_T)).clamp(min=1)
