"""What verl trains: batches, optimizers, the critic, weights that are in Megatron-Core's form."""

from __future__ import annotations

from typing import Any

from fivefold.config.dialects import mtp, shared, verl_async
from fivefold.config.dialects.adapters import of_verl
from fivefold.config.dialects.source import Source, UnreadableError
from fivefold.config.dialects.verl_algorithm import estimator, kl_in_reward
from fivefold.config.dialects.verl_layout import dtypes, engine_of, is_megatron, longest, offloaded, sections, virtual_stages
from fivefold.config.dialects.verl_schedule import schedule

TOTAL_STEPS = "trainer.total_training_steps"
_A, _M, _C, _REF = "actor_rollout_ref.actor.", "actor_rollout_ref.model.", "critic.", "actor_rollout_ref.ref."


def batch(source: Source) -> dict[str, Any]:
    if verl_async.is_fully_async(source):
        return verl_async.batch(source)
    key = batch_key(source)
    prompts, mini = source.count(key), source.count(_A + "ppo_mini_batch_size")
    if not 0 < mini <= prompts:
        raise UnreadableError(f"{_A}ppo_mini_batch_size = {mini} must be in 1 to {key} = {prompts}")
    updates, rest = divmod(prompts, mini)
    if rest:
        source.lacks(_A + "ppo_mini_batch_size", f"updates of unequal size: {key} = {prompts} is no multiple of it")
    found = {"data.prompts_per_step": prompts, "algorithm.updates_per_step": updates}
    return verl_async.separate_batch(source, found) if verl_async.is_separate(source) else found


def batch_key(source: Source) -> str:
    """The key with the prompts of a step: without dynamic sampling verl until 0.8 trains on all that its loader draws."""
    drawn, usual = "data.gen_batch_size", "data.train_batch_size"
    if source.flag("algorithm.filter_groups.enable") or verl_async.is_v1(source) or not source.has(drawn):
        return usual
    if source.whole(drawn) in (None, source.whole(usual)):
        return usual
    source.note(
        f"{drawn} = {source.whole(drawn)} is the batch of a step, as in verl until 0.8; with trainer.use_v1=True, which 0.9 "
        f"has, it is {usual}"
    )
    return drawn


def optimizer(source: Source, role: str = _A, ours: str = "policy.optimizer") -> dict[str, Any]:
    said = source.under(role + "optim.")
    uses_megatron = is_megatron(source)
    found: dict[str, Any] = {"lr": said.number("lr"), "weight_decay": said.number("weight_decay")}
    if not uses_megatron:
        # verl does not hand betas to Megatron's optimizer, whose own are 0.9 and 0.999.
        found["betas"] = [float(beta) for beta in said.items("betas")]
        found["eps"] = said.number("eps")
        # The newer engine reads optim.clip_grad, the older workers grad_clip: whichever is set.
        set_there = said.has("clip_grad") and not source.has(role + "grad_clip")
        found["clip_grad"] = said.number("clip_grad") if set_there else source.number(role + "grad_clip")
    else:
        found |= {"betas": [0.9, 0.999], "clip_grad": said.number("clip_grad")}
    found |= {"schedule_per": "step", **schedule(said, engine_of(source), source.whole(TOTAL_STEPS))}
    if verl_async.is_fully_async(source) or verl_async.is_separate(source):
        found |= verl_async.schedule(source, found["schedule"], found["warmup_steps"])
    return {f"{ours}.{key}": value for key, value in found.items()}


