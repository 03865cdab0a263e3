"""Rules for the values of a configuration: each alone, by its field, and then together. No torch here."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from operator import attrgetter

from fivefold.algo.methods import check_method
from fivefold.config.derived import Derived
from fivefold.config.engine import EngineConfig, RolloutConfig
from fivefold.config.environment import REWARD
from fivefold.config.fsdp_checks import check_fsdp, report_unused
from fivefold.config.learners import LoraConfig, MTPConfig, OptimizerConfig, PolicyConfig
from fivefold.config.machine import on_gpus
from fivefold.config.mcore_options import LOSS_SCALE
from fivefold.config.mixture import counts
from fivefold.config.roles import Learns, Roles, further_sections
from fivefold.config.schema import AlgorithmConfig, DataConfig
from fivefold.errors import UserError
from fivefold.keys.findings import Findings
from fivefold.keys.identity import leaves
from fivefold.keys.ranges import check_values, suggest
from fivefold.layout import ParallelLayout
from fivefold.layout.parallel import ENGINES, TRAINERS
from fivefold.models.adapters import ALL


def validate(config: Derived) -> Findings:
    """Find everything that the configuration alone shows; plan/check.py checks files, models and devices."""
    findings = Findings()
    check_values(config, findings)
    if findings.errors:
        # The rules below compute with these values.
        return findings
    algorithm = config.algorithm
    _check_layouts(findings, config)
    # The rules for engine and other models depend on the layouts.
    are_layouts_good = not findings.errors
    if are_layouts_good:
        _check_engine(findings, config)
    has_turns = config.environment.is_active
    check_method(findings.at("algorithm"), algorithm.name, algorithm, algorithm.group_size, algorithm.updates, has_turns)
    _check_batch(findings, config)
    _check_mixture(findings.at("data"), config.data)
    _check_rollout(findings.at("rollout"), config)
    _check_environment(findings, config)
    if are_layouts_good:
        _check_models(findings, config)
    _check_evaluation(findings, config)
    _check_accepted(findings, config)
    return findings


def _check_layouts(findings: Findings, config: Derived) -> None:
    """Check the layouts of all models that train or compute log-probs and values."""
    policy = _check_layout(findings, "policy.backend", config.policy.backend)
    for name, of in further_sections(config).items():
        key, text = f"{name}.backend", of.backend
        layout = None if text is None else _check_layout(findings, key, text)
        if policy is not None and layout is not None and of.first_rank == 0:
            findings.require(
                layout.world_size == policy.world_size,
                key,
                f"shares the policy's ranks, so d·t·p·c must be {policy.world_size}: {layout} has {layout.world_size}; "
                f"write for example megatron:d{policy.world_size}, or leave it out for {policy}; "
                f"or give it ranks of its own, {key.replace('backend', 'first_rank')}: {policy.world_size}",
            )
    try:
        _ = config.reward.judge_layout
    except UserError as error:
        findings.error("reward.judge.backend", f": {error}")
    if not findings.errors:
        _check_spans(findings, config.roles)


def _check_spans(findings: Findings, roles: Roles) -> None:
    """Check that two models share all ranks or none, and that every rank has a model."""
    # The model that a process reward model is compared with is on the same ranks.
    spans = {name: role.ranks for name, role in roles.models.items() if role.compared_by is None}
    policy, before = spans["policy"], dict[str, range]()
    for name, span in spans.items():
        key = f"{name}.first_rank"
        for other, taken in before.items():
            findings.require(
                span == taken or span.start >= taken.stop or taken.start >= span.stop,
                key,
                f"must be {taken.start}, where {other} begins, with as many ranks, or leave {_shown(taken)} to it: "
                f"got {span.start} for {_shown(span)}",
            )
        before[name] = span
    held = {rank for span in spans.values() for rank in span}
    idle = [rank for rank in range(roles.world_size) if rank not in held]
    if idle and not findings.errors:
        later = [f"{name}.first_rank {span.start}" for name, span in spans.items() if span.start > idle[0]]
        findings.error(
            later[0].split()[0],
            f"leaves rank {idle[0]} without a model: got {', '.join(later)} after the policy's {_shown(policy)}; "
            f"number them without a gap",
        )


def _shown(span: range) -> str:
    return f"rank {span[0]}" if len(span) == 1 else f"ranks {span[0]}-{span[-1]}"


def _check_layout(findings: Findings, key: str, text: str) -> ParallelLayout | None:
    try:
        layout = ParallelLayout.parse(text)
    except UserError as error:
        findings.error(key, f": {error}")
        return None
    findings.require(
        layout.backend in TRAINERS,
        key,
        f"must be a layout of a trainer, megatron or fsdp: got {layout}; write megatron:{str(layout).partition(':')[2]}",
    )
    return layout


def _check_engine(findings: Findings, config: Derived) -> None:
    engine, longest = config.engine, config.max_sequence_tokens
    try:
        layout, policy = engine.layout, config.layout
    except UserError as error:
        findings.error("engine.backend", f": {error}")
        return
    findings.require(
        engine.max_model_len is None or engine.max_model_len >= longest,
        "engine.max_model_len",
        f"must hold the longest prompt and response, {longest} tokens: got {engine.max_model_len}",
    )
    findings.require(all(engine.sampling.stop), "engine.sampling.stop", "must be texts that are not empty")
    findings.require(
        engine.sampling.min_tokens <= config.data.max_response_tokens,
        "engine.sampling.min_tokens",
        f"must be at most data.max_response_tokens = {config.data.max_response_tokens}: got {engine.sampling.min_tokens}",
    )
    _check_processes(findings, engine)
    if engine.logprobs == "tenth_step":
        if engine.kind == "transformers":
            findings.ignore("engine.logprobs", "the transformers engine has the log-probs anyway")
        elif config.algorithm.reads_rollout_logprobs:
            findings.ignore("engine.logprobs", "a correction or your own code reads the log-probs of every step")
        elif config.environment.agent is not None:
            findings.ignore("engine.logprobs", "an agent may request the log-probs of its turns")
    if engine.url:
        message = f"must be vllm or sglang alone: the servers of engine.url have layouts of their own; got {engine.backend}"
        findings.require(engine.backend in ENGINES, "engine.backend", message)
    message = "must be colocated or left out: " + (
        "the servers of engine.url are where they are" if engine.url else "transformers has no servers"
    )
    findings.require(layout is not None or not engine.is_apart, "engine.placement", message)
    message = (
        f"is for servers on other devices: set engine.placement: apart or engine.url; got {engine.backend} on the ranks'"
    )
    findings.require(not engine.staged_sync or engine.is_apart or bool(engine.url), "engine.staged_sync", message)
    if layout is None:
        message = "must be in_process or left out: transformers has no servers"
        findings.require(bool(engine.url) or engine.mode != "server", "engine.mode", message)
        return
    if layout.backend not in ENGINES:
        findings.error("engine.backend", f"must be transformers or a layout of vllm or sglang: got {engine.backend}")
        return
    dtype = engine.dtype or config.policy.dtype
    findings.require(
        layout.backend != "sglang" or dtype != "float32" or not on_gpus(config.launch, config.trainer.device),
        "engine.dtype",
        "must be bfloat16 or float16 with SGLang on GPUs, whose kernel of norms has no float32",
    )
    message = "must be server or left out: SGLang runs in processes of its own"
    findings.require(layout.backend == "vllm" or engine.mode != "in_process", "engine.mode", message)
    message = "must be server or left out: with engine.placement: apart the engine has processes of its own"
    findings.require(not engine.is_apart or engine.mode != "in_process", "engine.mode", message)
    findings.require(
        engine.is_apart or layout.world_size == policy.world_size,
        "engine.backend",
        f"shares the policy's ranks, so it must have as many: {layout} has {layout.world_size} and {policy} "
        f"{policy.world_size}; or set engine.placement: apart",
    )
    findings.require(
        engine.is_server or config.roles.world_size == policy.world_size,
        "engine.mode",
        "must be server where a model has ranks of its own: in the trainer's processes vLLM is in all of them or none; got "
        f"{engine.mode} with {config.roles.world_size} ranks, of which {policy.world_size} hold the policy",
    )
    message = (
        f"must be server with policy.router_replay: R3: in the ranks vLLM returns the routes on one rank only; got {layout}"
    )
    replays = config.policy.router_replay == "R3"
    findings.require(not replays or layout.tp == 1 or engine.is_server, "engine.mode", message)
    findings.require(layout.pp == 1, "engine.backend", f"must have p1: tensor parallelism shards engines here; got {layout}")
    findings.require(
        layout.ep in (1, layout.tp),
        "engine.backend",
        f"must have e1 or e{layout.tp}: experts are divided over all {layout.tp} ranks of a replica or none; got {layout}",
    )


def _check_batch(findings: Findings, config: Derived) -> None:
    data, algorithm = config.data, config.algorithm
    chosen = algorithm.resolved
    drawn = config.prompts_per_call * algorithm.sampling_rounds
    findings.require(
        not chosen.dynamic_sampling or drawn >= data.prompts_per_step,
        "algorithm.prompts_per_round x sampling_rounds",
        f"must reach data.prompts_per_step = {data.prompts_per_step}: got {drawn}",
    )
    findings.require(
        (chosen.overlong_buffer or 0) <= data.max_response_tokens,
        "algorithm.overlong_buffer",
        f"must be at most data.max_response_tokens = {data.max_response_tokens}: got {chosen.overlong_buffer:g}",
    )
    findings.require(
        data.prompts_per_step % algorithm.updates_per_step == 0,
        "data.prompts_per_step",
        f"must be a multiple of algorithm.updates_per_step, so that the updates are equal: "
        f"got {data.prompts_per_step} and {algorithm.updates_per_step}",
    )
    counts_rounds = bool(chosen.dynamic_sampling) and config.trainer.ends_with_data
    findings.require(
        not counts_rounds or (not data.mixture and config.rollout.max_staleness is None),
        "trainer.ends_with_data",
        "must be false with dynamic sampling and data.mixture or rollout.max_staleness, which draw prompts in another order",
    )
    _check_expert(findings, config)
    _check_learners(findings, config)
    if algorithm.values_per == "update":
        if "critic" not in config.roles:
            findings.ignore("algorithm.values_per", "there is no critic")
        findings.require(
            algorithm.ppo_epochs == 1 or "critic" not in config.roles,
            "algorithm.values_per",
            f": update needs algorithm.ppo_epochs: 1, for the values of an update are those before it: "
            f"got {algorithm.ppo_epochs}",
        )


def _check_learners(findings: Findings, config: Derived) -> None:
    """Check models that learn before the advantages, by whole groups, and what they are compared with."""
    for role in config.roles.values():
        if role.learns is Learns.BEFORE_ADVANTAGES:
            key, prompts = f"{role.name}.updates_per_step", config.data.prompts_per_step
            findings.require(
                prompts % role.updates_per_step == 0,
                "data.prompts_per_step",
                f"must be a multiple of {key}, so that the updates are equal: got {prompts} and {role.updates_per_step}",
            )
        if role.compared_by and role.served_by == "policy" and attrgetter(role.path_key)(config) is not None:
            findings.ignore(role.path_key, "algorithm.process_reward.reference is the policy")
    process, reward = config.algorithm.resolved.process_reward, config.reward
    if process.coef and reward.model.path and not reward.functions and not reward.by_source:
        findings.require(
            process.target == "reward",
            "algorithm.process_reward.target",
            ": correct needs a reward function that decides whether a response is, a reward model does not: name one in "
            "reward.functions, or set target: reward for scores between 0 and 1",
        )


def _check_expert(findings: Findings, config: Derived) -> None:
    data, algorithm = config.data, config.algorithm
    if algorithm.resolved.expert.weight is None:
        findings.require(not data.expert, "data.expert", f"needs algorithm.expert.weight, which {algorithm.name} has not")
        findings.require(not data.expert_per_step, "data.expert_per_step", "needs algorithm.expert.weight")
        return
    findings.require(bool(data.expert), "data.expert", "must name files of responses: algorithm.expert.weight is set")
    findings.require(
        data.expert_per_step > 0 and data.expert_per_step % algorithm.updates_per_step == 0,
        "data.expert_per_step",
        f"must be a multiple of algorithm.updates_per_step above 0: got {data.expert_per_step} and "
        f"{algorithm.updates_per_step}",
    )
    findings.require(
        config.rollout.max_staleness is None,
        "rollout.max_staleness",
        "must be left out with algorithm.expert: groups that are sampled ahead have no expert's among them",
    )


def _check_processes(findings: Findings, engine: EngineConfig) -> None:
    """Check that an engine can have several processes on its devices."""
    if engine.processes == 1:
        return
    key, count = "engine.processes", engine.processes
    if count == "auto" and (engine.kind != "vllm" or engine.url):
        findings.ignore(key, "it is 1: only processes of a vLLM that the run starts share a GPU")
        return
    message = f"must be 1 with {engine.kind}: only vLLM's processes share a GPU; got {count}"
    findings.require(engine.kind == "vllm", key, message)
    message = (
        f"must be 1 with engine.url: got {count}; each process that runs already is a server with an address of its own"
    )
    findings.require(not engine.url, key, message)
    message = f"must be server or left out with engine.processes {count}: they are processes next to the ranks"
    findings.require(engine.mode != "in_process", "engine.mode", message)
    message = f"must be at most engine.max_num_seqs = {engine.max_num_seqs}: got {count}"
    findings.require(engine.max_num_seqs >= engine.process_count, key, message)


def _check_mixture(findings: Findings, data: DataConfig) -> None:
    named = [source for sources in data.domains.values() for source in sources]
    twice = next((source for source in named if named.count(source) > 1), "")
    findings.require(not twice, "domains", f"must name every data_source once: got {twice!r} twice")
    if not data.mixture:
        return
    total = sum(data.mixture.values())
    if abs(total - 1) > 1e-6:
        findings.error("mixture", f"must have shares that sum to 1: got {total:g}")
        return
    try:
        counts(data.mixture, data.prompts_per_step)
    except UserError as error:
        findings.error("mixture", str(error))


def _check_rollout(findings: Findings, config: Derived) -> None:
    rollout, algorithm, usual = config.rollout, config.algorithm, RolloutConfig()
    if algorithm.resolved.rollout_correction.old_logprobs_from == "loglinear" and (rollout.max_staleness or 0) < 2:
        findings.note(
            "algorithm.rollout_correction.old_logprobs_from: loglinear is the same as engine where no token is more than a "
            "step old (rollout.max_staleness below 2)"
        )
    if rollout.max_staleness is None or algorithm.offline:
        reason = "the method learns from the data" if algorithm.offline else "rollout.max_staleness is left out"
        for item in fields(rollout):
            if getattr(rollout, item.name) != getattr(usual, item.name):
                findings.ignore(item.name, reason)
        return
    chosen = algorithm.resolved
    findings.require(
        not chosen.dynamic_sampling or config.reward.model.path is None,
        "max_staleness",
        "must be left out with dynamic sampling and a reward model, which scores what a step takes; "
        "algorithm.dynamic_sampling: false",
    )
    findings.require(
        chosen.advantage != "greedy_baseline",
        "max_staleness",
        "must be left out with advantage: greedy_baseline, whose most likely responses are sampled within the step",
    )
    findings.require(
        rollout.oversample == 0 or rollout.tail != "wait",
        "oversample",
        f"needs rollout.tail: carry or drop, for surplus groups: got {rollout.oversample:g} with tail: wait",
    )
    engine = config.engine
    if engine.is_server and not engine.url and not engine.is_apart:
        findings.require(
            not engine.sleep or config.trainer.device == "cpu",
            "max_staleness",
            "must be left out where servers leave the GPUs while the policy trains; "
            "engine.placement: apart, engine.url, or engine.sleep: false",
        )
    correction = chosen.rollout_correction
    is_weighed = correction.weight != "none" or correction.reject != "none" or correction.reject_divergence
    if rollout.max_staleness and not is_weighed and correction.old_logprobs_from == "trainer":
        findings.note(
            f"rollout.max_staleness {rollout.max_staleness:g}: samples of older weights are not corrected, and "
            f"training may diverge (docs/async.md); algorithm.rollout_correction: {{name: tis}}, or "
            f"{{old_logprobs_from: engine}}"
        )
    if not engine.is_server and rollout.interrupt != usual.interrupt:
        findings.ignore("interrupt", "the engine samples in the ranks: nothing is in flight when its weights change")


def _check_environment(findings: Findings, config: Derived) -> None:
    environment, data = config.environment, config.data
    named = [REWARD in weights for weights in (config.reward.functions, *config.reward.by_source.values())]
    findings.require(
        environment.reads_rows or not any(named),
        "reward.functions",
        f"cannot name {REWARD} without environment.class or environment.agent, which give this reward: set one, or leave "
        "the reward out",
    )
    if not environment.is_active:
        return
    message = "must be true with environment: a chat template writes the turns"
    findings.require(data.apply_chat_template, "data.apply_chat_template", message)
    message = "must be left out with environment.tools, which are the functions that the model reads about"
    findings.require(not environment.tools or data.tools_key is None, "data.tools_key", message)
    longest = data.max_total_tokens or data.max_prompt_tokens + data.max_response_tokens
    findings.require(
        longest > data.max_response_tokens,
        "data.max_total_tokens",
        f"must be above data.max_response_tokens = {data.max_response_tokens}, the length of one turn: got {longest}",
    )
    findings.require(
        not config.algorithm.resolved.process_reward.coef or environment.has_one_sequence,
        "algorithm.process_reward.coef",
        "must be 0 with environment.agent or environment.history: template: trajectories then have several sequences, and "
        "the process reward model scores a sequence as a response",
    )
    layout = None if config.engine.is_server else config.engine.layout
    findings.require(
        layout is None or layout.tp == 1,
        "engine.mode",
        f"must be server with environment where a replica has several ranks, as in {config.engine.backend}: only one "
        "has the environment's answers; or write t1",
    )
    findings.require(
        environment.same_start or not config.policy.share_prefix,
        "environment.same_start",
        "must be true with policy.share_prefix: trajectories with contexts of their own share none",
    )


def _check_models(findings: Findings, config: Derived) -> None:
    # Samples that are compared must fit into one micro-batch.
    longest = config.max_sequence_tokens * config.algorithm.samples_per_comparison
    _check_model(findings.at("policy"), config.policy, {item.name for item in fields(PolicyConfig)}, longest)
    _check_shared_prefix(findings, config.policy, config.algorithm.samples_per_prompt)
    _check_router_replay(findings, config.policy, config.engine, config.algorithm)
    _check_adapters(findings.at("policy"), config.policy)
    if config.policy.lora.path is not None and "reference" in config.roles and config.reference.path is None:
        findings.note(
            "policy.lora.path: the reference is the model without these adapters, so the KL of the first step is not 0; "
            "reference.path names a model that has them merged"
        )
    for name, role in config.roles.further_learners.items():
        _check_adapters(findings.at(name), role.settings)
        chosen = {item.name for item in fields(role.section) if getattr(role.section, item.name) is not None}
        _check_model(findings.at(name), role.settings, chosen, longest)
    _check_mtp(findings.at("policy"), config.policy)
    for role in config.roles.models.values():
        if role.layout.backend == "fsdp":
            check_fsdp(findings, role)
    report_unused(findings, config.roles)
    if "critic" in config.roles:
        warmup, steps = config.critic.warmup_steps, config.trainer.steps
        findings.require(
            steps is None or warmup < steps,
            "critic.warmup_steps",
            f"must be below trainer.steps, or the policy never learns: got {warmup}",
        )
    for where, other in (("reference", config.reference), ("reward.model", config.reward.model)):
        if (other.path or where == "reference") and other.megatron is not None:
            _check_model(findings.at(where), other.settings(config.policy), {"megatron"}, longest)


def _check_shared_prefix(findings: Findings, policy: PolicyConfig, samples_per_prompt: int) -> None:
    key = "policy.share_prefix"
    if not policy.share_prefix:
        return
    layout = policy.layout
    findings.require(layout.cp == 1, key, f"needs whole sequences on a rank, so c1: got {layout}; leave one of the two out")
    findings.require(
        policy.megatron.transformer_impl == "torch",
        key,
        f"needs megatron.transformer_impl: torch: got {policy.megatron.transformer_impl}",
    )
    message = "would change what routers' losses and biases count, as a prompt is routed once: leave one of the two out"
    findings.require(not policy.has_router_terms, key, message)
    if samples_per_prompt == 1:
        findings.ignore(key, "every prompt has one sample")


def _ignore_settings(findings: Findings, section: str, settings: LoraConfig | MTPConfig, reason: str) -> None:
    """Report the settings in a section that has no effect."""
    usual = type(settings)()
    for item in fields(settings):
        if getattr(settings, item.name) != getattr(usual, item.name):
            findings.ignore(f"{section}.{item.name}", reason)


def _check_router_replay(findings: Findings, policy: PolicyConfig, engine: EngineConfig, algorithm: AlgorithmConfig) -> None:
    mode, key = policy.router_replay, "policy.router_replay"
    if mode == "R2" and algorithm.updates == 1:
        findings.ignore(key, "with one optimizer step a step, R2 replays what its routers choose anyway")
    if mode != "R3":
        return
    message = f"must be left out or R2 where no engine samples: {algorithm.name} learns from the data; got R3"
    findings.require(not algorithm.offline, key, message)
    message = "must be left out or R2 with SGLang: R3 needs the experts that the engine chose; take vllm or transformers"
    findings.require(algorithm.offline or engine.kind != "sglang", key, message)
    findings.require(
        bool(engine.vllm.get("enable_prefix_caching", True)),
        "engine.vllm.enable_prefix_caching",
        "must be true or left out with policy.router_replay: R3: vLLM keeps routes by the blocks of its prefix cache",
    )


def _check_adapters(findings: Findings, settings: PolicyConfig) -> None:
    """Check the requirements of adapters; `findings` are at the model's section."""
    lora, megatron, usual = settings.lora, settings.megatron, LoraConfig()
    if not lora.rank:
        _ignore_settings(findings, "lora", lora, "lora.rank is 0: there are no adapters")
        return
    if lora.path is not None and lora.init != usual.init:
        findings.ignore("lora.init", "the adapters of lora.path are not drawn")
    findings.require(bool(lora.target_modules), "lora.target_modules", f"must name linear layers, or {ALL}: got []")
    for key, needed in (("transformer_impl", "torch"), ("bridge_type", "native")):
        setting = getattr(megatron, key)
        findings.require(setting == needed, f"megatron.{key}", f"must be {needed} with adapters (lora): got {setting}")
    for key, why in (
        ("moe_shared_expert_overlap", "adapters are next to layers that gather and scatter themselves"),
        ("moe_router_bias_update_rate", "with adapters nothing else of the model moves"),
    ):
        value = megatron.transformer.get(key)
        findings.require(not value, f"megatron.transformer.{key}", f"must be left out with adapters, {why}: got {value}")


