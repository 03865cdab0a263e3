"""Groups on the ranks that sampled them -> batches of the replicas that own them: every token once, where it belongs."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from fivefold.columns import Column
from fivefold.rollout.packing import pack, pack_dataset
from fivefold.rollout.stats import BatchPlan, gather_stats, rollout_metrics
from fivefold.types import DatasetResponse, Group, Prompt, Sample
from tests.support.toy import toy_prompts

PLAN = BatchPlan(updates_per_step=2, temperature=0.9, max_response_tokens=9)


def make_groups(sizes: list[int], versions: bool = False) -> list[Group]:
    """Groups of these sizes; every token id and log-prob is one of a kind."""
    draw, number = random.Random(7), 0
    groups = []
    for index, size in enumerate(sizes):
        prompt = Prompt(100 + index, [draw.randrange(1 << 20) for _ in range(draw.randint(1, 5))], "s", "", "")
        samples = []
        for _ in range(size):
            tokens = draw.randint(1, 9)
            sample = Sample(
                [], [], "", "answered" if draw.random() < 0.5 else "length", policy_version=3, reward=draw.random()
            )
            for _ in range(tokens):
                number += 1
                sample.token_ids.append(number)
                sample.logprobs.append(-number / 7)
            if versions:
                sample.token_versions = [3 + (place > 2) for place in range(tokens)]
            samples.append(sample)
        groups.append(Group(prompt, samples, index=index))
    return groups


def packed(mesh, sizes: list[int], versions: bool):
    """Each rank holds some groups, in any order; what arrives."""
    draw = random.Random(3)
    holder = [draw.randrange(mesh.layout.world_size) for _ in sizes]
    groups = [group for group in make_groups(sizes, versions) if holder[group.index] == mesh.ranks.rank]
    stats = gather_stats(groups[::-1], mesh.ranks, PLAN)
    return mesh.ranks.coords.dp, stats, pack(groups[::-1], stats, mesh.ranks, PLAN)


@pytest.mark.parametrize("layout", ["d1", "d2", "d4", "t2", "p2", "d2t2", "d2p2"])
@pytest.mark.parametrize("versions", [False, True])
def test_every_token_arrives_at_its_owner_and_at_all_ranks_of_it(cluster, layout, versions):
    sizes = [4, 1, 3, 4, 2, 4]
    results = cluster.run(packed, f"megatron:{layout}", sizes, versions)
    samples = [(group, sample) for group in make_groups(sizes, versions) for sample in group.samples]
    stats = results[0][1]
    assert stats.group_N.tolist() == [0] * 4 + [1] + [2] * 3 + [3] * 4 + [4] * 2 + [5] * 4
    assert stats.minibatch_N.tolist() == [0] * 8 + [1] * 10
    assert stats.rewards_N.tolist() == [sample.reward for _, sample in samples]
    seen = set()
    for dp, own_stats, batch in results:
        assert own_stats.owner_N.tolist() == stats.owner_N.tolist()
        rows = (stats.owner_N == dp).nonzero()[:, 0].tolist()
        assert batch.sample_index_N == rows
        assert batch.lengths_N == stats.lengths_N[rows].tolist()
        expected = [group.prompt.token_ids + sample.token_ids for group, sample in (samples[row] for row in rows)]
        assert batch.token_ids_T.tolist() == [token for tokens in expected for token in tokens]
        logprobs = torch.tensor([value for row in rows for value in samples[row][1].logprobs], dtype=torch.float32)
        assert torch.equal(batch[Column.ROLLOUT_LOGPROBS][batch.loss_mask_T], logprobs), "bit for bit"
        if versions:
            expected_versions = [version for row in rows for version in samples[row][1].token_versions]
            assert batch[Column.VERSION][batch.loss_mask_T].tolist() == expected_versions
        else:
            assert Column.VERSION not in batch
        seen |= set(rows)
    assert seen == set(range(len(samples)))


def twice(mesh):
    """Both ranks of a replica return the same groups."""
    try:
        gather_stats(make_groups([2, 2]), mesh.ranks, PLAN)
    except RuntimeError as error:
        return str(error)


def test_a_sample_that_two_ranks_return_is_refused(cluster):
    for message in cluster.run(twice, "megatron:t2"):
        assert "two ranks returned the same sample of a step" in message


def too_few(mesh):
    try:
        gather_stats([], mesh.ranks, PLAN)
    except RuntimeError as error:
        return str(error)


def test_a_step_without_samples_is_refused_on_every_rank(cluster):
    for message in cluster.run(too_few, "megatron:d2"):
        assert "the step has no samples" in message


def metrics_of(mesh, sizes: list[int]):
    groups = make_groups(sizes)
    for group in groups:
        for place, sample in enumerate(group.samples):
            sample.reward = float(place == 0 and group.index != 1)
            sample.reward_parts = {"mine": sample.reward} | ({"other": 2.0} if group.index == 0 else {})
            sample.correct = sample.reward >= 1
    stats = gather_stats(mesh.ranks.shard(groups), mesh.ranks, PLAN)
    return rollout_metrics(stats, policy_version=5)


@pytest.mark.parametrize("layout", ["d1", "d2t2"])
def test_metrics_of_unequal_groups_are_means_over_groups(cluster, layout):
    for metrics in cluster.run(metrics_of, f"megatron:{layout}", [4, 3, 4, 1]):
        assert metrics["reward/mean"] == pytest.approx(3 / 12)
        assert metrics["reward/mean@4"] == pytest.approx((1 / 4 + 0 + 1 / 4 + 1) / 4)
        assert metrics["reward/pass@4"] == pytest.approx(3 / 4)
        assert metrics["reward/solve_all"] == pytest.approx(1 / 4)
        assert metrics["reward/solve_none"] == pytest.approx(1 / 4)
        assert metrics["reward/frac_reward_zero_std"] == pytest.approx(2 / 4)
        assert metrics["reward/mine"] == pytest.approx(3 / 12)
        assert metrics["reward/other"] == pytest.approx(2.0)
        assert metrics["rollout/staleness_mean"] == metrics["rollout/staleness_max"] == 2


def test_packing_lays_prompt_before_response_and_masks_the_prompt():
    first = DatasetResponse([4, 5], [True, False], "")
    prompts = [replace(toy_prompts()[0], token_ids=[1, 2], responses=[first]), toy_prompts()[3]]
    groups = [
        Group(prompt, [Sample(one.token_ids, [], "", "answered", 0, loss_mask=one.loss_mask) for one in prompt.responses])
        for prompt in prompts
    ]
    batch = pack_dataset(groups, PLAN)
    assert batch.token_ids_T.tolist() == [1, 2, 4, 5, 3, 4, 4, 4, 3, 5, 5, 5]
    assert batch.loss_mask_T.int().tolist() == [0, 0, 1, 0, 0, 1, 1, 1, 0, 1, 1, 1]
    assert batch.lengths_N == [4, 4, 4]
    assert batch.positions_T.tolist() == [0, 1, 2, 3] * 3
    assert Column.ROLLOUT_LOGPROBS not in batch
    assert batch.expand_to_tokens(torch.tensor([1.0, 2.0, 3.0])).tolist() == [0, 0, 1, 0, 0, 2, 2, 2, 0, 3, 3, 3]
    picked = batch.select([2, 0])
    assert picked.token_ids_T.tolist() == [3, 5, 5, 5, 1, 2, 4, 5]
    assert (picked.lengths_N, picked.sample_index_N) == ([4, 4], [2, 0])
    assert batch.select([]).token_ids_T.tolist() == []
    assert pack_dataset([], PLAN).tensors().keys() == {"token_ids_T", "loss_mask_T"}
