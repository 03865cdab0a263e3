"""TRL's losses as its trainer computes them, micro-batch by micro-batch, against the objective of the translated run."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from fivefold.algo.advantages import AdvantageInputs
from fivefold.algo.objective import Objective
from fivefold.columns import Column
from fivefold.types import TokenBatch
from tests.support.dialects import config

LIMIT = 6
RUN = ("model_name_or_path=m", "dataset_name=a/b", "reward_funcs=r.f", "num_generations=4", f"max_completion_length={LIMIT}")
MODES = [f"vllm_importance_sampling_mode={by}_{how}" for by in ("token", "sequence") for how in ("mask", "truncate")]
BOUNDS = ["vllm_importance_sampling_clip_max=1.1", "vllm_importance_sampling_clip_min=0.8"]
LOSSES = [
    *([f"loss_type={name}"] for name in ("grpo", "dapo", "dr_grpo", "luspo", "sapo")),
    ["loss_type=cispo", "epsilon_high=1.4"],
    *([f"loss_type={name}", "importance_sampling_level=sequence", "beta=0.1"] for name in ("grpo", "luspo")),
    ["loss_type=dapo", "beta=0.04", "use_bias_correction_kl=false"],
    ["epsilon_high=0.28", "delta=1.4"],
    *(["use_vllm=true", "beta=0.1", mode, *bounds] for mode in MODES for bounds in ([], BOUNDS)),
    ["use_vllm=true", "vllm_importance_sampling_correction=false"],
    ["mask_truncated_completions=true"],
]
ALONE = [["loss_type=bnpo"], ["loss_type=bnpo", "entropy_coef=0.1"], ["loss_type=dapo", "entropy_coef=0.1"]]


def responses(count):
    """Numbers of `count` responses, the first one truncated, the second one without an advantage."""
    generator = torch.Generator().manual_seed(1)

    def normal(length, scale):
        return torch.randn(length, generator=generator) * scale

    responses_of_step = []
    for place in range(count):
        length = LIMIT if place == 0 else int(torch.randint(1, LIMIT, (1,), generator=generator))
        now = normal(length, 0.6) - 1.5
        old = now + normal(length, 0.4)
        advantage = 0.0 if place == 1 else float(normal(1, 1.0))
        responses_of_step.append({"now": now, "old": old, "ref": now + normal(length, 0.4), "engine": old + normal(length, 0.2),
                      "entropy": normal(length, 1.0).abs(), "advantage": advantage})  # fmt: skip
    return responses_of_step


def objective_tokens(one, options):
    """What TRL multiplies by -1 for each token of a response, with its KL."""
    log_ratio = one["now"] - one["old"].double()
    ratio = (log_ratio.mean() if options["importance_sampling_level"] == "sequence" else log_ratio).exp()
    advantage, low, high = one["advantage"], options["epsilon"], options["epsilon_high"] or options["epsilon"]
    if options["loss_type"] == "cispo":
        value = ratio.detach().clamp(max=high) * advantage * one["now"]
    elif options["loss_type"] == "sapo":
        tau = 1.0 if advantage > 0 else 1.05
        value = torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantage
    else:
        bounded = ratio if options["delta"] is None else ratio.clamp(max=options["delta"])
        value = torch.minimum(bounded * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    if options["use_vllm"] and options["vllm_importance_sampling_correction"]:
        by, how = options["vllm_importance_sampling_mode"].split("_")
        drift = (one["old"] - one["engine"]).double()
        weight = (drift.sum() if by == "sequence" else drift).exp()
        least, most = options["vllm_importance_sampling_clip_min"] or 0.0, options["vllm_importance_sampling_clip_max"]
        value = value * (weight.clamp(least, most) if how == "truncate" else weight * ((weight >= least) & (weight <= most)))
    behind = one["ref"].double() - one["now"]
    kl = (behind.exp() - behind - 1) * (ratio if options["use_bias_correction_kl"] else 1)
    return (value - options["beta"] * kl).expand(len(one["now"]))


def trl_loss(batches, options):
    """Loss of one optimizer step over its micro-batches."""
    kept = [one for batch in batches for one in batch if not (options["mask_truncated_completions"] and one["truncated"])]
    tokens, total = sum(len(one["now"]) for one in kept), 0.0
    for batch in batches:
        for one in (response for response in batch if any(response is other for other in kept)):
            value = objective_tokens(one, options)
            share = {
                "dapo": 1 / tokens,
                "cispo": 1 / tokens,
                "bnpo": 1 / sum(len(other["now"]) for other in batch) / len(batches),
                "dr_grpo": 1 / LIMIT / len(batch) / len(batches),
                "luspo": 1 / len(batch) / len(batches),
            }.get(options["loss_type"], 1 / len(value) / len(batch) / len(batches))
            entropy = one["entropy"].mean() * len(value) / sum(len(other["now"]) for other in batch) / len(batches)
            total = total - share * value.sum() - options["entropy_coef"] * entropy
    return total


DEFAULTS = {
    "loss_type": "dapo", "importance_sampling_level": "token", "epsilon": 0.2, "epsilon_high": None, "delta": None, "beta": 0.0,
    "use_bias_correction_kl": True, "use_vllm": False, "vllm_importance_sampling_correction": True, "entropy_coef": 0.0,
    "vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_min": None,
    "vllm_importance_sampling_clip_max": 3.0, "mask_truncated_completions": False,
}  # fmt: skip


def both(words, rows, at_once):
    """(loss, gradient) of TRL and of ours, for responses in micro-batches of `rows` on two processes."""
    given = responses(8)
    options = DEFAULTS | {key: parsed(value) for key, _, value in (word.partition("=") for word in words)}
    copies = [
        response | {"now": response["now"].double().requires_grad_(), "truncated": len(response["now"]) == LIMIT}
        for response in given
    ]
    there = trl_loss([copies[start : start + rows] for start in range(0, 8, rows)], options)
    there.backward()
    settings = [f"per_device_train_batch_size={rows}", f"num_processes={at_once}",
                f"gradient_accumulation_steps={8 // rows // at_once}"]  # fmt: skip
    run = config("trl", *RUN, *settings, *words)
    objective = Objective.of(run.algorithm.resolved)

    def packed(name):
        return torch.cat([torch.cat([torch.zeros(1), response[name]]) for response in given])

    lengths_N = torch.tensor([len(response["now"]) for response in given])
    mask_T = torch.cat([torch.tensor([False] + [True] * int(length)) for length in lengths_N])
    batch = TokenBatch(torch.zeros(len(mask_T), dtype=torch.long), mask_T, (lengths_N + 1).tolist(), update_tokens=8)
    columns = {Column.OLD_LOGPROBS: "old", Column.REF_LOGPROBS: "ref", Column.ROLLOUT_LOGPROBS: "engine"}
    for column, name in columns.items():
        batch[column] = packed(name)
    advantages_N = torch.tensor([response["advantage"] for response in given])
    batch[Column.ADVANTAGES] = batch.expand_to_tokens(advantages_N)
    kept_N = lengths_N < LIMIT if run.algorithm.resolved.overlong_filter else None
    batch[Column.LOSS_WEIGHTS] = batch.expand_to_tokens(objective.loss_weights(lengths_N, LIMIT, kept_N))
    if (penalties_N := objective.penalty_weights(lengths_N, LIMIT, kept_N)) is not None:
        batch[Column.PENALTY_WEIGHTS] = batch.expand_to_tokens(penalties_N)
    now_T = packed("now").requires_grad_()
    here = objective.loss(now_T, packed("entropy"), batch).loss
    here.backward()
    gradients = [
        torch.zeros_like(response["now"]) if response["now"].grad is None else response["now"].grad for response in copies
    ]
    gradient_T = torch.cat([torch.cat([torch.zeros(1), gradient]) for gradient in gradients])
    return (float(there.detach()), gradient_T), (float(here.detach()), now_T.grad)


def parsed(text):
    return {"true": True, "false": False}.get(text, text if text.replace("_", "").isalpha() else float(text))


def same(words, rows, at_once):
    (there, expected_T), (here, found_T) = both(words, rows, at_once)
    assert here == pytest.approx(there, rel=1e-5, abs=1e-6)
    assert expected_T.abs().max() > 1e-3
    assert torch.allclose(found_T.double(), expected_T.double(), atol=1e-7 + 1e-5 * float(expected_T.abs().max()))


@pytest.mark.parametrize("words", LOSSES, ids=" ".join)
def test_a_loss_of_trl_has_its_value_and_gradient_here(words):
    same(words, rows=2, at_once=2)


@pytest.mark.parametrize("words", ALONE, ids=" ".join)
def test_a_mean_over_micro_batches_of_one_response_or_one_micro_batch_is_the_same(words):
    same(words, rows=1, at_once=2)
    same(words, rows=8, at_once=1)


@pytest.mark.parametrize(("scale", "by"), [("group", 1), ("batch", 0), ("none", None), ("true", 1), ("false", None)])
def test_advantages_are_divided_as_scale_rewards_says(scale, by):
    """TRL adds 1e-4 to the deviation, here it is 1e-6: 0.02 % of the smallest one."""
    rewards = torch.tensor([[1.0, 0, 0, 1], [3, 1, 1, 1]])
    centred = rewards - rewards.mean(1, keepdim=True)
    divisor = {None: torch.ones(1), 0: rewards.std() + 1e-4, 1: rewards.std(1, keepdim=True) + 1e-4}[by]
    chosen = Objective.of(config("trl", *RUN, f"scale_rewards={scale}").algorithm.resolved)
    groups = torch.arange(2).repeat_interleave(4)
    advantages = chosen.compared(AdvantageInputs(rewards.flatten(), groups, torch.ones(8, dtype=torch.long)))
    assert advantages.tolist() == pytest.approx((centred / divisor).flatten().tolist(), rel=2e-4)


@pytest.mark.parametrize(("sizes", "prompts", "updates"), [
    ({"per_device_train_batch_size": 8, "num_processes": 8}, 16, 1),
    ({"gradient_accumulation_steps": 4, "num_processes": 2}, 16, 1),
    ({"gradient_accumulation_steps": 2, "steps_per_generation": 8, "num_processes": 2, "num_iterations": 3}, 32, 4),
    ({"gradient_accumulation_steps": 2, "generation_batch_size": 64, "num_processes": 2}, 16, 2),
])  # fmt: skip
def test_a_rollout_has_the_prompts_and_updates_that_trls_sampler_gives_it(sizes, prompts, updates):
    """TRL's sampler repeats generation_batch_size / num_generations prompts; an update is an accumulation of its batches."""
    run = config("trl", *RUN, "loss_type=grpo", "max_steps=24", "save_steps=24", *(f"{k}={v}" for k, v in sizes.items()))
    passes = sizes.get("num_iterations", 1)
    assert (run.data.prompts_per_step, run.algorithm.updates_per_step) == (prompts, updates)
    assert (run.algorithm.ppo_epochs, run.trainer.steps) == (passes, 24 / updates / passes)
    assert run.trainer.save_every == 24 / updates / passes


