"""Runs that sample ahead with real servers of vLLM, in which servers and trainers are killed."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.support.async_runs import check_ages_and_prompts, command, finished, make_run
from tests.support.commands import children_of, gone, is_free, wait_for
from tests.support.whole_runs import left_in

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("servers"))


def test_a_killed_server_or_trainer_loses_no_prompt_and_uses_none_twice(root, temporary):
    process = command(root, "killed", "rollout.max_staleness=2")
    checkpoints = root / "runs/killed/checkpoints"
    wait_for((checkpoints / "step-000002").exists, process)
    everyone = children_of(process.pid)
    (api,) = [pid for pid in everyone if "fivefold.engines.vllm.serve" in psutil.Process(pid).cmdline()]
    os.kill(api, signal.SIGKILL)
    wait_for((checkpoints / "step-000004").exists, process)
    everyone = children_of(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_for(lambda: gone(everyone) and is_free(root / "runs/killed"))
    left = left_in(temporary)
    finished(root, command(root, "killed", "rollout.max_staleness=2"), "killed")
    check_ages_and_prompts(root, "killed", 2)
    assert left == left_in(temporary) == []


def servers_of(process) -> list[int]:
    pids = []
    for pid in children_of(process.pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            pids += [pid] if "fivefold.engines.vllm.serve" in psutil.Process(pid).cmdline() else []
    return pids


def test_servers_and_trainers_killed_in_turn_lose_no_prompt_and_use_none_twice(root):
    """Steps take two of 64 prompts each; the server is killed after two of the steps, the run after two others."""
    name, given = "turns", ["rollout.max_staleness=2", "data.prompts_per_step=2", "trainer.steps=32", "trainer.save_every=1"]
    checkpoints = root / f"runs/{name}/checkpoints"
    process = command(root, name, *given, "trainer.keep=99")
    for step in range(2, 6):
        wait_for((checkpoints / f"step-{step:06d}").exists, process)
        everyone = children_of(process.pid)
        if step % 2:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            wait_for(lambda everyone=everyone: gone(everyone))
            process = command(root, name, *given, "trainer.keep=99")
        else:
            # Steps continue with what was sampled ahead while the server that was killed before is started again.
            wait_for(lambda process=process: servers_of(process), process)
            os.kill(servers_of(process)[0], signal.SIGKILL)
    finished(root, process, name)
    check_ages_and_prompts(root, name, 2, steps=32)
