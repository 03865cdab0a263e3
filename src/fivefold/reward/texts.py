"""Rewards on how a text is written: the letter of a choice, repeated n-grams."""

from __future__ import annotations

import re

from fivefold.reward.boxed import last_boxed

_CAPITAL = re.compile(r"[A-Z]")
_ANSWER_IS = re.compile("answer is", re.IGNORECASE | re.ASCII)
_WORDS = 3
_SOFT = {(True, True): 1.0, (True, False): 0.5, (False, True): -0.5, (False, False): -1.0}
"""(right, in a box) -> reward."""


def after_thinking(response: str) -> str:
    """Return the text after the last </think>, or all of it if there is none."""
    return response.rpartition("</think>")[2].lstrip("\n")


def _choice(response: str) -> tuple[str, bool]:
    r"""Return (the chosen letter, whether it is in a box).

    It is the first capital in the last \boxed{}; without a box, the first after the last "answer is", or of the whole text.
    """
    text = after_thinking(response)
    boxed = last_boxed(text)
    if boxed is None:
        match = _CAPITAL.search(text, max((stated.end() for stated in _ANSWER_IS.finditer(text)), default=0))
    else:
        match = _CAPITAL.search(boxed)
    return "" if match is None else match[0], boxed is not None


def choice_fault(ground_truth: str) -> str | None:
    """Return the requirement that the truth of a multiple choice violates, or None."""
    return None if ground_truth[:1].isupper() else "must begin with the capital letter of the right choice"


def multiple_choice(response: str, ground_truth: str) -> float:
    """Return 1 if the chosen letter is the first letter of the truth, 0 otherwise."""
    return float(_choice(response)[0] == ground_truth[:1])


def multiple_choice_soft(response: str, ground_truth: str) -> float:
    r"""Return 1 for a right letter in a \boxed{}, 0.5 for one without; -0.5 for a wrong letter in a box, -1 without (ROLL's
    `soft`)."""
    letter, is_boxed = _choice(response)
    return _SOFT[letter == ground_truth[:1], is_boxed]


def repetition(response: str) -> float:
    """Return the share of the response's 3-grams of lower-case words that occurred in it before (penalty of 2502.03373)."""
    words = response.lower().split()
    grams = list(zip(*(words[begin:] for begin in range(_WORDS)), strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
