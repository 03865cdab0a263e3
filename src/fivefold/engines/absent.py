"""Placeholder engine for ranks without one: ranks of another model, while the policy's ranks sample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from fivefold.engines.turns import Turns
from fivefold.interfaces import EngineReplica, EngineState, Stream
from fivefold.types import Completion, Request


class AbsentEngine:
    """An Engine that receives no requests, and has the state and the version of the engine on the other ranks."""

    restarts = 0

    def __init__(self, count: int, can_sleep: bool) -> None:
        """`count`: replicas of the engine, all on other ranks; `can_sleep`: whether these can sleep."""
        self.replica = EngineReplica(None, count, leads=False)
        self.state, self.version, self._can_sleep = EngineState.ABSENT, 0, can_sleep

    def generate(self, requests: Sequence[Request]) -> Iterator[Completion]:
        assert not requests, "there is no engine on this rank"
        return iter(())

    def stream(self) -> Stream:
        return Turns(self)

    def update_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        self.state, self.version = EngineState.READY, version

    def abort(self) -> None: ...

    def sleep(self) -> None:
        if self._can_sleep:
            self.state = EngineState.ASLEEP

    def wake(self) -> None: ...

    def restart(self) -> None: ...

    def look_after(self) -> None: ...

    def close(self) -> None: ...
