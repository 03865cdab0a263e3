"""The GPU of this machine in the table of GPUs, by what its driver calls it and how much memory it says."""

from __future__ import annotations

import pytest

from fivefold.config import machine
from fivefold.plan import devices


@pytest.mark.parametrize(
    ("name", "gib", "kind"),
    [
        ("NVIDIA H200", 139.8, "h200-141g"),
        ("NVIDIA H20", 95.0, "h20-96g"),
        ("NVIDIA H100 80GB HBM3", 79.6, "h100-80g"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100-80g"),
        ("NVIDIA A100-SXM4-40GB", 39.5, "a100-40g"),
        ("NVIDIA A10", 22.5, "a10-24g"),
        ("NVIDIA L40S", 44.9, "l40s-48g"),
        ("NVIDIA GeForce RTX 4090", 23.9, "rtx4090-24g"),
        ("NVIDIA GeForce GTX 1080", 8.0, None),
        ("", None, None),
    ],
)
def test_a_gpu_is_found_by_its_driver_s_name_and_memory(monkeypatch, name, gib, kind):
    monkeypatch.setattr(devices, "_asked", lambda what: f"{name}\n{name}\n" if name else "")
    monkeypatch.setattr(devices, "gpu_bytes", lambda: None if gib is None else int(gib * 2**30))
    assert devices.local_gpu_kind() == kind


@pytest.mark.parametrize(
    ("given", "of_the_driver", "visible", "count"),
    [
        # A container may see what the driver has, and was given less.
        (["nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm"], 4, None, 2),
        # A node on which no GPU was used yet.
        (["nvidiactl"], 4, None, 4),
        # Or a sandbox that shows devices only.
        (["nvidia0"], 0, None, 1),
        (["nvidia0", "nvidia1"], 2, "1", 1),
        (["nvidia0", "nvidia1"], 2, "", 0),
        ([], 0, None, 0),
    ],
)
def test_gpus_are_those_that_a_process_may_use(tmp_path, monkeypatch, given, of_the_driver, visible, count):
    for folder in ("dev", "gpus"):
        (tmp_path / folder).mkdir()
    for name in [f"dev/{name}" for name in given] + [f"gpus/0000:{number}" for number in range(of_the_driver)]:
        (tmp_path / name).touch()
    monkeypatch.setattr(machine, "_DEVICES", tmp_path / "dev")
    monkeypatch.setattr(machine, "_DRIVER", tmp_path / "gpus")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.visible_gpus() == count
