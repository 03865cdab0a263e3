"""Parameter tables: names in Hugging Face files and Megatron-Core, and the sharding of each. No torch here.

A family's table consists of the rows below and its own; `expand` fills it in for one model: table -> parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from fivefold.models.spec import ModelSpec


class Sharding(Enum):
    """How a parameter is sharded over tensor-parallel ranks, and how the tensors in the files are joined in it."""

    REPLICATE = "replicate"
    """Replicated on every rank."""
    COLUMN = "column"
    """Sharded by output dimension."""
    ROW = "row"
    """Sharded by input dimension."""
    COLUMN_SWAPPED = "column_swapped"
    """Sharded by output dimension; the halves of the input dimension are in reverse order in the files."""
    VOCABULARY = "vocabulary"
    """Sharded by rows of the vocabulary, padded with zeros to `ModelSpec.padded_vocab`."""
    QKV = "qkv"
    """Sharded by query group: the queries of a group, its key, its value; the same for weights and biases."""
    GATE_UP = "gate_up"
    """Gate and up sharded by output dimension, one on top of the other on each rank."""


class Place(Enum):
    """Layers that have a parameter."""

    FIRST = "first"
    """No layer: the parameter comes before the first one."""
    LAYER = "layer"
    """All layers."""
    DENSE = "dense"
    """Layers without experts."""
    SPARSE = "sparse"
    """Layers with experts."""
    EXPERT = "expert"
    """Layers with experts, once per expert."""
    LAST = "last"
    """No layer: the parameter comes after the last one."""


@dataclass(frozen=True)
class Row:
    """One parameter of a family; `{layer}` and `{expert}` in its names are numbered over the whole model."""

    mcore: str
    """Name in Megatron-Core."""
    hf: tuple[str, ...]
    """Names in Hugging Face files, of one tensor or of several that are joined."""
    sharding: Sharding
    place: Place = Place.LAYER


Table = tuple[Row, ...]


@dataclass(frozen=True)
class MappedParameter:
    """One parameter of one model: a row with its layer and expert filled in."""

    mcore: str
    hf: tuple[str, ...]
    sharding: Sharding
    row: str
    """`mcore` of the row: parameters of one row and layer have the same shape."""
    layer: int | None = None
    expert: int | None = None


def expand(table: Table, spec: ModelSpec) -> list[MappedParameter]:
    """Return every parameter of the model in order of layers; the experts of a row follow one another."""
    parameters = [_fill(row) for row in table if row.place is Place.FIRST]
    for layer in range(spec.layers):
        present = {Place.LAYER, Place.SPARSE if spec.has_experts(layer) else Place.DENSE}
        parameters += [_fill(row, layer) for row in table if row.place in present]
        if spec.moe is not None and spec.has_experts(layer):
            experts = range(spec.moe.num_experts)
            parameters += [_fill(row, layer, expert) for row in table if row.place is Place.EXPERT for expert in experts]
    return parameters + [_fill(row) for row in table if row.place is Place.LAST]


@dataclass(frozen=True)
class MTPNames:
    """Names of multi-token prediction layers in files: `{layer}` continues the model's numbering, `{depth}` starts at 0."""

    layer: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    final_norm: str
    hidden_first: bool = False
    """Whether the projection's input is [hidden state; embedding]; Megatron-Core's is the other way round."""
    copies: tuple[tuple[str, str], ...] = ()
    """(name in the layer, name in the model) of each parameter that a layer shares with the model and files store again."""

    def start(self, spec: ModelSpec, depth: int) -> str:
        """Return the prefix of a layer's names."""
        return self.layer.format(layer=spec.layers + depth, depth=depth)


def expand_mtp(table: Table, names: MTPNames, spec: ModelSpec) -> list[MappedParameter]:
    """Return every parameter of the multi-token prediction layers except those shared with the model, in order of layers.

    Each has the structure of the model's last layer, after norms of an embedding and a hidden state and their joint
    projection (DeepSeek-V3, eq. 21-23).
    """
    around = (
        ("enorm", names.embedding_norm, Sharding.REPLICATE),
        ("hnorm", names.hidden_norm, Sharding.REPLICATE),
        ("eh_proj", names.projection, Sharding.COLUMN_SWAPPED if names.hidden_first else Sharding.COLUMN),
        ("final_layernorm", names.final_norm, Sharding.REPLICATE),
    )
    parameters: list[MappedParameter] = []
    for depth in range(spec.mtp_layers):
        layer, start = spec.layers + depth, names.start(spec, depth)
        for part, name, sharding in around:
            mcore = f"mtp.layers.{{depth}}.{part}.weight"
            parameters.append(MappedParameter(mcore.format(depth=depth), (f"{start}{name}.weight",), sharding, mcore, layer))
        present = {Place.LAYER, Place.SPARSE if spec.has_experts(layer) else Place.DENSE}
        experts = range(spec.moe.num_experts) if spec.moe is not None and spec.has_experts(layer) else range(0)
        inside = [_fill(row, layer) for row in table if row.place in present]
        inside += [_fill(row, layer, expert) for row in table if row.place is Place.EXPERT for expert in experts]
        theirs, ours = f"decoder.layers.{layer}.", f"mtp.layers.{depth}.transformer_layer."
        for item in inside:
            hf = tuple(start + name.removeprefix(f"model.layers.{layer}.") for name in item.hf)
            parameters.append(replace(item, mcore=ours + item.mcore.removeprefix(theirs), hf=hf))
    return parameters


