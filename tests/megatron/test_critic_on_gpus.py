"""A model with a value head on GPUs: values against transformers, PPO's updates on layouts over NCCL against one GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fivefold.algo.advantages import AdvantageInputs
from fivefold.algo.objective import make_objective
from fivefold.algo.values import ValueLoss
from fivefold.columns import Column
from tests.support.cluster import Together
from tests.support.gpu_models import build, finite, is_large, step_batch
from tests.support.shards import shard_of_replica
from tests.support.two_steps import OPTIMIZER

pytestmark = pytest.mark.gpu

PPO = make_objective("ppo", gamma=0.99, lam=0.95)
LAYOUTS = ["d2", "t2", "p2", "c2", "t2c2", "t2p2", "d2p2"]


def budget(mesh) -> int:
    return 4096 if is_large(mesh) else 64


def values(mesh, directory: Path, dtype: str) -> tuple[float, float, float]:
    """Largest and mean difference of values from transformers' in float32, and the values' own spread."""
    import transformers

    model = build(mesh, directory, dtype, budget(mesh), value_head=True)
    batch = step_batch(mesh, model.spec.vocab)
    values_T = model.forward(batch)
    reference = transformers.AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    reference = reference.to(mesh.device).eval()
    gaps, start = [], 0
    with torch.no_grad():
        for length in batch.lengths_N:
            tokens = batch.token_ids_T[start : start + length][None].to(mesh.device)
            expected = (reference.model(tokens)[0][0] @ reference.score.weight[0]).cpu()
            part_T = values_T[start : start + length]
            # From the token before the response to its last one.
            first = int(batch.loss_mask_T[start : start + length].nonzero()[0]) - 1
            gaps.append((part_T - expected)[first:])
            assert not part_T[:first].any()
            start += length
    gap = torch.cat(gaps).abs()
    return float(gap.max()), float(gap.mean()), float(values_T[values_T != 0].std())


def ppo_updates(mesh, directory: Path, critic_directory: Path, dtype: str):
    """Policy, critic, and [(losses and norms of critic and policy)] of two updates with values, GAE and whitening."""
    policy = build(mesh, directory, dtype, budget(mesh))
    critic = build(mesh, critic_directory, dtype, budget(mesh), value_head=True)
    whole = step_batch(mesh, policy.spec.vocab)
    samples = len(whole.lengths_N)
    shard = shard_of_replica(mesh.ranks, range(samples))
    mine = whole.select(shard)
    mine = mine.with_columns(
        {Column.OLD_LOGPROBS: policy.forward(mine) + mine[Column.OLD_LOGPROBS], Column.VALUES: critic.forward(mine)}
    )

    generator = torch.Generator().manual_seed(3)
    responses_N = torch.tensor([int(whole.loss_mask_T[whole.token_index([i])].sum()) for i in range(samples)])
    scores = AdvantageInputs(torch.rand(samples, generator=generator), torch.arange(samples), responses_N)
    finished_N = torch.rand(samples, generator=generator) < 0.7
    advantages_T, returns_T = PPO.advantages(mine, scores, finished_N, mesh.ranks)
    weights_N = PPO.loss_weights(responses_N, max(whole.lengths_N))[shard]
    mine = mine.with_columns(
        {Column.ADVANTAGES: advantages_T, Column.RETURNS: returns_T, Column.LOSS_WEIGHTS: mine.expand_to_tokens(weights_N)}
    )
    numbers = []
    for _ in range(2):
        of_critic, of_policy = critic.train_step(mine, ValueLoss(0.5)), policy.train_step(mine, PPO.loss)
        numbers.append((of_critic.loss, of_critic.grad_norm, of_policy.loss, of_policy.grad_norm))
    critic.verify()
    policy.verify()
    return policy, critic, numbers


def ppo_numbers(mesh, *arguments):
    return ppo_updates(mesh, *arguments)[2]


def ppo_numbers_and_kept(mesh, directory: Path, critic_directory: Path):
    """Updates in float32 on one GPU, whose parameters the other layouts find in the models' directories."""
    policy, critic, numbers = ppo_updates(mesh, directory, critic_directory, "float32")
    for where, model in ((directory, policy), (critic_directory, critic)):
        torch.save({name: tensor.cpu() for name, tensor in model.weights()}, where / "after-ppo.pt")
    return numbers


