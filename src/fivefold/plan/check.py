"""Checks of a run that need no torch: configuration -> Findings, in well under two seconds."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from fivefold.algo.methods import COLUMNS
from fivefold.config import RunConfig
from fivefold.config.engine import EngineConfig, SamplingConfig
from fivefold.config.fsdp_checks import unproven_fault
from fivefold.config.learners import LearnerConfig, LoraConfig, PolicyConfig
from fivefold.config.machine import elsewhere, is_joined, on_gpus, visible_gpus
from fivefold.config.mcore_options import MESSAGES, RECOMPUTE, messages_fault, recompute_fault
from fivefold.config.packages import (
    BRIDGES,
    LAUNCHERS,
    TRACKERS,
    TRANSFORMER_IMPL,
    missing_packages,
    release_fault,
    slower_paths,
    transformers_has,
)
from fivefold.config.roles import ROLES, Role
from fivefold.config.schema import (
    AlgorithmConfig,
    DataConfig,
    EvalConfig,
    LaunchConfig,
    ModelConfig,
    ProfileConfig,
    RayConfig,
    ReferenceConfig,
    TrackingConfig,
    TrainerConfig,
)
from fivefold.config.scoring import RewardConfig
from fivefold.config.validate import validate
from fivefold.errors import UserError, shown
from fivefold.hub import MODELSCOPE, cached_models, model_snapshot
from fivefold.keys.findings import Findings
from fivefold.models.adapters import adapters_of, check_adapter_files
from fivefold.models.bridges import bridge_fault
from fivefold.models.config_json import read_config
from fivefold.models.families import load_spec, unread_keys
from fivefold.models.headers import tensor_places
from fivefold.models.parameters import VALUE_HEAD
from fivefold.models.spec import ModelSpec
from fivefold.models.tensor_files import check_tensor_files
from fivefold.models.torch_dist import check_torch_dist, find_torch_dist, has_value_head, is_torch_dist
from fivefold.plan import cpu_time
from fivefold.plan.data_files import check_data
from fivefold.plan.engine_checks import check_engine, check_judge, report_engine
from fivefold.plan.engine_placement import device_rows
from fivefold.plan.environment_checks import check_environment
from fivefold.plan.fit import check_fit
from fivefold.plan.gain import describe_step
from fivefold.plan.hosts import check_hosts
from fivefold.plan.megatron_checkpoints import has_config
from fivefold.plan.placement import placement
from fivefold.plan.processes import decided
from fivefold.plan.roles import memory_of, placed
from fivefold.plan.tokenizer_files import check_tokenizer, check_tokenizer_files, is_hub_id
from fivefold.reward.choose import check_rewards


def check(config: RunConfig) -> Findings:
    """Return every finding about a configuration and the files that it names, without torch.

    `errors` keep the run from starting, `notes` are worth reading first, and `ignored` has a (key, reason) pair for each key
    that is set but changes nothing.

    Example: `print(*check(RunConfig.from_yaml("run.yaml")).errors, sep="\\n")`.
    """
    findings = validate(config)
    specs: dict[str, ModelSpec] = {}
    roles = config.roles.models
    for role in roles.values():
        _check_model(findings, config, role, specs)
    policy = specs.get("policy")
    for name, spec in specs.items():
        if policy is not None and not roles[name].reads_text and spec.vocab != policy.vocab:
            findings.error(roles[name].path_key, f"must have the policy's vocabulary: {spec.vocab} != {policy.vocab}")
    if policy is not None and not findings.errors:
        config, processes = decided(config, policy)
        findings.summary[:] = _summary(config, policy)
        check_fit(findings, config, lambda changed: memory_of(changed, policy))
        if not findings.errors:
            findings.notes[:0] = [*describe_step(config, policy), *filter(None, [processes])]
    elif policy is None and config.engine.processes == "auto":
        findings.note("engine.processes: auto is decided when the run starts: the model's sizes are not here")
    _estimate_on_cpu(findings, config, policy)
    _check_run_dir(findings, config.run_dir, config.trainer.run_dir)
    resume = config.trainer.resume
    if resume not in ("auto", "never") and not Path(resume).is_dir():
        findings.error("trainer.resume", f"must be auto, never or a checkpoint directory: got {resume!r}")
    if config.trainer.run_dir is None:
        findings.note(f"trainer.run_dir is left out: the run writes to {config.run_dir}")
    check_rewards(findings.at("reward"), config.reward)
    tokenizer = check_tokenizer(findings, config, policy)
    check_data(findings, config, tokenizer, None if policy is None else policy.vocab)
    _check_trackers(findings, config.trainer.loggers, config.tracking)
    _check_launch(findings.at("launch"), config.launch, config.trainer.device)
    check_hosts(findings, config)
    _check_devices(findings, config)
    check_environment(findings, config, tokenizer)
    if config.may_generate:
        check_engine(findings, config, policy)
        check_judge(findings.at("reward.judge"), config.reward, config.launch)
    _report_ignored(findings, config, specs)
    chosen = config.algorithm.resolved.kl
    if chosen.coef and chosen.place == "loss" and chosen.estimator == "k1":
        findings.note(
            "algorithm.kl.estimator: the gradient of k1 is 0 on average where the policy itself has sampled; k1+ has the "
            "gradient of the KL"
        )
    return findings


def _estimate_on_cpu(findings: Findings, config: RunConfig, spec: ModelSpec | None) -> None:
    """Note the time of a step on this machine's CPU, and a trial if it is long. A hub model needs only its config.json."""
    if findings.errors or elsewhere(config.launch) or on_gpus(config.launch, config.trainer.device):
        return
    if spec is None:
        spec = _spec_from_hub(config.model.path)
    if spec is not None:
        findings.duration[:], findings.trial[:] = cpu_time.describe_cpu_step(config, spec, cpu_time.measured_rates)