def _fill(row: Row, layer: int | None = None, expert: int | None = None) -> MappedParameter:
    def fill(name: str) -> str:
        return name.format(layer=layer, expert=expert)

    return MappedParameter(fill(row.mcore), tuple(map(fill, row.hf)), row.sharding, row.mcore, layer, expert)


def layer_row(
    mcore: str,
    hf: str | Iterable[str],
    sharding: Sharding,
    place: Place = Place.LAYER,
) -> Row:
    """Make a row for the layers, from names within a layer."""
    names = (hf,) if isinstance(hf, str) else hf
    return Row(
        f"decoder.layers.{{layer}}.{mcore}",
        tuple(f"model.layers.{{layer}}.{name}" for name in names),
        sharding,
        place,
    )


EMBEDDING = Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), Sharding.VOCABULARY, Place.FIRST)
FINAL_NORM = Row("decoder.final_layernorm.weight", ("model.norm.weight",), Sharding.REPLICATE, Place.LAST)
OUTPUT = Row("output_layer.weight", ("lm_head.weight",), Sharding.VOCABULARY, Place.LAST)
VALUE_HEAD = Row("output_layer.weight", ("score.weight",), Sharding.REPLICATE, Place.LAST)
"""The value head, in place of the output layer: transformers calls it a sequence classifier with one label."""

MTP_BEHIND = MTPNames(
    layer="model.layers.{layer}.",
    embedding_norm="enorm",
    hidden_norm="hnorm",
    projection="eh_proj",
    final_norm="shared_head.norm",
    copies=(("embed_tokens.weight", EMBEDDING.hf[0]), ("shared_head.head.weight", OUTPUT.hf[0])),
)
"""Names in DeepSeek-V3 and GLM-4.5: multi-token prediction layers continue the model's numbering."""

NORMS = (
    layer_row("input_layernorm.weight", "input_layernorm.weight", Sharding.REPLICATE),
    layer_row("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", Sharding.REPLICATE),
)
QK_NORMS = (
    layer_row("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", Sharding.REPLICATE),
    layer_row("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", Sharding.REPLICATE),
)
ATTENTION_OUTPUT = layer_row("self_attention.linear_proj.weight", "self_attn.o_proj.weight", Sharding.ROW)
ROUTER_BIAS = layer_row("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", Sharding.REPLICATE, Place.SPARSE)
"""Correction of the scores for choosing experts (DeepSeek-V3, eq. 16)."""


def attention(spec: ModelSpec) -> Table:
    """Return the rows of grouped-query attention, with its biases and norms of queries and keys if the model has them."""
    kinds = ("weight", "bias") if spec.qkv_bias else ("weight",)
    qkv = tuple(
        layer_row(f"self_attention.linear_qkv.{kind}", [f"self_attn.{part}_proj.{kind}" for part in "qkv"], Sharding.QKV)
        for kind in kinds
    )
    return (*qkv, *(QK_NORMS if spec.qk_norm else ()), ATTENTION_OUTPUT)


def gated_mlp(hf: str = "mlp", place: Place = Place.DENSE, mcore: str = "mlp") -> Table:
    """Return the rows of down(silu(gate(x)) * up(x)), the MLP of dense layers and of shared experts."""
    return (
        layer_row(f"{mcore}.linear_fc1.weight", (f"{hf}.gate_proj.weight", f"{hf}.up_proj.weight"), Sharding.GATE_UP, place),
        layer_row(f"{mcore}.linear_fc2.weight", f"{hf}.down_proj.weight", Sharding.ROW, place),
    )


def experts(hf: str = "mlp", gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> Table:
    """Return the rows of router and experts by their names in files."""
    inside = f"{hf}.experts.{{expert}}"
    return (
        layer_row("mlp.router.weight", f"{hf}.gate.weight", Sharding.REPLICATE, Place.SPARSE),
        layer_row(
            "mlp.experts.{expert}.fc1",
            (f"{inside}.{gate}.weight", f"{inside}.{up}.weight"),
            Sharding.GATE_UP,
            Place.EXPERT,
        ),
        layer_row("mlp.experts.{expert}.fc2", f"{inside}.{down}.weight", Sharding.ROW, Place.EXPERT),
    )


def shared_experts(spec: ModelSpec, hf: str = "mlp.shared_experts") -> Table:
    """Return the rows of the experts that process every token, if the model has them."""
    if spec.moe is None or not spec.moe.shared_ffn:
        return ()
    return gated_mlp(hf, Place.SPARSE, "mlp.shared_experts")


def head(spec: ModelSpec) -> Table:
    """Return the final norm and the output layer or value head; a tied output layer is the embedding, so it has no row."""
    if spec.value_head:
        return (FINAL_NORM, VALUE_HEAD)
    return (FINAL_NORM,) if spec.tied else (FINAL_NORM, OUTPUT)


def decoder(spec: ModelSpec, *rows: Row) -> Table:
    """Return the table of a model under Llama's names; `rows` are those of layers with experts."""
    return (EMBEDDING, *NORMS, *attention(spec), *gated_mlp(), *rows, *head(spec))
