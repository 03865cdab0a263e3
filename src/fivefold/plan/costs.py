"""Arithmetic and memory traffic of each part of a model on one rank: spec, layout, tokens -> Work. No torch here.

Each formula is for one micro-batch of one layer; docs/plan.md has them as a table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fivefold.layout import ParallelLayout
from fivefold.models.spec import ModelSpec, MoESpec
from fivefold.plan.efficiency import Efficiencies

ADAM_BYTES = 34
"""Bytes that Adam moves per parameter: moments and float32 copy read and written, gradient read; then the copy read again
and the parameter written."""
GRADIENT_BYTES = 16
"""Bytes moved per parameter for a float32 gradient: set to zero, read for the norm, read and written for clipping."""
HOST_ADAM_BYTES = 40
"""Bytes that an update in host memory moves per parameter, all float32: weight and moments read and written, gradient read
(28); gradient read for the norm (4); gradient read and written for clipping (8)."""
ADDED_BYTES = 10
"""Bytes moved to add a two-byte gradient to its float32 sum, where the matrix product that makes it cannot accumulate."""


@dataclass(frozen=True)
class Work:
    """Number of operations or bytes for one kind of kernel."""

    kind: str
    size: float
    amount: float

    def seconds(self, efficiencies: Efficiencies) -> float:
        return self.amount / efficiencies.rate(self.kind, self.size)


@dataclass(frozen=True)
class Tokens:
    """Size of a micro-batch, as the formulas use it."""

    count: float
    """Tokens of whole sequences, before context-parallel ranks split them."""
    attended: float
    """Length of the sequence that a token belongs to, averaged over tokens."""
    predicted: float = 1.0
    """Share of tokens whose log-prob is computed."""
    number_bytes: int = 2


def layer_work(spec: ModelSpec, layout: ParallelLayout, tokens: Tokens, has_experts: bool) -> tuple[list[Work], list[Work]]:
    """Return forward and backward work for one layer."""
    local = tokens.count / layout.cp
    attention = _attention(spec, layout, tokens, local)
    norms = _traffic(spec, layout, tokens, local)
    if has_experts:
        products, grouped, moved = _experts(spec, layout, tokens, local)
    else:
        products, grouped, moved = _mlp(spec, layout, tokens, local, spec.ffn)
    forward = [*attention[0], *norms[0], *products, *grouped, *moved[0]]
    backward = [*attention[1], *norms[1], *_twice([*products, *grouped]), *moved[1]]
    return forward, backward


def unread_work(spec: ModelSpec, layout: ParallelLayout, tokens: Tokens) -> Work:
    """Return the work of a dense layer's last product.

    Recomputation skips this product, because only the next layer would read its result.
    """
    return _product(tokens.count / layout.cp, spec.ffn / layout.tp, spec.hidden)


def attention_flops(spec: ModelSpec, layout: ParallelLayout, tokens: Tokens) -> float:
    """Return FLOPs of a layer's attention products on one rank; causality leaves out half of the square."""
    width: float = spec.heads * spec.head_dim
    if spec.mla is not None:
        width = spec.heads * (spec.mla.qk_nope + spec.mla.qk_rope + spec.mla.v_dim) / 2
    seen = tokens.attended / 2
    if spec.sliding_window is not None:
        seen = min(seen, float(spec.sliding_window))
    return 4 * tokens.count / layout.cp * seen * width / layout.tp


def cached_numbers(spec: ModelSpec) -> float:
    """Return how many numbers the keys and values of one token take in one layer."""
    return spec.kv_numbers_per_token / spec.layers


def _product(tokens: float, inner: float, outer: float) -> Work:
    return Work("gemm", min(tokens, inner, outer), 2 * tokens * inner * outer)


def _twice(work: list[Work]) -> list[Work]:
    """Return backward work: the product with the weights and the product with the inputs."""
    return [Work(one.kind, one.size, 2 * one.amount) for one in work]


def _attention(spec: ModelSpec, layout: ParallelLayout, tokens: Tokens, local: float) -> tuple[list[Work], list[Work]]:
    tp, hidden = layout.tp, spec.hidden
    if spec.mla is None:
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        products = [_product(local, hidden, (queries + 2 * keys) / tp), _product(local, queries / tp, hidden)]
    else:
        part = spec.mla
        q_out, kv_out = spec.heads * (part.qk_nope + part.qk_rope) / tp, spec.heads * (part.qk_nope + part.v_dim) / tp
        products = [
            _product(local / tp, hidden, part.kv_rank + part.qk_rope),
            _product(local, part.kv_rank, kv_out),
            _product(local, spec.heads * part.v_dim / tp, hidden),
        ]
        if part.q_rank is None:
            products.append(_product(local, hidden, q_out))
        else:
            products += [_product(local / tp, hidden, part.q_rank), _product(local, part.q_rank, q_out)]
    flops = attention_flops(spec, layout, tokens)
    forward = Work("attention_forward", tokens.attended, flops)
    backward = Work("attention_backward", tokens.attended, 2.5 * flops)
    return [*products, forward], [*_twice(products), backward]


