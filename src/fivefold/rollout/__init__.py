"""Where a step's samples come from, and how they become a batch."""
