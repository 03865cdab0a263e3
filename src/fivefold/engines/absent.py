"""Placeholder engine for ranks without one: ranks of another model, while the policy's ranks sample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from fivefold.engines.turns import Turns
from fivefold.interfaces import EngineReplica, Stream
from fivefold.types import Completion, Request


class AbsentEngine:
    """An Engine that receives no requests, and has the same version as the engine on the other ranks."""

    def __init__(self, count: int) -> None:
        """`count`: replicas of the engine, all on other ranks."""
        self.replica = EngineReplica(None, count, leads=False)
        self.version = -1

    def generate(self, requests: Sequence[Request]) -> Iterator[Completion]:
        assert not requests, "there is no engine on this rank"
        return iter(())

    def stream(self) -> Stream:
        return Turns(self)

    def update_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        self.version = version

    def abort(self) -> None: ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def look_after(self) -> None: ...

    def close(self) -> None: ...
