"""Keys of dynamic sampling, which replaces prompts that teach nothing (rollout/sources.py samples)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from fivefold.algo.part import Case, Part, usual
from fivefold.keys.ranges import above, within


@dataclass(frozen=True)
class DynamicSampling(Part):
    """Whether prompts are replaced, and by which reward."""

    dynamic_sampling: bool = usual(False)
    """Replace prompts whose responses all have the same reward: sample further prompts."""
    dynamic_sampling_by: Literal["reward", "shaped_reward"] = usual("reward")
    """Reward that dynamic sampling compares: the reward itself, or as the method shapes it (`overlong_buffer`,
    `reward_clip`)."""
    dynamic_sampling_low: Annotated[float, within("[-1e9, 1e9]")] | None = None
    dynamic_sampling_high: Annotated[float, within("[-1e9, 1e9]")] | None = None
    """Bounds of dynamic sampling on a prompt's mean reward, instead of equal rewards: keep prompts not below the one and not
    above the other."""
    dynamic_sampling_max_tokens: Annotated[int, above(0)] | None = None
    """Maximum response length for dynamic sampling, in tokens: prompts with a longer response are not kept."""

    @classmethod
    def check(cls, case: Case) -> None:
        chosen, overrides, findings = cls.of(case.chosen), case.overrides, case.findings
        limits = ("dynamic_sampling_low", "dynamic_sampling_high", "dynamic_sampling_max_tokens")
        case.require_off("dynamic_sampling", "dynamic_sampling_by", *limits)
        findings.require(
            case.group_size > 1 or not chosen.dynamic_sampling,
            "dynamic_sampling",
            "needs a group_size of at least 2: one sample alone never differs from the others",
        )
        low, high = chosen.dynamic_sampling_low, chosen.dynamic_sampling_high
        if low is not None and high is not None:
            message = f"must satisfy dynamic_sampling_low <= dynamic_sampling_high: got {low:g} and {high:g}"
            findings.require(low <= high, "dynamic_sampling_low and dynamic_sampling_high", message)
        if not chosen.dynamic_sampling:
            for key in (*limits, "dynamic_sampling_by"):
                if getattr(overrides, key) is not None:
                    findings.ignore(key, "dynamic_sampling is off")
        elif (
            overrides.dynamic_sampling_by == "shaped_reward"
            and not case.chosen.overlong_buffer
            and case.chosen.reward_clip is None
        ):
            findings.ignore("dynamic_sampling_by", "neither overlong_buffer nor reward_clip changes a reward")
