"""Ranks that others start: torchrun, Slurm, one launcher on each of several nodes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from fivefold.distributed.ports import free_port
from fivefold.launch.environment import complete, first_host, launched_externally
from tests.launch.test_resume import RUN, add_commit, with_a_hub_of_files
from tests.support.commands import Command, fivefold, wait_for
from tests.support.whole_runs import assert_same, make_model, metrics, write_run

SRUN = {
    "SLURM_JOB_ID": "1234567", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "gpu[03-04]",
}  # fmt: skip


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"), ("a,b", "a"), ("gpu[03-06,9],login1", "gpu03"), ("gpu[7,9-12]", "gpu7"),
        ("rack1-n[001-128]", "rack1-n001"), ("10.0.0.1", "10.0.0.1"), ("n[2]-ib,m", "n2-ib"),
    ],
)  # fmt: skip
def test_the_first_host_of_a_list_of_slurm_is_found(nodes, first):
    assert first_host(nodes) == first


def test_a_task_of_srun_knows_who_it_is():
    environment = dict(SRUN)
    assert launched_externally(environment)
    complete(environment)
    variables = {name: environment[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")}
    assert variables == {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "gpu03"}
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    other = {**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    complete(other)
    assert other["MASTER_PORT"] == environment["MASTER_PORT"], "all tasks meet at one port"
    next_step = {**SRUN, "SLURM_STEP_ID": "1"}
    complete(next_step)
    assert next_step["MASTER_PORT"] != environment["MASTER_PORT"]


def test_a_shell_or_a_single_task_of_an_allocation_starts_its_ranks_itself():
    assert not launched_externally({**SRUN, "SLURM_STEP_NUM_TASKS": "1"})
    assert not launched_externally({name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"})


@pytest.mark.parametrize(
    ("known", "local"), [({"SLURM_LOCALID": "3"}, "3"), ({"LOCAL_WORLD_SIZE": "4"}, "2"), ({"LOCAL_RANK": "5"}, "5")]
)
def test_the_number_on_the_node_is_derived(known, local):
    environment = {"RANK": "6", "WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "1", **known}
    complete(environment)
    assert environment["LOCAL_RANK"] == local


def test_ranks_without_a_number_on_their_node_do_not_all_take_the_first_gpu():
    with pytest.raises(ValueError, match="rank 6 of 8 needs its number on its node"):
        complete({"RANK": "6", "WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "1"})
    with pytest.raises(ValueError, match="MASTER_ADDR, MASTER_PORT is missing"):
        complete({"RANK": "6", "WORLD_SIZE": "8", "LOCAL_RANK": "0"})


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("nodes")
    make_model(root, rows=16)
    write_run(root, RUN, relative=True)
    return root


@pytest.fixture(autouse=True)
def _in_root(root, monkeypatch):
    monkeypatch.chdir(root)


def start(environment: Mapping[str, str], *overrides: str, hook=None) -> Command:
    """`fivefold train` as one rank, with an environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        return Command("train", "run.yaml", "policy.backend=megatron:d2", *overrides, hook=hook)


def nodes(port: int) -> list[dict[str, str]]:
    """Two nodes of one rank each."""
    common = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    return [{**common, "RANK": str(rank), "MASTER_PORT": str(port)} for rank in range(2)]


def test_srun_alone_starts_a_run(root):
    """With the variables of two tasks on this machine; as the run that starts its ranks itself."""
    single = fivefold("train", "run.yaml", "policy.backend=megatron:d2")
    assert single.returncode == 0, single.stderr
    job = {**SRUN, "SLURM_JOB_ID": str(free_port()), "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    tasks = [
        start({**job, "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
              "trainer.run_dir=runs/srun")
        for rank in range(2)
    ]  # fmt: skip
    for task in tasks:
        done = task.finish()
        assert done.returncode == 0, done.stdout + done.stderr
    assert_same(metrics(root, "srun"), metrics(root, "base"))


def test_each_of_two_nodes_has_its_own_cache_and_detects_the_other_s_death(root, tmp_path):
    """Training of two launchers, a hub model that the first rank of each node reads, and the death of one node."""
    environments = nodes(free_port())
    for node in range(2):
        add_commit(tmp_path / f"hub-{node}", root / "model", "1" * 40, 1.0)
        environments[node]["HF_HUB_CACHE"] = str(tmp_path / f"hub-{node}")
    more = ["model.path=someone/tiny", "trainer.run_dir=runs/nodes", "trainer.steps=100000", "trainer.save_every=0"]
    first, second = (start(environment, *more, hook=with_a_hub_of_files) for environment in environments)
    rows = root / "runs/nodes/metrics.jsonl"
    wait_for(lambda: rows.is_file() and '"step": 2,' in rows.read_text(), first)
    os.killpg(second.pid, signal.SIGKILL)
    begin = time.monotonic()
    done = first.finish()
    assert time.monotonic() - begin < 45
    assert done.returncode == 1
    assert "lost another rank, which has the reason" in done.stderr
