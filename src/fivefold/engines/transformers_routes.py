"""The experts that a transformers model sends its tokens to, as its routers say them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fivefold.models.spec import RouteShape
from fivefold.routes import NO_ROUTE, no_routes, route_dtype


class RouterOutputs:
    """Reads what the routers of a model chose in a forward pass."""

    def __init__(self, model: torch.nn.Module, shape: RouteShape) -> None:
        """Raises RuntimeError where the model has other routers than `shape` says."""
        # (logits, weights, experts) is what they give in every family that is read here.
        routers = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
        if len(routers) != len(shape.layers):
            raise RuntimeError(
                f"policy.router_replay: R3 reads the routers of {type(model).__name__}, which must be {len(shape.layers)}: "
                f"this release of transformers has {len(routers)}; engine.backend: vllm"
            )
        self._chosen: dict[int, Tensor] = {}
        self._shape = shape
        for place, router in enumerate(routers):
            router.register_forward_hook(self._hook(place))

    def _hook(self, place: int) -> Any:
        def keep(_: Any, __: Any, output: tuple[Tensor, ...]) -> None:
            self._chosen[place] = output[2]

        return keep

    def take(self, rows: int) -> Tensor:
        """[rows, tokens of each, layers, K] of the last pass."""
        chosen = [self._chosen[place] for place in range(len(self._shape.layers))]
        self._chosen.clear()
        return torch.stack([each.view(rows, -1, each.shape[-1]) for each in chosen], 2).to(route_dtype(self._shape))


class BatchRoutes:
    """Routes of requests that are decoded together."""

    def __init__(self, outputs: RouterOutputs, shape: RouteShape) -> None:
        self._outputs, self._shape = outputs, shape
        self._pieces: list[list[Tensor]] = []
        self._columns: list[Tensor] = []

    def add_prompts(self, mask: Tensor, owner: Tensor) -> None:
        """Behind a pass over prompts [prompts, tokens], of which each request has one."""
        routes = self._outputs.take(len(mask)).cpu()
        prompts = [rows[own.bool()] for rows, own in zip(routes, mask.cpu(), strict=True)]
        self._pieces = [[prompts[number]] for number in owner.tolist()]

    def add_column(self, rows: int) -> None:
        """Behind a pass over the newest token of each row that is left."""
        self._columns.append(self._outputs.take(rows)[:, 0])

    def collect(self, alive: list[int]) -> None:
        """Move what came since the last time to the host; the same rows were left all the time."""
        if self._columns:
            for row, found in zip(alive, torch.stack(self._columns, 1).cpu(), strict=True):
                self._pieces[row].append(found)
            self._columns = []

    def of(self, row: int, tokens: int) -> Tensor:
        """[tokens - 1, layers, K] of a request of so many tokens, with its prompt: the last was sampled and not read."""
        found = torch.cat([*self._pieces[row], no_routes(0, self._shape)])[: tokens - 1]
        assert len(found) == tokens - 1 and not (found == NO_ROUTE).any()
        return found
