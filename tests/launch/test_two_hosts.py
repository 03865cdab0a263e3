"""Runs over two hosts of this machine: with each launcher they equal the run on one host, and each fault ends in a sentence.

`make test-hosts`, as root: tests/support/two_hosts.py makes the hosts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.two_hosts import Host, Hosts, Program, skip_without_hosts, two_hosts
from tests.support.whole_runs import assert_same, make_model, metrics, write_run

pytestmark = pytest.mark.hosts

RUN = """
policy: {backend: "megatron:d2", tokens_per_micro_batch: 64}
algorithm: {name: grpo, group_size: 4, updates_per_step: 2, kl: {coef: 0.1}}
data: {prompts_per_step: 4, max_response_tokens: 8}
trainer: {steps: 4, save_every: 2, device: cpu, logged_samples_per_step: 16}
launch: {silent_seconds: 10}
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that both hosts share, with models and data."""
    skip_without_hosts()
    root = tmp_path_factory.mktemp("hosts")
    make_model(root, rows=16)
    write_run(root, RUN)
    return root


@pytest.fixture(scope="module")
def pair(root) -> Iterator[Hosts]:
    """Two hosts for tests that leave them as they are."""
    with two_hosts() as hosts:
        yield hosts


def torchrun(
    hosts: Hosts, root: Path, name: str, *overrides: str, per_host: int = 1, rendezvous: str = "static"
) -> list[Program]:
    """Starts torchrun on both hosts, as docs/multi-gpu.md has it."""
    where = {
        "c10d": ["--rdzv-backend", "c10d", "--rdzv-endpoint", "north:29500", "--rdzv-id", name],
        "static": ["--master-addr", "north", "--master-port", "29500"],
    }[rendezvous]
    return [
        host.start(
            sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", per_host, *where,
            *([] if rendezvous == "c10d" else ["--node-rank", number]), "-m", "fivefold.cli", "train", root / "run.yaml",
            f"trainer.run_dir={root}/runs/{name}", *overrides,
        )
        for number, host in enumerate(hosts)
    ]  # fmt: skip


def local(host: Host, root: Path, name: str, *overrides: str) -> None:
    """Trains on one host, whose launcher starts all ranks."""
    host.run(
        sys.executable, "-m", "fivefold.cli", "train", root / "run.yaml", f"trainer.run_dir={root}/runs/{name}", *overrides
    )


def finish(programs: list[Program]) -> str:
    """Returns what programs said that all ended well."""
    for program in programs:
        assert program.wait() == 0, "\n".join(each.said for each in programs)
    return "\n".join(each.said for each in programs)


def assert_equal_runs(root: Path, name: str, other: str) -> None:
    """The same metrics within float32's rounding, the same samples, and the same weights and moments, bit by bit."""
    assert_same(metrics(root, name), metrics(root, other))
    assert samples(root, name) == samples(root, other) != []
    files = [
        path.relative_to(root / "runs" / other) for path in (root / "runs" / other).glob("checkpoints/*/*/*.safetensors")
    ]
    assert files
    for file in files:
        got, want = load_file(root / "runs" / name / file), load_file(root / "runs" / other / file)
        assert got.keys() == want.keys() and all(torch.equal(got[key], want[key]) for key in want), file


def samples(root: Path, name: str) -> list[dict[str, Any]]:
    """Returns a run's samples without the time of day."""
    lines = (root / f"runs/{name}/samples.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key != "wall"} for line in lines]


def test_torchrun_on_two_hosts_trains_as_one_host_does(root, pair):
    finish(torchrun(pair, root, "torchrun", rendezvous="c10d"))
    local(pair.north, root, "one")
    assert_equal_runs(root, "torchrun", "one")
