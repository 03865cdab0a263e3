"""Time of a step by part, and its memory: configuration, cluster, rates -> StepEstimate. No torch here."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from fivefold.algo.surrogates import surrogate_class
from fivefold.config import RunConfig
from fivefold.config.learners import PolicyConfig
from fivefold.config.roles import Learns
from fivefold.config.schema import AlgorithmConfig, DataConfig
from fivefold.models.spec import ModelSpec
from fivefold.plan.efficiency import Efficiencies
from fivefold.plan.engine_checks import engine_cache
from fivefold.plan.fit import elastic
from fivefold.plan.hardware import Cluster
from fivefold.plan.memory import BYTES, Memory
from fivefold.plan.roles import memory_of, shard_roles
from fivefold.plan.rollout_time import Requests, RolloutTime, Sampler, rollout_time, sync_time
from fivefold.plan.step_time import Batch, PassTime, forward_time, update_time


@dataclass(frozen=True)
class Lengths:
    """Mean tokens of prompts and of responses, which are not part of the configuration."""

    prompt: float
    response: float

    @classmethod
    def of(cls, data: DataConfig, prompt: float | None = None, response: float | None = None) -> Lengths:
        """Return the given lengths; half of the configured maximum replaces each one that is missing."""
        return cls(prompt or data.max_prompt_tokens / 2, response or data.max_response_tokens / 2)


@dataclass(frozen=True)
class StepEstimate:
    """Estimated seconds and bytes of a step."""

    parts: dict[str, float]
    """Seconds by part, in the order of a step; they add up to the whole."""
    overlapped: dict[str, float]
    """Seconds that overlap with `parts` and are not in them."""
    memory: Memory
    tokens: float
    """Tokens of prompts and responses in all samples of a step."""
    micro_batches: int
    """Micro-batches of one optimizer step."""
    rollout: RolloutTime | None = field(default=None, repr=False)

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def cost_per_million(self, cluster: Cluster) -> float | None:
        """Return the cost of a million tokens at the cluster's price."""
        if cluster.price is None:
            return None
        return cluster.price * cluster.gpus / 3600 / self.tokens_per_second * 1e6

    @property
    def limit(self) -> str:
        """Describe the part that takes most of the time, and why."""
        part = max(self.parts, key=self.parts.__getitem__)
        reason = _REASONS.get(part, "")
        if part == "rollout" and self.rollout is not None:
            host = self.rollout.host > self.rollout.memory
            reason = "the host that prepares each decoding step" if host else "reading weights, keys and values"
        return f"{part}, {self.parts[part] / self.seconds:.0%} of the step" + (f": {reason}" if reason else "")


_REASONS = {
    "backward": "arithmetic of the policy's update",
    "forward": "arithmetic of the policy's update",
    "bubble": "stages that wait for the first and the last micro-batch: fewer stages, virtual ones or smaller micro-batches",
    "waiting for the host": "kernels are over before the next are launched: larger micro-batches, less tensor parallelism",
    "recomputation": "activations that are made again",
    "expert parallel": "tokens on their way to experts and back",
    "tensor parallel": "activations gathered and scattered in each layer",
}


def training_batch(config: RunConfig, lengths: Lengths) -> Batch:
    """Return the batch of one optimizer step."""
    return Batch.of(config.samples_per_step / config.algorithm.updates_per_step, lengths.prompt, lengths.response)


def needs_old_logprobs(algorithm: AlgorithmConfig, policy: PolicyConfig) -> bool:
    """Return whether a separate pass computes the policy's log-probs, or its routes, before the first update."""
    if policy.router_replay == "R2" and algorithm.updates > 1:
        return True
    chosen = algorithm.resolved
    if chosen.rollout_correction.old_logprobs_from != "trainer":
        return False
    corrected = chosen.rollout_correction.name != "none"
    compares = corrected or surrogate_class(chosen.surrogate).ratio_reference == "old"
    in_reward = bool(chosen.kl.reward_coef) or (bool(chosen.kl.coef) and chosen.kl.place == "reward")
    return in_reward or (algorithm.updates > 1 and compares)


