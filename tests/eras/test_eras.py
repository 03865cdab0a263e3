"""A trainer's own default files say the same run as leaving every key out, for each release that is on PyPI.

The oracle are the files in the wheels (wheels.txt), read as archives; what differs stands in differences.yaml, with a reason.
"""

from __future__ import annotations

import dataclasses
from fnmatch import fnmatchcase
from functools import cache

import pytest
import yaml

from fivefold.config import RunConfig
from fivefold.config.loader import build
from fivefold_dialects.source import flatten
from tests.eras import archives, eras

pytestmark = pytest.mark.eras
ERAS = eras.every() if all(archives.wheel(*pin) for pin in archives.pins()) else []
LISTED = eras.load("differences.yaml")
SWITCHES = {
    "verl": {
        "": {},
        "GRPO": {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 8},
        "a KL in the loss": {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.actor.use_kl_loss": True},
        "dynamic batches": {"actor_rollout_ref.actor.use_dynamic_bsz": True, "data.train_batch_size": 256},
    }
}
"""System -> settings that a user writes over the defaults, so that branches which they open are compared too."""
CASES = [(era, name) for era in ERAS for name in SWITCHES.get(era.system, {"": {}}) if not name or "sft" not in era.trainer]


def _switches(era, name):
    return SWITCHES.get(era.system, {"": {}})[name]


@cache
def refusals(era, name=""):
    return tuple(era.whole(_switches(era, name)).refusals)


@cache
def differences(era, name=""):
    """Our keys whose values are others where all keys are written."""
    switches = _switches(era, name)
    both = []
    for translation in (era.whole(switches), era.bare(switches)):
        tree = eras.nested({"model.path": "/m", "data.train": ["/d"], **dict(flatten(translation.tree))})
        both.append(dict(flatten(dataclasses.asdict(build(RunConfig, tree)))))
    whole, bare = both
    return {key: (whole.get(key), bare.get(key)) for key in whole.keys() | bare.keys() if whole.get(key) != bare.get(key)}


def _is_listed(kind, era, key):
    return any(fnmatchcase(str(era), rule["era"]) and fnmatchcase(key, rule["key"]) for rule in LISTED[kind])


def test_the_wheels_are_there():
    assert all(archives.wheel(*pin) for pin in archives.pins()), "`make test-eras` fetches the wheels"


@pytest.mark.parametrize("era", ERAS, ids=str)
def test_every_key_at_its_default_is_accepted(era):
    assert [sentence for sentence in refusals(era) if not _is_listed("refused", era, sentence)] == []


@pytest.mark.parametrize(("era", "name"), CASES, ids=lambda value: str(value))
def test_the_run_with_all_keys_at_their_defaults_is_the_run_with_none(era, name):
    assert {key: both for key, both in differences(era, name).items() if not _is_listed("differs", era, key)} == {}


def test_every_listed_difference_is_still_there():
    unused = [
        rule
        for kind, read in (("refused", refusals), ("differs", differences))
        for rule in LISTED[kind]
        if not any(
            fnmatchcase(str(era), rule["era"]) and any(fnmatchcase(key, rule["key"]) for key in read(era)) for era in ERAS
        )
    ]
    assert unused == []


@pytest.mark.parametrize("version", [version for name, version in archives.pins() if name == "verl"])
def test_a_composed_tree_is_the_one_that_the_wheel_carries(version):
    """`_generated_*.yaml` are verl's own compositions of the same files: numbers written as text are numbers there."""
    for era in ERAS:
        engine = era.trainer.partition("-")[2]
        name = f"_generated_ppo_{engine}{'_' if engine else ''}trainer.yaml"
        text = archives.text("verl", version, f"verl/trainer/config/{name}")
        if era.version != version or not era.trainer.startswith("ppo") or text is None:
            continue
        carried, composed = (
            {key: float(value) if isinstance(value, str) and value[:1].isdigit() and "e-" in value else value
             for key, value in flatten(tree) if key != "model_engine"}
            for tree in (yaml.safe_load(text), era.read())
        )  # fmt: skip
        assert composed == carried


def test_no_default_of_a_class_is_left_unread():
    for package, version, files in (("areal", "1.0.4", ("areal/api/cli_args.py", "areal/utils/constants.py")),):
        known = eras.classes(package, version, files)
        known.tree("GRPOConfig")
        assert known.unread == []
