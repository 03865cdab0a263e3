"""Checks that end a run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fivefold.types import TokenBatch


def compared(mesh, gap: float, versions: list[int], version: int) -> tuple[list[str], list[str], str]:
    """What the gate needs after the first step, what it has said, and with which error it ended the run."""
    from fivefold.trainer.checks import LogprobGate

    said: list[str] = []
    gate = LogprobGate(mesh.ranks, 0.01, is_open=False, log=said.append)
    assert gate.needs
    batch = TokenBatch(
        torch.tensor([5, 6, 7]),
        torch.tensor([False, True, True]),
        [3],
        rollout_logprobs_T=torch.tensor([0.0, -1.0, -1.0]),
        old_logprobs_T=torch.tensor([0.0, -1.0, -1.0 - gap]),
        version_T=torch.tensor([0, *versions]),
    )
    try:
        gate.check(batch, SimpleNamespace(skipped_N=None), version)
    except RuntimeError as error:
        return sorted(gate.needs), said, str(error)
    return sorted(gate.needs), said, ""


@pytest.mark.parametrize(
    ("gap", "versions", "says"),
    [(0.0, [4, 4], ""), (0.5, [4, 4], "differ from the trainer's by 0.25"), (0.5, [4, 3], ""), (0.5, [3, 4], "by 0.5")],
)
def test_what_the_newest_weights_have_sampled_is_compared_once(cluster, gap, versions, says):
    ((needs, said, error),) = cluster.run(compared, "megatron:d1", gap, versions, 4)
    assert needs == said == [] and says in error and bool(says) == bool(error)


def test_a_run_that_resumes_with_older_samples_compares_nothing_and_says_so_once(cluster):
    """What older weights had sampled cannot be compared: log-probs that nothing else needs would be computed in vain."""
    ((needs, said, error),) = cluster.run(compared, "megatron:d1", 0.5, [3, 3], 4)
    assert needs == [] and error == ""
    assert said == ["the engine's log-probs were not compared with the trainer's: older weights have sampled the step"]
