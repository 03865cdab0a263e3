"""Trinity-RFT's models: optimizers, layouts, memory and weights of policy, reference and critic -> ours.

Read in the wheels trinity-rft 0.1.0 to 0.6.0 (verl_config.py, synchronize_config; fsdp_workers.py; megatron_workers.py).
"""

from __future__ import annotations

from typing import Any

from fivefold.config.dialects import shared
from fivefold.config.dialects.source import Source, UnreadableError
from fivefold.config.dialects.trinity_algorithm import chosen, kind, kl, offline
from fivefold.config.dialects.trinity_data import lengths, response_tokens
from fivefold.config.dialects.trinity_keys import ACTOR, CRITIC, MODEL, REFERENCE, VERL
from fivefold.config.dialects.trinity_placement import gpus, is_megatron
from fivefold.config.dialects.trinity_releases import RELEASE
from fivefold.config.dialects.trinity_steps import period, periods
from fivefold.config.mcore_options import is_option, refusal
from fivefold.layout import ParallelLayout

_SIZES = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
_PARTS = {"parameters": "param", "gradients": "grad", "optimizer": "optimizer"}


def uses_critic(source: Source) -> bool:
    return not offline(source) and chosen(source, "advantage", "advantage_fn") == "ppo"


def uses_reference(source: Source) -> bool:
    return kind(source) == "dpo" or any(value for key, value in kl(source).items() if key.endswith("coef"))


def optimizer(source: Source) -> dict[str, Any]:
    """algorithm.optimizer, or verl's keys where those are set instead."""
    new, old = source.under("algorithm.optimizer."), source.under(ACTOR + "optim.")

    def of(key: str) -> Source:
        return old if old.has(key) and not new.has(key) else new

    style = new.text("warmup_style") or (old.text("warmup_style") if old.has("warmup_style") else None)
    style = style or of("lr_scheduler_type").text("lr_scheduler_type")
    lr, share = of("lr").number("lr") or 0.0, of("min_lr_ratio").number("min_lr_ratio") or 0.0
    found: dict[str, Any] = {key: of(key) for key in ("lr", "weight_decay")}
    found = {key: said.number(key) for key, said in found.items()}
    found["betas"] = [float(beta) for beta in of("betas").items("betas")]
    found |= _warmup(source, of("lr_warmup_steps"), of("lr_warmup_steps_ratio"))
    if is_megatron(source):
        found["betas"], found["clip_grad"] = [0.9, 0.999], of("clip_grad").number("clip_grad")
        floor = share * lr if source.text(RELEASE) in (None, "2026-02") else 0.0
        found |= _of_megatron(old, old.text("lr_decay_style") or style, found["warmup_steps"], floor, share * lr)
    else:
        keys = ("trainer.actor_grad_clip", ACTOR + "grad_clip", "trainer.grad_clip")
        found["clip_grad"] = next((number for key in keys if (number := source.number(key)) is not None), None)
        found |= _schedule(new, style, share * lr)
    return {f"policy.optimizer.{key}": value for key, value in found.items()}


def _warmup(source: Source, of_steps: Source, of_share: Source) -> dict[str, Any]:
    """verl's warm-up: steps of the run, the first with rate 0."""
    steps, share = of_steps.whole("lr_warmup_steps"), of_share.number("lr_warmup_steps_ratio")
    return {
        "schedule_per": "step" if period(source) == 1 else "update",
        "warmup_from": 0,
        "warmup_steps": steps if steps is not None and steps >= 0 else share or 0,
    }


def _schedule(said: Source, style: str | None, lowest: float) -> dict[str, Any]:
    if style not in (None, "constant", "cosine"):
        said.lacks("lr_scheduler_type", f"the schedule {style}")
    return {"schedule": "cosine", "min_lr": lowest} if style == "cosine" else {"schedule": "constant"}


def _of_megatron(said: Source, style: str | None, warmup: float, floor: float, lowest: float) -> dict[str, Any]:
    """What Megatron's scheduler reads besides, `floor` and `lowest` where the keys of `said` are left out."""
    found: dict[str, Any] = {"schedule": style if style in ("linear", "cosine") else "constant"}
    if style not in (None, "constant", "linear", "cosine"):
        said.lacks("lr_decay_style", f"the schedule {style}")
    begin, end = said.number("lr_warmup_init"), said.number("min_lr")
    if warmup:
        found["warmup_init_lr"] = (floor if begin is None else begin) or None
    if found["schedule"] != "constant":
        found |= {"min_lr": lowest if end is None else end, "decay_steps": said.whole("lr_decay_steps")}
    return found


