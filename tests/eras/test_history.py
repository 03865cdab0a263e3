"""Defaults that no wheel has are those of history.yaml, each with the repository and commit where it was read."""

from __future__ import annotations

import pytest

from fivefold.config.dialect import find_system
from tests.eras import eras

pytestmark = pytest.mark.eras


@pytest.mark.parametrize("group", eras.load("history.yaml"), ids=lambda group: f"{group['system']}@{group['release']}")
def test_a_default_that_no_wheel_has_is_the_one_of_its_commit(group):
    table = find_system(group["system"]).tables[0]
    here = {**table.defaults, **table.versions.get(group["release"], {})}
    assert {key: here[key] for key in group["defaults"]} == group["defaults"]
