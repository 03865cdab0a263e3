"""Checkpoints of a run, from which it resumes, and their export."""
