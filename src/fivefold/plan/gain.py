"""Estimates that `check` adds: whether the run fits, a step's time by part, the change that gains most. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fivefold.config import RunConfig
from fivefold.config.learners import OffloadConfig
from fivefold.config.packages import NOT_INSTALLED
from fivefold.config.validate import validate
from fivefold.errors import UserError
from fivefold.layout import ParallelLayout
from fivefold.models.spec import ModelSpec
from fivefold.plan.efficiency import Efficiencies
from fivefold.plan.estimate import Lengths, StepEstimate, describe_parts, step_estimate
from fivefold.plan.hardware import Cluster
from fivefold.plan.processes import WORTH, fastest, step_seconds, with_processes
from fivefold.plan.run_rates import RunRates

Change = tuple[str, RunConfig]


def describe_step(config: RunConfig, spec: ModelSpec) -> list[str]:
    """Describe memory, the time of a step and the change that would gain most; empty if the device's rates are unknown."""
    try:
        known = RunRates.of(config)
    except UserError as error:
        # A run can start without an estimate of its time.
        return [f"no time is estimated: {error}"]
    if known is None:
        return []
    cluster, rates, fault = known.cluster, known.rates, known.flash_fault
    kind = cluster.gpu
    lengths = Lengths.of(config.data)
    estimate = step_estimate(config, spec, cluster, rates, lengths)
    assumed = f"prompts of {lengths.prompt:.0f} and responses of {lengths.response:.0f} tokens on average"
    if fault is not None:
        why = "" if fault == NOT_INSTALLED else f"{fault}; "
        assumed += f' and without flash-attn-4 ({why}pip install "fivefold[flash]")'
    held = estimate.memory.total
    fits = "fits" if held <= cluster.bytes else "may not fit"
    lines = [
        f"it {fits} {kind}: about {held / 2**30:.1f} of {cluster.bytes / 2**30:.1f} GiB on the fullest rank",
        f"a step takes about {estimate.seconds:.1f} s on {kind} with {assumed}: {describe_parts(estimate, 0.02)}",
    ]
    best = best_change(config, spec, cluster, rates, lengths, estimate)
    if best is not None:
        lines.append(f"what gains most: {best[0]}, about {best[1]:.1f} s instead of {estimate.seconds:.1f}")
    return lines


def best_change(
    config: RunConfig, spec: ModelSpec, cluster: Cluster, rates: Efficiencies, lengths: Lengths, now: StepEstimate
) -> tuple[str, float] | None:
    """Return the single change that fits and makes a step shortest, with its seconds; None if no change gains enough."""
    best: tuple[str, float] | None = None
    room = max(cluster.room, now.memory.total)
    processes = with_processes(config, fastest(step_seconds(config, spec, cluster, rates, lengths)))
    for text, changed in [*_changes(config), (f"engine.processes: {processes.engine.processes}", processes)]:
        try:
            spec.check_layout(changed.layout, changed.policy.megatron.pipeline_split)
            if validate(changed).errors:
                continue
            estimate = step_estimate(changed, spec, cluster, rates, lengths)
        except UserError:
            # This layout cannot shard the model.
            continue
        least = (1 - WORTH) * now.seconds if best is None else best[1]
        if estimate.memory.total <= room and estimate.seconds < least:
            best = text, estimate.seconds
    return best


def _changes(config: RunConfig) -> Iterator[Change]:
    """Yield changes of one setting or layout that do not change what is learned."""
    policy, engine = config.policy, config.engine
    for recompute in ("none", "selective"):
        if policy.recompute == "full" or (policy.recompute == "selective" and recompute == "none"):
            yield f"policy.recompute: {recompute}", replace(config, policy=replace(policy, recompute=recompute))
    for factor in (2, 4):
        tokens = policy.tokens_per_micro_batch * factor
        yield (
            f"policy.tokens_per_micro_batch: {tokens}",
            replace(config, policy=replace(policy, tokens_per_micro_batch=tokens)),
        )
    if policy.offload.parts:
        yield "policy.offload: {}", replace(config, policy=replace(policy, offload=OffloadConfig()))
    for text in _near(config.layout):
        yield f"policy.backend: {text}", replace(config, policy=replace(policy, backend=text))
    if config.algorithm.offline or engine.url:
        return
    for fraction in (0.6, 0.7, 0.8, 0.9):
        if engine.layout is not None and fraction > engine.memory_fraction:
            yield f"engine.memory_fraction: {fraction}", replace(config, engine=replace(engine, memory_fraction=fraction))
    if engine.layout is None:
        world = config.layout.world_size
        yield f"engine.backend: vllm:d{world}", replace(config, engine=replace(engine, backend=f"vllm:d{world}"))
        return
    for tp in (1, 2, 4, 8):
        if engine.layout.world_size % tp == 0 and tp != engine.layout.tp:
            text = f"{engine.kind}:d{engine.layout.world_size // tp}t{tp}"
            yield f"engine.backend: {text}", replace(config, engine=replace(engine, backend=text))


def _near(layout: ParallelLayout) -> Iterator[str]:
    """Yield layouts with the same number of ranks: a factor of 2 moved between dimensions, or `ep` doubled or halved."""
    names = ("dp", "tp", "pp", "cp")
    changes = [
        {source: getattr(layout, source) // 2, target: getattr(layout, target) * 2}
        for source in names
        for target in names
        if source != target and getattr(layout, source) % 2 == 0
    ]
    changes += [{"ep": size} for size in (layout.ep * 2, layout.ep // 2) if size]
    for sizes in changes:
        try:
            yield str(replace(layout, **sizes))
        except UserError:
            # Experts cannot be sharded over the remaining ranks.
            continue
