"""AReaL's releases: defaults that were others then, and the keys by which a configuration shows its age.

Read in the history of areal/api/cli_args.py, from 71eb201b4 (2025-08-05) to cbff54d64 (2026-08-22).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_OPTIMIZER = {"lr": 2e-5, "weight_decay": 0.05, "beta2": 0.95, "eps": 1e-5}
"""Until 01caa1333 (2025-10-16)."""
_ROLES = ("actor", "critic", "model")
DEFAULTS: dict[str, dict[str, Any]] = {
    "2025-09": {
        "gconfig.max_tokens": 65536,
        **{f"{role}.optimizer.{name}": value for role in _ROLES for name, value in _OPTIMIZER.items()},
        **{f"{role}.gradient_checkpointing": True for role in _ROLES},
    },
    "2025-11": {"gconfig.max_tokens": 65536},
}
"""Month of a release -> what it had in the place of today's."""

_GONE = (
    "actor.group_adv_norm",
    "actor.group_reward_norm",
    "actor.context_length",
    "weight_update_mode",
    "server_only",
    "train_dataset.reward_fn",
)
_GONE_BELOW = re.compile(r"checkpointer\..*|.*\.(max_tokens_per_gpu|ulysses_sp_size|init_critic_from_actor|ds_auto_tp\..*)")


def release_of(settings: Mapping[str, Any]) -> str:
    """A month of DEFAULTS that the configuration cannot be younger than, or nothing where it may be today's.

    What went by 2025-10-16 says so of itself. A layout with dots went on 2025-11-13: four weeks of these had today's
    optimizer already, and it is taken.
    """
    if any(key in _GONE or _GONE_BELOW.fullmatch(key) for key in settings) or isinstance(
        settings.get("actor.adv_norm"), bool
    ):
        return "2025-09"
    dots = re.match(r"['\"]?(sglang|vllm)\.", str(settings.get("allocation_mode") or ""))
    return "2025-11" if dots else ""
