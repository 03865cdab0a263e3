"""Configuration sections for the models of a run: training, layout and memory."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal

from fivefold.config.mcore_options import SECTIONS, Options, with_numbers
from fivefold.keys.identity import CONTENT, HARMLESS
from fivefold.keys.ranges import RANKS, above, at_least, within
from fivefold.layout import ParallelLayout, PipelineSplit
from fivefold.models.adapters import ALL, LoraSpec


@dataclass(frozen=True)
class OptimizerConfig:
    lr: Annotated[float, within("[0, 1]")] = 1e-6
    """Peak learning rate of AdamW."""
    betas: list[Annotated[float, within("[0, 1)")]] = field(default_factory=lambda: [0.9, 0.999])
    """Decay rates of the moving averages of gradients and of their squares."""
    eps: Annotated[float, within("(0, 1]")] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, within("[0, 100]")] = 0.01
    """Decoupled weight decay (AdamW); not applied to biases and norms."""
    clip_grad: Annotated[float, at_least(0)] = 1.0
    """Maximum global gradient norm; 0 turns clipping off."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay of the learning rate from `lr` to `min_lr` after the warm-up."""
    schedule_per: Literal["update", "step"] | Annotated[int, above(0)] = "update"
    """Unit of warm-up and decay: optimizer steps, steps of the run, or a number of optimizer steps, during which the rate
    stays constant."""
    warmup_steps: Annotated[float, at_least(0)] = 0.0
    """Length of the linear warm-up; below 1 a share of `schedule_over`."""
    warmup_from: Literal[0, 1] = 1
    """Start of a warm-up over w steps: 1 begins at 1/w of the rate, 0 at 0, as torch's schedulers and most other systems
    do."""
    warmup_init_lr: Annotated[float, within("[0, 1]")] = 0.0
    """Learning rate that the warm-up starts from."""
    decay_steps: Annotated[int, above(0)] | None = None
    """Step at which `min_lr` is reached, including the warm-up; the end of `schedule_over` if left out."""
    schedule_over: Literal["run", "data"] = "run"
    """Length of a schedule without `decay_steps`, and of the whole that a warm-up share refers to. run: the steps of the
    run; data: those of `trainer.epochs` passes over the data, even if `trainer.steps` ends the run earlier."""
    min_lr: Annotated[float, within("[0, 1]")] = 0.0
    """Final rate of a linear or cosine schedule."""

    @property
    def depends_on_length(self) -> bool:
        """Whether the rates depend on the number of steps in `schedule_over`."""
        return (self.schedule != "constant" and self.decay_steps is None) or 0 < self.warmup_steps < 1


