"""Trajectories of several sequences and turns: rows of the step, packing, advantages, weights and gradients."""

from __future__ import annotations

import math
import statistics
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from fivefold.algo.objective import make_objective
from fivefold.algo.terms.process_reward import ProcessReward
from fivefold.columns import Column
from fivefold.config.learners import MegatronConfig
from fivefold.rollout.generation import group_of
from fivefold.rollout.packing import pack
from fivefold.rollout.stats import BatchPlan, Informative, gather_stats, rollout_metrics
from fivefold.rollout.trajectories import HeldSequence, Task, Trajectory
from fivefold.trainer.minibatches import MiniBatches
from fivefold.types import Completion, Group, Prompt, Sample, Turn
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
    groups_of_rank = mesh.ranks.shard(groups)
    stats = gather_stats(groups_of_rank, mesh.ranks, plan)
    batch = pack(groups_of_rank, stats, mesh.ranks, plan)
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
    gradients_by_method = {}
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
        gradients_by_method[name] = {key: tensor.clone() for key, tensor in stream()}
    return gradients_by_method


@pytest.mark.parametrize("layout", ["d1", "d2", "t2", "p2", "c2"])
def test_unmerged_sequences_have_the_gradient_of_the_merged_one(cluster, models, layout):
    directory = models("qwen3")
    merged = cluster.run(gradients, "megatron:d1", directory, make_groups(True), METHODS)[0]
    apart = cluster.run(gradients, f"megatron:{layout}", directory, make_groups(False), METHODS)[0]
    # Other layouts add the same numbers in another order.
    closeness = 1e-6 if layout.startswith("d") else 5e-6
    for name in METHODS:
        largest = max(float(gradient.abs().max()) for gradient in merged[name].values())
        assert largest > 1e-3, name
        for key, gradient in merged[name].items():
            assert torch.allclose(apart[name][key], gradient, rtol=0, atol=closeness * largest), (name, key)


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
    numbers = []
    for name, choices in METHODS.items():
        stats, batch = batch_of(mesh, groups, make_objective(name, surrogate=ratio_times_advantage, **choices))
        rows = {item.name: getattr(stats, item.name) for item in fields(stats) if item.name not in ("scoring", "turns")}
        numbers.append((rows, batch.tensors(), rollout_metrics(stats, 5)))
    return numbers


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
    (gradients_by_method,) = cluster.run(
        gradients, "megatron:d1", models("qwen3"), one_turn(make_groups(True, is_plain=True)), plain
    )
    for name, by_key in expected.items():
        assert all(torch.equal(gradient, gradients_by_method[name][key]) for key, gradient in by_key.items()), name


# --- oracles ----------------------------------------------------------------------------------------------------------

PROMPT = [1, 2]


def trajectory(number: int, reward: float, turns: list[tuple[int, float, str | None]], is_merged: bool, observed: int = 2):
    """The sequences of a trajectory from (tokens, reward, state) of each turn, with observations between the turns."""
    tokens: list[int] = []
    mask: list[bool] = []
    turns_of_row, parts = [], []
    for place, (count, earned, state) in enumerate(turns):
        if place:
            tokens, mask = tokens + [9] * observed, mask + [False] * observed
        begin = len(tokens)
        part = Sample([5] * count, [-0.5] * count, "", "answered", 0, reward=reward, trajectory=number)
        part.prompt_ids, part.turns = PROMPT + tokens, (Turn(place, 0, count, earned, state),)
        parts.append(part)
        tokens, mask = tokens + [5] * count, mask + [True] * count
        turns_of_row.append(Turn(place, begin, begin + count, earned, state))
    merged = Sample(tokens, [-0.5] * len(tokens), "", "answered", 0, loss_mask=mask, reward=reward, trajectory=number)
    merged.turns = tuple(turns_of_row)
    return [merged] if is_merged else parts


