"""Experiment trackers: a process next to the run passes the run's files to each tracker through its library."""
