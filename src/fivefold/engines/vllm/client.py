"""Client of one vLLM server, as `fivefold.engines.vllm.serve` starts it: requests, weights and memory over HTTP."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any

import httpx2 as httpx

from fivefold.engines.servers.buckets import Entry
from fivefold.engines.servers.http import LONGEST_CALL, blocking_client, streaming_client
from fivefold.engines.servers.server import Answer, Draw, ServerLostError, Where, unreached
from fivefold.engines.vllm.arguments import ROUTE, TAKE, WEIGHTS
from fivefold.engines.vllm.numbers import from_text
from fivefold.engines.vllm.parameters import sampling_arguments
from fivefold.engines.vllm.probe import answers, pressure, progress
from fivefold.engines.vllm.routes import unpacked
from fivefold.errors import RunError
from fivefold.interfaces import Pressure
from fivefold.models.spec import RouteShape
from fivefold.routes import routes_of_engine
from fivefold.types import Sampling

_RESET_SECONDS = 30.0


class VLLMServer:
    """Calls of one server; `generate` belongs to an event loop, the others block."""

    def __init__(
        self,
        address: str,
        ends: Collection[int],
        run: str,
        routes: RouteShape | None = None,
        longest_call: float = LONGEST_CALL,
    ) -> None:
        """`address`: http://host:port or unix:/path; `ends`: tokens that end a response; `run`: name of the run, the same on
        all ranks; `routes`: shape of the routes in answers, None if answers have none; `longest_call`: seconds after which
        a server is lost that does not answer a call about weights or memory."""
        self.address, self._ends, self._run, self._routes = address, ends, run, routes
        self._control, self._requests = blocking_client(address, longest_call), streaming_client(address)
        self.names_versions = False

    def take(self) -> None:
        """Reserve the server for this run alone, and end what another run left there."""
        self.names_versions = self._post(TAKE, json={"run": self._run}).json()["names_versions"]
        self._call("take", self._run)
        self.abort()

    async def generate(
        self, name: str, prompt_ids: list[int], sampling: Sampling, draws: Sequence[Draw]
    ) -> AsyncIterator[Answer]:
        """Yields the answer to each draw, as they end; raises ServerLostError."""
        sampled = sampling_arguments(sampling, self._ends)
        request = {"run": self._run, "name": name, "prompt_ids": prompt_ids, "sampling": sampled, "draws": draws}
        try:
            async with self._requests.stream("POST", ROUTE, json=request) as response:
                if response.status_code != 200:
                    await response.aread()
                    self._explain(response)
                async for line in response.aiter_lines():
                    answer = json.loads(line)
                    if isinstance(answer, dict):
                        kind = ServerLostError if answer["is_dead"] else RunError
                        raise kind(f"{self}: {answer['error']}")
                    yield self._answer(len(prompt_ids), *answer)
        except httpx.TransportError as error:
            raise unreached(self, error) from error

    def _answer(self, prompt: int, number: int, drawn: str, probs: str, reason: str, versions: Any, packed: Any) -> Answer:
        tokens, logprobs = from_text(drawn, "i"), from_text(probs, "f")
        if self._routes is None:
            return number, tokens, logprobs, reason, versions, None
        array = None if packed is None else unpacked(*packed)
        routes = routes_of_engine(array, prompt + len(tokens), self._routes, reason == "abort")
        return number, tokens, logprobs, reason, versions, routes

    def answers(self) -> bool:
        return answers(self.address)

    def progress(self) -> float | None:
        """Returns the number of tokens sampled so far; None if it does not answer."""
        return progress(self.address)

    def pressure(self) -> Pressure | None:
        values = pressure(self.address)
        return None if values is None else Pressure(*values)

    def pause(self) -> None:
        """Suspend the requests in flight, and discard what was computed for them with the old weights."""
        self._post("/pause", params={"mode": "keep"})

    def resume(self) -> None:
        """Continue the suspended requests."""
        self._post("/resume")

    def abort(self) -> None:
        """End the requests in flight, which return what they have."""
        self._post("/pause", params={"mode": "abort"})
        self._post("/resume")

    def join_groups(self, where: Where, names: Sequence[str], first: int, size: int) -> None:
        self._call("join_groups", where, names, first, size, self._run)

    def begin_weights(self, verify: bool) -> None:
        self._give("begin_weights", verify, self._run)

    def receive_bucket(self, handles: Sequence[dict[str, Any]], entries: Sequence[Entry], used: int) -> None:
        self._give("receive_bucket", handles, entries, used)

    def finish_weights(self, is_whole: bool, version: int) -> list[str]:
        """End an update of weights; returns what is wrong with them. No keys of the old weights remain in the KV cache."""
        faults = [fault for faults_of_worker in self._give("finish_weights", is_whole) for fault in faults_of_worker]
        deadline = time.monotonic() + _RESET_SECONDS
        while not _succeeded(self._post("/reset_prefix_cache")):
            # Abandoned requests end a moment later.
            if time.monotonic() > deadline:
                raise RunError(f"{self} keeps keys of the old weights: requests are running")
            time.sleep(0.05)
        # Not every release names the weights in its answers.
        self._post("/update_weight_version", may_miss=True, json={"new_version": str(version)})
        return faults

    def workers(self) -> int:
        """Returns the number of processes that receive weights."""
        return len(self._call("describe"))

    def sleep(self) -> None:
        """Free the memory of weights and cache."""
        self._post("/sleep", params={"level": 2})

    def wake(self, part: str) -> None:
        """Allocate the memory of `weights` or `kv_cache` again."""
        self._post("/wake_up", params={"tags": part})

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        """Returns the answers of all workers; raises RuntimeError with the error of one."""
        return self._results(self._post("/collective_rpc", json={"method": "answer", "args": [method, *arguments]}))

    def _give(self, method: str, *arguments: Any) -> list[Any]:
        """Returns the answers of all workers to a call about weights, which the server tracks."""
        return self._results(self._post(WEIGHTS, json={"run": self._run, "method": method, "args": arguments}))

    def _results(self, answer: httpx.Response) -> list[Any]:
        results = answer.json()["results"]
        for result in results:
            if "error" in result:
                raise RunError(f"{self}: {result['error']}")
        return [result["result"] for result in results]

    def _post(self, path: str, may_miss: bool = False, **named: Any) -> httpx.Response:
        try:
            response = self._control.post(path, **named)
        except httpx.TransportError as error:
            raise unreached(self, error) from error
        if response.status_code != 200 and not (may_miss and response.status_code == 404):
            self._explain(response)
        return response

    def _explain(self, response: httpx.Response) -> None:
        message = f"{self} answers {response.request.url.path} with {response.status_code}: {response.text[:2000]}"
        if response.status_code >= 500 and not self.answers():
            raise ServerLostError(message)
        raise RunError(message)

    def __str__(self) -> str:
        return f"vLLM's server at {self.address}"


def _succeeded(answer: httpx.Response) -> bool:
    """Returns whether a call went well: old releases answer with an empty body, newer ones with the result."""
    return not answer.content or bool(answer.json().get("success", True))
