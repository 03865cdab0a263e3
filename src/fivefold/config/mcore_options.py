"""Megatron-Core's own options, checked by name and type against its dataclasses without importing it. No torch here.

Policy, critic and reward model each have a section `megatron`; `{section}` in a reason is replaced by the model's section.
"""

from __future__ import annotations

import ast
import importlib.metadata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fivefold.errors import shown
from fivefold.keys.findings import Findings
from fivefold.keys.ranges import suggest

SECTIONS = ("transformer", "pipeline", "ddp", "optimizer")
"""Sections of `policy.megatron`: TransformerConfig, its pipeline fields, DistributedDataParallelConfig, OptimizerConfig."""

_CLASSES = {
    "transformer": (
        ("transformer/transformer_config.py", ("TransformerConfig", "MLATransformerConfig")),
        ("model_parallel_config.py", ("ModelParallelConfig",)),
    ),
    "ddp": (("distributed/distributed_data_parallel_config.py", ("DistributedDataParallelConfig",)),),
    "optimizer": (("optimizer/optimizer_config.py", ("OptimizerConfig",)),),
}

PIPELINE = (
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "batch_p2p_comm",
    "batch_p2p_sync",
    "deallocate_pipeline_outputs",
    "microbatch_group_size_per_vp_stage",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "overlap_p2p_comm",
    "overlap_p2p_comm_warmup_flush",
    "pipeline_model_parallel_layout",
    "variable_seq_lengths",
    "virtual_pipeline_model_parallel_size",
)
"""Fields of TransformerConfig that belong in `policy.megatron.pipeline`."""

_SHAPE = "it comes from the model's config.json"
_LAYOUT = "it comes from the layout string policy.backend"
_PACKED = "sequences are packed, and the loss is weighted by token"
_TE = "it needs Transformer Engine's layers, which have not been run with this project"
_NOT_HERE = "nothing in a decoder of this kind uses it"

