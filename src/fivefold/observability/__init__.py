"""What a run shows and records: console, metrics, samples, reports, trackers."""
