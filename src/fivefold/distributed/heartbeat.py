"""What the ranks know of each other at any moment: whether the run was asked to end, and where, and whether all are there.

On every rank a thread exchanges two numbers with all others twice a second, over a process group of its own, whatever the
rank itself is doing. A request to end reaches one rank or all of them at different moments, in different places of the
program; they must leave it in the same place, or some would wait for the others for ever. So the thread holds its rank where
it is, all threads exchange how far their ranks are, and then everyone knows the place: that of the rank that is farthest. Up
to there every rank goes on, for others wait for it; behind it nobody has been.

A place is (number of collectives of the whole world and of passes over a batch that were begun, item within the last of
them): all ranks begin the same ones in the same order. An item is a micro-batch, an engine's step or a finished response.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import NoReturn

import torch
import torch.distributed as dist

_SECONDS = 0.5
"""Between two exchanges."""
Place = tuple[int, int]


class Interrupted(Exception):  # noqa: N818 - it is no error
    """The run was asked to end; every rank raises it in the same place."""

    def __init__(self, number: int) -> None:
        super().__init__(f"asked to end by signal {number}")
        self.number = number


class Heartbeat:
    """How far this rank is, and where it is to end. Without a thread (`start`) it is never asked to."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._place: Place = (0, -1)
        self._is_held = self._is_over = False
        self._is_shielded = False
        self._places: list[Place] = []
        """Of all ranks, once the run was asked to end."""
        self._number = 0
        self._thread: threading.Thread | None = None
        self._close = threading.Event()
        self.has_begun = False
        """There is something to save: the run ends in a place that all ranks agree on. Before it ends where it is."""
        self.on_request: Callable[[], None] = lambda: None
        """Called by the thread again and again between a request to end and the end: wakes what its rank waits for."""

    # --- the thread --------------------------------------------------------------------------------------------------

    def start(
        self,
        group: dist.ProcessGroup,
        requested: Callable[[], int],
        end_now: Callable[[int], None],
        on_loss: Callable[[Exception], None],
    ) -> None:
        """Begin to exchange. `requested` gives the signal that asked this rank to end, or 0; `end_now` ends it where there
        is nothing to save; `on_loss` is called once another rank is gone."""

        def beat() -> None:
            try:
                while self._exchange(group, requested, end_now):
                    self._close.wait(_SECONDS)
            except RuntimeError as error:
                on_loss(error)

        self._thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait until every rank has come here: then none of them misses another."""
        if self._thread is not None:
            self._close.set()
            self._thread.join()

    def _exchange(self, group: dist.ProcessGroup, requested: Callable[[], int], end_now: Callable[[int], None]) -> bool:
        """Once with all others; whether to go on."""
        stays, saves = not self._close.is_set(), self.has_begun
        numbers = torch.tensor([requested(), stays, saves])
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=group)
        number, any_stays, any_saves = numbers.tolist()
        if number and not any_saves:
            end_now(number)
        if number and not self._places:
            self._agree(group, number)
        if number and not self._is_over:
            self.on_request()
        return bool(any_stays)

    def _agree(self, group: dist.ProcessGroup, number: int) -> None:
        with self._change:
            self._is_held = True
            own = torch.tensor(self._place)
        everyone = [torch.zeros_like(own) for _ in range(group.size())]
        dist.all_gather(everyone, own, group=group)
        with self._change:
            self._places = [(int(step), int(item)) for step, item in everyone]
            self._number, self._is_held = number, False
            self._change.notify_all()

    # --- the rank ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A collective of all ranks begins, or a pass over a batch. Raises Interrupted where nobody has been."""
        with self._change:
            self._wait()
            if self._may_end and self._place[0] >= self._end:
                self._interrupt()
            self._place = (self._place[0] + 1, -1)

    def item(self, number: int, among: Iterable[int] | None = None) -> bool:
        """Whether to do an item of what was begun last: all of these ranks do it, or none."""
        with self._change:
            self._wait()
            if self._may_end and number > self._last_item(among):
                return False
            self._place = max(self._place, (self._place[0], number))
            return True

    def check_items(self, count: int) -> None:
        """Raises Interrupted, on all ranks, where not all of so many items of a pass were done."""
        with self._change:
            self._wait()
            if self._may_end and count - 1 > self._last_item(None):
                self._interrupt()

    def check(self) -> bool:
        """Whether the run was asked to end and others wait for this rank farther on, so that it should get there. Raises
        Interrupted where nobody does. For what a rank does alone, before the next collective of all."""
        with self._change:
            self._wait()
            if self._may_end and self._place[0] >= self._end:
                self._interrupt()
            return self._may_end

    def goes_on(self, among: Iterable[int]) -> Callable[[], bool]:
        """Whether to take the next of the steps that these ranks take together, asked before each; raises Interrupted where
        the run was asked to end and nobody waits for them farther on."""
        steps, members = count(), tuple(among)

        def is_next_taken() -> bool:
            if self.item(next(steps), members):
                return True
            self.check()
            return False

        return is_next_taken

    @contextmanager
    def shielded(self) -> Iterator[None]:
        """What happens meanwhile is not interrupted, but whatever follows."""
        self._is_shielded = True
        try:
            yield
        finally:
            self._is_shielded = False

    @property
    def _may_end(self) -> bool:
        return bool(self._places) and not self._is_over and not self._is_shielded

    @property
    def _end(self) -> int:
        """The last collective or pass that any rank has begun."""
        return max(self._places)[0]

    def _last_item(self, ranks: Iterable[int] | None) -> float:
        """The last item, of what this rank has begun, that any of these ranks has begun."""
        chosen = self._places if ranks is None else [self._places[rank] for rank in ranks]
        if any(step > self._place[0] for step, _ in chosen):
            return math.inf
        return max((item for step, item in chosen if step == self._place[0]), default=-1)

    def _wait(self) -> None:
        while self._is_held:
            self._change.wait()

    def _interrupt(self) -> NoReturn:
        self._is_over = True
        raise Interrupted(self._number)
