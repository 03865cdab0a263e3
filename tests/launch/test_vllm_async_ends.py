"""Runs that sample ahead with real servers of vLLM, asked to end again and again, and with a server that stands still."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.support.async_runs import ENDLESS, check_ages_and_prompts, command, finished, make_run
from tests.support.commands import children_of, gone, wait_for

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("servers"))


def test_a_run_with_two_servers_asked_to_end_again_and_again_uses_every_prompt_once(root):
    """After a while of its own each time, so that requests are in flight, weights on their way, or a step is trained."""
    given = [
        "rollout.max_staleness=2", "engine.backend=vllm:d2", "policy.backend=megatron:d2", "trainer.save_every=0", *ENDLESS
    ]  # fmt: skip
    for step, seconds in ((1, 0.0), (3, 0.7), (5, 1.6)):
        process = command(root, "asked", *given)
        rows = root / "runs/asked/metrics.jsonl"
        wait_for(lambda step=step, rows=rows: rows.is_file() and f'"step": {step},' in rows.read_text(), process)
        time.sleep(seconds)
        everyone = children_of(process.pid)
        process.send_signal(signal.SIGTERM)
        done = process.finish()
        assert done.returncode == 128 + signal.SIGTERM, done.stdout + done.stderr
        wait_for(lambda everyone=everyone: gone(everyone))
    finished(root, command(root, "asked", *given), "asked")
    check_ages_and_prompts(root, "asked", 2)


def test_a_stalled_server_is_started_again(root):
    """Stopped and not ended: it holds its requests, or the new weights, and answers nothing."""
    process = command(root, "stalled", "rollout.max_staleness=2", "engine.stall_seconds=5")
    wait_for((root / "runs/stalled/checkpoints/step-000002").exists, process)
    for pid in children_of(process.pid):
        if (
            "fivefold.engines.vllm.serve" not in psutil.Process(pid).cmdline()
            and "vllm" in psutil.Process(pid).name().lower()
        ):
            os.kill(pid, signal.SIGSTOP)
    done = process.finish()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 servers of the engine ended or do not answer, and are started again" in done.stdout, done.stdout
    check_ages_and_prompts(root, "stalled", 2)
