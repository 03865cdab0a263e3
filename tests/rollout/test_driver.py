"""Trajectories side by side: how many run, in which order, and what a loss of servers or an abort leaves of them."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fivefold.config.environment import EnvironmentConfig
from fivefold.data.dialog import Dialog
from fivefold.data.tokenizer import load_tokenizer, train_tokenizer
from fivefold.engines.sampling import request_seed
from fivefold.engines.servers import request_router
from fivefold.environments.pool import EnvironmentPool
from fivefold.errors import RunError
from fivefold.interfaces import EngineState, Pressure
from fivefold.rollout.conversations import Conversations
from fivefold.rollout.driver import Driver
from fivefold.rollout.group_files import read_groups, write_groups
from fivefold.rollout.trajectories import Clock, Task, Trajectory
from fivefold.types import Completion, Prompt, Request, Sampling
from tests.rollout.test_conversations import TOOL_TEMPLATE
from tests.support.memory_engine import MemoryEngine
from tests.support.tiny_models import make_tokenizer

CODE = '''
import asyncio, os, random, time


class Count:
    """Three to five turns, each answered after a random time; files in $MARKS count the environments that exist."""

    async def reset(self, task, seed):
        self.draws = random.Random(seed)
        self.left = 3 + self.draws.randrange(3)
        return f"{task['prompt'][0]['content']} {self.draws.randrange(100)}"

    async def step(self, message):
        await asyncio.sleep(0.01 * random.random())
        self.left -= 1
        text = message["content"]
        return {"messages": f"{text} {self.draws.randrange(1000)}?", "reward": len(text) / 8, "done": self.left == 0,
                "state": str(self.left)}


class Marked(Count):
    async def reset(self, task, seed):
        marks = task["extra_info"]["marks"]
        self.path = os.path.join(marks, f"{os.getpid()}-{id(self)}")
        open(self.path, "w").close()
        with open(f"{marks}.counts", "a") as file:
            print(len(os.listdir(marks)), file=file)
        return await super().reset(task, seed)

    async def close(self):
        os.remove(self.path)


class Sleeps(Count):
    async def step(self, message):
        await asyncio.sleep(1.5)
        return {"done": True}


class Stated(Count):
    """Can be restored; `log` of the row counts its steps, `restored` the states."""

    async def reset(self, task, seed):
        self.task = task
        return await super().reset(task, seed)

    async def step(self, message):
        with open(os.path.join(self.task["extra_info"]["marks"], "steps"), "a") as file:
            file.write("x")
        return await super().step(message)

    def state(self):
        version, numbers, rest = self.draws.getstate()
        return {"left": self.left, "draws": [version, list(numbers), rest]}

    def restore(self, state):
        with open(os.path.join(self.task["extra_info"]["marks"], "restored"), "a") as file:
            file.write("x")
        self.left, (version, numbers, rest) = state["left"], state["draws"]
        self.draws.setstate((version, tuple(numbers), rest))


class Replayable(Count):
    replayable = True


class Forgetful(Count):
    """Says that it can be replayed, and cannot: its second environment of a process gives other answers."""

    replayable = True
    made = 0

    async def reset(self, task, seed):
        Forgetful.made += 1
        self.is_other = Forgetful.made > 12 and Forgetful.made <= 24
        return await super().reset(task, seed)

    async def step(self, message):
        step = await super().step(message)
        return {**step, "messages": "something else"} if self.is_other else step


class Refuses(Stated):
    def restore(self, state):
        raise ValueError("a state of another version")


class SlowReset(Marked):
    async def reset(self, task, seed):
        first = await super().reset(task, seed)
        await asyncio.sleep(0.3)
        return first
'''
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}{{ eos_token }}{% else %}({{ m.content }})\n"
    "{% endif %}{% endfor %}"
)
DROPPING = TEMPLATE.replace("{{ m.content }}{{ eos_token }}", "{{ m.content.split('1')[-1] }}{{ eos_token }}")
"""Leaves out what comes before the last 1 of a turn."""
SAMPLING = Sampling(max_tokens=12)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[str, str]:
    """(tokenizer, environments)."""
    root = tmp_path_factory.mktemp("driver")
    (root / "envs.py").write_text(CODE)
    return str(make_tokenizer(root / "tokenizer")), str(root / "envs.py")


class Rig:
    """What trajectories need: environments, servers and a driver."""

    def __init__(self, files: tuple[str, str], name: str = "Count", engine: dict[str, Any] | None = None, **settings: Any):
        self.tokenizer = load_tokenizer(files[0])
        config = EnvironmentConfig(class_=f"{files[1]}:{name}", **settings)
        template = {"chat_template": TEMPLATE if config.history == "append" else DROPPING}
        self.dialog = Dialog.of(self.tokenizer, template, [self.tokenizer.eos_token_id], history=config.history)
        self.pool = EnvironmentPool(config)
        self.pool.start()
        self.engine = MemoryEngine(self.tokenizer, **(engine or {}))
        self.conversations = Conversations(config, self.dialog, self.pool, 1000)
        self.driver = self.conversations.driver(self.engine)

    def tasks(self, prompts: int = 4, size: int = 3, **extra: Any):
        rows = [
            Prompt(i, self.dialog.begin(message)[0], "s", "", "", messages=message, extra=extra, is_chat=True)
            for i, message in enumerate([{"role": "user", "content": "abcd"[i]}] for i in range(prompts))
        ]
        return [task for row in rows for task in self.conversations.tasks(row, row.id, 0, size, (3, 5))]

    def add(self, *numbers: int, **extra: Any) -> None:
        self.driver.add(self.tasks(*numbers, **extra), SAMPLING)

    def run(self, seconds: float = 60.0) -> dict[tuple[int, int], Trajectory]:
        ended: dict[tuple[int, int], Trajectory] = {}
        end = time.monotonic() + seconds
        while self.driver.is_running and time.monotonic() < end:
            ended |= {held.task.key: held for held in self.driver.advance(0.2)}
        return ended

    def close(self) -> None:
        self.engine.close()
        self.pool.close()


@pytest.fixture
def rig(files):
    rigs: list[Rig] = []

    def make(*names, **settings) -> Rig:
        rigs.append(Rig(files, *names, **settings))
        return rigs[-1]

    yield make
    for one in rigs:
        one.close()


def content(trajectories: dict[tuple[int, int], Trajectory]) -> dict[tuple[int, int], Any]:
    """What trajectories are: tokens, log-probs, mask, turns and end."""
    return {
        key: [
            (one.prompt_ids, one.token_ids, one.logprobs, one.loss_mask, one.end, held.error,
             [(turn.number, turn.begin, turn.end, turn.given, turn.state) for turn in one.turns])
            for one in held.samples()
        ]
        for key, held in sorted(trajectories.items())
    }  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(files) -> dict[tuple[int, int], Any]:
    one = Rig(files)
    one.add()
    contents = content(one.run())
    one.close()
    assert len(contents) == 12 and all(samples[0][4] == "done" for samples in contents.values())
    return contents


def read(one: Rig, trajectories: dict[tuple[int, int], Trajectory]) -> None:
    """Check that each turn's context is what was held before it, and that each was sampled once for all that is kept."""
    seen = Counter(tokens for tokens, _ in one.engine.seen)
    for held in trajectories.values():
        for sequence in held.sequences:
            for turn in sequence.turns:
                assert seen[tuple(sequence.context + sequence.token_ids[: turn.begin])] >= 1


