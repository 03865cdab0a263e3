"""Objectives: their keys and rules, and pure functions of tensors."""
