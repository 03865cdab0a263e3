"""Environments in their processes: what hangs, raises or dies fails its own trajectories, and nothing of the trainer leaks."""

from __future__ import annotations

import http.server
import os
import signal
import socketserver
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from fivefold.config.environment import EnvironmentConfig
from fivefold.environments.pool import EnvironmentFailure, EnvironmentPool
from fivefold.errors import UserError

CODE = '''
import asyncio, json, os, signal, sys, time, typing


class Game:
    async def reset(self, task, seed):
        self.task = task
        if task == "raise":
            raise KeyError("no such task")
        return f"seed {seed}"

    async def step(self, message):
        said = message["content"]
        if said == "hang":
            await asyncio.sleep(1000)
        if said == "block":
            time.sleep(1000)
        if said == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if said == "nan":
            return {"messages": "x", "reward": float("nan")}
        if said == "numpy":
            import numpy

            kind = getattr(numpy, self.task)
            return {"messages": "x", "reward": kind(1)}
        if said == "text":
            return {"messages": "x", "reward": "much"}
        if said.startswith("{"):
            return json.loads(said)
        if said == "numpy done":
            import numpy

            return {"messages": "x", "done": numpy.bool_(True)}
        if said == "nothing":
            return {"messages": []}
        if said == "memory":
            bytearray(10**10)
        if said == "environment":
            return {"messages": json.dumps(dict(os.environ)), "done": True}
        if said == "pid":
            return {"messages": str(os.getpid())}
        if said == "half":
            return {"messages": "a\\ud800\\u20acb"}
        if said == "huge":
            return {"messages": "x" * (65 << 20)}
        if said == "infinite":
            return {"messages": "x", "reward": 10**400}
        if said.startswith("forge "):
            answer(said.removeprefix("forge "))
            await asyncio.sleep(1000)
        if said == "fork":
            os.fork()
        if said == "children":
            # One is a copy, the other a program; both outlive their parent.
            if os.fork() == 0:
                os.setsid()
                time.sleep(30)
                os._exit(0)
            os.system("setsid sleep 30 &")
            os._exit(3)
        return {"messages": [{"role": "user", "content": said}], "reward": 0.5, "done": False, "state": 3}

    async def close(self):
        if "/" in self.task:
            open(self.task, "a").write("closed")


def answer(text):
    """Write to the socket through which this process answers."""
    for name in os.listdir("/proc/self/fd"):
        if os.path.exists(f"/proc/self/fd/{name}") and os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
            try:
                os.write(int(name), text.encode() + b"\\n")
            except OSError:
                pass


class Kept:
    replayable = True

    def reset(self, task, seed):
        self.seen = [task]
        return "start"

    def step(self, message):
        self.seen.append(message["content"])
        return {"messages": " ".join(self.seen), "done": message["content"] == "end"}

    def state(self):
        if "odd" in self.seen:
            return {"seen": float("nan")}
        return {"seen": self.seen}

    def restore(self, state):
        self.seen = [*state["seen"]]

    def score(self):
        return len(self.seen)


class Half(Kept):
    restore = None


class Plain:
    def reset(self, task, seed):
        return None

    def step(self, message):
        time.sleep(float(message["content"]))
        return {"done": True, "reward": 1}


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b (int): The second number.
    """
    return a + b


def search(words: typing.List, most: typing.Optional[int] = None) -> str:
    """Search.

    Args:
        words (list): What to search for,
            joined by AND: no
                address.

            Never empty.

        most:
            How many.

    Returns:
        most: Text.
    """


def slow(text: str) -> str:
    time.sleep(1000)


async def wrong(values: list[float]) -> dict:
    raise ValueError(f"no such values: {values}")


def bare(a):
    return a
'''


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "envs.py"
    path.write_text(CODE)
    return path


@pytest.fixture
def pool_of(code: Path):
    pools = []

    def make(**settings) -> EnvironmentPool:
        names = {"class_": f"{code}:Game"} if "class_" not in settings and "tools" not in settings else {}
        settings = {"step_seconds": 20.0, **names, **settings}
        settings["tools"] = [f"{code}:{name}" for name in settings.get("tools", [])]
        pools.append(EnvironmentPool(EnvironmentConfig(**settings)))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def say(pool: EnvironmentPool, place, text: str, seconds: float = 20.0):
    return pool.step(place, {"role": "assistant", "content": text}, seconds)


