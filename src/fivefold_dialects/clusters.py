"""Translate hosts and GPUs of other systems into launch.nodes, launch.gpus_per_node and `launch.backend: ray`."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from fivefold.config.dialect import Line
from fivefold.config.machine import is_node_of_job
from fivefold.layout import ParallelLayout
from fivefold_dialects.source import Source, UnreadableError
from fivefold_dialects.table import load

KEY = "launch.backend"
WITH_JUDGE: str = load("shared")["texts"]["with_judge"]
_OTHERS = re.compile(r"\.first_rank$|^reward\.judge\.backend$")
"""Keys of ours that give a model or a judge GPUs of its own."""
_USUAL = {"nodes": (), "chosen": {}, "devices": "", "gpus_per_node": (), "is_whole": False, "part": {}}
CLUSTERS: dict[str, dict[str, Any]] = {name: {**_USUAL, **keys} for name, keys in load("shared")["clusters"].items()}
"""System -> the keys by which it requests several machines; tables/shared.yaml explains them."""


def keys_for_ray(source: Source, system: str, ours: Mapping[str, Any]) -> list[str]:
    """Return the keys that ask for Ray; empty if torchrun or another launcher has started this process as a rank."""
    if {"RANK", "WORLD_SIZE"} <= set(source.environment) and not is_node_of_job(source.environment):
        return []
    asks = CLUSTERS.get(system, _USUAL)
    keys = [key for key in asks["nodes"] if key in source.settings and _number(source, key) > 1]
    keys += [key for key, name in asks["chosen"].items() if key in source.settings and source.text(key) == name]
    if (devices := asks["devices"]) and _ranks(ours) > _number(source, asks["gpus_per_node"][0]):
        keys += [key for key in source.settings if key.endswith(devices)]
    return keys


def hosts(source: Source, system: str, ours: Mapping[str, Any]) -> Iterator[Line]:
    """Yield launch.nodes and launch.gpus_per_node, as far as the configuration sets the numbers.
    Yields nothing if `ours`, the other values of the run, place servers or models on separate GPUs that are not counted."""
    asks = CLUSTERS.get(system, _USUAL)
    if asks["devices"]:
        # ROLL's judge borrows GPUs of the policy, and has its own here.
        yield from () if "reward.judge.backend" in ours else _hosts_of_devices(source, asks, ours)
        return
    has_others = ours.get("engine.placement") == "apart" or any(_OTHERS.search(key) for key in ours)
    is_whole = asks["is_whole"] and not any(source.text(key) == value for key, value in asks["part"].items())
    if has_others and not is_whole:
        return
    for name, keys in (("launch.nodes", asks["nodes"]), ("launch.gpus_per_node", asks["gpus_per_node"])):
        if key_set := next((key for key in keys if key in source.settings and _number(source, key) > 0), None):
            yield Line(name, _number(source, key_set), (key_set,))


def _hosts_of_devices(source: Source, asks: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[Line]:
    """Yield as few machines as the GPUs that the layouts take need."""
    keys, per_node = [key for key in source.settings if key.endswith(asks["devices"])], asks["gpus_per_node"][0]
    if per_node in source.settings and (gpus := _ranks(ours)) > 0 and (most := _number(source, per_node)) > 0:
        yield Line("launch.nodes", nodes := -(-gpus // most), (per_node, *keys))
        yield Line("launch.gpus_per_node", -(-gpus // nodes), (per_node, *keys))


def _ranks(ours: Mapping[str, Any]) -> int:
    """Return how many GPUs the layouts of a run take; 0 if it has none."""
    layouts = {key.removesuffix(".backend"): str(ours[key]) for key in ours if key.endswith(".backend")}
    sizes = {name: ParallelLayout.parse(layout).world_size for name, layout in layouts.items() if ":" in layout}
    apart = sizes.pop("engine", 0) if ours.get("engine.placement") == "apart" else 0
    return apart + max((ours.get(f"{name}.first_rank", 0) + size for name, size in sizes.items()), default=0)


def _number(source: Source, key: str) -> int:
    """Return a number, or 0 if the value is absent or wrong; another function reports a wrong value."""
    with contextlib.suppress(UnreadableError):
        return source.whole(key) or 0
    return 0
