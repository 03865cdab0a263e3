"""Places of the packed sequences of a micro-batch: lengths -> Packing.

Context parallelism: each sequence is padded to 2·cp chunks. Rank r holds chunks r and 2·cp-1-r, so that every rank has the
same share of causal attention's work. Keys and values are gathered over the ranks, and every chunk of queries attends to the
keys up to its own end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fivefold.backend.routing import Routing
from fivefold.types import to_device


@dataclass(frozen=True)
class Bucket:
    """Pieces of similar length as padded rows of local queries and of all keys; -1 after the end of a piece."""

    queries: Tensor
    """[pieces, most queries] indices of local tokens."""
    keys: Tensor
    """[pieces, most keys] indices of gathered tokens."""
    key_lengths: Tensor
    query_lengths: Tensor
    is_whole: bool
    """In every piece the queries are the same tokens as the keys: no explicit mask is needed."""


Piece: TypeAlias = tuple[int, int, Tensor]
"""Index of its first query among the local tokens, number of queries, and indices of its keys among the gathered tokens."""


@dataclass
class Packing:
    """Locations of a micro-batch's sequences on this rank."""

    lengths: tuple[int, ...] = ()
    """Lengths of the sequences without the prefixes they continue, padded to a multiple of the context-parallel chunks."""
    real_lengths: tuple[int, ...] = ()
    """`lengths` without padding. If the micro-batch's last sequence is padding only, it has the same length in both."""
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


Prefixes: TypeAlias = Sequence[tuple[int, int]]
"""(begin, length) of the local tokens that each sequence continues, length 0 if it continues none."""


def make_packing(lengths: list[int], device: torch.device, cp: int = 1, rank: int = 0, prefixes: Prefixes = ()) -> Packing:
    """Build the packing of sequences of these padded lengths on context-parallel `rank`."""
    multiple, prefixes = chunk_multiple(cp), prefixes or [(0, 0)] * len(lengths)
    is_shared = any(length for _, length in prefixes)
    assert all(length % multiple == 0 for length in lengths)
    assert not is_shared or cp == 1, "prefixes are shared without context parallelism"
    positions = torch.cat(
        [before + local_positions(length, cp, rank) for length, (_, before) in zip(lengths, prefixes, strict=True)]
    )
    local_tokens = sum(lengths) // cp
    pieces: list[Piece] = []
    start = 0
    for length, (begin, before) in zip(lengths, prefixes, strict=True):
        if cp == 1:
            piece = torch.arange(start, start + length)
            pieces.append((start, length, torch.cat([torch.arange(begin, begin + before), piece]) if before else piece))
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
    return Packing(
        lengths=tuple(lengths),
        positions_T=to_device(positions, device),
        pieces=tuple(pieces),
        cu_queries=to_device(cumulative([size for _, size, _ in pieces]), device),
        cu_keys=to_device(cumulative([len(keys) for *_, keys in pieces]), device),
        key_index=to_device(torch.cat([keys for *_, keys in pieces]), device) if cp > 1 or is_shared else None,
        most_queries=max(size for _, size, _ in pieces),
        most_keys=max(len(keys) for *_, keys in pieces),
    )


def cumulative(sizes: list[int]) -> Tensor:
    return torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)


def _buckets(pieces: Sequence[Piece], device: torch.device) -> tuple[Bucket, ...]:
    by_size: dict[tuple[int, bool], list[Piece]] = {}
    for piece in pieces:
        is_whole = len(piece[2]) == piece[1]
        by_size.setdefault(((len(piece[2]) - 1).bit_length(), is_whole), []).append(piece)
    buckets = []
    for (_, alike), members in by_size.items():
        query_lengths = torch.tensor([size for _, size, _ in members])
        starts = torch.tensor([start for start, *_ in members])
        offsets = torch.arange(int(query_lengths.max()))
        queries = torch.where(offsets < query_lengths[:, None], starts[:, None] + offsets, -1)
        keys = torch.nn.utils.rnn.pad_sequence([index for *_, index in members], batch_first=True, padding_value=-1)
        key_lengths = torch.tensor([len(index) for *_, index in members])
        rows = [to_device(tensor, device) for tensor in (queries, keys, key_lengths, query_lengths)]
        buckets.append(Bucket(rows[0], rows[1], rows[2], rows[3], alike))
    return tuple(buckets)
