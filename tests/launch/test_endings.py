"""Runs that are asked to end, and ranks that die: what is saved, who is named, and as what."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fivefold.launch.lock import locked
from fivefold.launch.watch import PAUSE
from tests.support.commands import LONGEST, Command, children_of, fivefold, gone, wait_for, words_of
from tests.support.engines import named_blocks
from tests.support.whole_runs import assert_same, make_model, metrics, write_run

RUN = """
policy: {backend: "megatron:d2", tokens_per_micro_batch: 24}
algorithm: {name: grpo, group_size: 4}
engine: {max_num_seqs: 2}
data: {val: [$ROOT/data/test.parquet], prompts_per_step: 4, max_response_tokens: 8}
reward: {timeout_seconds: 500}
eval: {max_prompts: 4}
trainer: {steps: 3, eval_every: 2, eval_before_train: false}
launch: {timeout_minutes: 600}
"""
SLOW_REWARD = """
import time
from pathlib import Path

def digits(response):
    if Path(__file__).with_name("slow-reward").exists():
        time.sleep(400)
    return sum(c.isdigit() for c in response) / 12
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("endings")
    make_model(root, rows=16)
    write_run(root, RUN, reward=SLOW_REWARD)
    return root


@pytest.fixture(scope="module")
def base(root: Path) -> list[dict[str, float]]:
    """The run that is not interrupted."""
    done = fivefold("train", root / "run.yaml")
    assert done.returncode == 0, done.stderr
    return metrics(root, "base")


def _mark(name: str) -> None:
    (Path(os.environ["FIVEFOLD_TEST_ROOT"]) / name).touch()


def _is_marked(name: str) -> bool:
    return (Path(os.environ["FIVEFOLD_TEST_ROOT"]) / name).exists()


def slow_reward_in_step_2():
    from fivefold.rollout.sources import EngineRollouts

    original = EngineRollouts.next

    def following(self, step):
        if step == 1:
            _mark("slow-reward")
        return original(self, step)

    EngineRollouts.next = following


def slow_rollout_in_step_2():
    """Eight responses of a rank, two at a time, of eight tokens: minutes."""
    from fivefold.engines import transformers as engine
    from fivefold.rollout.sources import EngineRollouts

    original, sample = EngineRollouts.next, engine.sample_token

    def following(self, step):
        if step == 1:
            _mark("slow-rollout")
        return original(self, step)

    def slowly(*arguments):
        time.sleep(3 if _is_marked("slow-rollout") else 0)
        return sample(*arguments)

    EngineRollouts.next, engine.sample_token = following, slowly


def slow_training_in_step_2():
    """Sixteen micro-batches: minutes."""
    from fivefold.backend.micro_batches import MicroBatches
    from fivefold.megatron.model import MegatronModel

    step, make = MegatronModel.train_step, MicroBatches._make

    def following(self, *arguments):
        if self.version == 1:
            _mark("slow-training")
        return step(self, *arguments)

    def slowly(self, number):
        time.sleep(3 if _is_marked("slow-training") and not self._batching.mesh.ranks.heartbeat._places else 0)
        return make(self, number)

    MegatronModel.train_step, MicroBatches._make = following, slowly


def slow_second_update_in_step_2():
    """Of the critic, where it is the one that is meant, otherwise of the policy."""
    from fivefold.megatron.model import MegatronModel

    step = MegatronModel.train_step

    def following(self, *arguments):
        while self.version == 3 and self.spec.value_head == (os.environ["SLOW_MODEL"] == "critic"):
            _mark("slow-update")
            self._mesh.ranks.barrier()
            time.sleep(0.01)
        return step(self, *arguments)

    MegatronModel.train_step = following


def slow_evaluation_after_step_2():
    from fivefold.trainer.evaluation import Evaluation

    original = Evaluation.measure

    def following(self, models):
        if models.policy.version == 2:
            _mark("slow-reward")
        return original(self, models)

    Evaluation.measure = following


