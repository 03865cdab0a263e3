"""Objectives in a loop of the user's own compute what a run computes: batches, losses and gradients."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fivefold import Column, TokenBatch, make_objective, prepare_update
from fivefold.config.learners import MegatronConfig
from fivefold.errors import UserError
from fivefold.types import Group, Prompt, Sample
from tests.support.two_steps import POLICY

PAGE = Path(__file__).resolve().parents[2] / "docs/api.md"
TOKENS = torch.tensor([[5, 6, 9, 8, 2], [5, 6, 4, 2, 0], [0, 7, 3, 3, 2], [0, 7, 8, 2, 0]])
RESPONSES = [[9, 8, 2], [4, 2], [3, 3, 2], [8, 2]]
MASK = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 1, 1, 0], [0, 0, 1, 1, 1], [0, 0, 1, 1, 0]])
REWARDS = [1.0, 0.0, 0.25, 1.0]
FINISHED = [True, False, True, True]
LONGEST = 8
METHODS = {
    "grpo": {},
    "dr_grpo": {"aggregate": "constant-length"},
    "dapo": {"reward_shift": 0.5},
    "gspo": {"overlong_filter": True},
    "ppo": {"advantage": "reward", "credit": "discounted", "gamma": 0.9, "kl": {"coef": 0.0}},
    "rloo": {"kl": {"coef": 0.1, "place": "reward"}},
    "reinforce_plus_plus": {"kl": {"coef": 0.2, "place": "loss"}},
}


def padded() -> TokenBatch:
    return TokenBatch.from_padded(TOKENS, MASK, TOKENS != 0)


def filled(batch: TokenBatch) -> TokenBatch:
    """With log-probs of other models, which some methods ask for."""
    values_T = torch.linspace(-1, 0, len(batch.token_ids_T)) * batch.loss_mask_T
    return batch.with_columns({Column.OLD_LOGPROBS: values_T, Column.REF_LOGPROBS: 0.5 * values_T})


def groups() -> list[Group]:
    samples = [
        Sample(tokens, [], "", "answered" if finished else "length", 0, reward=reward)
        for tokens, finished, reward in zip(RESPONSES, FINISHED, REWARDS, strict=True)
    ]
    prompts = [Prompt(0, [5, 6], "s", "", ""), Prompt(1, [7], "s", "", "")]
    return [Group(prompt, samples[2 * i : 2 * i + 2], index=i) for i, prompt in enumerate(prompts)]


def batches_of_a_run(mesh, methods: dict) -> list[tuple[torch.Tensor, ...]]:
    from fivefold.rollout.packing import pack
    from fivefold.rollout.stats import BatchPlan, gather_stats
    from fivefold.trainer.minibatches import MiniBatches

    batches, plan = [], BatchPlan(max_response_tokens=LONGEST)
    for name, choices in methods.items():
        objective = make_objective(name, **choices)
        stats = gather_stats(groups(), mesh.ranks, plan)
        batch = filled(pack(groups(), stats, mesh.ranks, plan))
        objective.assign_advantages(batch, stats, mesh.ranks)
        (mini,) = MiniBatches(objective)(batch, stats)
        batches.append(tuple(mini.batch.tensors().values()))
    return batches


def test_an_own_loop_gets_the_batches_of_a_run(cluster):
    (expected,) = cluster.run(batches_of_a_run, "megatron:d1", METHODS)
    for (name, choices), tensors in zip(METHODS.items(), expected, strict=True):
        objective = make_objective(name, **choices)
        batch = prepare_update(
            objective, filled(padded()), REWARDS, [0, 0, 1, 1], max_response_tokens=LONGEST, finished=FINISHED
        )
        assert len(batch.tensors()) == len(tensors)
        for column, expected_T in zip(batch.tensors().values(), tensors, strict=True):
            assert torch.equal(column, expected_T), name
        assert batch[Column.LOSS_WEIGHTS].any() and batch[Column.ADVANTAGES].any()


def gradients_of_a_run(mesh, directory: Path) -> dict[str, torch.Tensor]:
    from fivefold.megatron import step
    from fivefold.megatron.bridge import WeightStream
    from fivefold.megatron.chunks import named_weights
    from fivefold.megatron.model import MegatronModel

    policy = replace(POLICY, megatron=MegatronConfig(ddp={"use_distributed_optimizer": False}))
    model = MegatronModel(directory, policy, mesh, total_updates=1)
    objective = make_objective("grpo", surrogate=lambda *values: values[0].exp() * values[2], kl={"coef": 0})
    batch = prepare_update(objective, padded(), [1, 0, 0, 1], [0, 0, 1, 1], max_response_tokens=LONGEST)
    for ddp in model._models:
        ddp.train()
        ddp.zero_grad_buffer()
    with mesh.active():
        step.forward_backward(model._models, model._finalize, batch, objective.loss, model._batching, [])
    stream = WeightStream(
        lambda: {name: tensor.main_grad for name, tensor in named_weights(model._chunks).items()}, model.spec, mesh, 64
    )
    return {name: tensor.clone() for name, tensor in stream()}


def test_the_loop_on_the_page_has_the_gradient_of_a_run(cluster, models, tmp_path, monkeypatch):
    program = next(text for text in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if "optimizer.step" in text)
    assert len(program.splitlines()) <= 40
    (tmp_path / "model").symlink_to(models("qwen3"))
    monkeypatch.chdir(tmp_path)
    space: dict = {}
    exec(program, space)
    (expected,) = cluster.run(gradients_of_a_run, "megatron:d1", models("qwen3"))
    gradients = {name: parameter.grad for name, parameter in space["model"].named_parameters()}
    assert gradients.keys() == expected.keys()
    # Relative to the whole gradient: sums in another order differ by float32's rounding and no more.
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    assert norm > 0.1
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).norm() < 1e-5 * norm, name


def test_the_losses_of_parts_add_up_to_that_of_the_whole():
    objective = make_objective("dapo")
    batch = prepare_update(objective, padded(), REWARDS, [0, 0, 1, 1], max_response_tokens=LONGEST)
    logprobs_T = torch.linspace(-2, -1, len(batch.token_ids_T))
    parts = [[0, 3], [1], [2]]
    losses = []
    for samples in parts:
        part = batch.select(samples)
        part_T = logprobs_T[batch.token_index(samples)]
        losses.append(objective.loss(part_T, torch.zeros_like(part_T), part).loss)
    loss = objective.loss(logprobs_T, torch.zeros_like(logprobs_T), batch).loss
    assert sum(losses) == pytest.approx(float(loss), abs=1e-7)


@pytest.mark.parametrize(
    ("method", "choices", "changes", "message"),
    [
        ("grpo", {}, {"rewards": [1, 0]}, "rewards must have a number for each of the 4 samples: got 2"),
        ("grpo", {}, {"rewards": [1, 0, float("nan"), 1]}, "every reward must be a finite number"),
        ("grpo", {}, {"rewards": [1, 0, None, 1]}, r"rewards must be numbers: got \[1, 0, None, 1\]"),
        ("grpo", {}, {"rewards": [[1], [0], [0], [1]]}, "rewards must have a number for each of the 4 samples: got 4 x 1"),
        ("grpo", {}, {"groups": [0]}, "groups must have a number for each of the 4 samples: got 1"),
        ("grpo", {}, {"groups": ["a", "a", "b", "b"]}, "groups must be numbers: got "),
        ("grpo", {}, {"finished": True}, "finished must have a number for each of the 4 samples: got one for all"),
        ("dapo", {}, {"max_response_tokens": 2}, "max_response_tokens must be at least 3, the longest response: got 2"),
        ("grpo", {"kl": {"coef": 0.1}}, {}, r"the method needs batch\[Column.REF_LOGPROBS\]: set it before"),
        ("ppo", {}, {}, r"the method needs batch\[Column.VALUES\]: set it before"),
        ("clip_cov", {}, {}, "selects tokens over all samples of an update: only a run supports that"),
        ("remax", {}, {}, "compares with the most likely response: only a run supports that"),
        ("chord", {}, {}, "learns from an expert's responses: only a run supports that"),
        ("gigpo", {}, {}, "compares turns that answer the same state"),
        ("ppo", {"whiten_by": "domain"}, {}, "whitens the responses of each domain"),
        ("dapo", {"difficulty_by": "correct", "difficulty_low": 0.1}, {}, "leaves prompts out by correctness"),
        (
            "rloo",
            {"kl": {"coef": 0.1, "place": "reward", "target": 0.1}},
            {},
            "adapts the coefficient of a KL in the reward",
        ),
        ("dapo", {"aggregate": "micro-batch-token-mean"}, {}, "averages micro-batches"),
        ("dapo", {"rollout_correction": {"name": "tis"}}, {}, r"the method needs batch\[Column.ROLLOUT_LOGPROBS\]"),
        ("dapo", {"rollout_correction": {"reject_divergence": {"mean_k3": 1.0}}}, {}, r"needs batch\[Column.ROLLOUT_LOGP"),
        ("dapo", {"rollout_correction": {"old_logprobs_from": "engine"}}, {}, r"needs batch\[Column.ROLLOUT_LOGPROBS\]"),
        (
            "dapo",
            {"rollout_correction": {"old_logprobs_from": "loglinear"}},
            {},
            r"batch\[Column.ROLLOUT_LOGPROBS\], batch\[Column.INTERPOLATION\]",
        ),
        (
            "dapo",
            {"rollout_correction": {"weight": "turn"}},
            {},
            r"batch\[Column.ROLLOUT_LOGPROBS\], batch\[Column.TURN\]",
        ),
        ("dapo", {"importance_sampling_level": "turn"}, {}, r"needs batch\[Column.TURN\]"),
        ("rloo", {"credit": "turns", "gamma": 0.9}, {}, r"needs batch\[Column.TURN\]"),
        ("prime", {}, {}, r"needs batch\[Column.PRM_LOGPROBS\], batch\[Column.PRM_REF_LOGPROBS\]"),
        (
            "dpo",
            {},
            {"rewards": [0, 1, 1, 0]},
            r"compares pairs: .* got groups \[0, 0\] and rewards \[0.0, 1.0\] from row 0",
        ),
        ("dpo", {}, {"rewards": [1, 0, 1, 1]}, r"got groups \[1, 1\] and rewards \[1.0, 1.0\] from row 2 on"),
        ("dpo", {}, {"groups": [0, 1, 0, 1]}, r"got groups \[0, 1\] and rewards"),
    ],
)
def test_what_an_own_loop_cannot_compute_is_refused(method, choices, changes, message):
    arguments = {"rewards": REWARDS, "groups": [0, 0, 1, 1], "max_response_tokens": LONGEST} | changes
    batch = padded()
    if method == "dpo":
        batch = filled(batch)
    with pytest.raises(UserError, match=message):
        prepare_update(make_objective(method, **choices), batch, **arguments)


@pytest.mark.parametrize(
    ("method", "choices"),
    [
        ("dr_grpo", {}),
        ("ppo", {}),
        ("reinforce_plus_plus", {"kl": {"coef": 0.1}}),
        ("reinforce_plus_plus_baseline", {}),
        ("otb", {}),
        ("prime", {"advantage_clip": 0.5}),
        ("grpo", {"normalize": "none", "credit": "discounted", "kl": {"coef": 0.1, "place": "reward"}}),
    ],
)
def test_overlong_zero_takes_the_advantage_of_these_responses_and_of_no_others(method, choices):
    def prepared(**more) -> TokenBatch:
        objective, batch = make_objective(method, **choices, **more), padded()
        for column, scale in zip(sorted(objective.needs(1), key=str), (-0.3, -0.5, -0.2, -0.4), strict=False):
            batch[column] = scale * torch.linspace(1, 2, len(batch.token_ids_T)) * batch.loss_mask_T
        if objective.process.is_active:
            batch[Column.PRM_LOGPROBS] = torch.linspace(-1, 0, len(batch.token_ids_T)) * batch.loss_mask_T
        return prepare_update(objective, batch, REWARDS, [0, 0, 1, 1], max_response_tokens=LONGEST, finished=FINISHED)

    plain, batch = prepared(), prepared(overlong_zero=True)
    is_cut_T = batch.expand_to_tokens(torch.tensor([0.0, 1, 0, 0])).bool()
    expected_T = torch.where(is_cut_T, 0.0, plain[Column.ADVANTAGES])
    assert (plain[Column.ADVANTAGES] != expected_T).any() and expected_T.any()
    assert torch.equal(batch[Column.ADVANTAGES], expected_T)
    for column in (Column.RETURNS, Column.LOSS_WEIGHTS):
        assert torch.equal(batch[column], plain[column])


def test_pairs_in_an_own_loop_are_compared_in_their_order():
    objective = make_objective("dpo")
    batch = prepare_update(objective, filled(padded()), [1, 0, 3, 2], [0, 0, 1, 1], max_response_tokens=LONGEST)
    logprobs_T = 0.5 * batch[Column.REF_LOGPROBS]
    margins = [0.1 * float((logprobs_T - batch[Column.REF_LOGPROBS]).split(batch.lengths_N)[row].sum()) for row in range(4)]
    expected = sum(math.log1p(math.exp(-(margins[row] - margins[row + 1]))) for row in (0, 2)) / 2
    assert float(objective.loss(logprobs_T, torch.zeros_like(logprobs_T), batch).loss) == pytest.approx(expected, rel=1e-5)
    with pytest.raises(UserError, match=r"got groups \[1\] and rewards \[1.0\] from row 2 on"):
        prepare_update(objective, batch.select([0, 1, 2]), [1, 0, 1], [0, 0, 1], max_response_tokens=LONGEST)


def test_a_correction_in_an_own_loop_weighs_by_the_engines_log_probs():
    objective, batch = make_objective("dapo", rollout_correction={"name": "tis"}), padded()
    batch[Column.ROLLOUT_LOGPROBS] = -1.0 * batch.loss_mask_T
    batch = prepare_update(objective, batch, REWARDS, [0, 0, 1, 1], max_response_tokens=LONGEST)
    logprobs_T = -0.9 * batch.loss_mask_T
    sums = objective.loss(logprobs_T, torch.zeros_like(logprobs_T), batch).sums
    assert float(sums["rollout_correction/weight_mean"]) == pytest.approx(math.exp(0.1), rel=1e-5)


def test_a_loss_of_what_does_not_fit_says_what_is_missing():
    objective, logprobs_T = make_objective("grpo", kl={"coef": 0}), torch.zeros(int((TOKENS != 0).sum()))
    with pytest.raises(UserError, match="must come from `prepare_update`: it has no advantages_T and no loss_weights_T"):
        objective.loss(logprobs_T, logprobs_T, padded())
    batch = prepare_update(objective, padded(), REWARDS, [0, 0, 1, 1], max_response_tokens=LONGEST)
    tokens = f"must have a number for each of the {len(logprobs_T)} tokens of the batch: got shape"
    with pytest.raises(UserError, match=rf"logprobs_T {tokens} \[5\]"):
        objective.loss(logprobs_T[:5], logprobs_T, batch)
    with pytest.raises(UserError, match=rf"entropy_T {tokens} \[1\]"):
        objective.loss(logprobs_T, logprobs_T[:1], batch)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_batch_is_prepared_on_its_device(device):
    objective = make_objective("rloo", kl={"coef": 0.1, "place": "reward"})
    arguments = {"groups": [0, 0, 1, 1], "max_response_tokens": LONGEST}
    expected = prepare_update(objective, filled(padded()), REWARDS, **arguments)
    before = filled(padded()).to(device)
    batch = prepare_update(objective, before, torch.tensor(REWARDS, device=device), **arguments)
    assert Column.ADVANTAGES not in before
    logprobs_T = torch.linspace(-2, -1, len(batch.token_ids_T), device=device)
    assert objective.loss(logprobs_T, torch.zeros_like(logprobs_T), batch).loss.device.type == device
    for name, tensor in batch.tensors().items():
        assert tensor.device.type == device, name
    for name, tensor in batch.to("cpu").tensors().items():
        assert torch.equal(tensor, expected.tensors()[name]), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"response_NL": MASK[:, :4]}, r"one shape \[samples, tokens\]: got \(4, 5\), \(4, 4\), \(4, 5\)"),
        ({"attention_NL": torch.zeros(4, 5)}, "sample 0 is padding only"),
        ({"response_NL": torch.ones(4, 5)}, "padding cannot carry loss"),
        (
            {"response_NL": MASK | (TOKENS == 7)},
            "the first token of a sample cannot carry loss, as it has no log-prob: sample 2",
        ),
    ],
)
def test_padded_samples_that_do_not_fit_together_are_refused(changes, message):
    arguments = {"token_ids_NL": TOKENS, "response_NL": MASK, "attention_NL": TOKENS != 0} | changes
    with pytest.raises(UserError, match=message):
        TokenBatch.from_padded(**arguments)


def function(*values):
    return values[0]


@pytest.mark.parametrize(
    "choices",
    [
        {"surrogate": function},
        {"surrogate": lambda *values: values[0]},
        {"advantage": function},
        {"credit": function},
        {"importance_sampling_level": function},
        {"aggregate": function},
        {"kl": {"coef": 0.1, "estimator": function}},
        {"rollout_correction": {"weight": function}},
    ],
)
def test_an_objective_takes_functions(choices):
    objective = make_objective("grpo", **choices)
    if "surrogate" in choices:
        values_T = torch.tensor([0.5, 0.0])
        assert objective.gradient.surrogate(values_T, values_T, values_T, None) is values_T


@pytest.mark.parametrize(
    ("name", "choices", "message"),
    [
        ("grop", {}, "the name of the method must be one of .*; got 'grop': did you mean 'grpo'?"),
        ("grpo", {"surrogat": function}, "unknown key 'algorithm.surrogat': did you mean 'algorithm.surrogate'?"),
        ("grpo", {"surrogate": "ppo_clop"}, "got 'ppo_clop': did you mean 'ppo_clip'?"),
        ("grpo", {"kl": {"koef": 1}}, "unknown key 'algorithm.kl.koef': did you mean 'algorithm.kl.coef'?"),
        ("grpo", {"normalize": function}, "algorithm.normalize must be one of group, batch, mean, none"),
        ("grpo", {"clip_high": "much"}, "algorithm.clip_high must be a number, got 'much'"),
    ],
)
def test_a_misspelled_choice_of_an_objective_is_named(name, choices, message):
    with pytest.raises(UserError, match=message):
        make_objective(name, **choices)
