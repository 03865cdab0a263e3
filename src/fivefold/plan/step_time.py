"""Seconds of an update by part: a model as its layout shards it, its tokens, a cluster -> PassTime. No torch here.

Micro-batches pass through the stages one after the other (1F1B). The slowest stage sets the time of all of them; the time of
the other stages for the first and the last micro-batch is the bubble. The host launches kernels ahead of the GPU; the GPU
waits if launching takes longer than computing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache

from fivefold.layout import ParallelLayout, PipelineSplit
from fivefold.models.spec import ModelSpec
from fivefold.plan.costs import (
    ADAM_BYTES,
    GRADIENT_BYTES,
    HOST_ADAM_BYTES,
    Tokens,
    Work,
    attention_flops,
    embedding_work,
    head_work,
    layer_work,
    unread_work,
)
from fivefold.plan.efficiency import Efficiencies
from fivefold.plan.hardware import Cluster
from fivefold.plan.links import Group, Links, data_group, expert_data_group, layer_traffic, tensor_group
from fivefold.plan.memory import RankParameters, Sharded

DATA_IMBALANCE = 1.02
"""Tokens of the fullest replica over the mean, with samples dealt by length (benchmarks/results/balance.md)."""


@dataclass(frozen=True)
class Batch:
    """Contents of one pass, over all replicas."""

    tokens: float
    mean_length: float
    attended: float
    """Mean sequence length over tokens: longer sequences have more of them."""
    predicted: float
    """Share of tokens that are in a response."""

    @classmethod
    def of(cls, samples: float, prompt: float, response: float, spread: float = 1 / 12) -> Batch:
        """Return samples with these mean lengths; `spread`: variance of the length over the square of its mean."""
        mean = prompt + response
        return cls(samples * mean, mean, mean * (1 + spread), response / mean)

    def micro_batches(self, layout: ParallelLayout, budget: int, virtual: int, imbalance: float) -> tuple[int, float]:
        """Return the micro-batches of a replica, and the tokens of each."""
        tokens = self.tokens / layout.dp * (imbalance if layout.dp > 1 else 1.0)
        count = max(1, math.ceil(tokens / max(budget, self.mean_length)))
        if virtual > 1:
            count = -(-count // layout.pp) * layout.pp
        return count, tokens / count


@dataclass(frozen=True)
class PassTime:
    """Seconds of one or more passes, by part."""

    parts: dict[str, float]
    overlapped: dict[str, float] = field(default_factory=dict)
    """Seconds that overlap with `parts` and are not in them."""
    micro_batches: int = 0
    micro_batch_tokens: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class _Stage:
    """Seconds of one pipeline stage for one micro-batch, by part."""

    parts: dict[str, float]
    overlapped: float

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def update_time(
    model: Sharded, batch: Batch, cluster: Cluster, rates: Efficiencies, imbalance: float = DATA_IMBALANCE
) -> PassTime:
    """Return the time of forward, backward and optimizer step over a batch."""
    passes = _passes(model, batch, cluster, rates, imbalance, trains=True)
    return PassTime(
        {**passes.parts, **optimizer_time(model, Links(cluster, rates))},
        passes.overlapped,
        passes.micro_batches,
        passes.micro_batch_tokens,
    )


def forward_time(
    model: Sharded, batch: Batch, cluster: Cluster, rates: Efficiencies, imbalance: float = DATA_IMBALANCE
) -> PassTime:
    """Return the time to compute log-probs or values of a batch."""
    return _passes(model, batch, cluster, rates, imbalance, trains=False)


def _passes(model: Sharded, batch: Batch, cluster: Cluster, rates: Efficiencies, imbalance: float, trains: bool) -> PassTime:
    layout, links = model.layout, Links(cluster, rates)
    virtual = model.stages.virtual_stages(layout)
    count, micro_batch_tokens = batch.micro_batches(layout, model.tokens_per_micro_batch, virtual, imbalance)
    tokens = Tokens(micro_batch_tokens, batch.attended, batch.predicted)
    stages = _stages(model, tokens, links, trains)
    slowest = max(stages, key=lambda stage: stage.total)
    parts = {name: seconds * count for name, seconds in slowest.parts.items()}
    # The first micro-batch passes through all other stages, and the last gradient passes back: once in total.
    if layout.backend == "fsdp":
        parts["gathering"] = _gathering_time(model, links, trains, count, sum(parts.values()))
        parts["copies of FSDP"] = _copied_bytes(model, trains, count) / rates.rate("elementwise")
    parts["bubble"] = (sum(stage.total for stage in stages) - slowest.total) / virtual
    return PassTime(parts, {"tensor parallel": slowest.overlapped * count}, count, micro_batch_tokens)


@lru_cache(maxsize=4096)
def _counts(layers: int, layout: ParallelLayout, split: PipelineSplit, experts: tuple[bool, ...]) -> list[tuple[int, int]]:
    """Return (dense layers, layers with experts) of each stage."""
    pairs = []
    for chunks in split.split_layers(layers, layout):
        layers_of_stage = [layer for chunk in chunks for layer in chunk]
        sparse = sum(experts[layer] for layer in layers_of_stage) if experts else 0
        pairs.append((len(layers_of_stage) - sparse, sparse))
    return pairs


def stage_layers(spec: ModelSpec, layout: ParallelLayout, split: PipelineSplit) -> list[tuple[int, int]]:
    """Return (dense layers, layers with experts) of each stage."""
    return _counts(spec.layers, layout, split, spec.moe.layers if spec.moe is not None else ())


def _seconds(work: list[Work], rates: Efficiencies) -> float:
    return sum(one.seconds(rates) for one in work)


def _stages(model: Sharded, tokens: Tokens, links: Links, trains: bool) -> list[_Stage]:
    spec, layout, rates = model.spec, model.layout, links.efficiencies
    counts = stage_layers(spec, layout, model.stages)
    kinds = {
        has_experts: _layer(model, tokens, links, trains, has_experts)
        for has_experts in (False, True)
        if any(pair[has_experts] for pair in counts)
    }
    # Adjacent stages are one stage's ranks apart. A send takes only its transfer time, once per chunk and direction.
    hidden = tokens.count / layout.cp / layout.tp * spec.hidden * tokens.number_bytes
    chunks = model.stages.virtual_stages(layout)
    sent = (2 if trains else 1) * chunks * links.send(layout.world_size // layout.pp, hidden) if layout.pp > 1 else 0.0
    embedding, head = embedding_work(spec, layout, tokens), head_work(spec, layout, tokens)
    around = links.gather(tensor_group(layout), tokens.count / layout.cp * spec.hidden * tokens.number_bytes)
    ways = 2 if trains else 1
    stages = []
    for stage, pair in enumerate(counts):
        parts = dict.fromkeys(_PARTS, 0.0)
        overlapped = host = 0.0
        for has_experts, layer in kinds.items():
            layers = pair[has_experts]
            for name, seconds in layer.parts.items():
                parts[name] += layers * seconds
            overlapped += layers * layer.overlapped
            host += layers * layer.host
        ends = ([embedding] if stage == 0 else []) + ([head] if stage == layout.pp - 1 else [])
        for work in ends:
            parts["forward"] += _seconds(work[0], rates)
            parts["backward"] += _seconds(work[1], rates) if trains else 0.0
            parts["tensor parallel"] += ways * around
        parts["pipeline"] = sent
        busy = sum(parts.values())
        parts["waiting for the host"] = max(0.0, host - busy)
        stages.append(_Stage(parts, overlapped))
    return stages


_PARTS = ("forward", "backward", "recomputation", "tensor parallel", "context parallel", "expert parallel", "pipeline")


_FROZEN = {"gemm": 0.5, "grouped_gemm": 0.5, "gradients": 0.0}
"""Kind of work -> share of a layer's backward that remains when its weights have no gradients."""


