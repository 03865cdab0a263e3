"""Reward functions: response and ground truth -> a number."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any

from fivefold.user_code import check_user_code, is_user_code, load_user_code, parameters_of

RewardFunction = Callable[..., float]

_NUMBER = r"-?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?"
_AFTER_HASHES = re.compile(r"####\s*\$?\s*(" + _NUMBER + r")")


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...} whose braces close, or None."""
    start = text.rfind("\\boxed{")
    while start >= 0:
        depth = 0
        for i in range(start + len("\\boxed"), len(text)):
            depth += {"{": 1, "}": -1}.get(text[i], 0)
            if depth == 0:
                return text[start + len("\\boxed{") : i]
        start = text.rfind("\\boxed{", 0, start)
    return None


def _number(text: str) -> Decimal | None:
    plain = re.sub(r"[\\$,\s]", "", text).rstrip(".")
    try:
        value = Decimal(plain)
    except InvalidOperation:
        return None
    return value if value.is_finite() else None


def gsm8k_answer(response: str) -> Decimal | None:
    r"""The number after the last `####`, otherwise in the last \boxed{}."""
    found = [match for match in _AFTER_HASHES.findall(response) if match.strip()]
    if found:
        return _number(found[-1])
    boxed = last_boxed(response)
    return None if boxed is None else _number(boxed)


def gsm8k(response: str, ground_truth: str) -> float:
    """1 when the stated number equals the truth as a number, 0 otherwise."""
    answer, truth = gsm8k_answer(response), _number(ground_truth)
    return float(answer is not None and answer == truth)


def math(response: str, ground_truth: str) -> float:
    r"""1 when the answer is mathematically the truth's equal (math-verify); the last \boxed{} is read where there is one."""
    from math_verify import parse, verify

    boxed = last_boxed(response)
    text = response if boxed is None else f"\\boxed{{{boxed}}}"
    # Its own time limits use signals; the pool has one for the whole sample.
    truth = parse(f"\\boxed{{{ground_truth}}}", parsing_timeout=None)
    return float(verify(truth, parse(text, parsing_timeout=None), timeout_seconds=None))


def format(response: str, ground_truth: str) -> float:
    r"""1 when the response states an answer where it is looked for: one `####` with a number, or a \boxed{}."""
    return float(gsm8k_answer(response) is not None or bool((last_boxed(response) or "").strip()))


BUILT_IN: dict[str, RewardFunction] = {"gsm8k": gsm8k, "math": math, "format": format}
WITH_TRUTH = ("gsm8k", "math")
"""Those that compare with the ground truth."""

SOURCES = {"gsm8k": "gsm8k", "arithmetic": "gsm8k", "math": "math", "deepscaler": "math", "aime": "math"}
"""Built-in reward of each data_source that `fivefold data` writes; verl's own names of the same sets follow."""
SOURCES |= {"openai/gsm8k": "gsm8k", "lighteval/MATH": "math", "DigitalLearningGmbH/MATH-lighteval": "math"}
SOURCES |= {"HuggingFaceH4/MATH-500": "math", "agentica-org/DeepScaleR-Preview-Dataset": "math"}


def check_name(name: str) -> None:
    """Raise ValueError for a reward name that `resolve` would not find; runs none of the user's code."""
    if name in BUILT_IN:
        return
    if not is_user_code(name):
        raise ValueError(
            f"unknown reward {name!r}; built in: {', '.join(BUILT_IN)}; your own is written path/to/file.py:function"
        )
    try:
        check_user_code(name)
    except ValueError as error:
        raise ValueError(f"reward {error}") from error


def takes_ground_truth(name: str) -> bool:
    """Whether a reward compares with the ground truth: of the user's functions those with a parameter of that name."""
    return name in WITH_TRUTH if name in BUILT_IN else "ground_truth" in parameters_of(name)


def resolve(name: str) -> RewardFunction:
    """The reward function of a name, or of `path/to/file.py:function`."""
    check_name(name)
    return BUILT_IN[name] if name in BUILT_IN else load_user_code(name)


def call(function: RewardFunction, offered: dict[str, Any]) -> float:
    """Call a reward function with those of the offered values that it names; it may return a number or {"score": number}."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        chosen = offered
    else:
        chosen = {name: value for name, value in offered.items() if name in parameters}
    result = function(**chosen)
    return float(result["score"] if isinstance(result, dict) else result)
