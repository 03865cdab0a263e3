"""RUN/trackers/NAME.json: which tracked run belongs to a run, and how much of it the tracker has received."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from fivefold.files import write_whole
from fivefold.terminal import plain

_SECRET = re.compile(r"KEY|TOKEN|PASSWORD|SECRET|CREDENTIAL", re.IGNORECASE)


@dataclass
class State:
    id: str = ""
    """Id of the tracked run."""
    url: str | None = None
    sent: int = -1
    """Last step that the tracker has stored permanently."""
    given: int = -1
    """Last step that the tracker's library has accepted."""
    lost_tables: int = 0
    """Number of steps whose samples the tracker refused."""
    error: str | None = None
    """Error because of which the tracker accepts nothing at the moment."""
    has_finished: bool = False

    @classmethod
    def read(cls, run_dir: Path, name: str) -> State:
        """Return the stored state, or a new one if there is none or it is not readable."""
        try:
            stored = json.loads(_path(run_dir, name).read_text(encoding="utf-8"))
            return cls(**{key: stored[key] for key in asdict(cls()) if key in stored})
        except (OSError, ValueError, TypeError):
            return cls()

    def write(self, run_dir: Path, name: str) -> None:
        write_whole(_path(run_dir, name), json.dumps(asdict(self), indent=1) + "\n")


def _path(run_dir: Path, name: str) -> Path:
    return run_dir / "trackers" / f"{name}.json"


def without_secrets(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return a message without the values of secret environment variables, logins in addresses and control characters."""
    for name, value in environment.items():
        if _SECRET.search(name) and len(value) >= 6:
            text = text.replace(value, "***")
    return plain(text)
