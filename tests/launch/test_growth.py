"""A long run needs no more memory at its end than at its beginning."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from itertools import pairwise

import psutil
import pytest

from tests.support.commands import LONGEST
from tests.support.whole_runs import make_model, write_run

SAMPLES = 256
RUN = """
policy: {backend: "megatron:d1", tokens_per_micro_batch: 4096}
algorithm: {name: grpo, group_size: 8, kl: {coef: 0}}
data: {prompts_per_step: 32, max_response_tokens: 4}
trainer: {steps: 300, logged_samples_per_step: 4, resume: never, guard: {every: 0}}
"""


@pytest.mark.slow
def test_ranks_do_not_grow_with_the_samples_of_300_steps(tmp_path):
    """The least memory of a stretch of steps is compared: within a step it goes up and down by more than it may grow."""
    make_model(tmp_path)
    write_run(tmp_path, RUN)
    run_dir = tmp_path / "runs/long"
    words = ["-m", "fivefold.cli", "train", tmp_path / "run.yaml", f"trainer.run_dir={run_dir}"]
    # A fresh interpreter: what one that was forked shares with its parent becomes its own little by little. One arena: the C
    # library opens further ones, of megabytes, whenever threads of a busy machine meet in it.
    environment = os.environ | {"MALLOC_ARENA_MAX": "1"}
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL, env=environment)
    held: list[tuple[int, int]] = []
    deadline = time.monotonic() + LONGEST
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
        try:
            ranks = psutil.Process(process.pid).children(recursive=True)
            most = max((child.memory_full_info().uss for child in ranks), default=0)
            held.append(((run_dir / "metrics.jsonl").read_bytes().count(b"\n"), most))
        except (psutil.Error, OSError):
            continue
    assert process.wait(LONGEST) == 0

    def least(first: int) -> int:
        return min(size for step, size in held if first <= step < first + 60)

    # What grows with the samples grows in every stretch; what is allocated once, as by a thread of a busy machine, in one.
    places = [60, 150, 240]
    growth = min(least(after) - least(before) for before, after in pairwise(places))
    samples = 90 * SAMPLES
    assert growth < 50 * samples, f"{growth / samples:.0f} bytes a sample"
