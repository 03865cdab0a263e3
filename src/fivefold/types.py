"""The data types that stages pass to each other.

Shape letters, the same in all modules: T packed tokens, S selected tokens, N samples, M trajectories, U turns, G samples of
one prompt, P prompts, V vocabulary, D model width, H heads, L layers, E experts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

from fivefold.columns import Column
from fivefold.errors import UserError
from fivefold.files import writing
from fivefold.lazy import Tensor, torch


@dataclass(frozen=True)
class Prompt:
    """One question, tokenized.

    Example: row 7 of a file of sums, rendered by a template without special tokens:
    `Prompt(id=7, token_ids=[12, 4, 9], source="arithmetic", text="3+4=", ground_truth="7")`.
    """

    id: int
    """Row in the prompt set; part of the key for the prompt's random draws."""
    token_ids: list[int]
    source: str
    """`data_source` of the row: selects the reward and groups evaluation metrics."""
    text: str
    ground_truth: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    """Messages that `text` was rendered from."""
    responses: list[DatasetResponse] = field(default_factory=list)
    """Responses from the data to learn from: one to imitate, or the chosen and the rejected one."""
    extra: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, Any] = field(default_factory=dict)
    """Columns of the row that reward functions take by name."""
    is_chat: bool = False
    """Whether the row's prompt is a list of messages, not a text."""

    @property
    def given(self) -> str | list[dict[str, Any]]:
        """The prompt in the row's form: its messages, or its text without a chat template."""
        return self.messages if self.is_chat or not self.messages else str(self.messages[-1]["content"])


@dataclass(frozen=True)
class DatasetResponse:
    """A tokenized response from the data set."""

    token_ids: list[int]
    loss_mask: list[bool]
    """True for tokens that carry loss; False for the user's later turns."""
    text: str
    truncated: bool = False
    """Whether the response was cut to the maximum length."""


MODEL_PART = "model"
"""Name of the reward model's score in `Sample.reward_parts`."""

ENDS: dict[str, Literal["finished", "truncated", "failed"]] = {
    "done": "finished",
    "answered": "finished",
    "turns": "truncated",
    "length": "truncated",
    "context": "truncated",
    "time": "truncated",
    "environment": "failed",
    "agent": "failed",
    "abort": "failed",
}
"""How a trajectory may end -> whether it is finished, truncated (`overlong_filter`), or has no reward.

The environment ended it (done); the response ended by itself, without a tool call (answered); a limit was reached: turns of
the trajectory, length of one turn, context, time; the environment or the agent failed, or the engine's request was aborted.
"""

BREAKS = ("template", "content", "calls", "system", "tools", "reasoning", "shorter")
"""Where the context of a turn differs from the tokens held so far, so that a new sequence begins: what the template renders
of earlier turns, in a message's content or tool calls, the system message, the tools or the reasoning; or it has fewer
messages."""


@dataclass(frozen=True)
class Turn:
    """One sampled piece of a sequence: the tokens of one request to the engine.

    Example: the second turn, 12 tokens after an observation of 8: `Turn(number=1, begin=20, end=32, reward=0.5)`.
    """

    number: int
    """Position among all turns of the trajectory, from 0."""
    begin: int
    end: int
    """The turn's tokens are `Sample.token_ids[begin:end]`."""
    reward: float = 0.0
    """Part of the trajectory's reward that this turn earned; what no turn earned belongs to the last one."""
    state: str | None = None
    """State of the environment that the turn answers. Turns of a group with equal states are comparable; None: with no
    other."""
    finish: str = "stop"
    """`Completion.finish_reason` of the turn's request."""
    seconds: float = 0.0
    """Time from the request to its completion."""
    given: float = 0.0
    """What the environment gave for the turn; scoring sets `reward` to this times the weight of the reward `environment`."""
    text: str | None = None
    """Text of the turn; None in checkpoints that do not have it."""


