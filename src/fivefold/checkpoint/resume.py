"""What a run resumes from: models, random states, and where it stands."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path

from fivefold.checkpoint.checkpoints import Checkpoints, RunState
from fivefold.checkpoint.fingerprint import Changes, Fingerprint
from fivefold.checkpoint.rng import load_rng
from fivefold.config import RunConfig
from fivefold.distributed.ranks import Ranks
from fivefold.interfaces import Model
from fivefold.observability.run_logger import RunLogger


def find_checkpoint(config: RunConfig, ranks: Ranks) -> Path | None:
    """The checkpoint that the run resumes from, if any; raises ValueError where one that is named is damaged. Collective."""
    checkpoints = Checkpoints(config.run_dir, config.trainer.keep)

    def find() -> str | None:
        found = checkpoints.find(config.trainer.resume, partial(print, flush=True))
        return None if found is None else str(found)

    place = ranks.call_on_main(find)
    return None if place is None else Path(place)


def load_run(
    checkpoints: Checkpoints,
    found: Path | None,
    fingerprint: Fingerprint,
    models: dict[str, Model],
    ranks: Ranks,
    logger: RunLogger,
) -> RunState | None:
    """Load the checkpoint that was found, if any, and make room for what will be written. Collective.

    `fingerprint` is the main rank's. Raises ValueError where the checkpoint is of another run.
    """
    state = None if found is None else RunState.read(found)
    if found is not None and state is not None:
        own = asdict(fingerprint.compare(state.fingerprint)) if ranks.is_main else None
        changes = Changes(**ranks.broadcast_from_main(own))
        changes.check(found)
        with logger.stage("load"):
            for name, model in models.items():
                if not (found / name).is_dir():
                    raise ValueError(
                        f"trainer.resume: checkpoint {found} has no {name}: it was written by another method; "
                        "name its method, or start over with trainer.resume=never"
                    )
                model.load(found / name)
        load_rng(found / "rng", ranks)
        logger.log(f"resumed after step {state.step} from {found} (written on {state.layout})")
        for title, keys in (("accepted", changes.accepted), ("without effect on what is learned", changes.harmless)):
            if keys:
                logger.log(f"changed since then, {title}: {'; '.join(keys)}")
    if ranks.is_main:
        # What stands here next to a checkpoint from elsewhere is of another run.
        is_own = found is not None and found.resolve().parent == checkpoints.root.resolve()
        step = state.step if state is not None and is_own else 0
        if aside := checkpoints.set_aside(step, is_pending=step > 0 and state is not None and state.pending is not None):
            logger.log(f"what was newer than step {step} in {checkpoints.root.parent} is now in {aside}")
    return state
