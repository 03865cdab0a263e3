"""verl's SFT trainers: `verl.trainer.sft_trainer` with an engine, and the older `fsdp_sft_trainer`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fivefold.config.dialects import mtp, shared
from fivefold.config.dialects.adapters import VERL_DEFAULTS, of_verl, rows_of_verl
from fivefold.config.dialects.known import known
from fivefold.config.dialects.shared import DATA_PARALLEL, EVERY_CHECKPOINT, KERNELS, NO_CUT, SHOWN, SPREAD, WHOLE_STATE
from fivefold.config.dialects.source import Source
from fivefold.config.dialects.table import Section, Table, below, fixed, lacks, slower, to, used
from fivefold.config.dialects.verl_algorithm import MEAN_OF_MICRO_BATCHES
from fivefold.config.dialects.verl_defaults import VERSIONS
from fivefold.config.dialects.verl_older import FIRST_ROWS, rows
from fivefold.config.dialects.verl_rows_data import VALIDATION_ROWS
from fivefold.config.dialects.verl_rows_engines import OF_SFT, engine_rows, rows_of_moments, rows_of_state
from fivefold.config.dialects.verl_schedule import SCHEDULES, schedule

_COMMON: dict[str, Any] = {
    "data.train_batch_size": 256,
    "data.max_length": 1024,
    "data.prompt_key": "question",
    "data.response_key": "answer",
    "data.messages_key": "messages",
    "data.truncation": "error",
    "data.shuffle": True,
    "data.micro_batch_size_per_gpu": 4,
    "optim.weight_decay": 0.01,
    "optim.clip_grad": 1.0,
    "ulysses_sequence_parallel_size": 1,
    "model.enable_gradient_checkpointing": True,
    **{f"model.{name}": value for name, value in {**VERL_DEFAULTS, **mtp.DEFAULTS}.items()},
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.total_epochs": 4,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.resume_mode": "auto",
    "trainer.seed": 1,
    "trainer.logger": ["console", "wandb"],
    "trainer.project_name": "gsm8k-sft",
    "trainer.experiment_name": "test",
    "trainer.default_local_dir": "checkpoints/${trainer.project_name}/${trainer.experiment_name}",
}
_ENGINES = ("optim", "engine", "model_engine")
"""Keys that name an engine, the optimizer's first."""
OLDER = "fsdp_sft_trainer"
OLDER_DEFAULTS = _COMMON | {
    "data.use_dynamic_bsz": False,
    "optim.lr": 1e-5,
    "optim.betas": [0.9, 0.95],
    "optim.lr_warmup_steps_ratio": 0.1,
}
"""Of `fsdp_sft_trainer` (sft_trainer.yaml of verl 0.1 to 0.7)."""
_BEFORE_2025_06 = {"model.enable_gradient_checkpointing": False}
OLDER_VERSIONS: dict[str, dict[str, Any]] = {month: _BEFORE_2025_06 if month <= "2025-06" else {} for month in VERSIONS}
"""Month of a release -> defaults of `fsdp_sft_trainer` that were others then (sft_trainer.yaml of 0.1 to 0.4)."""
DEFAULTS = _COMMON | {
    "data.use_dynamic_bsz": True,
    "data.max_token_len_per_gpu": 8192,
    "optim.lr": 1e-3,
    "optim.betas": [0.9, 0.999],
    "optim.lr_warmup_steps_ratio": 0.0,
    "optim.lr_warmup_steps": -1,
    **{f"engine.{name}_parallel_size": 1 for name in ("tensor_model", "pipeline_model", "context", "expert_model")},
    "engine.ulysses_sequence_parallel_size": 1,
}
"""Of `sft_trainer` and `sft_trainer_ray` with FSDP, VeOmni, torchtitan or Megatron-Core (sft_trainer_engine.yaml and optim/
of verl 0.6 to 0.9.1)."""
AUTOMODEL_DEFAULTS = DEFAULTS | {"optim.lr": 1e-5, "optim.init_lr_ratio": 0.1, "optim.min_lr_ratio": 0.01}
_OF_OLDER = re.compile(
    r"model\.(partial_pretrain|strategy|fsdp_config\..*)|data\.(multiturn\..*|\w+_dict_keys)|ulysses_sequence_parallel_size"
    r"|use_remove_padding|optim\.(lr_scheduler|warmup_steps_ratio)"
)
"""Keys that only the older trainer has."""


def looks_like(settings: Mapping[str, Any]) -> bool:
    """Settings of an SFT trainer."""
    names = (str(settings.get("-m")), str(settings.get("--config-name")))
    is_named = any("sft_trainer" in name for name in names)
    return is_named or any(key.startswith("optim.") or key in ("model.partial_pretrain", "model.path") for key in settings)


