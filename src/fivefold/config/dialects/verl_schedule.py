"""How the learning rate moves in each of verl's engines: the keys that it reads, and what they are when left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fivefold.config.dialects.source import Source


@dataclass(frozen=True)
class Schedule:
    """The keys of `optim` that one engine reads."""

    style: str
    """Key with the form of the decay."""
    usual: str
    """The form when the key is left out."""
    lowest: str = ""
    """Key with the rate at the end."""
    first: str = ""
    """Key with the rate that the warm-up starts from."""
    are_shares: bool = True
    """`lowest` and `first` are shares of the rate."""
    decay_steps: str = ""
    """Key with the step at which the decay ends."""
    warmup_steps: str = "lr_warmup_steps"
    """Key with the length of the warm-up; without it only the share is read."""
    warmup_shares: tuple[str, ...] = ("lr_warmup_steps_ratio",)
    """Names of the key with the warm-up as a share of the run."""
    warmup_from: int = 0
    """Numerator of the first rate of a warm-up."""


SCHEDULES = {
    "fsdp": Schedule("lr_scheduler_type", "constant", "min_lr_ratio"),
    "megatron": Schedule(
        "lr_decay_style", "constant", "min_lr", "lr_warmup_init", are_shares=False, decay_steps="lr_decay_steps"
    ),
    "veomni": Schedule("lr_scheduler_type", "cosine", "lr_min", "lr_start", are_shares=False, warmup_steps=""),
    "torchtitan": Schedule("decay_type", "linear", "min_lr_factor", warmup_from=1),
    "automodel": Schedule("lr_scheduler_type", "cosine", "min_lr_ratio", "init_lr_ratio"),
    "fsdp_sft_trainer": Schedule(
        "lr_scheduler", "cosine", warmup_steps="", warmup_shares=("lr_warmup_steps_ratio", "warmup_steps_ratio")
    ),
}
"""Engine, or the older SFT trainer -> its schedule: `_build_lr_scheduler` in verl 0.9.1's workers/engine, and
fsdp_sft_trainer.py of 0.1 to 0.7."""


def schedule(said: Source, engine: str) -> dict[str, Any]:
    """Our keys of an optimizer's schedule, from a section `optim`."""
    reads, rate = SCHEDULES[engine], said.number("lr") or 0.0
    style = _style(said, reads)
    factor = rate if reads.are_shares else 1.0
    found: dict[str, Any] = {"schedule": style, "warmup_from": 0}
    if reads.first:
        found["warmup_init_lr"] = factor * (said.number(reads.first) or 0.0) or None
    steps = said.whole(reads.decay_steps) if reads.decay_steps else None
    if style != "constant":
        found["min_lr"] = factor * (said.number(reads.lowest) or 0.0) if reads.lowest else 0.0
        found["decay_steps"] = steps or None
    found["warmup_steps"] = _warmup(said, reads, steps)
    if found["warmup_steps"]:
        found["warmup_from"] = reads.warmup_from
    return found


def _style(said: Source, reads: Schedule) -> str:
    key = "warmup_style" if reads.style == "lr_scheduler_type" and said.text("warmup_style") else reads.style
    style = said.text(key) or reads.usual
    if style not in ("constant", "linear", "cosine"):
        said.lacks(key, f"the schedule {style}")
        return "constant"
    return style


def _warmup(said: Source, reads: Schedule, decay_steps: int | None) -> float:
    """Steps, or a share of the run; Megatron-Core's share is one of `decay_steps` where that is set."""
    steps = said.whole(reads.warmup_steps) if reads.warmup_steps else None
    if steps is not None and steps >= 0 and (steps or not reads.decay_steps):
        return steps
    shares = reads.warmup_shares
    share = said.number(next((key for key in shares if said.has(key)), shares[0])) or 0.0
    return int(share * decay_steps) if decay_steps and share < 1 else share
