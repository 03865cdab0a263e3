"""Runs over two hosts of this machine: with each launcher they equal the run on one host, and each fault ends in a sentence.

`make test-hosts`, as root: tests/support/two_hosts.py makes the hosts.
"""

from __future__ import annotations

import importlib.util
import json
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.commands import wait_for
from tests.support.two_hosts import Host, Hosts, Program, skip_without_hosts, two_hosts
from tests.support.whole_runs import assert_same, make_model, metrics, write_run

pytestmark = pytest.mark.hosts

RUN = """
policy: {backend: "megatron:d2", tokens_per_micro_batch: 64}
algorithm: {name: grpo, group_size: 4, updates_per_step: 2, kl: {coef: 0.1}}
data: {prompts_per_step: 4, max_response_tokens: 8}
trainer: {steps: 4, save_every: 2, device: cpu, logged_samples_per_step: 16}
launch: {silent_seconds: 30}
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
    hosts: Hosts,
    root: Path,
    name: str,
    *overrides: str,
    per_host: int = 1,
    rendezvous: str = "static",
    env: Sequence[Mapping[str, str]] = ({}, {}),
) -> list[Program]:
    """Starts torchrun on both hosts, as docs/multi-gpu.md has it; `env` has the variables of each."""
    where = {
        "c10d": ["--rdzv-backend", "c10d", "--rdzv-endpoint", "north:29500", "--rdzv-id", name],
        "static": ["--master-addr", "north", "--master-port", 29500],
    }[rendezvous]
    return [
        host.start(
            sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", per_host, *where,
            *([] if rendezvous == "c10d" else ["--node-rank", number]), "-m", "fivefold.cli", "train", root / "run.yaml",
            f"trainer.run_dir={root}/runs/{name}", *overrides, env=env[number],
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
        assert program.wait() == 0, "\n".join(program.output for program in programs)
    return "\n".join(program.output for program in programs)


def assert_equal_runs(root: Path, name: str, other: str) -> None:
    """The same metrics within float32's rounding, the same samples, and the same weights and moments, bit by bit.

    Metrics of asynchronous runs that count what is in flight at a moment are left out.
    """
    rows, expected = (
        [{key: value for key, value in row.items() if not key.startswith("async/")} for row in metrics(root, run_name)]
        for run_name in (name, other)
    )
    assert_same(rows, expected)
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


@pytest.fixture(scope="module")
def one(root, pair) -> str:
    """The name of the run that one host trains."""
    local(pair.north, root, "one")
    return "one"


def test_torchrun_on_two_hosts_trains_as_one_host_does(root, pair, one):
    """With the number of hosts and of their GPUs, which are compared with torchrun's."""
    finish(torchrun(pair, root, "torchrun", "launch={nodes: 2, gpus_per_node: 1, silent_seconds: 30}", rendezvous="c10d"))
    assert_equal_runs(root, "torchrun", one)


def test_another_number_of_hosts_than_torchrun_started_is_refused_with_both(root, pair):
    programs = torchrun(pair, root, "refused", "launch.nodes=1")
    assert all(program.wait() != 0 for program in programs)
    assert "launch.nodes: 1 requested, and the launcher started ranks on 2" in programs[0].output
    assert not (root / "runs/refused/metrics.jsonl").exists()


APART = [
    "policy.backend=megatron:d1", "reference={backend: 'megatron:d1', first_rank: 1}",
    "critic={backend: 'megatron:d1', first_rank: 1, optimizer: {lr: 2.0e-3, eps: 1.0e-4}}",
    "algorithm={name: ppo, updates_per_step: 2, kl: {coef: 0.1}}", "trainer.steps=2",
]  # fmt: skip


def test_ppo_with_roles_on_different_hosts_trains_as_one_host_does(root, pair):
    """The policy learns on one host, reference and critic on the other."""
    finish(torchrun(pair, root, "ppo", *APART))
    local(pair.south, root, "ppo-one", *APART)
    assert_equal_runs(root, "ppo", "ppo-one")


@pytest.fixture
def wide(root) -> list[str]:
    """A model with heads as wide as vLLM's attention on CPUs wants them; skips where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: make test-hosts runs this in .venv-vllm")
    if not (root / "wide").exists():
        (root / "wide").mkdir()
        make_model(root / "wide", hidden=64, heads=2, rows=16)
    return [
        f"model.path={root}/wide/model", "algorithm.updates_per_step=1", "trainer.steps=2",
        "engine.vllm={kv_cache_memory_bytes: 67108864}", "policy.tokens_per_micro_batch=512",
    ]  # fmt: skip


def test_vllm_in_the_ranks_of_two_hosts_trains_as_on_one_host(root, pair, wide):
    given = [*wide, "engine.backend=vllm:d2"]
    finish(torchrun(pair, root, "vllm", *given))
    local(pair.north, root, "vllm-one", *given)
    assert_equal_runs(root, "vllm", "vllm-one")


def test_a_server_on_the_other_host_samples_as_one_on_this_host_and_ahead(root, pair, wide):
    """An asynchronous run that samples nothing ahead is the same; one step ahead, what is sampled depends on moments: each
    prompt is used once, and nothing is too old."""
    given = [*wide, "policy.backend=megatron:d1", "engine.backend=vllm", "trainer.steps=4"]
    runs = {"server": (pair.south, 0), "ahead": (pair.south, 1), "server-one": (pair.north, 0)}
    servers = {host: serve(host, root) for host in pair}
    for name, (host, steps) in runs.items():
        local(pair.north, root, name, *given, f"rollout.max_staleness={steps}", f"engine.url=[http://{host.name}:8000]")
    for server in servers.values():
        server.send_signal(signal.SIGTERM)
        server.wait()
    assert_equal_runs(root, "server", "server-one")
    assert max(row["async/staleness_max"] for row in metrics(root, "ahead")) == 1
    prompts = [row["prompt_id"] for row in samples(root, "ahead")]
    assert sorted(prompts) == list(range(16))


def serve(host: Host, root: Path) -> Program:
    """Starts a server of vLLM, as docs/engines.md has it, and waits until it answers."""
    from fivefold.engines.vllm.arguments import ON_CPU

    server = host.start(
        sys.executable, "-m", "fivefold.engines.vllm.serve", "--model", root / "wide/model", "--host", host.address, "--port",
        8000, "--dtype", "float32", "--max-model-len", 64, "--enforce-eager", "--kv-cache-memory-bytes", 67108864,
        env={**ON_CPU, "TORCH_COMPILE_DISABLE": "1"},
    )  # fmt: skip
    ask = f"import urllib.request; urllib.request.urlopen('http://{host.name}:8000/health')"
    wait_for(lambda: host.start(sys.executable, "-c", ask).wait() == 0, server)
    return server
