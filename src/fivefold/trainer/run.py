"""The parts of a run, as `build` puts them together and `train` uses them."""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.algo import Objective
from fivefold.distributed.ranks import Ranks
from fivefold.interfaces import Engine, RolloutSource
from fivefold.observability.run_logger import RunLogger
from fivefold.reward.manager import RewardManager
from fivefold.rollout.stats import BatchPlan
from fivefold.trainer.checks import LogprobGate
from fivefold.trainer.models import Models
from fivefold.trainer.trainer import Trainer


@dataclass(frozen=True)
class Run:
    ranks: Ranks
    logger: RunLogger
    models: Models
    engine: Engine | None
    """What samples for training; None where the responses stand in the data."""
    rewards: RewardManager
    rollouts: RolloutSource
    plan: BatchPlan
    objective: Objective
    updates: int
    """Optimizer steps of one rollout, all epochs."""
    gate: LogprobGate
    trainer: Trainer

    def close(self) -> None:
        """End the reward processes and the displays."""
        self.rewards.close()
        self.logger.close()