def table_of(settings: Mapping[str, Any]) -> Table:
    """The table of the trainer and the engine that these settings choose."""
    program = str(settings.get("-m")).rpartition(".")[2]
    if program == OLDER or (not program.startswith("sft_trainer") and any(map(_OF_OLDER.fullmatch, settings))):
        return OLDER_TABLE
    return AUTOMODEL_TABLE if _optimizer_of(settings) == "automodel" else TABLE


def _optimizer_of(settings: Mapping[str, Any]) -> str:
    """The engine whose optimizer is configured: `optim=NAME`, or else that of the engine."""
    named = (str(settings.get(key, "")).strip("'\"") for key in _ENGINES)
    return next((name for name in named if name in SCHEDULES), "fsdp")


def is_megatron(source: Source) -> bool:
    return "megatron" in (source.text(key) for key in ("engine", "model_engine", "engine.strategy"))


def method(source: Source) -> dict[str, Any]:
    return {"algorithm.name": "sft", "data.prompts_per_step": source.count("data.train_batch_size")}


def model(source: Source) -> dict[str, Any]:
    key = "model.partial_pretrain" if source.has("model.partial_pretrain") else "model.path"
    return {"model.path": shared.path(source, key)}


def low_rank(source: Source) -> dict[str, Any]:
    return of_verl(source, "model.", "policy", is_megatron(source))


def further_tokens(source: Source) -> dict[str, Any]:
    return mtp.of_verl(source, "model.")


def layout(source: Source) -> dict[str, Any]:
    gpus = source.count("trainer.nnodes") * source.count("trainer.n_gpus_per_node")
    said = source.under("engine.")
    if not is_megatron(source):
        cp = max(said.whole("ulysses_sequence_parallel_size") or 1, source.whole("ulysses_sequence_parallel_size") or 1)
        return {"policy.backend": str(shared.world_layout(gpus, cp=cp))}
    sizes = {
        short: said.whole(f"{name}_parallel_size") or 1
        for short, name in (("tp", "tensor_model"), ("pp", "pipeline_model"), ("cp", "context"), ("ep", "expert_model"))
    }
    etp = said.whole("expert_tensor_parallel_size") or (sizes["tp"] if sizes["ep"] > 1 else 1)
    found: dict[str, Any] = {"policy.backend": str(shared.world_layout(gpus, etp=etp, **sizes))}
    if (virtual := said.whole("virtual_pipeline_model_parallel_size")) and virtual > 1:
        found["policy.megatron.pipeline.virtual_pipeline_model_parallel_size"] = virtual
    return found | shared.megatron_options(source, "engine.override_transformer_config", "policy.megatron")


def memory(source: Source) -> dict[str, Any]:
    """The type of numbers, recomputation and offload."""
    parts = {"parameters": "param", "gradients": "grad", "optimizer": "optimizer"}
    found: dict[str, Any] = {
        f"policy.offload.{part}": True for part, name in parts.items() if source.flag(f"engine.{name}_offload")
    }
    if (name := source.text("engine.dtype")) not in (None, "auto"):
        if name not in shared.DTYPES:
            source.lacks("engine.dtype", f"numbers of the type {name}: known here are {', '.join(shared.DTYPES)}")
        found["policy.dtype"] = shared.DTYPES.get(str(name))
    if _optimizer_of(source.settings) == "veomni" and source.has(key := "engine.mixed_precision") and not source.flag(key):
        source.lacks(key, "weights of bfloat16 without a copy in float32")
    if is_megatron(source):
        return found | shared.recompute(source, "engine.override_transformer_config", "policy")
    key = "engine.activation_checkpointing"
    key = key if source.text("engine") == "automodel" else "model.enable_gradient_checkpointing"
    return found | ({"policy.recompute": "full"} if source.flag(key) else {})


def micro_batch(source: Source) -> dict[str, Any]:
    longest = source.count("data.max_length")
    if source.flag("data.use_dynamic_bsz"):
        shared_by = source.whole(
            "engine.context_parallel_size" if is_megatron(source) else "engine.ulysses_sequence_parallel_size"
        )
        return {
            "policy.tokens_per_micro_batch": max(source.count("data.max_token_len_per_gpu") * (shared_by or 1), 2 * longest)
        }
    return {"policy.tokens_per_micro_batch": max((source.whole("data.micro_batch_size_per_gpu") or 1), 2) * longest}


