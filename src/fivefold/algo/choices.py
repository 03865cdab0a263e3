"""The choices of an objective as keys: every part's fields, each with None for the method's choice. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.algo.aggregate import Aggregation
from fivefold.algo.correction import Correction
from fivefold.algo.dynamic_sampling import DynamicSampling
from fivefold.algo.part import Chosen, Part, with_keys_of
from fivefold.algo.reward_shaping import RewardShaping
from fivefold.algo.sample_filter import SampleFilter
from fivefold.algo.surrogates import SURROGATES
from fivefold.algo.terms import CLASSES
from fivefold.algo.terms.entropy import Entropy
from fivefold.algo.terms.imitation import Imitation
from fivefold.algo.terms.kl import KL
from fivefold.algo.terms.policy_gradient import SurrogateKeys
from fivefold.algo.terms.process_reward import ProcessReward
from fivefold.algo.token_advantages import TokenAdvantages

_BEFORE: tuple[type[Part], ...] = (TokenAdvantages, SurrogateKeys)
"""Parts whose keys come before the parameters of surrogates, as docs/configuration.md lists them."""
_AFTER: tuple[type[Part], ...] = (
    Aggregation, Entropy, KL, Correction, Imitation, ProcessReward, RewardShaping, SampleFilter, DynamicSampling,
)  # fmt: skip
PARTS = (*_BEFORE, *_AFTER, *(part for part in CLASSES if part not in _BEFORE + _AFTER))
"""Every part of an objective with keys."""


@with_keys_of(*_BEFORE, *SURROGATES.values(), *PARTS[len(_BEFORE) :])
@dataclass(frozen=True)
class Choices(Chosen):
    """One choice per axis; None stands for the method's choice."""
