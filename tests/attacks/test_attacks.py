"""A slice of the attacks: other ones for each seed, and a fault is printed with the command that repeats it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

import pytest

from tests.support.commands import program, python

_LEAVES = """
import sys
import time
from pathlib import Path

from benchmarks import attacks

class Leaves(attacks.Attack):
    def __call__(self, number):
        time.sleep(0.5)
        if number:
            Path("/dev/shm/of_the_attack").touch()
        return "made", ""

attacks.own_mounts([sys.executable, *sys.orig_argv[1:]])
attacks.PARTS["leaves"] = attacks.Part(Leaves, 1)
attacks.main(["leaves", "--first", sys.argv[1], "--most", "1"])
"""


@pytest.fixture
def other_program():
    """Files that another program writes to the shared memory of the machine meanwhile."""
    stop, files = threading.Event(), []

    def write() -> None:
        while not stop.wait(0.05):
            files.append(Path(tempfile.mkstemp(dir="/dev/shm")[1]))

    thread = threading.Thread(target=write)
    thread.start()
    yield files
    stop.set()
    thread.join()
    for path in files:
        path.unlink()


def test_shared_memory_of_other_programs_is_no_fault_and_that_of_attacks_is(other_program):
    if (
        shutil.which("unshare") is None
        or subprocess.run(["unshare", "--user", "--map-root-user", "--mount", "true"]).returncode
    ):
        pytest.skip("no mounts of its own here")
    alone, leaving = (python("-c", _LEAVES, number) for number in (0, 1))
    assert alone.stdout.endswith("\n0 faults in all\n"), alone
    assert "FAULT leaves: left behind from 1 on: /dev/shm/of_the_attack\n" in leaving.stdout, leaving
    assert len(other_program) > 10
    assert not Path("/dev/shm/of_the_attack").exists()


@pytest.mark.attacks
def test_a_slice_of_the_attacks_finds_no_fault():
    seconds, seed = os.environ.get("FIVEFOLD_ATTACK_SECONDS", "360"), os.environ.get("SEED", "0")
    print(f"SEED={seed} make test-attacks repeats these attacks", flush=True)
    done = program("benchmarks.attacks", "--seconds", seconds, "--seed", seed)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
