"""Trajectories of several turns: prompts and an environment -> samples, through an engine's stream.

A trajectory is a generator that yields what it waits for, a `Request` to the engine or a future of the environment, and is
sent the result. Its held tokens are never encoded again: each turn's context is exactly what was read and sampled before.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Generator as Coroutine
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

from fivefold.config.environment import EnvironmentConfig
from fivefold.data.dialog import Answer, Dialog, check_messages
from fivefold.data.tool_calls import ToolCall, arguments_fault
from fivefold.distributed.ranks import Ranks
from fivefold.engines.sampling import request_seed
from fivefold.environments.pool import EnvironmentFailure, EnvironmentPool, Place, ToolAnswer
from fivefold.errors import RunError, UserError, shown
from fivefold.interfaces import Engine, EngineState
from fivefold.types import Completion, Prompt, Request, Sample, Sampling, Turn

RESET_STREAM = 0x5EED0
"""Mixed into the seed, so that environments and sampled tokens use different random numbers."""
_ROUND_SECONDS = 0.5
"""Seconds between two exchanges of the ranks while trajectories run."""
_POLL_SECONDS = 0.002
"""Seconds that a rank waits for completions while environments work too."""
Waiting = Request | Future[Any]
Steps = Coroutine[Waiting, Any, None]


@dataclass
class Task:
    """One trajectory to sample."""

    prompt: Prompt
    place: int
    """Position of the prompt among those of the call."""
    number: int
    """Number of the trajectory within its group."""
    draw: tuple[int, ...]
    """Parts of the key of its random draws: seed, step, prompt and number of the response."""
    seed: int
    """Seed of the environment, the same for all trajectories of a group."""


@dataclass
class Trajectory:
    """What a trajectory holds while it runs, and its end."""

    task: Task
    context: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """Text of each turn."""
    turns: list[Turn] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Weight version of each token."""
    routes_TLK: Any = None
    end: str = "environment"
    error: str | None = None
    """Why it failed; None if it did not."""

    def observe(self, tokens: Sequence[int]) -> None:
        """Append tokens that the model reads."""
        self.token_ids += tokens
        self.logprobs += [0.0] * len(tokens)
        self.loss_mask += [False] * len(tokens)
        self.versions += self.versions[-1:] * len(tokens)

    def sampled(self, found: Completion, state: str | None, seconds: float) -> None:
        """Append a turn of the model."""
        begin = len(self.token_ids)
        self.token_ids += found.token_ids
        self.logprobs += found.logprobs
        self.loss_mask += [True] * len(found.token_ids)
        self.versions += found.token_versions or [found.policy_version] * len(found.token_ids)
        self.routes_TLK = found.routes_TLK
        turn = Turn(len(self.turns), begin, len(self.token_ids), 0.0, state, found.finish_reason, seconds)
        self.turns.append(turn)

    def sample(self) -> Sample:
        """Return the trajectory as a sample that is not scored yet."""
        return Sample(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            text="\n".join(self.texts),
            end=self.end,
            policy_version=self.versions[0] if self.versions else 0,
            token_versions=self.versions if len(set(self.versions)) > 1 else None,
            routes_TLK=self.routes_TLK,
            loss_mask=None if all(self.loss_mask) else self.loss_mask,
            reward_failed=self.error is not None,
            prompt_ids=self.context or None,
            turns=tuple(self.turns),
        )


