"""The interfaces that everything meets: a Model learns, an Engine samples, a RolloutSource gives a step its groups."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from fivefold.types import Completion, Group, LossFn, Request, StepReport, TokenBatch


class FrozenModel(Protocol):
    """What computes log-probs or values and is not trained: a reference or a reward model. Every method is called on all
    ranks."""

    def forward(self, batch: TokenBatch) -> Tensor:
        """[T] on the CPU of every rank, 0 where nothing is wanted.

        With a language-model head the log-prob of each response token at the batch's temperature; with a value head the
        value of the text up to and including each token, from the one before the response on.
        """
        ...

    def offload(self, parameters: bool = True) -> dict[str, int]:
        """Move to host memory what the configuration names, without `parameters` all but these; bytes freed by part.

        Other methods bring back what they need.
        """
        ...

    def onload(self) -> None:
        """Bring back everything that `offload` moved."""
        ...


class Model(FrozenModel, Protocol):
    """Policy, reference, critic or reward model, one replica sharded over the ranks of a layout."""

    @property
    def version(self) -> int:
        """Optimizer steps taken."""
        ...

    def train_step(self, batch: TokenBatch, loss_fn: LossFn) -> StepReport:
        """One optimizer step over the whole batch."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor), one at a time, on every rank."""
        ...

    def verify(self) -> None:
        """Raise RuntimeError where copies of a parameter on several ranks are not equal."""
        ...

    def prepare_snapshots(self) -> None:
        """Make the memory for copies while the run goes on."""
        ...

    def snapshot(self, copies: bool) -> Callable[[Path], list[Path]]:
        """Parameters, optimizer and schedule as they are, free of the layout; the function writes this rank's share of them
        into a directory and gives its files. With `copies` the model may go on meanwhile."""
        ...

    def load(self, path: Path) -> None:
        """Read what the ranks of any layout wrote."""
        ...


@dataclass(frozen=True)
class Load:
    """Requests in flight over some time."""

    seconds: float
    idle_seconds: float
    """In which nothing was in flight."""
    request_seconds: float
    """Requests in flight, integrated over the time."""
    curve: list[tuple[float, int]]
    """Moments (time.time) and what was in flight from there on."""


@dataclass(frozen=True)
class EngineReplica:
    """Which of an engine's replicas this rank belongs to; every rank of one is asked for the same requests."""

    index: int | None
    """None on a rank that belongs to none."""
    count: int
    leads: bool = True
    """This rank hands over what its replica samples: one rank of each does."""

    def owns(self, place: int) -> bool:
        """The replica samples what has this place in a list that is dealt to all of them."""
        return place % self.count == self.index


class Engine(Protocol):
    """Samples responses, at the level of tokens. Every method is called on all ranks."""

    @property
    def replica(self) -> EngineReplica: ...

    @property
    def version(self) -> int:
        """Optimizer steps taken by the weights that sample now; below 0 before the first weights came, and after `sleep`."""
        ...

    def generate(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """A completion of each request, as they finish."""
        ...

    def stream(self) -> Stream:
        """For requests of this rank that are not waited for."""
        ...

    def abort(self) -> None:
        """End the requests in flight: `generate` gives what they have so far."""
        ...

    def update_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Take new weights by Hugging Face name; raises RuntimeError where they are not the whole model."""
        ...

    def sleep(self) -> None:
        """Leave the device, where there is one to leave: weights and cache are dropped."""
        ...

    def wake(self) -> None:
        """Take memory for the weights again; what is needed to sample follows with `generate`."""
        ...

    def look_after(self) -> None:
        """Know what any rank has lost of the engine: the version is below 0 where nothing is left. Collective."""
        ...

    def close(self) -> None:
        """End what the engine has started."""
        ...


class Stream(Protocol):
    """Requests of this rank to an engine that are not waited for."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Ask for these too."""
        ...

    def arrived(self, seconds: float) -> Iterator[Completion]:
        """Completions as they finish, for about so long; an aborted one may be submitted again."""
        ...

    def drop(self, request_ids: Collection[int]) -> None:
        """Do without these."""
        ...

    @property
    def is_stranded(self) -> bool:
        """Nothing is sampled any more until the engine gets new weights."""
        ...

    def load(self) -> Load | None:
        """How busy the engine was with this rank's requests since this was last asked, where it samples by itself."""
        ...


class RolloutSource(Protocol):
    """Where a step's groups come from. Every method is called on all ranks."""

    def next(self, step: int) -> list[Group] | None:
        """This rank's groups of the step: every group on one rank only, each with its `index` among all of the step. None
        where too few prompts are left for it."""
        ...

    def begin(self, step: int, sync: Callable[[], None]) -> None:
        """Begin with the groups of a step while others train, for sources that work ahead; `sync` gives the engine the
        policy's weights. Others do nothing."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """What JSON can hold and `load_state_dict` needs to resume after the groups that were given out."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume where `state_dict` was taken."""
        ...


@runtime_checkable
class SteppedEngine(Protocol):
    """An engine whose every step the ranks of a replica take together."""

    goes_on: Callable[[], bool]
    """Asked by all of them before each step: otherwise what runs is ended."""


@runtime_checkable
class BufferedSource(RolloutSource, Protocol):
    """A rollout source that holds groups which no step has taken yet."""

    def snapshot(self) -> Callable[[Path], list[Path]]:
        """The groups of this rank as they are; the function writes them into a directory and gives its files."""
        ...

    def load(self, directory: Path) -> None:
        """Read what the ranks of any layout wrote."""
        ...
