"""Coordinates of the ranks, their exchanges on the host, and the assignment of samples to them."""
