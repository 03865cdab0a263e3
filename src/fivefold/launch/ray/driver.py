"""Runs the ranks on the nodes of a Ray cluster: reserved, started by an actor on each node, watched, and ended together.

The driver does not train, so it needs no GPU. Its terminal output, exit codes and signals are the same as on one machine:
the same `watch` watches remote ranks.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fivefold import __version__
from fivefold.config.engine import EngineConfig
from fivefold.config.machine import hosts
from fivefold.config.roles import Roles
from fivefold.config.schema import LaunchConfig, TrainerConfig
from fivefold.errors import RunError, UserError, first_line
from fivefold.launch.environment import forwarded
from fivefold.launch.ray.cluster import connected, reserved
from fivefold.launch.ray.node import ERRORS, News, NodeRanks, Report
from fivefold.launch.ray.placement import Amount, Bundle, Node, listed, rank_role
from fivefold.launch.watch import FAILED, Cause, Kind, Signals, watch

_UNAVAILABLE_SECONDS = 3.0
"""Seconds for which a connection may be broken."""
_REACH_SECONDS = 2.0
_START_SECONDS = 300.0
"""Most seconds until an actor is ready: its process imports this package."""
_DRAIN_SECONDS = 2.0
"""Most seconds to wait for the remaining output of rank 0 after it has ended."""


def spawn(
    arguments: Sequence[str],
    hand_over: Callable[[], None],
    log_dir: Path,
    roles: Roles,
    engine: EngineConfig,
    trainer: TrainerConfig,
    launch: LaunchConfig,
) -> int:
    """Run `python -m ARGUMENTS` once per rank on the cluster of `launch.ray`; returns the exit code of the run.

    `hand_over` writes the configuration into `log_dir`, where the ranks read it. It is called when no other run can start in
    the run's directory, which is the parent of `log_dir`.
    Raises ValueError before anything starts if there is no cluster, if it has too few devices, or if a node does not see the
    run's files.
    """
    count, settings = roles.world_size, launch.ray
    if engine.layout is not None and engine.placement == "apart":
        count += engine.layout.world_size
    size = Amount(1 if trainer.device != "cpu" else 0, settings.cpus_per_rank) * count
    role_on = partial(rank_role, roles, engine, trainer.device, settings.cpus_per_rank)
    with Signals() as signals, connected(settings, size) as cluster:
        # Ray has replaced our handlers by its own.
        signals.install()
        wanted = hosts(launch, count)
        with reserved(lambda alive: [role_on(alive)], settings, wanted, lambda: bool(signals.taken)) as reservation:
            if reservation is None:
                return signals.code
            with _actors(*reservation, log_dir, launch.silent_seconds) as ranks:
                if not ranks.wait(lambda: bool(signals.taken)):
                    return signals.code
                # After the module and its configuration comes the checkpoint of an evaluation.
                ranks.look(log_dir, arguments[2:])
                print(f"note     on {cluster}:", flush=True)
                for host in ranks.hosts:
                    print(f"note     {host}", flush=True)
                ranks.hold(log_dir.parent, trainer.umask)
                hand_over()
                ranks.start(arguments, roles.world_size, launch)
                return watch(ranks, signals)


@dataclass
class Host:
    """A node with ranks, and their last reported state."""

    bundle: Bundle
    actor: Any
    report: Report | None = None
    codes: list[int | None] = field(default_factory=list)
    is_speaking: bool = False
    silent: list[Cause] = field(default_factory=list)
    """Causes for its ranks that run and have given no sign of life for too long."""
    lost: Cause | None = None
    """Why the node is no longer called; None while it is."""
    broken_since: float | None = None

    @property
    def _ranks(self) -> str:
        members = self.bundle.members
        return f"rank{'s' if len(members) > 1 else ''} {listed(members)}"

    def __str__(self) -> str:
        gpus = self.report.gpus if self.report else []
        devices = f"GPUs {', '.join(gpus)}" if gpus else "CPU"
        return f"ray node {self.bundle.node}: {self._ranks}, {devices}"

    def lose(self, why: str) -> None:
        node = self.bundle.node
        message = f"{self._ranks} on {node}, Ray node {node.id[:12]}: {why}"
        self.codes = [FAILED] * len(self.bundle.members)
        self.lost, self.is_speaking = Cause(Kind.KILLED, self.bundle.members[0], message), False


class RemoteRanks:
    """All ranks, through the actors of their nodes."""

    def __init__(self, hosts: list[Host], silent_seconds: float) -> None:
        """`silent_seconds`: time without an answer after which a node is lost: its network or power may be gone."""
        self.hosts = hosts
        """Nodes in the order of their ranks."""
        self._silent_seconds = silent_seconds

    def wait(self, stopped: Callable[[], bool]) -> bool:
        """Wait until the actors are ready; returns False if `stopped` before."""
        references, deadline = [host.actor.__ray_ready__.remote() for host in self.hosts], time.monotonic() + _START_SECONDS
        while not stopped() and time.monotonic() < deadline:
            if not ray.wait(references, num_returns=len(references), timeout=1.0)[1]:
                return True
        return not stopped()

    def look(self, log_dir: Path, paths: Sequence[str]) -> None:
        """Raises ValueError if a node does not see the run's logs, or one of the files that it reads."""
        log_dir.mkdir(parents=True, exist_ok=True)
        mark = log_dir / f".seen-{secrets.token_hex(8)}"
        mark.write_text(mark.name)
        try:
            reports = self._ask_all("look", list(paths), (str(mark), mark.name))
        finally:
            mark.unlink()
        for host, report in reports:
            host.report = report
            where = f"launch.ray: node {host.bundle.node}"
            if report.missing:
                raise UserError(
                    f"{where} must see the files of this machine, and lacks {', '.join(report.missing)}: use a file system "
                    "that all nodes share, with the same paths"
                )
            if report.version != __version__:
                raise UserError(f"{where} must have fivefold {__version__}, as this machine: it has {report.version}")
            assert report.node_id == host.bundle.node.id, "Ray has started it on another node than requested"

    def hold(self, run_dir: Path, umask: str) -> None:
        """Lock the run's directory on the node of rank 0. Raises ValueError if another run holds it."""
        held = self._ask_all("hold", str(run_dir), umask, among=self.hosts[:1])
        if fault := held[0][1]:
            raise UserError(fault)

    def start(self, arguments: Sequence[str], world_size: int, launch: LaunchConfig) -> None:
        """Start the ranks."""
        first = self.hosts[0]
        assert first.report is not None
        variables = {
            **forwarded(os.environ, launch.ray.env_vars),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": first.report.address,
            "MASTER_PORT": str(first.report.port),
        }
        self._ask_all("start", list(arguments), variables, launch)

    def codes(self) -> list[int | None]:
        """Returns the exit codes, None for ranks that still run; also prints the latest output of rank 0."""
        news: News
        for host, news in self._ask("poll"):
            host.codes, host.is_speaking, host.silent = news.codes, news.is_speaking, news.silent
            for stream, piece in news.output:
                out = sys.stderr if stream == ERRORS else sys.stdout
                out.buffer.write(piece)
                out.flush()
        return [code for host in self.hosts for code in host.codes or [None] * len(host.bundle.members)]

    def send(self, number: int) -> None:
        self._ask("send", number)

    def silent(self) -> list[Cause]:
        return [cause for host in self.hosts for cause in host.silent]

    def causes(self) -> list[Cause]:
        causes = [cause for _, causes in self._ask("causes") for cause in causes]
        return [*causes, *(host.lost for host in self.hosts if host.lost)]

    def losses(self) -> list[Cause]:
        return [cause for _, causes in self._ask("losses") for cause in causes]

    def close(self) -> None:
        """Print the remaining output, kill the remaining processes, and release the actors."""
        deadline = time.monotonic() + _DRAIN_SECONDS
        while any(host.is_speaking for host in self.hosts) and time.monotonic() < deadline:
            self.codes()
            time.sleep(0.05)
        self._ask("close")
        for host in self.hosts:
            with contextlib.suppress(Exception):
                ray.kill(host.actor)

    def _ask_all(self, method: str, *arguments: Any, among: Sequence[Host] | None = None) -> list[tuple[Host, Any]]:
        """Call a method of every actor; raises RuntimeError if one does not answer."""
        answers = self._ask(method, *arguments, among=among)
        answering = [host.bundle for host, _ in answers]
        if silent := [host for host in among or self.hosts if host.bundle not in answering]:
            messages = [host.lost.text if host.lost else f"{host} does not answer" for host in silent]
            raise RunError("\n".join(messages))
        return answers

    def _ask(self, method: str, *arguments: Any, among: Sequence[Host] | None = None) -> list[tuple[Host, Any]]:
        """Call a method of the actors that are not lost; returns their answers. An actor that is gone is marked as lost."""
        hosts = [host for host in (self.hosts if among is None else among) if host.lost is None]
        references = [(host, getattr(host.actor, method).remote(*arguments)) for host in hosts]
        deadline, answers = time.monotonic() + self._silent_seconds, []
        for host, reference in references:
            try:
                answers.append((host, ray.get(reference, timeout=max(0.0, deadline - time.monotonic()))))
                host.broken_since = None
            except ActorUnavailableError as error:
                host.broken_since = host.broken_since or time.monotonic()
                if time.monotonic() > host.broken_since + _UNAVAILABLE_SECONDS:
                    host.lose(_why(host, error))
            except GetTimeoutError:
                host.lose(f"it has not answered for {self._silent_seconds:g} s: the node, or the way to it, is gone")
            except RayActorError as error:
                host.lose(_why(host, error))
        return answers


