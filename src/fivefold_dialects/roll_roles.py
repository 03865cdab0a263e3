"""ROLL's roles: what trains, what samples, and on which GPUs."""

from __future__ import annotations

from fivefold_dialects.device_mapping import parse_devices
from fivefold_dialects.source import Source, UnreadableError

TRAIN, INFER = "actor_train.", "actor_infer."


def kind(source: Source) -> str:
    """rlvr, sft or dpo: by the sections that are there."""
    if source.keys("sft_train."):
        return "sft"
    return "dpo" if source.has("chosen_key") else "rlvr"


def role(source: Source) -> str:
    return "sft_train." if kind(source) == "sft" else TRAIN


def devices(source: Source, key: str) -> list[int]:
    """The GPUs that a mapping names."""
    try:
        return parse_devices(source.raw(key))
    except ValueError as error:
        raise UnreadableError(f"{key} {error}") from None


def uses_critic(source: Source) -> bool:
    return source.text("adv_estimator") in (None, "gae")


def samples_a_group(source: Source) -> int:
    key = INFER + "generating_args.num_return_sequences"
    return source.count(key if source.has(key) else "num_return_sequences_in_group")
