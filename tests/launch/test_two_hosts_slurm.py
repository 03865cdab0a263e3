"""Real Slurm on two hosts: a controller, two nodes, and the job of examples/slurm."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.launch.test_two_hosts import RUN, assert_equal_runs, local
from tests.support.commands import wait_for
from tests.support.slurm import Slurm
from tests.support.two_hosts import skip_without, skip_without_hosts, two_hosts
from tests.support.whole_runs import make_model, write_run

pytestmark = pytest.mark.hosts

ROOT = Path(__file__).parents[2]
FEW = ["--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=1"]
"""The job's sizes on nodes of this machine."""


def test_the_job_of_the_examples_is_submitted_requeued_and_resumed_as_one_run(tmp_path):
    skip_without_hosts()
    for program in ("slurmctld", "munged"):
        skip_without(program, "slurm-wlm munge")
    make_model(tmp_path, rows=16)
    write_run(tmp_path, RUN.replace("steps: 4", "steps: 16"))
    rows, output = tmp_path / "runs/slurm/metrics.jsonl", tmp_path / "job.out"
    with two_hosts() as hosts:
        local(hosts.north, tmp_path, "one")
        slurm = Slurm(hosts, tmp_path / "slurm")
        job = slurm.run(
            "sbatch", "--parsable", *FEW, f"--output={output}", ROOT / "examples/slurm/train.sbatch", tmp_path / "run.yaml",
            f"trainer.run_dir={tmp_path}/runs/slurm", VENV=sys.prefix,
        )  # fmt: skip
        assert job.isdigit(), job
        wait_for(lambda: (rows.is_file() and '"step": 3,' in rows.read_text()) or slurm.state(job) == "FAILED")
        slurm.run("scontrol", "requeue", job)
        wait_for(lambda: "asked to end by SIGTERM" in output.read_text())
        slurm.wait(job, "PENDING")
        assert '"step": 16,' not in rows.read_text(), "it was not requeued in its middle"
        # Slurm would wait for two minutes.
        slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")
        assert slurm.wait(job, "COMPLETED", "FAILED") == "COMPLETED", output.read_text()
        text = output.read_text()
        assert "resume" in text and "Traceback" not in text
        refused = slurm.run("sbatch", "--parsable", "--wait", *FEW, f"--output={tmp_path}/refused.out",
                            ROOT / "examples/slurm/train.sbatch", tmp_path / "run.yaml", "policy.backend=megatron:d4",
                            VENV=sys.prefix)  # fmt: skip
        assert refused and "layout megatron:d4t1p1 needs 4 ranks: WORLD_SIZE is 2" in (tmp_path / "refused.out").read_text()
    assert_equal_runs(tmp_path, "slurm", "one")