def _spec_from_hub(name: str) -> ModelSpec | None:
    """Return the sizes of a model of the hub, by its config.json in the cache or downloaded, one small file; else None."""
    if name.startswith(MODELSCOPE) or not is_hub_id(name):
        return None
    # Why the hub does not have it is reported when the run downloads its weights.
    with suppress(UserError):
        return load_spec(cached_models().get(name) or model_snapshot(name, ("config.json",)))
    return None


def _check_run_dir(findings: Findings, path: Path, named: str | None) -> None:
    """Check that the run directory, or its nearest existing parent, is writable."""
    try:
        existing = next(one for one in (path, *path.parents) if one.exists())
        usable = (named is None or bool(named.strip())) and existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    except (OSError, ValueError, StopIteration):
        usable = False
    findings.require(usable, "trainer.run_dir", f"must be a directory that can be written: got {shown(str(path))}")


def _check_model(findings: Findings, config: RunConfig, role: Role, specs: dict[str, ModelSpec]) -> None:
    """Check the directory of one model; `specs` gets the model's sizes if its files are on this machine."""
    again = role.name != "policy" and role.path == config.model.path
    if again and role.settings == config.policy and not role.has_value_head:
        return
    if Path(role.path).is_dir():
        try:
            checkpoint = find_torch_dist(role.path)
            if checkpoint is not None and not has_config(findings, config.model, role):
                return
            specs[role.name] = spec = load_spec(config.model.described_by(role.path), role.has_value_head)
            if unread := unread_keys(config.model.described_by(role.path)):
                findings.note(f"{role.path_key}: not read, here and by transformers: {', '.join(unread)} in config.json")
            _check_layout(findings, role, spec)
            if role.settings.mtp.train:
                spec.check_mtp(role.settings.layout)
            _check_spec(findings, config, role, spec)
            _check_adapters(findings.at(role.name), role.settings.lora, spec)
            if not again and checkpoint is not None:
                check_torch_dist(checkpoint, spec, role.settings.mtp.train)
            elif not again:
                check_tensor_files(Path(role.path), spec, role.settings.mtp.train)
        except UserError as error:
            findings.error(role.path_key, f": {error}")
    elif again:
        return
    elif not is_hub_id(role.path):
        findings.error(role.path_key, f": no directory {role.path}, and no hub id, which is written owner/name")
    elif role.path.startswith(MODELSCOPE) and (missing := missing_packages(("modelscope_hub",))):
        findings.error(role.path_key, f": {role.path} needs {'; '.join(missing)}: pip install 'fivefold[modelscope]'")
    else:
        findings.note(f"model {role.path} is not here: it will be taken from the hub, and its sizes are not checked")


