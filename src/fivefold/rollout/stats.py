"""Groups on the ranks that sampled them -> RolloutStats of the whole step, the same on every rank.

A sample whose reward failed is dropped here: nothing after this compares with it, learns from it or averages over it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from fivefold.algo.reward_shaping import repetition
from fivefold.distributed.balance import deal, deal_sharing
from fivefold.distributed.ranks import Ranks
from fivefold.errors import RunError
from fivefold.models.spec import RouteShape
from fivefold.rollout.turns import gather_turns, sampled_tokens, turn_metrics
from fivefold.types import BREAKS, ENDS, Group, RolloutStats, Sample, Scoring, Turns, by_trajectory, last_sequence


def tokens(lengths_N: Tensor) -> Tensor:
    """Work of a sample, measured in tokens."""
    return lengths_N.double()


def nothing_skipped(stats: RolloutStats) -> None:
    """Return None: the policy's passes cover all samples."""


def no_forms(source: str) -> tuple[str, ...]:
    """Return no form: the reward reads any text."""
    return ()


def has_form(text: str, forms: Sequence[str]) -> float:
    """Return 1 if a response has one of the forms that its reward reads, 0 if it has none; NaN if there is none to have."""
    return float(any(form in text for form in forms)) if forms else math.nan


@dataclass(frozen=True)
class BatchPlan:
    """Parameters that turn the samples of a step into batches: dealt to optimizer steps, then to replicas."""

    updates_per_step: int = 1
    """Optimizer steps into which one rollout is divided, by whole groups in order; no more than there are groups."""
    samples_per_comparison: int = 1
    """Consecutive samples that the loss compares and that stay together: 2 for pairs."""
    temperature: float = 1.0
    """Sampling temperature, which divides the logits for every log-prob."""
    max_response_tokens: int = 0
    sampled: bool = True
    """Whether an engine samples the responses; those of the data have no rewards to report."""
    work: Callable[[Tensor], Tensor] = tokens
    """lengths_N -> cost of a forward and backward pass over each sample, in any unit."""
    skipped: Callable[[RolloutStats], Tensor | None] = nothing_skipped
    """Stats of the step -> the samples that the policy's passes skip."""
    domain_of: Callable[[str], str] | None = None
    """data_source -> domain; None if domains are not distinguished."""
    share_prefix: bool = False
    """Whether samples of one prompt on one replica compute the prompt only once."""
    forms: Callable[[str], Sequence[str]] = no_forms
    """data_source -> texts, one of which a response must have to be right; empty if its reward reads any text."""
    routes: RouteShape | None = None
    """Shape of the expert routes that are sent with the samples; None: no routes are sent."""


_COLUMNS = (
    "group", "place", "reward", "response_length", "prompt_length", "length", "finished", "failed", "incomplete", "correct",
    "repetition", "version", "versions_differ", "greedy_reward", "greedy_length", "has_logprobs", "is_used", "domain",
    "is_expert", "timed_out", "formed", "trajectory", "turns", "break", "end",
)  # fmt: skip
_TURNS = _COLUMNS.index("turns")
_ENDS = tuple(ENDS)


def gather_stats(groups: list[Group], ranks: Ranks, plan: BatchPlan) -> RolloutStats:
    """Return the numbers of all ranks' samples, and the optimizer step and replica that each is dealt to. Collective.

    Numbers per sample are exchanged as one tensor; tokens stay on their rank until they are packed. Samples whose reward
    failed are left out of the step.
    """
    rows_of_rank = torch.tensor([row for group in groups for row in _rows(group, plan)], dtype=torch.float64).view(
        -1, len(_COLUMNS)
    )
    gathered = ranks.all_gather_world(rows_of_rank)
    rank_N = torch.cat([torch.full((len(rows),), rank) for rank, rows in enumerate(gathered)])
    everyone = torch.cat(gathered)
    if not len(everyone):
        raise RunError("the step has no samples: its rollout source returned no group on any rank")
    group_N, place_N = everyone[:, 0].long(), everyone[:, 1].long()
    key_N = group_N * (int(place_N.max()) + 1) + place_N
    if len(key_N.unique()) < len(key_N):
        raise RunError(
            "two ranks returned the same sample of a step: each rank returns its own groups, each with an index of its own "
            "(ranks.shard gives a rank its part of a list)"
        )
    order_N = key_N.argsort()
    rows, rank_N = everyone[order_N], rank_N[order_N]
    turns = gather_turns(groups, key_N[order_N], int(place_N.max()) + 1, ranks) if rows[:, _TURNS].any() else None
    used_N = rows[:, _COLUMNS.index("is_used")].bool()
    stats = _stats(rows, rank_N, turns, used_N, [group for group in groups if group.is_used], ranks, plan)
    if used_N.all():
        return stats
    return replace(stats, sampled=_stats(rows, rank_N, turns, torch.ones_like(used_N), groups, ranks, plan))


