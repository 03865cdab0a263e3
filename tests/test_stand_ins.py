from __future__ import annotations

import importlib
import json
import sys

import pytest

from fivefold.stand_ins import stand_ins


def test_a_package_that_is_absent_is_found_within_the_block_only():
    with stand_ins("absent_engine"):
        import absent_engine.layers as layers
        from absent_engine.layers.linear import Linear

        @layers.jit
        def double(number: int) -> int:
            return 2 * number

        class Own(Linear):
            """A library's class of its own, with an annotation of names that are not there."""

            part: layers.ops.Sequential

        assert double(4) == 8 and isinstance(Own(), Linear)
    assert not [name for name in sys.modules if name.startswith("absent_engine")]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("absent_engine")


def test_a_package_that_is_installed_is_not_replaced():
    with stand_ins("json"):
        assert importlib.import_module("json") is json
    assert sys.modules["json"] is json
