"""Collects the log-probs of drawn tokens inside vLLM's workers, and hands them over once when a request is done.

vLLM itself makes objects of every token's log-prob in every step, which takes longer than a small model takes to sample it.
No vLLM here: its model runners are read through what all supported releases have in common.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any

import numpy as np
from torch import Tensor

from fivefold.engines.vllm.draws import KeyedSampler
from fivefold.engines.vllm.parameters import TAG
from fivefold.errors import RunError

_MOST_STEPS = 64
"""Number of steps whose draws are divided among their requests at once."""
_MOST_UNTAKEN = 1 << 14
"""Number of requests whose log-probs are kept, counting those that no client takes any more."""

Drawn = tuple[bytes, bytes]
"""Tokens of a request that were drawn so far, as int32, and their log-probs, as float32."""


class _Request:
    """Tokens and log-probs of one request, in the order of its response; `by_us`: handed over by our sampler."""

    __slots__ = ("by_us", "logprobs", "tokens")

    def __init__(self, by_us: bool = False) -> None:
        self.tokens, self.logprobs, self.by_us = array("i"), array("f"), by_us


class _Steps:
    """Draws of consecutive steps in which the same requests draw one token each: divided among them once for many steps."""

    def __init__(self) -> None:
        self._drawn: list[Tensor] = []
        self._names: list[str] = []
        self._counts: list[int] = []
        self._rows: dict[str, int] = {}
        self._requests: list[_Request | None] = []

    def begin(self, cached: Any, rows: dict[str, int], named: Mapping[str, _Request]) -> None:
        """Expect further steps like this one, whose draws have been collected."""
        self._names, self._counts, self._rows = list(cached.req_ids), list(cached.num_output_tokens), dict(rows)
        self._requests = [None] * len(rows)
        for name, row in rows.items():
            self._requests[row] = named.get(name)

    def take(self, scheduled: Any, output: Any, drawn_2R: Tensor | None) -> bool:
        """Returns whether this step is like the one before; its draws are then kept."""
        cached = scheduled.scheduled_cached_reqs
        if (
            drawn_2R is None
            or output.logprobs is not None
            or scheduled.scheduled_new_reqs
            or cached.req_ids != self._names
            or output.req_id_to_index != self._rows
            or set(map(len, output.sampled_token_ids)) != {1}
            or cached.num_output_tokens != [count + 1 for count in self._counts]
        ):
            return False
        self._counts = cached.num_output_tokens
        self._drawn.append(drawn_2R)
        if len(self._drawn) == _MOST_STEPS:
            self.divide()
        return True

    def divide(self) -> None:
        """Append to each request what it has drawn."""
        if not self._drawn:
            return
        steps_R2S = np.ascontiguousarray(np.stack([drawn_2R.numpy() for drawn_2R in self._drawn], axis=-1).swapaxes(0, 1))
        for one, (tokens_S, bits_S) in zip(self._requests, steps_R2S, strict=True):
            if one is not None:
                one.tokens.frombytes(tokens_S.tobytes())
                one.logprobs.frombytes(bits_S.tobytes())
        self._drawn.clear()


class LogprobCollector:
    """Mixed into vLLM's worker: `collect_logprobs` once, `give_logprobs` when requests are done."""

    model_runner: Any

    _requests: dict[str, _Request]
    _sampler: KeyedSampler | None
    _steps: _Steps
    _lock: Lock

    def collect_logprobs(self, sampler: KeyedSampler | None) -> None:
        """Collect log-probs of tagged requests from now on; `sampler` hands over those that vLLM does not compute."""
        if hasattr(self, "_requests"):
            return
        self._requests, self._sampler, runner = {}, sampler, self.model_runner
        # With several workers results arrive on a thread of their own.
        self._steps, self._lock = _Steps(), Lock()
        named: dict[str, _Request] = {}
        execute, sample, scheduled = runner.execute_model, runner.sample_tokens, None

        def execute_model(scheduler_output: Any, *arguments: Any, **options: Any) -> Any:
            nonlocal scheduled
            scheduled = scheduler_output
            return self._watched(execute(scheduler_output, *arguments, **options), scheduler_output, named)

        def sample_tokens(*arguments: Any, **options: Any) -> Any:
            return self._watched(sample(*arguments, **options), scheduled, named)

        runner.execute_model, runner.sample_tokens = execute_model, sample_tokens

    def give_logprobs(self, names: Sequence[str]) -> list[Drawn]:
        """Returns tokens and log-probs of requests that are done; a request that has drawn no token has none."""
        with self._lock:
            self._steps.divide()
            drawn = [self._requests.pop(name, _Request()) for name in names]
        return [(one.tokens.tobytes(), one.logprobs.tobytes()) for one in drawn]

    def _watched(self, result: Any, scheduled: Any, named: dict[str, _Request]) -> Any:
        """Returns a runner's result without the log-probs of tagged requests, which are collected once it is there."""
        drawn = None if result is None or self._sampler is None else self._sampler.take()
        if hasattr(result, "get_output"):
            # The copy from the GPU is under way.
            get: Callable[[], Any] = result.get_output
            result.get_output = lambda: self._collect(get(), scheduled, named, drawn)
            return result
        return result if result is None else self._collect(result, scheduled, named, drawn)

    def _collect(self, output: Any, scheduled: Any, named: dict[str, _Request], drawn_2R: Tensor | None) -> Any:
        with self._lock:
            for name in scheduled.finished_req_ids:
                named.pop(name, None)
            if not self._steps.take(scheduled, output, drawn_2R):
                self._steps.divide()
                self._collect_step(output, scheduled, named, drawn_2R)
                self._steps.begin(scheduled.scheduled_cached_reqs, output.req_id_to_index, named)
        return output

    def _collect_step(self, output: Any, scheduled: Any, named: dict[str, _Request], drawn_2R: Tensor | None) -> None:
        cached = scheduled.scheduled_cached_reqs
        positions: dict[str, int] = dict(zip(cached.req_ids, cached.num_output_tokens, strict=True))
        for new in scheduled.scheduled_new_reqs:
            if (tag := _tag_of(new)) is not None:
                # The second model runner gets a preempted request as a new one, with the tokens that it has drawn.
                drawn = len(getattr(new, "prefill_token_ids", None) or new.prompt_token_ids) - len(new.prompt_token_ids)
                positions[new.req_id] = drawn
                before = self._requests.get(tag) if drawn else None
                by_us = getattr(new.sampling_params, "logprobs", None) is None
                named[new.req_id] = self._requests[tag] = before or _Request(by_us)
        while len(self._requests) > max(_MOST_UNTAKEN, 2 * len(named)):
            self._requests.pop(next(iter(self._requests)), None)
        if not named:
            return
        # The tokens are taken from the rows of the log-probs, so that a wrong row is seen when they are handed over.
        ours, theirs = _rows(drawn_2R), _rows_of_vllm(output.logprobs)
        starts = None if output.logprobs is None else output.logprobs.cu_num_generated_tokens
        sampled, are_all = output.sampled_token_ids, True
        for name, row in output.req_id_to_index.items():
            if (one := named.get(name)) is None:
                are_all = False
            elif (count := len(sampled[row])) and (rows := ours if one.by_us else theirs) is not None:
                tokens, logprobs = rows
                first, drawn_tokens = row if one.by_us or starts is None else starts[row], one.tokens
                if (position := positions[name]) < len(drawn_tokens):
                    # vLLM draws again what it discards.
                    del drawn_tokens[position:], one.logprobs[position:]
                if count == 1:
                    drawn_tokens.append(tokens[first])
                    one.logprobs.append(logprobs[first])
                else:
                    drawn_tokens.extend(tokens[first : first + count])
                    one.logprobs.extend(logprobs[first : first + count])
        if are_all:
            output.logprobs = None


