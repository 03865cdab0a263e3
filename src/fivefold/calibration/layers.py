"""Measures layers and heads of small models as the trainer runs them: device -> rates in the units of their kinds.

The time of a part is the difference, kind by kind, between a model with more layers, or with a vocabulary, and one without.
Matrix products are not measured this way: those of a layer take ten times as long as its passes over memory.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from fivefold.calibration.kernels import Clock
from fivefold.config.learners import PolicyConfig
from fivefold.distributed.ranks import Ranks
from fivefold.layout import ParallelLayout
from fivefold.megatron.layers.moe import GroupedExperts
from fivefold.megatron.mesh import Mesh, build_mesh, destroy, init_process_group
from fivefold.megatron.model import MegatronModel
from fivefold.models.families import load_spec, parameters_of
from fivefold.models.shapes import file_shapes
from fivefold.plan.costs import Tokens, Work, head_work, layer_work
from fivefold.plan.efficiency import KINDS, UNITS, Efficiencies
from fivefold.types import LossOutput, TokenBatch

Found = tuple[str, float, float]
_MINUTES = 10.0
_ONE = ParallelLayout()
_NOT_PASSES = ("products", "attention", "optimizer", "zeros")


@dataclass(frozen=True)
class _Sizes:
    hidden: int
    ffn: int
    heads: int
    head_dim: int
    vocab: int
    tokens: int
    lengths: tuple[int, ...]
    experts: int
    expert_ffn: int
    expert_tokens: tuple[int, ...]
    """Numbers of tokens per expert to measure."""


_LARGE = _Sizes(2048, 6144, 16, 128, 151936, 16384, (1024, 4096, 8192), 32, 768, (16, 128, 512, 1024, 2048, 4096))
_MIDDLE = replace(_LARGE, vocab=32768, tokens=8192)
_SMALL = _Sizes(64, 192, 4, 16, 8192, 512, (512,), 8, 32, (16, 128))
_LARGE_BYTES = 64 * 2**30
"""Memory in bytes of a GPU that has room for the large sizes, which take 40 GiB."""
_FEW = 1024
"""Vocabulary size of models whose head is not measured: their embeddings take little time and memory."""


def layers(clock: Clock, rates: Callable[[], Efficiencies], tell: Callable[[str], None]) -> Iterator[Found]:
    """Yield rates of layers on one device, from models that train; `tell` receives what cannot be measured, and why."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    init_process_group(clock.device, _MINUTES)
    try:
        mesh = build_mesh(Ranks(_ONE, _MINUTES), clock.device, seed=0, timeout_minutes=_MINUTES)
        with tempfile.TemporaryDirectory() as directory:
            yield from _Layers(clock, mesh, Path(directory), rates, tell).measure()
    finally:
        destroy()


