"""The typed configuration tree; every default stands here, once, on its field."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from fivefold.config.mcore_options import Options
from fivefold.config.methods import Choices, problems, resolve
from fivefold.layout import ParallelLayout, PipelineSplit


@dataclass(frozen=True)
class ModelConfig:
    path: str
    """Hugging Face model directory, or a hub id that is downloaded once a node."""
    tokenizer: str | None = None
    """Tokenizer directory or hub id; the model's when left out."""
    trust_remote_code: bool = False
    """Let the tokenizer's repository run its own Python code. Models never run theirs."""


@dataclass(frozen=True)
class OptimizerConfig:
    lr: float = 1e-6
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    weight_decay: float = 0.01
    """Decoupled (AdamW); not applied to biases and norms."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    """Optimizer steps over which the rate rises linearly from 0."""
    decay_steps: int | None = None
    """Optimizer step at which `min_lr` is reached, warm-up included; the whole run when left out."""
    min_lr: float = 0.0


@dataclass(frozen=True)
class MegatronConfig:
    transformer_impl: Literal["torch", "transformer_engine", "auto"] = "torch"
    """`auto` takes Transformer Engine where it is installed and the device is CUDA."""
    bridge_type: Literal["native", "mbridge", "megatron-bridge"] = "native"
    transformer: dict[str, Any] = field(default_factory=dict)
    """Fields of Megatron-Core's TransformerConfig, by its names."""
    pipeline: dict[str, Any] = field(default_factory=dict)
    """Its fields about pipeline stages: virtual_pipeline_model_parallel_size, num_layers_in_first_pipeline_stage, ..."""
    ddp: dict[str, Any] = field(default_factory=dict)
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
    gradients: bool = False
    optimizer: bool = False
    """Adam's moments and the float32 copy of the parameters."""
    bucket_mb: int = 256
    """State moves in pieces of about this size."""

    @property
    def parts(self) -> frozenset[str]:
        """The parts that leave, by name."""
        return frozenset(name for name in ("parameters", "gradients", "optimizer") if getattr(self, name))


@dataclass(frozen=True)
class PolicyConfig:
    backend: str = "megatron:d1"
    """Layout string."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    sequence_parallel: bool = True
    """Cut activations of norms and dropouts over the tensor-parallel ranks; acts when t > 1."""
    recompute: Literal["none", "selective", "full"] = "none"
    """`selective` recomputes core attention in backward, `full` whole layers; finer in megatron.transformer."""
    tokens_per_micro_batch: int = 16384
    """Most packed tokens in one forward-backward of one data-parallel replica."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)

    def problems(self, where: str, longest: int) -> list[str]:
        """What is impossible in this section, called `where`, with sequences (or pairs of them) of `longest` tokens."""
        found = [fault.replace("policy.", f"{where}.") for fault in self.megatron.options.problems()]
        optimizer = self.optimizer

        def need(holds: bool, message: str) -> None:
            if not holds:
                found.append(f"{where}.{message}")

        need(
            self.dtype != "float32" or not self.megatron.optimizer.get("optimizer_cpu_offload", False),
            "megatron.optimizer.optimizer_cpu_offload needs policy.dtype: bfloat16: Megatron-Core moves the float32 "
            "copies of parameters, and float32 parameters have none",
        )
        need(
            self.recompute == "none" or "recompute_granularity" not in self.megatron.transformer,
            f"recompute and {where}.megatron.transformer.recompute_granularity say the same: keep one",
        )
        need(self.offload.bucket_mb > 0, f"offload.bucket_mb must be above 0: got {self.offload.bucket_mb}")
        need(
            self.tokens_per_micro_batch >= longest,
            "tokens_per_micro_batch must hold the longest sequence, max_prompt_tokens + max_response_tokens (for dpo a pair "
            f"of them), which is {longest}: got {self.tokens_per_micro_batch}; raise it or shorten the sequences",
        )
        need(
            len(optimizer.betas) == 2 and all(0 <= beta < 1 for beta in optimizer.betas),
            f"optimizer.betas must be two numbers in [0, 1): got {optimizer.betas}",
        )
        need(optimizer.lr >= 0 and optimizer.min_lr >= 0, "optimizer.lr and min_lr must not be negative")
        need(optimizer.min_lr <= optimizer.lr, f"optimizer.min_lr must be at most lr: {optimizer.min_lr} > {optimizer.lr}")
        need(optimizer.clip_grad >= 0, f"optimizer.clip_grad must not be negative: got {optimizer.clip_grad}")
        if optimizer.schedule != "constant" and optimizer.decay_steps is not None:
            need(
                optimizer.warmup_steps < optimizer.decay_steps,
                "optimizer.warmup_steps must be below decay_steps: "
                f"got {optimizer.warmup_steps} and {optimizer.decay_steps}",
            )
        return found


