"""Turns, requests and environments that mean harm. Every case follows from its number, like those of `fuzz.py`.

`benchmarks/attacks.py` takes as many of them as it has time for.
"""

from __future__ import annotations

import contextlib
import copy
import json
import random
import socket
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.support.fuzz import spoil, spoil_bytes

MARKS = {
    "json": ("<tool_call>", "</tool_call>", "{", "}", " "),
    "xml": ("<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", ">", "</parameter>", "\n", "a"),
    "pairs": ("<tool_call>", "</tool_call>", "f\n", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", " "),
    "deepseek": ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "f\n", " "),
    "harmony": ("<|start|>assistant", "<|channel|>", "a", "to=", "<|constrain|>", "<|message|>", "<|end|>", ">", " "),
    "mistral": ("[TOOL_CALLS]", "[", "]", " "),
    "arguments": ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "a", "["),
    "cohere": ("<|START_ACTION|>", "<|END_ACTION|>", "<|START_THINKING|>", "<|END_THINKING|>", "a"),
    "gemma": ("<|tool_call>call:", "<tool_call|>", '<|"|>', "{", "a", ":", " "),
    "whole": ("{", "}", " ", '{"name":'),
}
"""What the texts of calls consist of, in each form that is read."""
_VALUES: list[Any] = [
    None, True, 0, -1, 1.5, 1e308, 10**30, "", "x", "\x1b[2J", "<|end|>[system]", "é" * 3000, [], [[]], {}, {"a": [{}]},
    {"role": "user", "content": "x"}, [{"role": "tool", "content": "x"}], {"type": "text"}, [["x"]], {"properties": True},
]  # fmt: skip
_SECONDS = 1.0
"""CPU time for reading a turn of a hundred thousand letters."""
_ANSWER_SECONDS = 0.5
"""What is not whole gets no answer."""
_LENGTH = 100_000


