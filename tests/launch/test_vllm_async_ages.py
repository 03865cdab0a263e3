"""Whole runs that sample ahead with real servers of vLLM, one for each way to treat requests in flight."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.async_runs import ENDLESS, check_ages_and_prompts, command, finished, make_run

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("servers"))


@pytest.mark.slow
@pytest.mark.parametrize("interrupt", ["continue", "finish", "abort"])
def test_ages_stay_within_their_bound_and_each_prompt_is_used_once(root, interrupt):
    given = ["rollout.max_staleness=2", f"rollout.interrupt={interrupt}", *ENDLESS]
    finished(root, command(root, interrupt, *given), interrupt)
    rows = check_ages_and_prompts(root, interrupt, 2)
    assert max(row["async/staleness_max"] for row in rows) == 2
    aborted, reused = (sum(row[f"async/{name}_tokens"] for row in rows) for name in ("aborted", "reused"))
    assert (aborted > 0, reused > 0) == (interrupt == "abort", interrupt == "continue"), (aborted, reused)