def _why(host: Host, error: RayActorError) -> str:
    """Returns whether the node is gone, or only Ray's worker process that started the ranks, as a message."""
    if not _is_there(host.bundle.node):
        return "the node has left the cluster: its raylet ended, or cannot be reached"
    text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    return f"Ray's worker process that started them has ended ({text[:500] or first_line(error)})"


def _is_there(node: Node) -> bool:
    """Returns whether the node is still in the cluster. The cluster itself notices a lost node half a minute late."""
    with contextlib.suppress(Exception):
        entries = [entry for entry in ray.nodes() if entry["NodeID"] == node.id and entry["Alive"]]
        if not entries or ray.util.client.ray.is_connected():
            # At ray:// only the head node is reachable from here.
            return bool(entries)
        try:
            socket.create_connection((node.address, entries[0]["NodeManagerPort"]), _REACH_SECONDS).close()
        except OSError:
            return False
    return True


@contextmanager
def _actors(bundles: list[Bundle], group: PlacementGroup, log_dir: Path, silent_seconds: float) -> Iterator[RemoteRanks]:
    """Creates an actor for each bundle; they and their children end with this context."""
    actor = ray.remote(max_restarts=0, max_task_retries=0)(NodeRanks)
    hosts = []
    for number, bundle in enumerate(bundles):
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
        options = {"num_cpus": bundle.amount.cpus, "num_gpus": bundle.amount.gpus, "scheduling_strategy": place}
        created = actor.options(**options).remote(bundle.members, os.getcwd(), str(log_dir))
        hosts.append(Host(bundle, created))
    ranks = RemoteRanks(hosts, silent_seconds)
    try:
        yield ranks
    finally:
        ranks.close()
