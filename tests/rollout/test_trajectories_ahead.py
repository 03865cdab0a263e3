"""Trajectories that are sampled ahead of their step: the same as those sampled within it, on any layout and after a resume."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fivefold.interfaces import EngineReplica
from fivefold.types import Group, Prompt
from tests.rollout.test_driver import CODE, SAMPLING, Rig
from tests.support.tiny_models import make_tokenizer
from tests.support.toy import scored

SLOW = '''

class Tools(Count):
    """Takes much longer than the engine, now and then."""

    replayable = True

    async def step(self, message):
        await asyncio.sleep(0.15 if random.random() < 0.2 else 0.0)
        return await super().step(message)
'''
STEPS, PER_STEP, SIZE, SEED = 5, 2, 3, 7


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[str, str]:
    root = tmp_path_factory.mktemp("ahead")
    (root / "envs.py").write_text(CODE + SLOW)
    return str(make_tokenizer(root / "tokenizer")), str(root / "envs.py")


class Scorer:
    """The sum of the environment's rewards, in an instant."""

    def submit(self, prompt, *sequences):
        for sample in sequences:
            sample.reward = sum({turn.number: turn.given for one in sequences for turn in one.turns}.values())
            sample.reward_failed = False
        return scored()

    def wait(self, scoring):
        return next((future.result() for future in scoring if future.result() is not None), None)

    def close(self): ...


class Loader:
    """Prompts without end."""

    steps_per_epoch = 100

    def __init__(self, dialog) -> None:
        self._dialog = dialog

    def epoch(self, position: int) -> float:
        return position / 100

    def take(self, begin: int, count: int) -> list[Prompt]:
        talks = [[{"role": "user", "content": "abcdefghij"[i % 10]}] for i in range(begin, begin + count)]
        return [
            Prompt(begin + i, self._dialog.begin(talk)[0], "s", "", "", messages=talk, is_chat=True)
            for i, talk in enumerate(talks)
        ]


class Ahead:
    """A source of steps on this rank, with what it needs."""

    def __init__(
        self, mesh, files, root: Path, name: str = "Tools", most: float = 2, seconds: float = 0.004, **choices: Any
    ):
        from fivefold.observability.run_logger import RunLogger
        from fivefold.reward.manager import RewardManager
        from fivefold.rollout.asynchronous import AsyncRollouts
        from fivefold.rollout.generation import Generator
        from fivefold.rollout.staleness import Admission

        self.rig = Rig(files, name, {"seconds": lambda drawn: seconds})
        self.engine, self.ranks = self.rig.engine, mesh.ranks
        self.engine.replica = EngineReplica(mesh.ranks.turn, mesh.ranks.layout.world_size)
        self.logger = RunLogger(root / "run", [], is_main=False, steps=STEPS)
        manager = RewardManager(Scorer(), mesh.ranks, max_failed=0.0)
        self.generator = Generator(
            self.engine, self.rig.tokenizer, manager, self.logger, conversations=self.rig.conversations
        )
        admission = Admission(most, PER_STEP, STEPS, choices.pop("oversample", 0.0))
        loader = Loader(self.rig.dialog)
        self.source = AsyncRollouts(
            self.generator, loader, self.logger, SAMPLING, admission, seed=SEED, group_size=SIZE, capacity=64, **choices
        )
        self.engine.version = -1
        self.longest_sync = 0.0

    def sync(self) -> None:
        """New weights, as servers with `interrupt: finish` take them: what is in flight ends before."""
        began = time.monotonic()
        self.engine.router.hold()
        while not self.engine.router.is_idle:
            time.sleep(0.001)
        self.engine.version += 1
        self.engine.router.go(self.engine.version)
        self.longest_sync = max(self.longest_sync, time.monotonic() - began)

    def step(self, step: int, train_seconds: float = 0.05) -> list[Group]:
        self.source.begin(step, self.sync)
        time.sleep(train_seconds)
        groups = self.source.next(step)
        self.metrics = self.logger.pending
        return groups


def rows(step: int, groups: list[Group]) -> dict[tuple[int, int, int], Any]:
    return {
        (step, group.index, number): (
            group.prompt.id, group.context_of(one), one.token_ids, one.logprobs, one.loss_mask, one.end, one.reward,
            [(turn.begin, turn.end, turn.state) for turn in one.turns],
        )
        for group in groups
        for number, one in enumerate(group.samples)
    }  # fmt: skip


def run_ahead(mesh, files, root: Path, choices: dict[str, Any], first: int = 0, last: int = STEPS, state: Any = None):
    """(trajectories by step, group and number, metrics of each step, longest wait for new weights)."""
    ahead, trajectories, metrics = Ahead(mesh, files, root, **choices), {}, []
    try:
        if state is not None:
            ahead.source.load_state_dict(state)
            ahead.engine.version = first - 1
            ahead.source.load(root)
        for step in range(first, last):
            trajectories |= rows(step, ahead.step(step))
            metrics.append(ahead.metrics)
        if last < STEPS:
            ahead.source.begin(last, ahead.sync)
            time.sleep(0.03)
            ahead.source.snapshot()(root)
        return trajectories, metrics, ahead.longest_sync, ahead.source.state_dict()
    finally:
        ahead.rig.close()


