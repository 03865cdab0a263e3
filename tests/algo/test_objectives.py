"""Every formula against numbers written out by hand, and every objective against the slow loops of tests/support/loops.py."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass, replace
from typing import Annotated

import pytest
import torch

from fivefold.algo import methods
from fivefold.algo.advantages import ADVANTAGES, NORMALIZED, NORMALIZED_BY_MEAN, AdvantageInputs, make_advantage
from fivefold.algo.aggregate import AGGREGATES
from fivefold.algo.correction import CORRECTIONS as CORRECTIONS_BY_NAME
from fivefold.algo.correction import DIVERGENCES, SECOND_MOMENT, Correction, beyond_second_moment, interpolation, ratio_at
from fivefold.algo.credit import GAE, DiscountedReturn, UniformCredit, before, whiten
from fivefold.algo.importance_sampling import sequence, sequence_token
from fivefold.algo.methods import check_method
from fivefold.algo.objective import Objective, make_objective
from fivefold.algo.reward_shaping import overlong_penalty, repetition
from fivefold.algo.segments import Segments
from fivefold.algo.surrogate import Surrogate
from fivefold.algo.surrogates import SURROGATES, make_surrogate
from fivefold.algo.terms import kl
from fivefold.algo.values import ValueLoss
from fivefold.columns import Column
from fivefold.config.schema import AlgorithmConfig
from fivefold.errors import RunError, UserError
from fivefold.keys.findings import Findings
from fivefold.keys.ranges import OneOf, check_values, within
from fivefold.types import RolloutStats, TokenBatch
from tests.support import loops
from tests.support.objectives import COMBINATIONS, WITHOUT_RATIO, Alone, as_lists


def scores(rewards, groups=None, lengths=None, greedy=None) -> AdvantageInputs:
    rewards = torch.tensor(rewards, dtype=torch.float64)
    groups = torch.zeros(len(rewards), dtype=torch.long) if groups is None else torch.tensor(groups)
    lengths = torch.ones(len(rewards), dtype=torch.long) if lengths is None else torch.tensor(lengths)
    return AdvantageInputs(rewards, groups, lengths, None if greedy is None else torch.tensor(greedy, dtype=torch.float64))


def whole(count: int) -> Segments:
    """One sample of `count` response tokens."""
    return Segments(torch.ones(count, dtype=torch.bool), [count])


# --- advantages ------------------------------------------------------------------------------------------------------


def test_group_advantages_of_the_field_s_test_case():
    advantages = make_advantage("group", "group")(scores([1.0, 0, 0, 1]))
    assert advantages.tolist() == pytest.approx([0.8660, -0.8660, -0.8660, 0.8660], abs=1e-4)


def test_dr_grpo_subtracts_the_mean_only():
    assert make_advantage("group", "none")(scores([1.0, 0, 0, 1])).tolist() == [0.5, -0.5, -0.5, 0.5]


def test_a_group_of_one_and_a_group_of_equals_give_zero():
    for kind in ("group", "leave_one_out", "pass_at_k"):
        for normalize in ("none", "group"):
            advantage = make_advantage(kind, normalize)
            assert advantage(scores([5.0])).tolist() == [0.0]
            assert advantage(scores([2.0, 2.0, 7.0], [0, 0, 1])).tolist() == [0.0, 0.0, 0.0]


def test_leave_one_out_compares_with_the_mean_of_the_others():
    assert make_advantage("leave_one_out", "none")(scores([3.0, 0, 0])).tolist() == pytest.approx([3.0, -1.5, -1.5])


def test_opo_s_baseline_is_weighted_by_length():
    advantages = make_advantage("length_weighted", "none")(scores([1.0, 0.0, 0.5], [0, 0, 1], [3, 1, 7]))
    assert advantages.tolist() == pytest.approx([0.25, -0.75, 0.0])


def test_gpg_scales_for_groups_that_tell_nothing():
    advantages = make_advantage("group_scaled", "none")(scores([1.0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 2, 2]))
    assert advantages.tolist() == pytest.approx([0.5 * 3, -0.5 * 3, 0, 0, 0, 0])
    assert make_advantage("group_scaled", "none")(scores([1.0] * 4)).tolist() == [0.0] * 4
    # Three times 0.1 is not three equal parts of 0.3 in floating point, but it tells nothing either.
    advantages = make_advantage("group_scaled", "none")(scores([0.1, 0.1, 0.1, 1.0, 0.0], [0, 0, 0, 1, 1]))
    assert advantages.tolist() == pytest.approx([0, 0, 0, 0.5 * 5 / 2, -0.5 * 5 / 2])


def test_pass_at_k_rewards_the_best_by_its_lead():
    advantages = make_advantage("pass_at_k", "none")(scores([0.2, 1.0, 0.7, 0.5, 0.5], [0, 0, 0, 1, 1]))
    assert advantages.tolist() == pytest.approx([0, 0.3, 0, 0, 0])


def test_a_baseline_below_the_mean_makes_good_responses_weigh_more():
    """AsymRE on rewards 1, 0, 0 and a shift of -0.1: the baseline is 1/3 - 0.1."""
    advantages = make_advantage("group", "none", -0.1)(scores([1.0, 0, 0, 5.0], [0, 0, 0, 1]))
    assert advantages.tolist() == pytest.approx([2 / 3 + 0.1, -1 / 3 + 0.1, -1 / 3 + 0.1, 0.0])


@pytest.mark.parametrize("normalize", ["group", "batch", "mean"])
def test_an_advantage_is_divided_only_where_there_is_a_deviation(normalize):
    """A shift of -0.1 with rewards 1, 0, 0 and four of 0: over the deviation of the step, or none in the second group."""
    rewards = [1.0, 0, 0, 0, 0, 0, 0]
    advantages = make_advantage("group", normalize, -0.1)(scores(rewards, [0, 0, 0, 1, 1, 1, 1]))
    first = {"group": 3**-0.5, "batch": statistics.stdev(rewards), "mean": 1 / 3}[normalize]
    second = first if normalize == "batch" else 1.0
    expected = [(2 / 3 + 0.1) / first, *[(-1 / 3 + 0.1) / first] * 2, *[0.1 / second] * 4]
    assert advantages.tolist() == pytest.approx(expected, rel=1e-5)
    # However the mean of equal rewards is rounded.
    alike = scores([0.0 if normalize == "mean" else 0.1] * 3)
    assert make_advantage("group", normalize, -0.1)(alike).tolist() == pytest.approx([0.1] * 3)


def test_the_log_mean_exp_baseline_lies_between_the_mean_and_the_best():
    """τ log((e^(1/τ) + 1) / 2): 0.6201 at τ = 1; the mean for a large τ, the best for a small one, and no overflow."""
    for tau, baseline in ((1.0, 0.62011), (1e4, 0.5), (1e-3, 1 - 1e-3 * math.log(2))):
        advantages = make_advantage("log_mean_exp", "none", baseline_temperature=tau)(scores([1.0, 0.0]))
        assert advantages.tolist() == pytest.approx([1 - baseline, -baseline], abs=1e-4)


def test_the_log_mean_exp_of_the_step_is_that_of_all_its_groups():
    """τ log mean e^(r / τ) of 1, 0, 1 and 1 with τ = 1/2."""
    baseline = 0.5 * math.log((3 * math.exp(2) + 1) / 4)
    advantages = make_advantage("step_log_mean_exp", "none", baseline_temperature=0.5)(scores([1.0, 0, 1, 1], [0, 0, 1, 2]))
    assert advantages.tolist() == pytest.approx([1 - baseline, -baseline, 1 - baseline, 1 - baseline], rel=1e-6)


def test_the_mean_of_the_step_is_that_of_all_its_groups():
    """1, 0, 1 and 2 less their mean 1; over the deviation of the step √(2/3)."""
    rewards = scores([1.0, 0, 1, 2], [0, 0, 1, 1])
    assert make_advantage("step_mean", "none")(rewards).tolist() == pytest.approx([0, -1, 0, 1])
    assert make_advantage("step_mean", "batch")(rewards).tolist() == pytest.approx([0, -1.224743, 0, 1.224743], rel=1e-5)
    assert make_advantage("step_mean", "batch")(scores([2.0, 2.0], [0, 1])).tolist() == [0.0, 0.0]


def test_sppo_is_the_mean_square_of_what_a_response_is_from_its_reward():
    """Two responses of 2 and 1 tokens: log-ratios of 0.3 and -0.2, advantages 0.5 and -1 with η = 2."""
    mask = torch.tensor([False, True, True, False, True])
    batch = TokenBatch(torch.zeros(5, dtype=torch.long), mask, [3, 2], update_tokens=3)
    batch[Column.OLD_LOGPROBS] = torch.tensor([0.0, -1.0, -2.0, 0.0, -1.0])
    objective = make_objective("sppo", eta=2.0)
    batch[Column.ADVANTAGES] = torch.tensor([0.0, 0.5, 0.5, 0.0, -1.0])
    batch[Column.LOSS_WEIGHTS] = batch.expand_to_tokens(objective.loss_weights(torch.tensor([2, 1]), 8))
    now_T = torch.tensor([0.0, -0.9, -1.8, 0.0, -1.2], requires_grad=True)
    loss = objective.loss(now_T, torch.zeros(5), batch).loss
    assert float(loss.detach()) == pytest.approx(((0.3 - 1.0) ** 2 + (-0.2 + 2.0) ** 2) / 2, rel=1e-6)
    loss.backward()
    assert now_T.grad.tolist() == pytest.approx([0.0, 0.3 - 1.0, 0.3 - 1.0, 0.0, -0.2 + 2.0], rel=1e-5)
    assert not objective.gradient.vanishes, "without an advantage a response is pulled back to the old policy"


def test_max_rl_divides_by_the_mean_of_the_group():
    advantages = make_advantage("group", "mean")(scores([1.0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1]))
    assert advantages.tolist() == pytest.approx([3, -1, -1, -1, 0, 0], rel=1e-5)


def test_verl_s_gpg_scales_by_the_rewards_that_are_not_zero():
    """Of six rewards two are not 0: (1 - 1/2) 6/2 where ours counts the four of groups with variance."""
    advantages = make_advantage("nonzero_scaled", "none")(scores([1.0, 0, 1, 0, 0, 0], [0, 0, 1, 1, 2, 2]))
    assert advantages.tolist() == pytest.approx([1.5, -1.5, 1.5, -1.5, 0, 0])
    assert make_advantage("nonzero_scaled", "none")(scores([0.0, 0.0])).tolist() == [0.0, 0.0]


def test_remax_compares_with_the_greedy_response():
    assert make_advantage("greedy_baseline", "none")(scores([1.0, 0.0], greedy=[0.25, 0.25])).tolist() == [0.75, -0.25]


@pytest.mark.parametrize(
    ("kind", "normalize"),
    [
        (kind, normalize)
        for kind in sorted(ADVANTAGES)
        for normalize in (["none", "group", "batch"] if kind in NORMALIZED else ["none"])
        + (["mean"] if kind in NORMALIZED_BY_MEAN else [])
    ],
)
def test_every_advantage_equals_its_loop(kind, normalize):
    draw = random.Random(4)
    groups = [0, 0, 0, 1, 1, 1, 1, 2, 2, 3]
    rewards = [round(draw.random() * 4, 2) for _ in groups]
    rewards[7] = rewards[8] = 0.5
    lengths = [draw.randrange(1, 30) for _ in groups]
    greedy = [draw.random() for _ in groups]
    advantages = make_advantage(kind, normalize, -0.3, 0.4)(scores(rewards, groups, lengths, greedy))
    assert advantages.tolist() == pytest.approx(
        loops.advantages(kind, rewards, groups, lengths, normalize, greedy, -0.3, 0.4), rel=1e-5, abs=1e-7
    )


# --- credit ----------------------------------------------------------------------------------------------------------

MASK = torch.tensor([0, 0, 1, 1, 1, 0, 1, 0, 0, 0, 1, 1], dtype=torch.bool)
LENGTHS = [5, 2, 5]
"""Responses of 3, 1 and 2 tokens after prompts of 2, 1 and 3."""


def test_gae_by_hand():
    """γ = 0.5, λ = 0.5, values 1, 2, reward 3 at the end: δ = 0.5·2 - 1 = 0 and 3 - 2 = 1, so A = 0.25, 1 and R = 1.25, 3."""
    values = torch.tensor([1.0, 2.0, 9.0])
    samples = Segments(torch.tensor([False, True, True]), [3])
    done = torch.tensor([True])
    advantages, returns = GAE(0.5, 0.5)(torch.tensor([3.0]), torch.zeros(3), values, done, samples)
    assert advantages.tolist() == pytest.approx([0, 0.25, 1.0])
    assert returns.tolist() == pytest.approx([0, 1.25, 3.0])


def test_a_truncated_response_is_bootstrapped_only_where_that_is_chosen():
    """The same with 9 after the last token: δ_2 = 3 + 0.5·9 - 2 = 5.5."""
    values = torch.tensor([1.0, 2.0, 9.0])
    samples = Segments(torch.tensor([False, True, True]), [3])
    inputs = torch.tensor([3.0]), torch.zeros(3), values, torch.tensor([False]), samples
    advantages, returns = GAE(0.5, 0.5, bootstrap_truncated=True)(*inputs)
    assert advantages.tolist() == pytest.approx([0, 0.25 * 5.5, 5.5])
    assert returns.tolist() == pytest.approx([0, 1 + 0.25 * 5.5, 7.5])
    advantages, returns = GAE(0.5, 0.5)(*inputs)
    assert advantages.tolist() == pytest.approx([0, 0.25, 1.0]) and returns.tolist() == pytest.approx([0, 1.25, 3.0])


@pytest.mark.parametrize(
    ("chosen", "expected"), [({}, [-0.3, -0.4, -0.5, -0.6]), ({"bootstrap_truncated": True}, [0.4, 0.3, 0.2, 0.1])]
)
def test_ppo_ends_a_truncated_response_with_0_as_verl_does_and_areal_does_not(chosen, expected):
    values = torch.tensor([0.3, 0.4, 0.5, 0.6, 0.7])
    samples = Segments(torch.tensor([False, True, True, True, True]), [5])
    credit = make_objective("ppo", **chosen).advantage.assignment
    advantages, _ = credit(torch.tensor([0.0]), torch.zeros(5), values, torch.tensor([False]), samples)
    assert advantages.tolist() == pytest.approx([0, *expected])


@pytest.mark.parametrize("kind", ["gae", "bootstrapped", "discounted", "response"])
def test_credit_equals_its_loop(kind):
    generator = torch.Generator().manual_seed(1)
    values, penalties = torch.randn(2, 12, generator=generator)
    penalties = penalties * MASK
    earned, finished = torch.tensor([1.0, -2.0, 0.5]), torch.tensor([True, False, False])
    bootstrapped = GAE(0.9, 0.8, bootstrap_truncated=True)
    credit = {
        "gae": GAE(0.9, 0.8),
        "bootstrapped": bootstrapped,
        "discounted": DiscountedReturn(0.9),
        "response": UniformCredit(),
    }[kind]
    advantages, returns = credit(earned, penalties, values, finished, Segments(MASK, LENGTHS))
    assert not advantages[~MASK].any() and not returns[~MASK].any()
    start = 0
    for sample, length in enumerate(LENGTHS):
        tokens = [t for t in range(start, start + length) if MASK[t]]
        rewards = [-float(penalties[t]) for t in tokens]
        rewards[-1] += float(earned[sample])
        if kind == "response":
            expected = [float(earned[sample])] * len(tokens)
        elif kind == "discounted":
            expected, _ = loops.gae(rewards, [0.0] * len(tokens), 0.0, 0.9, 1.0)
        else:
            end = 0.0 if finished[sample] or kind == "gae" else float(values[tokens[-1]])
            expected, targets = loops.gae(rewards, [float(values[t - 1]) for t in tokens], end, 0.9, 0.8)
            assert returns[tokens].tolist() == pytest.approx(targets, rel=1e-5, abs=1e-6)
        assert advantages[tokens].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)
        start += length


def test_gae_goes_over_the_turns_of_others():
    """Tokens of the user between two turns take no part: the value before the next own token follows."""
    mask = torch.tensor([False, True, False, False, True])
    values = torch.tensor([0.5, 7.0, 8.0, 0.25, 3.0])
    advantages, _ = GAE(1.0, 1.0)(torch.tensor([1.0]), torch.zeros(5), values, torch.tensor([True]), Segments(mask, [5]))
    assert advantages.tolist() == pytest.approx([0, 0.5, 0, 0, 0.75])


def test_whitening_looks_at_the_tokens_of_all_replicas():
    values, mask = torch.tensor([1.0, 5.0, 2.0, 9.0, 4.0]), torch.tensor([True, True, False, True, True])
    chosen = [1.0, 5.0, 9.0, 4.0]
    mean, std = statistics.fmean(chosen), math.sqrt(statistics.variance(chosen) + 1e-8)
    expected = [(x - mean) / std if m else 0.0 for x, m in zip(values.tolist(), mask.tolist(), strict=True)]
    assert whiten(values, mask, lambda sums: sums).tolist() == pytest.approx(expected, rel=1e-6)
    # Two replicas that each hold a part find the same, from each other's sums.
    parts = [slice(0, 2), slice(2, 5)]
    sums_of_calls = [[torch.tensor([2.0, 6.0]).double(), torch.tensor([2.0, 13.0]).double()], []]

    def total_for(part):
        step = iter([sum(sums_of_calls[0]), torch.tensor([sum((x - mean) ** 2 for x in chosen)]).double()])
        return lambda sums: next(step)

    for part in parts:
        assert whiten(values[part], mask[part], total_for(part)).tolist() == pytest.approx(expected[part], rel=1e-6)


def test_whitening_by_domain_looks_at_each_domain_for_itself():
    """Two domains of [1, 5, 9] and [100, 104], one of a single token, and one without any on this replica."""
    values, mask = torch.tensor([1.0, 100.0, 5.0, 7.0, 104.0, 9.0, 3.0]), torch.tensor([True] * 3 + [False] + [True] * 3)
    part = torch.tensor([0, 2, 0, 0, 2, 0, 3])
    whitened = whiten(values, mask, lambda sums: sums, part, 4).tolist()
    assert whitened == pytest.approx([-1, -(0.5**0.5), 0, 0, 0.5**0.5, 1, 0], rel=1e-6)
    # Two replicas, each with tokens of both domains: the sums of each call are those of the two.
    halves, calls = [slice(0, 3), slice(3, 7)], [[], []]
    for place, half in enumerate(halves):
        whiten(
            values[half],
            mask[half],
            lambda sums, sums_of_call=calls[place]: sums_of_call.append(sums) or sums,
            part[half],
            4,
        )
    first = calls[0][0] + calls[1][0]
    mean = first[4:] / first[:4].clamp(min=1)
    second = torch.zeros(4, dtype=torch.float64).index_add(
        0, part[mask], (values.double()[mask] - mean[part[mask]]).square()
    )
    for half in halves:
        steps = iter([first, second])
        assert (
            whiten(values[half], mask[half], lambda sums, told=steps: next(told), part[half], 4).tolist() == whitened[half]
        )


class Half:
    """One of two replicas: it gets its own sums and those of the other."""

    def __init__(self, others=0.0):
        self.own, self._others = None, others

    def all_reduce_sum(self, sums):
        self.own = sums
        return sums + self._others


def batch_of_distributions(temperature: float, groups: list[int], lengths: list[int], vocab: int = 7):
    """(logits of each response token, a batch whose log-probs are those of the tokens that were drawn from them)."""
    torch.manual_seed(3)
    logits, tokens, pieces = [], [], {"old": [], "half": [], "ref": [], "engine": [], "mask": []}
    for length in lengths:
        logits_of_one = 3 * torch.randn(length, vocab, dtype=torch.float64)
        drawn = torch.randint(vocab, (length, 1))
        scaled = {
            "old": logits_of_one / temperature,
            "half": logits_of_one / (temperature / 2),
            "ref": logits_of_one * 0.9,
            "engine": logits_of_one * 1.1,
        }
        for name, values in scaled.items():
            # A prompt of two tokens is before each response.
            pieces[name] += [0.0, 0.0, *values.log_softmax(-1).gather(1, drawn)[:, 0].tolist()]
        pieces["mask"] += [False, False] + [True] * length
        logits.append(logits_of_one)
        tokens.append(drawn[:, 0].tolist())
    batch = TokenBatch(
        torch.zeros(len(pieces["mask"]), dtype=torch.long),
        torch.tensor(pieces["mask"]),
        [length + 2 for length in lengths],
        temperature=temperature,
        columns={
            Column.OLD_LOGPROBS: torch.tensor(pieces["old"]),
            Column.HALF_TEMPERATURE_LOGPROBS: torch.tensor(pieces["half"]),
            Column.REF_LOGPROBS: torch.tensor(pieces["ref"]),
            Column.ROLLOUT_LOGPROBS: torch.tensor(pieces["engine"]),
        },
    )
    return logits, tokens, batch


@pytest.mark.parametrize("corrected", [False, True])
def test_the_optimal_token_baseline_weighs_returns_by_squared_scores(corrected):
    """2602.07078, token by token from whole distributions: groups of 3, 2 and 1, rewards with a penalty of each token."""
    groups, lengths, rewards, temperature = [0, 1, 0, 2, 1, 0], [4, 2, 6, 3, 2, 5], [1.0, 0.0, 0.0, 1.0, 2.0, 0.5], 0.7
    logits, tokens, batch = batch_of_distributions(temperature, groups, lengths)
    choices = {"kl": methods.KL(estimator="k1", coef=0.1, place="reward")}
    if corrected:
        choices["rollout_correction"] = methods.Correction(weight="token", high=1.1)
    objective = make_objective("otb", **choices)
    assert objective.needs(1) == {Column.OLD_LOGPROBS, Column.HALF_TEMPERATURE_LOGPROBS, Column.REF_LOGPROBS}
    finished = torch.ones(6, dtype=torch.bool)
    inputs = scores(rewards, groups, lengths)
    advantages_T, _ = objective.advantages(batch, inputs, finished, Alone())

    returns, weights = [], []
    for n, (of_response, drawn) in enumerate(zip(logits, tokens, strict=True)):
        ref = (of_response * 0.9).log_softmax(-1)
        engine = (of_response * 1.1).log_softmax(-1)
        later, energy, of_returns, of_weights = rewards[n], 0.0, [], []
        for t in reversed(range(lengths[n])):
            chances = (of_response[t] / temperature).softmax(-1)
            later -= 0.1 * float(chances[drawn[t]].log() - ref[t, drawn[t]])
            of_returns.insert(0, later)
        for t in range(lengths[n]):
            chances = (of_response[t] / temperature).softmax(-1)
            score = -chances
            score[drawn[t]] += 1
            weight = min(float(chances[drawn[t]] / engine[t, drawn[t]].exp()), 1.1) if corrected else 1.0
            energy += float((score**2).sum()) * weight**2
            of_weights.append(energy)
        returns.append(of_returns)
        weights.append(of_weights)
    expected = []
    for n, group in enumerate(groups):
        expected += [0.0, 0.0]
        for t in range(lengths[n]):
            others = [m for m in range(6) if groups[m] == group and lengths[m] > t]
            total = sum(weights[m][t] for m in others)
            baseline = sum(weights[m][t] * returns[m][t] for m in others) / total if len(others) > 1 else 0.0
            expected.append(returns[n][t] - baseline)
    assert advantages_T.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)

    # Two replicas, each with a part of the groups, find the same from their sums.
    halves = [[0, 1, 3], [2, 4, 5]]
    alone = [Half(), Half()]
    for half, replica in zip(halves, alone, strict=True):
        objective.advantages(batch.select(half), inputs, finished, replica)
    for half, other in zip(halves, reversed(alone), strict=True):
        together_T, _ = objective.advantages(batch.select(half), inputs, finished, Half(other.own))
        assert together_T.tolist() == pytest.approx(advantages_T[batch.token_index(half)].tolist(), rel=1e-6, abs=1e-9)


# --- ratios and surrogates -------------------------------------------------------------------------------------------


def test_ppo_clips_only_where_clipping_lowers_the_objective():
    now = torch.tensor([1.5, 1.5, 0.5, 0.5]).log()
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    assert make_surrogate("ppo_clip")(now, now, advantages, whole(4)).tolist() == pytest.approx([1.2, -1.5, 0.5, -0.8])
    assert make_surrogate("ppo_clip", clip_high=0.28)(now, now, advantages, whole(4)).tolist() == pytest.approx(
        [1.28, -1.5, 0.5, -0.8]
    )


def test_a_clipped_token_has_no_gradient_and_others_have_ratio_times_advantage():
    now = torch.tensor([1.5, 1.1]).log().requires_grad_()
    make_surrogate("ppo_clip")(now, now, torch.tensor([2.0, 2.0]), whole(2)).sum().backward()
    assert now.grad.tolist() == pytest.approx([0.0, 2.2])


def test_dual_clip_bounds_what_a_bad_token_may_cost():
    now = torch.tensor([5.0, 2.0, 5.0]).log()
    advantages = torch.tensor([-1.0, -1.0, 1.0])
    assert make_surrogate("ppo_clip", dual_clip=3.0)(now, now, advantages, whole(3)).tolist() == pytest.approx(
        [-3.0, -2.0, 1.2]
    )


def test_cispo_weights_the_log_likelihood_and_no_token_loses_its_gradient():
    now = torch.tensor([3.0, 1.1, 0.1]).log().requires_grad_()
    value = make_surrogate("cispo")(now - torch.zeros(3), now, torch.tensor([2.0, 2.0, -1.0]), whole(3))
    assert value.tolist() == pytest.approx([1.2 * 2 * math.log(3), 1.1 * 2 * math.log(1.1), -0.1 * math.log(0.1)], rel=1e-5)
    value.sum().backward()
    assert now.grad.tolist() == pytest.approx([2.4, 2.2, -0.1], rel=1e-5)


@pytest.mark.parametrize(("advantage", "tau"), [(1.5, 1.0), (-0.5, 1.05)])
def test_sapo_s_gate_has_the_policy_gradient_at_ratio_one_and_fades_away_from_it(advantage, tau):
    for ratio in (1.0, 1.4, 0.5, 6.0):
        now = torch.tensor([ratio]).log().requires_grad_()
        value = make_surrogate("sapo")(now, now, torch.tensor([advantage]), whole(1))
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        assert value.item() == pytest.approx(4 / tau * gate * advantage, rel=1e-5)
        value.sum().backward()
        # d/d log pi = 4 sigma (1 - sigma) rho A, which is A at rho = 1.
        assert now.grad.item() == pytest.approx(4 * gate * (1 - gate) * ratio * advantage, rel=1e-4)


def test_gmpo_is_the_advantage_times_the_geometric_mean_of_clipped_ratios():
    """Log-ratios 1, 0.2 and -3 with clip 0.4: for A = 2 the first is clipped, exp((0.4 + 0.2 - 3) / 3); for A = -2 the last."""
    d = torch.tensor([1.0, 0.2, -3.0], requires_grad=True)
    up = make_surrogate("gmpo")(d, d, torch.full((3,), 2.0), whole(3))
    assert up.tolist() == pytest.approx([2 * math.exp(-2.4 / 3)] * 3, rel=1e-6)
    down = make_surrogate("gmpo")(d, d, torch.full((3,), -2.0), whole(3))
    assert down.tolist() == pytest.approx([-2 * math.exp((1 + 0.2 - 0.4) / 3)] * 3, rel=1e-6)
    up.mean().backward()
    assert d.grad.tolist() == pytest.approx([0.0, 2 * math.exp(-0.8) / 3, 2 * math.exp(-0.8) / 3], rel=1e-5)


def test_the_ratio_of_a_sequence_is_the_geometric_mean_of_its_tokens():
    mask = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1, 1, 1], dtype=torch.bool)
    lengths = [3, 2, 5]
    old = -torch.arange(10.0).flip(0) / 5
    for form in (sequence, sequence_token):
        now = (-torch.arange(10.0) / 7).requires_grad_()
        log_ratio = form(now, old, Segments(mask, lengths))
        difference = (now.detach() - old).tolist()
        start = 0
        for length in lengths:
            tokens = [t for t in range(start, start + length) if mask[t]]
            mean = sum(difference[t] for t in tokens) / len(tokens)
            for t in tokens:
                assert float(log_ratio[t].detach()) == pytest.approx(mean, rel=1e-5)
            start += length
        # GSPO's gradient goes to all tokens of the response alike, GSPO-token's to the token itself.
        (grad,) = torch.autograd.grad(log_ratio[8], now)
        expected = [0.0] * 7 + ([1 / 3] * 3 if form is sequence else [0.0, 1.0, 0.0])
        assert grad.tolist() == pytest.approx(expected, abs=1e-7)


def test_gspo_and_gspo_token_have_equal_gradients_where_a_response_has_one_advantage():
    gradients = []
    for ratio in ("sequence", "sequence-token"):
        batch = make_batch()
        now = (-torch.linspace(0.1, 0.6, 15)).requires_grad_()
        make_objective("gspo", importance_sampling_level=ratio, clip_low=0.9, clip_high=9.0).loss(
            now, torch.zeros(15), batch
        ).loss.backward()
        gradients.append(now.grad)
    assert torch.allclose(*gradients, atol=1e-7) and gradients[0].abs().max() > 0.01


def test_log_likelihood_is_cross_entropy():
    assert make_surrogate("log_likelihood")(
        torch.zeros(2), torch.tensor([-1.0, -2.0]), torch.ones(2), whole(2)
    ).tolist() == [-1.0, -2.0]


def test_topr_tapers_bad_responses_only():
    """Ratios 3, 3 and 0.5: a good token has weight 1, a bad one at most 1; the weight has no gradient."""
    now = torch.tensor([3.0, 3.0, 0.5]).log().requires_grad_()
    value = make_surrogate("topr")(now - torch.zeros(3), now, torch.tensor([2.0, -2.0, -2.0]), whole(3))
    assert value.tolist() == pytest.approx([2 * math.log(3), -2 * math.log(3), -1.0 * math.log(0.5)], rel=1e-5)
    value.sum().backward()
    assert now.grad.tolist() == pytest.approx([2.0, -2.0, -1.0], rel=1e-5)


def test_opmd_divides_reinforce_by_one_plus_tau():
    now = torch.tensor([-1.0, -2.0])
    assert make_surrogate("opmd", tau=3.0)(now, now, torch.tensor([2.0, -1.0]), whole(2)).tolist() == [-0.5, 0.5]


@pytest.mark.parametrize(
    ("mode", "good", "bad"),
    [
        ("none", [1, 1, 1, 1, 1], [1, 1, 1, 1, 1]),
        ("one_sided", [1, 1, 1, 0, 0], [0, 0, 1, 1, 1]),
        ("two_sided", [0, 0, 1, 0, 0], [0, 0, 1, 0, 0]),
        ("ring", [1, 0, 1, 0, 0], [0, 0, 1, 0, 1]),
    ],
)
def test_rec_leaves_out_tokens_by_their_ratio(mode, good, bad):
    """Ratios 0.2, 0.6, 1, 1.5, 4 with bounds 0.8 and 1.2 and a ring of 0.4 and 3: what stays has the gradient A."""
    for advantage, expected in ((2.0, good), (-2.0, bad)):
        now = torch.tensor([0.2, 0.6, 1.0, 1.5, 4.0]).log().requires_grad_()
        value = make_surrogate("rec", clip_mode=mode)(now - torch.zeros(5), now, torch.full((5,), advantage), whole(5))
        value.sum().backward()
        assert now.grad.tolist() == pytest.approx([advantage * stays for stays in expected], abs=1e-6)


def test_rec_s_weights_and_additions_by_hand():
    """Ratio 1.5, A = 2, log π = -1: weights 1.5 and e^(2/4); the additions 0.1 log π and -0.3 (log 1.5)²."""
    d, now, advantages = torch.tensor([1.5]).log(), torch.tensor([-1.0]), torch.tensor([2.0])
    square = math.log(1.5) ** 2
    for choices, expected in (
        ({}, -2.0),
        ({"token_weight": "ratio"}, -3.0),
        ({"token_weight": "advantage", "weight_temperature": 4.0}, -2 * math.exp(0.5)),
        ({"likelihood_coef": 0.1}, -2.1),
        ({"proximal_coef": 0.3}, -2.0 - 0.3 * square),
        # What is left out keeps the additions.
        ({"clip_mode": "two_sided", "likelihood_coef": 0.1, "proximal_coef": 0.3}, -0.1 - 0.3 * square),
    ):
        gains = make_surrogate("rec", **{"clip_mode": "none", **choices})(d, now, advantages, whole(1))
        assert gains.tolist() == pytest.approx([expected], rel=1e-5), choices


def test_sppo_and_rollout_is_are_rec_with_other_bounds():
    """sPPO (Trinity): A log ρ within [1/(1 + ε), 1 + ε]; rollout_is (SkyRL): sg(ρ) A log π within [1 - ε, 1 + ε], else 0."""
    now = torch.tensor([0.65, 0.8, 1.2, 1.4]).log().requires_grad_()
    advantages, e = torch.tensor([1.0, -2.0, 1.0, -2.0]), 0.3
    ours = make_surrogate("rec", clip_mode="two_sided", clip_low=e / (1 + e), clip_high=e)
    ours(now, now, advantages, whole(4)).sum().backward()
    x = now.detach().clone().requires_grad_()
    rho = x.exp().detach()
    (advantages * x * ((rho >= 1 / (1 + e)) & (rho <= 1 + e))).sum().backward()
    assert torch.allclose(now.grad, x.grad) and x.grad.tolist() == [0.0, -2.0, 1.0, 0.0]
    weighted = make_surrogate("rec", clip_mode="two_sided", clip_low=e, clip_high=e, token_weight="ratio")
    expected = torch.where((rho > 1 - e) & (rho < 1 + e), rho, 0.0) * advantages * now.detach()
    assert torch.allclose(weighted(now, now, advantages, whole(4)).detach(), expected)


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_dppo_looks_at_probabilities_and_not_at_ratios(divergence):
    """A rare token whose probability went from 1e-4 to 1e-3 stays; one from 0.3 to 0.7 goes, unless it moves back."""
    now = torch.tensor([1e-3, 0.7, 0.7, 0.2, 0.2]).log().requires_grad_()
    old = torch.tensor([1e-4, 0.3, 0.3, 0.7, 0.7]).log()
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0])
    value = make_surrogate("dppo", divergence=divergence, ratio_cap=2.0)(now - old, now, advantages, whole(5))
    value.sum().backward()
    assert now.grad.tolist() == pytest.approx([2.0, 0.0, -2.0, 0.0, 2 / 7], rel=1e-4)


def test_cpgd_clips_log_probs_and_pulls_back_to_the_old_policy():
    """Ratios 1.1, 1.5, 0.9, 0.5 and 4 of A = 2, 2, -2, -2, -2: beyond the bound of their side nothing is left of A, and the
    drift takes off 0.1 min(ρ - 1, 2)."""
    ratios = torch.tensor([1.1, 1.5, 0.9, 0.5, 4.0])
    now = torch.full((5,), -3.0).requires_grad_()
    old = now.detach() - ratios.log()
    advantages = torch.tensor([2.0, 2.0, -2.0, -2.0, -2.0])
    value = make_surrogate("cpgd")(now - old, now, advantages, whole(5))
    bounded = [2 * math.log(1.1), 2 * math.log(1.2), -2 * math.log(0.9), -2 * math.log(0.8), -2 * math.log(4)]
    assert value.tolist() == pytest.approx(bounded, rel=1e-5)
    value.sum().backward()
    assert now.grad.tolist() == pytest.approx([2.0, 0.0, -2.0, 0.0, -2.0])
    now.grad = None
    make_surrogate("cpgd", drift_coef=0.1)(now - old, now, advantages, whole(5)).sum().backward()
    assert now.grad.tolist() == pytest.approx([1.99, -0.05, -1.99, 0.05, -2.2], rel=1e-4)


def test_covariance_chooses_tokens_over_the_whole_update():
    """Covariances 3.5·1.5, ...: kl-cov takes the largest, clip-cov random ones of those between its bounds."""
    logprobs = torch.tensor([-4.0, -0.1, -0.2, -3.0, -0.5, -0.4])
    advantages = torch.tensor([-2.0, 1.0, 1.0, -1.0, 0.5, 0.5])
    mean_l, mean_a = statistics.fmean(logprobs.tolist()), statistics.fmean(advantages.tolist())
    cov = [(x - mean_l) * (a - mean_a) for x, a in zip(logprobs.tolist(), advantages.tolist(), strict=True)]
    order = sorted(range(6), key=lambda i: -cov[i])
    selected = make_surrogate("kl_cov", cov_fraction=0.34).select_tokens(logprobs, logprobs, advantages, torch.rand(6))
    assert sorted(selected.nonzero()[:, 0].tolist()) == sorted(order[:2])
    uniform = torch.tensor([0.9, 0.5, 0.1, 0.2, 0.0, 0.3])
    inside = [i for i in range(6) if 1.0 < cov[i] < 5.0]
    assert len(inside) >= 3, cov
    clip = make_surrogate("clip_cov", cov_fraction=0.34).select_tokens(logprobs, logprobs, advantages, uniform)
    assert sorted(clip.nonzero()[:, 0].tolist()) == sorted(sorted(inside, key=lambda i: float(uniform[i]))[:2])
    # A token that PPO's clip already leaves without a gradient is not taken.
    old = logprobs.clone()
    old[inside] -= torch.where(advantages[inside] > 0, 1.0, -1.0)
    assert not make_surrogate("clip_cov", cov_fraction=0.34).select_tokens(logprobs, old, advantages, uniform).any()


def test_clip_cov_leaves_tokens_out_and_kl_cov_pulls_them_back():
    now = torch.tensor([1.1, 1.1]).log().requires_grad_()
    samples = Segments(torch.ones(2, dtype=torch.bool), [2], torch.tensor([True, False]))
    assert make_surrogate("clip_cov")(now, now, torch.ones(2), samples).tolist() == pytest.approx([0.0, 1.1])
    value = make_surrogate("kl_cov", cov_kl_coef=0.5)(now, now, torch.ones(2), samples)
    assert value.tolist() == pytest.approx([1.1 - 0.5 * math.log(1.1), 1.1])


def test_dpo_by_hand():
    """Log-ratios to the reference 0.5 + 0.1 and -0.2: the margin is 0.1·0.8, the loss -log σ(0.08) = 0.6540."""
    samples = Segments(torch.ones(3, dtype=torch.bool), [2, 1])
    value = make_surrogate("dpo")(torch.tensor([0.5, 0.1, -0.2]), torch.zeros(3), torch.ones(3), samples)
    assert value.tolist() == pytest.approx([-0.65395] * 3, abs=1e-5)
    smooth = make_surrogate("dpo", label_smoothing=0.2)(
        torch.tensor([0.5, 0.1, -0.2]), torch.zeros(3), torch.ones(3), samples
    )
    assert smooth.tolist() == pytest.approx([0.8 * -0.65395 + 0.2 * math.log(1 / (1 + math.exp(0.08)))] * 3, abs=1e-5)


# --- KL --------------------------------------------------------------------------------------------------------------


def test_kl_estimators_of_one_token():
    d = 0.3
    logp, ref = torch.tensor([-1.0]), torch.tensor([-1.0 - d])
    assert kl.k1(logp, ref).item() == pytest.approx(d)
    assert kl.k2(logp, ref).item() == pytest.approx(d * d / 2)
    assert kl.k3(logp, ref).item() == pytest.approx(math.exp(-d) + d - 1)
    assert kl.absolute(ref, logp).item() == pytest.approx(d)


@pytest.mark.parametrize("estimator", sorted(kl.ESTIMATORS))
def test_every_estimator_and_its_gradient_equal_the_loop(estimator):
    for logp, ref in [(-1.0, -0.3), (-0.2, -2.5), (-0.7, -0.7001)]:
        now = torch.tensor([logp], requires_grad=True)
        value = kl.ESTIMATORS[estimator](now, torch.tensor([ref]))
        x = torch.tensor(logp, dtype=torch.float64, requires_grad=True)
        expected = loops.kl(estimator, x, ref)
        (slope,) = torch.autograd.grad(expected, x)
        assert value.item() == pytest.approx(expected.item(), rel=1e-4, abs=1e-7)
        value.sum().backward()
        assert now.grad.item() == pytest.approx(slope.item(), rel=1e-4, abs=1e-6)


def test_k1_and_k3_estimate_the_kl_of_two_distributions_and_k2_has_its_gradient():
    generator = torch.Generator().manual_seed(0)
    logits, other = torch.randn(2, 5, generator=generator)
    logits = logits.requires_grad_()
    p, q = torch.log_softmax(logits, 0), torch.log_softmax(other, 0)
    exact = (p.exp() * (p - q)).sum()
    for estimator in (kl.k1, kl.k3):
        assert (p.exp() * estimator(p, q)).sum().item() == pytest.approx(exact.item(), rel=1e-5)
    (slope,) = torch.autograd.grad(exact, logits, retain_graph=True)
    for name in ("k2", "k1+", "k3+", "abs+"):
        value = (p.exp().detach() * kl.ESTIMATORS[name](p, q)).sum()
        (gradient,) = torch.autograd.grad(value, logits, retain_graph=True)
        assert torch.allclose(gradient, slope, atol=1e-6), name
    # Without the straight-through form k1 has no gradient on average: that is why it exists.
    (nothing,) = torch.autograd.grad((p.exp().detach() * kl.k1(p, q)).sum(), logits)
    assert nothing.abs().max() < 1e-6


def test_the_adaptive_coefficient_moves_towards_the_target():
    """Twice the target is bounded to +20 %: 0.1 · (1 + 0.2 · 256 / 1024) = 0.105; 10 % under it is -10 %."""
    moved, fixed = make_objective("grpo", kl=methods.KL(coef=0.1, target=0.1, horizon=1024)), make_objective("grpo")
    assert moved.kl.adapted(0.1, 0.2, 256) == pytest.approx(0.105)
    assert moved.kl.adapted(0.1, 0.09, 256) == pytest.approx(0.1 * (1 - 0.1 / 4))
    assert fixed.kl.adapted(0.001, 9.0, 256) == 0.001


def test_a_penalty_in_the_reward_comes_before_advantages_are_made():
    """One group of two: with KL sums 2 and 0 and coefficient 0.25 the rewards 1, 1 become 0.5, 1."""
    mask = torch.tensor([False, True, True, False, True])
    batch = TokenBatch(torch.zeros(5, dtype=torch.long), mask, [3, 2])
    batch[Column.OLD_LOGPROBS] = torch.tensor([0.0, -1.0, -1.0, 0.0, -1.0])
    batch[Column.REF_LOGPROBS] = torch.tensor([0.0, -2.0, -2.0, 0.0, -1.0])
    objective = make_objective("dr_grpo", kl=methods.KL(estimator="k1", coef=0.25, place="reward"))
    advantages, _ = objective.advantages(batch, scores([1.0, 1.0]), torch.tensor([True, True]), Alone())
    assert advantages.tolist() == pytest.approx([0, -0.25, -0.25, 0, 0.25])
    # With returns token by token, a token does not pay for what came before it.
    plus = make_objective("reinforce_plus_plus", whiten=False, kl=methods.KL(coef=0.25))
    advantages, _ = plus.advantages(batch, scores([1.0, 1.0]), torch.tensor([True, True]), Alone())
    assert advantages.tolist() == pytest.approx([0, 0.5, 0.75, 0, 1.0])


def test_a_second_kl_penalty_in_the_reward_does_not_change_that_of_the_loss():
    """By hand: advantages are those of KL sums 2 and 0 with 0.25 in the reward, the loss has 0.8 x k2 more."""
    mask = torch.tensor([False, True, True, False, True])
    batch = TokenBatch(torch.zeros(5, dtype=torch.long), mask, [3, 2], update_tokens=3)
    batch[Column.OLD_LOGPROBS] = torch.tensor([0.0, -1.0, -1.0, 0.0, -1.0])
    batch[Column.REF_LOGPROBS] = torch.tensor([0.0, -2.0, -2.0, 0.0, -1.0])
    both = make_objective("dr_grpo", kl=methods.KL(estimator="k2", coef=0.8, reward_coef=0.25))
    advantages, _ = both.advantages(batch, scores([1.0, 1.0]), torch.tensor([True, True]), Alone())
    assert advantages.tolist() == pytest.approx([0, -0.25, -0.25, 0, 0.25])
    batch[Column.ADVANTAGES], batch[Column.LOSS_WEIGHTS] = advantages, mask / 3
    one = make_objective("dr_grpo", kl=methods.KL(estimator="k1", coef=0.25, place="reward"))
    now_T = torch.tensor([0.0, -0.5, -1.0, 0.0, -1.5])
    losses = [float(objective.loss(now_T, torch.zeros(5), batch).loss) for objective in (both, one)]
    k2 = [(now + distance) ** 2 / 2 for now, distance in ((-0.5, 2.0), (-1.0, 2.0), (-1.5, 1.0))]
    assert losses[0] - losses[1] == pytest.approx(0.8 * sum(k2) / 3)
    assert both.needs(1) == {Column.OLD_LOGPROBS, Column.REF_LOGPROBS}


# --- rewards, weights ------------------------------------------------------------------------------------------------


def test_the_overlong_penalty_is_dapo_s_equation_13():
    """L_max 10, cache 4: nothing up to 6, then (6 - length) / 4, -1 at 10."""
    penalties = overlong_penalty(torch.tensor([3, 6, 7, 9, 10]), 10, 4, 1.0)
    assert penalties.tolist() == pytest.approx([0, 0, -0.25, -0.75, -1.0])
    shaped = make_objective("dapo", overlong_buffer=0.4, overlong_penalty=2.0, reward_clip=1.2).shaping(
        torch.tensor([1.0, 1.0, 5.0], dtype=torch.float64), torch.tensor([6, 10, 3]), 10
    )
    assert shaped.tolist() == pytest.approx([1.0, -1.0, 1.2])


def test_rewards_are_penalised_then_shifted_then_scaled_then_bounded():
    """AReaL's reward_bias, reward_scaling and reward_clip: (1 - 0.5) 10, (0 - 0.5) 10; the long one (1 - 1 - 0.5) 10."""
    shaped = {"reward_shift": -0.5, "reward_scale": 10.0, "overlong_buffer": 4, "overlong_penalty": 1.0}
    rewards, lengths = torch.tensor([1.0, 0.0, 1.0, 3.0], dtype=torch.float64), torch.tensor([3, 3, 10, 3])
    shaped_rewards = make_objective("grpo", **shaped).shaping(rewards, lengths, 10)
    assert shaped_rewards.tolist() == pytest.approx([5.0, -5.0, -5.0, 25.0])
    shaped_rewards = make_objective("grpo", **shaped, reward_clip=20.0).shaping(rewards, lengths, 10)
    assert shaped_rewards.tolist() == pytest.approx([5.0, -5.0, -5.0, 20.0])


