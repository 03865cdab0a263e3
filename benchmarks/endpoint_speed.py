"""Measure the endpoint of agents: the time that it adds to a turn, and how long its event loop is blocked.

    python -m benchmarks.endpoint_speed [turns] [contexts]

`turns`: 512 conversations with clients on another core. Engine and agents sleep for known times, which are taken off.
`contexts`: eight requests of 128k tokens at once. A busy machine takes the core away: the time that the loop's thread waited
for one (`/proc/thread-self/schedstat`) is printed too, and taken off where a line says so.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from typing import Any

from fivefold.config.environment import EndpointConfig
from fivefold.data.dialog import Dialog
from fivefold.data.tokenizer import load_tokenizer, train_tokenizer
from fivefold.rollout.endpoint import Endpoint
from fivefold.rollout.sessions import Dialogs
from fivefold.types import Completion, Request, Sampling

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
CONVERSATIONS, TURNS, ENGINE_SECONDS, AGENT_SECONDS = 512, 6, 2.0, 2.0
"""Number of conversations, turns of each, seconds of a turn in the engine, and the longest pause of an agent in seconds."""
OBSERVATION, SAMPLED = 600, 150
"""Characters in a message of the agent, and tokens in an answer of the engine."""
CONTEXTS, LONG = 8, 128_000


class Sleeping:
    """An engine that answers each request after the same time."""

    def __init__(self, tokens: list[int], seconds: float) -> None:
        self._tokens, self._seconds = tokens, seconds
        self._waiting: list[tuple[float, int, Request, Future]] = []
        self._numbers, self._more = count(), threading.Condition()
        threading.Thread(target=self._answer, daemon=True).start()

    def ask(self, request: Request) -> Future:
        future: Future[Completion] = Future()
        with self._more:
            heapq.heappush(self._waiting, (time.monotonic() + self._seconds, next(self._numbers), request, future))
            self._more.notify()
        return future

    def _answer(self) -> None:
        while True:
            with self._more:
                while not self._waiting or (left := self._waiting[0][0] - time.monotonic()) > 0:
                    self._more.wait(left if self._waiting else None)
                _, _, request, future = heapq.heappop(self._waiting)
            future.set_result(Completion(request.id, self._tokens, [-0.5] * len(self._tokens), "stop", 0))


class Client:
    """Connection of one agent to the endpoint: a minimal HTTP client."""

    def __init__(self, port: int, number: int, key: str) -> None:
        self._port, self._head = (
            port,
            f"POST /{number}/v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key}\r\n",
        )

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 24)

    async def ask(self, messages: list[dict]) -> dict:
        body = json.dumps({"model": "x", "messages": messages}).encode()
        self._writer.write(f"{self._head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        answer = json.loads(await self._reader.readexactly(length))
        return answer["choices"][0]["message"]


async def talk(port: int, number: int, key: str, draws: random.Random, added: list[float]) -> None:
    client = Client(port, number, key)
    await client.open()
    await asyncio.sleep(draws.uniform(0, ENGINE_SECONDS + AGENT_SECONDS / 2))
    messages = [{"role": "system", "content": "be brief"}]
    for turn in range(TURNS):
        text = "".join(draws.choice("abcdefgh ijklm nopq rstu vwxyz") for _ in range(OBSERVATION))
        messages.append({"role": "user", "content": f"{number} {turn} {text}"})
        began = time.monotonic()
        message = await client.ask(messages)
        added.append(time.monotonic() - began - ENGINE_SECONDS)
        messages.append({"role": "assistant", "content": message["content"]})
        await asyncio.sleep(draws.uniform(0, AGENT_SECONDS))


def agents(core: int, port: int, keys: list[str], pipe: Any) -> None:
    """Run the clients of all agents in this process, which is not the endpoint's."""
    os.sched_setaffinity(0, {core})
    added: list[float] = []

    async def run() -> None:
        draws = random.Random(0)
        await asyncio.gather(
            *(talk(port, number, key, random.Random(draws.random()), added) for number, key in enumerate(keys))
        )

    asyncio.run(run())
    pipe.send((added, time.process_time()))


def endpoint_of(directory: Path) -> tuple[Endpoint, Any]:
    texts = [path.read_text() for path in (Path(__file__).parents[1] / "docs").glob("*.md")]
    train_tokenizer("bpe", texts, directory, 8000)
    tokenizer = load_tokenizer(str(directory))
    dialog = Dialog.of(tokenizer, {"chat_template": TEMPLATE}, [tokenizer.eos_token_id])
    endpoint = Endpoint(Dialogs(dialog), EndpointConfig(), "x", 1000, 200_000)
    endpoint.start()
    return endpoint, tokenizer