def _check_mtp(findings: Findings, policy: PolicyConfig) -> None:
    """Check the requirements for training multi-token prediction layers; `findings` are at the policy's section."""
    mtp, megatron = policy.mtp, policy.megatron
    if not mtp.train:
        _ignore_settings(findings, "mtp", mtp, "mtp.train is false: no loss of further tokens is computed")
        return
    findings.require(not policy.lora.rank, "mtp.train", "must be false with adapters (lora): they alone are trained then")
    message = "must be false with mtp.train: what lies ahead of a prompt's end differs between the samples that share it"
    findings.require(not policy.share_prefix, "share_prefix", message)
    for key, needed in (("transformer_impl", "torch"), ("bridge_type", "native")):
        value = getattr(megatron, key)
        findings.require(value == needed, f"megatron.{key}", f"must be {needed} with mtp.train: got {value}")
    key = "pipeline_model_parallel_layout"
    message = "must be left out with mtp.train: the last stage has the layers of multi-token prediction"
    findings.require(key not in megatron.pipeline, f"megatron.pipeline.{key}", message)


def _check_model(findings: Findings, settings: PolicyConfig, chosen: Collection[str], longest: int) -> None:
    """Check all settings of one model; the section sets those in `chosen`, and the policy's section checks the rest."""
    megatron = settings.megatron
    if "megatron" in chosen:
        megatron.options.check(findings)
        findings.require(
            settings.dtype != "float32" or not megatron.optimizer.get("optimizer_cpu_offload", False),
            "megatron.optimizer.optimizer_cpu_offload",
            "needs policy.dtype: bfloat16: Megatron-Core moves the float32 copies of parameters, and float32 parameters "
            "have none",
        )
        for name in (*LOSS_SCALE, "loss_scale"):
            if name in megatron.optimizer and settings.dtype != "float16":
                findings.ignore(f"megatron.optimizer.{name}", f"it is read in float16 only, and dtype is {settings.dtype}")
    if "megatron" in chosen or "recompute" in chosen:
        findings.require(
            settings.recompute == "none" or "recompute_granularity" not in megatron.transformer,
            "recompute",
            f"and {findings.key('megatron.transformer.recompute_granularity')} say the same: keep one",
        )
        divides = settings.sequence_parallel and settings.layout.tp > 1
        if not findings.errors:
            # Options of wrong types cannot be compared.
            megatron.options.check_recompute(findings, settings.recompute, divides)
    if "tokens_per_micro_batch" in chosen:
        findings.require(
            settings.tokens_per_micro_batch >= longest,
            "tokens_per_micro_batch",
            "must hold the longest sequence, max_prompt_tokens + max_response_tokens (a pair of them where pairs are "
            f"compared), which is {longest}: got {settings.tokens_per_micro_batch}; raise it or shorten the sequences",
        )
    if "optimizer" in chosen:
        _check_optimizer(findings.at("optimizer"), settings.optimizer)


