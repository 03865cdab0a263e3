"""ModelSpec and layout -> bytes on a rank and floating-point operations of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from fivefold.config.learners import FSDPConfig
from fivefold.layout import ParallelLayout, PipelineSplit
from fivefold.models.adapters import LoraSpec, adapter_tensors
from fivefold.models.parameters import Sharding
from fivefold.models.spec import ModelSpec

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per number, by dtype."""
CPU_CACHE = 1 << 30
"""Bytes of vLLM's cache on a CPU, where vLLM's default would be a share of the whole machine's memory."""
ENGINE_GRAPHS = 2 << 30
"""Bytes that vLLM uses besides weights and cache: CUDA graphs (0.4 to 0.6 GiB seen), workspaces, its largest prefill."""
LOGITS_BYTES = 2 * 2**30
"""Bytes of the chunk of float32 logits that exists at one time on a GPU: its gradient is freed before the next chunk."""
PLAIN_LOGITS_BYTES = 3 * 256 * 2**20
"""Bytes of the chunks of logits in plain PyTorch, three at one time."""


@dataclass(frozen=True)
class OtherMemory:
    """Bytes of a model besides the policy, on one rank."""

    state: int
    """Bytes during its updates: parameters, gradients, optimizer state, and the reference it is compared with; 0 if it does
    not learn."""
    resident: int
    """Bytes that stay on the device outside of its turn."""
    activations: int = 0
    """Bytes that an update keeps for its backward pass."""
    computing: int = 0
    """Bytes of its state during a pass without gradient."""
    forward: int = 0
    """Bytes that this pass holds, where a number of sequences limits it; 0 where the micro-batches of updates do."""


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest rank, by purpose."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    engine: int
    """Bytes of the engine's weights."""
    cache: int
    """Bytes of the engine's KV cache."""
    others: Mapping[str, OtherMemory] = field(default_factory=dict)
    """Role -> bytes of each model besides the policy."""
    engine_sleeps: bool = True
    """True if the engine is on the device only while it samples."""
    offload: frozenset[str] = frozenset()
    """Parts of the policy that are on the host outside of its turn."""
    forward: int = 0
    """Bytes that a pass of the policy without gradient holds, where a number of sequences limits it."""

    def _waiting(self, turn: str = "policy") -> dict[str, int]:
        """Return the bytes of models whose turn it is not."""
        others = {name.replace(".", " "): one.resident for name, one in self.others.items() if name != turn}
        parts = {} if self.engine_sleeps else {"engine": self.engine}
        names = (name for name in ("parameters", "gradients", "optimizer") if name not in self.offload)
        return others | parts | {name: getattr(self, name) for name in names}

    @property
    def training(self) -> dict[str, int]:
        """Return the bytes during an update of the policy."""
        learning = {name: getattr(self, name) for name in ("parameters", "gradients", "optimizer", "activations")}
        return learning | self._waiting()

    def training_of(self, name: str) -> dict[str, int]:
        """Return the bytes during an update of another model that learns."""
        one = self.others[name]
        return {name: one.state, "activations": one.activations} | self._waiting(name)

    @property
    def sampling(self) -> dict[str, int]:
        """Return the bytes while the engine samples."""
        return {"engine": self.engine, "cache": self.cache} | self._waiting()

    @property
    def syncing(self) -> dict[str, int]:
        """Return the bytes during a weight sync: parameters of policy and engine, before the engine allocates its cache."""
        return {"parameters": self.parameters, "engine": self.engine} | self._waiting()

    @property
    def phases(self) -> dict[str, dict[str, int]]:
        """Return the phases of a step in this run, by name."""
        others = {f"training the {name}": self.training_of(name) for name, one in self.others.items() if one.state}
        passes = {
            f"a pass of the {name}": {name: one.computing, "activations": one.forward} | self._waiting(name)
            for name, one in self.others.items()
            if one.forward
        }
        if self.forward:
            computing = {"parameters": self.parameters, "activations": self.forward}
            passes["a pass without gradient"] = computing | self._waiting()
        engine = {"syncing weights": self.syncing, "sampling": self.sampling} if self.engine else {}
        return {"training": self.training, **others, **passes, **engine}

    @property
    def total(self) -> int:
        """Return the bytes of the largest phase."""
        return max(sum(parts.values()) for parts in self.phases.values())

    def table(self) -> list[str]:
        """Return a table as lines: a row for each phase, a column for each part, in GiB or MiB."""
        unit, size = ("GiB", 2**30) if self.total >= 2**30 else ("MiB", 2**20)
        columns = list(dict.fromkeys(name for parts in self.phases.values() for name, held in parts.items() if held))
        rows = [[f"{unit} on the fullest rank", "total", *columns]]
        for phase, parts in self.phases.items():
            sizes = [sum(parts.values()), *(parts.get(name, 0) for name in columns)]
            rows.append([phase, *(f"{held / size:.2f}" if held else "" for held in sizes)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        cells = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
        return ["  ".join(line).rstrip() for line in cells]


@dataclass(frozen=True)
class RankParameters:
    """Numbers of parameters on one rank."""

    dense: int
    experts: int

    @property
    def total(self) -> int:
        return self.dense + self.experts


@lru_cache(maxsize=4096)
def rank_parameters(
    spec: ModelSpec, layout: ParallelLayout, stages: PipelineSplit | None = None, mtp_layers: int = 0
) -> tuple[RankParameters, ...]:
    """Return the parameters of one rank in each pipeline stage, with embeddings and `mtp_layers` of multi-token
    prediction."""
    embedding = spec.padded_vocab * spec.hidden
    per_stage = []
    for stage, chunks in enumerate((stages or PipelineSplit()).split_layers(spec.layers, layout)):
        layers = [layer for chunk in chunks for layer in chunk]
        dense = sum(spec.shared_parameters(layer) for layer in layers)
        experts = sum(spec.expert_parameters(layer) for layer in layers)
        if stage == 0:
            dense += embedding
        if stage == layout.pp - 1 and not spec.value_head and not (spec.tied and layout.pp == 1):
            dense += embedding
        if stage == layout.pp - 1 and mtp_layers:
            # Three norms and a projection around a layer like the last one; with a pipeline also a copy of the embedding.
            width, last = spec.hidden, spec.layers - 1
            dense += mtp_layers * (spec.shared_parameters(last) + 3 * width + 2 * width * width)
            dense += embedding if layout.pp > 1 else 0
            experts += mtp_layers * spec.expert_parameters(last)
        per_stage.append(RankParameters(dense // layout.tp, experts // (layout.ep * layout.etp)))
    return tuple(per_stage)


class Gathered(NamedTuple):
    """Numbers of parameters that a rank of an `fsdp:` layout has whole, once FSDP has gathered them from its shards."""

    ends: int
    """Parameters of the embedding and the output layer."""
    dense: int
    """Parameters of all layers but their routed experts."""
    experts: int
    """Parameters of this rank's routed experts, in all layers."""

    @property
    def total(self) -> int:
        return sum(self)


@lru_cache(maxsize=4096)
def gathered_parameters(spec: ModelSpec, layout: ParallelLayout) -> Gathered:
    """Return what a rank of an `fsdp:` layout has whole; tensor-parallel ranks divide whole experts too."""
    ends = (1 if spec.tied or spec.value_head else 2) * spec.vocab * spec.hidden
    experts = spec.routed_parameters
    dense = spec.parameters - ends - experts
    return Gathered(ends, dense // layout.tp, experts // max(layout.tp, layout.ep))


@lru_cache(maxsize=64)
def _adapter_sizes(spec: ModelSpec, lora: LoraSpec) -> Counter[tuple[int, bool, bool, int]]:
    """Return how many adapter tensors each (layer, of an expert, sharded, size) has: experts have tens of thousands."""
    counts = Counter[tuple[int, bool, bool, int]]()
    for tensor, (rows, columns) in adapter_tensors(spec, lora).items():
        assert tensor.layer is not None
        counts[tensor.layer, tensor.expert is not None, tensor.sharding is not Sharding.REPLICATE, rows * columns] += 1
    return counts


@lru_cache(maxsize=4096)
def adapter_parameters(
    spec: ModelSpec, lora: LoraSpec, layout: ParallelLayout, stages: PipelineSplit | None = None
) -> tuple[RankParameters, ...]:
    """Return the adapter parameters of one rank in each pipeline stage."""
    dense, experts = [0] * spec.layers, [0] * spec.layers
    for (layer, of_expert, is_sharded, size), count in _adapter_sizes(spec, lora).items():
        parts = layout.etp if of_expert else layout.tp
        (experts if of_expert else dense)[layer] += count * (size // (parts if is_sharded else 1))
    return tuple(
        RankParameters(sum(dense[layer] for layer in of_stage), sum(experts[layer] for layer in of_stage) // layout.ep)
        for chunks in (stages or PipelineSplit()).split_layers(spec.layers, layout)
        for of_stage in [[layer for chunk in chunks for layer in chunk]]
    )


def kept_numbers(spec: ModelSpec, layer: int, kernels: bool) -> int:
    """Return how many numbers a layer keeps per token for backward.

    `kernels`: with GPU kernels, which keep only their inputs.
    """
    heads, groups = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    if spec.mla is not None:
        part = spec.mla
        attention = 3 * spec.heads * (part.qk_nope + part.qk_rope) + 3 * spec.heads * part.v_dim
        attention += 2 * (part.kv_rank + part.qk_rope) + 2 * (part.q_rank or 0)
    elif kernels:
        # Queries, keys and values before and after norm and rotation, and the output of attention.
        attention = 2 * (heads + 2 * groups) + heads
    else:
        attention = 3 * heads + 3 * groups
    # Two norms with their inputs and outputs; gate, up and the output of the activation.
    widths, copies, inner = (4, 1, 3) if kernels else (6, 3, 4)
    if spec.moe is None or not spec.moe.layers[layer]:
        return widths * spec.hidden + attention + inner * spec.ffn
    # One copy of a token per expert that it is routed to, and each expert's inner width.
    routed = spec.moe.top_k * (copies * spec.hidden + inner * spec.moe.ffn)
    return widths * spec.hidden + attention + routed + inner * spec.moe.shared_ffn


def backward_numbers(spec: ModelSpec, layer: int) -> int:
    """Return how many numbers per token the backward pass of a layer holds next to what the layer keeps.

    The most is held where it begins: gradients of the layer's output and of gate and up, when nothing else is free yet.
    """
    if spec.moe is None or not spec.moe.layers[layer]:
        return spec.hidden + 2 * spec.ffn
    return spec.hidden + spec.moe.top_k * (spec.hidden + 2 * spec.moe.ffn) + 2 * spec.moe.shared_ffn


@dataclass(frozen=True)
class Sharded:
    """A model as its layout shards it over ranks."""

    spec: ModelSpec
    layout: ParallelLayout
    stages: PipelineSplit = field(default_factory=PipelineSplit)
    recompute: str = "none"
    tokens_per_micro_batch: int = 0
    """Tokens of whole sequences, which context-parallel ranks split; 0 if the model only runs forward."""
    kernels: bool = True
    """True if the model runs on GPUs."""
    lora: LoraSpec | None = None
    """Adapters that are trained instead of the whole model."""
    mtp_layers: int = 0
    """Layers of multi-token prediction that are trained."""
    tokens_per_forward: int = 0
    """Most tokens of a pass without gradient that a number of sequences limits; 0 where `tokens_per_micro_batch` does."""
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    """Options of an `fsdp:` layout."""

    @property
    def shards(self) -> int:
        """Number of ranks that shard what tensor-parallel ranks hold of the model, in an `fsdp:` layout."""
        return self.layout.dp * self.layout.cp // self.fsdp.replicas

    @property
    def neighbors(self) -> int:
        """Number of tensor-parallel groups that divide experts among them, in an `fsdp:` layout."""
        return max(1, self.layout.ep // self.layout.tp)

    @property
    def gathered(self) -> Gathered:
        """Return the numbers of parameters that a rank has whole, in an `fsdp:` layout."""
        return gathered_parameters(self.spec, self.layout)

    @property
    def shard(self) -> int:
        """Return the number of parameters that FSDP leaves to a rank, in an `fsdp:` layout."""
        held = self.gathered
        return -(-(held.ends + held.dense) // self.shards) + -(-held.experts // (self.shards // self.neighbors))

    @property
    def trained(self) -> tuple[RankParameters, ...]:
        """Return the parameters with gradients and moments, for one rank of each pipeline stage."""
        if self.lora is None:
            return rank_parameters(self.spec, self.layout, self.stages, self.mtp_layers)
        return adapter_parameters(self.spec, self.lora, self.layout, self.stages)

    def held(self, size: int) -> list[Held]:
        """Return the bytes on one rank of each pipeline stage; `size` is the bytes per number."""
        if self.layout.backend == "fsdp":
            return [self._held_by_fsdp(size)]
        spec, layout, stages = self.spec, self.layout, list[Held]()
        tokens = self.tokens_per_micro_batch / (layout.tp * layout.cp)
        parts = rank_parameters(self.spec, layout, self.stages, self.mtp_layers)
        split = self.stages.split_layers(self.spec.layers, layout)
        for stage, (all_parameters, learned, chunks) in enumerate(zip(parts, self.trained, split, strict=True)):
            # A stage has as many micro-batches in flight as stages from it to the last; interleaved stages have more.
            in_flight = float(layout.pp - stage)
            if len(chunks) > 1:
                in_flight += (layout.pp - 1) / len(chunks)
            layers = [layer for chunk in chunks for layer in chunk]
            layers += [spec.layers - 1] * (self.mtp_layers if stage == layout.pp - 1 else 0)
            numbers, again = [kept_numbers(spec, layer, self.kernels) for layer in layers], 0
            if self.recompute == "full":
                # The input of each layer, and one recomputed layer at a time.
                numbers, again = [spec.hidden] * len(layers), max(numbers, default=0)
            has_logits = stage == layout.pp - 1 and not spec.value_head
            last = self._logits(tokens, size, copies=2) if has_logits else 0
            again += max((backward_numbers(spec, layer) for layer in layers), default=0)
            # The logits are freed before the backward pass of a layer, and before a layer is recomputed.
            activations = int(tokens * size * in_flight * sum(numbers) + max(last, tokens * size * again))
            held = (all_parameters.total + (0 if self.lora is None else learned.total)) * size
            forward = self._forward(layers, size, has_logits)
            stages.append(Held(held, learned.total * 4, _optimizer(learned, layout, size), activations, forward))
        return stages

    def _held_by_fsdp(self, size: int) -> Held:
        """Return the bytes on every rank of an `fsdp:` layout: float32 shards, and what is gathered around a layer."""
        spec, held = self.spec, self.gathered
        # The gradient of the layer, and its float32 copy that is reduced; those of the ends come last.
        reduced = max(held.ends, sum(self._gathered_layer())) * (size + 4)
        tokens = self.tokens_per_micro_batch / self.layout.cp
        every = range(spec.layers)
        numbers, again = [kept_numbers(spec, layer, kernels=False) for layer in every], 0
        if self.recompute == "full":
            numbers, again = [spec.hidden] * spec.layers, max(numbers)
        last = 0.0 if spec.value_head else self._logits(tokens, size, copies=2)
        # The tokens of all neighbors around a layer of experts, and their results.
        exchanged = 2 * self.neighbors * spec.hidden if self.neighbors > 1 else 0
        activations = int(tokens * size * sum(numbers) + max(last, tokens * size * (again + exchanged)))
        gathered = self.gathered_bytes(size)
        forward = self._forward(list(every), size, not spec.value_head) + gathered if self.tokens_per_forward else 0
        gathered_gradients = held.total * 4 if self.fsdp.keep_gathered else 0
        shard = 0 if self.fsdp.cpu_adam else self.shard
        return Held(shard * 4, shard * 4 + gathered_gradients, shard * 8, activations + gathered + reduced, forward)

    def _gathered_layer(self) -> tuple[int, int]:
        """Return (dense, experts): what a rank of an `fsdp:` layout has whole of a layer, of one with experts if any has."""
        part, layers = self.spec.moe, self.spec.layers
        return self.gathered.dense // layers, self.gathered.experts // (layers if part is None else sum(part.layers))

    def gathered_bytes(self, size: int) -> int:
        """Return the bytes that are gathered at a time in an `fsdp:` layout; `size` is the bytes per number."""
        if self.shards == 1 and size == 4 and not self.fsdp.cpu_adam:
            return 0
        held, (dense, experts) = self.gathered, self._gathered_layer()
        # Two layers are gathered at a time, the second ahead of its use; embedding and head stay for the whole pass. Experts
        # that ranks divide are gathered apart: those of the second layer follow when those of the first are released.
        together = 2 * dense + experts * (1 if max(self.layout.tp, self.layout.ep) > 1 else 2)
        layers = together if self.fsdp.reshard_after_forward else held.dense + held.experts
        return (held.ends + layers) * size

    def _forward(self, layers: list[int], size: int, has_logits: bool) -> int:
        """Return the bytes of a pass without gradient: what goes in and out of a layer, and one layer or the logits."""
        tokens = self.tokens_per_forward / (self.layout.tp * self.layout.cp)
        inside = max((kept_numbers(self.spec, layer, self.kernels) for layer in layers), default=0)
        logits = self._logits(tokens, size, copies=1) if has_logits else 0
        return int(2 * tokens * size * self.spec.hidden + max(logits, tokens * size * inside))

    def _logits(self, tokens: float, size: int, copies: int) -> float:
        """Return the bytes of the output layer; `copies` is 2 with gradients."""
        logits = 4 * tokens * self.spec.padded_vocab
        if self.kernels:
            # The last norm, its input and output; also the states that every tensor-parallel rank has whole.
            return min(LOGITS_BYTES, logits) + copies * tokens * size * self.spec.hidden * (1 + self.layout.tp)
        return min(PLAIN_LOGITS_BYTES, 3 * logits)


@dataclass(frozen=True)
class Held:
    """Bytes of one model on one rank."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    forward: int = 0
    """Bytes of a pass without gradient, where a number of sequences limits it."""

    def outside(self, parts: Collection[str]) -> int:
        """Return the bytes of its state after these parts are offloaded."""
        return sum(getattr(self, name) for name in ("parameters", "gradients", "optimizer") if name not in parts)


@dataclass(frozen=True)
class Other:
    """A model besides the policy: its sharding, its ranks, and the parts that are offloaded while other models compute."""

    model: Sharded
    first_rank: int = 0
    offload: frozenset[str] = frozenset()
    learns: bool = False
    compared_by: str | None = None
    """Role that is compared with this model in each of its updates; this model is counted and offloaded with that role."""


def estimate_memory(
    policy: Sharded,
    *,
    dtype: str,
    engine_sequences: int,
    max_sequence_tokens: int,
    engine_shards: int = 1,
    engine_sleeps: bool = True,
    engine_dtype: str | None = None,
    engine_cache: int | None = None,
    engine_processes: int = 1,
    offload: frozenset[str] = frozenset(),
    others: Mapping[str, Other] | None = None,
) -> Memory:
    """Estimate memory on the fullest rank, with the engine next to the policy (0 sequences: no engine).

    `engine_shards`: ranks that shard the engine. `engine_cache`: bytes that the engine always takes for its cache (default:
    as many as its sequences need). `engine_processes`: processes that each hold the engine's weights.
    """
    spec, size, engine_size = policy.spec, BYTES[dtype], BYTES[engine_dtype or dtype]
    if engine_cache is None:
        engine_cache = engine_sequences * spec.kv_numbers_per_token * engine_size * max_sequence_tokens // engine_shards
    others = others or {}
    models = {"policy": (policy, 0), **{name: (other.model, other.first_rank) for name, other in others.items()}}
    stages = [
        (name, stage, first + number * (model.layout.world_size // model.layout.pp), model.layout)
        for name, (model, first) in models.items()
        for number, stage in enumerate(model.held(size))
    ]
    memories = []
    # All ranks between two starts of stages hold the same.
    for rank in sorted({first for _, _, first, _ in stages}):
        held = {
            name: stage for name, stage, first, layout in stages if first <= rank < first + layout.world_size // layout.pp
        }
        policy_stage, samples = held.get("policy", Held()), engine_sequences and "policy" in held
        # A model that is alone on a rank is not offloaded.
        has_company = len(held) > 1 or bool(samples)
        memories.append(
            Memory(
                parameters=policy_stage.parameters,
                gradients=policy_stage.gradients,
                optimizer=policy_stage.optimizer,
                activations=policy_stage.activations,
                engine=engine_processes * spec.parameters * engine_size // engine_shards if samples else 0,
                cache=max(0, engine_cache) if samples else 0,
                others={
                    name: _other(name, others, held, has_company)
                    for name, other in others.items()
                    if other.compared_by is None
                },
                engine_sleeps=engine_sleeps,
                offload=offload if has_company else frozenset(),
                forward=policy_stage.forward,
            )
        )
    return max(memories, key=lambda memory: memory.total)


def _other(name: str, others: Mapping[str, Other], held: Mapping[str, Held], has_company: bool) -> OtherMemory:
    """Return the memory of one model on a rank, with the model that it is compared with."""
    model, leaving = held.get(name, Held()), others[name].offload if has_company else frozenset()
    compared = sum(held.get(key, Held()).parameters for key, one in others.items() if one.compared_by == name)
    compared = 0 if "parameters" in leaving else compared
    if not others[name].learns:
        resident = 0 if "parameters" in leaving else model.parameters
        return OtherMemory(0, resident, computing=model.parameters, forward=model.forward)
    computing = model.outside(leaving - {"parameters"}) + compared
    return OtherMemory(
        model.outside(()) + compared, model.outside(leaving) + compared, model.activations, computing, model.forward
    )


def _optimizer(trained: RankParameters, layout: ParallelLayout, size: int) -> int:
    """Return bytes of Adam's two moments and the float32 copy of 16-bit parameters, sharded over the replicas."""
    state = 12 if size == 2 else 8
    return trained.dense * state // (layout.dp * layout.cp) + trained.experts * state // layout.edp


def trained_parameters(spec: ModelSpec, lora: LoraSpec | None) -> int:
    """Return the number of trained parameters: all of the model, or only its adapters."""
    if lora is None:
        return spec.parameters
    return sum(size * count for (*_, size), count in _adapter_sizes(spec, lora).items())


def checkpoint_bytes(spec: ModelSpec, dtype: str, lora: LoraSpec | None = None) -> int:
    """Return the bytes of a trained model's checkpoint: weights, a float32 copy of 16-bit weights, and two moments."""
    return trained_parameters(spec, lora) * (12 if dtype == "float32" else 14)


def training_flops(spec: ModelSpec, tokens: int, mean_length: float, lora: LoraSpec | None = None) -> float:
    """Return FLOPs of forward and backward: 6 per active parameter and token, plus causal attention's products.

    A frozen parameter takes 4, because it has no gradient. The adapters' own are left out: about rank / width of them.
    """
    active = sum(spec.active_parameters(layer) for layer in range(spec.layers)) + spec.vocab * spec.hidden
    width = spec.heads * spec.head_dim
    if spec.mla is not None:
        width = spec.heads * (spec.mla.qk_nope + spec.mla.qk_rope + spec.mla.v_dim) // 2
    return tokens * ((6.0 if lora is None else 4.0) * active + 6 * spec.layers * width * mean_length)
