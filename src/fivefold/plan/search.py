"""Search for layouts and settings of a run that fit a cluster, the fastest first: model, cluster, workload -> Candidates.

No torch here.

The rules of the layouts exclude models that cannot be sharded; the memory estimate excludes runs that do not fit. The search
first times the trainer alone with even stages. The fastest layouts then get other stage splits and virtual stages, and the
fastest of those are combined with each engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, cast

from fivefold.config import RunConfig
from fivefold.config.fsdp_checks import unproven_fault
from fivefold.config.learners import OffloadConfig
from fivefold.config.validate import validate
from fivefold.errors import UserError
from fivefold.layout import ParallelLayout, PipelineSplit
from fivefold.models.bridges import bridge_fault
from fivefold.models.spec import ModelSpec
from fivefold.plan.efficiency import Efficiencies
from fivefold.plan.engine_checks import engine_cache, token_bytes
from fivefold.plan.estimate import Lengths, StepEstimate, step_estimate, trainer_cluster, training_batch
from fivefold.plan.hardware import HEADROOM, Cluster
from fivefold.plan.memory import BYTES, Sharded
from fivefold.plan.processes import fastest, step_seconds, with_processes
from fivefold.plan.roles import memory_of
from fivefold.plan.stage_cuts import even_split, stage_cuts
from fivefold.plan.step_time import update_time

_BUDGETS = (4096, 8192, 16384, 32768, 65536)
_FRACTIONS = tuple(share / 100 for share in range(90, 15, -5))
_EVEN, _CUT, _WHOLE = 24, 6, 8
"""Number of layouts that each round passes on."""
_MOST_GPUS = 64
"""Largest multiple of the given GPUs that is tried if a model does not fit."""
_RESERVES = (0.0, 0.25, 0.5, 0.75)
"""Shares of memory reserved for critic, reference and reward model, tried in order.