def _check_layout(findings: Findings, role: Role, spec: ModelSpec) -> None:
    """Check that the layout can shard the model; report the error at the model's own layout if it has one."""
    try:
        spec.check_layout(role.settings.layout, role.settings.megatron.pipeline_split)
    except UserError as error:
        findings.error(role.backend_key if role.has_own_layout else role.path_key, f": {error}")
        return
    megatron, layout = role.settings.megatron, role.settings.layout
    options = RECOMPUTE[role.settings.recompute] | megatron.transformer
    chunks = megatron.pipeline_split.split_layers(spec.layers, layout)
    key = "microbatch_group_size_per_vp_stage"
    if key in megatron.pipeline:
        group, name = megatron.pipeline[key], f"{role.section_key}.megatron.pipeline.{key}"
        if len(chunks[0]) == 1:
            findings.ignore(name, "there are no virtual stages")
        elif group is not None:
            findings.require(group >= layout.pp, name, f"must be at least p = {layout.pp}: got {group}")
    pipeline = findings.at(f"{role.section_key}.megatron.pipeline")
    if messages := messages_fault(megatron.pipeline, len(chunks[0])):
        pipeline.error(*messages)
    for name in MESSAGES if layout.pp == 1 else ():
        if name in megatron.pipeline:
            pipeline.ignore(name, "there is one stage")
    if fault := recompute_fault(options, (len(chunk) for stage in chunks for chunk in stage)):
        findings.error(f"{role.section_key}.megatron.transformer", f": {fault}")


def _check_spec(findings: Findings, config: RunConfig, role: Role, spec: ModelSpec) -> None:
    """Report what this model does not support with its settings."""
    settings, megatron, layout = role.settings, role.settings.megatron, role.settings.layout
    is_policy_s = role.name == "reference" and config.reference.megatron is None
    section = findings.at("policy" if is_policy_s else role.section_key).at("megatron")
    if not is_policy_s:
        _check_packages(section, role.settings, on_gpus(config.launch, config.trainer.device))
    if not role.reads_text and config.max_sequence_tokens > spec.max_positions:
        has_own = config.environment.is_active and config.data.max_total_tokens is not None
        findings.error(
            "data.max_total_tokens" if has_own else "data.max_prompt_tokens + data.max_response_tokens",
            f"= {config.max_sequence_tokens} is more than the {spec.max_positions} positions of the model in "
            f"{role.path_key}",
        )
    if role.is_learner and megatron.optimizer.get("optimizer_cpu_offload", False) and config.trainer.device == "cpu":
        section.error("optimizer.optimizer_cpu_offload", "needs a GPU: on the CPU the optimizer is there already")
    if layout.backend == "fsdp":
        _check_fsdp(findings, config.model, role, spec)
    elif spec.moe is not None and layout.tp > 1 and not settings.sequence_parallel:
        findings.error(
            "policy.sequence_parallel",
            f"must be true for a model with experts ({role.path_key}) and t > 1: Megatron-Core routes each token once",
        )
    if role.name == "policy" and settings.router_replay and spec.moe is None:
        message = (
            f"must be left out for a model without experts: got {settings.router_replay}, and {spec.family} has no routers"
        )
        findings.error("policy.router_replay", message)
    if megatron.transformer_impl == "transformer_engine" and not spec.has_fused_layers:
        section.error("transformer_impl", f"must be torch for {spec.family}")
    if fault := bridge_fault(megatron.bridge_type, spec, layout, megatron.pipeline_split.virtual_stages(layout)):
        section.error("bridge_type", fault)
    if megatron.bridge_type != "native" and role.has_value_head:
        findings.error(role.path_key, ": a value head needs megatron.bridge_type: native")
    gathers = megatron.transformer.get("moe_token_dispatcher_type") == "allgather"
    if gathers and megatron.pipeline.get("variable_seq_lengths", False):
        section.error(
            "transformer.moe_token_dispatcher_type", ": allgather needs pipeline.variable_seq_lengths: false: leave it out"
        )
    modules = megatron.transformer.get("recompute_modules") or []
    for module, present in (("mla_up_proj", spec.mla), ("moe", spec.moe), ("moe_act", spec.moe),
                            ("shared_experts", spec.moe and spec.moe.shared_ffn)):  # fmt: skip
        if module in modules and not present:
            section.error("transformer.recompute_modules", f": {spec.family} has no {module}")
    if role.reads_text:
        # transformers omits the labels of a classifier when there are two, its default.
        described, checkpoint = Path(config.model.described_by(role.path)), find_torch_dist(role.path)
        if checkpoint is None:
            labels = len(read_config(described).get("id2label") or range(2))
            findings.require(labels == 1, role.path_key, f": a reward model has one label: got {labels} in config.json")
        head = VALUE_HEAD.hf[0]
        is_there = head in tensor_places(described) if checkpoint is None else has_value_head(checkpoint, spec)
        if not is_there:
            findings.error(role.path_key, f": {role.path} has no value head ({head}): it is not a sequence classifier")
        check_tokenizer_files(findings, role.path_key, described, spec)


