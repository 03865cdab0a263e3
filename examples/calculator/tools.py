"""A tool for products, and the reward of an answer."""

from __future__ import annotations


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


def right(response: str, ground_truth: str) -> float:
    """Return 1 if the last turn is the product."""
    return float(response.splitlines()[-1:] == [ground_truth])
