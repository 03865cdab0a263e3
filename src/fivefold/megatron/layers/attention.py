"""Core attention over packed sequences in plain PyTorch: query, key, value [T, H, D] -> [T, H·D].

Context parallelism: each sequence is padded to 2·cp chunks. Rank r holds chunks r and 2·cp-1-r, so that every rank has the
same share of causal attention's work. Keys and values are gathered over the ranks (grouped-query heads make them small).
Every chunk of queries attends to the keys up to its own end.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from fivefold.megatron.kernels import flash
from fivefold.megatron.layers.routing import Routing
from fivefold.types import to_device

_GROUPED_QUERY = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Whether varlen_attn of the installed torch supports fewer key/value heads than query heads."""


@dataclass(frozen=True)
class Bucket:
    """Pieces of similar length as padded rows of local queries and of all keys; -1 after the end of a piece."""

    queries: Tensor
    """[pieces, most queries] indices of local tokens."""
    keys: Tensor
    """[pieces, most keys] indices of gathered tokens."""
    key_lengths: Tensor
    query_lengths: Tensor
    whole: bool
    """In every piece the queries are the same tokens as the keys: no explicit mask is needed."""


Piece: TypeAlias = tuple[int, int, Tensor]
"""Index of its first query among the local tokens, number of queries, and indices of its keys among the gathered tokens."""


@dataclass
class Packing(PackedSeqParams):
    """Locations of a micro-batch's sequences on this rank.

    With layers of plain PyTorch `cu_seqlens_q` stays None: rotary angles are gathered by position before the layers, so that
    no layer reads sequence lengths on the host. Transformer Engine's attention needs it.
    """

    lengths: tuple[int, ...] = ()
    """Lengths of the sequences without the prefixes they continue, padded to a multiple of the context-parallel chunks."""
    positions_T: Tensor | None = None
    """Position of each local token in its sequence."""
    pieces: tuple[Piece, ...] = ()
    """Pieces whose queries this rank holds, in the order of the local tokens."""
    cu_queries: Tensor | None = None
    """[pieces + 1] int32 cumulative numbers of queries, in the order of the local tokens."""
    cu_keys: Tensor | None = None
    key_index: Tensor | None = None
    """Indices of each piece's keys among the gathered tokens, piece by piece; None if the keys are the local tokens."""
    routing: Routing | None = None
    """Inputs of the routers, for layers with experts."""
    ahead: Sequence[Any] = ()
    """Inputs of each layer of multi-token prediction, if there are any."""
    most_queries: int = 0
    most_keys: int = 0
    _turns: tuple[Tensor, Tensor] | None = None

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """The pieces as padded rows, for attention without a variable-length kernel."""
        assert self.positions_T is not None
        return _buckets(self.pieces, self.positions_T.device)

    def turns(self, angles: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """[T, R] cosines and sines of rotary angles [T, 1, R], times `scale`: computed in the first layer, then reused."""
        if self._turns is None:
            self._turns = (angles[:, 0].cos() * scale, angles[:, 0].sin() * scale)
        return self._turns


def chunk_multiple(cp: int) -> int:
    """Return the multiple that a sequence is padded to, so that `cp` context-parallel ranks can shard it."""
    return 2 * cp if cp > 1 else 1


def local_positions(length: int, cp: int, rank: int) -> Tensor:
    """Return the positions of a (padded) sequence that context-parallel `rank` holds, in its order."""
    if cp == 1:
        return torch.arange(length)
    chunk = length // (2 * cp)
    first, second = rank * chunk, (2 * cp - 1 - rank) * chunk
    return torch.cat([torch.arange(first, first + chunk), torch.arange(second, second + chunk)])


def make_packing(
    lengths: list[int],
    device: torch.device,
    fused: bool,
    cp: int = 1,
    rank: int = 0,
    prefixes: Sequence[tuple[int, int]] = (),
) -> Packing:
    """Build the packing of sequences of these padded lengths on context-parallel `rank`.

    `fused`: the layers are Transformer Engine's. `prefixes`: (begin, length) of the local tokens that each sequence
    continues, length 0 if it continues none.
    """
    multiple, prefixes = chunk_multiple(cp), prefixes or [(0, 0)] * len(lengths)
    is_shared = any(length for _, length in prefixes)
    assert all(length % multiple == 0 for length in lengths)
    assert not is_shared or (cp == 1 and not fused), (
        "prefixes are shared by layers of plain PyTorch without context parallelism"
    )
    positions = torch.cat(
        [before + local_positions(length, cp, rank) for length, (_, before) in zip(lengths, prefixes, strict=True)]
    )
    local_tokens = sum(lengths) // cp
    pieces: list[Piece] = []
    start = 0
    for length, (begin, before) in zip(lengths, prefixes, strict=True):
        if cp == 1:
            own = torch.arange(start, start + length)
            pieces.append((start, length, torch.cat([torch.arange(begin, begin + before), own]) if before else own))
        else:
            chunk = length // multiple
            # Place of position p of this sequence among the tokens of all ranks, one rank after the other.
            owner = torch.tensor([min(i, multiple - 1 - i) for i in range(multiple)])
            half = torch.tensor([int(i >= cp) for i in range(multiple)])
            place = (owner * local_tokens + start + half * chunk)[:, None] + torch.arange(chunk)
            for half_index, index in enumerate((rank, multiple - 1 - rank)):
                pieces.append((start + half_index * chunk, chunk, place[: index + 1].flatten()))
        start += length // cp
    pieces = [piece for piece in pieces if piece[1]]
    whole = to_device(_cumulative(lengths), device) if fused else None
    longest = max(length + before for length, (_, before) in zip(lengths, prefixes, strict=True))
    return Packing(
        qkv_format="thd",
        cu_seqlens_q=whole,
        cu_seqlens_kv=whole,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        lengths=tuple(lengths),
        positions_T=to_device(positions, device),
        pieces=tuple(pieces),
        cu_queries=to_device(_cumulative([size for _, size, _ in pieces]), device),
        cu_keys=to_device(_cumulative([len(keys) for *_, keys in pieces]), device),
        key_index=to_device(torch.cat([keys for *_, keys in pieces]), device) if cp > 1 or is_shared else None,
        most_queries=max(size for _, size, _ in pieces),
        most_keys=max(len(keys) for *_, keys in pieces),
    )


def _cumulative(sizes: list[int]) -> Tensor:
    return torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)


