"""Instructions and choices that a program verifies, each with texts that follow it and texts that do not, by hand."""

from __future__ import annotations

import importlib.util
import json

import pytest

from fivefold.reward.ifeval import FUNCTIONS, INSTRUCTIONS, ifeval, ifeval_fraction, in_language, sentences
from fivefold.reward.rules import ground_truth_fault
from fivefold.reward.texts import multiple_choice, multiple_choice_soft, repetition

CASES = {
    "keywords:existence": ({"keywords": ["tea", "cup"]}, ["A Cup of Tea", "teacup"], ["a cup", "coffee"]),
    "keywords:frequency": (
        {"keyword": "a", "frequency": 2, "relation": "at least"},
        ["a A b", "banana"],
        ["a b", "none"],
    ),
    "keywords:forbidden_words": ({"forbidden_words": ["cat"]}, ["a concatenation", "dogs"], ["A Cat.", "cat"]),
    "keywords:letter_frequency": (
        {"letter": "L", "let_frequency": 3, "let_relation": "less than"},
        ["hello", "a"],
        ["lLl", "hello all"],
    ),
    "length_constraints:number_sentences": (
        {"num_sentences": 3, "relation": "less than"},
        ["One. Two.", "Dr. A. Smith is here. So.", "It is 3.5 m long. Good"],
        ["One. Two! Three?", "A b. C d. E f."],
    ),
    "length_constraints:number_paragraphs": (
        {"num_paragraphs": 2},
        ["one\n***\ntwo", "***\none\n***\ntwo\n***"],
        ["one", "one *** *** two", "one***two***three"],
    ),
    "length_constraints:number_words": (
        {"num_words": 3, "relation": "at least"},
        ["one two three", "it's so"],
        ["one two", ". . . ."],
    ),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "so"},
        ["One\n\nSo, it is", 'One\n\n"So" it'],
        ["So\n\nOne", "One\n\nSome", "One\n\nSo\n\nThree"],
    ),
    "detectable_content:number_placeholders": ({"num_placeholders": 2}, ["[a] and [b]"], ["[a]", "(a) (b)"]),
    "detectable_content:postscript": (
        {"postscript_marker": "P.S."},
        ["Bye\nP.S. more", "p. s. more"],
        ["Bye", "PS more"],
    ),
    "detectable_format:number_bullet_lists": (
        {"num_bullets": 2},
        ["* a\n* b", "- a\ntext\n  - b"],
        ["* a", "**a**\n* b", "* a\n* b\n- c"],
    ),
    "detectable_format:constrained_response": ({}, ["My answer is yes.", "So: My answer is maybe."], ["yes", "My answer is Yes"]),
    "detectable_format:number_highlighted_sections": (
        {"num_highlights": 2},
        ["*a* and *b*", "**a** and *b*"],
        ["*a*", "* * and *b\nc*"],
    ),
    "detectable_format:multiple_sections": (
        {"section_spliter": "SECTION", "num_sections": 2},
        ["SECTION 1\na\nSECTION 2\nb"],
        ["SECTION 1\na", "SECTION a\nSECTION b"],
    ),
    "detectable_format:json_format": ({}, ['{"a": 1}', '```json\n{"a": [1]}\n```', "3"], ["{a: 1}", 'so: {"a": 1}']),
    "detectable_format:title": ({}, ["<<A title>>\ntext"], ["<<>>", "<a>", "<<a\nb>>"]),
    "combination:two_responses": (
        {},
        ["one\n******\ntwo", "******one******two"],
        ["one", "one******one", "one******two******three", "one****** ******two"],
    ),
    "combination:repeat_prompt": ({"prompt_to_repeat": "Say this. "}, ["say this. Yes", " Say this."], ["Yes. Say this.", "Say"]),
    "startend:end_checker": ({"end_phrase": "The end"}, ["So it is. The END", 'so "the end"'], ["The end.", "end"]),
    "startend:quotation": ({}, ['"so"', ' "a "b" c" '], ['"so', 'so"', '"']),
    "change_case:capital_word_frequency": (
        {"capital_frequency": 2, "capital_relation": "at least"},
        ["AN IDEA", "A well-known NATO"],
        ["An Idea", "NATO"],
    ),
    "change_case:english_capital": ({}, ["ALL OF IT, 3 TIMES."], ["All of it", "123"]),
    "change_case:english_lowercase": ({}, ["all of it, 3 times."], ["All of it", "123"]),
    "punctuation:no_comma": ({}, ["no comma here."], ["a, b"]),
    "verify_keywords": ({"keyword_list": ["tea", "cup"]}, ["A Cup of Tea"], ["a cup"]),
    "verify_keyword_frequency": ({"word": "tea", "N": 2}, ["Tea, tea", "tea (TEA) teapot"], ["tea", "tea tea tea", "two words"]),
    "validate_forbidden_words": ({"forbidden_words": ["cat"]}, ["dogs"], ["concatenation", "Cat"]),
    "verify_letter_frequency": ({"letter": "a", "N": 2}, ["banal", "A a a"], ["banana", "b"]),
    "verify_paragraph_count": ({"N": 2}, ["one\n* * *\ntwo"], ["one", "one* * *two* * *three", "one\n* * *\n "]),
    "validate_word_constraint": (
        {"N": 20, "quantifier": "around"},
        ["w " * 18, "w " * 22],
        ["w " * 17, "w " * 23],
    ),
    "verify_sentence_constraint": ({"N": 3, "quantifier": "around"}, ["A b. C d.", "A b. C d. E f. G h."], ["A b.", "So. " * 5]),
    "validate_paragraphs": ({"N": 2, "first_word": "So", "i": 2}, ["One\n\nSo it"], ["So\n\nOne", "a\n\nSo\n\nb"]),
    "verify_postscript": ({"postscript_marker": "P.S."}, ["Bye P.S. more"], ["Bye P.S. ", "p.s. more"]),
    "validate_placeholders": ({"N": 2}, ["[a] [b] [c]"], ["[a]"]),
    "verify_bullet_points": ({"N": 2}, ["* a\n- b"], ["* a", "* a\n* b\n* c"]),
    "validate_title": ({}, ["<<poem>>"], ["<poem>"]),
    "validate_choice": ({"options": ["yes", "no"]}, ["yes", " no\n"], ["maybe", "yes and no"]),
    "validate_highlighted_sections": ({"N": 2}, ["*a* *b*"], ["*a*"]),
    "validate_sections": ({"N": 2, "section_splitter": "PART"}, ["PART a PART b", "a PART b"], ["PART a", "x PART a PART b"]),
    "validate_json_format": ({}, ['{"a": 1}'], ["{a}"]),
    "validate_repeat_prompt": ({"original_prompt": "Say this."}, ["Say this. Yes"], ["say this.", "Yes Say this."]),
    "validate_two_responses": ({}, ["one ****** two"], ["one", "one******one", "a******b******c"]),
    "validate_uppercase": ({}, ["ALL OF IT 3"], ["All"]),
    "validate_lowercase": ({}, ["all of it 3"], ["All"]),
    "validate_frequency_capital_words": ({"N": 2, "quantifier": "at most"}, ["AN IDEA", "none"], ["A B C"]),
    "validate_end": ({"end_phrase": "The end"}, ["So. The end", "The end\n"], ["the end", "The end."]),
    "validate_quotation": ({}, ['"so"'], ['"so']),
    "validate_no_commas": ({}, ["no comma"], ["a, b"]),
}  # fmt: skip
LANGUAGE = {"language:response_language", "validate_response_language"}


