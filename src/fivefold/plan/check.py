"""Everything about a run that can be known without torch: configuration -> faults and notes, in well under two seconds."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from fivefold.config import RunConfig, methods
from fivefold.config.schema import (
    AlgorithmConfig,
    CriticConfig,
    DataConfig,
    PolicyConfig,
    RewardConfig,
    RewardModelConfig,
    SamplingConfig,
)
from fivefold.models.config_json import read_config
from fivefold.models.families import load_spec
from fivefold.models.spec import ModelSpec
from fivefold.plan.memory import Memory, estimate_memory
from fivefold.reward.choose import choose_rewards


@dataclass(frozen=True)
class _Part:
    """One of the models that a run cuts over its layout."""

    where: str
    """Its section of the configuration."""
    key: str
    path: str
    settings: PolicyConfig
    value_head: bool = False
    """It ends in a value head."""


def _parts(config: RunConfig) -> list[_Part]:
    policy, reward_model = config.policy, config.reward.model
    parts = [_Part("policy", "model.path", config.model.path, policy)]
    if config.uses_critic:
        path = config.critic.path or config.model.path
        parts.append(_Part("critic", "critic.path", path, config.critic.settings(policy), value_head=True))
    if reward_model.path:
        parts.append(
            _Part("reward.model", "reward.model.path", reward_model.path, reward_model.settings(policy), value_head=True)
        )
    return parts


def check(config: RunConfig) -> tuple[list[str], list[str]]:
    """(what keeps the run from starting, what is worth knowing)."""
    faults: list[str] = []
    notes: list[str] = []
    shapes: dict[str, ModelSpec] = {}
    for part in _parts(config):
        again = part.where != "policy" and part.path == config.model.path
        if Path(part.path).is_dir():
            try:
                shapes[part.where] = shape = load_spec(part.path, part.value_head)
                shape.check_layout(config.layout, part.settings.megatron.pipeline_split)
                faults += _shape_faults(config, part, shape)
            except ValueError as error:
                faults.append(f"{part.key}: {error}")
            if not again and not any(Path(part.path).glob("*.safetensors")):
                faults.append(f"{part.key}: no *.safetensors in {part.path}")
        elif again:
            continue
        elif part.path.startswith((".", "/", "~")) or part.path.count("/") != 1:
            faults.append(f"{part.key}: no directory {part.path}")
        else:
            notes.append(f"model {part.path} is not here: it will be taken from the hub, and its sizes are not checked")
    if "policy" in shapes:
        if config.model.tokenizer is None and not any(Path(config.model.path).glob("tokenizer*")):
            faults.append(f"model.path: no tokenizer in {config.model.path}; name one in model.tokenizer")
        if "critic" in shapes and shapes["critic"].vocab != shapes["policy"].vocab:
            faults.append(
                f"critic.path must have the policy's vocabulary: {shapes['critic'].vocab} != {shapes['policy'].vocab}"
            )
        if not faults:
            notes += _shape_notes(config, shapes["policy"])
    if config.reference.path and config.reference.path.startswith((".", "/")) and not Path(config.reference.path).is_dir():
        faults.append(f"reference.path: no directory {config.reference.path}")
    if not config.data.train:
        faults.append("data.train names no file")
    for name in [*config.data.train, *config.data.val]:
        if not Path(name).is_file():
            faults.append(f"data: no file at {name}; `fivefold data` writes data sets")
    for where, names in [("reward.functions", config.reward.functions), *config.reward.by_source.items()]:
        try:
            if names:
                choose_rewards(config.reward, str(where))
        except ValueError as error:
            faults.append(f"{where}: {error}")
    if config.trainer.resume not in ("auto", "never") and not Path(config.trainer.resume).is_dir():
        faults.append(f"trainer.resume must be auto, never or a checkpoint directory: got {config.trainer.resume!r}")
    faults += _device_faults(config)
    updates = config.algorithm.updates_per_step * config.algorithm.ppo_epochs
    notes += methods.notes(config.algorithm.name, config.algorithm, updates)
    notes += [f"{key} has no effect: {reason}" for key, reason in ignored_keys(config, shapes)]
    return faults, notes


def _shape_faults(config: RunConfig, part: _Part, shape: ModelSpec) -> list[str]:
    """What this model cannot do with its settings."""
    found: list[str] = []
    where, settings, megatron = part.where, part.settings, part.settings.megatron
    trained = where != "reward.model"
    if trained and config.max_sequence_tokens > shape.max_positions:
        found.append(
            f"data.max_prompt_tokens + data.max_response_tokens = {config.max_sequence_tokens} is more than the "
            f"{shape.max_positions} positions of the model in {part.key}"
        )
    if trained and megatron.optimizer.get("optimizer_cpu_offload", False) and config.trainer.device == "cpu":
        found.append(
            f"{where}.megatron.optimizer.optimizer_cpu_offload needs a GPU: on the CPU the optimizer is there already"
        )
    if shape.moe is not None and config.layout.tp > 1 and not settings.sequence_parallel:
        found.append(
            f"policy.sequence_parallel must be true for a model with experts ({part.key}) and t > 1: Megatron-Core routes "
            "each token once"
        )
    if megatron.transformer_impl == "transformer_engine" and (shape.moe or shape.mla):
        found.append(f"{where}.megatron.transformer_impl must be torch for {shape.family}")
    if megatron.bridge_type != "native" and (shape.moe or megatron.pipeline_split.virtual_stages(config.layout) > 1):
        found.append(f"{where}.megatron.bridge_type must be native for models with experts and for virtual stages")
    if megatron.bridge_type != "native" and part.value_head:
        found.append(f"{part.key}: a value head needs megatron.bridge_type: native")
    gathers = megatron.transformer.get("moe_token_dispatcher_type") == "allgather"
    if gathers and megatron.pipeline.get("variable_seq_lengths", False):
        found.append("moe_token_dispatcher_type: allgather needs pipeline.variable_seq_lengths: false: leave it out")
    modules = megatron.transformer.get("recompute_modules") or []
    for module, present in (("mla_up_proj", shape.mla), ("moe", shape.moe), ("moe_act", shape.moe),
                            ("shared_experts", shape.moe and shape.moe.shared_ffn)):  # fmt: skip
        if module in modules and not present:
            found.append(f"{where}.megatron.transformer.recompute_modules: {shape.family} has no {module}")
    if where == "reward.model":
        # transformers leaves the labels of a classifier out where there are two, its default.
        labels = len(read_config(Path(part.path)).get("id2label") or range(2))
        if labels != 1:
            found.append(f"{part.key}: a reward model has one label: got {labels} in config.json")
    return found


def ignored_keys(config: RunConfig, shapes: dict[str, ModelSpec]) -> list[tuple[str, str]]:
    """(key, reason) of each key that was set and changes nothing; `shapes` are those of the models that are here."""
    found: list[tuple[str, str]] = []
    algorithm, name, critic = config.algorithm, config.algorithm.name, config.critic
    for where, own in (
        ("policy", config.policy),
        ("critic", critic if config.uses_critic else None),
        ("reward.model", config.reward.model if config.reward.model.path else None),
    ):
        if own is None:
            continue
        experts = where not in shapes or shapes[where].moe is not None
        if own.megatron is not None:
            told = own.megatron.options.ignored_keys(experts)
            found += [(key.replace("policy.", f"{where}."), reason) for key, reason in told]
            if where == "reward.model" and (own.megatron.ddp or own.megatron.optimizer):
                found.append(("reward.model.megatron.ddp and optimizer", "a reward model is not trained"))
        if isinstance(own, RewardModelConfig):
            continue
        if own.offload is not None and config.trainer.device == "cpu":
            reason = "on the CPU everything is in host memory already"
            found += [(f"{where}.offload.{part}", reason) for part in sorted(own.offload.parts)]
        if own.optimizer.schedule == "constant" and (own.optimizer.decay_steps is not None or own.optimizer.min_lr):
            found.append((f"{where}.optimizer.decay_steps and min_lr", "the schedule is constant"))
    found += methods.ignored_keys(name, algorithm)
    if algorithm.offline:
        if algorithm.group_size != AlgorithmConfig().group_size:
            found.append(("algorithm.group_size", f"{name} learns from the responses that stand in the data"))
        drawn, usual = config.engine.sampling, SamplingConfig()
        if (drawn.temperature, drawn.top_p, drawn.top_k) != (usual.temperature, usual.top_p, usual.top_k):
            found.append(("engine.sampling", f"{name} does not sample for training, and evaluation has its own (eval)"))
        if config.engine.max_logprob_diff is not None:
            found.append(("engine.max_logprob_diff", f"{name} does not sample for training"))
        if not config.may_generate and config.reward != RewardConfig():
            found.append(("reward", f"{name} scores nothing where nothing is sampled for evaluation"))
    for key, learners in _LEARNED_COLUMNS.items():
        if getattr(config.data, key) != getattr(DataConfig(), key) and name not in learners:
            found.append((f"data.{key}", f"{name} does not read it"))
    if config.reference.path and not _needs_reference(config):
        found.append(("reference.path", "the KL coefficient is 0"))
    if not config.uses_critic and critic != CriticConfig():
        found.append(("critic", f"{name} has no critic: set algorithm.credit: gae"))
    if not algorithm.resolved.dynamic_sampling and (
        algorithm.prompts_per_round is not None or algorithm.sampling_rounds != AlgorithmConfig().sampling_rounds
    ):
        found.append(("algorithm.sampling_rounds and prompts_per_round", "dynamic_sampling is off"))
    if not config.data.val and (config.eval.samples or config.eval.generate is not None):
        found.append(("eval.samples and generate", "there are no validation files"))
    elif config.eval.samples and not config.may_generate:
        found.append(("eval.samples", "nothing is sampled for evaluation: set eval.generate: true"))
    return found


_LEARNED_COLUMNS = {
    "response_key": ("sft",),
    "messages_key": ("sft",),
    "chosen_key": ("dpo",),
    "rejected_key": ("dpo",),
}
"""Columns of responses in the data, and the methods that read them."""


def _shape_notes(config: RunConfig, shape: ModelSpec) -> list[str]:
    algorithm = config.algorithm
    memory = memory_of(config, shape)
    return [
        f"model {shape.family}, {shape.parameters / 1e6:,.1f} M parameters",
        f"layout {config.layout}: {config.layout.world_size} ranks",
        f"{config.samples_per_step} samples a step, {algorithm.updates_per_step * algorithm.ppo_epochs} optimizer steps each",
        f"memory on the fullest rank about: {memory.describe()}",
    ]


def _needs_reference(config: RunConfig) -> bool:
    return config.algorithm.resolved.kl.coef != 0 or config.algorithm.name == "dpo"


def memory_of(config: RunConfig, shape: ModelSpec) -> Memory:
    """Memory of the fullest rank of a run with a policy of this shape."""
    others = {part.where: part for part in _parts(config)[1:] if Path(part.path).is_dir()}
    critic, reward_model = others.get("critic"), others.get("reward.model")
    return estimate_memory(
        shape,
        config.layout,
        dtype=config.policy.dtype,
        recompute=config.policy.recompute,
        tokens_per_micro_batch=config.policy.tokens_per_micro_batch,
        reference=_needs_reference(config),
        engine_sequences=config.engine.max_num_seqs if config.may_generate else 0,
        max_sequence_tokens=config.max_sequence_tokens,
        stages=config.policy.megatron.pipeline_split,
        offload=config.policy.offload.parts,
        critic=None
        if critic is None
        else (load_spec(critic.path, value_head=True), critic.settings.megatron.pipeline_split),
        critic_offload=frozenset() if critic is None else critic.settings.offload.parts,
        reward_model=None
        if reward_model is None
        else (load_spec(reward_model.path, value_head=True), reward_model.settings.megatron.pipeline_split),
    )


def _device_faults(config: RunConfig) -> list[str]:
    """More ranks than GPUs; under torchrun the ranks of other machines count too, so only its own world size is checked."""
    world = config.layout.world_size
    if "WORLD_SIZE" in os.environ:
        given = int(os.environ["WORLD_SIZE"])
        return [] if given == world else [f"layout {config.layout} needs {world} ranks: WORLD_SIZE is {given}"]
    gpus = len(list(Path("/proc/driver/nvidia/gpus").glob("*"))) if Path("/proc/driver/nvidia/gpus").is_dir() else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        gpus = min(gpus, len([item for item in visible.split(",") if item.strip()]))
    if config.trainer.device == "cuda" and gpus < world:
        return [
            f"layout {config.layout} needs {world} GPUs on this machine: found {gpus}; lower it or set trainer.device: cpu"
        ]
    if config.trainer.device == "auto" and 0 < gpus < world:
        return [
            f"layout {config.layout} needs {world} GPUs on this machine: found {gpus}; lower it or set trainer.device: cpu"
        ]
    return []
