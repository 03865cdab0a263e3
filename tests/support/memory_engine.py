"""An engine whose servers are in this process: real routing and real loss of servers, and tokens drawn from the seed alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from fivefold.engines.servers.request_router import RequestRouter
from fivefold.engines.servers.server import ServerLostError
from fivefold.interfaces import EngineReplica, EngineState, Pressure


class MemoryServer:
    """Samples digits that the seed of a request determines, and an end token, after a while."""

    names_versions = True

    def __init__(self, engine: MemoryEngine) -> None:
        self._engine = engine
        self.seen: list[tuple[tuple[int, ...], int]] = []
        """(tokens read, seed) of each request that it was sent."""
        self.is_lost = False
        self.running = self.most = 0
        self.cut = asyncio.Event()

    async def generate(self, name, prompt_ids, sampling, draws):
        for number, seed in draws:
            self.seen.append((tuple(prompt_ids), seed))
            self.running += 1
            self.most = max(self.most, self.running)
            try:
                drawn = random.Random(seed)
                tokens = [drawn.choice(self._engine.words) for _ in range(1 + drawn.randrange(5))] + [self._engine.end]
                tokens = tokens[: sampling.max_tokens]
                await asyncio.sleep(self._engine.seconds(drawn))
            finally:
                self.running -= 1
            if self.is_lost:
                raise ServerLostError("lost")
            if self.cut.is_set():
                yield number, tokens[:1], [-0.5], "abort", None, None
                continue
            reason = "stop" if tokens[-1] == self._engine.end else "length"
            yield number, tokens, [-float(token) for token in tokens], reason, None, None

    def progress(self) -> float | None:
        return None if self.is_lost else float(len(self.seen))

    def pressure(self) -> Pressure | None:
        return self._engine.pressure(self)


class MemoryEngine:
    """Servers in memory, and a router of requests."""

    restarts = 0

    def __init__(
        self, tokenizer, servers: int = 1, window: int = 64, seconds: Callable[[random.Random], float] = lambda drawn: 0.0
    ) -> None:
        self.words = tokenizer.encode("0123456789", add_special_tokens=False)
        self.end, self.seconds = tokenizer.eos_token_id, seconds
        self.pressure: Callable[[MemoryServer], Pressure | None] = lambda server: None
        self.replica, self.version, self.state = EngineReplica(0, 1), 5, EngineState.READY
        self.servers = [MemoryServer(self) for _ in range(servers)]
        self.router = RequestRouter(0, window, lambda line: None, stall_seconds=60.0)
        self._serve()
        self.router.go(self.version)

    @property
    def seen(self) -> list[tuple[tuple[int, ...], int]]:
        return [sampled for server in self.servers for sampled in server.seen]

    def _serve(self) -> None:
        # The router needs no more of a server.
        self.router.serve(self.servers)  # type: ignore[arg-type]

    def stream(self):
        return self.router.open()

    def lose(self, number: int) -> None:
        """A server ends: what it was sent gets no answer."""
        self.servers[number].is_lost = True

    def look_after(self) -> None:
        if len(self.router.lost) == len(self.servers):
            self.state = EngineState.LOST

    def restart(self) -> None:
        """New servers in the place of those that have ended, with the same weights."""
        self.servers = [MemoryServer(self) if server.is_lost else server for server in self.servers]
        self._serve()
        self.state = EngineState.READY
        self.router.go(self.version)

    def cut(self) -> None:
        """End the requests in flight with what they have."""
        for server in self.servers:
            self.router.call(server.cut.set)
        self.router.abort()

    def close(self) -> None:
        self.router.close()
