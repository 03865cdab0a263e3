"""Model specification, independent of the family: sizes, choices, parameter counts and supported layouts. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from fivefold.errors import UserError
from fivefold.layout import ParallelLayout, PipelineSplit

VOCABULARY_MULTIPLE = 128
"""The vocabulary is padded to a multiple of this on every layout, so that a checkpoint does not depend on tp."""


@dataclass(frozen=True)
class MoESpec:
    """The mixture-of-experts layers of a model."""

    num_experts: int
    top_k: int
    """Number of experts per token."""
    ffn: int
    layers: tuple[bool, ...]
    """For each layer, whether it has experts; the others are dense."""
    shared_ffn: int = 0
    """Combined size of the shared experts; 0 without."""
    shared_gate: bool = False
    """Whether a sigmoid gate of its own weights the shared expert's output."""
    sigmoid: bool = False
    """Whether scores are sigmoids, with a correction bias for the choice (DeepSeek-V3); otherwise a softmax."""
    normalize: bool = True
    """Whether the weights of the chosen experts sum to 1."""
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    """Factor of the routed experts' weights."""
    balance_coef: float = 0.0
    """Coefficient of the balance loss in pre-training, from config.json."""


@dataclass(frozen=True)
class RouteShape:
    """Sizes of a routes tensor: layers, experts per token and number of experts."""

    total_layers: int
    layers: tuple[int, ...]
    """Layers with experts."""
    top_k: int
    num_experts: int

    @property
    def bytes(self) -> int:
        """Bytes per expert number, which is signed because -1 means none."""
        return 1 if self.num_experts <= 128 else 2


@dataclass(frozen=True)
class MLASpec:
    """Multi-head latent attention (DeepSeek-V2, eq. 9-19)."""

    q_rank: int | None
    """Width of the low-rank query projection, or None for a plain projection."""
    kv_rank: int
    qk_nope: int
    qk_rope: int
    v_dim: int


@dataclass(frozen=True)
class YarnSpec:
    """YaRN RoPE scaling as DeepSeek-V3 uses it."""

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float


@dataclass(frozen=True)
class StoredModel:
    """Tensors and experts of a model whose family has no table here; sizes in its ModelSpec are estimates for plans."""

    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    """Name and shape of every tensor in the files."""
    experts: int = 0
    """Number of experts in a layer; 0 without."""
    only_fsdp: str = ""
    """Why only `fsdp:` layouts compute the model; empty if Megatron-Core does too, through Megatron-Bridge."""