@dataclass(frozen=True)
class CriticConfig:
    """The value model of methods with `credit: gae`; what is left out is the policy's."""

    path: str | None = None
    """Model directory or hub id, of any family and size; a value head that it lacks starts at 0."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    recompute: Literal["none", "selective", "full"] | None = None
    tokens_per_micro_batch: int | None = None
    megatron: MegatronConfig | None = None
    offload: OffloadConfig | None = None
    value_clip: float | None = 0.5
    """A value may move by so much from what it was before the step; null: no bound."""
    warmup_steps: int = 0
    """Steps in which the critic learns and the policy stays as it is."""

    def settings(self, policy: PolicyConfig) -> PolicyConfig:
        """The critic's whole settings."""
        own = {
            name: getattr(self, name)
            for name in ("optimizer", "recompute", "tokens_per_micro_batch", "megatron", "offload")
            if getattr(self, name) is not None
        }
        return replace(policy, **own)


@dataclass(frozen=True)
class ReferenceConfig:
    path: str | None = None
    """The policy's starting weights when left out."""
    backend: str | None = None
    """The policy's layout when left out; one process group serves both, so it must be the same layout."""


@dataclass(frozen=True)
class SamplingConfig:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 turns it off."""
    stop: list[str] = field(default_factory=list)
    """A response ends with the token that completes one of these strings."""


@dataclass(frozen=True)
class EngineConfig:
    backend: Literal["transformers"] = "transformers"
    max_num_seqs: int = 256
    """Most sequences decoded at once on one rank."""
    max_logprob_diff: float | None = None
    """Largest mean difference of rollout and trainer log-probs at the first step; by dtype when left out."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    sync_bucket_mb: int = 256
    """Weights move from trainer to engine in buckets of about this size."""


@dataclass(frozen=True)
class AlgorithmConfig(Choices):
    """A published method by its name; every other choice is the method's when left out."""

    name: Literal[
        "ppo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "rloo", "reinforce_plus_plus",
        "reinforce_plus_plus_baseline", "remax", "opo", "gpg", "gmpo", "clip_cov", "kl_cov", "sft", "dpo",
    ] = "grpo"  # fmt: skip
    group_size: int = 8
    """Samples drawn for each prompt."""
    updates_per_step: int = 1
    """Optimizer steps into which one rollout is cut."""
    ppo_epochs: int = 1
    """Times each rollout is gone through."""
    sampling_rounds: int = 10
    """Rounds of dynamic sampling in one step at most; then groups without a signal fill up what is missing."""
    prompts_per_round: int | None = None
    """Prompts sampled in each round of dynamic sampling; data.prompts_per_step when left out."""

    @property
    def resolved(self) -> Choices:
        """The method with these choices: every axis has one."""
        return resolve(self.name, self)

    @property
    def learn(self) -> Literal["sft", "dpo"] | None:
        """What it takes from responses in the data, if it learns from those instead of sampling."""
        return self.name if self.name == "sft" or self.name == "dpo" else None

    @property
    def offline(self) -> bool:
        """It learns from responses in the data instead of sampling."""
        return self.learn is not None

    @property
    def samples_per_prompt(self) -> int:
        return {"sft": 1, "dpo": 2}.get(self.name, self.group_size)


@dataclass(frozen=True)
class DataConfig:
    train: list[str] = field(default_factory=list)
    val: list[str] = field(default_factory=list)
    prompts_per_step: int = 32
    max_prompt_tokens: int = 512
    max_response_tokens: int = 512
    overlong_prompts: Literal["drop", "refuse"] = "drop"
    shuffle: bool = True
    prompt_key: str = "prompt"
    response_key: str = "response"
    """Column with the completion to imitate (sft)."""
    messages_key: str = "messages"
    """Column with a whole conversation to imitate (sft): the assistant's turns carry loss."""
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    """Columns with the better and the worse response (dpo): texts, or conversations of which the last turn is it."""


@dataclass(frozen=True)
class RewardModelConfig:
    """A sequence classifier with one label that scores whole responses, on the policy's layout."""

    path: str | None = None
    """Hugging Face directory or hub id; no reward model when left out."""
    weight: float = 1.0
    """Factor of its score in the reward, beside the functions'."""
    megatron: MegatronConfig | None = None
    """The policy's when left out."""

    def settings(self, policy: PolicyConfig) -> PolicyConfig:
        """The reward model's whole settings."""
        return replace(policy, megatron=self.megatron or policy.megatron)