def _traffic(spec: ModelSpec, layout: ParallelLayout, tokens: Tokens, local: float) -> tuple[list[Work], list[Work]]:
    """Return memory traffic of norms, residuals and attention heads.

    Heads are split, normalized and rotated. Only reads and writes that cannot be avoided count, each once.
    """
    # Norm: read, write; backward read twice, write. Residual: read twice, write; backward the same.
    shared = local / layout.tp * spec.hidden * 2
    forward, backward = 5 * shared, 6 * shared
    rows = (spec.heads + 2 * spec.kv_heads) / layout.tp
    heads = local * rows * spec.head_dim * tokens.number_bytes
    if spec.mla is not None:
        # Plain PyTorch: each pass is counted twice. None of our runs measured this.
        turned, heads = local * spec.heads * (spec.mla.qk_nope + spec.mla.qk_rope) / layout.tp, 0.0
        forward, backward = forward + 8 * turned, backward + 10 * turned
    if layout.cp > 1:
        # A rank has two chunks of queries. Each chunk copies the gathered keys and values before it, in their order.
        copied = 2 * tokens.count * (1 + 0.5 / layout.cp) * cached_numbers(spec) / layout.tp
        forward, backward = forward + copied, backward + copied
    return (
        [Work("elementwise", 0, forward * tokens.number_bytes), Work("heads", rows, 2 * heads)],
        [Work("elementwise", 0, backward * tokens.number_bytes), Work("heads", rows, 3 * heads)],
    )


def _mlp(
    spec: ModelSpec, layout: ParallelLayout, tokens: Tokens, local: float, ffn: float
) -> tuple[list[Work], list[Work], tuple[list[Work], list[Work]]]:
    width = ffn / layout.tp
    products = [_product(local, spec.hidden, 2 * width), _product(local, width, spec.hidden)]
    size = local * width * tokens.number_bytes
    return products, [], ([Work("swiglu", 0, 3 * size)], [Work("swiglu", 0, 5 * size)])


def _experts(
    spec: ModelSpec, layout: ParallelLayout, tokens: Tokens, local: float
) -> tuple[list[Work], list[Work], tuple[list[Work], list[Work]]]:
    part = spec.moe
    assert part is not None
    tokens_of_rank = local / layout.tp
    routed = tokens_of_rank * part.top_k
    tokens_of_expert = routed * layout.ep * layout.etp / part.num_experts
    grouped = [Work("grouped_gemm", tokens_of_expert, 6 * routed * spec.hidden * part.ffn)]
    # Received tokens are copied for each of their experts, and the outputs are summed: a read and a write, then a read.
    copies = 3 * routed * layout.etp + tokens_of_rank
    if layout.backend != "fsdp" and (ranks := ranks_of_token(part, layout)) > 1:
        # Tokens are copied in the order of the ranks that they are sent to, and what returns is summed; FSDP gathers all.
        copies += 4 * ranks * tokens_of_rank
    copied = Work("elementwise", 0, copies * spec.hidden * tokens.number_bytes)
    held = 3 * spec.hidden * part.ffn * part.num_experts / layout.ep / layout.etp
    added = Work("gradients", 0, ADDED_BYTES * held)
    products, moved = [_product(tokens_of_rank, spec.hidden, part.num_experts)], ([copied], [copied, added])
    if part.shared_ffn:
        more, _, shared = _mlp(spec, layout, tokens, local, part.shared_ffn)
        products, moved = products + more, (moved[0] + shared[0], moved[1] + shared[1])
    return products, grouped, moved


def ranks_of_token(part: MoESpec, layout: ParallelLayout) -> float:
    """Return the number of ranks that hold at least one of a token's experts, on average over all choices of experts."""
    elsewhere = part.num_experts - part.num_experts // layout.ep
    missed = math.comb(elsewhere, part.top_k) / math.comb(part.num_experts, part.top_k)
    return layout.ep * layout.etp * (1 - missed)


def head_work(spec: ModelSpec, layout: ParallelLayout, tokens: Tokens) -> tuple[list[Work], list[Work]]:
    """Return forward and backward work for the output layer.

    It has the matrix products, which backward recomputes, and a pass over the logits.
    """
    rows = tokens.count * tokens.predicted / layout.cp
    if spec.value_head:
        read = Work("elementwise", 0, rows * spec.hidden * tokens.number_bytes)
        return [read], [read, read]
    product = Work("gemm", min(rows, spec.hidden), 2 * rows * spec.hidden * spec.vocab / layout.tp)
    logits = rows * spec.vocab / layout.tp
    again = Work(product.kind, product.size, 3 * product.amount)
    # Forward reads float32 logits; backward writes their gradient in two bytes per number.
    return [product, Work("head_forward", 0, 4 * logits)], [again, Work("head_backward", 0, 6 * logits)]


def embedding_work(spec: ModelSpec, layout: ParallelLayout, tokens: Tokens) -> tuple[list[Work], list[Work]]:
    """Return the work of reading rows of the embedding and adding their gradients."""
    size = tokens.count / layout.cp * spec.hidden * tokens.number_bytes
    return [Work("elementwise", 0, 2 * size)], [Work("elementwise", 0, 3 * size)]
