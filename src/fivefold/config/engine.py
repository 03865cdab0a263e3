"""Configuration sections for sampling: the distribution, the engine, and sampling ahead of the trainer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fivefold.keys.identity import HARMLESS
from fivefold.keys.ranges import above, at_least, within
from fivefold.layout import ParallelLayout

IN_RANKS = (
    "transformers",
)  # fmt: skip
"""Engines that run a model on every rank of the policy, and have no layout."""


@dataclass(frozen=True)
class SamplingConfig:
    temperature: Annotated[float, within("(0, 100]")] = 1.0
    """Divisor of the logits, in sampling and in the trainer's log-probs."""
    top_p: Annotated[float, within("(0, 1]")] = 1.0
    """Cumulative probability of the tokens to sample from; 1 turns it off."""
    top_k: Annotated[int, at_least(0)] = 0
    """Number of most likely tokens to sample from; 0 turns it off."""
    min_p: Annotated[float, within("[0, 1)")] = 0.0
    """Minimum probability of a token, relative to the most likely one; 0 turns it off."""
    repetition_penalty: Annotated[float, within("(0, 100]")] = 1.0
    """Factor that makes tokens already in the prompt or response less likely (1909.05858); 1 turns it off."""
    min_tokens: Annotated[int, at_least(0)] = 0
    """Minimum number of tokens in a response."""
    ignore_eos: bool = False
    """Continue sampling after the model's own end tokens."""
    stop: list[str] = field(default_factory=list)
    """Strings that end a response; the token that completes one is the last."""
    stop_token_ids: list[Annotated[int, at_least(0)]] = field(default_factory=list)
    """Tokens that end a response, in addition to the model's own."""
    logit_bias: dict[int, Annotated[float, within("[-1000, 1000]")]] = field(default_factory=dict)
    """Token id -> number added to its logit."""

    @property
    def is_changed(self) -> bool:
        """Whether sampling departs from the model's full distribution at the temperature."""
        cut = self.top_p < 1 or self.top_k > 0 or self.min_p > 0
        return cut or self.repetition_penalty != 1 or self.min_tokens > 0 or bool(self.logit_bias)


