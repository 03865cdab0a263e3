"""Tokens on their way to experts and back: each is sent once to every rank that has experts for it.

Megatron-Core's dispatcher sends a token once for each of its experts (eight times in Qwen3-30B-A3B). Here a rank gets a
token with its experts and weights, copies it for those that it holds, and returns the sum of their outputs; sums are in
float32. DeepEP does the same between nodes (DeepSeek-V3, 2412.19437, section 3.2.2); here it is the all-to-all of torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import all_to_all, gather_from_sequence_parallel_region
from torch import Tensor

from fivefold.backend import kernels


@dataclass(frozen=True)
class Copies:
    """Copies of rows, in order of a key: row `source_M[m]` is the one that copy m is of."""

    order_M: Tensor
    """Place of the copy's key among all keys."""
    source_M: Tensor
    places_NK: Tensor
    """Copies of each row; -1 for those of its keys that have none."""

    @classmethod
    def by_key(cls, keys_NK: Tensor, count: int) -> Copies:
        """Return the copies for the `count` smallest keys, in order of key and row; the other keys have none."""
        order_M = keys_NK.flatten().argsort(stable=True)[:count]
        places = torch.full((keys_NK.numel(),), -1, dtype=torch.long, device=keys_NK.device)
        places.scatter_(0, order_M, torch.arange(count, device=keys_NK.device))
        return cls(order_M, order_M // keys_NK.shape[1], places.view_as(keys_NK))

    def of(self, rows_ND: Tensor) -> Tensor:
        """Return the copies, [M, D]."""
        return _Copy.apply(rows_ND, self.source_M, self.places_NK)  # type: ignore[no-any-return]

    def sum(self, copies_MD: Tensor) -> Tensor:
        """Return the sum of the copies of each row, [N, D]."""
        return _Sum.apply(copies_MD, self.source_M, self.places_NK)  # type: ignore[no-any-return]


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, source_M: Tensor, places_NK: Tensor) -> Tensor:
        ctx.save_for_backward(places_NK)
        return rows_ND.index_select(0, source_M)

    @staticmethod
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor, None, None]:
        return _sum_rows(grad_MD, *ctx.saved_tensors), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, copies_MD: Tensor, source_M: Tensor, places_NK: Tensor) -> Tensor:
        ctx.save_for_backward(source_M)
        return _sum_rows(copies_MD, places_NK)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None]:
        (source_M,) = ctx.saved_tensors
        return grad_ND.index_select(0, source_M), None, None


def _sum_rows(rows_MD: Tensor, places_NK: Tensor) -> Tensor:
    if kernels.serve(rows_MD) and rows_MD.dtype != torch.float64:
        from fivefold.backend.kernels.rows import sum_rows

        return sum_rows(rows_MD, places_NK)
    precise = torch.promote_types(rows_MD.dtype, torch.float32)
    # The row of a place that is -1.
    padded = torch.cat([rows_MD.to(precise), rows_MD.new_zeros(1, rows_MD.shape[1], dtype=precise)])
    return padded[places_NK].sum(1).to(rows_MD.dtype)


@dataclass(frozen=True)
class Dispatched:
    """The tokens that this rank's experts compute, in order of expert."""

    tokens_MD: Tensor
    weights_M: Tensor
    counts_E: Tensor
    """Tokens of each of this rank's experts, on the device."""
    copies: Copies
    """From the tokens that this rank has got to those of its experts."""
    sent: Copies | None
    """From this rank's tokens to those that it has sent; None if it has all experts."""
    splits: tuple[list[int], list[int]]
    """Tokens sent to each rank, and got from each."""


class ExpertExchange:
    """Exchange of tokens among the ranks that hold a layer's experts."""

    def __init__(self, num_experts: int, groups: ProcessGroupCollection) -> None:
        self._group, self._etp = groups.tp_ep, groups.expt_tp.size()
        self._ranks = self._group.size()
        assert self._group.rank() == groups.ep.rank() * self._etp + groups.expt_tp.rank(), "ranks are in order of experts"
        self._held = num_experts // groups.ep.size()
        self._first = groups.ep.rank() * self._held

    def dispatch(self, tokens_TD: Tensor, weights_TE: Tensor, chosen_TE: Tensor, experts_TK: Tensor) -> Dispatched:
        """Send tokens to the ranks that hold their experts; `experts_TK` are those that are true in `chosen_TE`.

        With one rank nothing waits for the device; otherwise the host waits once, for the numbers of tokens.
        """
        weights_TK = weights_TE.gather(1, experts_TK)
        if self._ranks == 1:
            copies = Copies.by_key(experts_TK.int(), experts_TK.numel())
            weights_M = weights_TK.flatten().index_select(0, copies.order_M)
            return Dispatched(copies.of(tokens_TD), weights_M, chosen_TE.sum(0), copies, None, ([], []))
        needed_TR = chosen_TE.unflatten(1, (-1, self._held)).any(2).repeat_interleave(self._etp, 1)
        sent_and_counts_RC = gather_from_sequence_parallel_region(
            torch.cat([needed_TR.sum(0), chosen_TE.sum(0)])[None], group=self._group
        )
        counts_RE = sent_and_counts_RC[:, self._ranks :][:, self._first : self._first + self._held]
        counts_E = counts_RE.sum(0)
        numbers_RC = torch.cat([sent_and_counts_RC[:, : self._ranks], counts_RE.sum(1, keepdim=True)], 1).tolist()
        splits = numbers_RC[self._group.rank()][:-1], [row[self._group.rank()] for row in numbers_RC]
        keys_TR = torch.arange(self._ranks, dtype=torch.int32, device=needed_TR.device).where(needed_TR, self._ranks)
        sent = Copies.by_key(keys_TR, sum(splits[0]))
        tokens_ND = self._swap(sent.of(tokens_TD), splits)
        # Both are exact in float32, so that one message has them.
        precise = torch.promote_types(weights_TK.dtype, torch.float32)
        routes = self._swap(sent.of(torch.cat([weights_TK.to(precise), experts_TK.to(precise)], 1)), splits)
        weights_NK, experts_NK = routes.chunk(2, 1)
        keys_NK = experts_NK.detach().int() - self._first
        keys_NK = keys_NK.where((keys_NK >= 0) & (keys_NK < self._held), self._held)
        copies = Copies.by_key(keys_NK, sum(row[-1] for row in numbers_RC))
        weights_M = weights_NK.flatten().index_select(0, copies.order_M).to(weights_TK.dtype)
        return Dispatched(copies.of(tokens_ND), weights_M, counts_E, copies, sent, splits)

    def combine(self, outputs_MD: Tensor, dispatched: Dispatched) -> Tensor:
        """Return the sum of the experts' outputs for each of this rank's tokens, [T, D]."""
        summed_ND = dispatched.copies.sum(outputs_MD)
        if dispatched.sent is None:
            return summed_ND
        to, since = dispatched.splits
        return dispatched.sent.sum(self._swap(summed_ND, (since, to)))

    def _swap(self, rows: Tensor, splits: tuple[list[int], list[int]]) -> Tensor:
        """Send so many rows to each rank, and get so many from each."""
        sent, received = splits
        return all_to_all(self._group, rows, received, sent)  # type: ignore[no-any-return]
