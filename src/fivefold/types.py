"""The nouns that travel between stages.

Shape letters, the same in all modules: T packed tokens, S selected tokens, N samples, G samples of one prompt, P prompts,
V vocabulary, D model width, H heads, L layers, E experts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from fivefold.files import writing


@dataclass(frozen=True)
class Prompt:
    """One question, tokenized.

    Example: row 7 of a file of sums, rendered by a template without special tokens:
    `Prompt(id=7, token_ids=[12, 4, 9], source="arithmetic", text="3+4=", ground_truth="7")`.
    """

    id: int
    """Row in the prompt set: part of the key of its random draws."""
    token_ids: list[int]
    source: str
    """`data_source` of the row: chooses the reward and groups the evaluation."""
    text: str
    ground_truth: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    """What `text` was rendered from."""
    responses: list[DatasetResponse] = field(default_factory=list)
    """What stands in the data to be learned from: one to imitate, or the chosen and the rejected one."""
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DatasetResponse:
    """A response that stands in the data, tokenized."""

    token_ids: list[int]
    loss_mask: list[bool]
    """Which of its tokens carry loss: not those of the user's later turns."""
    text: str
    truncated: bool = False
    """It was cut off at the longest response."""


MODEL_PART = "model"
"""Name of a reward model's score among the parts of a reward."""


@dataclass
class Sample:
    """One response to a prompt.

    Example: two tokens and the end token, sampled after 20 optimizer steps, of which the reward function made 1:
    `Sample([5, 8, 2], [-0.1, -1.3, -0.02], "7", finished=True, policy_version=20, reward=1.0, correct=True)`.
    """

    token_ids: list[int]
    logprobs: list[float]
    """Log-prob of each token as the engine saw it, at the temperature of sampling."""
    text: str
    finished: bool
    """It ended by itself (EOS or stop string), not at the token limit."""
    policy_version: int
    """Optimizer steps taken by the weights that sampled its first token."""
    token_versions: list[int] | None = None
    """The same per token, where the weights changed within the response."""
    routes_TLK: Tensor | None = None
    """Experts that the engine sent prompt and response to, as far as it has read them (fivefold.routes)."""
    loss_mask: list[bool] | None = None
    """Which tokens carry loss; all of them when left out."""
    reward: float = float("nan")
    """NaN until it is scored, and for ever where that failed: nothing can take it for a number."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    correct: bool = False
    """The function that decides this (reward.accuracy) gives it 1 or more; never a reward model's score."""
    reward_failed: bool = False
    """Its reward function raised, ran out of time or gave no finite number: the step and every mean leave the sample out."""
    reward_timed_out: bool = False
    """It took a built-in reward too long, which counts as 0."""

    @property
    def loss_tokens(self) -> int:
        """Tokens that carry loss."""
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
    """Reward of the most likely response, where the method compares with it."""
    greedy_length: int = 0
    """Tokens of that response."""
    index: int = 0
    """Place among the groups of the step, the same on every layout."""
    is_used: bool = True
    """The step trains on it; dynamic sampling leaves some out, which count in the metrics only."""
    is_expert: bool = False
    """Its response stands in the data, next to those that are sampled."""