def assigned(mesh, group: list[Sample], name: str, choices: dict, values: list[float] | None = None):
    """(advantages, returns) of the tokens with loss, trajectory after trajectory in the order of their turns.

    A process reward model, if the method has one, rewards all tokens alike.
    """
    objective = make_objective(name, **choices)
    groups = [Group(Prompt(0, PROMPT, "s", "", ""), group)]
    plan = BatchPlan(max_response_tokens=LONGEST, skipped=objective.skipped)
    stats = gather_stats(groups, mesh.ranks, plan)
    batch = pack(groups, stats, mesh.ranks, plan)
    if values is not None:
        batch[Column.VALUES] = torch.tensor(values)
    if objective.process.is_active:
        batch[Column.PRM_LOGPROBS] = batch[Column.PRM_REF_LOGPROBS] = torch.zeros(len(batch.token_ids_T))
    objective.assign_advantages(batch, stats, mesh.ranks)
    return tuple(batch[column][batch.loss_mask_T].tolist() for column in (Column.ADVANTAGES, Column.RETURNS))


def turn_losses(mesh, is_merged: bool, choices: dict):
    """(loss, gradient by token, and columns of the batch) of one micro-batch."""
    objective = make_objective("grpo", kl={"coef": 0.0}, **choices)
    _, batch = batch_of(mesh, make_groups(is_merged), objective)
    noise_T = torch.randn(len(batch.token_ids_T), generator=torch.Generator().manual_seed(3))
    logprobs_T = (batch[Column.OLD_LOGPROBS] + 0.3 * noise_T).double().requires_grad_()
    loss = objective.loss(logprobs_T, torch.zeros_like(logprobs_T), batch).loss
    loss.backward()
    columns = [
        batch[name] for name in (Column.OLD_LOGPROBS, Column.ROLLOUT_LOGPROBS, Column.ADVANTAGES, Column.LOSS_WEIGHTS)
    ]
    mask_T = batch.loss_mask_T
    values = [logprobs_T.detach(), *columns, batch[Column.TURN], logprobs_T.grad]
    return (
        float(loss),
        [value[mask_T].tolist() for value in values],
        batch.expand_to_tokens(torch.arange(len(batch.lengths_N)))[mask_T].tolist(),
    )


@pytest.mark.parametrize("is_merged", [True, False])
@pytest.mark.parametrize(
    "choices",
    [
        {"importance_sampling_level": "turn"},
        {"rollout_correction": {"weight": "turn", "low": 0.4, "high": 0.5, "outside": "truncate"}},
        {"importance_sampling_level": "turn", "rollout_correction": {"weight": "turn", "high": 0.45, "outside": "mask"}},
    ],
)
def test_ratios_and_corrections_of_turns_are_those_of_their_definition(cluster, is_merged, choices):
    """In loops: exp of the mean log-ratio over the turn's tokens, and the product of trainer / engine over the turn."""
    ((loss, columns, samples),) = cluster.run(turn_losses, "megatron:d1", is_merged, choices)
    by_turn: dict = {}
    for sample, row in zip(samples, zip(*columns, strict=True), strict=True):
        by_turn.setdefault((sample, row[5]), []).append(row)
    correction, total, gradients = choices.get("rollout_correction"), 0.0, []
    clipped = 0
    for rows in by_turn.values():
        differences = [now - old for now, old, *_ in rows]
        ratios = [math.exp(sum(differences) / len(rows))] * len(rows)
        if "importance_sampling_level" not in choices:
            ratios = [math.exp(difference) for difference in differences]
        weight = 1.0
        if correction is not None:
            weight = math.exp(sum(old - engine for _, old, engine, *_ in rows))
            low, high = correction.get("low", 0.0), correction["high"]
            clipped += not low <= weight <= high
            if correction["outside"] == "mask":
                weight = weight if low <= weight <= high else 0.0
            else:
                weight = min(max(weight, low), high)
        for ratio, (_, _, _, advantage, share, _, _) in zip(ratios, rows, strict=True):
            total -= weight * share * min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
        shared = "importance_sampling_level" in choices
        moves = [
            -weight * share * ratio * advantage * (ratio * advantage <= min(max(ratio, 0.8), 1.2) * advantage)
            for ratio, (_, _, _, advantage, share, _, _) in zip(ratios, rows, strict=True)
        ]
        gradients_of_turn = [sum(moves) / len(rows)] * len(rows) if shared else moves
        gradients += [(row[6], gradient) for row, gradient in zip(rows, gradients_of_turn, strict=True)]
    assert loss == pytest.approx(total, rel=1e-5)
    assert all(gradient == pytest.approx(expected, rel=1e-4, abs=1e-7) for gradient, expected in gradients)
    assert len(by_turn) == 11 and (clipped > 0) == (correction is not None)


