"""Temporary directories end with the process that has them, in whatever way it ends."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fivefold.distributed.scratch import remove_scratch, scratch_directory

HOLD = (
    "import sys; from fivefold.distributed.scratch import scratch_directory; "
    "print(scratch_directory(), flush=True); sys.stdin.read()"
)


def test_files_of_a_killed_process_are_removed_by_the_next_one_and_no_others(temporary):
    processes = [
        subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    killed, living = (Path(process.stdout.readline().strip()) for process in processes)
    (killed / "socket").touch()
    processes[0].kill()
    processes[0].wait()
    # The same number may be that of a process of another container, which shares the directory.
    elsewhere = temporary / f"fivefold-{processes[0].pid}-elsewhere"
    elsewhere.mkdir()
    held = os.open(elsewhere, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    directory = scratch_directory()
    assert sorted(temporary.iterdir()) == sorted([living, elsewhere, directory])
    os.close(held)
    processes[1].communicate()
    remove_scratch(os.getpid())
    assert scratch_directory().parent == temporary and len(list(temporary.iterdir())) == 1


def test_sockets_have_room_for_their_names_wherever_temporary_files_are(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 60)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    directory = scratch_directory()
    assert directory.is_dir() and len(f"{directory}/{'x' * 36}") <= 107
    assert directory.stat().st_mode & 0o777 == 0o700
    remove_scratch(os.getpid())
    assert not directory.exists()


SHARE = """
import multiprocessing, sys, time
from multiprocessing import shared_memory
from fivefold.distributed.scratch import name_shared_memory, scratch_directory

def child(lock, ready):
    own = multiprocessing.get_context("spawn").Lock()
    ready.set()
    time.sleep(600)

if __name__ == "__main__":
    name_shared_memory(scratch_directory())
    spawn = multiprocessing.get_context("spawn")
    lock, ready, block = spawn.Lock(), spawn.Event(), shared_memory.SharedMemory(create=True, size=10)
    spawn.Process(target=child, args=(lock, ready)).start()
    ready.wait()
    print(block.name, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("by", ["its launcher", "the next process"])
def test_shared_memory_of_a_session_that_is_killed_is_removed_with_its_directory(temporary, by):
    (program := temporary / "share.py").write_text(SHARE)
    process = subprocess.Popen(
        [sys.executable, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    block = process.stdout.readline().strip()
    (directory,) = temporary.glob("fivefold-*")
    # The block, the lock, five semaphores of the event, and the lock of the child.
    names = [*Path("/dev/shm").glob(f"*{directory.name}*")]
    assert len(names) == 8 and Path("/dev/shm", block) in names
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert all(name.exists() for name in names)
    remove_scratch(process.pid) if by == "its launcher" else scratch_directory()
    assert not any(name.exists() for name in names) and not directory.exists()
    remove_scratch(os.getpid())