def ppo_numbers_and_gaps(mesh, directory: Path, critic_directory: Path):
    """Updates in float32, and how far both models' parameters are from those kept: root mean square over lr."""
    policy, critic, numbers = ppo_updates(mesh, directory, critic_directory, "float32")
    gaps = []
    for where, model in ((directory, policy), (critic_directory, critic)):
        kept = torch.load(where / "after-ppo.pt", mmap=True)
        squares = elements = 0.0
        for name, tensor in model.weights():
            squares += finite(float((tensor - kept[name].to(tensor.device)).square().sum()))
            elements += tensor.numel()
        gaps.append(squares**0.5 / (OPTIMIZER.lr * elements**0.5))
    return numbers, gaps


def worst(reports, expected) -> list[float]:
    """Largest differences of (critic's loss, norm, policy's loss, norm) over both updates, relative to the largest of each."""
    scale = [max(abs(row[i]) for row in expected) for i in range(4)]
    pairs = list(zip(reports, expected, strict=True))
    return [max(finite(abs(a[i] - b[i])) for a, b in pairs) / scale[i] for i in range(4)]


@pytest.fixture(scope="module")
def results(gpus, gpu_models):
    """By ("values" or "ppo", dtype or layout)."""
    pair = (gpu_models["qwen3"], gpu_models["critic"])
    calls = {
        ("values", "float32"): ("megatron:d1", values, pair[1], "float32"),
        ("values", "bfloat16"): ("megatron:d1", values, pair[1], "bfloat16"),
        ("ppo", "bfloat16"): ("megatron:d1", ppo_numbers, *pair, "bfloat16"),
        ("ppo", "d1"): ("megatron:d1", ppo_numbers_and_kept, *pair),
        **{("ppo", layout): (f"megatron:{layout}", ppo_numbers_and_gaps, *pair) for layout in LAYOUTS},
    }
    together = Together(gpus, calls)
    # What the other layouts are compared with: made before all of them, once.
    together["ppo", "d1"]
    return together


def test_float32_values_equal_those_of_transformers(results):
    ((largest, _, spread),) = results["values", "float32"]
    print(f"largest {largest:.1e}, values spread {spread:.2f}")
    assert largest < 1e-4 * max(1.0, spread)


def test_bfloat16_values_are_near_those_of_float32(results):
    ((_, mean, spread),) = results["values", "bfloat16"]
    print(f"mean {mean:.1e}, values spread {spread:.2f}")
    assert mean < 0.02 * spread + 1e-3


def test_ppo_in_bfloat16_is_near_that_of_float32(results):
    (rounded,), (exact,) = results["ppo", "bfloat16"], results["ppo", "d1"]
    value_loss, value_norm, _, norm = worst(rounded, exact)
    print(f"critic's loss {value_loss:.1e}, norm {value_norm:.1e}; policy's norm {norm:.1e}")
    # The policy's loss is left out: its clipped gains cancel to nearly 0.
    assert max(value_loss, value_norm, norm) < 1e-2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_updates_of_ppo_are_those_of_one_gpu(results, layout):
    """Values, GAE, whitening over replicas, critic and policy."""
    (expected,) = results["ppo", "d1"]
    for numbers, gaps in results["ppo", layout]:
        print(
            "differences", *(f"{value:.1e}" for value in worst(numbers, expected)), "parameters", *(f"{g:.1e}" for g in gaps)
        )
        assert max(worst(numbers, expected)) < 1e-5
        assert max(gaps) < 1e-4
