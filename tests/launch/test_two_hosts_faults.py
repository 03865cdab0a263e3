"""Faults of hosts, network, clocks and disks between two hosts: each ends in a sentence with host and rank, or is survived."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.launch.test_two_hosts import RUN, assert_equal_runs, finish, local, torchrun
from tests.support.commands import is_free, wait_for
from tests.support.two_hosts import Hosts, Program, skip_without, skip_without_hosts, two_hosts
from tests.support.whole_runs import make_model, metrics, write_run

pytestmark = pytest.mark.hosts

SILENT = 15
STEPS = 12
_DISK = 96 << 20


@contextmanager
def disk(path: Path) -> Iterator[None]:
    """A file system of its own in a new directory, which can be made to hang."""
    path.mkdir()
    image = path.with_suffix(".image")
    with image.open("wb") as file:
        file.truncate(_DISK)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, path], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory that both hosts share, with the run that nothing touches."""
    skip_without_hosts()
    root = tmp_path_factory.mktemp("faults")
    make_model(root, rows=16)
    write_run(root, RUN.replace("steps: 4", f"steps: {STEPS}").replace("silent_seconds: 30", f"silent_seconds: {SILENT}"))
    # Before any host is made: a host keeps the file systems that are there when it begins.
    (root / "runs").mkdir()
    with disk(root / "runs/disk"):
        with two_hosts() as hosts:
            local(hosts.north, root, "one")
        yield root


def at_step(root: Path, name: str, step: int, program: Program) -> None:
    """Waits until a run has taken a step."""
    rows = root / f"runs/{name}/metrics.jsonl"
    wait_for(lambda: rows.is_file() and f'"step": {step},' in rows.read_text(), program)


def test_a_cable_that_is_cut_for_five_seconds_changes_nothing(root):
    with two_hosts() as hosts:
        programs = torchrun(hosts, root, "short")
        at_step(root, "short", 2, programs[0])
        hosts.cable.is_cut = True
        time.sleep(5)
        assert all(program.poll() is None for program in programs) and len(metrics(root, "short")) < STEPS
        hosts.cable.is_cut = False
        finish(programs)
    assert_equal_runs(root, "short", "one")


def lost(hosts: Hosts, name: str) -> list[int]:
    """Does what the name says; returns the numbers of the hosts that are left."""
    match name:
        case "cable cut":
            hosts.cable.is_cut = True
        case "host killed":
            hosts.lose(hosts.south)
        case "head killed":
            hosts.lose(hosts.north)
    return {"cable cut": [0, 1], "host killed": [0], "head killed": [1]}[name]


@pytest.mark.parametrize("fault", ["cable cut", "host killed", "head killed"])
def test_what_is_beyond_a_lost_connection_is_named_and_the_rest_resumes(root, fault):
    name = fault.replace(" ", "-")
    with two_hosts() as hosts:
        programs = torchrun(hosts, root, name)
        at_step(root, name, 1, programs[0])
        begin, left = time.monotonic(), lost(hosts, fault)
        for number in left:
            program, (there, other) = programs[number], [("south", 1), ("north", 0)][number]
            assert program.wait(SILENT + 90) != 0
            output = " ".join(program.output.split())
            assert f"rank {number} on {['north', 'south'][number]} lost another rank" in output, program.output
            assert f"the other ranks were not heard of for {SILENT} s" in output, program.output
            assert f"rank {other} on {there}" in output and "does not answer" in output, program.output
        assert time.monotonic() - begin < SILENT + 90
        wait_for(lambda: is_free(root / "runs" / name))
        taken = len(metrics(root, name))
        assert 1 <= taken < STEPS
        local(list(hosts)[left[-1]], root, name)
    assert_equal_runs(root, name, "one")


def test_a_slow_and_lossy_network_changes_nothing(root):
    """50 ms in each direction, and one packet of a hundred lost."""
    with two_hosts(delay=0.05, loss=0.01) as hosts:
        finish(torchrun(hosts, root, "slow", "trainer.steps=2"))
        assert hosts.cable.carried > 100
        local(hosts.north, root, "slow-one", "trainer.steps=2")
    assert_equal_runs(root, "slow", "slow-one")


def test_a_clock_that_is_90_s_off_is_named_and_changes_nothing(root):
    skip_without("faketime", "faketime libfaketime")
    library = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
    with two_hosts() as hosts:
        clock = {"LD_PRELOAD": str(library), "FAKETIME": "+90s"}
        output = finish(torchrun(hosts, root, "clock", env=[{}, clock]))
    assert "the clock of rank 1 on south is 90 s later than that of rank 0 on north" in output
    assert_equal_runs(root, "clock", "one")


def test_a_shared_directory_that_hangs_is_named_and_the_run_continues_later(root):
    with two_hosts() as hosts:
        programs = torchrun(hosts, root, "disk/run")
        at_step(root, "disk/run", 2, programs[0])
        subprocess.run(["fsfreeze", "--freeze", root / "runs/disk"], check=True)
        try:
            wait_for(lambda: "that does not answer" in programs[0].output, programs[0])
        finally:
            subprocess.run(["fsfreeze", "--unfreeze", root / "runs/disk"], check=True)
        output = finish(programs)
    assert "rank 0 on north has waited for" in output or "rank 1 on south has waited for" in output
    assert_equal_runs(root, "disk/run", "one")
