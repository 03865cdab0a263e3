"""log-ratio, logprobs, advantages -> the contribution of each token to the objective (maximized).

A surrogate is one frozen dataclass in `algo/surrogates/`: its fields are its parameters, which are keys of `algorithm`, each
with default, range and meaning. It is found by its name.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fivefold.algo.importance_sampling import RATIOS
from fivefold.algo.segments import Segments
from fivefold.keys.identity import hints_of
from fivefold.keys.ranges import Rule
from fivefold.lazy import Tensor

if TYPE_CHECKING:
    from fivefold.algo.part import Case

Metrics = dict[str, "Tensor"]
RatioReference = Literal["old", "reference", "nothing"]
"""The ratio's denominator: the policy before the step's updates, the reference, or nothing."""


class Surrogate:
    """Formula of the objective of each token, before rollout correction and loss weights."""

    name = ""
    """Value of `algorithm.surrogate` that chooses it."""
    ratio_reference: RatioReference = "old"
    levels: tuple[str, ...] = tuple(RATIOS)
    """Importance sampling levels that it supports."""
    pairs = False
    """Whether the surrogate compares the two responses of a pair; if so, it belongs to methods that learn from pairs."""
    vanishes = False
    """Whether a sample without advantages contributes exactly zero to value and gradient and does not affect other
    samples."""
    selects = False
    """Whether the surrogate treats some tokens differently, selected among all tokens of the update."""
    unless: tuple[str, ...] = ()
    """Parameters that prevent vanishing if they are not 0."""
    reports: tuple[tuple[str, str, str], ...] = ()
    """(name, unit, meaning) of each metric that only this surrogate reports: its rows of docs/metrics.md."""

    def __call__(self, log_ratio_T: Tensor, logprobs_T: Tensor, advantages_T: Tensor, samples: Segments) -> Tensor:
        raise NotImplementedError

    def metrics(self, log_ratio_T: Tensor, advantages_T: Tensor, samples: Segments) -> Metrics:
        """Return values per token; their weighted mean is reported."""
        return {}

    def select_tokens(self, logprobs_S: Tensor, old_logprobs_S: Tensor, advantages_S: Tensor, uniform_S: Tensor) -> Tensor:
        """[S] which response tokens of the whole update are selected; `uniform_S` has a random number in [0, 1) for each."""
        raise NotImplementedError

    @classmethod
    def check(cls, case: Case) -> None:
        """Record choices that cannot be used with this surrogate."""

    @classmethod
    def parameters(cls) -> dict[str, Any]:
        """Return the default of each parameter."""
        return {item.name: item.default for item in fields(cls)}  # type: ignore[arg-type]

    @classmethod
    def range_of(cls, parameter: str) -> Rule:
        """Return the range, or the names, on a parameter's field."""
        hint = hints_of(cls)[parameter]
        options = [hint] if typing.get_origin(hint) is Annotated else typing.get_args(hint)
        return next(mark for option in options for mark in typing.get_args(option)[1:] if isinstance(mark, Rule))


def ratio(log_ratio_T: Tensor) -> Tensor:
    """ρ = π / π_old. The clamp to ±20 keeps exp() finite; every method clips far earlier."""
    return log_ratio_T.clamp(-20, 20).exp()


@dataclass(frozen=True)
class UserSurrogate(Surrogate):
    """Wraps a user function: log_ratio_T, logprobs_T, advantages_T, samples -> objective_T."""

    function: Callable[[Tensor, Tensor, Tensor, Segments], Tensor]

    def __call__(self, log_ratio_T: Tensor, logprobs_T: Tensor, advantages_T: Tensor, samples: Segments) -> Tensor:
        return self.function(log_ratio_T, logprobs_T, advantages_T, samples)
