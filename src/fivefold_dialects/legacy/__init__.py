"""Read configurations and programs from before 2026; this package is frozen, nothing is added."""
