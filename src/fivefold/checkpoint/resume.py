"""Resuming of a run: finds a checkpoint and loads models, random states and the position of the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from fivefold.checkpoint.checkpoints import Checkpoints, RunState
from fivefold.checkpoint.fingerprint import Changes, Fingerprint
from fivefold.checkpoint.rng import load_rng
from fivefold.config.schema import TrainerConfig
from fivefold.distributed.calls import call_on_main
from fivefold.distributed.ranks import Ranks
from fivefold.errors import UserError
from fivefold.interfaces import Model
from fivefold.observability.run_logger import RunLogger
from fivefold.summed_files import DamagedFile


def find_checkpoint(run_dir: Path, trainer: TrainerConfig, ranks: Ranks) -> Path | None:
    """Return the checkpoint to resume from, if any; raises ValueError if a named one is damaged. Collective."""
    checkpoints = Checkpoints(run_dir, trainer.keep)
    return _on_main(ranks, partial(checkpoints.find, trainer.resume, partial(print, flush=True)))


def _on_main(ranks: Ranks, find: Callable[[], Path | None]) -> Path | None:
    """Return, on every rank, the checkpoint that rank 0 finds."""

    def name() -> str | None:
        path = find()
        return None if path is None else str(path)

    place = call_on_main(ranks, name)
    return None if place is None else Path(place)


@dataclass(frozen=True)
class Resumed:
    """A loaded checkpoint."""

    path: Path
    state: RunState
    changed: list[str]
    """Keys with other values in the checkpoint's run that affect what is learned."""


def load_run(
    checkpoints: Checkpoints,
    checkpoint: Path | None,
    resume: str,
    fingerprint: Fingerprint,
    models: dict[str, Model],
    ranks: Ranks,
    logger: RunLogger,
) -> Resumed | None:
    """Load the checkpoint `checkpoint`, if any, and move aside files that the resumed run would overwrite. Collective.

    If `resume` is auto and one of its models turns out to be damaged, the previous checkpoint is loaded. `fingerprint` is
    the main rank's. Raises ValueError if the checkpoint is from another run, or none is intact.
    """
    damaged: dict[Path, str] = {}
    while checkpoint is not None:
        state = RunState.read(checkpoint)
        compared = asdict(fingerprint.compare(state.fingerprint)) if ranks.is_main else None
        changes = Changes(**ranks.broadcast_from_main(compared))
        changes.check(checkpoint)
        with logger.stage("load"):
            fault = _load_models(checkpoint, models, ranks)
        if not fault:
            break
        if resume != "auto":
            raise UserError(f"trainer.resume: checkpoint {checkpoint} cannot be used: {fault}")
        damaged[checkpoint] = fault
        checkpoint = _on_main(ranks, partial(checkpoints.latest, logger.log, damaged))
    if checkpoint is not None:
        load_rng(checkpoint / "rng", ranks)
        logger.log(f"resumed after step {state.step} from {checkpoint} (written on {state.layout})")
        for title, keys in (("accepted", changes.accepted), ("without effect on what is learned", changes.harmless)):
            if keys:
                logger.log(f"changed since then, {title}: {'; '.join(keys)}")
    if ranks.is_main:
        # If the checkpoint is from another directory, the files here belong to another run.
        is_own = checkpoint is not None and checkpoint.resolve().parent == checkpoints.root.resolve()
        step = state.step if is_own else 0
        is_pending = step > 0 and state.pending is not None
        if aside := checkpoints.set_aside(step, is_pending, logger.log):
            logger.log(f"what was newer than step {step} in {checkpoints.root.parent} is now in {aside}")
    return None if checkpoint is None else Resumed(checkpoint, state, changes.accepted_keys)


def _load_models(path: Path, models: dict[str, Model], ranks: Ranks) -> str:
    """Load every model from a checkpoint; return the fault, the same on all ranks, or an empty text."""
    for name, model in models.items():
        if not (path / name).is_dir():
            raise UserError(
                f"trainer.resume: checkpoint {path} has no {name}: it was written by another method; "
                "name its method, or start over with trainer.resume=never"
            )
        fault = ""
        try:
            model.load(path / name)
        except DamagedFile as error:
            fault = str(error).replace(f"{path}/", "")
        # A model may be on some ranks only; agree here, so that all ranks of the next model load it or none does.
        if faults := [text for text in ranks.gather_objects(fault) if text]:
            return faults[0]
    return ""
