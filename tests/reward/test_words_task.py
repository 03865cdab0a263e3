"""Arithmetic in words, the task of examples/smollm2: its problems and its reward."""

from __future__ import annotations

import hashlib
import json
from collections import Counter

import pytest

from examples.smollm2 import words

UNITS = {word: number for number, word in enumerate(words.UNITS)}
TENS = {word: 20 + 10 * place for place, word in enumerate(words.TENS)}


def number(text: str) -> int:
    """Read a number in English, part by part."""
    return sum((TENS | UNITS)[part] for part in text.split("-"))


def test_numbers_in_words_are_read_back_as_the_same_numbers():
    assert [number(words.words(n)) for n in range(100)] == list(range(100))
    assert [words.words(n) for n in (0, 13, 20, 41, 99)] == ["zero", "thirteen", "twenty", "forty-one", "ninety-nine"]


def test_every_answer_is_that_of_its_question_and_no_question_comes_twice():
    every = words.problems()
    assert len({question for question, _ in every}) == len(every) == 8100 + 90 * 91 // 2
    for question, answer in every:
        _, _, first, operation, second = question.removesuffix("?").split()
        assert answer == number(first) + (1 if operation == "plus" else -1) * number(second) >= 0


def test_a_seed_gives_the_same_files_and_no_test_problem_is_trained_on(tmp_path):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        words.main(tmp_path / name, seed)
    files = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in tmp_path.rglob("*.jsonl")}
    assert files[tmp_path / "a/train.jsonl"] == files[tmp_path / "b/train.jsonl"] != files[tmp_path / "c/train.jsonl"]
    rows = {name: [json.loads(line) for line in (tmp_path / f"a/{name}.jsonl").open()] for name in ("train", "test")}
    questions = {name: {row["prompt"][1]["content"] for row in part} for name, part in rows.items()}
    assert {name: len(part) for name, part in questions.items()} == {"train": words.TRAIN, "test": words.TEST}
    assert not questions["train"] & questions["test"]
    signs = Counter("plus" in question for question in questions["train"])
    assert 0.6 < signs[True] / words.TRAIN < 0.72


@pytest.mark.parametrize(
    ("response", "reward"), [("68", 1), (" 68\n", 1), ("68.", 0), ("It is 68", 0), ("068", 0), ("6", 0), ("", 0)]
)
def test_a_response_is_right_only_if_it_is_the_number_alone(response, reward):
    assert words.right(response, "68") == reward