@dataclass
class Sample:
    """One sequence of a trajectory: a context that the engine read, and what it sampled. A response is the only sequence of
    its trajectory unless an environment or an agent answers it.

    Example: two tokens and the end token, sampled after 20 optimizer steps, of which the reward function made 1:
    `Sample([5, 8, 2], [-0.1, -1.3, -0.02], "7", "answered", policy_version=20, reward=1.0, correct=True)`.
    """

    token_ids: list[int]
    """Tokens after the context: sampled ones, and between turns the observations, which have `loss_mask` false."""
    logprobs: list[float]
    """Log-prob of each token under the engine, at the sampling temperature; 0 for observations, which nothing reads."""
    text: str
    end: str
    """How the trajectory ended, a row of ENDS."""
    policy_version: int
    """Optimizer steps taken by the weights that sampled the first token."""
    token_versions: list[int] | None = None
    """`policy_version` of each token, if the weights changed within the response."""
    routes_TLK: Tensor | None = None
    """Experts that the engine routed prompt and response tokens to, for the tokens that it has read (fivefold.routes)."""
    loss_mask: list[bool] | None = None
    """True for tokens that carry loss; None: all of them."""
    reward: float = float("nan")
    """NaN until scored; stays NaN if scoring failed, so it can never be used as a reward by mistake."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    correct: bool = False
    """Whether the function that decides correctness (reward.accuracy) returned 1 or more; a reward model's score never
    counts."""
    reward_failed: bool = False
    """The reward function raised, timed out or returned no finite number; the step and all means exclude the sample."""
    reward_timed_out: bool = False
    """A built-in reward timed out on this sample, which counts as reward 0."""
    prompt_ids: list[int] | None = None
    """Context of this sequence; None: the tokens of the group's prompt."""
    trajectory: int | None = None
    """Number of the trajectory within the group. Its sequences have the same reward and end. None: the sample is a
    trajectory of its own, which holds for all samples of the group or for none."""
    turns: tuple[Turn, ...] = ()
    """Turns in the order of their tokens; empty: the whole response is one turn."""
    break_cause: str | None = None
    """Why this sequence begins instead of the one before being extended, a row of BREAKS; None for the first of a
    trajectory."""
    environment_rewards: dict[str, float] = field(default_factory=dict)
    """Parts of the reward `environment`, by the names that an agent gave them."""

    @property
    def finished(self) -> bool:
        """Whether the trajectory ended by itself, not at a limit."""
        return ENDS[self.end] == "finished"

    @property
    def loss_tokens(self) -> int:
        """Number of tokens that carry loss."""
        return len(self.token_ids) if self.loss_mask is None else sum(self.loss_mask)


@dataclass
class Group:
    """The responses to one prompt; groups of one step may differ in size.

    Example: two of four responses are right, and the group is the third of its step:
    `Group(prompt, [right, wrong, right, wrong], index=2)`.
    """

    prompt: Prompt
    samples: list[Sample]
    greedy_reward: float | None = None
    """Reward of the greedy response, if the method uses it as a baseline."""
    greedy_length: int = 0
    """Number of tokens in the greedy response."""
    index: int = 0
    """Index among the groups of the step, the same on every layout."""
    is_used: bool = True
    """Whether the step trains on this group. Groups that dynamic sampling leaves out count in the metrics only."""
    is_expert: bool = False
    """Whether the response is an expert's, from the data, and was not sampled."""

    def __post_init__(self) -> None:
        if any(sample.trajectory is not None for sample in self.samples):
            self.samples = sorted(self.samples, key=lambda sample: -1 if sample.trajectory is None else sample.trajectory)
            _carry_loss_once(self.samples)

    def context_of(self, sample: Sample) -> list[int]:
        """Return the tokens that a sample's first turn answers."""
        return self.prompt.token_ids if sample.prompt_ids is None else sample.prompt_ids


