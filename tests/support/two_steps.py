"""Two GRPO steps on a layout and the same written out with transformers and torch.optim.AdamW, and how far they are apart."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fivefold.algo.advantages import AdvantageInputs
from fivefold.algo.objective import make_objective
from fivefold.algo.terms.kl import KL
from fivefold.columns import Column
from fivefold.config.learners import MegatronConfig, OptimizerConfig, PolicyConfig
from fivefold.types import TokenBatch
from tests.support.layout_cases import Case, with_backend
from tests.support.shards import shard_of_replica
from tests.support.tiny_models import VOCAB, load_tensors

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
OBJECTIVE = make_objective("grpo", kl=KL(coef=KL_COEF))


def whole_batch(text_T: torch.Tensor | None = None) -> TokenBatch:
    """The same batch on every layout, with old and reference log-probs that differ from the policy's; `text_T` are its tokens,
    drawn at random if left out.
    """
    generator = torch.Generator().manual_seed(3)
    mask = torch.ones(sum(LENGTHS), dtype=torch.bool)
    start = 0
    for length, prompt in zip(LENGTHS, PROMPTS, strict=True):
        mask[start : start + prompt] = False
        start += length
    drawn_T = torch.randint(0, VOCAB, (sum(LENGTHS),), generator=generator)
    batch = TokenBatch(drawn_T if text_T is None else text_T, mask, list(LENGTHS), temperature=TEMPERATURE)
    rewards_N = torch.tensor([1.0, 0, 0, 1, 0.5, 0, 1, 0])
    advantages_N = OBJECTIVE.compared(AdvantageInputs(rewards_N, torch.arange(len(LENGTHS)) // GROUP, torch.tensor(LENGTHS)))
    responses_N = torch.tensor(LENGTHS) - torch.tensor(PROMPTS)
    noise = torch.randn(2, sum(LENGTHS), generator=generator) * 0.1
    return replace(
        batch.with_columns(
            {
                Column.ADVANTAGES: batch.expand_to_tokens(advantages_N),
                Column.LOSS_WEIGHTS: batch.expand_to_tokens(OBJECTIVE.loss_weights(responses_N, MAX_RESPONSE)),
                Column.OLD_LOGPROBS: noise[0] * mask,
                Column.REF_LOGPROBS: 10 * noise[1] * mask,
            }
        ),
        update_tokens=int(responses_N.sum()),
    )


def megatron_step(mesh, directory: Path, policy: PolicyConfig, base_T: torch.Tensor):
    """Two optimizer steps: (reports, parameters by Hugging Face name) of one rank.

    Old and reference log-probs are `base_T`, those of the oracle, with noise: so the loss shows what the layout computes
    from the first step on.
    """
    from fivefold.megatron.model import MegatronModel

    return updated(MegatronModel(directory, policy, mesh, total_updates=2), mesh, base_T)


def fsdp_step(mesh, directory: Path, policy: PolicyConfig, base_T: torch.Tensor):
    """The same two steps of `megatron_step`, with the model of an `fsdp:` layout."""
    from fivefold.fsdp.mesh import build_mesh
    from fivefold.fsdp.model import FSDPModel

    mesh = build_mesh(mesh.ranks, mesh.device, policy.fsdp.replicas)
    return updated(FSDPModel(directory, policy, mesh, total_updates=2), mesh, base_T)


def updated(model, mesh, base_T: torch.Tensor):
    """Two optimizer steps of a model: (reports, parameters by Hugging Face name)."""
    batch = whole_batch()
    batch = batch.with_columns(
        {Column.OLD_LOGPROBS: base_T + batch[Column.OLD_LOGPROBS], Column.REF_LOGPROBS: base_T + batch[Column.REF_LOGPROBS]}
    )
    mine = batch.select(shard_of_replica(mesh.ranks, range(len(LENGTHS))))
    reports = [model.train_step(mine, OBJECTIVE.loss) for _ in range(2)]
    return reports, {name: tensor.clone() for name, tensor in model.weights()}


def reference_step(
    directory: Path,
    options: dict[str, Any],
    adapt: Callable[[Any], Callable[[], None]] | None = None,
    *,
    batch: TokenBatch | None = None,
    optimizer: OptimizerConfig = OPTIMIZER,
    updates: int = 2,
):
    """The same two steps written out with transformers and torch.optim.AdamW, routers' losses included.

    ([(loss, gradient norm)], parameters by name, [T] log-probs before the first step). `adapt` changes the model before, and
    gives what is to be done with it after the last step.
    """
    import transformers

    config = transformers.AutoConfig.from_pretrained(directory)
    # Other implementations may leave a part out: transformers 5.19 computes Gemma 2 with SDPA, which has no soft cap.
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, config=config, attn_implementation="eager").float()
    # No token pads here, so that all of them learn.
    model.get_input_embeddings().padding_idx = None
    finish = (lambda: None) if adapt is None else adapt(model)
    batch = whole_batch() if batch is None else batch
    decays = {n: p.ndim > 1 and not n.endswith("bias") for n, p in model.named_parameters()}
    decay = [p for n, p in model.named_parameters() if decays[n] and p.requires_grad]
    plain = [p for n, p in model.named_parameters() if not decays[n] and p.requires_grad]
    adam = torch.optim.AdamW(
        [{"params": decay, "weight_decay": optimizer.weight_decay}, {"params": plain, "weight_decay": 0.0}],
        lr=optimizer.lr,
        betas=(optimizer.betas[0], optimizer.betas[1]),
        eps=optimizer.eps,
    )
    routed: dict[torch.nn.Module, list[torch.Tensor]] = {}
    for module in model.modules():
        if type(module).__name__.lower().endswith("topkrouter"):
            module.register_forward_hook(lambda module, _, output: routed.setdefault(module, []).append(output))

    def logprobs() -> list[torch.Tensor]:
        routed.clear()
        pieces, start = [], 0
        for length, prompt in zip(LENGTHS, PROMPTS, strict=True):
            tokens = batch.token_ids_T[start : start + length]
            logits = model(tokens[None]).logits[0] / TEMPERATURE
            pieces.append(torch.log_softmax(logits, -1)[prompt - 1 : -1].gather(1, tokens[prompt:, None])[:, 0])
            start += length
        return pieces

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
                bias: Any = router.e_score_correction_bias
                counts = torch.cat([chosen.flatten() for *_, chosen in calls]).bincount(minlength=len(bias)).float()
                bias += options.get("moe_router_bias_update_rate", 0.0) * torch.sign(counts.mean() - counts)

    base = [x.detach() for x in logprobs()]
    results = []
    for _ in range(updates):
        loss, start, now = torch.zeros(()), 0, logprobs()
        for i, (length, prompt) in enumerate(zip(LENGTHS, PROMPTS, strict=True)):
            place = slice(start + prompt, start + length)
            old, ref = base[i] + batch[Column.OLD_LOGPROBS][place], base[i] + batch[Column.REF_LOGPROBS][place]
            advantage = batch[Column.ADVANTAGES][place]
            ratio = (now[i] - old).exp()
            gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            k3 = (ref - now[i]).exp() - (ref - now[i]) - 1
            loss = loss - (gain - KL_COEF * k3).mean() / len(LENGTHS)
            start += length
        adam.zero_grad()
        (loss + router_losses()).backward()
        move_biases()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), optimizer.clip_grad)
        adam.step()
        results.append((loss.item(), norm.item()))
    finish()
    with tempfile.TemporaryDirectory() as saved:
        # In memory transformers stacks experts; its files have the names that everything else goes by.
        model.save_pretrained(saved)
        base_T = torch.zeros(sum(LENGTHS))
        base_T[batch.loss_mask_T] = torch.cat(base)
        return results, load_tensors(Path(saved)), base_T


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
    numbers, state, _ = oracle
    scale = max(abs(loss) for loss, _ in numbers)
    losses, norms, parameters = [], [], []
    for reports, weights in results:
        assert set(weights) == set(state) - {"lm_head.weight"} | set(weights) & {"lm_head.weight"}
        for report, (expected_loss, expected_norm) in zip(reports, numbers, strict=True):
            losses.append(abs(report.loss - expected_loss) / scale)
            norms.append(abs(report.grad_norm - expected_norm) / expected_norm)
        parameters += [float((tensor - state[name]).abs().max()) for name, tensor in weights.items()]
    # What is not a number is not equal.
    loss, norm, parameter = (
        max(math.inf if math.isnan(value) else value for value in values) for values in (losses, norms, parameters)
    )
    return loss, norm, parameter


def run_step(cluster, layout: str, directory: Path, policy: PolicyConfig, function=None, *arguments, oracle=None):
    """The step on every rank of a layout, with the oracle's log-probs as old and reference ones."""
    base_T = (oracle or expected(directory, policy))[2]
    layout = with_backend(layout)
    step = fsdp_step if layout.startswith("fsdp") else megatron_step
    return cluster.run(function or step, layout, directory, policy, base_T, *arguments)