@dataclass(frozen=True)
class MegatronConfig:
    transformer_impl: Annotated[Literal["torch", "transformer_engine", "auto"], HARMLESS] = "torch"
    """Implementation of the layers. `auto` uses Transformer Engine if it is installed and the device is CUDA."""
    bridge_type: Annotated[Literal["native", "mbridge", "megatron-bridge"], HARMLESS] = "native"
    """Reader and writer of the weights: our own tables (native), mbridge, or Megatron-Bridge."""
    transformer: dict[str, Any] = field(default_factory=dict)
    """Fields of Megatron-Core's TransformerConfig, by name."""
    pipeline: Annotated[dict[str, Any], HARMLESS] = field(default_factory=dict)
    """TransformerConfig's fields about pipeline stages: virtual_pipeline_model_parallel_size,
    num_layers_in_first_pipeline_stage, ..."""
    ddp: Annotated[dict[str, Any], HARMLESS] = field(default_factory=dict)
    """Fields of DistributedDataParallelConfig."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """Fields of OptimizerConfig that policy.optimizer does not have."""

    def __post_init__(self) -> None:
        for section in SECTIONS:
            object.__setattr__(self, section, with_numbers(section, getattr(self, section)))

    @property
    def options(self) -> Options:
        return Options(self.transformer, self.pipeline, self.ddp, self.optimizer)

    @property
    def pipeline_split(self) -> PipelineSplit:
        return PipelineSplit.of(self.pipeline)


@dataclass(frozen=True)
class FSDPConfig:
    """Options of `fsdp:` layouts."""

    replicas: Annotated[int, above(0), HARMLESS] = 1
    """Number of whole copies of parameters, gradients and optimizer (HSDP): each group of d / replicas neighbors shards one.
    Must divide d."""
    keep_gathered: Annotated[bool, HARMLESS] = False
    """Add up the gradients of micro-batches before they are reduced: less communication, 4 bytes a parameter more on every
    rank."""
    reshard_after_forward: Annotated[bool, HARMLESS] = True
    """Free a gathered layer after its forward pass and gather it again in backward; false keeps it: less communication, the
    model in `dtype` more on every rank."""
    cpu_adam: Annotated[bool, HARMLESS] = False
    """Keep parameters, gradients and moments in host memory and take the optimizer step there; layers are copied to the GPU
    one by one."""
    compile: Annotated[bool, HARMLESS] = False
    """Compile each layer with torch.compile."""
    unproven: Annotated[bool, HARMLESS] = False
    """Allow t and e with families whose steps were not compared with those of one process (docs/fsdp.md)."""


@dataclass(frozen=True)
class OffloadConfig:
    """State that leaves the GPU between the stages of a step; it is restored bit for bit before it is used."""

    parameters: bool = False
    """Offload the weights, in `dtype`."""
    gradients: bool = False
    """Free the gradients; they need no copy, because every update starts from zero."""
    optimizer: bool = False
    """Offload Adam's moments and the float32 copy of the parameters."""
    bucket_mb: Annotated[int, above(0)] = 256
    """Approximate size of the pieces in which state moves, in MB."""

    @property
    def parts(self) -> frozenset[str]:
        """Names of the parts that leave the GPU."""
        return frozenset(name for name in ("parameters", "gradients", "optimizer") if getattr(self, name))


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (LoRA, 2106.09685). Only the adapters and a critic's value head are trained; all other weights are
    frozen."""

    rank: Annotated[int, at_least(0)] = 0
    """Rank of A and B, with which a weight W becomes W + alpha / rank · B A; 0: no adapters, all weights are trained."""
    alpha: Annotated[float, above(0)] = 16.0
    """Numerator of the scale alpha / rank."""
    target_modules: list[str] = field(default_factory=lambda: [ALL])
    """Target modules: linear layers with adapters, by the end of their Hugging Face names: q_proj, k_proj, v_proj, o_proj,
    gate_proj, up_proj, down_proj. `all-linear` means all of them in the layers."""
    exclude_modules: list[str] = field(default_factory=list)
    """Target modules to exclude."""
    init: Literal["kaiming", "xavier"] = "kaiming"
    """Distribution of the initial A, seeded by trainer.seed: uniform in ±1/sqrt(in), as in PEFT, or normal with variance 2 /
    (in + rank), as in Megatron-Bridge. B starts at 0, so the model starts unchanged."""
    path: Annotated[str | None, CONTENT] = None
    """Adapters to start from instead, in PEFT's format: a directory or hub id with adapter_config.json and
    adapter_model.safetensors."""
    max_lost: Annotated[float | None, within("(0, 1]"), HARMLESS] = None
    """Maximum share of the adapters' contribution that the engine's dtype may lose (rollout/lora_lost). Above it the run
    ends, from the tenth update on. Not checked if left out."""

    @property
    def spec(self) -> LoraSpec | None:
        """Arguments for building models with adapters; None without adapters."""
        if not self.rank:
            return None
        return LoraSpec(self.rank, self.alpha, tuple(self.target_modules), tuple(self.exclude_modules))


@dataclass(frozen=True)
class MTPConfig:
    """Multi-token prediction layers, which some models have after their last layer (DeepSeek-V3, 2412.19437, section 2.2).
    Forward passes skip them, and exports include them."""

    train: bool = False
    """Train the multi-token prediction layers too. The cross-entropy of the response tokens further ahead, averaged over
    these tokens and the layers, is added to the policy's loss. Otherwise the layers are frozen."""
    loss_scaling_factor: Annotated[float, at_least(0)] = 0.1
    """Weight of the multi-token prediction loss."""
    detach_encoder: bool = False
    """Stop the multi-token prediction loss at the layers' inputs, the hidden states and embeddings. The output layer, shared
    with the model, still learns from it, and clip_grad applies to all gradients together."""


