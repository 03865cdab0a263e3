"""The typed configuration tree. Every default is on its field, once, with the range of a number in its type.

learners.py has what sections of models share; engine.py and scoring.py define sections for sampling and rewards. validate.py
checks values against each other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from fivefold.algo.choices import Choices
from fivefold.algo.correction import Correction
from fivefold.algo.methods import METHODS, Method, resolve
from fivefold.algo.surrogates import surrogate_class
from fivefold.config.engine import EngineConfig, RolloutConfig
from fivefold.config.environment import EnvironmentConfig
from fivefold.config.gpus import GPUS
from fivefold.config.learners import FrozenConfig, LearnerConfig, LoraConfig, OptimizerConfig, PolicyConfig
from fivefold.config.scoring import VARIABLE, RewardConfig
from fivefold.keys.identity import CONTENT, HARMLESS
from fivefold.keys.ranges import Matches, OneOf, Range, above, at_least, within
from fivefold.models.overrides import overridden
from fivefold.models.torch_dist import config_next_to, is_torch_dist
from fivefold.tables import DATA_SETS
from fivefold.user_code import is_user_code

UMASK = re.compile(r"0?[0-7]{3}")
RAY_ADDRESS = re.compile(r"auto|(ray://)?[^/\s]+:\d+")


@dataclass(frozen=True)
class ModelConfig:
    path: Annotated[str, CONTENT]
    """Hugging Face model directory, a hub id (`OWNER/NAME[@REVISION]`, `modelscope:OWNER/NAME` for ModelScope), which is
    downloaded once per node, or a Megatron-Core checkpoint (`torch_dist`), whose weights are loaded. critic.path and
    reference.path accept the same."""
    config: Annotated[str | None, CONTENT] = None
    """Hugging Face directory or hub id with the config.json and the tokenizer for a Megatron-Core checkpoint. If left out:
    the files in the checkpoint's directory or above it."""
    tokenizer: Annotated[str | None, CONTENT] = None
    """Tokenizer directory or hub id; that of model.config or of the model if left out."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Values in place of those in the policy's config.json, by key: `{rope_theta: 1000000.0}`. Trainer, engine and exports
    read them; a reference or critic with the same path too. A key that config.json does not have is refused."""
    trust_remote_code: Annotated[bool, HARMLESS] = False
    """Let the repositories of tokenizers and models run their own Python code, here and in engines; no code of theirs runs
    otherwise. The trainer never runs the model class of a family that has a file here."""

    @property
    def tokenizer_path(self) -> str:
        """Directory or hub id of the tokenizer."""
        return self.tokenizer or self.described_by(self.path)

    def described_by(self, path: str) -> str:
        """Return the directory or hub id with the config.json for the model in `path`, which differs from `path` for a
        Megatron-Core checkpoint, and for a local model with `overrides`."""
        described = (self.config or str(config_next_to(path) or path)) if is_torch_dist(path) else path
        if self.overrides and path == self.path and Path(described).is_dir():
            return str(overridden(Path(described), self.overrides))
        return described


