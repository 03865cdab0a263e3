"""Every formula against numbers written out by hand, or against a slow loop."""

from __future__ import annotations

import math

import pytest
import torch

from fivefold.algo import METHODS, kl
from fivefold.algo.advantages import GroupMeanScaled, GroupNorm, LeaveOneOut, LengthWeighted, Ones
from fivefold.algo.aggregate import constant_length, seq_mean_token_mean, seq_mean_token_sum, token_mean
from fivefold.algo.ratios import sequence_log_ratio
from fivefold.algo.surrogates import CISPO, LogLikelihood, PPOClip, SoftGate
from fivefold.batch import spread
from fivefold.types import TokenBatch

ANY = torch.ones(8, dtype=torch.long)
"""Response lengths where they do not matter."""


def test_group_advantages_of_the_field_s_test_case():
    advantages = GroupNorm()(torch.tensor([1.0, 0, 0, 1]), torch.zeros(4, dtype=torch.long), ANY[:4])
    assert advantages.tolist() == pytest.approx([0.8660, -0.8660, -0.8660, 0.8660], abs=1e-4)


def test_the_standard_deviation_is_the_unbiased_one_with_eps_1e_6():
    rewards = torch.tensor([3.0, 5.0, 10.0, 0.1, 0.2, 0.4], dtype=torch.float64)
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    for begin in (0, 3):
        r = rewards[begin : begin + 3].tolist()
        mean = sum(r) / 3
        std = math.sqrt(sum((x - mean) ** 2 for x in r) / 2)
        expected = [(x - mean) / (std + 1e-6) for x in r]
        assert GroupNorm()(rewards, groups, ANY[:6])[begin : begin + 3].tolist() == pytest.approx(expected, rel=1e-6)


def test_dr_grpo_subtracts_the_mean_only():
    assert GroupNorm(by_std=False)(torch.tensor([1.0, 0, 0, 1]), torch.zeros(4, dtype=torch.long), ANY[:4]).tolist() == [
        0.5,
        -0.5,
        -0.5,
        0.5,
    ]


def test_a_group_of_one_and_a_group_of_equals_give_zero():
    assert GroupNorm()(torch.tensor([5.0]), torch.tensor([0]), ANY[:1]).tolist() == [0.0]
    assert GroupNorm()(torch.tensor([2.0, 2.0, 7.0]), torch.tensor([0, 0, 1]), ANY[:3]).tolist() == [0.0, 0.0, 0.0]


def test_supervised_samples_count_alike():
    assert Ones()(torch.tensor([0.3, 0.9], dtype=torch.float64), torch.tensor([0, 1]), ANY[:2]).tolist() == [1.0, 1.0]


def test_ppo_clips_only_where_clipping_lowers_the_objective():
    old = torch.zeros(4)
    now = torch.tensor([1.5, 1.5, 0.5, 0.5]).log()
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    assert PPOClip()(now - old, now, advantages).tolist() == pytest.approx([1.2, -1.5, 0.5, -0.8])
    assert PPOClip(clip_high=0.28)(now - old, now, advantages).tolist() == pytest.approx([1.28, -1.5, 0.5, -0.8])


def test_a_clipped_token_has_no_gradient_and_an_unclipped_one_has_ratio_times_advantage():
    now = torch.tensor([1.5, 1.1]).log().requires_grad_()
    PPOClip()(now, now, torch.tensor([2.0, 2.0])).sum().backward()
    assert now.grad.tolist() == pytest.approx([0.0, 2.2])


def test_dual_clip_bounds_what_a_bad_token_may_cost():
    now = torch.tensor([5.0, 2.0, 5.0]).log()
    advantages = torch.tensor([-1.0, -1.0, 1.0])
    assert PPOClip(dual_clip=3.0)(now, now, advantages).tolist() == pytest.approx([-3.0, -2.0, 1.2])


def test_cispo_weights_the_log_likelihood_and_no_token_loses_its_gradient():
    now = torch.tensor([3.0, 1.1, 0.1]).log().requires_grad_()
    advantages = torch.tensor([2.0, 2.0, -1.0])
    value = CISPO()(now - torch.zeros(3), now, advantages)
    assert value.tolist() == pytest.approx([1.2 * 2 * math.log(3), 1.1 * 2 * math.log(1.1), -0.1 * math.log(0.1)], rel=1e-5)
    value.sum().backward()
    assert now.grad.tolist() == pytest.approx([2.4, 2.2, -0.1], rel=1e-5)


