"""Keys of SkyRL's releases on PyPI that ask for nothing at their defaults."""

from __future__ import annotations

from fivefold.config.dialects.table import Section, fixed, lacks, slower

_MEGATRON = "megatron_config."


def _below(section: str, names: str) -> str:
    return " ".join(section + name for name in names.split())


RL = Section.of(
    "Of some releases only",
    lacks("generator.inference_engine.enable_http_endpoint", "an HTTP address of the engines", [False]),
    fixed("generator.inference_engine.http_endpoint_*", "read with enable_http_endpoint only", takes_any=True),
    fixed("megatron_config.ddp_config.average_in_collective", "a mean of the same gradients, up to rounding"),
    fixed("generator.inference_engine.override_existing_update_group", "how engines are reached"),
)
SFT = Section.of(
    "Megatron-Core",
    fixed(
        _below(_MEGATRON, "dist_ckpt_optim_fully_reshardable empty_cuda_cache hf_export_config.distributed_save "
                          "hf_export_config.save_every_n_ranks lora_config.lora_type lora_config.merge_lora "
                          "moe_grouped_gemm moe_per_layer_logging moe_token_dispatcher_type "
                          "mtp_loss_chunk_size torch_profiler_config.enable torch_profiler_config.ranks "
                          "torch_profiler_config.save_path"),
        "how state is spread and shown",
    ),
    lacks(f"{_MEGATRON}moe_router_dtype", "routers that compute in another type", ["fp32"]),
    slower(_below(f"{_MEGATRON}optimizer_config_kwargs.", "overlap_cpu_optimizer_d2h_h2d use_precision_aware_optimizer"),
           "Megatron-Core's optimizer in the CPU's memory: policy.megatron.optimizer has its fields", [False, True]),
    lacks(_below(_MEGATRON, "freeze_moe_router moe_enable_routing_replay moe_router_enable_expert_bias "
                            "moe_router_score_function mtp_num_layers mtp_loss_topk"), "another model", [False]),
    lacks(_below(_MEGATRON, "moe_aux_loss_coeff mtp_loss_weight"), "a further loss", [0, 0.0, 0.1]),
    lacks(f"{_MEGATRON}moe_router_load_balancing_type", "a loss of the router's balance", ["none"]),
    lacks(f"{_MEGATRON}model_config_kwargs model_config_kwargs", "changes of config.json"),
    lacks(_below(f"{_MEGATRON}optimizer_config_kwargs.", "optimizer_cpu_offload optimizer_offload_fraction"),
          "an optimizer in the CPU's memory", [False, 0, 0.0], changes_result=False),
    fixed("model.fake_int4_qat.*", "read with fake_int4_qat.enabled only", takes_any=True),
)  # fmt: skip