def _buckets(pieces: Sequence[Piece], device: torch.device) -> tuple[Bucket, ...]:
    by_size: dict[tuple[int, bool], list[Piece]] = {}
    for piece in pieces:
        is_whole = len(piece[2]) == piece[1]
        by_size.setdefault(((len(piece[2]) - 1).bit_length(), is_whole), []).append(piece)
    found = []
    for (_, whole), members in by_size.items():
        query_lengths = torch.tensor([size for _, size, _ in members])
        starts = torch.tensor([start for start, *_ in members])
        offsets = torch.arange(int(query_lengths.max()))
        queries = torch.where(offsets < query_lengths[:, None], starts[:, None] + offsets, -1)
        keys = torch.nn.utils.rnn.pad_sequence([index for *_, index in members], batch_first=True, padding_value=-1)
        key_lengths = torch.tensor([len(index) for *_, index in members])
        rows = [to_device(tensor, device) for tensor in (queries, keys, key_lengths, query_lengths)]
        found.append(Bucket(rows[0], rows[1], rows[2], rows[3], whole))
    return tuple(found)


class _Gather(torch.autograd.Function):
    """Select rows by index; gradients of a row that several pieces have as a key are summed in float32."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = len(rows)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        found = grad.new_zeros(ctx.rows, *grad.shape[1:], dtype=torch.float32).index_add_(0, index, grad.float())
        return found.to(grad.dtype), None


class PackedAttention(MegatronModule):
    """Causal attention inside each packed sequence, grouped-query heads and sliding windows included."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        assert attn_mask_type == AttnMaskType.causal and attention_type == "self"
        assert config.attention_dropout == 0.0, "attention dropout would make log-probs random"
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels or 1)
        window = config.window_size
        self.window = None if window is None else int(window[0]) + 1
        self.cp_group = parallel_state.get_context_parallel_group()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        assert isinstance(packed_seq_params, Packing), "sequences are always packed"
        packing = packed_seq_params
        if self.cp_group.size() > 1:
            # Backward: each rank receives the gradients of its own keys and values, summed over the queries of all ranks.
            together = gather_from_sequence_parallel_region(torch.cat([key, value], -1), group=self.cp_group)
            key, value = together.split([key.shape[-1], value.shape[-1]], -1)
        half = query.dtype in (torch.bfloat16, torch.float16)
        if not (query.is_cuda and half and query.shape[2] % 8 == 0):
            return self._padded(query, key, value, packing).flatten(1)
        if packing.key_index is not None:
            key, value = (_Gather.apply(tensor, packing.key_index) for tensor in (key, value))
        assert packing.cu_queries is not None and packing.cu_keys is not None
        if flash.takes(query, value):
            ends, most = (packing.cu_queries, packing.cu_keys), (packing.most_queries, packing.most_keys)
            window = None if self.window is None else self.window - 1
            return flash.attention(query, key, value, ends, most, window, self.scale).flatten(1)
        return self._varlen(query, key, value, packing).flatten(1)

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor, packing: Packing) -> Tensor:
        """Compute attention with PyTorch's variable-length flash attention; a piece's queries are the last of its keys."""
        if not _GROUPED_QUERY and query.shape[1] != key.shape[1]:
            repeat = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
        width = value.shape[2]
        if width < key.shape[2]:
            value = F.pad(value, (0, key.shape[2] - width))
        options: dict[str, Any] = {"enable_gqa": True} if _GROUPED_QUERY else {}
        assert packing.cu_queries is not None and packing.cu_keys is not None
        left = -1 if self.window is None else self.window - 1
        output = varlen_attn(
            query,
            key,
            value,
            packing.cu_queries,
            packing.cu_keys,
            packing.most_queries,
            packing.most_keys,
            window_size=(left, 0),
            scale=self.scale,
            **options,
        )
        assert isinstance(output, Tensor)
        return output[..., :width]

    def _padded(self, query: Tensor, key: Tensor, value: Tensor, packing: Packing) -> Tensor:
        """Compute attention with SDPA over pieces of similar length, padded on the right.

        Causality hides the padding from every token.
        """
        output = query.new_zeros(query.shape[0], query.shape[1], value.shape[2])
        for bucket in packing.buckets:
            inside = bucket.queries >= 0
            q = query[bucket.queries.clamp(min=0)].transpose(1, 2)
            k, v = (tensor[bucket.keys.clamp(min=0)].transpose(1, 2) for tensor in (key, value))
            mask = None
            if not bucket.whole or (self.window is not None and bucket.keys.shape[1] > self.window):
                before = (bucket.key_lengths - bucket.query_lengths)[:, None, None]
                place = torch.arange(bucket.queries.shape[1], device=query.device)[:, None] + before
                distance = place - torch.arange(bucket.keys.shape[1], device=query.device)
                mask = distance >= 0
                if self.window is not None:
                    mask &= distance < self.window
                # A padded query must see some key, or its softmax is NaN.
                mask = (mask | ~inside[:, :, None])[:, None]
            attended = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
            )
            output = output.index_put((bucket.queries[inside],), attended.transpose(1, 2)[inside])
        return output
