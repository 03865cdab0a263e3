"""Validation prompts -> accuracy, mean@k and pass@k by source, and the loss on responses in the dataset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fivefold.algo.aggregate import token_mean
from fivefold.algo.objective import Objective
from fivefold.columns import Column
from fivefold.distributed.balance import deal
from fivefold.distributed.ranks import Ranks
from fivefold.engines.weight_sync import sleeping_after
from fivefold.observability.run_logger import RunLogger
from fivefold.rollout.generation import Generator
from fivefold.rollout.packing import pack_dataset
from fivefold.rollout.sources import groups_from_dataset
from fivefold.rollout.stats import BatchPlan, has_form, known_mean
from fivefold.trainer.models import Models
from fivefold.types import Group, Prompt, Sampling, by_trajectory, last_sequence

EVALUATION_STREAM = 0x5EED
"""Mixed into the seed, so that evaluation and training use different random numbers."""


@dataclass(frozen=True)
class EvaluationSet:
    """Prompts to evaluate and how: always greedy, and also `samples` sampled responses if above 0."""

    prompts: Sequence[Prompt]
    samples: int
    greedy: Sampling
    sampled: Sampling
    seed: int = 0
    """Seed of the random draws, the same in every evaluation."""
    generate: bool = True
    """Whether responses are sampled and scored."""
    offline: list[Prompt] = field(default_factory=list)
    """Prompts with responses in the dataset, whose loss is measured; for methods that learn from such responses."""


@dataclass(frozen=True)
class Evaluation:
    """Measures a policy on an evaluation set."""

    evaluation_set: EvaluationSet
    generator: Generator | None
    objective: Objective
    ranks: Ranks
    logger: RunLogger
    plan: BatchPlan

    def measure(self, models: Models) -> tuple[dict[str, float], list[Group]]:
        """(`val/...` metrics, this rank's greedy groups) of the current policy. Collective."""
        metrics: dict[str, float] = {}
        groups: list[Group] = []
        if self.evaluation_set.offline:
            with self.logger.stage("eval"):
                metrics |= self._losses(models)
        if self.evaluation_set.generate:
            assert self.generator is not None
            with self.logger.stage("weight_sync"):
                models.sync(self.generator.engine)
            with self.logger.stage("eval"), models.away(), sleeping_after(self.generator.engine):
                scores, groups = self._responses()
            metrics |= scores
        return metrics, groups

    def _losses(self, models: Models) -> dict[str, float]:
        """`val/loss` and the objective's own metrics on responses in the dataset."""
        objective, ranks = self.objective, self.ranks
        groups = groups_from_dataset(self.evaluation_set.offline)
        lengths_N = torch.tensor([sample.loss_tokens for group in groups for sample in group.samples])
        work = [float(sum(len(sample.token_ids) for sample in group.samples)) for group in groups]
        owner_P = deal(work, [0] * len(groups), ranks.layout.dp)
        local = [place for place, owner in enumerate(owner_P) if owner == ranks.coords.dp]
        batch = pack_dataset([groups[place] for place in local], replace(self.plan, temperature=1.0))
        models.annotate(batch, frozenset({Column.OLD_LOGPROBS}) | objective.needs(1))
        logprobs_T = batch.columns.pop(Column.OLD_LOGPROBS)
        # A validation set has no micro-batches, so the legacy aggregation becomes the mean over its tokens.
        aggregation = objective.aggregation
        aggregate = token_mean if aggregation.per_micro_batch else aggregation.of_policy
        weights_PG = aggregate(lengths_N, self.evaluation_set.greedy.max_tokens).view(len(groups), -1)
        batch[Column.LOSS_WEIGHTS] = batch.expand_to_tokens(weights_PG[local].reshape(-1))
        batch[Column.ADVANTAGES] = batch.loss_mask_T.float()
        batch.update_tokens = int(lengths_N.sum())
        report = objective.loss(logprobs_T, torch.zeros_like(logprobs_T), batch)
        names = [name for name in report.sums if name != "policy/entropy"]
        sums = ranks.all_reduce_sum(torch.stack([report.loss, *(report.sums[name] for name in names)]).double()).tolist()
        metrics = {f"val/{name.removeprefix('policy/')}": value for name, value in zip(names, sums[1:], strict=True)}
        return {"val/loss": sums[0], **metrics}

    def _responses(self) -> tuple[dict[str, float], list[Group]]:
        """(`val/<source>/...`, this rank's greedy groups)."""
        chosen = self.evaluation_set
        metrics: dict[str, float] = {}
        assert self.generator is not None
        draw = (chosen.seed ^ EVALUATION_STREAM, 0)
        greedy = self.generator.sample(chosen.prompts, 1, chosen.greedy, draw)
        for source, rows in self._by_source(greedy).items():
            metrics |= rows.means(source, correct="accuracy", rewards="reward", lengths="length_mean")
            metrics |= rows.shapes(source) | rows.standard_error(1, f"val/{source}/accuracy_stderr")
        if chosen.samples:
            k = chosen.samples
            sampled = self.generator.sample(chosen.prompts, k, chosen.sampled, draw)
            for source, rows in self._by_source(sampled).items():
                metrics |= rows.means(source, correct=f"mean@{k}") | rows.standard_error(k, f"val/{source}/stderr@{k}")
                if len(correct_PG := rows.by_prompt(k)):
                    metrics[f"val/{source}/pass@{k}"] = float(correct_PG.any(1).double().mean())
        return metrics, greedy

    def _by_source(self, groups: Sequence[Group]) -> dict[str, _Rows]:
        """Numbers of the trajectories of all ranks by source, in the order of the prompts."""
        rows = [
            [
                group.index,
                sequences[0].correct,
                sequences[0].reward,
                sum(sample.loss_tokens for sample in sequences),
                sequences[0].reward_failed,
                not sequences[0].finished,
                has_form(last_sequence(sequences).text, self.plan.forms(group.prompt.source)),
            ]
            for group in groups
            for sequences in by_trajectory(group.samples)
        ]
        gathered = torch.cat(self.ranks.all_gather_world(torch.tensor(rows, dtype=torch.float64).view(-1, 7)))
        gathered = gathered[gathered[:, 0].argsort(stable=True)]
        sources = [self.evaluation_set.prompts[int(index)].source for index in gathered[:, 0]]
        places = {source: [i for i, name in enumerate(sources) if name == source] for source in sorted(set(sources))}
        return {source: _Rows(*gathered[rows, 1:].T) for source, rows in places.items()}


@dataclass(frozen=True)
class _Rows:
    """Samples of one source, as columns with one number per sample."""

    correct: Tensor
    rewards: Tensor
    lengths: Tensor
    failed: Tensor
    truncated: Tensor
    formed: Tensor

    def means(self, source: str, **names: str) -> dict[str, float]:
        """`val/<source>/<name>` of the named columns, over samples with a known reward; empty if there are none."""
        known = self.failed == 0
        if not known.any():
            return {}
        return {f"val/{source}/{name}": float(getattr(self, column)[known].mean()) for column, name in names.items()}

    def by_prompt(self, k: int) -> Tensor:
        """Whether each of a prompt's k responses is correct; only prompts whose k responses all have a reward."""
        return self.correct.view(-1, k)[self.failed.view(-1, k).sum(1) == 0]

    def standard_error(self, k: int, name: str) -> dict[str, float]:
        """Standard error of the share of correct responses, under `name`: that of a mean over independent prompts.

        The k responses to a prompt are not independent of each other. Empty if there are fewer than two prompts.
        """
        mean_P = self.by_prompt(k).double().mean(1)
        return {name: float(mean_P.std() / len(mean_P) ** 0.5)} if len(mean_P) > 1 else {}

    def shapes(self, source: str) -> dict[str, float]:
        """`val/<source>/...` on how the responses end and whether they have the form that the reward reads."""
        fractions = {"truncated_fraction": float(self.truncated.mean()), "form_fraction": known_mean(self.formed)}
        return {f"val/{source}/{name}": value for name, value in fractions.items() if value is not None}
