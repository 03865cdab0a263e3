"""Signatures of reward functions: the names of its parameters decide how a function is called.

A form is a row of `FORMS`: ours and verl's score one response a call, TRL's gets lists. Standard library only.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, SupportsFloat, TypeGuard

from fivefold.errors import UserError, shown
from fivefold.user_code import Parameters

RewardFunction = Callable[..., Any]
Scored = dict[str, Any]
"""What a reward process receives: `_OF_A_ROW`, and `response`, `prompt`, `prompts` (the prompt as its row has it), `columns`
(of the row)."""
_OF_A_ROW = ("ground_truth", "data_source", "extra_info")
RESPONSE = ("response", "completion", "solution_str")
"""Names of the text of the response."""
OFFERED_BY_JUDGE = ("reward_router_address", "reward_model_tokenizer")
"""Further parameters that a reward function may have with `reward.judge.functions_ask`."""
TOKENS = "completion_ids"
"""Parameter with the tokens of the responses, which are sent only to functions that name it."""


@dataclass(frozen=True)
class Form:
    """One way to call a reward function."""

    marks: tuple[str, ...]
    """Parameters that show this form; the form without any is that of all other functions."""
    about: str
    """How functions are called, for the line at the start of a run."""
    offered: tuple[str, ...]
    """Parameters that the program fills, in addition to the columns of a row."""
    arguments: Callable[[Scored], dict[str, Any]]
    """What is scored -> value of each parameter."""
    score: Callable[[Any], float | None]
    """Result of the function -> reward; None if the function does not apply to the response."""


def _of_one(scored: Scored) -> dict[str, Any]:
    judge = {name: scored[name] for name in OFFERED_BY_JUDGE if name in scored}
    row_values = {name: scored[name] for name in (*_OF_A_ROW, "prompt")}
    return {**scored["columns"], **row_values, **judge, **dict.fromkeys(RESPONSE, scored["response"])}


def _number(result: Any) -> float:
    score = result.get("score") if isinstance(result, dict) else result
    if not _is_number(score):
        hint = "; is a `return` missing?" if result is None else ""
        raise UserError(f"a reward function must return a number or {{'score': number}}: got {shown(result)}{hint}")
    return float(score)


def _is_number(value: Any) -> TypeGuard[SupportsFloat]:
    """Return whether a value is a number, or holds one as arrays do. A text is none, whatever it says."""
    return hasattr(type(value), "__float__") and not isinstance(value, str | bytes)


def _of_lists(scored: Scored) -> dict[str, Any]:
    """Return lists with one element each. Completions are messages where the prompts are, as in TRL."""
    prompt, text = scored["prompts"], scored["response"]
    completion = [{"role": "assistant", "content": text}] if isinstance(prompt, list) else text
    tokens = {TOKENS: scored[TOKENS]} if TOKENS in scored else {}
    # In TRL a column has the name that it has in the data.
    row_values = {name: scored[name] for name in _OF_A_ROW} | scored["columns"]
    return {name: [value] for name, value in {**row_values, "prompts": prompt, "completions": completion, **tokens}.items()}


def _only_number(result: Any) -> float | None:
    numbers = _numbers(result)
    if numbers is None or len(numbers) != 1:
        raise UserError(
            "a reward function with the parameter completions must return a list with a number, or None, for each of "
            f"them: got {shown(result)} for a list of one"
        )
    return numbers[0]


def _numbers(result: Any) -> list[float | None] | None:
    """Return the elements of a list or an array; None if it is none, or has others than numbers and None."""
    if isinstance(result, str | dict) or not (hasattr(result, "__len__") and hasattr(result, "__getitem__")):
        return None
    elements = [result[place] for place in range(len(result))]
    if not all(element is None or _is_number(element) for element in elements):
        return None
    return [None if element is None else float(element) for element in elements]


LISTS = Form(
    ("completions",),
    "with lists of one element, as TRL calls it",
    ("completions", "prompts", TOKENS, *_OF_A_ROW),
    _of_lists,
    _only_number,
)
ONE = Form((), "with one response", (*RESPONSE, *_OF_A_ROW, "prompt"), _of_one, _number)
FORMS = (LISTS, ONE)


def form_of(parameters: Parameters) -> Form:
    """Return the first form of which the function has a parameter."""
    return next(form for form in FORMS if not form.marks or set(form.marks) & set(parameters.named))


def check_binding(name: str, parameters: Parameters, columns: Collection[str], judge: Sequence[str] = ()) -> None:
    """Raise UserError for a required parameter that is neither offered nor a column of the row.

    `judge`: parameters that are offered because functions send requests to a judge.
    """
    form = form_of(parameters)
    offered = (*form.offered, *(judge if form is ONE else ()))
    if lacking := [parameter for parameter in parameters.required if parameter not in offered and parameter not in columns]:
        further = [column for column in columns if column not in offered]
        rest = f", the columns of its row ({', '.join(further)})" if further else ""
        raise UserError(
            f"reward {name!r} must have no required parameter that is not offered: got {', '.join(lacking)}; it is called "
            f"{form.about}, and its parameters may be {', '.join(offered)}{rest}, or have defaults"
        )


def check_by_name(name: str, parameters: Parameters) -> None:
    """Raise UserError for a function whose parameters cannot be passed by name."""
    if parameters.positional:
        raise UserError(
            f"reward {name!r} must take its parameters by name: got {', '.join(parameters.positional)} before a `/`; its "
            f"parameters may be {', '.join(form_of(parameters).offered)}, and columns of the data"
        )


def column_names(parameters: Parameters) -> list[str]:
    """Return the parameters that must be columns of the data, because the program does not fill them."""
    return [
        parameter for parameter in parameters.named if parameter not in (*form_of(parameters).offered, *OFFERED_BY_JUDGE)
    ]


def columns_of(parameters: Parameters | None) -> tuple[str, ...] | None:
    """Return the columns that a function reads by parameters of their names; None if it may read any."""
    if parameters is None or parameters.takes_any:
        return None
    # A column takes precedence over what is offered under its name: see `_of_lists`.
    further = [column for column in _OF_A_ROW if column in parameters.named] if form_of(parameters) is LISTS else []
    return (*column_names(parameters), *further)


def describe(name: str, function: RewardFunction) -> str:
    """Return how a function is called, for the line at the start of a run."""
    parameters = Parameters.of(function)
    names = ", ".join([*parameters.named, *(["**"] if parameters.takes_any else [])])
    return f"{name}({names}) is called {form_of(parameters).about}"


def call(name: str, function: RewardFunction, scored: Scored) -> float | None:
    """Call a reward function with the values that its parameters name; None if it does not apply to the response.

    The function may be asynchronous.
    """
    parameters = Parameters.of(function)
    form = form_of(parameters)
    values = form.arguments(scored)
    check_binding(
        name, parameters, scored["columns"], [value_name for value_name in OFFERED_BY_JUDGE if value_name in scored]
    )
    chosen = (
        values
        if parameters.takes_any
        else {value_name: value for value_name, value in values.items() if value_name in parameters.named}
    )
    return form.score(_awaited(function(**chosen)))


def lists_matter(function: RewardFunction, scored: Scored) -> bool:
    """Whether a function of lists gives a response another reward when the list has two of them.

    Here it never has: such a function would compute something else than in TRL.
    """
    parameters = Parameters.of(function)
    if form_of(parameters) is not LISTS:
        return False
    chosen = {
        parameter: value
        for parameter, value in LISTS.arguments(scored).items()
        if parameters.takes_any or parameter in parameters.named
    }
    other = LISTS.arguments({**scored, "response": f"{scored['response']} {scored['response']}."})
    pairs = {name: [*value, *other[name]] for name, value in chosen.items()}
    first, second, both = (
        _numbers(_awaited(function(**arguments))) or []
        for arguments in (chosen, {name: other[name] for name in chosen}, pairs)
    )
    # Compared as texts, since NaN is unequal to itself.
    return str(both) != str([*first, *second])


def _awaited(result: Any) -> Any:
    return asyncio.run(_await(result)) if inspect.isawaitable(result) else result


async def _await(result: Awaitable[Any]) -> Any:
    return await result
