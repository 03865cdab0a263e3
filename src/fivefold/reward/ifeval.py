"""Instructions that a program can verify: a response and its prompt's instructions -> whether it follows them.

IFEval's 25 instructions (Zhou et al., 2311.07911, table 1, with the names and arguments of its data) and the 25 functions of
the RLVR-IFEval set (Tülu 3, 2411.15124) that other trainers read. Each is a function of the text and its own arguments.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from fivefold.config.packages import NOT_INSTALLED, import_fault
from fivefold.errors import UserError
from fivefold.reward.texts import after_thinking

Verifier = Callable[..., bool]
FORMS = 'JSON of {"instruction_id_list": [...], "kwargs": [...]} or {"func_name": ..., ...}'
"""Form of a ground truth of `ifeval`."""
_DETECTOR = "py3langid"
_WORD = re.compile(r"\w+")
_JOINED = re.compile(r"\w+(?:['’-]\w+)*")
_SENTENCE = re.compile(r"""(?:(?<![.!?])[.!?]++|…)["'”’)\]]*+(?=\s|$)""")
_ABBREVIATION = re.compile(r"\b(?:(?i:mr|mrs|ms|dr|prof|jr|sr|vs|e\.g|i\.e|cf)|[A-Z])\.$")
"""Period that does not end a sentence: titles, usual abbreviations, initials."""
_FENCE = "```"


def ifeval(response: str, ground_truth: str) -> float:
    """Return 1 if the response after the last </think> follows every instruction, 0 otherwise."""
    return float(all(_followed(response, ground_truth)))


def ifeval_fraction(response: str, ground_truth: str) -> float:
    """Return the share of the instructions that the response follows."""
    followed = _followed(response, ground_truth)
    return sum(followed) / len(followed)


def _followed(response: str, ground_truth: str) -> list[bool]:
    text = after_thinking(response)
    # An empty response follows no instruction, not even one that forbids commas.
    return [bool(text.strip()) and verify(text, **arguments) for verify, arguments in read_instructions(ground_truth)]


def read_instructions(ground_truth: str) -> list[tuple[Verifier, dict[str, Any]]]:
    """Return (verifier, its arguments) for each instruction of a ground truth; raise ValueError for one it cannot verify."""
    try:
        parsed = json.loads(ground_truth)
        parsed = parsed[0] if isinstance(parsed, list) and len(parsed) == 1 else parsed
        if "func_name" in parsed:
            names, kwargs, known = [parsed["func_name"]], [parsed], FUNCTIONS
        else:
            names, kwargs, known = parsed["instruction_id_list"], parsed["kwargs"], INSTRUCTIONS
        if not names or len(names) != len(kwargs):
            raise UserError(f"{len(names or ())} instructions and {len(kwargs)} kwargs")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"must be {FORMS}: {error}") from error
    return [_verifier(name, arguments or {}, known) for name, arguments in zip(names, kwargs, strict=True)]


def instructions_fault(ground_truth: str) -> str | None:
    """Return the requirement that a ground truth of `ifeval` violates, or None."""
    try:
        read_instructions(ground_truth)
    except UserError as error:
        return str(error)
    return None


def load_detector() -> None:
    """Load the language detector's model, if it is installed."""
    if import_fault(_DETECTOR) is None:
        in_language("a text", "en")


def _verifier(name: str, arguments: dict[str, Any], known: dict[str, Verifier]) -> tuple[Verifier, dict[str, Any]]:
    if name not in known:
        raise UserError(f"must name instructions that are known: got {name!r}")
    if known[name] is in_language and (fault := import_fault(_DETECTOR)) is not None:
        why = "" if fault == NOT_INSTALLED else f", {fault}"
        raise UserError(f"needs {_DETECTOR} for {name}{why}: pip install 'fivefold[ifeval]', or leave such rows out")
    parameters = list(inspect.signature(known[name]).parameters.values())[1:]
    # Data files fill columns of other instructions with null.
    chosen = {
        parameter.name: arguments[parameter.name] for parameter in parameters if arguments.get(parameter.name) is not None
    }
    missing = [
        parameter.name for parameter in parameters if parameter.name not in chosen and parameter.default is parameter.empty
    ]
    if missing:
        raise UserError(f"must give {name} its {', '.join(missing)}")
    return known[name], chosen


def _compare(count: int, relation: str, wanted: int, tolerance: int = 0) -> bool:
    """Compare a count; `relation` is "at least", "less than", "at most" or "around", any other raises ValueError."""
    if relation == "around":
        return abs(count - wanted) <= tolerance
    compared = {"at least": count >= wanted, "less than": count < wanted, "at most": count <= wanted}
    if relation not in compared:
        raise UserError(f"a relation is one of {', '.join(compared)}, around: got {relation!r}")
    return compared[relation]


def has_keywords(text: str, keywords: Sequence[str]) -> bool:
    return all(word.lower() in text.lower() for word in keywords)


