"""Time of a step on this machine's CPU, from operations and measured rates, and a trial run. No torch here.

The rates are those of this machine: numpy multiplies float32 matrices on all its cores, and reads memory, for a fraction of
a second. What Python costs between the products is left out, so a step takes at least this long.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from fivefold.config import RunConfig
from fivefold.data.rows import count_rows, part_of
from fivefold.errors import UserError
from fivefold.models.spec import ModelSpec
from fivefold.plan.estimate import Lengths, needs_old_logprobs
from fivefold.plan.memory import BYTES, training_flops
from fivefold.plan.roles import shard_roles

LONG = 60.0
"""Seconds of a step from which a trial is offered."""
TRIAL_STEPS, TRIAL_PROMPTS, TRIAL_TOKENS = 3, 4, 64
_FEW = 1e10
"""Operations of a step below which its time is not worth a sentence, nor the measurement."""
_MOST_ROWS = 10**6
_SECONDS = 0.15
_SIDE, _READ = 768, 1 << 26
"""Rows of the matrices that are multiplied, and bytes that are read."""


@dataclass(frozen=True)
class Rates:
    """Speed of this machine, over all its cores."""

    flops: float
    """Operations per second of a float32 matrix product."""
    bytes: float
    """Bytes per second that are read from memory."""


@cache
def measured_rates() -> Rates:
    """Measure this machine, in about a third of a second."""
    import numpy as np

    matrix = np.ones((_SIDE, _SIDE), np.float32)
    out, memory = np.empty_like(matrix), np.ones(_READ // 4, np.float32)
    return Rates(
        2 * _SIDE**3 / _fastest(lambda: np.matmul(matrix, matrix, out=out)), _READ / _fastest(lambda: float(memory.sum()))
    )


def _fastest(work: Callable[[], object]) -> float:
    """Return the fewest seconds of one call: another program may use the cores too."""
    times: list[float] = []
    deadline = time.perf_counter() + _SECONDS
    while not times or time.perf_counter() < deadline:
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)


def step_operations(config: RunConfig, spec: ModelSpec, lengths: Lengths) -> float:
    """Return the floating-point operations of a step on all ranks; `spec` is the policy's."""
    length = lengths.prompt + lengths.response
    tokens, models = round(config.samples_per_step * length), shard_roles(config, spec)
    total = 0.0
    for name, role in config.roles.models.items():
        if name not in models:
            continue
        forward = training_flops(models[name].spec, tokens, length) / 3
        if role.is_learner:
            total += role.epochs * training_flops(models[name].spec, tokens, length, role.settings.lora.spec)
        if role.pass_name is not None and (name != "policy" or needs_old_logprobs(config.algorithm, config.policy)):
            total += forward
    if not config.algorithm.offline:
        # A prompt is read once for each of its samples.
        total += training_flops(spec, tokens, length) / 3
    return total


def step_seconds(config: RunConfig, spec: ModelSpec, lengths: Lengths, rates: Rates) -> float:
    """Return the least seconds of a step: its operations, and the weights that each decoding step reads."""
    seconds = step_operations(config, spec, lengths) / rates.flops
    if not config.algorithm.offline:
        at_once = config.engine.max_num_seqs * config.layout.world_size
        turns = -(-config.samples_per_step // at_once)
        size = spec.parameters * BYTES[config.engine.dtype or config.policy.dtype]
        seconds += turns * lengths.response * size / rates.bytes
    return seconds


def steps_of(config: RunConfig) -> int | None:
    """Return the steps of a run: trainer.steps, or those of the rows in its files; None if a file is not here."""
    if config.trainer.steps is not None:
        return config.trainer.steps
    files = [Path(name) for name in config.data.train]
    if not all(part_of(file)[0].is_file() for file in files):
        return None
    try:
        rows = sum(count_rows(file, _MOST_ROWS) for file in files)
    except UserError:
        # The check of the data reports the reason.
        return None
    return config.trainer.epochs * (rows // config.prompts_taken)


def trial_of(config: RunConfig) -> list[str]:
    """Return the overrides of a short run that shows whether everything works: few steps, prompts and tokens."""
    algorithm, data = config.algorithm, config.data
    # Each optimizer step takes whole groups, of which each replica has some.
    part = algorithm.updates_per_step * config.layout.dp
    changes = {
        "trainer.steps": TRIAL_STEPS,
        "data.prompts_per_step": min(data.prompts_per_step, -(-TRIAL_PROMPTS // part) * part),
    }
    if not algorithm.offline:
        changes["data.max_response_tokens"] = min(TRIAL_TOKENS, data.max_response_tokens)
    if data.val:
        changes["eval.max_prompts"] = TRIAL_PROMPTS
    return [*(f"{key}={value}" for key, value in changes.items()), "trainer.run_dir=runs/trial", "trainer.resume=never"]


def shortened(config: RunConfig) -> RunConfig:
    """Return the configuration with the sizes of the trial, for its estimate."""
    values = dict(override.split("=") for override in trial_of(config))
    tokens = int(values.get("data.max_response_tokens", config.data.max_response_tokens))
    prompts = int(values["data.prompts_per_step"])
    return replace(config, data=replace(config.data, prompts_per_step=prompts, max_response_tokens=tokens))


def describe_cpu_step(config: RunConfig, spec: ModelSpec, measure: Callable[[], Rates]) -> tuple[list[str], list[str]]:
    """Return (sentences on a step's time on this CPU, overrides of a trial); both are empty where a step is short."""
    lengths = Lengths.of(config.data)
    operations = step_operations(config, spec, lengths)
    if operations < _FEW:
        return [], []
    rates = measure()
    seconds = step_seconds(config, spec, lengths, rates)
    steps = steps_of(config)
    total = f", {steps} steps {_time(steps * seconds)}" if steps else ""
    sentences = [
        f"a step takes at least {_time(seconds)} on this CPU{total}: {operations:.1e} operations "
        f"with prompts of {lengths.prompt:.0f} and responses of {lengths.response:.0f} tokens on average, at the "
        f"{rates.flops / 1e9:,.0f} GFLOP/s that numpy's matrix product reaches here, measured now"
    ]
    if seconds < LONG:
        return sentences, []
    trial = shortened(config)
    short = step_seconds(trial, spec, Lengths.of(trial.data), rates)
    return [*sentences, f"a trial shows in at least {_time(TRIAL_STEPS * short)} whether everything works"], trial_of(config)


def _time(seconds: float) -> str:
    for size, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {name}"
    return f"{seconds:.1f} s"
