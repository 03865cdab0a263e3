"""Inputs of routers for a micro-batch besides its tokens: which tokens are real, and experts to be replayed.

Router replay fixes which experts a token is sent to, but not their weights. The current router computes the weights, so that
it learns (GSPO, 2507.18071, section 5.3; R3, 2510.11370, section 4).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.models.spec import RouteShape
from fivefold.routes import NO_ROUTE, no_routes


@dataclass
class Routing:
    """Router inputs of a micro-batch on this rank; they travel with the packing, so that recomputed layers find the same."""

    sequence_mask_ST: Tensor
    """True where a real token of this rank belongs to the sequence."""
    routes_TLK: Tensor | None = None
    """Experts that tokens are sent to, by the places of this rank's routers; None: the routers choose."""
    recorded: dict[int, Tensor] | None = None
    """[T, K] experts that each router chose, by its place; None: not requested."""

    def part(self, size: int, rank: int) -> Routing:
        """Return the routing of one of the ranks that divide these tokens among them."""
        routes_TLK = None if self.routes_TLK is None else self.routes_TLK.chunk(size, 0)[rank]
        return Routing(self.sequence_mask_ST.chunk(size, 1)[rank], routes_TLK, self.recorded)


@dataclass
class Choice:
    """The experts of one layer's tokens: those of `routes_TK` if given, or the router's own choice.

    Megatron-Core calls it in place of its RouterReplay, which is global and must be updated on every pass over every
    micro-batch.
    """

    routes_TK: Tensor | None
    chosen_TK: Tensor = field(init=False)
    """Experts that the router itself chooses."""
    taken_TK: Tensor = field(init=False)
    """Experts that tokens are sent to."""

    def get_replay_topk(
        self,
        scores_TE: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        choose: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return the chosen experts of each token: their [T, K] scores and [T, K] numbers."""
        scores_TK, self.chosen_TK = choose(scores_TE, topk, num_groups=num_groups, group_topk=group_topk)
        self.taken_TK = self.chosen_TK
        if self.routes_TK is None:
            return scores_TK, self.taken_TK
        routes_TK = self.routes_TK.long()
        # A token without a route has the same number K times; no token is sent to an expert twice.
        is_given_T = routes_TK.sort(1).values.diff(dim=1).ne(0).all(1) & (routes_TK != NO_ROUTE).all(1)
        self.taken_TK = torch.where(is_given_T[:, None], routes_TK, self.chosen_TK)
        return scores_TE.gather(1, self.taken_TK), self.taken_TK

    def agreement(self, real_T: Tensor) -> Tensor:
        """[2] number of given routes of real tokens, and how many of them the router chooses as well."""
        assert self.routes_TK is not None
        replayed_TK = (self.routes_TK != NO_ROUTE) & real_T[:, None]
        same_TK = (self.routes_TK[:, :, None] == self.chosen_TK[:, None, :]).any(-1)
        return torch.stack([replayed_TK.sum(), (replayed_TK & same_TK).sum()])


@dataclass(frozen=True)
class MoELayers:
    """The model's layers with experts, and which of them this rank holds."""

    routes: RouteShape
    """Shape of the whole model's routes."""
    held: tuple[int, ...]
    """Indices among the layers with experts, by the places of this rank's routers."""

    def local(self, routes_TLK: Tensor, source_T: Tensor) -> Tensor:
        """[T, own layers, K] routes of local tokens, at `source_T` in the batch; NO_ROUTE for padding (`source_T` is -1)."""
        real_T = source_T >= 0
        local_TLK = routes_TLK.new_full((len(source_T), len(self.held), self.routes.top_k), NO_ROUTE)
        local_TLK[real_T] = routes_TLK[source_T[real_T]][:, torch.tensor(self.held, dtype=torch.long)]
        return local_TLK


class RouteRecord:
    """Experts that the tokens of a batch are sent to, collected from the ranks of a replica."""

    def __init__(self, layers: MoELayers) -> None:
        self._layers = layers
        self._parts: dict[int, tuple[Routing, Tensor, Tensor]] = {}

    def add(self, routing: Routing, place_T: Tensor, index_T: Tensor) -> None:
        """Add a micro-batch whose tokens lie at `place_T` on this rank (-1: elsewhere) and at `index_T` in the batch.

        Each virtual stage adds the same micro-batch.
        """
        self._parts[id(routing)] = (routing, place_T, index_T)

    def whole(self, tokens: int, tp: dist.ProcessGroup, replica: dist.ProcessGroup) -> Tensor:
        """[tokens, layers, K] experts on the host of every rank of the replica; collective."""
        layers = self._layers
        # The expert's number + 1, or 0 if another rank holds it: the sum over ranks is then the value of one rank.
        numbers_TLK = no_routes(tokens, layers.routes) + 1
        held = torch.tensor(layers.held, dtype=torch.long)
        for routing, place_T, index_T in self._parts.values() if layers.held else ():
            assert routing.recorded is not None
            chosen_TLK = torch.stack([routing.recorded[place] for place in range(len(held))], 1).cpu()
            # Tensor-parallel ranks divide the tokens among them.
            begin = tp.rank() * len(chosen_TLK)
            is_local_T = (place_T >= begin) & (place_T < begin + len(chosen_TLK))
            numbers_TLK[index_T[is_local_T][:, None], held] = (
                chosen_TLK[place_T[is_local_T] - begin].to(numbers_TLK.dtype) + 1
            )
        if replica.size() > 1 and tokens:
            dist.all_reduce(numbers_TLK.view(torch.uint8), group=replica)
        return numbers_TLK - 1