class Conversations:
    """Samples trajectories of several turns with an environment, tools, or both."""

    def __init__(self, config: EnvironmentConfig, dialog: Dialog, pool: EnvironmentPool, max_tokens: int) -> None:
        """`max_tokens`: maximum length of a whole trajectory with its first context."""
        self._config, self.dialog, self._pool, self._max_tokens = config, dialog, pool, max_tokens
        self._sums: Counter[str] = Counter()

    def tasks(
        self,
        prompts: Sequence[Prompt],
        places: Sequence[int],
        numbers: Sequence[int],
        size: int,
        draw: tuple[int, ...],
    ) -> list[Task]:
        """Return the trajectories of the prompts at these places; `numbers` has the number of each prompt's first one."""
        start = (draw[0] ^ RESET_STREAM, *draw[1:])
        return [
            Task(
                prompts[place],
                place,
                number,
                (*draw, prompts[place].id, numbers[place] + number),
                # Libraries take seeds of 31 bits.
                request_seed((*start, prompts[place].id)) & 0x7FFFFFFF,
            )
            for place in places
            for number in range(size)
        ]

    def begin(self, engine: Engine, tasks: Sequence[Task], sampling: Sampling) -> Driver:
        """Begin these trajectories, and return what takes them to their ends. Collective."""
        held = [Trajectory(task) for task in tasks]
        steps = [self._steps(each, sampling, number) for number, each in enumerate(held)]
        return Driver(engine, held, steps, self._check_start if self._config.same_start else None)

    def count_seconds(self, seconds: float) -> None:
        """Add the time in which trajectories ran."""
        self._count("environment/elapsed", seconds)

    def take_metrics(self, ranks: Ranks) -> dict[str, float]:
        """Return the metrics of environments and tools since the previous call, over all ranks. Collective."""
        own, self._sums = dict(self._sums), Counter()
        total: Counter[str] = Counter()
        for each in ranks.gather_objects(own):
            total.update(each)
        found = dict.fromkeys(("turns/inserted_ends", "turns/observations_cut"), 0.0) | total
        for name in [name for name in total if name.endswith("/seconds")]:
            found[name] = total[name] / total[name.replace("/seconds", "/calls")]
        if waited := found.pop("environment/wait", 0.0):
            found["environment/wait"] = waited / total["environment/steps"]
        if seconds := found.pop("environment/elapsed", 0.0):
            found["environment/steps_per_second"] = found.pop("environment/steps", 0.0) / (seconds / ranks.world.size())
        return found

    def _check_start(self, held: Trajectory, other: Trajectory) -> None:
        """Raise RunError if two trajectories of a group began with different contexts."""
        if held.context != other.context:
            texts = (shown(self.dialog.text(each.context), 1000) for each in (other, held))
            raise RunError(
                "the trajectories of a group must start alike, and `reset` gave different first contexts for one task with "
                f"seed {held.task.seed}:\n{next(texts)}\n{next(texts)}\n"
                "draw everything random from `seed`, or set environment.same_start: false"
            )

    def _count(self, name: str, number: float = 1.0) -> None:
        self._sums[name] += float(number)  # type: ignore[assignment]

    def _steps(self, held: Trajectory, sampling: Sampling, number: int) -> Steps:
        """Take a trajectory to its end; a failure of its environment is its own end."""
        place: Place | None = None
        try:
            place, given = yield self._pool.reset(task_of(held.task.prompt), held.task.seed)
            held.context = self._first_context(held.task.prompt, given)
            yield from self._turns(held, place, sampling, number)
            if held.end != "done" and self._pool.has_score:
                # The last step of an environment has its score already; a trajectory that was cut off gets it here.
                score: float = yield self._pool.score(place)
                held.turns[-1] = replace(held.turns[-1], reward=held.turns[-1].reward + score)
        except (EnvironmentFailure, UserError) as error:
            held.end, held.error = "environment", str(error)
            self._count("environment/failed")
        finally:
            if place is not None:
                self._pool.leave(place)

    def _turns(self, held: Trajectory, place: Place, sampling: Sampling, number: int) -> Steps:
        deadline = time.monotonic() + self._config.trajectory_seconds
        # Trajectories of a group start in the same state, which has no name of its own.
        state: str | None = "" if self._config.same_start else None
        while True:
            limit = min(sampling.max_tokens, self._room(held))
            if limit < max(1, sampling.min_tokens):
                raise UserError(
                    f"the first context has {len(held.context)} tokens, which leaves no room for an answer below "
                    f"{self._max_tokens} (data.max_total_tokens)"
                )
            turn = len(held.turns)
            seed = request_seed((*held.task.draw, turn) if turn else held.task.draw)
            asked = time.monotonic()
            request = Request(number, held.context + held.token_ids, replace(sampling, max_tokens=limit), seed)
            found: Completion = yield request
            held.sampled(found, state, time.monotonic() - asked)
            held.texts.append(self.dialog.text(found.token_ids))
            if found.finish_reason == "abort":
                held.end, held.error = "abort", "the engine's request was aborted"
                return
            if found.finish_reason == "length":
                held.end = "length" if limit == sampling.max_tokens else "context"
                return
            answer = self.dialog.read(found.token_ids)
            end, messages, state = yield from self._answer(held, place, answer, deadline)
            if end is None and turn + 1 == self._config.max_turns:
                end = "turns"
            if end is None and time.monotonic() >= deadline:
                end = "time"
            if end is None:
                follow = self._follow(held, messages, answer.calls)
                if self._room(held) - len(follow) >= max(1, sampling.min_tokens):
                    held.observe(follow)
                    continue
                end = "context"
            held.end = end
            return

    def _answer(
        self, held: Trajectory, place: Place, answer: Answer, deadline: float
    ) -> Coroutine[Waiting, Any, tuple[str | None, list[dict[str, Any]], str | None]]:
        """Return (end of the trajectory or None, what follows the turn, state of the environment)."""
        left = max(deadline - time.monotonic(), 1e-3)
        if answer.calls:
            messages = yield from self._call_tools(place, answer.calls, left)
            return None, messages, held.turns[-1].state or None
        if not self._pool.has_class:
            return "answered", [], None
        try:
            began = time.monotonic()
            step = yield self._pool.step(place, answer.message, left)
        except EnvironmentFailure as error:
            if error.is_late and time.monotonic() >= deadline:
                return "time", [], None
            raise
        self._count("environment/steps")
        self._count("environment/wait", time.monotonic() - began)
        held.turns[-1] = replace(held.turns[-1], reward=step["reward"])
        return ("done" if step["done"] else None), as_messages(step["messages"]), step["state"]

    def _call_tools(
        self, place: Place, calls: Sequence[ToolCall], seconds: float
    ) -> Coroutine[Waiting, Any, list[dict[str, Any]]]:
        """Return the tools' answers to all calls of a turn, in the order of the calls."""
        faults = [arguments_fault(call, self.dialog.schemas) for call in calls]
        for number in range(self._config.max_parallel_calls, len(calls)):
            faults[number] = f"a turn may call at most {self._config.max_parallel_calls} tools"
        good = [(call.name, call.arguments) for call, fault in zip(calls, faults, strict=True) if fault is None]
        answered: Iterator[ToolAnswer] = iter(())
        if good:
            answered = iter((yield self._pool.call(place, good, seconds)))
        messages = []
        for number, (call, fault) in enumerate(zip(calls, faults, strict=True)):
            given = next(answered) if fault is None else ToolAnswer(f"Error: {fault}", is_error=True)
            if fault is not None:
                self._count("tools/malformed")
            else:
                self._count(f"tools/{call.name}/calls")
                self._count(f"tools/{call.name}/errors", given.is_error)
                self._count(f"tools/{call.name}/timeouts", given.is_late)
                self._count(f"tools/{call.name}/seconds", given.seconds)
            text = f"Error: {given.text}" if given.is_error and fault is None else given.text
            messages.append(
                {"role": "tool", "content": text, "name": call.name or "unknown", "tool_call_id": f"call{number:05}"}
            )
        return messages

    def _first_context(self, prompt: Prompt, given: Any) -> list[int]:
        """Return the context of the first turn: what `reset` gave, or the prompt."""
        if given is None:
            return prompt.token_ids
        messages = as_messages(given)
        check_messages(messages)
        system = [message for message in prompt.messages[:1] if message["role"] == "system"]
        if system and messages[0]["role"] != "system":
            messages = [*system, *messages]
        return self.dialog.begin(messages)[0]

    def _follow(self, held: Trajectory, messages: list[dict[str, Any]], calls: Sequence[ToolCall]) -> list[int]:
        """Return the tokens between a turn and the next; the end token of the turn is the first unless it was sampled."""
        check_messages(messages)
        limit, side = self._config.max_observation_tokens, self._config.cut_observations
        short = []
        for message in messages:
            text, is_cut = self.dialog.cut(message["content"], limit, side)
            self._count("turns/observations_cut", is_cut)
            short.append({**message, "content": text})
        follow = self.dialog.follow(short, calls)
        if held.token_ids[-1] == follow[0]:
            return follow[1:]
        self._count("turns/inserted_ends")
        return follow

    def _room(self, held: Trajectory) -> int:
        return self._max_tokens - len(held.context) - len(held.token_ids)


