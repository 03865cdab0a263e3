"""Output of a run: console, metrics, samples, reports, trackers."""
