"""ROLL's batches, lengths, domains and their rewards -> ours."""

from __future__ import annotations

from typing import Any

from fivefold.config.dialects import shared
from fivefold.config.dialects.roll_placement import sizes
from fivefold.config.dialects.roll_roles import TRAIN, devices, kind, role, samples_a_group
from fivefold.config.dialects.source import Source


def batch(source: Source) -> dict[str, Any]:
    said = source.under(role(source) + "training_args.")
    split, world = sizes(source), len(devices(source, role(source) + "device_mapping"))
    replicas = world // (split.get("tp", 1) * split.get("pp", 1) * split.get("cp", 1))
    update = said.count("per_device_train_batch_size") * said.count("gradient_accumulation_steps") * replicas
    if kind(source) != "rlvr":
        return {"data.prompts_per_step": update}
    prompts, group = source.count("rollout_batch_size"), samples_a_group(source)
    updates, rest = divmod(prompts * group, update)
    if rest or updates < 1 or prompts % updates:
        said.lacks(
            "gradient_accumulation_steps",
            f"updates of {update} samples of a step's {prompts} x {group}: whole prompts must make an update",
        )
        updates = 1
    return {"data.prompts_per_step": prompts, "algorithm.updates_per_step": updates, "algorithm.group_size": group}


def lengths(source: Source) -> dict[str, Any]:
    said = source.under(role(source))
    if kind(source) == "rlvr":
        prompt, response = source.count("prompt_length"), source.count("response_length")
    else:
        prompt = response = source.count("sequence_length")
    longest = (prompt + response) * (2 if kind(source) == "dpo" else 1)
    if said.flag("use_dynamic_batching_in_train"):
        tokens = said.whole("max_tokens_per_microbatch_in_train") or 0
    else:
        tokens = said.count("training_args.per_device_train_batch_size") * (prompt + response)
    return {
        "data.max_prompt_tokens": prompt,
        "data.max_response_tokens": response,
        "policy.tokens_per_micro_batch": max(tokens, longest),
        "data.train": shared.files(source, role(source) + "data_args.file_name"),
        "data.val": shared.files(source, "validation.data_args.file_name"),
        "data.overlong_prompts": "drop" if kind(source) == "rlvr" else "refuse",
    }


def rewards(source: Source) -> dict[str, Any]:
    if kind(source) != "rlvr":
        return {}
    domains = {key.split(".")[1] for key in source.keys("rewards.")}
    weights = {
        key.rpartition(".")[2]: source.number(key) for key in source.keys(TRAIN + "data_args.domain_interleave_probs.")
    }
    if len([name for name, weight in weights.items() if weight]) > 1:
        for name in weights:
            source.lacks(f"{TRAIN}data_args.domain_interleave_probs.{name}", "domains mixed by probability in each step")
    if domains - {"math_rule"}:
        for domain in sorted(domains - {"math_rule"}):
            if weights.get(domain, 1.0):
                for key in source.keys(f"rewards.{domain}."):
                    source.lacks(key, f"the reward of {domain}: reward.functions or reward.by_source name a function")
    columns = source.under(TRAIN + "data_args.")
    found: dict[str, Any] = {
        "data.ground_truth_key": "ground_truth",
        "data.prompt_key": columns.text("messages") or columns.text("prompt"),
    }
    return found | ({"reward.functions": {"math": 1.0}} if "math_rule" in domains else {})