class _Layers:
    def __init__(
        self, clock: Clock, mesh: Mesh, directory: Path, rates: Callable[[], Efficiencies], tell: Callable[[str], None]
    ) -> None:
        self._clock, self._mesh, self._directory, self._rates, self._tell = clock, mesh, directory, rates, tell
        self._sizes = _SMALL
        if clock.is_large:
            room = torch.cuda.get_device_properties(clock.device).total_memory
            self._sizes = _LARGE if room >= _LARGE_BYTES else _MIDDLE

    def measure(self) -> Iterator[Found]:
        """Measure host time, passes over memory, attention, head and experts."""
        few, more = self._model(2), self._model(4)
        yield from self._bodies(few, more)
        del more
        if self._has_time("the head"):
            yield from self._head(few)
        del few
        yield from self._experts()

    def _has_time(self, work: str) -> bool:
        if self._clock.left <= 0:
            self._tell(f"{work}: not measured, the time is over")
        return self._clock.left > 0

    def _rates_of(self, measured: dict[tuple[str, float], tuple[float, float]]) -> Iterator[Found]:
        """Yield the rates of (kind, size) -> (operations or bytes, seconds)."""
        for (kind, size), (amount, seconds) in measured.items():
            if seconds > 0:
                yield kind, size, amount / seconds / UNITS[KINDS[kind].unit]
            else:
                self._tell(f"{kind}: left out, nothing of it was seen")

    def _bodies(self, few: MegatronModel, more: MegatronModel) -> Iterator[Found]:
        sizes, few_tokens = self._sizes, _batch(16, 16, few.spec.vocab)
        host = [self._clock.seconds(partial(model.train_step, few_tokens, _sum)) for model in (few, more)]
        if host[1] > host[0]:
            yield "layer_host", 0, (host[1] - host[0]) / 2 * 1e6
        else:
            self._tell("layer_host: left out, two layers more took no longer")
        for number, length in enumerate(sizes.lengths):
            if not self._has_time(f"attention of {length} tokens"):
                return
            low, high = (self._spent(model, length) for model in (few, more))
            ahead, total = ({kind: (high[way][kind] - low[way][kind]) / 2 for kind in high[way]} for way in (0, 1))
            forward, backward = layer_work(few.spec, _ONE, Tokens(sizes.tokens, length), False)
            if number == 0:
                yield from self._rates_of(_traffic([*forward, *backward], total))
            attention = self._rates().in_use("attention_forward"), self._rates().in_use("attention_backward")
            yield from self._rates_of(
                {
                    (attention[0], length): (_amount(forward, "attention_forward"), ahead["attention"]),
                    (attention[1], length): (
                        _amount(backward, "attention_backward"),
                        total["attention"] - ahead["attention"],
                    ),
                }
            )

    def _head(self, without: MegatronModel) -> Iterator[Found]:
        sizes, model = self._sizes, self._model(2, value_head=False)
        length = sizes.lengths[0]
        bare, total = self._spent(without, length), self._spent(model, length)
        forward, backward = head_work(model.spec, _ONE, Tokens(sizes.tokens, length))
        # Count only the head's own kernels, if it has any: a larger vocabulary also adds passes over its gradient.
        spent_on = (lambda spent: spent["logits"]) if total[0]["logits"] else _passes
        ahead, both = (spent_on(total[way]) - spent_on(bare[way]) for way in (0, 1))
        yield from self._rates_of(
            {
                ("head_forward", 0): (_amount(forward, "head_forward"), ahead),
                ("head_backward", 0): (_amount(backward, "head_backward"), both - ahead),
            }
        )

    def _experts(self) -> Iterator[Found]:
        """Measure the experts of a layer alone: what carries tokens to them and back is measured as traffic."""
        sizes, device = self._sizes, self._mesh.device
        model = self._model(1, experts=True, learns=False)
        (experts,) = (part for part in model.modules() if isinstance(part, GroupedExperts))
        experts.requires_grad_(True)
        for tokens in sizes.expert_tokens:
            if not self._has_time(f"grouped_gemm of {tokens} tokens"):
                return
            count = tokens * sizes.experts
            tokens_TD = torch.randn(count, sizes.hidden, device=device).to(experts.fc1.dtype).requires_grad_()
            weights_T = torch.rand(count, device=device).requires_grad_()
            work = partial(_there_and_back, experts, tokens_TD, weights_T, torch.full((sizes.experts,), tokens))
            # Three products, and each takes two more in backward.
            flops = 3 * 3 * 2 * count * sizes.hidden * sizes.expert_ffn
            yield "grouped_gemm", tokens, flops / self._clock.seconds(work) / 1e12

    def _spent(self, model: MegatronModel, length: int) -> tuple[dict[str, float], dict[str, float]]:
        """Return seconds by kind for (a forward pass, a whole update)."""
        batch = _batch(length, self._sizes.tokens, model.spec.vocab)
        return (
            self._clock.by_kind(lambda: model.forward(batch)),
            self._clock.by_kind(lambda: model.train_step(batch, _sum)),
        )

    def _model(self, layers: int, value_head: bool = True, experts: bool = False, learns: bool = True) -> MegatronModel:
        """Build a model with random weights."""
        # Free the memory of earlier models, which are in cycles of references.
        gc.collect()
        if self._clock.is_large:
            torch.cuda.empty_cache()
        sizes = self._sizes
        config: dict[str, Any] = {
            "model_type": "qwen3_moe" if experts else "qwen3", "hidden_size": sizes.hidden, "intermediate_size": sizes.ffn,
            "num_hidden_layers": layers, "num_attention_heads": sizes.heads, "num_key_value_heads": max(1, sizes.heads // 2),
            "head_dim": sizes.head_dim, "vocab_size": _FEW if value_head else sizes.vocab,
            "max_position_embeddings": 2 * max(sizes.lengths),
            "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
        }  # fmt: skip
        if experts:
            config |= {
                "num_experts": sizes.experts, "num_experts_per_tok": 2,
                "moe_intermediate_size": sizes.expert_ffn, "norm_topk_prob": True,
            }  # fmt: skip
        directory = self._directory / f"{layers}-{value_head}-{experts}"
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(config))
        _write_weights(directory, self._mesh.device, value_head)
        settings = PolicyConfig(tokens_per_micro_batch=sizes.tokens)
        model = MegatronModel(directory, settings, self._mesh, total_updates=1000 if learns else None, value_head=value_head)
        shutil.rmtree(directory)
        return model


