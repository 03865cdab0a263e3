"""What a server knows of the weights that its workers hold: nobody samples with half of two models."""

from __future__ import annotations

import asyncio
import time
from typing import Any

_SILENCE = 300.0
"""Seconds between two calls of an update after which whoever sends it is taken to be gone."""


class HeldWeights:
    """Whether they are a whole model: once an update begins, not before it has ended well."""

    def __init__(self) -> None:
        self._are_whole = False
        self._heard: float | None = None
        """When the update under way was last heard of."""
        self._settled = asyncio.Event()

    def before(self) -> None:
        """A call about weights goes to the workers: from now on they may hold parts of two models."""
        self._are_whole, self._heard = False, time.monotonic()
        self._settled.clear()

    def after(self, method: str, arguments: list[Any], answers: list[Any]) -> None:
        """It went well; `answers` of `finish_weights` are what is wrong."""
        self._heard = time.monotonic()
        if method == "finish_weights":
            self._settle(are_whole=arguments == [True] and not any(answers))

    def cut(self) -> None:
        """What was under way does not come to its end."""
        self._settle(are_whole=False)

    def _settle(self, are_whole: bool) -> None:
        self._are_whole, self._heard = are_whole, None
        self._settled.set()

    async def are_whole(self) -> bool:
        """Whether they may be sampled with, when an update under way has ended."""
        while self._heard is not None:
            left = self._heard + _SILENCE - time.monotonic()
            if left <= 0:
                self.cut()
                break
            try:
                await asyncio.wait_for(self._settled.wait(), left)
            except TimeoutError:
                continue
        return self._are_whole
