"""Configuration -> built parts; the only reader of the whole configuration."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fivefold.algo import METHODS, Objective
from fivefold.checkpoint import Checkpoints
from fivefold.config import RunConfig, dump_yaml
from fivefold.data import PromptSet, Sampler, load_prompts
from fivefold.data.making import load_tokenizer
from fivefold.engines.transformers import TransformersEngine
from fivefold.evaluate import EVALUATION_STREAM, Evaluation
from fivefold.layout import ParallelLayout
from fivefold.megatron.build import DTYPES
from fivefold.megatron.mesh import build_mesh
from fivefold.megatron.model import MegatronModel
from fivefold.model_shape import ModelShape, load_shape
from fivefold.observe.observer import Observer
from fivefold.plan.estimate import estimate_memory, training_flops
from fivefold.ranks import Ranks
from fivefold.reward.pool import RewardPool
from fivefold.rollout import given_groups
from fivefold.run import Run
from fivefold.types import Group, Prompt, Sampling

MAX_LOGPROB_DIFF = {"float32": 1e-3, "bfloat16": 5e-2}
"""Engine and trainer compute the same log-probs up to rounding: about 1e-6 a token in float32, 1e-2 in bfloat16."""


def build_objective(config: RunConfig) -> Objective:
    """The method's row of the table, with what the configuration changes; raises ValueError for what it cannot have."""
    chosen = config.algorithm
    return METHODS[chosen.name]().override(
        by_std=chosen.normalize_by_std,
        clip_low=chosen.clip_low,
        clip_high=chosen.clip_high,
        aggregate=chosen.aggregate,
        dual_clip=chosen.dual_clip,
        ratio=chosen.ratio,
        entropy_coef=chosen.entropy_coef,
        kl_estimator=None if chosen.kl is None else chosen.kl.estimator,
        kl_coef=None if chosen.kl is None else chosen.kl.coef,
    )


def fetch_model(path: str, ranks: Ranks) -> Path:
    """A local model directory, or the hub's: the first rank of each node downloads, the others wait."""
    if Path(path).is_dir():
        return Path(path)
    local_rank = int(os.environ.get("LOCAL_RANK", ranks.rank))
    found: str | None = None
    for turn in (True, False):
        if (local_rank == 0) is turn:
            found = _download(path)
        ranks.barrier()
    assert found is not None
    return Path(found)


def _download(path: str) -> str:
    from huggingface_hub import snapshot_download

    wanted = ["*.safetensors", "*.json", "*.txt", "*.jinja", "tokenizer*"]
    try:
        return str(snapshot_download(path, allow_patterns=wanted))
    except Exception as error:
        # Whatever the hub's client raises (no such model, no network, no access), the user has one thing to look at.
        raise ValueError(f"{path!r} is neither a directory here nor a model that the hub gives: {error}") from error


def build_run(config: RunConfig, ranks: Ranks, device: torch.device, stop_requested: Callable[[], bool]) -> Run:
    """Everything `train` needs, built on this rank; raises ValueError for what cannot work, before any step."""
    torch.manual_seed(config.trainer.seed)
    if config.trainer.deterministic:
        torch.use_deterministic_algorithms(True)
        # Nothing reads memory that was never written: filling it would only cost time.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    directory = fetch_model(config.model.path, ranks)
    shape = load_shape(directory)
    shape.check_layout(ranks.layout, config.policy.megatron.stages)
    objective = build_objective(config)
    given = config.algorithm.name == "sft"
    tokenizer = load_tokenizer(config.model.tokenizer or str(directory), config.model.trust_remote_code)
    training = _prompts(config, tokenizer, config.data.train, need_response=given)
    validation = _prompts(config, tokenizer, config.data.val, first=config.eval.max_prompts) if config.data.val else None
    scorer = RewardPool(config.reward)
    for prompt in ([] if given else training.prompts) + (validation.prompts if validation else []):
        scorer.weights(prompt.source)
    sampler = Sampler(training.prompts, config.data.prompts_per_step, config.trainer.seed, config.data.shuffle)
    steps = config.trainer.steps or config.trainer.epochs * sampler.steps_per_epoch
    updates = steps * config.algorithm.updates_per_step * config.algorithm.epochs
    mesh = build_mesh(ranks, device, config.trainer.seed, config.launch.timeout_minutes)
    observer = Observer(config.run_dir, list(config.trainer.loggers), ranks.is_main, steps)
    observer.say(describe(config, shape, training, validation, objective, steps))
    policy = MegatronModel(directory, config.policy, mesh, total_updates=updates, bucket_mb=config.engine.sync_bucket_mb)
    reference = None
    if objective.needs_reference:
        other = fetch_model(config.reference.path, ranks) if config.reference.path else directory
        reference = MegatronModel(other, config.policy, mesh)
        if reference.shape.vocab != shape.vocab:
            raise ValueError(f"reference.path must have the policy's vocabulary: {reference.shape.vocab} != {shape.vocab}")
    engine = None
    if not given or validation is not None:
        engine = TransformersEngine(
            directory, tokenizer, device, DTYPES[config.policy.dtype], config.engine.max_sequences, observer.advance
        )
    sampling = Sampling(
        max_tokens=config.data.max_response_tokens,
        temperature=1.0 if given else config.engine.sampling.temperature,
        top_p=config.engine.sampling.top_p,
        top_k=config.engine.sampling.top_k,
        stop=tuple(config.engine.sampling.stop),
        seed=config.trainer.seed,
    )

    def given_groups_of(prompts: list[Prompt]) -> list[Group]:
        def encode(text: str) -> list[int]:
            return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]

        return given_groups(ranks, prompts, encode, sampling.max_tokens)

    return Run(
        ranks=ranks,
        observer=observer,
        policy=policy,
        reference=reference,
        engine=engine,
        objective=objective,
        sampler=sampler,
        given=given_groups_of if given else None,
        group_size=config.algorithm.group_size,
        sampling=sampling,
        scorer=scorer,
        evaluation=None if validation is None else _evaluation(config, validation, sampling),
        checkpoints=Checkpoints(config.run_dir, config.trainer.keep),
        run_dir=config.run_dir,
        steps=steps,
        seed=config.trainer.seed,
        updates_per_step=config.algorithm.updates_per_step,
        epochs=config.algorithm.epochs,
        max_logprob_diff=config.engine.max_logprob_diff or MAX_LOGPROB_DIFF[config.policy.dtype],
        save_every=config.trainer.save_every,
        eval_every=config.trainer.eval_every,
        eval_before=config.trainer.eval_before,
        stop_at=config.trainer.stop_at,
        samples_per_step=config.trainer.samples_per_step,
        resume=config.trainer.resume,
        flops=partial(training_flops, shape),
        stop_requested=stop_requested,
        guard_every=config.trainer.guard.every,
        max_skipped=config.trainer.guard.max_skipped,
        profile_steps=config.trainer.profile.steps,
        profile_this_rank=ranks.rank in config.trainer.profile.ranks,
        resolved_config=dump_yaml(config),
    )


