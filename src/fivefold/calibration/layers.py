"""Layers and heads of small models as the trainer runs them: device -> rates in the units of their kinds.

What a model with more layers, longer sequences, a vocabulary or experts takes more than one without, less the products, is
the time of that part.
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
from fivefold.config.schema import PolicyConfig
from fivefold.distributed.ports import free_port
from fivefold.distributed.ranks import Ranks
from fivefold.layout import ParallelLayout
from fivefold.megatron.layers.moe import GroupedExperts
from fivefold.megatron.mesh import Mesh, build_mesh, destroy, init_process_group
from fivefold.megatron.model import MegatronModel
from fivefold.models.families import load_spec, parameters_of
from fivefold.models.shapes import file_shapes
from fivefold.plan.costs import ADAM_BYTES, GRADIENT_BYTES, Tokens, Work, head_work, layer_work
from fivefold.plan.efficiency import Efficiencies
from fivefold.types import LossOutput, TokenBatch

Found = tuple[str, float, float]
_MINUTES = 10.0
_ONE = ParallelLayout()
_TRAFFIC = ("elementwise", "heads", "swiglu")


@dataclass(frozen=True)
class _Sizes:
    hidden: int
    ffn: int
    heads: int
    head_dim: int
    vocab: int
    tokens: int
    short: int
    lengths: tuple[int, ...]
    experts: int
    expert_ffn: int
    each: tuple[int, ...]
    """Tokens of an expert."""


_LARGE = _Sizes(2048, 6144, 16, 128, 151936, 16384, 256, (1024, 4096, 8192), 32, 768, (16, 128, 512, 1024, 2048, 4096))
_MIDDLE = replace(_LARGE, vocab=32768, tokens=8192)
_SMALL = _Sizes(64, 192, 4, 16, 1024, 512, 16, (512,), 8, 32, (16, 128))
_LARGE_BYTES = 64 * 2**30
"""Of a GPU that has room for the large sizes, which take 40 GiB."""
_FEW = 1024
"""Words of models whose head is not measured: their embeddings take little time and memory."""


def layers(clock: Clock, rates: Callable[[], Efficiencies], tell: Callable[[str], None]) -> Iterator[Found]:
    """Rates of layers on one device, of models that train; `tell` is given what cannot be measured, and why."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
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
        """Host, traffic, attention, head, experts: each takes the ones before it as known."""
        few, more = self._model(2), self._model(4)
        yield from self._bodies(few, more)
        del more
        if self._has_time("the head"):
            yield from self._head(few)
        del few
        yield from self._experts()

    def _has_time(self, what: str) -> bool:
        if self._clock.left <= 0:
            self._tell(f"{what}: not measured, the time is over")
        return self._clock.left > 0

    def _is_more(self, what: str, seconds: float) -> bool:
        """Whether there is anything left of a whole, the known parts of which are measured apart."""
        if seconds <= 0:
            self._tell(f"{what}: left out, the parts that are known take {-seconds * 1e3:.3g} ms more than the whole")
        return seconds > 0

    def _bodies(self, few: MegatronModel, more: MegatronModel) -> Iterator[Found]:
        sizes = self._sizes

        def layer(length: int, tokens: int) -> tuple[float, float]:
            """(forward, backward) of one layer."""
            low, high = self._times(few, length, tokens), self._times(more, length, tokens)
            forward = max(0.0, high[0] - low[0]) / 2
            added = self._update_seconds(more) - self._update_seconds(few)
            return forward, max(0.0, high[1] - low[1] - added) / 2 - forward

        few_tokens = _batch(16, 16, few.spec.vocab)
        host = [self._clock.seconds(partial(model.train_step, few_tokens, _sum)) for model in (few, more)]
        if self._is_more("layer_host", host[1] - host[0]):
            yield "layer_host", 0, (host[1] - host[0]) / 2 * 1e6
        base, spec = layer(sizes.short, sizes.tokens), few.spec
        work = [layer_work(spec, _ONE, Tokens(sizes.tokens, sizes.short), False)[way] for way in (0, 1)]
        left = sum(base) - sum(self._known(way, *_TRAFFIC) for way in work)
        if self._is_more(", ".join(_TRAFFIC), left):
            # Passes over memory are measured together: each has its own share of the rates that are known.
            known = self._rates()
            moved = [one for way in work for one in way if one.kind in _TRAFFIC]
            share = sum(one.seconds(known) for one in moved) / left
            for kind, size in dict.fromkeys((one.kind, one.size) for one in moved):
                yield kind, size, share * known.rate(kind, size) / 1e9
        for length in sizes.lengths:
            if not self._has_time(f"attention of {length} tokens"):
                return
            there = layer(length, sizes.tokens)
            for way, name in enumerate(("attention_forward", "attention_backward")):
                flops = [
                    _amount(layer_work(spec, _ONE, Tokens(sizes.tokens, each), False)[way], name)
                    for each in (length, sizes.short)
                ]
                if self._is_more(f"{name} of {length} tokens", there[way] - base[way]):
                    yield self._rates().in_use(name), length, (flops[0] - flops[1]) / (there[way] - base[way]) / 1e12

    def _head(self, without: MegatronModel) -> Iterator[Found]:
        sizes, model = self._sizes, self._model(2, value_head=False)
        with_head, bare = (self._times(one, sizes.short, sizes.tokens) for one in (model, without))
        forward, backward = head_work(model.spec, _ONE, Tokens(sizes.tokens, sizes.short))
        ahead = with_head[0] - bare[0]
        added = self._update_seconds(model) - self._update_seconds(without)
        behind = with_head[1] - bare[1] - ahead - added
        for name, work, seconds in (
            ("head_forward", forward, ahead),
            ("head_backward", backward, behind),
        ):
            left = seconds - self._known(work, name)
            if self._is_more(name, left):
                yield name, 0, _amount(work, name) / left / 1e9

    def _experts(self) -> Iterator[Found]:
        """The experts of a layer alone: what carries tokens to them and back is measured as traffic."""
        sizes, device = self._sizes, self._mesh.device
        model = self._model(1, experts=True, learns=False)
        (experts,) = (part for part in model.modules() if isinstance(part, GroupedExperts))
        experts.requires_grad_(True)
        for each in sizes.each:
            if not self._has_time(f"grouped_gemm of {each} tokens"):
                return
            count = each * sizes.experts
            tokens_TD = torch.randn(count, sizes.hidden, device=device).to(experts.fc1.dtype).requires_grad_()
            weights_T = torch.rand(count, device=device).requires_grad_()
            work = partial(_there_and_back, experts, tokens_TD, weights_T, torch.full((sizes.experts,), each))
            # Three products, and each twice more in backward.
            flops = 3 * 3 * 2 * count * sizes.hidden * sizes.expert_ffn
            yield "grouped_gemm", each, flops / self._clock.seconds(work) / 1e12

    def _known(self, work: list[Work], *unknown: str) -> float:
        rates = self._rates()
        return sum(one.seconds(rates) for one in work if one.kind not in unknown)

    def _update_seconds(self, model: MegatronModel) -> float:
        """Of the optimizer's kernels, by the rates that are known."""
        spec, rates = model.spec, self._rates()
        return spec.parameters * (ADAM_BYTES / rates.rate("adam") + GRADIENT_BYTES / rates.rate("gradients"))

    def _times(self, model: MegatronModel, length: int, tokens: int) -> tuple[float, float]:
        """Seconds that (forward, a whole update) compute."""
        batch = _batch(length, tokens, model.spec.vocab)
        return (
            self._clock.computing(lambda: model.forward(batch)),
            self._clock.computing(lambda: model.train_step(batch, _sum)),
        )

    def _model(self, layers: int, value_head: bool = True, experts: bool = False, learns: bool = True) -> MegatronModel:
        """A model with random weights."""
        # What the models before it had: they are in cycles of references.
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
    """Forward and all gradients of experts."""
    output_TD, _ = experts(tokens_TD, counts_E, weights_T)
    torch.autograd.grad(output_TD, (tokens_TD, weights_T, experts.fc1, experts.fc2), tokens_TD.detach())


