"""Runs the ranks as processes of this machine: spawned, watched, and ended together."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fivefold.config.schema import LaunchConfig
from fivefold.distributed.ports import free_port
from fivefold.launch.processes import RankProcesses, clear
from fivefold.launch.watch import Signals, watch
from fivefold.observability.start_up import VARIABLE, command_began


def spawn(
    arguments: Sequence[str],
    world_size: int,
    log_dir: Path,
    settings: LaunchConfig,
    inherited: Sequence[int] = (),
    reaches_others: bool = False,
) -> int:
    """Run `python -m ARGUMENTS` once per rank, with the `inherited` files; returns the exit code of the run.

    `reaches_others`: the ranks also send weights to other machines.

    Rank 0 writes to this terminal, the others into `log_dir`. When one rank fails, its traceback is shown and the others are
    ended. SIGINT and SIGTERM are forwarded, so that the ranks save and end. A second Ctrl-C, after a pause, ends them at
    once.
    """
    clear(log_dir)
    environment = {
        **os.environ,
        VARIABLE: command_began(),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": str(settings.threads or max(1, (os.cpu_count() or 1) // world_size)),
    }
    ranks = RankProcesses(range(world_size), log_dir, settings.silent_seconds, reaches_others)
    with Signals() as signals:
        try:
            ranks.start(arguments, environment, inherited)
            return watch(ranks, signals)
        finally:
            ranks.close()