def test_repetition_is_the_share_of_n_grams_that_were_there_before():
    assert repetition([1, 2, 3, 4, 5, 6]) == 0.0
    assert repetition([7] * 10) == pytest.approx(6 / 7)
    assert repetition([1, 2]) == 0.0


def test_aggregations_against_their_definitions():
    lengths, loss = [2, 3, 0], [[1.0, 2.0], [3.0, 4.0, 5.0], []]

    def weighted(name):
        weights = AGGREGATES[name](torch.tensor(lengths), 8)
        return sum(float(weights[i]) * sum(loss[i]) for i in range(3))

    assert weighted("token-mean") == pytest.approx(15 / 5)
    assert weighted("seq-mean-token-mean") == pytest.approx((1.5 + 4.0 + 0) / 3)
    assert weighted("seq-mean-token-sum") == pytest.approx(15 / 3)
    assert weighted("constant-length") == pytest.approx(15 / 8 / 3)


def test_responses_that_were_cut_off_can_be_left_out_of_loss_and_denominator():
    objective = make_objective("dapo", overlong_filter=True)
    weights = objective.loss_weights(torch.tensor([2, 3, 5]), 8, torch.tensor([True, False, True]))
    assert weights.tolist() == pytest.approx([1 / 7, 0, 1 / 7])


