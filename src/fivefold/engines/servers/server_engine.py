"""An engine of servers: distributes requests by load, sends weights in buckets, and restarts a server that ends."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fivefold.distributed.ranks import Ranks
from fivefold.engines.servers.request_router import RequestRouter, RequestStream
from fivefold.engines.servers.server import Server, ServerLostError
from fivefold.engines.servers.server_process import ServerProcess
from fivefold.engines.servers.weight_sender import Delivery, Sender, WeightSender
from fivefold.engines.servers.wire_sender import WireSender
from fivefold.engines.weight_sync import give_back_memory, not_come
from fivefold.errors import RunError
from fivefold.interfaces import EngineReplica, EngineState
from fivefold.models.families import load_spec, parameters_of
from fivefold.types import Completion, Request

_POLL_SECONDS = 0.02
MOST_RESTARTS = 3
"""Consecutive restarts of servers before the run ends."""


class ServerEngine:
    """One engine of several servers. Every rank sends its own part of the requests, each to the server with the fewest of
    them."""

    def __init__(
        self,
        directory: Path,
        ranks: Ranks,
        device: torch.device,
        connect: Callable[[str], Server],
        log: Callable[[str], None],
        *,
        processes: Mapping[int, ServerProcess] | None = None,
        ranks_per_server: int | None = 1,
        servers_per_device: int = 1,
        addresses: Sequence[str] = (),
        window: int,
        bucket_bytes: int,
        verify_every: int,
        can_sleep: bool,
        stall_seconds: float = 300.0,
        interrupt: Literal["continue", "finish", "abort"] = "continue",
        is_staged: bool = False,
    ) -> None:
        """Connects to servers that the ranks start, or to running ones at `addresses`.

        `processes`: by number, the servers that this rank starts; `ranks_per_server`: number of consecutive ranks whose
        devices a server shares, None for separate devices; `window`: most requests of this rank that a server has at once;
        `servers_per_device`, `is_staged`: as in WireSender; `stall_seconds`: RequestRouter's; `interrupt`: RolloutConfig's.
        """
        self._ranks, self._connect, self._log = ranks, connect, log
        self._processes = dict(processes or {})
        self._verify_every, self._can_sleep = verify_every, can_sleep
        self._given = list(addresses)
        self._sender: Sender
        if addresses or ranks_per_server is None:
            self._sender = WireSender(ranks, device, bucket_bytes, servers_per_device, is_staged=is_staged)
        else:
            self._sender = WeightSender(ranks, device, ranks_per_server, bucket_bytes)
        self._router = RequestRouter(ranks.rank, window, log, stall_seconds)
        self._expected = [name for parameter in parameters_of(load_spec(directory)) for name in parameter.hf]
        self._servers: list[Server] = []
        self._lost: set[int] = set()
        self._restarts = self._updates = self.restarts = 0
        self._is_cache_asleep = self._is_paused = self._is_new = False
        self._interrupt = interrupt
        self.replica = EngineReplica(ranks.rank if ranks.holds else None, ranks.layout.world_size, leads=ranks.holds)
        self.state, self.version = EngineState.ABSENT, 0
        self._start()

    @property
    def _servers_to_call(self) -> dict[int, Server]:
        """The servers that this rank calls for weights and memory."""
        if self._given:
            return dict(enumerate(self._servers)) if self._ranks.is_main else {}
        return {number: self._servers[number] for number in self._processes}

    def _start(self) -> None:
        """Start the servers that have ended, and exchange the addresses of all servers."""
        fault = ""
        self._router.hold()
        # The first weights of a server are compared, also after a restart.
        self._updates = 0
        ended = [process for process in self._processes.values() if process.has_ended]
        try:
            for process in ended:
                self._log(f"starting the engine's server; what it says is in {process.log}")
                process.start()
            for process in ended:
                process.wait()
        except RuntimeError as error:
            fault = str(error)
        for rank_fault in self._ranks.gather_objects(fault):
            if rank_fault:
                raise RunError(rank_fault)
        started: dict[int, str] = {}
        local = [(number, process.address) for number, process in self._processes.items()]
        for numbered in self._ranks.gather_objects(local):
            started |= dict(numbered)
        addresses = self._given or [started[number] for number in sorted(started)]
        before = {server.address: server for server in self._servers}
        self._servers = [before[address] if address in before else self._connect(address) for address in addresses]
        self._lost.clear()
        self._router.serve(self._servers)
        for server in self._servers_to_call.values():
            if server.address not in before:
                server.take()
        self._names_versions = not self._ranks.any(
            not all(server.names_versions for server in self._servers_to_call.values())
        )

    def restart(self) -> None:
        """Start lost servers again; raises RuntimeError after too many restarts, and for servers of another owner."""
        if not self._lost:
            return
        self._restarts, self._is_new, self.restarts = self._restarts + 1, True, self.restarts + 1
        mine = [process for number, process in self._processes.items() if number in self._lost]
        tails = [
            tail
            for tails_of_rank in self._ranks.gather_objects([one.last_words() for one in mine])
            for tail in tails_of_rank
        ]
        names = ", ".join(str(self._servers[number]) for number in sorted(self._lost))
        if self._given or self._restarts > MOST_RESTARTS:
            raise RunError("\n".join([f"the engine's servers ended {self._restarts} times: {names}", *tails]))
        count = f"{len(self._lost)} of {len(self._servers)}"
        self._log(f"{count} servers of the engine ended or do not answer, and are started again: {names}")
        for process in mine:
            process.end()
        self._start()
        if self.state is not EngineState.ASLEEP:
            self.state = EngineState.ABSENT

    def close(self) -> None:
        """End the servers that this engine has started."""
        self._router.close()
        for process in self._processes.values():
            process.close()

    def update_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Send full tensors, of which each worker keeps its shard; raises RuntimeError if it then holds something else.

        As `interrupt` says, requests in flight wait and continue with the new weights, finish before, or are aborted. If a
        server ends meanwhile, the engine is lost: weights are sent again after `restart`.
        """
        verify = self._verify_every > 0 and self._updates % self._verify_every == 0
        missing = set(self._expected)
        faults, lost = self._sender.deliver(
            Delivery(self._servers_to_call, weights, missing, verify, version, self._begin_update)
        )
        if self._ranks.holds:
            # Only these ranks hold the policy's weights, and so can see which tensors were sent.
            faults = not_come(missing, self._expected) or faults
        if message := "; ".join(fault for faults_of_rank in self._ranks.gather_objects(faults) for fault in faults_of_rank):
            raise RunError(f"the engine's weights are not those of the policy after {version} updates: {message}")
        for number in lost.intersection(self._processes):
            # The server may wait for weights that are never sent, with requests in flight.
            self._processes[number].end()
        self._agree(lost)
        if self._is_paused:
            self._call_all("resume")
            self._is_paused = False
        if self._lost:
            self.state = EngineState.LOST
            return
        # A restarted server has to last until the next update.
        self._restarts, self._is_new = self._restarts if self._is_new else 0, False
        self._updates += 1
        self.state, self.version = EngineState.READY, version
        self._router.go(version)

    def _hold(self) -> bool:
        """Stop all sampling; returns whether servers keep requests meanwhile."""
        goes_on = self._interrupt == "continue"
        if not self._ranks.any(self._router.hold(keeps=goes_on)):
            return False
        if goes_on and self._names_versions:
            self._router.stop_watching()
            self._call_all("pause")
            return True
        # Every rank has stopped sending requests, so none arrives after this.
        if goes_on:
            self._end_running()
        elif self._interrupt == "abort":
            self.abort()
        while self._ranks.any(not self._router.is_idle):
            time.sleep(_POLL_SECONDS)
        return False

    def _begin_update(self) -> None:
        """Begin an update: servers hold a mix of two versions from now on, until they have all of the new one."""
        self._is_paused = self._hold()
        self.state = EngineState.ABSENT

    def sleep(self) -> None:
        if self._can_sleep and self.state is not EngineState.ASLEEP:
            self._call_all("sleep")
            self.state, self._is_cache_asleep = EngineState.ASLEEP, True

    def wake(self) -> None:
        if self.state is EngineState.ASLEEP:
            self._call_all("wake", "weights")
            self.state = EngineState.ABSENT

    def _wake_cache(self) -> None:
        if self._is_cache_asleep:
            give_back_memory()
            self._call_all("wake", "kv_cache")
            self._is_cache_asleep = False

    def _call_all(self, name: str, *arguments: Any) -> None:
        """Call a method of every server, each from the rank responsible for it; returns on all ranks when all have
        answered."""
        self._ranks.barrier()
        lost = set()
        for number, server in self._servers_to_call.items():
            if number in self._lost:
                continue
            try:
                getattr(server, name)(*arguments)
            except ServerLostError:
                lost.add(number)
        self._agree(lost)

    def _agree(self, lost: set[int]) -> None:
        """Share the servers that any rank has lost with every rank."""
        rows = torch.tensor(sorted(lost), dtype=torch.long)
        self._lost |= set(torch.cat(self._ranks.all_gather_world(rows)).tolist())
        self._router.lose(self._lost)

    def generate(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """Yields a completion of each request, as they finish. Collective.

        The requests of a server that ended go to the others. If none is left, the engine is lost, and so are the requests
        without a response: they are for the caller to send again after new weights.
        """
        assert self.state is EngineState.READY, f"the engine must be ready to sample: it is {self.state.value}"
        self._wake_cache()
        stream = self.stream()
        try:
            stream.submit(requests)
            yield from stream.completions()
        finally:
            stream.close()
        self.look_after()

    def stream(self) -> RequestStream:
        """Returns a stream for requests of this rank that the caller does not wait for; an engine with weights then has all
        of its memory. Collective."""
        if self.state is EngineState.READY:
            self._wake_cache()
        return self._router.open()

    def look_after(self) -> None:
        """Synchronize server failures across ranks; the engine is lost if no server is left. Collective."""
        self._agree(self._router.lost)
        if len(self._lost) == len(self._servers):
            self.state = EngineState.LOST

    def abort(self) -> None:
        """End the requests in flight: `generate` yields what they have so far."""
        self._router.abort()
        self._end_running()

    def _end_running(self) -> None:
        for number, server in self._servers_to_call.items():
            if number not in self._lost:
                # The rank that has requests there notices that the server is gone.
                with contextlib.suppress(ServerLostError):
                    server.abort()