def in_language(text: str, language: str) -> bool:
    """Return whether the most likely language of the whole text is `language` (ISO 639-1)."""
    import py3langid

    return bool(py3langid.classify(text)[0] == language.lower().partition("-")[0])


def no_comma(text: str) -> bool:
    return "," not in text


def sentences(text: str) -> int:
    """Count sentences by their ends: . ! ? or … before white space or the end.

    Initials and usual abbreviations do not end a sentence. Text left after the last end counts as one sentence.
    """
    text, count, begin = text.strip(), 0, 0
    for mark in _SENTENCE.finditer(text):
        if mark.end() < len(text) and _ABBREVIATION.search(text[max(0, mark.end() - 8) : mark.end()]):
            continue
        count, begin = count + 1, mark.end()
    return count + (begin < len(text))


def _keyword_frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    return _compare(text.lower().count(keyword.lower()), relation, frequency)


def _no_forbidden_words(text: str, forbidden_words: Sequence[str]) -> bool:
    return not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words)


def _letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _compare(text.lower().count(letter.lower()), let_relation, let_frequency)


def _number_sentences(text: str, num_sentences: int, relation: str) -> bool:
    return _compare(sentences(text), relation, num_sentences)


def _number_paragraphs(text: str, num_paragraphs: int) -> bool:
    """Check the number of paragraphs between `***`; only the first and the last may be empty, and do not count then."""
    parts = [part.strip() for part in text.split("***")]
    if not parts[0]:
        parts = parts[1:]
    if parts and not parts[-1]:
        parts = parts[:-1]
    return all(parts) and len(parts) == num_paragraphs


def _number_words(text: str, num_words: int, relation: str) -> bool:
    return _compare(len(_WORD.findall(text)), relation, num_words)


def _nth_paragraph_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    parts = [part.strip() for part in text.split("\n\n")]
    if sum(map(bool, parts)) != num_paragraphs or not 1 <= nth_paragraph <= len(parts) or not parts[nth_paragraph - 1]:
        return False
    word = re.match(r"[^.,?!'\"]*", parts[nth_paragraph - 1].split()[0].lstrip("'\""))
    return word is not None and word[0].lower() == first_word.lower()


def _number_placeholders(text: str, num_placeholders: int) -> bool:
    return _placeholders(text) >= num_placeholders


def _placeholders(text: str) -> int:
    """Count pieces of a line from a `[` to the next `]`, in linear time; a regular expression would take longer."""
    count = 0
    for line in text.split("\n"):
        begin = line.find("[")
        while begin >= 0 and (end := line.find("]", begin)) >= 0:
            count, begin = count + 1, line.find("[", end)
    return count


def _postscript(text: str, postscript_marker: str) -> bool:
    usual = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return re.search(usual.get(postscript_marker, re.escape(postscript_marker)), text, re.IGNORECASE) is not None


def _number_bullet_lists(text: str, num_bullets: int) -> bool:
    """Check the number of lines that begin with one `*` or a `-`."""
    return sum(bool(re.match(r"\s*(?:\*[^*]|-)", line)) for line in text.split("\n")) == num_bullets


def _constrained_response(text: str) -> bool:
    return any(f"My answer is {answer}." in text for answer in ("yes", "no", "maybe"))


def _number_highlighted_sections(text: str, num_highlights: int) -> bool:
    """Check the number of non-empty parts of a line between single or double asterisks."""
    sections = [*re.findall(r"\*([^\n*]*)\*", text), *re.findall(r"\*\*([^\n*]*)\*\*", text)]
    return sum(bool(part.strip()) for part in sections) >= num_highlights


def _multiple_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    """Check the number of sections that begin with the splitter and a number."""
    return len(re.findall(rf"{re.escape(section_spliter)}\s?\d+", text)) >= num_sections


def _json_format(text: str) -> bool:
    """Check that the whole text is JSON, or a block of JSON."""
    try:
        json.loads(_unfenced(text.strip()))
    except (ValueError, RecursionError):
        return False
    return True


def _unfenced(text: str) -> str:
    """Return the content of a JSON block, or the text itself."""
    if text.startswith(_FENCE):
        text = text.removeprefix(_FENCE)
        text = text[4:] if text[:4].lower() == "json" else text
    return text.removesuffix(_FENCE).strip()


def _title(text: str) -> bool:
    """Check that a line has text between its first `<<` and its last `>>`."""
    spans = ((line, line.find("<<"), line.rfind(">>")) for line in text.split("\n"))
    return any(begin >= 0 and line[begin : max(begin, end)].strip("<> \t") for line, begin, end in spans)


def _has_title(text: str) -> bool:
    """Check that a line has a `>>` after its first `<<`."""
    spans = ((line, line.find("<<")) for line in text.split("\n"))
    return any(begin >= 0 and line.find(">>", begin + 2) >= 0 for line, begin in spans)


