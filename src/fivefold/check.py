"""Everything about a run that can be known without torch: configuration -> faults and notes, in well under two seconds."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from fivefold import methods
from fivefold.config import RunConfig
from fivefold.config.schema import AlgorithmConfig, CriticConfig, SamplingConfig
from fivefold.model_shape import ModelShape, load_shape, read_config
from fivefold.plan.estimate import Memory, estimate_memory
from fivefold.reward.choose import choose_rewards


def check(config: RunConfig) -> tuple[list[str], list[str]]:
    """(what keeps the run from starting, what is worth knowing)."""
    faults: list[str] = []
    notes: list[str] = []
    directory, experts = Path(config.model.path), True
    if directory.is_dir():
        try:
            shape = load_shape(directory)
            shape.check_layout(config.layout, config.policy.megatron.stages)
            notes += _shape_notes(config, shape)
            faults += _shape_faults(config, shape)
            experts = shape.experts is not None
            if config.max_sequence_tokens > shape.max_positions:
                faults.append(
                    f"data.max_prompt_tokens + data.max_response_tokens = {config.max_sequence_tokens} is more than the "
                    f"{shape.max_positions} positions of the model"
                )
        except ValueError as error:
            faults.append(f"model.path: {error}")
        if not any(directory.glob("*.safetensors")):
            faults.append(f"model.path: no *.safetensors in {directory}")
        if config.model.tokenizer is None and not any(directory.glob("tokenizer*")):
            faults.append(f"model.path: no tokenizer in {directory}; name one in model.tokenizer")
    elif config.model.path.startswith((".", "/", "~")) or config.model.path.count("/") != 1:
        faults.append(f"model.path: no directory {directory}")
    else:
        notes.append(f"model {config.model.path} is not here: it will be taken from the hub, and its sizes are not checked")
    for key, path in (
        ("reference.path", config.reference.path),
        ("critic.path", config.critic.path if config.uses_critic else None),
        ("reward.model.path", config.reward.model.path),
    ):
        if path and path.startswith((".", "/")) and not Path(path).is_dir():
            faults.append(f"{key}: no directory {path}")
    faults += _value_model_faults(config)
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
    updates = config.algorithm.updates_per_step * config.algorithm.epochs
    notes += methods.notes(config.algorithm.name, config.algorithm, updates)
    notes += [f"{key} has no effect: {reason}" for key, reason in without_effect(config, experts)]
    return faults, notes


def _value_model_faults(config: RunConfig) -> list[str]:
    """What the critic or the reward model, where they are here, cannot do with these settings."""
    found: list[str] = []
    policy, judge = config.policy, config.reward.model
    models = [("critic.path", config.critic.path or config.model.path, config.critic.settings(policy))] * config.uses_critic
    if judge.path:
        models.append(("reward.model.path", judge.path, replace(policy, megatron=judge.megatron or policy.megatron)))
    for key, path, settings in models:
        if not Path(path).is_dir():
            continue
        try:
            shape = load_shape(path, values=True)
            shape.check_layout(config.layout, settings.megatron.stages)
        except ValueError as error:
            found.append(f"{key}: {error}")
            continue
        if settings.megatron.bridge_type != "native":
            found.append(f"{key}: a value head needs megatron.bridge_type: native")
        if key == "critic.path" and (policy_shape := _shape_of(config)) and shape.vocab != policy_shape.vocab:
            found.append(f"{key} must have the policy's vocabulary: {shape.vocab} != {policy_shape.vocab}")
        labels = read_config(Path(path)).get("id2label")
        if key == "reward.model.path" and (labels is None or len(labels) != 1):
            found.append(f"{key}: a reward model has one label: got {2 if labels is None else len(labels)} in config.json")
    return found


def _shape_of(config: RunConfig) -> ModelShape | None:
    try:
        return load_shape(config.model.path) if Path(config.model.path).is_dir() else None
    except ValueError:
        return None


def _shape_faults(config: RunConfig, shape: ModelShape) -> list[str]:
    """What this model cannot do with these settings."""
    found, policy = [], config.policy
    if policy.megatron.optimizer.get("optimizer_cpu_offload", False) and config.trainer.device == "cpu":
        found.append(
            "policy.megatron.optimizer.optimizer_cpu_offload needs a GPU: on the CPU the optimizer is there already"
        )
    if shape.experts is not None and config.layout.tp > 1 and not policy.sequence_parallel:
        found.append(
            "policy.sequence_parallel must be true for a model with experts and t > 1: Megatron-Core routes each token once"
        )
    if policy.megatron.transformer_impl == "transformer_engine" and (shape.experts or shape.latent):
        found.append(f"policy.megatron.transformer_impl must be torch for {shape.family}")
    if policy.megatron.bridge_type != "native" and (shape.experts or policy.megatron.stages.virtual(config.layout) > 1):
        found.append("policy.megatron.bridge_type must be native for models with experts and for virtual stages")
    gathers = policy.megatron.transformer.get("moe_token_dispatcher_type") == "allgather"
    if gathers and policy.megatron.pipeline.get("variable_seq_lengths", False):
        found.append("moe_token_dispatcher_type: allgather needs pipeline.variable_seq_lengths: false: leave it out")
    modules = policy.megatron.transformer.get("recompute_modules") or []
    for module, present in (("mla_up_proj", shape.latent), ("moe", shape.experts), ("moe_act", shape.experts),
                            ("shared_experts", shape.experts and shape.experts.shared_ffn)):  # fmt: skip
        if module in modules and not present:
            found.append(f"policy.megatron.transformer.recompute_modules: {shape.family} has no {module}")
    return found


def without_effect(config: RunConfig, experts: bool) -> list[tuple[str, str]]:
    """(key, reason) of each key that was set and changes nothing in a run of a model with or without experts."""
    found = list(config.policy.megatron.options.without_effect(experts))
    if config.trainer.device == "cpu":
        reason = "on the CPU everything is in host memory already"
        found += [(f"policy.offload.{name}", reason) for name in sorted(config.policy.offload.parts)]
    optimizer = config.policy.optimizer
    if optimizer.schedule == "constant" and (optimizer.decay_steps is not None or optimizer.min_lr):
        found.append(("policy.optimizer.decay_steps and min_lr", "the schedule is constant"))
    algorithm, name = config.algorithm, config.algorithm.name
    found += methods.without_effect(name, algorithm)
    if algorithm.given:
        if algorithm.group_size != AlgorithmConfig().group_size:
            found.append(("algorithm.group_size", f"{name} learns from the responses that stand in the data"))
        drawn, usual = config.engine.sampling, SamplingConfig()
        if (drawn.temperature, drawn.top_p, drawn.top_k) != (usual.temperature, usual.top_p, usual.top_k):
            found.append(("engine.sampling", f"{name} does not sample for training, and evaluation has its own (eval)"))
        if config.engine.max_logprob_diff is not None:
            found.append(("engine.max_logprob_diff", f"{name} does not sample for training"))
        if (config.reward.functions or config.reward.by_source) and not config.data.val:
            found.append(("reward", f"{name} without validation files scores nothing"))
    if config.reference.path and not _needs_reference(config):
        found.append(("reference.path", "the KL coefficient is 0"))
    if not config.uses_critic and config.critic != CriticConfig():
        found.append(("critic", f"{name} has no critic: set algorithm.credit: gae"))
    if not algorithm.resolved.dynamic_sampling and (
        algorithm.prompts_per_round is not None or algorithm.sampling_rounds != AlgorithmConfig().sampling_rounds
    ):
        found.append(("algorithm.sampling_rounds and prompts_per_round", "dynamic_sampling is off"))
    if not config.data.val and config.eval.samples:
        found.append(("eval.samples", "there are no validation files"))
    return found


def _shape_notes(config: RunConfig, shape: ModelShape) -> list[str]:
    algorithm = config.algorithm
    memory = memory_of(config, shape)
    return [
        f"model {shape.family}, {shape.parameters / 1e6:,.1f} M parameters",
        f"layout {config.layout}: {config.layout.world_size} ranks",
        f"{config.samples_per_step} samples a step, {algorithm.updates_per_step * algorithm.epochs} optimizer steps each",
        f"memory on the fullest rank about: {memory.describe()}",
    ]


def _needs_reference(config: RunConfig) -> bool:
    return config.algorithm.resolved.kl.coef != 0 or config.algorithm.name == "dpo"


def memory_of(config: RunConfig, shape: ModelShape) -> Memory:
    """Memory of the fullest rank of a run with a policy of this shape."""
    critic, judge = config.critic.path or config.model.path, config.reward.model.path
    return estimate_memory(
        shape,
        config.layout,
        dtype=config.policy.dtype,
        recompute=config.policy.recompute,
        tokens_per_micro_batch=config.policy.tokens_per_micro_batch,
        reference=_needs_reference(config),
        engine_sequences=0 if config.algorithm.given and not config.data.val else config.engine.max_sequences,
        max_sequence_tokens=config.max_sequence_tokens,
        stages=config.policy.megatron.stages,
        offload=config.policy.offload.parts,
        critic=load_shape(critic, values=True) if config.uses_critic and Path(critic).is_dir() else None,
        critic_offload=config.critic.settings(config.policy).offload.parts,
        judge=load_shape(judge, values=True) if judge and Path(judge).is_dir() else None,
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