def truth(name: str, kwargs: dict) -> str:
    if name in FUNCTIONS:
        # Data files name the arguments of every function in each row.
        return json.dumps({"func_name": name, **dict.fromkeys(["N", "word", "options"]), **kwargs})
    return json.dumps({"instruction_id_list": [name], "kwargs": [{"relation": None, **kwargs}]})


_OF_IFEVAL = [(name, CASES[name][0]) for name in INSTRUCTIONS if name not in LANGUAGE]
INSTRUCTION_TRUTHS = [
    json.dumps({"instruction_id_list": [name for name, _ in _OF_IFEVAL], "kwargs": [kwargs for _, kwargs in _OF_IFEVAL]}),
    *(truth(name, CASES[name][0]) for name in FUNCTIONS if name not in LANGUAGE),
]
"""Truths that between them have every instruction but the language."""


def test_every_instruction_has_cases():
    assert len(INSTRUCTIONS) == len(FUNCTIONS) == 25
    assert {*INSTRUCTIONS, *FUNCTIONS} == {*CASES, *LANGUAGE}


@pytest.mark.parametrize("name", CASES)
def test_an_instruction_is_followed_by_these_texts_and_not_by_those(name):
    kwargs, followed, others = CASES[name]
    ground_truth = truth(name, kwargs)
    assert ground_truth_fault("ifeval", ground_truth) is None
    for text in followed:
        assert ifeval(text, ground_truth) == 1, text
        assert ifeval(f"<think>, A *a*</think>\n\n{text}", ground_truth) == 1, text
    for text in [*others, "", " \n"]:
        assert ifeval(text, ground_truth) == 0, text


