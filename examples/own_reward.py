"""The reward of own_reward.yaml: any function that takes `response`, `ground_truth`, `prompt`, ... by name."""

from __future__ import annotations


def concise(response: str, ground_truth: str) -> float:
    """Return 1 if the response ends with the ground truth, less 0.001 for each character."""
    return float(response.strip().endswith(ground_truth)) - 0.001 * len(response)
