"""A Ray cluster of two hosts: the run of one host, faults that are named with host and rank, and a clean terminal."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.launch.test_two_hosts import RUN, assert_equal_runs, finish, local
from tests.support.commands import is_free, wait_for
from tests.support.two_hosts import Host, Hosts, Program, skip_without_hosts, two_hosts
from tests.support.whole_runs import make_model, metrics, write_run

pytestmark = pytest.mark.hosts

STEPS, SILENT = 24, 15
VARIABLES = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 32, "RAY_USAGE_STATS_ENABLED": "0"}
DRIVER = ["launch.backend=ray", "launch.ray.address=north:6379", "launch.nodes=2", "launch.gpus_per_node=1"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    skip_without_hosts()
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: make test-hosts runs this in .venv-vllm")
    root = tmp_path_factory.mktemp("ray-hosts")
    make_model(root, rows=16)
    write_run(root, RUN.replace("steps: 4", f"steps: {STEPS}").replace("silent_seconds: 30", f"silent_seconds: {SILENT}"))
    with two_hosts() as hosts:
        local(hosts.north, root, "one")
    return root


def ray_start(host: Host, *words: str) -> Program:
    """Starts Ray's processes of a host, with two CPUs."""
    return host.start(
        sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=2", "--num-gpus=0",
        f"--node-ip-address={host.address}", f"--object-store-memory={100 * 2**20}", *words, env=VARIABLES,
    )  # fmt: skip


@contextmanager
def cluster() -> Iterator[Hosts]:
    """Two hosts with a Ray cluster, as docs/multi-gpu.md starts it."""
    with two_hosts() as hosts:
        head = ray_start(
            hosts.north, "--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={hosts.north.temporary}"
        )
        wait_for(lambda: "Ray runtime started" in head.output, head)
        node = ray_start(hosts.south, "--address=north:6379")
        wait_for(lambda: "Ray runtime started" in node.output, node)
        yield hosts


def drive(host: Host, root: Path, name: str, *overrides: str) -> Program:
    """Starts `fivefold train` on a host of the cluster."""
    words = [f"trainer.run_dir={root}/runs/{name}", *DRIVER, *overrides]
    return host.start(sys.executable, "-m", "fivefold.cli", "train", root / "run.yaml", *words, env=VARIABLES, cwd=root)


def is_of_ray(line: str) -> bool:
    """True for a line that Ray's own processes have written, as a state dump of a raylet."""
    return not line.startswith("rank ") and any(
        part in line for part in ("raylet", "Raylet", "(pid=", "[state-dump]", "ray::", "core_worker", "gcs_")
    )


def test_a_ray_cluster_of_two_hosts_trains_as_one_host_does(root):
    with cluster() as hosts:
        driver = drive(hosts.north, root, "ray")
        output = finish([driver])
        refused = drive(
            hosts.north, root, "refused", "launch.nodes=1", "launch.gpus_per_node=2", "policy.backend=megatron:d4"
        )
        assert refused.wait() == 2 and "have 2, too few for layouts that take 4" in refused.output
        alone = drive(hosts.north, root, "alone", "launch.nodes=3", "launch.gpus_per_node=1", "policy.backend=megatron:d3")
        assert alone.wait() != 0 and "on 3 nodes alike (launch.nodes)" in alone.output
    assert "ray node north (10.77.0.1): rank 0" in output and "ray node south (10.77.0.2): rank 1" in output
    assert [line for line in output.splitlines() if is_of_ray(line)] == []
    assert_equal_runs(root, "ray", "one")


def has_ranks(host: Host) -> bool:
    return any(
        "fivefold.launch.rank" in process.cmdline()
        for process in host.processes()
        if process.status() != psutil.STATUS_ZOMBIE
    )


@pytest.mark.parametrize("fault", ["cable cut", "host killed", "node process killed", "head killed"])
def test_a_host_that_ray_loses_is_named_and_the_rest_resumes(root, fault):
    name = fault.replace(" ", "-")
    with cluster() as hosts:
        driver = drive(hosts.north, root, name)
        rows = root / f"runs/{name}/metrics.jsonl"
        wait_for(lambda: rows.is_file() and '"step": 3,' in rows.read_text(), driver)
        begin = time.monotonic()
        match fault:
            case "cable cut":
                hosts.cable.is_cut = True
            case "node process killed":
                next(process for process in hosts.south.processes() if process.name() == "raylet").kill()
            case "host killed":
                hosts.lose(hosts.south)
            case "head killed":
                hosts.lose(hosts.north)
        if fault != "head killed":
            assert driver.wait(SILENT + 90) == 1, driver.output
            assert "rank 1 on south (10.77.0.2), Ray node " in driver.output
            assert [line for line in driver.output.splitlines() if is_of_ray(line)] == []
        # Ranks beyond the cut end by themselves.
        wait_for(lambda: not has_ranks(hosts.south))
        assert time.monotonic() - begin < SILENT + 90
        assert 3 <= len(metrics(root, name)) < STEPS
        wait_for(lambda: is_free(root / "runs" / name))
        local(hosts.south if fault == "head killed" else hosts.north, root, name)
    assert_equal_runs(root, name, "one")
