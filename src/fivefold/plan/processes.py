"""How many of vLLM's processes share the GPUs of a replica: configuration, model, rates -> a number. No torch here."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

from fivefold.config import RunConfig
from fivefold.config.machine import elsewhere
from fivefold.config.validate import validate
from fivefold.errors import UserError
from fivefold.models.spec import ModelSpec
from fivefold.plan.efficiency import Efficiencies
from fivefold.plan.engine_checks import engine_cache, token_bytes
from fivefold.plan.estimate import Lengths, step_estimate
from fivefold.plan.hardware import Cluster
from fivefold.plan.run_rates import RunRates

WORTH = 0.03
"""Smallest share of a step that a change must gain to be made or named."""
COUNTS = (1, 2, 4)
"""Numbers of processes that are compared."""
_CORES = 2
"""Cores that a process keeps busy while it samples: one for its requests, one for its steps; more for tensor ranks."""


def with_processes(config: RunConfig, count: int) -> RunConfig:
    """Return the run with so many processes in each replica of its engine."""
    return replace(config, engine=replace(config.engine, processes=count))


def step_seconds(
    config: RunConfig, spec: ModelSpec, cluster: Cluster, rates: Efficiencies, lengths: Lengths, most: int = COUNTS[-1]
) -> dict[int, float]:
    """Return the seconds of a step by number of processes: one, and the others that the run may have and that fit."""
    one = with_processes(config, 1)
    now = step_estimate(one, spec, cluster, rates, lengths)
    seconds = {1: now.seconds}
    engine = one.engine
    if engine.kind != "vllm" or engine.url or now.rollout is None:
        return seconds
    if now.rollout.host < WORTH * now.seconds or (cluster.gpus > cluster.node_gpus and not engine.is_apart):
        # Only the host's work is divided; and ranks reach the processes next to them on one machine only.
        return seconds
    room = max(cluster.room, now.memory.total)
    sequence = token_bytes(engine, config.policy, spec) * (engine.max_model_len or config.max_sequence_tokens)
    for count in COUNTS[1:]:
        changed = with_processes(config, count)
        cache = engine_cache(changed, spec)
        if count > most or (cache is not None and cache // count < sequence):
            break
        estimate = step_estimate(changed, spec, cluster, rates, lengths)
        if estimate.memory.total > room:
            break
        seconds[count] = estimate.seconds
    if fastest(seconds) > 1:
        faults = set(validate(one).errors)
        seconds = {
            count: seconds[count] for count in seconds if set(validate(with_processes(config, count)).errors) <= faults
        }
    return seconds


def fastest(seconds: dict[int, float]) -> int:
    """Return the fewest processes with which a step is not slower than the fastest by more than `WORTH`."""
    return next(count for count in sorted(seconds) if seconds[count] * (1 - WORTH) <= min(seconds.values()))


def decide(config: RunConfig, spec: ModelSpec) -> tuple[int, str]:
    """Return the number of processes in place of `engine.processes: auto`, and a sentence about it.

    The sentence is empty for engines that cannot share a GPU: `validate` has said that the key has no effect on them.
    """
    if config.engine.kind != "vllm" or config.engine.url:
        return 1, ""
    try:
        known = RunRates.of(config)
        if known is None:
            return 1, "engine.processes: auto is 1, as for devices without known rates"
        most = _most(config)
        lengths = Lengths.of(config.data)
        seconds = step_seconds(config, spec, known.cluster, known.rates, lengths, most)
    except UserError as error:
        # A run can start without an estimate of its time.
        return 1, f"engine.processes: auto is 1, no time is estimated: {error}"
    count = fastest(seconds)
    others = ", ".join(f"{seconds[other]:.1f} with {other}" for other in seconds if other != count)
    text = f"engine.processes: auto is {count}: a step takes about {seconds[count]:.1f} s"
    text += f" ({others})" if others else ""
    return count, text + (f"; this machine's cores are enough for {most}" if most < COUNTS[-1] else "")


def decided(config: RunConfig, spec: ModelSpec) -> tuple[RunConfig, str]:
    """Return the run with a number in place of `engine.processes: auto`, and a sentence about it: empty if there was a
    number, or an engine that cannot share a GPU."""
    if config.engine.processes != "auto":
        return config, ""
    count, why = decide(config, spec)
    return with_processes(config, count), why


def _most(config: RunConfig) -> int:
    """Return for how many processes of each replica the cores of this machine are enough; any number on other machines."""
    engine = config.engine
    if config.launch.gpu is not None or elsewhere(config.launch) or engine.layout is None:
        return COUNTS[-1]
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    cores_per_replica = _CORES + (engine.layout.tp if engine.layout.tp > 1 else 0)
    return max(1, cores // (cores_per_replica * engine.layout.dp))
