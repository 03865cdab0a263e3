"""A sample that no one could score is no 0: the step, its advantages and its means are those of the other samples."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fivefold.algo import methods
from fivefold.algo.objective import make_objective
from fivefold.columns import Column
from fivefold.interfaces import EngineReplica, EngineState
from fivefold.rollout.packing import pack
from fivefold.rollout.sources import DynamicSampling, EngineRollouts
from fivefold.rollout.stats import BatchPlan, gather_stats, rollout_metrics
from fivefold.trainer.minibatches import MiniBatches, divided
from fivefold.types import Completion, Group, Prompt, Sample
from tests.rollout.test_sources import gradients, model_groups
from tests.support.toy import ToyScorer, scored

FAILED = math.nan


def failing_sample() -> Sample:
    return Sample([7, 7, 7], [-0.5] * 3, "", "length", 0, reward_failed=True)


def with_failures(groups: list[Group]) -> list[Group]:
    """The same groups, with a failed sample before, within or after the others of three, and a group of nothing else."""
    changed = []
    for group in groups:
        samples = list(group.samples)
        if group.index < 3:
            samples.insert((0, 1, len(samples))[group.index], failing_sample())
        changed.append(replace(group, samples=samples))
    return [*changed, Group(groups[0].prompt, [failing_sample(), failing_sample()], index=len(groups))]


def group_of(*rewards: float, index: int = 0) -> Group:
    samples = [
        Sample([1, 2, 3][: 1 + place % 3], [-0.1, -0.2, -0.3][: 1 + place % 3], "", "answered" if place % 4 != 3 else "length", 0, reward=reward,
               reward_failed=math.isnan(reward), correct=reward >= 1)
        for place, reward in enumerate(rewards)
    ]  # fmt: skip
    return Group(Prompt(index, [4, 5], "s", "", ""), samples, greedy_reward=0.25, index=index)


def without_failures(groups: list[Group]) -> list[Group]:
    known = [replace(group, samples=[s for s in group.samples if not s.reward_failed]) for group in groups]
    return [group for group in known if group.samples]


STEP = [
    group_of(1.0, FAILED, 0.0, 1.0, index=0),
    group_of(FAILED, FAILED, 0.5, FAILED, index=1),
    group_of(0.25, 0.75, 0.5, FAILED, index=2),
    group_of(FAILED, FAILED, FAILED, FAILED, index=3),
    group_of(0.0, 0.0, 1.0, 0.0, index=4),
]
EVERY_ADVANTAGE = [
    {"advantage": name, "normalize": normalize}
    for name in ("group", "leave_one_out", "pass_at_k")
    for normalize in ("group", "batch", "none")
] + [{"advantage": name} for name in ("length_weighted", "group_scaled", "greedy_baseline", "reward")]
SHAPED = [
    {"whiten": True},
    {"overlong_filter": True},
    {"overlong_buffer": 2, "overlong_penalty": 0.5},
    {"reward_clip": 0.6},
    {"kl": methods.KL(coef=0.1, place="reward", estimator="k1")},
    {"credit": "discounted", "gamma": 0.9},
    *({"aggregate": name} for name in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant-length")),
]


def learned(mesh, groups: list[Group], choices: dict):
    """(advantages, weights, loss) of every sample of a step."""
    objective = make_objective("grpo", **choices)
    plan = BatchPlan(max_response_tokens=5)
    stats = gather_stats(groups, mesh.ranks, plan)
    batch = pack(groups, stats, mesh.ranks, plan)
    batch[Column.OLD_LOGPROBS] = batch[Column.ROLLOUT_LOGPROBS] + 0.05
    batch[Column.REF_LOGPROBS] = batch[Column.ROLLOUT_LOGPROBS] - 0.1
    objective.assign_advantages(batch, stats, mesh.ranks)
    (mini,) = MiniBatches(objective)(batch, stats)
    output = objective.loss(batch[Column.ROLLOUT_LOGPROBS], torch.zeros(len(batch.token_ids_T)), mini.batch)
    sums = {name: float(value) for name, value in (output.sums | output.maxima).items()}
    return (
        batch[Column.ADVANTAGES].tolist(),
        mini.batch[Column.LOSS_WEIGHTS].tolist(),
        float(output.loss),
        sums,
        mini.batch.update_tokens,
    )


def every_objective(mesh):
    return [
        (choices, learned(mesh, STEP, choices), learned(mesh, without_failures(STEP), choices))
        for choices in EVERY_ADVANTAGE + SHAPED
    ]


def test_every_objective_learns_as_if_the_failed_samples_were_not_there(cluster):
    (results,) = cluster.run(every_objective, "megatron:d1")
    for choices, with_failed, without in results:
        assert with_failed == without, choices
        assert any(with_failed[0]) or choices.get("advantage") == "greedy_baseline", choices


def by_domain(mesh):
    """(tokens' advantages, their groups' sources) of a step of two domains of other scales, and of each domain alone."""
    sources = ["a", "b", "c", "b"]
    groups = [
        group_of(*rewards, index=n) for n, rewards in enumerate([(1.0, 0.0), (30.0, 50.0), (0.5, FAILED), (20.0, 70.0)])
    ]
    groups = [replace(group, prompt=replace(group.prompt, source=name)) for group, name in zip(groups, sources, strict=True)]
    objective = make_objective("grpo", advantage="reward", normalize="none", whiten=True, whiten_by="domain")
    plan = BatchPlan(max_response_tokens=5, domain_of={"a": "x", "b": "y", "c": "x"}.__getitem__)

    def advantages(chosen_groups):
        stats = gather_stats(mesh.ranks.shard(chosen_groups), mesh.ranks, plan)
        batch = pack(mesh.ranks.shard(chosen_groups), stats, mesh.ranks, plan)
        objective.assign_advantages(batch, stats, mesh.ranks)
        rewards = [stats.rewards_N[n] for n in batch.sample_index_N for _ in range(int(stats.lengths_N[n]))]
        tokens = zip(rewards, batch[Column.ADVANTAGES].tolist(), batch.loss_mask_T.tolist(), strict=True)
        return sorted({(float(reward), round(value, 5)) for reward, value, learned in tokens if learned})

    return advantages(groups), *(advantages([groups[n] for n in chosen]) for chosen in ((0, 2), (1, 3)))


def by_group(mesh):
    """(reward, length, advantage) of every response that this replica has, whitened over its prompt's tokens."""
    groups = [group_of(*rewards, index=n) for n, rewards in enumerate([(1.0, 0.0, 0.0), (30.0, 50.0, 90.0), (2.0, 2.0)])]
    lengths = iter([3, 1, 2, 4, 2, 1, 2, 3])
    groups = [replace(group, samples=[of_length(sample, next(lengths)) for sample in group.samples]) for group in groups]
    objective = make_objective("grpo", advantage="reward", normalize="none", whiten=True, whiten_by="group")
    stats = gather_stats(mesh.ranks.shard(groups), mesh.ranks, BatchPlan(max_response_tokens=5))
    batch = pack(mesh.ranks.shard(groups), stats, mesh.ranks, BatchPlan(max_response_tokens=5))
    objective.assign_advantages(batch, stats, mesh.ranks)
    responses, place = [], 0
    for row, length in zip(batch.sample_index_N, batch.lengths_N, strict=True):
        advantages_T = batch[Column.ADVANTAGES][place : place + length][batch.loss_mask_T[place : place + length]]
        responses += [(float(stats.rewards_N[row]), len(advantages_T), value) for value in advantages_T.tolist()]
        place += length
    return responses


