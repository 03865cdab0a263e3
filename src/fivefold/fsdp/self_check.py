"""At start: are our log-probs those of transformers' own forward pass, one sequence at a time?

Packing goes wrong silently: a layer that ignores the ends of the sequences gives every sequence but the first another
context. So two short sequences of different length are computed both ways before anything is trained. Windows are narrowed
for them, since a window that is wider than the sequences would not show.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DistError

from fivefold.backend.micro_batches import BatchingConfig, MicroBatches
from fivefold.backend.self_check import Gap, check_batch, check_batching
from fivefold.errors import RunError, UserError, first_line
from fivefold.fsdp.attention import NAME
from fivefold.fsdp.collectives import sum_over
from fivefold.fsdp.current import packed
from fivefold.fsdp.mesh import Mesh
from fivefold.fsdp.packed_model import PackedModel, fsdp_modules
from fivefold.types import TokenBatch

ROUNDING_OF_LAYER = {True: 1e-5, False: 0.05}
"""Relative difference of a layer's output that rounding alone can make: in float32, and in 16 bits."""

NARROW = 16
"""Size of windows, chunks and numbers of selected keys during the check, less than the length of either sequence."""
_REACHES = ("sliding_window", "attention_chunk_size", "index_topk")
"""Names of what limits the keys of a token, in configurations and layers of transformers."""

_ADVICE = "use megatron: if it has the family, or another model"


class PackingError(RunError):
    """Raised when packed sequences get other log-probs than the same sequences alone."""


@torch.no_grad()
def check_packing(model: PackedModel, batching: BatchingConfig, mesh: Mesh) -> None:
    """Raise PackingError, which names the first layer that differs, if our path differs from transformers'. Collective."""
    batch = check_batch(model.vocab)
    unsupported = f"fsdp does not support {model.family} as transformers {_version()} computes it"
    try:
        with _narrowed(model.model):
            ours_T, our_layers = _packed(model, batch, check_batching(batching), mesh)
            theirs_T, their_layers = _alone(model, batch, mesh)
    except (UserError, RunError, torch.OutOfMemoryError, DistError):
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise PackingError(f"{unsupported}: {reason}; {_ADVICE}") from error
    for module in fsdp_modules(model):
        module.reshard()
    gap = Gap.between(ours_T, theirs_T, model.dtype)
    if gap.is_rounding:
        return
    relative = [float((a - b).abs().mean() / b.abs().mean()) for a, b in zip(our_layers, their_layers, strict=True)]
    first = next(
        (number for number, value in enumerate(relative) if not value <= ROUNDING_OF_LAYER[model.dtype == torch.float32]),
        None,
    )
    where = "its head" if first is None else f"layer {first}, whose output is off by {relative[first]:.2g} of its size"
    raise PackingError(
        f"log-probs of packed sequences must be those that transformers computes of each sequence alone, within "
        f"{gap.bound} ({gap.measure}): they are off by {gap.value:.2g}, first in {where}. {unsupported}; {_ADVICE}"
    )


def _packed(model: PackedModel, batch: TokenBatch, batching: BatchingConfig, mesh: Mesh) -> tuple[Tensor, list[Tensor]]:
    """[T] numbers of all tokens, and the [T, D] outputs of every layer, as we compute them."""
    parts = MicroBatches(batch, batching)
    (micro,) = parts.iterators()
    with packed(micro.packing, mesh), _recorded(model) as outputs:
        results = model(micro)
    spread = results.new_zeros(2, len(batch.token_ids_T)).index_copy(1, micro.output_index_S, results)
    place_T = micro.place_T.to(mesh.device)
    layers = []
    for hidden in outputs:
        hidden_TD = hidden.new_zeros(len(place_T), hidden.shape[-1], dtype=torch.float32)
        hidden_TD[place_T >= 0] = hidden[place_T[place_T >= 0]].float()
        layers.append(sum_over(hidden_TD, mesh.cp))
    return sum_over(spread, mesh.cp)[0], layers


def _alone(model: PackedModel, batch: TokenBatch, mesh: Mesh) -> tuple[Tensor, list[Tensor]]:
    """[T] numbers of all tokens, and the [T, D] outputs of every layer, one sequence at a time by transformers."""
    numbers, layers = [], []
    config = model.model.config
    config._attn_implementation = "eager"
    try:
        for ids_T in batch.token_ids_T.to(mesh.device).split(batch.lengths_N):
            with _recorded(model) as outputs, torch.compiler.set_stance("force_eager"):
                numbers.append(model(None, ids_T))
            layers.append([hidden.float() for hidden in outputs])
    finally:
        config._attn_implementation = NAME
    return torch.cat(numbers), [torch.cat(parts) for parts in zip(*layers, strict=True)]


@contextmanager
def _narrowed(model: Any) -> Iterator[None]:
    """Within this context, what limits a layer's keys limits them to NARROW, in masks of transformers too."""
    # Phi-3.5-MoE's window of 131,072 positions, which are all that it has, limits nothing.
    modules = list(model.modules())
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    holders = {id(holder): holder for module in modules for holder in (module, getattr(module, "config", None))}
    sizes = [(holder, name, getattr(holder, name, None)) for holder in holders.values() for name in _REACHES]
    wide = [(holder, name, size) for holder, name, size in sizes if isinstance(size, int) and NARROW < size < longest]
    for holder, name, _ in wide:
        setattr(holder, name, NARROW)
    try:
        yield
    finally:
        for holder, name, size in wide:
            setattr(holder, name, size)


@contextmanager
def _recorded(model: PackedModel) -> Iterator[list[Tensor]]:
    """Within this context, the outputs of the layers [T, D] are added to the list."""
    outputs: list[Tensor] = []

    def record(module: Any, arguments: Any, output: Any) -> None:
        outputs.append((output[0] if isinstance(output, tuple) else output)[0])

    handles = [layer.register_forward_hook(record) for layer in model.layers]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _version() -> str:
    import transformers

    return str(transformers.__version__)