def by_trajectory(samples: Iterable[Sample]) -> list[list[Sample]]:
    """Return the sequences of each trajectory of a group; a sample without a trajectory is one of its own."""
    sequences: dict[tuple[bool, int], list[Sample]] = {}
    for place, sample in enumerate(samples):
        key = (False, place) if sample.trajectory is None else (True, sample.trajectory)
        sequences.setdefault(key, []).append(sample)
    return list(sequences.values())


def last_sequence(sequences: Sequence[Sample]) -> Sample:
    """Return the sequence of a trajectory that contains its last turn."""
    return max(reversed(sequences), key=lambda sample: sample.turns[-1].number if sample.turns else -1)


def _carry_loss_once(samples: list[Sample]) -> None:
    """Take the loss from the tokens of turns that an earlier sequence of the same trajectory contains."""
    seen: set[tuple[int | None, int]] = set()
    for sample in samples:
        turns = {(sample.trajectory, turn.number): turn for turn in sample.turns}
        for turn in (turns[key] for key in turns.keys() & seen):
            if sample.loss_mask is None:
                sample.loss_mask = [True] * len(sample.token_ids)
            sample.loss_mask[turn.begin : turn.end] = [False] * (turn.end - turn.begin)
        seen |= turns.keys()


@dataclass(frozen=True)
class Scoring:
    """Numbers about the rewards of a step that its metrics show and its rows do not."""

    reward_parts: dict[str, float] = field(default_factory=dict)
    """Mean of each part of the reward, over the samples that have this part."""
    failed: int = 0
    """Number of samples without a row because their reward failed."""
    timed_out: int = 0
    """Number of samples with reward 0 because a built-in reward timed out."""
    formed: float | None = None
    """Share of the sampled responses with the form that their reward reads; None if no reward needs one."""
    group_size: int = 1
    """Usual number of trajectories in a group, including those whose reward failed."""
    trajectories: dict[str, float] = field(default_factory=dict)
    """Metrics of trajectories, including those whose reward failed; empty without turns."""


@dataclass(frozen=True)
class Turns:
    """Turns of the step's trajectories, each in the first sequence that contains it; the same on every rank."""

    row_U: Tensor
    """Row in RolloutStats of the sequence that contains the turn."""
    number_U: Tensor
    begin_U: Tensor
    end_U: Tensor
    """First token of the turn and the one after its last, counted from the end of the sequence's context."""
    reward_U: Tensor
    state_U: Tensor
    """Number of the state that the turn answers, among all states of all groups; -1 for a turn without a state."""
    cut_U: Tensor
    """Whether the turn ended at its own length limit."""
    seconds_U: Tensor

    def select(self, kept_N: Tensor) -> Turns:
        """Return the turns of the chosen rows, whose numbers are then those among the chosen ones."""
        kept_U, place_N = kept_N[self.row_U], kept_N.cumsum(0) - 1
        chosen = Turns(**{name: value[kept_U] for name, value in vars(self).items()})
        return replace(chosen, row_U=place_N[chosen.row_U])


