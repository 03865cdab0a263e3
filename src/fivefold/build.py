"""Builds all parts of a run from its configuration, and hands each the sections that it needs."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from fivefold.algo.advantages import ADVANTAGES
from fivefold.algo.methods import LearnsFrom
from fivefold.algo.objective import Objective
from fivefold.algo.values import ValueLoss
from fivefold.backends import BACKENDS, Meshes
from fivefold.build_engine import as_engines_know, build_engine, start_judges
from fivefold.checkpoint.checkpoints import RunState
from fivefold.checkpoint.fingerprint import Fingerprint
from fivefold.config import RunConfig, dump_yaml
from fivefold.config.environment import REWARD
from fivefold.config.learners import PolicyConfig
from fivefold.config.mixture import counts, domains_of
from fivefold.config.models_read import models_read
from fivefold.config.roles import Role
from fivefold.config.schema import DataConfig
from fivefold.data.data_sets import cache_of, hub_names, local_file, with_files
from fivefold.data.dialog import Dialog
from fivefold.data.mixture import MixedLoader, places_by_domain
from fivefold.data.prompt_cache import is_large, open_prompts, store_prompts
from fivefold.data.prompt_loader import Loader, PromptLoader
from fivefold.data.prompts import PromptSet, Reading, encode_conversation, load_prompts
from fivefold.data.rows import Columns
from fivefold.data.tokenizer import check_config, load_tokenizer
from fivefold.distributed.calls import call_once, call_once_a_machine
from fivefold.distributed.ranks import Ranks
from fivefold.distributed.redealing import on_replicas_of
from fivefold.distributed.scratch import name_shared_memory, scratch_directory
from fivefold.engines.servers.server_process import ServerProcess
from fivefold.engines.weight_sync import sleeping_after
from fivefold.environments.pool import EnvironmentPool
from fivefold.errors import UserError, shown
from fivefold.hub import commit_of, model_snapshot
from fivefold.interfaces import Engine, FrozenModel, Model, RolloutSource
from fivefold.keys.identity import with_absolute_paths
from fivefold.megatron.model import WithoutAdapters
from fivefold.models.end_tokens import EndTokens, pad_token
from fivefold.models.families import load_spec
from fivefold.models.overrides import overridden
from fivefold.models.spec import ModelSpec
from fivefold.models.torch_dist import find_torch_dist
from fivefold.observability.run_logger import RunLogger
from fivefold.observability.start_up import start_up
from fivefold.observability.warnings import Facts, Warnings
from fivefold.plan.data_files import unused_sources
from fivefold.plan.memory import training_flops
from fivefold.plan.processes import decide, with_processes
from fivefold.plan.summary import describe
from fivefold.reward.choose import choose_rewards, columns_read, forms_by_source
from fivefold.reward.code.confine import layers
from fivefold.reward.manager import Closing, RewardManager
from fivefold.reward.pool import RewardPool
from fivefold.reward.reward_model import ModelReward, scored_part
from fivefold.reward.rules import ground_truth_fault, runs_programs
from fivefold.rollout.agents import Agents
from fivefold.rollout.asynchronous import AsyncRollouts
from fivefold.rollout.conversations import Conversations
from fivefold.rollout.endpoint import Endpoint
from fivefold.rollout.generation import Generator
from fivefold.rollout.logprob_steps import LogprobSteps
from fivefold.rollout.packing import pack
from fivefold.rollout.sessions import Dialogs
from fivefold.rollout.sources import DatasetRollouts, DynamicSampling, EngineRollouts, ExpertRollouts, PromptQueue
from fivefold.rollout.staleness import Admission
from fivefold.rollout.stats import BatchPlan, Informative, gather_stats, nothing_skipped
from fivefold.trainer.checks import AdapterGuard, Bounds, LogprobGate, Probe, SkipGuard
from fivefold.trainer.evaluation import Evaluation, EvaluationSet
from fivefold.trainer.learners import CriticLearner, Learner, PolicyLearner, ProcessRewardLearner
from fivefold.trainer.minibatches import MiniBatches
from fivefold.trainer.models import Models
from fivefold.trainer.run import Run
from fivefold.trainer.step_work import WORK
from fivefold.trainer.trainer import Trainer
from fivefold.types import Prompt, RolloutStats, Sample, Sampling, TokenBatch

MAX_LOGPROB_KL = {"float32": 5e-7, "float16": 2e-4, "bfloat16": 1e-2}
"""Bounds on the KL divergence per token between engine and trainer: a multiple of the measured rounding error
(docs/engines.md)."""
PROBE_STREAM = 0x960BE
"""Mixed into the seed, so the samples for a log-prob comparison alone use other random numbers than training."""
_PROBE = 16, 64
"""Minimum number of responses sampled for the comparison of log-probs alone, and their maximum length in tokens."""


def fetch_models(config: RunConfig, ranks: Ranks, commits: Mapping[str, str]) -> dict[str, Path]:
    """Return the local directory of each model in the configuration; collective.

    For a model on the hub, the first rank of each node downloads the commit in `commits`, or the latest, and the others
    wait.
    """
    directories: dict[str, Path] = {}
    for name, wanted in models_read(config).items():
        if Path(name).is_dir():
            directories[name] = Path(name)
            continue
        commit = call_once(ranks, partial(_latest_commit, name, wanted, commits.get(name)))
        directories[name] = Path(call_once_a_machine(ranks, partial(_snapshot, name, wanted, commit)))
        if config.model.overrides and name == config.model.described_by(config.model.path):
            directories[name] = overridden(directories[name], config.model.overrides)
    return directories


def _snapshot(name: str, wanted: Sequence[str], commit: str) -> str:
    return str(model_snapshot(name, wanted, commit))


def _latest_commit(name: str, wanted: Sequence[str], commit: str | None) -> str:
    return commit_of(model_snapshot(name, wanted, commit))


def fetch_data(data: DataConfig, ranks: Ranks, commits: Mapping[str, str]) -> dict[str, Path]:
    """Return the local file of each data set on the hub; collective.

    The first rank of each node downloads the commit in `commits`, or the latest, and the others wait.
    """
    files: dict[str, Path] = {}
    for key, name in hub_names(data):
        fetch = partial(_data_file, name, key, cache_of(data))
        commit = commit_of(Path(call_once(ranks, partial(fetch, commits.get(name)))))
        files[name] = Path(call_once_a_machine(ranks, partial(fetch, commit)))
    return files


def _data_file(name: str, key: str, cache: Path, commit: str | None) -> str:
    return str(local_file(name, key, cache, commit))


def build_run(
    config: RunConfig, ranks: Ranks, device: torch.device, checkpoint: Path | None, is_evaluation: bool = False
) -> Run:
    """Build everything that `train` needs on this rank; raises ValueError for what cannot work, before any step.

    Hub models have the commits of `checkpoint` if the run resumes from one or evaluates one. An evaluation logs no summary
    of the training.
    """
    torch.manual_seed(config.trainer.seed)
    if config.trainer.deterministic:
        torch.use_deterministic_algorithms(True)
        # No code reads uninitialized memory, so filling it would only cost time.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    commits = {} if checkpoint is None else RunState.read(checkpoint).commits
    directories, data_files = fetch_models(config, ranks, commits), fetch_data(config.data, ranks, commits)
    directory = directories[config.model.described_by(config.model.path)]
    spec = load_spec(directory)
    spec.check_layout(ranks.layout, config.policy.megatron.pipeline_split)
    processes = ""
    if config.engine.processes == "auto":
        count, processes = ranks.broadcast_from_main(decide(config, spec) if ranks.is_main else None)
        config = with_processes(config, count)
    known = as_engines_know(directory)
    check_config(known, config.model.trust_remote_code)
    tokenizer_directory = directories[config.model.tokenizer_path]
    tokenizer = load_tokenizer(str(tokenizer_directory), config.model.trust_remote_code)
    local = replace(config, data=with_files(config.data, data_files))
    conversations = environments = endpoint = None
    if config.environment.is_active:
        environments = EnvironmentPool(config.environment)
        conversations, local = build_conversations(local, tokenizer, directory, environments)
        if config.environment.agent is not None:
            endpoint = build_endpoint(config, conversations.dialog)
            named = (config.reward.functions, *config.reward.by_source.values())
            conversations = Agents(
                config.environment,
                conversations.dialog,
                environments,
                config.max_sequence_tokens,
                endpoint,
                needs_reward=any(weights.get(REWARD) for weights in named),
            )
    training, evaluation_set = build_data(local, tokenizer, tokenizer_directory, ranks)
    first_prompts = check_rewards(config, training, evaluation_set)
    loader = build_loader(config, training)
    of_data = config.trainer.epochs * loader.steps_per_epoch
    steps = config.trainer.steps or of_data
    steps = min(steps, of_data) if config.trainer.ends_with_data else steps
    if "critic" in config.roles and config.critic.warmup_steps >= steps:
        raise UserError(
            f"critic.warmup_steps must be below the {steps} steps of the run, or the policy never learns: "
            f"got {config.critic.warmup_steps}"
        )
    meshes = Meshes(ranks, device, config.trainer.seed, config.launch.timeout_minutes, config.policy.replicas)
    settle = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    logger = RunLogger(
        config.run_dir,
        list(config.trainer.loggers),
        ranks.is_main,
        steps,
        settle,
        config.tracking.wait_seconds,
        ranks.heartbeat.stages,
        Warnings(config.trainer.warnings, facts_of(config, {prompt.source for prompt in first_prompts})),
        config.trainer.verbosity,
        config.trainer.log_file,
    )
    objective = Objective.of(config.algorithm.resolved)
    validation = 0 if evaluation_set is None else len(evaluation_set.prompts)
    sizes = {"prompts": len(training.prompts), "dropped": training.dropped, "validation": validation}
    if not is_evaluation:
        logger.log(describe(config, spec, steps=steps, processes=processes, **sizes), "normal")
    judges: list[ServerProcess] = []
    reward, judge_files = config.reward, None
    if reward.judge_layout is not None and config.may_generate:
        judge_files = directories[str(reward.judge.model)]
        judges, urls = start_judges(config, judge_files, ranks, device)
        reward = replace(reward, judge=replace(reward.judge, url=urls))
    pool = RewardPool(reward, judge_files)
    start_reward_pool(pool, first_prompts, logger.log)
    if first_prompts:
        for key, reason in unused_sources(config.data, config.reward, {prompt.source for prompt in first_prompts}).items():
            logger.log(f"{key} has no effect: {reason}", "normal")
    start_up.mark("data")
    models = build_models(config, directories, meshes, objective, {"run": steps, "data": of_data}, logger)
    start_up.mark("models")
    engine = generator = reward_model = None
    generates = not config.algorithm.offline or (evaluation_set is not None and evaluation_set.generate)
    if generates and config.reward.model.path:
        reward_model = build_reward_model(config, directories, meshes)
    servers: list[Closing] = [*judges, *(server for server in (endpoint, environments) if server is not None)]
    rewards = RewardManager(pool, ranks, reward_model, config.reward.max_failed, logger.log, servers)
    if generates:
        # An engine measures the free device memory when it starts.
        with models.on_device():
            engine = build_engine(config, known, tokenizer, ranks, device, logger.log)
            start_up.mark("engine")
            if checkpoint is not None and (checkpoint / WORK).is_dir():
                # The run resumes between two optimizer steps, which need the device first.
                engine.sleep()
        generator = Generator(engine, tokenizer, rewards, logger, partial(_refresh, models, engine), conversations)
    plan = build_plan(config, spec, objective)
    probe = None
    if generator is not None and (checkpoint is not None or config.rollout.max_staleness is not None):
        probe = partial(sample_probe, config, training, generator, models, plan)
    gate = build_gate(config, ranks, logger, probe)
    rollouts = build_rollouts(config, loader, generator, ranks, logger, objective, steps, gate)
    if config.data.expert:
        experts = PromptQueue(build_expert_loader(local, tokenizer, tokenizer_directory, ranks), logger, "expert/epoch")
        rollouts = ExpertRollouts(
            rollouts,
            experts,
            ranks,
            groups=config.data.prompts_per_step,
            per_step=config.data.expert_per_step,
            updates=config.algorithm.updates_per_step,
        )
    evaluation = None
    if evaluation_set is not None:
        evaluation = Evaluation(evaluation_set, generator, objective, ranks, logger, plan)
    return Run(
        ranks=ranks,
        logger=logger,
        models=models,
        engine=None if config.algorithm.offline else engine,
        rewards=rewards,
        rollouts=rollouts,
        plan=plan,
        objective=objective,
        updates=config.algorithm.updates,
        gate=gate,
        trainer=Trainer(
            config.trainer,
            config.run_dir,
            steps,
            loader.steps_per_epoch,
            ranks,
            logger,
            models,
            objective,
            rollouts,
            evaluation,
            plan,
            flops=partial(training_flops, spec, lora=config.policy.lora.spec),
            resolved_config=dump_yaml(portable(config)),
            # Only one rank compares and writes it, because this reads every file of the run.
            fingerprint=Fingerprint.of(config, steps, directories | data_files) if ranks.is_main else Fingerprint(),
            resume_from=checkpoint,
            dialog=None if conversations is None else conversations.dialog,
        ),
    )


def build_conversations(
    config: RunConfig, tokenizer: Any, directory: Path, environments: EnvironmentPool
) -> tuple[Conversations, RunConfig]:
    """Return what samples trajectories of several turns, and the configuration whose prompts name the tools."""
    data, tools = config.data, environments.start()
    template = data.chat_template_kwargs | ({} if data.chat_template is None else {"chat_template": data.chat_template})
    ends = EndTokens.of(directory, tokenizer.eos_token_id).used | {*config.engine.sampling.stop_token_ids}
    dialog = Dialog.of(tokenizer, template, ends, tools, config.environment.history)
    conversations = Conversations(config.environment, dialog, environments, config.max_sequence_tokens)
    named = data.chat_template_kwargs | ({"tools": tools} if tools else {})
    return conversations, replace(config, data=replace(data, chat_template_kwargs=named))


def build_endpoint(config: RunConfig, dialog: Dialog) -> Endpoint:
    """Return the endpoint for the agents of this rank, which listens."""
    environment = config.environment
    endpoint = Endpoint(
        Dialogs(dialog), environment.endpoint, config.model.path, environment.max_turns, config.max_sequence_tokens
    )
    endpoint.start(int(os.environ.get("LOCAL_RANK", "0")))
    return endpoint


def facts_of(config: RunConfig, sources: Collection[str]) -> Facts:
    """Return what the warnings of a run say about its configuration; `sources` are those of the scored prompts."""
    return Facts(
        config.data.max_response_tokens,
        config.algorithm.group_size,
        ADVANTAGES[config.algorithm.resolved.advantage],
        forms_by_source(config.reward),
        sorted(sources),
        config.algorithm.offline,
        config.environment.is_active,
    )


def portable(config: RunConfig) -> RunConfig:
    """Return the configuration with absolute paths and an explicit run directory, which means the same in every working
    directory."""
    trainer = replace(config.trainer, run_dir=str(config.run_dir.absolute()))
    if trainer.resume not in ("auto", "never"):
        trainer = replace(trainer, resume=str(Path(trainer.resume).absolute()))
    return replace(with_absolute_paths(config), trainer=trainer)


def build_gate(config: RunConfig, ranks: Ranks, logger: RunLogger, probe: Probe | None) -> LogprobGate:
    """Build the check of the engine's log-probs against the trainer's; `probe` samples for this check alone, before the
    first step."""
    engine, dtypes = config.engine, (config.policy.dtype, config.engine.dtype or config.policy.dtype)
    bounds = Bounds(engine.max_logprob_kl or max(MAX_LOGPROB_KL[dtype] for dtype in dtypes), engine.max_logprob_diff)
    return LogprobGate(ranks, bounds, config.algorithm.offline or engine.sampling.is_changed, logger.log, probe)


def sample_probe(
    config: RunConfig, training: PromptSet, generator: Generator, models: Models, plan: BatchPlan
) -> tuple[TokenBatch, RolloutStats]:
    """Sample a few short responses without rewards from the current policy. Collective."""
    (count, longest), sampling, engine = _PROBE, _sampling(config), generator.engine
    some = range(min(max(count, engine.replica.count), len(training.prompts)))
    sampling = replace(sampling, max_tokens=max(sampling.min_tokens, min(longest, sampling.max_tokens)))
    models.sync(engine)
    with models.away(), sleeping_after(engine):
        prompts = [training.prompts[place] for place in some]
        groups = generator.sample(prompts, 1, sampling, (config.trainer.seed ^ PROBE_STREAM, 0), is_scored=False)
    probe_plan = replace(plan, updates_per_step=1, samples_per_comparison=1, skipped=nothing_skipped)
    stats = gather_stats(groups, models.ranks, probe_plan)
    return pack(groups, stats, models.ranks, probe_plan), stats


def build_data(config: RunConfig, tokenizer: Any, directory: Path, ranks: Ranks) -> tuple[PromptSet, EvaluationSet | None]:
    """Return the training prompts and the evaluation set, if there are validation files; `directory` is the tokenizer's."""
    read = partial(_prompts, config, tokenizer, directory, ranks)
    training = read(config.data.train, need_responses=config.algorithm.offline)
    if not config.data.val:
        return training, None
    return training, _evaluation_set(config, read(config.data.val, first=config.eval.max_prompts))


