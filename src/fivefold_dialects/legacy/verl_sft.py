"""Define the table of verl's older SFT trainer, `fsdp_sft_trainer` of 0.1 to 0.7, from the table of `sft_trainer`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fivefold_dialects.legacy.verl import VERSIONS as MONTHS
from fivefold_dialects.shared import TEXTS
from fivefold_dialects.source import Source
from fivefold_dialects.table import Table

PROGRAM = "fsdp_sft_trainer"
_DEFAULTS = {
    "data.use_dynamic_bsz": False,
    "optim.lr": 1e-5,
    "optim.betas": [0.9, 0.95],
    "optim.lr_warmup_steps_ratio": 0.1,
}
"""Defaults in sft_trainer.yaml of verl 0.1 to 0.7."""
_BEFORE_2025_06 = {"model.enable_gradient_checkpointing": False}
_VERSIONS: dict[str, dict[str, Any]] = {month: _BEFORE_2025_06 if month <= "2025-06" else {} for month in MONTHS}
"""Month of a release -> its defaults that differ from _DEFAULTS (sft_trainer.yaml of 0.1 to 0.4)."""
_LATER = re.compile(r"data\.max_token_len_per_gpu|optim\.lr_warmup_steps|engine\..*")
"""Keys that only the newer trainer's defaults have."""
_OWN = re.compile(
    r"model\.(partial_pretrain|strategy|fsdp_config\..*)|data\.(multiturn\..*|\w+_dict_keys)|ulysses_sequence_parallel_size"
    r"|use_remove_padding|optim\.(lr_scheduler|warmup_steps_ratio)"
)
"""Keys that only this trainer has."""


def is_meant(settings: Mapping[str, Any]) -> bool:
    """Return whether the settings are for this trainer, by its name, or by its keys if no other trainer is named."""
    program = str(settings.get("-m")).rpartition(".")[2]
    return program == PROGRAM or (not program.startswith("sft_trainer") and any(map(_OWN.fullmatch, settings)))


def table(newer: Table, optimizer: Callable[..., dict[str, Any]]) -> Table:
    """Return the older trainer's table; its schedule covers trainer.total_epochs even if the run ends earlier."""

    def own_optimizer(source: Source) -> dict[str, Any]:
        ours = optimizer(source, PROGRAM)
        if (source.whole("trainer.total_training_steps") or 0) > 0:
            ours["policy.optimizer.schedule_over"] = "data"
        source.note(TEXTS["mean_of_micro_batches"].format("fsdp_sft_trainer"))
        return ours

    kept = {key: value for key, value in newer.defaults.items() if not _LATER.fullmatch(key)}
    derived = tuple(own_optimizer if function is optimizer else function for function in newer.derived)
    return replace(newer, defaults=kept | _DEFAULTS, derived=derived, versions=_VERSIONS)