CREDITED = [(1.0, [(2, 0.25, None), (1, 0.5, None)]), (0.0, [(1, -0.5, None), (2, 0.0, None)])]


@pytest.mark.parametrize("is_merged", [True, False])
def test_a_turn_gets_its_own_return_and_the_last_one_the_rest_of_the_reward(cluster, is_merged):
    """Against the mean 0.5 the advantages are ±0.5: rewards 0.25 and 0.5 - 0.25 of one, -0.5 and -0.5 + 0.5 of the other."""
    group = [one for number, credited in enumerate(CREDITED) for one in trajectory(number, *credited, is_merged)]
    ((advantages, _),) = cluster.run(assigned, "megatron:d1", group, "dr_grpo", {"credit": "turns", "gamma": 0.5})
    assert advantages == pytest.approx([0.25 + 0.5 * 0.25] * 2 + [0.25] + [-0.5] + [0.0] * 2)
    ((advantages, _),) = cluster.run(assigned, "megatron:d1", group, "dr_grpo", {"credit": "turns", "reward_scale": 2.0})
    assert advantages == pytest.approx([1.0] * 2 + [0.5] + [-1.0] + [0.0] * 2), "with γ = 1 the first turn has the advantage"


def test_turns_of_concurrent_sequences_are_credited_in_the_order_of_their_numbers(cluster):
    first = Sample([5, 9, 5], [-0.5] * 3, "", "done", 0, loss_mask=[True, False, True], reward=1.0, trajectory=0)
    first.turns = (Turn(0, 0, 1, 0.0), Turn(2, 2, 3, 0.0))
    second = Sample([5], [-0.5], "", "done", 0, reward=1.0, trajectory=0, turns=(Turn(1, 0, 1, 0.5),))
    choices = {"advantage": "reward", "credit": "turns", "gamma": 0.5, "kl": {"coef": 0.0}}
    ((advantages, _),) = cluster.run(assigned, "megatron:d1", [first, second], "topr", choices)
    # In time 0, 0.5 and the rest, 0.5; the batch has the turns 0, 2 and 1.
    assert advantages == pytest.approx([0.5 * 0.5 + 0.25 * 0.5, 0.5, 0.5 + 0.5 * 0.5])


@pytest.mark.parametrize("coef", [1.0, 5.0])
def test_the_weight_of_outcomes_scales_what_turns_have_earned_of_them(cluster, coef):
    """The first turn has earned all of the reward."""
    group = [*trajectory(0, 1.0, [(2, 1.0, None), (1, 0.0, None)], True), *trajectory(1, 0.0, [(1, 0.0, None)], True)]
    process = ProcessReward(coef=1.0, outcome_coef=coef)
    choices = {"credit": "turns", "gamma": 1.0, "whiten": False, "process_reward": process, "advantage": "reward"}
    ((advantages, _),) = cluster.run(assigned, "megatron:d1", group, "prime", choices)
    assert advantages == pytest.approx([coef, coef, 0.0, 0.0])


@pytest.mark.parametrize("is_merged", [True, False])
def test_gae_skips_observations_and_has_the_rewards_of_turns(cluster, is_merged):
    """δ by hand; before the second turn stands the value at the last token of the observation."""
    # Prompt, turn, observation and turn of each trajectory. The second sequence of an unmerged one has all of them.
    values_of_both = [[0.3, 0.1, -0.2, 0.4, 7.0, 0.6, 0.9], [0.0, 0.2, 0.5, 8.0, -0.4, 0.7, 0.8]]
    values = [
        value
        for values_of_one, first in zip(values_of_both, (4, 3), strict=True)
        for value in ([] if is_merged else values_of_one[:first]) + values_of_one
    ]
    group = [one for number, credited in enumerate(CREDITED) for one in trajectory(number, *credited, is_merged)]
    gamma, lam = 0.9, 0.8
    choices = {"gamma": gamma, "lam": lam, "whiten": False}
    ((advantages, returns),) = cluster.run(assigned, "megatron:d1", group, "ppo", choices, values)
    expected, targets = [], []
    for befores, rewards in (([0.1, -0.2, 0.6], [0.0, 0.25, 0.75]), ([0.2, -0.4, 0.7], [-0.5, 0.0, 0.5])):
        later, of_turns = 0.0, []
        for place in (2, 1, 0):
            after = befores[place + 1] if place < 2 else 0.0
            later = rewards[place] + gamma * after - befores[place] + gamma * lam * later
            of_turns.append(later)
        expected += of_turns[::-1]
        targets += [a + v for a, v in zip(of_turns[::-1], befores, strict=True)]
    assert advantages == pytest.approx(expected) and returns == pytest.approx(targets)


