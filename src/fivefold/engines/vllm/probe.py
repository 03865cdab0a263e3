"""Checks that a vLLM server answers, and reads what it holds. No torch and no vLLM: `fivefold check` uses it too."""

from __future__ import annotations

import httpx2 as httpx

from fivefold.engines.servers.http import answers as is_well
from fivefold.engines.servers.http import ask
from fivefold.engines.servers.probe import Description
from fivefold.engines.vllm.arguments import PROGRESS

COMMAND = "python -m fivefold.engines.vllm.serve --model ... --port ..."


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


def describe(address: str) -> Description | int:
    """Returns what the first worker reports of its model, or the HTTP status if another service answers."""
    answer = ask(address, "POST", "/collective_rpc", {"method": "describe"})
    try:
        found = answer.json()["results"][0]
        return Description(dict(found["sizes"]), int(found["max_model_len"]))
    except (ValueError, TypeError, KeyError, IndexError):
        return answer.status_code