def _stats(
    rows: Tensor, rank_N: Tensor, turns: Turns | None, chosen_N: Tensor, groups: list[Group], ranks: Ranks, plan: BatchPlan
) -> RolloutStats:
    """Return the stats of the chosen samples of all ranks; `groups` are this rank's groups. Collective."""
    begun_N = begins(rows)
    firsts = rows[chosen_N & begun_N]
    sampled = firsts[~firsts[:, _COLUMNS.index("is_expert")].bool()]
    group_size = int(sampled[:, 0].unique(return_counts=True)[1].mode().values) if len(sampled) else 0
    failed_N = rows[:, _COLUMNS.index("failed")].bool()
    failed = int((failed_N & chosen_N & begun_N).sum())
    if failed == len(firsts):
        raise RunError(f"the rewards of all {failed} samples of the step failed: there is nothing to learn from")
    of_trajectories = {} if turns is None else _trajectory_metrics(rows[chosen_N], firsts)
    kept_N = chosen_N & ~failed_N
    turns = turns.select(kept_N) if turns is not None and rows[kept_N][:, _TURNS].any() else None
    rows, rank_N, begun_N = rows[kept_N], rank_N[kept_N], begun_N[kept_N]
    column = {name: rows[:, number] for number, name in enumerate(_COLUMNS)}
    if not column["reward"].isfinite().all():
        raise RunError("every sample of a step needs a finite reward, or reward_failed: its rollout source gave it none")
    _, group_N = column["group"].long().unique(return_inverse=True)
    minibatch_N = deal_to_updates(group_N, plan.updates_per_step)
    lengths_N, expert_N = column["length"].long(), column["is_expert"].bool()
    greedy_N = column["greedy_reward"]
    stats = RolloutStats(
        group_N=group_N,
        rewards_N=column["reward"],
        response_lengths_N=column["response_length"].long(),
        prompt_lengths_N=column["prompt_length"].long(),
        lengths_N=lengths_N,
        finished_N=column["finished"].bool(),
        correct_N=column["correct"].bool(),
        repetition_N=column["repetition"],
        version_N=column["version"].long(),
        versions_differ=bool(column["versions_differ"].any()) or len(column["version"][~expert_N].unique()) > 1,
        rank_N=rank_N,
        minibatch_N=minibatch_N,
        owner_N=torch.zeros(len(rows), dtype=torch.long),
        max_response_tokens=plan.max_response_tokens,
        has_logprobs=bool((column["has_logprobs"].bool() | expert_N).all()),
        greedy_rewards_N=None if greedy_N.isnan().any() else greedy_N,
        greedy_lengths_N=column["greedy_length"].long(),
        scoring=Scoring(
            _reward_parts(groups, ranks),
            failed,
            int(column["timed_out"][begun_N].sum()),
            known_mean(column["formed"][~expert_N & begun_N]),
            group_size,
            of_trajectories,
        ),
        domain_N=column["domain"].unique(return_inverse=True)[1] if plan.domain_of else None,
        incomplete_N=column["incomplete"].bool() if failed else None,
        expert_N=expert_N if expert_N.any() else None,
        trajectory_N=None if begun_N.all() else begun_N.cumsum(0) - 1,
        turns=turns,
    )
    stats = replace(stats, skipped_N=plan.skipped(stats))
    return replace(stats, owner_N=owners(stats, ranks.layout.dp, plan))


