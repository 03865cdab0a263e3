"""Trajectories of several sequences and turns: rows of the step, packing, advantages, weights and gradients."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from fivefold.algo.objective import make_objective
from fivefold.columns import Column
from fivefold.config.learners import MegatronConfig
from fivefold.rollout.packing import pack
from fivefold.rollout.stats import BatchPlan, gather_stats, rollout_metrics
from fivefold.trainer.minibatches import MiniBatches
from fivefold.types import Group, Prompt, Sample, Turn
from tests.support.tiny_models import VOCAB
from tests.support.two_steps import POLICY

LONGEST = 16
REWARDS = [[1.0, 0.0, 0.25], [0.5, 0.5, 2.0]]
TURNS = [[2, 1, 3], [2, 2, 1]]
"""Number of turns of each trajectory."""
OBSERVATION = 3
METHODS: dict[str, dict] = {
    "grpo": {"kl": {"coef": 0.0}},
    "dr_grpo": {"overlong_filter": True},
    "dapo": {"importance_sampling_level": "turn"},
    "rloo": {"rollout_correction": {"weight": "turn"}},
    "opo": {"credit": "turns", "gamma": 0.9},
    "gigpo": {"kl": {"coef": 0.0}},
    "reinforce_plus_plus": {"kl": {"coef": 0.0}, "whiten_by": "group"},
}


def ratio_times_advantage(log_ratio_T, logprobs_T, advantages_T, samples):
    return (0.2 * log_ratio_T).exp() * advantages_T


def make_groups(is_merged: bool, is_plain: bool = False) -> list[Group]:
    """Two groups of three trajectories of one to three turns, merged to one sequence each or with one for each turn.

    With `is_plain` they have their first turn only, and no mention of turns.
    """
    draw = torch.Generator().manual_seed(5)

    def tokens(count: int) -> list[int]:
        return torch.randint(0, VOCAB, (count,), generator=draw).tolist()

    groups = []
    for index, rewards in enumerate(REWARDS):
        prompt, samples = Prompt(index, tokens(3 + index), "s", "", ""), []
        for number, reward in enumerate(rewards):
            common = {"reward": reward, "correct": reward >= 1, "trajectory": number}
            end = "turns" if number == 2 else "answered"
            merged = Sample([], [], "x", end, 4, loss_mask=[], **common)
            parts = []
            for place in range(TURNS[index][number]):
                sampled, observed = tokens(2 + (index + number + place) % 3), tokens(OBSERVATION)
                logprobs = (-3 * torch.rand(len(sampled), generator=draw)).tolist()
                turn = Turn(place, 0, len(sampled), 0.25 * place, f"state {place if number else 0}", seconds=1.0 + place)
                context = prompt.token_ids + merged.token_ids
                cause = "template" if place else None
                parts.append(
                    Sample(sampled, logprobs, "x", end, 4, prompt_ids=context, turns=(turn,), break_cause=cause, **common)
                )
                begin = len(merged.token_ids)
                merged.turns += (replace(turn, begin=begin, end=begin + len(sampled)),)
                merged.token_ids += sampled + observed
                merged.logprobs += logprobs + [0.0] * OBSERVATION
                merged.loss_mask += [True] * len(sampled) + [False] * OBSERVATION
            # Nothing follows the last turn.
            for name in ("token_ids", "logprobs", "loss_mask"):
                del getattr(merged, name)[-OBSERVATION:]
            if is_plain:
                first = parts[0]
                samples.append(Sample(first.token_ids, first.logprobs, "x", end, 4, reward=reward, correct=reward >= 1))
            else:
                samples += [merged] if is_merged else parts
        groups.append(Group(prompt, samples, index=index))
    return groups


def batch_of(mesh, groups: list[Group], objective):
    plan = BatchPlan(max_response_tokens=LONGEST, skipped=objective.skipped)
    own = mesh.ranks.shard(groups)
    stats = gather_stats(own, mesh.ranks, plan)
    batch = pack(own, stats, mesh.ranks, plan)
    batch[Column.OLD_LOGPROBS] = (batch[Column.ROLLOUT_LOGPROBS] * 1.1 - 0.2) * batch.loss_mask_T
    objective.assign_advantages(batch, stats, mesh.ranks)
    (mini,) = MiniBatches(objective)(batch, stats)
    return stats, mini.batch


def gradients(mesh, directory: Path, groups: list[Group], methods: dict) -> dict[str, dict[str, torch.Tensor]]:
    """The gradient of one optimizer step by method, name and parameter."""
    from fivefold.megatron import step
    from fivefold.megatron.bridge import WeightStream
    from fivefold.megatron.chunks import named_weights
    from fivefold.megatron.model import MegatronModel

    policy = replace(POLICY, megatron=MegatronConfig(ddp={"use_distributed_optimizer": False}))
    model = MegatronModel(directory, policy, mesh, total_updates=1)
    found = {}
    for name, choices in methods.items():
        objective = make_objective(name, surrogate=ratio_times_advantage, **choices)
        _, batch = batch_of(mesh, groups, objective)
        for ddp in model._models:
            ddp.train()
            ddp.zero_grad_buffer()
        with mesh.active():
            step.forward_backward(model._models, model._finalize, batch, objective.loss, model._batching, [])
        stream = WeightStream(
            lambda: {key: tensor.main_grad for key, tensor in named_weights(model._chunks).items()}, model.spec, mesh, 64
        )
        found[name] = {key: tensor.clone() for key, tensor in stream()}
    return found


@pytest.mark.parametrize("layout", ["d1", "d2"])
def test_unmerged_sequences_have_the_gradient_of_the_merged_one(cluster, models, layout):
    directory = models("qwen3")
    merged = cluster.run(gradients, f"megatron:{layout}", directory, make_groups(True), METHODS)[0]
    apart = cluster.run(gradients, f"megatron:{layout}", directory, make_groups(False), METHODS)[0]
    for name in METHODS:
        largest = max(float(gradient.abs().max()) for gradient in merged[name].values())
        assert largest > 1e-3, name
        for key, gradient in merged[name].items():
            assert torch.allclose(apart[name][key], gradient, rtol=0, atol=1e-6 * largest), (name, key)


def one_turn(groups: list[Group]) -> list[Group]:
    """The same samples as trajectories of one turn."""
    for group in groups:
        for number, sample in enumerate(group.samples):
            sample.trajectory, sample.prompt_ids = number, list(group.prompt.token_ids)
            sample.turns = (Turn(0, 0, len(sample.token_ids)),)
            sample.loss_mask = [True] * len(sample.token_ids)
        group.__post_init__()
    return groups


def numbers_of(mesh, groups: list[Group]):
    found = []
    for name, choices in METHODS.items():
        stats, batch = batch_of(mesh, groups, make_objective(name, surrogate=ratio_times_advantage, **choices))
        rows = {item.name: getattr(stats, item.name) for item in fields(stats) if item.name not in ("scoring", "turns")}
        found.append((rows, batch.tensors(), rollout_metrics(stats, 5)))
    return found


def test_one_turn_gives_the_rows_batch_and_metrics_of_a_plain_response(cluster):
    (plain,) = cluster.run(numbers_of, "megatron:d1", make_groups(True, is_plain=True))
    (turned,) = cluster.run(numbers_of, "megatron:d1", one_turn(make_groups(True, is_plain=True)))
    for (rows, tensors, metrics), (other_rows, other_tensors, other_metrics) in zip(plain, turned, strict=True):
        assert repr(rows) == repr(other_rows)
        for name, tensor in tensors.items():
            assert torch.equal(tensor, other_tensors.pop(name)), name
        assert list(other_tensors) == ["turn_T"]
        assert metrics.items() <= other_metrics.items()
        assert all(name.startswith(("turns/", "trajectory/")) for name in other_metrics.keys() - metrics.keys())


def test_one_turn_has_the_gradient_of_a_plain_response_bit_for_bit(cluster, models):
    plain = {name: choices for name, choices in METHODS.items() if name in ("grpo", "dapo", "reinforce_plus_plus")}
    (expected,) = cluster.run(gradients, "megatron:d1", models("qwen3"), make_groups(True, is_plain=True), plain)
    (found,) = cluster.run(gradients, "megatron:d1", models("qwen3"), one_turn(make_groups(True, is_plain=True)), plain)
    for name, by_key in expected.items():
        assert all(torch.equal(gradient, found[name][key]) for key, gradient in by_key.items()), name
