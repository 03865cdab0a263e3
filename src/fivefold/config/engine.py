"""Sections about sampling: the distribution, the engine, how far it is ahead."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fivefold.config.identity import HARMLESS
from fivefold.config.ranges import above, at_least, within
from fivefold.layout import ParallelLayout


@dataclass(frozen=True)
class SamplingConfig:
    temperature: Annotated[float, within("(0, 100]")] = 1.0
    """Divides the logits, of the trainer's log-probs too."""
    top_p: Annotated[float, within("(0, 1]")] = 1.0
    """Share of the probability that is sampled from; 1 turns it off."""
    top_k: Annotated[int, at_least(0)] = 0
    """0 turns it off."""
    min_p: Annotated[float, within("[0, 1)")] = 0.0
    """Tokens less likely than this share of the most likely one are not drawn; 0 turns it off."""
    repetition_penalty: Annotated[float, within("(0, 100]")] = 1.0
    """Makes tokens of the prompt and of the response so far less likely (1909.05858); 1 turns it off."""
    min_tokens: Annotated[int, at_least(0)] = 0
    """No end of the response before so many tokens."""
    ignore_eos: bool = False
    """Sample on behind the model's own end tokens."""
    stop: list[str] = field(default_factory=list)
    """A response ends with the token that completes one of these strings."""
    stop_token_ids: list[Annotated[int, at_least(0)]] = field(default_factory=list)
    """Tokens that end a response, besides the model's own."""
    logit_bias: dict[int, Annotated[float, within("[-1000, 1000]")]] = field(default_factory=dict)
    """Token id -> number added to its logit."""

    @property
    def is_changed(self) -> bool:
        """Tokens are not drawn from the whole distribution of the model at the temperature."""
        cut = self.top_p < 1 or self.top_k > 0 or self.min_p > 0
        return cut or self.repetition_penalty != 1 or self.min_tokens > 0 or bool(self.logit_bias)


@dataclass(frozen=True)
class EngineConfig:
    backend: Annotated[str, HARMLESS] = "transformers"
    """What samples: `transformers`, a model on every rank of the policy, or vLLM or SGLang on the same ranks by its layout:
    `vllm:d4t2` is four replicas of two tensor-parallel ranks, `vllm:d4t2e2` divides experts over the two instead of cutting
    each. `vllm` or `sglang` alone where engine.url names servers."""
    mode: Annotated[Literal["in_process", "server"] | None, HARMLESS] = None
    """Where the engine runs: in the policy's ranks, or as servers of their own processes on the same devices. When left out
    vLLM runs in the ranks; SGLang runs as servers only."""
    placement: Annotated[Literal["colocated", "apart"], HARMLESS] = "colocated"
    """`apart`: the engine's servers have GPUs of their own, those behind the ranks' on each machine, and weights reach them
    over the wire. Its layout may then have any size."""
    url: Annotated[list[str], HARMLESS] = field(default_factory=list)
    """Servers that run already, instead of those of a layout; docs/engines.md has how they are started."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of the engine's weights; the policy's when left out."""
    memory_fraction: Annotated[float, within("(0, 1)"), HARMLESS] = 0.5
    """Share of a GPU's memory for the engine's weights, cache and graphs (vLLM's gpu_memory_utilization, SGLang's
    mem_fraction_static)."""
    max_num_seqs: Annotated[int, above(0), HARMLESS] = 256
    """Most sequences decoded at once by one replica."""
    max_model_len: Annotated[int | None, above(0), HARMLESS] = None
    """Longest sequence that the engine makes room for; the longest prompt and response together when left out."""
    sleep: Annotated[bool, HARMLESS] = True
    """The engine leaves the GPU between rollouts; on a CPU there is nothing to leave."""
    verify_weights_every: Annotated[int, at_least(0), HARMLESS] = 20
    """Weight syncs between comparisons of what the engine holds with what the trainer sent, from the first on; 0: never."""
    stall_seconds: Annotated[float, within("(0, 86400]"), HARMLESS] = 300.0
    """A server of vLLM that has requests and samples no token for so long is started again, and its requests with it."""
    vllm: Annotated[dict[str, Any], HARMLESS] = field(default_factory=dict)
    """vLLM's own arguments by its names: enforce_eager, max_num_batched_tokens, enable_prefix_caching, ..."""
    sglang: Annotated[dict[str, Any], HARMLESS] = field(default_factory=dict)
    """SGLang's own arguments by its names: attention_backend, chunked_prefill_size, disable_cuda_graph, ..."""
    max_logprob_kl: Annotated[float | None, above(0), HARMLESS] = None
    """Largest KL divergence of the trainer's tokens from the engine's at their first comparison, in nats a token; by dtype
    when left out (docs/engines.md)."""
    max_logprob_diff: Annotated[float | None, above(0), HARMLESS] = None
    """Largest mean difference of their log-probs at that comparison; not looked at when left out."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    sync_bucket_mb: Annotated[int, above(0), HARMLESS] = 256
    """Weights move from trainer to engine in buckets of about this size."""
    staged_sync: Annotated[bool, HARMLESS] = False
    """For servers on other devices: gather all weights before the servers are given any, so that they go on sampling
    meanwhile. Each rank that sends then holds its part of the whole model once more."""

    @property
    def is_server(self) -> bool:
        """It samples in processes of its own."""
        return self.mode == "server" or bool(self.url) or self.kind == "sglang" or self.is_apart

    @property
    def is_apart(self) -> bool:
        """Its servers are started with the run, on devices of their own."""
        return self.placement == "apart"

    @property
    def kind(self) -> str:
        """Whose engine it is: transformers, vllm or sglang."""
        return self.backend.partition(":")[0]

    @property
    def own_arguments(self) -> dict[str, Any]:
        """Those that are given by the engine's own names."""
        return self.sglang if self.kind == "sglang" else self.vllm

    @property
    def layout(self) -> ParallelLayout | None:
        """How an engine with a layout of its own is laid out; raises ValueError where it is none."""
        return None if self.backend == "transformers" or self.url else ParallelLayout.parse(self.backend)


@dataclass(frozen=True)
class RolloutConfig:
    """Sampling ahead of the trainer; docs/async.md."""

    max_staleness: Annotated[float | None, within("[0, 1000]")] = None
    """Steps between the weights that sample a response's first token and the step that trains on it, at most: so many steps
    are sampled ahead, while the trainer trains; 0.5 is half a step's prompts. 0 waits as a synchronous run does; null is
    that run."""
    interrupt: Literal["continue", "finish", "abort"] = "continue"
    """What becomes of responses in flight when servers get new weights: they go on under the new ones, are finished under
    the old ones first, or are thrown away and sampled again."""
    tail: Literal["wait", "carry", "drop"] = "wait"
    """What becomes of groups that are not complete when they are due, and of those in excess: the step waits for them, their
    prompts are sampled again, or they are dropped. Not waiting favours short responses."""
    oversample: Annotated[float, within("[0, 16]")] = 0.0
    """More groups in flight than are needed, as a share of data.prompts_per_step; a step takes what is complete first."""
