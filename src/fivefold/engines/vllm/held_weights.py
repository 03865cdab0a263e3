"""Tracks whether a server's workers hold complete weights, so that no request is sampled with a mix of two models."""

from __future__ import annotations

import asyncio
import time
from typing import Any

_SILENCE = 300.0
"""Seconds between two calls of an update after which its sender counts as gone."""


class HeldWeights:
    """Whether the held weights are a complete model: false from the start of an update until it has succeeded."""

    def __init__(self) -> None:
        self._are_whole = False
        self._heard: float | None = None
        """Time of the last call of the update under way; None without one."""
        self._settled = asyncio.Event()

    def before(self) -> None:
        """Record that a call about weights goes to the workers: from now on they may hold parts of two models."""
        self._are_whole, self._heard = False, time.monotonic()
        self._settled.clear()

    def after(self, method: str, arguments: list[Any], answers: list[Any]) -> None:
        """Record that a call succeeded; the `answers` of `finish_weights` are faults."""
        self._heard = time.monotonic()
        if method == "finish_weights":
            self._settle(are_whole=arguments == [True] and not any(answers))

    def cut(self) -> None:
        """Record that the update under way will not complete."""
        self._settle(are_whole=False)

    def _settle(self, are_whole: bool) -> None:
        self._are_whole, self._heard = are_whole, None
        self._settled.set()

    async def are_whole(self) -> bool:
        """Waits for an update under way; returns whether the weights may be used for sampling."""
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
