"""ModelSpec and layout -> bytes on a rank and floating-point operations of a step."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from fivefold.layout import ParallelLayout, PipelineSplit
from fivefold.models.adapters import LoraSpec, adapter_tensors
from fivefold.models.parameters import Sharding
from fivefold.models.spec import ModelSpec

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Of a number, by dtype."""
CPU_CACHE = 1 << 30
"""Bytes of vLLM's cache on a CPU, where its share of the memory would be that of the whole machine."""
ENGINE_GRAPHS = 2 << 30
"""Bytes that vLLM takes beside weights and cache: CUDA graphs (0.4 to 0.6 GiB seen), workspaces, its largest prefill."""
LOGITS_BYTES = 2 * 2**30
"""The chunk of float32 logits that exists at once on a GPU: its gradient is gone before the next one is made."""
PLAIN_LOGITS_BYTES = 3 * 256 * 2**20
"""Those in plain PyTorch, three at once."""


@dataclass(frozen=True)
class OtherMemory:
    """Bytes of a model besides the policy on one rank."""

    state: int
    """What is there in its updates: parameters, gradients, optimizer state, and what it is compared with; 0 where it does
    not learn."""
    resident: int
    """What stays on the device outside of its turn."""
    activations: int = 0
    """What an update keeps for its backward."""


@dataclass(frozen=True)
class Memory:
    """Bytes of the fullest rank, by what they are for."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    engine: int
    """The engine's weights."""
    cache: int
    """Its keys and values."""
    others: Mapping[str, OtherMemory] = field(default_factory=dict)
    """Models besides the policy, by their roles."""
    engine_sleeps: bool = True
    """The engine is on the device while it samples only."""
    offload: frozenset[str] = frozenset()
    """Parts of the policy that wait on the host outside of its turn."""

    def _waiting(self, turn: str = "policy") -> dict[str, int]:
        """What is there of the models whose turn it is not."""
        others = {name.replace(".", " "): one.resident for name, one in self.others.items() if name != turn}
        parts = {} if self.engine_sleeps else {"engine": self.engine}
        kept = (name for name in ("parameters", "gradients", "optimizer") if name not in self.offload)
        return others | parts | {name: getattr(self, name) for name in kept}

    @property
    def training(self) -> dict[str, int]:
        """What is there during an update of the policy."""
        own = {name: getattr(self, name) for name in ("parameters", "gradients", "optimizer", "activations")}
        return own | self._waiting()

    def training_of(self, name: str) -> dict[str, int]:
        """What is there during an update of one of the others that learn."""
        one = self.others[name]
        return {name: one.state, "activations": one.activations} | self._waiting(name)

    @property
    def sampling(self) -> dict[str, int]:
        """What is there while responses are sampled."""
        return {"engine": self.engine, "cache": self.cache} | self._waiting()

    @property
    def syncing(self) -> dict[str, int]:
        """What is there while the engine is given new weights: both of the policy, before its cache takes room."""
        return {"parameters": self.parameters, "engine": self.engine} | self._waiting()

    @property
    def phases(self) -> dict[str, dict[str, int]]:
        """The phases of a step that this run has, by name."""
        others = {f"training the {name}": self.training_of(name) for name, one in self.others.items() if one.state}
        engine = {"syncing weights": self.syncing, "sampling": self.sampling} if self.engine else {}
        return {"training": self.training, **others, **engine}

    @property
    def total(self) -> int:
        """The largest of them."""
        return max(sum(parts.values()) for parts in self.phases.values())

    def describe(self) -> str:
        """Each turn with its parts, in GiB."""

        def sizes_of(parts: dict[str, int]) -> str:
            sizes = {name: size / 2**30 for name, size in parts.items() if size}
            return f"{sum(sizes.values()):.2f} GiB = " + " + ".join(f"{name} {size:.2f}" for name, size in sizes.items())

        return "; ".join(f"{name} {sizes_of(parts)}" for name, parts in self.phases.items())


@dataclass(frozen=True)
class RankParameters:
    """Parameters of one rank."""

    dense: int
    experts: int

    @property
    def total(self) -> int:
        return self.dense + self.experts


