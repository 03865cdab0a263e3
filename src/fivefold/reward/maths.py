"""Rewards for answers that are numbers or formulas: the answer of a response -> whether it equals the truth."""

from __future__ import annotations

import json
import re
from decimal import Decimal, InvalidOperation
from typing import Any

from fivefold.reward.boxed import last_boxed

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d*)?(?:[eE][-+]?\d+)?")
_HASHES = re.compile(r"#{4,}")
_SPACING = re.compile(r"\\[,!;: ()\[\]]|\{,\}|\\?\$\s*|(?<=,)\s+(?=\d{3})|(?<=\d)\s+(?=\d{3}(?!\d))")
"""Signs without meaning inside a number: a dollar, thin spaces, spaces between thousands, braces around a comma."""
_STATES_NUMBER = re.compile(r"(?:=\s*)?[-+]?(?:\.?\d|\\[dtc]?frac|\\sqrt)")
_REMARK = re.compile(r"(?:[,;.]|\s\()\s[a-zA-Z].*|\s\([a-zA-Z].*")
"""Words after a stated number that are not its unit."""
_OPERATORS = r"[-+*/:^×÷·−–\s]*+"
_CALCULATION = re.compile(
    rf"{_OPERATORS}(?:[xX]\s*+)?\.?\d|{_OPERATORS}(?<!\s)[({{]|[.,;]\s*\d|[¹²³¼½¾]"
    rf"|{_OPERATORS}\\(?:[dtc]?frac|sqrt|times|cdot|div|pm|mp|pi)(?![a-zA-Z])"
)
"""Text that makes the number before it a part of a calculation, a range or a list."""
_UNIT = re.compile(r"(?:\s*\\?%|\s*\\(?:text|mathrm|mbox)[a-z]*\{[^{}\d]*\}(?:\^\{?\d\}?)?|(?:\s+[a-zA-Z]{2,})+)?[\s.,]*")
_BOLD = re.compile(r"(?<![\w)\]}!*])(\*\*\*?)(?=[^\s*])((?:[^*\n]|(?<!\*)\*(?!\*))+)(?<=[^\s*])\1(?![\w(\[{*])")
"""Bold text of Markdown. A power follows a number or a bracket, or a number or a bracket follows it."""


def _number(text: str) -> Decimal | None:
    """Return the number if the whole text is one, otherwise None; commas may stand between thousands only."""
    plain = _plain(text).rstrip(".,")
    if not _NUMBER.fullmatch(plain):
        return None
    try:
        return Decimal(plain.replace(",", ""))
    except InvalidOperation:
        # No digit before the exponent, or an exponent beyond those of Decimal.
        return None


def gsm8k_answer(response: str) -> Decimal | None:
    r"""Return the number that follows the last `####` in its line, or that is in the last \boxed{}; None if there is none.

    A unit may follow it. Of an equation the right side counts. The beginning of a calculation, such as `1/2`, is no number.
    """
    lines = [_plain(text.strip().partition("\n")[0]) for text in _HASHES.split(response)[1:]]
    stated = next((line for line in reversed(lines) if _STATES_NUMBER.match(line)), None)
    boxed = last_boxed(response) if stated is None else None
    answer = _REMARK.sub("", stated or _plain(boxed or "")).rpartition("=")[2].strip()
    number = _NUMBER.match(answer)
    assert number is not None
    is_part = _CALCULATION.match(answer, number.end()) if boxed is None else not _UNIT.fullmatch(answer, number.end())
    return None if is_part else _number(number[0])


def _plain(text: str) -> str:
    """Return a text without bold and without signs that mean nothing inside a number."""
    return _SPACING.sub("", _BOLD.sub(r"\2", text)).strip()


def gsm8k(response: str, ground_truth: str) -> float:
    """Return 1 if the stated number equals the truth as a number, 0 otherwise."""
    answer, truth = gsm8k_answer(response), _number(ground_truth)
    return float(answer is not None and answer == truth)


def gsm8k_fault(ground_truth: str) -> str | None:
    return None if _number(ground_truth) is not None else "must be a number"


def math(response: str, ground_truth: str) -> float:
    r"""Return 1 if the answer equals the truth mathematically (math-verify); the last \boxed{} is read if there is one.

    An answer that cannot be computed (thousands of digits, powers of powers) is right only if it is written like the truth.
    If a box, or without one the last phrase with a number, states several sides, such as `x = 2 + 3 = 5`, every side without
    a letter must equal the truth. Bold text is read as plain text.
    """
    boxed = last_boxed(response)
    answer = _BOLD.sub(r"\2", response[-_LONGEST_ANSWER:] if boxed is None else boxed)
    if "".join(answer.split()) == "".join(ground_truth.split()):
        return 1.0
    if is_large(answer) or _GLUED.search(answer) or _repeats_piece(answer) or (boxed is None and _repeats_word(answer)):
        return 0.0
    stated, latex = (_last_phrase(answer), answer) if boxed is None else (answer, f"\\boxed{{{answer}}}")
    return float(_verify(latex, ground_truth) == 1 and _sides_agree(stated, ground_truth))


