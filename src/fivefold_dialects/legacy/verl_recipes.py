"""Translate two recipes of verl's repository until 2025, PRIME and SPPO, which verl-recipe keeps for those releases.

Source: verl-recipe 48ea0a79. Of PRIME, a rloo over outcome and implicit process rewards, prime_core_algos.py has the
advantage and the losses, prime_dp_rm.py the rewards of tokens, prime_ray_trainer.py the filter and the length of the run,
prime_trainer.yaml the defaults.
"""

from __future__ import annotations

from typing import Any

from fivefold_dialects import shared
from fivefold_dialects.source import Source
from fivefold_dialects.table import fields

PROGRAM, SPPO = "recipe.prime.main_prime", "recipe.sppo.main_sppo"
_A, _R, _P = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "reward_model."
_MODEL = _P + "model."

FIELDS = fields("legacy/verl")
_OWN = (
    "data.filter_accuracy", "data.filter_truncate", _MODEL + "update", _MODEL + "loss_type", _P + "prime_norm",
    "algorithm.reward_dpo_coef",
)  # fmt: skip
"""Keys that only PRIME reads."""
REWARDS = {"recipe.entropy.main_entropy": "recipe/entropy/reward_score/__init__.py:_default_compute_score"}
"""Programs with their own reward function for all data -> its file and name in verl's repository."""
_REFUSED = {"whole": ", with which the recipe fails", "none": ", a reward model that does not learn"}


def is_prime(source: Source) -> bool:
    return source.text("-m") == PROGRAM


def prime(source: Source) -> dict[str, Any]:
    """Return our keys of the recipe's method, reward model and filter; empty for other programs."""
    if not is_prime(source):
        for key in _OWN:
            if source.has(key) and source.raw(key) not in (None, False, "False", "false"):
                source.lacks(key, f"a key of PRIME, which is a separate program: set -m={PROGRAM}")
        return {}
    if source.text("algorithm.adv_estimator") != "rloo":
        source.lacks("algorithm.adv_estimator", "another advantage than rloo, with which the recipe fails")
    ours = {**_advantage(source), **_filter(source), **_length(source)}
    if not ours["algorithm.process_reward.coef"]:
        return ours
    return ours | _process_reward(source) | _model(source, ours["data.prompts_per_step"])


def _advantage(source: Source) -> dict[str, Any]:
    """Return our keys of the advantage: leave-one-out for each reward, return per token, whitened
    (compute_rloo_advantage_return)."""
    coef = source.number("algorithm.reward_dpo_coef") if source.flag(_P + "enable") else 0.0
    outcome = source.number("algorithm.reward_gt_coef")
    if not outcome:
        source.lacks("algorithm.reward_gt_coef", "process rewards without outcome rewards")
    chosen = FIELDS["prime"](source)
    chosen |= {"process_reward.coef": coef, "process_reward.outcome_coef": outcome if coef else None}
    return {f"algorithm.{key}": value for key, value in chosen.items()}


def _process_reward(source: Source) -> dict[str, Any]:
    names: dict[str, dict[str | None, str]] = {
        _P + "prime_granularity": {"token": "token"},
        _P + "prime_norm": {"batch_norm": "step", "none": "none", None: "none"},
        _MODEL + "loss_type": {"ce": "ce", "dpo": "dpo"},
        _MODEL + "update": {"before": "before", "after": "after", "reverse": "after"},
    }
    chosen = {}
    for key, known in names.items():
        value = source.text(key)
        if value not in known:
            shown = ", ".join(name for name in known if name)
            source.lacks(key, f"{value or 'none'}{_REFUSED.get(value or 'none', '')}: known here are {shown}")
        chosen[key] = known.get(value)
    granularity, normalize, loss, update = chosen.values()
    if loss == "dpo" and source.text(_MODEL + "update") != "reverse":
        source.lacks(_MODEL + "loss_type", "dpo without update=reverse, with which the recipe fails")
    ours = FIELDS["process_reward"](source.under(_MODEL))
    ours |= {"granularity": granularity, "normalize": normalize, "loss": loss, "update": update}
    return {f"algorithm.process_reward.{key}": value for key, value in ours.items()}


