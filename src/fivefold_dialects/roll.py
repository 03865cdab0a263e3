"""Translate ROLL: `python examples/start_rlvr_pipeline.py --config_path DIR --config_name FILE`, YAML with roles.

Behavior that only ROLL's code defines was read in ROLL 8eb27cc2 (2026-08-18); comments and notes cite the place.
"""

from __future__ import annotations

from typing import Any

from fivefold_dialects import roll_placement as placement
from fivefold_dialects import shared
from fivefold_dialects.known import known
from fivefold_dialects.legacy import roll as legacy
from fivefold_dialects.roll_method import critic, loss, low_rank, method, optimizer
from fivefold_dialects.roll_placement import FIELDS, TRAIN, devices, is_rlvr, kind, role, samples_a_group
from fivefold_dialects.source import Source
from fivefold_dialects.system import System
from fivefold_dialects.table import load, table, when


def run(source: Source) -> dict[str, Any]:
    resume = source.text("resume_from_checkpoint") or "False"
    ours: dict[str, Any] = {
        "trainer.resume": "never" if resume.lower() == "false" else resume,
        **FIELDS["run"](source),
        "trainer.eval_every": (source.whole("eval_steps") or 0) if source.items("validation.data_args.file_name") else 0,
    }
    epochs = role(source) + "training_args.num_train_epochs"
    if kind(source) == "dpo":
        # It ends with its epochs or with max_steps, over which the learning rate decays (dpo_pipeline.py:134, 203, 258).
        steps, style = source.whole("max_steps"), optimizer(source)["policy.optimizer.schedule"]
        ours |= {"trainer.steps": steps, "policy.optimizer.decay_steps": None if style == "constant" else steps}
        return ours | {"trainer.epochs": int(source.number(epochs) or 1), "trainer.ends_with_data": True}
    by_steps = is_rlvr(source) or not source.number(epochs)
    ours |= {"trainer.steps": source.whole("max_steps")} if by_steps else {"trainer.epochs": source.whole(epochs)}
    return ours | FIELDS["evaluation"](source)


def ahead(source: Source) -> dict[str, Any]:
    ratio = source.number("async_generation_ratio") or 0.0
    if ratio > 0 and not ratio.is_integer():
        source.lacks("async_generation_ratio", "a part of a step that is sampled ahead: rollout.max_staleness counts steps")
    return shared.ahead(int(ratio), "continue") if is_rlvr(source) else {}


def model(source: Source) -> dict[str, Any]:
    path, reference = (source.text(f"{start}model_args.model_name_or_path") for start in (role(source), "reference."))
    ours = {"model.path": path or source.path("pretrain")}
    return ours | ({"reference.path": reference} if reference not in (None, ours["model.path"]) else {})


def batch(source: Source) -> dict[str, Any]:
    update = placement.samples_an_update(source, role(source))
    if not is_rlvr(source):
        return {"data.prompts_per_step": update}
    prompts, group = source.count("rollout_batch_size"), samples_a_group(source)
    updates, rest = divmod(prompts * group, update)
    if rest or updates < 1 or prompts % updates:
        reason = f"where a step has {prompts} x {group}: an update must consist of whole prompts"
        source.lacks(role(source) + "training_args.gradient_accumulation_steps", f"updates of {update} samples, {reason}")
        updates = 1
    return {"data.prompts_per_step": prompts, "algorithm.updates_per_step": updates, "algorithm.group_size": group}


def lengths(source: Source) -> dict[str, Any]:
    section = source.under(role(source))
    keys = ("prompt_length", "response_length") if is_rlvr(source) else ("sequence_length", "sequence_length")
    prompt, response = (source.count(key) for key in keys)
    longest = (prompt + response) * (2 if kind(source) == "dpo" else 1)
    if section.flag("use_dynamic_batching_in_train"):
        tokens = section.whole("max_tokens_per_microbatch_in_train") or 0
    else:
        tokens = section.count("training_args.per_device_train_batch_size") * (prompt + response)
    return {
        "data.max_prompt_tokens": prompt,
        "data.max_response_tokens": response,
        "policy.tokens_per_micro_batch": max(tokens, longest),
        "data.train": source.files(role(source) + "data_args.file_name"),
        "data.val": source.files("validation.data_args.file_name"),
        "data.overlong_prompts": "drop" if is_rlvr(source) else "refuse",
    }


MATH = "math_rule"
"""Name of the domain for rows whose tag belongs to no other domain (rlvr_pipeline.py:116)."""
_JUDGE_PROMPT = "Qwen2.5-7B-Instruct-RLVR-prompt"


def domains(source: Source) -> dict[str, int]:
    """Return each domain's prompts in a step: shares are rounded down, the last gets the rest (rlvr_pipeline.py:283)."""
    start, prompts = TRAIN + "data_args.domain_interleave_probs.", source.count("rollout_batch_size")
    names = [key.removeprefix(start) for key in source.keys(start)]
    counts = {name: int((source.number(start + name) or 0.0) * prompts) for name in names}
    if names:
        counts[names[-1]] = prompts - sum(counts[name] for name in names[:-1])
    return {name: count for name, count in counts.items() if count}


