"""Servers of vLLM that are killed or stopped leave no process and no shared memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.engines.test_server_engine import server_of
from tests.engines.test_vllm_engine import SIZES
from tests.support.commands import wait_for
from tests.support.engines import named_blocks
from tests.support.tiny_models import make_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model("qwen3_tied", tmp_path_factory.mktemp("model") / "qwen3_tied", **SIZES)


HOST = """
import sys, torch
from pathlib import Path
from tests.engines.test_server_engine import server_of
served = server_of(Path(sys.argv[1]), Path(sys.argv[2]), tensor_parallel=2)
served.start()
served.wait()
print(served._process.pid, flush=True)
served._process.wait()
print("ended", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("victim", ["the rank", "the API server", "the engine core", "a worker"])
def test_whatever_is_killed_no_process_and_no_shared_memory_stays(model, tmp_path, victim):
    host = subprocess.Popen(
        [sys.executable, "-c", HOST, str(model), str(tmp_path / "log")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    line = host.stdout.readline()
    assert line, (tmp_path / "log").read_text()[-3000:]
    api = psutil.Process(int(line))
    (core,) = [child for child in api.children() if "EngineCore" in " ".join(child.cmdline()) or child.children()]
    family = [api, *api.children(recursive=True)]
    killed = {
        "the rank": psutil.Process(host.pid),
        "the API server": api,
        "the engine core": core,
        "a worker": core.children()[-1],
    }
    blocks = named_blocks(process.pid for process in family)
    killed[victim].kill()
    _, alive = psutil.wait_procs(family, timeout=15)
    host.communicate()
    assert alive == [], [process.cmdline() for process in alive]
    # Python's tracker removes what a killed process had under a name, a moment later.
    wait_for(lambda: not any(block.exists() for block in blocks))


def is_there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_starting_server_that_ends_with_its_tracker_leaves_nothing_over(model, tmp_path, number):
    """Killed, as for lack of memory, or stopped and then ended by its rank: Python's tracker removes nothing any more."""
    server = server_of(model, tmp_path / "log")
    server.start()
    group = server._process.pid
    # Before it is ready, names of semaphores are needed: processes that it starts open them by name.
    wait_for(lambda: bool(named_blocks(process.pid for process in server._family())), server._process)
    blocks = named_blocks(process.pid for process in server._family())
    os.killpg(group, number)
    if number == signal.SIGKILL:
        server._process.wait()
        assert any(block.exists() for block in blocks)
    server.end()
    wait_for(lambda: not is_there(group))
    assert not any(block.exists() for block in blocks)
    server.close()
