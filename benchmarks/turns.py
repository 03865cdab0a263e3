"""Measure what several turns cost besides engine and environment: time per turn, environments per second, long contexts,
idle engines, and tokens that are trained.

taskset -c 0,1 python benchmarks/turns.py [loop environments extension blocked idle trained]     # no GPU; five minutes

Engines are servers in this process with the router that runs have: they return drawn tokens after a drawn time, so what
is measured is the trajectory loop, the router and the environment layer.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from typing import Any
from urllib.request import Request as HttpRequest
from urllib.request import urlopen

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from fivefold.config.environment import EndpointConfig, EnvironmentConfig
from fivefold.data.dialog import Dialog
from fivefold.data.tokenizer import load_tokenizer, train_tokenizer
from fivefold.environments.pool import EnvironmentPool
from fivefold.rollout.conversations import Conversations
from fivefold.rollout.endpoint import Address, Endpoint
from fivefold.rollout.sessions import Dialogs
from fivefold.rollout.staleness import Admission
from fivefold.rollout.trajectories import Task, Trajectory
from fivefold.types import Completion, Prompt, Request, Sampling
from tests.support.memory_engine import MemoryEngine

ENVIRONMENTS = '''
import asyncio, random


class Sleeps:
    """Sleeps before each answer."""

    async def reset(self, task, seed):
        return "begin"

    async def step(self, message):
        await asyncio.sleep(float(message["content"]))
        return {"messages": "and?"}

'''
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}{{ eos_token }}{% else %}({{ m.content }})\n"
    "{% endif %}{% endfor %}"
)
WORDS = "the quick brown fox jumps over a lazy dog and then it sleeps in the warm sun of a long afternoon "


def line(text: str) -> None:
    print(text, flush=True)


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


class Immediate:
    """Environments without processes that answer after a known time, so that the environment layer is not measured."""

    has_class, is_stateless, is_replayable, capacity = True, False, False, 1 << 20

    def __init__(self, seconds: float, turns: int, answer: str = WORDS * 2) -> None:
        self._seconds, self._turns, self._answer = seconds, turns, answer
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.answered: dict[int, float] = {}
        """Number of an environment -> when its last answer was due."""
        self._left: dict[int, int] = {}

    def reset(self, task: Any, seed: int, restore: Any = None) -> Future[tuple[int, Any]]:
        place = len(self._left)
        self._left[place] = self._turns
        return self._after(0.0, (place, f"{place} {WORDS}"))

    def step(self, place: int, message: Any, seconds: float) -> Future[dict[str, Any]]:
        self._left[place] -= 1
        self.answered[place] = time.perf_counter() + self._seconds
        answer = {"messages": self._answer, "reward": 0.0, "done": not self._left[place], "state": None}
        return self._after(self._seconds, answer)

    def leave(self, place: int) -> None: ...

    def _after(self, seconds: float, value: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if seconds:
            self._loop.call_soon_threadsafe(self._loop.call_later, seconds, future.set_result, value)
        else:
            future.set_result(value)
        return future


def rows(dialog: Dialog, count: int) -> list[Prompt]:
    messages = [{"role": "user", "content": "a"}]
    return [Prompt(i, dialog.begin(messages)[0], "s", "", "", messages=messages, is_chat=True) for i in range(count)]


class Rig:
    def __init__(self, root: Path, pool: Any, seconds: Callable[[random.Random], float], most_tokens: int, **settings: Any):
        if not (root / "words").exists():
            train_tokenizer("bpe", [WORDS], root / "words", 400)
        self.tokenizer = load_tokenizer(str(root / "words"))
        self.dialog = Dialog.of(self.tokenizer, {"chat_template": TEMPLATE}, [self.tokenizer.eos_token_id])
        self.config = EnvironmentConfig(class_="x.py:X", max_observation_tokens=1 << 20, **settings)
        self.engine = MemoryEngine(self.tokenizer, 4, 1024, seconds)
        self.conversations = Conversations(self.config, self.dialog, pool, most_tokens)
        # A driver needs no more of an engine.
        self.driver = self.conversations.driver(self.engine)  # type: ignore[arg-type]

    def add(self, count: int, max_tokens: int = 64) -> None:
        tasks = [task for row in rows(self.dialog, count) for task in self.conversations.tasks(row, row.id, 0, 1, (0, 0))]
        self.driver.add(tasks, Sampling(max_tokens=max_tokens))

    def run(self) -> int:
        ended = 0
        while self.driver.is_running:
            ended += len(self.driver.advance(0.5))
        return ended


def loop(root: Path) -> None:
    """Measure the time between a completion and the next request in 512 conversations of 16 turns, without the environment's
    second."""
    conversations, turns = 512, 16
    pool = Immediate(1.0, turns)
    rig = Rig(root, pool, lambda drawn: 0.5 + drawn.random(), 1 << 20, max_turns=turns + 1)
    added: list[float] = []
    spent: list[float] = []
    due: dict[int, float] = {}
    arrived, request, answered = rig.driver._arrived, rig.driver._request, rig.driver._answered

    def on_arrival(completion: Any) -> None:
        due[rig.driver._requests[completion.request_id].run.number] = time.perf_counter()
        began = time.thread_time()
        arrived(completion)
        spent.append(time.thread_time() - began)

    def on_answer(run: Any, future: Any) -> None:
        began = time.thread_time()
        answered(run, future)
        spent.append(time.thread_time() - began)

    def on_request(run: Any, given: Any, future: Any = None) -> None:
        if run.number in due:
            added.append(time.perf_counter() - due.pop(run.number) - 1.0)
        request(run, given, future)

    rig.driver._arrived, rig.driver._request, rig.driver._answered = on_arrival, on_request, on_answer  # type: ignore
    began, cpu = time.perf_counter(), time.process_time()
    rig.add(conversations)
    assert rig.run() == conversations
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    total = conversations * turns
    line(
        f"loop: {conversations} conversations of {turns} turns, {total / seconds:.0f} turns/s: the loop takes "
        f"{1e3 * sum(spent) / total:.2f} ms of CPU a turn, {1e3 * cpu / total:.2f} ms with router and simulated engine; "
        f"by the clock, next to whatever else runs here, median {1e3 * statistics.median(added):.1f} ms, "
        f"p99 {1e3 * quantile(added, 0.99):.0f} ms"
    )
    rig.engine.close()


def environments(root: Path) -> None:
    """Measure 4,096 environments that sleep 2 s a step, in 64 processes."""
    count, rounds, nap = 4096, 6, 2.0
    (root / "envs.py").write_text(ENVIRONMENTS)
    for processes, per_worker in ((2, 2048), (64, 64)):
        config = EnvironmentConfig(class_=f"{root}/envs.py:Sleeps", per_worker=per_worker, max_processes=processes)
        pool = EnvironmentPool(config)
        pool.start()
        began = time.perf_counter()
        places = [request.result()[0] for request in [pool.reset({}, 0) for _ in range(count)]]
        made = time.perf_counter() - began
        late: list[float] = []
        failed: list[BaseException] = []
        done, draws = threading.Semaphore(0), random.Random(0)

        def step(
            place: Any, left: int, nap: float, pool: EnvironmentPool = pool, late: list[float] = late,
            failed: list[BaseException] = failed, done: threading.Semaphore = done,
        ) -> None:  # fmt: skip
            asked = time.perf_counter()

            def answered(future: Future[Any]) -> None:
                if (error := future.exception()) is not None:
                    failed.append(error)
                late.append(time.perf_counter() - asked - nap)
                if left > 1 and error is None:
                    step(place, left - 1, 2.0)
                else:
                    done.release()

            pool.step(place, {"role": "assistant", "content": str(nap)}, 60.0).add_done_callback(answered)

        began, cpu = time.perf_counter(), time.process_time()
        for place in places:
            # Steps spread over the whole time, as trajectories do.
            step(place, rounds, nap * draws.random())
        for _ in range(count):
            done.acquire()
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        pool.close()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        theirs = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        line(
            f"environments: {count} in {processes} processes (made in {made:.1f} s), {len(late) / seconds:.0f} steps/s: "
            f"a step takes {1e3 * statistics.median(late):.0f} ms more than its sleep, p99 "
            f"{1e3 * quantile(late, 0.99):.0f} ms; {len(failed)} failed; "
            f"{1e3 * cpu / len(late):.2f} ms of CPU a step in the rank, and at most "
            f"{1e3 * theirs / len(late):.2f} ms in the processes with their start: "
            f"{len(late) / (cpu + theirs):.0f} steps/s a core"
        )


def extension(root: Path) -> None:
    """Measure the CPU time from a completion to the next request in a conversation of 128 turns and 69,000 tokens."""
    turns = 128
    pool = Immediate(0.0, turns, WORDS * 25)
    rig = Rig(root, pool, lambda drawn: 0.0, 1 << 20, max_turns=turns + 1)
    times: dict[int, list[float]] = {}
    arrived = rig.driver._arrived
    lengths: list[int] = []

    def timed(completion: Any) -> None:
        asked = rig.driver._requests[completion.request_id]
        turn, began = asked.request.turn, time.thread_time()
        lengths.append(len(asked.request.prompt_ids))
        arrived(completion)
        rig.driver._take()
        times.setdefault(turn, []).append(time.thread_time() - began)

    rig.driver._arrived = timed  # type: ignore[method-assign]
    for _ in range(9):
        rig.add(1)
        rig.run()
    first, last = (
        1e3 * statistics.median(t for turn in positions for t in times[turn]) for positions in (range(1, 5), range(122, 126))
    )
    line(
        f"extension: {first:.2f} ms at turn 2, {last:.2f} ms at turn {turns - 4} with {max(lengths):,} tokens: "
        f"{last / first:.2f} times"
    )
    rig.engine.close()


def blocked(root: Path) -> None:
    """Measure how long the event loops of requests and environments stand still with eight contexts of 128,000 tokens at
    once."""
    (root / "long.py").write_text(
        "class Long:\n"
        "    async def reset(self, task, seed):\n"
        f"        return {WORDS!r} * {128_000 // 20}\n"
        "    async def step(self, message):\n"
        "        return {'done': True}\n"
    )
    pool = EnvironmentPool(EnvironmentConfig(class_=f"{root}/long.py:Long"))
    pool.start()
    rig = Rig(root, pool, lambda drawn: 0.5, 1 << 20)
    lags: dict[str, list[float]] = {"requests": [], "environments": []}
    stop = threading.Event()

    async def watch(name: str) -> None:
        while not stop.is_set():
            began = time.perf_counter()
            await asyncio.sleep(0.001)
            lags[name].append(time.perf_counter() - began - 0.001)

    watching = [
        asyncio.run_coroutine_threadsafe(watch(name), of)
        for name, of in (("requests", rig.engine.router._loop), ("environments", pool._loop))
    ]
    time.sleep(0.3)
    before = {name: max(values) for name, values in lags.items()}
    rig.driver.start()
    rig.add(8)
    ended = rig.driver.advance(0.5)
    while len(ended) < 8:
        ended += rig.driver.advance(0.5)
    stop.set()
    for watcher in watching:
        watcher.result()
    tokens = min(len(held.context) for held in ended)
    line(
        f"blocked: 8 contexts of {tokens:,} tokens at once: the loop of requests stands still for at most "
        f"{1e3 * max(lags['requests']):.0f} ms, that of environments for {1e3 * max(lags['environments']):.0f} ms "
        f"({1e3 * before['requests']:.0f} and {1e3 * before['environments']:.0f} ms before)"
    )
    rig.engine.close()
    pool.close()


def idle(root: Path) -> None:
    """Simulate steps of 128 x 8 trajectories of 4 to 8 turns with tools, by the rule by which runs admit them."""
    rate, unused = simulated(0, False)
    line(f"idle: max_staleness 0: the engine has no request {100 * unused:.1f} % of the time, {1 / rate:.0f} s a step")
    for tail in ("wait", "carry"):
        ahead, unused = simulated(2, tail == "carry")
        line(
            f"idle: max_staleness 2, tail: {tail}: {100 * unused:.1f} %, {1 / ahead:.0f} s a step: "
            f"{ahead / rate:.2f} times the synchronous rate"
        )


def simulated(most: int, cuts: bool, prompts: int = 128, group: int = 8) -> tuple[float, float]:
    """Return (steps per second, share of the time in which the engine has no request).

    The engine samples 64 turns at once, of 1 s each, later ones first; a tool takes a log-normal time, median 1 s and p99
    30 s; a training step takes 20 s.
    """
    steps, warm = 40, 8
    slots, train, draws, admission = 64, 20.0, random.Random(0), Admission(most, prompts, steps)
    events: list[tuple[float, int, str, int, int]] = []
    waiting: list[tuple[bool, int, int]] = []
    turns: dict[int, int] = {}
    places: dict[int, int] = {}
    members: dict[int, list[int]] = {}
    left: dict[int, int] = {}
    unused: dict[int, int] = {}
    now = idle_seconds = began = 0.0
    running = given = taken = 0
    numbers = count()

    def ask(place: int) -> None:
        left[place], members[place] = group, [next(numbers) for _ in range(group)]
        for number in members[place]:
            turns[number], places[number] = draws.randint(4, 8), place
            heappush(waiting, (True, number, number))

    def begin(step: int) -> None:
        nonlocal given
        for place in [place for place in unused if place not in left]:
            ask(place)
        for _ in range(admission.room(len(unused), step)):
            unused[given] = step
            ask(given)
            given += 1
        start()

    def start() -> None:
        nonlocal running
        while waiting and running < slots:
            running += 1
            heappush(events, (now + 1.0, next(numbers), "sampled", heappop(waiting)[2], 0))

    def pass_time(until: float) -> None:
        """Run all simulated events before a time."""
        nonlocal now, running, idle_seconds
        while now < until:
            then = min(until, events[0][0]) if events else until
            idle_seconds += 0.0 if running else then - now
            now = then
            while events and events[0][0] <= now:
                _, _, kind, number, _ = heappop(events)
                running -= kind == "sampled"
                if places[number] not in left:
                    start()
                elif kind == "sampled":
                    turns[number] -= 1
                    heappush(events, (now + draws.lognormvariate(0.0, 1.4622), next(numbers), "answered", number, 0))
                elif turns[number]:
                    heappush(waiting, (False, next(numbers), number))
                else:
                    left[places[number]] -= 1
                start()

    for step in range(steps):
        if step == warm:
            began, idle_seconds = now, 0.0
        begin(step)
        while (chosen := admission.choose(unused, [place for place in unused if not left[place]], step, cuts)) is None:
            pass_time(events[0][0])
        for place in chosen:
            del unused[place]
        for place in admission.overdue(unused, step) if cuts else ():
            # Its trajectories are given up, and begun again before the next step.
            unused[place] = step + 1
            del left[place]
            for number in members[place]:
                places[number] = -1
        taken += step >= warm
        pass_time(now + train)
    # The last steps have less and less ahead of them, as in a run.
    return taken / (now - began), idle_seconds / (now - began)


def trained(root: Path) -> tuple[float, float]:
    """Measure how many tokens agents train that append to one conversation of 32 turns, and in how many sequences.

    Returns (sequences per trajectory, trained tokens over those of the last context with its answer). The engine samples any
    tokens, which need not be those that their text is encoded to.
    """
    turns, agents = 32, 16
    train_tokenizer("bpe", [WORDS], root / "words", 400)
    tokenizer = load_tokenizer(str(root / "words"))
    dialog = Dialog.of(tokenizer, {"chat_template": TEMPLATE}, [tokenizer.eos_token_id])
    endpoint = Endpoint(Dialogs(dialog), EndpointConfig(), "policy", turns, 1 << 20)
    endpoint.start()
    vocabulary = tokenizer.encode(WORDS, add_special_tokens=False)
    read_and_sampled: list[int] = []

    def sample(request: Request) -> Future[Completion]:
        draws, answered = random.Random(request.seed), Future[Completion]()
        tokens = [*draws.choices(vocabulary, k=draws.randrange(5, 100)), tokenizer.eos_token_id]
        read_and_sampled.append(len(request.prompt_ids) + len(tokens))
        answered.set_result(Completion(request.id, tokens, [-0.5] * len(tokens), "stop", 0))
        return answered

    sequences, tokens, last = 0, 0, 0
    for number in range(agents):
        draw = 0, 0, 0, number
        address = endpoint.open(draw, Sampling(max_tokens=1000), sample)
        converse(address, turns)
        endpoint.end(address).result()
        held = Trajectory(Task(Prompt(0, [], "s", "", ""), 0, number, draw, 0))
        address.session.record(held)
        assert held.turns == turns
        sequences += len(held.sequences)
        tokens += sum(len(sequence) for sequence in held.sequences)
        last += read_and_sampled[-1]
    endpoint.close()
    line(
        f"trained: {agents} agents of {turns} turns: {sequences / agents:.3f} sequences per trajectory, {tokens:,} "
        f"trained tokens: {tokens / last:.3f} times those of the last contexts with their answers"
    )
    return sequences / agents, tokens / last


def converse(address: Address, turns: int) -> None:
    """Take turns with an endpoint as an agent that repeats the whole conversation and appends to it."""
    messages: list[dict[str, Any]] = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{turn} {WORDS}"})
        body = json.dumps({"model": "policy", "messages": messages}).encode()
        headers = {"Authorization": f"Bearer {address.api_key}"}
        with urlopen(HttpRequest(f"{address.base_url}/chat/completions", body, headers)) as answer:
            messages.append(json.load(answer)["choices"][0]["message"])


PARTS: dict[str, Callable[[Path], object]] = {
    part.__name__: part for part in (loop, environments, extension, blocked, idle, trained)
}


def main() -> int:
    chosen = sys.argv[1:] or [*PARTS]
    line(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as directory:
        for name in chosen:
            PARTS[name](Path(directory))
    return 0


if __name__ == "__main__":
    sys.exit(main())
