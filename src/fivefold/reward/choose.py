"""data_source -> its rewards."""

from __future__ import annotations

from fivefold.config.schema import RewardConfig
from fivefold.reward.rules import SOURCES, check_name


def choose_rewards(config: RewardConfig, source: str) -> dict[str, float]:
    """Reward name -> weight for a data_source: its own, the common ones, or the built-in one that fits.

    With a reward model none is chosen by itself: it may be all the reward there is.
    """
    weights = config.by_source.get(source) or config.functions
    if not weights and config.model.path is None:
        if source not in SOURCES:
            raise ValueError(
                f"no reward is known for data_source {source!r}: name one in reward.functions or reward.by_source; "
                f"chosen by themselves: {', '.join(SOURCES)}"
            )
        weights = {SOURCES[source]: 1.0}
    for name in weights:
        check_name(name)
    return weights