def waited() -> float:
    """Return the seconds for which this thread was ready to run but had no core."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def turns(directory: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    endpoint, tokenizer = endpoint_of(directory)
    os.sched_setaffinity(0, {cores[0]})
    for task in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(task), {cores[0]})
    words = tokenizer.encode("word and number " * SAMPLED, add_special_tokens=False)
    tokens = [*words[:SAMPLED], tokenizer.eos_token_id]
    engine = Sleeping(tokens, ENGINE_SECONDS)
    addresses = [endpoint.open((0, 0, 0, number), Sampling(max_tokens=1000), engine.ask) for number in range(CONVERSATIONS)]
    here, there = multiprocessing.get_context("spawn").Pipe()
    keys = [address.api_key for address in addresses]
    client = multiprocessing.get_context("spawn").Process(target=agents, args=(cores[-1], endpoint.port, keys, there))
    client.start()
    began, used, late = time.monotonic(), time.process_time(), [0.0]
    endpoint._loop.call_soon_threadsafe(watch, endpoint._loop, late)
    added, of_client = here.recv()
    seconds, cpu = time.monotonic() - began, time.process_time() - used
    client.join()
    added.sort()
    print(
        f"{CONVERSATIONS} conversations of {TURNS} turns, {len(added)} turns in {seconds:.1f} s, one core for the endpoint"
    )
    shown = (1e3 * duration for duration in (statistics.median(added), added[len(added) * 99 // 100], added[-1]))
    print("added per turn, with HTTP and JSON of the client: median {:.2f} ms, p99 {:.2f} ms, most {:.2f} ms".format(*shown))
    print(f"CPU per turn: endpoint {1e3 * cpu / len(added):.2f} ms, clients {1e3 * of_client / len(added):.2f} ms")
    print(f"the loop waited {late[0]:.2f} s for its core, which other programs had")
    held = [address.session for address in addresses]
    assert all(
        len(session.turns) == TURNS and all(turn.parent or not turn.number for turn in session.turns) for session in held
    )
    endpoint.close()


def watch(loop: asyncio.AbstractEventLoop, late: list[float]) -> None:
    late[0] = waited()
    loop.call_later(0.2, watch, loop, late)


def contexts(directory: Path) -> None:
    endpoint, tokenizer = endpoint_of(directory)
    engine = Sleeping([5, tokenizer.eos_token_id], 0.0)
    text = (Path(__file__).parents[1] / "docs/engines.md").read_text()
    per = len(tokenizer.encode(text, add_special_tokens=False))
    text = text * (LONG // per) + text[: len(text) * (LONG % per) // per]
    print(f"a context has {len(tokenizer.encode(text, add_special_tokens=False))} tokens, {len(text)} characters")
    addresses = [endpoint.open((0, 0, 0, number), Sampling(max_tokens=100), engine.ask) for number in range(CONTEXTS)]
    gaps: list[tuple[float, float]] = []
    before = [0.0, 0.0]

    def tick() -> None:
        now, without_core = time.monotonic(), waited()
        if before[0]:
            gaps.append((now - before[0] - 0.001, without_core - before[1]))
        before[:] = now, without_core
        endpoint._loop.call_later(0.001, tick)

    async def run() -> None:
        await asyncio.sleep(0.5)
        clients = [Client(endpoint.port, address.number, address.api_key) for address in addresses]
        for client in clients:
            await client.open()
        await asyncio.gather(*(client.ask([{"role": "user", "content": text}]) for client in clients))

    child = multiprocessing.get_context("fork").Process(target=lambda: asyncio.run(run()))
    child.start()
    # Making the child has held up all threads of this process.
    endpoint._loop.call_soon_threadsafe(tick)
    began = time.monotonic()
    child.join()
    print(f"{CONTEXTS} at once took {time.monotonic() - began - 0.5:.2f} s")
    print(f"the event loop was blocked for at most {1e3 * max(gap for gap, _ in gaps):.1f} ms, "
          f"{1e3 * max(gap - late for gap, late in gaps):.1f} ms without its wait for a core")  # fmt: skip
    endpoint.close()


if __name__ == "__main__":
    for name in sys.argv[1:] or ("turns", "contexts"):
        with tempfile.TemporaryDirectory() as root:
            {"turns": turns, "contexts": contexts}[name](Path(root))