@dataclass(frozen=True)
class PolicyConfig:
    backend: Annotated[str, HARMLESS] = "megatron:d1"
    """Backend and layout; docs/layouts.md has the grammar."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Dtype of parameters and activations; gradients are summed in float32. In float16 the loss is scaled before backward by
    a dynamic factor: megatron.optimizer.{initial_loss_scale, min_loss_scale, loss_scale_window, hysteresis}."""
    sequence_parallel: Annotated[bool, HARMLESS] = True
    """Shard activations of norms and dropouts over the tensor-parallel ranks; no effect if t = 1."""
    recompute: Annotated[Literal["none", "selective", "full"], HARMLESS] = "none"
    """Recomputation in backward: `selective` recomputes core attention, `full` whole layers; megatron.transformer has finer
    options."""
    tokens_per_micro_batch: Annotated[int, above(0), HARMLESS] = 16384
    """Maximum number of packed tokens in one forward-backward of one data-parallel replica."""
    sequences_per_forward: Annotated[int | None, above(0), HARMLESS] = None
    """Number of sequences in one pass without gradient (log-probs, values, scores), whatever their lengths. If left out,
    tokens_per_micro_batch limits these passes too."""
    skip_zero_advantage: Annotated[bool, HARMLESS] = True
    """Skip samples that contribute exactly zero to the policy's gradient, unless something else reads them (mtp.train does).
    These are samples without an advantage (in groups with equal rewards) or without weight. The update is the same; its
    metrics cover only the computed tokens."""
    share_prefix: Annotated[bool, HARMLESS] = False
    """Compute a prompt once for several samples in a micro-batch: each response attends to the prompt and to itself. Samples
    of a group then go to one replica if that pays off. Needs c1, plain PyTorch layers, and routers without losses."""
    router_replay: Literal["R2", "R3"] | None = None
    """Experts in the policy's passes: by default those that its router chooses. R2 (from the authors of GSPO) replays the
    choices made when the old log-probs were computed, R3 (2510.11370) those that the engine made while sampling. Routing
    weights are always computed again, so routers learn; reference and critic choose for themselves."""
    router_balance: Literal["none", "config"] = "none"
    """Balance loss that pushes routers to use all experts equally. `config` takes it from config.json, as in pre-training:
    router_aux_loss_coef over each micro-batch (softmax routers; those with a correction bias have none). For another kind or
    coefficient, set moe_router_load_balancing_type and moe_aux_loss_coeff in megatron.transformer."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    mtp: MTPConfig = field(default_factory=MTPConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    offload: Annotated[OffloadConfig, HARMLESS] = field(default_factory=OffloadConfig)

    @property
    def layout(self) -> ParallelLayout:
        return ParallelLayout.parse(self.backend)

    @property
    def replicas(self) -> int:
        """Number of whole copies of the model among the ranks of an `fsdp:` layout."""
        return self.fsdp.replicas if self.layout.backend == "fsdp" else 1

    @property
    def has_router_terms(self) -> bool:
        """Whether routers add losses or update biases based on the choices of all tokens in an update."""
        return self.router_balance != "none" or self.megatron.options.has_router_terms

    def shares_prefix_on(self, layout: ParallelLayout) -> bool:
        """Whether a model with these settings computes shared prompts once on `layout`, which may be a critic's or a
        reference's."""
        return self.share_prefix and layout.cp == 1 and not self.has_router_terms and not self.mtp.train

    def for_role(self, backend: str | None, megatron: MegatronConfig | None, **changes: Any) -> PolicyConfig:
        """Settings of another model: these, except where its section sets its own. Raises ValueError if `backend` is not a
        layout.

        A different layout does not inherit this layout's pipeline split.
        """
        # Adapters come only from a model's own section, and only the policy predicts further tokens.
        changes = {"lora": LoraConfig(), "mtp": MTPConfig(), **changes}
        settings = replace(self, **changes) if backend is None else replace(self, backend=backend, **changes)
        if megatron is None:
            is_same = settings.backend == self.backend or settings.layout.is_same(self.layout)
            megatron = self.megatron if is_same else replace(self.megatron, pipeline={})
        return replace(settings, megatron=megatron)


@dataclass(frozen=True)
class FrozenConfig:
    """A model other than the policy that is not trained; settings left out are the policy's."""

    path: Annotated[str | None, CONTENT] = None
    """Model directory or hub id; the policy's starting weights if left out, without the adapters of `policy.lora.path`."""
    backend: Annotated[str | None, HARMLESS] = None
    """Layout on the policy's ranks, with the same number of ranks, or on the ranks from `first_rank` on; the policy's layout
    if left out. With another layout, only its own `megatron.pipeline` splits it into stages."""
    first_rank: Annotated[int, within(RANKS), HARMLESS] = 0
    """First rank of the model: 0 shares the policy's ranks; the number of the policy's ranks, or more, gives it ranks of its
    own."""
    megatron: MegatronConfig | None = None
    """Key as in `policy`; the policy's value if left out, without `pipeline` if `backend` is another layout."""
    fsdp: FSDPConfig | None = None
    """Key as in `policy`; the policy's value if left out."""
    sequences_per_forward: Annotated[int | None, above(0), HARMLESS] = None
    """Key as in `policy`; the policy's value if left out."""

    def settings(self, policy: PolicyConfig) -> PolicyConfig:
        """Return all settings of the model."""
        changes = {item.name: getattr(self, item.name) for item in fields(self) if item.name in _OWN}
        changes = {name: value for name, value in changes.items() if value is not None}
        return policy.for_role(self.backend, self.megatron, **changes)


_OWN = ("lora", "optimizer", "fsdp", "recompute", "tokens_per_micro_batch", "sequences_per_forward", "offload")
"""Settings of the policy that sections of other models have too."""


@dataclass(frozen=True)
class LearnerConfig(FrozenConfig):
    """A trained model other than the policy; settings left out are the policy's."""

    lora: LoraConfig = field(default_factory=LoraConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    recompute: Annotated[Literal["none", "selective", "full"] | None, HARMLESS] = None
    """Key as in `policy`; the policy's value if left out."""
    tokens_per_micro_batch: Annotated[int | None, above(0), HARMLESS] = None
    """Key as in `policy`; the policy's value if left out."""
    offload: Annotated[OffloadConfig | None, HARMLESS] = None


@dataclass(frozen=True)
class RewardModelConfig(FrozenConfig):
    """A sequence classifier with one label that scores whole responses."""

    path: Annotated[str | None, CONTENT] = None
    """Hugging Face directory or hub id; no reward model if left out."""
    weight: Annotated[float, within("[-1000000, 1000000]")] = 1.0
    """Weight of the reward model's score in the reward, alongside the functions' weights."""