@dataclass(frozen=True)
class ModelSpec:
    """Sizes and choices of a decoder-only transformer that determine its parameters and its mathematics."""

    family: str
    """`model_type` in config.json: the family whose table names the parameters."""
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    rope_linear_factor: float | None
    """Divisor of the positions (linear RoPE scaling), or None."""
    rope_llama3_factor: float | None
    """`factor` of llama3 RoPE scaling, or None."""
    sliding_window: int | None
    """Number of tokens that a query attends to, including itself, or None for all before it."""
    qkv_bias: bool
    qk_norm: bool
    tied: bool
    """Whether the output layer shares the embedding's weight."""
    rotary_fraction: float = 1.0
    """Share of a head's dimensions that RoPE rotates."""
    moe: MoESpec | None = None
    mla: MLASpec | None = None
    yarn: YarnSpec | None = None
    value_head: bool = False
    """Whether the output is one number per token instead of a distribution: a critic or a reward model."""
    mtp_layers: int = 0
    """Number of multi-token prediction layers after the last one, each for one further token (DeepSeek-V3, 2412.19437,
    section 2.2). The model's forward pass and its parameter counts exclude them."""

    stored: StoredModel | None = None
    """Tensors of the model's files, for a family without a table here; None otherwise."""

    @property
    def padded_vocab(self) -> int:
        return -(-self.vocab // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE

    @property
    def only_fsdp(self) -> str:
        """Why only `fsdp:` layouts compute this model; empty if Megatron-Core does too."""
        return "" if self.stored is None else self.stored.only_fsdp

    @property
    def has_fused_layers(self) -> bool:
        """Whether Transformer Engine's layers compute this model too."""
        return self.moe is None and self.mla is None and self.stored is None

    @property
    def kv_numbers_per_token(self) -> int:
        """Number of values per token in a cache of the keys and values of all layers, with latent ones expanded."""
        part = self.mla
        if part is not None:
            return self.layers * self.heads * (part.qk_nope + part.qk_rope + part.v_dim)
        return 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def attention_parameters(self) -> int:
        """Number of parameters in one layer's attention and its two norms."""
        norms = 2 * self.hidden
        if self.mla is not None:
            part = self.mla
            q_out, kv_out = self.heads * (part.qk_nope + part.qk_rope), self.heads * (part.qk_nope + part.v_dim)
            q = self.hidden * q_out if part.q_rank is None else part.q_rank * (self.hidden + 1 + q_out)
            kv = self.hidden * (part.kv_rank + part.qk_rope) + part.kv_rank * (1 + kv_out)
            return q + kv + self.heads * part.v_dim * self.hidden + norms
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        bias = q + 2 * kv if self.qkv_bias else 0
        return self.hidden * (q + 2 * kv) + q * self.hidden + bias + norms + (2 * self.head_dim if self.qk_norm else 0)

    @property
    def routes(self) -> RouteShape | None:
        """Shape of a routes tensor; None without experts."""
        if self.moe is None:
            return None
        layers = tuple(layer for layer in range(self.layers) if self.moe.layers[layer])
        return RouteShape(self.layers, layers, self.moe.top_k, self.moe.num_experts)

    def has_experts(self, layer: int) -> bool:
        """Whether `layer` has experts; multi-token prediction layers, numbered after the others, are like the last of
        them."""
        return self.moe is not None and self.moe.layers[min(layer, self.layers - 1)]

    def expert_parameters(self, layer: int) -> int:
        """Return the number of parameters in all routed experts of a layer."""
        if self.moe is None or not self.moe.layers[layer]:
            return 0
        return self.moe.num_experts * 3 * self.hidden * self.moe.ffn

    def shared_parameters(self, layer: int) -> int:
        """Return the number of parameters in a layer that process every token: all but the routed experts."""
        if self.stored is not None and not self.only_fsdp:
            return sum(prod(shape) for name, shape in self.stored.tensors if f".layers.{layer}." in name)
        if self.moe is None or not self.moe.layers[layer]:
            return self.attention_parameters + 3 * self.hidden * self.ffn
        part = self.moe
        router = part.num_experts * self.hidden
        return (
            self.attention_parameters + router + 3 * self.hidden * part.shared_ffn + (self.hidden if part.shared_gate else 0)
        )

    def active_parameters(self, layer: int) -> int:
        """Return the number of parameters in a layer that are used for one token."""
        active = self.expert_parameters(layer)
        return self.shared_parameters(layer) + (active * self.moe.top_k // self.moe.num_experts if self.moe else 0)

    @property
    def routed_parameters(self) -> int:
        """Number of parameters in the routed experts of all layers."""
        if self.stored is not None:
            return sum(prod(shape) for name, shape in self.stored.tensors if ".experts." in name)
        return sum(map(self.expert_parameters, range(self.layers)))

    @property
    def parameters(self) -> int:
        """Number of parameters in the whole model; tied ones count once."""
        if self.stored is not None:
            return sum(prod(shape) for _, shape in self.stored.tensors)
        embeddings = self.vocab * self.hidden * (1 if self.tied or self.value_head else 2) + (
            self.hidden if self.value_head else 0
        )
        layers = sum(self.shared_parameters(layer) + self.expert_parameters(layer) for layer in range(self.layers))
        return layers + self.hidden + embeddings

    def check_layout(self, layout: ParallelLayout, stages: PipelineSplit | None = None) -> None:
        """Raise ValueError if this model cannot be sharded by `layout` and `stages`."""
        if self.only_fsdp and layout.backend == "megatron":
            raise UserError(f"{self.only_fsdp}: got {layout}; write fsdp:d{layout.world_size}")
        sharded = [("attention heads", self.heads, "tp", layout.tp), ("ffn size", self.ffn, "tp", layout.tp)]
        if self.mla is None:
            sharded.append(("key/value heads", self.kv_heads, "tp", layout.tp))
        stored_experts = 0 if self.stored is None else self.stored.experts
        if experts := stored_experts if self.moe is None else self.moe.num_experts:
            sharded.append(("experts", experts, "ep", layout.ep))
            if layout.backend == "fsdp":
                # Tensor-parallel ranks divide whole experts there.
                sharded.append(("experts", experts, "tp", layout.tp))
        if self.moe is not None:
            sharded.append(("expert ffn size", self.moe.ffn, "etp", layout.etp))
            sharded.append(("shared expert ffn size", self.moe.shared_ffn, "tp", layout.tp))
        for part, size, dimension, parts in sharded:
            if size % parts:
                raise UserError(
                    f"{part} must be divisible by {dimension}: got {size} for {dimension}={parts} in {layout}; "
                    f"choose {'an' if dimension[0] == 'e' else 'a'} {dimension} that divides {size}"
                )
        if not experts and (layout.ep > 1 or layout.etp > 1):
            raise UserError(f"{self.family} has no experts: got ep={layout.ep} etp={layout.etp} in {layout}; leave e out")
        if self.padded_vocab % layout.tp:
            raise UserError(
                f"tp must divide the padded vocabulary of {self.padded_vocab} (of {self.vocab}, to a multiple of "
                f"{VOCABULARY_MULTIPLE}): got tp={layout.tp} in {layout}; choose a power of two"
            )
        (stages or PipelineSplit()).split_layers(self.layers, layout)

    def check_mtp(self, layout: ParallelLayout) -> None:
        """Raise ValueError if this model's multi-token prediction layers cannot be trained on `layout`."""
        if not self.mtp_layers:
            raise UserError(
                "policy.mtp.train needs layers of multi-token prediction, and num_nextn_predict_layers in config.json of "
                f"this {self.family} model is 0 or missing: leave policy.mtp.train out, or take a model that has them"
            )
        if self.tied and layout.pp > 1:
            raise UserError(
                f"policy.mtp.train needs p1 where the output layer is the embedding, of which the last stage would have two "
                f"copies: got {layout}; choose a layout without p"
            )