def _write_weights(directory: Path, device: torch.device, value_head: bool) -> None:
    """Random ones: products of zeros are faster."""
    spec, found = load_spec(directory, value_head), {}
    for parameter in parameters_of(spec):
        for name, shape in zip(parameter.hf, file_shapes(spec, parameter), strict=True):
            assert shape is not None
            found[name] = (0.02 * torch.randn(shape, device=device)).bfloat16().cpu()
    save_file(found, directory / "model.safetensors")


def _amount(work: list[Work], kind: str) -> float:
    return sum(one.amount for one in work if one.kind == kind)


def _sum(output_T: Tensor, entropy_T: Tensor, batch: TokenBatch) -> LossOutput:
    """A loss with a gradient for every token."""
    return LossOutput(output_T.sum() / max(1, batch.update_tokens), {})


def _batch(length: int, tokens: int, vocab: int) -> TokenBatch:
    """Sequences of one length, all of whose tokens but the first are predicted."""
    lengths = [length] * max(1, tokens // length)
    mask = torch.cat([torch.arange(one) > 0 for one in lengths])
    generator = torch.Generator().manual_seed(0)
    return TokenBatch(
        torch.randint(0, vocab, (sum(lengths),), generator=generator), mask, lengths, update_tokens=int(mask.sum())
    )