@dataclass(frozen=True)
class RewardConfig:
    functions: dict[str, float] = field(default_factory=dict)
    """Reward name (gsm8k, math, format) or `path.py:function` -> weight; empty: chosen by `data_source`."""
    by_source: dict[str, dict[str, float]] = field(default_factory=dict)
    """data_source -> its own `functions`."""
    accuracy: str | None = None
    """Function that decides whether a response is correct (it gives 1 or more): accuracy, pass@k. When left out, and for a
    data_source that does not use it: the first by name of those that take a ground truth, or of all where none does."""
    timeout_seconds: float = 10.0
    """Time one sample's rewards may take; a sample over it scores 0 and is counted."""
    max_failed: float = 0.1
    """Largest share of a step's samples whose reward may fail (it raised, ran out of time, was not finite): above it the run
    ends with the first error."""
    workers: int = 1
    """Reward processes of each rank."""
    memory_mb: int = 4096
    """Address space of one reward process."""
    model: RewardModelConfig = field(default_factory=RewardModelConfig)


@dataclass(frozen=True)
class ProfileConfig:
    steps: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=lambda: [0])


@dataclass(frozen=True)
class EvalConfig:
    samples: int = 0
    """Sampled responses a prompt for mean@k and pass@k, besides the greedy one; 0 for greedy only."""
    temperature: float = 1.0
    top_p: float = 1.0
    max_prompts: int | None = None
    """Only the first so many prompts of each file."""
    generate: bool | None = None
    """Sample responses and score them; when left out, dpo does not, and sft does where rewards are known for the files."""


@dataclass(frozen=True)
class GuardConfig:
    """Checks of every run; the run stops where one fails."""

    every: int = 10
    """Steps between comparisons of what must be equal on several ranks: replicas, norms, routers, tied weights; 0: never."""
    max_skipped: int = 3
    """Updates in a row that may be skipped because the loss or a gradient was not finite."""


@dataclass(frozen=True)
class TrainerConfig:
    run_dir: str = "runs/default"
    steps: int | None = None
    """Steps of the run; when left out, as many as `epochs` passes over the data take."""
    epochs: int = 1
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    save_every: int = 0
    """Steps between checkpoints; 0 saves only at the end."""
    keep: int = 3
    """Checkpoints kept, the newest ones."""
    resume: str = "auto"
    """auto: the newest whole checkpoint of run_dir; never; or the path of one."""
    eval_every: int = 0
    eval_before_train: bool = True
    """Evaluate before the first step, when there is validation data."""
    stop_at: dict[str, float] = field(default_factory=dict)
    """End the run when an evaluation finds every one of these metrics at or above its value."""
    logged_samples_per_step: int = 4
    """Samples written to samples.jsonl each step."""
    loggers: list[Literal["console", "tensorboard"]] = field(default_factory=lambda: ["console", "tensorboard"])
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    deterministic: bool = False
    """Two runs give the same bits: deterministic kernels only, at some cost of speed."""


@dataclass(frozen=True)
class LaunchConfig:
    timeout_minutes: float = 30.0
    """Longest wait for another rank in one collective operation."""
    threads: int | None = None
    """CPU threads of each rank; the cores shared evenly when left out."""