def difficulty_stats(rewards, finished) -> RolloutStats:
    """Three prompts of two responses, of 2 and 4 tokens each."""
    ones = torch.ones(6, dtype=torch.long)
    lengths = torch.tensor([2, 4] * 3)
    return RolloutStats(
        group_N=torch.tensor([0, 0, 1, 1, 2, 2]), rewards_N=torch.tensor(rewards, dtype=torch.float64), response_lengths_N=lengths,
        prompt_lengths_N=ones, lengths_N=lengths + 1, finished_N=torch.tensor(finished), correct_N=ones.bool(), repetition_N=ones.double(),
        version_N=ones, versions_differ=False, rank_N=0 * ones, minibatch_N=0 * ones, owner_N=0 * ones, max_response_tokens=8,
        has_logprobs=True,
    )  # fmt: skip


def test_prompts_that_are_too_easy_or_too_hard_do_not_count_in_the_loss():
    """Means 0, 0.5 and 1 against bounds 0.1 and 0.95; with the overlong filter the second response of the second prompt goes too."""
    stats = difficulty_stats([0, 0, 1, 0, 1, 1], [True, True, True, False, True, True])
    objective = make_objective("dapo", difficulty_low=0.1, difficulty_high=0.95)
    assert objective.kept(stats).tolist() == [False, False, True, True, False, False]
    weights = objective.loss_weights(stats.response_lengths_N, 8, objective.kept(stats))
    assert weights.tolist() == pytest.approx([0, 0, 1 / 6, 1 / 6, 0, 0])
    both = make_objective("dapo", difficulty_low=0.1, difficulty_high=0.95, overlong_filter=True)
    assert both.kept(stats).tolist() == [False, False, True, False, False, False]
    assert make_objective("dapo", difficulty_high=0.95).kept(stats).tolist() == [True] * 4 + [False] * 2
    # By correctness the means are 0.5, 0.5 and 1, whatever the rewards are.
    graded = replace(stats, correct_N=torch.tensor([True, False, True, False, True, True]))
    by = make_objective("dapo", difficulty_low=0.1, difficulty_high=0.95, difficulty_by="correct")
    assert by.kept(graded).tolist() == [True] * 4 + [False] * 2
    # A mean on a bound is out, as in ROLL.
    assert make_objective("dapo", difficulty_low=0.5).kept(stats).tolist() == [False] * 4 + [True] * 2
    assert make_objective("dapo").kept(stats) is None


