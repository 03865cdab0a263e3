"""Arithmetic and memory traffic of each part of a model on one rank: spec, layout, tokens -> Work. No torch here.

Each formula is for one micro-batch of one layer; docs/plan.md has them as a table.
"""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.layout import ParallelLayout
from fivefold.models.spec import ModelSpec
from fivefold.plan.efficiency import Efficiencies

ADAM_BYTES = 34
"""A parameter's moments and float32 copy read and written, its gradient read; the copy read again, itself written."""
GRADIENT_BYTES = 16
"""A float32 gradient set to zero, read for the norm, read and written for clipping."""
ADDED_BYTES = 10
"""A gradient of two bytes added to its float32 sum, where the product that makes it cannot add itself."""


@dataclass(frozen=True)
class Work:
    """So many operations or bytes of one kind of kernel."""

    kind: str
    size: float
    amount: float

    def seconds(self, efficiencies: Efficiencies) -> float:
        return self.amount / efficiencies.rate(self.kind, self.size)


@dataclass(frozen=True)
class Tokens:
    """A micro-batch as the formulas see it."""

    count: float
    """Of whole sequences, before context-parallel ranks share them."""
    attended: float
    """Length of the sequence that a token is in, on average over tokens."""
    predicted: float = 1.0
    """Share of tokens whose log-prob is wanted."""
    number_bytes: int = 2


def layer_work(spec: ModelSpec, layout: ParallelLayout, tokens: Tokens, has_experts: bool) -> tuple[list[Work], list[Work]]:
    """Forward and backward of one layer."""
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
    """The last product of a dense layer, which a layer that is made again leaves out: only the next one would read it."""
    return _product(tokens.count / layout.cp, spec.ffn / layout.tp, spec.hidden)


def attention_flops(spec: ModelSpec, layout: ParallelLayout, tokens: Tokens) -> float:
    """Products of queries, keys and values of a layer on a rank, with half of the square left out by causality."""
    width: float = spec.heads * spec.head_dim
    if spec.mla is not None:
        width = spec.heads * (spec.mla.qk_nope + spec.mla.qk_rope + spec.mla.v_dim) / 2
    seen = tokens.attended / 2
    if spec.sliding_window is not None:
        seen = min(seen, float(spec.sliding_window))
    return 4 * tokens.count / layout.cp * seen * width / layout.tp


def cached_numbers(spec: ModelSpec) -> float:
    """Numbers that the keys and values of a token are in one layer."""
    return spec.kv_numbers_per_token / spec.layers


def _product(tokens: float, inner: float, outer: float) -> Work:
    return Work("gemm", min(tokens, inner, outer), 2 * tokens * inner * outer)


def _twice(work: list[Work]) -> list[Work]:
    """Backward: the product with the weights and the one with the inputs."""
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
    """Norms and residuals; heads apart, normed and rotated: what must be read and written once."""
    # Norm: read, write; backward read twice, write. Residual: read twice, write; backward the same.
    shared = local / layout.tp * spec.hidden * 2
    forward, backward = 5 * shared, 6 * shared
    rows = (spec.heads + 2 * spec.kv_heads) / layout.tp
    heads = local * rows * spec.head_dim * tokens.number_bytes
    if spec.mla is not None:
        # In plain PyTorch, which no run of ours measured: each pass twice.
        turned, heads = local * spec.heads * (spec.mla.qk_nope + spec.mla.qk_rope) / layout.tp, 0.0
        forward, backward = forward + 8 * turned, backward + 10 * turned
    if layout.cp > 1:
        # Of the gathered keys and values each of a rank's two chunks of queries has those before it, in their order.
        copied = 2 * tokens.count * (1 + 0.5 / layout.cp) * cached_numbers(spec) / layout.tp
        forward, backward = forward + copied, backward + copied
    return (
        [Work("elementwise", 0, forward * tokens.number_bytes), Work("heads", rows, 2 * heads)],
        [Work("elementwise", 0, backward * tokens.number_bytes), Work("heads", rows, 3 * heads)],
    )


def _mlp(
    spec: ModelSpec, layout: ParallelLayout, tokens: Tokens, local: float, ffn: float
) -> tuple[list[Work], list[Work], tuple[list[Work], list[Work]]]:
    own = ffn / layout.tp
    products = [_product(local, spec.hidden, 2 * own), _product(local, own, spec.hidden)]
    size = local * own * tokens.number_bytes
    return products, [], ([Work("swiglu", 0, 3 * size)], [Work("swiglu", 0, 5 * size)])


def _experts(
    spec: ModelSpec, layout: ParallelLayout, tokens: Tokens, local: float
) -> tuple[list[Work], list[Work], tuple[list[Work], list[Work]]]:
    part = spec.moe
    assert part is not None
    own = local / layout.tp
    routed = own * part.top_k
    each = routed * layout.ep * layout.etp / part.num_experts
    grouped = [Work("grouped_gemm", each, 6 * routed * spec.hidden * part.ffn)]
    # Copies of a token are written in the order of experts, and summed again in its own: twice read and written, each way.
    # Those that a rank has of all others are put together by expert, and apart again, as often.
    gathered = routed * layout.etp if part.num_experts > layout.ep else 0
    copied = Work("elementwise", 0, 4 * (routed + gathered) * spec.hidden * tokens.number_bytes)
    held = 3 * spec.hidden * part.ffn * part.num_experts / layout.ep / layout.etp
    added = Work("gradients", 0, ADDED_BYTES * held)
    products, moved = [_product(own, spec.hidden, part.num_experts)], ([copied], [copied, added])
    if part.shared_ffn:
        more, _, shared = _mlp(spec, layout, tokens, local, part.shared_ffn)
        products, moved = products + more, (moved[0] + shared[0], moved[1] + shared[1])
    return products, grouped, moved


def head_work(spec: ModelSpec, layout: ParallelLayout, tokens: Tokens) -> tuple[list[Work], list[Work]]:
    """Forward and backward of the output layer: its products, made again in backward, and a pass over the logits."""
    rows = tokens.count * tokens.predicted / layout.cp
    if spec.value_head:
        read = Work("elementwise", 0, rows * spec.hidden * tokens.number_bytes)
        return [read], [read, read]
    product = Work("gemm", min(rows, spec.hidden), 2 * rows * spec.hidden * spec.vocab / layout.tp)
    logits = rows * spec.vocab / layout.tp
    again = Work(product.kind, product.size, 3 * product.amount)
    # float32 logits are read; in backward their gradient is written in two bytes a number.
    return [product, Work("head_forward", 0, 4 * logits)], [again, Work("head_backward", 0, 6 * logits)]


def embedding_work(spec: ModelSpec, layout: ParallelLayout, tokens: Tokens) -> tuple[list[Work], list[Work]]:
    """Rows of the embedding read, and their gradients added."""
    size = tokens.count / layout.cp * spec.hidden * tokens.number_bytes
    return [Work("elementwise", 0, 2 * size)], [Work("elementwise", 0, 3 * size)]
