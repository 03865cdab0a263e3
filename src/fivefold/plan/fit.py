"""Whether a run fits its device, phase by phase, and changes that would make it fit: configuration -> Findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

from fivefold.config import RunConfig
from fivefold.config.engine import EngineConfig
from fivefold.config.learners import LearnerConfig, OffloadConfig
from fivefold.config.machine import on_gpus
from fivefold.errors import UserError
from fivefold.keys.findings import Findings
from fivefold.layout import ParallelLayout
from fivefold.plan.devices import device_of
from fivefold.plan.memory import Memory

Measure = Callable[[RunConfig], Memory]
Remedy = tuple[str, RunConfig]

ACTIVATIONS_AT_LEAST = 0.7
"""Smallest measured share of the estimated activations, over all measured runs; parameters and states are exact."""
TIGHT = 0.95
_MOST_RANKS = 64
"""Largest multiple of the layout's ranks that is tried."""


def check_fit(findings: Findings, config: RunConfig, measure: Measure) -> None:
    """Report an error for each phase that cannot fit, with changes that would help, or a note if memory is tight."""
    device = device_of(config)
    if device is None:
        return
    large = {name: size for name, size in _phases(config, measure).items() if size > device.bytes}
    if large:
        needs = ", ".join(f"{name} needs at least {_gib(size)}" for name, size in large.items())
        findings.error(
            "policy.backend",
            f": {needs} on the fullest rank, and {device.name} has {_gib(device.bytes)}; {_advice(config, measure)}",
        )
        return
    estimate = max(sum(parts.values()) for parts in measure(elastic(config)).phases.values())
    if estimate > TIGHT * device.bytes:
        findings.note(
            f"memory is tight: about {_gib(estimate)} on the fullest rank, and {device.name} has {_gib(device.bytes)}"
        )


def _phases(config: RunConfig, measure: Measure) -> dict[str, float]:
    """Return the least memory that each phase needs, in bytes."""
    return {
        name: sum(parts.values()) - (1 - ACTIVATIONS_AT_LEAST) * parts.get("activations", 0)
        for name, parts in measure(elastic(config)).phases.items()
    }


def elastic(config: RunConfig) -> RunConfig:
    """Return the configuration with one sequence at a time for the transformers engine.

    That engine decodes as many sequences at once as fit; one is the minimum.
    """
    if config.engine.backend != "transformers":
        return config
    return replace(config, engine=replace(config.engine, max_num_seqs=1))


def _advice(config: RunConfig, measure: Measure) -> str:
    """Return single changes that suffice, with layouts of up to twice the ranks.

    Otherwise return all settings together, with the fewest ranks that suffice.
    """

    def needed(changed: RunConfig) -> float:
        return max(_phases(changed, measure).values())

    def fits(changed: RunConfig) -> bool:
        # On a host, each rank has a share of the memory.
        device = device_of(changed)
        return device is not None and needed(changed) <= device.bytes

    near = [remedy for remedy in _layouts(config, measure) if remedy[1].layout.world_size <= 2 * config.layout.world_size]
    alone = [*_settings(config), *near]
    if remedies := [f"{text} ({_gib(needed(changed))})" for text, changed in alone if fits(changed)]:
        return f"one of these makes it fit: {'; '.join(remedies)}"
    texts, everything = [text for text, _ in _settings(config)], config
    for text in texts:
        # Each change is applied to the result of the changes before it. A setting that another model takes from the policy
        # has already changed with it.
        everything = dict(_settings(everything)).get(text, everything)
    for text, changed in [("", everything), *_layouts(everything, measure)]:
        if fits(changed):
            return f"together these make it fit: {'; '.join(filter(None, [*texts, text]))} ({_gib(needed(changed))})"
    saved = "; ".join(texts) or "the settings that save memory"
    return f"with all of {saved} it still needs {_gib(needed(everything))}: use a smaller model or larger GPUs"


