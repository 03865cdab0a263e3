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
WINDOWS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
MOE = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
DEEPSEEK = {
    **MOE,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "num_key_value_heads": 8,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.8,
    "mscale_all_dim": 1.0,
}
MOE_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", {**MOE, "head_dim": 16, "num_experts": 8, "norm_topk_prob": True}),
    "qwen3_moe_sparse": ("Qwen3Moe", {**MOE, "head_dim": 16, "num_experts": 4, "mlp_only_layers": [2]}),
    "qwen2_moe": ("Qwen2Moe", {**MOE, "num_experts": 8, "shared_expert_intermediate_size": 48}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "deepseek_v3": ("DeepseekV3", DEEPSEEK),
    "deepseek_v3_yarn": ("DeepseekV3", {**DEEPSEEK, "rope_parameters": YARN, "q_lora_rank": None, "rms_norm_eps": 1e-5}),
    "deepseek_v3_collapsed": ("DeepseekV3", {**DEEPSEEK, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}),
    "glm4_moe": (
        "Glm4Moe",
        {
            **MOE,
            "head_dim": 16,
            "n_routed_experts": 8,
            "first_k_dense_replace": 2,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
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
    "seed_oss": ("SeedOss", {"head_dim": 16}),
}


_IDS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
_LINEAR = {
    # The first outputs of a head are a query times one key, which may nearly vanish, and are normalized. With the usual 1e-6
    # a last place of the weights moves the gradient norm by 1.7e-5 of it, with this by 2.5e-7.
    "rms_norm_eps": 1e-3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
_GEMMA = {**_IDS, "head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 16}
OTHER_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("Gemma2", {**_GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3Text", {**_GEMMA, "layer_types": WINDOWS}),
    "phi3": ("Phi3", {**_IDS, "sliding_window": 7}),
    "gpt_oss": (
        "GptOss",
        {
            **_IDS,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 7,
            "layer_types": WINDOWS,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "minimax_m2": ("MiniMaxM2", {**_IDS, "head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "qwen3_next": (
        "Qwen3Next",
        {**MOE, **_LINEAR, "num_experts": 8, "norm_topk_prob": True, "shared_expert_intermediate_size": 48},
    ),
    "qwen3_5": ("Qwen3_5Text", _LINEAR),
    "qwen3_5_moe": ("Qwen3_5MoeText", {**MOE, **_LINEAR, "num_experts": 8, "shared_expert_intermediate_size": 48}),
    "granite": (
        "Granite",
        {
            **_IDS,
            "logits_scaling": 3.0,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.2,
        },
    ),
    "cohere": ("Cohere", {**_IDS, "logit_scale": 0.4}),
    "mamba": ("Mamba", _IDS),
    "falcon_mamba": ("FalconMamba", _IDS),
    "olmo2": ("Olmo2", _IDS),
    "olmo3": ("Olmo3", {**_IDS, "sliding_window": 7, "layer_types": WINDOWS}),
    "smollm3": ("SmolLM3", {**_IDS, "tie_word_embeddings": True}),
}
"""Families of transformers that have no file among ours: what `fsdp:` layouts train."""

BRIDGED_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "nemotron": (
        "Nemotron",
        {
            **_IDS,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "gemma": ("Gemma", {**_IDS, "head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}),
}
"""Families without a file that `megatron:` layouts train through Megatron-Bridge."""


MTP_VARIANTS = {
    "mimo": ("qwen2", 1),
    "mimo_two": ("qwen2", 2),
    "deepseek_v3_mtp": ("deepseek_v3", 1),
    "glm4_moe_mtp": ("glm4_moe", 2),
}
"""Name -> (the variant that is the model itself, its layers of multi-token prediction)."""
MTP_PARTS = {
    "mimo": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    "deepseek_v3": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
}
"""Names of a layer's own parts in the files: norms of embedding and hidden state, their projection, the last norm."""


def add_mtp(directory: Path, layers: int, family: str) -> None:
    """Put layers of multi-token prediction after the model in `directory`, each in the form of its last layer."""
    import json

    import torch
    from safetensors.torch import save_file

    config, state = json.loads((directory / "config.json").read_text()), load_tensors(directory)
    layers_of_model, hidden = config["num_hidden_layers"], config["hidden_size"]
    generator = torch.Generator().manual_seed(13)

    def draw(*shape: int) -> torch.Tensor:
        noise = torch.randn(shape, generator=generator) * 0.1
        return noise + 1 if len(shape) == 1 else noise

    last = f"model.layers.{layers_of_model - 1}."
    for depth in range(layers):
        start = f"model.mtp_layers.{depth}." if family == "mimo" else f"model.layers.{layers_of_model + depth}."
        *norms, projection, final = MTP_PARTS["mimo" if family == "mimo" else "deepseek_v3"]
        state[f"{start}{projection}.weight"] = draw(hidden, 2 * hidden)
        state |= {f"{start}{norm}.weight": draw(hidden) for norm in (*norms, final)}
        for name in [name for name in state if name.startswith(last)]:
            is_bias = name.endswith("bias")
            state[start + name.removeprefix(last)] = draw(*state[name].shape) - (1 if is_bias else 0)
        if family != "mimo":
            state[f"{start}embed_tokens.weight"] = state["model.embed_tokens.weight"].clone()
            state[f"{start}shared_head.head.weight"] = state["lm_head.weight"].clone()
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    config |= {"num_nextn_predict_layers": layers}
    if family == "mimo":
        config |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"]}
    (directory / "config.json").write_text(json.dumps(config))


def make_model(name: str, directory: Path, **sizes: Any) -> Path:
    """Write the variant `name` into `directory`, with weights large enough that every part matters."""
    import torch
    import transformers

    if name in MTP_VARIANTS:
        base, layers = MTP_VARIANTS[name]
        make_model(base, directory, **sizes)
        add_mtp(directory, layers, "mimo" if base == "qwen2" else base)
        return directory
    prefix, changes = (VARIANTS | MOE_VARIANTS | OTHER_VARIANTS | BRIDGED_VARIANTS)[name]
    config = getattr(transformers, f"{prefix}Config")(**{**SIZES, **changes, **sizes})
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.1
            # The norms of some families multiply by 1 + weight, except those after linear attention.
            usual = (
                0 if prefix.startswith(("Gemma", "Nemotron", "Qwen3Next", "Qwen3_5")) and ".linear_attn." not in key else 1
            )
            parameter.copy_(noise + usual if parameter.ndim == 1 else noise)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)
                if "collapsed" in name:
                    buffer[:2] += 10
    model.save_pretrained(directory)
    return directory


def make_classifier(directory: Path, name: str = "qwen3", seed: int = 11, **changes: Any) -> Path:
    """Write a sequence classifier with one label into `directory`: a reward model, or a critic that knows something."""
    import torch
    import transformers

    prefix, changes_of_variant = (VARIANTS | MOE_VARIANTS)[name]
    config = getattr(transformers, f"{prefix}Config")(**{**SIZES, **changes_of_variant, "num_labels": 1, **changes})
    model = transformers.AutoModelForSequenceClassification.from_config(config).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.copy_(noise + 1 if parameter.ndim == 1 else noise)
    model.save_pretrained(directory)
    return directory


def load_tensors(directory: Path) -> dict[str, Any]:
    """The tensors of a model directory by their names in the file."""
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


def make_tokenizer(directory: Path) -> Path:
    """Write a tokenizer of one token a character into `directory`, for letters, digits and signs."""
    import string

    from fivefold.data.tokenizer import train_tokenizer

    train_tokenizer("char", [string.ascii_letters + string.digits + " +-=#.,?!:;/<>()\n"], directory)
    return directory
