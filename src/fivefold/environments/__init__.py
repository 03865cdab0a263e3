"""Environments and tools of several turns, in processes of their own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Step:
    """What an environment returns for one turn of the model; a mapping with these keys does as well."""

    messages: str | list[dict[str, Any]] = field(default_factory=list)
    """What the model reads next: a user's message as text, or messages with a role and content."""
    reward: float = 0.0
    """Reward of the turn; the rewards of a trajectory are added."""
    done: bool = False
    """Whether the trajectory ends."""
    state: str | None = None
    """Name of the state that the environment is in now, the same name for the same state."""
