"""RUN/trackers/NAME.json: which tracked run a run has, and how much of it the tracker has got."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from fivefold.files import write_whole

_SECRET = re.compile(r"KEY|TOKEN|PASSWORD|SECRET|CREDENTIAL", re.IGNORECASE)
_LOGIN = re.compile(r"://[^/\s@]+@")


@dataclass
class State:
    id: str = ""
    """Of the tracked run."""
    url: str | None = None
    sent: int = -1
    """Last step that the tracker has for good."""
    given: int = -1
    """Last step that its library has taken."""
    lost_tables: int = 0
    """Steps whose samples it refused."""
    error: str | None = None
    """Why it takes nothing at the moment."""
    has_finished: bool = False

    @classmethod
    def read(cls, run_dir: Path, name: str) -> State:
        """As it was left; new where there is none, or none that can be read."""
        try:
            found = json.loads(_path(run_dir, name).read_text(encoding="utf-8"))
            return cls(**{key: found[key] for key in asdict(cls()) if key in found})
        except (OSError, ValueError, TypeError):
            return cls()

    def write(self, run_dir: Path, name: str) -> None:
        write_whole(_path(run_dir, name), json.dumps(asdict(self), indent=1) + "\n")


def _path(run_dir: Path, name: str) -> Path:
    return run_dir / "trackers" / f"{name}.json"


def without_secrets(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """A message without keys that stand in the environment, and without logins in addresses."""
    for name, value in environment.items():
        if _SECRET.search(name) and len(value) >= 6:
            text = text.replace(value, "***")
    return _LOGIN.sub("://***@", text)