def megatron_checkpoints(source: Source) -> dict[str, Any]:
    """Weights of policy and reference that are not those of the Hugging Face directory."""
    if not is_megatron(source):
        return {}
    weights: dict[str, Any] = {}
    directory = shared.path(source, _M + "path")
    has_reference = uses_reference(source)
    roles = [
        ("model.path", _A, _M + "path", True),
        ("reference.path", _REF, _M + "path", has_reference),
        ("critic.path", _C, _C + "model.path", estimator(source) == "gae"),
        ("reward.model.path", "reward_model.", "reward_model.model.path", source.flag("reward_model.enable")),
    ]
    for ours, role, describing, is_there in roles:
        if not (source.flag(f"{role}megatron.use_dist_checkpointing") and is_there):
            continue
        weights[ours] = source.text(f"{role}megatron.dist_checkpointing_path")
        if shared.path(source, describing) != directory:
            source.lacks(
                f"{role}megatron.use_dist_checkpointing",
                f"weights in Megatron-Core's form of another model than {_M}path, whose config.json is model.config here",
            )
    if not weights:
        return {}
    if has_reference and "reference.path" not in weights:
        weights["reference.path"] = directory
    return {**weights, "model.config": directory}


def low_rank(source: Source) -> dict[str, Any]:
    return of_verl(source, _M, "policy", is_megatron(source))


def further_tokens(source: Source) -> dict[str, Any]:
    return mtp.of_verl(source, _M)


def critic(source: Source) -> dict[str, Any]:
    if estimator(source) != "gae":
        return {}
    said = source.under(_C)
    found: dict[str, Any] = {
        "critic.path": shared.path(source, "critic.model.path"),
        "critic.value_clip": said.number("cliprange_value"),
    }
    found |= optimizer(source, _C, "critic.optimizer")
    found |= of_verl(source, "critic.model.", "critic", is_megatron(source))
    for key, of_actor in (("ppo_mini_batch_size", _A), ("ppo_epochs", _A), ("loss_agg_mode", _A)):
        if said.raw(key) is not None and str(said.raw(key)) != str(source.raw(of_actor + key)):
            said.lacks(key, "the critic learns in the policy's updates")
    if (warmup := source.whole("trainer.critic_warmup") or 0) > 1:
        found["critic.warmup_steps"] = warmup - 1
    if said.flag("use_dynamic_bsz") and (budget := said.whole("ppo_max_token_len_per_gpu")):
        found["critic.tokens_per_micro_batch"] = max(budget, longest(source))
    elif sequences := said.whole("ppo_micro_batch_size_per_gpu"):
        found["critic.tokens_per_micro_batch"] = sequences * longest(source)
    if not is_megatron(source):
        found["critic.recompute"] = "full" if said.flag("model.enable_gradient_checkpointing") else "none"
    return found | {f"critic.offload.{part}": True for part in offloaded(source, _C)} | _own_options(source, _C, "critic")


def reference(source: Source) -> dict[str, Any]:
    """What is the reference's own: Megatron-Core's options. Its weights leave the GPU with the policy's."""
    if not uses_reference(source):
        return {}
    if "parameters" in offloaded(source, _REF) and "parameters" not in offloaded(source, _A):
        key = f"{sections(source, _REF)[0]}param_offload"
        source.lacks(key, shared.REFERENCE_ALONE, changes_result=False)
    own = _own_options(source, _REF, "reference")
    return {key: value for key, value in own.items() if "recompute" not in key}


def uses_reference(source: Source) -> bool:
    return source.flag(_A + "use_kl_loss") or kl_in_reward(source)


def _own_options(source: Source, role: str, ours: str) -> dict[str, Any]:
    """What a model's own section says of numbers and of Megatron-Core, which are the policy's where it says nothing."""
    policy = dtypes(source)["policy.dtype"] or "bfloat16"
    for key in (f"{section}dtype" for section in sections(source, role)):
        if source.has(key) and (name := source.text(key)) is not None and shared.DTYPES.get(name) != policy:
            source.lacks(key, f"numbers of the type {name}, where the policy's are {policy}")
    start = f"{role}megatron.override_transformer_config"
    if not is_megatron(source) or not source.keys(f"{start}."):
        return {}
    found = shared.megatron_options(source, start, f"{ours}.megatron")
    return found | shared.recompute(source, start, ours) | (virtual_stages(source, ours) if found else {})