@dataclass(frozen=True)
class AlgorithmConfig(Choices):
    """A published method by name; each choice that is left out is the method's."""

    name: Annotated[str, OneOf(METHODS)] = "grpo"
    """Name of the published method: a row of docs/methods.md."""
    group_size: Annotated[int, within("[1, 65536]")] = 8
    """Number of samples per prompt."""
    updates_per_step: Annotated[int, above(0)] = 1
    """Number of optimizer steps that one rollout is divided into."""
    ppo_epochs: Annotated[int, within("[1, 1000]")] = 1
    """Number of passes over each rollout."""
    values_per: Literal["step", "update"] = "step"
    """When the critic computes the values for advantages: once before all updates of a step, or again before each update,
    with the critic as updated so far. With `update`, advantages are whitened over the update. That matches systems in which
    every optimizer step is a step of its own, on samples of older weights."""
    sampling_rounds: Annotated[int, above(0)] = 10
    """Maximum rounds of dynamic sampling per step. After them, groups with equal rewards fill the step."""
    prompts_per_round: Annotated[int, above(0)] | None = None
    """Prompts sampled in each round of dynamic sampling; data.prompts_per_step if left out."""

    @property
    def method(self) -> Method:
        """Row of the method in METHODS."""
        return METHODS[self.name]

    @cached_property
    def resolved(self) -> Choices:
        """The method with these choices applied; every axis has a value."""
        return resolve(self.name, self)

    @property
    def offline(self) -> bool:
        """Whether the method learns from responses in the data and does not sample."""
        return self.method.offline

    @property
    def samples_per_comparison(self) -> int:
        """Number of consecutive samples that stay together because the loss compares them: 2 for pairs."""
        return self.method.samples_per_comparison

    @property
    def samples_per_prompt(self) -> int:
        return self.method.samples_per_prompt(self.group_size)

    @property
    def updates(self) -> int:
        """Number of optimizer steps per rollout."""
        return self.updates_per_step * self.ppo_epochs

    @property
    def reads_rollout_logprobs(self) -> bool:
        """Whether every step needs the engine's log-probs: for a correction, or for user code, which may read them."""
        correction = self.resolved.rollout_correction
        is_read = Correction.of(self.resolved).is_active or correction.old_logprobs_from != "trainer"
        return is_read or any(map(is_user_code, _leaves(asdict(self.resolved))))

    @property
    def needs_reference(self) -> bool:
        """Whether the KL has a nonzero weight or the surrogate compares with the reference."""
        chosen = self.resolved
        has_penalty = chosen.kl.coef != 0 or chosen.kl.reward_coef != 0
        return has_penalty or surrogate_class(chosen.surrogate).ratio_reference == "reference"


def _leaves(values: dict[str, Any]) -> Iterator[Any]:
    for value in values.values():
        yield from _leaves(value) if isinstance(value, dict) else (value,)