STATES = [
    (1.0, [(2, 0.0, "a"), (1, 0.25, "b"), (3, 0.0, "c")]),
    (0.0, [(1, 0.0, "a"), (2, -0.5, "b")]),
    (0.5, [(1, 0.5, "a"), (1, 0.0, "a"), (1, 0.0, None), (2, 0.0, None)]),
]


def gigpo_by_hand(omega: float, gamma: float) -> list[float]:
    """Equations of 2505.10978 in loops: the advantage of a token by trajectory and turn."""

    def compared(value: float, others: list[float]) -> float:
        if len(others) == 1:
            return 0.0
        return (value - statistics.fmean(others)) / (statistics.stdev(others) + 1e-6)

    totals = [reward for reward, _ in STATES]
    returns, by_state = [], {}
    for total, turns in STATES:
        earned = [reward for _, reward, _ in turns]
        earned[-1] += total - sum(earned)
        ahead = [sum(gamma**later * value for later, value in enumerate(earned[place:])) for place in range(len(earned))]
        returns.append(ahead)
        for (_, _, state), value in zip(turns, ahead, strict=True):
            if state is not None:
                by_state.setdefault(state, []).append(value)
    advantages = []
    for (total, turns), ahead in zip(STATES, returns, strict=True):
        for (count, _, state), value in zip(turns, ahead, strict=True):
            step = 0.0 if state is None else compared(value, by_state[state])
            advantages += [compared(total, totals) + omega * step] * count
    return advantages


@pytest.mark.parametrize("is_merged", [True, False])
def test_gigpo_adds_the_advantage_of_a_turn_to_that_of_the_trajectory(cluster, is_merged):
    group = [one for number, states in enumerate(STATES) for one in trajectory(number, *states, is_merged)]
    ((advantages, _),) = cluster.run(assigned, "megatron:d1", group, "gigpo", {})
    assert advantages == pytest.approx(gigpo_by_hand(1.0, 0.95), rel=1e-5)
    ((advantages, _),) = cluster.run(assigned, "megatron:d1", group, "gigpo", {"turn_coef": 0.5, "turn_gamma": 0.5})
    assert advantages == pytest.approx(gigpo_by_hand(0.5, 0.5), rel=1e-5)


def test_states_of_other_groups_are_not_compared():
    from fivefold.rollout.turns import gather_turns

    class OneRank:
        def all_gather_world(self, rows):
            return [rows]

    groups = [Group(Prompt(i, PROMPT, "s", "", ""), trajectory(0, 1.0, [(1, 0.0, "a")], True), index=i) for i in range(2)]
    assert len(set(gather_turns(groups, torch.tensor([0, 1]), 1, OneRank()).state_U.tolist())) == 2


# --- rows, lengths and weights ----------------------------------------------------------------------------------------


def inspected(mesh, groups: list[Group], aggregate: str):
    stats, batch = batch_of(mesh, groups, make_objective("grpo", aggregate=aggregate, kl={"coef": 0.0}))
    return stats, batch, rollout_metrics(stats, 5)