def math_any(response: str, ground_truth: str) -> float:
    r"""Return 1 if `math` is 1 for a solution in a JSON list of texts; for a text with a \boxed{}, its content counts."""
    solutions = json.loads(ground_truth)
    return float(any(math(response, last_boxed(text) or text) for text in solutions))


def math_fault(ground_truth: str) -> str | None:
    return None if ground_truth.strip() else "must not be empty"


def math_any_fault(ground_truth: str) -> str | None:
    try:
        texts = json.loads(ground_truth)
    except (ValueError, RecursionError):
        texts = None
    is_list = isinstance(texts, list) and bool(texts) and all(isinstance(text, str) and text.strip() for text in texts)
    return None if is_list else "must be a JSON list of solutions"


def load_math() -> None:
    """Import and prepare math-verify, which takes longer than the time limit of an answer."""
    _verify("\\boxed{\\frac{1}{2}}", "0.5")


def _verify(answer: str, ground_truth: str, **rounding: Any) -> float:
    from math_verify import parse, verify

    # math-verify's own time limits use real time, which depends on the machine's load.
    truth = parse(f"\\boxed{{{ground_truth}}}", parsing_timeout=None)
    return float(verify(truth, parse(answer, parsing_timeout=None), timeout_seconds=None, **rounding))


_OF_VALUES = (
    "[dtc]?frac", "sqrt", "[dt]?binom", "cdot", "times", "div", "pm", "mp", "sum", "prod", "int", "lim", "overline", "infty",
    "(?:arc)?(?:sin|cos|tan)h?", "cot", "sec", "csc", "log", "ln", "lg", "exp", "gcd", "max", "min", "det", "[pb]?mod",
    "left", "right", "[bB]igg?[lr]?", "[lr](?:floor|ceil|vert|angle|brace)", "begin", "end", "boxed",
    "text[a-z]*", "math[a-z]*", "operatorname", "displaystyle", "bf", "rm", "[a-z]*space", "q?quad", "degree", "prime",
    "cup", "cap", "setminus", "emptyset", "in", "notin", "[lg]eq?", "[lg]t", "neq?",
    "(?i:alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|pi|rho|sigma|tau|phi|chi|psi|omega)",
    "var[a-z]+",
)  # fmt: skip
r"""Commands of LaTeX that may be part of a value. math-verify reads only what follows any other, such as `\iff`."""
_RELATION = re.compile(
    r"(?<![<>!\\]):?=+"
    r"|(?<=\d)\.\s"
    r"|[\u2190-\u21ff\u2234\u223c-\u225f\u2261\u27f0-\u27ff\uff1d]"
    rf"|(?<!\^)(?<!\^\{{)\\(?!(?:{'|'.join(_OF_VALUES)})(?![a-zA-Z]))[a-zA-Z]+"
)
"""Signs between the sides of a statement: equality and the like in LaTeX and Unicode, and a full stop."""
_BREAK = re.compile(r"[$\n;:?!](?!=)|[.,](?!\d)|(?<![\\a-zA-Z])[a-zA-Z]{2,}")
"""Signs and words between the phrases of a text."""
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_GLUED = re.compile(r"%\d[\d.,]*\\?%[\s.$)\]}]*$")
"""Two percentages at the end with nothing between them."""
_THOUSANDS = re.compile(r"(?<=\d)(?:,|\{,\}|\\[,;! ]?)(?=\d{3}(?!\d))")
"""Signs between the thousands of a number."""
_SEVERAL = re.compile(r"[,;]|\\[pm][mp](?![a-zA-Z])|\b(?:or|and)\b")
"""Signs of a truth that has several values."""
_LOOP = 3
"""Number of equal words at the end of a text that show a loop instead of an answer."""
_LOOP_OF_PIECES = 6
"""Number of equal pieces of a digit and another sign, such as `5;`, that show a loop; a list or a sum may repeat fewer."""
_LONGEST_PIECE = 20


def _sides_agree(statement: str, ground_truth: str) -> bool:
    """Return whether every side that is a number equals the truth, to two decimals; math-verify compares only the last.

    If the truth has several values, such as those of `x = 2, y = 3`, the sides are compared with the last one.
    """
    if not _RELATION.search(statement) or _RELATION.search(ground_truth):
        return True
    sides = [piece for side in _sides(statement) if not _has_letter(side) for piece in _RELATION.split(side)]
    numbers = [side for side in sides if any(map(str.isdecimal, side))]
    value = numbers.pop() if numbers and _SEVERAL.search(_THOUSANDS.sub("", ground_truth)) else ground_truth
    return all(_is_near(side, value) for side in dict.fromkeys(numbers))


