"""Classifies every key of `config.json`: read, without effect on numbers, or refused. No torch here.

A key in neither a family's reader nor these tables is not read by transformers' layers of the family either. A test compares
them with every field in transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fivefold.errors import UserError, shown
from fivefold.models.spec import ModelSpec

_DROPOUT = "nothing is dropped here, as when responses are sampled"
_DTYPE = "policy.dtype names the type of the weights, whatever the files have"
_LABELS = "one label or a vocabulary is read from the shape of the last layer"
_RETURNS = "what transformers returns besides the logits"
_LAYERS = "the layers of the family's model_type are computed"
_AUXILIARY = "policy.megatron.transformer.moe_aux_loss_coeff names the loss of routers"
_TOKENS = "plan/tokenizer_files.py reads the tokens that end a response"
_BOOKKEEPING = "where the file comes from"

WITHOUT_EFFECT: dict[str, str] = {
    "_name_or_path": _BOOKKEEPING,
    "name_or_path": _BOOKKEEPING,
    "_commit_hash": _BOOKKEEPING,
    "transformers_version": _BOOKKEEPING,
    "model_type": "it chooses the family",
    "architectures": _LAYERS,
    "auto_map": "code in a model's directory does not run",
    "attn_implementation": _LAYERS,
    "_attn_implementation_autoset": _LAYERS,
    "experts_implementation": _LAYERS,
    "pretraining_tp": "the same products, cut in another way",
    "chunk_size_feed_forward": "the same products, cut in another way",
    "initializer_range": "weights are read, not drawn",
    "attention_dropout": _DROPOUT,
    "residual_dropout": _DROPOUT,
    "classifier_dropout": _DROPOUT,
    "dtype": _DTYPE,
    "torch_dtype": _DTYPE,
    "id2label": _LABELS,
    "label2id": _LABELS,
    "num_labels": _LABELS,
    "problem_type": _LABELS,
    "bos_token_id": "the tokenizer writes it",
    "eos_token_id": _TOKENS,
    "pad_token_id": "sequences are packed: there is no padding",
    "output_attentions": _RETURNS,
    "output_hidden_states": _RETURNS,
    "output_router_logits": _AUXILIARY,
    "router_aux_loss_coef": _AUXILIARY,
    "return_dict": _RETURNS,
    "use_cache": "engines choose their caches",
    "sliding_window": "without use_sliding_window there is no window",
    "max_window_layers": "without use_sliding_window there is no window",
    "layer_types": "compared with the layers that are computed",
    "attention_bias": "the families that do not read it have the biases of their models in any case",
    "qk_head_dim": "transformers computes it from the two of which it is the sum",
}
"""Keys with no effect on numbers here, and why."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None, {}),
    "compression_config": (None, {}),
    "per_layer_config": (None, {}),
    "original_max_position_embeddings": (None,),
    "is_encoder_decoder": (None, False),
    "is_decoder": (None, False, True),
    "add_cross_attention": (None, False),
    "tie_encoder_decoder": (None, False),
    "pruned_heads": (None, {}),
}
"""Keys that change numbers in an unsupported way, and the values with no effect."""
_WHY = {
    "quantization_config": "weights are computed as floats: take the model without quantization, or remove the key "
    "where the files hold floats",
}


class RecordedKeys(dict[str, Any]):
    """A parsed `config.json` that records which of its keys were read."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)


def check_keys(config: dict[str, Any], spec: ModelSpec) -> None:
    """Raise ValueError for a key that changes numbers in a way that the spec does not support."""
    for key, neutral in NEUTRAL.items():
        if config.get(key) not in neutral:
            why = _WHY.get(key, "it is not supported: remove it where it has no effect")
            raise UserError(f"{key} in config.json must be left out: got {shown(config[key])}; {why}")
    _check_layer_types(config, spec)


def _check_layer_types(config: dict[str, Any], spec: ModelSpec) -> None:
    """Raise ValueError unless `layer_types` names the kind of layer that is computed."""
    kinds = config.get("layer_types")
    if kinds is None:
        return
    computed = "full_attention" if spec.sliding_window is None else "sliding_attention"
    if not isinstance(kinds, list) or len(kinds) != spec.layers or any(kind != computed for kind in kinds):
        raise UserError(
            f"layer_types in config.json must name {computed} for each of {spec.layers} layers, as the other keys do "
            f"(sliding_window, use_sliding_window): got {shown(kinds)}"
        )


def unknown_keys(config: RecordedKeys) -> Iterator[str]:
    """Yield keys that were not read and are in no table: transformers does not read them for the family either."""
    return (key for key in config if key not in config.read | WITHOUT_EFFECT.keys() | NEUTRAL.keys())
