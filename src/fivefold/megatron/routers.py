"""The routers of this rank's chunks: what they count over an update, their biases and the metrics of their experts."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.backend.routing import MoELayers
from fivefold.distributed.objects import all_gather_json
from fivefold.megatron.layers.layer_spec import PolicyModel
from fivefold.megatron.layers.moe import MoE, Router
from fivefold.megatron.mesh import Mesh
from fivefold.models.spec import ModelSpec


class Routers:
    """The routers of a model that this rank holds; those of multi-token prediction come last."""

    def __init__(self, chunks: list[PolicyModel], spec: ModelSpec, mesh: Mesh) -> None:
        self._mesh = mesh
        self._by_layer = _by_layer(chunks)
        """Routers by layer number in the whole model."""
        layers = [layer for layer in self._by_layer if layer < spec.layers]
        for number, layer in enumerate(layers):
            self._by_layer[layer].place = number
        self.layers = None if spec.routes is None else MoELayers(spec.routes, tuple(map(spec.routes.layers.index, layers)))
        """Which layers have experts and which of them this rank holds; None for a model without experts."""

    def __iter__(self) -> Iterator[Router]:
        return iter(self._by_layer.values())

    def reset_counts(self) -> None:
        """Set to 0 what the routers count over an update."""
        for router in self:
            router.load_E.zero_()
            router.balance.zero_()
            router.replayed.zero_()

    def biases(self) -> list[Tensor | None]:
        """Return copies of the routers' biases; None for a router without one."""
        return [None if router.expert_bias is None else router.expert_bias.clone() for router in self]

    def restore(self, biases: list[Tensor | None]) -> None:
        """Undo what a rejected update did to the router biases (DeepSeek-V3, 2412.19437, section 2.1.2)."""
        for router, bias in zip(self, biases, strict=True):
            if bias is not None:
                router.expert_bias.copy_(bias)

    @torch.no_grad()
    def metrics(self, tokens: int) -> dict[str, float]:
        """Return metrics of the experts for an update of `tokens` tokens, the same on every rank; collective.

        They are the load of each layer's experts (largest over mean), the routers' losses per token, and the share of given
        routes that the routers choose as well.
        """
        if self.layers is None:
            return {}
        metrics: dict[str, float] = {}
        if self._by_layer:
            rows = torch.stack([torch.cat([r.load_E, r.balance[None], r.replayed]) for r in self])
            dist.all_reduce(rows, group=self._mesh.stage)
            for layer, row in zip(self._by_layer, rows.double().cpu(), strict=True):
                load_E, (balance, replayed, same) = row[:-3], row[-3:].tolist()
                metrics[f"moe/load_max/layer_{layer:02d}"] = float(load_E.max() / load_E.mean().clamp(min=1e-30))
                metrics[f"moe/aux_loss/layer_{layer:02d}"] = balance / max(1, tokens)
                if replayed:
                    metrics[f"moe/router_agreement/layer_{layer:02d}"] = same / replayed
        if self._mesh.layout.pp > 1:
            everyone = all_gather_json(metrics, self._mesh.ranks.pp)
            metrics = {name: value for stage in everyone for name, value in stage.items()}
        by_name = {
            kind: {name: value for name, value in sorted(metrics.items()) if name.startswith(f"moe/{kind}/")}
            for kind in ("load_max", "aux_loss", "router_agreement")
        }
        loads, losses, same = by_name["load_max"], by_name["aux_loss"], by_name["router_agreement"]
        means = {"moe/load_max": max(loads.values()), "moe/aux_loss": math.fsum(losses.values())}
        if same:
            means["moe/router_agreement"] = math.fsum(same.values()) / len(same)
        return loads | same | means


def _by_layer(chunks: list[PolicyModel]) -> dict[int, Router]:
    routers = {
        chunk.layers_of_model[index]: layer.mlp.router
        for chunk in chunks
        for index, layer in enumerate(chunk.decoder.layers)
        if isinstance(layer.mlp, MoE)
    }
    for chunk in chunks:
        for depth, layer in enumerate(chunk.mtp.layers if chunk.mtp_process else ()):
            if isinstance(layer.transformer_layer.mlp, MoE):
                routers[chunk.config.num_layers + depth] = layer.transformer_layer.mlp.router
    return routers
