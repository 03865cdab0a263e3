"""Trinity-RFT's method: the choices of an algorithm type, its loss and its KL."""

from __future__ import annotations

import math
from typing import Any

from fivefold.config.dialects import shared
from fivefold.config.dialects.source import Source
from fivefold.config.dialects.trinity_keys import ACTOR, VERL
from fivefold.config.dialects.trinity_releases import FIRST, RELEASE

ALGORITHMS: dict[str, dict[str, Any]] = {
    "ppo": {"advantage": "ppo", "loss": "ppo", "kl": "k2", "repeat": 1},
    "grpo": {"advantage": "grpo", "loss": "ppo", "kl": "k2", "repeat": 2},
    "grpo_verl": {"advantage": "grpo", "loss": "ppo", "kl": "k2", "repeat": 2},
    "rloo": {"advantage": "rloo", "loss": "ppo", "kl": "k2", "repeat": 2},
    "reinforceplusplus": {"advantage": "reinforceplusplus", "loss": "ppo", "kl": "k2", "repeat": 2},
    "cispo": {"advantage": "grpo", "loss": "cispo", "kl": "k2", "repeat": 2},
    "gspo": {"advantage": "grpo", "loss": "gspo", "kl": "k2", "repeat": 2},
    "sapo": {"advantage": "grpo", "loss": "sapo", "kl": "k2", "repeat": 2},
    "opmd": {"advantage": "opmd", "loss": "opmd", "kl": "k2", "repeat": 2},
    "asymre": {"advantage": "asymre", "loss": "opmd", "repeat": 2, "entropy": "none"},
    "topr": {"advantage": "reinforce", "loss": "topr", "kl": "k2", "repeat": 2},
    "sppo": {"advantage": "opmd", "loss": "sppo", "repeat": 2, "entropy": "none"},
    "rec": {"advantage": "rec", "loss": "rec", "kl": "k2", "repeat": 2},
    "mix": {"advantage": "grpo", "loss": "mix", "kl": "k2", "repeat": 8},
    "mix_chord": {"advantage": "grpo", "loss": "mix_chord", "kl": "k2", "repeat": 8},
    "dpo": {"loss": "dpo"},
    "sft": {"loss": "sft"},
}
"""algorithm_type -> its choices when they are left out (algorithm/algorithm.py); without kl there is none."""
ADVANTAGES: dict[str, dict[str, Any]] = {
    "ppo": shared.PPO,
    "grpo": {"name": "grpo", "advantage": "group", "normalize": "group"},
    "rloo": shared.RLOO,
    "reinforceplusplus": shared.REINFORCE_PLUS_PLUS,
}
for _name, _ours in (("opmd", "opmd"), ("asymre", "asymre"), ("rec", "rec")):
    ADVANTAGES[_name] = {"name": _ours, "advantage": "group", "normalize": "none"}
ADVANTAGES["reinforce"] = {"name": "topr", "advantage": "reward", "normalize": "none"}
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "ppo": ("gamma", "lam"),
    "grpo": ("epsilon", "std_cal_level"),
    "reinforceplusplus": ("gamma",),
    "opmd": ("opmd_baseline", "tau"),
    "asymre": ("baseline_shift",),
    "rec": ("epsilon", "std_normalize", "drop"),
}
"""Of advantages, as far as they are read; epsilon is 1e-6 there and here."""
LOSSES: dict[str, dict[str, Any]] = {
    "opmd": {"surrogate": "opmd"},
    "topr": {"surrogate": "topr"},
    "sppo": {"surrogate": "rec", "clip_mode": "two_sided", "token_weight": "none"},
    "rec": {"surrogate": "rec"},
    "ppo": {"surrogate": "ppo_clip"},
    "mix": {"surrogate": "ppo_clip"},
    "mix_chord": {"surrogate": "ppo_clip"},
    "cispo": {"surrogate": "cispo"},
    "sapo": {"surrogate": "sapo"},
    "gspo": {"surrogate": "ppo_clip", "importance_sampling_level": "sequence-token"},
}
_MIXED = (
    "clip_range", "clip_range_low", "clip_range_high", "sft_loss_agg_mode", "grpo_loss_agg_mode",
    "use_token_level_loss_in_sft", "use_dynamic_bsz", "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "ngpus_trainer",
    "train_batch_size_usual", "train_batch_size_expert",
)  # fmt: skip
LOSS_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "opmd": ("tau",),
    "topr": (),
    "sppo": ("epsilon",),
    "rec": (
        "epsilon_low", "epsilon_high", "epsilon_low_prime", "epsilon_high_prime", "clip_mode", "weight", "regularizer",
        "regularizer_coef", "temp",
    ),
    "ppo": ("clip_range", "clip_range_low", "clip_range_high", "clip_ratio_c", "loss_agg_mode"),
    "mix": ("mu", *_MIXED),
    "mix_chord": (
        "mu_warmup_steps", "mu_decay_steps", "mu_peak", "mu_valley", "enable_phi_function", *_MIXED,
    ),
    "gspo": ("clip_range", "clip_range_low", "clip_range_high", "loss_agg_mode"),
    "cispo": ("clip_low", "clip_high", "loss_agg_mode"),
    "sapo": ("tau_pos", "tau_neg", "loss_agg_mode"),
}  # fmt: skip
_CLIP_MODES = {
    "none": "none", "one-side": "one_sided", "gspo-one-side": "one_sided", "two-side": "two_sided", "ring": "ring",
}  # fmt: skip