def begins(rows: Tensor) -> Tensor:
    """[N] whether a row is the first sequence of its trajectory."""
    key_N = rows[:, [_COLUMNS.index("group"), _COLUMNS.index("trajectory")]]
    begun_N = torch.ones(len(rows), dtype=torch.bool)
    begun_N[1:] = (key_N[1:] != key_N[:-1]).any(1)
    return begun_N


def _trajectory_metrics(rows: Tensor, firsts: Tensor) -> dict[str, float]:
    """Sequences and breaks of a trajectory, and the share of each end; `firsts` has its first sequences."""
    cause_N, end_M = (of[:, _COLUMNS.index(name)] for of, name in ((rows, "break"), (firsts, "end")))
    return {
        "trajectory/sequences": len(rows) / len(firsts),
        **{f"trajectory/breaks_{cause}": float((cause_N == at).sum()) / len(firsts) for at, cause in enumerate(BREAKS)},
        **{f"trajectory/end_{end}": float((end_M == at).double().mean()) for at, end in enumerate(ENDS)},
    }


def scored(groups: list[Group]) -> list[Sample]:
    """Return the samples with a known reward, in order."""
    return [sample for group in groups for sample in group.samples if not sample.reward_failed]


Shape = Callable[[Tensor, Tensor], Tensor]
"""rewards_N, response_lengths_N -> rewards_N as the method uses them."""


def differ(samples: Iterable[Sample], shape: Shape | None = None) -> bool:
    """Whether the known rewards of these samples differ, after `shape` if given."""
    return len(_known_rewards(samples, shape).unique()) > 1


def _known_rewards(samples: Iterable[Sample], shape: Shape | None) -> Tensor:
    """[M] known rewards of the trajectories."""
    known = [sequences for sequences in by_trajectory(samples) if not sequences[0].reward_failed]
    rewards_M = torch.tensor([sequences[0].reward for sequences in known], dtype=torch.double)
    lengths = [sum(sample.loss_tokens for sample in sequences) for sequences in known]
    return rewards_M if shape is None else shape(rewards_M, torch.tensor(lengths))


@dataclass(frozen=True)
class Informative:
    """Selects the groups that dynamic sampling keeps: those with different rewards, or with a mean reward within bounds."""

    shape: Shape | None = None
    """Transforms rewards before they are examined; None: unchanged."""
    low: float | None = None
    high: float | None = None
    """Largest mean reward of a group that is kept. `low` and `high` are inclusive."""
    max_tokens: int | None = None
    """Longest response, in tokens, that a kept group may contain."""

    def __call__(self, samples: Iterable[Sample]) -> bool:
        samples = list(samples)
        lengths = (sum(sample.loss_tokens for sample in sequences) for sequences in by_trajectory(samples))
        if self.max_tokens is not None and any(length > self.max_tokens for length in lengths):
            return False
        if self.low is None and self.high is None:
            return differ(samples, self.shape)
        rewards_N = _known_rewards(samples, self.shape)
        low, high = (-math.inf if self.low is None else self.low), (math.inf if self.high is None else self.high)
        return len(rewards_N) > 0 and low <= float(rewards_N.mean()) <= high


def known_mean(values_N: Tensor) -> float | None:
    """Return the mean of the values that are not NaN, or None if there are none."""
    known_N = values_N[~values_N.isnan()]
    return float(known_N.mean()) if len(known_N) else None