def step_estimate(
    config: RunConfig, spec: ModelSpec, cluster: Cluster, rates: Efficiencies, lengths: Lengths
) -> StepEstimate:
    """Estimate a step of a run on the GPUs of a cluster; `spec` is the policy."""
    models, roles = shard_roles(config, spec), config.roles
    batch, algorithm = training_batch(config, lengths), config.algorithm
    everything = replace(batch, tokens=batch.tokens * algorithm.updates_per_step)
    trainer = trainer_cluster(config.layout.world_size, cluster)
    parts: dict[str, float] = {}
    overlapped: dict[str, float] = {}

    def add(times: dict[str, float], factor: float = 1.0) -> None:
        for name, seconds in times.items():
            if seconds:
                parts[name] = parts.get(name, 0.0) + factor * seconds

    sampled = _rollout(config, spec, rates, lengths) if not algorithm.offline else None
    if sampled is not None:
        add({"rollout": sampled.total})
    turns: dict[int, dict[str, float]] = {}
    for name, role in roles.models.items():
        if role.pass_name is None or name not in models:
            continue
        if name == "policy" and not needs_old_logprobs(algorithm, config.policy):
            continue

        # A model that only runs forward has micro-batches too.
        model = replace(models[name], tokens_per_micro_batch=role.settings.tokens_per_micro_batch)
        seconds = forward_time(model, everything, trainer_cluster(model.layout.world_size, cluster), rates).total
        if role.reads_text:
            # It scores before the step's batch is packed.
            add({role.pass_name: seconds})
        else:
            turn = turns.setdefault(role.first_rank, {})
            turn[role.pass_name] = turn.get(role.pass_name, 0.0) + seconds
    # Models on separate ranks compute at the same time: the step waits for the longest turn.
    longest = max(turns, key=lambda first: sum(turns[first].values()), default=None)
    for first, turn in turns.items():
        if first == longest:
            add(turn)
        else:
            overlapped |= turn
    update = update_time(models["policy"], batch, trainer, rates)
    learning = algorithm.updates * sum(update.parts.values())
    for name, role in roles.further_learners.items():
        if name not in models:
            continue
        model, updates = models[name], role.updates_per_step
        own_cluster = trainer_cluster(model.layout.world_size, cluster)
        part = replace(everything, tokens=everything.tokens * role.epochs / updates)
        seconds = updates * update_time(model, part, own_cluster, rates).total
        overlap = 0.0
        if role.learns is Learns.BEFORE_ADVANTAGES:
            # The advantages wait for this update, and for the model's forward pass after it.
            seconds += forward_time(model, everything, own_cluster, rates).total
        elif role.first_rank:
            overlap = min(seconds, learning)
        add({name: seconds - overlap})
        overlapped |= {name: overlap} if overlap else {}
    add(update.parts, algorithm.updates)
    overlapped |= {name: algorithm.updates * seconds for name, seconds in update.overlapped.items() if seconds}
    memory = memory_of(elastic(config), spec)
    if not algorithm.offline:
        onload = memory.parameters if "parameters" in config.policy.offload.parts else 0
        sleeps = config.engine.layout is not None and config.engine.sleep and not config.engine.is_apart
        size = BYTES[config.policy.dtype]
        add({"weight sync": sync_time(spec, config.layout.world_size, size, rates, sleeps, onload)})
    add({"offload": _offload(config.policy.offload.parts, memory, rates)})
    if (config.rollout.max_staleness or 0) > 0 and sampled is not None and config.engine.is_apart:
        # The engine samples the next step's responses during this step's training.
        hidden = min(parts["rollout"], sum(seconds for name, seconds in parts.items() if name not in _SERIAL))
        overlapped["rollout"] = hidden
        parts["rollout"] -= hidden
    return StepEstimate(
        {name: seconds for name, seconds in parts.items() if seconds},
        overlapped,
        memory,
        everything.tokens,
        update.micro_batches,
        sampled,
    )


_SERIAL = ("rollout", "weight sync")
"""Parts that do not overlap with training."""


def trainer_cluster(world: int, cluster: Cluster) -> Cluster:
    """Return the cluster of the trainer's ranks: an equal share of every node if servers use the other GPUs."""
    nodes = max(1, cluster.gpus // cluster.node_gpus)
    return replace(cluster, gpus=world, node_gpus=max(1, min(cluster.node_gpus, -(-world // nodes))))


def _rollout(config: RunConfig, spec: ModelSpec, rates: Efficiencies, lengths: Lengths) -> RolloutTime:
    engine, layout = config.engine, config.engine.layout
    group = config.algorithm.samples_per_prompt
    longest = config.data.max_response_tokens
    prompts = config.data.prompts_per_step
    if config.rollout.max_staleness is None:
        # Dynamic sampling's first round may have more prompts than the step; how many rounds follow depends on the rewards.
        prompts = max(prompts, config.prompts_per_call)
    requests = Requests(prompts * group, group, lengths.prompt, lengths.response, longest)
    cache = engine_cache(config, spec)
    size = BYTES[engine.dtype or config.policy.dtype]
    # Servers that already run are assumed to use one GPU each.
    replicas, tp, ep = (len(engine.url) or config.layout.world_size, 1, 1)
    if layout is not None:
        replicas, tp, ep = layout.dp, layout.tp, layout.ep
    sampler = Sampler(
        spec,
        tp,
        ep,
        engine.max_num_seqs,
        float("inf") if cache is None else max(1.0, cache),
        size,
        is_server=engine.is_server,
        processes=engine.process_count,
        logprobs="none" if config.skips_logprobs else "collected",
        is_eager=engine.kind == "transformers",
    )
    return rollout_time(sampler, requests, replicas, rates)


def _offload(parts: Collection[str], memory: Memory, rates: Efficiencies) -> float:
    """Return the seconds to offload state to the host and to load it again; the weight sync already loads the parameters."""
    moved = {"optimizer": 2 * memory.optimizer, "parameters": memory.parameters, "gradients": 0}
    return sum(moved[name] for name in parts) / rates.rate("host_copy")


def describe_parts(times: PassTime | StepEstimate, least: float = 0.01) -> str:
    """Return the parts that matter, the largest first: `backward 3.1 s, forward 1.2`."""
    total = sum(times.parts.values())
    large = sorted(((seconds, name) for name, seconds in times.parts.items() if seconds >= least * total), reverse=True)
    return ", ".join(f"{name} {seconds:.2f}" for seconds, name in large)