@dataclass(frozen=True)
class _Layer:
    parts: dict[str, float]
    overlapped: float
    host: float


def _layer(model: Sharded, tokens: Tokens, links: Links, trains: bool, has_experts: bool) -> _Layer:
    spec, layout, rates = model.spec, model.layout, links.efficiencies
    ahead, back = layer_work(spec, layout, tokens, has_experts)
    traffic = layer_traffic(spec, layout, tokens, has_experts, links)
    if model.lora is not None:
        back = [replace(one, amount=one.amount * _FROZEN.get(one.kind, 1.0)) for one in back]
    forward = _seconds(ahead, rates)
    again, ways, tensor_ways, overlapped = 0.0, 1.0, 1.0, 0.0
    if trains:
        ways = tensor_ways = 2.0
        backward = _seconds(back, rates)
        # Gathers during products cost only the time that the products do not cover.
        overlapped = min(traffic.overlapped, backward)
        if model.recompute == "full":
            again, ways, tensor_ways = forward, 3.0, 3.0
            if not has_experts:
                # The skipped product also skips its scatter: one of four gathers and scatters.
                again, tensor_ways = again - unread_work(spec, layout, tokens).seconds(rates), 2.75
        elif model.recompute == "selective":
            again = attention_flops(spec, layout, tokens) / rates.rate("attention_forward", tokens.attended)
    parts = {
        "forward": forward,
        "recomputation": again,
        "tensor parallel": tensor_ways * traffic.tensor + (traffic.overlapped - overlapped if trains else 0.0),
        "context parallel": ways * traffic.context,
        "expert parallel": ways * traffic.expert,
    }
    if trains:
        parts["backward"] = backward
    host = rates.rate("layer_host")
    host += rates.rate("tensor_host") if layout.tp > 1 else 0.0
    host += rates.rate("context_host") if layout.cp > 1 else 0.0
    host += rates.rate("fsdp_host") if layout.backend == "fsdp" else 0.0
    if has_experts:
        # Token counts are copied to the host before experts are launched, so the host cannot run ahead of the GPU.
        parts["expert parallel"] += rates.rate("expert_host") * ways / 2
        host += rates.rate("expert_host")
    # Forward alone takes about a third of this host time; full recomputation adds another third.
    return _Layer(parts, overlapped, host * (ways + 1 if trains else 1) / 3)