_Rows = tuple[list[int], list[float]]


def _rows(drawn_2R: Tensor | None) -> _Rows | None:
    if drawn_2R is None:
        return None
    drawn = drawn_2R.numpy()
    return drawn[0].tolist(), drawn[1].view(np.float32).tolist()


def _rows_of_vllm(lists: Any) -> _Rows | None:
    return None if lists is None else (lists.logprob_token_ids[:, 0].tolist(), lists.logprobs[:, 0].tolist())


def _tag_of(new: Any) -> str | None:
    extra: Mapping[str, Any] = getattr(new.sampling_params, "extra_args", None) or {}
    return extra.get(TAG)


def logprobs_of(name: str, token_ids: Sequence[int], answers: Sequence[Drawn]) -> array[float]:
    """Returns the log-probs of a response from what the workers of a replica collected; raises RunError if they belong to
    other tokens."""
    collected, logprobs = max(answers, key=lambda drawn: len(drawn[0]))
    wanted, drawn = array("i", token_ids), array("f")
    if not collected.startswith(wanted.tobytes()):
        tokens = array("i")
        tokens.frombytes(collected)
        pairs = enumerate(zip(wanted, tokens, strict=False))
        place = next((at for at, (token, other) in pairs if token != other), len(tokens))
        raise RunError(
            f"vLLM's log-probs of request {name} belong to other tokens than its response, from token {place} of "
            f"{len(wanted)} on: this release hands them over in another way; please report it with the version of vLLM"
        )
    drawn.frombytes(logprobs[: len(wanted) * drawn.itemsize])
    return drawn


class LogprobTaker:
    """Takes log-probs from the workers of a server, in one call for all requests that are done by then."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[list[Drawn]]] = {}
        self._task: asyncio.Task[None] | None = None

    async def take(self, engine: Any, name: str) -> list[Drawn]:
        """Returns what each worker has collected for a request that is done."""
        future: asyncio.Future[list[Drawn]] = asyncio.get_running_loop().create_future()
        self._waiting[name] = future
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._take(engine))
        return await future

    async def _take(self, engine: Any) -> None:
        while self._waiting:
            waiting, self._waiting = self._waiting, {}
            try:
                answers = await engine.collective_rpc(method="give_logprobs", args=(list(waiting),))
            except Exception as error:
                for future in waiting.values():
                    if not future.done():
                        future.set_exception(error)
                continue
            for place, future in enumerate(waiting.values()):
                # The client may have gone.
                if not future.done():
                    future.set_result([drawn[place] for drawn in answers])
