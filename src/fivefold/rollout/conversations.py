"""Trajectories of several turns: a prompt and its environment -> turns, as generators that a `Driver` takes to their ends.

A trajectory yields what it waits for, a `Request` to the engine or a future of the environment, and is sent the result. Its
held tokens are never encoded again: each turn's context is exactly what was read and sampled before.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator as Coroutine
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from fivefold.config.environment import EnvironmentConfig
from fivefold.data.dialog import Dialog, check_messages
from fivefold.data.tool_calls import ToolCall, arguments_fault
from fivefold.data.turn_reader import Answer
from fivefold.distributed.ranks import Ranks
from fivefold.engines.sampling import request_seed
from fivefold.environments.pool import EnvironmentFailure, EnvironmentPool, Place, ToolAnswer
from fivefold.errors import RunError, UserError, shown
from fivefold.interfaces import Engine
from fivefold.rollout.driver import Driver, Steps, Waiting
from fivefold.rollout.trajectories import Clock, HeldSequence, Task, Trajectory
from fivefold.types import Completion, Prompt, Request, Sampling, Turn

RESET_STREAM = 0x5EED0
"""Mixed into the seed, so that environments and sampled tokens use different random numbers."""


class Conversations:
    """Samples trajectories of several turns with an environment, tools, or both."""

    def __init__(self, config: EnvironmentConfig, dialog: Dialog, pool: EnvironmentPool, max_tokens: int) -> None:
        """`max_tokens`: maximum length of a whole trajectory with its first context."""
        self._config, self.dialog, self._pool, self._max_tokens = config, dialog, pool, max_tokens
        self.most = min(config.max_running, pool.capacity)

    def tasks(self, prompt: Prompt, place: int, first: int, size: int, draw: tuple[int, ...]) -> list[Task]:
        """Return the trajectories of a group; `first`: number of its first one among all of the same prompt."""
        # Libraries take seeds of 31 bits.
        seed = request_seed((draw[0] ^ RESET_STREAM, *draw[1:], prompt.id)) & 0x7FFFFFFF
        return [Task(prompt, place, number, (*draw, prompt.id, first + number), seed) for number in range(size)]

    def driver(self, engine: Engine) -> Driver:
        """Return a driver of trajectories. Collective."""
        return Driver(engine, self, self._check_start if self._config.same_start else None)

    def steps(self, held: Trajectory, sampling: Sampling, driver: Driver) -> Steps:
        """Take a trajectory to its end, from where it is; a failure of its environment is its own end.

        One that a checkpoint has kept continues in the state of its environment then. Tools alone have none: their answers
        are part of the conversation. Without a state, its actions are taken again in a new environment if they may be and
        each answer is the same; otherwise it begins again.
        """
        if held.restore is None and self._pool.is_stateless:
            held.restore = {}
        try:
            if held.turns and (held.restore is not None or self._pool.is_replayable):
                first = yield from self._reset(held)
                if held.restore is None and not (yield from self._replay(held, first)):
                    self._leave(held)
                    held.forget()
            else:
                held.forget()
            if not held.turns:
                first = yield from self._reset(held)
                held.clock = Clock(self._config.trajectory_seconds)
                held.messages, context = first
                held.extend_or_begin(context)
                # Trajectories of a group start in the same state, which has no name of its own.
                held.state = "" if self._config.same_start else None
            held.restore = None
            yield from self._turns(held, sampling)
            if held.end != "done" and held.turns and self._pool.has_score:
                # An environment adds it to the reward of its own last step; a trajectory that was cut off lacks it.
                turn, _ = held.in_order()[-1]
                held.earn(turn, turn.given + (yield self._pool.score(held.place)))
        except (EnvironmentFailure, UserError) as error:
            held.end, held.error = "environment", str(error)
            held.count("environment/failed")
        finally:
            self._leave(held)

    def state_of(self, held: Trajectory) -> Future[dict[str, Any] | None] | None:
        return None if held.place is None else self._pool.state(held.place)

    def _reset(self, held: Trajectory) -> Coroutine[Waiting, Any, tuple[list[dict[str, Any]], list[int]]]:
        """Make the environment of a trajectory, and return messages and tokens of the first context."""
        reset = self._pool.reset(task_of(held.task.prompt), held.task.seed, held.restore)
        try:
            held.place, first = yield reset
        except GeneratorExit:
            # The environment is made all the same, and is closed then.
            reset.add_done_callback(self._leave_late)
            raise
        return self._first_context(held.task.prompt, first)

    def _leave(self, held: Trajectory) -> None:
        if held.place is not None:
            self._pool.leave(held.place)
            held.place = None

    def _leave_late(self, reset: Future[tuple[Place, Any]]) -> None:
        if not reset.cancelled() and reset.exception() is None:
            self._pool.leave(reset.result()[0])

    def _replay(self, held: Trajectory, first: tuple[list[dict[str, Any]], list[int]]) -> Coroutine[Waiting, Any, bool]:
        """Take the actions of a trajectory again in a new environment; return whether it gave the same messages."""
        messages, context = first
        again = Trajectory(held.task, messages=messages, place=held.place)
        if context != held.context:
            return False
        for turn, tokens in held.in_order():
            answer = self.dialog.read(tokens)
            again.messages.append(answer.message)
            if len(again.messages) == len(held.messages):
                # What follows the last turn was not there yet.
                break
            end, messages, _ = yield from self._answer(again, turn, answer)
            if end is not None:
                return False
            again.messages += self._readable(again, messages)
            if again.messages != held.messages[: len(again.messages)]:
                return False
        return again.messages == held.messages

    def _check_start(self, held: Trajectory, other: Trajectory) -> None:
        """Raise RunError if two trajectories of a group began with different contexts."""
        if held.context != other.context:
            texts = (shown(self.dialog.text(trajectory.context), 1000) for trajectory in (other, held))
            raise RunError(
                "the trajectories of a group must start alike, and `reset` gave different first contexts for one task with "
                f"seed {held.task.seed}:\n{next(texts)}\n{next(texts)}\n"
                "draw everything random from `seed`, or set environment.same_start: false"
            )

    def _turns(self, held: Trajectory, sampling: Sampling) -> Steps:
        held.clock.run()
        current = held.sequences[-1]
        while True:
            if current.is_answered and (end := (yield from self._sample(held, current, sampling))) is not None:
                held.end = end
                return
            turn = current.turns[-1]
            answer = self.dialog.read(current.token_ids[turn.begin : turn.end])
            end, messages, held.state = yield from self._answer(held, turn, answer)
            if end is None and held.turns == self._config.max_turns:
                end = "turns"
            if end is None and not held.clock.left:
                end = "time"
            if end is None:
                messages = self._readable(held, messages)
                follow, cause = self._follow(held, current, messages, answer.calls)
                before = 0 if cause else len(current)
                if self._max_tokens - before - len(follow) < max(1, sampling.min_tokens):
                    end = "context"
            if end is not None:
                held.end = end
                return
            held.messages += messages
            current = held.extend_or_begin(follow if cause else current.tokens + follow, cause)

    def _sample(self, held: Trajectory, current: HeldSequence, sampling: Sampling) -> Coroutine[Waiting, Any, str | None]:
        """Let the engine sample a turn, and return the end of the trajectory if it is the last one."""
        limit = min(sampling.max_tokens, self._max_tokens - len(current))
        if limit < max(1, sampling.min_tokens):
            if not held.turns:
                # Nothing was sampled, so there is nothing to reward.
                held.error = (
                    f"the first context has {len(current)} tokens, which leaves no room for an answer below "
                    f"{self._max_tokens} (data.max_total_tokens)"
                )
            return "context"
        seed = request_seed((*held.task.draw, held.turns) if held.turns else held.task.draw)
        begin = time.monotonic()
        completion: Completion = yield Request(0, current.tokens, replace(sampling, max_tokens=limit), seed)
        held.sampled(current, completion, self.dialog.text(completion.token_ids), held.state, time.monotonic() - begin)
        if completion.finish_reason == "length":
            return "length" if limit == sampling.max_tokens else "context"
        held.messages.append(self.dialog.read(completion.token_ids).message)
        return None

    def _answer(
        self, held: Trajectory, turn: Turn, answer: Answer
    ) -> Coroutine[Waiting, Any, tuple[str | None, list[dict[str, Any]], str | None]]:
        """Return (end of the trajectory or None, what follows the turn, state of the environment)."""
        assert held.place is not None
        left = max(held.clock.left, 1e-3)
        if answer.calls:
            messages = yield from self._call_tools(held, answer.calls, left)
            return None, messages, turn.state or None
        if not self._pool.has_class:
            return "answered", [], None
        try:
            began = time.monotonic()
            step = yield self._pool.step(held.place, answer.message, left)
        except EnvironmentFailure as error:
            if error.is_late and not held.clock.left:
                return "time", [], None
            raise
        held.count("environment/steps")
        held.count("environment/wait", time.monotonic() - began)
        held.earn(turn, step["reward"])
        return ("done" if step["done"] else None), as_messages(step["messages"]), step["state"]

    def _call_tools(
        self, held: Trajectory, calls: Sequence[ToolCall], seconds: float
    ) -> Coroutine[Waiting, Any, list[dict[str, Any]]]:
        """Return the tools' answers to all calls of a turn, in the order of the calls."""
        faults = [arguments_fault(call, self.dialog.schemas) for call in calls]
        for number in range(self._config.max_parallel_calls, len(calls)):
            faults[number] = f"a turn may call at most {self._config.max_parallel_calls} tools"
        good = [(call.name, call.arguments) for call, fault in zip(calls, faults, strict=True) if fault is None]
        answered: Iterator[ToolAnswer] = iter((yield self._pool.call(held.place, good, seconds)) if good else ())
        messages = []
        for number, (call, fault) in enumerate(zip(calls, faults, strict=True)):
            answer = next(answered) if fault is None else ToolAnswer(f"Error: {fault}", is_error=True)
            if fault is not None:
                held.count("tools/malformed")
            else:
                held.count(f"tools/{call.name}/calls")
                held.count(f"tools/{call.name}/errors", answer.is_error)
                held.count(f"tools/{call.name}/timeouts", answer.is_late)
                held.count(f"tools/{call.name}/seconds", answer.seconds)
            text = f"Error: {answer.text}" if answer.is_error and fault is None else answer.text
            messages.append(
                {"role": "tool", "content": text, "name": call.name or "unknown", "tool_call_id": f"call{number:05}"}
            )
        return messages

    def _first_context(self, prompt: Prompt, first: Any) -> tuple[list[dict[str, Any]], list[int]]:
        """Return messages and tokens of the first turn's context: what `reset` gave, or the prompt.

        Messages of the prompt keep the special tokens that `data.special_tokens` leaves in them; all others have none.
        """
        if first is None:
            return list(prompt.messages), prompt.token_ids
        messages = as_messages(first)
        check_messages(messages)
        messages = [
            message if message in prompt.messages else escaped
            for message, escaped in zip(messages, self.dialog.escaped(messages), strict=True)
        ]
        system = [message for message in prompt.messages[:1] if message["role"] == "system"]
        if system and messages[0]["role"] != "system":
            messages = [*system, *messages]
        return messages, self.dialog.begin(messages)[0]

    def _readable(self, held: Trajectory, messages: Any) -> list[dict[str, Any]]:
        """Return the answer to a turn as the model reads it: not too long, and without special tokens."""
        check_messages(messages)
        config = self._config
        limits = config.max_observation_tokens, config.cut_observations, config.max_observation_characters
        short = []
        for message in self.dialog.escaped(messages):  # which writes more tokens
            text, is_cut = self.dialog.cut(message["content"], *limits)
            held.count("turns/observations_cut", is_cut)
            short.append({**message, "content": text})
        return self.dialog.escaped(short)

    def _follow(
        self, held: Trajectory, current: HeldSequence, messages: list[dict[str, Any]], calls: Sequence[ToolCall]
    ) -> tuple[list[int], str | None]:
        """Return the tokens between a turn and the next, and None; or the context of a new sequence, and its cause.

        The end token of the turn is the first of the tokens unless it was sampled.
        """
        if self.dialog.appends:
            follow = self.dialog.follow(messages, calls)
            is_ended = current.token_ids[-1] == follow[0]
            follow = follow[is_ended:]
        else:
            rendered = self.dialog.again([*held.messages, *messages])
            added = self.dialog.continued(current.tokens, rendered)
            if added is None:
                return rendered, "template"
            follow, is_ended = added, current.token_ids[-1] in self.dialog.template.ends
        held.count("turns/inserted_ends", not is_ended)
        return follow, None


