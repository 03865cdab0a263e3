"""What a run is saved as and resumed from: models, random states, and where it stands."""

from __future__ import annotations

from pathlib import Path

from fivefold.checkpoint.checkpoints import RECORDS, Checkpoints, RunState, find_corruption
from fivefold.checkpoint.rng import load_rng, save_rng
from fivefold.config.schema import TrainerConfig
from fivefold.distributed.ranks import Ranks
from fivefold.interfaces import Model
from fivefold.observability.run_logger import RunLogger, truncate_after


def save_run(checkpoints: Checkpoints, state: RunState, models: dict[str, Model], ranks: Ranks, config: str) -> Path:
    """Write a checkpoint; `config` is the resolved configuration as YAML. Collective."""

    def fill(directory: Path) -> None:
        if ranks.is_main:
            (directory / "run.yaml").write_text(config)
        save_rng(directory / "rng", ranks)
        for name, model in models.items():
            if ranks.is_main:
                (directory / name).mkdir()
            ranks.barrier()
            model.save(directory / name)

    return checkpoints.write(state, ranks.is_main, ranks.barrier, fill)


def load_run(
    checkpoints: Checkpoints, config: TrainerConfig, models: dict[str, Model], ranks: Ranks, logger: RunLogger
) -> RunState | None:
    """Load the checkpoint that `config.resume` names, if any, and make room for what will be written. Collective."""
    found = ranks.broadcast_from_main(_find(checkpoints, config.resume, logger) if ranks.is_main else None)
    state = None if found is None else RunState.read(found)
    if found is not None and state is not None:
        if state.seed != config.seed:
            raise ValueError(
                f"trainer.seed must be that of the checkpoint to resume with the same samples: {config.seed} != {state.seed}"
            )
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
    if ranks.is_main:
        _make_room(checkpoints, 0 if state is None else state.step, logger)
    return state


def _find(checkpoints: Checkpoints, resume: str, logger: RunLogger) -> Path | None:
    if resume == "auto":
        return checkpoints.latest(logger.log)
    if resume == "never":
        return None
    if faults := find_corruption(Path(resume)):
        raise ValueError(f"trainer.resume: checkpoint {resume} cannot be used: {faults}")
    return Path(resume)


def _make_room(checkpoints: Checkpoints, step: int, logger: RunLogger) -> None:
    """A directory has one timeline: what lies after the step at which this run begins is moved or truncated."""
    if aside := checkpoints.set_aside(step):
        logger.log(f"began after step {step}: newer checkpoints and records of before are now in {aside}")
    for name in RECORDS:
        truncate_after(checkpoints.root.parent / name, step)
