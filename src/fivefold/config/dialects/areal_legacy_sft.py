"""AReaL's imitation before 2025-08: `training/main_sft.py`, whose model stands in `model`, and its cut in `allocation`.

What its code explains was read in AReaL c0ae64f70 (2025-11-13, under realhf/); a note has the place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold.config.dialects import areal_legacy, shared
from fivefold.config.dialects.areal_legacy import PLACES, RUN, loss_scale, optimizer_rows
from fivefold.config.dialects.areal_method import optimizer
from fivefold.config.dialects.areal_placement import layout
from fivefold.config.dialects.shared import SPREAD
from fivefold.config.dialects.source import Source
from fivefold.config.dialects.table import Section, fixed, lacks, to, used

TODAY: dict[str, Any] = {
    **{
        key: value for key, value in areal_legacy.TODAY.items() if key.startswith(("total_", "saver.", "stats_", "recover."))
    },
    **dict.fromkeys(("saver.freq_secs", "evaluator.freq_epochs", "evaluator.freq_secs", "model.dtype")),
    **dict.fromkeys(f"actor.megatron.{name}" for name in ("virtual_pipeline_parallel_size", "recompute_modules")),
    "train_dataset.batch_size": "${dataset.train_bs_n_seqs}",
    "train_dataset.max_length": "${dataset.max_seqlen}",
    "model.mb_spec.max_tokens_per_mb": "${allocation.mb_spec.max_tokens_per_mb}",
}
"""Key of today -> the older one that stands for it."""

DEFAULTS: dict[str, Any] = {
    **{name[2:-1]: None for name in TODAY.values() if name},
    **{
        key: value
        for key, value in areal_legacy.DEFAULTS.items()
        if key.startswith(("exp_ctrl.", "recover_mode", "wandb.", "shuffle_dataset"))
    },
    **{
        f"model.{key.removeprefix('actor.')}": value
        for key, value in areal_legacy.DEFAULTS.items()
        if key.startswith(("actor.optimizer.", "actor.bf16", "actor.gradient_checkpointing"))
    },
    "dataset.train_bs_n_seqs": 256,
    "dataset.max_seqlen": 1024,
}


def is_legacy_sft(settings: Mapping[str, Any]) -> bool:
    return "model.path" in settings and any(key.startswith("exp_ctrl.") for key in settings)


def precision(source: Source) -> dict[str, Any]:
    """float16 unless bf16 is set."""
    if source.flag("model.bf16"):
        return {"policy.dtype": "bfloat16"}
    return {"policy.dtype": "float16", **loss_scale(source, "model.optimizer.")}


def rows(source: Source) -> dict[str, Any]:
    """Prompt and answer are joined as they stand, and the answer is learned (prompt_answer_dataset.py:41)."""
    return {"data.apply_chat_template": False, "data.prompt_key": "prompt", "data.response_key": "answer"}


METHOD = (layout, precision, optimizer, rows)
SECTIONS = (
    Section.of(
        "Before 2025-08: imitation",
        used("allocation_mode", "policy.backend", "d32p1m4: m is tensor parallelism."),
        used("model.path", "model.path"),
        fixed("model.type._class model.type.is_critic", "config.json names the family"),
        used("model.bf16", "policy.dtype policy.megatron.optimizer", "float16 when left out, with a loss scale."),
        used("model.gradient_checkpointing", "policy.recompute"),
        used("allocation.mb_spec.max_tokens_per_mb", "policy.tokens_per_micro_batch"),
        fixed("allocation.** model.megatron.** model.backend model.sglang.** model.vllm.**", SPREAD, takes_any=True),
        lacks("model.init_from_scratch model.init_critic_from_actor", "weights that are drawn", [False]),
        *optimizer_rows("model"),
        to(
            "dataset.train_path",
            "data.train",
            shared.files,
            "jsonl with prompt and answer, which are joined without a template; the end of a row that is longer than "
            "dataset.max_seqlen is cut off there, here such a row is refused.",
        ),
        to("dataset.valid_path", "data.val", shared.files),
        used("dataset.max_seqlen", "data.max_prompt_tokens data.max_response_tokens"),
        used("dataset.train_bs_n_seqs", "data.prompts_per_step"),
        fixed("dataset.valid_bs_n_seqs", "how many are computed at once"),
        lacks("dataset.fill_to_max_length", "rows that are filled for tests", [False]),
        *PLACES,
        *RUN,
    ),
)