def optimizer(source: Source, engine: str = "") -> dict[str, Any]:
    """`engine`: whose schedule it is; left out, that of the keys `optim` and `engine`."""
    said, engine = source.under("optim."), engine or _optimizer_of({key: source.text(key) for key in _ENGINES})
    found: dict[str, Any] = {name: said.number(name) for name in ("lr", "weight_decay", "clip_grad")}
    # verl hands no betas to Megatron's optimizer.
    found["betas"] = [0.9, 0.999] if engine == "megatron" else [float(beta) for beta in said.items("betas")]
    found["eps"] = said.number("eps") if said.has("eps") else None
    total = None if engine == OLDER else source.whole("trainer.total_training_steps")
    aware = engine == "megatron" and said.flag("use_precision_aware_optimizer")
    ours = {f"policy.optimizer.{name}": value for name, value in (found | schedule(said, engine, total)).items()}
    return ours | shared.moments(said, are_read=aware or engine == "automodel")


def older_optimizer(source: Source) -> dict[str, Any]:
    """Our keys of `fsdp_sft_trainer`'s optimizer, whose schedule goes over trainer.total_epochs wherever the run ends."""
    found = optimizer(source, OLDER)
    if (source.whole("trainer.total_training_steps") or 0) > 0:
        found["policy.optimizer.schedule_over"] = "data"
    source.note(MEAN_OF_MICRO_BATCHES.format("fsdp_sft_trainer"))
    return found


def columns(source: Source) -> dict[str, Any]:
    """The column, and the part of it that the text is in: `extra_info.question`."""
    return {
        f"data.{key}": ".".join([source.text(f"data.{key}") or "", *source.texts(f"data.{inner}")])
        for key, inner in (("prompt_key", "prompt_dict_keys"), ("response_key", "response_dict_keys"))
    }


def lengths(source: Source) -> dict[str, Any]:
    """One length of the whole there, of prompt and response here: each may be as long."""
    longest = source.count("data.max_length")
    if source.text("data.truncation") not in ("error", None):
        source.fixed(
            "data.truncation", "a response that is too long is cut off at its end; prompts that are too long are refused"
        )
    each = {"data.max_prompt_tokens": longest, "data.max_response_tokens": longest, "data.overlong_prompts": "refuse"}
    for key, ours in (("max_prompt_length", "max_prompt_tokens"), ("max_response_length", "max_response_tokens")):
        if source.has(f"data.{key}"):
            each[f"data.{ours}"] = source.count(f"data.{key}")
    return each


def intervals(source: Source) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, ours in (("save_freq", "save_every"), ("test_freq", "eval_every")):
        if source.text(f"trainer.{key}") == "after_each_epoch":
            source.lacks(f"trainer.{key}", "after each epoch: say a number of steps", changes_result=False)
        else:
            found[f"trainer.{ours}"] = shared.interval(source, f"trainer.{key}")
    if not source.items("data.val_files"):
        found["trainer.eval_every"] = 0
    return found | shared.validation_rows(source, "data.val_max_samples")


def run(source: Source) -> dict[str, Any]:
    mode = (source.text("trainer.resume_mode") or "auto").lower()
    resume = {"auto": "auto", "disable": "never"}.get(mode, source.text("trainer.resume_from_path"))
    keep = source.whole("trainer.max_ckpt_to_keep")
    return {"trainer.resume": resume, "trainer.keep": keep or EVERY_CHECKPOINT, "trainer.eval_before_train": False}


_READ = frozenset(
    below(
        "engine.",
        "ulysses_sequence_parallel_size tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size "
        "expert_model_parallel_size expert_tensor_parallel_size virtual_pipeline_model_parallel_size strategy",
    )
)
"""Of an engine's fields those that say which it is, and the layout."""
tracked = shared.tracked("trainer.logger", "trainer.project_name", "trainer.experiment_name")