BOUNDS = (4e-6, 1e-5, 1e-6)
"""Relative loss, relative gradient norm, absolute parameter: what float32 may move in any order of summation.

A log-prob differs from transformers' by 1e-6 (two last places of the logits' log-sum, near 4.9). The loss moves by that times
the sum of its slopes, 1.1 on this batch, and is 0.28. A gradient sums 109 tokens times 64 channels: 6e-8 times the root of
that is 5e-6, in forward and backward. Adam moves a parameter by lr / eps = 10 times the error of an element of the clipped
gradient, whose largest are 0.1: a last place of those is 7e-9, and a sum of 109 parts is off by some ten of them.
"""


def assert_equal(results, oracle) -> None:
    for difference_seen, bound in zip(difference(results, oracle), BOUNDS, strict=True):
        assert difference_seen <= bound


POLICY = PolicyConfig(dtype="float32", tokens_per_micro_batch=1000, optimizer=OPTIMIZER)
ROUTER = {
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.3,
    "moe_z_loss_coeff": 0.05,
    "moe_router_bias_update_rate": 0.02,
}
"""Every loss of a router, large enough to matter next to the policy's."""


DENSE_MODELS = ("qwen3", "qwen2_tied", "qwen3_tied")


def policy_of(model: str, case: Case, budget: int) -> PolicyConfig:
    megatron = MegatronConfig(pipeline=case.pipeline, transformer={} if model in DENSE_MODELS else ROUTER)
    return replace(POLICY, tokens_per_micro_batch=budget, sequence_parallel=case.sequence_parallel, megatron=megatron)
