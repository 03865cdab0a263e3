"""What tests of `fsdp:` layouts share: the settings of a layout, and cases of families on layouts."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import pytest

from fivefold.config.learners import FSDPConfig, PolicyConfig
from tests.support.two_steps import POLICY


def policy_of(layout: str, budget: int = 32, **options: Any) -> PolicyConfig:
    """Settings of a layout such as `d4 replicas`: with two whole copies."""
    replicas = 2 if "replicas" in layout else 1
    return replace(POLICY, tokens_per_micro_batch=budget, fsdp=FSDPConfig(replicas=replicas), **options)


def cases(names: Iterable[str], layouts: Collection[str], plain: Collection[tuple[str, str]] = ()) -> list[Any]:
    """Cases (model, layout, budget) for a test: those in `plain` are in the plain suite, the others in `make test-fsdp`.

    With two ranks the whole batch is computed in one micro-batch too.
    """
    return [
        pytest.param(name, layout, budget, marks=() if (name, layout) in plain and budget == 32 else pytest.mark.fsdp)
        for name in names
        for layout in layouts
        for budget in ((1000, 32) if layout in ("d2", "c2", "t2") else (32,))
    ]