def _sides(statement: str) -> list[str]:
    """Return the sides of a statement; a relation in brackets, as in `P(X = 2)`, splits it only if there is no other."""
    sides: list[str] = []
    for piece in _RELATION.split(statement):
        if sides and not _is_closed(sides[-1]):
            sides[-1] += f"={piece}"
        else:
            sides.append(piece)
    return sides if len(sides) > 1 else _RELATION.split(statement)


def _has_letter(side: str) -> bool:
    return any(map(str.isalpha, _COMMAND.sub("", side)))


def _is_closed(text: str) -> bool:
    """Return whether as many brackets close as open."""
    opened, closed = (sum(map(text.count, signs)) for signs in ("([{", ")]}"))
    return opened == closed


def _is_near(side: str, value: str) -> bool:
    """Return whether a side equals a value to two decimals, with its commas between thousands or as a list."""
    plain = side.strip().rstrip(".")
    readings = dict.fromkeys((plain, _THOUSANDS.sub("", plain)))
    return any(_verify(f"\\boxed{{{reading}}}", value, float_rounding=2) for reading in readings)


def _last_phrase(text: str) -> str:
    """Return the last phrase of a text that has a digit; an empty text if none has, or if it ends within brackets."""
    phrase = next((phrase for phrase in reversed(_BREAK.split(text)) if any(map(str.isdecimal, phrase))), "")
    return phrase if _is_closed(phrase) else ""


def _repeats_piece(text: str) -> bool:
    """Return whether a text ends in a piece repeated without spaces: a loop, not an answer."""
    end = _THOUSANDS.sub("", "".join(text.split()))
    pieces = (end[-size:] for size in range(2, _LONGEST_PIECE + 1))
    return any(
        end.endswith(piece * _LOOP_OF_PIECES) and any(map(str.isdecimal, piece)) and not piece.isdecimal()
        for piece in pieces
    )


def _repeats_word(text: str) -> bool:
    """Return whether a text ends in one word repeated: a loop, not an answer."""
    words = text.split()[-_LOOP:]
    return len(words) == _LOOP and len(set(words)) == 1


_LONGEST_ANSWER = 1000
"""Largest number of characters of an answer; without a box, the answer is searched in so many at the end."""
_LARGEST_EXPONENT = 10_000
_LARGEST_FACTORIAL = 2000
_LARGE_NUMBER = re.compile(r"\d{1000}|\d[eE]\+?\d{5}|binom\s*\{?\s*\d{5}")
_SMALL_TOWER = re.compile(r"\^\s*\{\s*(\d{1,2})\s*\^\s*\{?\s*(\d)\s*\}?\s*\}")
_TOKEN = re.compile(r"\\[a-zA-Z]+|\d+|\*\*|\S")


def is_large(latex: str) -> bool:
    """Return whether numbers in an answer may be too large to compute, judged by their text, in linear time.

    An exponent is at most 10,000. So are the products within it, and the product of the exponents that follow a number or a
    bracket. A power or factorial of a number in an exponent is large, unless it is as small as 3^2.
    """
    if len(latex) > _LONGEST_ANSWER or _LARGE_NUMBER.search(latex):
        return True
    latex = _SMALL_TOWER.sub(lambda match: f"^{{{int(match[1]) ** int(match[2])}}}", latex)
    tokens = [token for token in _TOKEN.findall(latex) if token not in ("\\left", "\\right")]
    numeric = not any(token.isalpha() for token in tokens)
    opened: list[str] = []
    raised, previous, together, product = "", " ", 1, 1
    was_exponent = False
    for token in tokens:
        of_number = previous.isdecimal() or previous in ")}]!"
        in_exponent, opened_by_number = any(opened), "number" in opened
        product = product if in_exponent else 1
        if token in ("^", "**"):
            if of_number and was_exponent:
                return True
            raised = "tower" if of_number and in_exponent else "number" if of_number else "symbol"
        elif token in "{([":
            opened.append(raised)
        elif token in "})]":
            was_exponent = bool(opened) and bool(opened.pop())
        elif token.isdecimal():
            value = int(token)
            together *= max(value, 1) if raised == "number" else 1
            product *= max(value, 1) if in_exponent and opened_by_number else 1
            if (raised or in_exponent) and (raised == "tower" or max(value, together, product) > _LARGEST_EXPONENT):
                return True
        elif token in "+-" and opened and opened[-1]:
            # A new term of the exponent itself; inside further brackets it may be multiplied.
            product = 1
        elif token == "!" and (
            (previous.isdecimal() and int(previous) > _LARGEST_FACTORIAL)
            or (of_number and in_exponent)
            or (previous in ")}]!" and numeric)
        ):
            return True
        if token not in ("^", "**", "{", "(", "[", "-", "+"):
            if token not in "})]":
                was_exponent = previous in ("^", "**")
            raised = ""
        previous = token
    return False


def format(response: str, ground_truth: str) -> float:
    r"""Return 1 if the response states an answer where it is expected: one `####` with a number, or a \boxed{}."""
    return float(gsm8k_answer(response) is not None or bool((last_boxed(response) or "").strip()))
