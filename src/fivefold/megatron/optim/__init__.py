"""Optimizer and schedule."""
