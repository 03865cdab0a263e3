"""Sources of a step's samples, and how samples become a batch."""
