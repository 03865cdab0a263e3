"""Ends all ranks of a run in the same place, and detects ranks that are hung or gone.

On every rank a thread exchanges a few numbers with all other ranks twice a second, over its own process group, whatever the
rank is doing. A request to end reaches the ranks at different moments and in different places of the program. They must
leave the program in the same place, or some would wait for the others permanently. So each thread holds its rank where it
is, and all threads exchange how far their ranks are. The end is the place of the rank that is farthest, the same for all.
Every rank continues up to there, because others wait for it; no rank has passed it.

A place is (number of collectives of the whole world and of passes over a batch that have begun, item within the last of
them): all ranks begin the same ones in the same order. An item is a micro-batch, an engine's step or a finished response.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import NoReturn

import torch
import torch.distributed as dist

from fivefold.config.roles import LEARNERS
from fivefold.distributed.hosts import on_hosts, roll_call
from fivefold.distributed.pulse import SECONDS, KernelWait, Motion, Stages

Place = tuple[int, int]
STAGES = frozenset({"step", "pack", "logprobs", "train", *LEARNERS})
"""Stages in which every rank is expected to make progress at any moment, once the first of them has ended. Loading,
compiling, sampling, rewards, weights and saving have separate limits."""
_TIMES = 10
"""Factor on the longest pause that ended by itself: a rank that paused and resumed may pause again for that many times as
long."""


@dataclass(frozen=True)
class Ends:
    """How and when this rank ends."""

    requested: Callable[[], int]
    """Returns the signal that asked this rank to end, or 0."""
    now: Callable[[int], None]
    """Ends this rank by that signal; there is nothing to save."""
    lost: Callable[[str], None]
    """Ends this rank because another rank is gone."""
    hung: Callable[[str], None]
    """Ends this rank because it is hung while others wait for it."""
    still_seconds: float = math.inf
    """Longest time in seconds without progress on any rank."""
    unheard_seconds: float = math.inf
    """Longest time in seconds without an exchange with the other ranks."""


class Interrupted(Exception):  # noqa: N818 - it is no error
    """Raised by every rank in the same place when the run was asked to end."""

    def __init__(self, number: int) -> None:
        super().__init__(f"asked to end by signal {number}")
        self.number = number


class Heartbeat:
    """Tracks how far this rank is, and where it has to end. Without its thread (`start`) it never has to end."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._place: Place = (0, -1)
        self._is_held = self._is_over = False
        self._is_shielded = False
        self._places: list[Place] = []
        """Places of all ranks, once the run was asked to end."""
        self._number = 0
        self._thread: threading.Thread | None = None
        self._close = threading.Event()
        self.stages = Stages()
        self._ends: Ends | None = None
        self._motion: Motion | None = None
        self._hosts: Sequence[str] = ()
        """The host of each rank."""
        self._kernel_wait = KernelWait()
        self._named: set[int] = set()
        """Ranks that were reported as waiting for a disk."""
        self._still = self._longest_still = self._unheard = 0
        """`_still` and `_longest_still`: exchanges in which no rank moved, now and at most before one moved again.
        `_unheard`: ticks since the last exchange."""
        self._has_begun = False

    def start(self, group: dist.ProcessGroup, ends: Ends, hosts: Sequence[str], computes_on_cpu: bool = True) -> None:
        """Start the thread that exchanges with the other ranks; `hosts` has the host of each rank."""
        self._ends, self._motion, self._hosts = ends, Motion(computes_on_cpu), hosts

        def beat() -> None:
            try:
                while self._exchange(group, ends):
                    self._close.wait(SECONDS)
            except RuntimeError as error:
                ends.lost(str(error))

        self._thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
        self._thread.start()

    def begin_run(self) -> None:
        """Record that every rank has loaded what it needs; they have waited for each other.

        From here on there is something to save, and the run ends in a place that all ranks agree on; before, it ends where
        it is. And from here on a rank that is unheard of for too long is lost: loading can block its threads.
        """
        self._unheard, self._has_begun = 0, True

    def close(self) -> None:
        """Wait until every rank has called this, so that no rank loses another one."""
        if self._thread is not None:
            self._close.set()
            self._thread.join()
            self._ends = None

    def _exchange(self, group: dist.ProcessGroup, ends: Ends) -> bool:
        """Exchange once with all other ranks; returns whether to continue."""
        stays, saves = not self._close.is_set(), self._has_begun
        waiting = group.rank() + 1 if self._kernel_wait.look() > ends.still_seconds else 0
        numbers = torch.tensor([ends.requested(), stays, saves, self._has_moved(), waiting])
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=group)
        number, any_stays, any_saves, any_moved, waiting = numbers.tolist()
        if waiting and group.rank() == 0:
            self._report_wait(waiting - 1, ends.still_seconds)
        self._unheard = 0
        if number and not any_saves:
            ends.now(number)
        if self._stands_still(bool(any_moved), ends.still_seconds):
            self._end_hung(group, ends)
        if number and not self._places:
            self._agree(group, number)
        return bool(any_stays)

    def _report_wait(self, rank: int, seconds: float) -> None:
        """Report, once, a rank that waits for a disk, on the terminal of the run: the log of that rank may be there."""
        if rank not in self._named:
            self._named.add(rank)
            print(
                f"warning  {on_hosts(self._hosts, [rank])} has waited for {seconds:g} s in the kernel, for a disk or a "
                "network file system that does not answer; the run continues when it does",
                flush=True,
            )

    def _agree(self, group: dist.ProcessGroup, number: int) -> None:
        with self._change:
            self._is_held = True
            place = torch.tensor(self._place)
        everyone = [torch.zeros_like(place) for _ in range(group.size())]
        dist.all_gather(everyone, place, group=group)
        with self._change:
            self._places = [(int(step), int(item)) for step, item in everyone]
            self._number, self._is_held = number, False
            self._change.notify_all()

    def _has_moved(self) -> bool:
        stage, is_known = self.stages.now()
        assert self._motion is not None
        return self._motion.has_moved(self._place, stage in STAGES and is_known)

    def _stands_still(self, any_moved: bool, limit: float) -> bool:
        """Returns whether no rank has moved for too long. Counted in exchanges, so that every rank gets the same answer."""
        if any_moved:
            self._longest_still, self._still = max(self._longest_still, self._still), 0
            return False
        self._still += 1
        return self._still * SECONDS > max(limit, _TIMES * self._longest_still * SECONDS)

    def _end_hung(self, group: dist.ProcessGroup, ends: Ends) -> None:
        """End all ranks after no rank has moved.

        The hung ranks are those that do not wait for another one, or the least advanced ones if all wait.
        """
        assert self._motion is not None
        position = torch.tensor([self._motion.waits, *self._place])
        everyone = [torch.zeros_like(position) for _ in range(group.size())]
        dist.all_gather(everyone, position, group=group)
        places = [tuple(row.tolist()) for row in everyone]
        slowest = min(places)
        named = [rank for rank, place in enumerate(places) if (place == slowest if slowest[0] else not place[0])]
        if len(places) == 1:
            # A single rank keeps no other rank waiting.
            self._still = 0
        elif group.rank() in named:
            ends.hung(
                f"it has stood still for {self._still * SECONDS:.0f} s {self.place} while the other ranks waited for it "
                f"(launch.silent_seconds: {ends.still_seconds:g}):\n{self._motion.stack()}"
            )
        else:
            ends.lost(f"{on_hosts(self._hosts, named)} stood still for {self._still * SECONDS:.0f} s")

    def tick(self) -> None:
        """End this rank if the other ranks are unheard of for too long. Called twice a second by a thread that waits for no
        other rank."""
        self._unheard += 1
        if self._ends is None or not self._has_begun or self._unheard * SECONDS <= self._ends.unheard_seconds:
            return
        self._unheard = 0
        self._ends.lost(
            f"the other ranks were not heard of for {self._ends.unheard_seconds:g} s (launch.silent_seconds): a rank is "
            f"stopped, or the network to it is cut; {roll_call(self._hosts)}"
        )

    @property
    def place(self) -> str:
        """The place of this rank, for messages."""
        collective, item = self._place
        return f"in stage {self.stages.now()[0]}, collective {collective}" + (
            f", micro-batch or item {item}" if item >= 0 else ""
        )

    def begin(self) -> None:
        """Record that a collective of all ranks, or a pass over a batch, begins.

        Raises Interrupted if the run was asked to end and no rank has begun this one.
        """
        with self._change:
            self._wait()
            if self._may_end and self._place[0] >= self._end:
                self._interrupt()
            self._place = (self._place[0] + 1, -1)

    def item(self, number: int, among: Iterable[int] | None = None) -> bool:
        """Returns whether to do an item of the current collective or pass: all of the ranks in `among` do it, or none."""
        with self._change:
            self._wait()
            if self._may_end and number > self._last_item(among):
                return False
            self._place = max(self._place, (self._place[0], number))
            return True

    def check_items(self, count: int) -> None:
        """Raises Interrupted, on all ranks, if not all of the `count` items of a pass were done."""
        with self._change:
            self._wait()
            if self._may_end and count - 1 > self._last_item(None):
                self._interrupt()

    def check(self) -> bool:
        """Returns whether the run was asked to end while other ranks wait for this rank at a later place, which it should
        then reach.

        Raises Interrupted if no rank waits for it. For work that a rank does alone, before the next collective of all ranks.
        """
        with self._change:
            self._wait()
            if self._may_end and self._place[0] >= self._end:
                self._interrupt()
            return self._may_end

    def goes_on(self, among: Iterable[int]) -> Callable[[], bool]:
        """Returns a function to call before each of the steps that the ranks in `among` take together: whether to take the
        step.

        It raises Interrupted if the run was asked to end and no rank waits for them at a later place.
        """
        steps, members = count(), tuple(among)

        def is_next_taken() -> bool:
            if self.item(next(steps), members):
                return True
            self.check()
            return False

        return is_next_taken

    @contextmanager
    def shielded(self) -> Iterator[None]:
        """Within this context nothing is interrupted; an interruption may follow right after it."""
        self._is_shielded = True
        try:
            yield
        finally:
            self._is_shielded = False

    def is_ending(self) -> bool:
        """Returns whether the run was asked to end, and this rank has not ended yet."""
        return bool(self._places) and not self._is_over

    @property
    def _may_end(self) -> bool:
        return self.is_ending() and not self._is_shielded

    @property
    def _end(self) -> int:
        """The last collective or pass that any rank has begun."""
        return max(self._places)[0]

    def _last_item(self, ranks: Iterable[int] | None) -> float:
        """Returns the last item of the current collective or pass that any of these ranks has begun."""
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