def kind(source: Source) -> str:
    return source.text("algorithm.algorithm_type") or "ppo"


def offline(source: Source) -> bool:
    return kind(source) in ("dpo", "sft")


def mixes(source: Source) -> bool:
    """It learns from an expert's responses next to those of the policy."""
    return kind(source) in ("mix", "mix_chord")


def expert_batch(source: Source) -> int:
    """The expert's share of a trainer's step (mix_sample_strategy.py)."""
    said = source.under("algorithm.sample_strategy_args.")
    share = said.number("expert_data_ratio") if said.has("expert_data_ratio") else 0.5
    return math.ceil((share or 0.0) * (source.whole("buffer.train_batch_size") or 0))


def chosen(source: Source, axis: str, key: str, default: str = "none") -> str:
    """A choice of the algorithm: its own key, or what the type has."""
    said = source.text(f"algorithm.{key}")
    if said is None and axis == "advantage" and source.text(RELEASE) == "2025-04" and kind(source) in ("ppo", "grpo"):
        said = _by_verl(source)
    return said or str(ALGORITHMS.get(kind(source), {}).get(axis, default))


_OF_VERL = {"gae": "ppo", "grpo": "grpo", "rloo": "rloo", "reinforce_plus_plus": "reinforceplusplus"}
"""adv_estimator -> advantage_fn."""


def _by_verl(source: Source) -> str:
    """The advantage by verl's key, while the type ppo told of the loss alone (ray_trainer.py, compute_advantage)."""
    key = VERL + "algorithm.adv_estimator"
    estimator = source.text(key) or "gae"
    if estimator not in _OF_VERL or (kind(source) == "grpo" and source.has(key) and estimator != "grpo"):
        source.lacks(key, f"the advantage {estimator} with the algorithm {kind(source)}")
    return "grpo" if kind(source) == "grpo" else _OF_VERL.get(estimator, "ppo")


_EARLY = {
    "use_kl_loss": ("use_kl_loss", False),
    "kl_loss_coef": ("kl_loss_coef", 0.001),
    "entropy_coef": ("entropy_coeff", 0.001),
    "clip_ratio": ("clip_ratio", 0.2),
}
"""trainer.actor_* of before 2025-06 -> verl's key that it came over, and what that was when left out (verl_config.py)."""


def early(source: Source) -> dict[str, Any]:
    """The numbers of the loss where keys of before 2025-06 say them; nothing where none does."""
    if source.text(RELEASE) not in FIRST and not any(source.has(f"trainer.actor_{name}") for name in _EARLY):
        return {}
    found: dict[str, Any] = {}
    for name, (of_verl, usual) in _EARLY.items():
        places = [key for key in (f"trainer.actor_{name}", ACTOR + of_verl) if source.value(key) is not None]
        read = source.flag if usual is False else source.number
        found[name] = read(places[0]) if places else usual
    return found


