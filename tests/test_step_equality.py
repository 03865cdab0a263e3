"""One GRPO step, the same on every layout: loss, gradient norm and every updated parameter."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fivefold.algo import METHODS
from fivefold.batch import spread
from fivefold.config.schema import OptimizerConfig, PolicyConfig
from fivefold.types import TokenBatch
from tests.models import VOCAB

LENGTHS = [9, 17, 5, 30, 12, 2, 21, 8]
PROMPTS = [3, 6, 2, 10, 4, 1, 7, 3]
"""Groups of four samples; the sixth has one response token."""
GROUP = 4
MAX_RESPONSE = 32
TEMPERATURE = 1.2
KL_COEF = 0.5
"""With reference log-probs this far away the KL carries the loss: clipped gains alone cancel to nearly 0."""
# Adam divides by |gradient| + eps: with eps well above rounding (1e-8) no rounding is blown up to the size of lr, and
# unlike with a tiny eps a wrong scale of the gradient changes the update.
OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-4, weight_decay=0.1, clip_grad=1.0, betas=[0.8, 0.95])
OBJECTIVE = replace(METHODS["grpo"](), kl_coef=KL_COEF)


def whole_batch() -> TokenBatch:
    """The same batch on every layout, with old and reference log-probs that differ from the policy's."""
    generator = torch.Generator().manual_seed(3)
    mask = torch.ones(sum(LENGTHS), dtype=torch.bool)
    start = 0
    for length, prompt in zip(LENGTHS, PROMPTS, strict=True):
        mask[start : start + prompt] = False
        start += length
    batch = TokenBatch(
        torch.randint(0, VOCAB, (sum(LENGTHS),), generator=generator), mask, list(LENGTHS), temperature=TEMPERATURE
    )
    rewards_N = torch.tensor([1.0, 0, 0, 1, 0.5, 0, 1, 0])
    advantages_N = OBJECTIVE.advantage(rewards_N, torch.arange(len(LENGTHS)) // GROUP)
    responses_N = torch.tensor(LENGTHS) - torch.tensor(PROMPTS)
    noise = torch.randn(2, sum(LENGTHS), generator=generator) * 0.1
    return replace(
        batch,
        advantages_T=spread(advantages_N, batch),
        loss_weights_T=spread(OBJECTIVE.weights(responses_N, MAX_RESPONSE), batch),
        old_logprobs_T=noise[0] * mask,
        ref_logprobs_T=10 * noise[1] * mask,
        update_tokens=int(responses_N.sum()),
    )


def megatron_step(mesh, directory: Path, policy: PolicyConfig):
    """Two optimizer steps: (reports, parameters by Hugging Face name) of one rank."""
    from fivefold.megatron.model import MegatronModel

    model = MegatronModel(directory, policy, mesh, total_updates=2)
    batch = whole_batch()
    own, _ = mesh.ranks.share(range(len(LENGTHS)))
    mine = batch.select(own)
    base = model.forward(mine)
    mine = replace(mine, old_logprobs_T=base + mine.old_logprobs_T, ref_logprobs_T=base + mine.ref_logprobs_T)
    reports = [model.train_step(mine, OBJECTIVE.loss) for _ in range(2)]
    return reports, {name: tensor.clone() for name, tensor in model.weights()}


def reference_step(directory: Path):
    """The same two steps written out with transformers and torch.optim.AdamW."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory).float()
    batch = whole_batch()
    decay = [p for n, p in model.named_parameters() if p.ndim > 1]
    plain = [p for n, p in model.named_parameters() if p.ndim == 1]
    adam = torch.optim.AdamW(
        [{"params": decay, "weight_decay": OPTIMIZER.weight_decay}, {"params": plain, "weight_decay": 0.0}],
        lr=OPTIMIZER.lr,
        betas=tuple(OPTIMIZER.betas),
        eps=OPTIMIZER.eps,
    )

    def logprobs() -> list[torch.Tensor]:
        found, start = [], 0
        for length, prompt in zip(LENGTHS, PROMPTS, strict=True):
            tokens = batch.token_ids_T[start : start + length]
            logits = model(tokens[None]).logits[0] / TEMPERATURE
            found.append(torch.log_softmax(logits, -1)[prompt - 1 : -1].gather(1, tokens[prompt:, None])[:, 0])
            start += length
        return found

    base = [x.detach() for x in logprobs()]
    results = []
    for _ in range(2):
        loss, start = torch.zeros(()), 0
        for i, (length, prompt) in enumerate(zip(LENGTHS, PROMPTS, strict=True)):
            place = slice(start + prompt, start + length)
            logp = logprobs()[i]
            old, ref = base[i] + batch.old_logprobs_T[place], base[i] + batch.ref_logprobs_T[place]
            advantage = batch.advantages_T[place]
            ratio = (logp - old).exp()
            gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            k3 = (ref - logp).exp() - (ref - logp) - 1
            loss = loss - (gain - KL_COEF * k3).mean() / len(LENGTHS)
            start += length
        adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_grad)
        adam.step()
        results.append((loss.item(), norm.item()))
    return results, {name: tensor.clone() for name, tensor in model.state_dict().items()}


_EXPECTED = {}


def expected(directory: Path):
    if directory not in _EXPECTED:
        _EXPECTED[directory] = reference_step(directory)
    return _EXPECTED[directory]


def difference(results, oracle) -> tuple[float, float, float]:
    """Largest (relative loss, relative gradient norm, absolute parameter) difference over ranks and steps.

    Losses are compared on the scale of the larger one: gains cancel, so a loss may come close to 0.
    """
    numbers, state = oracle
    scale = max(abs(loss) for loss, _ in numbers)
    loss = norm = parameter = 0.0
    for reports, weights in results:
        for report, (expected_loss, expected_norm) in zip(reports, numbers, strict=True):
            loss = max(loss, abs(report.loss - expected_loss) / scale)
            norm = max(norm, abs(report.grad_norm - expected_norm) / expected_norm)
        for name, tensor in weights.items():
            parameter = max(parameter, float((tensor - state[name]).abs().max()))
    return loss, norm, parameter


def assert_equal(results, oracle) -> None:
    loss, norm, parameter = difference(results, oracle)
    assert loss <= 1e-6
    assert norm <= 1e-5
    assert parameter <= 1e-6


POLICY = PolicyConfig(dtype="float32", tokens_per_micro_batch=1000, optimizer=OPTIMIZER)
LAYOUTS = ["d1", "d2", "t2", "p2", "d2t2", "d2p2", "t2p2", "t4", "d4"]


@pytest.mark.parametrize("budget", [1000, 32])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_is_the_same_on_every_layout(cluster, models, layout, recompute, budget):
    policy = replace(POLICY, recompute=recompute, tokens_per_micro_batch=budget)
    assert_equal(cluster.run(megatron_step, f"megatron:{layout}", models("qwen3"), policy), expected(models("qwen3")))


@pytest.mark.parametrize("layout", ["t2", "d2t2", "t2p2", "t4"])
def test_a_step_is_the_same_without_sequence_parallelism(cluster, models, layout):
    policy = replace(POLICY, sequence_parallel=False, tokens_per_micro_batch=32)
    assert_equal(cluster.run(megatron_step, f"megatron:{layout}", models("qwen3"), policy), expected(models("qwen3")))


@pytest.mark.parametrize("layout", ["t2", "p2", "p4", "d2t2p2"])
@pytest.mark.parametrize("name", ["qwen2_tied", "qwen3_tied"])
def test_a_step_is_the_same_with_tied_embeddings(cluster, models, name, layout):
    policy = replace(POLICY, tokens_per_micro_batch=32)
    assert_equal(cluster.run(megatron_step, f"megatron:{layout}", models(name), policy), expected(models(name)))


def test_selective_recompute_changes_nothing(cluster, models):
    policy = replace(POLICY, recompute="selective")
    assert_equal(cluster.run(megatron_step, "megatron:t2", models("qwen3"), policy), expected(models("qwen3")))


def test_more_replicas_than_samples_neither_hangs_nor_changes_the_step(cluster, models):
    """d8 over 8 samples with a budget of 32: one replica has a sample of two tokens and needs fewer micro-batches."""
    policy = replace(POLICY, tokens_per_micro_batch=32)
    assert_equal(cluster.run(megatron_step, "megatron:d8", models("qwen3"), policy), expected(models("qwen3")))


# --- planted faults: each must be seen by the comparison above -------------------------------------------------------


def step_without_finalize(mesh, directory: Path, policy: PolicyConfig):
    from fivefold.megatron import step

    original = step.finalize_model_grads
    step.finalize_model_grads = lambda *args, **kwargs: None
    try:
        return megatron_step(mesh, directory, policy)
    finally:
        step.finalize_model_grads = original


def step_with_a_factor_of_dp(mesh, directory: Path, policy: PolicyConfig):
    from fivefold.megatron import step

    original = step.finalize_model_grads

    def twice(model, num_tokens, **kwargs):
        original(model, num_tokens, **kwargs)
        for chunk in model:
            chunk.scale_gradients(1.0 / mesh.layout.dp)

    step.finalize_model_grads = twice
    try:
        return megatron_step(mesh, directory, policy)
    finally:
        step.finalize_model_grads = original


def step_without_norm_reduction(mesh, directory: Path, policy: PolicyConfig):
    module = sys.modules["megatron.core.distributed.finalize_model_grads"]
    original = module._allreduce_non_tensor_model_parallel_grads
    module._allreduce_non_tensor_model_parallel_grads = lambda *args, **kwargs: None
    try:
        return megatron_step(mesh, directory, policy)
    finally:
        module._allreduce_non_tensor_model_parallel_grads = original


def step_without_tied_reduction(mesh, directory: Path, policy: PolicyConfig):
    module = sys.modules["megatron.core.distributed.finalize_model_grads"]
    original = module._allreduce_word_embedding_grads
    module._allreduce_word_embedding_grads = lambda *args, **kwargs: None
    try:
        return megatron_step(mesh, directory, policy)
    finally:
        module._allreduce_word_embedding_grads = original


@pytest.mark.parametrize(
    ("fault", "layout", "name"),
    [
        (step_without_finalize, "d2", "qwen3"),
        (step_with_a_factor_of_dp, "d2", "qwen3"),
        (step_without_norm_reduction, "t2", "qwen3"),
        (step_without_tied_reduction, "p2", "qwen3_tied"),
    ],
)
def test_a_planted_fault_is_seen(cluster, models, fault, layout, name):
    results = cluster.run(fault, f"megatron:{layout}", models(name), POLICY)
    loss, norm, parameter = difference(results, expected(models(name)))
    assert norm > 1e-3 or parameter > 1e-5, (loss, norm, parameter)
