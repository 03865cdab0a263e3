"""`fivefold plan --calibrate` on this machine's CPU: a short one, whose file plan reads."""

from __future__ import annotations

from fivefold.plan.efficiency import Efficiencies, load_rates, read_calibration
from tests.support.commands import program


def test_a_short_calibration_measures_layers_as_the_trainer_runs_them(tmp_path):
    path = tmp_path / "own" / "rates.json"
    done = program("fivefold.cli", "plan", "--calibrate", "--seconds", "19", "--calibration", path,
                   env={"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"rates: {path}"
    rows = read_calibration(path)
    assert {row.hardware for row in rows} == {"cpu"}
    # What is left of a layer without its products may be nothing on a busy machine; what stands alone is measured first.
    kinds = {row.kind for row in rows}
    assert {"gemm", "adam", "gradients", "host_copy"} <= kinds
    assert {"layer_host", "heads", "torch_attention_forward", "head_forward"} & kinds and "attention_forward" not in kinds
    assert all("fivefold plan --calibrate, " in row.source for row in rows)
    # What was measured stands in the place of what was measured elsewhere; of the rest that remains.
    rates = Efficiencies(load_rates(path), "cpu")
    assert rates.sources["gemm"] == "cpu" and rates.sources["decode_host"] == "h200-141g"