@pytest.mark.parametrize(
    ("hook", "layout", "whom", "saved"),
    [
        (slow_reward_in_step_2, "d2", "everyone", 1),
        (slow_rollout_in_step_2, "d2", "rank 1", 1),
        (slow_training_in_step_2, "p2", "launcher", 1),
        (slow_evaluation_after_step_2, "t2", "launcher", 2),
    ],
)
def test_sigterm_saves_within_its_grace_wherever_the_run_is(root, base, monkeypatch, hook, layout, whom, saved):
    """Each stage takes minutes here and the signal comes in the middle of it: to the launcher, to one rank, or twice to every
    process, as Slurm sends it. The run has no other checkpoint, and continues as if nothing had been."""
    monkeypatch.setenv("FIVEFOLD_TEST_ROOT", str(root))
    name = hook.__name__
    overrides = [f"trainer.run_dir={root}/runs/{name}", f"policy.backend=megatron:{layout}"]
    process = Command("train", root / "run.yaml", *overrides, hook=hook)
    wait_for(lambda: any(root.glob("slow-*")), process)
    time.sleep(1.0)
    everyone = children_of(process.pid)
    ranks = sorted(child.pid for child in psutil.Process(process.pid).children())
    whose = {"launcher": [process.pid], "rank 1": ranks[1:], "everyone": [process.pid, *everyone] * 2}[whom]
    begin = time.monotonic()
    for pid in whose:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    done = process.finish()
    seconds = time.monotonic() - begin
    for mark in root.glob("slow-*"):
        mark.unlink()
    assert done.returncode == 128 + signal.SIGTERM, done.stdout + done.stderr
    assert seconds < 30, f"{seconds} s from the signal to the end"
    # The launcher says which signal it got.
    assert ("asked to end in step" if whom == "rank 1" else "asked to end by SIGTERM: the run saves") in done.stdout
    checkpoints = root / "runs" / name / "checkpoints"
    assert [path.name for path in checkpoints.glob("step-*")] == [f"step-{saved:06d}"]
    wait_for(lambda: gone(everyone))
    resumed = fivefold("train", root / "run.yaml", *overrides)
    assert resumed.returncode == 0, resumed.stderr
    assert f"resumed after step {saved} " in resumed.stdout
    assert_same(metrics(root, name), base)


@pytest.mark.parametrize(
    ("method", "model", "taken", "before", "after"),
    [
        ("{name: grpo, group_size: 4, updates_per_step: 2, kl: {coef: 0.1}}", "policy", 1, "d2", "t2"),
        ("{name: grpo, group_size: 4, ppo_epochs: 2, surrogate: clip_cov}", "policy", 1, "t2", "d2"),
        ("{name: ppo, group_size: 4, updates_per_step: 2}", "critic", 1, "p2", "d2"),
        ("{name: dapo, group_size: 4, credit: gae, updates_per_step: 2}", "policy", 3, "d2", "p2"),
    ],
)  # fmt: skip
def test_a_step_continues_between_its_updates_on_another_layout_unchanged(
    root, monkeypatch, method, model, taken, before, after
):
    """Samples, advantages and what was taken of the step are in the checkpoint: none is taken twice, and none is left out."""
    monkeypatch.setenv("FIVEFOLD_TEST_ROOT", str(root))
    monkeypatch.setenv("SLOW_MODEL", model)
    name = f"between-{before}-{after}"
    given = [f"algorithm={method}", "engine.max_num_seqs=256"]
    whole = fivefold("train", root / "run.yaml", *given, f"trainer.run_dir={root}/runs/{name}-whole")
    assert whole.returncode == 0, whole.stderr
    given.append(f"trainer.run_dir={root}/runs/{name}")
    process = Command("train", root / "run.yaml", *given, *on(before), hook=slow_second_update_in_step_2)
    wait_for((root / "slow-update").exists, process)
    process.send_signal(signal.SIGTERM)
    done = process.finish()
    (root / "slow-update").unlink()
    assert done.returncode == 128 + signal.SIGTERM, done.stdout + done.stderr
    assert f"in step 2, which continues after {taken} of its optimizer steps on resume" in done.stdout
    resumed = fivefold("train", root / "run.yaml", *given, *on(after))
    assert resumed.returncode == 0 and "resumed after step 1 " in resumed.stdout, resumed.stdout + resumed.stderr
    assert f"step 2 continues after {taken} of its optimizer steps" in resumed.stdout
    assert_same(metrics(root, name), metrics(root, f"{name}-whole"))
    rows = [json.loads(line) for line in (root / "runs" / name / "samples.jsonl").read_text().splitlines()]
    others = [json.loads(line) for line in (root / "runs" / f"{name}-whole" / "samples.jsonl").read_text().splitlines()]
    assert [(row["step"], row["response"]) for row in rows] == [(row["step"], row["response"]) for row in others]