def build_loader(config: RunConfig, training: PromptSet) -> Loader[Prompt]:
    """Build the loader of the training prompts; raises ValueError if a domain of the mixture has too few prompts."""
    data, seed = config.data, config.trainer.seed
    if not data.mixture:
        return PromptLoader(training.prompts, config.prompts_taken, seed, data.shuffle)
    places = places_by_domain((source for _, source, _ in training.ground_truths()), domains_of(data.domains))
    return MixedLoader(training.prompts, places, counts(data.mixture, data.prompts_per_step), seed, data.shuffle)


def build_expert_loader(config: RunConfig, tokenizer: Any, directory: Path, ranks: Ranks) -> Loader[Prompt]:
    """Build the loader of the expert's responses, whose conversations keep their own system messages."""
    plain = replace(config, data=replace(config.data, system_prompt=None))
    experts = _prompts(plain, tokenizer, directory, ranks, config.data.expert, need_responses=True, learns_from="responses")
    if len(experts.prompts) < config.data.expert_per_step:
        raise UserError(
            f"data.expert_per_step must not be larger than the expert's responses: got {config.data.expert_per_step} for "
            f"{len(experts.prompts)}"
        )
    return PromptLoader(experts.prompts, config.data.expert_per_step, config.trainer.seed, config.data.shuffle)


