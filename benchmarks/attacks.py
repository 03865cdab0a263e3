"""Damage, faults and cheats against whole runs, as many as there is time for: `python -m benchmarks.attacks [PART ...]`.

Every attack follows from its number, and a fault is printed with the command that repeats it. Parts: mutated configurations,
config.json and data files; turns, requests of agents, environments, servers of tools, results of reward functions,
unusual answers and command lines of TRL that mean harm; training of what `check` accepts; flipped bytes of a checkpoint;
runs that are killed, stopped or filled up at any moment, also on Ray and with servers of vLLM where these are installed;
cheats against rewards.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import psutil

from fivefold.checkpoint.manifest import find_corruption
from tests.support import fuzz, hostile, kills
from tests.support.commands import Command
from tests.support.hostile_rewards import Answers, Rewards
from tests.support.hostile_trl import Trl
from tests.support.whole_runs import assert_same, metrics
from tests.support.zygote import zygote

_MEMORY = 6 << 30
"""Bytes that `check` may take on top of what this process has."""
_OFTEN = 1000
"""Attacks from one seed to the next."""
_FAULTS_A_RUN = 3
_RANGES = 16
"""Parts of a file, of which one gets a byte flipped."""
_SHARED_MEMORY = Path("/dev/shm")
Outcome = tuple[str, str]
"""(outcome of an attack, description of its fault; empty without one)."""


class Attack:
    """A kind of attack: prepared once in a directory of its own, then made by number."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __call__(self, number: int) -> Outcome:
        raise NotImplementedError

    def close(self) -> None:
        """End what was started."""


class Fuzz(Attack):
    """Damaged input of `check`, within a limit of time and memory."""

    damage: Callable[..., tuple[Counter[str], list[str]]] = staticmethod(fuzz.fuzz_configs)

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._inputs = fuzz.Inputs(root)

    def __call__(self, number: int) -> Outcome:
        with _limited_memory():
            counts, broken = self.damage(self._inputs, range(number, number + 1))
        return next(iter(counts)), "; ".join(broken)


class FuzzModels(Fuzz):
    damage = staticmethod(fuzz.fuzz_models)


class FuzzData(Fuzz):
    damage = staticmethod(fuzz.fuzz_data)


class Trained(Fuzz):
    """A damaged configuration that `check` accepts: training ends well, or in one sentence."""

    def __call__(self, number: int) -> Outcome:
        self._inputs.spoil_config(number)
        if fuzz.verdict(self._inputs.check)[0] != "accepted":
            return "refused by check", ""
        run_dir = self._root / f"run-{number}"
        before = os.getcwd()
        os.chdir(self._root)
        try:
            given = [f"trainer.run_dir={run_dir}", "trainer.steps=1", "launch.threads=1", "launch.silent_seconds=60"]
            done = Command("train", self._inputs.file, *given).finish()
        finally:
            os.chdir(before)
        output = done.stdout + done.stderr
        return "trained" if done.returncode == 0 else "ended in a sentence", output[-2000:] if "Traceback" in output else ""


class Turns(Attack):
    """Texts of marks that a model may sample: each is read in a time that is linear in its length, and without an error."""

    def __call__(self, number: int) -> Outcome:
        return hostile.read_a_turn(number)


class Hostile(Attack):
    """An attack whose cases all run against one object, which is made once."""

    against: Callable[[Path], Any] = hostile.Requests

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._against = self.against(root)

    def __call__(self, number: int) -> Outcome:
        return self._against(number)

    def close(self) -> None:
        self._against.close()


class HostileEnvironments(Hostile):
    against = hostile.Environments


class HostileRewards(Hostile):
    against = Rewards


class HostileAnswers(Hostile):
    against = Answers


class HostileTrl(Hostile):
    against = Trl

    def __call__(self, number: int) -> Outcome:
        with _limited_memory():
            return super().__call__(number)