def on(layout: str) -> list[str]:
    """The layout of policy and critic."""
    return [f"{role}.backend=megatron:{layout}" for role in ("policy", "critic")]


def rank_1_is_late():
    from fivefold.megatron import mesh

    join = mesh.init_process_group

    def late(*arguments):
        if os.environ["RANK"] == "1":
            Path("late").touch()
            time.sleep(LONGEST)
        join(*arguments)

    mesh.init_process_group = late


def test_sigterm_before_ranks_are_joined_ends_those_that_wait_for_others(root, tmp_path, monkeypatch):
    """Rank 1 ends at once; rank 0 waits for it where no handler of Python's runs."""
    monkeypatch.chdir(tmp_path)
    process = Command(
        "train", root / "run.yaml", f"trainer.run_dir={tmp_path}/run", "policy.backend=megatron:d2", hook=rank_1_is_late
    )
    wait_for((tmp_path / "late").exists, process)
    time.sleep(2)
    everyone = children_of(process.pid)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 143
    wait_for(lambda: gone(everyone))


def test_a_second_interrupt_of_a_person_ends_the_run_at_once(root, monkeypatch):
    """While the first one waits for its place; the same one by another way, a moment later, does not."""
    monkeypatch.setenv("FIVEFOLD_TEST_ROOT", str(root))
    process = Command("train", root / "run.yaml", f"trainer.run_dir={root}/runs/twice", hook=slow_training_in_step_2)
    wait_for((root / "slow-training").exists, process)
    everyone = children_of(process.pid)
    for _ in range(3):
        process.send_signal(signal.SIGINT)
    time.sleep(PAUSE + 0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    begin = time.monotonic()
    done = process.finish()
    (root / "slow-training").unlink()
    assert done.returncode == 128 + signal.SIGINT and time.monotonic() - begin < 60
    assert not list((root / "runs/twice/checkpoints").glob("step-*"))
    wait_for(lambda: gone(everyone))


ENDLESS = "trainer.steps=100000"


@pytest.mark.parametrize(("rank", "number"), [(1, signal.SIGKILL), (0, signal.SIGSEGV)])
def test_a_rank_that_is_killed_is_named_and_not_the_one_that_survives(root, tmp_path, monkeypatch, rank, number):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    process = Command("train", root / "run.yaml", f"trainer.run_dir={tmp_path}/run", "trainer.save_every=1", ENDLESS)
    wait_for((tmp_path / "run/checkpoints/step-000001").exists, process)
    ranks = sorted(psutil.Process(process.pid).children(), key=lambda child: child.pid)
    assert len(ranks) == 2
    os.kill(ranks[rank].pid, number)
    done = process.finish()
    assert done.returncode == 1
    headline = done.stderr.strip().splitlines()[0]
    assert headline.startswith(f"rank {rank} on {socket.gethostname()} was ")
    assert number.name in headline and "out of memory" not in headline
    assert "closed by peer" not in done.stderr and f"rank {1 - rank} " not in done.stderr
    assert not list((tmp_path / "tmp").glob("pymp-*")), "directories of helpers of a save"


def every_data_set_is_large() -> None:
    from fivefold.data import prompt_cache

    prompt_cache.IN_MEMORY = prompt_cache._PROCESS_ROWS = 4


@pytest.mark.parametrize("victim", ["rank", "launcher"])
def test_a_run_killed_while_processes_tokenize_leaves_nothing_over(root, victim):
    """Python's tracker, which removes semaphores, is killed with the session of the rank that it tracks for."""
    run = f"trainer.run_dir={root}/runs/tokenizing-{victim}"
    process = Command("train", root / "run.yaml", run, hook=every_data_set_is_large)
    wait_for(lambda: bool(named_blocks(children_of(process.pid))), process)
    everyone = children_of(process.pid)
    blocks = named_blocks(everyone)
    tokenizing = [pid for pid in everyone if "tracker_fd" in " ".join(words_of(pid))]
    os.kill(psutil.Process(tokenizing[0]).ppid() if victim == "rank" else process.pid, signal.SIGKILL)
    process.wait()
    wait_for(lambda: gone(everyone) and not any(block.exists() for block in blocks))


def lock_files_only() -> None:
    """Refuse locks of directories that are called `run`, as NFS does for all."""
    flock = fcntl.flock

    def of_files(file: int, operation: int) -> None:
        if Path(f"/proc/self/fd/{file}").resolve().name == "run":
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(file, operation)

    fcntl.flock = of_files


@pytest.mark.parametrize("change", ["replaced", "removed"])
def test_where_only_files_lock_a_run_whose_lock_is_not_its_own_saves_nothing(root, tmp_path, monkeypatch, change):
    run = tmp_path / "run"
    process = Command(
        "train", root / "run.yaml", f"trainer.run_dir={run}", "trainer.save_every=1", "trainer.keep=99", ENDLESS,
        hook=lock_files_only,
    )  # fmt: skip
    wait_for((run / "checkpoints/step-000002").exists, process)
    (run / "lock").unlink()
    monkeypatch.setattr(fcntl, "flock", fcntl.flock)
    lock_files_only()
    with locked(run) if change == "replaced" else contextlib.nullcontext():
        before = len(list((run / "checkpoints").glob("step-*")))
        done = process.finish()
    assert done.returncode == 1
    holder = f"is of process {os.getpid()} on " if change == "replaced" else "is gone; "
    assert f"the lock file of this run in {run} {holder}" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert len(list((run / "checkpoints").glob("step-*"))) <= before + 1


HUNGRY = """
import os, time
if os.environ["RANK"] == "1":
    kept = []
    while True:
        kept.append(b"x" * 2**20)
time.sleep(100)
"""
LIMITED = """
import os, sys
from pathlib import Path
from fivefold.config.schema import LaunchConfig
from fivefold.launch.local import spawn

Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
sys.exit(spawn(["hungry"], 2, Path(sys.argv[2]), LaunchConfig(threads=1)))
"""


@contextlib.contextmanager
def limited_cgroup(limit: int) -> Iterator[Path]:
    """A cgroup within this process's with so many bytes of memory; skips the test where none can be made."""
    limit_file = None
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            limit_file = (Path("/sys/fs/cgroup/memory") / path.strip("/"), "memory.limit_in_bytes")
        elif not controllers and limit_file is None:
            limit_file = (Path("/sys/fs/cgroup") / path.strip("/"), "memory.max")
    assert limit_file is not None
    group = limit_file[0] / f"fivefold-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup of our own: {error}")
    try:
        try:
            (group / limit_file[1]).write_text(str(limit))
        except OSError as error:
            pytest.skip(f"no limit of memory on a cgroup of our own: {error}")
        yield group
    finally:
        group.rmdir()


def test_a_rank_that_the_kernel_kills_is_reported_as_out_of_memory(tmp_path):
    """A real limit and a real kill: the same signal as above, and another sentence."""
    (tmp_path / "hungry.py").write_text(HUNGRY)
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    with limited_cgroup(200 * 2**20) as group:
        done = subprocess.run(
            [sys.executable, "-c", LIMITED, str(group), str(tmp_path / "logs")],
            capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, timeout=300,
        )  # fmt: skip
    assert done.returncode == 1
    headline = done.stderr.strip().splitlines()[0]
    assert headline.startswith(f"rank 1 on {socket.gethostname()} was killed by SIGKILL, probably out of memory: ")
    assert "oom" in headline.lower() or "Killed process" in headline