@dataclass(frozen=True)
class DataConfig:
    train: Annotated[list[str], CONTENT] = field(default_factory=list)
    """Data sets with prompts: parquet or jsonl files, directories of `save_to_disk`, or `OWNER/NAME[:CONFIG][/SPLIT]` of the
    Hugging Face hub, of ModelScope with `modelscope:` before it, with `@REVISION` at the end for another than the latest.
    `NAME[begin:end]` selects rows as a Python slice does: `[:200]`, `[-100:]`."""
    val: Annotated[list[str], CONTENT] = field(default_factory=list)
    """Data sets for evaluation; no evaluation if left out."""
    expert: Annotated[list[str], CONTENT] = field(default_factory=list)
    """Files with an expert's responses, which algorithm.expert imitates in addition to the sampled ones; rows as for sft."""
    expert_per_step: Annotated[int, at_least(0)] = 0
    """Number of expert responses per step; must be a multiple of algorithm.updates_per_step."""
    prompts_per_step: Annotated[int, above(0)] = 32
    """Number of prompts per step; must be a multiple of algorithm.updates_per_step."""
    max_prompt_tokens: Annotated[int, above(0)] = 512
    """Maximum length of a prompt, in tokens."""
    max_response_tokens: Annotated[int, above(0)] = 512
    """Maximum length of a response, in tokens; with `environment`, of one turn."""
    max_total_tokens: Annotated[int | None, above(1)] = None
    """Maximum length of prompt and response together in the data (sft), in tokens. Longer responses are cut; a prompt that
    leaves no room for a response is too long. With `environment`: of a sequence of a trajectory, its context and its turns;
    `max_prompt_tokens` + `max_response_tokens` if left out."""
    overlong_prompts: Literal["drop", "refuse"] = "drop"
    """Drop and count prompts that are too long, or refuse to start."""
    shuffle: bool = True
    """Shuffle again for each epoch, seeded by trainer.seed. With false, the last prompts that do not fill a step are never
    taken."""
    cache_dir: Annotated[str, HARMLESS] = "~/.cache/fivefold/prompts"
    """Directory on each machine that caches data sets of the hub, and the tokenized prompts of more than 1,000 rows."""
    system_prompt: str | None = None
    """System message for each prompt that does not begin with one."""
    chat_template: str | None = None
    """Jinja template for prompts, replacing the tokenizer's chat template."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template, for example `{enable_thinking: false}`."""
    apply_chat_template: bool = True
    """If false, prompts are plain text, to which the tokenizer adds its special tokens."""
    special_tokens: Literal["keep", "escape", "refuse"] = "keep"
    """Handling of the tokenizer's special tokens in a row's texts, which open turns (`<|im_start|>system` in a user's
    message). keep leaves them, escape adds a space after the first letter, so that they become text, and refuse rejects the
    row. They are always escaped in tool answers, in what an environment returns (`reset` too) and in judge prompts."""
    prompt_key: str = "prompt"
    """Column with the prompt: text or messages. In this key and the next, `a.b` means field b of column a."""
    query_key: str | None = None
    """Column with a second part of the prompt, added on a new line; a row may leave it empty."""
    system_key: str | None = None
    """Column with a row's system message, used instead of `system_prompt`; ignored if the prompt begins with one, and may be
    empty."""
    tools_key: str | None = None
    """Column with the functions passed to the chat template as `tools`: a list, or JSON; may be empty."""
    ground_truth_key: str = "reward_model.ground_truth"
    """Column with the ground truth, which responses are compared with. In a column of another name, a solution whose last
    line is `#### answer` counts as its answer."""
    ground_truth_by_source: dict[str, str] = field(default_factory=dict)
    """data_source -> column with its ground truth, for example one with tests for programs."""
    source_key: str = "data_source"
    """Column with the data_source, which selects the reward; the file's name for rows without one."""
    domains: dict[str, list[str]] = field(default_factory=dict)
    """Domain name -> its data_sources; `'*'` stands for all that no domain names. Other data_sources are domains of their
    own."""
    mixture: dict[str, Annotated[float, within("(0, 1]")]] = field(default_factory=dict)
    """Domain -> its share of the prompts in every step. Shares sum to 1, and rows of other domains are left out. If left
    out, all rows are shuffled together."""
    response_key: str = "response"
    """Column with the response to imitate, for methods that learn from responses (sft)."""
    messages_key: str = "messages"
    """Column with a whole conversation to imitate instead; the assistant's turns carry loss."""
    learned_turns: Literal["all", "last"] = "all"
    """Turns in a `messages_key` conversation that carry loss. all: all assistant turns, each up to the special token that
    ends it in the chat template; last: the last one, with all text that the chat template adds after it."""
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    """Columns with the better and the worse response, for methods that learn from pairs (dpo): texts, or conversations whose
    last turn is the response."""

    def renamed(self, change: Callable[[str], str]) -> DataConfig:
        """Return the section with each name of a data set changed."""
        named: dict[str, Any] = {key: [change(name) for name in getattr(self, key)] for key in DATA_SETS}
        return replace(self, **named)


@dataclass(frozen=True)
class ProfileConfig:
    steps: list[Annotated[int, above(0)]] = field(default_factory=list)
    """Steps to trace with the torch profiler, from 1."""
    ranks: list[Annotated[int, at_least(0)]] = field(default_factory=lambda: [0])
    """Ranks that write traces."""


@dataclass(frozen=True)
class EvalConfig:
    samples: Annotated[int, at_least(0), HARMLESS] = 0
    """Number of responses sampled per prompt for mean@k and pass@k, in addition to the greedy one; 0: greedy only."""
    temperature: Annotated[float, within("[0, 100]")] = 1.0
    """Temperature of the sampled responses."""
    top_p: Annotated[float, within("(0, 1]")] = 1.0
    """Top-p of the sampled responses."""
    top_k: Annotated[int, at_least(0)] = 0
    """Top-k of the sampled responses; 0 turns it off."""
    max_prompts: Annotated[int | None, above(0), HARMLESS] = None
    """Maximum number of prompts per file: the first ones are used."""
    generate: Annotated[bool | None, HARMLESS] = None
    """Sample responses and score them. If left out: false for methods that learn from pairs (dpo); for methods that learn
    from responses (sft), true if rewards are known for the files."""


@dataclass(frozen=True)
class GuardConfig:
    """Checks in every run; the run stops when one fails."""

    every: Annotated[int, at_least(0)] = 10
    """Steps between checks that replicas, norms, routers and tied weights are equal on all ranks that hold them; 0:
    never."""
    max_skipped: Annotated[int, at_least(0)] = 3
    """Maximum number of consecutive updates skipped because the loss or a gradient was not finite."""