@pytest.mark.parametrize(("most", "per_worker"), [(2, 64), (3, 1), (1024, 64)])
def test_no_more_trajectories_run_than_may_and_they_are_the_same(rig, undisturbed, tmp_path, most, per_worker):
    one, marks = rig("Marked", max_running=most, per_worker=per_worker), tmp_path / "marks"
    marks.mkdir()
    one.add(marks=str(marks))
    groups = one.run()
    assert content(groups) == undisturbed
    read(one, groups)
    counts = [int(line) for line in (tmp_path / "marks.counts").read_text().splitlines()]
    # An environment is closed when the next one may already have begun.
    assert len(counts) == 12 and max(counts) <= 2 * most
    assert len(one.pool._processes) <= (1 if per_worker > 1 else 2 * most)
    assert one.conversations.most <= one.pool.capacity


def test_the_youngest_trajectories_wait(rig):
    one = rig(max_running=2)
    one.add()
    order = []
    while one.driver.is_running:
        order += [held.task.key for held in one.driver.advance(0.005)]
    # Two run at once: none ends before one that was added two or more earlier has begun to end.
    expected = [task.key for task in one.tasks()]
    assert all(abs(order.index(key) - place) <= 5 for place, key in enumerate(expected))
    assert sorted(order) == sorted(expected)