def of_length(sample: Sample, length: int) -> Sample:
    return replace(sample, token_ids=sample.token_ids[:1] * length, logprobs=[-0.5] * length)


@pytest.mark.parametrize("layout", ["d1", "d2"])
def test_each_group_is_whitened_over_its_own_tokens(cluster, layout):
    """By hand: a prompt's tokens, each with its response's reward, less their mean over their deviation."""
    advantages = {
        (reward, length): value for rank in cluster.run(by_group, f"megatron:{layout}") for reward, length, value in rank
    }
    for group in (((1.0, 3), (0.0, 1), (0.0, 2)), ((30.0, 4), (50.0, 2), (90.0, 1))):
        tokens = [reward for reward, length in group for _ in range(length)]
        for reward, length in group:
            expected = (reward - statistics.fmean(tokens)) / statistics.stdev(tokens)
            assert advantages[reward, length] == pytest.approx(expected, rel=1e-5)
    assert advantages[2.0, 2] == advantages[2.0, 3] == 0.0


@pytest.mark.parametrize("layout", ["d1", "d2"])
def test_domains_are_whitened_as_if_each_were_alone(cluster, layout):
    replicas = cluster.run(by_domain, f"megatron:{layout}")
    together, first, second = ([row for rank in part for row in rank] for part in zip(*replicas, strict=True))
    assert sorted(together) == sorted(first + second) and len(together) == 7
    assert max(value for _, value in together) < 3 and min(value for _, value in together) < -0.5