@pytest.mark.parametrize("aggregate", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant-length"])
def test_weights_and_metrics_count_trajectories_and_sampled_tokens(cluster, aggregate):
    (merged,) = cluster.run(inspected, "megatron:d1", make_groups(True), aggregate)
    (apart,) = cluster.run(inspected, "megatron:d1", make_groups(False), aggregate)
    for name in ("LOSS_WEIGHTS", "ADVANTAGES", "ROLLOUT_LOGPROBS"):
        first, second = (batch[Column[name]][batch.loss_mask_T] for _, batch, _ in (merged, apart))
        assert torch.equal(first, second), name
    changed = {name for name, value in merged[2].items() if value != apart[2][name]}
    assert changed == {"trajectory/sequences", "trajectory/breaks_template"}
    assert apart[2]["trajectory/sequences"] == 11 / 6 and apart[2]["trajectory/breaks_template"] == 5 / 6
    assert apart[2]["turns/mean"] == 11 / 6 and apart[2]["trajectory/end_turns"] == 1 / 3
    assert merged[0].trajectory_N is None and apart[0].trajectory_N.tolist() == [0, 0, 1, 2, 2, 2, 3, 3, 4, 4, 5]
    assert apart[0].trajectories.response_lengths_N.tolist() == merged[0].response_lengths_N.tolist()


def test_a_merged_row_longer_than_the_limit_of_a_turn_is_trained_whole(cluster):
    (result,) = cluster.run(long_row, "megatron:d1")
    lengths, batch = result
    assert max(lengths) > 3
    weights_T = batch[Column.LOSS_WEIGHTS]
    assert int((weights_T > 0).sum()) == sum(lengths) == int(batch.loss_mask_T.sum())


def long_row(mesh):
    groups, plan = make_groups(True), BatchPlan(max_response_tokens=3)
    objective = make_objective("dr_grpo")
    stats = gather_stats(groups, mesh.ranks, plan)
    batch = pack(groups, stats, mesh.ranks, plan)
    objective.assign_advantages(batch, stats, mesh.ranks)
    (mini,) = MiniBatches(objective)(batch, stats)
    lengths = [len([mask for mask in sample.loss_mask if mask]) for group in groups for sample in group.samples]
    return lengths, mini.batch


def test_nothing_reads_the_log_probs_of_observations(cluster, models):
    chosen = {name: METHODS[name] for name in ("grpo", "rloo", "dapo")}
    (expected,) = cluster.run(gradients, "megatron:d1", models("qwen3"), make_groups(True), chosen)
    spoiled = make_groups(True)
    for group in spoiled:
        for sample in group.samples:
            sample.logprobs = [p if m else math.nan for p, m in zip(sample.logprobs, sample.loss_mask, strict=True)]
    ((_, batch, _),) = cluster.run(inspected, "megatron:d1", spoiled, "token-mean")
    assert not batch[Column.ROLLOUT_LOGPROBS][~batch.loss_mask_T].any()
    (gradients_by_method,) = cluster.run(gradients, "megatron:d1", models("qwen3"), spoiled, chosen)
    for name, by_key in expected.items():
        assert all(torch.equal(gradient, gradients_by_method[name][key]) for key, gradient in by_key.items()), name


def test_an_inserted_end_of_turn_changes_no_length_and_is_not_trained(cluster):
    (plain,) = cluster.run(inspected, "megatron:d1", make_groups(True), "token-mean")
    groups = make_groups(True)
    for group in groups:
        for sample in group.samples:
            # The engine reads it before the next turn, but did not sample it.
            sample.token_ids.append(3)
            sample.logprobs.append(-1.0)
            sample.loss_mask.append(False)
    (ended,) = cluster.run(inspected, "megatron:d1", groups, "token-mean")
    assert ended[2] == plain[2]
    for name in ("LOSS_WEIGHTS", "ADVANTAGES", "TURN"):
        first, second = (batch[Column[name]][batch.loss_mask_T] for _, batch, _ in (plain, ended))
        assert torch.equal(first, second), name
    assert not ended[1][Column.LOSS_WEIGHTS][~ended[1].loss_mask_T].any()


def test_a_turn_of_two_sequences_carries_loss_in_the_first_only():
    first = Sample([5, 6, 9, 7], [-1.0] * 4, "", "done", 0, loss_mask=[True, True, False, True], trajectory=0)
    first.turns = (Turn(0, 0, 2), Turn(1, 3, 4))
    second = Sample([5, 6, 8, 4], [-1.0] * 4, "", "done", 0, loss_mask=[True, True, False, True], trajectory=0)
    second.turns = (Turn(0, 0, 2), Turn(2, 3, 4))
    other = Sample([5, 6], [-1.0] * 2, "", "done", 0, trajectory=1, turns=(Turn(0, 0, 2),))
    group = Group(Prompt(0, PROMPT, "s", "", ""), [other, first, second])
    assert [sample.trajectory for sample in group.samples] == [0, 0, 1]
    assert [sample.loss_tokens for sample in group.samples] == [3, 1, 2]


def test_a_trajectory_has_the_log_probs_of_all_its_tokens_or_none():
    """In most steps of engine.logprobs: tenth_step the engine returns none, and observations are none of its own."""
    for logprobs, expected in (([-1.0], [-1.0, 0.0, -1.0]), ([], [])):
        held = Trajectory(Task(Prompt(0, [1], "s", "", ""), 0, 0, (), 0))
        for context in ([1], [1, 5, 8]):
            held.sampled(held.extend_or_begin(context), Completion(0, [5], logprobs, "stop", 0), "", None, 0.0)
        (one,) = held.samples()
        assert one.token_ids == [5, 8, 5] and one.logprobs == expected


def test_groups_name_trajectories_only_where_one_has_several_sequences():
    def one(context: list[int], cause: str | None = None) -> Sample:
        return Sample([7], [-0.5], "x", "done", 0, prompt_ids=context, turns=(Turn(0, 0, 1),), break_cause=cause)

    prompt = Prompt(0, [9], "s", "", "")
    plain = group_of(prompt, [[one([1, 2])], [one([1, 2])]], 4)
    assert plain.index == 4 and plain.prompt.token_ids == [1, 2]
    assert all(sample.trajectory is None and sample.prompt_ids is None for sample in plain.samples)
    several = group_of(prompt, [[one([1, 2])], [one([1, 2]), one([1, 3], "content")]])
    assert several.prompt.token_ids == [1, 2]
    assert [(sample.trajectory, sample.prompt_ids) for sample in several.samples] == [(0, None), (1, None), (1, [1, 3])]
    apart = group_of(prompt, [[one([1, 2])], [one([1, 4])]])
    assert apart.prompt.token_ids == [9] and [sample.prompt_ids for sample in apart.samples] == [[1, 2], [1, 4]]


def test_a_context_extends_the_longest_sequence_that_it_begins_with_or_begins_one():
    """Held tokens are never overwritten."""
    held = Trajectory(Task(Prompt(0, [1], "s", "", ""), 0, 0, (), 0))

    def sampled(context: list[int], *tokens: int, cause: str | None = None) -> HeldSequence:
        sequence = held.extend_or_begin(context, cause)
        completion = Completion(0, list(tokens), [-1.0] * len(tokens), "stop", 4)
        held.sampled(sequence, completion, "", None, 0.0)
        return sequence

    first = sampled([1], 5, 6)
    assert sampled([1, 5, 6, 8], 7) is first and first.loss_mask == [True, True, False, True]
    second = sampled([1, 5], 9, cause="shorter")
    assert second is not first and second.cause == "shorter" and second.context == [1, 5]
    third = sampled([1, 5, 6, 8, 4], 2, cause="content")
    assert sampled([1, 5, 6, 8, 7], 3) is first
    assert [turn.number for turn in first.turns] == [0, 1, 4] and len(held.sequences) == 3
    assert first.tokens == [1, 5, 6, 8, 7, 3] and third.tokens == [1, 5, 6, 8, 4, 2]
    assert first.versions == [4] * 5


def test_dynamic_sampling_looks_at_trajectories():
    apart = [one for number in range(2) for one in trajectory(number, 1.0, [(2, 0.0, None), (3, 0.0, None)], False)]
    assert not Informative()(apart)
    lengths = []
    Informative(shape=lambda rewards_M, lengths_M: lengths.append(lengths_M.tolist()) or rewards_M)(apart)
    assert lengths == [[5, 5]]
    assert Informative(low=0.5, max_tokens=5)(apart) and not Informative(low=0.5, max_tokens=4)(apart)


def refused(mesh):
    group = trajectory(0, 1.0, [(2, 0.0, None), (3, 0.0, None)], False)
    group[1].reward = 0.0
    try:
        gather_stats([Group(Prompt(0, PROMPT, "s", "", ""), group)], mesh.ranks, BatchPlan())
    except RuntimeError as error:
        return str(error)


def test_sequences_of_a_trajectory_with_two_rewards_are_refused(cluster):
    assert "the sequences of a trajectory need the same reward and end" in cluster.run(refused, "megatron:d1")[0]