_REFUSED: dict[str, dict[str, tuple[str, ...]]] = {
    "transformer": {
        _SHAPE: (
            "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size", "kv_channels",
            "layernorm_epsilon", "layernorm_zero_centered_gamma", "add_bias_linear", "add_qkv_bias", "gated_linear_unit",
            "activation_func", "glu_linear_offset", "activation_func_clamp_value", "num_moe_experts", "rotary_interleaved",
            "window_size", "window_attn_skip_freq", "normalization", "qk_layernorm", "qk_l2_norm", "softmax_scale",
            "softmax_type", "no_rope_freq", "multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim",
            "qk_pos_emb_head_dim", "v_head_dim", "rope_type", "rotary_base", "rotary_percent", "rotary_scaling_factor",
            "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
            "moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "moe_layer_freq", "moe_ffn_hidden_size",
            "moe_router_topk", "moe_router_num_groups", "moe_router_group_topk", "moe_router_pre_softmax",
            "moe_router_topk_scaling_factor", "moe_router_score_function", "moe_router_enable_expert_bias",
            "moe_router_topk_limited_devices", "attention_output_gate", "apply_residual_connection_post_layernorm",
        ),
        _LAYOUT: (
            "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
            "expert_model_parallel_size", "expert_tensor_parallel_size", "moe_extended_tp",
            "hierarchical_context_parallel_sizes", "hybrid_context_parallel", "max_seqlen_per_dp_cp_rank",
        ),
        "set policy.sequence_parallel": ("sequence_parallel",),
        "set policy.dtype": (
            "fp16", "bf16", "params_dtype", "pipeline_dtype", "enable_autocast", "autocast_dtype",
            "disable_bf16_reduced_precision_matmul",
        ),
        "set {section}.megatron.transformer_impl": ("transformer_impl",),
        "set trainer.deterministic": ("deterministic_mode",),
        _PACKED: ("calculate_per_token_loss", "hidden_dropout", "attention_dropout", "cross_entropy_loss_fusion",
                  "cross_entropy_fusion_impl", "moe_input_jitter_eps"),
        "the project sets it": (
            "finalize_model_grads_func", "grad_scale_func", "no_sync_func", "grad_sync_func", "param_sync_func", "timers",
            "init_method", "output_layer_init_method", "embedding_init_method", "use_cpu_initialization",
            "perform_initialization", "config_logger_dir", "_cpu_offloading_context", "is_hybrid_model", "mtp_standalone",
            "num_microbatches_with_partial_activation_checkpoints", "init_model_with_meta_device",
            "bias_activation_fusion", "bias_dropout_fusion",
        ),
        "set recompute_modules: [moe]": ("moe_layer_recompute",),
        "experts never drop tokens, or the log-probs of sampler and trainer would differ": (
            "moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity", "moe_token_drop_policy", "moe_token_dropping",
            "moe_router_force_load_balancing", "moe_apply_probs_on_input", "moe_latent_size",
        ),
        "it needs the package deep_ep": ("moe_enable_deepep", "moe_flex_dispatcher_backend", "moe_deepep_num_sms",
                                         "moe_hybridep_num_sms"),
        "set policy.mtp": ("mtp_num_layers", "mtp_loss_scaling_factor"),
        "set policy.router_replay": ("moe_enable_routing_replay",),
        "products add to the optimizer's buffer by themselves": ("gradient_accumulation_fusion",),
        "use {section}.offload, which moves state between the stages of a step": (
            "cpu_offloading", "cpu_offloading_num_layers", "cpu_offloading_activations", "cpu_offloading_weights",
            "cpu_offloading_double_buffering", "fine_grained_activation_offloading", "offload_modules",
            "min_offloaded_tensor_size",
        ),
        _TE: (
            "apply_rope_fusion", "fused_single_qkv_rope", "moe_permute_fusion", "moe_router_fusion", "delay_wgrad_compute",
            "overlap_moe_expert_parallel_comm", "ep_overlap_early_attn_memory_release", "use_te_rng_tracker",
            "use_te_activation_func", "moe_router_padding_for_quantization", "moe_router_padding_for_fp8",
            "use_kitchen", "use_kitchen_attention", "kitchen_attention_backend", "quant_recipe", "batch_invariant_mode",
            "cp_comm_type", "attention_backend", "first_last_layers_bf16", "num_layers_at_start_in_bf16",
            "num_layers_at_end_in_bf16", "tp_only_amax_red", "disable_parameter_transpose_cache", "symmetric_ar_type",
            "defer_embedding_wgrad_compute", "wgrad_deferral_limit",
            "activation_func_fp8_input_store", "log_max_attention_logit", "qk_clip", "qk_clip_alpha", "qk_clip_threshold",
            "use_ring_exchange_p2p", "pipeline_model_parallel_comm_backend", "use_fused_weighted_squared_relu",
            "memory_efficient_layer_norm", "persist_layer_norm", "moe_use_legacy_grouped_gemm",
        ),
    },
    "pipeline": {
        "the project sets it: over Gloo a sent tensor must stay": ("deallocate_pipeline_outputs",),
        "the project sets it: with batched messages interleaved stages would mix up forward and backward": (
            "overlap_p2p_comm", "batch_p2p_comm", "batch_p2p_sync", "overlap_p2p_comm_warmup_flush",
        ),
    },
    "ddp": {
        "Megatron-FSDP is another backend": (
            "use_megatron_fsdp", "use_custom_fsdp", "data_parallel_sharding_strategy", "outer_dp_sharding_strategy",
            "suggested_communication_unit_size", "preserve_fp32_weights", "keep_fp8_transpose_cache", "fsdp_double_buffer",
            "fsdp_manual_registration", "disable_symmetric_registration", "gradient_reduce_div_fusion",
        ),
        "one instance of the distributed optimizer spans all replicas": ("num_distributed_optimizer_instances",),
        _TE: ("fp8_param_gather", "reuse_grad_buf_for_mxfp8_param_ag", "delay_wgrad_compute", "nccl_ub"),
    },
    "optimizer": {
        "set {section}.optimizer.lr": ("lr",),
        "set {section}.optimizer.min_lr": ("min_lr",),
        "set {section}.optimizer.weight_decay": ("weight_decay",),
        "set {section}.optimizer.betas": ("adam_beta1", "adam_beta2"),
        "set {section}.optimizer.eps": ("adam_eps",),
        "set {section}.optimizer.clip_grad": ("clip_grad",),
        "set {section}.megatron.ddp.grad_reduce_in_fp32": ("main_grads_dtype",),
        "the optimizer's copy of the parameters is always in float32": ("main_params_dtype",),
        "set policy.dtype": (
            "fp16", "bf16", "params_dtype",
        ),
        "the scale of float16's loss moves: initial_loss_scale is where it begins": ("loss_scale",),
        "set {section}.megatron.ddp.use_distributed_optimizer": ("use_distributed_optimizer",),
        "set {section}.megatron.ddp.overlap_param_gather": ("overlap_param_gather",),
        "the optimizer is AdamW": (
            "optimizer", "decoupled_weight_decay", "sgd_momentum", "muon_momentum", "muon_split_qkv", "muon_use_nesterov",
            "muon_scale_mode", "muon_fp32_matmul_prec", "muon_num_ns_steps", "muon_tp_mode", "muon_extra_scale_factor",
            "use_torch_optimizer_for_cpu_offload",
        ),
        "the project sets it": ("timers", "config_logger_dir", "log_num_zeros_in_grad"),
        _TE: ("fp8_recipe", "reuse_grad_buf_for_mxfp8_param_ag", "store_param_remainders"),
        "the parameter gather overlaps with the forward pass instead (ddp.overlap_param_gather)": (
            "overlap_param_gather_with_optimizer_step",
        ),
    },
}  # fmt: skip
_REFUSED_PREFIXES = {
    "transformer": {
        _TE: ("fp8", "fp4", "tp_comm", "cuda_graph", "enable_cuda_graph", "external_cuda_graph"),
        _NOT_HERE: (
            "mamba", "use_mamba", "heterogeneous", "hetereogenous", "inference", "use_inference", "dsa_", "linear_",
            "experimental_attention", "mrope", "mlp_chunks", "flash_decode", "test_mode", "cache_mla",
        ),
    },
}  # fmt: skip
_NO_EFFECT: dict[str, dict[str, str]] = {
    "transformer": {
        "init_method_std": "weights are loaded, not drawn",
        "embedding_init_method_std": "weights are loaded, not drawn",
        "apply_query_key_layer_scaling": "attention runs in PyTorch's kernels, which scale exactly",
        "attention_softmax_in_fp32": "attention's softmax is always in float32",
        "masked_softmax_fusion": "attention runs in PyTorch's kernels",
        "async_tensor_model_parallel_allreduce": "Megatron-Core no longer reads it",
        "clone_scatter_output_in_embedding": "the embedding's output is used once",
        "barrier_with_L1_time": "Megatron-Core's timers are not used; stages are timed by the project",
        "moe_per_layer_logging": "every layer's load is always recorded (metrics moe/load/...)",
    },
    "ddp": {
        "average_in_collective": "gradients are summed and divided once by the tokens of the update, which is the same mean",
    },
    "optimizer": {"barrier_with_L1_time": "Megatron-Core's timers are not used; stages are timed by the project"},
}  # fmt: skip
LOSS_SCALE = {"initial_loss_scale": 2.0**32, "min_loss_scale": 1.0, "loss_scale_window": 1000, "hysteresis": 2}
"""Options of the dynamic loss scale in float16, with Megatron-Core's defaults."""
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
"""Options that each value of the key `recompute` sets."""
_RECOMPUTED = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")
"""Modules that `selective` may name."""
_NEEDED: dict[str, dict[str, tuple[str, ...]]] = {
    "transformer": {
        "recompute_granularity": (
            "recompute_method",
            "recompute_num_layers",
            "recompute_modules",
            "distribute_saved_activations",
        )
    },
    "optimizer": {
        "optimizer_cpu_offload": (
            "optimizer_offload_fraction",
            "overlap_cpu_optimizer_d2h_h2d",
            "pin_cpu_grads",
            "pin_cpu_params",
        )
    },
}
"""Options without which the listed ones have no effect."""
_NARROWER = {"pipeline_model_parallel_layout": "Optional[str]"}
"""Types of options for which Megatron-Core accepts other forms too."""
DTYPE_NAMES = {"float32": "float32", "fp32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16", "float16": "float16",
               "fp16": "float16"}  # fmt: skip