def check_rewards(config: RunConfig, training: PromptSet, evaluation_set: EvaluationSet | None) -> list[Prompt]:
    """Return the first prompt of each scored data source; raises ValueError if a reward is unknown or cannot be earned."""
    scored = [] if config.algorithm.offline else [training]
    if evaluation_set is not None and evaluation_set.generate:
        scored.append(PromptSet(evaluation_set.prompts, 0))
    names: dict[str, list[str]] = {}
    first: list[Prompt] = []
    for prompts in scored:
        for place, (number, source, ground_truth) in enumerate(prompts.ground_truths()):
            if source not in names:
                names[source] = list(choose_rewards(config.reward, source).weights)
                first.append(prompts.prompts[place])
            for name in names[source]:
                if fault := ground_truth_fault(name, ground_truth, config.reward.code.trusted_tests):
                    raise UserError(f"prompt {number} of {source}: ground_truth {fault}: got {shown(ground_truth)}")
    return first


def start_reward_pool(pool: RewardPool, prompts: list[Prompt], log: Callable[[str], None]) -> None:
    """Call every reward function once and log how; raises ValueError for one that cannot be loaded or raises."""
    error = pool.start([(prompt, Sample([], [], prompt.ground_truth, "answered", 0)) for prompt in prompts])
    if error is not None:
        raise UserError(f"a reward function failed on a trial, in which the response was the ground truth:\n{error}")
    for line in pool.forms:
        log(f"reward   {line}")
    if any(runs_programs(name) for prompt in prompts for name in pool.weights(prompt.source)):
        log(f"sandbox  programs in responses are locked up by {layers()}")


