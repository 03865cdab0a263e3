"""The Ray cluster of a run: joins one, or starts one on this machine and ends it; reports its nodes and reserves room on
them."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from fivefold.config.schema import RayConfig
from fivefold.errors import RunError, UserError
from fivefold.launch.ray import guardian as guard
from fivefold.launch.ray.placement import Amount, Bundle, Node, Role, has, needs, place, place_when_free

_OBJECTS = 100 * 2**20
"""Size in bytes of the object store of a cluster that we start; a run does not use it."""
_REACH_SECONDS, _LOOK_SECONDS, _TRY_SECONDS = 10.0, 120.0, 5.0
_SPEECHLESS: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
_NODE_ID = "ray.io/node-id"


@contextmanager
def connected(settings: RayConfig, machine: Amount) -> Iterator[str]:
    """Stay connected to the cluster within this context; yields the cluster's name for messages.

    A process that is already connected stays connected. `machine`: resources of a cluster that is started here. Raises
    ValueError if there is no cluster at the address.
    """
    address = settings.address or os.environ.get("RAY_ADDRESS")
    # A thread of Ray's prints what other processes of Ray publish, as the last lines of a raylet's log; `log_to_driver` does
    # not reach it. What it says of lost nodes is in our own messages, and in Ray's logs.
    ray._private.worker.print_to_stdstream = lambda *data, **options: None
    if ray.is_initialized():
        yield "the Ray cluster of this process"
    elif address is None:
        with _started(machine):
            yield "a Ray cluster of this machine"
    else:
        _join(address)
        try:
            yield f"the Ray cluster at {address}"
        finally:
            ray.shutdown()


def _join(address: str) -> None:
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    try:
        if colon and port.isdigit():
            # Ray itself would retry for minutes.
            socket.create_connection((host.strip("[]"), int(port)), _REACH_SECONDS).close()
        ray.init(address, **_SPEECHLESS)
    except Exception as error:
        raise UserError(
            f"launch.ray.address: no Ray cluster can be joined at {address}: {' '.join(str(error).split())[-500:]}; start "
            "one with `ray start --head`, or leave the address out for a cluster of this machine"
        ) from error


@contextmanager
def _started(machine: Amount) -> Iterator[None]:
    """Runs a cluster within this context that leaves nothing after it."""
    directory = tempfile.mkdtemp(prefix="fivefold-ray-", dir=_short_directory())
    # These CPUs serve only for reservations: as many as the ranks take, as without Ray.
    size = {"num_cpus": machine.cpus, "object_store_memory": _OBJECTS, **({"num_gpus": 0} if not machine.gpus else {})}
    guardian = subprocess.Popen(
        [sys.executable, "-m", guard.__name__, directory], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        with _environment(_own_variables()):
            try:
                ray.init("local", include_dashboard=False, _temp_dir=directory, **size, **_SPEECHLESS)
                yield
            finally:
                ray.shutdown()
    finally:
        guardian.communicate()


def _own_variables() -> dict[str, str]:
    """Returns the variables that Ray reads when it starts a cluster."""
    # The token keeps other users out. Without it Ray would keep one in the home directory.
    token = {"RAY_AUTH_TOKEN": secrets.token_hex(32)} if "RAY_AUTH_TOKEN_PATH" not in os.environ else {}
    # Ray's memory monitor would kill our launcher on the node, which uses little memory, instead of the rank that uses much.
    return {**token, "RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0"}


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets those variables that are not set already; restores the environment afterwards."""
    before = dict(os.environ)
    os.environ.update({name: value for name, value in variables.items() if name not in before})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _short_directory() -> str:
    """Returns a directory for Ray's sockets, whose paths have at most 107 characters."""
    usual = tempfile.gettempdir()
    return usual if len(usual) <= 16 else "/tmp"  # noqa: S108 - the directory in it has an unguessable name


