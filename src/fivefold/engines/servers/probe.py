"""Checks that running servers answer, and that they hold what a run needs. No torch: `fivefold check` uses it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx

from fivefold.keys.findings import Findings


@dataclass(frozen=True)
class Description:
    """Description of a server's model, as it reports it; sizes and names as in the model's config.json."""

    model: Mapping[str, Any]
    longest: int
    """Most tokens of a prompt and its response."""


def check_servers(
    findings: Findings,
    addresses: Sequence[str],
    describe: Callable[[str], Description | int],
    command: str,
    model: Mapping[str, Any],
    longest: int,
) -> None:
    """Adds errors for servers that do not answer, hold another model than `model` (of config.json) or take less than
    `longest` tokens.

    `describe` returns the HTTP status if another kind of server answers. `findings` are at `engine`.
    """
    for address in addresses:
        if not address.startswith(("http://", "https://")):
            findings.error("url", f"must be http://host:port: got {address!r}")
            continue
        try:
            description = describe(address)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            findings.error("url", f": {address} does not answer ({type(error).__name__}); start a server there: {command}")
            continue
        if isinstance(description, int):
            stranger = (
                f": {address} is not a server that takes weights (it answers with {description}); start it by {command}"
            )
            findings.error("url", stranger)
            continue
        wrong = {name: value for name, value in description.model.items() if name in model and value != model[name]}
        if wrong:
            expected = {name: model[name] for name in wrong}
            findings.error("url", f": {address} holds another model than model.path: {wrong} != {expected}")
        findings.require(
            description.longest >= longest,
            "url",
            f": {address} must hold the longest prompt and response, {longest} tokens: its maximum is {description.longest}",
        )