@dataclass(frozen=True)
class WarningsConfig:
    """Thresholds at which a run says that something is wrong with what it learns. null switches a warning off."""

    enabled: bool = True
    """Print and store warnings."""
    every: Annotated[int, above(0)] = 10
    """Steps between two lines of the same warning, while it holds."""
    equal_rewards: Annotated[float | None, within("(0, 1]")] = 1.0
    """Share of groups whose samples all have the same reward. For methods that do not compare the samples of a group: 1 if
    all samples of the step have the same reward."""
    truncated: Annotated[float | None, within("(0, 1]")] = 0.5
    """Share of responses, in training or in an evaluation, that are cut off at data.max_response_tokens."""
    evaluation: Annotated[float | None, within("(0, 1]")] = 1.0
    """Share of greedy responses to a source's validation prompts that are not correct."""
    entropy_drop: Annotated[float | None, within("(0, 1]")] = 0.9
    """Share of the first step's entropy that is gone."""
    clip_fraction: Annotated[float | None, within("(0, 1]")] = 0.5
    """Share of tokens whose ratio is clipped."""
    kl: Annotated[float | None, above(0)] = 1.0
    """KL divergence from the reference, in nats a token."""
    engine_diff: Annotated[float | None, above(0)] = 3.0
    """Mean difference of the engine's and the trainer's log-probs, as a multiple of the first step's. Differences below 0.01
    are never reported."""


@dataclass(frozen=True)
class TrainerConfig:
    run_dir: Annotated[str | None, HARMLESS] = None
    """Directory for all output of the run. If left out: `runs/METHOD-MODEL-NUMBER`, where NUMBER is a hash of all keys that
    affect what is learned, so different runs get different directories."""
    steps: Annotated[int | None, above(0), HARMLESS] = None
    """Number of steps in the run; if left out, enough for `epochs` passes over the data."""
    epochs: Annotated[int, above(0), HARMLESS] = 1
    """Number of passes over the data."""
    ends_with_data: bool = False
    """End the run when the data of `epochs` is used up, even before `steps`. Every prompt that dynamic sampling draws
    counts; a step with too few prompts left is not taken."""
    seed: Annotated[int, within(f"[0, {2**32 - 1}]")] = 0
    """Seed for the order of prompts and all random draws."""
    device: Annotated[Literal["auto", "cpu", "cuda"], HARMLESS] = "auto"
    """`auto` uses GPUs if there are any."""
    umask: Annotated[str, Matches(UMASK, "three octal digits in quotes, as '077' or '027'"), HARMLESS] = "077"
    """Permissions removed from files and directories of the run: with '077' only the owner reads them, with '027' the group
    too."""
    save_every: Annotated[Annotated[int, at_least(0)] | Literal["epoch"], HARMLESS] = 0
    """Steps between checkpoints; 0 saves only at the end, `epoch` after as many steps as one pass over the data takes."""
    async_save: Annotated[bool, HARMLESS] = False
    """Copy a checkpoint to host memory and continue while it is written. Needs host memory for a rank's share of the
    checkpoint."""
    keep: Annotated[int, above(0), HARMLESS] = 3
    """Number of latest checkpoints to keep."""
    resume: Annotated[str, HARMLESS] = "auto"
    """auto: resume from the latest complete checkpoint in run_dir; never: start from scratch; or the path of a
    checkpoint."""
    accept_changes: Annotated[list[str], HARMLESS] = field(default_factory=list)
    """Keys or sections that may differ from the resumed checkpoint although they affect what is learned. Any other such
    change is refused."""
    eval_every: Annotated[Annotated[int, at_least(0)] | Literal["epoch", "never"], HARMLESS] = 0
    """Steps between evaluations; 0: only before the first step and at the end, `epoch`: as many steps as one pass over the
    data takes, `never`: none after a step, not at the end either."""
    eval_before_train: Annotated[bool, HARMLESS] = True
    """Evaluate before the first step, if there is validation data."""
    stop_at: Annotated[dict[str, Annotated[float, Range()]], HARMLESS] = field(default_factory=dict)
    """End the run when an evaluation finds each of these metrics at or above its value. It resumes only with other values
    here."""
    logged_samples_per_step: Annotated[int | Literal["all"], at_least(0), HARMLESS] = 4
    """Number of samples written to samples.jsonl per step, the first of as many groups, with the rewards and lengths of the
    whole group. all: every sample with its tokens, log-probs, values, weights and advantages, from which another program can
    recompute the step's loss. This costs a gather, disk space, and a forward pass of the policy if nothing else needs
    one."""
    loggers: Annotated[list[Literal["console", "tensorboard", "wandb", "mlflow", "swanlab", "trackio"]], HARMLESS] = field(
        default_factory=lambda: ["console", "tensorboard"]
    )
    """Outputs for metrics in addition to metrics.jsonl: the terminal, and trackers (`tracking`)."""
    tensorboard_dir: Annotated[str | None, HARMLESS] = None
    """Directory for TensorBoard's event files; `tensorboard` in run_dir if left out."""
    verbosity: Annotated[Literal["quiet", "normal", "debug"], HARMLESS] = "normal"
    """Lines in the terminal. quiet: warnings, errors, checkpoints and how the run ends; normal: also notes and a line for
    each step; debug: also a line for each stage, with its seconds and the memory in use."""
    log_file: Annotated[str | None, HARMLESS] = None
    """File to which the lines of verbosity `debug` are appended with their time, whatever the terminal shows: a path, or a
    name in `logs` of run_dir."""
    profile: Annotated[ProfileConfig, HARMLESS] = field(default_factory=ProfileConfig)
    guard: Annotated[GuardConfig, HARMLESS] = field(default_factory=GuardConfig)
    warnings: Annotated[WarningsConfig, HARMLESS] = field(default_factory=WarningsConfig)
    deterministic: Annotated[bool, HARMLESS] = False
    """Make two runs bitwise identical: only deterministic kernels, which are slower."""


