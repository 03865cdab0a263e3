"""The rows of verl's table for layout, batch, optimizer, and the critic's and reference's."""

from __future__ import annotations

from fivefold.config.dialects import shared
from fivefold.config.dialects.adapters import rows_of_verl
from fivefold.config.dialects.shared import KERNELS, NO_CUT, SPREAD
from fivefold.config.dialects.table import Section, below, fixed, lacks, slower, to, used
from fivefold.config.dialects.verl_rows_engines import OF_RL, engine_rows, rows_of_moments, rows_of_state

_A, _R, _C = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "critic."
_MCORE = ("megatron", "mindspeed")
"""Engines of Megatron-Core; MindSpeed's was there from 2026-05 to 08."""
_TRAINERS = (_A, _C, "actor_rollout_ref.ref.", "reward_model.")
ORDER = "each update has its own prompts: their order in it changes nothing"

TRAINING = Section.of(
    "Training",
    used(
        f"{_A}strategy model_engine --config-name defaults",
        "policy.backend",
        "fsdp and fsdp2 become data-parallel Megatron-Core on as many GPUs, with recomputation and "
        "offload as they were set.",
    ),
    used(
        (
            "trainer.nnodes",
            "trainer.n_gpus_per_node",
            *(
                f"{_A}{engine}.{name}_parallel_size"
                for engine in _MCORE
                for name in ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
            ),
            _A + "ulysses_sequence_parallel_size",
            _A + "fsdp_config.ulysses_sequence_parallel_size",
        ),
        "policy.backend",
        "Ulysses' size becomes context parallelism. Expert tensor parallelism left out is that of the model.",
    ),
    used(tuple(f"{_A}{engine}.virtual_pipeline_model_parallel_size" for engine in _MCORE), "policy.megatron.pipeline"),
    used(tuple(f"{_A}{engine}.sequence_parallel" for engine in _MCORE), "policy.sequence_parallel"),
    used(
        f"{_A}megatron.override_transformer_config.* {_A}mindspeed.mcore_kwargs.* {_A}mindspeed.llm_kwargs.*",
        "policy.megatron.transformer policy.recompute",
        takes_any=True,
    ),
    used(_A + "mindspeed.strategy", "policy.backend", "mindspeed_megatron, or mindspeed_fsdp."),
    fixed(f"{_A}mindspeed.fsdp_kwargs.** actor_rollout_ref.ref.mindspeed.** critic.mindspeed.**", SPREAD, takes_any=True),
    used(
        below("**.megatron. **.mindspeed.", "param_offload grad_offload optimizer_offload")
        + below("**.fsdp_config. critic.fsdp. **.veomni. **.torchtitan.", "param_offload optimizer_offload"),
        "policy.offload critic.offload",
        "The reference's weights leave the GPU with the policy's.",
    ),
    used(
        (f"{_A}use_dynamic_bsz {_A}ppo_max_token_len_per_gpu {_A}ppo_micro_batch_size_per_gpu {_A}ppo_micro_batch_size"),
        "policy.tokens_per_micro_batch",
        "A token budget per GPU, times the GPUs that share a sequence; a number of sequences at their longest. "
        "It cannot change the numbers here.",
    ),
    to(_A + "ppo_epochs", "algorithm.ppo_epochs", shared.whole),
    fixed(f"{_A}shuffle {_A}data_loader_seed", ORDER),
    used(_A + "optim.lr", "policy.optimizer.lr"),
    used(_A + "optim.weight_decay", "policy.optimizer.weight_decay"),
    used(
        _A + "optim.betas",
        "policy.optimizer.betas",
        "verl hands no betas to Megatron's optimizer (utils/megatron/optimizer.py): 0.9 and 0.999 then.",
    ),
    used(
        f"{_A}grad_clip {_A}optim.clip_grad",
        "policy.optimizer.clip_grad",
        "grad_clip with FSDP, optim.clip_grad with Megatron.",
    ),
    used(
        f"{_A}optim.lr_warmup_steps {_A}optim.lr_warmup_steps_ratio",
        "policy.optimizer.warmup_steps",
        "verl counts steps of the run from 0, so the first of a warm-up has rate 0 (torch_functional.py:769, "
        "engine_workers.py:303): schedule_per: step, warmup_from: 0.",
    ),
    used(
        f"{_A}optim.lr_scheduler_type {_A}optim.warmup_style {_A}optim.lr_decay_style {_A}optim.decay_type",
        "policy.optimizer.schedule",
        "FSDP reads lr_scheduler_type (constant when left out), VeOmni too (cosine), Megatron lr_decay_style (constant), "
        "torchtitan decay_type (linear).",
    ),
    used(_A + "optim.lr_decay_steps", "policy.optimizer.decay_steps"),
    used(
        f"{_A}optim.min_lr {_A}optim.min_lr_ratio {_A}optim.lr_min {_A}optim.min_lr_factor",
        "policy.optimizer.min_lr",
        "Of Megatron, FSDP, VeOmni and torchtitan; a ratio or factor is a share of the rate.",
    ),
    lacks("**.optim.lr_decay_ratio", "a decay that ends before the run", [1, 1.0]),
    fixed(f"{_A}optim.total_training_steps critic.optim.total_training_steps", "verl sets it itself"),
    used(
        f"{_A}optim.lr_warmup_init {_A}optim.lr_start",
        "policy.optimizer.warmup_init_lr",
        "With Megatron, and with VeOmni.",
    ),
    lacks("**.optim.num_cycles", "a cosine of other cycles", [0.5]),
    lacks("**.optim.weight_decay_incr_style", "weight decay that changes", ["constant"]),
    fixed("**.optim.lr_wsd_decay_style **.optim.lr_wsd_decay_steps", "read with the schedule WSD only"),
    lacks("**.optim.optimizer", "another optimizer than AdamW", ["AdamW", "adam", "adamw", "Adam"]),
    fixed(
        "**.optim.optimizer_impl **.optim.use_checkpoint_opt_param_scheduler **.optim.zero_indexed_step",
        "AdamW is AdamW, and a resumed run goes on with its schedule",
    ),
    used(_A + "optim.override_optimizer_config.*", "policy.megatron.optimizer", takes_any=True),
    fixed(f"{_A}optim.override_optimizer_config critic.optim.override_optimizer_config", "empty"),
    slower("critic.optim.override_optimizer_config.*", "the critic's optimizer stays on its GPU", [False, 0, 1]),
    used(
        tuple(
            f"{role}megatron.{name}" for role in _TRAINERS for name in ("use_dist_checkpointing", "dist_checkpointing_path")
        ),
        "model.path model.config reference.path critic.path reward.model.path",
        "Weights of a checkpoint of Megatron-Core; config.json and tokenizer stay those of the Hugging Face "
        "directory. A value head that it lacks is drawn at random in verl: a critic's starts at 0 here, and a reward "
        "model without one is refused.",
    ),
    used(
        f"{_A}router_replay.mode {_A}megatron.router_replay.mode {_A}veomni.router_replay.mode "
        f"{_R}enable_rollout_routing_replay",
        "policy.router_replay engine.mode",
        "By Megatron and VeOmni; actor.router_replay in releases of 2026-01. R3 leaves the last token of a sequence to "
        "the router, as here; the reference chooses for itself in both.",
    ),
    lacks("**router_replay.mode", "replaying the routing of experts in another model than the policy", ["disabled"]),
    fixed("**router_replay.*", "R2 and R3 keep routes with the samples, and read no file"),
    lacks("**qat.enable", "training for a quantized model", [False]),
    fixed("**qat.*", "read with qat.enable only"),
    used(
        f"**.megatron.dtype **.mindspeed.dtype **.fsdp_config.dtype critic.fsdp.dtype **.torchtitan.dtype "
        f"{_A}fsdp_config.mixed_precision.param_dtype",
        "policy.dtype",
        "The critic and the reference have the policy's type. In float16 an update whose gradient overflows is left out "
        "and the loss scaled by less, as verl's scaler does.",
    ),
    engine_rows(OF_RL),
    fixed(
        (
            f"{_A}entropy_checkpointing {_A}entropy_from_logits_with_chunking "
            f"{_A}entropy_from_logits_chunk_size {_A}calculate_entropy {_A}calculate_sum_pi_squared "
            f"{_A}sum_pi_squared_checkpointing {_A}rollout_n {_A}pad_to_length"
        ),
        "how the same number is computed",
    ),
    fixed("**._target_", "Hydra's name of a class", takes_any=True),
    used(_A + "optim.eps", "policy.optimizer.eps"),
    rows_of_moments(_A + "optim."),
    rows_of_state("**.optim."),
    fixed("**.optim.muon_* **.optim.name", "read by other optimizers only"),
    lacks("**.load_weight", "models that begin with random weights", [True]),
    fixed(f"{_R}layer_name_map.*", "how weights travel to the engine"),
    fixed(_R + "skip_dump_dir", "read with skip_rollout only"),
)

