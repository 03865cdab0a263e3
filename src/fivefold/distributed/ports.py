"""Where processes of a run meet: a free port, or, on one machine, a directory."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from pathlib import Path

from fivefold.errors import RunError

DIRECTORY = "FIVEFOLD_RENDEZVOUS"
"""Environment variable that names the directory in which the ranks of one machine meet."""
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_LOOPBACK = "lo"


def free_port() -> int:
    """Returns a port that no process listens on, below the range from which systems assign ports to outgoing connections.

    Ranks bind the port seconds later. A port of that range could be taken by then: the ranks of one run alone open hundreds
    of connections.
    """
    for port in random.SystemRandom().sample(range(15000, 32000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise RunError("no port between 15000 and 32000 is free on this machine")


def on_one_machine(directory: Path, reaches_others: bool = False) -> dict[str, str]:
    """Returns the environment variables with which ranks of this machine meet in a directory.

    Gloo and NCCL then listen on the loopback interface. Exceptions: their own variable names another interface, or the ranks
    also send weights to other machines (`reaches_others`).
    """
    variables = {DIRECTORY: str(directory)}
    if not reaches_others and (Path("/sys/class/net") / _LOOPBACK).exists():
        variables |= {name: _LOOPBACK for name in _INTERFACES if name not in os.environ}
    return variables
