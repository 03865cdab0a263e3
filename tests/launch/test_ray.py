"""Ranks on real Ray clusters: several nodes are several raylets on this machine, each with processes of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fivefold.distributed.ports import free_port
from fivefold.launch.lock import locked
from fivefold.launch.watch import PAUSE
from tests.support.commands import LONGEST, fivefold, gone, is_free, wait_for
from tests.support.whole_runs import assert_same, make_model, metrics, write_run
from tests.support.zygote import THREADS

pytestmark = pytest.mark.ray

RUN = """
policy: {backend: "megatron:d2t2", tokens_per_micro_batch: 64}
algorithm: {name: grpo, group_size: 4}
data: {prompts_per_step: 4, max_response_tokens: 8}
trainer: {steps: 12, save_every: 2}
"""
LIGHT = """
import json, os, signal, sys, time
from pathlib import Path

from fivefold.launch.processes import end_with_launcher
from fivefold.launch.rank import _leave_error

end_with_launcher()
assert Path("handed-over").exists(), "ranks start before they can read the configuration"
rank, mode = int(os.environ["RANK"]), os.environ["FIVEFOLD_TEST_MODE"]
blocked = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])]

def saved(number, frame):
    Path(f"saved-{rank}").touch()
    if mode != "stubborn":
        os._exit(128 + number)

signal.signal(signal.SIGTERM, saved)
Path(f"rank-{rank}.partial").write_text(json.dumps({"pid": os.getpid(), "blocked": blocked, **os.environ}))
os.rename(f"rank-{rank}.partial", f"rank-{rank}.json")

def wait_for_others():
    while not all(Path(f"rank-{each}.json").exists() for each in range(int(os.environ["WORLD_SIZE"]))):
        time.sleep(0.01)

if mode == "speak":
    for number in range(1000):
        print("line", number, "x" * 200, flush=True)
    print("to standard error", file=sys.stderr, flush=True)
    sys.exit(0)
if mode == "raise" and rank == 3:
    wait_for_others()
    _leave_error("RuntimeError: planted in rank 3", "error")
    sys.exit(1)
if mode == "silent" and rank == 2:
    wait_for_others()
    print("last words of rank 2", flush=True)
    sys.exit(7)
time.sleep(1000)
"""
"""A rank that trains nothing: what the launcher does with it is the same."""
DRIVER = """
import sys
from pathlib import Path

from fivefold.config import RunConfig
from fivefold.errors import sentence_of
from fivefold.launch.ray.driver import spawn

run, hand_over = RunConfig.from_yaml("run.yaml", sys.argv[1:]), Path("handed-over").touch
try:
    sys.exit(spawn(["light"], hand_over, run.run_dir / "logs", run.roles, run.engine, run.trainer, run.launch))
except Exception as error:
    if sentence_of(error) is None:
        raise
    sys.exit("fivefold: " + sentence_of(error))
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ray")
    make_model(root, rows=16)
    write_run(root, RUN, relative=True)
    (root / "light.py").write_text(LIGHT)
    return root


@pytest.fixture(autouse=True)
def _in_root(root, monkeypatch):
    monkeypatch.chdir(root)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")])))
    remove_marks()


def remove_marks() -> None:
    for left in [*Path().glob("rank-*"), *Path().glob("saved-*"), *Path().glob("handed-over")]:
        left.unlink()


