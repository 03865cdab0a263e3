"""Our own spelling: nothing is translated."""

from __future__ import annotations

from fivefold.config.dialects import Translation, Tree


def translate(tree: Tree, overrides: list[str]) -> Translation:
    """The configuration as it was written."""
    return Translation(tree, overrides)
