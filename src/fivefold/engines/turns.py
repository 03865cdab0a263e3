"""A stream of requests to an engine that samples in the trainer's ranks: sampling and training take turns."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from fivefold.types import Completion, Request

if TYPE_CHECKING:
    from fivefold.interfaces import Engine


class Turns:
    """Samples all submitted requests at once when completions are requested: the ranks of a replica do so in lockstep."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: dict[int, Request] = {}

    def submit(self, requests: Sequence[Request]) -> None:
        self._waiting |= {request.id: request for request in requests}

    def arrived(self, seconds: float) -> Iterator[Completion]:
        """Yields all completions, however long that takes."""
        requests, self._waiting = list(self._waiting.values()), {}
        if requests:
            yield from self._engine.generate(requests)

    def drop(self, request_ids: Collection[int]) -> None:
        for request_id in request_ids:
            self._waiting.pop(request_id, None)

    def load(self) -> None:
        """Returns nothing: the engine samples only on request."""

    def wake(self) -> None:
        """Does nothing: `arrived` never waits."""

    def pressure(self) -> None:
        """Returns nothing: there are no servers."""