def one_group(mesh, rewards: list[float]):
    advantages, weights, *_ = learned(mesh, [group_of(*rewards)], {"advantage": "group", "normalize": "none"})
    return [a for a, w in zip(advantages, weights, strict=True) if w]


def test_a_failed_sample_is_in_no_baseline(cluster):
    """1, 0 and 1 have the mean 2/3; a zero in the place of the failure would make it 1/2. Samples have 1, 3 and 1 tokens."""
    ((advantages,),) = [cluster.run(one_group, "megatron:d1", [1.0, FAILED, 0.0, 1.0])]
    assert advantages == pytest.approx([1 / 3] + [-2 / 3] * 3 + [1 / 3])


@pytest.mark.parametrize("layout", ["d1", "d2t2"])
def test_a_megatron_step_with_failed_rewards_equals_the_step_without_those_samples(cluster, models, layout):
    """Bit for bit: what is computed with is the same."""
    calls = [(gradients, models("qwen3"), 1, make) for make in (model_groups, failing_model_groups)]
    expected, without_failed = (cluster.run(*call[:1], f"megatron:{layout}", *call[1:])[0] for call in calls)
    for (owners, loss, gradient), (other_owners, other_loss, other) in zip(expected, without_failed, strict=True):
        assert owners == other_owners and loss == other_loss
        assert gradient.norm() > 1e-2 and torch.equal(gradient, other)


def failing_model_groups() -> list[Group]:
    return with_failures(model_groups())


def measured(mesh, groups: list[Group]):
    return rollout_metrics(gather_stats(mesh.ranks.shard(groups), mesh.ranks, BatchPlan()), policy_version=0)


@pytest.mark.parametrize("layout", ["d1", "d2"])
def test_means_of_a_step_are_those_of_the_samples_with_a_reward(cluster, layout):
    for metrics in cluster.run(measured, f"megatron:{layout}", STEP):
        rewards = [1, 0, 1, 0.5, 0.25, 0.75, 0.5, 0, 0, 1, 0]
        assert metrics["reward/mean"] == pytest.approx(sum(rewards) / 11)
        assert (metrics["reward/min"], metrics["reward/failed"]) == (0.0, 9.0)
        # Right of those that are known, by group: 2 of 3, 0 of 1, 0 of 3, 1 of 4.
        assert metrics["reward/mean@4"] == pytest.approx((2 / 3 + 0 + 0 + 1 / 4) / 4)
        # Only of the last group all four are known.
        assert (metrics["reward/pass@4"], metrics["reward/solve_none"], metrics["reward/best"]) == (1.0, 0.0, 1.0)


def refused(mesh, groups: list[Group]) -> str:
    try:
        gather_stats(mesh.ranks.shard(groups), mesh.ranks, BatchPlan())
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_sample_without_a_finite_reward_that_did_not_fail_ends_the_step(cluster, reward):
    """So a source or scorer that forgot a sample is seen, and not taken for a reward of 0."""
    groups = [group_of(1.0, 0.5), group_of(1.0, 0.0, index=1)]
    groups[1].samples[1] = Sample([1], [0.0], "", "answered", 0, reward=reward)
    for message in cluster.run(refused, "megatron:d2", groups):
        assert "every sample of a step needs a finite reward" in message
    for message in cluster.run(refused, "megatron:d2", STEP[3:4]):
        assert "the rewards of all 4 samples of the step failed" in message


