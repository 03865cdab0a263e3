"""What a run writes to go on, and what leaves it."""
