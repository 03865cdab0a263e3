"""Checks that a vLLM server answers, and reads what it holds. No torch and no vLLM: `fivefold check` uses it too."""

from __future__ import annotations

import httpx2 as httpx

from fivefold.engines.servers.http import answers as is_well
from fivefold.engines.servers.http import ask
from fivefold.engines.servers.probe import Description
from fivefold.engines.vllm.arguments import PROGRESS

COMMAND = "python -m fivefold.engines.vllm.serve --model ... --port ..."

_GAUGES = (
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_waiting",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
)
"""Metrics of a server in the order of the fields of Pressure."""


def answers(address: str) -> bool:
    """Returns whether the server is there and ready."""
    return is_well(address, "/health")


def progress(address: str) -> float | None:
    """Returns the number of tokens that it has sampled since its start; None if it does not answer."""
    try:
        answer = ask(address, "GET", PROGRESS)
    except httpx.TransportError:
        return None
    return float(answer.json()["tokens"]) if answer.status_code == 200 else None


def pressure(address: str) -> tuple[float, int, float, float] | None:
    """Returns how close the server is to its limits, as the fields of a Pressure; None if it does not answer or runs without
    statistics."""
    try:
        lines = ask(address, "GET", "/metrics").text.splitlines()
    except httpx.TransportError:
        return None
    values = {name: [float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{")] for name in _GAUGES}
    used, queued, tokens, hits = values.values()
    # Its engines have a cache each.
    return (max(used), int(sum(queued)), sum(tokens), sum(hits)) if used else None


def describe(address: str) -> Description | int:
    """Returns what the first worker reports of its model, or the HTTP status if another service answers."""
    answer = ask(address, "POST", "/collective_rpc", {"method": "describe"})
    try:
        worker = answer.json()["results"][0]
        return Description(dict(worker["sizes"]), int(worker["max_model_len"]))
    except (ValueError, TypeError, KeyError, IndexError):
        return answer.status_code
