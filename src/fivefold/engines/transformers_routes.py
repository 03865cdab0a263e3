"""Reads the experts to which a transformers model sends its tokens, from the outputs of its routers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fivefold.errors import RunError
from fivefold.models.spec import RouteShape
from fivefold.routes import NO_ROUTE, no_routes, route_dtype


class RouterOutputs:
    """Records the experts that a model's routers chose in a forward pass."""

    def __init__(self, model: torch.nn.Module, shape: RouteShape) -> None:
        """Raises RuntimeError if the number of routers in the model differs from `shape`."""
        # Routers return (logits, weights, experts) in every model family that is read here.
        routers = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
        if len(routers) != len(shape.layers):
            raise RunError(
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
        """Returns [rows, tokens of each, layers, K] of the last pass."""
        chosen = [self._chosen[place] for place in range(len(self._shape.layers))]
        self._chosen.clear()
        return torch.stack([rows_of_layer.view(rows, -1, rows_of_layer.shape[-1]) for rows_of_layer in chosen], 2).to(
            route_dtype(self._shape)
        )


class BatchRoutes:
    """Routes of requests that are decoded together."""

    def __init__(self, outputs: RouterOutputs, shape: RouteShape) -> None:
        self._outputs, self._shape = outputs, shape
        self._pieces: list[list[Tensor]] = []
        self._columns: list[Tensor] = []

    def add_prompts(self, mask: Tensor, owner: Tensor) -> None:
        """Record the routes after a pass over prompts [prompts, tokens]; `owner` is the prompt of each request."""
        routes = self._outputs.take(len(mask)).cpu()
        prompts = [rows[row_mask.bool()] for rows, row_mask in zip(routes, mask.cpu(), strict=True)]
        self._pieces = [[prompts[number]] for number in owner.tolist()]

    def add_column(self, rows: int) -> None:
        """Record the routes after a pass over the latest token of each remaining row."""
        self._columns.append(self._outputs.take(rows)[:, 0])

    def collect(self, alive: list[int]) -> None:
        """Move the routes since the previous call to the host; the remaining rows must not have changed since then."""
        if self._columns:
            for row, routes in zip(alive, torch.stack(self._columns, 1).cpu(), strict=True):
                self._pieces[row].append(routes)
            self._columns = []

    def of(self, row: int, tokens: int) -> Tensor:
        """Returns [tokens - 1, layers, K] of a request with `tokens` tokens, prompt included: the last token was sampled but
        not read."""
        routes = torch.cat([*self._pieces[row], no_routes(0, self._shape)])[: tokens - 1]
        assert len(routes) == tokens - 1 and not (routes == NO_ROUTE).any()
        return routes
