"""Experiment trackers: each gets what the run writes to its own files, in a process next to the run, through its library."""
