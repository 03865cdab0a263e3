"""Checks a run's directory before the run writes into it: all its files belong to a run, and no link leads elsewhere."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from fivefold.checkpoint.lock_file import LOCK
from fivefold.errors import UserError

_MARKS = (LOCK, "metrics.jsonl")
"""Files that mark a run: at least one is in every directory in which a run has begun."""
_MAY_STAND = re.compile(
    r"\..*|lost\+found|run\.yaml|logs|checkpoints|data|tensorboard|trace|trackers|fivefold-.*|.*\.(out|err|log|ya?ml|sbatch|sh)"
)
"""Names allowed before a run begins: hidden files, its configuration and job script, and output files of a scheduler."""
_SHOWN = 3


def check_run_directory(run_dir: Path) -> None:
    """Raises ValueError if the directory holds files that are not a run's, or symbolic links. The directory itself may be a
    link."""
    if not run_dir.exists():
        return
    if not run_dir.is_dir():
        raise UserError(f"trainer.run_dir must be a directory: {run_dir} is a file; choose another one")
    names = sorted(os.listdir(run_dir))
    foreign = [name for name in names if not _MAY_STAND.fullmatch(name)]
    if foreign and not any(mark in names for mark in _MARKS):
        listed = ", ".join(foreign[:_SHOWN]) + (f" and {len(foreign) - _SHOWN} more" if len(foreign) > _SHOWN else "")
        raise UserError(
            f"trainer.run_dir must be a new directory or a run's: {run_dir} holds files that are not a run's, {listed}; "
            "choose another trainer.run_dir"
        )
    if link := next(_links(run_dir), None):
        raise UserError(
            f"trainer.run_dir: {link} is a symbolic link, to which a run does not write: remove it, or let trainer.run_dir "
            "itself be the link"
        )


def _links(directory: Path) -> Iterator[Path]:
    for root, directories, files in os.walk(directory):
        yield from (path for name in (*directories, *files) if (path := Path(root, name)).is_symlink())