@dataclass(frozen=True)
class Options:
    """Raw Megatron-Core options of one model, by section, as in the configuration."""

    transformer: dict[str, Any]
    pipeline: dict[str, Any]
    ddp: dict[str, Any]
    optimizer: dict[str, Any]

    def check(self, findings: Findings) -> None:
        """Record errors for unusable options and combinations; `findings` are at the model's section."""
        alone = findings.at("megatron")
        before = len(alone.errors)
        for section in SECTIONS:
            for name, value in getattr(self, section).items():
                _check_option(alone, section, name, value)
        if len(alone.errors) == before:
            self._check_conflicts(alone)

    def _check_conflicts(self, findings: Findings) -> None:
        transformer, optimizer, ddp = (findings.at(section) for section in ("transformer", "optimizer", "ddp"))
        balancing = self.transformer.get("moe_router_load_balancing_type", "none")
        kinds = balancing if isinstance(balancing, list) else [balancing]
        if unknown := [kind for kind in kinds if kind not in ("none", "seq_aux_loss", "aux_loss")]:
            transformer.error(
                "moe_router_load_balancing_type",
                "must be none, seq_aux_loss (of each sequence: the same under every cut) or aux_loss (of each micro-batch): "
                f"got {unknown[0]!r}",
            )
        coefficients = self.transformer.get("moe_aux_loss_coeff", 0.0)
        if isinstance(balancing, list) != isinstance(coefficients, list) or (
            isinstance(balancing, list) and len(balancing) != len(coefficients)
        ):
            transformer.error("moe_aux_loss_coeff", "must have one number for each moe_router_load_balancing_type")
        transformer.require(
            self.transformer.get("moe_token_dispatcher_type", "alltoall") != "flex",
            "moe_token_dispatcher_type",
            "must be alltoall or allgather: flex needs the package deep_ep",
        )
        aware = self.optimizer.get("use_precision_aware_optimizer", False)
        for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
            dtype = DTYPE_NAMES[self.optimizer.get(name, "float32")]
            message = "must be float32 or bfloat16: small moments vanish in float16"
            optimizer.require(dtype != "float16", name, message)
            optimizer.require(dtype == "float32" or aware, name, "needs use_precision_aware_optimizer: true")
        scale = {name: self.optimizer.get(name, default) for name, default in LOSS_SCALE.items()}
        for name, value in scale.items():
            optimizer.require(value > 0, name, f"must be above 0: got {value}")
        optimizer.require(
            scale["min_loss_scale"] <= scale["initial_loss_scale"],
            "min_loss_scale",
            f"must not be above initial_loss_scale = {scale['initial_loss_scale']:g}: got {scale['min_loss_scale']:g}",
        )
        distributed = self.ddp.get("use_distributed_optimizer", True)
        if not distributed and aware:
            optimizer.error("use_precision_aware_optimizer", "needs ddp.use_distributed_optimizer: true")
        if self.ddp.get("overlap_param_gather", False):
            ddp.require(distributed, "overlap_param_gather", "needs use_distributed_optimizer: true")
            ddp.require(
                self.ddp.get("overlap_grad_reduce", False), "overlap_param_gather", "needs overlap_grad_reduce: true"
            )

    def check_recompute(self, findings: Findings, recompute: str, is_sequence_parallel: bool) -> None:
        """Record errors for contradictory recomputation options, some of which the model's key `recompute` sets; `findings`
        are at the model's section."""
        findings, chosen = findings.at("megatron.transformer"), RECOMPUTE[recompute] | self.transformer
        kind, layers = chosen.get("recompute_granularity"), chosen.get("recompute_num_layers")
        modules = chosen.get("recompute_modules") or []
        unknown = [module for module in modules if module not in _RECOMPUTED]
        message = f"must be of {', '.join(_RECOMPUTED)}: got {shown(unknown[:1])[1:-1]}"
        findings.require(not unknown, "recompute_modules", message)
        if kind == "full":
            lacking = [name for name in ("recompute_method", "recompute_num_layers") if chosen.get(name) is None]
            message = f": full needs {' and '.join(lacking)}, for example uniform and 1"
            findings.require(not lacking, "recompute_granularity", message)
            findings.require(layers is None or layers > 0, "recompute_num_layers", f"must be at least 1: got {layers}")
        message = f"must be left out with recompute_granularity: selective, which names modules: got {layers}"
        findings.require(kind != "selective" or layers is None, "recompute_num_layers", message)
        message = "must be false where t > 1 with sequence parallelism: what is saved is divided there already"
        divides = kind is not None and is_sequence_parallel and chosen.get("distribute_saved_activations", False)
        findings.require(not divides, "distribute_saved_activations", message)

    @property
    def has_router_terms(self) -> bool:
        """Whether routers add losses or update biases based on the choices of all tokens in an update."""
        names = ("moe_z_loss_coeff", "moe_router_bias_update_rate")
        balanced = self.transformer.get("moe_router_load_balancing_type", "none") != "none"
        return balanced or any(self.transformer.get(name) for name in names)

    def report_ignored(self, findings: Findings, experts: bool, recompute: str, balanced: bool = False) -> None:
        """Report the options that have no effect for a model with or without `experts`; `findings` are at the model's
        section.

        The key `recompute` sets some options; `balanced`: routers have a balance loss without these options.
        """
        findings = findings.at("megatron")
        for section, reasons in _NO_EFFECT.items():
            for name in getattr(self, section):
                if name in reasons:
                    findings.ignore(f"{section}.{name}", reasons[name])
        for section, needed in _NEEDED.items():
            options: dict[str, Any] = getattr(self, section)
            for needs, names in needed.items():
                for name in names if not options.get(needs) else ():
                    if name in options and not (needs == "recompute_granularity" and recompute != "none"):
                        findings.ignore(f"{section}.{name}", f"{needs} is not set")
        balancing = self.transformer.get("moe_router_load_balancing_type", "none")
        if balancing == "none" and not balanced and self.transformer.get("moe_aux_loss_coeff"):
            findings.ignore("transformer.moe_aux_loss_coeff", "moe_router_load_balancing_type is none")
        if not experts and (named := [name for name in self.transformer if name.startswith("moe_")]):
            findings.ignore(f"transformer.{named[0]}", "the model has no experts")

    def effective(self, section: str) -> dict[str, Any]:
        """Return the options of a section that are passed to Megatron-Core."""
        ignored = _NO_EFFECT.get(section, {})
        return {name: value for name, value in getattr(self, section).items() if name not in ignored}


