"""Find the class of an environment: in a user's file, or in another library."""

from __future__ import annotations

from dataclasses import dataclass

VERL = "verl:"
"""Beginning of an entry of `environment.tools` that is a file of tools for verl."""
FILE = "file"
"""Kind of a class in a user's file."""
AGENT = "agent"
"""Kind of an agent that samples its turns through an endpoint."""


@dataclass(frozen=True)
class Kind:
    """A library with environments; `adapters/KIND.py` has its adapter."""

    form: str
    """How `environment.class` names an environment of it."""
    is_alone: bool = False
    """Whether an environment of it needs a process of its own, since the library draws from the process's random state."""
    is_file: bool = False
    """Whether it names a class in a user's file."""


KINDS = {
    "gymnasium": Kind("gymnasium:ID"),
    "textarena": Kind("textarena:ID", is_alone=True),
    "trl": Kind("trl:FILE:CLASS", is_file=True),
    "skyrl_gym": Kind("skyrl_gym:ID"),
    "openenv": Kind("openenv:URL"),
}


def kind_of(name: str) -> tuple[str, str]:
    """Return (kind, what it names) of `environment.class`."""
    kind, _, rest = name.partition(":")
    return (kind, rest) if kind in KINDS else (FILE, name)


def is_server(tool: str) -> bool:
    """Whether an entry of `environment.tools` is an MCP server."""
    return tool.startswith(("mcp:", "mcp+http:", "mcp+https:"))