@dataclass(frozen=True)
class RolloutStats:
    """One row per sample of the whole step whose reward is known, the same on every rank, in the order of groups.

    Example: two prompts with three and two responses on two replicas, one optimizer step:
    `group_N = [0, 0, 0, 1, 1]`, `lengths_N = [9, 4, 5, 8, 4]`, `owner_N = [0, 1, 1, 1, 0]` (13 and 17 tokens).
    """

    group_N: Tensor
    """Number of the group of each sample, from 0."""
    rewards_N: Tensor
    response_lengths_N: Tensor
    """Tokens that carry loss."""
    prompt_lengths_N: Tensor
    lengths_N: Tensor
    """All tokens: what a forward pass costs."""
    finished_N: Tensor
    correct_N: Tensor
    repetition_N: Tensor
    version_N: Tensor
    """`Sample.policy_version`."""
    versions_differ: bool
    """The step's tokens were sampled by weights of more than one version."""
    rank_N: Tensor
    """Rank that holds the sample before it is packed."""
    minibatch_N: Tensor
    """Number of the optimizer step, from 0, that each sample is used in."""
    owner_N: Tensor
    """Data-parallel replica that trains on each sample."""
    max_response_tokens: int
    """Longest response that could have been sampled."""
    has_logprobs: bool
    """The samples came from an engine; those of a dataset have no log-probs of their own."""
    greedy_rewards_N: Tensor | None = None
    greedy_lengths_N: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    """Of the responses that those rewards are of."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Mean of each part of the reward, over the samples that have it."""
    sampled: RolloutStats | None = None
    """Those of all samples, where the step does not train on some of them."""
    failed: int = 0
    """Samples that are not among the rows, as their reward failed."""
    timed_out: int = 0
    """Samples that took a built-in reward too long, which gave them 0."""
    group_size: int = 1
    """The usual size of a group, with samples whose reward failed."""
    incomplete_N: Tensor | None = None
    """The reward of another sample of its group failed; None where none did."""
    domain_N: Tensor | None = None
    """Number of the domain of each sample's prompt, from 0; None where domains are not told apart."""
    expert_N: Tensor | None = None
    """Responses of an expert, to be imitated next to the sampled ones; None where there are none."""
    skipped_N: Tensor | None = None
    """Samples that add exactly nothing to the policy's loss and gradient, which its passes leave out; None where that is
    off or cannot be said."""

    def __len__(self) -> int:
        return len(self.group_N)

    @property
    def minibatches(self) -> int:
        """Optimizer steps that the samples are dealt to."""
        return int(self.minibatch_N.max()) + 1 if len(self) else 0


@dataclass(frozen=True)
class Sampling:
    """How an engine draws tokens; temperature 0 takes the most likely one.

    The order is vLLM's: logit bias, `min_tokens`, repetition penalty, temperature, min-p, top-k, top-p.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    """Tokens less likely than this share of the most likely one are not drawn."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens that prompt or response have already (1909.05858)."""
    min_tokens: int = 0
    """No token that ends the response is drawn before so many."""
    ignore_eos: bool = False
    """Only `max_tokens` and stop strings end a response."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """They end a response besides the model's own end tokens."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, number added to its logit)."""


@dataclass(frozen=True)
class Request:
    """One response that an engine is asked for.

    Example: the second response to a prompt of three tokens:
    `Request(id=1, prompt_ids=[12, 4, 9], sampling=Sampling(max_tokens=64), seed=request_seed((0, 20, 7, 1)))`.
    """

    id: int
    """Names it among the requests in flight."""
    prompt_ids: list[int]
    sampling: Sampling
    seed: int
    """Key of its random draws, a signed number of 64 bits: the same key draws the same response from the same weights."""


@dataclass(frozen=True)
class Completion:
    """What an engine gives for a request."""

    request_id: int
    token_ids: list[int]
    logprobs: list[float]
    """Log-prob of each token under the distribution that it was drawn from; at temperature 0 under the model's own."""
    finish_reason: Literal["stop", "length", "abort"]
    """An end token or stop string, the limit of tokens, or `Engine.abort`."""
    policy_version: int
    """Optimizer steps taken by the weights that sampled its first token."""
    token_versions: list[int] | None = None
    """The same per token, where the weights changed within the response."""
    routes_TLK: Tensor | None = None
    """Experts that prompt and response were sent to, as far as they were read, where the engine is asked for them."""


