"""Parallel layouts: which rank holds what. No torch here."""

from fivefold.layout.allocation import Allocation
from fivefold.layout.parallel import Coordinates, ParallelLayout
from fivefold.layout.pipeline import PipelineSplit

__all__ = ["Allocation", "Coordinates", "ParallelLayout", "PipelineSplit"]
