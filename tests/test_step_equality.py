"""One GRPO step, the same on every layout: loss, gradient norm and every updated parameter."""

from __future__ import annotations

import math
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.algo import METHODS
from fivefold.batch import spread
from fivefold.config.schema import MegatronConfig, OptimizerConfig, PolicyConfig
from fivefold.types import TokenBatch
from tests.layouts import MODELS, VPP2, Case
from tests.models import VOCAB, load_tensors

LENGTHS = [9, 17, 5, 30, 12, 2, 21, 8]
PROMPTS = [3, 6, 2, 10, 4, 1, 7, 3]
"""Groups of four samples; the sixth has one response token."""
GROUP = 4
MAX_RESPONSE = 32
TEMPERATURE = 1.2
KL_COEF = 0.5
"""The reference is not the model itself, so the loss shows what the layout computes from the first step on; clipped gains
alone would cancel to nearly 0, and their rounding would look large beside it."""
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
        ref_logprobs_T=(10 * noise[1] - math.log(VOCAB)) * mask,
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
    mine = replace(mine, old_logprobs_T=base + mine.old_logprobs_T)
    reports = [model.train_step(mine, OBJECTIVE.loss) for _ in range(2)]
    return reports, {name: tensor.clone() for name, tensor in model.weights()}


def reference_step(directory: Path, options: dict[str, Any]):
    """The same two steps written out with transformers and torch.optim.AdamW, routers' losses included."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, config=config).float()
    batch = whole_batch()
    decay = [p for n, p in model.named_parameters() if p.ndim > 1]
    plain = [p for n, p in model.named_parameters() if p.ndim == 1]
    adam = torch.optim.AdamW(
        [{"params": decay, "weight_decay": OPTIMIZER.weight_decay}, {"params": plain, "weight_decay": 0.0}],
        lr=OPTIMIZER.lr,
        betas=tuple(OPTIMIZER.betas),
        eps=OPTIMIZER.eps,
    )
    routed: dict[torch.nn.Module, list[torch.Tensor]] = {}
    for module in model.modules():
        if type(module).__name__.lower().endswith("topkrouter"):
            module.register_forward_hook(lambda module, _, output: routed.setdefault(module, []).append(output))

    def logprobs() -> list[torch.Tensor]:
        routed.clear()
        found, start = [], 0
        for length, prompt in zip(LENGTHS, PROMPTS, strict=True):
            tokens = batch.token_ids_T[start : start + length]
            logits = model(tokens[None]).logits[0] / TEMPERATURE
            found.append(torch.log_softmax(logits, -1)[prompt - 1 : -1].gather(1, tokens[prompt:, None])[:, 0])
            start += length
        return found

    def router_losses() -> torch.Tensor:
        total, tokens = torch.zeros(()), sum(LENGTHS)
        for calls in routed.values():
            for logits, _, chosen in calls:
                scores = logits.softmax(-1) if config.model_type == "qwen3_moe" else logits.sigmoid()
                scores = scores / scores.sum(-1, keepdim=True)
                best = torch.zeros_like(scores).scatter(1, scores.topk(chosen.shape[1], -1).indices, 1.0)
                balance = (best.mean(0) * scores.sum(0)).sum() * scores.shape[1] / chosen.shape[1]
                total = total + options.get("moe_aux_loss_coeff", 0.0) * balance / tokens
                total = total + options.get("moe_z_loss_coeff", 0.0) * logits.logsumexp(-1).square().sum() / tokens
        return total

    @torch.no_grad()
    def move_biases() -> None:
        for router, calls in routed.items():
            if hasattr(router, "e_score_correction_bias"):
                bias = router.e_score_correction_bias
                counts = torch.cat([chosen.flatten() for *_, chosen in calls]).bincount(minlength=len(bias)).float()
                bias += options.get("moe_router_bias_update_rate", 0.0) * torch.sign(counts.mean() - counts)

    base = [x.detach() for x in logprobs()]
    results = []
    for _ in range(2):
        loss, start, now = torch.zeros(()), 0, logprobs()
        for i, (length, prompt) in enumerate(zip(LENGTHS, PROMPTS, strict=True)):
            place = slice(start + prompt, start + length)
            old, ref = base[i] + batch.old_logprobs_T[place], batch.ref_logprobs_T[place]
            advantage = batch.advantages_T[place]
            ratio = (now[i] - old).exp()
            gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            k3 = (ref - now[i]).exp() - (ref - now[i]) - 1
            loss = loss - (gain - KL_COEF * k3).mean() / len(LENGTHS)
            start += length
        adam.zero_grad()
        (loss + router_losses()).backward()
        move_biases()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_grad)
        adam.step()
        results.append((loss.item(), norm.item()))
    with tempfile.TemporaryDirectory() as saved:
        # In memory transformers stacks experts; its files have the names that everything else goes by.
        model.save_pretrained(saved)
        return results, load_tensors(Path(saved))


_EXPECTED: dict[Any, Any] = {}


def expected(directory: Path, policy: PolicyConfig | None = None):
    options = {} if policy is None else policy.megatron.transformer
    key = (directory, tuple(sorted((name, str(value)) for name, value in options.items())))
    if key not in _EXPECTED:
        _EXPECTED[key] = reference_step(directory, options)
    return _EXPECTED[key]


def difference(results, oracle) -> tuple[float, float, float]:
    """Largest (relative loss, relative gradient norm, absolute parameter) difference over ranks and steps.

    Losses are compared on the scale of the larger one: gains cancel, so a loss may come close to 0.
    """
    numbers, state = oracle
    scale = max(abs(loss) for loss, _ in numbers)
    losses, norms, parameters = [], [], []
    for reports, weights in results:
        assert set(weights) == set(state) - {"lm_head.weight"} | set(weights) & {"lm_head.weight"}
        for report, (expected_loss, expected_norm) in zip(reports, numbers, strict=True):
            losses.append(abs(report.loss - expected_loss) / scale)
            norms.append(abs(report.grad_norm - expected_norm) / expected_norm)
        parameters += [float((tensor - state[name]).abs().max()) for name, tensor in weights.items()]
    # What is not a number is not equal.
    return tuple(max(math.inf if math.isnan(value) else value for value in found) for found in (losses, norms, parameters))


BOUNDS = (1e-6, 1e-5, 1e-6)
"""Relative loss, relative gradient norm, absolute parameter (lr 1e-3)."""


def assert_equal(results, oracle) -> None:
    for found, bound in zip(difference(results, oracle), BOUNDS, strict=True):
        assert found <= bound


POLICY = PolicyConfig(dtype="float32", tokens_per_micro_batch=1000, optimizer=OPTIMIZER)
ROUTER = {
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.3,
    "moe_z_loss_coeff": 0.05,
    "moe_router_bias_update_rate": 0.02,
}
"""Every loss of a router, large enough to matter beside the policy's."""


