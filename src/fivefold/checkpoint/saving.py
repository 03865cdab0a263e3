"""Saving of a checkpoint: every rank writes its files, directly or in a thread, and the main rank publishes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path

from safetensors.torch import save_file

from fivefold.checkpoint.checkpoints import Checkpoints, RunState, sync_file
from fivefold.checkpoint.manifest import Entry, entry_of
from fivefold.checkpoint.rng import rng_name, rng_states
from fivefold.distributed.ranks import Ranks
from fivefold.distributed.threads import in_thread
from fivefold.errors import RunError
from fivefold.files import write_text, writing

Entries = dict[str, Entry]
Writer = Callable[[Path], list[Path]]
"""Writes this rank's share into a directory and returns its files."""


class Saving:
    """Saves one checkpoint, from the start of writing until it is published. Every method is called on all ranks."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        state: RunState,
        parts: Mapping[str, Writer],
        ranks: Ranks,
        config: str,
        in_background: bool,
    ) -> None:
        """Start writing; with `in_background` in a thread, while the run continues.

        `parts`: directory name -> writer of this rank's share there; `config`: the resolved configuration as YAML.
        """
        self._checkpoints, self._state, self._ranks = checkpoints, state, ranks
        states = rng_states()
        if ranks.is_main:
            checkpoints.stage(state.step, ["rng", *parts])
        ranks.barrier()
        directory = checkpoints.staging(state.step)

        def write() -> Entries:
            files = [directory / "rng" / rng_name(ranks)]
            with writing(files[0]):
                save_file(states, files[0])
            if ranks.is_main:
                files.append(directory / "run.yaml")
                write_text(files[-1], config)
            for name, writer in parts.items():
                files += writer(directory / name)
            for file in files:
                sync_file(file)
            return {str(file.relative_to(directory)): entry_of(file) for file in files}

        self._written = in_thread(write, "checkpoint") if in_background else _now(write)

    def finish(self, wait: bool) -> Path | None:
        """Return the checkpoint once all ranks have written their files; None if one has not yet and `wait` is not set.

        Raises RuntimeError on all ranks if one could not write.
        """
        if not wait and self._ranks.any(not self._written.done()):
            return None
        error = self._written.exception()
        results = self._ranks.gather_objects((self._written.result() if error is None else {}, _reason(error)))
        if faults := [f"rank {rank}: {fault}" for rank, (_, fault) in enumerate(results) if fault]:
            raise RunError(f"the checkpoint of step {self._state.step} could not be written; {'; '.join(faults)}")
        if self._ranks.is_main:
            self._checkpoints.publish(
                self._state, {name: entry for entries, _ in results for name, entry in entries.items()}
            )
        self._ranks.barrier()
        return self._checkpoints.path(self._state.step)


def _now(write: Callable[[], Entries]) -> Future[Entries]:
    future: Future[Entries] = Future()
    try:
        future.set_result(write())
    except OSError as error:
        future.set_exception(error)
    return future


def _reason(error: BaseException | None) -> str:
    if error is None:
        return ""
    if isinstance(error, OSError):
        return f"{error.filename or 'the disk'}: {error.strerror}"
    raise error
