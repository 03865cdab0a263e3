"""Checkpoints of a run: what they contain, and when writing one starts and ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fivefold.algo.term import Progress
from fivefold.checkpoint.checkpoints import Checkpoints, RunState
from fivefold.checkpoint.fingerprint import Fingerprint
from fivefold.checkpoint.lock_file import check_lone_lock, lone_lock
from fivefold.checkpoint.saving import Saving, Writer
from fivefold.config.schema import TrainerConfig
from fivefold.distributed.calls import call_on_main
from fivefold.distributed.ranks import Ranks
from fivefold.interfaces import BufferedSource, RolloutSource
from fivefold.observability.run_logger import RunLogger
from fivefold.trainer.models import Models
from fivefold.trainer.step_work import WORK, StepWork


@dataclass
class Saver:
    """Writes checkpoints one at a time, in the background if configured. Its methods are called on all ranks."""

    config: TrainerConfig
    run_dir: Path
    ranks: Ranks
    logger: RunLogger
    models: Models
    rollouts: RolloutSource
    resolved_config: str
    fingerprint: Fingerprint
    saved_step: int = -1
    """Step of the last checkpoint; -1 if this step is to be saved again."""
    reached: dict[str, float] = field(default_factory=dict)
    """`trainer.stop_at`, once the run has reached it."""
    _saving: Saving | None = None
    """Checkpoint that is being written."""
    _lock: str | None = None
    """Text of the run's lock file if only that file keeps other runs out of the directory."""
    _is_prepared: bool = False
    """Whether host buffers for asynchronous snapshots of the models have been (or are being) allocated."""

    def __post_init__(self) -> None:
        self._lock = lone_lock(self.run_dir)

    @cached_property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.run_dir, self.config.keep)

    def prepare(self) -> None:
        """Allocate host buffers for the models in the background, if checkpoints are written there."""
        if self.config.async_save and not self._is_prepared:
            self._is_prepared = True
            for model in self.models.trained.values():
                model.prepare_snapshots()

    def groups(self) -> Writer | None:
        """Take a snapshot of this rank's groups that no step has taken; None if the source has none."""
        return self.rollouts.snapshot() if isinstance(self.rollouts, BufferedSource) else None

    def write(
        self,
        progress: Progress,
        rollouts: dict[str, Any],
        groups: Writer | None,
        is_last: bool,
        pending: dict[str, float] | None = None,
        work: StepWork | None = None,
    ) -> None:
        """Begin to write a checkpoint after `progress.step` finished steps, once the one before is written.

        `rollouts`: state of the rollout source; `groups`: as `groups` returns them; `is_last`: the run ends with this
        checkpoint, so wait for it; `pending`: metrics of the step that are not recorded yet; `work`: training data of the
        next step, if the run ends between its optimizer steps.
        """
        assert progress.kl_coef is not None
        state = RunState(
            step=progress.step,
            version=self.models.policy.version,
            layout=str(self.ranks.layout),
            rollouts=rollouts,
            kl_coef=progress.kl_coef,
            fingerprint=self.fingerprint.values,
            commits=self.fingerprint.commits,
            pending=pending,
            reached=self.reached,
        )
        with self.logger.stage("save"):
            call_on_main(self.ranks, self._check_lock)
            self.settle(wait=True)
            in_background = self.config.async_save and not is_last
            parts = {name: model.snapshot(copies=in_background) for name, model in self.models.trained.items()}
            if groups is not None:
                parts["rollouts"] = groups
            if work is not None:
                parts[WORK] = work.writer(self.ranks, self.logger.pending)
            self._saving = Saving(self.checkpoints, state, parts, self.ranks, self.resolved_config, in_background)
            self.saved_step = progress.step
            self.settle(wait=not in_background)

    def _check_lock(self) -> None:
        if self._lock is not None:
            check_lone_lock(self.run_dir, self._lock)

    def settle(self, wait: bool) -> None:
        """Publish the checkpoint that is being written once all ranks have written it. `wait` blocks until then."""
        if self._saving is not None and (path := self._saving.finish(wait)) is not None:
            self._saving = None
            self.logger.log(f"saved {path}")