def _filter(source: Source) -> dict[str, Any]:
    """Return our keys of the filter: it keeps 1 / oversample_factor of one round, passing prompts first
    (filter_and_downsample)."""
    factor, group = source.number("data.oversample_factor") or 1.0, source.count(_R + "n")
    drawn = int(source.count("data.train_batch_size") * factor)
    kept, rest = divmod(int(drawn * group // factor), group)
    if rest or not kept:
        source.lacks("data.oversample_factor", f"a part of a prompt's responses: {drawn} prompts x {group} / {factor:g}")
    updates, odd = divmod(kept, source.count(_A + "ppo_mini_batch_size"))
    if odd or not updates:
        source.lacks(_A + "ppo_mini_batch_size", f"updates of unequal size, or larger than the {kept} prompts of a step")
    ours: dict[str, Any] = {"data.prompts_per_step": kept, "algorithm.updates_per_step": max(updates, 1)}
    if kept == drawn:
        return ours | {"algorithm.dynamic_sampling": False}
    by_accuracy, by_length = source.flag("data.filter_accuracy"), source.flag("data.filter_truncate")
    if not by_accuracy and not by_length:
        source.lacks("data.oversample_factor", "prompts that are sampled and then dropped without a rule")
    ours |= {
        "algorithm.dynamic_sampling": True,
        "algorithm.sampling_rounds": 1,
        "algorithm.prompts_per_round": drawn,
        # Without a filter by accuracy, these bounds accept every reward.
        "algorithm.dynamic_sampling_low": source.number("data.accuracy_lower_bound") if by_accuracy else -1e9,
        "algorithm.dynamic_sampling_high": source.number("data.accuracy_upper_bound") if by_accuracy else None,
    }
    if by_length:
        # The recipe also counts a response that is one token shorter than the limit as truncated.
        ours["algorithm.dynamic_sampling_max_tokens"] = shared.response_tokens(source) - 2
    return ours


def _length(source: Source) -> dict[str, Any]:
    """Return our key of the number of steps: the recipe counts from 1 and stops one step before the total."""
    steps = source.whole("trainer.total_training_steps")
    return {"trainer.steps": max(1, steps - 1)} if steps and steps > 0 else {}


def _model(source: Source, prompts: int) -> dict[str, Any]:
    """Return our keys of the reward model's weights, optimizer and layout; the recipe always uses FSDP for it."""
    model, group = source.under(_MODEL), source.count(_R + "n")
    path, frozen = source.path(_MODEL + "path"), source.path(_MODEL + "ref_path")
    samples, mini = prompts * group, source.count(_P + "mini_batch_size")
    updates, rest = divmod(samples, mini) if mini else (0, 0)
    if rest or not updates or prompts % max(updates, 1):
        source.lacks(
            _P + "mini_batch_size",
            f"updates of {mini} responses: the {samples} responses of a step do not divide into such updates",
        )
        updates = 1
    if updates > 1 and source.text(_MODEL + "update") in ("after", "reverse"):
        model.lacks("update", "rewards of an update's responses by the model as it is after the previous updates")
    if source.flag(_P + "use_dynamic_bsz"):
        source.lacks(_P + "use_dynamic_bsz", "a loss that is not divided by the number of responses")
    longest = source.count("data.max_prompt_length") + shared.response_tokens(source)
    sequences = source.whole(_P + "micro_batch_size_per_gpu") or 1
    gpus = source.count("trainer.nnodes") * source.count("trainer.n_gpus_per_node")
    # Only lr_warmup_steps has an effect: the recipe never sets the number of steps that the share refers to.
    warmup = model.whole("optim.lr_warmup_steps")
    ours = {
        "reference_path": None if frozen == path else frozen,
        "backend": str(shared.world_layout(gpus, "fsdp", cp=source.whole(_P + "ulysses_sequence_parallel_size") or 1)),
        "updates_per_step": updates,
        "tokens_per_micro_batch": sequences * longest,
        "recompute": "full" if model.flag("enable_gradient_checkpointing") else "none",
        "optimizer.warmup_steps": max(0, warmup or 0),
    }
    return FIELDS["prm"](model) | {f"prm.{key}": value for key, value in ours.items()}


def sppo(source: Source, has_penalty: bool) -> dict[str, Any]:
    """Return our keys of SPPO: rewards minus the step's log-mean-exp (sppo_ray_trainer.py), squared loss (dp_actor.py)."""
    actor, eta = source.under(_A), source.number("algorithm.sppo_eta")
    if not eta or eta < 0:
        source.lacks("algorithm.sppo_eta", "rewards minus their mean over the step, or a negative eta")
        eta = 1.0
    if (actor.text("loss_agg_mode") or "token-mean") != "token-mean":
        actor.lacks("loss_agg_mode", "a mean other than token-mean, with which the recipe fails")
    ours = FIELDS["sppo"](actor) | {"baseline_temperature": 1 / eta}
    if has_penalty:
        ours["penalty_aggregate"] = "token-mean"
    return {f"algorithm.{key}": value for key, value in ours.items()}
