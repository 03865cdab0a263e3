"""The lock file of a run directory, as the ranks of the run see it: some file systems can lock nothing else, or nothing."""

from __future__ import annotations

from pathlib import Path

from fivefold.errors import UserError

LOCK = "lock"
ALONE = "only this file keeps other runs out"
"""Line of the file where the directory itself cannot be locked, as on NFS: the file is then compared before each save."""


def lone_lock(run_dir: Path) -> str | None:
    """Return the text of the lock file if the directory itself is not locked; None if it is, or without a lock file."""
    text = _read(run_dir)
    return text if text is not None and ALONE in text else None


def check_lone_lock(run_dir: Path, text: str) -> None:
    """Raise ValueError if the lock file is not the one with this text: another run may have entered the directory."""
    present = _read(run_dir)
    if present != text:
        holder = "is gone" if present is None else f"is of {present.splitlines()[0] if present.strip() else 'another run'}"
        raise UserError(
            f"trainer.run_dir: the lock file of this run in {run_dir} {holder}; nothing is saved, because another run may "
            f"write there. Never remove {LOCK} while a run is alive; start this run again once no other run is left"
        )


def _read(run_dir: Path) -> str | None:
    try:
        return (run_dir / LOCK).read_text(errors="replace")
    except FileNotFoundError:
        return None
