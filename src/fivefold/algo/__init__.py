"""Objectives: pure functions of tensors."""

from fivefold.algo.objective import Objective, make_objective

__all__ = ["Objective", "make_objective"]
