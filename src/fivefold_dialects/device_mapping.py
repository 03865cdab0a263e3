"""Read GPU lists as other systems write them (`list(range(0,8)) + [12, 13]`, `0-7`) without evaluating code."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fivefold.errors import UserError

_RANGE = re.compile(r"list\(range\(\s*(\d+)\s*(?:,\s*(\d+)\s*(?:,\s*(\d+)\s*)?)?\)\)")
_LIST = re.compile(r"(?:list\()?\[((?:\s*\d+\s*,)*(?:\s*\d+)?\s*)\]\)?")
_SPANS = re.compile(r"\d+(?:\s*-\s*\d+)?(?:\s*,\s*\d+(?:\s*-\s*\d+)?)*")
_MOST = 1 << 20


def parse_devices(value: Any) -> list[int]:
    """Return the GPUs in a list, a sum of `list(range(a,b,c))`, `list([a,b])` and `[a,b]`, or spans `0-3,6`, in order.
    Raise UserError for any other value, and for a number that occurs twice."""
    # Python's own text of a list or a number is such a form too.
    numbers = [number for part in str(value).split("+") for number in _numbers(part.strip(), value)]
    if len(set(numbers)) < len(numbers):
        twice = next(number for place, number in enumerate(numbers) if number in numbers[:place])
        raise UserError(f"must name each GPU once: got GPU {twice} more than once in {value!r}")
    return numbers


def ranks_after(policy: Sequence[int], engine: Sequence[int], others: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Return the first rank of each model that has its own GPUs; its ranks come after those of the policy.
    A model is included if it shares no GPU with policy and engine, and either all or no GPUs with each other model."""
    ours: dict[str, int] = {}
    placed: dict[frozenset[int], int] = {}
    first, taken = len(policy), {*policy, *engine}
    for name, gpus in others.items():
        its_gpus = frozenset(gpus)
        if its_gpus and its_gpus not in placed and not its_gpus & taken:
            placed[its_gpus], first, taken = first, first + len(its_gpus), taken | its_gpus
        if its_gpus in placed:
            ours[name] = placed[its_gpus]
    return ours


def _numbers(part: str, whole: Any) -> list[int]:
    if called := _RANGE.fullmatch(part):
        bounds = [int(group) for group in called.groups() if group is not None]
        if 0 in bounds[2:] or max(bounds[:2]) > _MOST:
            raise UserError(_wrong(whole))
        return list(range(*bounds))
    if listed := _LIST.fullmatch(part):
        return [int(number) for number in listed[1].split(",") if number.strip()]
    if not _SPANS.fullmatch(part):
        raise UserError(_wrong(whole))
    numbers: list[int] = []
    for piece in part.split(","):
        first_text, _, last_text = piece.partition("-")
        low, high = int(first_text), int(last_text or first_text)
        if high < low or high > _MOST:
            raise UserError(_wrong(whole))
        numbers += range(low, high + 1)
    return numbers


def _wrong(value: Any) -> str:
    return f"must be a sum of list(range(a,b)) and [a,b], or spans like 0-7: got {value!r}"
