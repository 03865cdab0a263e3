"""Rewards: rules on texts, run in separate processes. No torch in those processes."""
