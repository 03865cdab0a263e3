"""ModelShape and layout -> bytes on a rank and floating-point operations of a step."""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.layout import ParallelLayout
from fivefold.model_shape import ModelShape

LOGITS_BYTES = 3 * 256 * 2**20
"""Chunks of float32 logits that exist at once in the head's backward."""


@dataclass(frozen=True)
class Memory:
    """Bytes of the fullest rank, by what they are for."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    reference: int
    engine: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.reference + self.engine

    def describe(self) -> str:
        parts = {name: value / 2**30 for name, value in vars(self).items() if value}
        return f"{self.total / 2**30:.2f} GiB = " + " + ".join(f"{name} {value:.2f}" for name, value in parts.items())


def rank_parameters(shape: ModelShape, layout: ParallelLayout) -> int:
    """Parameters of the rank that holds most: the first or last stage with its share of the embedding."""
    embedding = shape.padded_vocab * shape.hidden
    ends = embedding if layout.pp > 1 or shape.tied else 2 * embedding
    return (shape.layers // layout.pp * shape.layer_parameters + ends) // layout.tp


def activation_bytes_per_token(shape: ModelShape, layout: ParallelLayout, dtype_bytes: int, recompute: str) -> int:
    """Kept for backward by one rank for each token of a micro-batch in flight, all its layers together."""
    layers = shape.layers // layout.pp
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    whole = 6 * shape.hidden + 3 * q + 3 * kv + 4 * shape.ffn
    if recompute == "full":
        # The input of each layer, and one layer made again at a time.
        return (layers * shape.hidden + whole) * dtype_bytes // layout.tp
    return layers * whole * dtype_bytes // layout.tp


def estimate_memory(
    shape: ModelShape,
    layout: ParallelLayout,
    *,
    dtype: str,
    recompute: str,
    tokens_per_micro_batch: int,
    reference: bool,
    engine_sequences: int,
    max_sequence_tokens: int,
) -> Memory:
    """Memory of the fullest rank, with the embedded engine beside the policy (0 sequences: no engine)."""
    size = 2 if dtype == "bfloat16" else 4
    own = rank_parameters(shape, layout)
    # Adam's two moments, and the float32 copy of parameters that are not float32, cut over the replicas.
    optimizer = own * (12 if size == 2 else 8) // layout.dp
    in_flight = min(layout.pp, 8)
    activations = tokens_per_micro_batch * in_flight * activation_bytes_per_token(shape, layout, size, recompute)
    cache = 2 * shape.layers * shape.kv_heads * shape.head_dim * size * max_sequence_tokens
    return Memory(
        parameters=own * size,
        gradients=own * 4,
        optimizer=optimizer,
        activations=activations + min(LOGITS_BYTES, 3 * 4 * tokens_per_micro_batch * shape.padded_vocab // layout.tp),
        reference=own * size if reference else 0,
        engine=shape.parameters * size + engine_sequences * cache if engine_sequences else 0,
    )


def training_flops(shape: ModelShape, tokens: int, mean_length: float) -> float:
    """Forward and backward of `tokens` tokens: 6 a parameter and token, and causal attention's two products."""
    dense = shape.layers * shape.layer_parameters + shape.vocab * shape.hidden
    attention = 6 * shape.layers * shape.heads * shape.head_dim * mean_length
    return tokens * (6.0 * dense + attention)