def test_prompts_whose_responses_are_alike_are_left_out_after_whitening():
    """Rewards 0 0, 1 0 and 1 1 with the overlong penalty: the second response of 8 tokens is worse by 1, so the third prompt stays."""
    stats = difficulty_stats([0, 0, 1, 0, 1, 1], [True] * 6)
    chosen = {"difficulty_low": 0.0, "difficulty_by": "spread"}
    plain = make_objective("dapo", overlong_buffer=0, **chosen)
    assert plain.kept(stats).tolist() == [False, False, True, True, False, False]
    weights = plain.loss_weights(stats.response_lengths_N, 8, plain.kept(stats))
    assert weights.tolist() == pytest.approx([0, 0, 1 / 6, 1 / 6, 0, 0])
    assert make_objective("dapo", overlong_buffer=8, overlong_penalty=1.0, **chosen).kept(stats).tolist() == [True] * 6
    # Advantages are whitened over all tokens, and what is left out still is packed for it.
    whitened = make_objective("ppo", credit="response", **chosen)
    assert whitened.filter.before_whitening.kept(stats, whitened.inputs(stats)) is None
    assert not whitened.skipped(stats).any()
    assert whitened.kept(stats).tolist() == [False, False, True, True, False, False]
    assert plain.skipped(stats).tolist() == [True, True, False, False, True, True]


