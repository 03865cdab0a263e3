"""Translate hosts and GPUs of other systems into launch.nodes, launch.gpus_per_node and `launch.backend: ray`."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from fivefold.config.dialect import Line
from fivefold.config.machine import is_node_of_job
from fivefold_dialects.device_mapping import parse_devices
from fivefold_dialects.source import Source, UnreadableError
from fivefold_dialects.table import load

KEY = "launch.backend"
WITH_JUDGE: str = load("shared")["texts"]["with_judge"]
_OTHERS = re.compile(r"\.first_rank$|^reward\.judge\.backend$")
"""Keys of ours that give a model or a judge GPUs of its own."""
_USUAL = {"nodes": (), "chosen": {}, "devices": "", "gpus_per_node": (), "is_whole": False, "part": {}}
CLUSTERS: dict[str, dict[str, Any]] = {name: {**_USUAL, **keys} for name, keys in load("shared")["clusters"].items()}
"""System -> the keys by which it requests several machines; tables/shared.yaml explains them."""


def keys_for_ray(source: Source, system: str) -> list[str]:
    """Return the keys that ask for Ray; empty if torchrun or another launcher has started this process as a rank."""
    if {"RANK", "WORLD_SIZE"} <= set(source.environment) and not is_node_of_job(source.environment):
        return []
    asks = CLUSTERS.get(system, _USUAL)
    keys = [key for key in asks["nodes"] if key in source.settings and _number(source, key) > 1]
    keys += [key for key, name in asks["chosen"].items() if key in source.settings and source.text(key) == name]
    if devices := asks["devices"]:
        per_node = _number(source, asks["gpus_per_node"][0])
        keys += [key for key in source.settings if key.endswith(devices) and _last(source, key) >= per_node]
    return keys


def hosts(source: Source, system: str, ours: Mapping[str, Any]) -> Iterator[Line]:
    """Yield launch.nodes and launch.gpus_per_node, as far as the configuration sets the numbers.
    Yields nothing if `ours`, the other values of the run, place servers or models on separate GPUs that are not counted."""
    asks = CLUSTERS.get(system, _USUAL)
    if asks["devices"]:
        # ROLL's judge borrows GPUs of the policy, and has its own here.
        yield from () if "reward.judge.backend" in ours else _hosts_of_devices(source, asks)
        return
    has_others = ours.get("engine.placement") == "apart" or any(_OTHERS.search(key) for key in ours)
    is_whole = asks["is_whole"] and not any(source.text(key) == value for key, value in asks["part"].items())
    if has_others and not is_whole:
        return
    for name, keys in (("launch.nodes", asks["nodes"]), ("launch.gpus_per_node", asks["gpus_per_node"])):
        if key_set := next((key for key in keys if key in source.settings and _number(source, key) > 0), None):
            yield Line(name, _number(source, key_set), (key_set,))


def _hosts_of_devices(source: Source, asks: Mapping[str, Any]) -> Iterator[Line]:
    """Yield what ROLL computes (base_config.py): whole machines, or one machine with the GPUs that mappings name."""
    keys = tuple(key for key in source.settings if key.endswith(asks["devices"]))
    gpus = max((_last(source, key) for key in keys), default=-1) + 1
    per_node = asks["gpus_per_node"][0]
    if per_node in source.settings and gpus > 0 and (most := _number(source, per_node)) > 0:
        yield Line("launch.nodes", -(-gpus // most), (per_node, *keys))
        yield Line("launch.gpus_per_node", min(gpus, most), (per_node, *keys))


def _number(source: Source, key: str) -> int:
    """Return a number, or 0 if the value is absent or wrong; another function reports a wrong value."""
    with contextlib.suppress(UnreadableError):
        return source.whole(key) or 0
    return 0


def _last(source: Source, key: str) -> int:
    with contextlib.suppress(ValueError):
        return max(parse_devices(source.raw(key)), default=-1)
    return -1