@dataclass(frozen=True)
class RolloutStats:
    """Per-sample statistics of the whole step: one row per sample with a reward, the same on every rank, in the order of
    groups. The sequences of a trajectory are neighbors.

    Example: two prompts with three and two responses on two replicas, one optimizer step:
    `group_N = [0, 0, 0, 1, 1]`, `lengths_N = [9, 4, 5, 8, 4]`, `owner_N = [0, 1, 1, 1, 0]` (13 and 17 tokens).
    """

    group_N: Tensor
    """Group number of each sample, from 0."""
    rewards_N: Tensor
    response_lengths_N: Tensor
    """Number of tokens that carry loss."""
    prompt_lengths_N: Tensor
    lengths_N: Tensor
    """Number of tokens in total, which a forward pass computes."""
    finished_N: Tensor
    correct_N: Tensor
    repetition_N: Tensor
    version_N: Tensor
    """`Sample.policy_version` of each sample."""
    versions_differ: bool
    """Whether weights of more than one version sampled the tokens of the step."""
    rank_N: Tensor
    """Rank that holds each sample before packing."""
    minibatch_N: Tensor
    """Optimizer step, from 0, that uses each sample."""
    owner_N: Tensor
    """Data-parallel replica that trains on each sample."""
    max_response_tokens: int
    """Maximum length of a sampled response."""
    has_logprobs: bool
    """Whether every sampled token has the engine's log-prob. Responses from the data have none, and those of most steps with
    `engine.logprobs: tenth_step`."""
    greedy_rewards_N: Tensor | None = None
    greedy_lengths_N: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    """Number of tokens in each greedy response of `greedy_rewards_N`."""
    scoring: Scoring = field(default_factory=Scoring)
    sampled: RolloutStats | None = None
    """Statistics over all samples, if the step does not train on some of them."""
    incomplete_N: Tensor | None = None
    """Whether the reward of another sample in the same group failed; None if no reward failed."""
    domain_N: Tensor | None = None
    """Domain number of each sample's prompt, from 0; None without domains."""
    expert_N: Tensor | None = None
    """Whether the sample is an expert's response, to be imitated; None without expert responses."""
    skipped_N: Tensor | None = None
    """Samples that contribute exactly zero to the policy's loss and gradient, which its passes leave out. None if this is
    off or cannot be determined."""
    trajectory_N: Tensor | None = None
    """Trajectory that each sample is a sequence of, from 0; None: every sample is a trajectory of its own."""
    turns: Turns | None = None
    """Turns of the trajectories; None if every response is one turn."""

    def __len__(self) -> int:
        return len(self.group_N)

    @property
    def trajectory_of_N(self) -> Tensor:
        """Trajectory of each sample, which is its own number without `trajectory_N`."""
        return torch.arange(len(self)) if self.trajectory_N is None else self.trajectory_N

    @cached_property
    def trajectories(self) -> RolloutStats:
        """Statistics with one row per trajectory: what rewards, baselines, weights and metrics count.

        Tokens are those of all its sequences, the prompt is that of the first, and the version is the oldest.
        """
        if self.trajectory_N is None:
            return self
        count = int(self.trajectory_N.max()) + 1 if len(self) else 0
        first_M = torch.searchsorted(self.trajectory_N, torch.arange(count))

        def reduced(values_N: Tensor, kind: str) -> Tensor:
            return values_N.new_zeros(count).scatter_reduce(0, self.trajectory_of_N, values_N, kind, include_self=False)

        tensors = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        tensors = {name: value for name, value in tensors.items() if len(value) == len(self)}
        columns: dict[str, Any] = {name: value[first_M] for name, value in tensors.items()}
        columns |= {name: reduced(tensors[name], "sum") for name in ("response_lengths_N", "lengths_N")}
        columns |= {"version_N": reduced(self.version_N, "amin"), "trajectory_N": None, "turns": None}
        return replace(self, **columns)

    @property
    def minibatches(self) -> int:
        """Number of optimizer steps that use the samples."""
        return int(self.minibatch_N.max()) + 1 if len(self) else 0


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of one request; temperature 0 takes the most likely token.

    They apply in vLLM's order: logit bias, `min_tokens`, repetition penalty, temperature, min-p, top-k, top-p.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    """Minimum probability of a token, relative to the most likely token."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens already in the prompt or response (1909.05858)."""
    min_tokens: int = 0
    """Minimum number of tokens before a token may end the response."""
    ignore_eos: bool = False
    """Ignore end tokens: only `max_tokens` and stop strings end a response."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, in addition to the model's end tokens."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token and the number added to its logit."""
    logprobs: bool = True
    """Whether vLLM and SGLang return log-probs of the drawn tokens; the transformers engine always does."""