def _check_fsdp(findings: Findings, model: ModelConfig, role: Role, spec: ModelSpec) -> None:
    """Check that an `fsdp:` layout can train this model."""
    if fault := release_fault("transformers"):
        findings.error(role.backend_key if role.has_own_layout else "policy.backend", f": fsdp needs its models: {fault}")
    key = role.backend_key if role.has_own_layout or role.name == "policy" else role.path_key
    if fault := unproven_fault(spec.family, role.layout, role.settings.fsdp.unproven):
        findings.error(key, f": {fault}")
    if spec.stored and not transformers_has(spec.family):
        lacks = f"the installed transformers has no family {spec.family}"
        if "AutoConfig" not in str(read_config(Path(model.described_by(role.path))).get("auto_map")):
            findings.error(role.path_key, f": {lacks}")
        elif not model.trust_remote_code:
            findings.error("model.trust_remote_code", f"must be true to run the code in {role.path}: {lacks}")


def _check_adapters(findings: Findings, config: LoraConfig, spec: ModelSpec) -> None:
    """Check that the model has the modules named in its section's `lora`, and that the initial adapters fit the model."""
    lora, path = config.spec, config.path
    if lora is None:
        return
    try:
        adapters_of(spec, lora)
    except UserError as error:
        key, _, message = str(error).partition(" ")
        findings.at("lora").error(key, message)
        return
    if path is None:
        return
    if Path(path).is_dir():
        try:
            check_adapter_files(Path(path), spec, lora)
        except UserError as error:
            findings.error("lora.path", f": {error}")
    elif not is_hub_id(path):
        findings.error("lora.path", f": no directory {path}, and no hub id, which is written owner/name")
    else:
        findings.note(f"adapters {path} are not here: they will be taken from the hub, and are not checked")


def _check_packages(findings: Findings, settings: PolicyConfig, has_gpus: bool) -> None:
    """Check the packages that a model's settings require; `findings` are at its `megatron` section."""
    bridge, layers = settings.megatron.bridge_type, settings.megatron.transformer_impl
    if missing := missing_packages(BRIDGES[bridge]):
        way = "docs/bridges.md has the line that installs it; or use native, if the family has a file here"
        findings.error("bridge_type", f": {bridge} needs {'; '.join(missing)}: {way}")
    if missing := missing_packages(TRANSFORMER_IMPL[layers]):
        findings.error("transformer_impl", f": {layers} needs {'; '.join(missing)}; torch needs nothing more")
    elif layers == "transformer_engine" and not has_gpus:
        findings.error("transformer_impl", f": {layers} needs GPUs; on the CPU write torch or auto")


