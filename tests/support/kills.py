"""Runs that are harmed at random moments, resumed on other layouts and harmed again, against the run that nothing touched.

`benchmarks/attacks.py` does so as often as it has time for. Each run's directory is a small file system of its own, which can be
filled: that takes mounts of its own, of `unshare`.
"""

from __future__ import annotations

import errno
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import psutil

from tests.support.commands import Command, children_of, gone, is_free, wait_for, words_of
from tests.support.whole_runs import REWARD, make_model, metrics
from tests.support.zygote import THREADS

STEPS = 8
RUN = """
model: {{path: {root}/model}}
policy: {{dtype: float32, tokens_per_micro_batch: 64, optimizer: {{lr: 1.0e-3, eps: 1.0e-4, warmup_steps: 2}}}}
data: {{train: [{root}/data/train.parquet], val: [{root}/data/test.parquet], prompts_per_step: 4, max_prompt_tokens: 16, max_response_tokens: 12}}
reward: {{functions: {{"{root}/reward.py:digits": 1.0}}, workers: 1}}
eval: {{max_prompts: 6}}
trainer: {{run_dir: {root}/runs/base, steps: {steps}, eval_every: 3, save_every: 2, loggers: [console], device: cpu}}
launch: {{threads: {threads}, silent_seconds: 10}}
"""
METHODS = {
    "GRPO": "algorithm={name: grpo, group_size: 2, updates_per_step: 2, kl: {coef: 0.1}}",
    "PPO": "algorithm={name: ppo, updates_per_step: 2, ppo_epochs: 2}",
    "DAPO": "algorithm={name: dapo, group_size: 2}",
}
LAYOUTS = ("d1", "d2", "t2", "p2")
SERVER = "engine: {backend: vllm:d1, mode: server, stall_seconds: 15, vllm: {kv_cache_memory_bytes: 67108864}}\n"
"""Lines of YAML for a run whose rank samples with a server of vLLM."""

SIZE = 48 << 20
"""Bytes of the file system of a run: several times what its checkpoints take."""
BETWEEN = "of its optimizer steps on resume"
FULL = "No space left on device"


@dataclass(frozen=True)
class Fault:
    """Something that is done to a run at a moment of its life."""

    harm: Callable[[Command, Path], bool]
    """Whether there was something to harm in the run of this directory."""
    when: Callable[[Command, Path, random.Random], Callable[[], bool]]
    """Whether the moment has come."""
    ends_it: bool = True


def _at_any_moment(_: Command, run: Path, draw: random.Random) -> Callable[[], bool]:
    moment = time.monotonic() + draw.uniform(0, 5)
    return lambda: time.monotonic() > moment


def _while_it_starts(process: Command, run: Path, draw: random.Random) -> Callable[[], bool]:
    """Between its first rank's start and its first step, or what it resumes from."""
    after: list[float] = []
    wait = draw.uniform(0, 1.5)

    def has_come() -> bool:
        if not after and psutil.Process(process.pid).children():
            after.append(time.monotonic())
        return bool(after) and time.monotonic() > after[0] + wait

    return has_come


def _while_it_saves(_: Command, run: Path, draw: random.Random) -> Callable[[], bool]:
    step = draw.choice(range(2, STEPS, 2))
    return (run / f"checkpoints/.step-{step:06d}.partial").exists


def _at_a_step(_: Command, run: Path, draw: random.Random) -> Callable[[], bool]:
    """Soon after one of the next steps is done, when weights are sent and the next responses are sampled."""
    rows, wait, after = run / "metrics.jsonl", draw.uniform(0, 1.5), list[float]()

    def count() -> int:
        return rows.read_bytes().count(b"\n") if rows.is_file() else 0

    awaited = count() + draw.randint(1, 3)

    def has_come() -> bool:
        if not after and count() >= awaited:
            after.append(time.monotonic())
        return bool(after) and time.monotonic() > after[0] + wait

    return has_come