@dataclass(frozen=True)
class Request:
    """A request to an engine for one response.

    Example: the second response to a prompt of three tokens:
    `Request(id=1, prompt_ids=[12, 4, 9], sampling=Sampling(max_tokens=64), seed=request_seed((0, 20, 7, 1)))`.
    """

    id: int
    """Identifies the request among those in flight."""
    prompt_ids: list[int]
    sampling: Sampling
    seed: int
    """Key of the random draws, a signed 64-bit number: the same key and weights give the same response."""
    trajectory: int | None = None
    """Number of the trajectory whose turn this is; servers keep what they computed for the turns before. None: a response of
    one turn."""
    turn: int = 0
    """Number of turns before this one."""


@dataclass(frozen=True)
class Completion:
    """An engine's response to a request."""

    request_id: int
    token_ids: list[int]
    logprobs: list[float]
    """Log-prob of each token under the distribution that it was drawn from; at temperature 0, under the model's
    distribution. Empty if they were not requested."""
    finish_reason: Literal["stop", "length", "abort", "lost"]
    """Ended by an end token or stop string (stop), by the token limit (length), by `Engine.abort` or new weights (abort), or
    by the end of the last server (lost). A lost response has no tokens: request it again once the engine is ready."""
    policy_version: int
    """Optimizer steps taken by the weights that sampled the first token."""
    token_versions: list[int] | None = None
    """`policy_version` of each token, if the weights changed within the response."""
    routes_TLK: Tensor | None = None
    """Experts that prompt and response tokens were routed to, for the tokens that were read; None if not requested."""


