"""The typed configuration tree; every default stands here, once, on its field, with the range of a number in its type.

validate.py has what values must satisfy together.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from fivefold.config.gpus import GPUS
from fivefold.config.identity import CONTENT, HARMLESS, leaves, with_absolute_paths
from fivefold.config.mcore_options import Options
from fivefold.config.methods import METHODS, Choices, Method, resolve, surrogate_row
from fivefold.config.ranges import Matches, OneOf, Range, above, at_least, within
from fivefold.config.scoring import VARIABLE, CodeConfig, JudgeConfig
from fivefold.layout import ParallelLayout, PipelineSplit
from fivefold.models.adapters import ALL, LoraSpec
from fivefold.models.torch_dist import config_beside, is_torch_dist

RAY_ADDRESS = re.compile(r"auto|(ray://)?[^/\s]+:\d+")


@dataclass(frozen=True)
class ModelConfig:
    path: Annotated[str, CONTENT]
    """Hugging Face model directory, a hub id (of ModelScope `modelscope:OWNER/NAME`) that is downloaded once per node, or a
    checkpoint of Megatron-Core (`torch_dist`), whose weights are taken; so may be critic.path and reference.path."""
    config: Annotated[str | None, CONTENT] = None
    """Hugging Face directory or hub id with the config.json, and the tokenizer, of a model whose weights are a checkpoint of
    Megatron-Core; the files that lie in it or above it when left out."""
    tokenizer: Annotated[str | None, CONTENT] = None
    """Tokenizer directory or hub id; that of model.config or of the model when left out."""
    trust_remote_code: Annotated[bool, HARMLESS] = False
    """Let the tokenizer's repository run its own Python code. Models never run theirs."""


@dataclass(frozen=True)
class OptimizerConfig:
    lr: Annotated[float, within("[0, 1]")] = 1e-6
    """Learning rate of AdamW at its highest."""
    betas: list[Annotated[float, within("[0, 1)")]] = field(default_factory=lambda: [0.9, 0.999])
    """Decay of the moving averages of gradients and of their squares."""
    eps: Annotated[float, within("(0, 1]")] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, within("[0, 100]")] = 0.01
    """Decoupled (AdamW); not applied to biases and norms."""
    clip_grad: Annotated[float, at_least(0)] = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate falls from `lr` to `min_lr` after the warm-up."""
    schedule_per: Literal["update", "step"] | Annotated[int, above(0)] = "update"
    """What warm-up and decay count: optimizer steps, steps of the run, or so many optimizer steps; through each of them the
    rate stays the same."""
    warmup_steps: Annotated[float, at_least(0)] = 0.0
    """Count over which the rate rises linearly; below 1 a share of the run."""
    warmup_from: Literal[0, 1] = 1
    """The first of w has 1/w of the rate, or 0/w: torch's schedulers, and so most other systems, begin at 0."""
    warmup_init_lr: Annotated[float, within("[0, 1]")] = 0.0
    """Rate that the warm-up rises from."""
    decay_steps: Annotated[int, above(0)] | None = None
    """Count at which `min_lr` is reached, warm-up included; the whole run when left out."""
    min_lr: Annotated[float, within("[0, 1]")] = 0.0
    """Where a linear or cosine schedule ends."""


