"""Is a server of SGLang there, and what does it hold? No torch and no SGLang: `fivefold check` asks too."""

from __future__ import annotations

from fivefold.engines.servers.http import answers as is_well
from fivefold.engines.servers.http import ask
from fivefold.engines.servers.probe import Description
from fivefold.engines.sglang.arguments import LOADER, MARGIN

COMMAND = f"python -m sglang.launch_server --custom-weight-loader {LOADER} --skip-tokenizer-init --model-path ... --port ..."


def answers(address: str) -> bool:
    """The server is there, and so are its schedulers, who are asked as well."""
    return is_well(address, "/server_info")


def describe(address: str) -> Description | int:
    """What it says of its model, or the HTTP status where somebody else, or a server without our loader, has answered."""
    settings = ask(address, "GET", "/server_info")
    try:
        found = settings.json()
        if LOADER not in found["custom_weight_loader"]:
            return settings.status_code
        model = ask(address, "GET", "/model_info").json()
        longest = min(found["context_length"] or found["max_total_num_tokens"], found["max_total_num_tokens"]) - MARGIN
        return Description({"model_type": model["model_type"]}, longest)
    except (ValueError, TypeError, KeyError):
        return settings.status_code