def test_whitening_looks_at_responses_that_carry_loss_only():
    batch = make_batch()
    inputs = scores([5.0, -3.0, 1.0], [0, 1, 2])
    objective = make_objective("ppo", credit="response", overlong_filter=True)
    advantages, _ = objective.advantages(
        batch, inputs, torch.ones(3, dtype=torch.bool), Alone(), torch.tensor([True, False, True])
    )
    values = [5.0] * 3 + [1.0] * 3
    mean, std = statistics.fmean(values), math.sqrt(statistics.variance(values) + 1e-8)
    assert advantages[[4, 8, 14]].tolist() == pytest.approx([(5 - mean) / std, 0.0, (1 - mean) / std], rel=1e-5)


def test_advantages_are_kept_within_their_bound():
    batch = make_batch()
    inputs = scores([5.0, -3.0, 0.0], [0, 1, 2])
    objective = make_objective("ppo", credit="response", whiten=False, advantage_clip=2.0)
    advantages, _ = objective.advantages(batch, inputs, torch.ones(3, dtype=torch.bool), Alone())
    assert sorted(set(advantages.tolist())) == [-2.0, 0.0, 2.0]


# --- correction ------------------------------------------------------------------------------------------------------


def test_the_share_of_tokens_far_from_the_engine_s_by_hand():
    """Of nine response tokens one each is off by 0.05, -0.2, 0.6 and -2."""
    batch, objective = make_batch(), make_objective("grpo")
    gap_T = torch.zeros(len(batch.loss_mask_T))
    gap_T[batch.loss_mask_T.nonzero()[:4, 0]] = torch.tensor([0.05, -0.2, 0.6, -2.0])
    batch[Column.ROLLOUT_LOGPROBS] = batch[Column.OLD_LOGPROBS] - gap_T
    sums = objective.loss(batch[Column.OLD_LOGPROBS].clone(), torch.zeros(15), batch).sums
    fractions = [float(sums[f"rollout/logprob_diff_over_{bound}"]) for bound in ("0.1", "0.5", "1")]
    assert fractions == pytest.approx([3 / 9, 2 / 9, 1 / 9])


def test_correction_weights_by_hand():
    """Ratios trainer / engine 4, 1.5, 0.1 in one response: product 0.6, geometric mean 0.6^(1/3) = 0.8434."""
    gap, samples = torch.tensor([4.0, 1.5, 0.1]).log(), whole(3)

    def weights(**choices):
        weight, is_kept = replace(Correction.usual_values(), **choices)(gap, samples)
        return pytest.approx(weight.tolist(), rel=1e-5), is_kept.tolist()

    assert weights(weight="token", high=2.0)[0] == [2.0, 1.5, 0.1]
    assert weights(weight="token", high=2.0, outside="mask")[0] == [0.0, 1.5, 0.1]
    assert weights(weight="token", low=0.5, high=5.0, outside="mask")[0] == [4.0, 1.5, 0.0]
    assert weights(weight="sequence", high=2.0)[0] == [0.6] * 3
    assert weights(weight="sequence", high=0.5, outside="mask")[0] == [0.0] * 3
    assert weights(weight="geometric")[0] == [0.6 ** (1 / 3)] * 3
    assert weights(reject="token", reject_low=0.5, reject_high=2.0)[1] == [False, True, False]
    assert weights(reject="geometric", reject_low=0.9, reject_high=1.1)[1] == [False] * 3
    assert weights(reject_divergence={"token_k2": 1.0})[1] == [True, True, False]
    assert weights(reject="token", reject_low=0.05, reject_high=2.0, reject_divergence={"max_k2": 2.7})[1] == [
        False,
        True,
        True,
    ]
    assert weights(reject="token", reject_low=0.05, reject_high=2.0, reject_divergence={"max_k2": 2.6})[1] == [False] * 3
    assert float(ratio_at("sequence", gap, samples)[0]) == pytest.approx(0.6, rel=1e-5)


CORRECTIONS = {name: methods.Correction(name=name) for name in CORRECTIONS_BY_NAME}
CORRECTIONS |= {
    level: methods.Correction(reject=level, reject_low=low, reject_high=high)
    for level, low, high in [("token", 0.7, 1.4), ("sequence", 0.5, 1.5), ("geometric", 0.8, 1.0)]
}


@pytest.mark.parametrize("name", CORRECTIONS)
def test_what_is_masked_or_rejected_keeps_its_place_in_the_denominator(name):
    objective = make_objective("grpo", rollout_correction=CORRECTIONS[name])
    batch = make_batch()
    out = objective.loss(batch[Column.OLD_LOGPROBS].clone(), torch.zeros(15), batch)
    expected = loops.loss(methods.resolve("grpo", given(rollout_correction=CORRECTIONS[name])), as_lists(batch), 8)
    assert float(out.loss) == pytest.approx(float(expected), rel=1e-5, abs=1e-7)
    if name not in CORRECTIONS_BY_NAME:
        assert 0.1 < float(out.sums["rollout_correction/rejected_fraction"]) < 0.9


def given(**choices):
    return methods.Choices(**choices)