CAST_BYTES, GATHERED_BYTES, REDUCED_BYTES, ADDED_BYTES = 6, 4, 6, 12
"""Read and written by FSDP: a number of the shard in 16 bits, a gathered number in its tensor, a gradient in float32 and in
order, and a gradient that is added to those of earlier micro-batches."""


def _gathering_time(model: Sharded, links: Links, trains: bool, micro_batches: int, computing: float) -> float:
    """Return the time in which FSDP gathers layers and reduces their gradients, as far as computing does not cover it.

    The next layer is gathered during the computation of one, so the first gather and the last reduction are never covered.
    """
    held, fsdp, tp = model.gathered, model.fsdp, model.layout.tp
    groups = [
        (Group(model.shards, tp), held.ends + held.dense),
        (Group(model.shards // model.neighbors, tp * model.neighbors), held.experts),
    ]
    gather, reduction = (sum(links.gather(group, numbers * size) for group, numbers in groups) for size in (2, 4))
    if fsdp.cpu_adam:
        # Float32 parameters come from the host before they are gathered, and reduced gradients go back.
        copied = model.shard * 4 / links.efficiencies.rate("host_copy")
        gather, reduction = gather + copied, reduction + copied
    total, ends = gather * micro_batches, gather
    if trains:
        total += gather * micro_batches if fsdp.reshard_after_forward else 0.0
        total += reduction * (1 if fsdp.keep_gathered else micro_batches)
        # Copies sum their shards once per update: a reduction and a gather.
        total += 2 * links.gather(Group(fsdp.replicas, tp * model.shards), model.shard * 4)
        ends += reduction
    return max(ends / model.spec.layers, total - computing)


def _copied_bytes(model: Sharded, trains: bool, micro_batches: int) -> int:
    """Return what a rank reads and writes to send shards and to receive whole layers, in all micro-batches."""
    held, fsdp = model.gathered, model.fsdp
    whole = held.ends + held.dense + held.experts
    gathers = 2 if trains and fsdp.reshard_after_forward else 1
    copied = gathers * (GATHERED_BYTES * whole + CAST_BYTES * model.shard)
    if trains:
        copied += REDUCED_BYTES * whole + ADDED_BYTES * (whole if fsdp.keep_gathered else model.shard)
    return copied * micro_batches


def optimizer_time(model: Sharded, links: Links) -> dict[str, float]:
    """Return the time to sum gradients over replicas, update each rank's shard, and gather the parameters."""
    layout, rates = model.layout, links.efficiencies
    if layout.backend == "fsdp":
        # Gradients were reduced in backward, and parameters are gathered in the next forward.
        kind, size = ("host_adam", HOST_ADAM_BYTES) if model.fsdp.cpu_adam else ("adam", ADAM_BYTES)
        return {"optimizer": model.shard * size / rates.rate(kind) + rates.rate("update_host")}
    fullest = max(model.trained, key=lambda parameters: parameters.total)
    rank_shard = RankParameters(fullest.dense // (layout.dp * layout.cp), fullest.experts // layout.edp)
    seconds = rank_shard.total * ADAM_BYTES / rates.rate("adam") + fullest.total * GRADIENT_BYTES / rates.rate("gradients")
    # Gradients are float32, parameters bfloat16.
    sent = sum(
        links.gather(group, size * 4) + links.gather(group, size * 2)
        for group, size in ((data_group(layout), fullest.dense), (expert_data_group(layout), fullest.experts))
    )
    return {"data parallel": sent, "optimizer": seconds + rates.rate("update_host")}
