"""Where the ranks of a run meet: on one machine a directory of this user alone, on several an address of the first rank.

torch's own rendezvous listens on every interface without a secret, and its store names the addresses to which ranks connect.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Mapping, MutableMapping
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import FileStore, HashStore, Store, TCPStore  # type: ignore[attr-defined]  # noqa: TID251 - its home

from fivefold.distributed.objects import unpickle_plain_values_only
from fivefold.distributed.ports import DIRECTORY


def join(backend: str, timeout_minutes: float, environment: MutableMapping[str, str] = os.environ) -> None:
    """Join the ranks that RANK and WORLD_SIZE count, in this machine's directory or at MASTER_ADDR and MASTER_PORT."""
    rank, world_size, timeout = int(environment["RANK"]), int(environment["WORLD_SIZE"]), timedelta(minutes=timeout_minutes)
    if world_size > 1:
        unpickle_plain_values_only()
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun has opened the store in a separate process.
        dist.init_process_group(backend, timeout=timeout)  # noqa: TID251 - its home
        return
    store = _store(rank, world_size, timeout, environment)
    store.set_timeout(timeout)
    dist.init_process_group(  # noqa: TID251 - its home
        backend, store=store, rank=rank, world_size=world_size, timeout=timeout
    )


def _store(rank: int, world_size: int, timeout: timedelta, environment: Mapping[str, str]) -> Store:
    if world_size == 1:
        return HashStore()
    if DIRECTORY in environment:
        return FileStore(f"{environment[DIRECTORY]}/store", world_size)
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    is_spread = int(environment.get("LOCAL_WORLD_SIZE", world_size)) < world_size
    return open_store(host, port, timeout, world_size, is_held=rank == 0, is_spread=is_spread)


def open_store(
    host: str, port: int, timeout: timedelta, world_size: int | None = None, *, is_held: bool, is_spread: bool = False
) -> TCPStore:
    """Opens the store at an address. A process that holds it (`is_held`) listens on that address only; port 0 takes a free
    one.

    `is_spread`: processes of other machines must reach it, so a name that means the loopback interface here cannot be the
    address that they use.
    """
    waits = world_size is not None
    if not is_held:
        return TCPStore(host, port, world_size, False, timeout, wait_for_workers=waits)
    listening = _listening(host, port, is_spread)
    port = listening.getsockname()[1]
    # The store closes the file that it is passed.
    return TCPStore(
        _reached(listening), port, world_size, True, timeout, wait_for_workers=waits, master_listen_fd=listening.detach()
    )


def _listening(host: str, port: int, is_spread: bool) -> socket.socket:
    """Returns a socket that listens on the host's address, or on all addresses if this machine does not have that one."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    is_hidden = is_spread and ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback
    with contextlib.suppress(OSError):
        if not is_hidden:
            return _bound(family, address)
    print(
        f"note     MASTER_ADDR {host} ({address[0]}) is not an address at which this machine can listen for others: the "
        "rendezvous listens on all of its addresses (docs/security.md)",
        flush=True,
    )
    return _bound(family, ("::" if family == socket.AF_INET6 else "0.0.0.0", port))  # noqa: S104 - said above


def _bound(family: int, address: tuple[object, ...]) -> socket.socket:
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(socket.SOMAXCONN)
    except OSError:
        listening.close()
        raise
    return listening


def _reached(listening: socket.socket) -> str:
    """Returns the address at which processes of this machine reach a socket."""
    host = str(listening.getsockname()[0])
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared only
