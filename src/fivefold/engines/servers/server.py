"""The interface that an engine of servers requires of each server."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from torch import Tensor

from fivefold.engines.servers.buckets import Entry
from fivefold.errors import RunError
from fivefold.interfaces import Pressure
from fivefold.types import Sampling

Where = tuple[str, int, float]
"""Address and port of the store where members of groups meet, and the longest wait for one of them in seconds."""
Draw = tuple[int, int]
"""Id and seed of a request."""
Answer = tuple[int, list[int], list[float], str, list[tuple[int, int]] | None, Tensor | None]
"""Id, token ids, log-probs, finish reason, the number of tokens that each version sampled (if the server reports it), and
the experts that they were sent to (if requested)."""


class ServerLostError(Exception):
    """Raised when the server has ended, or is not reachable any more."""


def unreached(server: object, error: BaseException) -> Exception:
    """Return the error of a call that did not reach a server: it is lost, unless no file was left to open for it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE):
            return RunError(
                f"{server} was not called: no more files can be opened, and each request takes one; raise the "
                "hard limit of open files (ulimit -H -n), or lower engine.max_num_seqs"
            )
        cause = cause.__cause__ or cause.__context__
    return ServerLostError(f"{server}: {type(error).__name__}: {error}")


class Server(Protocol):
    """One replica of an engine that runs as a server."""

    address: str
    names_versions: bool
    """True if it reports which weights sampled which token of a response, so that requests can continue with new weights.
    Valid after `take`."""

    def take(self) -> None:
        """Reserve the server for this run alone, and end what another run left there."""
        ...

    def generate(self, name: str, prompt_ids: list[int], sampling: Sampling, draws: Sequence[Draw]) -> AsyncIterator[Answer]:
        """Yields the answer to each draw, as they end; raises ServerLostError."""
        ...

    def pause(self) -> None:
        """Suspend the requests in flight, and discard what was computed for them with the old weights."""
        ...

    def resume(self) -> None:
        """Continue the suspended requests."""
        ...

    def abort(self) -> None:
        """End the requests in flight, which return what they have."""
        ...

    def answers(self) -> bool:
        """Returns whether the server is there and ready."""
        ...

    def progress(self) -> float | None:
        """Returns a number that grows while the server samples; None if it does not answer."""
        ...

    def pressure(self) -> Pressure | None:
        """Returns how close the server is to its limits; None if it does not say."""
        ...

    def workers(self) -> int:
        """Returns the number of processes that receive weights."""
        ...

    def join_groups(self, where: Where, names: Sequence[str], first: int, size: int) -> None:
        """Join the groups over which weights arrive, one for each sender; the server's first worker is the `first` of `size`
        members."""
        ...

    def begin_weights(self, verify: bool) -> None:
        """Begin an update of weights. `verify`: at its end, compare the held weights with the received ones."""
        ...

    def receive_bucket(self, handles: Sequence[dict[str, Any]], entries: Sequence[Entry], used: int) -> None:
        """Load the tensors of a bucket; `handles[i]` is its memory for tensor-parallel rank i."""
        ...

    def finish_weights(self, is_whole: bool, version: int) -> list[str]:
        """End an update of weights; returns what is wrong with them. Answers then name them by `version`."""
        ...

    def sleep(self) -> None:
        """Free the memory of weights and cache."""
        ...

    def wake(self, part: str) -> None:
        """Allocate the memory of `weights` or `kv_cache` again."""
        ...
