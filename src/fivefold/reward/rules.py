"""Table of built-in rewards, and how any reward is found by its name. forms.py calls it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from fivefold.config.environment import REWARD
from fivefold.errors import UserError
from fivefold.reward import verl
from fivefold.reward.code.cases import cases_fault
from fivefold.reward.code.reward import code, code_fraction, start_sandbox
from fivefold.reward.forms import ONE, RewardFunction, check_by_name, column_names, form_of
from fivefold.reward.ifeval import ifeval, ifeval_fraction, instructions_fault, load_detector
from fivefold.reward.maths import (
    format,
    gsm8k,
    gsm8k_fault,
    load_math,
    math,
    math_any,
    math_any_fault,
    math_fault,
)
from fivefold.reward.tagged import countdown, countdown_fault, think, think_answer
from fivefold.reward.texts import choice_fault, multiple_choice, multiple_choice_soft, repetition
from fivefold.user_code import Parameters, check_user_code, is_user_code, load_user_code, parameters_of


@dataclass(frozen=True)
class BuiltIn:
    """One built-in reward: a row of `BUILT_IN`, which is all that the project stores about it."""

    function: RewardFunction | None
    """Function that scores a response; None if a model or an environment does."""
    needs_truth: bool
    """True if the reward compares with the ground truth, so that it can be the accuracy."""
    fault_of_truth: Callable[..., str | None] | None
    """Function that returns the requirement that a row's ground truth violates: no right response could then earn the
    reward.

    For rewards that run programs, it also takes `reward.code.trusted_tests`.
    """
    about: str
    """Description of the reward's value, printed in docs/rewards.md."""
    sources: tuple[str, ...] = ()
    """Values of `data_source` that choose the reward: those of `fivefold data`, and verl's names of the same sets."""
    prepare: Callable[[], None] | None = None
    """Function that imports and starts what the reward needs, once per process, before the time of a response counts."""
    runs_programs: bool = False
    """True if the reward runs a response's program in the sandbox, which has its own limits."""
    reads: tuple[str, ...] = ()
    """Marks of the answer that the reward reads. A prompt that names none of them does not ask for the answer's form."""


_MATH = ("math", "deepscaler", "aime", "lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500",
         "agentica-org/DeepScaleR-Preview-Dataset")  # fmt: skip
_PROGRAMS = ("apps", "taco", "codecontests", "codeforces", "livecodebench")

_HASHES, _BOX, _ANSWER = "####", "\\boxed", "<answer>"

BUILT_IN: dict[str, BuiltIn] = {
    "gsm8k": BuiltIn(
        gsm8k, True, gsm8k_fault,
        r"1 when the number after the last `####`, else in the last `\boxed{}`, equals the truth as a number",
        sources=("gsm8k", "arithmetic", "openai/gsm8k"), reads=(_HASHES, _BOX),
    ),
    "math": BuiltIn(
        math, True, math_fault,
        "1 when the answer is mathematically equal to the truth (math-verify)",
        sources=_MATH, prepare=load_math, reads=(_BOX,),
    ),
    "math_any": BuiltIn(
        math_any, True, math_any_fault,
        r"the same for one of the solutions in a JSON list, each a text, with its last `\boxed{}` where it has one",
        prepare=load_math, reads=(_BOX,),
    ),
    "format": BuiltIn(
        format, False, None,
        r"1 if the response has an answer in the form that the reward reads (`####` with a number, or `\boxed{}`)",
        reads=(_HASHES, _BOX),
    ),
    "think": BuiltIn(
        think, False, None,
        "0 when one `<think>` and after it one `</think>` stand in the response, else -1",
    ),
    "think_answer": BuiltIn(
        think_answer, False, None,
        "1 when `<think>...</think>` and then `<answer>...</answer>` stand in the response, else -1",
        reads=(_ANSWER,),
    ),
    "countdown": BuiltIn(
        countdown, True, countdown_fault,
        '1 when the equation in the last `<answer>` uses every number of `{"target": 98, "numbers": [44, 19, 35]}` once and '
        "has the target, 0.1 for another equation, 0 for none (TinyZero)",
        reads=(_ANSWER,),
    ),
    "code": BuiltIn(
        code, True, cases_fault,
        "1 when the program in the response passes every test",
        sources=_PROGRAMS, prepare=start_sandbox, runs_programs=True,
    ),
    "code_fraction": BuiltIn(
        code_fraction, True, cases_fault,
        "the share of the tests that it passes",
        prepare=start_sandbox, runs_programs=True,
    ),
    "ifeval": BuiltIn(
        ifeval, True, instructions_fault,
        "1 when the response follows every [instruction](#instructions-ifeval) of its prompt",
        prepare=load_detector,
    ),
    "ifeval_fraction": BuiltIn(
        ifeval_fraction, True, instructions_fault,
        "the share of them that it follows",
        prepare=load_detector,
    ),
    "multiple_choice": BuiltIn(
        multiple_choice, True, choice_fault,
        r'1 when the first capital letter in the last `\boxed{}`, without a box after the last "answer is" or of the whole '
        "response, is the truth's first letter",
    ),
    "multiple_choice_soft": BuiltIn(
        multiple_choice_soft, True, choice_fault,
        "for right and wrong letters 1 and -0.5 in a box, 0.5 and -1 without one",
    ),
    "repetition": BuiltIn(
        repetition, False, None,
        "the share of the response's 3-grams of words that occurred in it before: give it a weight below 0 (2502.03373)",
    ),
    "verl_gsm8k": BuiltIn(
        verl.verl_gsm8k, True, verl.gsm8k_fault,
        "verl's: 1 when the number after the last `#### ` in the last 300 characters is the truth as text, but for commas",
        reads=(_HASHES,),
    ),
    "verl_gsm8k_first": BuiltIn(
        verl.verl_gsm8k_first, True, verl.gsm8k_fault,
        "siiRL's, and verl's until 0.4: by the first `#### ` of the whole response",
        reads=(_HASHES,),
    ),
    "verl_math": BuiltIn(
        verl.verl_math, True, verl.text_fault,
        r"verl's for MATH: 1 when the last `\boxed{}` is the truth as text, after both are brought into one form",
        reads=(_BOX,),
    ),
    "verl_math_dapo": BuiltIn(
        verl.verl_math_dapo, True, verl.text_fault,
        "verl's for DAPO's data: 1 when what follows the last `Answer:` is the truth in Minerva's form, else -1",
        reads=("Answer:",),
    ),
    "verl_math_dapo_boxed": BuiltIn(
        verl.verl_math_dapo_boxed, True, verl.text_fault,
        r"`verl_math_dapo` as in verl 0.9.1: without `Answer:`, the last `\boxed{}` of the last 100 characters counts if it "
        "equals the truth as text",
        reads=("Answer:", _BOX),
    ),
    "judge": BuiltIn(
        None, True, None,
        "the [judge model's](#a-judge) score",
    ),
    REWARD: BuiltIn(
        None, False, None,
        "the sum of the rewards that an [environment](environments.md) gives for the turns of a trajectory",
    ),
}  # fmt: skip

