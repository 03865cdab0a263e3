"""The rows of Trinity-RFT's table: what becomes of each key, in the order in which its users think."""

from __future__ import annotations

from fivefold.config.dialects import shared
from fivefold.config.dialects.shared import SHOWN
from fivefold.config.dialects.source import Source
from fivefold.config.dialects.table import Section, below, fixed, lacks, to, used
from fivefold.config.dialects.trinity_keys import BUFFER, EXPERTS, ROLLOUT, TASKSET
from fivefold.config.dialects.trinity_rows_trainer import TRAINER

_SECOND_FILE = "a file for trainer.trainer_config_path, which is no run of its own"
_KEPT = "where Trinity keeps samples"
_TASKS = "workflows, tools and other models"

SECTIONS = (
    Section.of(
        "Run",
        used(
            "mode",
            "algorithm.name policy.backend engine.backend",
            "A run of two files, `--config explorer.yaml --config trainer.yaml`, with sync_style fixed is that of mode both "
            "on the GPUs of both: the explorer waits for the trainer's weights, and the trainer for its samples.",
        ),
        used("project name checkpoint_root_dir", "trainer.run_dir tracking.project tracking.name"),
        used("model.checkpoint_path", "trainer.run_dir", "Of before 2025-05-22, whole."),
        used("group", "tracking.group"),
        used("continue_from_checkpoint", "trainer.resume"),
        fixed(
            "checkpoint_job_dir ray_namespace ignore_validator_suggestions log.** service.** "
            "monitor.monitor_args monitor.detailed_stats monitor.enable_ray_timeline monitor.cache_dir",
            SHOWN,
        ),
        used("monitor.monitor_type", "trainer.loggers", "metrics.jsonl is always written."),
        used(
            "cluster.node_num cluster.gpu_per_node",
            "policy.backend",
            "The trainer's GPUs: those of the cluster without engine_num x tensor_parallel_size, which are the engine's.",
        ),
        fixed(
            "cluster.ray_address cluster.total_gpu_num cluster.*_gpu_num cluster.trainer_node_num "
            "cluster.trainer_gpu_num_per_node",
            "how processes are started",
        ),
        used(
            "synchronizer.sync_interval synchronizer.sync_offset synchronizer.sync_style",
            "rollout data.prompts_per_step algorithm.updates_per_step algorithm.values_per policy.optimizer.schedule_per "
            "critic.optimizer.schedule_per trainer.steps "
            "trainer.save_every trainer.eval_every",
            "sync_interval I of the trainer's steps between two syncs are one step here, of I updates: their samples are "
            "all of the same weights, and their old log-probs the engine's; a critic computes the values of each of them "
            "anew.  Steps are counted so: total_steps / I, and intervals of checkpoints and evaluations rounded up. A "
            "sync_offset of k x I is rollout.max_staleness: k, a part of a step too, with interrupt: finish, for "
            "responses are whole before weights come (explorer.py, save_checkpoint). What is left of an epoch behind its "
            "last whole interval is not trained on here.",
        ),
        fixed(
            "synchronizer.sync_method synchronizer.sync_timeout synchronizer.wait_for_checkpoint "
            "synchronizer.explorer_world_size synchronizer.ray_namespace synchronizer.backend synchronizer.master_address "
            "synchronizer.master_port",
            "weights move on the GPUs",
        ),
        lacks("stages", "stages of different algorithms"),
        fixed("-m --config-name --config-path", "how the program is started"),
    ),
    Section.of(
        "Algorithm",
        used(
            "algorithm.algorithm_type algorithm.advantage_fn algorithm.advantage_fn_args.*",
            "algorithm.name algorithm.advantage algorithm.normalize algorithm.gamma algorithm.lam "
            "algorithm.baseline_shift algorithm.baseline_temperature",
            "multi_step_grpo learns from several turns: refused. Before 2025-05 the type ppo told of the loss alone, and "
            "trainer.trainer_config.algorithm.adv_estimator of the advantage.",
            takes_any=True,
        ),
        used(
            "algorithm.gamma algorithm.lam", "algorithm.gamma algorithm.lam", "Of before 2025-06: as in advantage_fn_args."
        ),
        used("algorithm.repeat_times", "algorithm.group_size"),
        used(
            "algorithm.policy_loss_fn algorithm.policy_loss_fn_args.* algorithm.loss_agg_mode",
            "algorithm.surrogate algorithm.clip_low algorithm.clip_high algorithm.dual_clip "
            "algorithm.aggregate algorithm.beta algorithm.tau algorithm.clip_mode algorithm.ring_low algorithm.ring_high "
            "algorithm.token_weight algorithm.weight_temperature algorithm.likelihood_coef algorithm.proximal_coef "
            "algorithm.importance_sampling_level algorithm.temperature_positive algorithm.temperature_negative "
            "algorithm.expert",
            "The ratio is bounded twice, with 3.0, when clip_ratio_c is left out (ppo_policy_loss.py), and once in releases "
            "of before 2025-11-19. opmd, topr, sppo and "
            "rec are means over tokens; sppo is rec without weight, within 1 / (1 + ε) and 1 + ε. mix and mix_chord are "
            "1 - μ of GRPO and μ of an expert's cross-entropy, a mean of its own each, where the batch sizes that they are "
            "told are the run's (chord_policy_loss.py).",
            takes_any=True,
        ),
        used(
            "algorithm.kl_penalty_fn algorithm.kl_penalty_fn_args.kl_coef algorithm.kl_penalty_fn_args.adaptive "
            "algorithm.kl_loss_fn algorithm.kl_loss_fn_args.kl_coef algorithm.kl_loss_fn_args.adaptive",
            "algorithm.kl algorithm.beta",
            "k2 with 0.001 in the loss when left out (algorithm.py, kl_fn.py). With dpo its kl_coef is β.",
        ),
        used("algorithm.entropy_loss_fn_args.entropy_coef", "algorithm.entropy_coef"),
        used("algorithm.entropy_loss_fn", "algorithm.entropy_coef"),
        used("algorithm.sample_strategy", "data.expert_per_step"),
        used(
            "algorithm.sample_strategy_args.expert_data_ratio",
            "data.expert_per_step",
            "Of mix and mix_chord: the expert's share of train_batch_size, rounded up; 0.5 when left out.",
        ),
        lacks("algorithm.sample_strategy_args.*", "another choice of samples"),
        lacks(
            "algorithm.add_strategy algorithm.add_strategy_args.*",
            "another way of scoring a group than that of the algorithm",
            ["grpo", "opmd", "asymre"],
        ),
        fixed("algorithm.*_args", "empty"),
        used("algorithm.optimizer.lr", "policy.optimizer.lr"),
        used("algorithm.optimizer.betas", "policy.optimizer.betas"),
        used("algorithm.optimizer.weight_decay", "policy.optimizer.weight_decay"),
        used("algorithm.optimizer.lr_scheduler_type algorithm.optimizer.warmup_style", "policy.optimizer.schedule"),
        used("algorithm.optimizer.min_lr_ratio", "policy.optimizer.min_lr"),
        used(
            "algorithm.optimizer.lr_warmup_steps algorithm.optimizer.lr_warmup_steps_ratio",
            "policy.optimizer.warmup_steps",
            "verl's: steps of the run, the first with rate 0.",
        ),
        lacks("algorithm.optimizer.optimizer_type", "another optimizer than AdamW", ["adam", "adamw"]),
    ),
    Section.of(
        "Model",
        to("model.model_path", "model.path", shared.path),
        to("model.trust_remote_code", "model.trust_remote_code", shared.flag),
        used("model.critic_model_path", "critic.path"),
        used(
            f"model.max_prompt_tokens model.max_response_tokens model.max_model_len {ROLLOUT}max_prompt_tokens "
            f"{ROLLOUT}max_response_tokens",
            "data.max_prompt_tokens data.max_response_tokens",
            "Prompts that are too long are refused: Trinity cuts them off. The engine's went before the model's until "
            "2025-09.",
        ),
        used(
            "model.temperature model.top_p model.top_k",
            "engine.sampling",
            "Trinity's trainer does not divide logits by the temperature, ours does: ratios compare the "
            "distribution that was sampled from.",
        ),
        used("model.lora_configs", "policy.lora", "One of them; rank 32, alpha 32 and all-linear when left out."),
        lacks("model.lora_configs.**", "parts of an adapter on the command line: write model.lora_configs whole"),
        used("model.enable_thinking", "data.chat_template_kwargs", "false when left out, until 2026-02."),
        to("model.custom_chat_template", "data.chat_template", Source.raw),
        lacks("model.chat_template_path", "a file of a chat template: write its text in model.custom_chat_template", [""]),
        lacks("model.rope_scaling model.rope_theta", "another RoPE: write it into the model's directory"),
        lacks("model.repetition_penalty model.min_response_tokens", "engine.sampling has it", [1.0, 1, 0]),
        fixed(
            "model.logprobs model.enable_prompt_truncation model.fully_sharded_loras model.max_cpu_loras",
            "log-probs are always recorded",
        ),
        lacks("model.tinker.enable model.external_model.enable", "models that are trained elsewhere", [False]),
        fixed("model.tinker.* model.external_model.*", "read with enable only"),
    ),
    Section.of(
        "Buffer",
        used(
            "buffer.batch_size buffer.train_batch_size",
            "data.prompts_per_step",
            "Tasks a step, and samples of a trainer's step.",
        ),
        used("buffer.total_epochs", "trainer.epochs"),
        used("buffer.total_steps trainer.total_steps", "trainer.steps"),
        used(TASKSET + "path", "data.train", "A name on the hub is to be written as parquet first."),
        used(TASKSET + "format.prompt_key", "data.prompt_key"),
        used(
            f"{TASKSET}format.response_key",
            "data.ground_truth_key",
            "Of a solution that ends in `#### answer` it is the answer.",
        ),
        used(
            TASKSET + "format.system_prompt buffer.explorer_input.system_prompt",
            "data.system_prompt",
            "When left out, math_workflow has DeepSeek-R1's and math_boxed_workflow one of its own.",
        ),
        lacks("buffer.explorer_input.reply_prefix", "a beginning of each response: write it into the data", [""]),
        used(
            f"{TASKSET}rollout_args.temperature {TASKSET}rollout_args.top_p {TASKSET}rollout_args.top_k",
            "engine.sampling",
        ),
        fixed(f"{TASKSET}rollout_args.n {TASKSET}rollout_args.logprobs", "algorithm.repeat_times and log-probs say it"),
        lacks(f"{TASKSET}rollout_args.*", "another way of sampling"),
        used(
            "buffer.explorer_input.eval_tasksets",
            "data.val eval.samples eval.temperature eval.top_p",
            "repeat_times responses a task, sampled by its rollout_args, and a greedy one besides.",
        ),
        used(f"buffer.explorer_input.default_workflow_type {TASKSET}default_workflow_type", "reward.functions"),
        used(
            f"buffer.explorer_input.default_reward_fn_type {TASKSET}default_reward_fn_type",
            "reward.functions",
            "math_reward is accuracy by math-verify, and ±0.1 by the form; so it is when nothing is said. math_boxed_reward "
            "and math_dapo_reward are accuracy of the last \\boxed{}.",
        ),
        used(
            f"{TASKSET}workflow_args.*",
            "data.chat_template data.system_prompt reward.functions",
            "Of math_boxed_workflow: use_base, prompts in a form of its own without the chat template; with_think, another "
            "system prompt and format_score_coef less where the reasoning is not in one <think>.",
        ),
        used(
            f"{TASKSET}reward_fn_args.*",
            "algorithm.overlong_buffer algorithm.overlong_penalty",
            "Of math_dapo_reward, whose penalty of long responses is DAPO's (dapo_reward.py).",
        ),
        used(
            f"{TASKSET}data_selector.selector_type",
            "data.shuffle",
            "sequential, the default: every epoch in the order of the file; or shuffle.",
        ),
        lacks(
            f"buffer.explorer_input.default_eval_workflow_type {TASKSET}data_selector.** "
            f"{TASKSET}task_selector.** {TASKSET}repeat_times",
            _TASKS,
            ["", "sequential"],
        ),
        lacks("buffer.explorer_input.tasksets", "several task sets"),
        fixed(
            f"{TASKSET}name {TASKSET}storage_type {TASKSET}split {TASKSET}subset_name "
            f"{TASKSET}enable_progress_bar {TASKSET}max_retry_* {TASKSET}index {TASKSET}is_eval {TASKSET}ray_namespace "
            f"{TASKSET}format {TASKSET}format.prompt_type {TASKSET}rollout_args {TASKSET}workflow_args "
            f"{TASKSET}reward_fn_args buffer.max_retry_times buffer.max_retry_interval buffer.tokenizer_path "
            f"buffer.cache_dir buffer.explorer_output",
            "how data are read",
        ),
        used(BUFFER + "path", "data.train", "Of dpo and sft."),
        used(f"{BUFFER}format.*", "data.prompt_key data.response_key data.chosen_key data.rejected_key"),
        used(
            f"{BUFFER}replay_buffer.enable {BUFFER}replay_buffer.priority_fn {BUFFER}replay_buffer.priority_fn_args.** "
            f"{BUFFER}replay_buffer.reuse_cooldown_time {BUFFER}use_priority_queue {BUFFER}replay_buffer_kwargs.** "
            f"{BUFFER}reuse_cooldown_time {BUFFER}capacity",
            "rollout",
            "Without reuse_cooldown_time every sample is read once, those of the newest weights first (storage/queue.py): "
            "where a period begins with an empty queue, as it does without sync_offset, that is the order of a queue "
            "without priorities. With it samples come back after seconds of the clock: refused.",
        ),
        fixed(
            below(
                BUFFER,
                "name storage_type format max_read_timeout max_retry_* split subset_name index batch_size "
                "enable_progress_bar schema_type tokenizer_path total_epochs total_steps ray_namespace wrap_in_ray",
            ),
            _KEPT,
        ),
        used(
            EXPERTS + "path",
            "data.expert",
            "Of mix and mix_chord; begun anew at its end, as there until total_epochs.",
        ),
        used(
            below(EXPERTS + "format.", "prompt_type messages_key prompt_key response_key"),
            "data.messages_key data.response_key",
        ),
        fixed(
            below(
                EXPERTS, "algorithm_type name storage_type schema_type split subset_name total_epochs total_steps batch_size"
            ),
            _KEPT,
        ),
        lacks("buffer.trainer_input.sft_warmup_steps trainer.sft_warmup_steps", "imitation before sampling begins", [0]),
        fixed(
            "buffer.sft_warmup_dataset.** buffer.trainer_input.sft_warmup_dataset.**",
            "read with sft_warmup_steps only",
            takes_any=True,
        ),
        lacks("trainer.get_exp_strategy", "samples in another order than that of sampling", ["", "FIFO", "fifo"]),
        lacks("buffer.explorer_output.*", "samples that another program passes on"),
        lacks(
            "buffer.prompt_type buffer.prompt_key buffer.response_key buffer.messages_key",
            "columns of all data sets: name them in each one's format",
            ["messages", "message", "prompt", "response"],
        ),
        fixed(
            "buffer.db_url buffer.read_batch_size buffer.pad_token_id buffer.reset_consumed "
            f"buffer.train_dataset.algorithm_type {BUFFER}algorithm_type",
            _KEPT,
        ),
        lacks("data.format_config.*", "a column that says how its row is asked or scored", [""]),
        fixed("data.eval_split", "none: there is no evaluation"),
        lacks(
            "buffer.explorer_input.taskset.format.reply_prefix",
            "responses that begin with a given text",
            [""],
        ),
        lacks("buffer.trainer_input.auxiliary_buffers.**", "samples of another source beside those of the policy"),
        lacks(
            "data_processor.task_pipeline.** data_processor.task_pipeline data_processor.experience_pipeline.operators "
            "data_processor.experience_pipeline.inputs.** data_processor.experience_pipeline.output.** "
            "data_processor.data_workflow_url data_processor.data_processor_url",
            "operators on data: write the rows as parquet",
        ),
        fixed(
            "data_processor data_processor.** data_processor.experience_pipeline",
            "operators on data are a server's, which is asked where its URL is given (launcher.py)",
            takes_any=True,
        ),
    ),
    Section.of(
        "Explorer",
        used(
            f"{ROLLOUT}engine_num {ROLLOUT}tensor_parallel_size",
            "engine.backend engine.placement policy.backend",
            "On GPUs of its own, behind the trainer's.",
        ),
        used(ROLLOUT + "gpu_memory_utilization", "engine.memory_fraction"),
        used(f"{ROLLOUT}enforce_eager {ROLLOUT}enable_prefix_caching {ROLLOUT}enable_chunked_prefill", "engine.vllm"),
        used(ROLLOUT + "dtype", "engine.dtype"),
        used(ROLLOUT + "engine_type", "engine.backend", "sglang becomes vLLM."),
        used("explorer.eval_interval", "trainer.eval_every"),
        used("explorer.eval_on_startup", "trainer.eval_before_train"),
        used(
            "explorer.auxiliary_models",
            "policy.backend",
            "Their GPUs are not the trainer's; rewards that ask them need a function of your own.",
        ),
        used(f"{ROLLOUT}enable_thinking", "data.chat_template_kwargs"),
        lacks(f"{ROLLOUT}ignore_eos", "responses that go on behind their end", [False]),
        lacks(f"{ROLLOUT}repetition_penalty {ROLLOUT}min_response_tokens", "engine.sampling has it", [1.0, 1, 0]),
        lacks(
            f"{ROLLOUT}rope_scaling {ROLLOUT}rope_theta {ROLLOUT}chat_template",
            "another chat template or RoPE: write it into the model's directory",
        ),
        fixed(
            below(
                ROLLOUT,
                "name use_v1 seed temperature top_p top_k logprobs max_model_len "
                "model_path trust_remote_code enable_prompt_truncation enable_history enable_openai_api "
                "enable_log_requests enable_auto_tool_choice tool_call_parser reasoning_parser bundle_indices ray_namespace "
                "cuda_visible_devices enable_lora enable_runtime_lora_updating lora_modules lora_kwargs",
            )
            + below(
                "explorer.",
                "name runner_per_model runner_num max_timeout max_retry_times env_vars concurrent_mode "
                "max_repeat_times_per_runner bench_on_latest_checkpoint proxy_port listen_address db_url "
                "service_status_check_interval min_running_model_num runner_state_report_interval backend use_ray "
                "max_pending_requests max_waiting_steps",
            ),
            "how requests are spread; model and algorithm say the rest",
        ),
        lacks("explorer.over_rollout.ratio", "samples that are left out when they take long", [0, 0.0]),
        lacks("explorer.dynamic_timeout.enable", "responses that end after some seconds", [False]),
        fixed(
            "explorer.over_rollout.wait_after_min explorer.over_rollout.return_partial_tasks explorer.dynamic_timeout.ratio "
            "explorer.dynamic_timeout.warmup_min_steps",
            "read with a ratio or enable only",
        ),
        fixed("explorer.env_vars.**", "how processes are started"),
    ),
    TRAINER,
    Section.of(
        "verl's own file",
        lacks(
            "actor_rollout_ref.** critic.** custom_reward_function.** data.** reward_model.** "
            "algorithm.kl_penalty algorithm.kl_ctrl.* trainer.balance_batch "
            "trainer.critic_warmup trainer.default_hdfs_dir "
            "trainer.del_local_ckpt_after_load trainer.remove_previous_ckpt_in_save trainer.resume_mode "
            "trainer.val_before_train trainer.max_*_ckpt_to_keep trainer.total_training_steps "
            "trainer.default_local_dir trainer.sync_freq",
            _SECOND_FILE,
        ),
    ),
)
