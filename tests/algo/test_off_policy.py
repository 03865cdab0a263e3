"""Samples of another policy than the trainer's: weights against closed forms, gradients against the on-policy one.

A policy over two tokens of six, small enough to go through all 36 responses: expectations are exact, nothing is drawn.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from fivefold.algo import methods
from fivefold.algo.objective import make_objective
from fivefold.columns import Column
from fivefold.trainer.models import Models
from fivefold.types import TokenBatch
from tests.support.toy import ToyModel

VOCAB, LENGTH = 6, 2
RESPONSES = list(itertools.product(range(VOCAB), repeat=LENGTH))


def setting():
    """(trainer's logits by place, how far the engine's are from them, advantage of each response)."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(LENGTH, VOCAB, generator=generator)
    change = 0.8 * torch.randn(LENGTH, VOCAB, generator=generator)
    return logits, change, torch.randn(len(RESPONSES), generator=generator)


def logprobs_of(logits: torch.Tensor) -> torch.Tensor:
    """[responses, tokens]"""
    logp = torch.log_softmax(logits, -1)
    return torch.stack([torch.stack([logp[place, token] for place, token in enumerate(response)]) for response in RESPONSES])


def gradient(correction: methods.Correction, logits, change, advantages, sampled_by, **choices) -> torch.Tensor:
    """Of the expected objective under samples of `sampled_by`, with the engine's log-probs next to them."""
    logits = logits.clone().requires_grad_()
    now = logprobs_of(logits)
    engine = logprobs_of(logits.detach() + change)
    count = len(RESPONSES)
    mask = torch.tensor([False, True, True] * count)

    def flat(values):
        return torch.cat([values.new_zeros(count, 1), values], 1).flatten()

    batch = TokenBatch(torch.zeros(3 * count, dtype=torch.long), mask, [3] * count)
    batch[Column.OLD_LOGPROBS] = flat(now.detach())
    batch[Column.ROLLOUT_LOGPROBS] = flat(engine)
    batch[Column.ADVANTAGES] = flat(advantages[:, None].expand(count, LENGTH))
    probability = (now.detach() if sampled_by == "trainer" else engine).sum(1).exp()
    batch[Column.LOSS_WEIGHTS] = flat(probability[:, None].expand(count, LENGTH))
    batch.update_tokens = LENGTH * count
    objective = make_objective("grpo", kl=methods.KL(coef=0.0), rollout_correction=correction, **choices)
    objective.loss(flat(now), torch.zeros(3 * count), batch).loss.backward()
    return -logits.grad


def named(name: str, **changes) -> methods.Correction:
    return methods.Correction(name=name, **changes)


CASES = {
    "tis": named("tis"),
    "mis": named("mis", high=4.0),
    "icepop": named("icepop"),
    "sequence_tis": named("sequence_tis", high=4.0),
    "sequence_mis": named("sequence_mis", high=6.0),
    "decoupled": named("decoupled"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_corrected_gradient_is_closer_to_the_on_policy_one(name):
    on_policy = gradient(named("none"), *setting(), "trainer")
    uncorrected = gradient(named("none"), *setting(), "engine")
    corrected = gradient(CASES[name], *setting(), "engine")
    before, after = (uncorrected - on_policy).norm(), (corrected - on_policy).norm()
    assert before > 0.3 * on_policy.norm(), "the change matters"
    assert after < 0.8 * before, (float(before), float(after))


def test_whole_responses_weighted_without_a_bound_give_the_on_policy_gradient():
    on_policy = gradient(named("none"), *setting(), "trainer")
    corrected = gradient(named("sequence_tis", high=1e9), *setting(), "engine")
    assert torch.allclose(corrected, on_policy, atol=1e-6)


def test_the_engine_s_log_probs_as_old_ones_give_it_too_where_nothing_is_clipped():
    """Token by token, so only where one token is all there is: the second place is made the same in both."""
    logits, change, advantages = setting()
    change[1] = 0
    on_policy = gradient(named("none"), logits, change, advantages, "trainer")
    old_is_engine = methods.Correction(old_logprobs_from="engine")
    wide = gradient(old_is_engine, logits, change, advantages, "engine", clip_low=1.0, clip_high=1e9)
    assert torch.allclose(wide[0], on_policy[0], atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_the_weights_of_a_known_change_equal_the_closed_form(name):
    """log w = log Z' - log Z - change[token] at each place, Z and Z' being the sums over the vocabulary of both."""
    from fivefold.algo.segments import Segments

    logits, change, _ = setting()
    chosen = methods.resolve("grpo", methods.Choices(rollout_correction=CASES[name])).rollout_correction
    shift = (logits + change).logsumexp(1) - logits.logsumexp(1)
    samples = Segments(torch.ones(LENGTH * len(RESPONSES), dtype=torch.bool), [LENGTH] * len(RESPONSES))
    gap = (logprobs_of(logits) - logprobs_of(logits + change)).flatten()
    weights, _ = chosen(gap, samples)
    for number, response in enumerate(RESPONSES):
        exact = [torch.exp(shift[place] - change[place, token]).item() for place, token in enumerate(response)]
        if chosen.weight == "sequence":
            exact = [exact[0] * exact[1]] * 2
        for place, w in enumerate(exact):
            bounded = min(max(w, chosen.low), chosen.high)
            expected = bounded if chosen.outside == "truncate" or bounded == w else 0.0
            assert float(weights[number * LENGTH + place]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("by_token", [True, False])
def test_the_age_of_a_token_counts_steps_of_several_updates(by_token):
    """Of a policy after 12 updates, three a step: tokens of 4, 3, 2, 1 and 0 steps ago, and of a version within a step."""
    model = ToyModel()
    model.version = 12
    models = Models({"policy": model}, ranks=None, guard=None, updates=3)
    versions, ways = (
        ([0, 3, 6, 9, 12, 4], [3 / 4, 2 / 3, 1 / 2, 0.0, 0.0, 5 / 8])
        if by_token
        else ([3, 3, 3, 6, 6, 6], [2 / 3] * 3 + [1 / 2] * 3)
    )
    batch = TokenBatch(torch.zeros(6, dtype=torch.long), torch.ones(6, dtype=torch.bool), [3, 3])
    if by_token:
        batch[Column.VERSION] = torch.tensor(versions)
    models.annotate(
        batch, frozenset({Column.INTERPOLATION}), SimpleNamespace(skipped_N=None, version_N=torch.tensor([3, 6]))
    )
    assert batch[Column.INTERPOLATION].tolist() == pytest.approx(ways)
