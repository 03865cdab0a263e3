"""Where sections of Trinity-RFT's configuration stand."""

from __future__ import annotations

VERL = "trainer.trainer_config."
"""verl's settings, of which Trinity overwrites some."""
ACTOR, REFERENCE, CRITIC = VERL + "actor_rollout_ref.actor.", VERL + "actor_rollout_ref.ref.", VERL + "critic."
MODEL = VERL + "actor_rollout_ref.model."
TASKSET, BUFFER = "buffer.explorer_input.taskset.", "buffer.trainer_input.experience_buffer."
ROLLOUT = "explorer.rollout_model."
EXPERTS = "buffer.trainer_input.auxiliary_buffers.sft_dataset."
