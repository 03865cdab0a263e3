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
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from fivefold.distributed.pulse import SECONDS, Motion

Place = tuple[int, int]
STAGES = frozenset({"step", "pack", "logprobs", "prm", "critic", "train"})
"""Stages in which every rank gets on at any moment, once the first of them has ended. Loading, compiling, sampling, rewards,
weights and saving have limits of their own."""
_TIMES = 10
"""A rank that stood still for a while and went on may do so again, for so many times as long."""
_ROLL_CALL_SECONDS = 5.0
"""For ranks to answer once some have not been heard of."""


@dataclass(frozen=True)
class Ends:
    """How this rank ends, and when."""

    requested: Callable[[], int]
    """The signal that asked it to end, or 0."""
    now: Callable[[int], None]
    """End by that signal: there is nothing to save."""
    lost: Callable[[str], None]
    """Another rank is gone."""
    hung: Callable[[str], None]
    """This rank stands still while others wait for it."""
    still_seconds: float = math.inf
    """How long no rank may get on."""
    unheard_seconds: float = math.inf
    """How long the ranks may not be heard of."""


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
        self.doing: Callable[[], tuple[str, bool]] = lambda: ("loading", False)
        """The stage that this rank is in, and whether it has ended one of this name before."""
        self._ends: Ends | None = None
        self._motion: Motion | None = None
        self._still = self._longest_still = self._unheard = 0
        """Exchanges in which no rank moved, now and at most before one moved again; moments since the last exchange."""
        self._all_have_begun = False
        self.has_begun = False
        """There is something to save: the run ends in a place that all ranks agree on. Before it ends where it is."""
        self.on_request: Callable[[], None] = lambda: None
        """Called by the thread again and again between a request to end and the end: wakes what its rank waits for."""

    # --- the thread --------------------------------------------------------------------------------------------------

    def start(self, group: dist.ProcessGroup, ends: Ends, computes_on_cpu: bool = True) -> None:
        """Begin to exchange."""
        self._ends, self._motion = ends, Motion(computes_on_cpu)

        def beat() -> None:
            try:
                while self._exchange(group, ends):
                    self._close.wait(SECONDS)
            except RuntimeError as error:
                ends.lost(str(error))

        self._thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait until every rank has come here: then none of them misses another."""
        if self._thread is not None:
            self._close.set()
            self._thread.join()
            self._ends = None

    def _exchange(self, group: dist.ProcessGroup, ends: Ends) -> bool:
        """Once with all others; whether to go on."""
        stays, saves = not self._close.is_set(), self.has_begun
        numbers = torch.tensor([ends.requested(), stays, saves, not saves, self._has_moved()])
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=group)
        number, any_stays, any_saves, any_loads, any_moved = numbers.tolist()
        self._unheard, self._all_have_begun = 0, not any_loads
        if number and not any_saves:
            ends.now(number)
        if self._stands_still(bool(any_moved), ends.still_seconds):
            self._end_hung(group, ends)
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

    def _has_moved(self) -> bool:
        stage, is_known = self.doing()
        assert self._motion is not None
        return self._motion.has_moved(self._place, stage in STAGES and is_known)

    def _stands_still(self, any_moved: bool, limit: float) -> bool:
        """Whether no rank has moved for too long; counted in exchanges, so that every rank comes to the same answer."""
        if any_moved:
            self._longest_still, self._still = max(self._longest_still, self._still), 0
            return False
        self._still += 1
        return self._still * SECONDS > max(limit, _TIMES * self._longest_still * SECONDS)

    def _end_hung(self, group: dist.ProcessGroup, ends: Ends) -> None:
        """No rank has moved: those that wait for no other one are why, or those that are the least far where all wait."""
        assert self._motion is not None
        own = torch.tensor([self._motion.waits, *self._place])
        everyone = [torch.zeros_like(own) for _ in range(group.size())]
        dist.all_gather(everyone, own, group=group)
        places = [tuple(each.tolist()) for each in everyone]
        slowest = min(places)
        named = [rank for rank, place in enumerate(places) if (place == slowest if slowest[0] else not place[0])]
        if len(places) == 1:
            # No other rank waits for it.
            self._still = 0
        elif group.rank() in named:
            ends.hung(
                f"it has stood still for {self._still * SECONDS:.0f} s {self.place} while the other ranks waited for it "
                f"(launch.silent_seconds: {ends.still_seconds:g}):\n{self._motion.stack()}"
            )
        else:
            ends.lost(f"ranks {named} have stood still for {self._still * SECONDS:.0f} s")

    def tick(self) -> None:
        """Called twice a second by a thread that waits for no other rank: end this one where the others are not heard of."""
        self._unheard += 1
        if self._ends is None or not self._all_have_begun or self._unheard * SECONDS <= self._ends.unheard_seconds:
            return
        self._unheard = 0
        self._ends.lost(
            f"the other ranks were not heard of for {self._ends.unheard_seconds:g} s (launch.silent_seconds): a rank is "
            f"stopped, or the network to it is cut; {_roll_call()}"
        )

    @property
    def place(self) -> str:
        """Where this rank is, for messages."""
        collective, item = self._place
        return f"in stage {self.doing()[0]}, collective {collective}" + (
            f", micro-batch or item {item}" if item >= 0 else ""
        )

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


def _roll_call() -> str:
    """Which ranks do not answer at the rendezvous, where it can be asked."""
    absent: list[int] = []
    store = distributed_c10d._get_default_store()

    def call() -> None:
        store.set(f"here/{dist.get_rank()}", "")
        time.sleep(_ROLL_CALL_SECONDS)
        absent.extend(rank for rank in range(dist.get_world_size()) if not store.check([f"here/{rank}"]))

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    caller.join(2 * _ROLL_CALL_SECONDS)
    if caller.is_alive():
        return "rank 0, which holds the rendezvous, does not answer"
    return f"ranks {absent} do not answer" if absent else "every rank answers at the rendezvous"