def algorithm(source: Source) -> dict[str, Any]:
    name = kind(source)
    if name not in ALGORITHMS:
        source.lacks("algorithm.algorithm_type", f"the algorithm {name}: known here are {', '.join(ALGORITHMS)}")
        return {}
    if name == "sft":
        return {"algorithm.name": "sft"}
    if name == "dpo":
        said = source.under("algorithm.policy_loss_fn_args.")
        beta = said.number("beta") if said.has("beta") else source.number("algorithm.kl_loss_fn_args.kl_coef")
        beta = early(source).get("kl_loss_coef", beta)
        return {
            "algorithm.name": "dpo",
            "algorithm.beta": 0.1 if beta is None else beta,
            "algorithm.label_smoothing": said.number("label_smoothing"),
        }
    strategy = source.text("algorithm.sample_strategy")
    if strategy not in (None, "mix" if mixes(source) else "default", "warmup"):
        source.lacks("algorithm.sample_strategy", f"another choice of samples: {strategy}")
    advantage = chosen(source, "advantage", "advantage_fn")
    if advantage not in ADVANTAGES:
        source.lacks("algorithm.advantage_fn", f"the advantage {advantage}: known here are {', '.join(ADVANTAGES)}")
        return {}
    found = {"whiten": False, "credit": "response", **ADVANTAGES[advantage]}
    said = source.under("algorithm.advantage_fn_args.")
    for key in source.keys("algorithm.advantage_fn_args."):
        if key.rpartition(".")[2] not in ARGUMENTS.get(advantage, ()) and source.value(key) not in (None, False):
            source.lacks(key, f"an argument of the advantage {advantage}")
    if advantage == "grpo" and said.text("std_cal_level") == "batch":
        found["normalize"] = "batch"
    if advantage == "asymre":
        found["baseline_shift"] = said.number("baseline_shift") if said.has("baseline_shift") else -0.1
    old = source.under(ACTOR) if early(source) and not source.keys("algorithm.advantage_fn_args.") else said
    if advantage == "opmd" and old.text("opmd_baseline") == "logavgexp":
        tau = old.number("tau") if old.has("tau") else (0.001 if old is not said else 1.0)
        found |= {"advantage": "log_mean_exp", "baseline_temperature": tau}
    if advantage == "rec":
        if said.flag("std_normalize"):
            said.lacks("std_normalize", "a biased deviation (n instead of n - 1)")
        if said.text("drop") not in (None, "none"):
            said.lacks("drop", "bad responses that are left out at random")
    if found["credit"] != "response":
        found["gamma"] = (said if said.has("gamma") else source.under("algorithm.")).number("gamma")
    if found["credit"] == "gae":
        found["lam"] = (said if said.has("lam") else source.under("algorithm.")).number("lam")
    group = source.whole("algorithm.repeat_times") or int(ALGORITHMS[name]["repeat"])
    if group == 1 and found["advantage"] in ("group", "leave_one_out", "log_mean_exp"):
        found |= {"advantage": "reward", "normalize": "none", "baseline_shift": None, "baseline_temperature": None}
    return {f"algorithm.{key}": value for key, value in found.items()}


