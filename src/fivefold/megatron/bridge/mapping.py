"""A model family as a table: Hugging Face names, Megatron-Core name, kind of cut."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from fivefold.megatron.bridge.sharding import QKV, ColumnParallel, GateUp, Replicate, RowParallel, Sharding, Vocabulary
from fivefold.models.spec import ModelSpec


class Place(Enum):
    """Which layers have a parameter."""

    FIRST = "first"
    """None: it stands before them."""
    LAYER = "layer"
    DENSE = "dense"
    """Layers without experts."""
    SPARSE = "sparse"
    """Layers with experts."""
    EXPERT = "expert"
    """Once for each expert of a layer."""
    LAST = "last"
    """None: it stands behind them."""


@dataclass(frozen=True)
class Row:
    """One Megatron-Core parameter; `{layer}` and `{expert}` are counted over the whole model."""

    mcore: str
    hf: tuple[str, ...]
    sharding: Sharding
    place: Place = Place.LAYER


REPLICATE, COLUMN, ROW, VOCABULARY, GATE_UP, QKV_SHARDING = (
    Replicate(),
    ColumnParallel(),
    RowParallel(),
    Vocabulary(),
    GateUp(),
    QKV(),
)

EMBEDDING = Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), VOCABULARY, Place.FIRST)
OUTPUT = Row("output_layer.weight", ("lm_head.weight",), VOCABULARY, Place.LAST)
VALUE = Row("output_layer.weight", ("score.weight",), REPLICATE, Place.LAST)
"""The value head, in the place of the output layer: what transformers calls a sequence classifier with one label."""
FINAL = (Row("decoder.final_layernorm.weight", ("model.norm.weight",), REPLICATE, Place.LAST), OUTPUT)


def _layer(mcore: str, hf: str | tuple[str, ...], sharding: Sharding, place: Place = Place.LAYER) -> Row:
    names = (hf,) if isinstance(hf, str) else hf
    return Row(
        f"decoder.layers.{{layer}}.{mcore}", tuple(f"model.layers.{{layer}}.{name}" for name in names), sharding, place
    )


def _qkv(kind: str) -> Row:
    return _layer(
        f"self_attention.linear_qkv.{kind}", tuple(f"self_attn.{part}_proj.{kind}" for part in "qkv"), QKV_SHARDING
    )


def _gate_up(hf: str, place: Place, mcore: str = "mlp") -> tuple[Row, Row]:
    return (
        _layer(f"{mcore}.linear_fc1.weight", (f"{hf}.gate_proj.weight", f"{hf}.up_proj.weight"), GATE_UP, place),
        _layer(f"{mcore}.linear_fc2.weight", f"{hf}.down_proj.weight", ROW, place),
    )


def _experts(hf: str, gate: str, up: str, down: str) -> tuple[Row, ...]:
    inside = f"{hf}.experts.{{expert}}"
    return (
        _layer("mlp.router.weight", f"{hf}.gate.weight", REPLICATE, Place.SPARSE),
        _layer("mlp.experts.{expert}.fc1", (f"{inside}.{gate}.weight", f"{inside}.{up}.weight"), GATE_UP, Place.EXPERT),
        _layer("mlp.experts.{expert}.fc2", f"{inside}.{down}.weight", ROW, Place.EXPERT),
    )


NORMS = (
    _layer("input_layernorm.weight", "input_layernorm.weight", REPLICATE),
    _layer("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", REPLICATE),
)
ATTENTION = (*NORMS, _qkv("weight"), _layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight", ROW))
QK_NORMS = (
    _layer("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", REPLICATE),
    _layer("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", REPLICATE),
)
DENSE = _gate_up("mlp", Place.DENSE)
EXPERTS = _experts("mlp", "gate_proj", "up_proj", "down_proj")
SHARED = _gate_up("mlp.shared_experts", Place.SPARSE, "mlp.shared_experts")
BIASED_ROUTER = _layer("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", REPLICATE, Place.SPARSE)

LLAMA = (EMBEDDING, *ATTENTION, *DENSE, *FINAL)
QWEN3 = (*LLAMA, *QK_NORMS)
DEEPSEEK_QUERIES = (
    _layer("self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj.weight", REPLICATE),
    _layer("self_attention.q_layernorm.weight", "self_attn.q_a_layernorm.weight", REPLICATE),
    _layer("self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight", COLUMN),
)
DEEPSEEK = (
    EMBEDDING,
    *NORMS,
    _layer("self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight", REPLICATE),
    _layer("self_attention.kv_layernorm.weight", "self_attn.kv_a_layernorm.weight", REPLICATE),
    _layer("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight", COLUMN),
    _layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight", ROW),
    *DENSE,
    *EXPERTS,
    *SHARED,
    BIASED_ROUTER,
    *FINAL,
)

FAMILY_TABLES: dict[str, tuple[Row, ...]] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": QWEN3,
    "qwen3_moe": (*QWEN3, *EXPERTS),
    "qwen2_moe": (
        *LLAMA,
        *EXPERTS,
        *_gate_up("mlp.shared_expert", Place.SPARSE, "mlp.shared_experts"),
        _layer("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight", REPLICATE, Place.SPARSE),
    ),
    "mixtral": (EMBEDDING, *ATTENTION, *_experts("block_sparse_moe", "w1", "w3", "w2"), *FINAL),
    "deepseek_v3": DEEPSEEK,
    "glm4_moe": (*LLAMA, *EXPERTS, *SHARED, BIASED_ROUTER),
}


def family_table(shape: ModelSpec) -> tuple[Row, ...]:
    """The family's table with what this model's configuration adds."""
    rows = FAMILY_TABLES[shape.family]
    if shape.qkv_bias:
        rows = (*rows, _qkv("bias"))
    if shape.family == "glm4_moe" and shape.qk_norm:
        rows = (*rows, *QK_NORMS)
    if shape.mla is not None and shape.mla.q_rank is None:
        rows = (*rows, _layer("self_attention.linear_q_proj.weight", "self_attn.q_proj.weight", COLUMN))
    elif shape.mla is not None:
        rows = (*rows, *DEEPSEEK_QUERIES)
    if shape.moe is not None and not shape.moe.shared_ffn:
        rows = tuple(row for row in rows if row not in SHARED)
    if shape.value_head:
        rows = tuple(VALUE if row is OUTPUT else row for row in rows)
    return rows


@dataclass(frozen=True)
class Mapped:
    """One parameter of one model: a row with its layer and expert filled in."""

    mcore: str
    hf: tuple[str, ...]
    sharding: Sharding
    row: str
    layer: int | None = None
    expert: int | None = None


def mapped_names(shape: ModelSpec) -> list[Mapped]:
    """Every parameter of the model in order of layers; experts that are gathered together follow one another."""
    rows = family_table(shape)
    found = [Mapped(row.mcore, row.hf, row.sharding, row.mcore) for row in rows if row.place is Place.FIRST]
    for layer in range(shape.layers):
        inside = {Place.LAYER, Place.SPARSE if shape.has_experts(layer) else Place.DENSE}
        found += [_filled(row, layer, None) for row in rows if row.place in inside]
        if shape.moe is not None and shape.has_experts(layer):
            found += [
                _filled(row, layer, expert)
                for row in rows
                if row.place is Place.EXPERT
                for expert in range(shape.moe.num_experts)
            ]
    for row in rows:
        # A tied output layer is the embedding once more: nothing of its own to read or write.
        if row.place is Place.LAST and not (shape.tied and row is OUTPUT):
            found.append(Mapped(row.mcore, row.hf, row.sharding, row.mcore))
    return found


def _filled(row: Row, layer: int, expert: int | None) -> Mapped:
    names = tuple(name.format(layer=layer, expert=expert) for name in row.hf)
    return Mapped(row.mcore.format(layer=layer, expert=expert), names, row.sharding, row.mcore, layer, expert)
