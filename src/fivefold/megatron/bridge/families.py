"""A model family as a table: Hugging Face names, Megatron-Core name, kind of cut."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from fivefold.megatron.bridge.cuts import QKV, Cut, GateUp, Replicate, RowParallel, Vocabulary
from fivefold.model_shape import ModelShape


class Place(Enum):
    """Pipeline stage that holds a parameter."""

    FIRST = "first"
    LAYER = "layer"
    LAST = "last"


@dataclass(frozen=True)
class Row:
    """One Megatron-Core parameter; `{layer}` stands for the layer, counted over the whole model."""

    mcore: str
    hf: tuple[str, ...]
    cut: Cut
    place: Place = Place.LAYER


REPLICATE, ROW, VOCABULARY, GATE_UP, QKV_CUT = Replicate(), RowParallel(), Vocabulary(), GateUp(), QKV()

EMBEDDING = Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), VOCABULARY, Place.FIRST)
FINAL = (
    Row("decoder.final_layernorm.weight", ("model.norm.weight",), REPLICATE, Place.LAST),
    Row("output_layer.weight", ("lm_head.weight",), VOCABULARY, Place.LAST),
)


def _attention(kind: str) -> Row:
    names = tuple(f"model.layers.{{layer}}.self_attn.{part}_proj.{kind}" for part in "qkv")
    return Row(f"decoder.layers.{{layer}}.self_attention.linear_qkv.{kind}", names, QKV_CUT)


def _layer(mcore: str, hf: str, cut: Cut) -> Row:
    return Row(f"decoder.layers.{{layer}}.{mcore}", (f"model.layers.{{layer}}.{hf}",), cut)


LLAMA = (
    EMBEDDING,
    _layer("input_layernorm.weight", "input_layernorm.weight", REPLICATE),
    _attention("weight"),
    _layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight", ROW),
    _layer("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", REPLICATE),
    Row(
        "decoder.layers.{layer}.mlp.linear_fc1.weight",
        ("model.layers.{layer}.mlp.gate_proj.weight", "model.layers.{layer}.mlp.up_proj.weight"),
        GATE_UP,
    ),
    _layer("mlp.linear_fc2.weight", "mlp.down_proj.weight", ROW),
    *FINAL,
)
QWEN2 = (*LLAMA, _attention("bias"))
QWEN3 = (
    *LLAMA,
    _layer("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", REPLICATE),
    _layer("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", REPLICATE),
)

FAMILY_TABLES: dict[str, tuple[Row, ...]] = {"llama": LLAMA, "mistral": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3}


@dataclass(frozen=True)
class Mapped:
    """One parameter of one model: a row with its layer filled in."""

    mcore: str
    hf: tuple[str, ...]
    cut: Cut
    stage: int


def mapped_names(shape: ModelShape, pp: int) -> list[Mapped]:
    """Every parameter of the model in order of layers, with the pipeline stage that owns it."""
    rows = FAMILY_TABLES[shape.family]
    per_stage = shape.layers // pp
    found = [Mapped(row.mcore, row.hf, row.cut, 0) for row in rows if row.place is Place.FIRST]
    for layer in range(shape.layers):
        found += [
            Mapped(
                row.mcore.format(layer=layer),
                tuple(name.format(layer=layer) for name in row.hf),
                row.cut,
                layer // per_stage,
            )
            for row in rows
            if row.place is Place.LAYER
        ]
    for row in rows:
        # A tied output layer is the embedding once more: nothing of its own to read or write.
        if row.place is Place.LAST and not (shape.tied and row.mcore == "output_layer.weight"):
            found.append(Mapped(row.mcore, row.hf, row.cut, pp - 1))
    return found
