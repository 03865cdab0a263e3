"""Checkpoints of a run: written to a staging directory, then renamed atomically; a corrupt one is named and skipped.

checkpoints/step-000030/   policy/ critic/ prm/ (Megatron-Core, free of the layout)  state.json  rng/  run.yaml
                           manifest.json
                           rollouts/ (groups that wait)  work/ (of a step that goes on between its optimizer steps)
checkpoints/latest         the name of the one to resume from
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fivefold.checkpoint.records import RECORDS, SAMPLES, move_rows
from fivefold.files import write_text

MANIFEST = "manifest.json"
_DIGEST_BYTES = 16 * 2**20


@dataclass(frozen=True)
class RunState:
    """What a run needs besides weights to resume."""

    step: int
    """Steps finished."""
    version: int
    """Optimizer steps taken."""
    layout: str
    rollouts: dict[str, Any]
    """State of the rollout source: how many prompts were taken from the data."""
    kl_coef: float
    """Coefficient of the KL, which moves where it has a target."""
    reward_mean: float | None = None
    fingerprint: dict[str, Any] = field(default_factory=dict)
    """What the run is: see fingerprint.py."""
    commits: dict[str, str] = field(default_factory=dict)
    """Hub id -> the commit that the run has read."""
    pending: dict[str, float] | None = None
    """Metrics of the last step, where the run was asked to end before its evaluation was done: its row is still to come."""

    @classmethod
    def read(cls, directory: Path) -> RunState:
        """The state in a checkpoint; raises ValueError where another version of the program wrote it."""
        try:
            return cls(**json.loads((directory / "state.json").read_text()))
        except TypeError as error:
            raise ValueError(f"{directory / 'state.json'} was written by another version of fivefold: {error}") from error


class Checkpoints:
    """The checkpoints of one run directory: one timeline, in the order of their steps."""

    def __init__(self, run_dir: Path, keep: int) -> None:
        self.root, self._keep = run_dir / "checkpoints", keep

    def path(self, step: int) -> Path:
        """Of the checkpoint of a step."""
        return self.root / f"step-{step:06d}"

    def staging(self, step: int) -> Path:
        """Where it is written."""
        return self.root / f".{self.path(step).name}.partial"

    def stage(self, step: int, parts: Iterable[str]) -> None:
        """Make the empty directories that ranks write into."""
        shutil.rmtree(self.staging(step), ignore_errors=True)
        for part in parts:
            (self.staging(step) / part).mkdir(parents=True)

    def publish(self, state: RunState, files: Mapping[str, list[int]]) -> None:
        """Make `step-N` of what ranks have written and brought to the disk: name -> size and digest of each file."""
        staging, final = self.staging(state.step), self.path(state.step)
        write_text(staging / "state.json", json.dumps(asdict(state), indent=1))
        whole = {**files, "state.json": size_and_digest(staging / "state.json")}
        write_text(staging / MANIFEST, json.dumps({"files": whole}, indent=1))
        # Ranks have brought their own files there.
        for path in [staging / "state.json", staging / MANIFEST, *filter(Path.is_dir, staging.rglob("*")), staging]:
            sync_file(path)
        shutil.rmtree(final, ignore_errors=True)
        staging.rename(final)
        self._point_to(final.name)
        for old in [each for each in self._steps() if each <= state.step][: -self._keep]:
            shutil.rmtree(self.path(old))

    def find(self, resume: str, warn: Callable[[str], None]) -> Path | None:
        """The checkpoint that `trainer.resume` asks for, if any; raises ValueError where one that it names is damaged."""
        if resume == "auto":
            return self.latest(warn)
        if resume == "never":
            return None
        if faults := find_corruption(Path(resume)):
            raise ValueError(f"trainer.resume: checkpoint {resume} cannot be used: {faults}")
        return Path(resume)

    def latest(self, warn: Callable[[str], None]) -> Path | None:
        """The checkpoint that the file `latest` names, or the newest without that file; each damaged one is named to `warn`
        and the one before it is taken."""
        for leftover in self.root.glob(".step-*.partial") if self.root.is_dir() else []:
            warn(f"{leftover} is a checkpoint that was not finished: ignored")
        steps = self._steps()
        named = self._named()
        if named is not None and steps and steps[-1] > named:
            newer = [step for step in steps if step > named]
            warn(
                f"{self.root / 'latest'} names step {named}: not looked at "
                f"{'is' if len(newer) == 1 else 'are'} {', '.join(self.path(step).name for step in newer)}"
            )
            steps = [step for step in steps if step <= named]
        for step in reversed(steps):
            faults = find_corruption(self.path(step))
            if not faults:
                return self.path(step)
            warn(f"checkpoint {self.path(step)} is damaged and skipped: {faults}")
        return None

    def set_aside(self, step: int, is_pending: bool = False, warn: Callable[[str], None] = print) -> Path | None:
        """Move what a run that begins after `step` would mix with: newer checkpoints, rows of later steps and, from step 0,
        everything that a run before has recorded. The directory they went to, if there were any.

        `is_pending`: the row of metrics of the step itself is still to come. Rows that cannot be read are named to `warn`.
        """
        run_dir = self.root.parent
        newer = [each for each in self._steps() if each > step]
        number = 1
        while (aside := run_dir / f"superseded-{number}").exists():
            number += 1
        if newer:
            (aside / "checkpoints").mkdir(parents=True)
            # First the name: whoever is killed in between resumes from where this run begins.
            left = [each for each in self._steps() if each <= step]
            self._point_to(self.path(left[-1]).name if left else "nothing")
            for each in newer:
                self.path(each).rename(aside / "checkpoints" / self.path(each).name)
            if not left:
                (self.root / "latest").unlink()
        for name in RECORDS:
            last = step - 1 if step == 0 or (is_pending and name != SAMPLES) else step
            move_rows(run_dir / name, last, aside / name, warn)
        if step == 0 and aside.exists() and (run_dir / "run.yaml").is_file():
            (run_dir / "run.yaml").rename(aside / "run.yaml")
        return aside if aside.exists() else None

    def _point_to(self, name: str) -> None:
        """Write `latest`, atomically."""
        pointer = self.root / ".latest.partial"
        write_text(pointer, name)
        sync_file(pointer)
        pointer.replace(self.root / "latest")
        sync_file(self.root)

    def _named(self) -> int | None:
        """The step that `latest` names, 0 where it names none; None without that file."""
        pointer = self.root / "latest"
        if not pointer.is_file():
            return None
        return _step_of(pointer.read_text().strip()) or 0

    def _steps(self) -> list[int]:
        """The steps of the checkpoints that are there, in their order."""
        found = [_step_of(path.name) for path in self.root.glob("step-*") if path.is_dir()] if self.root.is_dir() else []
        return sorted(step for step in found if step is not None)


def _step_of(name: str) -> int | None:
    found = re.fullmatch(r"step-(\d{6,})", name)
    return int(found[1]) if found else None


def find_corruption(directory: Path) -> str:
    """What is wrong with a checkpoint, or an empty text."""
    try:
        expected: dict[str, list[int]] = json.loads((directory / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__})"
    for name, (size, crc) in expected.items():
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
        if digest(path) != crc:
            return f"{name} has other content than was written"
    return ""


def size_and_digest(path: Path) -> list[int]:
    """What the manifest says of a file."""
    return [path.stat().st_size, digest(path)]


def digest(path: Path) -> int:
    """CRC-32 of a file's head and tail: of small files it is all, of large ones what does not take minutes."""
    with path.open("rb") as file:
        value = zlib.crc32(file.read(_DIGEST_BYTES))
        if path.stat().st_size > 2 * _DIGEST_BYTES:
            file.seek(-_DIGEST_BYTES, os.SEEK_END)
        return zlib.crc32(file.read(_DIGEST_BYTES), value)


def sync_file(path: Path) -> None:
    """Make a file, or the names in a directory, reach the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
