"""data_source -> texts, one of which a response must have to be right by its reward."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from fivefold.config.scoring import RewardConfig
from fivefold.errors import UserError
from fivefold.reward.choose import choose_rewards

_BOX = "\\boxed{"
FORMS: dict[str, tuple[str, ...]] = {
    "gsm8k": ("####", _BOX),
    "format": ("####", _BOX),
    "math": (_BOX,),
    "math_any": (_BOX,),
    "think": ("<think>",),
    "think_answer": ("<answer>",),
    "countdown": ("<answer>",),
    "verl_gsm8k": ("#### ",),
    "verl_gsm8k_first": ("#### ",),
    "verl_math": (_BOX,),
    "verl_math_dapo": ("Answer:",),
    "verl_math_dapo_boxed": ("Answer:", _BOX),
}
"""Built-in reward -> the texts that announce the answer. `math` also reads an answer without a box, but less reliably."""


def forms_by_source(config: RewardConfig) -> Callable[[str], tuple[str, ...]]:
    """Return a function from a data_source to the forms of the reward that decides whether a response is correct."""

    @cache
    def forms(source: str) -> tuple[str, ...]:
        try:
            return FORMS.get(choose_rewards(config, source).accuracy or "", ())
        except UserError:
            # Nothing scores this source.
            return ()

    return forms
