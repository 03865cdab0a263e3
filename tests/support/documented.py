"""Metrics without a row in the table of observability/metrics.py."""

from __future__ import annotations

from collections.abc import Iterable

from fivefold.observability.metrics import find


def undocumented(names: Iterable[str]) -> list[str]:
    return sorted({name for name in names if find(name) is None})