def _report_ignored(findings: Findings, config: RunConfig, specs: dict[str, ModelSpec]) -> None:
    """Report keys that are set but change nothing; `specs` has the models whose files are on this machine."""
    algorithm = config.algorithm
    if config.policy.router_balance != "none" and "policy" in specs and specs["policy"].moe is None:
        findings.ignore("policy.router_balance", "the model has no experts")
    for name, role in config.roles.items():
        section, settings = findings.at(name), role.section
        if role.compared_by is not None:
            # It shares the section of that model.
            continue
        if settings.megatron is not None:
            experts, balanced = name not in specs or specs[name].moe is not None, config.policy.router_balance != "none"
            settings.megatron.options.report_ignored(section, experts, role.settings.recompute, balanced)
            if not role.is_learner and (settings.megatron.ddp or settings.megatron.optimizer):
                section.ignore("megatron.ddp and optimizer", f"a {role.label} is not trained")
        if not isinstance(settings, PolicyConfig | LearnerConfig):
            continue
        if settings.offload is not None and config.trainer.device == "cpu":
            for part in sorted(settings.offload.parts):
                section.ignore(f"offload.{part}", "on the CPU everything is in host memory already")
        if settings.optimizer.schedule == "constant" and (
            settings.optimizer.decay_steps is not None or settings.optimizer.min_lr
        ):
            section.ignore("optimizer.decay_steps and min_lr", "the schedule is constant")
        if settings.optimizer.schedule_over != "run" and not settings.optimizer.depends_on_length:
            section.ignore("optimizer.schedule_over", "neither the decay nor the warm-up is a share of the run")
        if settings.optimizer.warmup_init_lr and not settings.optimizer.warmup_steps:
            section.ignore("optimizer.warmup_init_lr", "warmup_steps is 0")
        if settings.lora.rank and settings.lora.max_lost is not None and (name != "policy" or algorithm.offline):
            section.ignore("lora.max_lost", "no engine samples with these adapters")
    if config.trainer.async_save and not config.trainer.save_every:
        findings.ignore("trainer.async_save", "save_every is 0, and a run waits for its last checkpoint")
    _report_profile(findings.at("trainer.profile"), config.trainer, config.roles.world_size)
    name = algorithm.name
    if algorithm.offline:
        _report_unsampled(findings, config)
    elif config.engine.sampling.is_changed:
        _report_uncompared(findings, config.engine, "engine.sampling changes the distribution: log-probs are not compared")
    if config.may_generate:
        report_engine(findings.at("engine"), config.engine, on_gpus(config.launch, config.trainer.device))
    for keys in COLUMNS.values():
        for key in keys:
            if getattr(config.data, key) != getattr(DataConfig(), key) and key not in algorithm.method.columns:
                findings.ignore(f"data.{key}", f"{name} does not read it")
    if not algorithm.offline and not config.environment.is_active and config.data.max_total_tokens is not None:
        findings.ignore("data.max_total_tokens", f"{name} samples its responses, and there is no environment")
    if config.data.learned_turns != DataConfig().learned_turns and algorithm.method.learns_from != "responses":
        findings.ignore("data.learned_turns", f"{name} does not read it")
    if config.data.domains and not config.data.mixture and algorithm.resolved.whiten_by != "domain":
        findings.ignore(
            "data.domains", "nothing uses the domains: neither data.mixture nor algorithm.whiten_by: domain is set"
        )
    if config.model.config is not None and not any(is_torch_dist(role.path) for role in config.roles.models.values()):
        findings.ignore("model.config", "no model is a checkpoint of Megatron-Core: a Hugging Face directory has its own")
    if config.reference != ReferenceConfig() and not algorithm.needs_reference:
        findings.ignore("reference", "the KL coefficient is 0")
    if config.reward.model.backend is not None and not config.reward.model.path:
        findings.ignore("reward.model.backend", "there is no reward model: name it in reward.model.path")
    for model, row in ROLES.items():
        if row.switch and model not in config.roles and (section := getattr(config, model)) != type(section)():
            findings.ignore(model, f"{name} has no {row.title}: set {row.switch}")
    if not algorithm.resolved.dynamic_sampling and (
        algorithm.prompts_per_round is not None or algorithm.sampling_rounds != AlgorithmConfig().sampling_rounds
    ):
        findings.ignore("algorithm.sampling_rounds and prompts_per_round", "dynamic_sampling is off")
    if not config.data.val and (config.eval.samples or config.eval.generate is not None):
        findings.ignore("eval.samples and generate", "there are no validation files")
    elif config.eval.samples and not config.may_generate:
        findings.ignore("eval.samples", "nothing is sampled for evaluation: set eval.generate: true")
    if not config.eval.samples:
        for key in ("temperature", "top_p", "top_k"):
            if getattr(config.eval, key) != getattr(EvalConfig, key):
                findings.ignore(f"eval.{key}", "eval.samples is 0: evaluation has the greedy response alone")


def _report_profile(findings: Findings, trainer: TrainerConfig, world_size: int) -> None:
    """Report ranks and steps of the profiler that the run does not have."""
    profile, steps = trainer.profile, trainer.steps
    if late := [step for step in profile.steps if steps is not None and step > steps]:
        findings.ignore("steps", f"the run has {steps} steps, and no step {late[0]}")
    if absent := [rank for rank in profile.ranks if rank >= world_size]:
        findings.ignore("ranks", f"the run has {world_size} ranks from 0 on, and no rank {absent[0]}")
    elif not profile.steps and profile != ProfileConfig():
        findings.ignore("ranks", "trainer.profile.steps names no step")


def _report_unsampled(findings: Findings, config: RunConfig) -> None:
    """Report sampling keys in a run that learns from the responses in its data."""
    name, drawn, usual = config.algorithm.name, config.engine.sampling, SamplingConfig()
    if config.algorithm.group_size != AlgorithmConfig().group_size:
        findings.ignore("algorithm.group_size", f"{name} learns from the responses in the data")
    ends = ("stop", "stop_token_ids", "ignore_eos")
    if drawn != replace(usual, **{name: getattr(drawn, name) for name in ends}):
        findings.ignore("engine.sampling", f"{name} does not sample for training, and evaluation has its own (eval)")
    _report_uncompared(findings, config.engine, f"{name} does not sample for training")
    if not config.may_generate and config.reward != RewardConfig():
        findings.ignore("reward", f"{name} scores nothing where nothing is sampled for evaluation")