def build_models(
    config: RunConfig,
    directories: Mapping[str, Path],
    meshes: Meshes,
    objective: Objective,
    steps: Mapping[str, int],
    logger: RunLogger,
) -> Models:
    """Build every model of the run except a reward model that reads texts.

    `directories` has the models' paths, `steps` the length for each value of `optimizer.schedule_over`.
    """
    ranks, roles, spec = meshes.ranks, config.roles, load_spec(directories[config.model.described_by(config.model.path)])
    placed: dict[str, tuple[Ranks, Any]] = {}
    warmup = config.critic.warmup_steps if "critic" in roles else 0
    engine_dtype = config.engine.dtype or config.policy.dtype
    lost: AdapterGuard | None = None

    def learning(role: Role) -> dict[str, Any]:
        if not role.is_learner:
            return {}
        lora, updates = role.settings.lora, role.updates_per_step
        adapters = {"adapters": directories.get(lora.path or ""), "seed": config.trainer.seed} if lora.rank else {}
        length = steps[role.settings.optimizer.schedule_over]
        total = (length - (warmup if role.name == "policy" else 0)) * updates
        return {
            "updates_per_step": updates, "total_updates": total, "bucket_mb": config.engine.sync_bucket_mb, **adapters,
            **({"stored_in": engine_dtype} if role.name == "policy" else {}),
        }  # fmt: skip

    models: dict[str, FrozenModel] = {}
    for name, role in roles.items():
        if role.reads_text:
            continue
        if role.served_by is not None:
            model_ranks, model = placed[role.served_by]
            base = None if model is None else cast(Model, WithoutAdapters(model))
            models[name] = on_replicas_of(ranks, base, model_ranks) if role.without_adapters else models[role.served_by]
            continue
        directory, torch_dist = directories[config.model.described_by(role.path)], find_torch_dist(directories[role.path])
        if name != "policy":
            same_vocabulary(role.path_key, load_spec(directory), spec)
        placed[name] = model_ranks, model = _on_its_ranks(
            meshes,
            roles.settings(name),
            role.first_rank,
            directory=directory,
            torch_dist=torch_dist,
            value_head=role.has_value_head,
            trust_remote_code=config.model.trust_remote_code,
            **learning(role),
        )
        if name == "policy" and role.settings.lora.rank and not config.algorithm.offline:
            measure = None if model is None else model.lost_to_rounding
            lost = AdapterGuard(measure, model_ranks, role.settings.lora.max_lost, engine_dtype, logger.record, logger.log)
        models[name] = on_replicas_of(ranks, model, model_ranks)
    return Models(
        models,
        ranks,
        SkipGuard(ranks, config.trainer.guard.max_skipped, config.run_dir, logger.log),
        build_learners(config, objective, ranks),
        served_by={name: role.served_by for name, role in roles.items() if role.served_by is not None},
        stage=logger.stage,
        updates=config.algorithm.updates,
        router_replay=config.policy.router_replay,
        adapters=lost,
    )


