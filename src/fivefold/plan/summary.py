"""The start-up summary: model, layout, method, batch arithmetic, memory. No torch here."""

from __future__ import annotations

import math

from fivefold.config import RunConfig
from fivefold.config.engine import EngineConfig, RolloutConfig
from fivefold.config.learners import PolicyConfig
from fivefold.config.roles import Learns, Role, Roles
from fivefold.config.schema import TrainerConfig
from fivefold.layout import ParallelLayout
from fivefold.models.adapters import adapters_of
from fivefold.models.spec import ModelSpec
from fivefold.plan.engine_placement import device_rows
from fivefold.plan.memory import checkpoint_bytes, trained_parameters
from fivefold.plan.placement import placement
from fivefold.plan.roles import memory_of, placed

_MOST_ROWS = 12


def describe(
    config: RunConfig, spec: ModelSpec, *, steps: int, prompts: int, dropped: int, validation: int, processes: str = ""
) -> str:
    """Return the summary of a run over `prompts` prompts; `dropped` more were too long, `validation` is for evaluation.

    `processes` is the sentence of `plan.processes` about a number that it decided.
    """
    layout, algorithm, data = config.layout, config.algorithm, config.data
    group = algorithm.samples_per_prompt
    samples = config.samples_per_step
    experts = f" and {data.expert_per_step} of an expert" if data.expert_per_step else ""
    updates = algorithm.updates_per_step * algorithm.ppo_epochs
    longest = samples // algorithm.updates_per_step * config.max_sequence_tokens
    most = -(-longest // (layout.dp * config.policy.tokens_per_micro_batch))
    chosen = algorithm.resolved
    kl = f"{chosen.kl.estimator} x {chosen.kl.coef:g} in the {chosen.kl.place}" if chosen.kl.coef else "none"
    if chosen.kl.reward_coef:
        kl += f", {chosen.kl.reward_estimator} x {chosen.kl.reward_coef:g} in the reward"
    truncated = ", truncated responses bootstrapped" if chosen.bootstrap_truncated else ", 0 after truncated responses"
    credit = f"{chosen.credit}{truncated if chosen.credit == 'gae' else ''}"
    correction = "" if chosen.rollout_correction.name == "none" else f", correction {chosen.rollout_correction.name}"
    left_out = f", {dropped} longer than {data.max_prompt_tokens} tokens left out" if dropped else ""
    virtual = config.policy.megatron.pipeline_split.virtual_stages(layout)
    has_sequence_parallel = config.policy.sequence_parallel and layout.tp > 1 and layout.backend == "megatron"
    sequence = "with" if has_sequence_parallel else "without"
    lines = [
        f"model    {config.model.path}: {spec.family}, {spec.parameters / 1e6:,.1f} M parameters, {spec.layers} layers, "
        f"vocabulary {spec.vocab}, {config.policy.dtype}",
        f"layout   {layout}: {layout.world_size} ranks = {layout.dp} replicas x {layout.tp} tensor ({sequence} sequence "
        f"parallelism) x {layout.cp} context x {layout.pp} pipeline"
        + (f" of {virtual} virtual stages each" if virtual > 1 else ""),
        *_describe_experts(spec, layout),
        *_describe_adapters(config, spec),
        *_describe_placement(config.roles),
        *_describe_engine(config),
        *([f"         {processes}"] if processes else []),
        *([] if algorithm.offline else _describe_ahead(config.rollout, config.engine)),
        f"method   {algorithm.name}: advantage {chosen.advantage}, credit {credit}, surrogate {chosen.surrogate} by "
        f"{chosen.importance_sampling_level}, {chosen.aggregate}, KL {kl}{correction}",
        *_describe_others(config),
        f"data     {prompts} prompts{left_out}" + (f"; {validation} for validation" if validation else ""),
        f"batch    {data.prompts_per_step} prompts x {group} samples{experts} = {samples} samples a step; {updates} "
        f"optimizer step{'s' if updates > 1 else ''} of {samples // algorithm.updates_per_step} samples; at most {most} "
        f"micro-batches of {config.policy.tokens_per_micro_batch} tokens on each of {layout.dp} replicas",
        f"steps    {steps}",
        *_describe_checkpoints(config.trainer, config.policy, spec),
        "memory   " + "\n         ".join(memory_of(config, spec).table()),
    ]
    return "\n".join(lines)


def _describe_placement(roles: Roles) -> list[str]:
    """Describe other models' layouts, and which ranks hold which models."""
    where = placed(roles)
    others = [one.describe() for one in where[1:] if not one.layout.is_same(where[0].layout)]
    return [f"         {line}" for line in [*others, *placement(where)]]


def _describe_checkpoints(trainer: TrainerConfig, policy: PolicyConfig, spec: ModelSpec) -> list[str]:
    """Describe when checkpoints are saved and their size, ignoring Megatron-Core's own settings for moments."""
    gib = checkpoint_bytes(spec, policy.dtype, policy.lora.spec) / 2**30
    share = f"{gib / policy.layout.world_size:.2f} GiB by each rank"
    if not trainer.save_every:
        return []
    how = f"in the background, with {share} of host memory" if trainer.async_save else share
    when = "epoch" if trainer.save_every == "epoch" else f"{trainer.save_every} steps"
    return [f"saves    every {when}, {gib:.2f} GiB of the policy on disk, {how}; {trainer.keep} are kept"]


def _describe_engine(config: RunConfig) -> list[str]:
    engine, layout = config.engine, config.engine.layout
    if not config.may_generate:
        return []
    dtype, most = engine.dtype or config.policy.dtype, f"at most {engine.max_num_seqs} sequences at once on each"
    if engine.url:
        return [f"engine   {engine.backend}, {len(engine.url)} servers at {', '.join(engine.url)}, {most}"]
    if layout is None:
        return [f"engine   transformers, {dtype}: {config.layout.world_size} replicas, {most}"]
    experts = " (experts divided)" if layout.ep > 1 else ""
    replicas = f"{layout.backend}, {dtype}: {layout.dp} replicas x {layout.tp} tensor{experts}"
    if engine.is_apart:
        rows = device_rows(config)
        shown = [*rows[:_MOST_ROWS], *([("...", f"and {len(rows) - _MOST_ROWS} more")] if len(rows) > _MOST_ROWS else [])]
        width = max(len(devices) for devices, _ in shown)
        return [
            f"engine   {replicas} as servers on devices of their own, {most}",
            *(f"         {devices:<{width}}  {who}" for devices, who in shown),
        ]
    where = "as servers on" if engine.is_server else "on"
    if engine.process_count > 1:
        where = f"as {engine.process_count} servers each on"
    rest = "" if engine.sleep else ", on the device all the time"
    return [
        f"engine   {replicas} {where} "
        f"the policy's ranks, {most}; {engine.memory_fraction:.0%} of each GPU for weights, cache and graphs{rest}"
    ]


_LATE = {"wait": "a step waits for its groups", "carry": "what is late is sampled again", "drop": "what is late is dropped"}
_IN_FLIGHT = {
    "continue": "continues under new weights",
    "finish": "ends before new weights",
    "abort": "is aborted by new weights",
}


def _describe_ahead(rollout: RolloutConfig, engine: EngineConfig) -> list[str]:
    if rollout.max_staleness is None:
        return []
    more = f", {rollout.oversample:.0%} more prompts than needed" if rollout.oversample else ""
    in_flight = f"; what is in flight {_IN_FLIGHT[rollout.interrupt]}" if engine.is_server else ""
    return [
        f"ahead    samples are at most {math.ceil(rollout.max_staleness)} steps old{more}; {_LATE[rollout.tail]}{in_flight}"
    ]


def _describe_others(config: RunConfig) -> list[str]:
    """Describe each model besides the policy that learns or scores, one line each."""
    lines, roles = [], config.roles
    for name, role in roles.further_learners.items():
        warmup = (
            f", {config.critic.warmup_steps} steps of warm-up" if name == "critic" and config.critic.warmup_steps else ""
        )
        compared = [_compared(other) for other in roles.values() if other.compared_by == name]
        against = f" against {compared[0]}" if compared else ""
        process = config.algorithm.resolved.process_reward
        rewards = ""
        if role.learns is Learns.BEFORE_ADVANTAGES:
            rewards = (
                f", {role.updates_per_step} updates {process.update} its rewards; outcome : process = "
                f"{process.outcome_coef:g} : {process.coef:g}"
            )
        lines.append(f"{name:<8} {role.path}{against}, learning rate {role.settings.optimizer.lr:g}{warmup}{rewards}")
    if "reward.model" in roles:
        lines.append(f"reward   model {roles['reward.model'].path} x {config.reward.model.weight:g}")
    return lines


def _compared(role: Role) -> str:
    """Return the name that messages use for the weights that a model is compared with."""
    return "the policy" if role.served_by == "policy" else role.path


def _describe_adapters(config: RunConfig, spec: ModelSpec) -> list[str]:
    """Describe the adapters: trained parameters, initial weights, the reference, and how the engine gets them."""
    lora = config.policy.lora.spec
    if lora is None:
        return []
    names = ", ".join(dict.fromkeys(adapter.name for adapter in adapters_of(spec, lora) if adapter.is_adapted))
    trained = trained_parameters(spec, lora)
    begin = f", beginning with {config.policy.lora.path}" if config.policy.lora.path else ""
    is_base = "reference" in config.roles and config.roles["reference"].without_adapters
    reference = "; the reference is the model without them" if is_base else ""
    dtype, rounded = config.engine.dtype or config.policy.dtype, []
    if not config.algorithm.offline and dtype != "float32":
        rounded.append(f"         the engine gets them merged, in {dtype}: rollout/lora_lost is the share that this loses")
    return [
        f"adapters rank {lora.rank}, x {lora.scale:g}, on {names}{begin}: {trained / 1e6:,.2f} M parameters are trained, "
        f"{trained / spec.parameters:.2%} of the model's{reference}",
        *rounded,
    ]


def _describe_experts(spec: ModelSpec, layout: ParallelLayout) -> list[str]:
    if spec.moe is None:
        return []
    return [
        f"experts  {spec.moe.num_experts} in {sum(spec.moe.layers)} layers, {spec.moe.top_k} a token: "
        f"{layout.ep} expert x {layout.etp} expert-tensor x {layout.edp} replicas on each stage"
    ]
