"""Components of a run, as `build` assembles and `train` uses them."""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.algo.objective import Objective
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
    """Engine that samples for training; None if the responses come from the dataset."""
    rewards: RewardManager
    rollouts: RolloutSource
    plan: BatchPlan
    objective: Objective
    updates: int
    """Optimizer steps per rollout, over all epochs of the step."""
    gate: LogprobGate
    trainer: Trainer

    def close(self) -> None:
        """Stop the reward processes and close the log displays."""
        self.rewards.close()
        self.logger.close()