@lru_cache(maxsize=4096)
def rank_parameters(
    spec: ModelSpec, layout: ParallelLayout, stages: PipelineSplit | None = None, mtp_layers: int = 0
) -> tuple[RankParameters, ...]:
    """Parameters of a rank of each pipeline stage, embeddings included, and so many layers of multi-token prediction."""
    embedding = spec.padded_vocab * spec.hidden
    found = []
    for stage, chunks in enumerate((stages or PipelineSplit()).split_layers(spec.layers, layout)):
        layers = [layer for chunk in chunks for layer in chunk]
        dense = sum(spec.shared_parameters(layer) for layer in layers)
        experts = sum(spec.expert_parameters(layer) for layer in layers)
        if stage == 0:
            dense += embedding
        if stage == layout.pp - 1 and not spec.value_head and not (spec.tied and layout.pp == 1):
            dense += embedding
        if stage == layout.pp - 1 and mtp_layers:
            # Three norms and a projection around a layer like the last one, and with a pipeline a copy of the embedding.
            width, last = spec.hidden, spec.layers - 1
            dense += mtp_layers * (spec.shared_parameters(last) + 3 * width + 2 * width * width)
            dense += embedding if layout.pp > 1 else 0
            experts += mtp_layers * spec.expert_parameters(last)
        found.append(RankParameters(dense // layout.tp, experts // (layout.ep * layout.etp)))
    return tuple(found)


@lru_cache(maxsize=4096)
def adapter_parameters(
    spec: ModelSpec, lora: LoraSpec, layout: ParallelLayout, stages: PipelineSplit | None = None
) -> tuple[RankParameters, ...]:
    """Numbers of the adapters of a rank of each pipeline stage."""
    dense, experts = [0] * spec.layers, [0] * spec.layers
    for tensor, (rows, columns) in adapter_tensors(spec, lora).items():
        assert tensor.layer is not None
        parts = layout.tp if tensor.expert is None else layout.etp
        size = rows * columns // (1 if tensor.sharding is Sharding.REPLICATE else parts)
        (dense if tensor.expert is None else experts)[tensor.layer] += size
    return tuple(
        RankParameters(sum(dense[layer] for layer in own), sum(experts[layer] for layer in own) // layout.ep)
        for chunks in (stages or PipelineSplit()).split_layers(spec.layers, layout)
        for own in [[layer for chunk in chunks for layer in chunk]]
    )


def kept_numbers(spec: ModelSpec, layer: int, kernels: bool) -> int:
    """What a layer keeps of a token for its backward; `kernels`: those of GPUs, which keep their inputs only."""
    heads, groups = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    if spec.mla is not None:
        part = spec.mla
        attention = 3 * spec.heads * (part.qk_nope + part.qk_rope) + 3 * spec.heads * part.v_dim
        attention += 2 * (part.kv_rank + part.qk_rope) + 2 * (part.q_rank or 0)
    elif kernels:
        # Queries, keys and values before and after norm and rotation, and what attention gives.
        attention = 2 * (heads + 2 * groups) + heads
    else:
        attention = 3 * heads + 3 * groups
    # Two norms, their inputs and outputs; gate, up and what the activation makes of them.
    widths, copies, inner = (4, 1, 3) if kernels else (6, 3, 4)
    if spec.moe is None or not spec.moe.layers[layer]:
        return widths * spec.hidden + attention + inner * spec.ffn
    # As many copies of a token as it has experts, and their own inner width.
    routed = spec.moe.top_k * (copies * spec.hidden + inner * spec.moe.ffn)
    return widths * spec.hidden + attention + routed + inner * spec.moe.shared_ffn


@dataclass(frozen=True)
class Sharded:
    """A model as the ranks of its layout hold it."""

    spec: ModelSpec
    layout: ParallelLayout
    stages: PipelineSplit = field(default_factory=PipelineSplit)
    recompute: str = "none"
    tokens_per_micro_batch: int = 0
    """Of whole sequences, of which context-parallel ranks hold a part each; 0 where the model only computes."""
    kernels: bool = True
    """It runs on GPUs."""
    lora: LoraSpec | None = None
    """Only these adapters are trained."""
    mtp_layers: int = 0
    """Layers of multi-token prediction that are trained."""

    @property
    def trained(self) -> tuple[RankParameters, ...]:
        """What has gradients and moments, of a rank of each pipeline stage."""
        if self.lora is None:
            return rank_parameters(self.spec, self.layout, self.stages, self.mtp_layers)
        return adapter_parameters(self.spec, self.lora, self.layout, self.stages)

    def held(self, size: int) -> list[Held]:
        """By a rank of each pipeline stage, in bytes; `size` is that of a number."""
        spec, layout, found = self.spec, self.layout, list[Held]()
        tokens = self.tokens_per_micro_batch / (layout.tp * layout.cp)
        logits = 4 * tokens * spec.padded_vocab
        if self.kernels:
            # The last norm, its input and output; what every rank of a tensor-parallel group has whole, and its gradient.
            logits = min(LOGITS_BYTES, logits) + tokens * size * spec.hidden * (2 + 2 * layout.tp)
        else:
            logits = min(PLAIN_LOGITS_BYTES, 3 * logits)
        parts = rank_parameters(self.spec, layout, self.stages, self.mtp_layers)
        split = self.stages.split_layers(self.spec.layers, layout)
        for stage, (own, learned, chunks) in enumerate(zip(parts, self.trained, split, strict=True)):
            # A stage works on as many micro-batches at once as there are stages behind it, interleaved ones on some more.
            in_flight = float(layout.pp - stage)
            if len(chunks) > 1:
                in_flight += (layout.pp - 1) / len(chunks)
            layers = [layer for chunk in chunks for layer in chunk]
            layers += [spec.layers - 1] * (self.mtp_layers if stage == layout.pp - 1 else 0)
            kept, again = [kept_numbers(spec, layer, self.kernels) for layer in layers], 0
            if self.recompute == "full":
                # The input of each layer, and one layer made again at a time.
                kept, again = [spec.hidden] * len(layers), max(kept, default=0)
            last = logits if stage == layout.pp - 1 and not spec.value_head else 0
            # The logits are gone before a layer is made again.
            activations = int(tokens * size * in_flight * sum(kept) + max(last, tokens * size * again))
            held = (own.total + (0 if self.lora is None else learned.total)) * size
            found.append(Held(held, learned.total * 4, _optimizer(learned, layout, size), activations))
        return found


@dataclass(frozen=True)
class Held:
    """Bytes of one model on one rank."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0

    def outside(self, parts: Collection[str]) -> int:
        """What is there of its state when these parts have left."""
        return sum(getattr(self, name) for name in ("parameters", "gradients", "optimizer") if name not in parts)


@dataclass(frozen=True)
class Other:
    """A model besides the policy: how it is sharded, where, and what of it leaves the device outside of its turn."""

    model: Sharded
    first_rank: int = 0
    offload: frozenset[str] = frozenset()
    learns: bool = False
    compared_by: str | None = None
    """The role that it is compared with in each of its updates: it counts, and leaves, with that."""


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
    offload: frozenset[str] = frozenset(),
    others: Mapping[str, Other] | None = None,
) -> Memory:
    """Memory of the fullest rank, with the engine next to the policy (0 sequences: no engine), sharded by `engine_shards`.

    `engine_cache`: bytes that the engine takes for its cache whatever it needs; as many as its sequences need when left out.
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
    # Between the ranks where a stage of some model begins all hold the same.
    for rank in sorted({first for _, _, first, _ in stages}):
        held = {
            name: stage for name, stage, first, layout in stages if first <= rank < first + layout.world_size // layout.pp
        }
        own, samples = held.get("policy", Held()), engine_sequences and "policy" in held
        # A model that is alone on a rank keeps the device.
        has_company = len(held) > 1 or bool(samples)
        memories.append(
            Memory(
                parameters=own.parameters,
                gradients=own.gradients,
                optimizer=own.optimizer,
                activations=own.activations,
                engine=spec.parameters * engine_size // engine_shards if samples else 0,
                cache=max(0, engine_cache) if samples else 0,
                others={
                    name: _other(name, others, held, has_company)
                    for name, other in others.items()
                    if other.compared_by is None
                },
                engine_sleeps=engine_sleeps,
                offload=offload if has_company else frozenset(),
            )
        )
    return max(memories, key=lambda memory: memory.total)


def _other(name: str, others: Mapping[str, Other], held: Mapping[str, Held], has_company: bool) -> OtherMemory:
    """One model of a rank, with what it is compared with."""
    own, leaving = held.get(name, Held()), others[name].offload if has_company else frozenset()
    compared = sum(held.get(key, Held()).parameters for key, one in others.items() if one.compared_by == name)
    compared = 0 if "parameters" in leaving else compared
    if not others[name].learns:
        return OtherMemory(0, 0 if "parameters" in leaving else own.parameters)
    return OtherMemory(own.outside(()) + compared, own.outside(leaving) + compared, own.activations)


def _optimizer(own: RankParameters, layout: ParallelLayout, size: int) -> int:
    """Adam's two moments, and the float32 copy of parameters that are not float32, sharded over the replicas."""
    state = 12 if size == 2 else 8
    return own.dense * state // (layout.dp * layout.cp) + own.experts * state // layout.edp


def trained_parameters(spec: ModelSpec, lora: LoraSpec | None) -> int:
    """Of the whole model: all, or those of adapters."""
    if lora is None:
        return spec.parameters
    return sum(rows * columns for rows, columns in adapter_tensors(spec, lora).values())


def checkpoint_bytes(spec: ModelSpec, dtype: str, lora: LoraSpec | None = None) -> int:
    """Of a model that trains: the trained weights, in 16 bits a float32 copy of them, and two moments."""
    return trained_parameters(spec, lora) * (12 if dtype == "float32" else 14)


def training_flops(spec: ModelSpec, tokens: int, mean_length: float, lora: LoraSpec | None = None) -> float:
    """Forward and backward of `tokens` tokens: 6 a parameter that takes part and token, and causal attention's products.

    A frozen parameter has 4, for it has no gradient; adapters' own are left out: about rank / width of them.
    """
    active = sum(spec.active_parameters(layer) for layer in range(spec.layers)) + spec.vocab * spec.hidden
    width = spec.heads * spec.head_dim
    if spec.mla is not None:
        width = spec.heads * (spec.mla.qk_nope + spec.mla.qk_rope + spec.mla.v_dim) // 2
    return tokens * ((6.0 if lora is None else 4.0) * active + 6 * spec.layers * width * mean_length)