def test_a_step_gives_messages_reward_done_and_state(pool_of):
    pool = pool_of()
    assert pool.start() == []
    place, first = pool.reset("x", 7).result()
    assert first == "seed 7"
    step = say(pool, place, "hello").result()
    assert step == {"messages": [{"role": "user", "content": "hello"}], "reward": 0.5, "done": False, "state": "3"}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("hang", "step took longer than 1 s"),
        ("block", "step took longer than 1 s"),
        ("die", "ended by SIGKILL"),
        ("nan", "^the reward of a step is a finite number: got nan$"),
        ("text", "^the reward of a step is a finite number: got 'much'$"),
        ("nothing", "^a step without messages must be done"),
        (
            '{"messages": "x", "rewards": 1.0}',
            "^a step has the keys messages, reward, done, state: got 'rewards': did you mean 'reward'",
        ),
        ('{"messages": "x", "info": {}}', "^a step has the keys messages, reward, done, state: got 'info'$"),
        ('{"messages": "x", "done": "false"}', "^`done` of a step is True or False: got 'false'$"),
        ('{"messages": "x", "done": null}', "^`done` of a step is True or False: got None$"),
        ("memory", "MemoryError"),
        ("infinite", "^the reward of a step is a finite number: got 10+[.]{3}0+$"),
        ("huge", "^what an environment or a tool returns has at most 64 MiB: got"),
        ("children", "ended with exit code 3"),
        ("forge [1]", "sent what is no answer .TypeError: an answer is an object"),
        ('forge {"id": [1]}', "sent what is no answer .TypeError"),
        ('forge {"value": 1}', "sent what is no answer .KeyError: 'id'"),
        ("forge {", "sent what is no answer .JSONDecodeError"),
        ("forge " + "[" * 100_000, "sent what is no answer .RecursionError"),
    ],
    ids=lambda value: value[:20],
)
def test_a_failure_of_an_environment_fails_its_own_trajectory_only(pool_of, text, error):
    pool = pool_of(per_worker=1, memory_mb=2000)
    pool.start()
    failing, other = (pool.reset("x", seed).result()[0] for seed in (1, 2))
    broken = say(pool, failing, text, 1.0 if text in ("hang", "block") else 20.0)
    assert say(pool, other, "hello").result()["reward"] == 0.5
    with pytest.raises(EnvironmentFailure, match=error):
        broken.result(timeout=20)
    assert say(pool, other, "hello").result()["reward"] == 0.5
    # Another trajectory gets a process that works.
    pool.leave(failing)
    assert say(pool, pool.reset("x", 3).result()[0], "hello").result()["reward"] == 0.5


@pytest.mark.parametrize(("kind", "reward"), [("float32", 1.0), ("int64", 1.0), ("bool_", None)])
def test_a_reward_may_be_a_number_of_numpy_and_no_truth_value(pool_of, kind, reward):
    pool = pool_of()
    pool.start()
    step = say(pool, pool.reset(kind, 0).result()[0], "numpy")
    if reward is None:
        with pytest.raises(EnvironmentFailure, match=r"^the reward of a step is a finite number: got "):
            step.result()
    else:
        assert step.result()["reward"] == reward


def test_the_end_of_a_trajectory_may_be_a_truth_value_of_numpy(pool_of):
    pool = pool_of()
    pool.start()
    assert say(pool, pool.reset("x", 0).result()[0], "numpy done").result()["done"] is True


def test_half_a_character_becomes_a_question_mark(pool_of):
    """No tokenizer takes one, and a tool may be told to write it."""
    pool = pool_of()
    pool.start()
    assert say(pool, pool.reset("x", 0).result()[0], "half").result()["messages"] == "a?\u20acb"