def _rows(group: Group, plan: BatchPlan) -> list[list[float]]:
    greedy = float("nan") if group.greedy_reward is None else group.greedy_reward
    incomplete = any(sample.reward_failed for sample in group.samples)
    # CRC-32 is the same on every rank.
    source, forms = group.prompt.source, plan.forms(group.prompt.source)
    domain = 0 if plan.domain_of is None else zlib.crc32(plan.domain_of(source).encode())
    rows: list[list[float]] = []
    for number, sequences in enumerate(by_trajectory(group.samples)):
        if len({repr((sample.reward, sample.reward_failed, sample.end)) for sample in sequences}) > 1:
            raise RunError(
                "the sequences of a trajectory need the same reward and end: got different ones from the rollout source"
            )
        repeated, formed = repetition(sampled_tokens(sequences)), has_form(last_sequence(sequences).text, forms)
        for sample in sequences:
            prompt = len(group.context_of(sample))
            rows.append([
                group.index, len(rows), sample.reward, sample.loss_tokens, prompt, prompt + len(sample.token_ids),
                sample.finished, sample.reward_failed, incomplete, sample.correct, repeated, sample.policy_version,
                sample.token_versions is not None, greedy, group.greedy_length,
                len(sample.logprobs) == len(sample.token_ids), group.is_used, domain, group.is_expert,
                sample.reward_timed_out, formed, number, len(sample.turns),
                -1 if sample.break_cause is None else BREAKS.index(sample.break_cause), _ENDS.index(sample.end),
            ])  # fmt: skip
    return rows


def deal_to_updates(group_N: Tensor, updates: int) -> Tensor:
    """Assign groups in order to optimizer steps, as evenly as whole groups allow.

    There are as many optimizer steps as groups if these are fewer, as where the reward of a group of one failed.
    """
    groups = int(group_N.max()) + 1
    return group_N * min(updates, groups) // groups


def owners(stats: RolloutStats, replicas: int, plan: BatchPlan) -> Tensor:
    """[N] replica of each sample, dealt by work within each optimizer step; a trajectory stays on one replica."""
    size, part_N = plan.samples_per_comparison, stats.minibatch_N
    if stats.skipped_N is not None:
        # Balance the samples that the policy computes, and separately the skipped ones, which other models may compute.
        part_N = 2 * part_N + stats.skipped_N
    work_N = plan.work(stats.lengths_N)
    trajectories, trajectory_N = stats.trajectories, stats.trajectory_of_N
    if plan.share_prefix and size == 1 and len(trajectories) == len(stats):
        prompt_work_N = plan.work(stats.prompt_lengths_N)
        rows = zip(work_N.tolist(), prompt_work_N.tolist(), stats.group_N.tolist(), part_N.tolist(), strict=True)
        return torch.tensor(deal_sharing(list(rows), replicas))
    work_M = torch.zeros(len(trajectories), dtype=work_N.dtype).index_add(0, trajectory_N, work_N)
    part_M = torch.zeros(len(trajectories), dtype=torch.long).scatter(0, trajectory_N, part_N)
    owner_M = torch.tensor(deal(work_M.view(-1, size).sum(1).tolist(), part_M[::size].tolist(), replicas))
    return owner_M.repeat_interleave(size)[trajectory_N]


def _reward_parts(groups: list[Group], ranks: Ranks) -> dict[str, float]:
    """Mean of each reward part over the trajectories that have it."""
    sums_by_name: dict[str, list[float]] = {}
    for sample in (
        sequences[0] for group in groups for sequences in by_trajectory(group.samples) if not sequences[0].reward_failed
    ):
        for name, value in sample.reward_parts.items():
            total = sums_by_name.setdefault(name, [0.0, 0.0])
            total[0] += value
            total[1] += 1
    names = sorted({name for names_of_rank in ranks.gather_objects(sorted(sums_by_name)) for name in names_of_rank})
    sums = ranks.all_reduce_sum_world([number for name in names for number in sums_by_name.get(name, [0.0, 0.0])])
    return {name: sums[2 * i] / sums[2 * i + 1] for i, name in enumerate(names)}


