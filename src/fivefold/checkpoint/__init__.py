"""What a run writes to resume from, and what leaves it."""
