"""Is a server of vLLM there, and what does it hold? No torch and no vLLM: `fivefold check` asks too."""

from __future__ import annotations

import httpx2 as httpx

from fivefold.engines.servers.http import answers as is_well
from fivefold.engines.servers.http import ask
from fivefold.engines.servers.probe import Description

COMMAND = "python -m fivefold.engines.vllm.serve --model ... --port ..."
_COUNTERS = ("vllm:generation_tokens_total{", "vllm:prompt_tokens_total{")


def answers(address: str) -> bool:
    """The server is there and ready."""
    return is_well(address, "/health")


def progress(address: str) -> float | None:
    """Tokens that it has read and sampled since it was started; None where it does not answer."""
    try:
        lines = ask(address, "GET", "/metrics").text.splitlines()
    except httpx.TransportError:
        return None
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(_COUNTERS))


def describe(address: str) -> Description | int:
    """What the first worker says of its model, or the HTTP status where somebody else has answered."""
    answer = ask(address, "POST", "/collective_rpc", {"method": "describe"})
    try:
        found = answer.json()["results"][0]
        return Description(dict(found["sizes"]), int(found["max_model_len"]))
    except (ValueError, TypeError, KeyError, IndexError):
        return answer.status_code
