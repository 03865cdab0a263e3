"""advantages_N -> advantages_T: distributes the advantage of a response to its tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from fivefold.algo.segments import Segments
from fivefold.lazy import Tensor, torch

CREDITS = ("response", "turns", "discounted", "gae")


class Credit:
    """Distributes the advantage of each response to its tokens."""

    by_token: ClassVar[bool] = True
    """Whether a token's penalty counts for the tokens before it. Otherwise it is part of the reward of the response."""
    needs_critic: ClassVar[bool] = False
    keeps_zero: ClassVar[bool] = False
    """Whether the tokens of a response with advantage 0 and no penalties have advantage 0."""
    by_turn: ClassVar[bool] = False
    """Whether a turn's own reward counts at its last token. Otherwise the whole reward counts at the end."""

    def __call__(
        self, advantages_N: Tensor, penalties_T: Tensor, values_T: Tensor | None, finished_N: Tensor, samples: Segments
    ) -> tuple[Tensor, Tensor]:
        """(advantages_T, returns_T), 0 outside of responses.

        `values_T` are the critic's values of the text up to and including each token. `finished_N` marks the responses that
        ended by themselves.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class UniformCredit(Credit):
    """Gives every token the advantage of its response."""

    by_token = False
    keeps_zero = True

    def __call__(
        self, advantages_N: Tensor, penalties_T: Tensor, values_T: Tensor | None, finished_N: Tensor, samples: Segments
    ) -> tuple[Tensor, Tensor]:
        advantages_T = advantages_N.float()[samples.sample_T] * samples.mask_T
        return advantages_T, advantages_T


@dataclass(frozen=True)
class _Return(Credit):
    """Gives every token the discounted sum of the rewards from its step on; subclasses define what a step is."""

    gamma: float = 1.0

    def __call__(
        self, advantages_N: Tensor, penalties_T: Tensor, values_T: Tensor | None, finished_N: Tensor, samples: Segments
    ) -> tuple[Tensor, Tensor]:
        table = Table(samples)
        advantages_T = table.flat(self._returns(table, table.rewards(advantages_N, penalties_T)))
        return advantages_T, advantages_T

    def _returns(self, table: Table, rewards_NL: Tensor) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class DiscountedReturn(_Return):
    """G_t = r_t + γ G_{t+1}, with the reward at the last token: REINFORCE++ (2501.03262)."""

    keeps_zero = True

    def _returns(self, table: Table, rewards_NL: Tensor) -> Tensor:
        return returns_of(rewards_NL, self.gamma)


@dataclass(frozen=True)
class TurnReturn(_Return):
    """G_k = R_k + γ G_{k+1} at every token of turn k, where R_k is the sum of the rewards of its tokens."""

    by_turn = True

    def _returns(self, table: Table, rewards_NL: Tensor) -> Tensor:
        turn_NL = table.turns()
        rewards_NU = torch.zeros(len(turn_NL), int(turn_NL.max()) + 1 if turn_NL.numel() else 1, dtype=torch.float64)
        rewards_NU.scatter_add_(1, turn_NL, rewards_NL)
        return returns_of(rewards_NU, self.gamma).gather(1, turn_NL)


@dataclass(frozen=True)
class GAE(Credit):
    """δ_t = r_t + γ V_{t+1} - V_t, A_t = δ_t + γλ A_{t+1}, returns A + V: 1506.02438 equations 11 to 16.

    V_t is the value before token t; t counts tokens with loss, so that observations are skipped. After the last token it
    is 0. With `bootstrap_truncated` and a truncated response, it is the critic's value of the whole text.
    """

    gamma: float = 1.0
    lam: float = 1.0
    bootstrap_truncated: bool = False
    needs_critic = True
    by_turn = True

    def __call__(
        self, advantages_N: Tensor, penalties_T: Tensor, values_T: Tensor | None, finished_N: Tensor, samples: Segments
    ) -> tuple[Tensor, Tensor]:
        assert values_T is not None
        table = Table(samples)
        before_NL = table.rows(before(values_T))
        bootstrapped_N = ~finished_N if self.bootstrap_truncated else torch.zeros_like(finished_N)
        end_N = torch.where(bootstrapped_N, table.last(values_T), 0.0)
        after_NL = torch.cat([before_NL[:, 1:], before_NL.new_zeros(len(before_NL), 1)], 1)
        after_NL = torch.where(table.is_last_NL, end_N[:, None], after_NL)
        delta_NL = table.rewards(advantages_N, penalties_T) + self.gamma * after_NL - before_NL
        advantages_T = table.flat(returns_of(delta_NL * table.present_NL, self.gamma * self.lam))
        return advantages_T, advantages_T + before(values_T) * samples.mask_T


@dataclass(frozen=True)
class UserCredit(Credit):
    """Wraps a user function: advantages_N, penalties_T, samples -> advantages_T."""

    function: Callable[[Tensor, Tensor, Segments], Tensor]

    def __call__(
        self, advantages_N: Tensor, penalties_T: Tensor, values_T: Tensor | None, finished_N: Tensor, samples: Segments
    ) -> tuple[Tensor, Tensor]:
        advantages_T = self.function(advantages_N, penalties_T, samples) * samples.mask_T
        return advantages_T, advantages_T


def before(values_T: Tensor) -> Tensor:
    """[T] value of the text before each token. A sample's first token is never a response token: the wrap-around is
    harmless."""
    return values_T.roll(1)


def returns_of(rewards_NL: Tensor, factor: float) -> Tensor:
    """[N, L] x_t + factor · x_{t+1} + factor² · x_{t+2} + ..."""
    returns_NL = rewards_NL.clone()
    for place in range(rewards_NL.shape[1] - 2, -1, -1):
        returns_NL[:, place] += factor * returns_NL[:, place + 1]
    return returns_NL


class Table:
    """Arranges tokens with loss as rows [N, L] in float64, each row filled from the left in the order of its turns."""

    def __init__(self, samples: Segments) -> None:
        self._place_S = samples.mask_T.nonzero()[:, 0]
        self._turn_T = samples.turn_T
        if samples.turn_T is not None:
            key_S = (samples.sample_T << 32)[self._place_S] + samples.turn_T[self._place_S]
            self._place_S = self._place_S[key_S.argsort(stable=True)]
        self._tokens = len(samples.mask_T)
        self._row_S = samples.sample_T[self._place_S]
        count_N = torch.bincount(self._row_S, minlength=len(samples.lengths_N))
        self._column_S = torch.arange(len(self._row_S)) - (count_N.cumsum(0) - count_N)[self._row_S]
        longest = max(int(count_N.max()), 1) if len(count_N) else 1
        self.present_NL = torch.arange(longest)[None] < count_N[:, None]
        self.is_last_NL = torch.arange(longest)[None] == count_N[:, None] - 1

    def rows(self, values_T: Tensor) -> Tensor:
        values_NL = torch.zeros(self.present_NL.shape, dtype=torch.float64)
        values_NL[self._row_S, self._column_S] = values_T[self._place_S].double()
        return values_NL

    def rewards(self, advantages_N: Tensor, penalties_T: Tensor) -> Tensor:
        """[N, L] reward of each token: minus its penalty, plus the advantage of the response at the last token."""
        return torch.where(self.is_last_NL, advantages_N.double()[:, None], 0.0) - self.rows(penalties_T)

    def turns(self) -> Tensor:
        """[N, L] position of each token's turn in its row, from 0; all 0 if every response is one turn."""
        turn_NL = torch.zeros(self.present_NL.shape, dtype=torch.long)
        if self._turn_T is not None:
            turn_NL[self._row_S, self._column_S] = self._turn_T[self._place_S]
            turn_NL[:, 1:] = (turn_NL[:, 1:] != turn_NL[:, :-1]).cumsum(1)
            turn_NL[:, 0] = 0
        return turn_NL

    def last(self, values_T: Tensor) -> Tensor:
        """[N] value at the last response token of each sample; 0 for an empty response."""
        return torch.where(self.is_last_NL, self.rows(values_T), 0.0).sum(1)

    def flat(self, values_NL: Tensor) -> Tensor:
        """[T] the values in float32, one per token of the batch; 0 outside of responses."""
        values_T = torch.zeros(self._tokens)
        values_T[self._place_S] = values_NL[self._row_S, self._column_S].float()
        return values_T


