"""Parallel layouts: which rank holds what. No torch here."""

from fivefold.layout.parallel import Coordinates, ParallelLayout

__all__ = ["Coordinates", "ParallelLayout"]