class Rounds:
    """Groups by hand: first one whose only difference is a failure, then an informative one."""

    def __init__(self) -> None:
        self._groups = iter([group_of(1.0, FAILED, 1.0, 1.0), group_of(1.0, FAILED, 0.0, 1.0)])

    def next(self, step: int) -> list[Group]:
        return [next(self._groups)]


class Notes:
    def record(self, metrics) -> None: ...
    def log(self, text: str) -> None: ...


def chosen_by_dynamic_sampling(mesh):
    source = DynamicSampling(Rounds(), mesh.ranks, Notes(), groups_per_step=1, max_rounds=2)
    (group,) = [group for group in source.next(0) if group.is_used]
    return [sample.reward for sample in group.samples if not sample.reward_failed]


def test_a_failure_makes_no_group_informative(cluster):
    (rewards,) = cluster.run(chosen_by_dynamic_sampling, "megatron:d1")
    assert rewards == [1.0, 0.0, 1.0]


def without_greedy_reward(mesh, tmp_path: Path):
    from fivefold.data.prompt_loader import PromptLoader
    from fivefold.observability.run_logger import RunLogger
    from fivefold.reward.manager import RewardManager
    from fivefold.rollout.generation import Generator
    from fivefold.rollout.sources import PromptQueue
    from fivefold.types import Sampling

    class Scorer(ToyScorer):
        """The most likely response of the second prompt has no reward."""

        def submit(self, prompt: Prompt, sample: Sample):
            sample.reward, sample.reward_failed = 0.5, False
            if sample.text == "greedy" and prompt.id == 1:
                sample.reward, sample.reward_failed = math.nan, True
                return scored("as asked")
            return scored()

    class Engine:
        state, version, replica = EngineState.READY, 0, EngineReplica(0, 1)

        def generate(self, requests):
            return iter([Completion(r.id, [int(r.sampling.temperature)], [0.0], "stop", 0) for r in requests])

        def decode(self, token_ids, skip_special_tokens):
            return "sampled" if token_ids[0] else "greedy"

    logger = RunLogger(tmp_path, [], is_main=False, steps=1)
    prompts = PromptQueue(PromptLoader([Prompt(i, [1], "s", "", "") for i in range(2)], 2, 0, False), logger)
    rewards = RewardManager(Scorer(), mesh.ranks, max_failed=0.5, log=lambda text: None)
    generator = Generator(Engine(), Engine(), rewards, logger)
    source = EngineRollouts(
        generator, prompts, logger, Sampling(4), seed=0, group_size=2, prompts_per_call=2, with_greedy=True
    )
    return [(group.greedy_reward, [s.reward_failed for s in group.samples]) for group in source.next(0)]


def test_a_group_whose_greedy_baseline_failed_is_left_out(cluster, tmp_path):
    (groups,) = cluster.run(without_greedy_reward, "megatron:d1", tmp_path)
    assert groups[0] == (0.5, [False, False])
    assert groups[1][1] == [True, True]


def updates_of(mesh, groups: list[Group], updates: int):
    """[the samples of each optimizer step], of the policy and of a model with twice as many."""
    plan = BatchPlan(updates_per_step=updates, max_response_tokens=4)
    stats = gather_stats(groups, mesh.ranks, plan)
    batch, objective = pack(groups, stats, mesh.ranks, plan), make_objective("remax")
    objective.assign_advantages(batch, stats, mesh.ranks)
    minis = list(MiniBatches(objective)(batch, stats))
    assert all(mini.batch[Column.LOSS_WEIGHTS].sum().item() == pytest.approx(1) for mini in minis)
    return [mini.rows_N.tolist() for mini in minis], [rows_N.tolist() for rows_N, _ in divided(batch, stats, 2 * updates)]


def test_a_group_of_one_whose_reward_failed_takes_its_update_with_it(cluster):
    """A step has no more updates than groups: one whose updates have one response each survives a failed reward."""
    groups = [group_of(reward, index=place) for place, reward in enumerate((1.0, FAILED, 0.5))]
    ((policy, other),) = cluster.run(updates_of, "megatron:d1", groups, 3)
    assert policy == other == [[0], [1]]
    ((policy, other),) = cluster.run(updates_of, "megatron:d1", [groups[0], replace(groups[2], index=1)], 1)
    assert (policy, other) == ([[0, 1]], [[0], [1]])