@dataclass(frozen=True)
class MegatronConfig:
    transformer_impl: Annotated[Literal["torch", "transformer_engine", "auto"], HARMLESS] = "torch"
    """`auto` takes Transformer Engine where it is installed and the device is CUDA."""
    bridge_type: Annotated[Literal["native", "mbridge", "megatron-bridge"], HARMLESS] = "native"
    """Who reads and writes the weights: our own tables, mbridge, or Megatron-Bridge."""
    transformer: dict[str, Any] = field(default_factory=dict)
    """Fields of Megatron-Core's TransformerConfig, by its names."""
    pipeline: Annotated[dict[str, Any], HARMLESS] = field(default_factory=dict)
    """Its fields about pipeline stages: virtual_pipeline_model_parallel_size, num_layers_in_first_pipeline_stage, ..."""
    ddp: Annotated[dict[str, Any], HARMLESS] = field(default_factory=dict)
    """Fields of DistributedDataParallelConfig."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """Fields of OptimizerConfig that policy.optimizer does not have."""

    @property
    def options(self) -> Options:
        return Options(self.transformer, self.pipeline, self.ddp, self.optimizer)

    @property
    def pipeline_split(self) -> PipelineSplit:
        return PipelineSplit.of(self.pipeline)


@dataclass(frozen=True)
class OffloadConfig:
    """What leaves the GPU between the stages of a step; it comes back bit for bit before it is used."""

    parameters: bool = False
    """The weights, in `dtype`."""
    gradients: bool = False
    """Freed instead of moved: every update begins by setting them to zero."""
    optimizer: bool = False
    """Adam's moments and the float32 copy of the parameters."""
    bucket_mb: Annotated[int, above(0)] = 256
    """State moves in pieces of about this size."""

    @property
    def parts(self) -> frozenset[str]:
        """The parts that leave, by name."""
        return frozenset(name for name in ("parameters", "gradients", "optimizer") if getattr(self, name))


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (LoRA, 2106.09685): only they are trained, and a critic's value head; all other weights stay as they
    are."""

    rank: Annotated[int, at_least(0)] = 0
    """Of A and B, by which a weight W becomes W + alpha / rank · B A; 0: no adapters, all weights are trained."""
    alpha: Annotated[float, above(0)] = 16.0
    """Over the rank, the factor of what adapters add."""
    target_modules: list[str] = field(default_factory=lambda: [ALL])
    """Linear maps that have adapters, by the end of their names in Hugging Face: q_proj, k_proj, v_proj, o_proj, gate_proj,
    up_proj, down_proj; `all-linear` names all of the layers."""
    exclude_modules: list[str] = field(default_factory=list)
    """Of these, the ones that have none."""
    init: Literal["kaiming", "xavier"] = "kaiming"
    """How A is drawn, by trainer.seed: uniform in ±1/sqrt(in), as PEFT does, or normal with the variance 2 / (in + rank), as
    Megatron-Bridge does. B is 0: the model begins as it is."""
    path: Annotated[str | None, CONTENT] = None
    """Adapters to begin with instead, as PEFT saves them: a directory or hub id with adapter_config.json and
    adapter_model.safetensors."""

    @property
    def spec(self) -> LoraSpec | None:
        """What models are built with; None without adapters."""
        if not self.rank:
            return None
        return LoraSpec(self.rank, self.alpha, tuple(self.target_modules), tuple(self.exclude_modules))


@dataclass(frozen=True)
class MTPConfig:
    """The layers of multi-token prediction that some models have behind their last one (DeepSeek-V3, 2412.19437, section
    2.2). The model computes without them, and an export has them."""

    train: bool = False
    """Train them too: the cross-entropy of the response tokens that lie further ahead, as a mean over these tokens and over
    the layers, is added to the policy's loss. Otherwise they stay as they are."""
    loss_scaling_factor: Annotated[float, at_least(0)] = 0.1
    """Of what is added."""
    detach_encoder: bool = False
    """Their loss stops at the hidden states and embeddings that they are given; the output layer, which they share with the
    model, learns from it all the same, and clip_grad is of all gradients together."""


@dataclass(frozen=True)
class PolicyConfig:
    backend: Annotated[str, HARMLESS] = "megatron:d1"
    """Backend and layout: docs/layouts.md has the grammar."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Of parameters and activations; gradients are summed in float32. In float16 the loss is scaled before backward, by a
    number that moves with what overflows: megatron.optimizer.{initial_loss_scale, min_loss_scale, loss_scale_window,
    hysteresis}."""
    sequence_parallel: Annotated[bool, HARMLESS] = True
    """Shard activations of norms and dropouts over the tensor-parallel ranks; acts when t > 1."""
    recompute: Annotated[Literal["none", "selective", "full"], HARMLESS] = "none"
    """`selective` recomputes core attention in backward, `full` whole layers; finer in megatron.transformer."""
    tokens_per_micro_batch: Annotated[int, above(0), HARMLESS] = 16384
    """Most packed tokens in one forward-backward of one data-parallel replica."""
    skip_zero_advantage: Annotated[bool, HARMLESS] = True
    """Leave samples that add exactly nothing to the policy's gradient out of its passes: those without an advantage (of
    groups whose rewards are equal) or without weight, where nothing else looks at them (mtp.train does). The update is the
    same, its metrics are those of the tokens that are computed."""
    share_prefix: Annotated[bool, HARMLESS] = False
    """Compute the prompt of several samples in a micro-batch once: each response attends to it and to itself. Samples of a
    group then go to one replica, as far as that pays. Needs c1, layers of plain PyTorch and routers without losses."""
    router_replay: Literal["R2", "R3"] | None = None
    """Which experts the policy's passes send a token to: those that its router chooses, those that it chose when the old
    log-probs were computed (R2, of GSPO's authors), or those that the engine chose while it sampled (R3, 2510.11370). Their
    weights are always computed anew, so routers learn; reference and critic choose for themselves."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    mtp: MTPConfig = field(default_factory=MTPConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    offload: Annotated[OffloadConfig, HARMLESS] = field(default_factory=OffloadConfig)

    @property
    def layout(self) -> ParallelLayout:
        return ParallelLayout.parse(self.backend)

    def shares_prefix_on(self, layout: ParallelLayout) -> bool:
        """A model of these settings computes prompts once on this layout, which may be a critic's or a reference's."""
        return self.share_prefix and layout.cp == 1 and not self.megatron.options.has_router_terms and not self.mtp.train

    def for_role(self, backend: str | None, megatron: MegatronConfig | None, **own: Any) -> PolicyConfig:
        """The settings of another model, which are these where its own are left out; raises ValueError where `backend` is no
        layout. How this layout's pipeline is split says nothing of another one's."""
        # A model has adapters where its own section says so, and only the policy predicts further tokens.
        own = {"lora": LoraConfig(), "mtp": MTPConfig(), **own}
        settings = replace(self, **own) if backend is None else replace(self, backend=backend, **own)
        if megatron is None:
            is_same = settings.backend == self.backend or settings.layout.is_same(self.layout)
            megatron = self.megatron if is_same else replace(self.megatron, pipeline={})
        return replace(settings, megatron=megatron)


@dataclass(frozen=True)
class LearnerConfig:
    """A model that learns beside the policy; what is left out is the policy's."""

    path: Annotated[str | None, CONTENT] = None
    backend: Annotated[str | None, HARMLESS] = None
    """Layout on the policy's ranks, with as many of them, or from `first_rank` on; the policy's when left out. On another
    one only the own `megatron.pipeline` splits it into stages."""
    first_rank: Annotated[int, at_least(0), HARMLESS] = 0
    """Where its ranks begin: 0 is on the policy's, the number of the policy's ranks or more on ranks of its own."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    recompute: Annotated[Literal["none", "selective", "full"] | None, HARMLESS] = None
    """As in `policy`; the policy's when left out."""
    tokens_per_micro_batch: Annotated[int | None, above(0), HARMLESS] = None
    """As in `policy`; the policy's when left out."""
    megatron: MegatronConfig | None = None
    """As in `policy`; the policy's when left out, without `pipeline` where `backend` is another layout."""
    offload: Annotated[OffloadConfig | None, HARMLESS] = None

    def settings(self, policy: PolicyConfig) -> PolicyConfig:
        """The model's whole settings."""
        own = {
            name: getattr(self, name)
            for name in ("lora", "optimizer", "recompute", "tokens_per_micro_batch", "offload")
            if getattr(self, name) is not None
        }
        return policy.for_role(self.backend, self.megatron, **own)


