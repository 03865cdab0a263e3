"""Validation prompts -> accuracy, mean@k and pass@k by source."""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.ranks import Ranks
from fivefold.rollout import Scorer, sample_groups
from fivefold.surfaces import Engine
from fivefold.types import Group, Prompt, Sampling

EVALUATION_STREAM = 0x5EED
"""Mixed into the seed, so that evaluation draws other numbers than training."""


@dataclass(frozen=True)
class Evaluation:
    """What is evaluated, and how: greedy always, sampled `samples` times when above 0."""

    prompts: list[Prompt]
    samples: int
    greedy: Sampling
    sampled: Sampling

    def run(self, engine: Engine, ranks: Ranks, scorer: Scorer) -> tuple[dict[str, float], list[Group]]:
        """(`val/<source>/...`, this replica's greedy groups); collective."""
        metrics: dict[str, float] = {}
        greedy = self._groups(engine, ranks, scorer, 1, self.greedy)
        for source, rows in _by_source(ranks, greedy).items():
            metrics[f"val/{source}/accuracy"] = _mean([row.right[0] for row in rows])
            metrics[f"val/{source}/reward"] = _mean([row.rewards[0] for row in rows])
            metrics[f"val/{source}/length_mean"] = _mean([row.lengths[0] for row in rows])
        if self.samples:
            k = self.samples
            groups = self._groups(engine, ranks, scorer, k, self.sampled)
            for source, rows in _by_source(ranks, groups).items():
                metrics[f"val/{source}/mean@{k}"] = _mean([_mean(row.right) for row in rows])
                metrics[f"val/{source}/pass@{k}"] = _mean([float(any(row.right)) for row in rows])
        return metrics, greedy

    def _groups(self, engine: Engine, ranks: Ranks, scorer: Scorer, size: int, sampling: Sampling) -> list[Group]:
        groups = sample_groups(engine, ranks, self.prompts, size, sampling)
        scorer.score(groups)
        return ranks.gather_replica(groups)


@dataclass(frozen=True)
class _Row:
    source: str
    right: list[float]
    """1 for a response to which the first reward of its source gives full marks (1 or more)."""
    rewards: list[float]
    lengths: list[float]


def _by_source(ranks: Ranks, groups: list[Group]) -> dict[str, list[_Row]]:
    def row(group: Group) -> _Row:
        samples = group.samples
        return _Row(
            group.prompt.source,
            [float(next(iter(sample.reward_parts.values()), 0.0) >= 1) for sample in samples],
            [sample.reward for sample in samples],
            [float(len(sample.token_ids)) for sample in samples],
        )

    found: dict[str, list[_Row]] = {}
    for item in ranks.gather_all([row(group) for group in groups]):
        found.setdefault(item.source, []).append(item)
    return dict(sorted(found.items()))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
