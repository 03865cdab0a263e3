"""Data files: rows -> tokenized prompts, in an order that a resumed run continues."""