@dataclass(frozen=True)
class RunConfig:
    model: ModelConfig
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)

    @property
    def layout(self) -> ParallelLayout:
        return ParallelLayout.parse(self.policy.backend)

    @property
    def run_dir(self) -> Path:
        return Path(self.trainer.run_dir)

    @property
    def samples_per_step(self) -> int:
        return self.data.prompts_per_step * self.algorithm.samples_per_prompt

    @property
    def max_sequence_tokens(self) -> int:
        return self.data.max_prompt_tokens + self.data.max_response_tokens

    @property
    def may_generate(self) -> bool:
        """Responses are sampled, for training or for evaluation; of sft's evaluation the data decide."""
        if not self.algorithm.offline:
            return True
        generate = self.eval.generate
        return bool(self.data.val) and (self.algorithm.name != "dpo" if generate is None else generate)

    @property
    def uses_critic(self) -> bool:
        return self.algorithm.resolved.credit == "gae"

    def problems(self) -> list[str]:
        """What this configuration alone shows to be impossible, one sentence each."""
        found: list[str] = []

        def need(holds: bool, message: str) -> None:
            if not holds:
                found.append(message)

        try:
            layout = self.layout
            need(
                layout.backend == "megatron",
                f"policy.backend must be a megatron layout, the one backend that trains: got {layout}; "
                f"write megatron:{str(layout).partition(':')[2]}",
            )
            if self.reference.backend is not None:
                other = ParallelLayout.parse(self.reference.backend)
                need(
                    other == layout,
                    f"reference.backend must be the policy's layout: got {other} beside {layout}; leave it out",
                )
        except ValueError as error:
            found.append(f"policy.backend or reference.backend: {error}")
        need(self.trainer.guard.every >= 0, f"trainer.guard.every must not be negative: got {self.trainer.guard.every}")
        need(
            self.trainer.guard.max_skipped >= 0,
            f"trainer.guard.max_skipped must not be negative: got {self.trainer.guard.max_skipped}",
        )
        data, algorithm, critic = self.data, self.algorithm, self.critic
        positive: dict[str, Any] = {
            "data.prompts_per_step": data.prompts_per_step,
            "data.max_prompt_tokens": data.max_prompt_tokens,
            "data.max_response_tokens": data.max_response_tokens,
            "algorithm.group_size": algorithm.group_size,
            "algorithm.updates_per_step": algorithm.updates_per_step,
            "algorithm.ppo_epochs": algorithm.ppo_epochs,
            "algorithm.sampling_rounds": algorithm.sampling_rounds,
            "algorithm.prompts_per_round": algorithm.prompts_per_round or 1,
            "engine.max_num_seqs": self.engine.max_num_seqs,
            "engine.sync_bucket_mb": self.engine.sync_bucket_mb,
            "trainer.keep": self.trainer.keep,
            "trainer.epochs": self.trainer.epochs,
            "reward.timeout_seconds": self.reward.timeout_seconds,
            "reward.workers": self.reward.workers,
        }
        drawn = (algorithm.prompts_per_round or data.prompts_per_step) * algorithm.sampling_rounds
        need(
            not algorithm.resolved.dynamic_sampling or drawn >= data.prompts_per_step,
            f"algorithm.prompts_per_round x sampling_rounds must reach data.prompts_per_step = {data.prompts_per_step}: "
            f"got {drawn}",
        )
        for name, number in positive.items():
            need(number > 0, f"{name} must be above 0: got {number}")
        need(0 <= self.reward.max_failed <= 1, f"reward.max_failed must be in [0, 1]: got {self.reward.max_failed}")
        need(
            self.trainer.steps is None or self.trainer.steps > 0, f"trainer.steps must be above 0: got {self.trainer.steps}"
        )
        found += problems(algorithm.name, algorithm, algorithm.group_size)
        buffer = algorithm.overlong_buffer or 0
        need(
            buffer <= data.max_response_tokens,
            f"algorithm.overlong_buffer must be at most data.max_response_tokens = {data.max_response_tokens}: "
            f"got {buffer:g}",
        )
        need(critic.warmup_steps >= 0, f"critic.warmup_steps must not be negative: got {critic.warmup_steps}")
        need(
            critic.value_clip is None or critic.value_clip > 0,
            f"critic.value_clip must be above 0, or null for no bound: got {critic.value_clip}",
        )
        need(
            not self.uses_critic or self.trainer.steps is None or critic.warmup_steps < self.trainer.steps,
            f"critic.warmup_steps must be below trainer.steps, or the policy never learns: got {critic.warmup_steps}",
        )
        need(
            data.prompts_per_step % algorithm.updates_per_step == 0,
            f"data.prompts_per_step must be a multiple of algorithm.updates_per_step, so that the updates are equal: "
            f"got {data.prompts_per_step} and {algorithm.updates_per_step}",
        )
        # Pairs are compared, so both of one must fit.
        longest = self.max_sequence_tokens * (2 if algorithm.name == "dpo" else 1)
        of_policy = self.policy.problems("policy", longest)
        found += of_policy
        others = {"critic": critic.settings(self.policy)} if self.uses_critic else {}
        if self.reward.model.path:
            others["reward.model"] = self.reward.model.settings(self.policy)
        for where, settings in others.items():
            # What it has from the policy was said there.
            found += [
                fault
                for fault in settings.problems(where, longest)
                if fault.replace(f"{where}.", "policy.") not in of_policy
            ]
        sampling = self.engine.sampling
        need(
            sampling.temperature > 0,
            f"engine.sampling.temperature must be above 0 (training needs a distribution): got {sampling.temperature}",
        )
        need(0 < sampling.top_p <= 1, f"engine.sampling.top_p must be in (0, 1]: got {sampling.top_p}")
        need(sampling.top_k >= 0, f"engine.sampling.top_k must not be negative: got {sampling.top_k}")
        need(self.eval.samples == 0 or self.eval.temperature > 0, "eval.temperature must be above 0 when eval.samples is")
        need(
            self.trainer.eval_every == 0 or bool(data.val),
            "trainer.eval_every needs validation files: name them in data.val or set eval_every to 0",
        )
        need(
            not self.trainer.stop_at or (bool(data.val) and self.trainer.eval_every > 0),
            "trainer.stop_at looks at evaluations: set trainer.eval_every and data.val",
        )
        return found