def read_a_turn(number: int) -> tuple[str, str]:
    """(outcome, fault) of reading a text that consists of the marks of one form, many times."""
    from fivefold.data.tool_calls import PARSERS, arguments_fault

    draw = random.Random(number)
    form = draw.choice(sorted(MARKS))
    few = draw.choices(MARKS[form], k=draw.randint(1, 5))
    inside = draw.choices(few, k=_LENGTH // 20) if draw.random() < 0.3 else few * (_LENGTH // max(1, len("".join(few))))
    text = "".join(
        (*draw.choices(MARKS[form], k=draw.randint(0, 3)), *inside, *draw.choices(MARKS[form], k=draw.randint(0, 3)))
    )
    schemas = {"f": {"properties": {"a": {"type": draw.choice(["integer", "string", "array"])}}}}
    begin = time.thread_time()
    _, calls = PARSERS[form](text[:_LENGTH], schemas)
    for call in calls[:100]:
        arguments_fault(call, schemas)
    seconds = time.thread_time() - begin
    return f"{form}: {'calls' if calls else 'no call'}", f"{seconds:.1f} s for {text[:80]!r}" if seconds > _SECONDS else ""


class Requests:
    """Requests of agents to one endpoint: none is a fault of it, and the next one is answered."""

    def __init__(self, root: Path) -> None:
        from fivefold.data.tokenizer import train_tokenizer
        from tests.rollout.test_endpoint import Served

        train_tokenizer("bpe", ["abc"], root, 300)
        self._served = Served(str(root))

    def __call__(self, number: int) -> tuple[str, str]:
        draw = random.Random(number)
        served = self._served
        served.address = served.opened(number)
        content = spoiled_request(
            draw, served.address.base_url.rpartition("/v1")[0].rpartition("/")[2], served.address.api_key
        )
        status = self._send(content, draw)
        if served.address.session.fault is not None:
            return "a fault of the endpoint", served.address.session.fault[-1000:]
        served.endpoint.end(served.address).result(20)
        served.address = served.opened(number)
        answered, answer = served.post({"messages": [{"role": "user", "content": "a"}]})
        served.endpoint.end(served.address).result(20)
        return f"status {status}", "" if answered == 200 else f"the next request got {answered}: {answer}"

    def _send(self, content: bytes, draw: random.Random) -> str:
        with socket.create_connection(("127.0.0.1", self._served.endpoint.port), 20) as connection:
            for begin, end in _pieces(len(content), draw):
                connection.sendall(content[begin:end])
            if draw.random() < 0.3:
                return "not waited for"
            if draw.random() < 0.2:
                connection.shutdown(socket.SHUT_WR)
            connection.settimeout(_ANSWER_SECONDS)
            with contextlib.suppress(ConnectionError, TimeoutError):
                return connection.recv(12).decode(errors="replace")[9:] or "none"
            return "none"

    def close(self) -> None:
        self._served.endpoint.close()


def spoiled_request(draw: random.Random, trajectory: str, key: str) -> bytes:
    """A request for a turn with other values in its body, other headers, or damaged bytes."""
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    tool = {
        "name": "add",
        "description": "Add.",
        "parameters": {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
    }
    body: dict[str, Any] = {
        "model": "tiny", "max_tokens": 5, "stop": ["x"], "stream": draw.random() < 0.3, "logprobs": draw.random() < 0.3,
        "messages": {
            "0": {"role": "user", "content": "a"},
            "1": {"role": "assistant", "content": "b", "tool_calls": {"0": copy.deepcopy(call)}},
            "2": {"role": "tool", "content": "c", "tool_call_id": "c"},
        },
        "tools": {"0": {"type": "function", "function": tool}},
    }  # fmt: skip
    for _ in range(draw.choice([0, 1, 1, 2, 3])):
        spoil(body, draw, _VALUES)
    route = draw.choice(["/v1/chat/completions"] * 8 + ["/inference/v1/generate", "/v1/models", "/v1/../x"])
    data = json.dumps(_lists(body)).encode()
    headers = [
        "Host: a",
        f"Authorization: Bearer {key}",
        f"X-Stainless-Retry-Count: {draw.choice(['0', '1', '9' * 4999, '²', '-1'])}",
    ]
    if draw.random() < 0.3:
        headers.append("Transfer-Encoding: chunked")
        data = (
            b"".join(b"%x\r\n%s\r\n" % (end - begin, data[begin:end]) for begin, end in _pieces(len(data), draw))
            + b"0\r\n\r\n"
        )
    else:
        headers.append(f"Content-Length: {len(data) + draw.choice([0, 0, 0, 1, -1, 10**17])}")
    if draw.random() < 0.2:
        headers.append(draw.choice(["Content-Length: 5", "Expect: 100-continue", "X: " + "a" * 70_000, " folded", "a\0: b"]))
    if draw.random() < 0.1:
        headers.pop(draw.randrange(len(headers)))
    head = "\r\n".join((f"{draw.choice(['POST'] * 9 + ['GET'])} /{trajectory}{route} HTTP/1.1", *headers, "\r\n"))
    content = head.encode("latin-1") + data
    return spoil_bytes(content, draw) if draw.random() < 0.3 else content


def _lists(value: Any) -> Any:
    """A tree of mappings whose keys are numbers as lists."""
    if not isinstance(value, dict):
        return value
    inner = {key: _lists(item) for key, item in value.items()}
    return list(inner.values()) if inner and all(key.rstrip("x").isdigit() for key in inner) else inner


def _pieces(length: int, draw: random.Random) -> list[tuple[int, int]]:
    cuts = sorted({0, length, *(draw.randint(0, length) for _ in range(draw.choice([0, 1, 5])))})
    return list(pairwise(cuts))


class Environments:
    """What an environment and a server of tools do to the process that runs them, while another trajectory is in it."""

    def __init__(self, root: Path) -> None:
        from fivefold.config.environment import EnvironmentConfig
        from fivefold.environments.pool import EnvironmentPool
        from tests.environments.test_environments import CODE, HARMS, MCP

        (root / "envs.py").write_text(CODE)
        (root / "server.py").write_text(MCP)
        self._harms = HARMS
        self._pool = EnvironmentPool(
            EnvironmentConfig(
                class_=f"{root}/envs.py:Game", tools=[f"mcp:{sys.executable} {root}/server.py"], per_worker=1, step_seconds=3.0,
                memory_mb=4000,
            )
        )  # fmt: skip
        self._pool.start()
        self._other = self._pool.reset({}, 0).result(60)[0]

    def __call__(self, number: int) -> tuple[str, str]:
        from fivefold.environments.pool import EnvironmentFailure

        draw = random.Random(number)
        kind, harm = draw.choice(self._harms)
        if kind == "forge":
            harm = (
                f"forge {spoil_bytes(json.dumps({'id': draw.randint(1, 9), 'value': {'messages': 'x'}}).encode(), draw)!r}"
            )
        place = self._pool.reset({}, number).result(60)[0]
        begin = time.monotonic()
        try:
            if kind == "tool":
                (answer,) = self._pool.call(place, [("tool", {"how": harm})], 60).result(60)
                outcome = "error of a tool" if answer.is_error else "answer of a tool"
            else:
                self._pool.step(place, {"role": "assistant", "content": harm}, 60).result(60)
                outcome = "step"
        except EnvironmentFailure:
            outcome = "failed trajectory"
        seconds = time.monotonic() - begin
        self._pool.leave(place)
        fine = self._pool.step(self._other, {"role": "assistant", "content": "hello"}, 60).result(60)["reward"] == 0.5
        fault = (
            ""
            if fine and seconds < 45
            else f"{kind} {harm[:80]}: {seconds:.0f} s, the other one is {'fine' if fine else 'harmed'}"
        )
        return outcome, fault

    def close(self) -> None:
        self._pool.close()
