"""Multi-token prediction as verl asks for it -> `policy.mtp`.

What a note says of verl's code was read in verl b178a3cd (2026-01-29).
"""

from __future__ import annotations

from typing import Any

from fivefold.config.dialects.source import Source
from fivefold.config.dialects.table import Row, fixed, slower, used

DEFAULTS = {
    "mtp.enable": False,
    "mtp.enable_train": False,
    "mtp.detach_encoder": False,
    "mtp.mtp_loss_scaling_factor": 0.1,
}
"""verl's own, within the section of a model."""


def of_verl(source: Source, start: str) -> dict[str, Any]:
    """What trains the layers of multi-token prediction of the model whose section is `start`; nothing where they stay."""
    said = source.under(f"{start}mtp.")
    if not (said.flag("enable") and said.flag("enable_train")):
        return {}
    return {
        "policy.mtp.train": True,
        "policy.mtp.loss_scaling_factor": said.number("mtp_loss_scaling_factor"),
        "policy.mtp.detach_encoder": said.flag("detach_encoder"),
    }


def rows_of_verl(start: str) -> list[Row]:
    """What becomes of the keys of multi-token prediction."""
    return [
        *used(
            [f"{start}mtp.enable", f"{start}mtp.enable_train"],
            "policy.mtp.train",
            "With enable alone the layers stay as they are, and an export has them, as it always has here.",
        ),
        *used(
            f"{start}mtp.mtp_loss_scaling_factor",
            "policy.mtp.loss_scaling_factor",
            "The mean is over the update's response tokens; verl's is that of each micro-batch and rank, and in RL counts "
            "one token of padding behind a response.",
        ),
        *used(
            f"{start}mtp.detach_encoder",
            "policy.mtp.detach_encoder",
            "Hidden states and embeddings; the output layer learns all the same, and all gradients are clipped together. "
            "With recompute_granularity: full verl's layers themselves learn nothing then, for no input of them wants a "
            "gradient (mtp_patch.py); here they do.",
        ),
        *slower(f"{start}mtp.enable_rollout", "speculative decoding: the engine draws each token from the policy", [False]),
        *fixed(f"{start}mtp.**", "read with mtp.enable_rollout only"),
    ]
