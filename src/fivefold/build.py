"""Configuration -> built parts; the only reader of the whole configuration."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fivefold.algo import Objective
from fivefold.algo.values import ValueLoss
from fivefold.checkpoint.manager import Checkpoints
from fivefold.config import RunConfig, dump_yaml
from fivefold.data import Columns, PromptLoader, PromptSet, load_prompts
from fivefold.data.prompts import encode_conversation
from fivefold.data.tokenizer import load_tokenizer
from fivefold.distributed.ranks import Ranks
from fivefold.engines.transformers import TransformersEngine
from fivefold.layout import ParallelLayout
from fivefold.megatron.construct import DTYPES
from fivefold.megatron.mesh import Mesh, build_mesh
from fivefold.megatron.model import MegatronModel
from fivefold.models.spec import ModelSpec, load_spec
from fivefold.observability.run_logger import RunLogger
from fivefold.plan.check import memory_of
from fivefold.plan.memory import training_flops
from fivefold.reward.choose import choose_rewards
from fivefold.reward.pool import RewardPool
from fivefold.reward.reward_model import ModelReward
from fivefold.rollout.groups import DynamicSampling, Rewards
from fivefold.trainer.evaluation import EVALUATION_STREAM, Evaluation
from fivefold.trainer.run import Run
from fivefold.types import Prompt, Sample, Sampling

MAX_LOGPROB_DIFF = {"float32": 1e-3, "bfloat16": 5e-2}
"""Engine and trainer compute the same log-probs up to rounding: about 1e-6 a token in float32, 1e-2 in bfloat16."""


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
    shape = load_spec(directory)
    shape.check_layout(ranks.layout, config.policy.megatron.pipeline_split)
    algorithm = config.algorithm
    objective = Objective.of(algorithm.resolved)
    tokenizer = load_tokenizer(config.model.tokenizer or str(directory), config.model.trust_remote_code)
    training = _prompts(config, tokenizer, config.data.train, need_responses=algorithm.offline)
    validation = _prompts(config, tokenizer, config.data.val, first=config.eval.max_prompts) if config.data.val else None
    evaluation = None if validation is None else _evaluation(config, validation)
    scorer = RewardPool(config.reward)
    generates = evaluation is not None and evaluation.generate
    for prompt in ([] if algorithm.offline else training.prompts) + (evaluation.prompts if evaluation and generates else []):
        scorer.weights(prompt.source)
    sampler = PromptLoader(training.prompts, config.data.prompts_per_step, config.trainer.seed, config.data.shuffle)
    steps = config.trainer.steps or config.trainer.epochs * sampler.steps_per_epoch
    updates = algorithm.updates_per_step * algorithm.ppo_epochs
    warmup = config.critic.warmup_steps if objective.needs_critic else 0
    if warmup >= steps:
        raise ValueError(
            f"critic.warmup_steps must be below the {steps} steps of the run, or the policy never learns: {warmup}"
        )
    mesh = build_mesh(ranks, device, config.trainer.seed, config.launch.timeout_minutes)
    logger = RunLogger(config.run_dir, list(config.trainer.loggers), ranks.is_main, steps)
    logger.log(describe(config, shape, training, validation, objective, steps))
    bucket_mb = config.engine.sync_bucket_mb
    policy = MegatronModel(directory, config.policy, mesh, total_updates=(steps - warmup) * updates, bucket_mb=bucket_mb)
    reference = critic = reward_model = engine = None
    if objective.needs_reference:
        other = fetch_model(config.reference.path, ranks) if config.reference.path else directory
        reference = MegatronModel(other, config.policy, mesh)
        same_vocabulary("reference.path", reference.shape, shape)
    if objective.needs_critic:
        other = fetch_model(config.critic.path, ranks) if config.critic.path else directory
        critic = MegatronModel(
            other,
            config.critic.settings(config.policy),
            mesh,
            total_updates=steps * updates,
            bucket_mb=bucket_mb,
            value_head=True,
        )
        same_vocabulary("critic.path", critic.shape, shape)
    samples = not algorithm.offline or generates
    if config.reward.model.path and samples:
        reward_model = _judge(config, fetch_model(config.reward.model.path, ranks), mesh)
    if samples:
        engine = TransformersEngine(
            directory, tokenizer, device, DTYPES[config.policy.dtype], config.engine.max_num_seqs, logger.advance
        )
    chosen = algorithm.resolved
    refill = DynamicSampling(algorithm.sampling_rounds, algorithm.prompts_per_round or config.data.prompts_per_step)

    return Run(
        ranks=ranks,
        logger=logger,
        policy=policy,
        reference=reference,
        critic=critic,
        engine=engine,
        objective=objective,
        value_loss=ValueLoss(config.critic.value_clip),
        critic_warmup=warmup,
        sampler=sampler,
        given=algorithm.offline,
        samples_per_comparison=algorithm.samples_per_comparison,
        group_size=algorithm.group_size,
        refill=refill if chosen.dynamic_sampling else None,
        sampling=_sampling(config),
        rewards=Rewards(scorer, reward_model, config.reward.max_failed, logger.log),
        evaluation=evaluation,
        checkpoints=Checkpoints(config.run_dir, config.trainer.keep),
        run_dir=config.run_dir,
        steps=steps,
        seed=config.trainer.seed,
        updates_per_step=config.algorithm.updates_per_step,
        epochs=config.algorithm.ppo_epochs,
        max_logprob_diff=config.engine.max_logprob_diff or MAX_LOGPROB_DIFF[config.policy.dtype],
        save_every=config.trainer.save_every,
        eval_every=config.trainer.eval_every,
        eval_before_train=config.trainer.eval_before_train,
        stop_at=config.trainer.stop_at,
        samples_per_step=config.trainer.logged_samples_per_step,
        resume=config.trainer.resume,
        flops=partial(training_flops, shape),
        stop_requested=stop_requested,
        guard_every=config.trainer.guard.every,
        max_skipped=config.trainer.guard.max_skipped,
        profile_steps=config.trainer.profile.steps,
        profile_this_rank=ranks.rank in config.trainer.profile.ranks,
        resolved_config=dump_yaml(config),
    )


def same_vocabulary(key: str, other: ModelSpec, shape: ModelSpec) -> None:
    """Raise ValueError where a model cannot read the policy's tokens."""
    if other.vocab != shape.vocab:
        raise ValueError(f"{key} must have the policy's vocabulary: {other.vocab} != {shape.vocab}")