def _check_optimizer(findings: Findings, optimizer: OptimizerConfig) -> None:
    findings.require(len(optimizer.betas) == 2, "betas", f"must be two numbers in [0, 1): got {optimizer.betas}")
    warmup = optimizer.warmup_steps
    findings.require(
        warmup < 1 or warmup.is_integer(),
        "warmup_steps",
        f"must be a whole number, or a share of the run below 1: got {warmup:g}",
    )
    for key in ("min_lr", "warmup_init_lr"):
        rate = getattr(optimizer, key)
        findings.require(rate <= optimizer.lr, key, f"must be at most lr: {rate} > {optimizer.lr}")
    if optimizer.schedule != "constant" and optimizer.decay_steps is not None:
        findings.require(
            warmup < optimizer.decay_steps,
            "warmup_steps",
            f"must be below decay_steps: got {warmup:g} and {optimizer.decay_steps}",
        )


def _check_accepted(findings: Findings, config: Derived) -> None:
    known = {leaf.key for leaf in leaves(config)}
    known |= {".".join(parts[:count]) for parts in (key.split(".") for key in known) for count in range(1, len(parts))}
    for name in config.trainer.accept_changes:
        message = f"must name keys or sections: got {name!r}{suggest(name, known)}"
        findings.require(name in known, "trainer.accept_changes", message)
        message = (
            f"cannot name {name}: a checkpoint holds adapters of its own rank; leave it as it was, or start again from an "
        )
        message += "exported adapter by lora.path"
        findings.require(not name.endswith(".lora.rank"), "trainer.accept_changes", message)


def _check_evaluation(findings: Findings, config: Derived) -> None:
    trainer, files = config.trainer, bool(config.data.val)
    findings.require(
        config.data.max_total_tokens is None or not config.algorithm.offline or not config.may_generate,
        "data.max_total_tokens",
        "bounds the responses of the data, and evaluation samples some: set eval.generate to false",
    )
    findings.require(
        config.eval.samples == 0 or config.eval.temperature > 0, "eval.temperature", "must be above 0 when eval.samples is"
    )
    findings.require(
        trainer.eval_every in (0, "never") or files,
        "trainer.eval_every",
        "needs validation files: name them in data.val or set eval_every to 0",
    )
    if files and trainer.eval_every == "never" and not trainer.eval_before_train:
        findings.ignore("data.val", "the run evaluates neither before nor after a step; `fivefold eval` does")
    findings.require(
        not trainer.stop_at or (files and trainer.eval_every not in (0, "never")),
        "trainer.stop_at",
        "looks at evaluations: set trainer.eval_every and data.val",
    )
