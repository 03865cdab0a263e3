"""Shares of a replica, as a step deals them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def shard_of_replica(ranks: Any, items: Sequence[Any]) -> list[Any]:
    """Return the part of this rank's replica: item i belongs to replica i mod dp."""
    return list(items[ranks.coords.dp :: ranks.layout.dp]) if ranks.holds else []
