"""`fivefold plan --calibrate` on this machine's CPU, whose file plan reads; and what it does when a part of it goes wrong."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F

from fivefold.calibration import calibrate, machine
from fivefold.calibration.profile import OTHERS, seconds_by_kind
from fivefold.plan.efficiency import Efficiencies, known_rates, load_rates, read_calibration
from fivefold.plan.measured import Rate
from tests.support.commands import gone, program, wait_for


@pytest.mark.slow
def test_a_calibration_measures_layers_as_the_trainer_runs_them(tmp_path):
    path = tmp_path / "own" / "rates.json"
    done = program("fivefold.cli", "plan", "--calibrate", "--seconds", "900", "--calibration", path,
                   env={"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == f"rates: {path}" and [line for line in lines[:-1] if not line.startswith("  ")] == [
        line for part in machine.PARTS for line in lines if line.startswith(f"{part}: at most ")
    ]
    rows = read_calibration(path)
    assert {row.hardware for row in rows} == {"cpu"}
    # What is left of a layer without its products may be nothing on a busy machine; what stands alone is measured first.
    kinds = {row.kind for row in rows}
    assert {"gemm", "grouped_gemm", "adam", "gradients", "host_copy", "host_adam", "node_link", "node_exchange"} <= kinds
    assert {"layer_host", "heads", "torch_attention_forward", "head_forward"} & kinds and "attention_forward" not in kinds
    assert all("fivefold plan --calibrate, " in row.source for row in rows)
    # What was measured stands in the place of what was measured elsewhere; of the rest that remains.
    rates = Efficiencies(load_rates(path), "cpu")
    assert rates.sources["gemm"] == "cpu" and rates.sources["decode_host"] == "h200-141g"


def test_what_is_computed_goes_to_its_kind_and_time_between_to_none():
    left, right, query = torch.randn(400, 400), torch.randn(400, 400), torch.randn(1, 2, 200, 16)

    def work():
        left @ right
        F.scaled_dot_product_attention(query, query, query, is_causal=True)
        F.layer_norm(left, (400,))
        left.exp()
        time.sleep(0.2)

    work()
    seconds = seconds_by_kind(work, torch.device("cpu"), times=2)
    assert {kind for kind, spent in seconds.items() if spent} >= {"products", "attention", "norms", OTHERS}
    assert sum(seconds.values()) < 0.2 and not seconds["logits"] and not seconds["communication"]


def a_part_that(tmp_path, monkeypatch, body):
    """Each part is this program, which says a rate first."""
    row = json.dumps(asdict(Rate("gemm", 512, 430.0, "cpu", "here")))
    program = tmp_path / "part"
    program.write_text(f"#!/bin/sh\ncat > /dev/null\necho '{row}'\n{body}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(machine, "_GRACE", 0.5)


def test_what_hangs_is_ended_with_its_children_and_what_was_measured_is_kept(tmp_path, monkeypatch):
    a_part_that(tmp_path, monkeypatch, f"trap '' TERM INT; sleep 1000 & echo $! >> {tmp_path}/children; sleep 1000")
    messages, begin = [], time.monotonic()
    path = calibrate(tmp_path / "rates.json", 3, messages.append)
    assert time.monotonic() - begin < 30
    assert [row.rate for row in read_calibration(path)] == [430.0]
    assert (
        "kernels: stopped, it did not end within 2 seconds" in messages
        and messages[-1] == "layers: not measured, the time is over"
    )
    children = [int(line) for line in (tmp_path / "children").read_text().split()]
    wait_for(lambda: gone(children))


def test_a_part_that_dies_is_named_and_the_others_are_measured(tmp_path, monkeypatch):
    a_part_that(tmp_path, monkeypatch, "echo 'NCCL error: unhandled' >&2; kill -SEGV $$")
    messages = []
    path = calibrate(tmp_path / "rates.json", 60, messages.append)
    assert len(read_calibration(path)) == len(machine.PARTS)
    assert "links: it ended with -11: 'NCCL error: unhandled'" in messages


def test_a_machine_that_measures_nothing_keeps_the_file_that_is_there(tmp_path, monkeypatch):
    a_part_that(tmp_path, monkeypatch, "")
    (tmp_path / "part").write_text("""#!/bin/sh\necho '{"fault": "OutOfMemoryError: 1 GiB"}'\n""")
    path = tmp_path / "rates.json"
    path.write_text("before")
    with pytest.raises(ValueError, match="kernels: OutOfMemoryError: 1 GiB; links: "):
        calibrate(path, 60, print)
    assert path.read_text() == "before"


def test_rates_of_this_machine_stand_in_the_place_of_those_that_came():
    # Also where those were measured on the same kind of GPU: two rates of one size would be one too many.
    rates = Efficiencies(
        known_rates([Rate("swiglu", 0, 9000.0, "h200-141g", "here"), Rate("gemm", 512, 900.0, "h200-141g", "here")]),
        "h200-141g",
    )
    assert rates.rate("swiglu") == 9000e9 and rates.rate("gemm", 128) == rates.rate("gemm", 8192) == 900e12
    assert rates.rate("adam") == Efficiencies(known_rates([]), "h200-141g").rate("adam")
