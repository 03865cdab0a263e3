"""No one samples with half of two models: what a server knows of the weights that its workers hold."""

from __future__ import annotations

import asyncio

import pytest

from fivefold.engines.vllm import held_weights as module
from fivefold.engines.vllm.held_weights import HeldWeights


def updated(held: HeldWeights, answers: list[list[str]], is_whole: bool = True) -> None:
    for method, arguments, results in (("begin_weights", [True, "run"], [None]), ("finish_weights", [is_whole], answers)):
        held.before()
        held.after(method, arguments, results)


def test_weights_are_whole_after_an_update_that_ended_well_and_only_then():
    held = HeldWeights()
    assert not asyncio.run(held.are_whole())
    updated(held, [[], []])
    assert asyncio.run(held.are_whole())
    updated(held, [[], ["1 of 9 parameters are not what was sent"]])
    assert not asyncio.run(held.are_whole())
    updated(held, [[]], is_whole=False)
    assert not asyncio.run(held.are_whole())
    updated(held, [[]])
    held.before()
    held.cut()
    assert not asyncio.run(held.are_whole())


@pytest.mark.parametrize("ends_well", [True, False])
def test_who_asks_during_an_update_waits_for_its_end(ends_well):
    async def ask() -> bool:
        held = HeldWeights()
        updated(held, [[]])
        held.before()
        waiting = asyncio.ensure_future(held.are_whole())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        if ends_well:
            held.after("finish_weights", [True], [[]])
        else:
            held.cut()
        return await waiting

    assert asyncio.run(ask()) is ends_well


def test_an_update_that_is_not_heard_of_any_more_is_taken_to_be_cut(monkeypatch):
    monkeypatch.setattr(module, "_SILENCE", 0.05)
    held = HeldWeights()
    held.before()
    assert not asyncio.run(held.are_whole())
