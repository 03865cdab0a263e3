"""Keys that only some of Trinity-RFT's releases have, which ask for nothing at their defaults."""

from __future__ import annotations

from fivefold.config.dialects.table import Section, fixed, lacks, slower
from fivefold.config.dialects.trinity_keys import REFERENCE, TASKSET


def _below(section: str, names: str) -> str:
    return " ".join(section + name for name in names.split())


_OF_OTHER_STORES = "how experiences are stored: a set of tasks is read from its file"
SECTION = Section.of(
    "Of some releases only",
    lacks(
        "algorithm.optimizer.lr_decay_steps algorithm.optimizer.lr_decay_style algorithm.optimizer.lr_warmup_init "
        "algorithm.optimizer.min_lr",
        "the learning rate by Megatron's names: give lr_scheduler_type and min_lr_ratio", ["constant", 0, 0.0],
    ),
    lacks("algorithm.use_token_level_loss", "a mean that is not over tokens: loss_agg_mode", [True]),
    lacks("algorithm.enable_router_replay", "experts that are replayed", [False]),
    lacks("algorithm.rollout_correction", "verl's correction of samples by older weights"),
    lacks("algorithm.bypass_old_logprobs", "old log-probs that the trainer computes", [True]),
    lacks(_below("buffer.trainer_input.", "auxiliary_buffers experience_buffer sft_warmup_dataset"), "a buffer"),
    lacks("buffer.trainer_input.read_experience_strategy", "an order of experiences by the trainer's buffer"),
    fixed(
        _below(TASKSET, "capacity max_read_timeout wrap_in_ray mm_data_kwargs schema_type use_priority_queue "
                        "reuse_cooldown_time replay_buffer_kwargs.decay replay_buffer_kwargs.priority_fn task_type "
                        "algorithm_type total_epochs total_steps default_eval_workflow_type raw"),
        _OF_OTHER_STORES,
    ),
    lacks(
        _below(f"{TASKSET}format.", "chat_template chosen_key rejected_key messages_key image_key video_key label_key "
                                    "reward_key solution_key reward_fn_key workflow_key system_prompt_key tools_key "
                                    "enable_concatenated_multi_turn"),
        "a column that tasks are not read from", ["", "chosen", "rejected", "message", "reward", "solution", "tools", False],
    ),
    lacks("explorer.eval_on_latest_checkpoint explorer.collect_experiences", "what the explorer does besides", [False]),
    fixed(_below("explorer.", "api_port max_inflight_batches runner_prepare_concurrency runner_prepare_max_retries"),
          "how requests are spread; model and algorithm say the rest"),
    fixed(_below(f"{REFERENCE}megatron.override_transformer_config.recompute_", "granularity method num_layers modules"),
          "the reference has no backward pass"),
    fixed("synchronizer.group_name", "how processes find each other"),
    lacks("synchronizer.explorer_sync_interval synchronizer.trainer_sync_interval", "intervals of their own: sync_interval"),
    lacks(_below("explorer.rollout_model.", "data_parallel_size pipeline_parallel_size nnodes"),
          "an engine over several machines or stages", [1]),
    lacks(_below("explorer.rollout_model.", "enable_expert_parallel enable_multimodal enable_return_routed_experts "
                                            "external_model_config.enable"),
          "another engine than the one of the layout", [False]),
    lacks("explorer.rollout_model.extra_engine_args", "options of the engine"),
    fixed(_below("explorer.rollout_model.", "api_key base_port checkpoint_job_dir engine_id gpu_per_engine node_rank "
                                            "ray_actor_name sync_method weight_sync_buffer_size "
                                            "external_model_config.*"), "how engines are reached", takes_any=True),
    lacks(_below("trainer.megatron.", "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size "
                                      "expert_model_parallel_size expert_tensor_parallel_size "
                                      "virtual_pipeline_model_parallel_size sequence_parallel"),
          "a layout by 0.6's names: give trainer.trainer_config.actor_rollout_ref.actor.megatron", [1, True]),
    slower("trainer.param_offload trainer.grad_offload trainer.optimizer_offload trainer.offload_policy",
           "offload by 0.6's names: give trainer.trainer_config", [False]),
    fixed("trainer.use_remove_padding", "sequences are always packed"),
    lacks("trainer.trust_remote_code", "code of a model's own", [False]),
)  # fmt: skip
