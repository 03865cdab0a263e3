"""Layers of a family without a table here, as Megatron-Bridge describes them: directory -> Architecture.

Its provider is a configuration of Megatron-Core. Every field that could change a number either acts here, is compared with
what config.json says, or must have its default: nothing that our layers do not compute is left out silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from fivefold.errors import UserError, shown
from fivefold.megatron.bridge.external import as_unsupported, import_bridge, open_megatron_bridge
from fivefold.megatron.patches.quiet import quiet
from fivefold.models.spec import ModelSpec


@dataclass(frozen=True)
class Architecture:
    """Activation, gate, norms and factor of embeddings by Megatron-Bridge; empty for families with a table here."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of Megatron-Core's configuration."""
    embedding_scale: float | None = None
    """Factor on embeddings before the first layer, or None."""


_ACTING = ("activation_func", "gated_linear_unit", "normalization", "layernorm_zero_centered_gamma")
_WITHOUT_EFFECT = frozenset({
    # config.json is read here: Megatron-Bridge 0.3.1 looks for the keys of RoPE where transformers 4 had them.
    "rotary_base", "rotary_percent",
    # Nothing is drawn or dropped, and lengths are those of the run.
    "hidden_dropout", "attention_dropout", "init_method", "init_method_std", "output_layer_init_method",
    "embedding_init_method", "embedding_init_method_std", "seq_length",
    # The run chooses types, layouts and kernels; the vocabulary is padded here.
    "bf16", "fp16", "params_dtype", "autocast_dtype", "pipeline_dtype", "attention_backend", "persist_layer_norm",
    "make_vocab_size_divisible_by", "should_pad_vocab", "hf_model_id",
    "apply_rope_fusion", "masked_softmax_fusion", "bias_activation_fusion", "bias_dropout_fusion",
    "cross_entropy_loss_fusion", "gradient_accumulation_fusion",
})  # fmt: skip
"""Fields of a provider that change no number here."""
_BUILDERS = {"GPTModelProvider.provide": False, "GemmaModelProvider.provide": True}
"""The code by which providers build a model -> whether it scales embeddings by the root of their width."""


def sizes_of(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields of Megatron-Core's configuration that are sizes of the model, and the epsilon of its norms."""
    return {
        "num_layers": spec.layers,
        "hidden_size": spec.hidden,
        "ffn_hidden_size": spec.ffn,
        "num_attention_heads": spec.heads,
        "num_query_groups": spec.kv_heads,
        "kv_channels": spec.head_dim,
        "layernorm_epsilon": spec.norm_eps,
    }


def architecture_of(directory: Path, spec: ModelSpec) -> Architecture:
    """Return how Megatron-Bridge computes the layers of this model; raises UserError if ours cannot."""
    if not spec.stored:
        return Architecture()
    library = import_bridge("megatron-bridge")
    with quiet("megatron.bridge"), quiet("transformers"):
        with as_unsupported("megatron-bridge", spec):
            provider = open_megatron_bridge(library, directory).to_megatron_provider(load_weights=False)
        sizes = {name: getattr(provider, name) for name in ("num_layers", "hidden_size", "num_attention_heads")}
        usual = library.models.GPTModelProvider(**sizes)
    builder = type(provider).provide.__qualname__
    differing = [
        *(f"{name}={shown(value)}" for name, value in _unlike(provider, usual, spec).items()),
        *([] if builder in _BUILDERS else [f"layers of {builder}"]),
    ]
    if differing:
        raise UserError(
            f"megatron.bridge_type: megatron-bridge computes this {spec.family} model with {', '.join(differing)}, which "
            "our layers do not: write an fsdp: layout"
        )
    # Megatron-Core fuses only the activations of families with a table here.
    settings = {name: getattr(provider, name) for name in _ACTING} | {"bias_activation_fusion": False}
    return Architecture(settings, spec.hidden**0.5 if _BUILDERS[builder] else None)


def _unlike(provider: Any, usual: Any, spec: ModelSpec) -> dict[str, Any]:
    """Return the fields of a provider that would change a number of our layers, with their values."""
    ours = {
        **sizes_of(spec),
        "vocab_size": spec.vocab,
        "share_embeddings_and_output_weights": spec.tied,
        "position_embedding_type": "rope",
        "add_bias_linear": False,
    }
    values = {one.name: getattr(provider, one.name) for one in fields(provider)}
    read = _WITHOUT_EFFECT.union(_ACTING)
    return {
        name: value
        for name, value in values.items()
        if name not in read and value != ours.get(name, getattr(usual, name, None))
    }