def _check_option(findings: Findings, section: str, name: str, value: Any) -> None:
    """Record an error for an unusable option; `findings` are at the `megatron` of the model's section."""
    key, model = f"{section}.{name}", findings.section.removesuffix(".megatron")
    fields = _fields("transformer" if section == "pipeline" else section)
    known = [field for field in fields if (field in PIPELINE) == (section == "pipeline")]
    if name not in fields:
        findings.unknown(key, suggest(name, known) or f"; see Megatron-Core {_version()}'s dataclass")
    elif section in ("transformer", "pipeline") and (name in PIPELINE) != (section == "pipeline"):
        findings.error(key, f"belongs into {findings.key('pipeline' if name in PIPELINE else 'transformer')}")
    elif reason := refusal(section, name):
        findings.error(key, f"cannot be set: {reason.replace('{section}', model)}")
    elif not _fits(fields[name], value):
        findings.error(key, f"must be {ast.unparse(fields[name])}, got {shown(value)}")
    elif isinstance(value, (int, float)) and value < 0:
        findings.error(key, f"must be at least 0: got {shown(value)}")


def is_option(section: str, name: str) -> bool:
    """Whether Megatron-Core has this option."""
    return name in _fields("transformer" if section == "pipeline" else section)


def refusal(section: str, name: str) -> str | None:
    """Return why an option of Megatron-Core cannot be set here; None if it can."""
    for reason, names in _REFUSED.get(section, {}).items():
        if name in names:
            return reason
    for reason, prefixes in _REFUSED_PREFIXES.get(section, {}).items():
        if name.startswith(prefixes):
            return reason
    return None