def run_synchronous(mesh, files, root: Path):
    from fivefold.rollout.sources import EngineRollouts, PromptQueue

    ahead, trajectories = Ahead(mesh, files, root), {}
    try:
        queue = PromptQueue(Loader(ahead.rig.dialog), ahead.logger)
        source = EngineRollouts(
            ahead.generator, queue, ahead.logger, SAMPLING, seed=SEED, group_size=SIZE, prompts_per_call=PER_STEP
        )
        for step in range(STEPS):
            ahead.sync()
            trajectories |= rows(step, source.next(step))
        return trajectories
    finally:
        ahead.rig.close()


@pytest.fixture(scope="module")
def expected(cluster, files, tmp_path_factory):
    (trajectories,) = cluster.run(run_synchronous, "megatron:d1", files, tmp_path_factory.mktemp("synchronous"))
    assert len(trajectories) == STEPS * PER_STEP * SIZE
    return trajectories


@pytest.mark.parametrize(("most", "layout"), [(0, "d1"), (2, "d1"), (2, "d2")])
def test_what_is_sampled_ahead_is_what_a_synchronous_run_samples(cluster, files, expected, tmp_path, most, layout):
    results = cluster.run(run_ahead, f"megatron:{layout}", files, tmp_path, {"most": most})
    trajectories: dict = {}
    for of_rank, metrics, _, _ in results:
        assert not of_rank.keys() & trajectories.keys()
        trajectories |= of_rank
        assert [row["async/staleness_max"] for row in metrics] == [float(min(step, most)) for step in range(STEPS)]
        assert sum(row["environment/steps_per_second"] for row in metrics) > 0
        assert all(row["turns/inserted_ends"] == 0 for row in metrics)
    assert trajectories == expected


def test_new_weights_never_wait_for_a_tool(cluster, files, tmp_path):
    ((_, metrics, waited, _),) = cluster.run(run_ahead, "megatron:d1", files, tmp_path, {"name": "Sleeps"})
    assert waited < 0.75, "each step of the environment takes 1.5 s"
    assert len(metrics) == STEPS


@pytest.mark.parametrize(("tail", "oversample"), [("carry", 0.5), ("drop", 0.5), ("carry", 0.0)])
def test_groups_that_are_too_late_are_cut_and_none_is_used_twice(cluster, files, expected, tmp_path, tail, oversample):
    ((trajectories, metrics, _, _),) = cluster.run(
        run_ahead, "megatron:d1", files, tmp_path, {"most": 1, "tail": tail, "oversample": oversample, "seconds": 0.02}
    )
    assert len(trajectories) == STEPS * PER_STEP * SIZE and all(row["async/staleness_max"] <= 1 for row in metrics)
    prompts = Counter(one[0] for (_, _, number), one in trajectories.items() if number == 0)
    assert max(prompts.values()) == 1
    by_prompt = {one[0]: one for (_, _, number), one in expected.items() if number == 0}
    for (_, _, number), one in trajectories.items():
        if number == 0 and one[0] in by_prompt:
            assert one == by_prompt[one[0]], "the draws of a prompt are those of its place in the run"


def run_and_resume(mesh, files, root: Path, name: str, after: int):
    from fivefold.rollout.group_files import read_groups

    first, *_, state = run_ahead(mesh, files, root, {"name": name}, last=after)
    parts = [part for path in root.glob("*.safetensors") for part in read_groups(path)[2]]
    second, *_ = run_ahead(mesh, files, root, {"name": name}, first=after, state=state)
    assert not first.keys() & second.keys()
    return first | second, len(parts)


@pytest.mark.parametrize(("name", "after"), [("Tools", 1), ("Tools", 3), ("Count", 2)])
def test_a_run_killed_while_trajectories_are_under_way_continues_as_if_undisturbed(
    cluster, files, expected, tmp_path, name, after
):
    """Both have the same answers; the one may be replayed, and the other begins again."""
    ((trajectories, parts),) = cluster.run(run_and_resume, "megatron:d1", files, tmp_path, name, after)
    assert parts, "no trajectory was under way, so this shows nothing"
    assert trajectories == expected


def saved(mesh, files, root: Path, after: int):
    trajectories, *_, state = run_ahead(mesh, files, root, {}, last=after)
    return trajectories, state


def continued(mesh, files, root: Path, after: int, state: Any):
    return run_ahead(mesh, files, root, {}, first=after, state=state)[0]


@pytest.mark.parametrize(("before", "behind"), [("d1", "d2"), ("d2", "d1")])
def test_a_checkpoint_with_trajectories_under_way_resumes_on_another_layout(
    cluster, files, expected, tmp_path, before, behind
):
    saves = cluster.run(saved, f"megatron:{before}", files, tmp_path, 2)
    trajectories = {key: one for of_rank, _ in saves for key, one in of_rank.items()}
    for of_rank in cluster.run(continued, f"megatron:{behind}", files, tmp_path, 2, saves[0][1]):
        assert not of_rank.keys() & trajectories.keys()
        trajectories |= of_rank
    assert trajectories == expected
