"""Client of one SGLang server: requests, weights and memory over SGLang's own HTTP calls."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import time
from collections.abc import AsyncIterator, Collection, Sequence
from functools import cached_property
from typing import Any

import httpx2 as httpx
import torch

from fivefold.engines.arguments import dotted
from fivefold.engines.servers.buckets import Entry
from fivefold.engines.servers.http import blocking_client, own_address, streaming_client
from fivefold.engines.servers.server import Answer, Draw, Where, unreached
from fivefold.engines.servers.transfer import open_store
from fivefold.engines.sglang.arguments import LOADER, SUSPENDING
from fivefold.engines.sglang.parameters import is_cut, sampling_arguments
from fivefold.engines.sglang.probe import answers, load
from fivefold.errors import RunError
from fivefold.interfaces import Pressure
from fivefold.types import Sampling

_FLUSH_SECONDS, _ANSWER_SECONDS = 30.0, 600.0
_CUT = -1
"""Version of incomplete weights."""


class SGLangServer:
    """Calls of one server; `generate` belongs to an event loop, the others block."""

    names_versions = True

    def __init__(self, address: str, ends: Collection[int], run: str) -> None:
        """`address`: http://host:port or unix:/path; `ends`: tokens that end a response; `run`: name of the run, the same on
        all ranks."""
        self.address, self._ends, self._run = address, ends, run
        self._control, self._requests = blocking_client(address), streaming_client(address)
        self._calls = 0
        self._asleep: set[str] = set()
        self._prompt_tokens = self._prompt_hits = 0.0

    def take(self) -> None:
        """Reserve the server for this run alone, and end what another run left there."""
        self._post("/continue_generation", {})
        self.abort()
        self._post("/end_weight_update", {}, may_refuse=True)
        self._post("/freeze_gc", {})

    async def generate(
        self, name: str, prompt_ids: list[int], sampling: Sampling, draws: Sequence[Draw]
    ) -> AsyncIterator[Answer]:
        """Yields the answer to each draw, as they end; raises ServerLostError."""
        pending = [asyncio.ensure_future(self._draw(name, prompt_ids, sampling, *draw)) for draw in draws]
        try:
            for done in asyncio.as_completed(pending):
                yield await done
        except httpx.TransportError as error:
            raise unreached(self, error) from error
        finally:
            # The server ends requests whose client has gone.
            for answer in pending:
                answer.cancel()

    async def _draw(self, name: str, prompt_ids: list[int], sampling: Sampling, number: int, seed: int) -> Answer:
        is_part = is_cut(sampling)
        request = {
            "rid": f"{self._run}-{name}-{number}",
            "input_ids": prompt_ids,
            "sampling_params": sampling_arguments(sampling, self._ends, seed),
            "return_logprob": sampling.logprobs,
            "return_sampling_mask": is_part and sampling.logprobs,
        }
        response = await self._requests.post("/generate", json=request)
        if response.status_code != 200:
            self._explain(response)
        answer = response.json()
        meta, tokens = answer["meta_info"], answer["output_ids"]
        reason = meta["finish_reason"]["type"]
        if reason == "length" and len(tokens) < sampling.max_tokens:
            raise RunError(
                f"{self} ended a response after {len(tokens)} of {sampling.max_tokens} tokens: its context is too short"
            )
        self._version_number(meta["weight_version"])
        # A request that was aborted while it waited has no counts; one that was suspended looks its prompt up again.
        looked_up = meta.get("prompt_tokens", 0)
        self._prompt_tokens += looked_up
        self._prompt_hits += min(meta.get("cached_tokens", 0), looked_up)
        logprobs: list[float] = []
        if sampling.logprobs:
            of = "output_token_sampling_logprobs" if is_part else "output_token_logprobs"
            logprobs = meta[of] if is_part else [one[0] for one in meta[of]]
        spans = meta.get("weight_versions")
        versions = spans and [(self._version_number(span["version"]), span["end"] - span["start"]) for span in spans]
        return number, tokens, logprobs, reason, versions, None

    def _version_number(self, version: str) -> int:
        """Returns the number of a version of this run. Raises RuntimeError for another run's version: its weights have
        sampled."""
        run, _, number = version.rpartition(":")
        if run != self._run:
            raise RunError(f"{self}: another run has taken this server")
        if int(number) == _CUT:
            raise RunError(f"{self} has incomplete weights: their transfer was cut off")
        return int(number)

    def answers(self) -> bool:
        return answers(self.address)

    def progress(self) -> float | None:
        """Returns the time while the server answers: SGLang does not report how many tokens it has sampled."""
        return time.monotonic() if self.answers() else None

    def pressure(self) -> Pressure | None:
        """Returns how close the server is to its limits, with the prompt tokens of this client's answers: SGLang itself
        counts them only if it is started with metrics."""
        values = load(self.address)
        return None if values is None else Pressure(*values, self._prompt_tokens, self._prompt_hits)

    def pause(self) -> None:
        """Suspend the requests in flight, and discard what was computed for them with the old weights."""
        self._post("/pause_generation", {"mode": "retract"})

    def resume(self) -> None:
        """Continue the suspended requests."""
        self._post("/continue_generation", {})

    def abort(self) -> None:
        """End the requests in flight, which return what they have."""
        self._post("/abort_request", {"abort_all": True})

    def workers(self) -> int:
        """Returns the number of processes that receive weights."""
        return self._workers

    @cached_property
    def _workers(self) -> int:
        return int(self._control.get("/server_info").json()["tp_size"])

    def join_groups(self, where: Where, names: Sequence[str], first: int, size: int) -> None:
        self._in_session("join_groups", where, names, first, size)

    def begin_weights(self, verify: bool) -> None:
        """Begin an update of weights. `verify`: at its end, compare the held weights with the received ones."""
        self._post("/begin_weight_update", {})
        # Tokens sampled before the end carry this version, and are rejected.
        self._call("begin_weights", verify, version=f"{self._run}:{_CUT}")

    def receive_bucket(self, handles: Sequence[dict[str, Any]], entries: Sequence[Entry], used: int) -> None:
        self._call("receive_bucket", handles, entries, used)

    def finish_weights(self, is_whole: bool, version: int) -> list[str]:
        """End an update of weights; returns what is wrong with them. No keys of the old weights remain in the KV cache."""
        faults = self._call("finish_weights", is_whole, version=f"{self._run}:{version if is_whole else _CUT}")
        self._post("/end_weight_update", {})
        deadline = time.monotonic() + _FLUSH_SECONDS
        while self._control.post("/flush_cache").status_code != 200:
            # Abandoned requests end a moment later.
            if time.monotonic() > deadline:
                cause = f"(before {dotted(SUSPENDING)} SGLang cannot drop them then: rollout.interrupt=finish, or abort)"
                raise RunError(f"{self} keeps keys of the old weights: requests are running {cause}")
            time.sleep(0.05)
        return [fault for faults_of_worker in faults for fault in faults_of_worker]

    def sleep(self) -> None:
        """Free the memory of weights and cache."""
        self._post("/release_memory_occupation", {"tags": ["kv_cache", "weights"]})
        self._asleep = {"kv_cache", "weights"}

    def wake(self, part: str) -> None:
        """Allocate the memory of `weights` or `kv_cache` again."""
        # SGLang's scheduler ends if a request is for memory that it has, as that of a server that was started again has.
        if part in self._asleep:
            self._post("/resume_memory_occupation", {"tags": [part]})
            self._asleep.discard(part)

    @cached_property
    def _answers(self) -> Any:
        """Store in which the schedulers leave their answers: SGLang's own call returns none."""
        return open_store(own_address(self.address), None, _ANSWER_SECONDS)

    def _call(self, method: str, *arguments: Any, version: str | None = None) -> list[Any]:
        """Returns the answers of all schedulers; raises RuntimeError with the error of one."""
        self._calls += 1
        message = {
            "method": method,
            "arguments": arguments,
            "number": self._calls,
            "answers_to": [own_address(self.address), self._answers.port],
        }
        # SGLang accepts only pickles, and only of tensors.
        pickled = base64.b64encode(pickle.dumps([(json.dumps(message), torch.empty(0))])).decode()
        content = {
            "serialized_named_tensors": [pickled] * self._workers,
            "load_format": LOADER,
            "flush_cache": False,
            "weight_version": version,
        }
        self._post("/update_weights_from_tensor", content)
        results = [json.loads(self._answers.get(f"{self._calls}/{rank}")) for rank in range(self._workers)]
        for result in results:
            if "error" in result:
                raise RunError(f"{self}: {result['error']}")
        return [result["result"] for result in results]

    def _in_session(self, method: str, *arguments: Any) -> None:
        """Makes a call outside an update of weights; SGLang requires that an update has begun."""
        self._post("/begin_weight_update", {})
        try:
            self._call(method, *arguments)
        finally:
            self._post("/end_weight_update", {})

    def _post(self, path: str, content: Any, may_refuse: bool = False) -> None:
        try:
            response = self._control.post(path, json=content)
        except httpx.TransportError as error:
            raise unreached(self, error) from error
        # Releases before 0.5.21 have no update sessions.
        missing = response.status_code == 404 and path.endswith("_weight_update")
        if response.status_code != 200 and not (may_refuse or missing):
            self._explain(response)

    def _explain(self, response: httpx.Response) -> None:
        raise RunError(f"{self} answers with {response.status_code}: {response.text[:2000]}")

    def __str__(self) -> str:
        return self.address