class Checkpoints(Attack):
    """A byte of a checkpoint's file, in any part of it: it is found by its sums, or by the ranks that read it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        kills.prepare(root)
        kills.whole_run(root, "whole", kills.METHODS["PPO"])
        self._newest = sorted((root / "runs/whole/checkpoints").glob("step-*"))[-1]
        self._files = sorted(path for path in self._newest.rglob("*") if path.is_file() and path.stat().st_size)

    def __call__(self, number: int) -> Outcome:
        path, part = self._files[number % len(self._files)], number // len(self._files) % _RANGES
        content = bytearray(path.read_bytes())
        place = random.Random(number).randrange(len(content) * part // _RANGES, max(1, len(content) * (part + 1) // _RANGES))
        place = min(place, len(content) - 1)
        kept = bytes(content)
        content[place] ^= 1 << random.Random(number).randrange(8)
        path.write_bytes(content)
        try:
            if find_corruption(self._newest):
                return "found before any rank starts", ""
            return "found by a rank", "" if self._is_refused() else f"byte {place} of {path.relative_to(self._newest)}"
        finally:
            path.write_bytes(kept)

    def _is_refused(self) -> bool:
        """Whether a run that resumes from it alone reads all of it and says what is wrong."""
        given = [kills.METHODS["PPO"], f"trainer.run_dir={self._root}/runs/resumed", f"trainer.steps={kills.STEPS + 1}"]
        done = Command("train", self._root / "run.yaml", *given, f"trainer.resume={self._newest}").finish()
        return done.returncode != 0 and "Traceback" not in done.stdout + done.stderr


class Kills(Attack):
    """A run that is harmed, resumed elsewhere and harmed again has the numbers of one that nothing touched."""

    settings: Mapping[str, tuple[str, ...]] = {}
    layouts: Sequence[str] = kills.LAYOUTS
    methods: Sequence[str] = tuple(sorted(kills.METHODS))
    faults: Mapping[str, kills.Fault] = kills.FAULTS
    at_most = _FAULTS_A_RUN

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._prepare()
        self._untouched: dict[str, list[dict[str, float]]] = {}

    def __call__(self, number: int) -> Outcome:
        draw = random.Random(number)
        random.seed(number)
        method, name = draw.choice(self.methods), f"run-{number}"
        choice = kills.METHODS[method]
        if method not in self._untouched:
            self._untouched[method] = kills.whole_run(self._root, f"base-{method}", choice)
        with kills.file_system(self._root / "runs" / name):
            try:
                done = kills.harmed_run(
                    self._root, name, choice, draw, self.at_most, self.settings, self.layouts, self.faults
                )
                assert_same(metrics(self._root, name), self._untouched[method])
            except AssertionError as error:
                return "not resumed", f"{method}: {error}"
        done.pop(kills.BETWEEN)
        return ", ".join(f"{times} x {what}" for what, times in sorted(done.items())) or "no fault met it", ""

    def _prepare(self) -> None:
        kills.prepare(self._root)


class KillsOnRay(Kills):
    settings: Mapping[str, tuple[str, ...]] = {"launch.backend": ("ray",)}


class KillsWithServers(Kills):
    """Servers of vLLM are killed and stopped too, one, two or three of them in a replica: what they sample depends on the
    weights and on the keys of requests."""

    settings: Mapping[str, tuple[str, ...]] = {"engine.processes": ("1", "2", "3")}
    layouts = ("d1",)
    methods = ("GRPO",)
    faults = kills.SERVER_FAULTS
    at_most = 2

    def _prepare(self) -> None:
        kills.prepare(self._root, kills.SERVER, hidden=64, heads=2)


class Tests(Attack):
    """Attacks that are tests already: the number is the test's."""

    paths: tuple[str, ...] = ("tests/reward/test_code.py",)
    chosen: tuple[str, ...] = ("-m", "not vllm")

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        lines = self._pytest("--collect-only", "-q", *self.paths).stdout.splitlines()
        self._tests = [line for line in lines if "::" in line]

    def __call__(self, number: int) -> Outcome:
        test = self._tests[number % len(self._tests)]
        done = self._pytest("-q", test)
        return (
            "passed" if done.returncode == 0 else "failed",
            "" if done.returncode == 0 else f"{test}: {done.stdout[-2000:]}",
        )

    def _pytest(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        options = ["-p", "no:xdist", "-o", "addopts=", f"--basetemp={self._root}/pytest", *self.chosen]
        command = [sys.executable, "-m", "pytest", *options, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)


@dataclass(frozen=True)
class Part:
    """A row of the table: what is attacked, its share of the time, and what must be installed."""

    attack: type[Attack]
    share: float
    needs: tuple[str, ...] = ()


PARTS = {
    "configurations": Part(Fuzz, 2),
    "models": Part(FuzzModels, 1),
    "data": Part(FuzzData, 1),
    "turns": Part(Turns, 0.5),
    "requests": Part(Hostile, 0.5),
    "environments": Part(HostileEnvironments, 1),
    "rewards": Part(HostileRewards, 1),
    "answers": Part(HostileAnswers, 0.5),
    "trl": Part(HostileTrl, 1),
    "trained": Part(Trained, 2),
    "checkpoints": Part(Checkpoints, 1),
    "kills": Part(Kills, 4),
    "kills-ray": Part(KillsOnRay, 3, ("ray",)),
    "servers": Part(KillsWithServers, 3, ("vllm",)),
    "cheats": Part(Tests, 1),
}


@contextlib.contextmanager
def _limited_memory() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + _MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def own_mounts(program: list[str]) -> None:
    """Run `program` in place of this one where it has mounts of its own, unless this one has them.

    Runs that are filled up have file systems of their own, and so has shared memory: other programs of the machine do not
    write there. The mounts end with the program.
    """
    if os.environ.get("MOUNTS") != "own":
        unshare = ["unshare", "--user", "--map-root-user", "--mount", *program]
        os.execvpe(unshare[0], unshare, os.environ | {"MOUNTS": "own"})
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", _SHARED_MEMORY], check=True)


def _left(before: set[str], scratch: Path) -> list[str]:
    """Processes, shared memory and temporary directories that attacks have left."""
    family = [one for one in psutil.Process().children(recursive=True) if one.status() != psutil.STATUS_ZOMBIE]
    processes = [f"process {one.pid}: {' '.join(one.cmdline())[:200]}" for one in family]
    memory = sorted({path.name for path in _SHARED_MEMORY.iterdir()} - before)
    kept = sorted(path.name for path in scratch.iterdir() if not path.name.startswith("torchinductor_"))
    return [*processes, *(f"/dev/shm/{name}" for name in memory), *(f"temporary {name}" for name in kept)]


def attack(name: str, seconds: float, first: int, most: int | None = None) -> list[str]:
    """Make the attacks of a part from a number on until their time is over; print what they came to, and give the faults."""
    outcomes, faults, made = Counter[str](), [], 0
    shared = {path.name for path in _SHARED_MEMORY.iterdir()}
    with tempfile.TemporaryDirectory(dir="/tmp") as directory, _temporary_files() as scratch:
        root = Path(directory)
        make = PARTS[name].attack(root)
        deadline = time.monotonic() + seconds
        for number in count(first):
            # One at least: the first may need all the time there is on a slow machine.
            if (made and time.monotonic() > deadline) or made == most:
                break
            outcome, fault = make(number)
            outcomes[outcome] += 1
            made += 1
            if fault:
                faults.append(
                    f"{name} {number}: {fault}\n  again: python -m benchmarks.attacks {name} --first {number} --most 1"
                )
                print(f"FAULT {faults[-1]}", flush=True)
        # It keeps the directory for temporary files of its start.
        zygote.close()
        make.close()
        if left := _left(shared, scratch):
            faults.append(f"{name}: left behind from {first} on: {'; '.join(left)}")
            print(f"FAULT {faults[-1]}", flush=True)
    print(f"{name}: {made} from number {first} on, {len(faults)} faults", flush=True)
    for outcome, times in sorted(outcomes.items()):
        print(f"    {times:6} {outcome}", flush=True)
    return faults


@contextlib.contextmanager
def _temporary_files() -> Iterator[Path]:
    """A directory for temporary files, whose path is short enough for sockets."""
    before = os.environ.get("TMPDIR"), tempfile.tempdir
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as scratch:
        os.environ["TMPDIR"] = tempfile.tempdir = scratch
        try:
            yield Path(scratch)
        finally:
            tempfile.tempdir = before[1]
            os.environ.pop("TMPDIR") if before[0] is None else os.environ.update(TMPDIR=before[0])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.attacks", description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="all where none is named")
    parser.add_argument("--seconds", type=float, default=420.0, help="in all; the parts share it")
    parser.add_argument("--seed", type=int, default=0, help="of a thousand attacks of each part, other ones for each seed")
    parser.add_argument("--first", type=int, help="number of the first attack, in place of the seed's")
    parser.add_argument("--most", type=int, help="attacks of each part")
    options = parser.parse_args(arguments)
    first = options.seed * _OFTEN if options.first is None else options.first
    chosen = {name: PARTS[name] for name in options.parts or PARTS}
    chosen = {name: part for name, part in chosen.items() if all(map(importlib.util.find_spec, part.needs))}
    print(f"seed {options.seed}, first number {first}, {options.seconds:.0f} s for {', '.join(chosen)}", flush=True)
    shares, faults = sum(part.share for part in chosen.values()), []
    for name, part in chosen.items():
        faults += attack(name, options.seconds * part.share / shares, first, options.most)
    print(f"{len(faults)} faults in all", flush=True)
    return int(bool(faults))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    own_mounts([sys.executable, "-m", "benchmarks.attacks", *sys.argv[1:]])
    sys.exit(main())
