"""Reward functions: response and ground truth -> a number."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import re
import signal
from collections.abc import Callable, Iterator
from decimal import Decimal, InvalidOperation
from typing import Any

from fivefold.reward import verl
from fivefold.reward.boxed import last_boxed
from fivefold.reward.code.reward import code, code_fraction, start_sandbox
from fivefold.reward.ifeval import ifeval, ifeval_fraction
from fivefold.reward.tagged import countdown, think, think_answer
from fivefold.reward.texts import multiple_choice, multiple_choice_soft, repetition
from fivefold.user_code import check_user_code, is_user_code, load_user_code, parameters_of

RewardFunction = Callable[..., float]

_NUMBER = r"-?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?"
_AFTER_HASHES = re.compile(r"####\s*\$?\s*(" + _NUMBER + r")")


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
    r"""1 when the answer is mathematically the truth's equal (math-verify); the last \boxed{} is read where there is one.

    An answer that no one could write out (thousands of digits, powers of powers) or that takes seconds to compare is right
    only where it is written as the truth is.
    """
    boxed = last_boxed(response)
    answer = response[-_LONGEST_ANSWER:] if boxed is None else boxed
    if "".join(answer.split()) == "".join(ground_truth.split()):
        return 1.0
    if is_large(answer):
        return 0.0
    with contextlib.suppress(_TooLongError), _cpu_limit(_COMPARE_SECONDS):
        return _verify(answer if boxed is None else f"\\boxed{{{boxed}}}", ground_truth)
    return 0.0


def math_any(response: str, ground_truth: str) -> float:
    r"""1 when `math` is, for one of the solutions in a JSON list of texts; of one with a \boxed{} its content counts."""
    solutions = json.loads(ground_truth)
    return float(any(math(response, last_boxed(text) or text) for text in solutions))


def _verify(answer: str, ground_truth: str) -> float:
    from math_verify import parse, verify

    # Its own time limits are those of real time, which a busy machine changes.
    truth = parse(f"\\boxed{{{ground_truth}}}", parsing_timeout=None)
    return float(verify(truth, parse(answer, parsing_timeout=None), timeout_seconds=None))


_LONGEST_ANSWER = 1000
"""Characters; without a box the answer is looked for in so many at the end."""
_LARGEST_EXPONENT = 10_000
_COMPARE_SECONDS = 1.0
"""Of CPU time: what can be compared takes a hundredth of it."""
_LARGEST_FACTORIAL = 2000
_LARGE_NUMBER = re.compile(r"\d{1000}|\d[eE]\+?\d{5}|binom\s*\{?\s*\d{5}")
_SMALL_TOWER = re.compile(r"\^\s*\{\s*(\d{1,2})\s*\^\s*\{?\s*(\d)\s*\}?\s*\}")
_TOKEN = re.compile(r"\\[a-zA-Z]+|\d+|\*\*|\S")


def is_large(latex: str) -> bool:
    """Whether numbers in an answer may be too large to be computed, judged by how they are written; linear in the text.

    An exponent is at most 10,000, as are those together that follow a number or a bracket; a number's power or factorial in
    an exponent is large unless it is as plain as 3^2.
    """
    if len(latex) > _LONGEST_ANSWER or _LARGE_NUMBER.search(latex):
        return True
    latex = _SMALL_TOWER.sub(lambda found: f"^{{{int(found[1]) ** int(found[2])}}}", latex)
    tokens = [token for token in _TOKEN.findall(latex) if token not in ("\\left", "\\right")]
    numeric = not any(token.isalpha() for token in tokens)
    opened: list[bool] = []
    raised, previous, together = "", " ", 1
    was_exponent = False
    for token in tokens:
        of_number = previous.isdigit() or previous in ")}]!"
        in_exponent = any(opened)
        if token in ("^", "**"):
            if of_number and was_exponent:
                return True
            raised = "tower" if of_number and in_exponent else "number" if of_number else "symbol"
        elif token in "{([":
            opened.append(bool(raised))
        elif token in "})]":
            was_exponent = bool(opened) and opened.pop()
        elif token.isdigit():
            value = int(token)
            together *= value if raised == "number" else 1
            if (raised or in_exponent) and (raised == "tower" or max(value, together) > _LARGEST_EXPONENT):
                return True
        elif token == "!" and (
            (previous.isdigit() and int(previous) > _LARGEST_FACTORIAL)
            or (of_number and in_exponent)
            or (previous in ")}]!" and numeric)
        ):
            return True
        if token not in ("^", "**", "{", "(", "[", "-", "+"):
            if token not in "})]":
                was_exponent = previous in ("^", "**")
            raised = ""
        previous = token
    return False


class _TooLongError(BaseException):
    """No Exception, so that no library takes it for one of its own."""


@contextlib.contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    """Raise _TooLongError in the block after so many seconds of this process's CPU time."""

    def end(number: int, frame: object) -> None:
        raise _TooLongError

    before = signal.signal(signal.SIGVTALRM, end)
    # Again and again, as a library may catch everything.
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds / 4)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def format(response: str, ground_truth: str) -> float:
    r"""1 when the response states an answer where it is looked for: one `####` with a number, or a \boxed{}."""
    return float(gsm8k_answer(response) is not None or bool((last_boxed(response) or "").strip()))