SOURCES = {source: name for name, row in BUILT_IN.items() for source in row.sources}
"""data_source -> the built-in reward that it chooses."""
SOURCES_OF = {"fivefold": SOURCES, "verl": SOURCES | verl.SOURCES, "siirl": SOURCES | verl.OF_SIIRL}
"""System -> built-in reward of each data_source, as that system chooses it, or as Fivefold does if it chooses none. A name
that ends with * stands for all that begin so."""


def runs_programs(name: str) -> bool:
    """Return whether a reward of this name runs programs in the sandbox."""
    return name in BUILT_IN and BUILT_IN[name].runs_programs


def is_judged(name: str) -> bool:
    """Return whether a model gives the reward instead of a function."""
    return name in BUILT_IN and BUILT_IN[name].function is None and name != REWARD


def reward_of(source: str, system: str) -> str | None:
    """Return the built-in reward that a system chooses for a data_source, or None."""
    chosen = SOURCES_OF[system]
    begins = (name for form, name in chosen.items() if form.endswith("*") and source.startswith(form[:-1]))
    return chosen.get(source) or next(begins, None)


def check_name(name: str) -> None:
    """Raise ValueError for a reward name that `resolve` would not find, without running the user's code."""
    if name in BUILT_IN:
        return
    if not is_user_code(name):
        raise UserError(
            f"unknown reward {name!r}; built in: {', '.join(BUILT_IN)}; your own is written path/to/file.py:function"
        )
    try:
        check_user_code(name)
    except UserError as error:
        raise UserError(f"reward {error}") from error


def check_parameters(name: str) -> None:
    """Raise ValueError for a user's function whose parameters cannot be passed by name, without running it."""
    if name not in BUILT_IN and (parameters := parameters_of(name)) is not None:
        check_by_name(name, parameters)


def needs_truth(name: str) -> bool:
    """Return whether a built-in reward compares with the ground truth."""
    return name in BUILT_IN and BUILT_IN[name].needs_truth


def takes_truth(name: str, columns: Collection[str] = ()) -> bool:
    """Return whether a user's function takes the ground truth, and not a column of that name."""
    parameters = parameters_of(name)
    if parameters is None or "ground_truth" not in parameters.named:
        return False
    return form_of(parameters) is ONE or "ground_truth" not in columns


def forms_read(name: str) -> tuple[str, ...]:
    """Return the forms of an answer of which a prompt must ask for one; empty for rewards that read any text."""
    return BUILT_IN[name].reads if name in BUILT_IN else ()


def describe_forms(forms: Sequence[str]) -> str:
    """Return forms of an answer as a sentence names them."""
    return " or ".join(f"{form}{{}}" if form == _BOX else form for form in forms)


def takes_ground_truth(name: str) -> bool:
    """Return whether a reward compares with the ground truth; a user's function does if it has a parameter of that name, or
    one that must be a column of the data."""
    if name in BUILT_IN:
        return BUILT_IN[name].needs_truth
    parameters = parameters_of(name)
    if parameters is None:
        return False
    return takes_truth(name) or bool({*column_names(parameters)} & {*parameters.required})


def ground_truth_fault(name: str, ground_truth: str, trusted_tests: bool = False) -> str | None:
    """Return the requirement of a reward that a row's ground truth violates, or None; a user's reward accepts any."""
    row = BUILT_IN.get(name)
    if row is None or row.fault_of_truth is None:
        return None
    fault = row.fault_of_truth(ground_truth, *([trusted_tests] if row.runs_programs else []))
    return None if fault is None else f"{fault} for the reward {name}"


def resolve(name: str) -> RewardFunction:
    """Return the reward function of a name, or of `path/to/file.py:function`, ready to be called.

    Raises RuntimeError if `code` cannot run programs, ValueError for a function whose parameters cannot be passed by name.
    """
    check_name(name)
    if name not in BUILT_IN:
        function: RewardFunction = load_user_code(name)
        check_by_name(name, Parameters.of(function))
        return function
    row = BUILT_IN[name]
    assert row.function is not None, f"the reward {name} is not computed by a function"
    if row.prepare is not None:
        row.prepare()
    return row.function
