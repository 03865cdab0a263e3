"""A setting of the five pages' examples is changed, one at a time: the run changes, or the report gives a true reason why not."""

from __future__ import annotations

import pytest

from fivefold.config.dialect import find_dialect
from tests.eras import eras

pytestmark = pytest.mark.eras
EXAMPLES = eras.load("examples.yaml")
NO_EFFECT = eras.load("no_effect.yaml")
"""System -> key -> what the report says, reviewed by hand."""
FLIPS = [(system, key) for system, example in EXAMPLES.items() for key in example["flips"]]


def _translated(system, flipped=None):
    flips = EXAMPLES[system]["flips"]
    settings = {**EXAMPLES[system]["run"], **{key: values[key == flipped] for key, values in flips.items()}}
    return find_dialect(system)(eras.nested(settings), [], environment=eras.HOME)


@pytest.mark.parametrize("system", EXAMPLES)
def test_the_example_of_a_page_is_accepted(system):
    assert _translated(system).refusals == []


@pytest.mark.parametrize(("system", "key"), FLIPS)
def test_a_changed_setting_changes_the_run_or_the_report_says_why_not(system, key):
    before, after = _translated(system), _translated(system, key)
    (said,) = [outcome for outcome in after.outcomes if outcome.key == key]
    listed = NO_EFFECT.get(system, {}).get(key)
    if before.tree != after.tree or after.refusals != before.refusals or said.kind == "unsupported":
        assert listed is None, "the setting has an effect: take it off no_effect.yaml"
    else:
        assert said.kind == "fixed" and said.reason == listed
