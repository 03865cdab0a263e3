"""The typed configuration tree; every default stands once, on its field, with the range of a number in its type.

learners.py, engine.py and scoring.py have the sections of models, sampling and rewards, validate.py what values must satisfy
together.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from fivefold.config.engine import EngineConfig, RolloutConfig
from fivefold.config.gpus import GPUS
from fivefold.config.identity import CONTENT, HARMLESS, leaves, with_absolute_paths
from fivefold.config.learners import (
    CriticConfig,
    PolicyConfig,
    PRMConfig,
    ReferenceConfig,
)
from fivefold.config.methods import METHODS, Choices, Method, resolve, surrogate_row
from fivefold.config.ranges import Matches, OneOf, Range, above, at_least, within
from fivefold.config.roles import Roles, roles_of
from fivefold.config.scoring import VARIABLE, RewardConfig
from fivefold.layout import ParallelLayout
from fivefold.models.torch_dist import config_beside, is_torch_dist

UMASK = re.compile(r"0?[0-7]{3}")
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

    @cached_property
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
    special_tokens: Literal["keep", "escape", "refuse"] = "keep"
    """Special tokens of the tokenizer in a row's texts, which open turns (`<|im_start|>system` in a user's message): keep
    them, escape them (a space after the first letter makes them text), or refuse the row. In a tool's answer and in a
    judge's prompt they are always escaped."""
    prompt_key: str = "prompt"
    """Column with the prompt: text or messages. Of this key and the next, `a.b` is the part b of column a."""
    query_key: str | None = None
    """Column with a second part of the prompt, which follows the first on a line of its own; a row may leave it empty."""
    system_key: str | None = None
    """Column with a row's own system message, which comes before `system_prompt`; a row may have none, or begin with one."""
    tools_key: str | None = None
    """Column with the functions that a row's chat template is passed as `tools`: a list, or JSON; a row may have none."""
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
    top_k: Annotated[int, at_least(0)] = 0
    """Of the sampled responses; 0 turns it off."""
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
    ends_with_data: bool = False
    """End the run with the data of `epochs`, even where `steps` are more. Every prompt that dynamic sampling draws counts;
    a step for which too few are left is not taken."""
    seed: Annotated[int, within(f"[0, {2**32 - 1}]")] = 0
    """Of the order of prompts and of every random draw."""
    device: Annotated[Literal["auto", "cpu", "cuda"], HARMLESS] = "auto"
    """`auto` takes GPUs where there are any."""
    umask: Annotated[str, Matches(UMASK, "three octal digits in quotes, as '077' or '027'"), HARMLESS] = "077"
    """Permissions that files and directories of the run lack: with '077' only their owner reads them, with '027' the group
    too."""
    save_every: Annotated[Annotated[int, at_least(0)] | Literal["epoch"], HARMLESS] = 0
    """Steps between checkpoints; 0 saves only at the end, `epoch` after as many steps as one pass over the data takes."""
    async_save: Annotated[bool, HARMLESS] = False
    """Copy a checkpoint to the host and go on while it is written; takes as much host memory as a rank's share of it."""
    keep: Annotated[int, above(0), HARMLESS] = 3
    """Checkpoints kept, the newest ones."""
    resume: Annotated[str, HARMLESS] = "auto"
    """auto: the newest whole checkpoint of run_dir; never; or the path of one."""
    accept_changes: Annotated[list[str], HARMLESS] = field(default_factory=list)
    """Keys or sections that may differ from those of the checkpoint that is resumed, although what is learned changes with
    them; a change that is not named here is refused."""
    eval_every: Annotated[Annotated[int, at_least(0)] | Literal["epoch"], HARMLESS] = 0
    """Steps between evaluations; 0: only before the first step and at the end, `epoch`: after as many steps as one pass over
    the data takes."""
    eval_before_train: Annotated[bool, HARMLESS] = True
    """Evaluate before the first step, when there is validation data."""
    stop_at: Annotated[dict[str, Annotated[float, Range()]], HARMLESS] = field(default_factory=dict)
    """End the run when an evaluation finds every one of these metrics at or above its value."""
    logged_samples_per_step: Annotated[int | Literal["all"], at_least(0), HARMLESS] = 4
    """Samples written to samples.jsonl each step, the first ones of as many groups. all: every sample with its tokens and
    their log-probs, values, weights and advantages, from which another program can compute the step's loss again; it costs
    a pass of the policy where nothing else needs one, a gather, and disk."""
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
    timeout_minutes: Annotated[float, within("[0.01, 43200]")] = 30.0
    """Longest wait for another rank, or for a server that takes weights, in one collective operation."""
    silent_seconds: Annotated[float, within("[5, 43200]")] = 60.0
    """A rank that gives no sign of life for so long, or that stands still while the others wait for it, is named and the run
    ends; so do ranks that hear of no other rank, or of no driver, for as long. Loading, compiling, sampling, rewards and
    saving have limits of their own. Raise it to hold a rank in a debugger."""
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

    @cached_property
    def roles(self) -> Roles:
        """The models of the run."""
        return roles_of(self)

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
        named = [self.model.path, *(role.path for role in self.roles.values())]
        judge = [self.reward.judge.model] if self.may_generate and self.reward.judge_layout else []
        adapters = [role.settings.lora.path for role in self.roles.learners.values() if role.settings.lora.rank]
        paths = [path for path in [*named, *judge, *adapters] if path]
        return {**dict.fromkeys([self.tokenizer, *map(self.described_by, paths)], False), **dict.fromkeys(paths, True)}

    @property
    def prompts_taken(self) -> int:
        """Prompts that an epoch counts for a step: those of one round of dynamic sampling, where rounds are counted."""
        algorithm = self.algorithm
        counts_rounds = algorithm.sampling_rounds == 1 or self.trainer.ends_with_data
        has_one = bool(algorithm.resolved.dynamic_sampling) and counts_rounds and not self.data.mixture
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