def conversation_metrics(counts: Mapping[str, float], ranks: Ranks) -> dict[str, float]:
    """Return the metrics of environments and tools over all ranks, whose trajectories have counted these events. Collective.

    `environment/elapsed` are the seconds in which they ran; `Usage` counts what the engine did.
    """
    total: Counter[str] = Counter()
    for counted in ranks.gather_objects(dict(counts)):
        total.update(counted)
    metrics = dict.fromkeys(("turns/inserted_ends", "turns/observations_cut"), 0.0) | total
    for name in [name for name in total if name.startswith("tools/") and name.endswith("/seconds")]:
        metrics[name] = total[name] / total[name.replace("/seconds", "/calls")]
    if waited := metrics.pop("environment/wait", 0.0):
        metrics["environment/wait"] = waited / total["environment/steps"]
    idle = metrics.pop("engine/idle", 0.0)
    if seconds := metrics.pop("engine/seconds", 0.0):
        metrics["engine/idle_fraction"] = idle / seconds
    hits = metrics.pop("engine/prefix_hits", 0.0)
    if looked_up := metrics.pop("engine/prefix_tokens", 0.0):
        metrics["engine/prefix_hits"] = hits / looked_up
    steps = metrics.pop("environment/steps", 0.0)
    if elapsed := metrics.pop("environment/elapsed", 0.0):
        metrics["environment/steps_per_second"] = steps / (elapsed / ranks.world.size())
    return metrics


def as_messages(value: Any) -> Any:
    """Return what an environment gave as messages: a text is a user's message."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def task_of(prompt: Prompt) -> dict[str, Any]:
    """Return the row of a prompt as `reset` takes it."""
    fields_of_prompt = {
        "prompt": prompt.given,
        "ground_truth": prompt.ground_truth,
        "data_source": prompt.source,
        "extra_info": prompt.extra,
    }
    return {**prompt.columns, **fields_of_prompt}
