"""A slice of the attacks: other ones for each seed, and a fault is printed with the command that repeats it."""

from __future__ import annotations

import os

import pytest

from tests.support.commands import program

pytestmark = pytest.mark.attacks


def test_a_slice_of_the_attacks_finds_no_fault():
    seconds, seed = os.environ.get("FIVEFOLD_ATTACK_SECONDS", "360"), os.environ.get("FIVEFOLD_ATTACK_SEED", "0")
    done = program("benchmarks.attacks", "--seconds", seconds, "--seed", seed)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
