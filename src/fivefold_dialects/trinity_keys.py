"""Name the sections of Trinity-RFT's configuration, and read the kind of a run."""

from __future__ import annotations

from fivefold_dialects.source import Source

VERL = "trainer.trainer_config."
"""Section of verl's settings; Trinity overwrites some of them."""
ACTOR, REFERENCE, CRITIC = VERL + "actor_rollout_ref.actor.", VERL + "actor_rollout_ref.ref.", VERL + "critic."
TASKSET, BUFFER = "buffer.explorer_input.taskset.", "buffer.trainer_input.experience_buffer."
ROLLOUT = "explorer.rollout_model."
EXPERTS = "buffer.trainer_input.auxiliary_buffers.sft_dataset."
EVALUATED = "buffer.explorer_input.eval_tasksets"
HALVES = "explore and train"
"""The mode of two files that are one run."""


def kind(source: Source) -> str:
    return source.text("algorithm.algorithm_type") or "ppo"


def samples(source: Source) -> bool:
    return kind(source) not in ("dpo", "sft")


def mixes(source: Source) -> bool:
    """Return whether the run also learns from an expert's responses, next to those of the policy."""
    return kind(source) in ("mix", "mix_chord")


def is_megatron(source: Source) -> bool:
    return (source.text(ACTOR + "strategy") or source.text("trainer.trainer_strategy")) == "megatron"


def period(source: Source) -> int:
    """Return the number of the trainer's steps in one of our steps: those between two syncs, with the same weights."""
    return max(1, source.whole("synchronizer.sync_interval") or 1) if samples(source) else 1


def periods(source: Source, steps: int | None) -> int:
    """Return the number of our steps for `steps` steps of the trainer, rounded up."""
    return -(-max(0, steps or 0) // period(source))
