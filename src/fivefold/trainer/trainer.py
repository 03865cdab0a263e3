"""Position of a run, and the work around its steps: resume, records, evaluation, checkpoints, the end of the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from fivefold.algo.objective import Objective
from fivefold.algo.term import Progress
from fivefold.checkpoint.fingerprint import Fingerprint
from fivefold.checkpoint.resume import load_run
from fivefold.checkpoint.rng import rng_states, set_rng_states
from fivefold.checkpoint.saving import Writer
from fivefold.config.schema import TrainerConfig
from fivefold.data.dialog import Dialog
from fivefold.distributed.ranks import Ranks
from fivefold.errors import RunError, UserError, shown
from fivefold.files import write_whole
from fivefold.interfaces import BufferedSource, RolloutSource
from fivefold.keys.ranges import suggest
from fivefold.observability.peak_memory import peak_memory
from fivefold.observability.profiler import profiled
from fivefold.observability.run_logger import RunLogger
from fivefold.rollout.stats import BatchPlan, rollout_metrics
from fivefold.trainer.evaluation import Evaluation
from fivefold.trainer.heap import trim_heap
from fivefold.trainer.logged_samples import LoggedSamples
from fivefold.trainer.models import Models
from fivefold.trainer.saver import Saver
from fivefold.trainer.step_work import WORK, StepWork, read_work
from fivefold.trainer.update_metrics import throughput, update_metrics
from fivefold.types import Group, RolloutStats, TokenBatch

NO_STEP = (
    "the data of a run must have groups for one step, and were used up before it: with dynamic sampling only groups count "
    "whose rewards differ; add rows to data.train, or choose rewards that tell responses apart"
)


@dataclass(frozen=True)
class BeforeStep:
    """State before a step, from which an interrupted step is repeated from scratch."""

    rollouts: dict[str, Any]
    """State of the rollout source."""
    groups: Writer | None
    """Writer of this rank's groups that no step had taken."""
    rng: dict[str, Tensor]
    updates: int
    """Optimizer steps taken so far, over all models."""


