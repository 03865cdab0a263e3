"""verl's rule-based rewards by its own definitions: results of `default_compute_score`, by data_source.

Taken from verl 0.4.1 to 0.9.1 (verl/utils/reward_score), and tested against answers computed by hand.
"""

from __future__ import annotations

import re

_GSM8K = re.compile(r"#### (-?[0-9.,]+)")
_TAIL = 300
"""Number of characters at the end of a response that are searched."""


def verl_gsm8k(response: str, ground_truth: str) -> float:
    """Return 1 if the number after the last `#### `, without commas, is written like the truth, else 0."""
    stated = _GSM8K.findall(response[-_TAIL:])
    return float(bool(stated) and stated[-1].replace(",", "") == ground_truth)


def verl_gsm8k_first(response: str, ground_truth: str) -> float:
    """Return the `verl_gsm8k` reward for the first `#### ` of the whole response, as in siiRL and verl 0.1 to 0.4."""
    stated = _GSM8K.search(response)
    return float(stated is not None and stated[1].replace(",", "") == ground_truth)


_MATH_TEXT = (
    ("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), ("\\left", ""), ("\\right", ""),
    ("^{\\circ}", ""), ("^\\circ", ""), ("\\$", ""),
)  # fmt: skip
_MATH_PERCENT = (("\\\\%", ""), ("\\%", ""), (" .", " 0."), ("{.", "{0."))
_UNIT = "\\text{ "


def verl_math(response: str, ground_truth: str) -> float:
    r"""Return 1 if the last \boxed{} equals the truth as text, after both are brought into one form (Hendrycks et al.), else
    0."""
    answer = _last_box(response)
    if answer is None:
        return 0.0
    try:
        return float(_math_form(answer) == _math_form(ground_truth))
    except (ValueError, IndexError):
        # A form may be impossible, for example for a \frac at the end: verl then compares the original texts.
        return float(answer == ground_truth)


def _last_box(text: str) -> str | None:
    r"""Return the content of the last \boxed{...}; for `\boxed ` with a space after it, all up to the next $."""
    if "\\boxed " in text:
        return text.rpartition("\\boxed ")[2].partition("$")[0]
    start = text.rfind("\\boxed")
    return _braced(text, start) if text.startswith("\\boxed{", start) and start >= 0 else None


def _braced(text: str, start: int) -> str | None:
    r"""Return the content of the \boxed{ at `start`; None if it does not close."""
    depth = 0
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if text[place] == "}" and depth == 0:
            return text[start + len("\\boxed{") : place]
    return None


def _math_form(text: str) -> str:
    """Return an answer of MATH in one form; raise ValueError or IndexError if a command is incomplete."""
    text = _replaced(text, _MATH_TEXT)
    if _UNIT in text:
        text, unit = text.split(_UNIT)
        del unit
    text = _replaced(text, _MATH_PERCENT)
    if not text:
        return text
    text = f"0{text}" if text[0] == "." else text
    left, equals, right = text.partition("=")
    if equals and "=" not in right and len(left) <= 2:
        text = right
    begin, *roots = text.split("\\sqrt")
    text = begin + "".join(f"\\sqrt{root}" if root[0] == "{" else f"\\sqrt{{{root[0]}}}{root[1:]}" for root in roots)
    text = _fractions(text.replace(" ", ""))
    return _slash("\\frac{1}{2}" if text == "0.5" else text)


def _fractions(text: str) -> str:
    r"""Return the text with `\frac12` and `\frac1{2}` as `\frac{1}{2}`."""
    begin, *rest = text.split("\\frac")
    parts = [begin]
    for part in rest:
        if part[0] == "{":
            parts.append(part)
        elif len(part) < 2:
            return text
        else:
            below = part[1:] if part[1] == "{" else f"{{{part[1]}}}{part[2:]}"
            parts.append(f"{{{part[0]}}}{below}")
    return "\\frac".join(parts)


def _slash(text: str) -> str:
    r"""Return the text with `3/4` of two whole numbers as `\frac{3}{4}`."""
    match = re.fullmatch(r"(0|-?[1-9][0-9]*)/(0|-?[1-9][0-9]*)", text)
    return f"\\frac{{{match[1]}}}{{{match[2]}}}" if match else text


_ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
_MINERVA_TEXT = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"), (",\\text{and}", ","),
    ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
_MINERVA_UNITS = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points", "feet",
    "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students", "childrentickets",
    "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}",
    "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots",
)  # fmt: skip
_MINERVA_FORMS = (
    (re.compile(r".*?\$(.*?)\$.*"), r"$\1$"),
    (re.compile(r"\\text\{(.*?)\}"), r"\1"),
    (re.compile(r"\\textbf\{(.*?)\}"), r"\1"),
    (re.compile(r"\\overline\{(.*?)\}"), r"\1"),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"(frac)([^{])(.)"), r"frac{\2}{\3}"),
    (re.compile(r"(sqrt)([^{])"), r"sqrt{\2}"),
)
_BOX_TAIL = 100