def build_learners(config: RunConfig, objective: Objective, ranks: Ranks) -> dict[str, Learner]:
    """Return the learner of each trained model, in the order in which they start."""
    algorithm, roles = config.algorithm, config.roles
    minibatches = MiniBatches(objective, algorithm.ppo_epochs)
    warmup = config.critic.warmup_steps if "critic" in roles else 0
    learners: dict[str, Learner] = {}
    if objective.process.is_active:
        learners["prm"] = ProcessRewardLearner(objective.process, ranks, "prm", roles["prm"].updates_per_step)
    if "critic" in roles:
        value_loss, per_update = ValueLoss(config.critic.value_clip), algorithm.values_per == "update"
        learners["critic"] = CriticLearner(objective, minibatches, ranks, value_loss, per_update)
    learners["policy"] = PolicyLearner(objective, minibatches, ranks, config.trainer.seed, first_step=warmup)
    return learners


def _on_its_ranks(meshes: Meshes, settings: PolicyConfig, first_rank: int, **arguments: Any) -> tuple[Ranks, Any]:
    """Return the ranks of a model, which begin at `first_rank`, and this rank's shard of it (None without one)."""
    model_ranks, mesh = meshes.of(settings.layout, first_rank, settings.replicas)
    build = BACKENDS[settings.layout.backend].model
    return model_ranks, None if mesh is None else build(policy=settings, mesh=mesh, **arguments)


