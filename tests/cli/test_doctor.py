"""`fivefold doctor` answers whatever the machine does."""

from __future__ import annotations

import json
import os
import time

import pytest

from fivefold import cli
from fivefold.commands.doctor import SECONDS, Report, _judge, describe, run_probes
from fivefold.commands.probes import topology
from fivefold.config.machine import visible_gpus

TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tSYS\tPIX\t0-47\t0\t\tN/A
GPU1\tNV18\t X \tSYS\tSYS\tNODE\t0-47\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tNV18\tSYS\t48-95\t1\t\tN/A
GPU3\tSYS\tSYS\tNV18\t X \tSYS\t48-95\t1\t\tN/A
NIC0\tPIX\tNODE\tSYS\tSYS\t X \t\t\t\t

Legend:

  X    = Self
"""
WELL = {
    "driver": {"version": "580.1", "gpus": [{"name": "H", "memory_gib": 79.1}] * 2, "links": {"NV18": ["0-1"]}},
    "torch": {"version": "2.11", "cuda": "13.0", "gpus": [{"name": "H", "memory_gib": 79.1}] * 2, "peers": ["0-1"]},
    "trainer": {"module": "m"},
    "sandbox": {"missing": None, "layers": "Landlock"},
    "disk": {"path": "/runs", "free_gib": 900, "write_mb_s": 1000},
    "collective": {"backend": "nccl", "ranks": 2, "mib": 1024, "bus_gb_s": 300.0},
}


def fake_tool(directory, body):
    path = directory / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def judged(**changed):
    report = Report(machine={"host": "h", "system": "s", "cores": 2, "shm_gib": 1, "open_files": 9999})
    report.probes = {**WELL, **changed}
    _judge(report)
    return report


def test_links_are_those_of_the_driver_s_matrix():
    assert topology(TOPOLOGY) == {"NV18": ["0-1", "2-3"], "SYS": ["0-2", "0-3", "1-2", "1-3"]}
    assert topology("") == {}


def test_gpus_and_links_come_from_the_driver_s_tool(tmp_path, monkeypatch):
    (tmp_path / "topology").write_text(TOPOLOGY)
    gpus = "NVIDIA H100 80GB HBM3, 81559, 580.65.06\n" * 4
    fake_tool(tmp_path, f'case "$1" in topo) cat {tmp_path}/topology;; *) printf "{gpus}";; esac')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    answer = run_probes({"driver": ()}, SECONDS)["driver"]
    assert answer["version"] == "580.65.06" and answer["links"]["NV18"] == ["0-1", "2-3"]
    assert answer["gpus"] == [{"name": "NVIDIA H100 80GB HBM3", "memory_gib": 79.6}] * 4


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18", "Driver/library version mismatch"),
        ("echo nonsense", "must list name, memory and driver of each GPU"),
        ("kill -SEGV $$", "ended with -11"),
    ],
)
def test_a_broken_driver_is_an_answer(tmp_path, monkeypatch, body, says):
    fake_tool(tmp_path, body)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert says in run_probes({"driver": ()}, SECONDS)["driver"]["error"]


def test_a_driver_that_hangs_does_not_hang_the_doctor(tmp_path, monkeypatch):
    fake_tool(tmp_path, "trap '' TERM INT HUP; while true; do sleep 1; done")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    begin = time.monotonic()
    answers = run_probes({"driver": (), "sandbox": ()}, {"driver": 2, "sandbox": 20})
    assert time.monotonic() - begin < 60
    assert answers["driver"] == {"error": "no answer within 2 seconds"} and "error" not in answers["sandbox"]


def test_nothing_answers_and_the_doctor_still_does(tmp_path, capsys):
    assert cli.main(["doctor", str(tmp_path), "--json", "--seconds", "0.01"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert "torch: no answer within 0.01 seconds" in report["faults"]
    assert {row["name"] for row in report["versions"]} >= {"python", "torch", "megatron-core", "transformers", "vllm"}


def test_what_cannot_be_written_is_a_fault(tmp_path):
    answer = run_probes({"disk": (str(tmp_path / "not/yet"),)}, SECONDS)["disk"]
    assert answer["path"] == str(tmp_path) and answer["free_gib"] > 0 and answer["write_mb_s"] > 0
    assert "error" in run_probes({"disk": ("/proc/sys",)}, SECONDS)["disk"]


@pytest.mark.parametrize(
    ("changed", "faults"),
    [
        ({}, []),
        ({"driver": {"error": "no answer"}}, []),
        ({"torch": {"version": "2.13+cpu", "cuda": None, "gpus": [], "peers": []}}, ["the driver has 2 GPUs, torch 2.13+cpu is a build for CPUs"]),
        ({"collective": {"error": "rank 1: NCCL error"}}, ["collective: rank 1: NCCL error"]),
        ({"disk": {"path": "/runs", "free_gib": 0.5, "write_mb_s": 9}}, ["/runs has 0.5 GiB free"]),
        ({"torch": {"error": "ImportError: libcudart"}}, ["torch: ImportError: libcudart"]),
        ({"trainer": {"error": "ModuleNotFoundError: megatron"}}, ["trainer: ModuleNotFoundError: megatron"]),
        ({"sandbox": {"missing": "it needs Landlock", "layers": None}}, []),
    ],
)  # fmt: skip
def test_a_fault_is_what_keeps_a_plain_run_from_starting(monkeypatch, changed, faults):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    report = judged(**changed)
    assert len(report.faults) == len(faults)
    assert all(fault.startswith(expected) for fault, expected in zip(report.faults, faults, strict=True))
    text = describe(report)
    assert text.endswith("no run can start here" if faults else "a plain run can start here")
    if "sandbox" in changed:
        assert "rewards code and code_fraction" in text and "it needs Landlock" in text


def test_gpus_that_are_not_visible_are_named(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    report = judged(torch={**WELL["torch"], "gpus": WELL["torch"]["gpus"][:1], "peers": []})
    assert report.faults == [] and report.notes == ["1 of this machine's 2 GPUs are visible: CUDA_VISIBLE_DEVICES=1"]


def test_it_says_what_answered_while_others_are_waited_for(tmp_path, monkeypatch):
    fake_tool(tmp_path, "sleep 1000")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    lines = []
    run_probes({"driver": (), "sandbox": ()}, {"driver": 2, "sandbox": 20}, lines.append)
    assert lines[0] == "asking driver (at most 2 s), sandbox (at most 20 s)"
    assert {line.split()[0] for line in lines[1:]} == {"driver", "sandbox"}
    assert any("no answer within 2 seconds" in line for line in lines)


@pytest.mark.skipif(visible_gpus() > 0, reason="this machine has GPUs")
def test_a_rank_that_fails_says_why_and_the_others_are_ended():
    error = run_probes({"collective": ("cuda", "3")}, SECONDS)["collective"]["error"]
    assert error.startswith("rank ") and error.endswith("must be visible: there are 0")


@pytest.mark.slow
def test_this_machine_can_run(tmp_path, capsys):
    assert cli.main(["doctor", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "right, " in output and "a plain run can start here" in output


@pytest.mark.gpu
def test_gpus_are_found_and_add_up(tmp_path, capsys):
    import torch

    assert cli.main(["doctor", str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    count = torch.cuda.device_count()
    # The driver lists those too that are not visible here.
    assert len(report["probes"]["torch"]["gpus"]) == count <= len(report["probes"]["driver"]["gpus"])
    assert (report["probes"]["collective"]["backend"], report["probes"]["collective"]["ranks"]) == ("nccl", count)
