"""Checkpoints of a run: written to a staging directory, then renamed atomically; a corrupt one is named and skipped.

checkpoints/step-000030/   policy/ and others that learn (Megatron-Core, independent of the layout)  state.json  rng/
                           run.yaml  manifest.json
                           rollouts/ (groups that wait)  work/ (of a step that resumes between its optimizer steps)
checkpoints/latest         name of the checkpoint to resume from
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fivefold.checkpoint.manifest import MANIFEST, Entry, Manifest, entry_of, find_corruption
from fivefold.checkpoint.records import RECORDS, SAMPLES, move_rows
from fivefold.errors import UserError, shown
from fivefold.files import write_text
from fivefold.summed_files import DamagedFile, read_part, repeat_io

LATEST, NONE = "latest", "nothing"
"""Name of the pointer file, and its content while a run starts over."""


@dataclass(frozen=True)
class RunState:
    """State of a run, besides weights, that it needs to resume."""

    step: int
    """Number of finished steps."""
    version: int
    """Number of optimizer steps taken by the policy."""
    layout: str
    rollouts: dict[str, Any]
    """State of the rollout source: how many prompts were taken from the data."""
    kl_coef: float
    """Coefficient of the KL, which changes if it has a target."""
    fingerprint: dict[str, Any] = field(default_factory=dict)
    """Identity of the run: see fingerprint.py."""
    commits: dict[str, str] = field(default_factory=dict)
    """Hub id -> commit that the run has read."""
    pending: dict[str, float] | None = None
    """Metrics of the last step if a signal ended the run before its evaluation was done; its row is not written yet."""
    reached: dict[str, float] = field(default_factory=dict)
    """`trainer.stop_at` if the run ended because it was reached."""

    @classmethod
    def read(cls, directory: Path) -> RunState:
        """Read the state of a checkpoint; raises ValueError if another version of the program wrote it."""
        try:
            state = json.loads(read_part(directory / "state.json"))
            # Checkpoints of earlier versions have it, and nothing read it.
            state.pop("reward_mean", None)
            return cls(**state)
        except (TypeError, ValueError) as error:
            raise UserError(f"{directory / 'state.json'} was written by another version of fivefold: {error}") from error


class Checkpoints:
    """The checkpoints of one run directory: a single timeline, ordered by step."""

    def __init__(self, run_dir: Path, keep: int) -> None:
        self.root, self._keep = run_dir / "checkpoints", keep

    def path(self, step: int) -> Path:
        """Return the directory of the checkpoint of a step."""
        return self.root / f"step-{step:06d}"

    def staging(self, step: int) -> Path:
        """Return the directory in which the checkpoint of a step is written."""
        return self.root / f".{self.path(step).name}.partial"

    def stage(self, step: int, parts: Iterable[str]) -> None:
        """Create the empty directories that ranks write into."""
        shutil.rmtree(self.staging(step), ignore_errors=True)
        for part in parts:
            (self.staging(step) / part).mkdir(parents=True)

    def publish(self, state: RunState, files: Mapping[str, Entry]) -> None:
        """Publish `step-N` from the files that ranks have written and synced to disk: name -> entry of the manifest."""
        staging, final = self.staging(state.step), self.path(state.step)
        write_text(staging / "state.json", json.dumps(asdict(state), indent=1))
        entries = {**files, "state.json": entry_of(staging / "state.json")}
        write_text(staging / MANIFEST, Manifest(entries).text)
        # Ranks have already synced their own files to disk.
        for path in [staging / "state.json", staging / MANIFEST, *filter(Path.is_dir, staging.rglob("*")), staging]:
            sync_file(path)
        shutil.rmtree(final, ignore_errors=True)
        staging.rename(final)
        self._point_to(final.name)
        for old in [saved_step for saved_step in self._steps() if saved_step <= state.step][: -self._keep]:
            shutil.rmtree(self.path(old))

    def find(self, resume: str, warn: Callable[[str], None]) -> Path | None:
        """Return the checkpoint that `trainer.resume` selects, if any.

        Raises ValueError if a named one is damaged, or if there are checkpoints and none is intact, and OSError if one
        cannot be read.
        """
        if resume == "auto":
            return self.latest(warn)
        if resume == "never":
            return None
        if faults := find_corruption(Path(resume)):
            raise UserError(f"trainer.resume: checkpoint {resume} cannot be used: {faults}")
        _say_partial(Path(resume), warn)
        return Path(resume)

    def latest(self, warn: Callable[[str], None], damaged: Mapping[Path, str] | None = None) -> Path | None:
        """Return the checkpoint that the file `latest` names, or the latest one if it names none; None without checkpoints.

        Each damaged one is reported to `warn`, and the previous one is taken. `damaged`: faults found while tensors of
        checkpoints were read. Raises ValueError if none is intact.
        """
        names = self._names()
        for leftover in sorted(name for name in names if re.fullmatch(r"\.step-.*\.partial", name)):
            warn(f"{self.root / leftover} is a checkpoint that was not finished: ignored")
        steps, named = self._steps(), self._named(warn)
        if named == 0 or (named is None and not steps):
            return None
        faults: dict[Path, str] = {}
        if named is not None:
            if newer := [step for step in steps if step > named]:
                warn(
                    f"{self.root / LATEST} names step {named}: not looked at "
                    f"{'is' if len(newer) == 1 else 'are'} {', '.join(self.path(step).name for step in newer)}"
                )
            steps = [step for step in steps if step <= named]
            if named not in steps:
                faults[self.path(named)] = f"{LATEST} names it, and it is not there"
                warn(f"checkpoint {self.path(named)} is missing: {LATEST} names it")
        for step in reversed(steps):
            path = self.path(step)
            if not (fault := (damaged or {}).get(path) or find_corruption(path)):
                _say_partial(path, warn)
                return path
            faults[path] = fault
            warn(f"checkpoint {path} is damaged and skipped: {fault}")
        listed = "".join(f"\n  {path.name}: {fault}" for path, fault in faults.items())
        raise UserError(
            f"trainer.resume: {self.root} has checkpoints and none can be used:{listed}\n"
            "put one back from a copy, name another by trainer.resume=DIRECTORY, or start over by trainer.resume: never, "
            "which moves what is there aside"
        )

    def set_aside(self, step: int, is_pending: bool = False, warn: Callable[[str], None] = print) -> Path | None:
        """Move aside what would mix with a run that begins after `step`; return the directory, or None if nothing was moved.

        It moves newer checkpoints, rows of later steps and, from step 0, all records of a previous run. `is_pending`: the
        metrics row of the step itself is not written yet. Rows that cannot be read are reported to `warn`.
        """
        run_dir = self.root.parent
        newer = [saved_step for saved_step in self._steps() if saved_step > step]
        number = 1
        while (aside := run_dir / f"superseded-{number}").exists():
            number += 1
        if newer:
            (aside / "checkpoints").mkdir(parents=True)
            # Change the pointer first: a run that is killed in between then resumes from the same step as this one.
            left = [saved_step for saved_step in self._steps() if saved_step <= step]
            self._point_to(self.path(left[-1]).name if left else NONE)
            for saved_step in newer:
                self.path(saved_step).rename(aside / "checkpoints" / self.path(saved_step).name)
            if not left:
                (self.root / LATEST).unlink()
        for name in RECORDS:
            last = step - 1 if step == 0 or (is_pending and name not in SAMPLES) else step
            move_rows(run_dir / name, last, aside / name, warn)
        if step == 0 and aside.exists() and (run_dir / "run.yaml").is_file():
            (run_dir / "run.yaml").rename(aside / "run.yaml")
        return aside if aside.exists() else None

    def _point_to(self, name: str) -> None:
        """Write `latest` atomically."""
        pointer = self.root / ".latest.partial"
        write_text(pointer, name)
        sync_file(pointer)
        pointer.replace(self.root / LATEST)
        sync_file(self.root)

    def _named(self, warn: Callable[[str], None]) -> int | None:
        """Return the step that `latest` names; 0, which no checkpoint has, if it marks that there is none.

        None if it names no step.
        """
        pointer = self.root / LATEST
        if LATEST not in self._names():
            return None
        try:
            content = read_part(pointer, 1000)
        except DamagedFile:
            content = b""
        name = content.decode(errors="replace").strip()
        if name == NONE:
            return 0
        if (step := _step_of(name)) is None:
            warn(f"{pointer} must hold the name of a checkpoint: got {shown(name)}; the latest complete one is taken")
        return step

    def _names(self) -> list[str]:
        """Return the names in the checkpoints directory."""
        try:
            return repeat_io(lambda: os.listdir(self.root), self.root)
        except DamagedFile:
            return []

    def _steps(self) -> list[int]:
        """Return the steps of the existing checkpoints, in order."""
        return sorted(step for name in self._names() if (step := _step_of(name)) is not None)


def _say_partial(path: Path, warn: Callable[[str], None]) -> None:
    if Manifest.read(path).is_partial:
        warn(f"checkpoint {path} was written before every byte had a sum: of files above 32 MiB only both ends are checked")


def _step_of(name: str) -> int | None:
    """Return the step, from 1 on, whose checkpoint has this name; None for any other name."""
    match = re.fullmatch(r"step-([0-9]{6,18})", name)
    return (int(match[1]) or None) if match else None


def sync_file(path: Path) -> None:
    """Sync a file, or the names in a directory, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