@dataclass(frozen=True)
class EngineConfig:
    backend: Annotated[str, HARMLESS] = "transformers"
    """Engine and layout. `transformers` runs a model on every rank of the policy; vLLM and SGLang run on the same ranks by
    their layout. `vllm:d4t2` is four replicas of two tensor-parallel ranks; `vllm:d4t2e2` divides the experts over the two
    instead of sharding each. Use `vllm` or `sglang` alone if engine.url names servers."""
    mode: Annotated[Literal["in_process", "server"] | None, HARMLESS] = None
    """Where the engine runs: in the policy's ranks, or as servers in processes of their own on the same devices. If left
    out, vLLM runs in the ranks; SGLang always runs as servers."""
    processes: Annotated[Annotated[int, within("[1, 16]")] | Literal["auto"], HARMLESS] = 1
    """vLLM's processes in each replica, which share its GPUs: each has all weights and its part of the cache and of
    max_num_seqs. More than 1 run as servers, for models whose steps take the host longer than the GPU. `auto`: the number
    with which the estimated step is fastest, decided when the run starts."""
    placement: Annotated[Literal["colocated", "apart"], HARMLESS] = "colocated"
    """Placement of the engine's servers. `apart`: on GPUs of their own, the next ones after the ranks' on each machine;
    weights are sent over the network, and the layout may have any size."""
    url: Annotated[list[str], HARMLESS] = field(default_factory=list)
    """Addresses of running servers, instead of a layout; docs/engines.md describes how to start them."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of the engine's weights; the policy's if left out."""
    memory_fraction: Annotated[float, within("(0, 1)"), HARMLESS] = 0.5
    """Fraction of GPU memory for the engine's weights, cache and graphs (vLLM's gpu_memory_utilization, SGLang's
    mem_fraction_static)."""
    max_num_seqs: Annotated[int, above(0), HARMLESS] = 256
    """Maximum number of sequences that one replica decodes at once, over all its processes."""
    max_model_len: Annotated[int | None, above(0), HARMLESS] = None
    """Maximum sequence length of the engine; the longest prompt plus the longest response if left out."""
    sleep: Annotated[bool, HARMLESS] = True
    """Free the engine's GPU memory between rollouts; no effect on CPU."""
    verify_weights_every: Annotated[int, at_least(0), HARMLESS] = 20
    """Weight syncs between checks that the engine's weights equal the trainer's, starting with the first sync; 0: never."""
    stall_seconds: Annotated[float, within("(0, 86400]"), HARMLESS] = 300.0
    """Seconds after which a vLLM server that has requests but samples no token is restarted, together with its requests. On
    the policy's devices also the longest wait, of at least 60 s, for its answer to a call about weights or memory."""
    vllm: Annotated[dict[str, Any], HARMLESS] = field(default_factory=dict)
    """vLLM's own arguments by name: enforce_eager, max_num_batched_tokens, enable_prefix_caching, ..."""
    sglang: Annotated[dict[str, Any], HARMLESS] = field(default_factory=dict)
    """SGLang's own arguments by name: attention_backend, chunked_prefill_size, disable_cuda_graph, ..."""
    max_logprob_kl: Annotated[float | None, above(0), HARMLESS] = None
    """Maximum KL divergence between the trainer's and the engine's log-probs at their first comparison, in nats per token;
    depends on the dtype if left out (docs/engines.md)."""
    max_logprob_diff: Annotated[float | None, above(0), HARMLESS] = None
    """Maximum mean difference between the trainer's and the engine's log-probs at their first comparison; not checked if
    left out."""
    logprobs: Annotated[Literal["always", "tenth_step"], HARMLESS] = "always"
    """Steps in which the engine returns log-probs. `tenth_step`: every tenth one, the first ones after a start, resume or
    restart, and all steps if a correction or an agent reads them; other steps do not compare engine and trainer."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    sync_bucket_mb: Annotated[int, above(0), HARMLESS] = 256
    """Approximate bucket size for sending weights from trainer to engine, in MB."""
    staged_sync: Annotated[bool, HARMLESS] = False
    """For servers on other devices: gather all weights before sending any, so that servers continue sampling during the
    gather. Each sending rank then holds its part of the whole model once more."""

    @property
    def is_server(self) -> bool:
        """Whether the engine samples in processes of its own."""
        return self.mode == "server" or bool(self.url) or self.kind == "sglang" or self.is_apart or self.process_count > 1

    @property
    def process_count(self) -> int:
        """Number of vLLM's processes in each replica; 1 as long as `auto` is not decided."""
        return 1 if self.processes == "auto" else self.processes

    @property
    def is_apart(self) -> bool:
        """Whether the run starts the engine's servers on devices of their own."""
        return self.placement == "apart"

    @property
    def kind(self) -> str:
        """Kind of engine: transformers, vllm or sglang."""
        return self.backend.partition(":")[0]

    @property
    def own_arguments(self) -> dict[str, Any]:
        """Arguments given under the engine's own names."""
        return self.sglang if self.kind == "sglang" else self.vllm

    @property
    def layout(self) -> ParallelLayout | None:
        """Layout of the engine; None if it has none of its own. Raises ValueError if `backend` is not a layout."""
        return None if self.backend in IN_RANKS or self.url else ParallelLayout.parse(self.backend)


@dataclass(frozen=True)
class RolloutConfig:
    """Sampling ahead of the trainer; see docs/async.md."""

    max_staleness: Annotated[float | None, within("[0, 1000]")] = None
    """Maximum steps between the weights that sample a response's first token and the step that trains on it. Up to this many
    steps are sampled ahead while the trainer trains; 0.5 is half of a step's prompts. 0 waits as a synchronous run does;
    null is a synchronous run."""
    interrupt: Literal["continue", "finish", "abort"] = "continue"
    """Handling of responses in flight when servers get new weights: continue under the new ones, finish under the old ones
    first, or abort and sample again."""
    tail: Literal["wait", "carry", "drop"] = "wait"
    """Handling of groups that are incomplete when due, and of surplus groups: wait for them, carry their prompts over to be
    sampled again, or drop them. Not waiting favors short responses."""
    oversample: Annotated[float, within("[0, 16]")] = 0.0
    """Additional groups in flight, as a share of data.prompts_per_step; a step takes the groups that complete first."""
