"""Spellings and programs of before 2026, frozen: they are read as they were, and nothing is added."""
