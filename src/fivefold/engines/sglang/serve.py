"""Runs SGLang's own server on a socket, ended with its parent: `python -m fivefold.engines.sglang.serve --uds PATH ...`.

The arguments are SGLang's. SGLang itself listens only on ports, where every user of the machine could send weights to it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fivefold.distributed.compiler_caches import use_compiler_caches
from fivefold.engines.arguments import flags
from fivefold.engines.servers.server_process import ServerProcess, devices_from, own_environment, run_as_program
from fivefold.engines.sglang.arguments import LOADER, MARGIN

if TYPE_CHECKING:
    import torch

# Responses may use a model's last positions too.
_ENVIRONMENT = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
_CUMEM, _AS_NCCL_DECIDES = "NCCL_CUMEM_ENABLE", "-2"
_FLAGS = ("--custom-weight-loader", LOADER, "--skip-tokenizer-init", "--skip-server-warmup", "--log-level-http", "warning")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="fivefold.engines.sglang.serve", allow_abbrev=False)
    for name in ("uds", "host", "port"):
        parser.add_argument(f"--{name}")
    options, rest = parser.parse_known_args(arguments)
    if fault := use_compiler_caches():
        print(f"warning  {fault}", file=sys.stderr)
    import uvicorn
    from sglang.launch_server import run_server
    from sglang.srt.entrypoints import http_server
    from sglang.srt.server_args import prepare_server_args

    class There(uvicorn.Config):
        """Configuration of a web server that listens on the run's address, whatever SGLang passes."""

        def __init__(self, app: Any, host: str, port: int, **named: Any) -> None:
            where = {"uds": options.uds} if options.uds else {"host": options.host, "port": int(options.port)}
            super().__init__(app, **named | where)

    # Older releases call uvicorn.run, which takes the class from its own module; `uvicorn.main` names a function.
    uvicorn.Config = sys.modules["uvicorn.main"].Config = There  # type: ignore[attr-defined]
    _keep_loads_with_temporary_files()
    # SGLang would send itself this request, to a port on which it does not listen. The client sends it in `take`.
    http_server._freeze_gc_after_server_warmup = lambda *_: None
    run_server(prepare_server_args([*rest, *_FLAGS]))


def _keep_loads_with_temporary_files() -> None:
    """Let schedulers report their load in a file that is removed with the server: SGLang leaves it in /dev/shm."""
    from sglang.srt.managers import load_snapshot

    load_snapshot.shm_path_for = lambda instance: str(Path(tempfile.gettempdir(), f"loads-{instance}"))


def server_process(
    arguments: Mapping[str, Any],
    device: torch.device,
    devices: int,
    log: Path,
    is_ready: Callable[[str], bool],
    host: str | None = None,
) -> ServerProcess:
    """Returns a server on this device and the following ones, `devices` in all, with SGLang's own arguments by name."""
    server_arguments = {"device": device.type, **arguments, "context_length": arguments["context_length"] + MARGIN}
    # SGLang would set it to 0, and NCCL sends no weights between two processes that differ in it.
    environment = _ENVIRONMENT | {_CUMEM: os.environ.get(_CUMEM, _AS_NCCL_DECIDES)} | devices_from(device, devices)
    if device.type == "cpu":
        # Otherwise SGLang requires a NUMA node for each tensor-parallel rank.
        cores = sorted(os.sched_getaffinity(0))
        shares = [cores[rank::devices] or cores for rank in range(devices)]
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, share)) for share in shares)
    return ServerProcess(
        ["fivefold.engines.sglang.serve", *flags(server_arguments, says_no=False)],
        own_environment(environment),
        log,
        is_ready,
        host,
    )


# SGLang spawns its other processes, which run this module again under its second name.
run_as_program(__name__, main, _keep_loads_with_temporary_files)