@dataclass(frozen=True)
class CriticConfig(LearnerConfig):
    """The value model of methods with `credit: gae`; what is left out is the policy's."""

    path: Annotated[str | None, CONTENT] = None
    """Model directory or hub id, of any family and size; a value head that it lacks starts at 0."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    value_clip: Annotated[float, above(0)] | None = 0.5
    """A value may move by so much from what it was before the step; null: no bound."""
    warmup_steps: Annotated[int, at_least(0)] = 0
    """Steps in which the critic learns and the policy stays as it is."""


@dataclass(frozen=True)
class PRMConfig(LearnerConfig):
    """The implicit process reward model of methods with `process_reward.coef`, a language model that learns from outcomes;
    what is left out is the policy's. Rate, weight decay and bound of the gradient are those of PRIME (2502.01456)."""

    path: Annotated[str | None, CONTENT] = None
    """Model directory or hub id, of any family and size with the policy's vocabulary; the policy's starting weights when
    left out."""
    reference_path: Annotated[str | None, CONTENT] = None
    """What it is compared with (`algorithm.process_reward.reference: initial`); its own starting weights when left out."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-6, weight_decay=0.0, clip_grad=10.0))
    updates_per_step: Annotated[int, above(0)] = 1
    """Optimizer steps into which one rollout is divided for it, by whole groups; data.prompts_per_step is a multiple."""

    @property
    def reference(self) -> PRMConfig:
        """What it is compared with, on its own layout."""
        return replace(self, path=self.reference_path or self.path, lora=LoraConfig())


@dataclass(frozen=True)
class ReferenceConfig:
    path: Annotated[str | None, CONTENT] = None
    """The policy's starting weights when left out."""
    backend: Annotated[str | None, HARMLESS] = None
    """Layout on the policy's ranks, with as many of them, or from `first_rank` on; the policy's when left out. On another
    one only the own `megatron.pipeline` splits it into stages."""
    first_rank: Annotated[int, at_least(0), HARMLESS] = 0
    """Where its ranks begin: 0 is on the policy's, the number of the policy's ranks or more on ranks of its own."""
    megatron: MegatronConfig | None = None
    """As in `policy`; the policy's when left out, without `pipeline` where `backend` is another layout."""

    def settings(self, policy: PolicyConfig) -> PolicyConfig:
        """The reference's whole settings."""
        return policy.for_role(self.backend, self.megatron)


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
    max_logprob_diff: Annotated[float | None, above(0), HARMLESS] = None
    """Largest mean difference of rollout and trainer log-probs at the first step; by dtype when left out."""
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