def _two_responses(text: str) -> bool:
    """Check for two different parts between `******`; only the first and the last part may be empty."""
    parts = [part.strip() for part in text.split("******")]
    if not all(parts[1:-1]):
        return False
    responses = [part for part in parts if part]
    return len(responses) == 2 and responses[0] != responses[1]


def _repeat_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def _end_checker(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _capital_word_frequency(text: str, capital_frequency: int, capital_relation: str) -> bool:
    return _compare(sum(word.isupper() for word in _JOINED.findall(text)), capital_relation, capital_frequency)


def _quotation(text: str) -> bool:
    plain = text.strip()
    return len(plain) > 1 and plain[0] == plain[-1] == '"'


INSTRUCTIONS: dict[str, Verifier] = {
    "keywords:existence": has_keywords,
    "keywords:frequency": _keyword_frequency,
    "keywords:forbidden_words": _no_forbidden_words,
    "keywords:letter_frequency": _letter_frequency,
    "language:response_language": in_language,
    "length_constraints:number_sentences": _number_sentences,
    "length_constraints:number_paragraphs": _number_paragraphs,
    "length_constraints:number_words": _number_words,
    "length_constraints:nth_paragraph_first_word": _nth_paragraph_first_word,
    "detectable_content:number_placeholders": _number_placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _number_bullet_lists,
    "detectable_format:constrained_response": _constrained_response,
    "detectable_format:number_highlighted_sections": _number_highlighted_sections,
    "detectable_format:multiple_sections": _multiple_sections,
    "detectable_format:json_format": _json_format,
    "detectable_format:title": _title,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": _repeat_prompt,
    "startend:end_checker": _end_checker,
    "startend:quotation": _quotation,
    "change_case:capital_word_frequency": _capital_word_frequency,
    "change_case:english_capital": lambda text: text.isupper(),
    "change_case:english_lowercase": lambda text: text.islower(),
    "punctuation:no_comma": no_comma,
}
"""IFEval's instructions, by id."""


def _keyword_times(text: str, word: str, N: int) -> bool:
    return [match.lower() for match in _WORD.findall(text)].count(word.lower()) == N


def _paragraph_count(text: str, N: int) -> bool:
    parts = text.split("* * *")
    return len(parts) == N and all(part.strip() for part in parts)


def _word_constraint(text: str, N: int, quantifier: str) -> bool:
    return _compare(len(text.split()), quantifier, N, tolerance=max(round(N * 0.1), 1))


def _sentence_constraint(text: str, N: int, quantifier: str) -> bool:
    return _compare(sentences(text), quantifier, N, tolerance=1)


def _paragraphs(text: str, N: int, first_word: str, i: int) -> bool:
    parts = text.split("\n\n")
    return len(parts) == N and 1 <= i <= N and parts[i - 1].strip().startswith(first_word)


def _postscript_of(text: str, postscript_marker: str) -> bool:
    return bool(text.partition(postscript_marker)[2].strip())


def _sections(text: str, N: int, section_splitter: str) -> bool:
    parts = text.split(section_splitter)
    return len(parts) - (parts[0] == "") == N


def _capital_words(text: str, N: int, quantifier: str) -> bool:
    return _compare(len(re.findall(r"\b[A-Z]+\b", text)), quantifier, N)


FUNCTIONS: dict[str, Verifier] = {
    "verify_keywords": lambda text, keyword_list: has_keywords(text, keyword_list),
    "verify_keyword_frequency": _keyword_times,
    "validate_forbidden_words": lambda text, forbidden_words: (
        not any(word.lower() in text.lower() for word in forbidden_words)
    ),
    "verify_letter_frequency": lambda text, letter, N: text.count(letter) == N,
    "validate_response_language": in_language,
    "verify_paragraph_count": _paragraph_count,
    "validate_word_constraint": _word_constraint,
    "verify_sentence_constraint": _sentence_constraint,
    "validate_paragraphs": _paragraphs,
    "verify_postscript": _postscript_of,
    "validate_placeholders": lambda text, N: _placeholders(text) >= N,
    "verify_bullet_points": lambda text, N: sum(line.strip().startswith(("*", "-")) for line in text.split("\n")) == N,
    "validate_title": _has_title,
    "validate_choice": lambda text, options: any(text.strip() in option for option in options),
    "validate_highlighted_sections": lambda text, N: len(re.findall(r"\*.*?\*", text)) >= N,
    "validate_sections": _sections,
    "validate_json_format": _json_format,
    "validate_repeat_prompt": lambda text, original_prompt: text.startswith(original_prompt),
    "validate_two_responses": lambda text: text.count("******") == 1 and _two_responses(text),
    "validate_uppercase": lambda text: text == text.upper(),
    "validate_lowercase": lambda text: text == text.lower(),
    "validate_frequency_capital_words": _capital_words,
    "validate_end": lambda text, end_phrase: text.rstrip().endswith(end_phrase),
    "validate_quotation": _quotation,
    "validate_no_commas": no_comma,
}
"""Functions of the RLVR-IFEval set, by name."""
