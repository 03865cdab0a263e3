"""What waits in a checkpoint comes back as it was, number by number."""

from __future__ import annotations

import math

from fivefold.rollout.group_files import read_groups, write_groups
from fivefold.types import Sample


def test_groups_come_back_as_they_were(tmp_path):
    groups = {
        7: [
            Sample([5, 8, 2], [-0.1, -1 / 3, -2e-17], "a\u2028b", True, 20, [20, 21, 21], reward=1 / 3, reward_parts={"m": 1e-300}),
            Sample([], [], "", False, 3, reward=math.nan, reward_failed=True),
        ],
        2**40: [Sample([1] * 5, [-0.5] * 5, "x", False, 0, reward=-math.pi, correct=True)],
    }  # fmt: skip
    write_groups(tmp_path / "groups.safetensors", groups, {7})
    found, scored = read_groups(tmp_path / "groups.safetensors")
    assert scored == {7} and repr(found) == repr(groups)
    write_groups(tmp_path / "none.safetensors", {}, ())
    assert read_groups(tmp_path / "none.safetensors") == ({}, set())