@dataclass(frozen=True)
class AlgorithmConfig(Choices):
    """A published method by its name; every other choice is the method's when left out."""

    name: Annotated[str, OneOf(METHODS)] = "grpo"
    """The published method: a row of docs/methods.md."""
    group_size: Annotated[int, within("[1, 65536]")] = 8
    """Samples drawn for each prompt."""
    updates_per_step: Annotated[int, above(0)] = 1
    """Optimizer steps into which one rollout is divided."""
    ppo_epochs: Annotated[int, within("[1, 1000]")] = 1
    """Times each rollout is gone through."""
    values_per: Literal["step", "update"] = "step"
    """When the critic computes the values that advantages are made of: before the updates of a step, all at once, or before
    each of them, as the updates before have left it; advantages are then whitened over the update. As where every
    optimizer step is a step of its own, on samples of older weights."""
    sampling_rounds: Annotated[int, above(0)] = 10
    """Rounds of dynamic sampling in one step at most; then groups of equal rewards fill up what is missing."""
    prompts_per_round: Annotated[int, above(0)] | None = None
    """Prompts sampled in each round of dynamic sampling; data.prompts_per_step when left out."""

    @property
    def method(self) -> Method:
        """The method's row."""
        return METHODS[self.name]

    @property
    def resolved(self) -> Choices:
        """The method with these choices: every axis has one."""
        return resolve(self.name, self)

    @property
    def offline(self) -> bool:
        """It learns from responses in the data instead of sampling."""
        return self.method.offline

    @property
    def samples_per_comparison(self) -> int:
        """Consecutive samples that stay together because the loss compares them: 2 for pairs."""
        return self.method.samples_per_comparison

    @property
    def samples_per_prompt(self) -> int:
        return self.method.samples_per_prompt(self.group_size)

    @property
    def updates(self) -> int:
        """Optimizer steps of one rollout."""
        return self.updates_per_step * self.ppo_epochs

    @property
    def needs_reference(self) -> bool:
        """The KL has weight, or the surrogate compares with the reference."""
        chosen = self.resolved
        has_penalty = chosen.kl.coef != 0 or chosen.kl.reward_coef != 0
        return has_penalty or surrogate_row(str(chosen.surrogate)).ratio_reference == "reference"


@dataclass(frozen=True)
class DataConfig:
    train: Annotated[list[str], CONTENT] = field(default_factory=list)
    """Parquet or jsonl files of prompts; `FILE[begin:end]` are those of its rows, as of a list: `[:200]`, `[-100:]`."""
    val: Annotated[list[str], CONTENT] = field(default_factory=list)
    """Files for evaluation; none is made when left out."""
    expert: Annotated[list[str], CONTENT] = field(default_factory=list)
    """Files of an expert's responses, which algorithm.expert imitates next to what is sampled: rows as for sft."""
    expert_per_step: Annotated[int, at_least(0)] = 0
    """Expert's responses in a step; a multiple of algorithm.updates_per_step."""
    prompts_per_step: Annotated[int, above(0)] = 32
    """Prompts of one step; a multiple of algorithm.updates_per_step."""
    max_prompt_tokens: Annotated[int, above(0)] = 512
    """Longest prompt."""
    max_response_tokens: Annotated[int, above(0)] = 512
    """Longest response: sampling ends there."""
    max_total_tokens: Annotated[int | None, above(1)] = None
    """Longest prompt and response of the data together (sft): what a response has beyond is cut off, and a prompt that
    leaves no room for one is too long."""
    overlong_prompts: Literal["drop", "refuse"] = "drop"
    """Leave out prompts that are too long and count them, or refuse to start."""
    shuffle: bool = True
    """Shuffle anew for each epoch, by trainer.seed."""
    cache_dir: Annotated[str, HARMLESS] = "~/.cache/fivefold/prompts"
    """Where the tokenized prompts of data sets of more than 20,000 rows are kept, on each machine."""
    system_prompt: str | None = None
    """A system message put before each prompt that does not begin with one of its own."""
    chat_template: str | None = None
    """A Jinja template of prompts in the place of the tokenizer's chat template."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template: `{enable_thinking: false}`."""
    apply_chat_template: bool = True
    """False: prompts are texts as the model reads them, with the tokenizer's own special tokens around them."""
    prompt_key: str = "prompt"
    """Column with the prompt: text or messages. Of this key and the next, `a.b` is the part b of column a."""
    ground_truth_key: str = "reward_model.ground_truth"
    """What a response is compared with; elsewhere, of a solution that ends in `#### answer`, it is the answer."""
    ground_truth_by_source: dict[str, str] = field(default_factory=dict)
    """data_source -> the column that has it there, such as one with tests of programs."""
    source_key: str = "data_source"
    """Column with the data_source, which chooses the reward; where a row has none it is the name of its file."""
    domains: dict[str, list[str]] = field(default_factory=dict)
    """Name -> data_sources that are one domain, `'*'` for all that no domain names; another one is a domain of its own."""
    mixture: dict[str, Annotated[float, within("(0, 1]")]] = field(default_factory=dict)
    """Domain -> its share of every step's prompts; they sum to 1, and rows of other domains are left out. When left out
    all rows are shuffled together."""
    response_key: str = "response"
    """Column with the response to imitate, for methods that learn from responses (sft)."""
    messages_key: str = "messages"
    """Column with a whole conversation to imitate instead: the assistant's turns carry loss."""
    learned_turns: Literal["all", "last"] = "all"
    """Of such a conversation: all turns of the assistant up to their end tokens, or the last one with all that the chat
    template writes behind it."""
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    """Columns with the better and the worse response, for methods that learn from pairs (dpo): texts, or conversations whose
    last turn is the response."""


