"""A checkpoint as verl's converter (scripts/converter_hf_to_mcore.py) writes it, made with Megatron-Core alone.

The model is Megatron-Core's GPTModel, filled tensor by tensor as verl does it, and saved by `dist_checkpointing.save` straight
into the directory. Transformer Engine's names of norms and its empty states are those that verl's model has.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed import distributed_c10d


def convert(mesh: Any, config: dict[str, Any], tensors: dict[str, torch.Tensor], out: Path) -> list[str]:
    """Write the model of a config.json and its tensors into `out`; the names of what was stored."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    experts = config.get("num_experts") or config.get("num_local_experts")
    has_qk_norm = config["model_type"].startswith("qwen3")
    ours = TransformerConfig(
        num_layers=config["num_hidden_layers"], hidden_size=config["hidden_size"], ffn_hidden_size=config["intermediate_size"],
        num_attention_heads=config["num_attention_heads"], num_query_groups=config["num_key_value_heads"],
        kv_channels=config.get("head_dim"), normalization="RMSNorm", gated_linear_unit=True, add_bias_linear=False,
        add_qkv_bias=config["model_type"] == "qwen2", qk_layernorm=has_qk_norm, activation_func=torch.nn.functional.silu,
        num_moe_experts=experts, moe_ffn_hidden_size=config.get("moe_intermediate_size"), use_cpu_initialization=True,
        moe_router_topk=config.get("num_experts_per_tok", 2), bf16=False, params_dtype=torch.float32,
    )  # fmt: skip
    layer = get_gpt_layer_local_spec(num_experts=experts, qk_layernorm=has_qk_norm, normalization="RMSNorm")
    if experts:
        # Transformer Engine fuses this norm with a linear layer, and a layer of experts begins with the router.
        layer.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.")
    out.mkdir(parents=True)
    # Megatron-Core's own checkpoints exchange objects, which the ranks of a run refuse.
    with mesh.active(), torch.no_grad(), patch.object(distributed_c10d, "_unpickler", pickle.Unpickler):
        model = GPTModel(
            config=ours, transformer_layer_spec=layer, vocab_size=config["vocab_size"], position_embedding_type="rope",
            max_sequence_length=config["max_position_embeddings"],
            share_embeddings_and_output_weights=config.get("tie_word_embeddings", False),
        )  # fmt: skip
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
        _fill(model, config, tensors)
        assert not any(parameter.isnan().any() for parameter in model.parameters())
        state: dict[str, Any] = model.sharded_state_dict()
        stored = {key: tensor for key, tensor in state.items() if tensor is not None and not key.endswith("_extra_state")}
        names = sorted({tensor.key for tensor in stored.values()})
        for linear in {name.rpartition(".")[0] for name in names if ".linear_" in name}:
            key = f"{linear}._extra_state"
            stored[key] = ShardedObject(key, None, (1,), (0,), replica_id=0)
        assert any(isinstance(tensor, ShardedTensor) for tensor in stored.values())
        dist_checkpointing.save(stored, str(out), sharded_strategy=None, async_sharded_save=False)
    return names


def _fill(model: Any, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    groups, heads, width = config["num_key_value_heads"], config["num_attention_heads"], config["hidden_size"]
    size = config.get("head_dim") or width // heads
    model.embedding.word_embeddings.weight.copy_(tensors["model.embed_tokens.weight"])
    for number, layer in enumerate(model.decoder.layers):
        layer_tensors = {
            name.removeprefix(f"model.layers.{number}."): tensor
            for name, tensor in tensors.items()
            if name.startswith(f"model.layers.{number}.")
        }
        layer.input_layernorm.weight.copy_(layer_tensors["input_layernorm.weight"])
        layer.pre_mlp_layernorm.weight.copy_(layer_tensors["post_attention_layernorm.weight"])
        attention = layer.self_attention
        for kind in ("weight", "bias"):
            if f"self_attn.q_proj.{kind}" in layer_tensors:
                q, k, v = (layer_tensors[f"self_attn.{part}_proj.{kind}"] for part in "qkv")
                parts = [q.view(groups, size * heads // groups, -1), k.view(groups, size, -1), v.view(groups, size, -1)]
                target = getattr(attention.linear_qkv, kind)
                target.copy_(torch.cat(parts, dim=1).reshape(target.shape))
        if "self_attn.q_norm.weight" in layer_tensors:
            attention.q_layernorm.weight.copy_(layer_tensors["self_attn.q_norm.weight"])
            attention.k_layernorm.weight.copy_(layer_tensors["self_attn.k_norm.weight"])
        attention.linear_proj.weight.copy_(layer_tensors["self_attn.o_proj.weight"])
        mlps = {"mlp.": layer.mlp}
        if "mlp.gate.weight" in layer_tensors:
            layer.mlp.router.weight.copy_(layer_tensors["mlp.gate.weight"])
            mlps = {f"mlp.experts.{expert}.": mlp for expert, mlp in enumerate(layer.mlp.experts.local_experts)}
        for start, mlp in mlps.items():
            mlp.linear_fc1.weight.copy_(
                torch.cat([layer_tensors[f"{start}gate_proj.weight"], layer_tensors[f"{start}up_proj.weight"]])
            )
            mlp.linear_fc2.weight.copy_(layer_tensors[f"{start}down_proj.weight"])
    model.decoder.final_layernorm.weight.copy_(tensors["model.norm.weight"])
    if not config.get("tie_word_embeddings"):
        model.output_layer.weight.copy_(tensors["lm_head.weight"])