def _sampling(config: RunConfig) -> Sampling:
    drawn = config.engine.sampling
    return Sampling(
        max_tokens=config.data.max_response_tokens,
        temperature=1.0 if config.algorithm.offline else drawn.temperature,
        top_p=drawn.top_p,
        top_k=drawn.top_k,
        stop=tuple(drawn.stop),
        seed=config.trainer.seed,
    )


def _judge(config: RunConfig, directory: Path, mesh: Mesh) -> ModelReward:
    tokenizer = load_tokenizer(str(directory), config.model.trust_remote_code)
    model = MegatronModel(directory, config.reward.model.settings(config.policy), mesh, value_head=True)
    if model.value_head_is_new:
        raise ValueError(f"reward.model.path: {directory} has no value head (score.weight): it is not a sequence classifier")

    def encode(prompt: Prompt, sample: Sample) -> list[int]:
        return encode_conversation(prompt.messages, sample.text, tokenizer)

    return ModelReward(model, encode, config.reward.model.weight, model.shape.max_positions)


def _prompts(
    config: RunConfig, tokenizer: Any, files: list[str], need_responses: bool = False, first: int | None = None
) -> PromptSet:
    data, algorithm = config.data, config.algorithm
    return load_prompts(
        files,
        tokenizer,
        max_prompt_tokens=data.max_prompt_tokens,
        overlong=data.overlong_prompts,
        columns=Columns(data.prompt_key, data.response_key, data.messages_key, data.chosen_key, data.rejected_key),
        learns_from=algorithm.method.learns_from,
        need_responses=need_responses,
        max_response_tokens=data.max_response_tokens,
        first=first,
    )


