"""Tiny random models of each family, made by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB = 131
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama3_rope": ("Llama", {"rope_parameters": LLAMA3, "max_position_embeddings": 131072}),
    "llama_linear_rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}),
    "mistral": ("Mistral", {"head_dim": 16, "sliding_window": None}),
    "mistral_window": ("Mistral", {"head_dim": 8, "sliding_window": 7}),
    "qwen2": ("Qwen2", {}),
    "qwen2_tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3_tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
}


def make_model(name: str, directory: Path) -> Path:
    """Write the variant `name` into `directory`, with weights large enough that every part matters."""
    import torch
    import transformers

    prefix, changes = VARIANTS[name]
    config = getattr(transformers, f"{prefix}Config")(**{**SIZES, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.copy_(noise + 1 if parameter.ndim == 1 else noise)
    model.save_pretrained(directory)
    return directory
