"""Implicit process rewards against loops over samples and tokens: rewards, advantages, the model's loss and its gradient."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from itertools import chain

import pytest
import torch

from fivefold.algo.advantages import AdvantageInputs
from fivefold.algo.methods import Choices, ProcessReward, check_method
from fivefold.algo.objective import make_objective
from fivefold.algo.terms.process_reward import pair_accuracy
from fivefold.columns import Column
from fivefold.keys.findings import Findings
from fivefold.types import RolloutStats, TokenBatch
from tests.support.objectives import Alone

GROUPS = [0, 0, 0, 1, 1, 2]
PROMPTS = [2, 1, 3, 1, 2, 1]
RESPONSES = [3, 1, 4, 2, 5, 2]
CORRECT = [1.0, 0.0, 1.0, 0.0, 1.0, 1.0]
REWARDS = [0.9, 0.1, 1.0, 0.0, 0.75, 0.5]
FINISHED = torch.ones(6, dtype=torch.bool)


def make_batch() -> TokenBatch:
    """Log-probs everywhere, in prompts too: a loss that counts those is found out."""
    generator = torch.Generator().manual_seed(11)
    lengths = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    mask = torch.cat([torch.arange(n) >= p for n, p in zip(lengths, PROMPTS, strict=True)])
    logprobs, ref = -3 * torch.rand(2, sum(lengths), generator=generator)
    return TokenBatch(
        torch.arange(sum(lengths)), mask, lengths, columns={Column.PRM_LOGPROBS: logprobs, Column.PRM_REF_LOGPROBS: ref}
    )


def log_ratios(batch: TokenBatch) -> list[list[float]]:
    """Of the response tokens of each sample."""
    ratios, start = [], 0
    for length, prompt in zip(batch.lengths_N, PROMPTS, strict=True):
        places = range(start + prompt, start + length)
        ratios.append([float(batch[Column.PRM_LOGPROBS][t]) - float(batch[Column.PRM_REF_LOGPROBS][t]) for t in places])
        start += length
    return ratios


def token_rewards(ratios: list[list[float]], beta: float, granularity: str, normalize: str) -> list[list[float]]:
    rewards = []
    for ratios_of_one in ratios:
        if granularity == "token":
            rewards.append([beta * q for q in ratios_of_one[:-1]] + [0.0])
        else:
            rewards.append([0.0] * (len(ratios_of_one) - 1) + [beta * sum(ratios_of_one)])
    if normalize == "step":
        largest = max(abs(sum(rewards_of_one[t:])) for rewards_of_one in rewards for t in range(len(rewards_of_one)))
        rewards = [[r / (largest + 1e-6) for r in rewards_of_one] for rewards_of_one in rewards]
    return rewards


def expected_advantages(
    rewards: list[list[float]], outcomes: list[float], coef: float, outcome_coef: float, granularity: str, gamma: float
) -> list[list[float]]:
    advantages = []
    for i, rewards_of_one in enumerate(rewards):
        members = [j for j, group in enumerate(GROUPS) if group == GROUPS[i]]
        n = len(members)
        others = [outcomes[j] for j in members if j != i]
        gains = [0.0] * len(rewards_of_one)
        if n > 1:
            typical = statistics.fmean if granularity == "token" else sum
            baseline = sum(typical(rewards[j]) for j in members) / (n - 1)
            rewarded = range(len(rewards_of_one)) if granularity == "token" else [len(rewards_of_one) - 1]
            for t in rewarded:
                gains[t] += coef * (rewards_of_one[t] * n / (n - 1) - baseline)
            gains[-1] += outcome_coef * (outcomes[i] - statistics.fmean(others))
        advantages.append(
            [sum(gamma ** (s - t) * gains[s] for s in range(t, len(rewards_of_one))) for t in range(len(rewards_of_one))]
        )
    return advantages


def advantages_of(batch: TokenBatch, objective, replicas=None, rows=None, rewards=REWARDS) -> torch.Tensor:
    inputs = AdvantageInputs(torch.tensor(rewards, dtype=torch.float64), torch.tensor(GROUPS), torch.tensor(RESPONSES))
    batch = batch if rows is None else batch.select(rows)
    return objective.advantages(batch, inputs, FINISHED, replicas or Alone())[0]


@pytest.mark.parametrize("normalize", ["step", "none"])
@pytest.mark.parametrize("granularity", ["token", "response"])
def test_advantages_equal_the_loop_over_tokens_and_other_responses(granularity, normalize):
    batch, chosen = make_batch(), {"coef": 3.0, "outcome_coef": 2.0, "beta": 0.2}
    process = ProcessReward(granularity=granularity, normalize=normalize, **chosen)
    objective = make_objective("prime", gamma=0.9, whiten=False, process_reward=process)
    rewards = token_rewards(log_ratios(batch), 0.2, granularity, normalize)
    expected = expected_advantages(rewards, REWARDS, 3.0, 2.0, granularity, 0.9)
    advantages_T = advantages_of(batch, objective)
    assert advantages_T[batch.loss_mask_T].tolist() == pytest.approx([*chain(*expected)], rel=1e-5, abs=1e-6)
    assert not advantages_T[~batch.loss_mask_T].any()
    # A response alone is compared with none.
    assert expected[5] == [0.0, 0.0] and max(map(abs, expected[0])) > 0.1


def test_the_method_s_advantages_have_the_numbers_of_the_paper_s_code():
    """Coefficients 5 and 5, β 0.05, no discount, whitened with the unbiased variance over all tokens."""
    batch = make_batch()
    rewards = token_rewards(log_ratios(batch), 0.05, "token", "step")
    flat = [*chain(*expected_advantages(rewards, REWARDS, 5.0, 5.0, "token", 1.0))]
    mean, variance = statistics.fmean(flat), statistics.variance(flat)
    expected = [(a - mean) / math.sqrt(variance + 1e-8) for a in flat]
    advantages_T = advantages_of(batch, make_objective("prime"))
    assert advantages_T[batch.loss_mask_T].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_two_responses_by_hand():
    """Log-ratios (2, 4, 6) and (1, 1): with β 0.5 the first two tokens of one have 1 and 2, the first of the other 0.5."""
    batch = TokenBatch(torch.arange(7), torch.tensor([False, True, True, True, False, True, True]), [4, 3])
    batch = batch.with_columns(
        {Column.PRM_LOGPROBS: torch.tensor([9.0, 2, 4, 6, 9, 1, 1]), Column.PRM_REF_LOGPROBS: torch.zeros(7)}
    )
    process = ProcessReward(coef=1.0, outcome_coef=1.0, beta=0.5, normalize="none")
    objective = make_objective("prime", whiten=False, process_reward=process)
    inputs = AdvantageInputs(torch.tensor([1.0, 0.0]), torch.zeros(2, dtype=torch.long), torch.tensor([3, 2]))
    advantages_T, _ = objective.advantages(batch, inputs, torch.tensor([True, True]), Alone())
    # Means 1 and 0.25 make the baseline 1.25, each token counts twice, and the outcome +1 or -1 stands at the last token.
    assert advantages_T.tolist() == pytest.approx(
        [0, 0.75 + 2.75 - 1.25 + 1, 2.75 - 1.25 + 1, -1.25 + 1, 0, -0.25 - 1.25 - 1, -2.25]
    )
    # The largest sum from a token on is 3.
    normalized = make_objective("prime", whiten=False, process_reward=replace(process, normalize="step"))
    advantages_T, _ = normalized.advantages(batch, inputs, torch.tensor([True, True]), Alone())
    assert advantages_T[5:].tolist() == pytest.approx([-1.5 / 3 - 1, -1.25 / 3 - 1], rel=1e-5)


class Summed:
    """Two replicas, one after the other: what the other one has is known from a first round."""

    def __init__(self) -> None:
        self.sums: list[torch.Tensor] = []
        self.largest = 0.0
        self.place = 0

    def all_reduce_sum(self, sums):
        if len(self.sums) <= self.place:
            self.sums.append(torch.zeros_like(sums))
        self.sums[self.place] = self.sums[self.place] + sums
        self.place += 1
        return self.sums[self.place - 1]

    def all_reduce_max(self, number):
        self.largest = max(self.largest, number)
        return self.largest


def test_advantages_of_a_replica_are_those_of_its_samples_among_all():
    batch, objective = make_batch(), make_objective("prime", whiten=False)
    whole_T = advantages_of(batch, objective)
    for mine, others in (([4, 0, 2], [1, 3, 5]), ([1, 3, 5], [4, 0, 2])):
        replicas = Summed()
        # The largest return has to be known before anything is summed by it.
        advantages_of(batch, objective, replicas, others)
        advantages_of(batch, objective, replicas, mine)
        known = Summed()
        known.largest = replicas.largest
        advantages_of(batch, objective, known, others)
        known.place = 0
        advantages_T = advantages_of(batch, objective, known, mine)
        assert torch.allclose(advantages_T, whole_T[batch.token_index(mine)], atol=1e-6)


def stats_of(rewards=REWARDS) -> RolloutStats:
    count, zeros_N = len(GROUPS), torch.zeros(len(GROUPS), dtype=torch.long)
    return RolloutStats(
        group_N=torch.tensor(GROUPS), rewards_N=torch.tensor(rewards, dtype=torch.float64),
        response_lengths_N=torch.tensor(RESPONSES), prompt_lengths_N=torch.tensor(PROMPTS),
        lengths_N=torch.tensor(RESPONSES) + torch.tensor(PROMPTS), finished_N=FINISHED, correct_N=torch.tensor(CORRECT).bool(),
        repetition_N=torch.zeros(count), version_N=zeros_N, versions_differ=False, rank_N=zeros_N, minibatch_N=zeros_N, owner_N=zeros_N,
        max_response_tokens=8, has_logprobs=True,
    )  # fmt: skip


CUTS = [[[0, 1, 2, 3, 4, 5]], [[3, 0], [], [5, 1], [2, 4]]]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("loss", ["ce", "dpo"])
@pytest.mark.parametrize("target", ["correct", "reward"])
def test_the_model_s_loss_and_its_gradient_equal_the_loop_for_every_cut(loss, target, cut):
    batch, stats, beta = make_batch(), stats_of(), 0.7
    config = ProcessReward(loss=loss, target=target, beta=beta, update="after" if loss == "dpo" else "before")
    process = make_objective("prime", process_reward=config).process
    outcomes = CORRECT if target == "correct" else REWARDS
    before = [beta * sum(ratios) for ratios in log_ratios(batch)]
    scores_N = process.scores(batch, 6, lambda sums: sums)
    assert scores_N.tolist() == pytest.approx(before, rel=1e-6)

    now = (-2 * torch.rand(len(batch.token_ids_T), generator=torch.Generator().manual_seed(5))).requires_grad_()
    x = now.detach().double().requires_grad_()
    expected, start, right = torch.zeros((), dtype=torch.float64), 0, 0
    for i, (length, prompt) in enumerate(zip(batch.lengths_N, PROMPTS, strict=True)):
        score = beta * sum(x[t] - float(batch[Column.PRM_REF_LOGPROBS][t]) for t in range(start + prompt, start + length))
        y = outcomes[i]
        if loss == "ce":
            p = 1 / (1 + torch.exp(-score))
            expected = expected - (y * torch.log(p) + (1 - y) * torch.log(1 - p)) / 6
        else:
            others = [
                before[j] for j in range(6)
                if GROUPS[j] == GROUPS[i] and (outcomes[j] < y if y > 0 else outcomes[j] > y)
            ]  # fmt: skip
            margin = score - (statistics.fmean(others) if others else 0.0)
            expected = expected - torch.log(1 / (1 + torch.exp(-margin if y > 0 else margin))) / 6
        right += math.copysign(1, score.item()) == (y > 0.5) - (y < 0.5)
        start += length
    expected.backward()

    loss_fn = process.model_loss(process.targets(stats), stats.group_N, scores_N, samples=6)
    total, accuracy = torch.zeros((), dtype=torch.float64), 0.0
    for samples in cut:
        index = batch.token_index(samples)
        out = loss_fn(now[index], torch.zeros(len(index)), batch.select(samples))
        total, accuracy = total + out.loss, accuracy + float(out.sums["prm/accuracy"])
    total.backward()
    assert total.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.allclose(now.grad.double(), x.grad, atol=1e-6) and x.grad.abs().max() > 1e-2
    assert accuracy == pytest.approx(int(right) / 6)
    # Neither prompts nor what comes from them.
    assert not now.grad[~batch.loss_mask_T].any()


def test_a_reward_that_is_no_probability_is_no_target():
    process = make_objective("prime", process_reward=ProcessReward(target="reward")).process
    with pytest.raises(RuntimeError, match=r"between 0 and 1.*got 1\.5"):
        process.targets(stats_of([0.0, 1.5, 0, 0, 0, 0]))


def test_the_share_of_pairs_in_the_right_order():
    scores, groups = torch.tensor([3.0, 1, 2, 9, 5]), torch.tensor([0, 0, 0, 1, 1])
    # 3 > 1 and 2 > 1 are right; 9 < 5 is not.
    assert pair_accuracy(scores, torch.tensor([1.0, 0, 1, 0, 1]), groups) == pytest.approx(2 / 3)
    # Pairs count by how far outcomes are apart: 0.5 right (3 > 2), 1.0 right (3 > 1), 0.5 wrong (1 < 2).
    assert pair_accuracy(scores[:3], torch.tensor([1.0, 0.5, 0.0]), groups[:3]) == pytest.approx(1.5 / 2)
    assert pair_accuracy(scores, torch.ones(5), groups) is None


@pytest.mark.parametrize(
    ("name", "choices", "group_size", "told"),
    [
        ("sft", {"process_reward": ProcessReward(coef=1.0)}, 1, "sft does not sample"),
        ("grpo", {"process_reward": ProcessReward(coef=1.0)}, 4, "credit: response gives all tokens the same"),
        ("prime", {}, 1, "group_size is 1"),
        ("prime", {"process_reward": ProcessReward(loss="dpo")}, 4, "write update: after"),
    ],
)
def test_choices_that_make_no_sense_are_refused(name, choices, group_size, told):
    findings = Findings(section="algorithm")
    check_method(findings, name, Choices(**choices), group_size)
    assert any("process_reward" in error and told in error for error in findings.errors), findings.errors


def test_what_changes_nothing_without_the_model_is_reported():
    findings = Findings(section="algorithm")
    check_method(findings, "grpo", Choices(process_reward=ProcessReward(beta=0.1)), 4)
    assert findings.ignored == [("algorithm.process_reward", "its coef is 0: there is no process reward model")]


def test_ppo_may_have_process_rewards_in_its_returns():
    """GAE with γ = λ = 1 and values of 0 gives the returns themselves."""
    batch = make_batch().with_columns({Column.VALUES: torch.zeros(len(make_batch().token_ids_T))})
    process = ProcessReward(coef=2.0, outcome_coef=1.0)
    advantages_T = advantages_of(batch, make_objective("ppo", whiten=False, process_reward=process))
    rewards = token_rewards(log_ratios(batch), 0.05, "token", "step")
    expected = [
        [a + REWARDS[i] for a in gains]
        for i, gains in enumerate(expected_advantages(rewards, [0.0] * 6, 2.0, 0.0, "token", 1.0))
    ]
    assert advantages_T[batch.loss_mask_T].tolist() == pytest.approx([*chain(*expected)], rel=1e-5, abs=1e-6)
