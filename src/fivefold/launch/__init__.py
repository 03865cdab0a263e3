"""Starts the ranks of a run and ends them."""
