"""The table of what a batch carries for each token, besides the tokens themselves. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

_FLOAT = ("float32",)
_FLOATS = ("float32", "float64")


def _sampling(temperature: float) -> float:
    return temperature


def _half(temperature: float) -> float:
    return temperature / 2


def _one(temperature: float) -> float:
    return 1.0


class Column(Enum):
    """One number, or one row of numbers, for each token of a batch.

    The value is the name of the column in files; it ends with the letters of its shape.
    """

    _value_: str
    dtypes: tuple[str, ...]
    """Names of the torch dtypes that it may have."""
    filled_by: str
    """Role of the model that computes the column, or the part of the step that sets it."""
    temperature: Callable[[float], float] | None
    """Sampling temperature -> temperature of the model's pass; None if no pass of a model computes the column."""

    def __new__(
        cls, name: str, dtypes: tuple[str, ...], filled_by: str, temperature: Callable[[float], float] | None = None
    ) -> Column:
        column = object.__new__(cls)
        column._value_ = name
        column.dtypes, column.filled_by, column.temperature = dtypes, filled_by, temperature
        return column

    LOSS_WEIGHTS = "loss_weights_T", _FLOAT, "mini-batches"
    """Share of the update's loss that each token carries; 0 on prompts. The aggregation determines the shares over all
    replicas of an update, so the loss is a plain sum."""
    PENALTY_WEIGHTS = "penalty_weights_T", _FLOAT, "mini-batches"
    """Weights of the KL and entropy terms, if they differ from LOSS_WEIGHTS."""
    VALUE_WEIGHTS = "value_weights_T", _FLOAT, "mini-batches"
    """Weights of the critic's loss, if they differ from LOSS_WEIGHTS."""
    ADVANTAGES = "advantages_T", _FLOATS, "advantages"
    """How much better a token is than expected, from the rewards of the step; float64 if a user's function returns that."""
    ROLLOUT_LOGPROBS = "rollout_logprobs_T", _FLOAT, "packing"
    """Log-probs of the engine that sampled the tokens; absent if the responses come from the data."""
    VERSION = "version_T", ("int64",), "packing"
    """Optimizer steps taken by the weights that sampled each token; absent if every sample has one version."""
    TURN = "turn_T", ("int64",), "packing"
    """Number, within its trajectory, of the turn that sampled each token; -1 on tokens without loss. Absent if every
    response is one turn."""
    INTERPOLATION = "interpolation_T", _FLOAT, "token age"
    """Position of each token's old log-prob between the engine's (0) and the current one (1)."""
    OLD_LOGPROBS = "old_logprobs_T", _FLOAT, "policy", _sampling
    """Log-probs of the policy before the step's updates."""
    FIRST_LOGPROBS = "first_logprobs_T", _FLOAT, "samples.jsonl"
    """OLD_LOGPROBS, if only samples.jsonl needs them; no formula reads them."""
    HALF_TEMPERATURE_LOGPROBS = "half_temperature_logprobs_T", _FLOAT, "policy", _half
    """OLD_LOGPROBS at half the temperature."""
    REF_LOGPROBS = "ref_logprobs_T", _FLOAT, "reference", _sampling
    """Log-probs of the reference model."""
    PRM_LOGPROBS = "prm_logprobs_T", _FLOAT, "prm", _one
    """Log-probs of the process reward model at temperature 1, with its weights at the time the rewards are computed."""
    PRM_REF_LOGPROBS = "prm_ref_logprobs_T", _FLOAT, "prm.reference", _one
    """Log-probs of the process reward model's reference, at temperature 1."""
    VALUES = "values_T", _FLOAT, "critic", _sampling
    """Critic's value of the text up to and including each token, before the step's updates."""
    RETURNS = "returns_T", _FLOATS, "advantages"
    """Training target of the critic: the return from each response token on."""
    SELECTED = "selected_T", ("bool",), "mini-batches"
    """Tokens that the surrogate treats differently, selected over the whole update."""
    EXPERT = "expert_T", ("bool",), "packing"
    """Tokens of expert samples, prompt and response."""
    ROUTES = "routes_TLK", ("int8", "int16"), "packing"
    """Experts that the policy routes each token to (fivefold.routes): the engine's, or those of the policy's own pass.
    Absent if the router chooses everywhere."""

    @property
    def shape(self) -> str:
        """Letters of its dimensions, one character each."""
        return self._value_.rpartition("_")[2]
