"""Data files: rows -> tokenized prompts, in an order that can be resumed."""