@pytest.mark.parametrize(("advantage", "tau"), [(1.5, 1.0), (-0.5, 1.05)])
def test_sapo_s_gate_has_the_policy_gradient_at_ratio_one_and_fades_away_from_it(advantage, tau):
    for ratio in (1.0, 1.4, 0.5, 6.0):
        now = torch.tensor([ratio]).log().requires_grad_()
        value = SoftGate()(now, now, torch.tensor([advantage]))
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        assert value.item() == pytest.approx(4 / tau * gate * advantage, rel=1e-5)
        value.sum().backward()
        # d/d log pi = 4 sigma (1 - sigma) rho A, which is A at rho = 1.
        assert now.grad.item() == pytest.approx(4 * gate * (1 - gate) * ratio * advantage, rel=1e-4)


def test_the_ratio_of_a_sequence_is_the_geometric_mean_of_its_tokens():
    mask = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1, 1, 1], dtype=torch.bool)
    lengths = [3, 2, 5]
    now = (-torch.arange(10.0) / 7).requires_grad_()
    old = -torch.arange(10.0).flip(0) / 5
    log_ratio = sequence_log_ratio(now, old, mask, lengths)
    difference = (now.detach() - old).tolist()
    start = 0
    for length in lengths:
        tokens = [t for t in range(start, start + length) if mask[t]]
        mean = sum(difference[t] for t in tokens) / len(tokens)
        for t in tokens:
            assert float(log_ratio[t].detach()) == pytest.approx(mean, rel=1e-5)
        start += length
    # The mean over a response of exp(ratio) has the gradient of the response's own ratio.
    (log_ratio[1:3].exp().mean()).backward()
    s = math.exp((difference[1] + difference[2]) / 2)
    assert now.grad.tolist() == pytest.approx([0, s / 2, s / 2] + [0] * 7, rel=1e-5)


def test_leave_one_out_against_a_loop():
    rewards, groups = [1.0, 0.0, 4.0, 2.0, 5.0, 7.0], [0, 0, 0, 1, 1, 2]
    found = LeaveOneOut()(torch.tensor(rewards), torch.tensor(groups), ANY[:6]).tolist()
    for i, reward in enumerate(rewards):
        others = [r for j, r in enumerate(rewards) if groups[j] == groups[i] and j != i]
        assert found[i] == pytest.approx(reward - sum(others) / len(others) if others else 0.0)


def test_opo_s_baseline_weighs_rewards_by_length():
    found = LengthWeighted()(torch.tensor([1.0, 0.0, 3.0]), torch.tensor([0, 0, 1]), torch.tensor([3, 1, 9]))
    assert found.tolist() == pytest.approx([1 - 0.75, -0.75, 0.0])


def test_gpg_scales_for_groups_that_tell_nothing():
    rewards, groups = torch.tensor([1.0, 0, 1, 1, 0, 0]), torch.tensor([0, 0, 1, 1, 2, 2])
    assert GroupMeanScaled()(rewards, groups, ANY[:6]).tolist() == pytest.approx([0.5 * 3, -0.5 * 3, 0, 0, 0, 0])
    assert GroupMeanScaled()(torch.ones(4), torch.zeros(4, dtype=torch.long), ANY[:4]).tolist() == [0.0] * 4


def test_log_likelihood_is_cross_entropy():
    assert LogLikelihood()(torch.zeros(2), torch.tensor([-1.0, -2.0]), torch.ones(2)).tolist() == [-1.0, -2.0]


def test_kl_estimators_of_one_token():
    d = 0.3
    logp, ref = torch.tensor([-1.0]), torch.tensor([-1.0 - d])
    assert kl.k1(logp, ref).item() == pytest.approx(d)
    assert kl.k2(logp, ref).item() == pytest.approx(d * d / 2)
    assert kl.k3(logp, ref).item() == pytest.approx(math.exp(-d) + d - 1)
    assert kl.absolute(ref, logp).item() == pytest.approx(d)


def test_k1_and_k3_estimate_the_kl_of_two_distributions():
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.softmax(torch.randn(5, generator=generator), 0) for _ in range(2))
    exact = (p * (p / q).log()).sum().item()
    for estimator in (kl.k1, kl.k3):
        assert (p * estimator(p.log(), q.log())).sum().item() == pytest.approx(exact, rel=1e-5)


def test_aggregations_against_their_definitions():
    lengths, loss = [2, 3, 0], [[1.0, 2.0], [3.0, 4.0, 5.0], []]
    tensor = torch.tensor(lengths)

    def weighted(weights):
        return sum(float(weights[i]) * sum(loss[i]) for i in range(3))

    assert weighted(token_mean(tensor, 8)) == pytest.approx(15 / 5)
    assert weighted(seq_mean_token_mean(tensor, 8)) == pytest.approx((1.5 + 4.0 + 0) / 3)
    assert weighted(seq_mean_token_sum(tensor, 8)) == pytest.approx(15 / 3)
    assert weighted(constant_length(tensor, 8)) == pytest.approx(15 / 8 / 3)


