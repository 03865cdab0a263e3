"""Validation prompts -> accuracy, mean@k and pass@k by source, and the loss on given responses."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fivefold.algo import Objective
from fivefold.algo.aggregate import token_mean
from fivefold.distributed.ranks import Ranks
from fivefold.interfaces import Engine, Model
from fivefold.rollout.batch import expand_to_tokens, pack
from fivefold.rollout.groups import Rewards, groups_from_dataset, sample_groups
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
    generate: bool = True
    """Sample responses and score them."""
    given: list[Prompt] = field(default_factory=list)
    """Those of the prompts with responses in the data, whose loss is told: methods that learn from given responses."""
    samples_per_comparison: int = 1

    def losses(self, policy: Model, reference: Model | None, objective: Objective, ranks: Ranks) -> dict[str, float]:
        """`val/loss` and the objective's own metrics on given responses; collective."""
        batch = pack(
            groups_from_dataset(ranks, self.given), 1.0, sampled=False, samples_per_comparison=self.samples_per_comparison
        )
        lengths_N = torch.tensor([sum(given.loss_mask) for prompt in self.given for given in prompt.responses])
        logprobs_T = policy.forward(batch)
        if reference is not None:
            batch.ref_logprobs_T = reference.forward(batch)
            reference.offload()
        # A validation set has no micro-batches to be averaged over: the legacy aggregation is the mean over its tokens.
        aggregate = token_mean if objective.per_micro_batch else objective.aggregate
        prompts = aggregate(lengths_N, self.greedy.max_tokens).view(-1, self.samples_per_comparison)
        batch.loss_weights_T = expand_to_tokens(prompts[ranks.coords.dp :: ranks.layout.dp].reshape(-1), batch)
        batch.advantages_T = batch.loss_mask_T.float()
        batch.update_tokens = int(lengths_N.sum())
        found = objective.loss(logprobs_T, torch.zeros_like(logprobs_T), batch)
        names = [name for name in found.sums if name != "policy/entropy"]
        sums = ranks.all_reduce_sum(torch.stack([found.loss, *(found.sums[name] for name in names)]).double()).tolist()
        metrics = {f"val/{name.removeprefix('policy/')}": value for name, value in zip(names, sums[1:], strict=True)}
        return {"val/loss": sums[0], **metrics}

    def run(self, engine: Engine, ranks: Ranks, rewards: Rewards) -> tuple[dict[str, float], list[Group]]:
        """(`val/<source>/...`, this replica's greedy groups); collective."""
        metrics: dict[str, float] = {}
        greedy = self._groups(engine, ranks, rewards, 1, self.greedy)
        for source, rows in _by_source(ranks, greedy).items():
            metrics[f"val/{source}/accuracy"] = _mean([row.right[0] for row in rows])
            metrics[f"val/{source}/reward"] = _mean([row.rewards[0] for row in rows])
            metrics[f"val/{source}/length_mean"] = _mean([row.lengths[0] for row in rows])
        if self.samples:
            k = self.samples
            groups = self._groups(engine, ranks, rewards, k, self.sampled)
            for source, rows in _by_source(ranks, groups).items():
                metrics[f"val/{source}/mean@{k}"] = _mean([_mean(row.right) for row in rows])
                metrics[f"val/{source}/pass@{k}"] = _mean([float(any(row.right)) for row in rows])
        return metrics, greedy

    def _groups(self, engine: Engine, ranks: Ranks, rewards: Rewards, size: int, sampling: Sampling) -> list[Group]:
        return rewards.scored(ranks, sample_groups(engine, ranks, self.prompts, size, sampling))


@dataclass(frozen=True)
class _Row:
    source: str
    right: list[float]
    """1 for a right response."""
    rewards: list[float]
    lengths: list[float]


def _by_source(ranks: Ranks, groups: list[Group]) -> dict[str, list[_Row]]:
    def row(group: Group) -> _Row:
        samples = group.samples
        return _Row(
            group.prompt.source,
            [float(sample.correct) for sample in samples],
            [sample.reward for sample in samples],
            [float(len(sample.token_ids)) for sample in samples],
        )

    found: dict[str, list[_Row]] = {}
    for item in ranks.all_gather_replicas([row(group) for group in groups]):
        found.setdefault(item.source, []).append(item)
    return dict(sorted(found.items()))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
