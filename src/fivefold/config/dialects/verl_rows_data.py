"""The rows of verl's table for data, and the model with its adapters."""

from __future__ import annotations

from fivefold.config.dialects import mtp, shared, verl_prime
from fivefold.config.dialects.adapters import rows_of_verl
from fivefold.config.dialects.shared import KERNELS
from fivefold.config.dialects.table import Section, fixed, lacks, slower, to, used
from fivefold.config.dialects.verl_older import FIRST_ROWS

_A, _M = "actor_rollout_ref.actor.", "actor_rollout_ref.model."
VALIDATION_ROWS = "The first rows of each file; verl draws them at random where data.shuffle is set, over all files."
NOT_TEXT = "images, videos and audio"
TOOLS = "tools and several turns"

DATA = Section.of(
    "Data",
    to("data.train_files", "data.train", shared.files),
    to("data.val_files", "data.val", shared.files),
    used(
        f"data.train_batch_size {_A}ppo_mini_batch_size",
        "data.prompts_per_step algorithm.updates_per_step",
        "Both count prompts: verl multiplies the mini-batch by rollout.n itself.",
    ),
    to("data.max_prompt_length", "data.max_prompt_tokens", shared.whole),
    to("data.max_response_length", "data.max_response_tokens", shared.whole),
    to("data.prompt_key", "data.prompt_key", shared.text),
    to("data.shuffle", "data.shuffle", shared.flag),
    to("data.seed", "trainer.seed", shared.whole, "The order of prompts is another: each system has its own shuffle."),
    used("data.filter_overlong_prompts", "data.overlong_prompts"),
    fixed("data.truncation", "prompts that are too long are dropped or refused: none is cut off silently"),
    fixed("data.reward_fn_key", "data_source is read"),
    fixed(
        (
            "data.val_batch_size data.dataloader_num_workers data.filter_overlong_prompts_workers "
            "data.num_workers data.use_shm data.return_raw_input_ids data.return_full_prompt "
            "data.return_multi_modal_inputs data.validation_shuffle data.image_key data.video_key "
            "data.audio_key data.image_patch_size data.cache_dir data.serialize_dataset "
            "data.ignore_input_ids_mismatch"
        ),
        "how data are read: the same prompts come out",
    ),
    fixed("data.return_raw_chat", "the chat template is applied here"),
    used("data.train_max_samples", "data.train", FIRST_ROWS),
    used("data.val_max_samples", "eval.max_prompts", VALIDATION_ROWS),
    used("data.apply_chat_template_kwargs.* data.apply_chat_template_kwargs", "data.chat_template_kwargs", takes_any=True),
    lacks(
        "data.custom_cls.path data.datagen.path data.sampler.class_path",
        "a data set of one's own code: write its rows as parquet",
    ),
    fixed("data.custom_cls.name data.datagen.name data.sampler.class_name", "read with its path only"),
    to("data.tokenizer", "model.tokenizer", shared.path),
    to("data.trust_remote_code", "model.trust_remote_code", shared.flag),
    lacks("data.tool_config_path data.function_tool_path", TOOLS),
    lacks("data.mm_processor_kwargs", NOT_TEXT),
    verl_prime.FILTER,
)

MODEL = Section.of(
    "Model",
    to(_M + "path", "model.path", shared.path),
    to(_M + "tokenizer_path", "model.tokenizer", shared.path),
    to(
        _M + "trust_remote_code",
        "model.trust_remote_code",
        shared.flag,
        "Of the tokenizer only: models run no code of theirs.",
    ),
    fixed(
        f"{_M}use_remove_padding {_A}use_remove_padding {_A}megatron.use_remove_padding",
        "sequences are always packed: nothing is padded",
    ),
    to(
        _A + "use_prefix_grouper",
        "policy.share_prefix",
        shared.flag,
        "verl's PrefixGrouper. Groups are kept together whatever trainer.balance_batch says.",
    ),
    fixed(
        (
            f"{_M}use_fused_kernels {_A}use_fused_kernels {_M}fused_kernel_options.impl_backend {_M}use_liger "
            f"{_A}use_torch_compile actor_rollout_ref.ref.use_torch_compile {_M}tiled_mlp.enabled {_M}tiled_mlp.num_shards"
        ),
        KERNELS,
    ),
    fixed(f"{_M}use_shm {_M}external_lib {_M}hf_config_path", "how the model's files are read"),
    fixed(_M + "torch_dtype", "verl reads it nowhere: fsdp_config.model_dtype is what it takes"),
    used(
        _M + "enable_gradient_checkpointing",
        "policy.recompute",
        "With FSDP. With Megatron override_transformer_config decides.",
    ),
    slower(_M + "enable_activation_offload", "activations stay on the GPU: use policy.recompute", [False]),
    rows_of_verl(_M, "policy"),
    fixed(_M + "lora.fully_sharded_loras", "how adapters reach the engine: it is given the merged weights"),
    lacks(_M + "custom_chat_template", "a chat template in the configuration: put it into the tokenizer's files"),
    fixed(
        (f"{_M}override_config.max_position_embeddings {_M}override_config.model_config.max_position_embeddings"),
        "RoPE does not depend on it: `check` refuses sequences longer than config.json allows, where it is to be written",
    ),
    fixed(f"{_M}override_config.attn_implementation {_M}override_config._attn_implementation", KERNELS),
    lacks(
        (f"{_M}override_config.attention_dropout {_M}override_config.embd_pdrop {_M}override_config.resid_pdrop"),
        "dropout",
        [0, 0.0],
    ),
    lacks(
        f"{_M}override_config.** {_M}override_config",
        "changes of config.json: write them into the model's directory",
    ),
    mtp.rows_of_verl(_M),
    lacks(f"{_A}freeze_vision_tower {_A}freeze_non_attn_ffn", "part of the weights frozen", [False]),
    fixed("actor_rollout_ref.hybrid_engine", "the program says whether trainer and engine share the GPUs"),
    slower("actor_rollout_ref.nccl_timeout", "launch.timeout_minutes has its own default"),
    fixed("actor_rollout_ref.checkpoint_engine", "read by asynchronous training only"),
)