def make_batch() -> TokenBatch:
    lengths, prompts = [5, 4, 6], [2, 1, 3]
    mask = torch.cat([torch.arange(n) >= p for n, p in zip(lengths, prompts, strict=True)])
    batch = TokenBatch(torch.arange(15), mask, lengths)
    objective = METHODS["grpo"]()
    responses = torch.tensor([n - p for n, p in zip(lengths, prompts, strict=True)])
    generator = torch.Generator().manual_seed(5)
    batch.advantages_T = spread(torch.tensor([1.0, -0.5, 0.25]), batch)
    batch.loss_weights_T = spread(objective.weights(responses, 8), batch)
    batch.update_tokens = int(responses.sum())
    for name in ("old_logprobs_T", "ref_logprobs_T", "rollout_logprobs_T"):
        setattr(batch, name, -torch.rand(15, generator=generator) * mask)
    return batch


@pytest.mark.parametrize(
    "changes", [{}, {"kl_coef": 0.1, "kl_estimator": "k2", "entropy_coef": 0.3}], ids=["", "kl-entropy"]
)
@pytest.mark.parametrize("name", list(METHODS))
@pytest.mark.parametrize("cut", [[[0, 1, 2]], [[0], [1, 2]], [[2], [0], [1]], [[1, 0, 2], []]])
def test_the_loss_its_gradient_and_its_metrics_are_the_same_for_every_cut(name, cut, changes):
    batch, objective = make_batch(), METHODS[name]().override(**changes)

    def run(pieces):
        logprobs = (-torch.linspace(0.1, 1.5, 15)).requires_grad_()
        total, sums, highest = 0.0, {}, {}
        for samples in pieces:
            index = batch.token_index(samples)
            part = batch.select(samples)
            out = objective.loss(logprobs[index] * part.loss_mask_T, torch.ones(len(index)) * part.loss_mask_T, part)
            total = total + out.loss
            for key, value in out.sums.items():
                sums[key] = sums.get(key, 0.0) + float(value)
            for key, value in out.maxima.items():
                highest[key] = max(highest.get(key, 0.0), float(value))
        total.backward()
        return float(total), logprobs.grad, sums, highest

    loss, gradient, sums, highest = run([[0, 1, 2]])
    other = run(cut)
    assert other[0] == pytest.approx(loss, rel=1e-6)
    assert torch.allclose(other[1], gradient, atol=1e-7)
    assert other[2] == pytest.approx(sums, rel=1e-5, abs=1e-7)
    assert other[3] == pytest.approx(highest)


def test_grpo_s_loss_against_a_loop():
    batch, objective = make_batch(), METHODS["grpo"]().override(kl_coef=0.05)
    logprobs = -torch.linspace(0.1, 1.5, 15) * batch.loss_mask_T
    expected, start = 0.0, 0
    for sample, (length, prompt) in enumerate(zip([5, 4, 6], [2, 1, 3], strict=True)):
        advantage = [1.0, -0.5, 0.25][sample]
        tokens = []
        for t in range(start + prompt, start + length):
            logp, old, ref = float(logprobs[t]), float(batch.old_logprobs_T[t]), float(batch.ref_logprobs_T[t])
            ratio = math.exp(logp - old)
            gain = min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
            tokens.append(gain - 0.05 * (math.exp(ref - logp) - (ref - logp) - 1))
        expected -= sum(tokens) / len(tokens) / 3
        start += length
    assert float(objective.loss(logprobs, torch.zeros(15), batch).loss) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("method", "change", "says"),
    [
        ("sft", {"by_std": True}, "group advantages"),
        ("sft", {"clip_low": 0.1}, "clipped ratio"),
        ("grpo", {"clip_low": 1.5}, "clip_low must be in"),
        ("rloo", {"ratio": "sequence"}, "compare with the policy before the update"),
        ("cispo", {"dual_clip": 3.0}, "dual_clip belongs to PPO"),
        ("grpo", {"dual_clip": 1.1}, r"above 1 \+ clip_high"),
        ("opo", {"by_std": False}, "group advantages"),
    ],
)
def test_a_choice_that_the_method_does_not_have_is_refused(method, change, says):
    with pytest.raises(ValueError, match=says):
        METHODS[method]().override(**change)


def test_an_entropy_bonus_raises_the_objective_by_its_weighted_entropy():
    batch = make_batch()
    plain, with_bonus = (METHODS["grpo"]().override(entropy_coef=coef) for coef in (0.0, 0.2))
    logprobs, entropy = -torch.linspace(0.1, 1.5, 15) * batch.loss_mask_T, torch.linspace(0.5, 2.0, 15) * batch.loss_mask_T
    difference = float(plain.loss(logprobs, entropy, batch).loss - with_bonus.loss(logprobs, entropy, batch).loss)
    assert difference == pytest.approx(0.2 * float((entropy * batch.loss_weights_T).sum()), rel=1e-5)
