"""One run at a time in a directory."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import socket
import subprocess
import sys

import pytest

from fivefold.checkpoint.lock_file import lone_lock
from fivefold.launch.lock import locked
from tests.launch.test_endings import lock_files_only

HOLD = """
import subprocess, sys
from pathlib import Path
from fivefold.launch.lock import locked

with locked(Path(sys.argv[1])) as files:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], pass_fds=files)
    print(child.pid, flush=True)
    input()
"""


def test_a_directory_is_held_until_the_last_process_of_its_run_has_ended(tmp_path):
    """By a run whose launcher is killed while one of its ranks lives on, and then that too: nothing is left over."""
    run = tmp_path / "run"
    launcher = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    rank = int(launcher.stdout.readline())
    holder = rf"is in use by process {launcher.pid} on {re.escape(socket.gethostname())} since \d{{4}}-"
    with pytest.raises(ValueError, match=holder), locked(run):
        pass
    rank_end = os.pidfd_open(rank)
    launcher.kill()
    launcher.wait()
    with pytest.raises(ValueError, match=holder), locked(run):
        pass
    os.kill(rank, signal.SIGKILL)
    select.select([rank_end], [], [])
    os.close(rank_end)
    with locked(run):
        assert (run / "lock").read_text().startswith(f"process {os.getpid()} on ")
        with pytest.raises(ValueError, match="in use"), locked(run):
            pass
    with locked(run):
        pass


def test_a_removed_lock_file_lets_no_second_run_in(tmp_path):
    """Not into a directory whose run, or a rank of it, is still there."""
    run = tmp_path / "run"
    with locked(run):
        (run / "lock").unlink()
        for _ in range(2):
            with pytest.raises(ValueError, match="is in use by another run, which made another lock"), locked(run):
                pass
        (run / "lock").unlink()
    launcher = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    rank = int(launcher.stdout.readline())
    rank_end = os.pidfd_open(rank)
    launcher.kill()
    launcher.wait()
    (run / "lock").unlink()
    with pytest.raises(ValueError, match="is in use"), locked(run):
        pass
    os.kill(rank, signal.SIGKILL)
    select.select([rank_end], [], [])
    os.close(rank_end)
    with locked(run):
        pass


def test_the_lock_file_says_whether_it_alone_keeps_other_runs_out(tmp_path, monkeypatch):
    run = tmp_path / "run"
    assert lone_lock(run) is None
    with locked(run):
        assert lone_lock(run) is None
    monkeypatch.setattr(fcntl, "flock", fcntl.flock)
    lock_files_only()
    with locked(run):
        text = (run / "lock").read_text()
        assert lone_lock(run) == text and text.startswith(f"process {os.getpid()} on ")
        holder = rf"is in use by process {os.getpid()} on [^\n]* since [^\n]*; wait"
        with pytest.raises(ValueError, match=holder), locked(run):
            pass
