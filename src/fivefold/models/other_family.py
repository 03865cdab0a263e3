"""A family without a table here: `config.json` and the headers of the tensor files -> ModelSpec. No torch here.

transformers computes such a model, so nothing of its mathematics is read. The sizes serve checks of layouts and estimates.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fivefold.errors import UserError
from fivefold.models.config_json import read_flag, read_whole
from fivefold.models.headers import all_headers
from fivefold.models.spec import ModelSpec, StoredModel

_NAMES = {
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"),
    "vocab_size": ("vocab_size",),
}
"""Keys of config.json that families use for the same number."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def read_other(config: dict[str, Any], directory: Path) -> ModelSpec:
    """Return the spec of a model that has no file under families/; raises UserError for sizes that cannot be found."""
    inner = config.get("text_config")
    values = {**config, **inner} if isinstance(inner, dict) else config

    def size(key: str) -> int:
        name = next((name for name in _NAMES[key] if values.get(name) is not None), None)
        if name is None:
            raise UserError(
                f"config.json of a {config['model_type']} model must have one of {', '.join(_NAMES[key])}: got none of them"
            )
        return int(read_whole(values, name))

    headers = all_headers(directory)
    hidden, heads = size("hidden_size"), size("num_attention_heads")
    return ModelSpec(
        family=config["model_type"],
        layers=size("num_hidden_layers"),
        hidden=hidden,
        ffn=read_whole(values, "intermediate_size", 4 * hidden),
        heads=heads,
        kv_heads=read_whole(values, "num_key_value_heads", heads),
        head_dim=read_whole(values, "head_dim", max(1, hidden // heads)),
        vocab=size("vocab_size"),
        max_positions=size("max_position_embeddings"),
        norm_eps=1e-6,
        rope_theta=10000.0,
        rope_linear_factor=None,
        rope_llama3_factor=None,
        sliding_window=None,
        qkv_bias=False,
        qk_norm=False,
        tied=read_flag(values, "tie_word_embeddings", not any(name.endswith("lm_head.weight") for name in headers)),
        stored=StoredModel(
            tuple((name, header.shape) for name, header in sorted(headers.items())),
            next((read_whole(values, name) for name in _EXPERTS if values.get(name) is not None), 0),
        ),
    )