@dataclass
class Trainer:
    """Yields the steps of a run one by one; around each step it resumes, evaluates, saves and records."""

    config: TrainerConfig
    run_dir: Path
    total_steps: int
    steps_per_epoch: int
    ranks: Ranks
    logger: RunLogger
    models: Models
    objective: Objective
    rollouts: RolloutSource
    evaluation: Evaluation | None
    plan: BatchPlan
    flops: Callable[[int, float], float]
    """(tokens, mean sequence length) -> floating-point operations of training on them."""
    resolved_config: str
    fingerprint: Fingerprint
    resume_from: Path | None = None
    """Path of the checkpoint to resume from; None starts from the beginning."""
    dialog: Dialog | None = None
    """Reads the turns of trajectories; None if responses have one turn."""
    step: int = 0
    """Number of finished steps."""
    work: StepWork | None = None
    """Training data of the step in progress, once sampled; set from the start if the run resumes between optimizer steps."""
    _kl_coef: float = field(init=False)
    """Coefficient of the KL penalty in the step in progress."""
    _before: BeforeStep | None = None
    """State before the step in progress; None between steps."""
    _is_pending: bool = False
    """Whether the metrics row of the last step is not written yet, because its evaluation is due or in progress."""
    _has_learned: bool = False
    """Whether the step in progress has taken all its optimizer steps."""
    _has_evaluated: bool = False

    def __post_init__(self) -> None:
        self._kl_coef = self.objective.kl.coef

    @property
    def progress(self) -> Progress:
        """State of the run that the objective's formulas depend on."""
        return Progress(self.step, self._kl_coef)

    @cached_property
    def _saver(self) -> Saver:
        parts = self.ranks, self.logger, self.models, self.rollouts
        return Saver(self.config, self.run_dir, *parts, self.resolved_config, self.fingerprint)

    @cached_property
    def _samples(self) -> LoggedSamples:
        return LoggedSamples(self.config.logged_samples_per_step, self.ranks, self.dialog)

    def steps(self) -> Iterator[int]:
        """Yield the remaining steps, counted from 0. The loop body trains; the work around each step happens here."""
        self._resume()
        self.ranks.barrier()
        self.ranks.heartbeat.begin_run()
        first = self.step - self._is_pending
        if self._is_pending:
            self._end_step()
        elif self.step == 0 and self.config.eval_before_train and self.evaluation is not None:
            self._evaluate(self.evaluation)
            self.logger.end_step(0)
        while self.step < self.total_steps:
            self._before = BeforeStep(self.rollouts.state_dict(), self._saver.groups(), rng_states(), self._updates())
            trace = profiled(self.config.profile, self.run_dir, self.ranks.rank, self.step + 1)
            with trace, self.logger.stage("step"):
                yield self.step
            if self.work is None:
                self._end_with_data(has_steps=self.step > first)
                break
            self._finish_step()
        self.logger.log(f"finished {self.total_steps} steps in {self.run_dir}")
        self.logger.end("finished", self.total_steps)

    def begin_updates(self, groups: list[Group], stats: RolloutStats, batch: TokenBatch) -> StepWork:
        """Store the step's training data and sample rows until the step ends."""
        self._samples.note_logprobs(batch, stats, self.models)
        self.work = StepWork(stats, batch, self._samples.rows(self.step + 1, groups, "train", stats))
        return self.work

    def end_updates(self) -> None:
        """Mark that the step has taken all its optimizer steps."""
        self._has_learned = True
        self._saver.prepare()

    def _resume(self) -> None:
        models, resume, checkpoints = self.models.trained, self.config.resume, self._saver.checkpoints
        resumed = load_run(checkpoints, self.resume_from, resume, self.fingerprint, models, self.ranks, self.logger)
        if resumed is not None:
            path, state = resumed.path, resumed.state
            assert self.models.policy.version == state.version, "the checkpoint's optimizer steps and its schedule differ"
            self.step = self._saver.saved_step = state.step
            self.rollouts.load_state_dict(state.rollouts)
            if isinstance(self.rollouts, BufferedSource):
                self.rollouts.load(path / "rollouts", resumed.changed)
            if state.pending is not None:
                self._is_pending, self._saver.saved_step = True, -1
                self.logger.record(state.pending)
            if (path / WORK).is_dir():
                self.work = read_work(path / WORK, self.ranks, self.plan)
                self.logger.record(self.work.metrics)
                self.logger.log(f"step {self.step + 1} continues after {self.work.updates} of its optimizer steps")
            if state.reached and state.reached == self.config.stop_at:
                self.logger.log(f"reached {state.reached} after step {self.step}")
                self.total_steps = self.step
            if self.objective.kl.target is not None and "algorithm.kl.coef" not in resumed.changed:
                self._kl_coef = state.kl_coef
        if self.ranks.is_main:
            write_whole(self.run_dir / "run.yaml", self.resolved_config)
        self.logger.begin(self.step)

    def _finish_step(self) -> None:
        """Record the step, then evaluate and save if due."""
        self._count_step()
        every = self.config.guard.every
        if every and self.step % every == 0:
            with self.logger.stage("verify"):
                for model in self.models.trained.values():
                    model.verify()
        trim_heap(self.step)
        self._end_step()

    def _count_step(self) -> None:
        """Count the step as finished, so that it is not repeated on resume."""
        assert self.work is not None and self._has_learned, "the body of the loop must begin and end the step's updates"
        with self.ranks.heartbeat.shielded():
            self.step += 1
            self._samples.complete(self.work, self.objective)
            self._record_metrics(self.work)
            self.logger.samples(self.work.rows)
            self._before, self.work, self._has_learned, self._is_pending = None, None, False, True

    def _end_step(self) -> None:
        last = self.step == self.total_steps
        if self.evaluation is not None and (self._is_due(self.config.eval_every) or (last and self._ends_with_evaluation)):
            scores, goal = self._evaluate(self.evaluation), self.config.stop_at
            if goal and all(scores.get(name, -math.inf) >= value for name, value in goal.items()):
                self.logger.log(f"reached {goal} after step {self.step}")
                self._saver.reached, self.total_steps, last = goal, self.step, True
        self.logger.end_step(self.step)
        self._is_pending = False
        self._saver.settle(wait=False)
        if last or self._is_due(self.config.save_every):
            self.save(last)

    def _is_due(self, every: int | Literal["epoch", "never"]) -> bool:
        """Whether the step that just ended completes an interval of `every` steps; 0 means never."""
        if every == "never":
            return False
        count = self.steps_per_epoch if every == "epoch" else every
        return bool(count) and self.step % count == 0

    @property
    def _ends_with_evaluation(self) -> bool:
        return self.config.eval_every != "never"

    def _end_with_data(self, has_steps: bool) -> None:
        """End the run after the last finished step, because too few prompts are left for the one in progress. `has_steps`:
        steps have ended since the process began."""
        if self.step == 0:
            raise RunError(NO_STEP)
        self._before, self.total_steps = None, self.step
        self.logger.discard()
        self.logger.log(f"the data of the run were used up after step {self.step}")
        is_evaluated = not has_steps or self._is_due(self.config.eval_every)
        if self.evaluation is not None and self._ends_with_evaluation and not is_evaluated:
            self._evaluate(self.evaluation)
            self.logger.end_step(self.step)
        self._saver.settle(wait=False)
        self.save(True)

    def _record_metrics(self, done: StepWork) -> None:
        record = self.logger.record
        policy_reports = done.reports["policy"]
        before = self.models.policy.version - sum(not report.skipped for report in policy_reports)
        record(rollout_metrics(done.stats, before, self.plan.sampled))
        if policy_reports:
            metrics = update_metrics(policy_reports, "policy")
            if self.objective.kl.target is not None:
                record({"policy/kl_coef": self._kl_coef})
                kl_reference = metrics.get("policy/kl_reference", math.nan)
                self._kl_coef = self.objective.kl.adapted(self._kl_coef, kl_reference, len(done.stats.trajectories))
            record(metrics)
        for name in self.models.learners:
            if name != "policy" and done.reports[name]:
                record(update_metrics(done.reports[name], name))
        tokens, sequences = (sum(getattr(r, name) for r in policy_reports) for name in ("tokens", "sequences"))
        tflop = self.flops(tokens, tokens / max(1, sequences)) / 1e12
        record({"memory/peak_gb": self.ranks.all_reduce_max(float(peak_memory.take())) / 2**30})
        record(throughput(done.stats, policy_reports, self.logger.times, tflop, self.ranks.layout.world_size))

    def _evaluate(self, evaluation: Evaluation) -> dict[str, float]:
        """Evaluate the current policy and record the metrics."""
        metrics, groups = evaluation.measure(self.models)
        unknown = [name for name in self.config.stop_at if name not in metrics]
        if unknown and not self._has_evaluated:
            raise UserError(
                f"trainer.stop_at must name metrics of the evaluation: got {shown(unknown[0])}"
                f"{suggest(unknown[0], metrics)}; it has {', '.join(sorted(metrics))}"
            )
        self._has_evaluated = True
        self.logger.samples(self._samples.rows(self.step, groups, "val"))
        self.logger.record(metrics)
        return metrics

    def save(self, is_last: bool) -> None:
        """Write a checkpoint of the current state unless there is one. `is_last`: the run ends with it."""
        if self._saver.saved_step != self.step:
            with self.ranks.heartbeat.shielded():
                self._saver.write(self.progress, self.rollouts.state_dict(), self._saver.groups(), is_last)

    def save_interrupted(self, message: str) -> None:
        """Write a checkpoint of a run that was asked to end, within a step, within an evaluation or between them.
        `message` begins the line of the log. Collective."""
        self._saver.settle(wait=True)
        if self._has_learned:
            self._count_step()
        self.logger.end("ended", self.total_steps)
        if self._before is not None:
            message += f" in step {self.step + 1}"
        if self.step == 0:
            self.logger.log(f"{message}: no step was finished, there is nothing to save")
        elif self._saver.saved_step == self.step:
            self.logger.log(f"{message}: step {self.step} is saved")
        elif self._before is not None and self.ranks.is_everywhere and self.work is not None and self.work.updates:
            self.logger.log(f"{message}, which continues after {self.work.updates} of its optimizer steps on resume")
            self._saver.write(self.progress, self.rollouts.state_dict(), self._saver.groups(), True, work=self.work)
        elif self._before is not None:
            message += ", which is repeated on resume"
            # Ranks without a model may not have its last reports, so the step cannot resume between its updates.
            taken = sum(int(self.ranks.all_reduce_max(model.version)) for model in self.models.trained.values())
            if updates := taken - self._before.updates:
                message += f"; {updates} of its optimizer steps were taken and stay"
            self.logger.log(message)
            set_rng_states(self._before.rng)
            self._saver.write(self.progress, self._before.rollouts, self._before.groups, True)
        else:
            self.logger.log(message)
            pending = self.logger.pending if self._is_pending else None
            self._saver.write(self.progress, self.rollouts.state_dict(), self._saver.groups(), True, pending)

    def _updates(self) -> int:
        return sum(model.version for model in self.models.trained.values())