def loss(source: Source) -> dict[str, Any]:
    if offline(source) or kind(source) not in ALGORITHMS:
        return {}
    name, said = chosen(source, "loss", "policy_loss_fn"), source.under("algorithm.policy_loss_fn_args.")
    if name not in LOSSES:
        source.lacks("algorithm.policy_loss_fn", f"the loss {name}: known here are {', '.join(LOSSES)}")
        return {}
    for key in source.keys("algorithm.policy_loss_fn_args."):
        if key.rpartition(".")[2] not in LOSS_ARGUMENTS[name]:
            source.lacks(key, f"an argument of the loss {name}")
    mean = (
        said.text("grpo_loss_agg_mode" if mixes(source) else "loss_agg_mode")
        or source.text("algorithm.loss_agg_mode")
        or ("seq-mean-token-mean" if name == "gspo" else "token-mean")
    )
    if mean not in shared.AGGREGATES:
        said.lacks("loss_agg_mode", f"the mean {mean}")
    found: dict[str, Any] = {
        **LOSSES[name],
        "aggregate": shared.AGGREGATES.get(mean),
        "entropy_coef": 0.0,
    }
    if chosen(source, "entropy", "entropy_loss_fn", "default") != "none":
        coef = source.number("algorithm.entropy_loss_fn_args.entropy_coef") or 0.0
        found["entropy_coef"] = early(source).get("entropy_coef", coef)
    if found["surrogate"] != "opmd":
        # Of the engine, whose samples the trainer takes as they are (data conversion of verl_trainer).
        found["rollout_correction.old_logprobs_from"] = "engine"
    if found["surrogate"] == "ppo_clip":
        usual = said.number("clip_range") if said.has("clip_range") else early(source).get("clip_ratio", 0.2)
        found |= {
            "clip_low": said.number("clip_range_low") if said.has("clip_range_low") else usual,
            "clip_high": said.number("clip_range_high") if said.has("clip_range_high") else usual,
        }
    if name in ("ppo", "mix", "mix_chord"):
        found["dual_clip"] = said.number("clip_ratio_c")
    if name == "cispo":
        found |= {
            "clip_low": said.number("clip_low") if said.has("clip_low") else 1.0,
            "clip_high": said.number("clip_high") if said.has("clip_high") else 0.28,
        }
    if name == "sapo":
        found |= {
            "temperature_positive": said.number("tau_pos") if said.has("tau_pos") else 1.0,
            "temperature_negative": said.number("tau_neg") if said.has("tau_neg") else 1.05,
        }
    if name == "opmd":
        usual = (source.number(ACTOR + "tau") if source.has(ACTOR + "tau") else 0.001) if early(source) else 1.0
        found["tau"] = said.number("tau") if said.has("tau") else usual
    if name == "sppo":
        epsilon = said.number("epsilon") if said.has("epsilon") else 0.3
        # A log ρ where 1 / (1 + ε) <= ρ <= 1 + ε: the gradient of A log π.
        found |= {"clip_low": 1 - 1 / (1 + (epsilon or 0.0)), "clip_high": epsilon}
    if name == "rec":
        found |= rec(said)
    if name in ("mix", "mix_chord"):
        found |= {f"expert.{key}": value for key, value in expert(source, said, name).items()}
    return {f"algorithm.{key}": value for key, value in found.items()}


def expert(source: Source, said: Source, name: str) -> dict[str, Any]:
    """(1 - μ) and μ of the losses mix and mix_chord (mix_policy_loss.py, chord_policy_loss.py); steps are the trainer's.

    Each side is a mean over its own samples where the batch sizes that the loss is told are those of the run.
    """

    def number(key: str, default: float) -> float:
        return (said.number(key) if said.has(key) else default) or 0.0

    by_token = said.flag("use_token_level_loss_in_sft") if said.has("use_token_level_loss_in_sft") else True
    mean = said.text("sft_loss_agg_mode") or ("token-mean" if by_token else "seq-mean-token-mean")
    if mean not in shared.AGGREGATES:
        said.lacks("sft_loss_agg_mode", f"the mean {mean}")
    whole, own = source.whole("buffer.train_batch_size") or 0, expert_batch(source)
    told = {"ppo_mini_batch_size": whole, "train_batch_size_usual": whole - own, "train_batch_size_expert": own}
    for key, holds in told.items():
        if said.whole(key) != holds:
            said.lacks(key, f"a loss that is scaled by the quotient to the run's own number, {holds}")
    if not said.flag("use_dynamic_bsz"):
        said.lacks("use_dynamic_bsz", "a loss that is scaled by the number of GPUs: say true")
    found: dict[str, Any] = {"aggregate": shared.AGGREGATES.get(mean), "token_weight": "none"}
    if name == "mix":
        return found | {"weight": number("mu", 0.1)}
    warmup, decay = int(number("mu_warmup_steps", 0)), int(number("mu_decay_steps", 0))
    peak, valley = number("mu_peak", 0.1), number("mu_valley", 0.1)
    if warmup and not decay and peak != valley:
        said.lacks("mu_decay_steps", "a share that falls at once behind its warm-up: say 1 or more")
    phi = said.flag("enable_phi_function") if said.has("enable_phi_function") else True
    return found | {
        "weight": peak if decay or warmup else valley,
        "final_weight": valley if decay else None,
        "warmup_updates": warmup,
        "decay_updates": decay,
        "token_weight": "phi" if phi else "none",
    }


