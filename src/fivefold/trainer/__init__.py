"""The training loop and its parts: mini-batches, models, checks, evaluation, resume."""