class Driver:
    """Runs the trajectories of a rank side by side: gives their requests to an engine, and waits for their environments."""

    def __init__(
        self,
        engine: Engine,
        held: Sequence[Trajectory],
        steps: Sequence[Steps],
        check_start: Callable[[Trajectory, Trajectory], None] | None,
    ) -> None:
        """`check_start`: is called with a trajectory and the first one of its group, once both have a first context."""
        self._engine, self._stream, self._held, self._check_start = engine, engine.stream(), held, check_start
        # An engine in the rank samples one batch at a time, and nothing else happens meanwhile.
        self._blocks = self._stream.load() is None
        self._running = dict(enumerate(steps))
        self._new: list[Request] = []
        self._asked: set[int] = set()
        """Numbers of the trajectories that wait for the engine."""
        self._futures: dict[Future[Any], int] = {}
        self._started: dict[int, Trajectory] = {}
        """Place of a group -> its first trajectory with a context."""
        self._ended: list[Trajectory] = []
        for number in list(self._running):
            self._resume(number, None)

    @property
    def is_running(self) -> bool:
        return bool(self._running)

    def advance(self) -> list[Trajectory]:
        """Continue the trajectories for a moment, and return those that have ended."""
        end = time.monotonic() + _ROUND_SECONDS
        while self._running and time.monotonic() < end and self._engine.state is EngineState.READY:
            if self._futures and (self._blocks or not self._asked):
                # The larger a batch of an engine that blocks, the better; and it does not depend on who answers first.
                when = ALL_COMPLETED if self._blocks else FIRST_COMPLETED
                wait(self._futures, max(0.0, end - time.monotonic()), when)
            self._take([future for future in self._futures if future.done()])
            if not self._asked or (self._blocks and self._futures):
                continue
            self._stream.submit(sorted(self._new, key=lambda request: request.id))
            self._new = []
            seconds = _POLL_SECONDS if self._futures else max(0.0, end - time.monotonic())
            for completion in self._stream.arrived(seconds):
                self._asked.remove(completion.request_id)
                self._resume(completion.request_id, completion)
                if not self._blocks and self._futures:
                    # Its environment may answer before another completion arrives.
                    break
        ended, self._ended = self._ended, []
        return ended

    def _take(self, futures: Sequence[Future[Any]]) -> None:
        for future in futures:
            number = self._futures.pop(future)
            error = future.exception()
            self._resume(number, None if error else future.result(), error)

    def _resume(self, number: int, result: Any, error: BaseException | None = None) -> None:
        """Send a trajectory what it waited for, and begin what it waits for next."""
        steps, held = self._running[number], self._held[number]
        try:
            waiting = steps.send(result) if error is None else steps.throw(error)
        except StopIteration:
            del self._running[number]
            self._ended.append(held)
            return
        if isinstance(waiting, Future):
            self._futures[waiting] = number
            return
        self._new.append(waiting)
        self._asked.add(number)
        if self._check_start is not None and not held.turns:
            self._check_start(held, self._started.setdefault(held.task.place, held))


def as_messages(given: Any) -> Any:
    """Return what an environment gave as messages: a text is a user's message."""
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


def task_of(prompt: Prompt) -> dict[str, Any]:
    """Return the row of a prompt as `reset` takes it."""
    own = {
        "prompt": prompt.given,
        "ground_truth": prompt.ground_truth,
        "data_source": prompt.source,
        "extra_info": prompt.extra,
    }
    return {**prompt.columns, **own}