@dataclass
class TokenBatch:
    """Samples laid end to end in one token dimension, prompt before response, on one data-parallel replica.

    Example: prompt [5, 6] with response [7], and prompt [8] with response [9, 1]:
    `token_ids_T = [5, 6, 7, 8, 9, 1]`, `loss_mask_T = [0, 0, 1, 0, 1, 1]`, `lengths_N = [3, 3]`.
    """

    token_ids_T: Tensor
    loss_mask_T: Tensor
    """True on response tokens: those that were sampled and can carry loss."""
    lengths_N: list[int]
    """Tokens of each sample, prompt included."""
    sample_index_N: list[int] = field(default_factory=list)
    """Row of each sample in the step's RolloutStats; 0, 1, 2, ... when left out."""
    temperature: float = 1.0
    """Temperature of sampling: it divides the logits of every log-prob."""
    loss_weights_T: Tensor | None = None
    """Share of the update's loss that each token carries; 0 on prompts. Over all replicas of an update the
    shares are what the aggregation asks for, so the loss is a plain sum."""
    penalty_weights_T: Tensor | None = None
    """Those of KL and entropy, where they are others."""
    advantages_T: Tensor | None = None
    rollout_logprobs_T: Tensor | None = None
    version_T: Tensor | None = None
    """Optimizer steps taken by the weights that sampled each token; None where every sample has one version."""
    interpolation_T: Tensor | None = None
    """How far the old log-prob of each token lies on the way from the engine's to the one of now; None where it does not."""
    old_logprobs_T: Tensor | None = None
    first_logprobs_T: Tensor | None = None
    """As `old_logprobs_T`, where only samples.jsonl asks for them: no formula reads them."""
    half_temperature_logprobs_T: Tensor | None = None
    """As `old_logprobs_T`, at half the temperature."""
    ref_logprobs_T: Tensor | None = None
    prm_logprobs_T: Tensor | None = None
    """By the process reward model (`prm`) at temperature 1, as far as it has learned when the step asks for its rewards."""
    prm_ref_logprobs_T: Tensor | None = None
    """By the reference of that model, at temperature 1."""
    values_T: Tensor | None = None
    """The critic's value of the text up to and including each token, before the step's updates."""
    returns_T: Tensor | None = None
    """What the critic learns: the return from each response token on."""
    selected_T: Tensor | None = None
    """Tokens that the surrogate treats in another way, chosen among all of the update."""
    expert_T: Tensor | None = None
    """Tokens of an expert's responses and their prompts, next to what was sampled."""
    routes_TLK: Tensor | None = None
    """Experts that the policy sends each token to (fivefold.routes); None: it chooses everywhere."""
    records_routes: bool = False
    """A forward pass is to fill in `routes_TLK` with what the model chooses."""
    update_tokens: int = 0
    """Response tokens of the whole update that are computed, over all replicas."""
    expert_tokens: int = 0
    """Those of them that are an expert's."""
    update_micro_batches: int = 0
    """Micro-batches of the whole update that hold samples, over all replicas; known to the loss only."""
    per_micro_batch: bool = False
    """`loss_weights_T` are still to be divided by the tokens of the micro-batch and the number of micro-batches (legacy)."""
    samples_per_comparison: int = 1
    """So many consecutive samples stay in one micro-batch: 2 where the loss compares pairs."""

    def __post_init__(self) -> None:
        assert len(self.token_ids_T) == sum(self.lengths_N) == len(self.loss_mask_T)
        if not self.sample_index_N:
            self.sample_index_N = list(range(len(self.lengths_N)))
        assert len(self.sample_index_N) == len(self.lengths_N)

    @property
    def positions_T(self) -> Tensor:
        """Position of each token in its own sample."""
        if not self.lengths_N:
            return torch.zeros(0, dtype=torch.long)
        return torch.cat([torch.arange(length) for length in self.lengths_N])

    @property
    def weights_T(self) -> Tensor:
        """The share of the loss that each token carries in this micro-batch."""
        assert self.loss_weights_T is not None
        if not self.per_micro_batch:
            return self.loss_weights_T
        # Tokens of samples that are left out have no weight, and are no part of the mean either.
        counted = (self.loss_weights_T != 0).sum().clamp(min=1)
        return self.loss_weights_T / (counted * max(self.update_micro_batches, 1))

    def tensors(self) -> dict[str, Tensor]:
        """The fields with one row a token."""
        found = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}

    def expand_to_tokens(self, values_N: Tensor) -> Tensor:
        """[T] each sample's number on its response tokens, 0 on the prompt."""
        lengths_N = torch.tensor(self.lengths_N, dtype=torch.long)
        return torch.repeat_interleave(values_N.float(), lengths_N) * self.loss_mask_T

    def select(self, samples: list[int]) -> TokenBatch:
        """The batch of these samples, in this order."""
        index_T = self.token_index(samples)
        selected: dict[str, Any] = {name: value[index_T] for name, value in self.tensors().items()}
        lengths_N = [self.lengths_N[i] for i in samples]
        return replace(self, lengths_N=lengths_N, sample_index_N=[self.sample_index_N[i] for i in samples], **selected)

    def token_index(self, samples: list[int]) -> Tensor:
        """Positions in T of all tokens of these samples."""
        starts = [0]
        for length in self.lengths_N:
            starts.append(starts[-1] + length)
        pieces = [torch.arange(starts[i], starts[i + 1]) for i in samples]
        return torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.long)

    def save(self, path: Path) -> None:
        """Write every field that is set into a safetensors file; numbers are JSON in its metadata."""
        # Copies: safetensors takes no two names of the same numbers, as advantages and returns may be.
        whole = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in self.tensors().items()}
        numbers: dict[str, Any] = {}
        for name in (item.name for item in fields(self) if item.name not in whole):
            value = getattr(self, name)
            if isinstance(value, list):
                whole[name] = torch.tensor(value, dtype=torch.long)
            elif value is not None:
                numbers[name] = value
        with writing(path):
            save_file(whole, path, metadata={"numbers": json.dumps(numbers)})

    def to(self, device: torch.device) -> TokenBatch:
        """The same batch with its tensors on `device`."""
        moved: dict[str, Any] = {name: to_device(value, device) for name, value in self.tensors().items()}
        return replace(self, **moved)