def mixture(source: Source) -> dict[str, Any]:
    """Return our keys of the domains in each step and of their rewards."""
    if not {key.split(".")[1] for key in source.keys("rewards.")} - {MATH}:
        alone = scored(source, MATH, True) if source.keys("rewards.") else {}
        judged, code = judge(source, MATH) if "judge" in alone else {}, "test_cases" if "code" in alone else None
        return judged | {"reward.functions": alone or None, "data.ground_truth_key": code}
    counts, prompts = domains(source), source.count("rollout_batch_size")
    rewards = list(dict.fromkeys(key.split(".")[1] for key in source.keys("rewards.")))
    for name in counts:
        if name not in rewards:
            source.lacks(f"{TRAIN}data_args.domain_interleave_probs.{name}", "a domain without a section in rewards")
    tags = {name: source.texts(f"rewards.{name}.tag_included") for name in (*rewards, MATH)}
    ours: dict[str, Any] = {
        "data.source_key": source.text(TRAIN + "data_args.tag") or "tag",
        "data.domains": {name: [*of, "*"] if name == MATH else of for name, of in tags.items() if of or name == MATH},
        "data.mixture": {name: count / prompts for name, count in counts.items()} or None,
    }
    by_source: dict[str, dict[str, float]] = {}
    for name in rewards:
        weights = scored(source, name, is_used=not counts or name in counts)
        if name == MATH:
            ours["reward.functions"] = weights
        by_source |= {tag: weights for tag in tags[name] if weights and name != MATH}
        if "judge" in weights:
            ours |= judge(source, name)
        if "code" in weights:
            ours["data.ground_truth_by_source"] = dict.fromkeys(tags[name], "test_cases")
    if len(counts) > 1 and source.flag("whiten_advantages"):
        ours["algorithm.whiten_by"] = "domain"
    if len(counts) > 1 and source.flag("add_token_level_kl") and source.number("target_kl") is not None:
        source.lacks("target_kl", "a KL coefficient that every domain adapts in turn")
    if source.flag("difficulty_mask") and samples_a_group(source) > 1:
        ours["algorithm.difficulty_by"] = "correct"
    return ours | {"reward.by_source": by_source or None}


def scored(source: Source, name: str, is_used: bool) -> dict[str, float]:
    """Return our rewards of a domain and their weights; empty if we have none, which is reported if the domain is used."""
    section = source.under(f"rewards.{name}.")
    worker = (section.text("worker_cls") or "").rpartition(".")[2]
    if worker == "CrossThinkQARuleRewardWorker" and (reward := section.text("reward_type")) != "soft":
        section.lacks("reward_type", f"the reward {reward} for multiple choice: only soft is supported")
    if worker.endswith("RewardWorker") and worker in FIELDS:
        return dict(FIELDS[worker](section))
    if is_used:
        section.lacks("worker_cls", "your own reward worker: name your function in reward.by_source")
    return {}


def judge(source: Source, name: str) -> dict[str, Any]:
    """Return our keys of the judge: a server that already runs, or one that we start on its own GPUs."""
    section = source.under(f"rewards.{name}.")
    if (prompt := section.text("judge_prompt")) != _JUDGE_PROMPT:
        section.lacks("judge_prompt", f"the prompt {prompt}: {_JUDGE_PROMPT} is known; reward.judge.prompt takes any text")
    if (kind_of_judge := section.text("judge_model_type")) == "api":
        return FIELDS["judge"](section)
    if kind_of_judge != "inference":
        section.lacks("judge_model_type", f"the judge {kind_of_judge}: known here are api and inference")
        return {}
    gpus, drawn = len(devices(source, f"rewards.{name}.device_mapping")), section.under("generating_args.")
    engine = section.under("strategy_args.strategy_config.")
    tp = engine.whole("tensor_parallel_size") or engine.whole("tp_size") or section.whole("num_gpus_per_worker") or 1
    others = {key: drawn.value(key) for key in ("top_p", "top_k") if drawn.has(key)}
    layout = shared.engine_layout(gpus, tp)
    return FIELDS["own_judge"](section) | {"reward.judge.backend": layout, "reward.judge.request": others or None}


def router_replay(source: Source) -> dict[str, Any]:
    key = "actor_train.router_replay.mode"
    mode = source.text(key)
    if mode not in (None, "disabled", "R3"):
        source.lacks(key, f"the mode {mode} of router replay, which ROLL refuses too")
    return shared.replayed("R3" if mode == "R3" else None)


DERIVED = (
    *(ahead, model, low_rank, method, *when(is_rlvr, loss), batch, lengths, *when(is_rlvr, FIELDS["of_rlvr"], mixture)),
    *(placement.layout, placement.megatron, optimizer, critic, *when(is_rlvr, placement.engine)),
    *(placement.forwards, router_replay, run, FIELDS["tracking"]),
)
TABLE = table("roll", DERIVED, older=load("legacy/roll"), release_of=legacy.release_of, known=known("roll"))
translate = System("roll", (TABLE,))
