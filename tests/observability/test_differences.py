"""Keys that differ between runs, and only those."""

from __future__ import annotations

import pytest

from fivefold.observability.differences import differences

ONE = (
    "algorithm: {name: grpo, kl: {coef: 0}}\npolicy: {optimizer: {lr: 1.0e-6, betas: [0.9, 0.99]}}\ntrainer: {run_dir: a}\n"
)
TWO = "algorithm: {name: grpo, kl: {coef: 0.1}}\npolicy: {optimizer: {lr: 1.0e-6, betas: [0.9, 0.95]}}\ntrainer: {run_dir: b}\n"


def test_keys_that_differ_are_listed_with_the_value_of_each_run():
    assert differences([ONE, TWO, ONE]) == [
        ("algorithm.kl.coef", ["0", "0.1", "0"]),
        ("policy.optimizer.betas", ["[0.9, 0.99]", "[0.9, 0.95]", "[0.9, 0.99]"]),
    ]


def test_a_key_that_a_run_does_not_have_differs():
    assert differences(["a: {b: 1}", "a: {b: 1, c: null}"]) == [("a.c", [None, "null"])]


@pytest.mark.parametrize("text", ["", "[1, 2]", "a: [", "{{", "- x", "a: !!python/object:os.system 1", "5"])
def test_a_run_without_readable_settings_has_none(text):
    assert differences([text, text]) == []
    assert [name for name, _ in differences([text, "a: 1"])] == ["a"]


def test_one_run_differs_from_nothing():
    assert differences([ONE]) == []