def test_the_metrics_of_correction():
    batch = make_batch()
    objective = make_objective("grpo", rollout_correction=methods.Correction(name="mis", high=1.2))
    out = objective.loss(batch[Column.OLD_LOGPROBS].clone(), torch.zeros(15), batch)
    metrics = objective.finalize_metrics({name: float(value) for name, value in out.sums.items()})
    ratios = [
        math.exp(float(a - b))
        for a, b, m in zip(batch[Column.OLD_LOGPROBS], batch[Column.ROLLOUT_LOGPROBS], batch.loss_mask_T, strict=True)
        if m
    ]
    weights = [r if r <= 1.2 else 0.0 for r in ratios]
    n = len(ratios)
    assert metrics["rollout_correction/ratio_mean"] == pytest.approx(sum(ratios) / n, rel=1e-5)
    assert metrics["rollout_correction/masked_fraction"] == pytest.approx(sum(w == 0 for w in weights) / n)
    assert 0 < metrics["rollout_correction/masked_fraction"] < 1
    assert metrics["rollout_correction/weight_mean"] == pytest.approx(sum(weights) / n, rel=1e-5)
    ess = sum(weights) ** 2 / (n * sum(w * w for w in weights))
    assert metrics["rollout_correction/effective_sample_size"] == pytest.approx(ess, rel=1e-5)
    assert float(out.maxima["rollout_correction/ratio_max"]) == pytest.approx(max(ratios), rel=1e-5)


def test_the_fewest_far_tokens_go_until_the_second_moment_is_below_its_bound():
    """Distances 0.1, -2, 0.5, 1 with mean squares 1.315, then 0.42 without the 2, then 0.13 without the 1."""
    gaps = torch.tensor([0.1, -2.0, 0.5, 1.0])
    for bound, expected in ((2.0, []), (1.0, [1]), (0.2, [1, 3]), (0.01001, [1, 2, 3]), (1e-9, [1, 2, 3])):
        left_out = beyond_second_moment(gaps, bound)
        assert left_out.nonzero()[:, 0].tolist() == expected, bound
        assert left_out.tolist() == loops.beyond_second_moment(gaps.tolist(), bound)
    draw = torch.randn(200, generator=torch.Generator().manual_seed(3))
    assert beyond_second_moment(draw, 0.3).tolist() == loops.beyond_second_moment(draw.tolist(), 0.3)
    assert beyond_second_moment(torch.zeros(0), 0.3).tolist() == []


@pytest.mark.parametrize("name", [name for name in DIVERGENCES if name != SECOND_MOMENT])
def test_every_divergence_rejects_what_its_loop_rejects(name):
    batch = make_batch()
    chosen = replace(Correction.usual_values(), reject_divergence={name: 0.08})
    difference = (batch[Column.OLD_LOGPROBS] - batch[Column.ROLLOUT_LOGPROBS]) * batch.loss_mask_T
    _, is_kept = chosen(difference, Segments.of(batch))
    expected = []
    for sample in as_lists(batch):
        gaps = [a - b for a, b in zip(sample["old"], sample["engine"], strict=True)]
        expected += loops.correction(chosen, gaps, sample["marked"])[1]
    assert is_kept[batch.loss_mask_T].tolist() == expected and len(set(expected)) == 2


# --- the loss as a whole ---------------------------------------------------------------------------------------------


def make_batch(samples: int = 3) -> TokenBatch:
    lengths, prompts = ([5, 4, 6], [2, 1, 3]) if samples == 3 else ([5, 4, 6, 3], [2, 1, 3, 1])
    total = sum(lengths)
    mask = torch.cat([torch.arange(n) >= p for n, p in zip(lengths, prompts, strict=True)])
    batch = TokenBatch(torch.arange(total), mask, lengths, samples_per_comparison=1 if samples == 3 else 2)
    responses = torch.tensor([n - p for n, p in zip(lengths, prompts, strict=True)])
    generator = torch.Generator().manual_seed(5)
    batch[Column.ADVANTAGES] = batch.expand_to_tokens(torch.tensor([1.0, -0.5, 0.25, -1.0][:samples]))
    batch[Column.LOSS_WEIGHTS] = batch.expand_to_tokens(AGGREGATES["seq-mean-token-mean"](responses, 8))
    batch.update_tokens = int(responses.sum())
    for column in (Column.OLD_LOGPROBS, Column.REF_LOGPROBS, Column.ROLLOUT_LOGPROBS):
        batch[column] = -torch.rand(total, generator=generator) * mask
    batch[Column.SELECTED] = (torch.rand(total, generator=generator) < 0.4) & mask
    return batch


def changed(**more):
    return {**more, "kl": methods.KL(estimator="k3+", coef=0.1), "entropy_coef": 0.3}


@pytest.mark.parametrize(("surrogate", "ratio", "aggregate"), COMBINATIONS)
def test_every_objective_and_its_gradient_equal_the_loop(surrogate, ratio, aggregate):
    """With KL, entropy and truncated weights, as one micro-batch and as three."""
    level = {} if surrogate in WITHOUT_RATIO else {"importance_sampling_level": ratio}
    choices = changed(
        surrogate=surrogate, aggregate=aggregate, rollout_correction=methods.Correction(name="tis", high=1.3), **level
    )
    objective, resolved = make_objective("cispo", **choices), methods.resolve("cispo", given(**choices))
    batch = make_batch()
    responses = torch.tensor([3, 3, 3])
    batch[Column.LOSS_WEIGHTS] = batch.expand_to_tokens(objective.loss_weights(responses, 8))
    batch.per_micro_batch = objective.aggregation.per_micro_batch
    entropy = torch.linspace(0.5, 2.0, 15) * batch.loss_mask_T
    for cut in ([[0, 1, 2]], [[2], [0, 1]]):
        now = (-torch.linspace(0.1, 1.5, 15)).requires_grad_()
        x = now.detach().double().requires_grad_()
        expected = loops.loss(resolved, as_lists(batch, x, entropy), 8, cut)
        expected.backward()
        batch.update_micro_batches = len(cut)
        total = 0.0
        for samples in cut:
            index = batch.token_index(samples)
            total = total + objective.loss(now[index], entropy[index], batch.select(samples)).loss
        total.backward()
        assert total.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-7)
        assert torch.allclose(now.grad.double(), x.grad, atol=1e-6)
        assert x.grad.abs().max() > 1e-3


@pytest.mark.parametrize("penalty", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant-length"])
def test_kl_and_entropy_may_be_weighted_in_another_way_than_the_surrogate(penalty):
    """SkyRL's KL is a mean over sequences next to a token mean, verl's GSPO a mean over sequences next to a token mean of the KL."""
    choices = changed(
        aggregate="seq-mean-token-mean" if penalty == "token-mean" else "token-mean",
        penalty_aggregate=penalty,
        rollout_correction=methods.Correction(name="geometric", reject_low=0.5, reject_high=1.2),
    )
    objective, resolved = make_objective("grpo", **choices), methods.resolve("grpo", given(**choices))
    batch = make_batch(4)
    responses = torch.tensor([3, 3, 3, 2])
    batch[Column.LOSS_WEIGHTS] = batch.expand_to_tokens(objective.loss_weights(responses, 8))
    batch[Column.PENALTY_WEIGHTS] = batch.expand_to_tokens(objective.penalty_weights(responses, 8))
    entropy = torch.linspace(0.5, 2.0, 18) * batch.loss_mask_T
    for cut in ([[0, 1, 2, 3]], [[2, 3], [0, 1]]):
        now = (-torch.linspace(0.1, 1.5, 18)).requires_grad_()
        x = now.detach().double().requires_grad_()
        expected = loops.loss(resolved, as_lists(batch, x, entropy), 8)
        expected.backward()
        total = 0.0
        for samples in cut:
            index = batch.token_index(samples)
            total = total + objective.loss(now[index], entropy[index], batch.select(samples)).loss
        total.backward()
        assert total.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-7)
        assert torch.allclose(now.grad.double(), x.grad, atol=1e-6)


OTHER_FORMS = {
    "kl times the ratio": ("grpo", {"kl": methods.KL(estimator="k3", coef=0.3, ratio_weighted=True)}),
    "kl times the ratio of the sequence": ("gspo", {"kl": methods.KL(estimator="k3", coef=0.3, ratio_weighted=True)}),
    "rec ring": ("rec", {"clip_mode": "ring", "ring_low": 0.3, "ring_high": 0.4, "proximal_coef": 0.2, "likelihood_coef": 0.1}),
    "rec two-sided by sequence": ("rec", {"clip_mode": "two_sided", "importance_sampling_level": "sequence", "token_weight": "ratio", "clip_low": 0.4, "clip_high": 0.3}),
    "rec by advantage": ("rec", {"clip_mode": "none", "token_weight": "advantage", "weight_temperature": 0.7}),
    "dppo by kl": ("dppo", {"divergence": "kl", "clip_low": 0.02, "clip_high": 0.05, "ratio_cap": 1.1}),
    "cpgd without a drift": ("cpgd", {"drift_coef": 0.0, "clip_low": 0.3, "clip_high": 0.1}),
    "cpgd with a strong drift": ("cpgd", {"drift_coef": 0.5}),
    "dppo by tv": ("dppo", {"clip_low": 0.1, "clip_high": 0.15}),
    "several divergences": ("cispo", {"rollout_correction": methods.Correction(
        reject="token", reject_low=0.6, reject_high=1.6, reject_divergence={"max_k2": 0.3, "token_k3": 0.1, "mean_k3": 0.2, "sum_k2": 0.5})}),
    "rejection by the engine as old policy": ("cispo", {"rollout_correction": methods.Correction(
        old_logprobs_from="engine", reject="token", reject_low=0.4, reject_high=1.6, reject_divergence={"max_k2": 0.4})}),
    "second moment": ("cispo", {"rollout_correction": methods.Correction(name="tis", reject_divergence={"second_moment": 0.1})}),
}  # fmt: skip


@pytest.mark.parametrize("name", [*sorted(methods.METHODS), *OTHER_FORMS])
def test_every_method_and_its_gradient_equal_the_loop(name):
    name, choices = OTHER_FORMS.get(name, (name, {}))
    resolved = methods.resolve(name, given(**choices))
    objective = make_objective(name, **choices)
    batch = make_batch(4)
    responses = torch.tensor([3, 3, 3, 2])
    batch[Column.LOSS_WEIGHTS] = batch.expand_to_tokens(objective.loss_weights(responses, 8))
    now = (-torch.linspace(0.1, 1.5, 18)).requires_grad_()
    x = now.detach().double().requires_grad_()
    expected = loops.loss(resolved, as_lists(batch, x), 8)
    expected.backward()
    loss = objective.loss(now, torch.zeros(18), batch).loss
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-7)
    assert torch.allclose(now.grad.double() * batch.loss_mask_T, x.grad * batch.loss_mask_T, atol=1e-6)
    assert x.grad.abs().max() > 1e-3


