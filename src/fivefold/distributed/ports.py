"""Ports for the rendezvous of ranks."""

from __future__ import annotations

import contextlib
import random
import socket


def free_port() -> int:
    """A port that nobody listens on, below those that systems hand to outgoing connections.

    Ranks bind it seconds later; one of the others would be taken by then now and then, for the ranks of a run alone open
    hundreds of connections.
    """
    for port in random.SystemRandom().sample(range(15000, 32000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise RuntimeError("no port between 15000 and 32000 is free on this machine")
