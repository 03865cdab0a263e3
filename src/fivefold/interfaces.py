"""The interfaces between components: a Model learns, an Engine samples, a RolloutSource supplies the groups of a step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from fivefold.types import Completion, Group, LossFn, Request, StepReport, TokenBatch


class FrozenModel(Protocol):
    """A model that computes log-probs or values and is not trained: a reference or a reward model. Every method is called on
    all ranks."""

    def forward(self, batch: TokenBatch) -> Tensor:
        """[T] log-probs or values on the CPU of every rank; 0 for tokens without one.

        With a language-model head: the log-prob of each response token at the batch's temperature. With a value head: the
        value of the text up to and including each token, starting with the token before the response.
        """
        ...

    def offload(self, parameters: bool = True) -> dict[str, int]:
        """Move the state that the configuration names to host memory and return the bytes freed per part.

        With `parameters=False` the parameters stay on the device. Other methods reload what they need.
        """
        ...

    def prepare_offload(self) -> None:
        """Allocate the memory for the next `offload` in the background."""
        ...

    def onload(self) -> None:
        """Reload everything that `offload` moved."""
        ...


class Model(FrozenModel, Protocol):
    """Policy, reference, critic or reward model, one replica sharded over the ranks of a layout."""

    @property
    def version(self) -> int:
        """Number of optimizer steps taken."""
        ...

    def train_step(self, batch: TokenBatch, loss_fn: LossFn) -> StepReport:
        """Take one optimizer step over the whole batch."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, full tensor) on every rank; tensors keep their values until the next update."""
        ...

    def verify(self) -> None:
        """Raise RuntimeError if copies of a parameter differ between ranks."""
        ...

    def prepare_snapshots(self) -> None:
        """Allocate the memory for snapshots in the background."""
        ...

    def snapshot(self, copies: bool) -> Callable[[Path], list[Path]]:
        """Take a snapshot of parameters, optimizer and schedule that does not depend on the layout.

        The returned function writes this rank's share into a directory and returns its files. With `copies` the model may
        continue to change before it is called.
        """
        ...

    def load(self, path: Path) -> None:
        """Load a snapshot written by the ranks of any layout."""
        ...


@dataclass(frozen=True)
class Load:
    """Number of requests in flight over a period."""

    seconds: float
    idle_seconds: float
    """Time in which no request was in flight."""
    request_seconds: float
    """Number of requests in flight, integrated over the period."""
    curve: list[tuple[float, int]]
    """Pairs of a time (time.time) and the number of requests in flight from then on."""


@dataclass(frozen=True)
class Pressure:
    """How close servers are to their limits, as one of them or all together report it."""

    kv_used: float
    """Largest share of its cache that a server uses."""
    queued: int
    """Number of requests that servers have and do not sample yet."""
    prefix_tokens: float = 0.0
    """Number of prompt tokens that servers have looked up in their caches since their start."""
    prefix_hits: float = 0.0
    """Number of those that they found there."""


@dataclass(frozen=True)
class EngineReplica:
    """The engine replica that this rank belongs to; every rank of a replica is passed the same requests."""

    index: int | None
    """Index of the replica; None if the rank belongs to none."""
    count: int
    leads: bool = True
    """Whether this rank returns the replica's samples; one rank of each replica does."""

    def owns(self, place: int) -> bool:
        """True if this replica is responsible for item `place` when items are dealt round-robin."""
        return place % self.count == self.index


class EngineState(Enum):
    """Whether an engine can sample, and what it needs otherwise."""

    ABSENT = "absent"
    """The engine has no weights: before the first ones, after `wake` and `restart`, and while new ones arrive."""
    ASLEEP = "asleep"
    """The engine's device memory is free; `wake` allocates it again."""
    LOST = "lost"
    """None of the engine's servers is left, or one ended while weights arrived; `restart` starts them again."""
    READY = "ready"
    """The engine samples with the weights of its version."""


class Engine(Protocol):
    """An engine that samples responses, as tokens. Every method is called on all ranks."""

    @property
    def replica(self) -> EngineReplica: ...

    @property
    def state(self) -> EngineState:
        """Whether the engine can sample; the same on all ranks."""
        ...

    @property
    def version(self) -> int:
        """Optimizer steps taken by the weights that arrived last; they sample while the engine is ready."""
        ...

    @property
    def restarts(self) -> int:
        """Number of times that servers which ended were started again; the same on all ranks that sample."""
        ...

    def generate(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """Yield a completion of each request as it finishes, or as `lost` if no server is left."""
        ...

    def stream(self) -> Stream:
        """Open a stream for requests of this rank that do not block."""
        ...

    def abort(self) -> None:
        """End the requests in flight; `generate` yields what they have so far."""
        ...

    def update_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Load new weights by Hugging Face name; raises RuntimeError if they are not the whole model."""
        ...

    def sleep(self) -> None:
        """Free the device memory, if the engine is on a device: weights and cache are dropped."""
        ...

    def wake(self) -> None:
        """Allocate memory for the weights again if the engine is asleep; `generate` allocates the rest."""
        ...

    def restart(self) -> None:
        """Start servers that have ended again, if any have; raises RuntimeError if that does not help."""
        ...

    def look_after(self) -> None:
        """Synchronize server failures across ranks; the engine is lost if no server is left. Collective."""
        ...

    def close(self) -> None:
        """End all processes and threads that the engine started."""
        ...


class Stream(Protocol):
    """Non-blocking requests of this rank to an engine."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Submit further requests."""
        ...

    def arrived(self, seconds: float) -> Iterator[Completion]:
        """Yield completions as they finish, for about `seconds`; an aborted one may be submitted again."""
        ...

    def drop(self, request_ids: Collection[int]) -> None:
        """Cancel these requests: they get no completion."""
        ...

    def wake(self) -> None:
        """Let an `arrived` that waits return; may be called by any thread."""
        ...

    def load(self) -> Load | None:
        """Return the engine's load with this rank's requests since the previous call; None if it does not sample in the
        background."""
        ...

    def pressure(self) -> Pressure | None:
        """Return how close the engine's servers are to their limits; None if they do not say."""
        ...


class RolloutSource(Protocol):
    """Source of the groups of each step. Every method is called on all ranks."""

    def next(self, step: int) -> list[Group] | None:
        """Return this rank's groups of the step; None if too few prompts are left.

        Every group is on one rank only, with its `index` among all groups of the step.
        """
        ...

    def begin(self, step: int, sync: Callable[[], None]) -> None:
        """Start on the groups of a step while training runs, if the source works ahead; otherwise do nothing. `sync` sends
        the policy's weights to the engine."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON-serializable state that `load_state_dict` needs to resume after the groups returned so far."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a `state_dict`."""
        ...


@runtime_checkable
class SteppedEngine(Protocol):
    """An engine that the ranks of a replica step in lockstep."""

    goes_on: Callable[[], bool]
    """Returns whether the run continues: these ranks call it before each step, and end running requests otherwise."""


@runtime_checkable
class BufferedSource(RolloutSource, Protocol):
    """A rollout source that buffers groups for later steps."""

    def snapshot(self) -> Callable[[Path], list[Path]]:
        """Take a snapshot of this rank's groups; the returned function writes them into a directory and returns its
        files."""
        ...

    def load(self, directory: Path, changed: Collection[str] = ()) -> None:
        """Load the groups written by the ranks of any layout. `changed`: keys with other values in
        the run that wrote them, which affect what is learned."""
        ...
