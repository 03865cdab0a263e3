"""Rewards of how a text is written: the letter of a choice, n-grams that come again."""

from __future__ import annotations

import re

from fivefold.reward.boxed import last_boxed

_CAPITAL = re.compile(r"[A-Z]")
_ANSWER_IS = "answer is"
_WORDS = 3
_SOFT = {(True, True): 1.0, (True, False): 0.5, (False, True): -0.5, (False, False): -1.0}
"""(right, in a box) -> reward."""


def after_thinking(response: str) -> str:
    """What stands behind the last </think>; everything where there is none."""
    return response.rpartition("</think>")[2].lstrip("\n")


def _choice(response: str) -> tuple[str, bool]:
    r"""(the letter that is chosen, whether it stands in a box).

    It is the first capital in the last \boxed{}; without a box behind the last "answer is", or of the whole text.
    """
    text = after_thinking(response)
    boxed = last_boxed(text)
    if boxed is None:
        place = text.lower().rfind(_ANSWER_IS)
        found = _CAPITAL.search(text, 0 if place < 0 else place + len(_ANSWER_IS))
    else:
        found = _CAPITAL.search(boxed)
    return "" if found is None else found[0], boxed is not None


def choice_fault(ground_truth: str) -> str | None:
    """What must hold of the truth of a multiple choice, where it does not."""
    return None if ground_truth[:1].isupper() else "must begin with the capital letter of the right choice"


def multiple_choice(response: str, ground_truth: str) -> float:
    """1 when the letter that is chosen is the truth's first one, 0 otherwise."""
    return float(_choice(response)[0] == ground_truth[:1])


def multiple_choice_soft(response: str, ground_truth: str) -> float:
    r"""1 and -1 for right and wrong letters, halved where a right one is not in a \boxed{} and where a wrong one is.

    A wrong letter without a box has -1, one in a box -0.5; a right one has 0.5 and 1 (ROLL's `soft`).
    """
    letter, is_boxed = _choice(response)
    return _SOFT[letter == ground_truth[:1], is_boxed]


def repetition(response: str) -> float:
    """The share of the response's 3-grams of words, in lower case, that occurred in it before (2502.03373, its penalty)."""
    words = response.lower().split()
    grams = list(zip(*(words[begin:] for begin in range(_WORDS)), strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