def _there_and_back(experts: GroupedExperts, tokens_TD: Tensor, weights_T: Tensor, counts_E: Tensor) -> None:
    """Run forward and compute all gradients of experts."""
    output_TD, _ = experts(tokens_TD, counts_E, weights_T)
    torch.autograd.grad(output_TD, (tokens_TD, weights_T, experts.fc1, experts.fc2), tokens_TD.detach())


def _write_weights(directory: Path, device: torch.device, value_head: bool) -> None:
    """Write random weights: products of zeros would be faster."""
    spec, weights = load_spec(directory, value_head), {}
    for parameter in parameters_of(spec):
        for name, shape in zip(parameter.hf, file_shapes(spec, parameter), strict=True):
            assert shape is not None
            weights[name] = (0.02 * torch.randn(shape, device=device)).bfloat16().cpu()
    save_file(weights, directory / "model.safetensors")


def _passes(spent: dict[str, float]) -> float:
    """Return the seconds of passes over memory that are not the optimizer's."""
    return sum(seconds for kind, seconds in spent.items() if kind not in _NOT_PASSES)


def _traffic(work: list[Work], spent: dict[str, float]) -> dict[tuple[str, float], tuple[float, float]]:
    """Return (amount, seconds) of passes over memory by kind and size.

    Kinds with their own kernels are measured separately; all others share one rate.
    """
    of = {kind: [one for one in work if one.kind == kind] for kind in ("elementwise", "heads", "swiglu")}
    apart = [kind for kind in of if spent.get(kind)]
    rest = [one for kind, works in of.items() if kind not in apart for one in works]
    left = _passes(spent) - sum(spent[kind] for kind in apart)
    traffic = {}
    for kind, works in of.items():
        amount, seconds = (_amount(works, kind), spent[kind]) if kind in apart else (sum(one.amount for one in rest), left)
        traffic[kind, works[0].size] = amount, seconds
    return traffic


def _amount(work: list[Work], kind: str) -> float:
    return sum(one.amount for one in work if one.kind == kind)


def _sum(output_T: Tensor, entropy_T: Tensor, batch: TokenBatch) -> LossOutput:
    """Return a loss with a gradient for every token."""
    return LossOutput(output_T.sum() / max(1, batch.update_tokens), {})


def _batch(length: int, tokens: int, vocab: int) -> TokenBatch:
    """Build sequences of one length, in which all tokens but the first are predicted."""
    lengths = [length] * max(1, tokens // length)
    mask = torch.cat([torch.arange(one) > 0 for one in lengths])
    generator = torch.Generator().manual_seed(0)
    return TokenBatch(
        torch.randint(0, vocab, (sum(lengths),), generator=generator), mask, lengths, update_tokens=int(mask.sum())
    )