class Nodes:
    """A cluster with a head that runs nothing and two nodes of two CPUs and two GPUs that Ray takes our word for."""

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="ray-test-", dir="/tmp"))
        # Ray reads them when it is imported; a token of its own is in no file.
        self.variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16), "RAY_USAGE_STATS_ENABLED": "0"}
        port, client = free_port(), free_port()
        self.address, self.client = f"127.0.0.1:{port}", f"ray://127.0.0.1:{client}"
        self._log = (self._directory / "log").open("w+")
        words = [f"--port={port}", f"--ray-client-server-port={client}", f"--temp-dir={self._directory}"]
        self._head = self._start(0, "--head", "--include-dashboard=false", *words)
        wait_for(lambda: "ray_current_cluster" in os.listdir(self._directory) or self._head.poll() is not None)
        assert self._head.poll() is None, (self._directory / "log").read_text()
        os.environ.update(self.variables)
        self.nodes: list[subprocess.Popen[str]] = []
        from ray._raylet import GcsClient

        self._client = GcsClient(address=self.address)
        wait_for(lambda: self._alive() == 1)
        for _ in range(2):
            self.nodes.append(self._start_node())

    def _alive(self) -> int:
        time.sleep(0.1)
        return sum(node.state == 0 for node in self._client.get_all_node_info().values())

    def _start_node(self, *before: str) -> subprocess.Popen[str]:
        alive = self._alive()
        for _ in range(3):
            node = self._start(2, f"--address={self.address}", before=before)
            deadline = time.monotonic() + 60
            while node.poll() is None and time.monotonic() < deadline:
                if self._alive() == alive + 1:
                    return node
            # Two that start at once on one machine may choose the same ports.
            _end(node)
        raise AssertionError(f"no node joined the cluster: {(self._directory / 'log').read_text()}")

    def _start(self, count: int, *words: str, before: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        amounts = [f"--num-cpus={count}", f"--num-gpus={count}", f"--object-store-memory={100 * 2**20}"]
        amounts += ["--min-worker-port=0", "--max-worker-port=0"]
        return subprocess.Popen(
            [*before, sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *amounts, *words], text=True,
            start_new_session=True, stdin=subprocess.DEVNULL, env={**os.environ, **self.variables},
            stdout=self._log, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def raylet(self, number: int) -> psutil.Process:
        children = psutil.Process(self.nodes[number].pid).children(recursive=True)
        return next(child for child in children if child.name() == "raylet")

    def replace(self, number: int, *before: str) -> None:
        """Another node in the place of one; `before`: the words that its command begins with."""
        _end(self.nodes[number])
        wait_for(lambda: self._alive() == 2)
        self.nodes[number] = self._start_node(*before)

    def close(self) -> None:
        for process in [*self.nodes, self._head]:
            _end(process)
        self._log.close()
        shutil.rmtree(self._directory)
        for name in self.variables:
            del os.environ[name]


def _end(process: subprocess.Popen[str]) -> None:
    """Kill it and what it started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for member in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
    process.wait()


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Nodes]:
    nodes = Nodes()
    yield nodes
    nodes.close()


class Driver:
    """`fivefold`, or what starts light ranks, in a fresh interpreter with a session of its own."""

    def __init__(self, mode: str, *overrides: str, address: str | None, command: tuple[str, ...] = ("-c", DRIVER)) -> None:
        self.output, self.errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        keys = ["launch.backend=ray", "trainer.run_dir=runs/light", *([f"launch.ray.address={address}"] if address else [])]
        self.process = subprocess.Popen(
            [sys.executable, *command, *keys, *overrides], start_new_session=True, stdin=subprocess.DEVNULL,
            stdout=self.output, stderr=self.errors, env={**os.environ, "FIVEFOLD_TEST_MODE": mode},
        )  # fmt: skip
        self.pid = self.process.pid

    def wait_for_ranks(self, count: int = 4) -> list[dict]:
        """What they found in their environment, once all are there."""
        wait_for(lambda: all(Path(f"rank-{rank}.json").exists() for rank in range(count)), self)
        return [json.loads(Path(f"rank-{rank}.json").read_text()) for rank in range(count)]

    # What `wait_for` asks.
    def poll(self) -> int | None:
        return self.process.poll()

    @property
    def returncode(self) -> int | None:
        return self.process.returncode

    def communicate(self) -> list[str]:
        texts = []
        for file in (self.output, self.errors):
            file.seek(0)
            texts.append(file.read().decode())
        return texts

    def finish(self, seconds: float = LONGEST) -> tuple[int, str, str]:
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it runs after {seconds} s: {self.communicate()}") from None
        return (code, *self.communicate())


def pids(ranks: list[dict]) -> list[int]:
    return [rank["pid"] for rank in ranks]


# --- who is where ----------------------------------------------------------------------------------------------------


def test_neighbours_share_a_node_and_have_the_environment_variables_that_were_named(two_nodes, monkeypatch):
    monkeypatch.setenv("HF_TEST_NAMED", "1")
    monkeypatch.setenv("OWN_NAME", "2")
    monkeypatch.setenv("OWN_OTHER", "3")
    monkeypatch.setenv("UNNAMED", "4")
    driver = Driver("speak", "launch.ray.env_vars=[OWN_N*]", address=two_nodes.address)
    code, output, errors = driver.finish()
    assert code == 0, output + errors
    ranks = driver.wait_for_ranks()
    assert [(rank["RANK"], rank["LOCAL_RANK"], rank["LOCAL_WORLD_SIZE"], rank["WORLD_SIZE"]) for rank in ranks] == [
        ("0", "0", "2", "4"), ("1", "1", "2", "4"), ("2", "0", "2", "4"), ("3", "1", "2", "4")
    ]  # fmt: skip
    raylets = [int(rank["RAY_RAYLET_PID"]) for rank in ranks]
    assert raylets[0] == raylets[1] != raylets[2] == raylets[3]
    assert sorted({raylets[0], raylets[2]}) == sorted(two_nodes.raylet(number).pid for number in range(2))
    assert len({(rank["MASTER_ADDR"], rank["MASTER_PORT"]) for rank in ranks}) == 1
    for rank in ranks:
        # All of a node's ranks see all of its GPUs, and take the one of their LOCAL_RANK.
        assert rank["CUDA_VISIBLE_DEVICES"] == "0,1"
        assert rank["HF_TEST_NAMED"] == "1" and rank["OWN_NAME"] == "2" and "OWN_OTHER" not in rank and "UNNAMED" not in rank
        assert rank["OMP_NUM_THREADS"] == str(THREADS) and rank["blocked"] == []
    lines = [line for line in output.splitlines() if line.startswith("line")]
    assert lines == [f"line {number} {'x' * 200}" for number in range(1000)], "rank 0's, whole and in order"
    assert "to standard error" in errors and "to standard error" not in output
    assert f"the Ray cluster at {two_nodes.address}" in output
    assert "ranks 0-1, GPUs 0, 1" in output and "ranks 2-3, GPUs 0, 1" in output
    assert "to standard error" in Path("runs/light/logs/rank-1.log").read_text()


# --- endings ---------------------------------------------------------------------------------------------------------


def ends(driver: Driver, ranks: list[dict], code: int = 1, seconds: float = 90) -> str:
    """What a driver printed that ended in time with nothing left of its ranks, which takes 5 s on an idle machine."""
    returned, output, errors = driver.finish(seconds)
    assert returned == code, output + errors
    wait_for(lambda: gone(pids(ranks)))
    return errors.strip()


def test_a_rank_that_is_killed_on_another_node_ends_the_run_and_is_named(two_nodes):
    driver = Driver("wait", address=two_nodes.address)
    ranks = driver.wait_for_ranks()
    os.kill(ranks[3]["pid"], signal.SIGKILL)
    output = ends(driver, ranks)
    assert output.startswith("rank 3 on ") and "was killed by SIGKILL" in output.splitlines()[0]


def test_the_traceback_of_a_rank_on_another_node_is_shown(two_nodes):
    driver = Driver("raise", address=two_nodes.address)
    assert "rank 3 failed:\nRuntimeError: planted in rank 3" in ends(driver, driver.wait_for_ranks())


@pytest.mark.slow
def test_a_rank_that_ends_in_silence_is_named_with_the_end_of_its_log(two_nodes):
    driver = Driver("silent", address=two_nodes.address)
    output = ends(driver, driver.wait_for_ranks())
    assert "ended with code 7 and left no traceback" in output and "last words of rank 2" in output


@pytest.mark.slow
def test_a_worker_process_of_rays_that_is_killed_takes_its_ranks_along_and_is_named(two_nodes):
    driver = Driver("wait", address=two_nodes.address)
    ranks = driver.wait_for_ranks()
    psutil.Process(ranks[2]["pid"]).parent().kill()
    output = ends(driver, ranks)
    assert output.startswith("ranks 2-3 on ") and "Ray's worker process that started them has ended" in output


@pytest.mark.slow
def test_a_rank_that_is_stopped_on_another_node_ends_the_run_and_is_named(two_nodes):
    driver = Driver("wait", "launch.silent_seconds=5", address=two_nodes.address)
    ranks = driver.wait_for_ranks()
    os.kill(ranks[3]["pid"], signal.SIGSTOP)
    output = ends(driver, ranks, seconds=LONGEST)
    assert output.startswith("rank 3 on ") and "has given no sign of life for " in output and "stopped by a signal" in output


@pytest.mark.slow
def test_ranks_end_when_their_driver_is_not_heard_of(two_nodes):
    """A driver that is stopped is not heard of, as one beyond a network that is cut; a rank may be stopped too."""
    driver = Driver("wait", "launch.silent_seconds=5", address=two_nodes.address)
    ranks = driver.wait_for_ranks()
    os.kill(ranks[1]["pid"], signal.SIGSTOP)
    driver.process.send_signal(signal.SIGSTOP)
    try:
        wait_for(lambda: gone(pids(ranks)))
    finally:
        driver.process.kill()
        driver.process.wait()


def test_sigterm_at_the_driver_reaches_all_ranks(two_nodes):
    driver = Driver("wait", address=two_nodes.address)
    ranks = driver.wait_for_ranks()
    driver.process.terminate()
    ends(driver, ranks, 143)
    assert len(list(Path().glob("saved-*"))) == 4


@pytest.mark.slow
def test_a_second_interrupt_of_a_person_ends_ranks_that_are_busy(two_nodes):
    driver = Driver("stubborn", address=two_nodes.address)
    ranks = driver.wait_for_ranks()
    driver.process.send_signal(signal.SIGINT)
    time.sleep(PAUSE + 0.5)
    assert driver.poll() is None and not any(gone([pid]) for pid in pids(ranks))
    driver.process.send_signal(signal.SIGINT)
    ends(driver, ranks, 130)


def test_a_driver_that_is_killed_leaves_no_rank_and_the_directory_free(two_nodes):
    driver = Driver("wait", address=two_nodes.address)
    ranks = driver.wait_for_ranks()
    with pytest.raises(ValueError, match="is in use by"), locked(Path("runs/light")):
        pass
    driver.process.kill()
    begin = time.monotonic()
    wait_for(lambda: gone(pids(ranks)) and is_free(Path("runs/light")))
    assert time.monotonic() - begin < 45


@pytest.mark.slow
def test_a_driver_outside_the_cluster_starts_a_run_and_sees_a_rank_die(two_nodes):
    code, output, errors = Driver("speak", address=two_nodes.client).finish()
    assert code == 0 and "line 999" in output and "to standard error" in errors, output + errors
    remove_marks()
    driver = Driver("wait", address=two_nodes.client)
    ranks = driver.wait_for_ranks()
    os.kill(ranks[3]["pid"], signal.SIGKILL)
    assert ends(driver, ranks).startswith("rank 3 on ")


def test_a_run_on_two_nodes_equals_one_machine_and_resumes_after_a_lost_node(two_nodes, root):
    """Real ranks: two nodes of two. The raylet of one is killed, another node comes, and the run resumes with a rank on each."""
    done = fivefold("train", "run.yaml", "policy.backend=megatron:d1")
    assert done.returncode == 0, done.stderr
    train, rows = ("-m", "fivefold.cli", "train", "run.yaml"), root / "runs/nodes/metrics.jsonl"
    name = ("trainer.run_dir=runs/nodes", "trainer.device=cpu")
    driver = Driver("", "trainer.steps=100000", *name, address=two_nodes.address, command=train)
    wait_for(lambda: rows.is_file() and '"step": 3,' in rows.read_text(), driver)
    ranks = [child for node in range(2) for child in two_nodes.raylet(node).children(recursive=True)]
    ranks = [{"pid": process.pid} for process in ranks if "fivefold.launch.rank" in process.cmdline()]
    assert len(ranks) == 4
    two_nodes.raylet(1).kill()
    output = ends(driver, ranks)
    assert re.search(r"^ranks (0-1|2-3) on .* Ray node \w+: the node has left the cluster", output, re.MULTILINE), output
    two_nodes.replace(1)
    again = ("policy.backend=megatron:d2", "launch.ray.strategy=spread")
    code, output, errors = Driver("", *name, *again, address=two_nodes.address, command=train).finish()
    assert code == 0 and re.search(r"resumed after step (2|4|6|8|10) ", output), output + errors
    assert output.count("note     ray node") == 2
    assert_same(metrics(root, "nodes"), metrics(root, "base"))


# --- what cannot start -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["policy.backend=megatron:d2t4"], "room for 8 ranks with 1 GPU and 1 CPU each, 4 neighbours on one node: "),
        (
            ["launch.ray.cpus_per_rank=2", "trainer.device=cpu"],
            "room for 4 ranks with 2 CPUs each, 2 neighbours on one node: ",
        ),
    ],
)
def test_a_cluster_that_is_too_small_is_refused_with_what_it_has(two_nodes, overrides, says):
    code, _, errors = Driver("wait", *overrides, address=two_nodes.address).finish()
    assert code == 1 and says in errors
    assert "has 2 GPUs and 2 CPUs, of which 2 GPUs and 2 CPUs free" in errors
    assert not list(Path().glob("rank-*"))


@pytest.mark.slow
def test_a_run_waits_for_what_others_have_reserved_and_says_so(two_nodes):
    first = Driver("wait", address=two_nodes.address)
    ranks = first.wait_for_ranks()
    late = Driver("wait", "trainer.run_dir=runs/late", "launch.ray.wait_minutes=0.02", address=two_nodes.address)
    code, output, errors = late.finish()
    assert (
        code == 1 and "waiting for room for 4 ranks" in output and "has 2 GPUs and 2 CPUs, of which nothing free" in output
    )
    assert "no room for 4 ranks" in errors and "after 0.02 minutes" in errors
    waiting = Driver("speak", "trainer.run_dir=runs/late", address=two_nodes.address)
    wait_for(lambda: "waiting for room" in waiting.communicate()[0], waiting)
    first.process.terminate()
    ends(first, ranks, 143)
    code, output, errors = waiting.finish()
    assert code == 0 and "line 999" in output, errors


def test_an_address_where_no_one_answers_is_refused():
    code, _, errors = Driver("wait", address="127.0.0.1:9").finish()
    assert code == 1 and errors.startswith("fivefold: launch.ray.address: no Ray cluster can be joined at 127.0.0.1:9: ")


@pytest.mark.slow
def test_a_node_that_does_not_see_the_runs_files_is_refused(two_nodes, root, tmp_path):
    """The second node has another directory in the place of the run's."""
    hidden = ("unshare", "--mount", "--", "sh", "-c", f'mount -t tmpfs none "{root}/runs" && exec "$@"', "sh")
    (root / "runs").mkdir(exist_ok=True)
    if subprocess.run([*hidden, "true"], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("no mount namespace of our own")
    two_nodes.replace(1, *hidden)
    code, _, errors = Driver("wait", address=two_nodes.address).finish()
    two_nodes.replace(1)
    assert code == 1 and f"must see the files of this machine, and lacks {root}/runs/light/logs: use a file system" in errors
    assert not list(Path().glob("rank-*"))


# --- a cluster of the run's own --------------------------------------------------------------------------------------


@pytest.fixture
def alone(monkeypatch) -> Iterator[Path]:
    """Without what the cluster above is joined by; where Ray's directories are made."""
    directory = tempfile.mkdtemp(prefix="rt-", dir="/tmp")
    monkeypatch.setenv("TMPDIR", directory)
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    yield Path(directory)
    shutil.rmtree(directory)


def started_by(driver: Driver) -> list[int]:
    return [child.pid for child in psutil.Process(driver.pid).children(recursive=True)]


def test_a_cluster_that_the_run_started_ends_with_it(alone):
    """Ctrl-C reaches everything in the terminal's group; four ranks want more CPUs than there may be."""
    driver = Driver("wait", "trainer.device=cpu", address=None)
    ranks = driver.wait_for_ranks()
    everyone = started_by(driver)
    assert list(alone.glob("fivefold-ray-*"))
    assert {rank["RAY_RAYLET_PID"] for rank in ranks} <= set(map(str, everyone)) and len(everyone) > 6
    os.killpg(driver.pid, signal.SIGINT)
    ends(driver, ranks, 130)
    assert len(list(Path().glob("saved-*"))) == 4
    wait_for(lambda: gone(everyone))
    assert not list(alone.glob("fivefold-ray-*"))


@pytest.mark.slow
def test_nothing_of_a_cluster_that_the_run_started_runs_on_when_the_driver_is_killed(alone):
    driver = Driver("wait", "trainer.device=cpu", address=None)
    ranks = driver.wait_for_ranks()
    everyone = started_by(driver)
    memory = set(Path("/dev/shm").iterdir())
    driver.process.kill()
    driver.process.wait()
    begin = time.monotonic()
    wait_for(lambda: gone([*everyone, *pids(ranks)]))
    assert time.monotonic() - begin < 45
    assert not [path for path in memory if path.exists() and ("plasma" in path.name or "ray" in path.name)]
    wait_for(lambda: not list(alone.glob("fivefold-ray-*")))
