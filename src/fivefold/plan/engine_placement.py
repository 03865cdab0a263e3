"""Devices of the ranks and devices of the engine's own servers, as far as they are known without torch."""

from __future__ import annotations

import os

from fivefold.config import RunConfig
from fivefold.config.machine import on_gpus, visible_gpus
from fivefold.engines.servers.placement import Machine, ServerPlace, after_servers, place_servers
from fivefold.layout import ParallelLayout


def machines_here(config: RunConfig) -> list[Machine]:
    """Return the machines of the run, each with as many ranks and GPUs as this one.

    With launch.gpu they are other machines, with enough GPUs.
    """
    world = int(os.environ.get("WORLD_SIZE", config.roles.world_size))
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    gpus = None
    if on_gpus(config.launch, config.trainer.device):
        layouts = (config.engine.layout, config.reward.judge_layout)
        others = sum(layout.world_size for layout in layouts if layout is not None)
        gpus = visible_gpus() if config.launch.gpu is None else local_ranks + others
    machines, policy = [], config.layout.world_size
    for first in range(0, world, local_ranks):
        ranks = range(first, min(first + local_ranks, world))
        machines.append(Machine(ranks, gpus, range(first, max(first, min(ranks.stop, policy)))))
    return machines


def device_rows(config: RunConfig) -> list[tuple[str, str]]:
    """Return (devices, what runs on them) for servers with their own devices; raise ValueError if GPUs are missing."""
    machines = machines_here(config)
    places: list[tuple[str, ParallelLayout, ServerPlace]] = []
    free = machines
    if config.engine.is_apart and config.engine.layout is not None:
        places += [("server", config.engine.layout, place) for place in place_servers(config.engine.layout, free)]
        free = after_servers(free, config.engine.layout)
    if (judge := config.reward.judge_layout) is not None:
        places += [("judge", judge, place) for place in place_servers(judge, free)]
    rows = []
    whose = f"of {config.layout}" + (" and other models" if config.roles.world_size > config.layout.world_size else "")
    for number, machine in enumerate(machines):
        where = f"machine {number} " if len(machines) > 1 else ""
        ranks = _span(machine.ranks[0], len(machine.ranks))
        devices = "processes" if machine.gpus is None else f"GPU {_span(0, len(machine.ranks))}"
        rows.append((f"{where}{devices}", f"ranks {ranks} {whose}"))
        for server, layout, place in places:
            if place.machine == number:
                server_devices = "processes" if place.first_gpu is None else f"GPU {_span(place.first_gpu, layout.tp)}"
                count = config.engine.process_count if server == "server" else 1
                named = f"{server}{'s' if count > 1 else ''} {_span(place.number * count, count)} of {layout}"
                rows.append((f"{where}{server_devices}", f"{named}, started by rank {place.rank}"))
    return rows


def _span(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first}-{first + count - 1}"