def _settings(config: RunConfig) -> Iterator[Remedy]:
    """Yield changes of settings that do not change the numerical results of a run, each with its key."""
    policy, has_gpus = config.policy, on_gpus(config.launch, config.trainer.device)
    everything = OffloadConfig(parameters=True, gradients=True, optimizer=True)
    if policy.recompute != "full" and "recompute_granularity" not in policy.megatron.transformer:
        yield "policy.recompute: full", replace(config, policy=replace(policy, recompute="full"))
    if has_gpus and len(policy.offload.parts) < 3:
        text = "policy.offload: {parameters: true, gradients: true, optimizer: true}"
        yield text, replace(config, policy=replace(policy, offload=everything))
    for name, role in config.roles.further_learners.items():
        if has_gpus and role.settings.offload.parts != everything.parts:
            text = f"{name}.offload: {{parameters: true, gradients: true, optimizer: true}}"
            changes: dict[str, Any] = {name: replace(cast(LearnerConfig, role.section), offload=everything)}
            yield text, replace(config, **changes)
    least = config.max_sequence_tokens * config.algorithm.samples_per_comparison
    if policy.tokens_per_micro_batch > least:
        yield (
            f"policy.tokens_per_micro_batch: {least}",
            replace(config, policy=replace(policy, tokens_per_micro_batch=least)),
        )
    for name, role in config.roles.models.items():
        if role.section.sequences_per_forward is not None and role.backend_key == f"{name}.backend":
            yield f"{name}.sequences_per_forward: null", _with(config, name, sequences_per_forward=None)
    if _shares_devices(config.engine) and has_gpus and config.engine.memory_fraction > 0.3:
        yield "engine.memory_fraction: 0.3", replace(config, engine=replace(config.engine, memory_fraction=0.3))


def _shares_devices(engine: EngineConfig) -> bool:
    """Return whether the engine has a layout on the policy's ranks."""
    return engine.layout is not None and not engine.is_apart


def _layouts(config: RunConfig, measure: Measure) -> Iterator[Remedy]:
    """Yield layouts that shard the model further: first with the same number of ranks, then with more."""
    roles = config.roles
    own_layouts = {name: of_model for name, of_model in roles.own_layouts.items() if roles[name].compared_by is None}
    for where, present in {"policy": config.layout, **own_layouts}.items():
        for factor in (2, 4, 8):
            if present.dp % factor == 0:
                yield from _layout(config, measure, where, present, dp=present.dp // factor, tp=present.tp * factor)
    # An engine on the policy's ranks and other models with their own layouts need the same number of ranks.
    if _shares_devices(config.engine) or config.roles.own_layouts or config.roles.world_size > config.layout.world_size:
        return
    layout = config.layout
    factor = 2
    while factor <= _MOST_RANKS:
        yield from _layout(config, measure, "policy", layout, tp=layout.tp * factor)
        yield from _layout(config, measure, "policy", layout, pp=layout.pp * factor)
        for tensor in (2, 4, 8):
            if factor % tensor == 0 and factor > tensor:
                yield from _layout(
                    config, measure, "policy", layout, tp=layout.tp * tensor, pp=layout.pp * (factor // tensor)
                )
        factor *= 2


def _layout(config: RunConfig, measure: Measure, where: str, present: ParallelLayout, **sizes: Any) -> Iterator[Remedy]:
    """Yield a change of one model's layout to these sizes, if the model can be sharded so."""
    try:
        layout = replace(present, **sizes)
        changed = _with(config, where, backend=str(layout))
        measure(changed)
    except UserError:
        # This layout cannot shard the model.
        return
    yield f"{where}.backend: {layout}", changed


def _with(config: RunConfig, where: str, **changes: Any) -> RunConfig:
    """Return the configuration with these keys of a model's section changed."""
    if where == "reward.model":
        reward = config.reward
        return replace(config, reward=replace(reward, model=replace(reward.model, **changes)))
    return replace(config, **{where: replace(getattr(config, where), **changes)})


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