def verl_math_dapo(response: str, ground_truth: str) -> float:
    """Return 1 if the text after the last `Answer:` is the truth in Minerva's form (2206.14858, appendix D.1), else -1."""
    return _signed(_states_answer(response, ground_truth))


def verl_math_dapo_boxed(response: str, ground_truth: str) -> float:
    r"""Return `verl_math_dapo` as in verl 0.9.1: without an `Answer:`, a last \boxed{} counts if written like the truth."""
    stated = _states_answer(response, ground_truth)
    tail = response[-_BOX_TAIL:]
    if stated is None and (start := tail.rfind("\\boxed{")) >= 0:
        stated = _braced(tail, start) == ground_truth
    return _signed(stated)


def _states_answer(response: str, ground_truth: str) -> bool | None:
    """Return whether the response's answer is the truth; None if it states none."""
    stated = _ANSWER.findall(response[-_TAIL:])
    return _minerva_form(stated[-1]) == _minerva_form(ground_truth) if stated else None


def _minerva_form(text: str) -> str:
    text = _replaced(text.rpartition("=")[2], (*_MINERVA_TEXT, *((unit, "") for unit in _MINERVA_UNITS)))
    for pattern, form in _MINERVA_FORMS:
        text = pattern.sub(form, text)
    text = text.replace("$", "")
    return (text.replace(",", "") if text.replace(",", "").isdigit() else text).strip()


def _signed(is_right: bool | None) -> float:
    return 1.0 if is_right else -1.0


def _replaced(text: str, pairs: tuple[tuple[str, str], ...]) -> str:
    for old, new in pairs:
        text = text.replace(old, new)
    return text


SOURCES: dict[str, str] = {
    "openai/gsm8k": "verl_gsm8k",
    **dict.fromkeys(("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"), "verl_math"),
    **dict.fromkeys(("math_dapo", "math", "math_dapo_reasoning", "aime*"), "verl_math_dapo"),
    # PRIME's grader and its programs: ours replace them.
    **dict.fromkeys((f"numina_{name}" for name in (
        "aops_forum", "synthetic_math", "amc_aime", "synthetic_amc", "cn_k12", "olympiads")), "math"),
    **dict.fromkeys(("codecontests", "apps", "codeforces", "taco"), "code_fraction"),
}  # fmt: skip
"""data_source -> the reward that verl chooses for it; a name that ends with * stands for all that begin so."""


OF_SIIRL: dict[str, str] = {name: reward for name, reward in SOURCES.items() if not name.startswith("math")} | {
    "openai/gsm8k": "verl_gsm8k_first",
    "math_dapo": "verl_math_dapo",
    **dict.fromkeys(("agentica-org/DeepScaleR-Preview-Dataset", "AIME2024", "AIME2025", "AIME24", "AIME25"), "verl_math"),
}
"""data_source -> the reward that siiRL chooses for it (siirl/utils/reward_score/__init__.py)."""


def gsm8k_fault(ground_truth: str) -> str | None:
    """Return the requirement that a ground truth of the gsm8k rewards violates, or None."""
    is_earned = verl_gsm8k(f"#### {ground_truth}", ground_truth)
    return None if is_earned else "must be a number without commas, as texts are compared,"


def text_fault(ground_truth: str) -> str | None:
    """Return the requirement that a ground truth of the mathematics rewards violates, or None."""
    return None if ground_truth.strip() else "must not be empty"