def critic(source: Source) -> dict[str, Any]:
    if not uses_critic(source):
        return {}
    said = source.under(CRITIC)
    found: dict[str, Any] = {
        "critic.path": source.text("model.critic_model_path"),
        "critic.value_clip": said.number("cliprange_value"),
        **_critic_optimizer(source, said.under("optim.")),
        **_own_options(source, CRITIC, "critic"),
        **_offload(source, CRITIC, "critic"),
    }
    if source.text(RELEASE) == "2025-04":
        _own_updates(source)
    if (said.whole("ppo_epochs") or 1) != (source.whole(ACTOR + "ppo_epochs") or 1):
        said.lacks("ppo_epochs", "the critic learns in the policy's updates, so as often")
    longest = lengths(source)["data.max_prompt_tokens"] + response_tokens(source)
    if said.has("use_dynamic_bsz") and not said.flag("use_dynamic_bsz"):
        found["critic.tokens_per_micro_batch"] = (said.whole("ppo_micro_batch_size_per_gpu") or 1) * longest
    elif budget := said.whole("ppo_max_token_len_per_gpu"):
        found["critic.tokens_per_micro_batch"] = max(budget, longest)
    if (warmup := source.whole(VERL + "trainer.critic_warmup") or 0) > 1:
        if (warmup - 1) % period(source):
            source.lacks(VERL + "trainer.critic_warmup", "a critic that learns alone until between two syncs")
        found["critic.warmup_steps"] = periods(source, warmup - 1)
    return found


def _critic_optimizer(source: Source, said: Source) -> dict[str, Any]:
    lr = said.number("lr") or 0.0
    found: dict[str, Any] = {"lr": lr, "weight_decay": said.number("weight_decay")}
    found |= {"betas": [float(beta) for beta in said.items("betas")], **_warmup(source, said, said)}
    if is_megatron(source):
        found["betas"], found["clip_grad"] = [0.9, 0.999], said.number("clip_grad")
        floor = 0.01 * lr if source.text(RELEASE) is None else 0.0
        found |= _of_megatron(said, said.text("lr_decay_style"), found["warmup_steps"], floor, floor)
    else:
        of_critic = source.number(CRITIC + "grad_clip")
        found["clip_grad"] = source.number("trainer.grad_clip") if of_critic is None else of_critic
        # lr_scheduler_type took its place in 2026-02, when verl's workers ceased to read warmup_style.
        style = said.text("lr_scheduler_type" if source.text(RELEASE) in (None, "2026-02") else "warmup_style")
        found |= _schedule(said, style, (said.number("min_lr_ratio") or 0.0) * lr)
    return {f"critic.optimizer.{key}": value for key, value in found.items()}


def _own_updates(source: Source) -> None:
    """Before 2025-05-15 the critic's mini-batch counted samples where the policy's counted prompts (fsdp_workers.py:867)."""
    key, group = CRITIC + "ppo_mini_batch_size", source.whole("algorithm.repeat_times") or 1
    if source.count("buffer.batch_size") * group > (source.whole(key) or 0):
        source.lacks(key, "several updates of the critic next to one of the policy: until 2025-05 it counted samples")


def layout(source: Source) -> dict[str, Any]:
    """The policy's, on the trainer's GPUs, and with Megatron those of other models where they have their own."""
    world = gpus(source)
    if not is_megatron(source):
        cp = max(
            source.whole("trainer.ulysses_sequence_parallel_size") or 1,
            source.whole(ACTOR + "ulysses_sequence_parallel_size") or 1,
        )
        return {"policy.backend": str(shared.world_layout(world, cp=cp))}
    said = source.under(ACTOR + "megatron.")
    policy = shared.world_layout(world, **shared.parallel_sizes(said))
    found: dict[str, Any] = {
        "policy.backend": str(policy),
        "policy.sequence_parallel": said.flag("sequence_parallel"),
    }
    if (virtual := said.whole("virtual_pipeline_model_parallel_size") or 1) > 1:
        found["policy.megatron.pipeline.virtual_pipeline_model_parallel_size"] = virtual
    others = {"reference": (REFERENCE, uses_reference(source)), "critic": (CRITIC, uses_critic(source))}
    for name, (start, is_there) in others.items():
        if is_there:
            found |= _own_layout(source, start + "megatron.", name, policy)
    return found


def _own_layout(source: Source, start: str, name: str, policy: ParallelLayout) -> dict[str, Any]:
    """Another model's layout, where it says one that is not the policy's."""
    said = source.under(start)
    keys = [f"{size}_parallel_size" for size in _SIZES if said.has(f"{size}_parallel_size")]
    if not keys:
        return {}
    sizes = shared.parallel_sizes(said)
    if (own := shared.own_layout(policy, **sizes)) is None:
        try:
            shared.world_layout(policy.world_size, **sizes)
        except UnreadableError as error:
            said.lacks(keys[0], f"{error}: the model has the policy's layout", changes_result=False)
        return {}
    virtual = said.whole("virtual_pipeline_model_parallel_size") or 1
    pipeline = {f"{name}.megatron.pipeline.virtual_pipeline_model_parallel_size": virtual} if virtual > 1 else {}
    return {f"{name}.backend": own, **pipeline}