@cache
def _fields(section: str) -> dict[str, ast.expr]:
    """Return field -> annotation, read from the source of the installed package."""
    found: dict[str, ast.expr] = {}
    for file, classes in _CLASSES[section]:
        tree = ast.parse((_root() / file).read_text())
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name in classes:
                found.update(
                    (item.target.id, item.annotation)
                    for item in node.body
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
                )
    return found | {name: ast.parse(text, mode="eval").body for name, text in _NARROWER.items() if name in found}


def recompute_fault(options: Mapping[str, Any], chunks: Iterable[int]) -> str | None:
    """Return what is wrong with `recompute_num_layers` for chunks of these sizes, one per virtual stage; None if nothing
    is."""
    layers, method = options.get("recompute_num_layers"), options.get("recompute_method")
    if options.get("recompute_granularity") != "full" or layers is None:
        return None
    sizes = sorted({count for count in chunks if count})
    if method == "uniform" and any(layers < 1 or count % layers for count in sizes):
        return f"recompute_num_layers must divide the layers of each stage where uniform: got {layers} for {sizes}"
    # With `block`, a stage of fewer layers recomputes all that it has.
    return f"recompute_num_layers must be at least 1: got {layers}" if layers < 1 else None


def _root() -> Path:
    return Path(str(importlib.metadata.distribution("megatron-core").locate_file("megatron/core")))