def rollout_metrics(stats: RolloutStats, policy_version: int, sampled: bool = True) -> dict[str, float]:
    """Metrics over all responses of a step; those of rewards only if an engine sampled them (`sampled`).

    If the step does not train on all of them, `filtered/...` covers those it trains on. `policy_version` is the policy's
    before the step's updates.
    """
    if stats.expert_N is not None:
        stats = _without_experts(stats)
    if stats.sampled is not None:
        filtered = rollout_metrics(replace(stats, sampled=None), policy_version)
        return rollout_metrics(stats.sampled, policy_version) | {
            f"filtered/{name}": value for name, value in filtered.items() if name.startswith(("reward/", "response/"))
        }
    of_turns = {} if stats.turns is None else turn_metrics(stats, stats.turns) | stats.scoring.trajectories
    stats = stats.trajectories
    rewards, lengths = stats.rewards_N, stats.response_lengths_N.double()
    metrics = {
        "response/length_mean": float(lengths.mean()),
        "response/length_std": float(lengths.std()) if len(lengths) > 1 else 0.0,
        "response/length_min": float(lengths.min()),
        "response/length_max": float(lengths.max()),
        "response/truncated_fraction": float(1 - stats.finished_N.double().mean()),
        "prompt/length_mean": float(stats.prompt_lengths_N.double().mean()),
    }
    if not sampled:
        return metrics
    staleness_N = (policy_version - stats.version_N).double()
    metrics |= {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()) if len(rewards) > 1 else 0.0,
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
        "reward/failed": float(stats.scoring.failed),
        "reward/timeouts": float(stats.scoring.timed_out),
        **{f"reward/{name}": value for name, value in stats.scoring.reward_parts.items()},
        "response/repetition": float(stats.repetition_N.mean()),
        "rollout/staleness_mean": float(staleness_N.mean()),
        "rollout/staleness_max": float(staleness_N.max()),
    }
    if stats.scoring.formed is not None:
        metrics["response/form_fraction"] = stats.scoring.formed
    for name, chosen in (("correct", stats.correct_N), ("incorrect", ~stats.correct_N)):
        if chosen.any():
            metrics[f"response/length_mean_{name}"] = float(lengths[chosen].mean())
    return metrics | of_turns | _group_metrics(stats)


def _without_experts(stats: RolloutStats) -> RolloutStats:
    """Return the rows of the sampled responses only."""
    assert stats.expert_N is not None
    rows_N, count = ~stats.expert_N, len(stats)
    columns = {item.name: getattr(stats, item.name) for item in fields(stats)}
    chosen: dict[str, Any] = {
        name: value[rows_N] for name, value in columns.items() if isinstance(value, Tensor) and len(value) == count
    }
    for name in chosen.keys() & {"group_N", "trajectory_N"}:
        chosen[name] = chosen[name].unique(return_inverse=True)[1]
    turns = None if stats.turns is None else stats.turns.select(rows_N)
    return replace(stats, **{**chosen, "expert_N": None, "turns": turns})


def _group_metrics(stats: RolloutStats) -> dict[str, float]:
    """Metrics of groups; k of pass@k is the most common group size.

    If the reward of a sample failed, the best of its group and whether all are correct are unknown. Metrics that need those
    leave such groups out.
    """
    count_P = torch.bincount(stats.group_N)
    k = stats.scoring.group_size
    if k == 1:
        return {}
    correct_P = torch.zeros(len(count_P), dtype=torch.float64).index_add(0, stats.group_N, stats.correct_N.double())

    def extreme(kind: str) -> Tensor:
        empty_P = torch.zeros(len(count_P), dtype=torch.float64)
        return empty_P.scatter_reduce(0, stats.group_N, stats.rewards_N, kind, include_self=False)

    best_P, worst_P = extreme("amax"), extreme("amin")
    metrics = {
        f"reward/mean@{k}": float((correct_P / count_P).mean()),
        "reward/frac_reward_zero_std": float((best_P == worst_P).double().mean()),
    }
    whole_P = torch.ones(len(count_P), dtype=torch.bool)
    if stats.incomplete_N is not None:
        whole_P[stats.group_N[stats.incomplete_N]] = False
    if not whole_P.any():
        return metrics
    return metrics | {
        f"reward/pass@{k}": float((correct_P > 0)[whole_P].double().mean()),
        "reward/best": float(best_P[whole_P].mean()),
        "reward/solve_all": float((correct_P == count_P)[whole_P].double().mean()),
        "reward/solve_none": float((correct_P == 0)[whole_P].double().mean()),
    }