@dataclass(frozen=True)
class RewardModelConfig:
    """A sequence classifier with one label that scores whole responses."""

    path: Annotated[str | None, CONTENT] = None
    """Hugging Face directory or hub id; no reward model when left out."""
    weight: Annotated[float, within("[-1000000, 1000000]")] = 1.0
    """Factor of its score in the reward, next to the functions'."""
    backend: Annotated[str | None, HARMLESS] = None
    """Layout on the policy's ranks, with as many of them, or from `first_rank` on; the policy's when left out. On another
    one only the own `megatron.pipeline` splits it into stages."""
    first_rank: Annotated[int, at_least(0), HARMLESS] = 0
    """Where its ranks begin: 0 is on the policy's, the number of the policy's ranks or more on ranks of its own."""
    megatron: MegatronConfig | None = None
    """As in `policy`; the policy's when left out, without `pipeline` where `backend` is another layout."""

    def settings(self, policy: PolicyConfig) -> PolicyConfig:
        """The reward model's whole settings."""
        return policy.for_role(self.backend, self.megatron)


@dataclass(frozen=True)
class RewardConfig:
    functions: dict[str, Annotated[float, within("[-1000000, 1000000]")]] = field(default_factory=dict)
    """Reward name (gsm8k, math, format, code, ifeval, judge, ...: docs/rewards.md) or `path.py:function` -> weight; empty:
    chosen by `data_source`."""
    by_source: dict[str, dict[str, Annotated[float, within("[-1000000, 1000000]")]]] = field(default_factory=dict)
    """data_source -> its own `functions`."""
    accuracy: str | None = None
    """Function that decides whether a response is correct (it gives 1 or more): accuracy, pass@k. When left out, and for a
    data_source that does not use it: the first by name of those that take a ground truth, or of all where none does."""
    timeout_seconds: Annotated[float, within("(0, 86400]"), HARMLESS] = 10.0
    """Time one sample's rewards may take; over it they have failed."""
    wait_seconds: Annotated[float, within("(0, 86400]"), HARMLESS] = 300.0
    """Time that a step waits for rewards once its last response is there; those not begun by then have failed."""
    max_failed: Annotated[float, within("[0, 1]"), HARMLESS] = 0.1
    """Largest share of a step's samples whose reward may fail (it raised, ran out of time, was not finite): above it the run
    ends with the first error. Samples that fail are left out of the step."""
    workers: Annotated[int | None, within("[1, 1024]"), HARMLESS] = None
    """Reward processes of each rank; when left out, as many as it has cores (2 to 32)."""
    memory_mb: Annotated[int, within("[256, 1048576]"), HARMLESS] = 4096
    """Address space of one reward process."""
    environment: Annotated[list[str], HARMLESS] = field(default_factory=list)
    """Environment variables that reward processes get besides the usual ones (PATH, HOME, ...), such as the key of a judge:
    they get no other of the trainer's."""
    code: CodeConfig = field(default_factory=CodeConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    model: RewardModelConfig = field(default_factory=RewardModelConfig)

    @property
    def judge_layout(self) -> ParallelLayout | None:
        """Of the judge's servers that the run starts; None where it starts none. Raises ValueError where it is none."""
        asked = self.judge.functions_ask or any("judge" in own for own in (self.functions, *self.by_source.values()))
        return ParallelLayout.parse(self.judge.backend) if asked and self.judge.backend else None


@dataclass(frozen=True)
class ProfileConfig:
    steps: list[Annotated[int, above(0)]] = field(default_factory=list)
    """Steps to trace with the torch profiler, from 1."""
    ranks: list[Annotated[int, at_least(0)]] = field(default_factory=lambda: [0])
    """Ranks that write traces."""


@dataclass(frozen=True)
class EvalConfig:
    samples: Annotated[int, at_least(0), HARMLESS] = 0
    """Responses sampled per prompt for mean@k and pass@k, besides the greedy one; 0 for greedy only."""
    temperature: Annotated[float, within("[0, 100]")] = 1.0
    """Of the sampled responses."""
    top_p: Annotated[float, within("(0, 1]")] = 1.0
    """Of the sampled responses."""
    max_prompts: Annotated[int | None, above(0), HARMLESS] = None
    """Only the first so many prompts of each file."""
    generate: Annotated[bool | None, HARMLESS] = None
    """Sample responses and score them; when left out, methods that learn from pairs (dpo) do not, and those that learn from
    responses (sft) do where rewards are known for the files."""


@dataclass(frozen=True)
class GuardConfig:
    """Checks of every run; the run stops where one fails."""

    every: Annotated[int, at_least(0)] = 10
    """Steps between comparisons of what must be equal on several ranks: replicas, norms, routers, tied weights; 0: never."""
    max_skipped: Annotated[int, at_least(0)] = 3
    """Updates in a row that may be skipped because the loss or a gradient was not finite."""


@dataclass(frozen=True)
class TrainerConfig:
    run_dir: Annotated[str | None, HARMLESS] = None
    """Where the run writes everything; when left out `runs/METHOD-MODEL-NUMBER`, the number made of every key that makes the
    run what it is, so that two different runs do not meet."""
    steps: Annotated[int | None, above(0), HARMLESS] = None
    """Steps of the run; when left out, as many as `epochs` passes over the data take."""
    epochs: Annotated[int, above(0), HARMLESS] = 1
    """Passes over the data."""
    seed: Annotated[int, within(f"[0, {2**32 - 1}]")] = 0
    """Of the order of prompts and of every random draw."""
    device: Annotated[Literal["auto", "cpu", "cuda"], HARMLESS] = "auto"
    """`auto` takes GPUs where there are any."""
    save_every: Annotated[int, at_least(0), HARMLESS] = 0
    """Steps between checkpoints; 0 saves only at the end."""
    async_save: Annotated[bool, HARMLESS] = False
    """Copy a checkpoint to the host and go on while it is written; takes as much host memory as a rank's share of it."""
    keep: Annotated[int, above(0), HARMLESS] = 3
    """Checkpoints kept, the newest ones."""
    resume: Annotated[str, HARMLESS] = "auto"
    """auto: the newest whole checkpoint of run_dir; never; or the path of one."""
    accept_changes: Annotated[list[str], HARMLESS] = field(default_factory=list)
    """Keys or sections that may differ from those of the checkpoint that is resumed, although what is learned changes with
    them; a change that is not named here is refused."""
    eval_every: Annotated[int, at_least(0), HARMLESS] = 0
    """Steps between evaluations; 0: only before the first step and at the end."""
    eval_before_train: Annotated[bool, HARMLESS] = True
    """Evaluate before the first step, when there is validation data."""
    stop_at: Annotated[dict[str, Annotated[float, Range()]], HARMLESS] = field(default_factory=dict)
    """End the run when an evaluation finds every one of these metrics at or above its value."""
    logged_samples_per_step: Annotated[int, at_least(0), HARMLESS] = 4
    """Samples written to samples.jsonl each step."""
    loggers: Annotated[list[Literal["console", "tensorboard", "wandb", "mlflow", "swanlab", "trackio"]], HARMLESS] = field(
        default_factory=lambda: ["console", "tensorboard"]
    )
    """Where metrics go besides metrics.jsonl: the terminal, and trackers (`tracking`)."""
    profile: Annotated[ProfileConfig, HARMLESS] = field(default_factory=ProfileConfig)
    guard: Annotated[GuardConfig, HARMLESS] = field(default_factory=GuardConfig)
    deterministic: Annotated[bool, HARMLESS] = False
    """Two runs give the same bits: deterministic kernels only, at some cost of speed."""


@dataclass(frozen=True)
class TrackingConfig:
    """What the trackers in `trainer.loggers` are told. Keys and addresses stand in the libraries' own variables."""

    project: str = "fivefold"
    """Project of W&B, SwanLab and Trackio, experiment of MLflow."""
    name: str | None = None
    """Name of the run; that of its directory when left out."""
    group: str | None = None
    """Runs of a group are shown together."""
    tags: list[str] = field(default_factory=list)
    """Words by which runs are found."""
    offline: bool = False
    """W&B and SwanLab write files, which their own `sync` sends later."""
    samples_every: Annotated[int, at_least(0)] = 10
    """Steps between tables of samples; those of an evaluation are always sent. 0: none at all."""
    wait_seconds: Annotated[float, within("[0, 3600]")] = 30.0
    """Longest wait at the end of the run for what trackers have not got yet."""


@dataclass(frozen=True)
class RayConfig:
    """Where the ranks run with `launch.backend: ray`."""

    address: Annotated[str, Matches(RAY_ADDRESS, "auto, HOST:PORT or ray://HOST:PORT")] | None = None
    """Of a cluster that runs: `auto`, `HOST:PORT` or `ray://HOST:PORT`. Left out: that in RAY_ADDRESS, which Ray sets in its
    jobs, or a cluster of this machine alone that the run starts and ends."""
    cpus_per_rank: Annotated[int, within("[1, 4096]")] = 1
    """CPUs that Ray reserves for each rank, next to its GPU."""
    strategy: Literal["pack", "spread"] = "pack"
    """`pack` takes as few nodes as possible, `spread` as many, evenly; tensor-parallel ranks share a node in both."""
    wait_minutes: Annotated[float, within("[0, 43200]")] = 10.0
    """Longest wait for what others have reserved on the cluster."""
    env_vars: list[Annotated[str, Matches(VARIABLE, "a name, or its beginning and a *")]] = field(default_factory=list)
    """Variables of the environment of `fivefold train` that ranks get besides HF_*, WANDB_*, NCCL_*, CUDA_* and the like: by
    name, or `PREFIX_*`."""


@dataclass(frozen=True)
class LaunchConfig:
    backend: Literal["auto", "local", "ray"] = "auto"
    """Who starts the ranks: `auto` joins those of torchrun or Slurm where this process is one of them, and otherwise starts
    all on this machine, as `local` does in any case; `ray` places them on a Ray cluster."""
    ray: RayConfig = field(default_factory=RayConfig)
    allocation: str | None = None
    """Layouts of engine and models in one string: `vllm:d4t2+megatron:d2t4` gives each GPUs of its own,
    `vllm:d4t2|megatron[actor]:d8` the same ones. It sets engine.backend, policy.backend and engine.placement, and of other
    models backend and first_rank; docs/layouts.md has their names."""
    gpu: Annotated[str, OneOf(GPUS)] | None = None
    """The GPU, by its name, whose memory `check` compares the run with; that of this machine when left out."""
    timeout_minutes: Annotated[float, within("(0, 43200]")] = 30.0
    """Longest wait for another rank, or for a server that takes weights, in one collective operation."""
    threads: Annotated[int, within("[1, 4096]")] | None = None
    """CPU threads of each rank; the cores shared evenly when left out."""


@dataclass(frozen=True)
class RunConfig:
    model: ModelConfig
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    prm: PRMConfig = field(default_factory=PRMConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    tracking: Annotated[TrackingConfig, HARMLESS] = field(default_factory=TrackingConfig)
    launch: Annotated[LaunchConfig, HARMLESS] = field(default_factory=LaunchConfig)

    @classmethod
    def of(cls, **sections: Any) -> RunConfig:
        """A configuration from Python, one mapping per section; raises ConfigError with every fault found.

        Wherever `path.py:function` may stand, a function may stand itself.

        Example: `RunConfig.of(model={"path": "Qwen/Qwen3-0.6B"}, reward={"functions": {my_reward: 1.0}})`.
        """
        from fivefold.config.loader import make_config

        return make_config(sections)

    @classmethod
    def load(cls, path: str | Path, *overrides: str) -> RunConfig:
        """The configuration in a YAML file with `a.b.c=value` overrides; raises ConfigError with every fault found."""
        from fivefold.config.loader import load_config

        return load_config(path, list(overrides))

    @property
    def layout(self) -> ParallelLayout:
        """The policy's, on the first ranks; other models may have their own on these or on further ones."""
        return self.policy.layout

    @property
    def others(self) -> dict[str, LearnerConfig | ReferenceConfig | RewardModelConfig]:
        """The models beside the policy that the run has, by their section."""
        found: dict[str, LearnerConfig | ReferenceConfig | RewardModelConfig] = {}
        if self.algorithm.needs_reference and not self.reference_is_base:
            found["reference"] = self.reference
        if self.uses_critic:
            found["critic"] = self.critic
        if self.uses_prm:
            found["prm"] = self.prm
        if self.has_prm_reference and not self.prm_reference_is_base:
            found["prm.reference"] = self.prm.reference
        if self.reward.model.path and self.may_generate:
            found["reward.model"] = self.reward.model
        return found

    @property
    def own_layouts(self) -> dict[str, ParallelLayout]:
        """Those of models that do not take the policy's, by their section."""
        backends = {name: other.backend for name, other in self.others.items()}
        return {name: ParallelLayout.parse(backend) for name, backend in backends.items() if backend is not None}

    def settings(self, name: str) -> PolicyConfig:
        """The whole settings of one of the other models. Who is alone on its ranks has nobody to leave the device to."""
        settings, spans = self.others[name].settings(self.policy), self.spans
        is_alone = list(spans.values()).count(spans[name]) == 1
        return replace(settings, offload=OffloadConfig()) if is_alone else settings

    @property
    def spans(self) -> dict[str, range]:
        """The ranks of each model, by its section."""
        layouts, found = self.own_layouts, {"policy": range(self.layout.world_size)}
        for name, other in self.others.items():
            found[name] = range(other.first_rank, other.first_rank + layouts.get(name, self.layout).world_size)
        return found

    @property
    def world_size(self) -> int:
        """Ranks of the run, those of all models."""
        return max(span.stop for span in self.spans.values())

    @property
    def reference_is_base(self) -> bool:
        """The reference is the policy with its adapters switched off: there is no second model."""
        policy, path = self.policy, self.reference.path
        if not policy.lora.rank or not self.algorithm.needs_reference or path not in (None, self.model.path):
            return False
        if self.reference.first_rank:
            return False
        settings = self.reference.settings(policy)
        is_placed_alike = settings.backend == policy.backend or settings.layout.is_same(policy.layout)
        return is_placed_alike and settings.megatron == policy.megatron

    @property
    def has_prm_reference(self) -> bool:
        """The process reward model is compared with weights that stay as they are."""
        return self.uses_prm and self.algorithm.resolved.process_reward.reference == "initial"

    @property
    def prm_reference_is_base(self) -> bool:
        """They are the model's own, with its adapters switched off: there is no second model."""
        return self.has_prm_reference and self.prm.lora.rank > 0 and self.prm.reference_path in (None, self.prm.path)

    @property
    def run_dir(self) -> Path:
        """Where the run writes everything."""
        if self.trainer.run_dir is not None:
            return Path(self.trainer.run_dir)
        values = [(leaf.key, leaf.value) for leaf in leaves(self) if leaf.counts is not HARMLESS]
        number = hashlib.sha256(json.dumps(values).encode()).hexdigest()[:8]
        return Path("runs") / f"{self.algorithm.name}-{Path(self.model.path).name}-{number}"

    @property
    def absolute(self) -> RunConfig:
        """The configuration with absolute paths and a named directory: it means the same wherever it is read."""
        trainer = replace(self.trainer, run_dir=str(self.run_dir.absolute()))
        if trainer.resume not in ("auto", "never"):
            trainer = replace(trainer, resume=str(Path(trainer.resume).absolute()))
        return replace(with_absolute_paths(self), trainer=trainer)

    @property
    def tokenizer(self) -> str:
        """Whose tokenizer the run has."""
        return self.model.tokenizer or self.described_by(self.model.path)

    def described_by(self, path: str) -> str:
        """Directory or hub id with the config.json of the model in `path`: another one where that is a checkpoint of
        Megatron-Core."""
        if not is_torch_dist(path):
            return path
        return self.model.config or str(config_beside(path) or path)

    @property
    def models(self) -> dict[str, bool]:
        """Directory or hub id of every model that the run reads -> whether it reads its weights too."""
        others = [self.reference.path if self.algorithm.needs_reference else None]
        others += [self.critic.path if self.uses_critic else None, self.reward.model.path if self.may_generate else None]
        others += [self.prm.path if self.uses_prm else None, self.prm.reference.path if self.has_prm_reference else None]
        others.append(self.reward.judge.model if self.may_generate and self.reward.judge_layout else None)
        others += [each.lora.path for each in self.learners.values() if each.lora.rank]
        paths = [path for path in (self.model.path, *others) if path]
        return {**dict.fromkeys([self.tokenizer, *map(self.described_by, paths)], False), **dict.fromkeys(paths, True)}

    @property
    def prompts_taken(self) -> int:
        """Prompts that an epoch counts for a step: those of the round, where every step of dynamic sampling has one."""
        algorithm = self.algorithm
        has_one = bool(algorithm.resolved.dynamic_sampling) and algorithm.sampling_rounds == 1 and not self.data.mixture
        return (algorithm.prompts_per_round if has_one else None) or self.data.prompts_per_step

    @property
    def samples_per_step(self) -> int:
        return self.data.prompts_per_step * self.algorithm.samples_per_prompt + self.data.expert_per_step

    @property
    def max_sequence_tokens(self) -> int:
        longest = self.data.max_prompt_tokens + self.data.max_response_tokens
        return min(longest, self.data.max_total_tokens or longest) if self.algorithm.offline else longest

    @property
    def may_generate(self) -> bool:
        """Responses are sampled, for training or for evaluation; left out, eval.generate may still turn out false."""
        if not self.algorithm.offline:
            return True
        generate = self.eval.generate
        return bool(self.data.val) and (self.algorithm.method.samples_in_evaluation if generate is None else generate)

    @property
    def uses_critic(self) -> bool:
        return self.algorithm.resolved.credit == "gae"

    @property
    def uses_prm(self) -> bool:
        return bool(self.algorithm.resolved.process_reward.coef)

    @property
    def learners(self) -> dict[str, PolicyConfig | LearnerConfig]:
        """The models that are trained, by their section."""
        beside = {"critic": self.critic} if self.uses_critic else {}
        return {"policy": self.policy, **beside, **({"prm": self.prm} if self.uses_prm else {})}
