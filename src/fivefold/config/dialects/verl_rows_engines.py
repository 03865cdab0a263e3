"""The rows of verl's engines: what becomes of the fields of an engine's section, of whichever model or program it is.

The sections are those of FSDP, Megatron-Core, VeOmni and torchtitan in workers/config/engine.py of verl 0.9.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fivefold.config.dialects.shared import DATA_PARALLEL, KERNELS, NO_CUT, SHOWN, SPREAD
from fivefold.config.dialects.table import Row, below, fixed, lacks, slower, used

OF_RL: Mapping[str, Sequence[str]] = {
    "fsdp": ("**.fsdp_config.", "critic.fsdp."),
    "mcore": ("**.megatron.", "**.mindspeed."),
    "veomni": ("**.veomni.",),
    "torchtitan": ("**.torchtitan.",),
}
"""Engine -> the beginnings of its keys in a configuration of RL; Megatron-Core's had a second one, MindSpeed's, from 2026-05
to 08."""
OF_SFT = dict.fromkeys(OF_RL, ("engine.",))
IN_BFLOAT16 = ("bf16", "bfloat16")
_LIKE_FSDP, _ALL = "fsdp veomni torchtitan", "fsdp mcore veomni torchtitan"
_TYPES = "parameters in bfloat16 with a float32 copy in the optimizer, gradients summed in float32"


def engine_rows(starts: Mapping[str, Sequence[str]]) -> list[Row]:
    """The rows of all engines whose sections begin so; a key that some model's function reads has its own row besides."""

    def of(engines: str, names: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(below([start for engine in engines.split() for start in starts[engine]], names)))

    rows = [
        *fixed(of(_ALL, "seed forward_only strategy"), "trainer.seed and the program's own strategy say it"),
        *slower(of(_ALL, "full_determinism"), "runs whose bits are the same: trainer.deterministic", [False]),
        *fixed(
            of(_ALL, "entropy_checkpointing entropy_from_logits_with_chunking entropy_from_logits_chunk_size")
            + of(_ALL, "pad_to_length pad_to_length_bucket use_torch_compile")
            + of("mcore", "max_seqlen_per_dp_cp_rank pad_bshd_to_minibatch_max use_remove_padding use_fused_kernels")
            + of("torchtitan", "attn_type max_seq_len spmd_backend")
            + of(
                "veomni",
                "attn_implementation causal_conv1d_implementation chunk_gated_delta_rule_implementation "
                "cross_entropy_loss_implementation dsa_attention_implementation dsa_indexer_implementation "
                "load_balancing_loss_implementation mhc_implementation moe_implementation qat_implementation "
                "rms_norm_gated_implementation rms_norm_implementation rotary_pos_emb_implementation "
                "swiglu_mlp_implementation",
            ),
            KERNELS,
        ),
        *fixed(
            of(_LIKE_FSDP, "forward_prefetch fsdp_size reshard_after_forward use_orig_params")
            + of(_LIKE_FSDP, "use_no_sync_for_gradient_accumulation wrap_policy wrap_policy.min_num_params")
            + of("veomni", "basic_modules enable_full_shard enable_reentrant force_use_huggingface init_device"),
            SPREAD,
        ),
        *slower(
            of("veomni torchtitan", "expert_parallel_size")
            + of("veomni", "ulysses_parallel_size")
            + of("torchtitan", "context_parallel_size pipeline_parallel_size tensor_parallel_size"),
            DATA_PARALLEL,
            [1],
        ),
        *fixed(
            of("veomni torchtitan", "data_parallel_size data_parallel_replicate_size data_parallel_shard_size"),
            "data parallelism is what the other sizes leave",
        ),
        *fixed(
            of(
                "mcore",
                "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size "
                "expert_tensor_parallel_size virtual_pipeline_model_parallel_size sequence_parallel "
                "num_layers_per_virtual_pipeline_stage",
            )
            + of("fsdp", "ulysses_sequence_parallel_size"),
            NO_CUT,
        ),
        *slower(of("mcore", "use_megatron_fsdp"), "Megatron-FSDP: the distributed optimizer shards instead", [False]),
        *slower(of("mcore", "dynamic_context_parallel"), "context parallelism by length", [False]),
        *fixed(
            of(
                "mcore",
                "use_mbridge vanilla_mbridge dist_checkpointing_prefix use_distributed_optimizer extra "
                "dist_ckpt_optim_fully_reshardable distrib_optim_fully_reshardable_mem_efficient",
            )
            + of("veomni", "ckpt_manager"),
            "our own tables read weights, under any prefix of a checkpoint; the optimizer is distributed; a checkpoint "
            "fits every layout",
        ),
        *lacks(of("veomni", "load_checkpoint_path"), "weights of a checkpoint of VeOmni's"),
        *slower(of("mcore", "override_ddp_config.*"), "policy.megatron.ddp has its own defaults"),
        *lacks(
            of("mcore", "override_mcore_model_config.**"),
            "changes of the model's shape: write them into its config.json",
        ),
        *fixed(
            of("mcore", "override_transformer_config override_ddp_config override_mcore_model_config")
            + of(_ALL, "qat router_replay turbo_config"),
            "empty",
        ),
        *fixed(of("fsdp", "turbo_config.**"), "read with the strategy fsdp_turbo only", takes_any=True),
        *fixed(of("fsdp", "model_dtype mixed_precision") + of("torchtitan", "mixed_precision"), _TYPES),
        *lacks(of("fsdp", "mixed_precision.param_dtype"), "types of single parts of the computation", [*IN_BFLOAT16]),
        *fixed(
            of("fsdp", "mixed_precision.reduce_dtype mixed_precision.buffer_dtype mixed_precision.cast_forward_inputs")
            + of("fsdp", "mixed_precision.cast_root_forward_inputs mixed_precision.keep_low_precision_grads"),
            _TYPES,
        ),
        *lacks(of("veomni", "mixed_precision"), "weights of bfloat16 without a copy in float32", [True]),
        *slower(
            of("fsdp", "offload_policy") + of("veomni", "enable_fsdp_offload"),
            "FSDP2's own offload: policy.offload moves state between the stages of a step",
            [False],
        ),
        *slower(
            of("veomni", "enable_async_activation_offload"), "activations that wait on the host: policy.recompute", [False]
        ),
        *fixed(
            of("veomni", "activation_gpu_limit activation_offload_host_cache_limit_gb activation_offload_modules"),
            "read with enable_async_activation_offload only",
        ),
        *fixed(of("torchtitan", "activation_checkpoint"), "model.enable_gradient_checkpointing says it: policy.recompute"),
        *fixed(of("veomni", "moe_load_balance_monitor_interval"), SHOWN),
    ]
    # Where engines share a section, what the first of them says.
    return list({row.key: row for row in reversed(rows)}.values())[::-1]


def rows_of_moments(start: str) -> list[Row]:
    """The rows of the types of Adam's moments."""
    names = "use_precision_aware_optimizer exp_avg_dtype exp_avg_sq_dtype"
    return used(
        below(start, names), "policy.megatron.optimizer", "Read with use_precision_aware_optimizer, and by Automodel."
    )


def rows_of_state(start: str) -> list[Row]:
    """The rows of an optimizer's other state, and of the moments where no function reads them."""
    types = "an optimizer whose state has fewer bits: policy.megatron.optimizer has its types"
    return [
        *lacks(below(start, "main_grads_dtype exp_avg_dtype exp_avg_sq_dtype"), types, ["fp32", "float32", "torch.float32"]),
        *slower(below(start, "use_precision_aware_optimizer use_layer_wise_distributed_optimizer"), types, [False]),
    ]
