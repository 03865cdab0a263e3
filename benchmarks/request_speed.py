"""Measure what requests to servers cost the process of a rank: its CPU time, with vLLM's client and the engine's router.

    python -m benchmarks.request_speed [--responses 1024] [--servers 1,4] [--tokens 200]

The servers sample nothing: they answer all requests after the same two seconds, with ready tokens and log-probs. A prompt
has one response or eight. The first of three rounds opens the connections, the others use them again if they are still open.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from fivefold.engines.servers.request_router import RequestRouter
from fivefold.engines.vllm.client import VLLMServer
from fivefold.types import Request, Sampling

SECONDS, ROUNDS, PROMPT_TOKENS = 2.0, 3, 100
VOCABULARY = 150_000


def serve(path: str, tokens: int, seconds: float) -> None:
    """Answer each request of a prompt with a line for each of its responses."""
    draw = random.Random(0)
    sampled = [[draw.randrange(VOCABULARY) for _ in range(tokens)], [-5 * draw.random() for _ in range(tokens)]]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                size = int(head.partition("content-length: ")[2].partition("\r")[0] or 0)
                if not size:
                    # The router asks a quiet server for its progress.
                    writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
                    continue
                request = json.loads(await reader.readexactly(size))
                await asyncio.sleep(seconds)
                writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
                for number, _ in request["draws"]:
                    line = json.dumps([number, *sampled, "length", [[0, tokens]], None]).encode() + b"\n"
                    writer.write(b"%x\r\n%b\r\n" % (len(line), line))
                    # As tokens do, responses end one after another.
                    await asyncio.sleep(0)
                writer.write(b"0\r\n\r\n")

    async def run() -> None:
        async with await asyncio.start_unix_server(answer, path, backlog=4096) as server:
            await server.serve_forever()

    asyncio.run(run())


@contextlib.contextmanager
def router_of(count: int, responses: int, tokens: int) -> Iterator[RequestRouter]:
    """A rank's router for so many servers, which are processes of their own."""
    with tempfile.TemporaryDirectory() as directory:
        paths = [f"{directory}/{number}" for number in range(count)]
        spawn = multiprocessing.get_context("spawn")
        processes = [spawn.Process(target=serve, args=(path, tokens, SECONDS), daemon=True) for path in paths]
        for process in processes:
            process.start()
        router = RequestRouter(0, responses, print, 300.0)
        try:
            while not all(map(Path.exists, map(Path, paths))):
                time.sleep(0.05)
            router.serve([VLLMServer(f"unix:{path}", set(), "run") for path in paths])
            router.go(0)
            yield router
        finally:
            router.close()
            for process in processes:
                process.kill()
                process.join()


def measure(router: RequestRouter, responses: int, group: int, tokens: int) -> float:
    """Return the seconds of CPU time that this process takes for so many responses."""
    sampling, draw = Sampling(max_tokens=tokens, logprobs=True), random.Random(1)
    prompts = [[draw.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(responses // group)]
    requests = [Request(number, prompts[number // group], sampling, draw.getrandbits(62)) for number in range(responses)]
    stream, begin = router.open(), time.process_time()
    stream.submit(requests)
    completions = list(stream.completions())
    seconds = time.process_time() - begin
    assert len(completions) == responses and all(len(one.logprobs) == tokens for one in completions)
    stream.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", type=int, default=1024, help="in flight at once (default: 1024)")
    parser.add_argument("--servers", default="1,4", help="numbers of servers (default: 1,4)")
    parser.add_argument("--tokens", type=int, default=200, help="of a response (default: 200)")
    chosen = parser.parse_args()
    for count in map(int, chosen.servers.split(",")):
        for group in (1, 8):
            with router_of(count, chosen.responses, chosen.tokens) as router:
                rounds = [measure(router, chosen.responses, group, chosen.tokens) for _ in range(ROUNDS)]
            text = ", ".join(f"{seconds:.2f}" for seconds in rounds)
            print(f"{chosen.responses} responses, {group} to a prompt, on {count} servers: {text} s of CPU time", flush=True)


if __name__ == "__main__":
    main()
