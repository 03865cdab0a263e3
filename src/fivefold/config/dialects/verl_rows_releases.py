"""Keys that only some of verl's releases have, which ask for nothing at their defaults."""

from __future__ import annotations

from fivefold.config.dialects.table import Section, fixed, lacks

_A, _R, _M = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
_OLD_RECOMPUTATION = " ".join(
    f"{model}gradient_checkpointing_kwargs.activations_checkpoint_{name}"
    for model in (_M, "critic.model.")
    for name in ("method", "granularity", "num_layers")
)

SECTION = Section.of(
    "Of some releases only",
    fixed("*.profile.* **.profile.* trainer.*_nsight_options.**", "changes what is shown, not what is learned"),
    fixed("critic.kl_ctrl.type critic.kl_ctrl.kl_coef", "verl's critic has no KL and reads none of it"),
    lacks(f"{_A}megatron.num_layers_per_virtual_pipeline_stage", "layers of a virtual stage: give the number of stages"),
    lacks(_OLD_RECOMPUTATION, "recomputation by older names: give recompute_granularity, _method and _num_layers"),
    lacks(f"{_M}override_config.moe_config.freeze_moe_router critic.model.override_config.moe_config.freeze_moe_router",
          "a router that does not learn", [False]),
    lacks("actor_rollout_ref.ref.model", "a model of its own for the reference", [{}]),
    lacks("**.megatron.param_dtype", "weights of another type than bfloat16: model.dtype", ["bfloat16", "bf16"]),
    lacks(f"{_R}router_config_path", "a file for a router of requests: the engines here share them by length"),
    lacks(f"{_R}skip.enable", "responses that are read from files", [False]),
    fixed(f"{_R}skip.*", "read with skip.enable only"),
    lacks("data.continuous_token.enable", "tokens of turns that are joined without the template", [False]),
    fixed("data.continuous_token.model_family", "read with continuous_token.enable only"),
    lacks("trainer.checkpoint_callback_class", "a function of yours after each checkpoint"),
)  # fmt: skip