@dataclass
class TokenBatch:
    """Samples packed end to end in one token dimension, prompt before response, on one data-parallel replica.

    Example: prompt [5, 6] with response [7], and prompt [8] with response [9, 1]:
    `token_ids_T = [5, 6, 7, 8, 9, 1]`, `loss_mask_T = [0, 0, 1, 0, 1, 1]`, `lengths_N = [3, 3]`.
    """

    token_ids_T: Tensor
    loss_mask_T: Tensor
    """True for response tokens that can carry loss."""
    lengths_N: list[int]
    """Number of tokens in each sample, including its prompt."""
    sample_index_N: list[int] = field(default_factory=list)
    """Row of each sample in the step's RolloutStats; 0, 1, 2, ... if left out."""
    temperature: float = 1.0
    """Sampling temperature, which divides the logits of every log-prob."""
    records_routes: bool = False
    """Whether a forward pass must store the router's choices in Column.ROUTES."""
    update_tokens: int = 0
    """Number of response tokens computed in the whole update, over all replicas."""
    expert_tokens: int = 0
    """Number of `update_tokens` that are an expert's."""
    update_micro_batches: int = 0
    """Number of micro-batches with samples in the whole update, over all replicas; set for the loss only."""
    per_micro_batch: bool = False
    """Column.LOSS_WEIGHTS must still be divided by the micro-batch's tokens and the number of micro-batches (legacy)."""
    samples_per_comparison: int = 1
    """Number of consecutive samples that stay in one micro-batch: 2 if the loss compares pairs."""
    columns: dict[Column, Tensor] = field(default_factory=dict)
    """Further values of each token, by column; a batch has its own dictionary, also after `replace`."""

    def __post_init__(self) -> None:
        assert len(self.token_ids_T) == sum(self.lengths_N) == len(self.loss_mask_T)
        if not self.sample_index_N:
            self.sample_index_N = list(range(len(self.lengths_N)))
        assert len(self.sample_index_N) == len(self.lengths_N)
        columns, self.columns = self.columns, {}
        for column, value in columns.items():
            self[column] = value

    @classmethod
    def from_padded(
        cls, token_ids_NL: Tensor, response_NL: Tensor, attention_NL: Tensor, temperature: float = 1.0
    ) -> TokenBatch:
        """Pack samples that are rows of a padded matrix, as the tokenizers and `generate` of transformers return them.

        `attention_NL` is true for tokens that are no padding, wherever the padding is, `response_NL` for tokens that carry
        loss. `values_NL[attention_NL]` packs any other matrix in the same order, for example log-probs. Raises UserError for
        matrices that do not fit together.

        Example: `TokenBatch.from_padded(token_ids_NL, response_NL, token_ids_NL != tokenizer.pad_token_id)`.
        """
        response_NL, attention_NL = response_NL.bool(), attention_NL.bool()
        shapes = [tuple(matrix.shape) for matrix in (token_ids_NL, response_NL, attention_NL)]
        if token_ids_NL.dim() != 2 or len(set(shapes)) > 1:
            raise UserError(f"the three matrices must have one shape [samples, tokens]: got {', '.join(map(str, shapes))}")
        lengths_N = attention_NL.sum(1)
        if not lengths_N.all():
            raise UserError(f"every sample must have tokens: sample {int(lengths_N.argmin())} is padding only")
        if (response_NL & ~attention_NL).any():
            raise UserError("padding cannot carry loss: response_NL must be false wherever attention_NL is")
        loss_mask_T = response_NL[attention_NL]
        starts_N = lengths_N.cumsum(0) - lengths_N
        if loss_mask_T[starts_N].any():
            wrong = int(loss_mask_T[starts_N].int().argmax())
            raise UserError(f"the first token of a sample cannot carry loss, as it has no log-prob: sample {wrong}")
        return cls(token_ids_NL[attention_NL].long(), loss_mask_T, lengths_N.tolist(), temperature=temperature)

    def __contains__(self, column: Column) -> bool:
        return column in self.columns

    def __getitem__(self, column: Column) -> Tensor:
        """Return a column; raises KeyError if the batch lacks it."""
        if column not in self.columns:
            raise KeyError(f"the batch has no {column.value}; filled in by: {column.filled_by}")
        return self.columns[column]

    def __setitem__(self, column: Column, value: Tensor) -> None:
        """Set a column; raises ValueError for another dtype or shape than the column's."""
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype not in column.dtypes or value.dim() != len(column.shape) or len(value) != len(self.token_ids_T):
            raise ValueError(
                f"{column.value} must be {' or '.join(column.dtypes)} of shape {list(column.shape)} with "
                f"T = {len(self.token_ids_T)}: got {dtype} of shape {list(value.shape)}"
            )
        self.columns[column] = value

    def with_columns(self, columns: Mapping[Column, Tensor | None]) -> TokenBatch:
        """Return the batch with these columns set; a batch has no column that is None."""
        columns_after = {**self.columns, **columns}
        return replace(self, columns={column: value for column, value in columns_after.items() if value is not None})

    @property
    def positions_T(self) -> Tensor:
        """Position of each token within its sample."""
        if not self.lengths_N:
            return torch.zeros(0, dtype=torch.long)
        return torch.cat([torch.arange(length) for length in self.lengths_N])

    @property
    def weights_T(self) -> Tensor:
        """Share of the loss that each token carries in this micro-batch."""
        weights_T = self[Column.LOSS_WEIGHTS]
        if not self.per_micro_batch:
            return weights_T
        # Samples that are left out have weight 0 and must not count in the mean.
        counted = (weights_T != 0).sum().clamp(min=1)
        return weights_T / (counted * max(self.update_micro_batches, 1))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors with one row per token by name, columns in the order of the table."""
        columns = {column.value: self.columns[column] for column in Column if column in self.columns}
        return {"token_ids_T": self.token_ids_T, "loss_mask_T": self.loss_mask_T} | columns

    @staticmethod
    def fields_of(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the arguments of `TokenBatch` that hold these tensors, by their names in `tensors()`."""
        structural = {name: tensors[name] for name in ("token_ids_T", "loss_mask_T")}
        # mypy expects all arguments of `Column.__new__`, but a call looks a member up by its value.
        columns = {Column(name): value for name, value in tensors.items() if name not in structural}  # type: ignore[call-arg]
        return {**structural, "columns": columns}

    def expand_to_tokens(self, values_N: Tensor) -> Tensor:
        """[T] each sample's number on its response tokens, 0 on its prompt."""
        lengths_N = torch.tensor(self.lengths_N, dtype=torch.long)
        return torch.repeat_interleave(values_N.float(), lengths_N) * self.loss_mask_T

    def select(self, samples: list[int]) -> TokenBatch:
        """Return a batch of these samples, in this order."""
        index_T = self.token_index(samples)
        selected = self.fields_of({name: value[index_T] for name, value in self.tensors().items()})
        lengths_N = [self.lengths_N[i] for i in samples]
        return replace(self, lengths_N=lengths_N, sample_index_N=[self.sample_index_N[i] for i in samples], **selected)

    def token_index(self, samples: list[int]) -> Tensor:
        """Return the positions in T of all tokens of these samples."""
        starts = [0]
        for length in self.lengths_N:
            starts.append(starts[-1] + length)
        pieces = [torch.arange(starts[i], starts[i + 1]) for i in samples]
        return torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.long)

    def save(self, path: Path) -> None:
        """Write every field and column to a safetensors file; numbers are JSON in its metadata."""
        from safetensors.torch import save_file

        # safetensors refuses two names for the same memory, which advantages and returns may share.
        tensors = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in self.tensors().items()}
        numbers: dict[str, Any] = {}
        for name in (item.name for item in fields(self) if item.name not in tensors and item.name != "columns"):
            value = getattr(self, name)
            if isinstance(value, list):
                tensors[name] = torch.tensor(value, dtype=torch.long)
            else:
                numbers[name] = value
        with writing(path):
            save_file(tensors, path, metadata={"numbers": json.dumps(numbers)})

    def to(self, device: torch.device | str) -> TokenBatch:
        """Return the batch with its tensors on `device`."""
        device = torch.device(device)
        return replace(self, **self.fields_of({name: to_device(value, device) for name, value in self.tensors().items()}))


