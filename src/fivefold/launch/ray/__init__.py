"""The ranks of a run on a Ray cluster. Ray enters the package here and nowhere else."""