def _look() -> list[Node]:
    free = ray._private.state.available_resources_per_node()
    return [
        Node(
            node["NodeID"],
            node["NodeManagerHostname"],
            node["NodeManagerAddress"],
            _amount(node["Resources"]),
            _amount(free.get(node["NodeID"], {})),
        )
        for node in sorted(ray.nodes(), key=lambda node: (node["NodeManagerAddress"], node["NodeID"]))
        if node["Alive"]
    ]


def _amount(resources: Mapping[str, float]) -> Amount:
    return Amount(int(resources.get("GPU", 0)), int(resources.get("CPU", 0)))


def nodes() -> list[Node]:
    """Returns the nodes that are alive, by address. Raises RuntimeError if the cluster cannot run code of this package."""
    # A driver outside the cluster, at ray://, needs a remote task for this.
    reference = ray.remote(num_cpus=0)(_look).remote()
    try:
        alive: list[Node] = ray.get(reference, timeout=_LOOK_SECONDS)
    except ray.exceptions.RayError as error:
        raise RunError(
            "launch.backend: the Ray cluster does not run this package: every node needs it, with the Python and Ray of "
            f"this machine: {error}"
        ) from error
    return alive


@contextmanager
def reserved(
    roles_for: Callable[[list[Node]], Sequence[Role]], settings: RayConfig, hosts: int | None, stopped: Callable[[], bool]
) -> Iterator[tuple[list[Bundle], PlacementGroup] | None]:
    """Reserves bundles for all processes of these roles as one placement group; yields None if `stopped` while waiting.

    `roles_for` returns the roles for a cluster with these nodes. `hosts`: the number of nodes, if it is requested. Raises
    ValueError at once if the cluster is too small, and after `wait_minutes` if others hold what is needed.
    """
    reservation = _reserve(roles_for, settings, hosts, stopped)
    try:
        yield reservation
    finally:
        if reservation is not None:
            with contextlib.suppress(Exception):
                remove_placement_group(reservation[1])


def _reserve(
    roles_for: Callable[[list[Node]], Sequence[Role]], settings: RayConfig, hosts: int | None, stopped: Callable[[], bool]
) -> tuple[list[Bundle], PlacementGroup] | None:
    deadline, has_told = time.monotonic() + 60 * settings.wait_minutes, False
    while not stopped():
        alive = nodes()
        roles, spread = roles_for(alive), settings.strategy == "spread"
        bundles = place(roles, alive, spread, hosts)
        if bundles is None and place_when_free(roles, alive, spread, hosts) is None:
            raise UserError(f"launch.ray: the cluster must have room for {needs(roles, hosts)}: {has(alive)}; {_ADVICE}")
        if bundles is not None and (group := _try(bundles)):
            return bundles, group
        if not has_told:
            longest = f"at most {settings.wait_minutes:g} minutes"
            print(f"note     waiting for room for {needs(roles, hosts)}, {longest}: {has(alive)}", flush=True)
            has_told = True
        if time.monotonic() > deadline:
            raise UserError(
                f"launch.ray.wait_minutes: no room for {needs(roles, hosts)} after {settings.wait_minutes:g} minutes: "
                f"{has(alive)}; end what has reserved it (`ray list placement-groups`, `ray list actors`), or wait longer"
            )
        time.sleep(1.0)
    return None


_ADVICE = (
    "start more nodes, choose a smaller policy.backend, or trainer.device: cpu where GPUs are lacking; neighbours are "
    "tensor-parallel ranks, or all where the engine's servers are reached on their own node"
)


def _try(bundles: Sequence[Bundle]) -> PlacementGroup | None:
    """Reserve what was free a moment ago; returns None if it is taken by now."""
    group = placement_group(
        [_resources(bundle.amount) for bundle in bundles],
        strategy="PACK",
        bundle_label_selector=[{_NODE_ID: bundle.node.id} for bundle in bundles],
    )
    if group.wait(_TRY_SECONDS):
        return group
    remove_placement_group(group)
    return None


def _resources(amount: Amount) -> dict[str, float]:
    return {name: count for name, count in (("GPU", amount.gpus), ("CPU", amount.cpus)) if count}
