"""What tests of `fsdp:` layouts share: settings of a layout, and cases that are computed together."""

from __future__ import annotations

from dataclasses import replace

from fivefold.config.learners import FSDPConfig, PolicyConfig
from tests.support.cluster import Together
from tests.support.two_steps import POLICY


def policy_of(layout: str, budget: int = 32, **options: object) -> PolicyConfig:
    """Settings of a layout such as `d4 replicas`: with two whole copies."""
    replicas = 2 if "replicas" in layout else 1
    return replace(POLICY, tokens_per_micro_batch=budget, fsdp=FSDPConfig(replicas=replicas), **options)


class Lazily:
    """The cases of one layout are computed together, those that are selected only."""

    def __init__(self, cluster, call) -> None:
        self._cluster, self._call, self.wanted = cluster, call, []
        self._together: Together | None = None

    def __getitem__(self, case):
        if self._together is None:
            self._together = Together(self._cluster, {wanted_case: self._call(*wanted_case) for wanted_case in self.wanted})
        return self._together[case]