@pytest.mark.parametrize(("words", "rate"), [
    ([], lambda step: 1 - step / 10),
    (["warmup_steps=4"], lambda step: step / 4 if step < 4 else (10 - step) / 6),
    (["warmup_ratio=0.25"], lambda step: step / 3 if step < 3 else (10 - step) / 7),
    (["lr_scheduler_type=cosine"], lambda step: 0.5 * (1 + math.cos(math.pi * step / 10))),
    (["lr_scheduler_type=constant", "warmup_steps=4"], lambda step: 1),
    (["lr_scheduler_type=constant_with_warmup", "warmup_steps=4"], lambda step: min(1, step / 4)),
    (["lr_scheduler_type=cosine_with_min_lr", "lr_scheduler_kwargs.min_lr_rate=0.1"],
     lambda step: 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / 10))),
])  # fmt: skip
def test_each_update_has_the_learning_rate_of_transformers_schedule(words, rate):
    from fivefold.backend.schedule import Schedule

    chosen = config("trl", *RUN, "learning_rate=0.5", "max_steps=10", *words).policy.optimizer

    group = {"lr": 0.0, "max_lr": chosen.lr, "min_lr": chosen.min_lr, "weight_decay": 0.0}
    schedule, rates = Schedule(SimpleNamespace(param_groups=[group]), chosen, 10), []
    for _ in range(10):
        schedule.step(1)
        rates.append(group["lr"] / 0.5)
    assert rates == pytest.approx([rate(step) for step in range(10)])
