"""The loop, and what surrounds its steps: mini-batches, models, checks, evaluation, resume."""