def policy_of(model: str, case: Case, budget: int) -> PolicyConfig:
    megatron = MegatronConfig(pipeline=case.pipeline, transformer={} if model in DENSE_MODELS else ROUTER)
    return replace(POLICY, tokens_per_micro_batch=budget, sequence_parallel=case.sequence_parallel, megatron=megatron)


DENSE_MODELS = ("qwen3",)


@pytest.mark.parametrize("budget", [1000, 32])
@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for name, cases in MODELS.items() for case in cases if case.ci], ids=str
)
def test_a_step_is_the_same_on_every_layout(cluster, models, name, case, budget):
    """Clipped gains, KL, routers' balance and z-losses, moving router biases. `make test-layouts` runs every layout."""
    policy = policy_of(name, case, budget)
    results = cluster.run(megatron_step, f"megatron:{case.layout}", models(name), policy)
    assert_equal(results, expected(models(name), policy))


@pytest.mark.parametrize("layout", ["t2", "p2", "p4", "d2t2p2"])
@pytest.mark.parametrize("name", ["qwen2_tied", "qwen3_tied"])
def test_a_step_is_the_same_with_tied_embeddings(cluster, models, name, layout):
    policy = replace(POLICY, tokens_per_micro_batch=32)
    assert_equal(cluster.run(megatron_step, f"megatron:{layout}", models(name), policy), expected(models(name)))


@pytest.mark.parametrize("layout", ["p2", "p2c2"])
def test_a_step_is_the_same_with_tied_embeddings_and_virtual_stages(cluster, models, layout):
    policy = policy_of("qwen3", Case(layout, VPP2), 32)
    assert_equal(
        cluster.run(megatron_step, f"megatron:{layout}", models("qwen3_tied"), policy), expected(models("qwen3_tied"))
    )


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
