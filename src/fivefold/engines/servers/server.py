"""What an engine of servers asks of each of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from torch import Tensor

from fivefold.engines.servers.buckets import Entry
from fivefold.types import Sampling

Where = tuple[str, int, float]
"""Address and port of the store where members of groups meet, and the longest wait for one of them in seconds."""
Draw = tuple[int, int]
"""Id and seed of a request."""
Answer = tuple[int, list[int], list[float], str, list[tuple[int, int]] | None, Tensor | None]
"""Id, token ids, log-probs, finish reason, which version sampled how many tokens, where the server says so, and the experts
that they were sent to, where it is asked for them."""


class ServerLostError(Exception):
    """The server ended, or cannot be reached any more."""


class Server(Protocol):
    """One replica of an engine that listens somewhere."""

    address: str
    names_versions: bool
    """It says which weights sampled which token of a response, so that requests can go on under new ones; known once it is
    taken."""

    def take(self) -> None:
        """Make the server this run's alone, and end what another one has left there."""
        ...

    def generate(self, name: str, prompt_ids: list[int], sampling: Sampling, draws: Sequence[Draw]) -> AsyncIterator[Answer]:
        """The answer to each draw, as they end; raises ServerLostError."""
        ...

    def pause(self) -> None:
        """Keep the requests in flight where they are, and what was computed for them under the old weights no longer."""
        ...

    def resume(self) -> None:
        """Go on with them."""
        ...

    def abort(self) -> None:
        """End the requests in flight, which answer with what they have."""
        ...

    def answers(self) -> bool:
        """It is there and ready."""
        ...

    def progress(self) -> float | None:
        """A number that grows while it samples; None where it does not answer."""
        ...

    def workers(self) -> int:
        """How many processes take weights."""
        ...

    def join_groups(self, where: Where, names: Sequence[str], first: int, size: int) -> None:
        """Join the groups over which weights come, one of each sender; its first worker is the `first` of `size` members."""
        ...

    def begin_weights(self, verify: bool) -> None:
        """`verify`: compare what is held at the end with what came."""
        ...

    def receive_bucket(self, handles: Sequence[dict[str, Any]], entries: Sequence[Entry], used: int) -> None:
        """Take the tensors of a bucket, `handles[i]` its memory for tensor-parallel rank i."""
        ...

    def finish_weights(self, is_whole: bool, version: int) -> list[str]:
        """What is wrong with the weights that were received; answers name them by `version`."""
        ...

    def sleep(self) -> None:
        """Give back the memory of weights and cache."""
        ...

    def wake(self, part: str) -> None:
        """Take memory again: of `weights` or `kv_cache`."""
        ...
