"""Objectives: pure functions of tensors, and the table of published methods."""

from fivefold.algo.objective import METHODS, Objective

__all__ = ["METHODS", "Objective"]