def memory(source: Source) -> dict[str, Any]:
    """The policy's numbers, recomputation, Megatron-Core's options and offload; the reference's where it has its own."""
    found = {**_options(source, ACTOR, "policy"), **_offload(source, ACTOR, "policy")}
    key = ACTOR + ("megatron.dtype" if is_megatron(source) else "fsdp_config.dtype")
    if (name := source.text(key)) is not None:
        if name not in shared.DTYPES:
            source.lacks(key, f"numbers of the type {name}: known here are {', '.join(shared.DTYPES)}")
        found["policy.dtype"] = None if shared.DTYPES.get(name) == "bfloat16" else shared.DTYPES.get(name)
    if uses_reference(source):
        own = _own_options(source, REFERENCE, "reference")
        found |= {key: value for key, value in own.items() if "recompute" not in key and ".ddp" not in key}
        _reference_offload(source)
    return found


def _options(source: Source, start: str, ours: str) -> dict[str, Any]:
    """Recomputation and Megatron-Core's options of a model."""
    if not is_megatron(source):
        key = (CRITIC + "model." if start == CRITIC else MODEL) + "enable_gradient_checkpointing"
        return {f"{ours}.recompute": "full"} if source.flag(key) else {}
    options = start + "megatron.override_transformer_config"
    return {
        **shared.recompute(source, options, ours),
        **shared.megatron_options(source, options, f"{ours}.megatron"),
        **_ddp_options(source, start + "megatron.override_ddp_config.", ours),
    }


def _ddp_options(source: Source, start: str, ours: str) -> dict[str, Any]:
    """Fields of Megatron-Core's DistributedDataParallelConfig."""
    found: dict[str, Any] = {}
    for key in source.keys(start):
        name, value = key.removeprefix(start), source.value(key)
        if value is None:
            continue
        if (reason := refusal("ddp", name)) is not None:
            source.fixed(key, reason.replace("{section}", ours))
        elif not is_option("ddp", name):
            source.lacks(key, f"Megatron-Core's ddp options have no {name}")
        else:
            found[f"{ours}.megatron.ddp.{name}"] = value
    return found


def _own_options(source: Source, start: str, ours: str) -> dict[str, Any]:
    """A model's options where they are not the policy's, which it has otherwise."""
    own = _options(source, start, ours)
    of_policy = {f"{ours}{key.removeprefix('policy')}": value for key, value in _options(source, ACTOR, "policy").items()}
    if own == of_policy:
        return {}
    found: dict[str, Any] = {f"{ours}.recompute": "none", **own}
    if not any(key.startswith(f"{ours}.megatron.") for key in own) and any(".megatron." in key for key in of_policy):
        # Said empty: left out it would be the policy's.
        found[f"{ours}.megatron.transformer"] = {}
    return found


def _offload(source: Source, start: str, ours: str) -> dict[str, Any]:
    if is_megatron(source):
        where = start + "megatron."
    else:
        where = start + ("model.fsdp_config." if start == CRITIC else "fsdp_config.")
    return {f"{ours}.offload.{part}": True for part, name in _PARTS.items() if source.flag(f"{where}{name}_offload")}


def _reference_offload(source: Source) -> None:
    """The reference's weights leave the GPU with the policy's: say so where only they were to."""
    where = "megatron." if is_megatron(source) else "fsdp_config."
    own, of_policy = (source.flag(f"{start}{where}param_offload") for start in (REFERENCE, ACTOR))
    if own and not of_policy:
        source.lacks(f"{REFERENCE}{where}param_offload", shared.REFERENCE_ALONE, changes_result=False)


def epochs(source: Source) -> dict[str, Any]:
    """Passes over each of the trainer's batches."""
    passes = source.whole(ACTOR + "ppo_epochs") or 1
    if passes > 1 and offline(source):
        source.lacks(ACTOR + "ppo_epochs", "several passes over a step's rows, where nothing is sampled: trainer.epochs")
    return {} if offline(source) else {"algorithm.ppo_epochs": passes}


def weights(source: Source) -> dict[str, Any]:
    """Weights in Megatron-Core's form, which are not those of the Hugging Face directory."""
    if not is_megatron(source):
        return {}
    directory, has_reference = shared.path(source, "model.model_path"), uses_reference(source)
    roles = {
        "model.path": (ACTOR, True),
        "reference.path": (REFERENCE, has_reference),
        "critic.path": (CRITIC, uses_critic(source)),
    }
    found: dict[str, Any] = {}
    for ours, (start, is_there) in roles.items():
        said = source.under(start + "megatron.")
        if not (is_there and said.flag("use_dist_checkpointing")):
            continue
        found[ours] = shared.path(said, "dist_checkpointing_path")
        if found[ours] is None:
            raise UnreadableError(f"{start}megatron.dist_checkpointing_path must name a checkpoint")
        other = source.text("model.critic_model_path")
        if start == CRITIC and other not in (None, directory):
            said.lacks(
                "use_dist_checkpointing",
                "weights in Megatron-Core's form of another model than model.model_path, whose config.json is taken",
            )
    if not found:
        return {}
    return {**({"reference.path": directory} if has_reference else {}), **found, "model.config": directory}