def test_every_instruction_must_be_followed_and_the_share_of_them_is_counted():
    both = json.dumps({"instruction_id_list": ["punctuation:no_comma", "startend:quotation"], "kwargs": [None, {}]})
    assert [ifeval(text, both) for text in ('"so"', "so", '"a, b"', "a, b")] == [1, 0, 0, 0]
    assert [ifeval_fraction(text, both) for text in ('"so"', "so", '"a, b"', "a, b")] == [1, 0.5, 0.5, 0]


@pytest.mark.parametrize(
    ("ground_truth", "says"),
    [
        ("so", "must be JSON of"),
        ('{"instruction_id_list": ["punctuation:no_comma"], "kwargs": []}', "1 instructions and 0 kwargs"),
        ('{"instruction_id_list": [], "kwargs": []}', "must be JSON of"),
        ('{"func_name": "validate_colour"}', "must name instructions that are known: got 'validate_colour'"),
        ('{"func_name": "validate_end"}', "must give validate_end its end_phrase"),
    ],
)
def test_a_ground_truth_that_no_response_could_be_compared_with_is_refused(ground_truth, says):
    assert says in str(ground_truth_fault("ifeval", ground_truth))


@pytest.mark.parametrize("name", sorted(LANGUAGE))
def test_a_language_is_asked_of_its_package_or_refused_by_name(name):
    ground_truth = truth(name, {"language": "de"})
    if importlib.util.find_spec("py3langid") is None:
        assert f"needs py3langid for {name}" in str(ground_truth_fault("ifeval", ground_truth))
        return
    assert ifeval("Das ist ein deutscher Satz, und er ist lang genug.", ground_truth) == 1
    assert ifeval("This is an English sentence, and it is long enough.", ground_truth) == 0
    assert in_language("这是一个中文句子，而且足够长。", "zh-cn")


def test_sentences_are_counted_as_a_reader_counts_them():
    assert [sentences(text) for text in ("", "No end", "One. Two.", 'He said "No." Then?', "Wait... what?", "e.g. this, Mr. X.")] == [
        0, 1, 2, 2, 2, 1,
    ]  # fmt: skip


CHOICES = [
    (r"So \boxed{B}", "B", 1, 1.0),
    (r"\boxed{A} no, \boxed{\text{(B)}}", "B", 1, 1.0),
    ("I think the answer is B.", "B", 1, 0.5),
    ("<think>The answer is B</think>\n\nthe ANSWER IS (c) C", "C", 1, 0.5),
    ("B", "B", 1, 0.5),
    (r"So \boxed{C}", "B", 0, -0.5),
    ("The answer is c", "C", 0, -1.0),
    ("none", "B", 0, -1.0),
    ("", "B", 0, -1.0),
    (r"B \boxed{}", "B", 0, -0.5),
    (r"\boxed{B}", "B) a whole sentence", 1, 1.0),
]


@pytest.mark.parametrize(("response", "ground_truth", "right", "soft"), CHOICES)
def test_a_choice_is_the_first_capital_where_the_answer_stands(response, ground_truth, right, soft):
    assert multiple_choice(response, ground_truth) == right
    assert multiple_choice_soft(response, ground_truth) == soft


def test_a_choice_needs_a_letter_as_its_truth():
    assert ground_truth_fault("multiple_choice", "b") and ground_truth_fault("multiple_choice_soft", "")
    assert ground_truth_fault("multiple_choice_soft", "B: yes") is None


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("", 0),
        ("a b", 0),
        ("a b c", 0),
        ("a b c A B C", 0),
        ("a b c a b c", 1 / 4),
        ("a a a a a", 2 / 3),
        ("A a a a", 1 / 2),
    ],
)
def test_repetition_is_the_share_of_3_grams_that_came_before(response, expected):
    grams = [tuple(response.lower().split()[i : i + 3]) for i in range(len(response.split()) - 2)]
    loop = sum(gram in grams[:place] for place, gram in enumerate(grams)) / max(len(grams), 1)
    assert repetition(response) == pytest.approx(loop)
    assert repetition(response) == pytest.approx(0.25 if response == "a b c A B C" else expected)
