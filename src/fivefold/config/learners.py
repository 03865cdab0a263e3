"""Sections of the models that a run has: how each is trained, laid out and kept in memory."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal

from fivefold.config.identity import CONTENT, HARMLESS
from fivefold.config.mcore_options import Options
from fivefold.config.ranges import RANKS, above, at_least, within
from fivefold.layout import ParallelLayout, PipelineSplit
from fivefold.models.adapters import ALL, LoraSpec


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
    schedule_over: Literal["run", "data"] = "run"
    """Length of a schedule without `decay_steps`, and of what a share of warm-up is a share of: the steps of the run, or
    those that `trainer.epochs` passes over the data take, even where `trainer.steps` ends the run before."""
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
    max_lost: Annotated[float | None, within("(0, 1]"), HARMLESS] = None
    """Largest share of what the adapters add that the engine's dtype may lose (rollout/lora_lost): the run ends above it,
    from the tenth update on. Not looked at when left out."""

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
    router_balance: Literal["none", "config"] = "none"
    """Balance loss that pulls routers towards using all experts alike. `config`: as config.json has it for pre-training,
    router_aux_loss_coef over each micro-batch (softmax routers; those with a correction bias have none). Another kind or
    coefficient stands in megatron.transformer: moe_router_load_balancing_type and moe_aux_loss_coeff."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    mtp: MTPConfig = field(default_factory=MTPConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    offload: Annotated[OffloadConfig, HARMLESS] = field(default_factory=OffloadConfig)

    @property
    def layout(self) -> ParallelLayout:
        return ParallelLayout.parse(self.backend)

    @property
    def has_router_terms(self) -> bool:
        """Routers add losses, or move biases, by what all tokens of an update choose."""
        return self.router_balance != "none" or self.megatron.options.has_router_terms

    def shares_prefix_on(self, layout: ParallelLayout) -> bool:
        """A model of these settings computes prompts once on this layout, which may be a critic's or a reference's."""
        return self.share_prefix and layout.cp == 1 and not self.has_router_terms and not self.mtp.train

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
class FrozenConfig:
    """A model besides the policy that computes and does not learn; what is left out is the policy's."""

    path: Annotated[str | None, CONTENT] = None
    """Model directory or hub id; the policy's starting weights when left out."""
    backend: Annotated[str | None, HARMLESS] = None
    """Layout on the policy's ranks, with as many of them, or from `first_rank` on; the policy's when left out. On another
    one only the own `megatron.pipeline` splits it into stages."""
    first_rank: Annotated[int, within(RANKS), HARMLESS] = 0
    """Where its ranks begin: 0 is on the policy's, the number of the policy's ranks or more on ranks of its own."""
    megatron: MegatronConfig | None = None
    """As in `policy`; the policy's when left out, without `pipeline` where `backend` is another layout."""

    def settings(self, policy: PolicyConfig) -> PolicyConfig:
        """The model's whole settings."""
        own = {item.name: getattr(self, item.name) for item in fields(self) if item.name in _OF_LEARNERS}
        own = {name: value for name, value in own.items() if value is not None}
        return policy.for_role(self.backend, self.megatron, **own)


_OF_LEARNERS = ("lora", "optimizer", "recompute", "tokens_per_micro_batch", "offload")
"""Settings that a section of a model that learns may have besides those of a frozen one."""


@dataclass(frozen=True)
class LearnerConfig(FrozenConfig):
    """A model that learns besides the policy; what is left out is the policy's."""

    lora: LoraConfig = field(default_factory=LoraConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    recompute: Annotated[Literal["none", "selective", "full"] | None, HARMLESS] = None
    """As in `policy`; the policy's when left out."""
    tokens_per_micro_batch: Annotated[int | None, above(0), HARMLESS] = None
    """As in `policy`; the policy's when left out."""
    offload: Annotated[OffloadConfig | None, HARMLESS] = None


@dataclass(frozen=True)
class CriticConfig(LearnerConfig):
    """The value model of methods with `credit: gae`; what is left out is the policy's."""

    path: Annotated[str | None, CONTENT] = None
    """Model directory or hub id, of any family and size; a value head that it lacks starts at 0."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    value_clip: Annotated[float, at_least(0)] | None = 0.5
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
class ReferenceConfig(FrozenConfig):
    """What the KL compares the policy with."""


@dataclass(frozen=True)
class RewardModelConfig(FrozenConfig):
    """A sequence classifier with one label that scores whole responses."""

    path: Annotated[str | None, CONTENT] = None
    """Hugging Face directory or hub id; no reward model when left out."""
    weight: Annotated[float, within("[-1000000, 1000000]")] = 1.0
    """Factor of its score in the reward, next to the functions'."""
