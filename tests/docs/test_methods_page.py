"""docs/methods.md says what the code does."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import yaml

from fivefold.algo import methods
from fivefold.algo.advantages import ADVANTAGES
from fivefold.algo.aggregate import AGGREGATES
from fivefold.algo.correction import CORRECTIONS
from fivefold.algo.objective import Objective
from fivefold.algo.surrogates import SURROGATES
from fivefold.config.methods_page import update

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "methods.md").read_text()
BLOCKS = dict(re.findall(r"^### (\w+)\n.*?```yaml\n(.*?)```", PAGE.partition("## Axes")[0], re.M | re.S))


def test_the_page_has_the_rows_of_the_code():
    assert update(PAGE) == PAGE, "`make docs` writes the rows"
    assert set(BLOCKS) == set(methods.METHODS)
    assert all(method.about for method in methods.METHODS.values())


@pytest.mark.parametrize("name", sorted(methods.METHODS))
def test_the_row_written_out_is_the_row_of_the_code(name, monkeypatch):
    row = yaml.safe_load(BLOCKS[name])
    kl = methods.KL(**row.pop("kl", {}))
    correction = methods.Correction(**row.pop("rollout_correction", {}))
    monkeypatch.setitem(methods.METHODS, "blank", methods.Method(learns_from=methods.METHODS[name].learns_from))
    expert = methods.Imitation(**row.pop("expert", {}))
    process = methods.ProcessReward(**row.pop("process_reward", {}))
    choices = methods.Choices(kl=kl, rollout_correction=correction, expert=expert, process_reward=process, **row)
    written = methods.resolve("blank", choices)
    assert Objective.of(written) == Objective.of(methods.resolve(name))
    assert written.dynamic_sampling == methods.resolve(name).dynamic_sampling


def test_every_choice_is_explained():
    for item in dataclasses.fields(methods.Choices):
        assert f"`{item.name}" in PAGE or f" {item.name}:" in PAGE or f"{{{item.name}" in PAGE, item.name
    axes = PAGE.partition("## Axes")[2]
    for name in [*CORRECTIONS, *ADVANTAGES, *AGGREGATES, *SURROGATES]:
        assert name in axes, name