def _refresh(models: Models, engine: Engine) -> None:
    """Send new weights in the middle of a rollout to an engine that has lost them."""
    engine.sleep()
    models.sync(engine)
    # The rollout continues with the device memory that it had.
    models.policy.offload()


def build_rollouts(
    config: RunConfig,
    loader: Loader[Prompt],
    generator: Generator | None,
    ranks: Ranks,
    logger: RunLogger,
    objective: Objective,
    steps: int,
    gate: LogprobGate,
) -> RolloutSource:
    """Build the source of the groups for each step."""
    algorithm, rollout = config.algorithm, config.rollout
    of_data = config.trainer.epochs * loader.steps_per_epoch * config.prompts_taken
    prompts = PromptQueue(loader, logger, end=of_data if config.trainer.ends_with_data else None)
    if algorithm.offline:
        return DatasetRollouts(prompts, ranks, config.data.prompts_per_step)
    assert generator is not None
    is_dynamic = bool(algorithm.resolved.dynamic_sampling)
    chosen = algorithm.resolved
    shapes = chosen.dynamic_sampling_by == "shaped_reward"
    shape = partial(objective.shaping, max_response_tokens=config.max_sampled_tokens) if shapes else None
    informative = Informative(
        shape, chosen.dynamic_sampling_low, chosen.dynamic_sampling_high, chosen.dynamic_sampling_max_tokens
    )
    logprobs = None
    if config.skips_logprobs:
        engine_in_use = generator.engine
        logprobs = LogprobSteps(lambda: gate.is_armed, lambda: engine_in_use.restarts)
    if rollout.max_staleness is not None:
        engine = config.engine
        replicas = len(engine.url) or (engine.layout.dp if engine.layout else config.layout.world_size)
        return AsyncRollouts(
            generator,
            loader,
            logger,
            _sampling(config),
            Admission(rollout.max_staleness, config.data.prompts_per_step, steps, rollout.oversample),
            seed=config.trainer.seed,
            group_size=algorithm.group_size,
            tail=rollout.tail,
            capacity=engine.max_num_seqs * replicas,
            most_prompts=config.prompts_per_call * algorithm.sampling_rounds if is_dynamic else 0,
            informative=informative,
            logprobs=logprobs,
        )
    rollouts: RolloutSource = EngineRollouts(
        generator,
        prompts,
        logger,
        _sampling(config),
        seed=config.trainer.seed,
        group_size=algorithm.group_size,
        prompts_per_call=config.prompts_per_call,
        with_greedy=objective.needs_greedy,
        logprobs=logprobs,
    )
    if not is_dynamic:
        return rollouts
    return DynamicSampling(
        rollouts,
        ranks,
        logger,
        groups_per_step=config.data.prompts_per_step,
        max_rounds=algorithm.sampling_rounds,
        informative=informative,
    )


