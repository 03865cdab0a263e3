"""Rewards: rules on texts, run in processes of their own. No torch in those processes."""