@pytest.mark.parametrize("choices", [{}, {"surrogate": "cispo"}, {"importance_sampling_level": "sequence"}], ids=str)
def test_old_log_probs_between_the_engine_s_and_those_of_now_equal_the_loop(choices):
    """Ages of 0, 1, 2, 3 and 6 steps of two updates, some within one response; the weight is that of old over engine."""
    correction = methods.Correction(old_logprobs_from="loglinear", weight="token", high=1.02, outside="mask")
    choices = {**choices, "kl": methods.KL(coef=0.0), "rollout_correction": correction}
    objective, resolved = make_objective("grpo", **choices), methods.resolve("grpo", given(**choices))
    assert objective.needs(4) == {Column.INTERPOLATION}
    batch, steps = make_batch(), torch.tensor([0, 0, 3, 3, 2, 0, 6, 6, 6, 0, 0, 0, 1, 0, 2])
    batch[Column.INTERPOLATION] = interpolation(2 * steps, updates=2)
    now = (-torch.linspace(0.1, 1.5, 15)).requires_grad_()
    x = now.detach().double().requires_grad_()
    samples = as_lists(batch, x)
    for sample, steps_of_sample in zip(samples, ([3, 3, 2], [6, 6, 6], [1, 0, 2]), strict=True):
        sample["steps"] = steps_of_sample
    expected = loops.loss(resolved, samples, 8)
    expected.backward()
    total = 0.0
    for part in ([0], [2, 1]):
        index = batch.token_index(part)
        total = total + objective.loss(now[index], torch.zeros(len(index)), batch.select(part)).loss
    total.backward()
    assert total.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.allclose(now.grad.double(), x.grad, atol=1e-6) and x.grad.abs().max() > 1e-3


@pytest.mark.parametrize("name", sorted(methods.METHODS))
@pytest.mark.parametrize("cut", [[[0, 1], [2, 3]], [[2, 3], [0, 1], []]])
def test_the_loss_its_gradient_and_its_metrics_are_the_same_for_every_cut(name, cut):
    batch = make_batch(4)
    objective = Objective.of(methods.resolve(name))

    def run(pieces):
        logprobs = (-torch.linspace(0.1, 1.5, 18)).requires_grad_()
        total, sums, highest = 0.0, {}, {}
        for samples in pieces:
            index, part = batch.token_index(samples), batch.select(samples)
            out = objective.loss(logprobs[index] * part.loss_mask_T, torch.ones(len(index)) * part.loss_mask_T, part)
            total = total + out.loss
            for key, value in out.sums.items():
                sums[key] = sums.get(key, 0.0) + float(value)
            for key, value in out.maxima.items():
                highest[key] = max(highest.get(key, 0.0), float(value))
        total.backward()
        return total.item(), logprobs.grad, sums, highest

    loss, gradient, sums, highest = run([[0, 1, 2, 3]])
    other = run(cut)
    assert other[0] == pytest.approx(loss, rel=1e-6)
    assert torch.allclose(other[1], gradient, atol=1e-7)
    assert other[2] == pytest.approx(sums, rel=1e-5, abs=1e-7)
    assert other[3] == pytest.approx(highest)


def test_an_entropy_bonus_raises_the_objective_by_its_weighted_entropy():
    batch = make_batch()
    plain, with_bonus = (make_objective("grpo", entropy_coef=coef) for coef in (0.0, 0.2))
    logprobs, entropy = -torch.linspace(0.1, 1.5, 15) * batch.loss_mask_T, torch.linspace(0.5, 2.0, 15) * batch.loss_mask_T
    difference = float(plain.loss(logprobs, entropy, batch).loss - with_bonus.loss(logprobs, entropy, batch).loss)
    assert difference == pytest.approx(0.2 * float((entropy * batch[Column.LOSS_WEIGHTS]).sum()), rel=1e-5)


# --- the critic's loss -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [Column.LOSS_WEIGHTS, Column.VALUE_WEIGHTS])
@pytest.mark.parametrize("clip", [None, 0.5, 0.05])
def test_the_value_loss_and_its_gradient_equal_the_loop(clip, weights):
    batch = make_batch()
    if weights is Column.VALUE_WEIGHTS:
        batch[weights] = batch[Column.LOSS_WEIGHTS] * torch.linspace(0.5, 2, 15)
    generator = torch.Generator().manual_seed(8)
    batch[Column.VALUES], batch[Column.RETURNS] = torch.randn(2, 15, generator=generator)
    batch[Column.RETURNS] = batch[Column.RETURNS] * batch.loss_mask_T
    now = torch.randn(15, generator=generator).requires_grad_()
    x = now.detach().double().requires_grad_()
    expected, errors, returns = 0.0, [], []
    for t in batch.loss_mask_T.nonzero()[:, 0].tolist():
        value, old, target = x[t - 1], float(batch[Column.VALUES][t - 1]), float(batch[Column.RETURNS][t])
        error = (value - target) ** 2
        if clip is not None:
            near = loops.clip(value, old - clip, old + clip)
            error = max(error, (near - target) ** 2, key=float)
        expected = expected + 0.5 * error * float(batch[weights][t])
        errors.append(target - float(value))
        returns.append(target)
    expected.backward()
    out = ValueLoss(clip)(now, torch.zeros(15), batch)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.allclose(now.grad.double(), x.grad, atol=1e-6)
    metrics = ValueLoss(clip).finalize_metrics({name: float(value) for name, value in out.sums.items()})
    explained = 1 - statistics.pvariance(errors) / statistics.pvariance(returns)
    assert metrics["critic/explained_variance"] == pytest.approx(explained, rel=1e-4)
    assert metrics["critic/return_mean"] == pytest.approx(statistics.fmean(returns), rel=1e-5, abs=1e-7)
    assert set(metrics) <= {
        f"critic/{name}" for name in ("value_mean", "return_mean", "return_std", "explained_variance", "clip_fraction")
    }


def test_a_mean_of_the_critics_loss_that_cannot_act_is_reported():
    for name, choices, errors, ignored in (
        ("ppo", {"value_aggregate": "seq-mean-token-mean"}, [], []),
        ("grpo", {"value_aggregate": "seq-mean-token-mean"}, [], [("algorithm.value_aggregate", "there is no critic")]),
        ("ppo", {"value_aggregate": "micro-batch-token-mean"}, ["needs the same algorithm.aggregate: got token-mean"], []),
        ("ppo", dict.fromkeys(("aggregate", "value_aggregate"), "micro-batch-token-mean"), [], []),
    ):
        findings = Findings()
        check_method(findings.at("algorithm"), name, methods.Choices(**choices), group_size=4)
        assert findings.ignored == ignored and len(findings.errors) == len(errors)
        assert all(part in error for part, error in zip(errors, findings.errors, strict=True))


def test_the_policys_mean_named_for_the_critic_too_changes_nothing():
    """A checkpoint from before the key compares equal, and the critic has no weights of its own."""
    chosen = methods.resolve("ppo", methods.Choices(value_aggregate="token-mean"))
    assert chosen == methods.resolve("ppo") and chosen.aggregate == "token-mean"
    lengths_N = torch.tensor([3, 1])
    assert make_objective("ppo", value_aggregate="token-mean").value_weights(lengths_N, 8) is None
    assert make_objective("ppo", value_aggregate="seq-mean-token-sum").value_weights(lengths_N, 8).tolist() == [0.5, 0.5]


def test_the_value_before_a_token_is_that_of_the_text_up_to_the_one_before():
    assert before(torch.tensor([5.0, 1.0, 2.0]))[1:].tolist() == [5.0, 1.0]


# --- rows and choices ------------------------------------------------------------------------------------------------


def test_every_row_is_complete_and_makes_sense():
    for name in methods.METHODS:
        findings = Findings()
        check_values(methods.METHODS[name], findings)
        check_method(findings, name, methods.Choices(), group_size=4)
        assert findings == Findings(), name
        Objective.of(methods.resolve(name))


@pytest.mark.parametrize("name", SURROGATES)
def test_the_defaults_of_a_surrogate_s_parameters_are_in_their_ranges(name):
    for key, default in SURROGATES[name].parameters().items():
        rule = SURROGATES[name].range_of(key)
        assert default is None or rule.fault(default) is None, key
        others = rule.names if isinstance(rule, OneOf) else [0.25]
        assert all(make_surrogate(name, **{key: other}) != make_surrogate(name) for other in others if other != default)


def test_a_new_surrogate_s_parameter_is_checked_and_resolved_without_a_branch(monkeypatch):
    @dataclass(frozen=True)
    class Softened(Surrogate):
        name = "softened"
        levels = ("token",)
        beta: Annotated[float, within("[0, 1)")] = 0.5

    monkeypatch.setitem(SURROGATES, "softened", Softened)
    assert methods.resolve("grpo", given(surrogate="softened")).beta == 0.5
    for change, says in (({"beta": 1.0}, r"beta must be in \[0, 1\): got 1.0"), ({"clip_low": 0.1}, "not to softened")):
        with pytest.raises(ValueError, match=says):
            make_objective("grpo", surrogate="softened", **change)


def test_a_new_method_is_a_new_row(monkeypatch):
    monkeypatch.setitem(methods.METHODS, "mine", methods.Method(advantage="leave_one_out", surrogate="cispo", clip_high=0.4))
    assert make_objective("mine").gradient.surrogate == make_surrogate("cispo", clip_high=0.4)
    monkeypatch.setitem(methods.METHODS, "robust_dpo", replace(methods.METHODS["dpo"], label_smoothing=0.1))
    config = AlgorithmConfig(name="robust_dpo", group_size=4)
    assert (config.offline, config.samples_per_comparison, config.samples_per_prompt) == (True, 2, 2)
    assert config.needs_reference and config.method.columns == ("chosen_key", "rejected_key")
    assert Column.REF_LOGPROBS in make_objective("robust_dpo").needs(1)


def test_what_the_ratio_compares_with_is_the_row_s():
    kinds = {name: make_objective(name).gradient.surrogate.ratio_reference for name in ("grpo", "rloo", "sft", "dpo")}
    assert kinds == {"grpo": "old", "rloo": "nothing", "sft": "nothing", "dpo": "reference"}


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_refused(number):
    with pytest.raises(ValueError, match=r"algorithm\.clip_high must be a finite number"):
        make_objective("grpo", clip_high=number)