def build_plan(config: RunConfig, spec: ModelSpec, objective: Objective) -> BatchPlan:
    """Return how samples become batches; the work of a sample is that of its tokens and of its attention."""
    # Routers with losses or biases, and multi-token prediction, use every token of an update.
    adds = spec.moe is not None and config.policy.has_router_terms
    skips = config.policy.skip_zero_advantage and not adds and not config.policy.mtp.train
    lora = config.policy.lora.spec
    per_token = training_flops(spec, 1, 0, lora)
    per_pair = training_flops(spec, 1, 1, lora) - per_token

    def work(lengths_N: Tensor) -> Tensor:
        lengths_N = lengths_N.double()
        return lengths_N * (per_token + per_pair * lengths_N)

    return BatchPlan(
        updates_per_step=config.algorithm.updates_per_step,
        samples_per_comparison=config.algorithm.samples_per_comparison,
        temperature=_sampling(config).temperature,
        max_response_tokens=config.max_sampled_tokens,
        sampled=not config.algorithm.offline,
        work=work,
        skipped=objective.skipped if skips else nothing_skipped,
        domain_of=domains_of(config.data.domains) if config.algorithm.resolved.whiten_by == "domain" else None,
        share_prefix=config.policy.shares_prefix_on(config.layout),
        forms=forms_by_source(config.reward),
        routes=spec.routes if config.policy.router_replay == "R3" else None,
    )


def same_vocabulary(key: str, other: ModelSpec, shape: ModelSpec) -> None:
    """Raise ValueError if a model cannot read the policy's tokens."""
    if other.vocab != shape.vocab:
        raise UserError(f"{key} must have the policy's vocabulary: {other.vocab} != {shape.vocab}")


def _sampling(config: RunConfig) -> Sampling:
    drawn = config.engine.sampling
    return Sampling(
        max_tokens=config.data.max_response_tokens,
        temperature=1.0 if config.algorithm.offline else drawn.temperature,
        top_p=drawn.top_p,
        top_k=drawn.top_k,
        min_p=drawn.min_p,
        repetition_penalty=drawn.repetition_penalty,
        min_tokens=drawn.min_tokens,
        ignore_eos=drawn.ignore_eos,
        stop=tuple(drawn.stop),
        stop_token_ids=tuple(drawn.stop_token_ids),
        logit_bias=tuple(sorted(drawn.logit_bias.items())),
    )


