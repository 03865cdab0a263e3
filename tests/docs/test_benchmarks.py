"""Scripts of benchmarks/ that measure on GPUs: each part has a dry run on a CPU, which computes the same with tiny sizes."""

from __future__ import annotations

import pytest

from tests.support.commands import program

pytestmark = pytest.mark.slow


def lines_of(module: str, *arguments: object) -> list[str]:
    done = program(f"benchmarks.{module}", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_long_sequences_and_experts_are_measured_on_two_ranks():
    found = lines_of("training_speed", "long", "experts-model", "--seconds", 500)
    assert not any(line.startswith("FAIL") or "not measured" in line for line in found), found
    for length, samples in ((256, 2), (1024, 1)):
        whole = [line for line in found if line.startswith(f"ok   {samples} x {length}: c2 computes the update of c1")]
        assert len(whole) == 1
        assert {f"{samples} x {length}, {layout}" for layout in ("c1", "c2")} <= {line.partition(":")[0] for line in found}
    assert any(line.startswith('d2e2: {"seconds"') and "estimated_gib" in line for line in found)
