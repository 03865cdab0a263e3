"""Calls of a function on some ranks, whose result or UserError every rank gets."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fivefold.distributed.ranks import Ranks
from fivefold.errors import UserError

T = TypeVar("T")
_POLL_SECONDS = 0.1


def call_once_a_machine(ranks: Ranks, function: Callable[[], T]) -> T:
    """Returns the function's result on the first rank of this rank's machine; its UserError is raised on all ranks.

    The function may take longer than the timeout between ranks: the ranks synchronize repeatedly until it is done.
    """
    host = socket.gethostname()
    results = _call_on(ranks, function, int(os.environ.get("LOCAL_RANK", ranks.rank)) == 0)
    return next(value for machine, value in results if machine == host)


def call_once(ranks: Ranks, function: Callable[[], T]) -> T:
    """Returns the function's result on rank 0, on every rank. It may take long, as in `call_once_a_machine`."""
    return _call_on(ranks, function, ranks.is_main)[0][1]


def _call_on(ranks: Ranks, function: Callable[[], T], calls: bool) -> list[tuple[str, T]]:
    """Return (machine, result) of each rank that `calls` the function; a UserError of one is raised on all ranks."""
    value: T | None = None
    fault = ""
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(function) if calls else None
        while ranks.any(call is not None and not call.done()):
            time.sleep(_POLL_SECONDS)
        if call is not None:
            try:
                value = call.result()
            except UserError as error:
                fault = str(error)
    results = ranks.gather_objects((calls, socket.gethostname(), value, fault))
    for *_, message in results:
        if message:
            raise UserError(message)
    return [(machine, result) for called, machine, result, _ in results if called]  # type: ignore[misc]


def call_on_main(ranks: Ranks, call: Callable[[], T]) -> T:
    """Returns the call's result on rank 0, on every rank; its UserError is raised on every rank."""
    outcome: tuple[T | None, str | None] | None = None
    if ranks.is_main:
        try:
            outcome = call(), None
        except UserError as error:
            outcome = None, str(error)
    value, fault = ranks.broadcast_from_main(outcome)
    if fault is not None:
        raise UserError(fault)
    return value  # type: ignore[return-value]
