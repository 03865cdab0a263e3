"""The estimate of memory as a table: what stands in it are the numbers of the phases."""

from __future__ import annotations

from fivefold.plan.memory import Memory, OtherMemory


def test_every_phase_is_a_row_and_its_parts_add_up_to_the_total():
    gib = 2**30
    memory = Memory(
        parameters=gib, gradients=2 * gib, optimizer=3 * gib, activations=gib // 2, engine=gib, cache=36 * gib,
        others={"reference": OtherMemory(0, gib)},
    )  # fmt: skip
    head, *rows = memory.table()
    assert head.startswith("GiB on the fullest rank  total  parameters  gradients")
    assert [row[:15].strip() for row in rows] == list(memory.phases)
    for row, parts in zip(rows, memory.phases.values(), strict=True):
        total, *shares = (float(word) for word in row[len("GiB on the fullest rank") :].split())
        assert total == round(sum(parts.values()) / gib, 2) == sum(shares)


def test_a_small_model_is_shown_in_mib():
    assert Memory(parameters=2**20, gradients=0, optimizer=0, activations=0, engine=0, cache=0).table() == [
        "MiB on the fullest rank  total  parameters",
        "training                  1.00        1.00",
    ]