def test_a_copy_that_an_environment_forks_answers_nothing(pool_of):
    pool = pool_of()
    pool.start()
    place, _ = pool.reset("x", 0).result()
    for _ in range(3):
        assert say(pool, place, "fork").result()["reward"] == 0.5
    pid = int(say(pool, place, "pid").result()["messages"])
    deadline = time.monotonic() + 20
    while any(one.status() != "zombie" for one in psutil.Process(pid).children()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [one for one in psutil.Process(pid).children() if one.status() != "zombie"]


def test_a_process_whose_calls_hang_again_and_again_is_replaced(pool_of, monkeypatch):
    """Each hanging function keeps a thread, and without threads every later call would be late."""
    monkeypatch.setattr("fivefold.environments.pool._MOST_LATE", 3)
    pool = pool_of(tools=["slow", "add"], step_seconds=0.5)
    pool.start()
    place, _ = pool.reset("x", 0).result()
    first = place.process
    for _ in range(3):
        assert pool.call(place, [("slow", {"text": "x"})], 10).result()[0].is_late
    assert pool.call(place, [("add", {"a": 1})], 10).result()[0].text == "2", "it serves the environments that it has"
    pool.leave(place)
    other, _ = pool.reset("x", 0).result()
    assert other.process is not first
    deadline = time.monotonic() + 20
    while not first.has_ended and time.monotonic() < deadline:
        time.sleep(0.02)
    assert first.has_ended and first._process.returncode == -signal.SIGKILL


def test_a_hanging_coroutine_leaves_the_others_of_its_process_alone(pool_of):
    pool = pool_of(per_worker=8)
    pool.start()
    places = [pool.reset("x", seed).result()[0] for seed in range(3)]
    hanging = say(pool, places[0], "hang", 0.5)
    with pytest.raises(EnvironmentFailure, match=r"longer than 0\.5 s"):
        hanging.result(timeout=20)
    assert len({say(pool, place, "pid").result()["messages"] for place in places[1:]}) == 1


def test_per_worker_bounds_the_environments_of_a_process(pool_of):
    pool = pool_of(per_worker=2)
    pool.start()
    places = [pool.reset("x", seed).result()[0] for seed in range(5)]
    pids = [say(pool, place, "pid").result()["messages"] for place in places]
    assert sorted(pids.count(pid) for pid in set(pids)) == [1, 2, 2]


def test_resets_that_come_together_share_processes_as_per_worker_says(pool_of):
    pool = pool_of(per_worker=2)
    pool.start()
    places = [future.result()[0] for future in [pool.reset("x", 0) for _ in range(8)]]
    pids = [say(pool, place, "pid").result()["messages"] for place in places]
    assert sorted(pids.count(pid) for pid in set(pids)) == [2, 2, 2, 2]


def test_processes_are_bounded_and_a_further_environment_waits_without_a_time_limit(pool_of):
    pool = pool_of(per_worker=2, max_processes=2, reset_seconds=1.0)
    pool.start()
    assert pool.capacity == 4
    asked = [pool.reset("x", 0) for _ in range(6)]
    places = [future.result(timeout=20)[0] for future in asked[:4]]
    time.sleep(1.5)
    assert not asked[4].done() and not asked[5].done()
    dead = say(pool, places[0], "die")
    with pytest.raises(EnvironmentFailure):
        dead.result(timeout=20)
    for place in (*places, places[1]):
        pool.leave(place)
    later = [future.result(timeout=20)[0] for future in asked[4:]]
    pids = {say(pool, place, "pid").result()["messages"] for place in later}
    assert len(pids) <= 2
    # Leaving twice gives one place back, not two.
    more = [pool.reset("x", 0) for _ in range(3)]
    assert all(future.result(timeout=20) for future in more[:2])
    time.sleep(0.5)
    assert not more[2].done()


def test_a_state_continues_in_another_process(pool_of, code):
    pool = pool_of(class_=f"{code}:Kept", per_worker=1)
    pool.start()
    assert pool.is_replayable and pool.has_score
    place, _ = pool.reset("task", 0).result()
    assert say(pool, place, "one").result()["messages"] == "task one"
    state = pool.state(place).result()
    assert state == {"seen": ["task", "one"]}
    other, first = pool.reset("task", 0, state).result()
    assert first == "start" and say(pool, other, "two").result()["messages"] == "task one two"
    assert say(pool, place, "three").result()["messages"] == "task one three"
    with pytest.raises(EnvironmentFailure, match=r"^the state of an environment must restore: KeyError: 'seen'$"):
        pool.reset("task", 0, {}).result()
    say(pool, other, "odd").result()
    with pytest.raises(EnvironmentFailure, match="JSON"):
        pool.state(other).result()


def test_a_score_is_that_of_the_whole_trajectory_whatever_its_end(pool_of, code):
    pool = pool_of(class_=f"{code}:Kept")
    pool.start()
    place, _ = pool.reset("task", 0).result()
    assert say(pool, place, "one").result()["reward"] == 0.0
    assert pool.score(place).result() == 2.0
    assert say(pool, place, "end").result()["reward"] == 3.0


def test_an_environment_without_state_says_so_and_plain_tools_have_none_to_keep(pool_of):
    stateless, tools = pool_of(), pool_of(tools=["add"])
    for pool in (stateless, tools):
        pool.start()
    place, _ = stateless.reset("x", 0).result()
    assert stateless.state(place).result() is None and not stateless.is_replayable and not stateless.has_score
    place, _ = tools.reset("x", 0).result()
    assert tools.is_stateless and not tools.is_replayable and not stateless.is_stateless
    assert tools.reset("x", 0, {}).result()[1] is None


def test_plain_methods_do_not_hold_each_other_up(pool_of, code):
    pool = pool_of(class_=f"{code}:Plain")
    pool.start()
    places = [pool.reset("x", 0).result()[0] for _ in range(8)]
    begin = time.monotonic()
    steps = [say(pool, place, "2") for place in places]
    assert all(step.result()["reward"] == 1 for step in steps)
    assert time.monotonic() - begin < 12, "one after another they take 16 s"


def test_a_reset_that_raises_is_a_failure_with_its_traceback(pool_of):
    pool = pool_of()
    pool.start()
    with pytest.raises(EnvironmentFailure, match="KeyError: 'no such task'"):
        pool.reset("raise", 0).result()


def test_close_is_called_at_the_end_of_a_trajectory(pool_of, tmp_path):
    pool = pool_of()
    pool.start()
    place, _ = pool.reset(str(tmp_path / "mark"), 0).result()
    pool.leave(place)
    deadline = time.monotonic() + 20
    mark = tmp_path / "mark"
    # The file is there before what is written to it.
    while not (mark.exists() and mark.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert mark.read_text() == "closed"


def test_environments_that_are_left_are_closed_at_the_end_of_a_run(pool_of, tmp_path):
    pool = pool_of(per_worker=2)
    pool.start()
    for number in range(3):
        pool.reset(str(tmp_path / f"mark{number}"), 0).result()
    pool.reset("starting", 0)
    pool.close()
    assert [(tmp_path / f"mark{number}").read_text() for number in range(3)] == ["closed"] * 3
    pool.close()


def test_processes_get_no_secrets_of_the_trainer(pool_of, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "abc")
    monkeypatch.setenv("WANTED", "yes")
    pool = pool_of(variables=["WANTED"])
    pool.start()
    seen = say(pool, pool.reset("x", 0).result()[0], "environment").result()["messages"]
    assert "SECRET_TOKEN" not in seen and '"WANTED": "yes"' in seen


def test_processes_end_with_the_one_that_started_them(code, tmp_path):
    program = f"""
import os, signal
from fivefold.config.environment import EnvironmentConfig
from fivefold.environments.pool import EnvironmentPool
pool = EnvironmentPool(EnvironmentConfig(class_="{code}:Game"))
pool.start()
place, _ = pool.reset("x", 0).result()
print(pool.step(place, {{"content": "pid"}}, 20).result()["messages"], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert done.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 20
    while Path(f"/proc/{done.stdout.strip()}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{int(done.stdout)}").exists()


def test_the_worker_runs_without_any_package(pool_of):
    """Under an interpreter that has the standard library alone."""
    python = os.path.realpath(sys.executable)
    probe = subprocess.run([python, "-I", "-c", "import torch"], capture_output=True)
    assert probe.returncode, "the interpreter outside of the environment must have no torch"
    pool = pool_of(python=python)
    assert pool.start() == []
    assert pool.reset("x", 4).result()[1] == "seed 4"


def test_tools_are_described_by_annotations_and_docstring(pool_of):
    (schema,) = pool_of(tools=["add"]).start()
    assert schema["function"] == {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "The first number."},
                "b": {"type": "integer", "description": "The second number."},
            },
            "required": ["a"],
        },
    }


def test_the_description_of_an_argument_has_all_of_its_lines_and_no_others(pool_of):
    (schema,) = pool_of(tools=["search"]).start()
    assert schema["function"]["parameters"]["properties"] == {
        "words": {"type": "array", "description": "What to search for, joined by AND: no address. Never empty."},
        "most": {"type": ["integer", "null"], "description": "How many."},
    }


def test_tools_of_one_turn_run_together_and_each_has_its_own_fate(pool_of):
    pool = pool_of(tools=["add", "slow", "wrong"], step_seconds=1.0)
    pool.start()
    place, first = pool.reset({}, 0).result()
    assert first is None
    calls = [("add", {"a": 2, "b": 3}), ("slow", {"text": "x"}), ("wrong", {"values": [1.0]})]
    good, late, raised = pool.call(place, calls, 100).result()
    assert (good.text, good.is_error) == ("5", False)
    assert late.is_late and late.is_error and "longer than 1 s" in late.text
    assert raised.is_error and not raised.is_late and raised.text == "ValueError: no such values: [1.0]"


def test_a_server_that_does_not_speak_mcp_is_refused(pool_of):
    with socketserver.TCPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        pool = pool_of(class_=None)
        pool._config.tools.append(f"mcp+http://127.0.0.1:{server.server_address[1]}/")
        with pytest.raises(UserError, match="must answer: HTTP status 501"):
            pool.start()
        server.shutdown()
    pool = pool_of(class_=None)
    pool._config.tools.append("""mcp:echo '{"id": 1, "result": {}}'""")
    with pytest.raises(
        UserError, match=r"must answer: what it sends is not MCP|the server has ended|ended with exit code 0"
    ):
        pool.start()


MCP = """
import json, sys, time
for line in sys.stdin:
    message = json.loads(line)
    name, number = message["method"], message.get("id")
    if name == "initialize":
        print("starting ...\\n[1]\\nnull\\n3", flush=True)
        answer = {"protocolVersion": "2025-06-18"}
    elif name == "tools/list":
        answer = {"tools": [{"name": "tool", "description": 5, "inputSchema": {"properties": {"how": True}}}]}
    elif name == "tools/call":
        how = message["params"]["arguments"]["how"]
        if how == "garbage":
            sys.stdout.buffer.write(b"\\xff\\xfe\\n[" + b"[" * 100000 + b'\\n{"id": [1]}\\n{"id": {}, "method": 3}\\n')
            sys.stdout.buffer.flush()
        if how == "die":
            sys.exit("out of ideas")
        if how == "never":
            time.sleep(1000)
        if how == "much":
            sys.stdout.write("x" * (65 << 20) + "\\n")
            sys.stdout.flush()
        if how == "odd error":
            print(json.dumps({"id": number, "error": "bad"}), flush=True)
            continue
        answer = {"none": {}, "list": [1], "parts": {"content": 5}, "garbage": {"content": [{"text": "well"}]}}.get(how)
        answer = answer if answer is not None else {"content": [{"text": "x" * 70_000_000 if how == "huge" else "fine"}]}
    else:
        continue
    print(json.dumps({"jsonrpc": "2.0", "id": number, "result": answer}), flush=True)
"""


HARMS = [
    *(
        ("step", word)
        for word in ("hang", "die", "nan", "text", "nothing", "memory", "half", "huge", "infinite", "fork", "children")
    ),
    *[("forge", "")] * 6,
    *(("tool", how) for how in ("garbage", "die", "never", "much", "huge", "odd error", "none", "list", "parts", "fine")),
]
"""What `Game` does to its process, and the server to its client."""


@pytest.mark.parametrize(
    ("how", "text", "is_error"),
    [
        ("garbage", "well", False),
        ("die", "ended with exit code 1: out of ideas", True),
        ("never", "call took longer than 3 s", True),
        ("much", "the server ended with exit code -9", True),
        ("huge", "the server ended with exit code -9", True),
        ("odd error", "bad", True),
        ("list", "the server's answer to tools/call has no result", True),
        ("parts", "TypeError", True),
        ("none", "", False),
    ],
)
def test_a_server_of_tools_that_answers_anything_fails_its_own_calls_only(pool_of, tmp_path, how, text, is_error):
    (tmp_path / "server.py").write_text(MCP)
    pool = pool_of(class_=None, step_seconds=3.0 if how == "never" else 60.0, memory_mb=4000)
    pool._config.tools.append(f"mcp:{sys.executable} {tmp_path}/server.py")
    pool.start()
    place, other = (pool.reset("x", 0).result()[0] for _ in range(2))
    fine = [("tool", {"how": "fine"})]
    assert pool.call(other, fine, 60).result()[0].text == "fine"
    (answer,) = pool.call(place, [("tool", {"how": how})], 60).result(timeout=60)
    assert (answer.is_error, text in answer.text) == (is_error, True), answer.text[:300]
    assert pool.call(other, fine, 60).result()[0].text == "fine"


def test_state_without_restore_is_refused(pool_of, code):
    with pytest.raises(UserError, match="must have both methods state and restore, or neither"):
        pool_of(class_=f"{code}:Half").start()


VERL_FUNCTIONS = '''
import asyncio

from verl.tools.function_tool import function_tool
from verl.tools.schemas import ToolResponse


@function_tool
def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.

    Returns:
        The sum.
    """
    return str(a + b)


@function_tool("web_search")
async def search(query: str, pages: list[int]) -> tuple:
    """Search the web.

    Args:
        query: What to look for.
        pages: Which pages.

    Returns:
        What was found.
    """
    await asyncio.sleep(0)
    return {"found": [query, *pages]}, 0.5, {"pages": len(pages)}


@function_tool(schema={"type": "function", "function": {"name": "shout", "description": "Shout.", "parameters": {
    "type": "object", "properties": {"text": {"type": "string", "description": "What."}}, "required": ["text"]}}})
def shout(text):
    return ToolResponse(text=text.upper())
'''
VERL_CLASSES = """
from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op


class Check(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.answers = {}

    async def create(self, instance_id=None, **kwargs):
        name, response = await super().create(instance_id)
        self.answers[name] = kwargs["create_kwargs"]["ground_truth"]
        return name, response

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs):
        right = parameters["answer"] == self.answers[instance_id]
        return ToolResponse(text=f"{self.config['says']}: {right}, {len(self.answers)}"), float(right), {}

    async def release(self, instance_id: str, **kwargs):
        del self.answers[instance_id]
"""
VERL_YAML = """
tools:
  - class_name: checking.Check
    config: {type: native, says: it is}
    tool_schema:
      type: function
      function:
        name: check
        description: Check an answer.
        parameters:
          type: object
          properties: {answer: {type: string, description: The answer.}}
          required: [answer]
"""


def test_a_file_of_functions_for_verl_runs_without_verl(pool_of, tmp_path):
    (tmp_path / "functions.py").write_text(VERL_FUNCTIONS)
    pool = pool_of(class_=None)
    pool._config.tools.append(f"verl:{tmp_path}/functions.py")
    schemas = pool.start()
    assert [schema["function"]["name"] for schema in schemas] == ["add", "web_search", "shout"]
    from transformers.utils import get_json_schema

    names: dict = {}
    code = VERL_FUNCTIONS.partition("\n\n\n@function_tool(schema")[0].replace("@function_tool", "@tool")
    exec(code.replace("from verl", "# ").replace('@tool("web_search")', "").replace("@tool", ""), names)
    for schema, function in zip(schemas, ("add", "search"), strict=False):
        # As verl makes them.
        theirs = get_json_schema(names[function])["function"]
        assert schema["function"] == {
            **{key: theirs[key] for key in ("description", "parameters")},
            "name": schema["function"]["name"],
        }
    assert schemas[2]["function"]["parameters"]["properties"] == {"text": {"type": "string", "description": "What."}}
    place, _ = pool.reset({}, 0).result()
    calls = [("add", {"a": 2, "b": 3}), ("web_search", {"query": "ä", "pages": [1]}), ("shout", {"text": "hi"})]
    assert [answer.text for answer in pool.call(place, calls, 20).result()] == ["5", '{"found": ["ä", 1]}', "HI"]


def test_a_yaml_file_of_tools_for_verl_has_what_the_row_gives_each(pool_of, tmp_path, monkeypatch):
    (tmp_path / "tools.yaml").write_text(VERL_YAML)
    (tmp_path / "checking.py").write_text(VERL_CLASSES)
    monkeypatch.chdir(tmp_path)
    pool = pool_of(class_=None)
    pool._config.tools.append(f"verl:{tmp_path}/tools.yaml")
    (schema,) = pool.start()
    assert schema["function"]["name"] == "check" and schema["function"]["parameters"]["required"] == ["answer"]
    texts = {}
    for truth in ("4", "5"):
        row = {"extra_info": {"tools_kwargs": {"check": {"create_kwargs": {"ground_truth": truth}}}}}
        texts[truth] = pool.reset(row, 0).result()[0]
    answers = [pool.call(place, [("check", {"answer": "4"})], 20).result()[0].text for place in texts.values()]
    assert answers == ["it is: True, 1", "it is: False, 1"]


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"tools": ["bare"]}, "the tool bare needs an annotation for its argument a"),
        ({"tools": ["add", "add"]}, "two tools are called add"),
        ({"class_": "envs.py:None"}, "No such file"),
        ({"python": "/bin/no-python"}, "environment.python must be a Python interpreter: /bin/no-python cannot be started"),
    ],
)
def test_what_cannot_be_loaded_ends_the_start_with_its_reason(pool_of, settings, error):
    with pytest.raises(UserError, match=error):
        pool_of(**settings).start()