@pytest.mark.parametrize(
    ("method", "change", "says"),
    [
        ("sft", {"normalize": "group"}, "normalize belongs to"),
        ("rloo", {"clip_low": 0.1}, "clip_low belongs to ppo_clip, gmpo, cispo, clip_cov"),
        ("grpo", {"clip_low": 1.5}, r"clip_low must be in \[0, 1\]"),
        ("rloo", {"importance_sampling_level": "sequence"}, "compare with the policy before the update"),
        ("gmpo", {"importance_sampling_level": "sequence"}, "looks at tokens itself"),
        (
            "grpo",
            {"credit": "turns"},
            "turns adds rewards of turns to the advantage of their trajectory.* set normalize: none",
        ),
        ("gpg", {"credit": "turns"}, "which must have their unit: got advantage group_scaled"),
        ("ppo", {"turn_coef": 1.0, "credit": "response", "kl": {"coef": 0.0}}, "turn_coef needs an advantage that compares"),
        ("gigpo", {"credit": "turns", "normalize": "none"}, "turn_coef needs credit: response"),
        ("cispo", {"dual_clip": 3.0}, "dual_clip belongs to ppo_clip"),
        ("grpo", {"dual_clip": 1.1}, r"above 1 \+ clip_high"),
        ("opo", {"normalize": "group"}, "normalize belongs to"),
        ("grpo", {"advantage": "step_mean"}, "step_mean compares over the whole step, so write batch or none: got group"),
        ("grpo", {"lam": 0.9}, "lam belongs to credit: gae"),
        ("grpo", {"gamma": 0.9}, "gamma belongs to credit: turns, discounted or gae"),
        ("grpo", {"bootstrap_truncated": True}, "bootstrap_truncated belongs to credit: gae"),
        ("ppo", {"lam": 1.5}, r"lam must be in \[0, 1\]"),
        ("grpo", {"surrogate": "dpo"}, "write name: dpo"),
        ("grpo", {"surrogate": "ppo"}, "surrogate must be one of ppo_clip"),
        ("grpo", {"advantage": "nowhere.py:mine"}, "no file at nowhere.py"),
        ("grpo", {"advantage": "given"}, "advantage must be one of reward, group"),
        ("sft", {"advantage": "group"}, "advantage has nothing to act on: sft does not sample"),
        ("grpo", {"beta": 0.1}, "beta belongs to dpo, not to ppo_clip"),
        ("dpo", {"beta": 0.0}, "beta must be above 0: got 0.0"),
        ("gmpo", {"clip_low": -1.0}, "clip_low must be at least 0: got -1.0"),
        ("grpo", {"credit": "gea"}, "credit must be one of response, turns, discounted, gae"),
        ("sft", {"credit": "gae"}, "credit has nothing to act on"),
        ("sft", {"dynamic_sampling": True}, "does not sample"),
        ("dpo", {"kl": methods.KL(coef=0.1)}, "has the reference in its loss already"),
        ("dpo", {"aggregate": "token-mean"}, "every pair counts alike"),
        ("grpo", {"kl": methods.KL(estimator="k3+", place="reward")}, "write k3"),
        ("grpo", {"kl": methods.KL(reward_coef=0.1, coef=0.0)}, "second penalty next to the one in the loss"),
        (
            "grpo",
            {"kl": methods.KL(reward_coef=0.1, coef=0.1, place="reward")},
            "second penalty next to the one in the loss",
        ),
        ("grpo", {"kl": methods.KL(reward_coef=0.1, coef=0.1, reward_estimator="k3+")}, "write k3"),
        ("sft", {"kl": methods.KL(reward_coef=0.1, coef=0.1)}, "kl.reward_coef has nothing to act on"),
        ("dapo", {"kl": methods.KL(target=0.1)}, "must start above 0"),
        (
            "grpo",
            {"rollout_correction": methods.Correction(name="tis", old_logprobs_from="engine")},
            "leave weight none and second_moment out",
        ),
        ("grpo", {"rollout_correction": methods.Correction(name="tis", low=3.0)}, "0 <= low < high"),
        (
            "clip_cov",
            {"rollout_correction": methods.Correction(old_logprobs_from="loglinear")},
            "leaves out the pass by which clip_cov",
        ),
        (
            "rloo",
            {"rollout_correction": methods.Correction(old_logprobs_from="loglinear")},
            "loglinear changes the ratio, which log_likelihood does not have",
        ),
        (
            "grpo",
            {"rollout_correction": methods.Correction(reject_divergence={"token_k4": 1.0})},
            "must be one of token_k2",
        ),
        (
            "kl_cov",
            {"rollout_correction": methods.Correction(reject_divergence={"second_moment": 1.0})},
            "and so does kl_cov",
        ),
        ("rec", {"clip_mode": "both"}, "clip_mode must be one of none, one_sided"),
        ("rec", {"importance_sampling_level": "sequence", "proximal_coef": 0.1}, "squared log-ratio of each token"),
        ("grpo", {"normalize": "mean", "advantage": "leave_one_out"}, "mean belongs to advantages group"),
        ("maxrl", {"kl": methods.KL(coef=0.1, place="reward")}, "kl.place: reward makes rewards negative"),
        ("maxrl", {"overlong_buffer": 4}, "overlong_buffer makes rewards negative"),
        ("maxrl", {"reward_shift": -0.5}, "reward_shift makes rewards negative"),
        ("rloo", {"baseline_shift": 0.1}, "baseline_shift belongs to advantage group: got leave_one_out"),
        ("grpo", {"difficulty_low": 0.9, "difficulty_high": 0.1}, "difficulty_low < difficulty_high"),
        ("rloo", {"kl": methods.KL(coef=0.1, ratio_weighted=True)}, "with which log_likelihood does not compare"),
        ("reinforce_plus_plus", {"kl": methods.KL(ratio_weighted=True)}, "belongs to place: loss"),
        (
            "rloo",
            {"rollout_correction": methods.Correction(old_logprobs_from="engine")},
            "which log_likelihood does not have",
        ),
    ],
)
def test_a_choice_that_makes_no_sense_is_refused_with_the_reason(method, change, says):
    with pytest.raises(ValueError, match=says):
        make_objective(method, **change)


@pytest.mark.parametrize(
    ("method", "choices", "ignored"),
    [
        ("rec", {"ring_low": 0.5, "ring_high": 3.0}, {"ring_low", "ring_high"}),
        ("rec", {"ring_low": 0.5, "ring_high": 3.0, "clip_low": 0.1, "clip_mode": "ring"}, set()),
        ("rec", {"clip_low": 0.1, "clip_high": 0.1}, set()),
        ("rec", {"clip_low": 0.1, "clip_high": 0.1, "clip_mode": "none"}, {"clip_low", "clip_high"}),
        ("rec", {"weight_temperature": 2.0, "token_weight": "ratio"}, {"weight_temperature"}),
        ("rec", {"weight_temperature": 2.0, "token_weight": "advantage"}, set()),
        ("chord", {"expert": methods.Imitation(decay_updates=100)}, {"expert.decay_updates"}),
        ("chord", {"expert": methods.Imitation(decay_updates=100, final_weight=0.05)}, set()),
        ("sft", {"kl": methods.KL(estimator="k2")}, {"kl"}),
        ("sft", {"kl": methods.KL(estimator="k2", coef=0.1)}, set()),
        ("dpo", {"kl": methods.KL(estimator="k2")}, {"kl"}),
        ("dapo", {"kl": methods.KL(estimator="k2")}, {"kl"}),
    ],
)
def test_a_choice_without_effect_is_reported(method, choices, ignored):
    findings = Findings()
    check_method(findings, method, methods.Choices(**choices), group_size=4)
    assert {key for key, _ in findings.ignored} == ignored and not findings.errors


def test_a_group_of_one_is_refused_where_samples_are_compared():
    def errors(name: str) -> list[str]:
        findings = Findings()
        check_method(findings, name, methods.Choices(), group_size=1)
        return findings.errors

    assert "at least 2" in errors("grpo")[0]
    assert errors("ppo") == errors("remax") == errors("sft") == []


def test_another_surrogate_does_not_take_over_the_row_s_numbers():
    assert make_objective("dapo").gradient.surrogate == make_surrogate("ppo_clip", clip_high=0.28)
    assert make_objective("dapo", surrogate="cispo").gradient.surrogate == make_surrogate("cispo")
    assert make_objective("gspo", surrogate="cispo", clip_high=0.5).gradient.surrogate == make_surrogate(
        "cispo", clip_high=0.5
    )


USER = """
import torch

def centred(scores):
    return (scores.rewards_N - scores.rewards_N.mean()).float()

def linear(log_ratio_T, logprobs_T, advantages_T, samples):
    return log_ratio_T * advantages_T

def half(logprobs_T, old_logprobs_T, samples):
    return (logprobs_T - old_logprobs_T) / 2

def by_root(response_lengths_N, max_response_tokens):
    return 1 / response_lengths_N.double().sqrt()

def last_only(advantages_N, penalties_T, samples):
    ends_N = torch.tensor(samples.lengths_N).cumsum(0) - 1
    return torch.zeros(len(penalties_T)).index_copy(0, ends_N, advantages_N)

def halved(log_ratio_T, samples):
    return (log_ratio_T / 2).exp()

def cubic(logprobs_T, ref_logprobs_T):
    return (logprobs_T - ref_logprobs_T).abs() ** 3
"""


def test_a_function_of_the_user_s_own_plugs_in_on_every_axis(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(USER)
    objective = make_objective(
        "grpo",
        advantage=f"{path}:centred",
        normalize="none",
        surrogate=f"{path}:linear",
        importance_sampling_level=f"{path}:half",
        aggregate=f"{path}:by_root",
        kl=methods.KL(estimator=f"{path}:cubic", coef=0.5),
        credit=f"{path}:last_only",
        rollout_correction=methods.Correction(weight=f"{path}:halved", high=1.1),
    )
    assert objective.compared(scores([1.0, 3.0])).tolist() == [-1.0, 1.0]
    batch = make_batch()
    advantages, _ = objective.advantages(batch, scores([1.0, 3.0, 5.0]), torch.ones(3, dtype=torch.bool), Alone())
    assert advantages.nonzero()[:, 0].tolist() == [4, 14] and advantages[[4, 8, 14]].tolist() == [-2.0, 0.0, 2.0]
    batch[Column.LOSS_WEIGHTS] = batch.expand_to_tokens(objective.loss_weights(torch.tensor([3, 3, 3]), 8))
    now = -torch.linspace(0.1, 1.5, 15)
    expected = 0.0
    for t in batch.loss_mask_T.nonzero()[:, 0].tolist():
        weight = min(math.exp(float(batch[Column.OLD_LOGPROBS][t] - batch[Column.ROLLOUT_LOGPROBS][t]) / 2), 1.1)
        gain = weight * float(now[t] - batch[Column.OLD_LOGPROBS][t]) / 2 * float(batch[Column.ADVANTAGES][t])
        expected -= (gain - 0.5 * abs(float(now[t] - batch[Column.REF_LOGPROBS][t])) ** 3) / math.sqrt(3)
    assert float(objective.loss(now, torch.zeros(15), batch).loss) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("method", methods.METHODS)
@pytest.mark.parametrize("credit", ["response", "discounted", "gae"])
def test_every_method_takes_every_credit_or_refuses_it(method, credit):
    try:
        objective = make_objective(method, credit=credit)
    except UserError as error:
        assert "algorithm." in str(error)
    else:
        assert objective.advantage.assignment.needs_critic == (credit == "gae")


@pytest.mark.parametrize(
    ("name", "choices", "key"),
    [
        ("gigpo", {}, "algorithm.turn_coef: gigpo compares the turns of trajectories"),
        ("dr_grpo", {"credit": "turns"}, "algorithm.credit: turns gives each turn of a trajectory its own return"),
        (
            "grpo",
            {"importance_sampling_level": "turn"},
            "algorithm.importance_sampling_level: turn needs turns of trajectories",
        ),
        (
            "grpo",
            {"rollout_correction": methods.Correction(weight="turn")},
            "algorithm.rollout_correction.weight: turn needs turns of trajectories",
        ),
    ],
)
def test_what_acts_on_turns_is_refused_without_an_environment(name, choices, key):
    def errors(has_turns: bool | None) -> list[str]:
        findings = Findings(section="algorithm")
        check_method(findings, name, methods.Choices(**choices), group_size=4, has_turns=has_turns)
        return findings.errors

    (error,) = errors(False)
    assert error.startswith(key) and "every response has one: name an environment (environment.class" in error
    assert errors(True) == errors(None) == []


def test_gae_with_turns_needs_advantages_in_the_unit_of_the_reward():
    def errors(has_turns: bool, **choices) -> list[str]:
        findings = Findings()
        check_method(findings, "ppo", methods.Choices(**choices), group_size=4, has_turns=has_turns)
        return findings.errors

    scaled = {"advantage": "group", "normalize": "group"}
    assert errors(False, **scaled) == errors(True) == errors(True, advantage="group") == []
    assert "gae adds rewards of turns" in errors(True, **scaled)[0]


def test_a_negative_reward_where_the_mean_divides_ends_the_run_with_its_value():
    """Divided by a negative mean, the better sample would get the negative advantage."""
    normalized = make_advantage("group", normalize="mean")
    assert normalized(scores([0.0, 1.0])).tolist() == pytest.approx([-1, 1], abs=1e-5)
    with pytest.raises(RunError, match=r"no reward may be negative: got -0\.5"):
        normalized(scores([-0.5, 0.25]))
