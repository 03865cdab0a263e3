"""`trainer.ends_with_data`: a run ends when its prompts are used up, however many of them a step draws."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fivefold.algo.methods import Choices
from fivefold.config import ConfigError, RunConfig
from fivefold.data.prompt_loader import PromptLoader
from fivefold.rollout.sources import DynamicSampling, EngineRollouts, PromptQueue
from fivefold.types import Sampling
from tests.rollout.test_sources import InMemory
from tests.support.toy import ToyModel, toy_parts, toy_prompts


class UntilUsedUp(InMemory):
    """The prompts of so many rounds."""

    def __init__(self, ranks, policy: ToyModel, rounds: int) -> None:
        super().__init__(ranks, policy)
        self._rounds = rounds

    def next(self, step: int):
        return None if self._calls == self._rounds else super().next(step)


def until_used_up(mesh, run_dir: Path, rounds: int):
    """Steps of two rounds each, as all groups of every round are wanted and a step takes twice as many."""
    from fivefold.trainer.train import train

    policy = ToyModel()
    source = UntilUsedUp(mesh.ranks, policy, rounds)
    run = toy_parts(mesh, run_dir, "grpo", Choices(), policy, 50)
    needed = 2 * len(toy_prompts())
    wanted = {"groups_per_step": needed, "max_rounds": 9, "informative": lambda samples: True}
    rollouts = DynamicSampling(source, mesh.ranks, run.logger, **wanted)
    run.trainer.rollouts = rollouts
    run = replace(run, rollouts=rollouts)
    train(run)
    written = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in written.read_text().splitlines()] if written.is_file() else []
    return [row["step"] for row in rows], policy.version, run.trainer.total_steps


@pytest.mark.parametrize(("rounds", "steps"), [(6, 3), (7, 3)])
def test_a_run_ends_before_the_step_for_which_too_few_prompts_are_left(cluster, tmp_path, rounds, steps):
    ((rows, version, total),) = cluster.run(until_used_up, "megatron:d1", tmp_path, rounds)
    assert rows == list(range(1, steps + 1)) and total == steps
    assert version == 2 * steps, "two updates of each step, and none of the prompts that are left"


def test_data_that_hold_no_step_end_the_run_with_an_error(cluster, tmp_path):
    with pytest.raises(RuntimeError, match="must have groups for one step, and were used up before it"):
        cluster.run(until_used_up, "megatron:d1", tmp_path, 1)
    assert not (tmp_path / "checkpoints").exists()


class Log:
    def record(self, values: dict[str, float]) -> None: ...


@pytest.mark.parametrize(("end", "calls"), [(None, 9), (24, 3), (31, 3)])
def test_a_source_gives_nothing_after_the_last_whole_round_of_prompts(end, calls):
    prompts = PromptQueue(PromptLoader(range(8), 8, 0, False), Log(), end=end)

    class Generator:
        def sample(self, prompts, *arguments, counts):
            return [*prompts]

        def record_counts(self, counts): ...

    source = EngineRollouts(Generator(), prompts, Log(), Sampling(max_tokens=1), seed=0, group_size=1, prompts_per_call=8)
    rounds = [source.next(step) for step in range(9)]
    assert [len(groups) for groups in rounds if groups is not None] == [8] * calls
    assert all(groups is None for groups in rounds[calls:]) and prompts.position == 8 * calls


def config(**trainer):
    return RunConfig.of(
        model={"path": "m"},
        algorithm={"name": "dapo", "group_size": 4, "prompts_per_round": 48},
        data={"train": ["a.parquet"], "prompts_per_step": 16},
        trainer=trainer,
    )


def test_an_epoch_counts_the_prompts_that_a_round_draws_where_it_ends_the_run():
    assert (config().prompts_taken, config(ends_with_data=True).prompts_taken) == (16, 48)


def test_a_mixture_with_dynamic_sampling_cannot_end_with_its_data():
    with pytest.raises(ConfigError, match=r"trainer\.ends_with_data must be false with dynamic sampling and data\.mixture"):
        RunConfig.of(
            model={"path": "m"},
            algorithm={"name": "dapo", "group_size": 4},
            data={"train": ["a.parquet"], "mixture": {"a": 1.0}, "prompts_per_step": 16},
            trainer={"ends_with_data": True},
        )
