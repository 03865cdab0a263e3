"""Routes: the experts that tokens are sent to, as small tensors with one row per token."""

from __future__ import annotations

import torch
from torch import Tensor

from fivefold.errors import RunError
from fivefold.models.spec import RouteShape

NO_ROUTE = -1
"""Placeholder for an expert's number: the router chooses."""
_DTYPES = {1: torch.int8, 2: torch.int16}


def route_dtype(shape: RouteShape) -> torch.dtype:
    """Return the smallest dtype that represents all experts and NO_ROUTE."""
    return _DTYPES[shape.bytes]


def no_routes(tokens: int, shape: RouteShape) -> Tensor:
    """[tokens, layers with experts, K] filled with NO_ROUTE."""
    return torch.full((tokens, len(shape.layers), shape.top_k), NO_ROUTE, dtype=route_dtype(shape))


def routes_of_engine(routes: Tensor | None, tokens: int, shape: RouteShape, is_aborted: bool) -> Tensor | None:
    """[tokens - 1, layers with experts, K] from an engine's routes of a sequence, which cover all layers or those with
    experts.

    An aborted sequence may have fewer rows, or none. Raises RuntimeError for any other shape.

    The last token is sampled but never read, so no engine has routed it.
    """
    if routes is None and is_aborted:
        return None
    places = {shape.total_layers: list(shape.layers), len(shape.layers): list(range(len(shape.layers)))}
    sizes = None if routes is None else list(routes.shape)
    fits = sizes is not None and len(sizes) == 3 and sizes[1] in places and sizes[2] == shape.top_k
    if routes is None or not fits or not (is_aborted or len(routes) >= tokens - 1):
        raise RunError(
            "policy.router_replay: R3 needs the experts that the engine sent its tokens to, "
            f"[{tokens - 1}, {shape.total_layers}, {shape.top_k}] for {tokens} tokens: got {sizes}; start servers of your "
            "own with --enable-return-routed-experts"
        )
    return routes[: tokens - 1, places[routes.shape[1]]].to(route_dtype(shape))


def encode_routes(routes_TLK: Tensor | None, tokens: int, shape: RouteShape) -> Tensor:
    """[tokens, columns] int32 with the bytes of the routes, NO_ROUTE for tokens without one."""
    rows_TLK = no_routes(tokens, shape)
    if routes_TLK is not None:
        rows_TLK[: len(routes_TLK)] = routes_TLK
    rows_TB = rows_TLK.view(tokens, -1).view(torch.uint8)
    padded_TB = torch.nn.functional.pad(rows_TB, (0, -rows_TB.shape[1] % 4))
    return padded_TB.contiguous().view(torch.int32)


def route_columns(shape: RouteShape) -> int:
    """Number of columns in the result of `encode_routes`."""
    return -(-len(shape.layers) * shape.top_k * shape.bytes // 4)


def decode_routes(columns_TF: Tensor, shape: RouteShape) -> Tensor:
    """[tokens, layers with experts, K] from the columns of `encode_routes`."""
    rows_TB = columns_TF.contiguous().view(torch.uint8)[:, : len(shape.layers) * shape.top_k * shape.bytes]
    return rows_TB.contiguous().view(route_dtype(shape)).view(len(columns_TF), len(shape.layers), shape.top_k)
