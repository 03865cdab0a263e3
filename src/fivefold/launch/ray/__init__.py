"""Runs the ranks on a Ray cluster. Only this package imports Ray."""