def optimal_token_baseline(
    returns_T: Tensor,
    squares_T: Tensor,
    samples: Segments,
    group_N: Tensor,
    longest_G: Tensor,
    total: Callable[[Tensor], Tensor],
    eps: float = 1e-8,
) -> Tensor:
    """[T] Σ W_t G_t / Σ W_t over the responses of a group that have a token t; W_t is the sum of `squares_T` up to t
    (2602.07078).

    It is 0 where only one response has such a token, as in verl (core_algos.py). `group_N` has the groups of these samples,
    `longest_G` the longest response of each group of the step; `total` sums over replicas.
    """
    table = Table(samples)
    present_NL = table.present_NL
    weights_NL = table.rows(squares_T).cumsum(1)
    begin_G = longest_G.cumsum(0) - longest_G
    place_NL = begin_G[group_N][:, None] + torch.arange(present_NL.shape[1])
    place_S, weights_S = place_NL[present_NL], weights_NL[present_NL]
    values = torch.stack([weights_S * table.rows(returns_T)[present_NL], weights_S, torch.ones_like(weights_S)])
    sums = torch.zeros(3, int(longest_G.sum()), dtype=torch.float64).index_add(1, place_S, values)
    weighted, weight, count = total(sums)
    baseline_NL = torch.zeros(present_NL.shape, dtype=torch.float64)
    baseline_NL[present_NL] = torch.where(count > 1, weighted / (weight + eps), 0.0)[place_S]
    return table.flat(baseline_NL)


