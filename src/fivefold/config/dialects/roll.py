"""ROLL: YAML with one section for each role, `python examples/start_rlvr_pipeline.py --config_path DIR --config_name FILE`.

Numbers that only ROLL's code explains were read in ROLL 8eb27cc2 (2026-08-18); a note has the place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold.config.dialects import shared
from fivefold.config.dialects.known import known
from fivefold.config.dialects.roll_data import batch, columns, lengths, mixture
from fivefold.config.dialects.roll_method import critic, loss, low_rank, method, optimizer
from fivefold.config.dialects.roll_placement import engine, layout, megatron
from fivefold.config.dialects.roll_roles import INFER, TRAIN, kind, role
from fivefold.config.dialects.roll_rows import SECTIONS
from fivefold.config.dialects.shared import EVERY_CHECKPOINT
from fivefold.config.dialects.source import Source
from fivefold.config.dialects.table import Table
from fivefold.config.dialects.translator import dialect

DEFAULTS: dict[str, Any] = {
    "seed": 42,
    "max_steps": 500,
    "save_steps": 50,
    "eval_steps": 10,
    "output_dir": "./output",
    "num_gpus_per_node": 8,
    "rollout_batch_size": 128,
    "prompt_length": 1024,
    "response_length": 1024,
    "ppo_epochs": 1,
    "max_grad_norm": 1.0,
    "lambd": 0.95,
    "gamma": 1.0,
    "pg_clip": 0.2,
    "pg_clip_low": 0.2,
    "pg_clip_high": 0.2,
    "use_pg_clip_range": False,
    "kl_penalty": "kl",
    "init_kl_coef": 0.2,
    "kl_horizon": 10000,
    "adv_estimator": "gae",
    "whiten_advantages": False,
    "use_kl_loss": False,
    "kl_loss_coef": 0.0,
    "entropy_loss_coef": 0.0,
    "loss_agg_mode": "seq-mean-token-mean",
    "dual_clip_loss": False,
    "importance_sampling": "token",
    "add_token_level_kl": False,
    "max_ckpt_to_keep": 0,
    "resume_from_checkpoint": False,
    "track_with": "tensorboard",
    "max_len_mask": False,
    "difficulty_mask": False,
    "difficulty_low_threshold": 0.0,
    "difficulty_high_threshold": 1.0,
    TRAIN + "pg_variant": "vanilla",
    TRAIN + "tis_lower_bound": 0.0,
    TRAIN + "tis_upper_bound": 1.0,
    TRAIN + "topr_positive_weight": 1.0,
    TRAIN + "topr_negative_weight": 1.0,
    TRAIN + "cispo_epsilon_low": 0.1,
    TRAIN + "cispo_epsilon_high": 0.1,
    TRAIN + "cispo_use_unified_mask": False,
    TRAIN + "kimi15_tau": 0.1,
    "num_return_sequences_in_group": 1,
    "sequence_length": 2048,
    "beta": 0.1,
    "label_smoothing": 0.0,
    "train_batch_size": 8,
    INFER + "generating_args.temperature": 0.95,
    INFER + "generating_args.top_p": 0.7,
    INFER + "generating_args.top_k": 50,
    **{f"{name}.model_args.lora_rank": 8 for name in ("actor_train", "sft_train")},
    INFER + "strategy_args.strategy_config.gpu_memory_utilization": 0.8,
}
for _role in ("actor_train", "critic", "sft_train"):
    DEFAULTS |= {
        f"{_role}.training_args.learning_rate": 5e-5,
        f"{_role}.training_args.weight_decay": 0.0,
        f"{_role}.training_args.warmup_steps": 0,
        f"{_role}.training_args.adam_beta1": 0.9,
        f"{_role}.training_args.adam_beta2": 0.999,
        f"{_role}.training_args.lr_scheduler_type": "linear",
        f"{_role}.training_args.per_device_train_batch_size": 8,
        f"{_role}.training_args.gradient_accumulation_steps": 1,
    }
VERSIONS: dict[str, dict[str, Any]] = {
    "2025-08": {
        "loss_agg_mode": "seq-mean-token-sum",
        **{f"{name}.training_args.warmup_ratio": 0.03 for name in ("actor_train", "critic", "sft_train")},
    }
}
"""Month of an older release -> defaults that were others then: until 2025-08-28, and until 2025-06-30."""
VERSIONS["2025-05"] = {**VERSIONS["2025-08"], "loss_agg_mode": "token-mean"}


def release_of(settings: Mapping[str, Any]) -> str:
    """2025-08 where rewards are normalized by the keys of until then, which no later release has."""
    return "2025-08" if not {"reward_norm", "reward_scale", "reward_shift"}.isdisjoint(settings) else ""


def run(source: Source) -> dict[str, Any]:
    resume, keep = source.text("resume_from_checkpoint") or "False", source.whole("max_ckpt_to_keep") or 0
    found: dict[str, Any] = {
        "trainer.run_dir": shared.path(source, "output_dir"),
        "trainer.seed": source.whole("seed"),
        "trainer.keep": keep or EVERY_CHECKPOINT,
        "trainer.resume": "never" if resume.lower() == "false" else resume,
        "trainer.save_every": source.whole("save_steps") or 0,
        "trainer.eval_every": (source.whole("eval_steps") or 0) if source.items("validation.data_args.file_name") else 0,
        "trainer.eval_before_train": False,
    }
    if kind(source) == "rlvr" or not source.number(role(source) + "training_args.num_train_epochs"):
        found["trainer.steps"] = source.whole("max_steps")
    else:
        found["trainer.epochs"] = source.whole(role(source) + "training_args.num_train_epochs")
    drawn = source.under("validation.generating_args.")
    if kind(source) == "rlvr" and drawn.number("temperature"):
        found |= {
            "eval.samples": drawn.whole("num_return_sequences"),
            "eval.temperature": drawn.number("temperature"),
            "eval.top_p": drawn.number("top_p"),
        }
        if (drawn.whole("top_k") or 0) > 0:
            drawn.lacks("top_k", "top-k in evaluation", changes_result=False)
    return found


def ahead(source: Source) -> dict[str, Any]:
    ratio = source.number("async_generation_ratio") or 0.0
    if ratio > 0 and not ratio.is_integer():
        source.lacks(
            "async_generation_ratio", "a part of a step that is sampled ahead: rollout.max_staleness counts whole ones"
        )
    return shared.ahead(int(ratio), "continue") if kind(source) == "rlvr" else {}


def model(source: Source) -> dict[str, Any]:
    own, reference = (source.text(f"{start}model_args.model_name_or_path") for start in (role(source), "reference."))
    found = {"model.path": own or shared.path(source, "pretrain")}
    return found | ({"reference.path": reference} if reference not in (None, found["model.path"]) else {})


tracked = shared.tracked(
    "track_with", "tracker_kwargs.project", "exp_name", group="tracker_kwargs.group", tags="tracker_kwargs.tags"
)


def router_replay(source: Source) -> dict[str, Any]:
    key = "actor_train.router_replay.mode"
    mode = source.text(key)
    if mode not in (None, "disabled", "R3"):
        source.lacks(key, f"the mode {mode} of router replay, which ROLL refuses too")
    return shared.replayed("R3" if mode == "R3" else None)


DERIVED = (
    *(ahead, model, low_rank, method, loss, batch, lengths, columns, mixture, layout, megatron, optimizer, critic, engine),
    *(router_replay, run, tracked),
)
TABLE = Table(
    "ROLL",
    SECTIONS,
    DERIVED,
    DEFAULTS,
    versions=VERSIONS,
    release_of=release_of,
    command="`fivefold train --from roll --config_path DIR --config_name FILE`, as `python "
    "examples/start_rlvr_pipeline.py`.",
    loses=(
        "environments and agents",
        "sandboxes behind an address, and reward workers of your own as classes",
    ),
    gains=(
        "device mappings that are parsed instead of evaluated",
        "keys of every section that are checked: ROLL drops unknown ones",
        "a token mean that counts response tokens only",
    ),
    known=known("roll"),
)
translate = dialect(TABLE)
