"""Random damage: `check` answers in sentences, soon, and what it accepts training's own readers accept."""

from __future__ import annotations

import pytest

from tests.support.fuzz import Inputs, fuzz_configs, fuzz_data, fuzz_models, fuzz_training, verdict


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    made_inputs = Inputs(tmp_path_factory.mktemp("fuzz"))
    assert verdict(made_inputs.check) == ("accepted", "")
    return made_inputs


@pytest.mark.parametrize(("fuzz", "count"), [(fuzz_configs, 120), (fuzz_models, 40), (fuzz_data, 60)])
def test_damage_is_answered_in_sentences(inputs, fuzz, count):
    """Numbers from 10^6 on: the thousands from 0 on are those of `python -m tests.support.fuzz`."""
    counts, broken = fuzz(inputs, range(10**6, 10**6 + count))
    assert broken == []
    assert min(counts["accepted"], counts["refused"]) >= 1, counts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fuzz", "first", "count"),
    [
        *((fuzz_configs, first, 1000) for first in range(0, 10_000, 1000)),
        *((fuzz_models, first, 1000) for first in range(0, 2000, 1000)),
        (fuzz_data, 0, 1000),
        *((fuzz_training, first, 100) for first in range(0, 500, 100)),
    ],
)
def test_ten_thousand_configurations_and_a_thousand_data_files(inputs, fuzz, first, count):
    counts, broken = fuzz(inputs, range(first, first + count))
    print(fuzz.__name__, dict(counts))
    assert broken == [] and counts