These models use the policy's ranks, and often its layout.
"""
_OFFLOADS = (
    OffloadConfig(),
    OffloadConfig(gradients=True, optimizer=True),
    OffloadConfig(parameters=True, gradients=True, optimizer=True),
)


@dataclass(frozen=True)
class Candidate:
    """A run that fits, with its estimate."""

    config: RunConfig
    estimate: StepEstimate

    def order(self) -> tuple[float, int]:
        """Return the key by which runs are sorted: the fastest first, and of equally fast ones the shorter layout."""
        return round(self.estimate.seconds, 6), len(self.config.policy.backend)


@dataclass
class _Smallest:
    """Smallest memory need among the runs that do not fit."""

    bytes: float = float("inf")

    def saw(self, size: float) -> None:
        self.bytes = min(self.bytes, size)


@dataclass(frozen=True)
class Space:
    """Inputs of the search."""

    spec: ModelSpec
    base: RunConfig
    """Run with all that is not searched: method, batch, lengths, other models. Its launch.gpu is the cluster's."""
    cluster: Cluster
    rates: Efficiencies
    lengths: Lengths
    reserve: float = 0.0
    """Share of `room` that is reserved for other models during the search for the policy's layouts."""
    _smallest: _Smallest = field(default_factory=_Smallest)

    @property
    def room(self) -> float:
        """Return the bytes of a GPU that a run may fill."""
        return self.cluster.room

    def search(self, count: int = 3) -> list[Candidate]:
        """Return the fastest `count` runs with different layouts; raise ValueError if none fits."""
        candidates = self._candidates()
        if not candidates:
            raise UserError(self._too_large())
        chosen: dict[tuple[str, str], Candidate] = {}
        for one in sorted(candidates, key=Candidate.order):
            where = (one.config.policy.backend, one.config.engine.placement)
            # Keep only the fastest engine for each layout.
            if len(chosen) < count and where not in chosen and not validate(one.config).errors:
                chosen[where] = one
        if not chosen:
            raise UserError("; ".join(validate(candidates[0].config).errors))
        return list(chosen.values())

    def larger(self) -> Iterator[Space]:
        """Yield the search on 2, 4, 8 and more times as many GPUs, up to 64 times."""
        cluster, factor = self.cluster, 2
        while factor <= _MOST_GPUS:
            gpus = cluster.gpus * factor
            node = max(cluster.node_gpus, min(8, gpus)) if cluster.gpus <= cluster.node_gpus else cluster.node_gpus
            yield replace(self, cluster=replace(cluster, gpus=gpus, node_gpus=node), _smallest=_Smallest())
            factor *= 2

    def fewest(self) -> Candidate | None:
        """Return the fastest run on the fewest GPUs that the model fits, this cluster's times a power of two, or None."""
        for space in chain([self], self.larger()):
            if candidates := space._candidates():
                return min(candidates, key=Candidate.order)
        return None

    def _candidates(self) -> list[Candidate]:
        for reserve in _RESERVES:
            candidates = [
                candidate
                for trainer, engine in self._divisions()
                for model in replace(self, reserve=reserve)._trained(trainer)
                for candidate in self._with_engines(model, engine)
            ]
            if candidates:
                return candidates
        return []

    def _divisions(self) -> Iterator[tuple[int, int]]:
        """Yield (trainer GPUs, GPUs of a separate engine): all and none, or a share of each node."""
        gpus, node_gpus = self.cluster.gpus, min(self.cluster.gpus, self.cluster.node_gpus)
        yield gpus, 0
        if self.base.algorithm.offline or self.base.engine.url:
            return
        for trainer_gpus in sorted({node_gpus // 4, node_gpus // 2, node_gpus * 3 // 4}):
            if 0 < trainer_gpus < node_gpus:
                yield gpus // node_gpus * trainer_gpus, gpus // node_gpus * (node_gpus - trainer_gpus)

    def _trained(self, world: int) -> list[Sharded]:
        """Return the fastest sharded models on `world` ranks."""
        policy = self.base.policy
        mtp = self.spec.mtp_layers if policy.mtp.train else 0
        even = _fastest(
            _EVEN,
            (
                self._best(Sharded(self.spec, layout, split, lora=policy.lora.spec, mtp_layers=mtp, fsdp=policy.fsdp))
                for layout, split in self.layouts(world)
            ),
        )
        cut = (
            self._best(replace(model, stages=split))
            for _, model in even[:_CUT]
            for split in (stage_cuts(self.spec.layers, model.layout) if model.layout.backend == "megatron" else ())
        )
        return [model for _, model in _fastest(_WHOLE, [*even, *cut])]

    def layouts(self, world: int) -> Iterator[tuple[ParallelLayout, PipelineSplit]]:
        """Yield every layout of `world` ranks that can shard the model, with stages as even as possible.

        They are `fsdp:` layouts if the run has one, or if the model has no file here and comes through no bridge.
        """
        if self.base.policy.layout.backend == "fsdp" or _needs_fsdp(self.spec, self.base.policy.megatron.bridge_type):
            yield from self._of_fsdp(world)
            return
        spec, part = self.spec, self.spec.moe
        samples = self.base.samples_per_step // self.base.algorithm.updates_per_step
        for pp in _divisors(world, spec.layers):
            split = even_split(spec.layers, pp)
            for tp in _divisors(world // pp, min(self.cluster.node_gpus, spec.heads)) if split is not None else ():
                for cp in _divisors(world // pp // tp, 16):
                    dp = world // pp // tp // cp
                    experts = [(1, 1)]
                    if part is not None:
                        experts = [(ep, 1) for ep in _divisors(world // pp, part.num_experts)]
                        experts += [(ep, tp) for ep in _divisors(world // pp // tp, part.num_experts) if tp > 1]
                    for ep, etp in experts if dp <= samples else ():
                        layout = ParallelLayout(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp)
                        if _can_shard(spec, layout, split):
                            assert split is not None
                            yield layout, split

    def _of_fsdp(self, world: int) -> Iterator[tuple[ParallelLayout, PipelineSplit]]:
        samples, options = self.base.samples_per_step // self.base.algorithm.updates_per_step, self.base.policy.fsdp
        for tp in _divisors(world, min(self.cluster.node_gpus, self.spec.heads)):
            for cp in _divisors(world // tp, 16):
                dp = world // tp // cp
                is_even = dp <= samples and dp % options.replicas == 0
                for ep in _expert_sizes(self.spec, tp, dp // options.replicas) if is_even else ():
                    layout = ParallelLayout("fsdp", dp=dp, tp=tp, cp=cp, ep=ep)
                    if _fsdp_can_train(self.spec, layout, options.unproven):
                        yield layout, PipelineSplit()

    def _best(self, model: Sharded) -> tuple[float, Sharded] | None:
        """Return the layout's fastest recomputation and micro-batch size that fit during training of the policy."""
        best: tuple[float, Sharded] | None = None
        longest = self.base.max_sequence_tokens * self.base.algorithm.samples_per_comparison
        if not _can_train(model, self.base.policy.megatron.bridge_type) or not self._holds(model):
            return None
        for recompute in ("none", "selective", "full") if model.layout.backend == "megatron" else ("none", "full"):
            before = float("inf")
            for budget in (longest, *(one for one in _BUDGETS if one > longest)):
                changed = replace(model, recompute=recompute, tokens_per_micro_batch=budget)
                if not self._holds(changed):
                    break
                seconds = self._seconds(changed)
                if best is None or seconds < best[0]:
                    best = seconds, changed
                if seconds >= before:
                    break
                before = seconds
            if best is not None and best[1].tokens_per_micro_batch > longest:
                # More recomputation costs more than even larger micro-batches could gain.
                break
        return best

    def _holds(self, model: Sharded) -> bool:
        """Return whether the model alone fits during training."""
        need = max(
            held.parameters + held.gradients + held.optimizer + held.activations
            for held in model.held(BYTES[self.base.policy.dtype])
        )
        if need > self.room:
            self._smallest.saw(need)
        return need <= (1 - self.reserve) * self.room

    def _seconds(self, model: Sharded) -> float:
        cluster = trainer_cluster(model.layout.world_size, self.cluster)
        return update_time(model, training_batch(self.base, self.lengths), cluster, self.rates).total

    def _with_engines(self, model: Sharded, engine_gpus: int) -> Iterator[Candidate]:
        """Yield the model with each engine, if both fit together."""
        base, layout = self.base, model.layout
        options = {name: value for name, value in vars(model.stages).items() if value != getattr(PipelineSplit(), name)}
        pipeline = {
            name: value for name, value in base.policy.megatron.pipeline.items() if name not in vars(PipelineSplit())
        }
        policy = replace(
            base.policy,
            backend=str(layout),
            recompute=cast(Any, model.recompute),
            tokens_per_micro_batch=model.tokens_per_micro_batch,
            megatron=replace(base.policy.megatron, pipeline=pipeline | options),
        )
        kind = base.engine.kind if base.engine.layout is not None else "vllm"
        for offload in _OFFLOADS[:1] if engine_gpus else _OFFLOADS:
            changed = replace(
                base, policy=replace(policy, offload=replace(offload, bucket_mb=base.policy.offload.bucket_mb))
            )
            if base.algorithm.offline or base.engine.url:
                yield from self._fitting(changed)
                continue
            world = engine_gpus or layout.world_size
            for tp in _divisors(world, self._widest(engine_gpus)):
                if not _engine_can_shard(self.spec, tp):
                    continue
                engine = replace(
                    base.engine,
                    backend=f"{kind}:d{world // tp}" + (f"t{tp}" if tp > 1 else ""),
                    placement="apart" if engine_gpus else "colocated",
                    processes=1,
                )
                yield from self._fitting(self._divided(self._filled(replace(changed, engine=engine))))

    def _widest(self, engine_gpus: int) -> int:
        """Return how many GPUs of a node an engine may have."""
        nodes = max(1, self.cluster.gpus // self.cluster.node_gpus)
        return engine_gpus // nodes if engine_gpus else min(self.cluster.gpus, self.cluster.node_gpus)

    def _filled(self, config: RunConfig) -> RunConfig | None:
        """Return the run with the largest engine memory share that fits next to what stays on the device during sampling."""
        apart = config.engine.is_apart
        stays = {} if apart else memory_of(config, self.spec).sampling
        resident = sum(size for name, size in stays.items() if name not in ("engine", "cache"))
        for fraction in _FRACTIONS:
            changed = replace(config, engine=replace(config.engine, memory_fraction=fraction))
            if resident + fraction * self.cluster.bytes > self.cluster.bytes * (HEADROOM if not apart else 1):
                continue
            cache = engine_cache(changed, self.spec)
            if (
                cache is not None
                and cache >= token_bytes(changed.engine, changed.policy, self.spec) * config.max_sequence_tokens
            ):
                return changed
            break
        return None

    def _divided(self, config: RunConfig | None) -> RunConfig | None:
        """Return the run with the number of engine processes with which a step is fastest."""
        if config is None:
            return None
        seconds = step_seconds(config, self.spec, self.cluster, self.rates, self.lengths)
        return with_processes(config, fastest(seconds))

    def _fitting(self, config: RunConfig | None) -> Iterator[Candidate]:
        if config is None:
            return
        estimate = step_estimate(config, self.spec, self.cluster, self.rates, self.lengths)
        if estimate.memory.total <= self.room:
            yield Candidate(config, estimate)
        else:
            self._smallest.saw(estimate.memory.total)

    def _too_large(self) -> str:
        """Describe how much memory is missing, and how many GPUs would be enough."""
        need, cluster = self._smallest.bytes, self.cluster
        message = (
            f"{self.spec.parameters / 1e9:,.1f} billion parameters do not fit {cluster.gpus} x {cluster.gpu} on any layout"
        )
        if need < float("inf"):
            message += (
                f": the smallest needs {need / 2**30:,.1f} GiB of each, {(need - self.room) / 2**30:,.1f} more than the "
                f"{self.room / 2**30:.1f} GiB that a run may fill"
            )
        enough = next((larger for larger in self.larger() if larger._candidates()), None)
        if enough is not None:
            return f"{message}; it fits {enough.cluster.gpus} of them"
        return f"{message}; it does not fit {cluster.gpus * _MOST_GPUS} of them either: take larger GPUs or a smaller model"


def _fastest(count: int, timed: Iterable[tuple[float, Sharded] | None]) -> list[tuple[float, Sharded]]:
    """Return the fastest `count`, each layout once."""
    best: dict[ParallelLayout, tuple[float, Sharded]] = {}
    for one in timed:
        if one is not None and (one[1].layout not in best or one[0] < best[one[1].layout][0]):
            best[one[1].layout] = one
    return sorted(best.values(), key=lambda pair: pair[0])[:count]


def _divisors(number: int, most: int) -> list[int]:
    """Return the divisors of `number` up to `most`."""
    return [one for one in range(1, min(number, most) + 1) if number % one == 0]


def _expert_sizes(spec: ModelSpec, tp: int, neighbors: int) -> list[int]:
    """Return sizes of e in an `fsdp:` layout: 1, where tp ranks divide experts, or the ranks of two and more neighbors."""
    return [1, *(tp * count for count in _divisors(neighbors, neighbors)[1:])] if spec.routed_parameters else [1]


def _fsdp_can_train(spec: ModelSpec, layout: ParallelLayout, unproven: bool) -> bool:
    return not unproven_fault(spec.family, layout, unproven) and _can_shard(spec, layout, None)


def _needs_fsdp(spec: ModelSpec, bridge: str) -> bool:
    """Whether a model has no file here and does not come through the run's bridge."""
    return spec.stored is not None and (bool(spec.only_fsdp) or bridge == "native")


def _can_train(model: Sharded, bridge: str) -> bool:
    """Whether the layout can shard the model and its bridge converts it."""
    virtual = model.stages.virtual_stages(model.layout)
    return not bridge_fault(bridge, model.spec, model.layout, virtual) and _can_shard(model.spec, model.layout, model.stages)


def _can_shard(spec: ModelSpec, layout: ParallelLayout, split: PipelineSplit | None) -> bool:
    try:
        spec.check_layout(layout, split)
    except UserError:
        return False
    return True


def _engine_can_shard(spec: ModelSpec, tp: int) -> bool:
    """Return whether heads, feed-forward and experts are divisible; key/value heads may be divided or copied."""
    ffn = spec.ffn if spec.moe is None else spec.moe.ffn
    return spec.heads % tp == 0 and ffn % tp == 0 and (spec.kv_heads % tp == 0 or tp % spec.kv_heads == 0)
