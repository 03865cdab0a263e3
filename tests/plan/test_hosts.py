"""launch.nodes and launch.gpus_per_node against layouts and launchers."""

from __future__ import annotations

import pytest

from fivefold.config import RunConfig
from fivefold.config.loader import override
from fivefold.keys.findings import Findings
from fivefold.plan.hosts import check_hosts

APART = ["engine.backend=vllm:d2t2", "engine.placement=apart", "engine.mode=server"]


@pytest.fixture(autouse=True)
def _outside_of_launchers(monkeypatch):
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "PET_NNODES",
        "SLURM_STEP_NUM_NODES",
        "RAY_ADDRESS",
    ):
        monkeypatch.delenv(name, raising=False)


def errors(*words: str) -> list[str]:
    tree = {"model": {"path": "m"}, "data": {"train": ["a.parquet"]}, "trainer": {"device": "cpu"}}
    findings = Findings()
    check_hosts(findings, RunConfig.of(override(tree, ["policy.backend=megatron:d4t2", *words])))
    return findings.errors


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["launch.gpus_per_node=8"], None),
        (["launch.nodes=1", "launch.gpus_per_node=8"], None),
        ([], None),
        (["launch.nodes=1", "launch.gpus_per_node=12", *APART], None),
        (["launch.nodes=1", "launch.gpus_per_node=4"], "1 host of 4 GPUs have 4, too few for layouts that take 8:"),
        (["launch.nodes=2", "launch.gpus_per_node=8"], "2 hosts of 8 GPUs have 16, too many for layouts that take 8:"),
        (["launch.nodes=3"], "3 hosts of 2 GPUs have 6, too few for layouts that take 8:"),
        (["launch.gpus_per_node=8", *APART], "too many for layouts that take 12 (8 for ranks, 4 for servers)"),
        (["launch.nodes=2", "launch.gpus_per_node=4"], "2 hosts are requested, and this command starts all ranks on 1"),
        (["launch.gpus_per_node=4"], "2 hosts are requested, and this command starts all ranks on 1"),
        (["launch.nodes=2", "launch.backend=ray"], "set launch.backend: ray and launch.ray.address"),
        (["launch.nodes=2", "launch.backend=ray", "launch.ray.address=head:6379"], None),
        (["launch.nodes=2", "launch.gpu=h100-80g"], None),
    ],
)
def test_too_few_or_too_many_gpus_are_refused_with_both_numbers(words, error):
    messages = errors(*words)
    assert len(messages) == (error is not None) and all(error in message for message in messages), messages


TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"}
SLURM = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "2", "SLURM_STEP_NUM_NODES": "4"}


@pytest.mark.parametrize(
    ("environment", "words", "error"),
    [
        (TORCHRUN, ["launch.nodes=2", "launch.gpus_per_node=4"], None),
        (TORCHRUN, ["launch.gpus_per_node=6", *APART], None),
        (TORCHRUN, ["launch.nodes=4"], "launch.nodes: 4 requested, and the launcher started ranks on 2"),
        (TORCHRUN, ["launch.nodes=1"], "launch.nodes: 1 requested, and the launcher started ranks on 2"),
        (SLURM, ["launch.nodes=4", "launch.gpus_per_node=2"], None),
        (SLURM, ["launch.nodes=2"], "launch.nodes: 2 requested, and the launcher started ranks on 4"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "3"}, ["launch.nodes=2"], "4 ranks are requested on each host, and the launcher started 3"),
    ],
)  # fmt: skip
def test_hosts_are_compared_with_what_torchrun_and_slurm_report(monkeypatch, environment, words, error):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    messages = errors(*words)
    assert len(messages) == (error is not None) and all(error in message for message in messages), messages


def test_a_host_of_a_pytorch_job_is_no_rank_and_says_how_to_start(monkeypatch):
    from fivefold.launch.environment import launched_externally

    job = {"RANK": "1", "WORLD_SIZE": "2", "PET_NNODES": "2", "PET_NODE_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert not launched_externally(job) and launched_externally({**job, "LOCAL_RANK": "0"})
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    assert ["host 1 of 2" in message and "torchrun -m fivefold.cli train" in message for message in errors()] == [True]
    on_ray = ["launch.nodes=2", "launch.backend=ray", "launch.ray.address=head:6379"]
    assert ["started on host 0 alone" in message for message in errors(*on_ray)] == [True]
    monkeypatch.setenv("PET_NODE_RANK", "0")
    assert errors(*on_ray) == []
