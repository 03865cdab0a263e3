"""Where a run stands, and what surrounds its steps: resume, records, evaluation, checkpoints, its end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fivefold.algo import Objective
from fivefold.checkpoint.checkpoints import Checkpoints, RunState
from fivefold.checkpoint.resume import load_run, save_run
from fivefold.config.schema import TrainerConfig
from fivefold.distributed.ranks import Ranks
from fivefold.interfaces import RolloutSource
from fivefold.observability.profiler import profiled
from fivefold.observability.run_logger import RunLogger, sample_rows
from fivefold.rollout.stats import rollout_metrics
from fivefold.trainer.evaluation import Evaluation
from fivefold.trainer.models import Models
from fivefold.trainer.update_metrics import peak_bytes, throughput, update_metrics
from fivefold.types import Group, RolloutStats, StepReport


@dataclass(frozen=True)
class StepRecord:
    """What a step leaves to be recorded."""

    groups: list[Group]
    """Of this rank."""
    stats: RolloutStats
    policy_reports: list[StepReport]
    critic_reports: list[StepReport]
    policy_version: int
    """Before the step's updates."""


@dataclass
class Trainer:
    """Gives out the steps of a run one by one; around each it resumes, evaluates, saves and records."""

    config: TrainerConfig
    total_steps: int
    ranks: Ranks
    logger: RunLogger
    models: Models
    rollouts: RolloutSource
    evaluation: Evaluation | None
    flops: Callable[[int, float], float]
    """Tokens and mean length of a sequence -> floating-point operations of training on them."""
    stop_requested: Callable[[], bool]
    resolved_config: str
    step: int = 0
    """Steps finished."""
    _saved: int = -1
    _record: StepRecord | None = None
    _last_metrics: dict[str, float] | None = None

    @property
    def run_dir(self) -> Path:
        return Path(self.config.run_dir)

    @property
    def objective(self) -> Objective:
        return self.models.objective

    @cached_property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.run_dir, self.config.keep)

    def steps(self) -> Iterator[int]:
        """The steps that are left, counted from 0; the body of the loop trains, what surrounds it happens here."""
        self._resume()
        if self.step == 0 and self.config.eval_before_train and self.evaluation is not None:
            self._evaluate(self.evaluation)
            self._last_metrics = self.logger.end_step(0)
        interrupted = False
        while self.step < self.total_steps and not interrupted:
            trace = profiled(self.config.profile, self.run_dir, self.ranks.rank, self.step + 1)
            with trace, self.logger.stage("step"):
                yield self.step
            interrupted = self._finish_step()
        if not interrupted:
            self.logger.log(f"finished {self.total_steps} steps in {self.run_dir}")

    def record(
        self, groups: list[Group], stats: RolloutStats, policy_reports: list[StepReport], critic_reports: list[StepReport]
    ) -> None:
        """Keep what the step did until it has ended."""
        before = self.models.policy.version - sum(not report.skipped for report in policy_reports)
        self._record = StepRecord(groups, stats, policy_reports, critic_reports, before)

    # --- before the first step ---------------------------------------------------------------------------------------

    def _resume(self) -> None:
        state = load_run(self.checkpoints, self.config, self.models.learners, self.ranks, self.logger)
        if state is not None:
            assert self.models.policy.version == state.version, "the checkpoint's optimizer steps and its schedule differ"
            self.step = self._saved = state.step
            self.rollouts.load_state_dict(state.rollouts)
            if self.objective.kl_target is not None:
                self.objective.kl_coef = state.kl_coef
        if self.ranks.is_main:
            (self.run_dir / "run.yaml").write_text(self.resolved_config)

    # --- after a step ------------------------------------------------------------------------------------------------

    def _finish_step(self) -> bool:
        """Record the step, evaluate and save when it is time; whether the run was asked to end."""
        assert self._record is not None, "the body of the loop must call trainer.record"
        done, self._record = self._record, None
        self.step += 1
        self._record_metrics(done)
        every = self.config.guard.every
        if every and self.step % every == 0:
            with self.logger.stage("verify"):
                for model in self.models.learners.values():
                    model.verify()
        self.logger.samples(sample_rows(self.step, done.groups, self.config.logged_samples_per_step, "train"))
        last = self.step == self.total_steps
        is_due = bool(self.config.eval_every) and self.step % self.config.eval_every == 0
        if self.evaluation is not None and (is_due or last):
            found, goal = self._evaluate(self.evaluation), self.config.stop_at
            if goal and all(found.get(name, -math.inf) >= value for name, value in goal.items()):
                self.logger.log(f"reached {goal} after step {self.step}")
                self.total_steps, last = self.step, True
        self._last_metrics = self.logger.end_step(self.step)
        interrupted = self.ranks.any(self.stop_requested())
        if last or interrupted or (self.config.save_every and self.step % self.config.save_every == 0):
            self.save()
        return interrupted

    def _record_metrics(self, done: StepRecord) -> None:
        record = self.logger.record
        record(rollout_metrics(done.stats, done.policy_version))
        if done.policy_reports:
            found = update_metrics(done.policy_reports, "policy")
            if self.objective.kl_target is not None:
                record({"policy/kl_coef": self.objective.kl_coef})
                self.objective.adapt_kl(found["policy/kl_reference"], len(done.stats))
            record(found)
        if done.critic_reports:
            record(update_metrics(done.critic_reports, "critic"))
        tokens, sequences = (sum(getattr(r, name) for r in done.policy_reports) for name in ("tokens", "sequences"))
        tflop = self.flops(tokens, tokens / max(1, sequences)) / 1e12
        record({"memory/peak_gb": self.ranks.all_reduce_max(peak_bytes()) / 2**30})
        record(throughput(done.policy_reports, self.logger.times, tflop, self.ranks.layout.world_size))

    def _evaluate(self, evaluation: Evaluation) -> dict[str, float]:
        """Evaluate the policy as it is, and record what was found."""
        metrics, groups = evaluation.measure(self.models)
        self.logger.samples(sample_rows(self.step, groups, self.config.logged_samples_per_step, "val"))
        self.logger.record(metrics)
        return metrics

    def save(self) -> None:
        """Write a checkpoint of the run as it stands, unless there is one."""
        if self._saved == self.step:
            return
        state = RunState(
            step=self.step,
            version=self.models.policy.version,
            seed=self.config.seed,
            layout=str(self.ranks.layout),
            rollouts=self.rollouts.state_dict(),
            kl_coef=self.objective.kl_coef,
            reward_mean=(self._last_metrics or {}).get("reward/mean"),
        )
        with self.logger.stage("save"):
            path = save_run(self.checkpoints, state, self.models.learners, self.ranks, self.resolved_config)
        self._saved = self.step
        self.logger.log(f"saved {path}")