TABLE = Table(
    "verl",
    (
        Section.of(
            "SFT",
            used("model.path model.partial_pretrain", "model.path"),
            to("data.train_files", "data.train", shared.files),
            to("data.val_files", "data.val", shared.files),
            used(
                "data.train_batch_size",
                "data.prompts_per_step",
                "One update a step, mean over the tokens of the whole batch.",
            ),
            used("data.max_length data.truncation", "data.max_prompt_tokens data.max_response_tokens"),
            used(
                "data.max_prompt_length data.max_response_length",
                "data.max_prompt_tokens data.max_response_tokens",
                "Until 2025-10, with data.pad_mode=left_right: a length of each.",
            ),
            to("data.prompt_key", "data.prompt_key", shared.text),
            to("data.response_key", "data.response_key", shared.text),
            to("data.messages_key", "data.messages_key", shared.text),
            fixed("data.multiturn.enable", "a row with a conversation is learned as one"),
            to("data.multiturn.messages_key", "data.messages_key", shared.text),
            to("data.shuffle", "data.shuffle", shared.flag),
            used("data.prompt_dict_keys data.response_dict_keys", "data.prompt_key data.response_key", "`column.part`."),
            used(
                ("data.use_dynamic_bsz data.max_token_len_per_gpu data.micro_batch_size_per_gpu"),
                "policy.tokens_per_micro_batch",
            ),
            fixed("data.micro_batch_size", NO_CUT),
            fixed(
                (
                    "data.pad_mode data.balance_dp_token data.use_shm data.num_workers "
                    "data.ignore_input_ids_mismatch data.return_raw_input_ids data.return_raw_chat data.return_full_prompt "
                    "data.return_multi_modal_inputs data.val_batch_size use_remove_padding "
                    "model.use_remove_padding"
                ),
                "sequences are always packed",
            ),
            used("data.train_max_samples", "data.train", FIRST_ROWS),
            used("data.val_max_samples", "eval.max_prompts", VALIDATION_ROWS),
            lacks(
                "data.custom_cls.path data.apply_chat_template_kwargs data.chat_template",
                "a data set of one's own code",
            ),
            fixed("data.custom_cls.name", "read with its path only"),
            used(
                (
                    "optim.lr optim.betas optim.weight_decay optim.clip_grad optim.lr_warmup_steps "
                    "optim.lr_warmup_steps_ratio optim.lr_scheduler_type optim.lr_scheduler optim.lr_decay_style "
                    "optim.min_lr optim.min_lr_ratio optim.lr_min optim.min_lr_factor optim.warmup_steps_ratio "
                    "optim.lr_warmup_init optim.lr_start optim.init_lr_ratio optim.decay_type optim.eps"
                ),
                "policy.optimizer",
                "A share of the run stays one; warmup_steps_ratio is the name of lr_warmup_steps_ratio until 2025-09. "
                "fsdp_sft_trainer has lr 1e-5, betas 0.9 and 0.95, a warm-up of a tenth of the run and a cosine; "
                "sft_trainer with Automodel lr 1e-5, from a tenth of it, and a cosine to a hundredth. VeOmni has a cosine, "
                "torchtitan a straight line.",
            ),
            lacks("optim.optimizer", "another optimizer than AdamW", ["AdamW", "adam", "FusedAdam"]),
            lacks("optim.num_cycles", "a cosine of other cycles", [0.5]),
            lacks("optim.lr_decay_ratio", "a decay that ends before the run", [1, 1.0]),
            used("optim", "policy.optimizer", "Whose optimizer it is, as `optim=veomni`; the engine's when left out."),
            fixed(
                (
                    "optim.optimizer_impl optim.master_weights optim.store_param_remainders "
                    "optim.total_training_steps optim.name"
                ),
                SPREAD,
            ),
            used(
                (
                    *below("trainer.", "nnodes n_gpus_per_node"),
                    *below([""], "engine model_engine ulysses_sequence_parallel_size"),
                    *sorted(_READ),
                ),
                "policy.backend",
                "fsdp becomes data-parallel Megatron-Core on as many GPUs.",
            ),
            used("engine.override_transformer_config.*", "policy.megatron.transformer policy.recompute", takes_any=True),
            used("model.enable_gradient_checkpointing engine.activation_checkpointing", "policy.recompute"),
            rows_of_moments("optim."),
            [row for row in rows_of_state("optim.") if row.key not in {each.key for each in rows_of_moments("optim.")}],
            lacks("optim.master_weight_dtype", "master weights of another type than float32", ["fp32", "float32"]),
            slower("optim.override_optimizer_config.*", "policy.megatron.optimizer has its own defaults", [False, 0, 1]),
            slower(
                ("engine.cp_size engine.pp_size engine.tp_size engine.ep_size"),
                DATA_PARALLEL,
                [1],
            ),
            fixed("engine.backend_config.**", KERNELS, takes_any=True),
            [row for row in engine_rows(OF_SFT) if row.key not in _READ],
            used("engine.dtype", "policy.dtype"),
            used("engine.param_offload engine.grad_offload engine.optimizer_offload", "policy.offload"),
            lacks("engine.use_dist_checkpointing", "weights in Megatron-Core's form: a Hugging Face directory", [False]),
            fixed("engine.dist_checkpointing_path", "read with use_dist_checkpointing only"),
            lacks("engine.router_replay.mode", "replaying the routing of experts", ["disabled"]),
            fixed("engine.router_replay.*", "read with router_replay.mode only"),
            lacks("engine.qat.enable", "training for a quantized model", [False]),
            fixed("engine.qat.*", "read with qat.enable only"),
            fixed("engine.distributed_strategy engine.data_parallel_mode model.strategy", SPREAD),
            rows_of_verl("model.", "policy"),
            fixed(
                (
                    "model.use_liger model.use_fused_kernels model.attn_implementation "
                    "model.override_config.attn_implementation"
                ),
                KERNELS,
            ),
            fixed(
                "model.fused_kernel_options.impl_backend model.tiled_mlp.enabled model.tiled_mlp.num_shards "
                "model.hf_config_path",
                KERNELS,
            ),
            to("model.tokenizer_path", "model.tokenizer", shared.path),
            lacks("model.custom_chat_template model.override_config", "changes of the model's files"),
            lacks("data.tools_key data.multiturn.tools_key", "tools", ["tools"]),
            lacks(
                "data.enable_thinking_key data.multiturn.enable_thinking_key data.enable_thinking_default",
                "an argument of the chat template",
                ["enable_thinking"],
            ),
            used("optim.warmup_style", "policy.optimizer.schedule"),
            used("optim.lr_decay_steps", "policy.optimizer.decay_steps"),
            lacks("optim.weight_decay_incr_style optim.wd_incr_style", "weight decay that changes", ["constant"]),
            fixed(
                "optim.lr_wsd_decay_style optim.lr_wsd_decay_steps optim.use_checkpoint_opt_param_scheduler "
                "optim.zero_indexed_step optim.muon_*",
                "read by other optimizers only",
            ),
            fixed("optim.override_optimizer_config", "empty"),
            lacks("model.enable_activation_offload", "activations stay on the GPU", [False], changes_result=False),
            mtp.rows_of_verl("model."),
            to("model.trust_remote_code", "model.trust_remote_code", shared.flag),
            fixed("model.fsdp_config.wrap_policy model.fsdp_config.wrap_policy.min_num_params", SPREAD),
            fixed("model.fsdp_config.model_dtype", "parameters in bfloat16 with a float32 copy in the optimizer"),
            slower(
                "model.fsdp_config.cpu_offload model.fsdp_config.offload_params",
                "FSDP's own offload: policy.offload moves state between the stages of a step",
                [False],
            ),
            fixed("model.external_lib model.use_shm model.name model", "how the model's files are read"),
            used("trainer.total_epochs trainer.total_training_steps", "trainer.epochs trainer.steps trainer.ends_with_data"),
            used("trainer.save_freq trainer.test_freq", "trainer.save_every trainer.eval_every"),
            used("trainer.resume_mode trainer.resume_from_path", "trainer.resume"),
            lacks("trainer.resume_path", "the older name of resume_from_path, which resumed weights only"),
            used("trainer.max_ckpt_to_keep", "trainer.keep"),
            to("trainer.default_local_dir", "trainer.run_dir", shared.path),
            used("trainer.project_name trainer.experiment_name", "trainer.run_dir tracking.project tracking.name"),
            to("trainer.logger", "trainer.loggers", shared.loggers),
            to("trainer.seed", "trainer.seed", shared.whole),
            to("trainer.device", "trainer.device", shared.choice({"cuda": "cuda", "npu": "auto", "cpu": "cpu"}, "a device")),
            fixed(
                (
                    "trainer.checkpoint.** checkpoint.** trainer.default_hdfs_dir trainer.balance_batch "
                    "trainer.nccl_timeout trainer.log_val_generations trainer.max_actor_ckpt_to_keep"
                ),
                WHOLE_STATE,
            ),
            fixed("profiler.** trainer.profile_* global_profiler.**", SHOWN),
            fixed(
                "hydra.** defaults --config-name --config-path -m **._target_ ray_kwargs.**",
                "how processes are started",
                takes_any=True,
            ),
        ),
    ),
    (
        method,
        model,
        low_rank,
        further_tokens,
        columns,
        lengths,
        rows,
        layout,
        memory,
        micro_batch,
        optimizer,
        shared.epochs_and_steps,
        intervals,
        run,
        tracked,
    ),
    DEFAULTS,
    known=known("verl"),
)
AUTOMODEL_TABLE = replace(TABLE, defaults=AUTOMODEL_DEFAULTS)
OLDER_TABLE = replace(
    TABLE,
    defaults=OLDER_DEFAULTS,
    derived=tuple(older_optimizer if function is optimizer else function for function in TABLE.derived),
    versions=OLDER_VERSIONS,
)