def token_versions(batch: TokenBatch, stats: RolloutStats) -> Tensor:
    """[T] optimizer steps taken by the weights that sampled each token. Prompt tokens have the version of the first response
    token."""
    if Column.VERSION in batch:
        return batch[Column.VERSION]
    return stats.version_N[batch.sample_index_N].repeat_interleave(torch.tensor(batch.lengths_N, dtype=torch.long))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to `device`. Copies to a GPU are asynchronous, from pinned memory, so the host does not wait."""
    is_upload = device.type != "cpu" and tensor.device.type == "cpu"
    return tensor.pin_memory().to(device, non_blocking=True) if is_upload else tensor.to(device)


@dataclass
class LossOutput:
    """Result of a loss function for one micro-batch."""

    loss: Tensor
    """This micro-batch's share of the update's loss."""
    sums: dict[str, Tensor]
    """Shares of metrics; the metric is their sum over micro-batches and replicas."""
    maxima: dict[str, Tensor] = field(default_factory=dict)
    """Metrics whose final value is the maximum over micro-batches and replicas."""


class LossFn(Protocol):
    """A loss function: model output (log-probs or values), entropies (0 if not computed), micro-batch -> its share of the
    loss."""

    def __call__(self, output_T: Tensor, entropy_T: Tensor, batch: TokenBatch, /) -> LossOutput: ...


@dataclass(frozen=True)
class StepReport:
    """Result of one optimizer step, the same on every rank."""

    loss: float
    grad_norm: float
    """Global gradient norm before clipping."""
    lr: float
    """Learning rate used in this step."""
    metrics: dict[str, float]
    micro_batches: int
    tokens: int
    """Number of tokens processed over all replicas, including prompts."""
    sequences: int
    skipped: bool = False
    """The loss or gradients were not finite, so no parameter changed."""
    loss_scale: float | None = None
    """Factor of the loss before backward; None unless the dtype is float16."""
    overflowed: bool = False
    """The step was skipped because gradients overflowed float16 at `loss_scale`, which is then lowered."""
