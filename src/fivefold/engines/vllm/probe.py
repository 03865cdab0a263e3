"""Is a server of vLLM there, and what does it hold? No torch and no vLLM: `fivefold check` asks too."""

from __future__ import annotations

from fivefold.engines.servers.http import answers as is_well
from fivefold.engines.servers.http import ask
from fivefold.engines.servers.probe import Description

COMMAND = "python -m fivefold.engines.vllm.serve --model ... --port ..."


def answers(address: str) -> bool:
    """The server is there and ready."""
    return is_well(address, "/health")


def describe(address: str) -> Description | int:
    """What the first worker says of its model, or the HTTP status where somebody else has answered."""
    answer = ask(address, "POST", "/collective_rpc", {"method": "describe"})
    try:
        found = answer.json()["results"][0]
        return Description(dict(found["sizes"]), int(found["max_model_len"]))
    except (ValueError, TypeError, KeyError, IndexError):
        return answer.status_code