def test_fewer_requests_are_in_flight_while_servers_are_full_and_the_youngest_wait(rig, undisturbed, monkeypatch):
    """And more again while they are clear. What waits is outside the time limit, and the trajectories are the same."""
    monkeypatch.setattr(request_router, "_LOOK_SECONDS", 0.004)
    one = rig(engine={"seconds": lambda drawn: 0.05}, trajectory_seconds=0.3)
    readings, server = [], one.engine.servers[0]
    is_full = threading.Event()
    is_full.set()

    def pressure(_) -> Pressure:
        readings.append(server.running if is_full.is_set() else 0)
        return Pressure(0.9, 0) if is_full.is_set() and server.running > 3 else Pressure(0.2, 0)

    one.engine.pressure = pressure
    one.driver._queue.limit = 6.0
    one.add()
    ended, flying = {}, []
    while one.driver.is_running:
        ended |= {held.task.key: held for held in one.driver.advance(0.02)}
        flying.append(len(one.driver._requests) - len(one.driver._queue.parked))
        if len(ended) >= 6:
            is_full.clear()
    assert content(ended) == undisturbed
    assert max(readings) <= 8 and min(flying[2 : len(flying) // 2]) <= 4
    assert one.driver._queue.limit > 3
    places = [3 * place + number for place, number in ended]
    assert sum(places[:4]) < sum(places[-4:])


def test_a_clock_counts_only_what_is_not_held():
    clock = Clock(10.0)
    assert clock.left == 10.0
    clock.run()
    time.sleep(0.05)
    clock.hold()
    left = clock.left
    time.sleep(0.05)
    assert clock.left == left and 9.8 < left <= 9.95
    clock.run()
    clock.run()
    time.sleep(0.02)
    assert clock.left < left
    assert Clock(0.0).left == 0.0


def test_the_time_limit_does_not_run_while_a_trajectory_waits_for_the_engine(rig, undisturbed):
    """Each turn takes the engine longer than the whole trajectory may take without it."""
    one = rig(engine={"seconds": lambda drawn: 0.3}, trajectory_seconds=0.25)
    one.add()
    assert content(one.run()) == undisturbed


def test_a_driver_does_nothing_while_it_waits(rig):
    """Neither for an environment nor for the engine; 512 trajectories look no more often than they have events."""
    one, rounds = rig("Sleeps"), Counter()
    for name in ("arrived", "submit"):
        one.driver._stream.__dict__[name] = _counted(getattr(one.driver._stream, name), rounds, name)
    one.add(4, 128)
    began = time.process_time()
    ended = one.run()
    assert len(ended) == 512 and {held.end for held in ended.values()} == {"done"}
    # One submission for each turn at most, and about one look for each event; 1.5 s of polls would be 750.
    assert rounds["submit"] <= 512 and rounds["arrived"] <= 600
    assert time.process_time() - began < 5.0


def _counted(function, rounds: Counter, name: str):
    def call(*arguments):
        rounds[name] += 1
        return function(*arguments)

    return call


@pytest.mark.parametrize("after", [0, 5, 20])
def test_a_lost_server_changes_no_trajectory(rig, undisturbed, after):
    one = rig(engine={"servers": 2, "seconds": lambda drawn: 0.002})
    one.add()
    ended: dict[tuple[int, int], Trajectory] = {}
    while one.driver.is_running:
        if len(one.engine.seen) >= after:
            one.engine.lose(0)
        ended |= {held.task.key: held for held in one.driver.advance(0.01)}
        one.engine.look_after()
    assert content(ended) == undisturbed and one.engine.router.lost == {0}
    read(one, ended)


def test_trajectories_continue_where_they_were_after_the_loss_of_all_servers(rig, undisturbed):
    """What the lost servers were sent fails after others have replaced them, which are not lost by that."""
    one = rig(engine={"servers": 2, "seconds": lambda drawn: 0.03})
    one.add()
    ended, restarts = {}, 0
    while one.driver.is_running:
        if len(one.engine.seen) >= 15 and not restarts:
            one.engine.lose(0), one.engine.lose(1)
        ended |= {held.task.key: held for held in one.driver.advance(0.005)}
        one.engine.look_after()
        if one.engine.state is EngineState.LOST:
            restarts, before = restarts + 1, len(one.engine.seen)
            one.engine.restart()
    assert content(ended) == undisturbed and restarts == 1
    # Turns that were sampled before are not sampled again: of the others, each may have been under way.
    turns, again = sum(held.turns for held in ended.values()), sum(len(server.seen) for server in one.engine.servers)
    assert before + again <= turns + 2 * 12


def test_an_aborted_turn_is_sampled_again_with_its_own_draws(rig, undisturbed):
    one = rig(engine={"seconds": lambda drawn: 0.02})
    one.add()
    ended, cuts = {}, 0
    while one.driver.is_running:
        is_cut = cuts < 3 and one.engine.servers[0].running > 3
        if is_cut:
            cuts += 1
            one.engine.cut()
        ended |= {held.task.key: held for held in one.driver.advance(0.03)}
        if is_cut:
            one.engine.router.call(one.engine.servers[0].cut.clear)
    assert content(ended) == undisturbed and cuts == 3
    assert sum(held.counts["turns/aborted_tokens"] for held in ended.values()) > 0
    # The same draws, for the same turns.
    contexts = {}
    for tokens, seed in one.engine.seen:
        assert contexts.setdefault(seed, tokens) == tokens
    assert len(contexts) < len(one.engine.seen)


@pytest.mark.parametrize("name", ["Marked", "SlowReset"])
def test_discarded_trajectories_leave_no_environment_and_change_no_other(rig, undisturbed, tmp_path, name):
    one = rig(name, engine={"seconds": lambda drawn: 0.01}, max_running=8)
    one.add(marks=str(tmp_path))
    ended = {held.task.key: held for held in one.driver.advance(0.05)}
    gone = {(place, number) for place in (0, 3) for number in range(3)} - ended.keys()
    assert gone
    one.driver.discard(gone)
    assert not gone & {held.task.key for held in one.driver.unfinished()}
    ended |= one.run()
    assert content(ended) == {key: samples for key, samples in undisturbed.items() if key not in gone}
    deadline = time.monotonic() + 10.0
    while list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not list(tmp_path.iterdir()) and not one.driver._requests and not one.driver._started and not one.driver._members


def test_trajectories_may_be_added_while_others_run(rig, undisturbed):
    one = rig(engine={"seconds": lambda drawn: 0.005})
    tasks, ended = one.tasks(), {}
    for first in range(0, 12, 3):
        one.driver.add(tasks[first : first + 3], SAMPLING)
        ended |= {held.task.key: held for held in one.driver.advance(0.02)}
    assert content(ended | one.run()) == undisturbed


def test_an_error_of_the_engine_or_of_two_starts_ends_the_run(rig):
    one = rig()
    one.driver._check_start = lambda held, other: held is other or (_ for _ in ()).throw(RunError("start alike"))
    one.add()
    with pytest.raises(RunError, match="start alike"):
        one.run()


def as_written(parts, tmp_path: Path):
    write_groups(tmp_path / "groups.safetensors", {}, (), parts)
    return read_groups(tmp_path / "groups.safetensors")[2]


def killed(one: Rig, turns: int, tmp_path: Path, **extra: Any) -> tuple[dict, list]:
    """(trajectories that ended, those that a checkpoint keeps) when so many turns were sampled; then nothing is left.

    On a busy machine all trajectories may be in the middle of a step, of which there is no state: this waits until one that
    has sampled a turn waits for the engine. Nothing changes after that, since the driver does nothing by itself.
    """
    one.add(**extra)
    ended: dict[tuple[int, int], Trajectory] = {}

    def is_time() -> bool:
        sampled = sum(held.turns for held in [*ended.values(), *one.driver.unfinished()])
        return sampled >= turns and any(request.run.held.turns for request in one.driver._requests.values())

    while one.driver.is_running and not is_time():
        ended |= {held.task.key: held for held in one.driver.advance(0.002)}
    parts = as_written(one.driver.parts(), tmp_path)
    one.close()
    return ended, parts


def resumed(one: Rig, ended: dict, parts: list, **extra: Any) -> dict:
    tasks = {task.key: task for task in one.tasks(**extra) if task.key not in ended}
    held = [Trajectory.of(tasks.pop((part.place, part.number)), part, one.dialog.text) for part in parts if part.record]
    one.driver.resume(held, SAMPLING)
    one.driver.add(list(tasks.values()), SAMPLING)
    return one.run()


@pytest.mark.parametrize("turns", [1, 10, 25, 40])
@pytest.mark.parametrize("name", ["Stated", "Replayable", "Count", "Forgetful"])
def test_trajectories_of_a_checkpoint_continue_and_equal_undisturbed_ones(files, undisturbed, tmp_path, name, turns):
    """With their environment's state, by taking their actions again, or from the start: none is lost and none is there twice."""
    engine = {"seconds": lambda drawn: 0.03}
    one = Rig(files, name, engine)
    ended, parts = killed(one, turns, tmp_path, marks=str(tmp_path))
    recorded = [part for part in parts if part.record is not None]
    assert len(ended) + len(parts) <= 12 and sum(part.record["turns"] for part in recorded) > 0
    two = Rig(files, name, engine)
    later = resumed(two, ended, parts, marks=str(tmp_path))
    two.close()
    assert not ended.keys() & later.keys() and content(ended | later) == undisturbed
    held = {seed for part in recorded for seed in seeds_of(one, part)}
    again = [seed for _, seed in two.engine.seen if seed in held]
    if name == "Stated":
        # Where the environment was in the middle of a step, it has no state to continue from.
        still = [part for part in recorded if part.record["restore"] is not None]
        assert len((tmp_path / "restored").read_text()) == len(still) > 0
        assert not [seed for part in still for seed in seeds_of(one, part) if seed in again]
    elif name == "Replayable":
        assert not again, "no turn of the checkpoint is sampled again"
    elif name == "Count":
        assert sorted(again) == sorted(held), "without either, every turn of the checkpoint is sampled again"


def test_trajectories_of_several_sequences_continue_from_a_checkpoint(files, tmp_path):
    settings: dict[str, Any] = {"engine": {"seconds": lambda drawn: 0.03}, "history": "template"}
    undisturbed_rig = Rig(files, "Stated", **settings)
    undisturbed_rig.add(marks=str(tmp_path))
    ended = undisturbed_rig.run()
    read(undisturbed_rig, ended)
    undisturbed_rig.close()
    expected = content(ended)
    assert any(len(samples) > 1 for samples in expected.values())
    one = Rig(files, "Stated", **settings)
    ended_before, parts = killed(one, 25, tmp_path, marks=str(tmp_path))
    assert any(len(part.samples) > 1 and part.record is not None for part in parts)
    two = Rig(files, "Stated", **settings)
    later = resumed(two, ended_before, parts, marks=str(tmp_path))
    two.close()
    assert content(ended_before | later) == expected


def seeds_of(one: Rig, part) -> list[int]:
    """The seeds of the turns that a checkpoint has of a trajectory."""
    task = next(task for task in one.tasks() if task.key == (part.place, part.number))
    return [request_seed((*task.draw, turn) if turn else task.draw) for turn in range(part.record["turns"])]


def test_a_state_that_does_not_restore_fails_that_trajectory_with_its_sentence(files, tmp_path):
    one = Rig(files, "Refuses", {"seconds": lambda drawn: 0.03})
    ended, parts = killed(one, 15, tmp_path, marks=str(tmp_path))
    assert any(part.record["restore"] is not None for part in parts if part.record)
    two = Rig(files, "Refuses")
    later = resumed(two, ended, parts, marks=str(tmp_path))
    two.close()
    failed = [held for held in later.values() if held.error is not None]
    assert len(failed) == sum(part.record["restore"] is not None for part in parts if part.record)
    assert all("a state of another version" in held.error and held.end == "environment" for held in failed)
    assert len(later) + len(ended) == 12


TOOLS = """
def mark(path: str) -> str:
    with open(path, "a") as file:
        file.write("x")
    return str(len(open(path).read()))
"""


@pytest.mark.parametrize("at", ["engine", "tool"])
def test_tools_alone_are_not_called_again_when_a_trajectory_continues(tmp_path, at):
    """Only the call that ran at the time of the checkpoint is: its answer was not there yet."""
    (tmp_path / "tools.py").write_text(TOOLS)
    train_tokenizer("bpe", ["abc"], tmp_path / "words", 300)
    tokenizer, marks = load_tokenizer(str(tmp_path / "words")), tmp_path / "marks"
    pool = EnvironmentPool(EnvironmentConfig(tools=[f"{tmp_path}/tools.py:mark"]))
    schemas = pool.start()
    dialog = Dialog.of(tokenizer, {"chat_template": TOOL_TEMPLATE}, [tokenizer.eos_token_id], schemas)
    conversations = Conversations(EnvironmentConfig(tools=["mark"]), dialog, pool, 1000)
    call = "<tool_call>" + json.dumps({"name": "mark", "arguments": {"path": str(marks)}}) + "</tool_call>"
    texts = iter([call, call, "done"])

    def go_on(held: Trajectory, until: Callable[[Any], bool]) -> None:
        steps = conversations.steps(held, Sampling(max_tokens=200), None)
        with suppress(StopIteration):
            waiting = next(steps)
            while not until(waiting):
                if isinstance(waiting, Request):
                    tokens = [*tokenizer.encode(next(texts), add_special_tokens=False), tokenizer.eos_token_id]
                    waiting = steps.send(Completion(0, tokens, [-1.0] * len(tokens), "stop", 5))
                else:
                    waiting = steps.send(waiting.result())
        steps.close()

    question = [{"role": "user", "content": "a"}]
    row = Prompt(0, dialog.begin(question)[0], "s", "", "", messages=question, is_chat=True)
    (task,) = conversations.tasks(row, 0, 0, 1, (3, 5))
    held = Trajectory(task)
    go_on(held, lambda waiting: held.turns == 2 and isinstance(waiting, Request) == (at == "engine"))
    again = Trajectory.of(task, held.part(None), dialog.text)
    go_on(again, lambda waiting: False)
    pool.close()
    assert again.end == "answered" and again.turns == 3 and again.messages[: len(held.messages)] == held.messages
    assert len(marks.read_text()) == (2 if at == "engine" else 3)


class Asked:
    """Trajectories whose turns are requested from elsewhere, until their future is done."""

    most = 8

    def __init__(self) -> None:
        self.ended: Future[str] = Future()

    def steps(self, held, sampling, driver):
        assert (yield self.ended) == "over"
        held.end = "done"


def asked(files) -> tuple[MemoryEngine, Driver, Trajectory, Future]:
    """(an engine, a driver with one trajectory, the trajectory, its end)."""
    engine, agents = MemoryEngine(load_tokenizer(files[0]), seconds=lambda drawn: 0.05), Asked()
    driver = Driver(engine, agents)
    driver.add([Task(Prompt(0, [1, 2], "s", "", ""), 0, 0, (3, 5), 0)], SAMPLING)
    driver.advance(0.01)
    (held,) = driver.unfinished()
    return engine, driver, held, agents.ended


def test_a_turn_with_an_agent_s_stop_is_sampled_again_under_new_weights(files):
    """Servers that do not name versions end it, and its rest could not be sampled apart: a stop may span the cut."""
    engine, driver, held, _ = asked(files)
    turn = driver.ask(held, Request(0, [1, 2, 3], Sampling(max_tokens=12, stop=("Observation:",)), seed=1))
    driver.advance(0.01)
    engine.router.hold(keeps=True)
    engine.router.call(engine.servers[0].cut.set)
    while not engine.router.is_idle:
        driver.advance(0.01)
    engine.router.call(engine.servers[0].cut.clear)
    engine.router.go(6)
    while not turn.done():
        driver.advance(0.02)
    engine.close()
    assert turn.result().policy_version == 6 and len(turn.result().token_ids) > 1
    assert engine.seen == [((1, 2, 3), 1)] * 2 and held.counts["turns/aborted_tokens"] == 1


def test_several_turns_of_a_trajectory_may_be_requested_at_once(files):
    """Sample two contexts at once, each a sequence of its own, as the endpoint of an agent does."""
    engine, driver, held, ended = asked(files)
    held.clock = Clock(100.0)
    held.clock.run()

    def agent() -> None:
        futures = [driver.ask(held, Request(0, [1, 2, which], SAMPLING, seed=which)) for which in (1, 2)]
        first, second = (future.result(timeout=20) for future in futures)
        for which, one in enumerate((first, second), start=1):
            held.sampled(held.extend_or_begin([1, 2, which], "content"), one, "x", None, 0.0)
        more = driver.ask(held, Request(0, [1, 2, 1, *first.token_ids, 9], SAMPLING, seed=7)).result(timeout=20)
        held.sampled(held.extend_or_begin([1, 2, 1, *first.token_ids, 9], "content"), more, "y", None, 0.0)
        ended.set_result("over")

    thread = threading.Thread(target=agent)
    thread.start()
    ended_trajectories = driver.advance(0.03)
    engine.cut()
    ended_trajectories += driver.advance(0.1)
    engine.router.call(engine.servers[0].cut.clear)
    while driver.is_running:
        ended_trajectories += driver.advance(0.1)
    thread.join()
    engine.close()
    (held,) = ended_trajectories
    assert [[turn.number for turn in sequence.turns] for sequence in held.sequences] == [[0, 2], [1]]
    assert [sequence.cause for sequence in held.sequences] == [None, "content"]
    assert held.sequences[0].loss_mask.count(False) == 1
    samples = held.samples()
    assert [sample.trajectory for sample in samples] == [0, 0] and samples[1].break_cause == "content"
    assert 99.0 < held.clock.left < 100.0
    assert held.counts["turns/aborted_tokens"] > 0
