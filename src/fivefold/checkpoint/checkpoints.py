"""Checkpoints of a run: written to a staging directory, then renamed atomically; a corrupt one is named and skipped.

checkpoints/step-000030/   policy/ critic/ (Megatron-Core, free of the layout)  state.json  rng/  run.yaml  manifest.json
checkpoints/latest         the name of the newest one
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
_DIGEST_BYTES = 16 * 2**20
RECORDS = ("metrics.jsonl", "samples.jsonl", "trace/stages.jsonl")
"""Files of a run that grow by each step."""


@dataclass(frozen=True)
class RunState:
    """What a run needs besides weights to resume."""

    step: int
    """Steps finished."""
    version: int
    """Optimizer steps taken."""
    seed: int
    layout: str
    rollouts: dict[str, Any]
    """State of the rollout source: how many prompts were taken from the data."""
    kl_coef: float
    """Coefficient of the KL, which moves where it has a target."""
    reward_mean: float | None = None

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

    def write(self, state: RunState, is_main: bool, barrier: Callable[[], None], fill: Callable[[Path], None]) -> Path:
        """Write `step-N`: every rank calls this; `fill(directory)` writes each rank's part."""
        final = self.root / f"step-{state.step:06d}"
        staging_dir = self.root / f".{final.name}.partial"
        if is_main:
            shutil.rmtree(staging_dir, ignore_errors=True)
            (staging_dir / "rng").mkdir(parents=True)
        barrier()
        fill(staging_dir)
        barrier()
        if is_main:
            (staging_dir / "state.json").write_text(json.dumps(asdict(state), indent=1))
            (staging_dir / MANIFEST).write_text(json.dumps({"files": _digests(staging_dir)}, indent=1))
            _sync(staging_dir)
            shutil.rmtree(final, ignore_errors=True)
            staging_dir.rename(final)
            pointer = self.root / ".latest.partial"
            pointer.write_text(final.name)
            _sync_file(pointer)
            pointer.replace(self.root / "latest")
            _sync_file(self.root)
            for old in self._names()[: -self._keep]:
                shutil.rmtree(self.root / old)
        barrier()
        return final

    def latest(self, warn: Callable[[str], None]) -> Path | None:
        """The newest whole checkpoint; each damaged one is named to `warn` and skipped."""
        for leftover in self.root.glob(".step-*.partial") if self.root.is_dir() else []:
            warn(f"{leftover} is a checkpoint that was not finished: ignored")
        for name in reversed(self._names()):
            faults = find_corruption(self.root / name)
            if not faults:
                return self.root / name
            warn(f"checkpoint {self.root / name} is damaged and skipped: {faults}")
        return None

    def set_aside(self, step: int) -> Path | None:
        """Move what a run that begins after `step` would mix with: newer checkpoints, and from step 0 the records of the run
        before. The directory they went to, if there were any."""
        run_dir = self.root.parent
        moved = [self.root / name for name in self._names() if int(name.removeprefix("step-")) > step]
        if step == 0:
            moved += [path for name in RECORDS if (path := run_dir / name).is_file()]
        if not moved:
            return None
        number = 1
        while (aside := run_dir / f"superseded-{number}").exists():
            number += 1
        for path in moved:
            there = aside / path.relative_to(run_dir)
            there.parent.mkdir(parents=True, exist_ok=True)
            path.rename(there)
        left = self._names()
        if left:
            (self.root / "latest").write_text(left[-1])
        else:
            (self.root / "latest").unlink(missing_ok=True)
        return aside

    def _names(self) -> list[str]:
        return sorted(path.name for path in self.root.glob("step-*") if path.is_dir()) if self.root.is_dir() else []


def find_corruption(directory: Path) -> str:
    """What is wrong with a checkpoint, or an empty text."""
    try:
        expected: dict[str, list[int]] = json.loads((directory / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__})"
    for name, (size, digest) in expected.items():
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
        if _digest(path) != digest:
            return f"{name} has other content than was written"
    return ""


def _digests(directory: Path) -> dict[str, list[int]]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): [path.stat().st_size, _digest(path)] for path in files}


def _digest(path: Path) -> int:
    """CRC-32 of a file's head and tail: of small files it is all, of large ones what does not take minutes."""
    with path.open("rb") as file:
        value = zlib.crc32(file.read(_DIGEST_BYTES))
        if path.stat().st_size > 2 * _DIGEST_BYTES:
            file.seek(-_DIGEST_BYTES, os.SEEK_END)
        return zlib.crc32(file.read(_DIGEST_BYTES), value)


def _sync(directory: Path) -> None:
    """Make every file below reach the disk before the rename makes it visible."""
    for path in [*directory.rglob("*"), directory]:
        _sync_file(path)


def _sync_file(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