def rec(said: Source) -> dict[str, Any]:
    """Arguments of the loss rec, with its defaults (policy_loss_fn/rec_policy_loss.py, default_args)."""

    def number(key: str, default: float) -> float | None:
        return said.number(key) if said.has(key) else default

    mode, weight, more = (said.text(key) or "none" for key in ("clip_mode", "weight", "regularizer"))
    found: dict[str, Any] = {
        "clip_low": number("epsilon_low", 0.2),
        "clip_high": number("epsilon_high", 0.2),
        "ring_low": number("epsilon_low_prime", 0.6),
        "ring_high": number("epsilon_high_prime", 2.0),
        "weight_temperature": number("temp", 1.0),
    }
    if mode == "gspo-one-side":
        found |= {"importance_sampling_level": "sequence", "aggregate": "seq-mean-token-mean"}
    if mode not in _CLIP_MODES:
        said.lacks("clip_mode", f"the mask {mode}: known here are {', '.join(_CLIP_MODES)}")
    weights = {"none": "none", "advantage": "advantage"}
    # The ratio of a token beside the mask of a sequence, and the other way round, are what we lack.
    weights["gspo_importance_sampling" if mode == "gspo-one-side" else "importance_sampling"] = "ratio"
    if weight not in weights:
        said.lacks("weight", f"the weight {weight} with clip_mode {mode}: known here are {', '.join(weights)}")
    coef = said.number("regularizer_coef") or 0.0
    if more not in ("none", "k2", "forward-kl") or (more == "k2" and coef and mode == "gspo-one-side"):
        said.lacks("regularizer", f"the regularizer {more} with clip_mode {mode}")
    elif more != "none":
        found["proximal_coef" if more == "k2" else "likelihood_coef"] = coef
    return found | {"clip_mode": _CLIP_MODES.get(mode), "token_weight": weights.get(weight)}


def kl(source: Source) -> dict[str, Any]:
    if offline(source) or kind(source) not in ALGORITHMS:
        return {}
    found: dict[str, Any] = {"coef": 0.0}
    loss, reward = _penalty(source, "kl_loss_fn", chosen(source, "kl", "kl_loss_fn")), _penalty(source, "kl_penalty_fn")
    if loss and reward:
        if "target" in loss or "target" in reward:
            source.lacks("algorithm.kl_penalty_fn", "two penalties of which one has a coefficient that moves")
        found = {**loss, "place": "loss", "reward_coef": reward["coef"], "reward_estimator": reward["estimator"]}
    elif loss or reward:
        found = {**(loss or reward), "place": "loss" if loss else "reward"}
    if mixes(source) and (loss or reward):
        source.lacks("algorithm.kl_loss_fn", "a penalty on the expert's tokens too: say kl_coef 0")
    return {f"algorithm.kl.{key}": value for key, value in found.items()}


def _penalty(source: Source, section: str, name: str | None = None) -> dict[str, Any]:
    """Estimator and coefficient of one of the two penalties; nothing where it is off."""
    name, said = name or source.text(f"algorithm.{section}") or "none", source.under(f"algorithm.{section}_args.")
    coef = said.number("kl_coef") if said.has("kl_coef") else 0.001
    if before := early(source):
        # One of the two, as in verl: in the loss, or else in the reward (verl_trainer.py, train_rft_iteration).
        if section == "kl_loss_fn":
            name = source.text(ACTOR + "kl_loss_type") or "low_var_kl"
            coef = before["kl_loss_coef"] if before["use_kl_loss"] else 0.0
        else:
            said = source.under(VERL + "algorithm.kl_ctrl.")
            name = source.text(VERL + "algorithm.kl_penalty") or "kl"
            coef = 0.0 if before["use_kl_loss"] else said.number("kl_coef") if said.has("kl_coef") else 0.001
    if name == "none" or not coef:
        return {}
    if name not in shared.ESTIMATORS:
        source.lacks(f"algorithm.{section}", f"the estimator {name}: known here are {', '.join(shared.ESTIMATORS)}")
        return {}
    found: dict[str, Any] = {"estimator": shared.ESTIMATORS[name], "coef": coef}
    if said.text("type") == "adaptive" if before else said.flag("adaptive"):
        found |= {"target": said.number("target_kl"), "horizon": said.whole("horizon")}
    return found