def token_versions(batch: TokenBatch, stats: RolloutStats) -> Tensor:
    """[T] optimizer steps taken by the weights that sampled each token; of prompts, as of their responses' first token."""
    if batch.version_T is not None:
        return batch.version_T
    return stats.version_N[batch.sample_index_N].repeat_interleave(torch.tensor(batch.lengths_N, dtype=torch.long))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The same numbers on `device`. The host does not wait: what a GPU copies from pinned memory, it copies in its turn."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


@dataclass
class LossOutput:
    """What a loss function makes of one micro-batch."""

    loss: Tensor
    """This micro-batch's share of the update's loss."""
    sums: dict[str, Tensor]
    """Shares of metrics: their sum over micro-batches and replicas is the metric."""
    maxima: dict[str, Tensor] = field(default_factory=dict)
    """Metrics of which the largest over micro-batches and replicas is the metric."""


class LossFn(Protocol):
    """What the model gives (log-probs or values), entropies (0 without), the micro-batch -> its share of the loss."""

    def __call__(self, output_T: Tensor, entropy_T: Tensor, batch: TokenBatch, /) -> LossOutput: ...


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step did, the same on every rank."""

    loss: float
    grad_norm: float
    """Global norm before clipping."""
    lr: float
    """Learning rate that this step used."""
    metrics: dict[str, float]
    micro_batches: int
    tokens: int
    """Tokens processed over all replicas, prompts included."""
    sequences: int
    skipped: bool = False
    """Loss or gradients were not finite: no parameter changed."""
    loss_scale: float | None = None
    """What the loss was multiplied by before backward; None but in float16."""
    overflowed: bool = False
    """It was skipped because gradients were too large for float16 at that scale, which falls."""