def _while_a_server_starts(process: Command, run: Path, draw: random.Random) -> Callable[[], bool]:
    """While it imports, loads its first weights or samples for the first time."""
    wait, after = draw.uniform(0, 30), list[float]()

    def has_come() -> bool:
        if not after and _servers(process):
            after.append(time.monotonic())
        return bool(after) and time.monotonic() > after[0] + wait

    return has_come


def _launcher(process: Command, _: Path) -> bool:
    process.kill()
    return True


def ranks_of(process: Command) -> list[psutil.Process]:
    """Those that have begun, wherever they are below the launcher: programs of their own, or forks of the launcher here."""
    launcher = psutil.Process(process.pid)
    everyone, command = launcher.children(recursive=True), launcher.cmdline()
    programs = [one for one in everyone if "fivefold.launch.rank" in words_of(one.pid)]
    return programs or [one for one in launcher.children() if words_of(one.pid) == command]


def _rank(process: Command, _: Path) -> bool:
    return _signal_one(ranks_of(process))


def _reward_process(process: Command, _: Path) -> bool:
    everyone = psutil.Process(process.pid).children(recursive=True)
    return _signal_one([one for one in everyone if "fivefold.reward.process" in one.cmdline()])


def _signal_one(processes: list[psutil.Process], number: int = signal.SIGKILL) -> bool:
    if processes:
        random.choice(processes).send_signal(number)
    return bool(processes)


def _asked(process: Command, _: Path) -> bool:
    process.send_signal(signal.SIGTERM)
    return True


def _fill(_: Command, run: Path) -> bool:
    """The run's file system, to its last byte."""
    with (run / "filler").open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                assert error.errno == errno.ENOSPC
    return True


def _stopped_rank(process: Command, _: Path) -> bool:
    return _signal_one(ranks_of(process), signal.SIGSTOP)


def _launcher_of_a_stopped_rank(process: Command, _: Path) -> bool:
    return _signal_one(ranks_of(process), signal.SIGSTOP) and _launcher(process, _)


FAULTS = {
    "rank stopped": Fault(_stopped_rank, _at_any_moment),
    "rank stopped and launcher killed": Fault(_launcher_of_a_stopped_rank, _at_any_moment),
    "launcher killed": Fault(_launcher, _at_any_moment),
    "launcher killed while it starts or resumes": Fault(_launcher, _while_it_starts),
    "launcher killed while it saves": Fault(_launcher, _while_it_saves),
    "rank killed": Fault(_rank, _at_any_moment),
    "rank killed while it starts or resumes": Fault(_rank, _while_it_starts),
    "rank killed while it saves": Fault(_rank, _while_it_saves),
    "reward process killed": Fault(_reward_process, _at_any_moment, ends_it=False),
    "disk full": Fault(_fill, _at_any_moment),
    "disk full while it saves": Fault(_fill, _while_it_saves),
    "SIGTERM": Fault(_asked, _at_any_moment),
    "SIGTERM while it starts or resumes": Fault(_asked, _while_it_starts),
}


def _servers(process: Command) -> list[psutil.Process]:
    """The processes of a server of vLLM: the one that answers requests, the engine's and its workers."""
    everyone = psutil.Process(process.pid).children(recursive=True)
    answering = [one for one in everyone if "fivefold.engines.vllm.serve" in one.cmdline()]
    return [one for api in answering for one in (api, *api.children(recursive=True))]


def _server(process: Command, _: Path) -> bool:
    return _signal_one(_servers(process))


def _stopped_server(process: Command, _: Path) -> bool:
    """All of its processes, Python's tracker of shared memory too: it holds its requests, and answers nothing."""
    servers = _servers(process)
    for one in servers:
        one.send_signal(signal.SIGSTOP)
    return bool(servers)


SERVER_FAULTS = {
    "server killed": Fault(_server, _at_a_step, ends_it=False),
    "server killed while it starts": Fault(_server, _while_a_server_starts),
    "server stopped": Fault(_stopped_server, _at_a_step, ends_it=False),
    "launcher killed": Fault(_launcher, _at_a_step),
    "rank killed": Fault(_rank, _at_a_step),
    "rank stopped and launcher killed": Fault(_launcher_of_a_stopped_rank, _at_a_step),
    "SIGTERM": Fault(_asked, _at_a_step),
}
"""Name -> a fault that is injected into a run with servers."""