ROLES = Section.of(
    "Critic and reference",
    used(
        (
            "critic.model.path critic.cliprange_value critic.optim.* critic.optim.lr_min critic.optim.lr_start "
            "critic.grad_clip critic.use_dynamic_bsz critic.ppo_max_token_len_per_gpu critic.ppo_micro_batch_size_per_gpu "
            "critic.ppo_mini_batch_size critic.ppo_epochs critic.loss_agg_mode "
            "critic.model.enable_gradient_checkpointing"
        ),
        "critic.path critic.optimizer critic.value_clip",
        "With adv_estimator=gae.",
    ),
    used(
        "trainer.critic_warmup",
        "critic.warmup_steps",
        "verl's policy learns from step critic_warmup on, counted from 1 (ray_trainer.py:1604): one step less here.",
    ),
    rows_of_verl("critic.model.", "critic"),
    fixed(
        "critic.strategy actor_rollout_ref.ref.strategy",
        "the actor's strategy is that of all models: it changes no number",
    ),
    fixed(
        "critic.ulysses_sequence_parallel_size critic.forward_max_token_len_per_gpu critic.forward_micro_batch_size "
        "critic.forward_micro_batch_size_per_gpu critic.ppo_micro_batch_size",
        NO_CUT,
    ),
    fixed(
        below(
            "actor_rollout_ref.ref.",
            "ulysses_sequence_parallel_size log_prob_max_token_len_per_gpu log_prob_micro_batch_size "
            "log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz entropy_checkpointing "
            "entropy_from_logits_with_chunking entropy_from_logits_chunk_size ppo_micro_batch_size "
            "ppo_micro_batch_size_per_gpu pad_to_length use_prefix_grouper use_remove_padding use_fused_kernels",
        ),
        "the reference computes as the policy does; no cut changes the numbers",
    ),
    fixed("critic.rollout_n critic.enable critic.nccl_timeout actor_rollout_ref.ref.rollout_n", "the run's own keys say it"),
    fixed("critic.shuffle critic.data_loader_seed", ORDER),
    lacks("critic.loss_scale_factor", "another constant than data.max_response_length"),
    fixed("actor_rollout_ref.ref.optim.*", "the reference learns nothing"),
    used(
        "critic.megatron.override_transformer_config.* actor_rollout_ref.ref.megatron.override_transformer_config.*",
        "critic.recompute critic.megatron reference.megatron",
        "Where they are left out, the critic and the reference have the policy's.",
        takes_any=True,
    ),
    fixed(
        "critic.model.use_remove_padding critic.model.tokenizer_path critic.model.trust_remote_code critic.model.use_shm "
        "critic.model.external_lib critic.model.hf_config_path critic.model.fused_kernel_options critic.model.lora",
        "how the model's files are read and sequences packed, the policy's keys say",
    ),
    fixed(
        "critic.model.use_fused_kernels critic.model.use_liger critic.model.fused_kernel_options.impl_backend "
        "critic.model.tiled_mlp.enabled critic.model.tiled_mlp.num_shards",
        KERNELS,
    ),
    lacks(
        "critic.model.override_config critic.model.override_config.**",
        "changes of config.json: write them into the model's directory",
    ),
    lacks("critic.model.custom_chat_template", "a chat template in the configuration: put it into the tokenizer's files"),
    slower("critic.model.enable_activation_offload", "activations that wait on the host: critic.recompute", [False]),
    lacks("critic.model.mtp.enable", "multi-token prediction of a critic", [False]),
    fixed("critic.model.mtp.*", "read with mtp.enable only"),
    lacks("actor_rollout_ref.ref.model.**", "a reference of other weights: reference.path here"),
)
