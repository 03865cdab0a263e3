"""Turns of a step: their rewards and returns, and the tokens of a batch that they sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fivefold.algo.credit import returns_of
from fivefold.lazy import Tensor, torch

if TYPE_CHECKING:
    from fivefold.types import RolloutStats, TokenBatch, Turns


def places_of_turns(batch: TokenBatch, stats: RolloutStats, turns: Turns) -> tuple[Tensor, Tensor]:
    """(places in T that the turns sampled, turn of each place), for the samples of this batch."""
    lengths_N = torch.tensor(batch.lengths_N, dtype=torch.long)
    start_N = torch.full((len(stats),), -1)
    start_N[batch.sample_index_N] = lengths_N.cumsum(0) - lengths_N + stats.prompt_lengths_N[batch.sample_index_N]
    local_U = (start_N[turns.row_U] >= 0).nonzero()[:, 0]
    count_U = (turns.end_U - turns.begin_U)[local_U]
    first_U = start_N[turns.row_U[local_U]] + turns.begin_U[local_U]
    place_S = (first_U - (count_U.cumsum(0) - count_U)).repeat_interleave(count_U) + torch.arange(int(count_U.sum()))
    return place_S, local_U.repeat_interleave(count_U)


def rewards_of_turns(batch: TokenBatch, stats: RolloutStats, turns: Turns) -> Tensor:
    """[T] the reward of each turn at its last token, 0 elsewhere."""
    place_S, turn_S = places_of_turns(batch, stats, turns)
    is_last_S = torch.ones_like(turn_S, dtype=torch.bool)
    is_last_S[:-1] = turn_S[1:] != turn_S[:-1]
    rewards_T = torch.zeros(len(batch.token_ids_T), dtype=torch.float64)
    rewards_T[place_S[is_last_S]] = turns.reward_U[turn_S[is_last_S]]
    return rewards_T


def turn_returns(turns: Turns, trajectory_N: Tensor, rewards_M: Tensor, gamma: float, scale: float = 1.0) -> Tensor:
    """[U] G_k = r_k + γ G_{k+1} over the turns of a trajectory in the order of their numbers.

    `scale` is the factor of the turns' own rewards. What they do not add up to of the trajectory's reward, `rewards_M`, is
    the last turn's.
    """
    trajectory_U = trajectory_N[turns.row_U]
    order_U = (trajectory_U * (int(turns.number_U.max()) + 1) + turns.number_U).argsort()
    row_U, count_M = trajectory_U[order_U], torch.bincount(trajectory_U, minlength=len(rewards_M))
    column_U = torch.arange(len(row_U)) - (count_M.cumsum(0) - count_M)[row_U]
    rewards_MU = torch.zeros(len(rewards_M), int(count_M.max()), dtype=torch.float64)
    rewards_MU[row_U, column_U] = scale * turns.reward_U[order_U]
    has_turns_M = count_M > 0
    rest_M = rewards_M.double() - rewards_MU.sum(1)
    rewards_MU[has_turns_M, count_M[has_turns_M] - 1] += rest_M[has_turns_M]
    returns_U = torch.zeros(len(row_U), dtype=torch.float64)
    returns_U[order_U] = returns_of(rewards_MU, gamma)[row_U, column_U]
    return returns_U
