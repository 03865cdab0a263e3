"""Seconds of communication between ranks: bytes and group -> time, within a node and between nodes. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.layout import ParallelLayout
from fivefold.models.spec import ModelSpec
from fivefold.plan.costs import Tokens, cached_numbers, ranks_of_token
from fivefold.plan.efficiency import Efficiencies
from fivefold.plan.hardware import Cluster


@dataclass(frozen=True)
class Group:
    """Communication group of `size` ranks, one every `stride` ranks."""

    size: int
    stride: int


def tensor_group(layout: ParallelLayout) -> Group:
    return Group(layout.tp, 1)


def context_group(layout: ParallelLayout) -> Group:
    return Group(layout.cp, layout.tp)


def data_group(layout: ParallelLayout) -> Group:
    """Return the data-parallel and context-parallel ranks, which sum gradients and shard the optimizer."""
    return Group(layout.dp * layout.cp, layout.tp)


def expert_data_group(layout: ParallelLayout) -> Group:
    return Group(layout.edp, layout.ep * layout.etp)


@dataclass(frozen=True)
class Links:
    """Communication times over the links of a cluster."""

    cluster: Cluster
    efficiencies: Efficiencies

    def gather(self, group: Group, size: float) -> float:
        """Return seconds of an all-gather or reduce-scatter of `size` bytes in total."""
        if group.size == 1 or not size:
            return 0.0
        rate, near = self.efficiencies.rate("node_link", size), self.cluster.together(group.size, group.stride)
        if near < group.size:
            # Each rank of a node has its own network port, and the ring uses all of them.
            rate = min(rate, self.cluster.network * near)
        return size * (group.size - 1) / group.size / rate

    def exchange(self, group: Group, size: float) -> float:
        """Return seconds of an all-to-all in which each rank has `size` bytes for the group."""
        if group.size == 1 or not size:
            return 0.0
        near = self.cluster.together(group.size, group.stride)
        inside = size * (near - 1) / group.size / self.efficiencies.rate("node_exchange", size)
        return max(inside, size * (group.size - near) / group.size / self.cluster.network)

    def send(self, stride: int, size: float) -> float:
        """Return seconds to send from a rank to the one `stride` ranks after it."""
        if stride >= self.cluster.node_gpus:
            return size / self.cluster.network
        return size / self.efficiencies.rate("node_exchange", size)


@dataclass(frozen=True)
class LayerTraffic:
    """Seconds of a layer's communication in one direction of a micro-batch, by dimension, and the part that overlaps."""

    tensor: float
    context: float
    expert: float
    overlapped: float = 0.0
    """Seconds of tensor-parallel input gathers that run during the products of backward; not included in `tensor`."""


def layer_traffic(spec: ModelSpec, layout: ParallelLayout, tokens: Tokens, has_experts: bool, links: Links) -> LayerTraffic:
    """Return one layer's communication in forward.

    Backward sends as much, and gathers its inputs once more during its products.
    """
    local = tokens.count / layout.cp * tokens.number_bytes
    part = spec.moe
    keys = cached_numbers(spec) / layout.tp
    context = links.gather(context_group(layout), tokens.count * keys * tokens.number_bytes)
    if layout.backend == "fsdp":
        # Tensor-parallel ranks sum what attention, feed-forward or shared experts, and routed experts return.
        sums = 2 if not has_experts or part is None or not part.shared_ffn else 3
        tensor = 2 * sums * links.gather(tensor_group(layout), local * spec.hidden)
        return LayerTraffic(tensor, context, _token_exchange(spec, layout, local, links) if has_experts else 0.0)
    # With experts, the second half of the layer works on each rank's own tokens only.
    halves = 1 if has_experts and part is not None and not part.shared_ffn else 2
    once = links.gather(tensor_group(layout), local * spec.hidden)
    expert = 0.0
    if has_experts and part is not None:
        sent = ranks_of_token(part, layout) * local / layout.tp * spec.hidden
        expert = 2 * links.exchange(Group(layout.ep * layout.etp, 1), sent)
    return LayerTraffic(2 * halves * once, context, expert, halves * once)


def _token_exchange(spec: ModelSpec, layout: ParallelLayout, local: float, links: Links) -> float:
    """Return seconds in which neighbors that divide experts gather each other's tokens and add up the results."""
    neighbors = max(1, layout.ep // layout.tp)
    return 2 * links.gather(Group(neighbors, layout.tp * layout.cp), neighbors * local * spec.hidden)
