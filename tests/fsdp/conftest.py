from __future__ import annotations

import pytest

from tests.support.cluster import Together
from tests.support.fsdp import policy_of
from tests.support.two_steps import expected, fsdp_step


@pytest.fixture(scope="module")
def steps(request, cluster, models):
    """Results by (model, layout, budget): the selected cases of a module, all of a layout in one start of its ranks."""
    keys = ("name", "layout", "budget")
    cases = [
        tuple(item.callspec.params[key] for key in keys)
        for item in request.session.items
        if item.module is request.module and set(keys) <= set(getattr(getattr(item, "callspec", None), "params", ()))
    ]

    def call(name: str, layout: str, budget: int):
        directory = models(name)
        return f"fsdp:{layout.split()[0]}", fsdp_step, directory, policy_of(layout, budget), expected(directory)[2]

    return Together(cluster, {case: call(*case) for case in cases})
