"""Rewards for responses with tagged parts: reasoning in <think>, the answer in <answer>."""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable
from fractions import Fraction

_ARITHMETIC = re.compile(r"[\d+\-*/().\s]+")
_BOTH = re.compile(r"</think>\s*<answer>")
_END = re.compile(r"</answer>\s*$", re.MULTILINE)
_LONGEST = 1000
"""Largest number of characters of an equation."""
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def think_answer(response: str, ground_truth: str) -> float:
    """Return 1 if <think>...</think> and then <answer>...</answer> at the end of a line are in the response, -1 otherwise.

    DeepSeek-R1's form (2501.12948 table 1).
    """
    begin = response.find("<think>")
    between = _BOTH.search(response, begin + len("<think>")) if begin >= 0 else None
    return 1.0 if between and _END.search(response, between.end()) else -1.0


def think(response: str, ground_truth: str) -> float:
    """Return 0 if the response has one <think> and one </think> after it, -1 otherwise."""
    is_formed = response.count("<think>") == 1 == response.count("</think>")
    return 0.0 if is_formed and response.find("<think>") < response.find("</think>") else -1.0


def countdown(response: str, ground_truth: str) -> float:
    """Return 1 for an equation that uses every number of the truth once and has its target.

    Return 0.1 for another equation, 0 for none. TinyZero's task: the last <answer> of the last line; the truth is JSON,
    `{"target": 98, "numbers": [44, 19, 35]}`.
    """
    truth = json.loads(ground_truth)
    answer = _last_answer(response.rpartition("\n")[2])
    if answer is None:
        return 0.0
    equation = answer.strip()
    used = sorted(int(number) for number in re.findall(r"\d{1,18}", equation))
    if used != sorted(truth["numbers"]) or not _ARITHMETIC.fullmatch(equation) or len(equation) > _LONGEST:
        return 0.1
    value = _value(equation)
    return 1.0 if value is not None and abs(value - Fraction(truth["target"])) < Fraction(1, 100_000) else 0.1


def _last_answer(line: str) -> str | None:
    """Return the text between the last <answer> and the next </answer>, in linear time, unlike a regular expression."""
    answer, begin = None, line.find("<answer>")
    while begin >= 0 and (end := line.find("</answer>", begin)) >= 0:
        answer, begin = line[begin + len("<answer>") : end], line.find("<answer>", end)
    return answer


def _value(equation: str) -> Fraction | None:
    """Return the exact value of sums, products and quotients; None for any other text, powers included."""
    try:
        return _of(ast.parse(equation, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _of(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        return -_of(node.operand) if isinstance(node.op, ast.USub) else _of(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_of(node.left), _of(node.right))
    raise ValueError(f"no arithmetic: {ast.dump(node)}")


def countdown_fault(ground_truth: str) -> str | None:
    """Return the requirement that a ground truth of countdown violates, or None."""
    try:
        truth = json.loads(ground_truth)
        if isinstance(truth["target"], (int, float)) and all(isinstance(number, int) for number in truth["numbers"]):
            return None
    except (ValueError, TypeError, KeyError):
        pass
    return 'must be {"target": number, "numbers": [whole numbers]}'
