"""Assigns samples to units of one micro-batch and selects the tokens to compute: TokenBatch -> units -> pieces.

The responses to one prompt begin with the same tokens. If the prefix is shared, its tokens are computed once. Each response
is then a separate piece, which attends to the prefix and to itself; its positions start where the prefix ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fivefold.distributed.balance import balance
from fivefold.types import TokenBatch


@dataclass(frozen=True)
class Unit:
    """Samples that are placed in the same micro-batch."""

    samples: list[int]
    prefix: int = 0
    """Number of tokens that all samples begin with and that are computed once; 0 if every sample is computed whole."""

    def computed(self, lengths_N: Sequence[int]) -> list[int]:
        """Return the lengths of the unit's pieces."""
        if not self.prefix:
            return [lengths_N[sample] for sample in self.samples]
        return [self.prefix, *(lengths_N[sample] - self.prefix for sample in self.samples)]


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of a batch that are computed together."""

    begin: int
    """Index of the first token among the tokens of the batch."""
    length: int
    prefix: int | None = None
    """Number of the piece that it continues, if any."""
    copies: tuple[int, ...] = ()
    """Indices where the same tokens begin in other samples, which do not compute them again."""


def make_units(batch: TokenBatch, budget: int, share: bool) -> list[Unit]:
    """Build units of samples that are compared with one another.

    With `share`, the samples of one prompt are joined as far as `budget` tokens allow.
    """
    size = batch.samples_per_comparison
    compared = [list(range(first, first + size)) for first in range(0, len(batch.lengths_N), size)]
    if not share:
        return [Unit(samples) for samples in compared]
    prompts = _prompts(batch)
    by_prompt: dict[bytes, list[list[int]]] = {}
    units = []
    for samples in compared:
        prefixes = {prompts[sample] for sample in samples}
        if len(prefixes) == 1 and (prompt := prefixes.pop()):
            by_prompt.setdefault(prompt, []).append(samples)
        else:
            units.append(Unit(samples))
    for prompt, members in by_prompt.items():
        units += _fitting(members, len(prompt) // batch.token_ids_T.element_size(), batch.lengths_N, budget)
    return units


def _prompts(batch: TokenBatch) -> list[bytes]:
    """Return the tokens of each sample before the first that can carry loss; empty for a sample without such a token."""
    prompts, tokens = [], batch.token_ids_T.contiguous().numpy()
    pieces = zip(batch.lengths_N, batch.loss_mask_T.split(batch.lengths_N), strict=True)
    start = 0
    for length, mask_T in pieces:
        prompt = int(mask_T.int().argmax()) if length and mask_T.any() else 0
        prompts.append(tokens[start : start + prompt].tobytes())
        start += length
    return prompts


def _fitting(members: list[list[int]], prefix: int, lengths_N: Sequence[int], budget: int) -> list[Unit]:
    """Build one unit, or as few units of similar size as fit the budget; each unit computes the prefix."""
    responses = [sum(lengths_N[sample] - prefix for sample in samples) for samples in members]
    for count in range(1, len(members) + 1):
        parts = balance(responses, count)
        if count == len(members) or all(prefix + sum(responses[i] for i in part) <= budget for part in parts):
            break
    chosen = [sorted(sample for i in part for sample in members[i]) for part in parts]
    return [Unit(samples, prefix if len(samples) > 1 else 0) for samples in chosen]


def make_pieces(lengths_N: Sequence[int], units: Sequence[Unit]) -> list[Piece]:
    """Return the pieces to compute for these units, whose samples lie end to end in this order with these lengths.

    Example: a prompt of 5 tokens with responses of 3 and 4, `lengths_N = [8, 9]`: `[Piece(0, 5, copies=(8,)), Piece(5, 3,
    prefix=0), Piece(13, 4, prefix=0)]`.
    """
    pieces: list[Piece] = []
    number = start = 0
    for unit in units:
        first, places = len(pieces), []
        for _ in unit.samples:
            places.append((start, lengths_N[number]))
            start, number = start + lengths_N[number], number + 1
        if not unit.prefix:
            pieces += [Piece(begin, length) for begin, length in places]
            continue
        pieces.append(Piece(places[0][0], unit.prefix, copies=tuple(begin for begin, _ in places[1:])))
        pieces += [Piece(begin + unit.prefix, length - unit.prefix, prefix=first) for begin, length in places]
    return pieces


def prefixes_of(pieces: Sequence[Piece], starts: Sequence[int]) -> list[tuple[int, int]]:
    """Return (begin, length) of the computed tokens that each piece continues.

    `starts` holds the index of each piece's first token among the computed tokens.
    """
    return [(0, 0) if piece.prefix is None else (starts[piece.prefix], pieces[piece.prefix].length) for piece in pieces]


def place_copies(place_T: Tensor, pieces: Sequence[Piece]) -> None:
    """Give tokens that are not computed again the places of those that are."""
    for piece in pieces:
        for begin in piece.copies:
            place_T[begin : begin + piece.length] = place_T[piece.begin : piece.begin + piece.length]
