"""`config.json` of published models: their sizes are facts, their weights are not needed."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

from fivefold.models.families import load_spec, parameters_of
from fivefold.models.shapes import file_shapes

_QWEN3: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 151936, "max_position_embeddings": 40960, "head_dim": 128, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "num_key_value_heads": 8, "tie_word_embeddings": False,
}  # fmt: skip
_MOE: dict[str, Any] = _QWEN3 | {
    "model_type": "qwen3_moe", "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
}  # fmt: skip


def _sized(base: dict[str, Any], hidden: int, ffn: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {**base, **sizes, **more}


SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": _sized(_QWEN3, 1024, 3072, 28, 16, tie_word_embeddings=True),
    "Qwen3-1.7B": _sized(_QWEN3, 2048, 6144, 28, 16, tie_word_embeddings=True),
    "Qwen3-4B": _sized(_QWEN3, 2560, 9728, 36, 32, tie_word_embeddings=True),
    "Qwen3-8B": _sized(_QWEN3, 4096, 12288, 36, 32),
    "Qwen3-14B": _sized(_QWEN3, 5120, 17408, 40, 40),
    "Qwen3-32B": _sized(_QWEN3, 5120, 25600, 64, 64),
    "Qwen3-30B-A3B": _sized(_MOE, 2048, 6144, 48, 32, moe_intermediate_size=768),
    "Qwen3-235B-A22B": _sized(_MOE, 4096, 12288, 94, 64, moe_intermediate_size=1536),
    "SmolLM2-135M-Instruct": {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "rope_theta": 1e5, "tie_word_embeddings": True,
    },
    "Qwen1.5-MoE-A2.7B-Chat": {
        "model_type": "qwen2_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
        "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False, "norm_topk_prob": False,
    },
}  # fmt: skip


def write_shape(directory: Path, name: str, **changes: Any) -> Path:
    """A directory with the model's config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**SHAPES[name], **changes}))
    return directory


def write_headers(directory: Path) -> None:
    """A model.safetensors next to a config.json, with a header and no bytes on the disk below it."""
    spec, header, end = load_spec(directory), dict[str, Any](), 0
    for parameter in parameters_of(spec):
        for name, shape in zip(parameter.hf, file_shapes(spec, parameter), strict=True):
            begin, end = end, end + 2 * prod(shape or (1,))
            header[name] = {"dtype": "BF16", "shape": shape or (1,), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