@dataclass(frozen=True)
class TrackingConfig:
    """Settings for the trackers in `trainer.loggers`. Keys and addresses are read from the libraries' own environment
    variables."""

    project: str = "fivefold"
    """Project in W&B, SwanLab and Trackio; experiment in MLflow."""
    name: str | None = None
    """Name of the run; its directory's name if left out."""
    group: str | None = None
    """Group of the run; trackers show runs of a group together."""
    tags: list[str] = field(default_factory=list)
    """Tags for finding runs."""
    offline: bool = False
    """Let W&B and SwanLab write files, to be sent later with their own `sync`."""
    samples_every: Annotated[int, at_least(0)] = 10
    """Steps between tables of samples; evaluation samples are always sent. 0: no tables."""
    wait_seconds: Annotated[float, within("[0, 3600]")] = 30.0
    """Maximum wait at the end of the run for trackers to receive pending data, in seconds."""


@dataclass(frozen=True)
class RayConfig:
    """Placement of ranks with `launch.backend: ray`."""

    address: Annotated[str, Matches(RAY_ADDRESS, "auto, HOST:PORT or ray://HOST:PORT")] | None = None
    """Address of a running cluster: `auto`, `HOST:PORT` or `ray://HOST:PORT`. If left out: RAY_ADDRESS, which Ray sets in
    its jobs, or else a cluster on this machine that the run starts and ends."""
    cpus_per_rank: Annotated[int, within("[1, 4096]")] = 1
    """Number of CPUs that Ray reserves for each rank, in addition to its GPU."""
    strategy: Literal["pack", "spread"] = "pack"
    """`pack` uses as few nodes as possible, `spread` as many, evenly; tensor-parallel ranks share a node in both."""
    wait_minutes: Annotated[float, within("[0, 43200]")] = 10.0
    """Maximum wait for resources that other users of the cluster have reserved, in minutes."""
    env_vars: list[Annotated[str, Matches(VARIABLE, "a name, or its beginning and a *")]] = field(default_factory=list)
    """Environment variables of `fivefold train` that ranks get in addition to HF_*, WANDB_*, NCCL_*, CUDA_* and the like: by
    name, or `PREFIX_*`."""


