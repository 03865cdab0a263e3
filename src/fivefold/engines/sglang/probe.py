"""Checks that an SGLang server answers, and reads what it holds. No torch and no SGLang: `fivefold check` uses it too."""

from __future__ import annotations

import httpx2 as httpx

from fivefold.engines.servers.http import answers as is_well
from fivefold.engines.servers.http import ask
from fivefold.engines.servers.probe import Description
from fivefold.engines.sglang.arguments import LOADER, MARGIN

COMMAND = f"python -m sglang.launch_server --custom-weight-loader {LOADER} --skip-tokenizer-init --model-path ... --port ..."


def answers(address: str) -> bool:
    """Returns whether the server and its schedulers answer."""
    return is_well(address, "/server_info")


def load(address: str) -> tuple[float, int] | None:
    """Returns the share of its cache that a server uses, and the number of requests that wait there; None if it does not
    answer."""
    try:
        answer = ask(address, "GET", "/v1/loads?include=core")
    except httpx.TransportError:
        return None
    loads = answer.json()["loads"] if answer.status_code == 200 else []
    # Its schedulers have a cache each.
    return (max(of["token_usage"] for of in loads), sum(of["num_waiting_reqs"] for of in loads)) if loads else None


def describe(address: str) -> Description | int:
    """Returns what the server reports of its model. Returns the HTTP status if another service, or a server without our
    loader, answers."""
    settings = ask(address, "GET", "/server_info")
    try:
        server = settings.json()
        if LOADER not in server["custom_weight_loader"]:
            return settings.status_code
        model = ask(address, "GET", "/model_info").json()
        longest = min(server["context_length"] or server["max_total_num_tokens"], server["max_total_num_tokens"]) - MARGIN
        return Description({"model_type": model["model_type"]}, longest)
    except (ValueError, TypeError, KeyError):
        return settings.status_code