def _version() -> str:
    return importlib.metadata.version("megatron-core")


def _fits(annotation: ast.expr, value: Any) -> bool:
    """Whether a value from a YAML file fits an annotation; a type that no file can hold (functions) never fits."""
    if isinstance(annotation, ast.Constant):
        return value is None if annotation.value is None else False
    if isinstance(annotation, ast.BinOp):
        return _fits(annotation.left, value) or _fits(annotation.right, value)
    if isinstance(annotation, ast.Attribute):
        return ast.unparse(annotation) == "torch.dtype" and isinstance(value, str) and value in DTYPE_NAMES
    if isinstance(annotation, ast.Name):
        if annotation.id == "float":
            return isinstance(value, (int, float)) and not isinstance(value, bool)
        if annotation.id == "int":
            return isinstance(value, int) and not isinstance(value, bool)
        plain: type | None = {"bool": bool, "str": str, "list": list, "dict": dict}.get(annotation.id)
        return plain is not None and isinstance(value, plain)
    if isinstance(annotation, ast.Subscript):
        outer, inner = ast.unparse(annotation.value), annotation.slice
        parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
        if outer == "Optional":
            return value is None or _fits(inner, value)
        if outer == "Union":
            return any(_fits(part, value) for part in parts)
        if outer == "Literal":
            return any(isinstance(part, ast.Constant) and part.value == value for part in parts)
        if outer in ("List", "list"):
            return isinstance(value, list) and all(_fits(inner, item) for item in value)
        if outer in ("Tuple", "tuple"):
            return isinstance(value, (list, tuple)) and len(value) == len(parts)
    return False