def _prompts(
    config: RunConfig, tokenizer: Any, files: list[str], need_response: bool = False, first: int | None = None
) -> PromptSet:
    return load_prompts(
        files,
        tokenizer,
        max_prompt_tokens=config.data.max_prompt_tokens,
        overlong=config.data.overlong_prompts,
        prompt_key=config.data.prompt_key,
        response_key=config.data.response_key,
        need_response=need_response,
        first=first,
    )


def _evaluation(config: RunConfig, validation: PromptSet, sampling: Sampling) -> Evaluation:
    seeded = dataclasses.replace(sampling, seed=config.trainer.seed ^ EVALUATION_STREAM, top_k=0)
    return Evaluation(
        validation.prompts,
        config.eval.samples,
        greedy=dataclasses.replace(seeded, temperature=0.0, top_p=1.0),
        sampled=dataclasses.replace(seeded, temperature=config.eval.temperature, top_p=config.eval.top_p),
    )


def describe(
    config: RunConfig, shape: ModelShape, training: PromptSet, validation: PromptSet | None, objective: Objective, steps: int
) -> str:
    """The start-up summary: model, layout, batch arithmetic, memory."""
    layout, algorithm, data = config.layout, config.algorithm, config.data
    group = 1 if algorithm.name == "sft" else algorithm.group_size
    samples = data.prompts_per_step * group
    updates = algorithm.updates_per_step * algorithm.epochs
    longest = samples // algorithm.updates_per_step * config.max_sequence_tokens
    most = -(-longest // (layout.dp * config.policy.tokens_per_micro_batch))
    memory = estimate_memory(
        shape,
        layout,
        dtype=config.policy.dtype,
        recompute=config.policy.recompute,
        tokens_per_micro_batch=config.policy.tokens_per_micro_batch,
        reference=objective.needs_reference,
        engine_sequences=0 if algorithm.name == "sft" and validation is None else config.engine.max_sequences,
        max_sequence_tokens=config.max_sequence_tokens,
        stages=config.policy.megatron.stages,
        offload=config.policy.offload.parts,
    )
    kl = f"{objective.kl_estimator} x {objective.kl_coef:g}" if objective.needs_reference else "none"
    dropped = f", {training.dropped} longer than {data.max_prompt_tokens} tokens left out" if training.dropped else ""
    ranks = layout.describe_ranks()
    virtual = config.policy.megatron.stages.virtual(layout)
    sequence = "with" if config.policy.sequence_parallel and layout.tp > 1 else "without"
    lines = [
        f"model    {config.model.path}: {shape.family}, {shape.parameters / 1e6:,.1f} M parameters, {shape.layers} layers, "
        f"vocabulary {shape.vocab}, {config.policy.dtype}",
        f"layout   {layout}: {layout.world_size} ranks = {layout.dp} replicas x {layout.tp} tensor ({sequence} sequence "
        f"parallelism) x {layout.cp} context x {layout.pp} pipeline"
        + (f" of {virtual} virtual stages each" if virtual > 1 else ""),
        *_describe_experts(shape, layout),
        *(f"         {line}" for line in ranks[:8]),
        *([f"         ... and {len(ranks) - 8} more"] if len(ranks) > 8 else []),
        f"method   {algorithm.name}: {objective.aggregate}, KL {kl}",
        f"data     {len(training.prompts)} prompts{dropped}"
        + (f"; {len(validation.prompts)} for validation" if validation else ""),
        f"batch    {data.prompts_per_step} prompts x {group} samples = {samples} samples a step; {updates} optimizer "
        f"step{'s' if updates > 1 else ''} of {samples // algorithm.updates_per_step} samples; at most {most} micro-batches "
        f"of {config.policy.tokens_per_micro_batch} tokens on each of {layout.dp} replicas",
        f"steps    {steps}",
        f"memory   on the fullest rank about: {memory.describe()}",
    ]
    return "\n".join(lines)


def _describe_experts(shape: ModelShape, layout: ParallelLayout) -> list[str]:
    if shape.experts is None:
        return []
    return [
        f"experts  {shape.experts.count} in {sum(shape.experts.layers)} layers, {shape.experts.chosen} a token: "
        f"{layout.ep} expert x {layout.etp} expert-tensor x {layout.edp} replicas on each stage"
    ]