def flip_a_byte(run: Path, draw: random.Random) -> bool:
    """In a file of the latest checkpoint, where there is an older one to resume from; whether it was done."""
    checkpoints = sorted((run / "checkpoints").glob("step-*"))
    if len(checkpoints) < 2:
        return False
    path = draw.choice([path for path in checkpoints[-1].rglob("*") if path.is_file() and path.stat().st_size])
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1
    path.write_bytes(bytes(content))
    return True


def whole_run(root: Path, name: str, choice: str) -> list[dict[str, float]]:
    """The metrics of a run that nothing touches."""
    done = Command("train", root / "run.yaml", f"trainer.run_dir={root}/runs/{name}", choice).finish()
    assert done.returncode == 0, done.stderr
    return metrics(root, name)


def prepare(root: Path, further: str = "", **sizes: int) -> None:
    """A model, data, a reward and the configuration of every run, with further sections."""
    make_model(root, **sizes)
    (root / "reward.py").write_text(REWARD)
    (root / "run.yaml").write_text(RUN.format(root=root, threads=THREADS, steps=STEPS) + further)


def harmed_run(
    root: Path,
    name: str,
    choice: str,
    draw: random.Random,
    most: int,
    settings: Mapping[str, Sequence[str]] = MappingProxyType({}),
    layouts: Sequence[str] = LAYOUTS,
    faults: Mapping[str, Fault] = MappingProxyType(FAULTS),
) -> Counter[str]:
    """A run until it has finished, with at most so many faults; how often each was done, and how many steps continued in their
    middle. Each start has one of the values of every key in `settings`. Raises AssertionError where a fault was not answered
    as it should be."""
    run, done = root / "runs" / name, Counter[str]()
    while True:
        policy, in_background = draw.choice(layouts), draw.choice(["true", "false"])
        alike = [layout for layout in layouts if layout[1:] == policy[1:]]
        by_role = {"policy": policy, "reference": draw.choice(alike), "critic": draw.choice(alike)}
        overrides = [
            f"trainer.run_dir={run}",
            choice,
            *(f"{role}.backend=megatron:{layout}" for role, layout in by_role.items()),
            f"trainer.async_save={in_background}",
            *(f"{key}={draw.choice(values)}" for key, values in settings.items()),
        ]
        process = Command("train", root / "run.yaml", *overrides)
        fault = draw.choice(sorted(faults)) if sum(done.values()) < most else ""
        is_harmed = bool(fault) and _harm(process, run, faults[fault], draw)
        if is_harmed:
            done[fault] += 1
        ended = process.finish()
        # What a rank has forked to write, and reward processes, end a moment later.
        (run / "filler").unlink(missing_ok=True)
        wait_for(lambda: is_free(run))
        output = ended.stdout + ended.stderr
        assert "Traceback" not in output, (fault, overrides, output)
        done[BETWEEN] += BETWEEN in output
        if ended.returncode == 0:
            return done
        assert is_harmed and faults[fault].ends_it, (fault, overrides, output)
        assert not fault.startswith("disk full") or FULL in output, (overrides, output)
        assert "stopped" not in fault or "launcher" in fault or "no sign of life" in output, (fault, overrides, output)
        if draw.random() < 0.2 and flip_a_byte(run, draw):
            done["a byte of the newest checkpoint flipped"] += 1


def _harm(process: Command, run: Path, fault: Fault, draw: random.Random) -> bool:
    """Wait for the moment and do it, unless the run has ended before."""
    try:
        has_come = fault.when(process, run, draw)
        while process.poll() is None and not has_come():
            time.sleep(0.002)
        if process.poll() is not None:
            return False
        everyone = children_of(process.pid)
        is_harmed = fault.harm(process, run)
    except psutil.NoSuchProcess:
        return False
    if is_harmed and fault.ends_it:
        process.wait()
        wait_for(lambda: gone(everyone))
    return is_harmed


@contextmanager
def file_system(path: Path) -> Iterator[None]:
    """Of its own, and small, in a new directory."""
    path.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", path], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)
