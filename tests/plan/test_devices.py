"""The GPU of this machine in the table of GPUs, by what its driver calls it and how much memory it says."""

from __future__ import annotations

import pytest

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