@dataclass(frozen=True)
class LaunchConfig:
    backend: Literal["auto", "local", "ray"] = "auto"
    """How the ranks start. `auto` joins the ranks of torchrun or Slurm if this process is one of them, and otherwise acts as
    `local`; `local` starts all ranks on this machine; `ray` places them on a Ray cluster."""
    ray: RayConfig = field(default_factory=RayConfig)
    nodes: Annotated[int, within("[1, 100000]")] | None = None
    """Number of hosts. Compared with the layouts and with what torchrun or Slurm report, requested from a Ray cluster, and 1
    where all ranks start on this machine. If left out, what the launcher reports."""
    gpus_per_node: Annotated[int, within("[1, 4096]")] | None = None
    """Number of GPUs that the run takes on each host, for ranks and for servers on GPUs of their own; on CPUs, the number of
    these processes. Compared and requested as `nodes` is: nodes x gpus_per_node must be what the layouts take."""
    allocation: str | None = None
    """Layouts of engine and models in one string: `vllm:d4t2+megatron:d2t4` gives each its own GPUs,
    `vllm:d4t2|megatron[actor]:d8` the same GPUs. It sets engine.backend, policy.backend and engine.placement, and for other
    models backend and first_rank; see docs/layouts.md for their names."""
    gpu: Annotated[str, OneOf(GPUS)] | None = None
    """Name of the GPU whose memory `check` compares the run with; this machine's GPU if left out."""
    timeout_minutes: Annotated[float, within("[0.01, 43200]")] = 30.0
    """Timeout of one collective operation: the maximum wait for another rank or for a server that receives weights, in
    minutes."""
    silent_seconds: Annotated[float, within("[5, 43200]")] = 60.0
    """Seconds after which the run ends and names the rank that sent no sign of life, or that makes no progress while others
    wait for it. Ranks also end if no other rank, or no driver, reaches them for as long. Loading, compiling, sampling,
    rewards and saving have their own limits. Raise it to hold a rank in a debugger."""
    threads: Annotated[int, within("[1, 4096]")] | None = None
    """Number of CPU threads per rank; an equal share of the cores if left out."""


@dataclass(frozen=True)
class CriticConfig(LearnerConfig):
    """The value model for methods with `credit: gae`; settings left out are the policy's."""

    path: Annotated[str | None, CONTENT] = None
    """Model directory or hub id, of any family and size; a missing value head starts at 0."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    value_clip: Annotated[float, at_least(0)] | None = 0.5
    """Maximum change of a value from its value before the step; null: no bound."""
    warmup_steps: Annotated[int, at_least(0)] = 0
    """Number of steps in which the critic learns and the policy is frozen."""


@dataclass(frozen=True)
class PRMConfig(LearnerConfig):
    """The implicit process reward model for methods with `process_reward.coef`: a language model that learns from outcomes.
    Settings left out are the policy's; learning rate, weight decay and gradient clipping are those of PRIME (2502.01456)."""

    path: Annotated[str | None, CONTENT] = None
    """Model directory or hub id, of any family and size with the policy's vocabulary; the policy's starting weights if left
    out."""
    reference_path: Annotated[str | None, CONTENT] = None
    """Weights of the reference of the process reward model (`algorithm.process_reward.reference: initial`); the model's own
    starting weights if left out."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-6, weight_decay=0.0, clip_grad=10.0))
    updates_per_step: Annotated[int, above(0)] = 1
    """Number of optimizer steps per rollout for this model, split by whole groups; must divide data.prompts_per_step."""

    @property
    def reference(self) -> PRMConfig:
        """Section of the model's reference, on the model's layout."""
        return replace(self, path=self.reference_path or self.path, lora=LoraConfig())


@dataclass(frozen=True)
class ReferenceConfig(FrozenConfig):
    """The model that the KL compares the policy with."""


@dataclass(frozen=True)
class Sections:
    """All sections of a run's configuration."""

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
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    tracking: Annotated[TrackingConfig, HARMLESS] = field(default_factory=TrackingConfig)
    launch: Annotated[LaunchConfig, HARMLESS] = field(default_factory=LaunchConfig)

    @property
    def may_generate(self) -> bool:
        """Whether responses may be sampled, for training or evaluation; if eval.generate is left out, evaluation may still
        not sample."""
        if not self.algorithm.offline:
            return True
        generate = self.eval.generate
        return bool(self.data.val) and (self.algorithm.method.samples_in_evaluation if generate is None else generate)
