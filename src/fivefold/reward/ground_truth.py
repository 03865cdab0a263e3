"""What a built-in reward needs of a ground truth: a response that states it must earn the reward. No torch here."""

from __future__ import annotations

import json

from fivefold.reward import verl
from fivefold.reward.code.cases import FORMS, read_cases
from fivefold.reward.ifeval import read_instructions
from fivefold.reward.rules import CODE, gsm8k
from fivefold.reward.tagged import countdown_fault


def is_list_of_texts(text: str) -> bool:
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return isinstance(found, list) and bool(found) and all(isinstance(each, str) and each.strip() for each in found)


def ground_truth_fault(name: str, ground_truth: str) -> str | None:
    """What must hold of a row's ground truth for a reward of this name, where it does not; the user's own take any."""
    if name in verl.REWARDS:
        return verl.ground_truth_fault(name, ground_truth)
    if name == "gsm8k" and not (
        gsm8k(f"#### {ground_truth}", ground_truth) or gsm8k(f"\\boxed{{{ground_truth}}}", ground_truth)
    ):
        return "must be a number for the reward gsm8k"
    if name == "math" and not ground_truth.strip():
        return "must not be empty for the reward math"
    if name == "math_any" and not is_list_of_texts(ground_truth):
        return "must be a JSON list of solutions for the reward math_any"
    if name == "countdown":
        return countdown_fault(ground_truth)
    if name.startswith("multiple_choice") and not ground_truth[:1].isupper():
        return f"must begin with the capital letter of the right choice for the reward {name}"
    if name.startswith("ifeval"):
        try:
            read_instructions(ground_truth)
        except ValueError as error:
            return f"{error} for the reward {name}"
    if name in CODE:
        try:
            read_cases(ground_truth)
        except ValueError:
            return f"must be {FORMS} for the reward {name}"
    return None
