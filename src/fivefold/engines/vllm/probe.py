"""Is a server of vLLM there, and what does it hold? No torch and no vLLM: `fivefold check` asks too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import httpx2 as httpx

from fivefold.config.findings import Findings
from fivefold.engines.servers.http import answers as is_well
from fivefold.engines.servers.http import ask

COMMAND = "python -m fivefold.engines.vllm.serve --model ... --port ..."


def answers(address: str) -> bool:
    """The server is there and ready."""
    return is_well(address, "/health")


def check_servers(findings: Findings, addresses: Sequence[str], model: Mapping[str, Any], longest: int) -> None:
    """Errors where servers do not answer, hold another model than `model` (of config.json) or take less than `longest`
    tokens; `findings` are at `engine`."""
    for address in addresses:
        if not address.startswith(("http://", "https://")):
            findings.error("url", f"must be http://host:port: got {address!r}")
            continue
        try:
            answer = ask(address, "POST", "/collective_rpc", {"method": "describe"})
        except (httpx.TransportError, httpx.InvalidURL) as error:
            findings.error("url", f": {address} does not answer ({type(error).__name__}); start a server there: {COMMAND}")
            continue
        if (found := _description(answer)) is None:
            findings.error(
                "url",
                f": {address} is no server that takes weights (it answers with {answer.status_code}); start it by {COMMAND}",
            )
            continue
        wrong = {name: value for name, value in found["sizes"].items() if name in model and value != model[name]}
        if wrong:
            own = {name: model[name] for name in wrong}
            findings.error("url", f": {address} holds another model than model.path: {wrong} != {own}")
        findings.require(
            found["max_model_len"] >= longest,
            "url",
            f": {address} must hold the longest prompt and response, {longest} tokens: its max_model_len is "
            f"{found['max_model_len']}",
        )


def _description(answer: httpx.Response) -> dict[str, Any] | None:
    """What the first worker says of its model; None where somebody else has answered."""
    try:
        found: dict[str, Any] = answer.json()["results"][0]
        return {"sizes": dict(found["sizes"]), "max_model_len": int(found["max_model_len"])}
    except (ValueError, TypeError, KeyError, IndexError):
        return None
