"""What waits in a checkpoint comes back as it was, number by number."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from fivefold.rollout import group_files
from fivefold.rollout.group_files import read_groups, write_groups
from fivefold.types import Sample, Turn


def test_tokens_that_carry_no_loss_carry_none_after_a_resume(tmp_path):
    groups = {
        0: [
            Sample([4, 5, 6], [0.0, -1.0, 0.0], "a", "answered", 0, loss_mask=[True, False, True]),
            Sample([1], [0.0], "", "answered", 0),
        ]
    }
    write_groups(tmp_path / "groups.safetensors", groups, ())
    again, plain = read_groups(tmp_path / "groups.safetensors")[0][0]
    assert again.loss_mask == [True, False, True] and again.loss_tokens == 2 and plain.loss_mask is None


def test_a_field_that_is_added_to_samples_is_kept_in_their_files(tmp_path, monkeypatch):
    added = [
        ("numbers", list[int] | None, None),
        ("remarks", list[str], dataclasses.field(default_factory=list)),
        ("weight", float, 1.0),
        ("values_T", torch.Tensor | None, None),
        ("note", dict, dataclasses.field(default_factory=dict)),
    ]
    Longer = dataclasses.make_dataclass("Longer", added, bases=(Sample,))
    monkeypatch.setattr(group_files, "Sample", Longer)
    plain = ([1, 2], [-0.5, -0.25], "x", "answered", 4)
    more = Longer(
        *plain, numbers=[7, 8], remarks=["\ud800", "b"], weight=1 / 3, values_T=torch.tensor([0.1, 0.2]), note={"n": [1]}
    )
    groups = {3: [Longer(*plain), more], 4: [Longer(*plain, routes_TLK=torch.ones(2, 1, 2, dtype=torch.uint8))]}
    write_groups(tmp_path / "groups.safetensors", groups, {4})
    assert repr(read_groups(tmp_path / "groups.safetensors")) == repr((groups, {4}, [], {}, {}))


def test_a_file_of_another_version_is_named_instead_of_read_with_fields_missing(tmp_path):
    save_file(
        {"logprobs_T": torch.zeros(1)}, tmp_path / "old.safetensors", metadata={"described": json.dumps({"groups": {}})}
    )
    with pytest.raises(ValueError, match=r"old\.safetensors was written by another version"):
        read_groups(tmp_path / "old.safetensors")


def test_groups_from_before_environments_are_read_with_their_ends(tmp_path):
    """A run that was saved then resumes with the groups that waited, and does not sample them again."""
    samples = [Sample([4, 5], [-1.0, -2.0], "a", "answered", 3, reward=0.5), Sample([1], [-3.0], "b", "length", 3)]
    path = tmp_path / "groups.safetensors"
    write_groups(path, {7: samples}, {7})
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    described = json.loads(tensors["fields.json"].numpy().tobytes())
    columns = described["others"]
    described["others"] = {name: columns[name] for name in ("text", "policy_version", "reward", "reward_parts", "correct")}
    described["others"] |= {name: columns[name] for name in ("token_versions", "routes_TLK", "loss_mask")}
    described["others"] |= {"reward_failed": [False, False], "reward_timed_out": [False, False], "finished": [True, False]}
    del described["parts"]
    tensors["fields.json"] = torch.frombuffer(bytearray(json.dumps(described).encode()), dtype=torch.uint8)
    save_file(tensors, path)
    assert repr(read_groups(path)) == repr(({7: samples}, {7}, [], {}, {}))


def test_groups_come_back_as_they_were(tmp_path):
    groups = {
        7: [
            Sample([5, 8, 2], [-0.1, -1 / 3, -2e-17], "a\u2028b", "answered", 20, [20, 21, 21], reward=1 / 3, reward_parts={"m": 1e-300}),
            Sample([], [], "", "length", 3, reward=math.nan, reward_failed=True),
        ],
        2**40: [Sample([1] * 5, [-0.5] * 5, "x", "length", 0, reward=-math.pi, correct=True)],
    }  # fmt: skip
    write_groups(tmp_path / "groups.safetensors", groups, {7})
    read, scored, *_ = read_groups(tmp_path / "groups.safetensors")
    assert scored == {7} and repr(read) == repr(groups)
    write_groups(tmp_path / "none.safetensors", {}, ())
    assert read_groups(tmp_path / "none.safetensors") == ({}, set(), [], {}, {})


def test_contexts_masks_and_turns_of_trajectories_come_back_as_they_were(tmp_path):
    turns = (Turn(0, 0, 2, 0.5, "start", "stop", 1 / 3), Turn(1, 3, 4, state=None, finish="length"))
    first = Sample([5, 8, 2, 9], [-0.1, -0.2, 0.0, -0.3], "a", "time", 20, loss_mask=[True, True, False, True])
    first.prompt_ids, first.trajectory, first.turns = [1, 2, 3], 0, turns
    later = Sample([7], [-0.5], "b", "time", 21, prompt_ids=[], trajectory=0, turns=(Turn(2, 0, 1),), break_cause="template")
    groups = {0: [first, later, Sample([4], [-0.5], "c", "abort", 20, trajectory=1)]}
    write_groups(tmp_path / "groups.safetensors", groups, {0})
    assert repr(read_groups(tmp_path / "groups.safetensors")) == repr((groups, {0}, [], {}, {}))