def _evaluation(config: RunConfig, validation: PromptSet) -> Evaluation:
    sampling = _sampling(config)
    seeded = dataclasses.replace(sampling, seed=config.trainer.seed ^ EVALUATION_STREAM, top_k=0)
    generate = config.eval.generate
    if generate is None:
        generate = config.may_generate and _rewards_are_known(config, validation)
    given = [prompt for prompt in validation.prompts if prompt.responses]
    if not generate and not given:
        raise ValueError(
            "data.val: there is nothing to evaluate, the rows have no responses to learn from and nothing is sampled; "
            "leave data.val out, or name rewards and set eval.generate: true"
        )
    return Evaluation(
        validation.prompts,
        config.eval.samples,
        greedy=dataclasses.replace(seeded, temperature=0.0, top_p=1.0),
        sampled=dataclasses.replace(seeded, temperature=config.eval.temperature, top_p=config.eval.top_p),
        generate=generate,
        given=given,
        samples_per_comparison=config.algorithm.samples_per_comparison,
    )


def _rewards_are_known(config: RunConfig, validation: PromptSet) -> bool:
    """Methods that sample need rewards, and say so where one is missing; others evaluate without."""
    if not config.algorithm.offline:
        return True
    try:
        for source in {prompt.source for prompt in validation.prompts}:
            choose_rewards(config.reward, source)
    except ValueError:
        return False
    return True


def describe(
    config: RunConfig, shape: ModelSpec, training: PromptSet, validation: PromptSet | None, objective: Objective, steps: int
) -> str:
    """The start-up summary: model, layout, batch arithmetic, memory."""
    layout, algorithm, data = config.layout, config.algorithm, config.data
    group = algorithm.samples_per_prompt
    samples = data.prompts_per_step * group
    updates = algorithm.updates_per_step * algorithm.ppo_epochs
    longest = samples // algorithm.updates_per_step * config.max_sequence_tokens
    most = -(-longest // (layout.dp * config.policy.tokens_per_micro_batch))
    chosen = algorithm.resolved
    kl = f"{chosen.kl.estimator} x {objective.kl_coef:g} in the {chosen.kl.place}" if objective.kl_coef else "none"
    correction = "" if chosen.rollout_correction.name == "none" else f", correction {chosen.rollout_correction.name}"
    dropped = f", {training.dropped} longer than {data.max_prompt_tokens} tokens left out" if training.dropped else ""
    ranks = layout.describe_ranks()
    virtual = config.policy.megatron.pipeline_split.virtual_stages(layout)
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
        f"method   {algorithm.name}: advantage {chosen.advantage}, credit {chosen.credit}, surrogate {chosen.surrogate} by "
        f"{chosen.importance_sampling_level}, {chosen.aggregate}, KL {kl}{correction}",
        *_describe_others(config),
        f"data     {len(training.prompts)} prompts{dropped}"
        + (f"; {len(validation.prompts)} for validation" if validation else ""),
        f"batch    {data.prompts_per_step} prompts x {group} samples = {samples} samples a step; {updates} optimizer "
        f"step{'s' if updates > 1 else ''} of {samples // algorithm.updates_per_step} samples; at most {most} micro-batches "
        f"of {config.policy.tokens_per_micro_batch} tokens on each of {layout.dp} replicas",
        f"steps    {steps}",
        f"memory   on the fullest rank about: {memory_of(config, shape).describe()}",
    ]
    return "\n".join(lines)


def _describe_others(config: RunConfig) -> list[str]:
    lines, critic, reward_model = [], config.critic, config.reward.model
    if config.uses_critic:
        warmup = f", {critic.warmup_steps} steps of warm-up" if critic.warmup_steps else ""
        lines.append(f"critic   {critic.path or config.model.path}, learning rate {critic.optimizer.lr:g}{warmup}")
    if reward_model.path:
        lines.append(f"reward   model {reward_model.path} x {reward_model.weight:g}")
    return lines


def _describe_experts(shape: ModelSpec, layout: ParallelLayout) -> list[str]:
    if shape.moe is None:
        return []
    return [
        f"experts  {shape.moe.num_experts} in {sum(shape.moe.layers)} layers, {shape.moe.top_k} a token: "
        f"{layout.ep} expert x {layout.etp} expert-tensor x {layout.edp} replicas on each stage"
    ]