def _report_uncompared(findings: Findings, engine: EngineConfig, reason: str) -> None:
    """Report the bounds of a comparison that is not made."""
    for key in ("max_logprob_kl", "max_logprob_diff"):
        if getattr(engine, key) is not None:
            findings.ignore(f"engine.{key}", reason)


def _summary(config: RunConfig, spec: ModelSpec) -> list[str]:
    algorithm, memory, where = config.algorithm, memory_of(config, spec), placed(config.roles)
    return [
        f"model {spec.family}, {spec.parameters / 1e6:,.1f} M parameters",
        *(one.describe() for one in where),
        *(placement(where) if config.roles.own_layouts else []),
        f"{config.samples_per_step} samples a step, {algorithm.updates} optimizer step{'s' * (algorithm.updates > 1)} each",
        *memory.table(),
    ]


def _check_trackers(findings: Findings, loggers: Sequence[str], tracking: TrackingConfig) -> None:
    trackers = [name for name in loggers if name in TRACKERS]
    for name in trackers:
        if missing := missing_packages(TRACKERS[name]):
            findings.error("trainer.loggers", f": {'; '.join(missing)}: pip install {name}, or leave {name} out")
    if not trackers and tracking != TrackingConfig():
        findings.ignore("tracking", "trainer.loggers names no tracker")
    elif tracking.offline and not {"wandb", "swanlab"} & set(trackers):
        findings.ignore("tracking.offline", "trainer.loggers has neither wandb nor swanlab")


def _check_launch(findings: Findings, launch: LaunchConfig, device: str) -> None:
    has_gpus = on_gpus(launch, device)
    if has_gpus:
        for line in slower_paths():
            findings.note(line)
    if missing := missing_packages(LAUNCHERS[launch.backend]):
        findings.error("backend", f": {launch.backend} needs {'; '.join(missing)}: pip install 'fivefold[ray]'")
    if launch.backend != "ray" and launch.ray != RayConfig():
        findings.ignore("ray", "launch.backend is not ray")
    if elsewhere(launch) and device == "auto" and not has_gpus:
        findings.note(
            "trainer.device is auto: the run takes GPUs if the Ray cluster has any; with trainer.device: cuda and launch.gpu"
            " it is looked at here as one on GPUs"
        )


def _check_devices(findings: Findings, config: RunConfig) -> None:
    """Check that there is a GPU for each rank.

    Under torchrun the ranks of other machines count too, so only torchrun's own world size is checked.
    """
    world = config.roles.world_size
    if is_joined(config.launch):
        launched = int(os.environ["WORLD_SIZE"])
        findings.require(launched == world, f"layout {config.layout}", f"needs {world} ranks: WORLD_SIZE is {launched}")
        local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        findings.require(
            not config.engine.is_server or bool(config.engine.url) or config.engine.is_apart or local == world,
            "engine.mode",
            f": servers on the ranks' devices are reached on their own machine, and {local} of {world} ranks are here: "
            "use vLLM in_process, or engine.placement: apart",
        )
        _check_apart(findings, config)
        return
    if elsewhere(config.launch):
        # On a Ray cluster, the launcher checks this.
        return
    gpus = visible_gpus()
    # With launch.gpu set, the run is for other machines.
    wanted = on_gpus(config.launch, config.trainer.device) and config.launch.gpu is None
    findings.require(
        not wanted or gpus >= world,
        f"layout {config.layout}",
        f"needs {world} GPUs on this machine: found {gpus}; lower it, start it with torchrun on several machines, place it "
        "on a Ray cluster by launch.backend: ray and launch.ray.address, or set trainer.device: cpu",
    )
    _check_apart(findings, config)


def _check_apart(findings: Findings, config: RunConfig) -> None:
    """Check that there are GPUs for the servers in addition to those of the ranks, where they can be counted."""
    has_devices = config.engine.is_apart or config.reward.judge_layout is not None
    if findings.errors or not config.may_generate or not has_devices:
        return
    try:
        rows = device_rows(config)
    except UserError as error:
        findings.error("engine.placement" if config.reward.judge_layout is None else "reward.judge.backend", f": {error}")
        return
    for devices, who in rows:
        findings.note(f"{devices}: {who}")
