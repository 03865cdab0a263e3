"""Rates: measured rows, what stands between and next to them, and files that replace them."""

from __future__ import annotations

import json

import pytest

from fivefold.config.gpus import GPUS
from fivefold.plan import efficiency
from fivefold.plan.efficiency import KINDS, Efficiencies, load_rates, read_calibration, write_calibration
from fivefold.plan.hardware import Cluster
from fivefold.plan.links import Group, Links
from fivefold.plan.measured import MEASURED, Rate

H200 = "h200-141g"


def test_every_kind_has_a_measured_rate_on_known_hardware_below_its_data_sheet():
    assert {row.kind for row in MEASURED} == set(KINDS)
    for row in MEASURED:
        sheet = {"arithmetic": "tflops", "memory": "memory_gb_s", "link": "link_gb_s"}.get(KINDS[row.kind].bound)
        assert row.source and (sheet is None or row.rate < getattr(GPUS[row.hardware], sheet)), row


def test_rates_are_interpolated_between_sizes_and_kept_beyond_them():
    rows = [*MEASURED, Rate("gemm", 100, 10, "l4-24g", "here"), Rate("gemm", 10000, 30, "l4-24g", "here")]
    rates = Efficiencies(rows, "l4-24g")
    assert [rates.rate("gemm", size) / 1e12 for size in (10, 100, 1000, 10000, 10**6)] == pytest.approx([10, 10, 20, 30, 30])


def test_another_gpu_has_the_measured_share_of_its_data_sheet_and_the_same_host():
    measured, scaled = Efficiencies(MEASURED, H200), Efficiencies(MEASURED, "a100-80g")
    sheets = GPUS["a100-80g"], GPUS[H200]
    assert scaled.rate("gemm", 2048) / measured.rate("gemm", 2048) == pytest.approx(sheets[0].tflops / sheets[1].tflops)
    assert scaled.rate("adam") / measured.rate("adam") == pytest.approx(sheets[0].memory_gb_s / sheets[1].memory_gb_s)
    assert scaled.rate("layer_host") == measured.rate("layer_host")
    assert measured.measured_here and not scaled.measured_here


def test_attention_is_torch_s_own_where_flash_attn_4_does_not_run():
    with_flash, without = (Efficiencies(MEASURED, H200, has_flash) for has_flash in (True, False))
    older = Efficiencies(MEASURED, "a100-80g")
    for kind in ("attention_forward", "attention_backward"):
        assert with_flash.rate(kind, 4096) > 1.5 * without.rate(kind, 4096)
        assert without.rate(kind, 4096) == with_flash.rate(f"torch_{kind}", 4096)
        assert older.rate(kind, 4096) == older.rate(f"torch_{kind}", 4096)
    # What is not used need not be measured.
    rows = [Rate(row.kind, row.size, row.rate, "a100-80g", "") for row in MEASURED if not row.kind.startswith("attention")]
    assert Efficiencies([*MEASURED, *rows], "a100-80g").measured_here


def test_a_calibration_replaces_its_kinds_of_its_hardware_only(tmp_path, monkeypatch):
    path = tmp_path / "rates.json"
    write_calibration(path, [Rate("gemm", 2048, 100.0, H200, "here")], "today")
    assert Efficiencies(load_rates(path), H200).rate("gemm", 8192) == 100e12
    assert Efficiencies(load_rates(path), H200).rate("adam") == Efficiencies(MEASURED, H200).rate("adam")
    write_calibration(path, [Rate("gemm", 2048, 1.0, "cpu", "here")], "today")
    assert Efficiencies(load_rates(path), H200).rate("gemm", 8192) == Efficiencies(MEASURED, H200).rate("gemm", 8192)
    # Without a name that of this machine is read, where there is one.
    monkeypatch.setattr(efficiency, "CALIBRATION", path)
    assert Efficiencies(load_rates(), "cpu").rate("gemm") == 1e12
    monkeypatch.setattr(efficiency, "CALIBRATION", tmp_path / "none")
    assert load_rates() == MEASURED


@pytest.mark.parametrize(
    "content",
    ["[]", "{}", '{"rates": []}', '{"rates": [1]}', '{"rates": [{"kind": "gemm"}]}',
     '{"rates": [{"kind": "gem", "size": 1, "rate": 1, "hardware": "cpu", "source": ""}]}',
     '{"rates": [{"kind": "gemm", "size": 1, "rate": 0, "hardware": "cpu", "source": ""}]}',
     '{"rates": [{"kind": "gemm", "size": 1, "rate": "fast", "hardware": "cpu", "source": ""}]}'],
)  # fmt: skip
def test_another_file_is_refused_by_its_name(tmp_path, content):
    path = tmp_path / "rates.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"rates\.json"):
        read_calibration(path)
    assert json.loads(content) is not None


def test_what_leaves_a_node_takes_the_network_s_time():
    """8 ranks in a node use NVLink; one of each of two nodes the port of one GPU, all of both nodes the ports of all."""
    links = Links(Cluster("h100-80g", 16, 8, network_gb_s=50), Efficiencies(MEASURED, "h100-80g"))
    inside, across, everyone = (links.gather(group, 1e9) for group in (Group(8, 1), Group(2, 8), Group(16, 1)))
    assert across == pytest.approx(0.5e9 / (50e9 * 0.8))
    assert inside < everyone < across
    assert links.exchange(Group(16, 1), 1e9) == pytest.approx(0.5e9 / (50e9 * 0.8))
    assert links.gather(Group(1, 1), 1e9) == links.exchange(Group(1, 1), 1e9) == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("h100", 8), "unknown GPU 'h100': known are a10-24g"),
        (("h100-80g", 12, 8), "got 12 with 8 on a node; take 8 or 16"),
    ],
)
def test_a_cluster_that_is_none_is_refused(arguments, says):
    with pytest.raises(ValueError, match=says):
        Cluster(*arguments)