def build_reward_model(config: RunConfig, directories: Mapping[str, Path], meshes: Meshes) -> ModelReward:
    """Build the sequence classifier that scores whole responses."""
    path = str(config.reward.model.path)
    directory = directories[config.model.described_by(path)]
    tokenizer = load_tokenizer(str(directory), config.model.trust_remote_code)
    settings = config.roles.settings("reward.model")
    ranks, model = _on_its_ranks(
        meshes,
        settings,
        config.reward.model.first_rank,
        directory=directory,
        torch_dist=find_torch_dist(directories[path]),
        value_head=True,
        trust_remote_code=config.model.trust_remote_code,
    )
    if model is not None and model.value_head_is_new:
        raise UserError(f"reward.model.path: {path} has no value head (score.weight): it is not a sequence classifier")

    pad = pad_token(directory / "config.json")

    def encode(prompt: Prompt, sample: Sample) -> list[int]:
        return scored_part(encode_conversation(prompt.messages, sample.text, tokenizer), pad)

    scorer = on_replicas_of(meshes.ranks, model, ranks)
    return ModelReward(scorer, meshes.ranks, encode, config.reward.model.weight, load_spec(directory).max_positions)


def _prompts(
    config: RunConfig,
    tokenizer: Any,
    directory: Path,
    ranks: Ranks,
    files: list[str],
    need_responses: bool = False,
    first: int | None = None,
    learns_from: LearnsFrom | None = None,
) -> PromptSet:
    """Load and tokenize prompts: on every rank if they are few, else on the first rank of each machine. Collective."""
    data = config.data
    reading = Reading(
        data.max_prompt_tokens,
        data.overlong_prompts,
        replace(Columns.of(data), carried=None if config.environment.reads_rows else columns_read(config.reward)),
        learns_from or config.algorithm.method.learns_from,
        need_responses,
        data.max_response_tokens,
        data.system_prompt,
        data.chat_template_kwargs,
        data.chat_template,
        data.apply_chat_template,
        data.learned_turns,
        data.max_total_tokens,
        data.special_tokens,
    )
    if first is not None or not is_large(files):
        return load_prompts(files, tokenizer, reading, first)
    cache = cache_of(data)
    trusted = config.model.trust_remote_code

    def store() -> str:
        # The processes that tokenize have semaphores, and end with this rank.
        name_shared_memory(scratch_directory())
        try:
            return str(store_prompts(files, (directory, trusted), reading, cache, print))
        except OSError as error:
            # Nothing can be written there, or the disk is full.
            print(f"every rank tokenizes {', '.join(files)} by itself: {error}; set data.cache_dir to another directory")
            return ""

    stored = call_once_a_machine(ranks, store)
    return open_prompts(Path(stored)) if stored else load_prompts(files, tokenizer, reading)


def _evaluation_set(config: RunConfig, validation: PromptSet) -> EvaluationSet:
    training = _sampling(config)
    # Evaluation has sampling parameters of its own, but the same end of a response as training.
    plain = Sampling(
        training.max_tokens, stop=training.stop, stop_token_ids=training.stop_token_ids, ignore_eos=training.ignore_eos
    )
    generate = config.eval.generate
    if generate is None:
        generate = config.may_generate and _rewards_are_known(config, validation)
    offline = [prompt for prompt in validation.prompts if prompt.responses]
    if not generate and not offline:
        raise UserError(
            "data.val: there is nothing to evaluate, the rows have no responses to learn from and nothing is sampled; "
            "leave data.val out, or name rewards and set eval.generate: true"
        )
    return EvaluationSet(
        validation.prompts,
        config.eval.samples,
        greedy=replace(plain, temperature=0.0),
        sampled=replace(plain, temperature=config.eval.temperature, top_p=config.eval.top_p, top_k=config.eval.top_k),
        seed=config.trainer.seed,
        generate=generate,
        offline=offline,
    )


def _rewards_are_known(config: RunConfig, validation: PromptSet) -> bool:
    """Whether rewards are known for the validation files. True for methods that sample, which report a missing reward
    themselves."""
    if not config.algorithm.offline:
        return True
    try:
        for source in {prompt.source for prompt in validation.prompts}:
            choose_rewards(config.reward, source)
    except UserError:
        return False
    return True
