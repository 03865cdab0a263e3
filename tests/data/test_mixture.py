"""Domains mixed in every step: exact counts, order, epochs of each domain, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from fivefold.build import build_loader
from fivefold.config import ConfigError, RunConfig
from fivefold.config.mixture import counts, domains_of
from fivefold.data.mixture import MixedLoader, places_by_domain
from fivefold.data.prompts import Reading, load_prompts
from fivefold.data.rows import Columns
from fivefold.keys.findings import Findings
from fivefold.plan.data_files import check_data

ITEMS = [f"{name}{number}" for name, count in (("m", 11), ("c", 7), ("j", 3)) for number in range(count)]
MIXTURE = {"m": 0.5, "c": 0.3, "j": 0.2}


def loader(seed: int = 1, *, shuffle: bool = True, mixture=MIXTURE, per_step: int = 10) -> MixedLoader[str]:
    places = places_by_domain((item[0] for item in ITEMS), domains_of({}))
    return MixedLoader(ITEMS, places, counts(mixture, per_step), seed, shuffle)


@pytest.mark.parametrize(
    ("mixture", "per_step", "expected"),
    [
        ({"a": 0.4, "b": 0.3, "c": 0.1, "d": 0.1, "e": 0.1}, 10, [4, 3, 1, 1, 1]),
        ({"a": 0.5, "b": 0.25, "c": 0.25}, 6, [3, 2, 1]),  # 3, 1.5, 1.5: the first of equal remainders
        ({"a": 0.4, "b": 0.3, "c": 0.3}, 8, [3, 3, 2]),  # 3.2, 2.4, 2.4
        ({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}, 7, [3, 2, 2]),
        ({"a": 0.29, "b": 0.71}, 100, [29, 71]),  # 0.29 * 100 is a little less than 29
        ({"a": 25 / 64, "b": 19 / 64, "c": 20 / 64}, 64, [25, 19, 20]),
    ],
)
def test_a_step_has_every_domain_s_share_and_the_largest_remainders_what_is_left(mixture, per_step, expected):
    assert list(counts(mixture, per_step).values()) == expected


def test_every_step_has_exactly_as_many_of_each_domain_and_spreads_them():
    mixed = loader()
    for step in range(30):
        taken = mixed.take(10 * step, 10)
        assert Counter(item[0] for item in taken) == {"m": 5, "c": 3, "j": 2}
        # Every half of a step, an optimizer step of two, has its part of all.
        assert [Counter(item[0] for item in half)["m"] for half in (taken[:5], taken[5:])] in ([3, 2], [2, 3])
        assert {item[0] for item in taken[:5]} == {item[0] for item in taken[5:]} == {"m", "c", "j"}


def test_every_prompt_of_a_domain_comes_once_in_each_epoch_of_the_domain():
    taken = loader().take(0, 700)
    for name, size in (("m", 11), ("c", 7), ("j", 3)):
        of_domain = [item for item in taken if item[0] == name]
        epochs = [of_domain[begin : begin + size] for begin in range(0, len(of_domain) - size + 1, size)]
        assert len(epochs) >= 30 and all(len(set(epoch)) == size for epoch in epochs)
        assert len(set(map(tuple, epochs[:5]))) > 1, "shuffled anew"
    plain = loader(shuffle=False).take(0, 20)
    assert [item for item in plain if item[0] == "m"] == [f"m{number % 11}" for number in range(10)]


def test_what_is_taken_is_a_function_of_seed_and_position():
    # A run that is resumed, samples ahead, or takes rounds of another size asks for the same places in another order.
    taken_at_once = loader().take(0, 300)
    assert loader().take(0, 300) == taken_at_once and loader(seed=2).take(0, 300) != taken_at_once
    for begin, count in ((290, 10), (3, 40), (120, 1), (17, 60), (0, 7)):
        assert loader().take(begin, count) == taken_at_once[begin : begin + count]
    again = loader()
    rounds = [again.take(begin, 4) for begin in range(0, 300, 4)]
    assert [item for taken in rounds for item in taken] == taken_at_once


def test_the_order_of_a_domain_does_not_depend_on_the_others():
    alone = loader(mixture={"c": 1.0}, per_step=3).take(0, 60)
    assert alone == [item for item in loader().take(0, 200) if item[0] == "c"]


def test_an_epoch_has_as_many_prompts_as_there_are():
    mixed = loader()
    assert mixed.steps_per_epoch == 2 and [mixed.epoch(place) for place in (0, 19, 20)] == [0, 0, 1]


def test_several_sources_are_one_domain_and_one_may_take_all_others():
    domain_of = domains_of({"maths": ["gsm8k", "aime"], "rest": ["*"]})
    assert [domain_of(name) for name in ("gsm8k", "aime", "other")] == ["maths", "maths", "rest"]
    assert domains_of({"maths": ["gsm8k"]})("code") == "code"


def config(**data):
    usual = {"train": ["x.jsonl"], "prompts_per_step": 4, "source_key": "tag", "ground_truth_key": "answer"}
    return RunConfig.of({"model": {"path": "m"}, "data": {**usual, **data}, "reward": {"functions": {"math": 1.0}}})


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"mixture": {"a": 0.5, "b": 0.4}}, "data.mixture must have shares that sum to 1: got 0.9"),
        ({"mixture": {"a": 0.9, "b": 0.1}}, "data.mixture must give every domain a prompt of a step: 'b' has 0.1 of 4"),
        ({"mixture": {"a": 1.5}}, r"data.mixture.a must be in \(0, 1\]: got 1.5"),
        ({"domains": {"a": ["x"], "b": ["x"]}}, "data.domains must name every data_source once: got 'x' twice"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(data, says):
    with pytest.raises(ConfigError, match=says):
        config(**data)


class _Characters:
    chat_template, eos_token_id = None, 0

    def encode(self, text, add_special_tokens=True):
        return list(text.encode())


def test_rows_are_taken_by_domain_and_a_domain_with_too_few_is_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{tag} {number}", "tag": tag, "answer": "1", "tests": "2"} for number in range(3) for tag in "abz"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = config(train=[str(path)], domains={"both": ["a", "b"]}, mixture={"both": 0.75, "z": 0.25})
    by_source = replace(run.data, ground_truth_by_source={"z": "tests"})
    prompts = load_prompts([str(path)], _Characters(), Reading(100, columns=Columns.of(by_source)))
    assert {prompt.source: prompt.ground_truth for prompt in prompts.prompts} == {"a": "1", "b": "1", "z": "2"}
    taken = build_loader(run, prompts).take(0, 8)
    assert Counter(prompt.source in "ab" for prompt in taken) == {True: 6, False: 2}
    few = config(train=[str(path)], domains={"both": ["a", "b"]}, mixture={"both": 0.25, "c": 0.75})
    with pytest.raises(ValueError, match=r"data\.mixture: a step takes 3 prompts of 'c', of which there are 0"):
        build_loader(few, prompts)
    findings = Findings()
    check_data(findings, few, None, None)
    assert any("a step takes 3 prompts of 'c', of which there are 0" in error for error in findings.errors)
    assert any("leaves out the rows of z (3)" in note for note in findings.notes)


def test_domains_that_nothing_tells_apart_are_said_to_be_without_effect(tmp_path):
    from fivefold.plan.check import check

    plain, mixed, whitened = ({}, {"mixture": {"a": 0.5, "b": 0.5}}, {})
    for data, choices, expected in (
        (plain, {}, True),
        (mixed, {}, False),
        (whitened, {"whiten": True, "whiten_by": "domain"}, False),
    ):
        run = replace(config(domains={"a": ["x"]}, **data), algorithm=replace(config().algorithm, **choices))
        assert ("data.domains" in dict(check(run).ignored)) == expected