def whiten(
    values_T: Tensor,
    mask_T: Tensor,
    total: Callable[[Tensor], Tensor],
    part_T: Tensor | None = None,
    parts: int = 1,
    eps: float = 1e-8,
) -> Tensor:
    """(x - mean) / sqrt(unbiased variance + eps) over the response tokens of all replicas; `total` sums over them.

    With `part_T` (part numbers below `parts`), each part has its own mean and variance.
    """
    values, part = values_T[mask_T].double(), torch.zeros_like(values_T, dtype=torch.long) if part_T is None else part_T
    response_part = part[mask_T]

    def by_part(of: Tensor) -> Tensor:
        return torch.zeros(parts, dtype=torch.float64).index_add(0, response_part, of)

    count, summed = total(torch.cat([by_part(torch.ones_like(values)), by_part(values)])).view(2, parts)
    mean = summed / count.clamp(min=1)
    deviation = (total(by_part((values - mean[response_part]).square())) / (count - 1).clamp(min=1) + eps).sqrt()
    return torch.where(mask_T, (values_T.double() - mean[part]) / deviation[part], 0.0).float()


def make_credit(name: str, gamma: float | None, lam: float | None, bootstrap_truncated: bool | None = None) -> Credit:
    """Return the credit `name`. Parameters left out keep their defaults."""
    parameters: dict[str, Any] = {} if gamma is None else {"gamma": gamma}
    if name == "gae":
        parameters |= {} if lam is None else {"lam": lam}
        return GAE(**parameters, bootstrap_truncated=bool(bootstrap_truncated))
    # The λ of a method's row belongs to GAE.
    kinds: dict[str, Callable[..., Credit]] = {"discounted": DiscountedReturn, "turns": TurnReturn}
    return kinds[name](**parameters) if name in kinds else UniformCredit()