BUILT_IN: dict[str, RewardFunction] = {
    "gsm8k": gsm8k,
    "math": math,
    "math_any": math_any,
    "format": format,
    "think": think,
    "think_answer": think_answer,
    "countdown": countdown,
    "code": code,
    "code_fraction": code_fraction,
    "ifeval": ifeval,
    "ifeval_fraction": ifeval_fraction,
    "multiple_choice": multiple_choice,
    "multiple_choice_soft": multiple_choice_soft,
    "repetition": repetition,
    **verl.REWARDS,
}
JUDGED = ("judge",)
"""Those that a model gives, and no function."""
CODE = ("code", "code_fraction")
"""Those that run programs."""
WITH_TRUTH = tuple(name for name in BUILT_IN if name not in ("format", "think", "think_answer", "repetition"))
"""Those that compare with the ground truth."""

SOURCES = {"gsm8k": "gsm8k", "arithmetic": "gsm8k", "math": "math", "deepscaler": "math", "aime": "math"}
"""Built-in reward of each data_source that `fivefold data` writes; verl's own names of the same sets follow."""
SOURCES |= {"openai/gsm8k": "gsm8k", "lighteval/MATH": "math", "DigitalLearningGmbH/MATH-lighteval": "math"}
SOURCES |= {"HuggingFaceH4/MATH-500": "math", "agentica-org/DeepScaleR-Preview-Dataset": "math"}

SOURCES |= dict.fromkeys(("apps", "taco", "codecontests", "codeforces", "livecodebench"), "code")


SOURCES_OF = {"fivefold": SOURCES, "verl": SOURCES | verl.SOURCES, "siirl": SOURCES | verl.OF_SIIRL}
"""System -> built-in reward of each data_source, as that system chooses it, or ours where it chooses none; a name that ends
with * stands for all that begin so."""


def reward_of(source: str, system: str) -> str | None:
    """The built-in reward that a system chooses for a data_source; None where there is none."""
    chosen = SOURCES_OF[system]
    begins = (name for form, name in chosen.items() if form.endswith("*") and source.startswith(form[:-1]))
    return chosen.get(source) or next(begins, None)


def check_name(name: str) -> None:
    """Raise ValueError for a reward name that `resolve` would not find; runs none of the user's code."""
    if name in BUILT_IN or name in JUDGED:
        return
    if not is_user_code(name):
        known = ", ".join((*BUILT_IN, *JUDGED))
        raise ValueError(f"unknown reward {name!r}; built in: {known}; your own is written path/to/file.py:function")
    try:
        check_user_code(name)
    except ValueError as error:
        raise ValueError(f"reward {error}") from error


def takes_ground_truth(name: str) -> bool:
    """Whether a reward compares with the ground truth: of the user's functions those with a parameter of that name."""
    if name in JUDGED:
        return True
    return name in WITH_TRUTH if name in BUILT_IN else "ground_truth" in parameters_of(name)


def resolve(name: str) -> RewardFunction:
    """The reward function of a name, or of `path/to/file.py:function`; raises RuntimeError where `code` runs no program."""
    check_name(name)
    if name in CODE:
        start_sandbox()
    return BUILT_IN[name] if name in BUILT_IN else load_user_code(name)


def call(function: RewardFunction, offered: dict[str, Any]) -> float:
    """Call a reward function with those of the offered values that it names; it may be asynchronous, and return a number or
    {"score": number}."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        chosen = offered
    else:
        chosen = {name: value for name, value in offered.items() if name in parameters}
    result = function(**chosen)
    if inspect.iscoroutine(result):
        result = asyncio.run(result)
    return float(result["score"] if isinstance(result, dict) else result)
