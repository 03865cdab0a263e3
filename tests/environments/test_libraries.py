"""Environments and tools of other libraries, unmodified and without a network; `make test-environments`."""

from __future__ import annotations

import inspect
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fivefold.config.environment import EnvironmentConfig
from fivefold.environments.pool import EnvironmentFailure, EnvironmentPool
from fivefold.errors import UserError
from tests.environments.test_environments import VERL_FUNCTIONS
from tests.rollout import test_conversations as conversations
from tests.support.commands import fivefold
from tests.support.tiny_models import make_tokenizer
from tests.support.whole_runs import metrics
from tests.support.zygote import THREADS

pytestmark = pytest.mark.environments
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

SERVER = '''
import os
import sys
import time

from mcp.server.mcpserver import Context, MCPServer

server = MCPServer("tools")
total = 0


@server.tool()
def add(number: int) -> str:
    """Add to the total of this server."""
    global total
    total += number
    return f"total {total}"


@server.tool()
def session(context: Context) -> str:
    """Name the session."""
    return (context.headers or {}).get("mcp-session-id") or str(os.getpid())


@server.tool()
def fail(reason: str) -> str:
    raise ValueError(reason)


@server.tool()
def slow(seconds: float) -> str:
    time.sleep(seconds)
    return "slept"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
'''

LETTERS = '''
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Say(Action):
    text: str


class Seen(Observation):
    text: str


class Letters(Environment):
    """Wants the letters of a word, one a turn."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **options):
        self.left = ["ab", "cd"][seed % 2] * options.get("times", 1)
        return Seen(text=f"say {self.left}")

    def step(self, action, timeout_s=None, **options):
        if action.text == "raise":
            raise ValueError("no such letter")
        right = action.text == self.left[0]
        self.left = self.left[1:]
        return Seen(text=f"left {self.left}" + "." * (70000 if action.text == "long" else 0), reward=float(right), done=not self.left)

    @property
    def state(self):
        return State()


if __name__ == "__main__":
    uvicorn.run(create_app(Letters, Say, Seen, max_concurrent_envs=64), port=int(sys.argv[1]), log_level="error")
'''

COUNTER = '''
from typing import Literal


class Counter:
    """A class as TRL's `environment_factory` takes it."""

    def __init__(self):
        self.total = None

    def reset(self, goal: str = "5", **kwargs) -> str | None:
        self.total, self.goal = 0, int(goal)
        return f" Reach {goal}."

    def add(self, number: int, sign: Literal["plus", "minus"] = "plus") -> str:
        """
        Add to the total.

        Args:
            number: How much to add.
            sign: Whether to add or to subtract.

        Returns:
            The new total.
        """
        self.total += number if sign == "plus" else -number
        return f"The total is {self.total}."

    async def guess(self, numbers: list[int]) -> str:
        """
        Compare numbers with the goal.

        Args:
            numbers: What to compare.

        Returns:
            The answer.
        """
        return " ".join("right" if number == self.goal else "wrong" for number in numbers)

    def _hidden(self):
        return 3

    def get_reward(self) -> float:
        return 1.0 if self.total == self.goal else 0.25 * (self.total > 0)
'''


@pytest.fixture
def pool_of() -> Iterator[Any]:
    pools = []

    def make(name: str | None, **settings: Any) -> EnvironmentPool:
        # The interpreter with the libraries is another one to the pool, without this one's variables.
        pools.append(EnvironmentPool(EnvironmentConfig(class_=name, python=sys.executable, **settings)))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def say(pool: EnvironmentPool, place: Any, text: str) -> dict[str, Any]:
    return pool.step(place, {"role": "assistant", "content": text}, 30).result()


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Any]:
    """Start a program that listens at a port, and return the port."""
    running = []

    def start(code: str) -> int:
        port = free_port()
        (tmp_path / "server.py").write_text(code)
        running.append(subprocess.Popen([sys.executable, tmp_path / "server.py", str(port)], stdout=subprocess.DEVNULL))
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
            except OSError:
                time.sleep(0.1)
            else:
                return port
        raise AssertionError("the server does not listen")

    yield start
    for process in running:
        process.kill()
        process.wait()


def test_frozen_lake_is_walked_as_gymnasium_has_it(pool_of):
    pool = pool_of("gymnasium:FrozenLake-v1", options={"is_slippery": False})
    assert pool.start() == [] and pool.is_replayable
    place, first = pool.reset({"prompt": "Walk."}, 3).result()
    assert first == user("Walk.\n\n[S]FFF\nFHFH\nFFFH\nHFFG")
    walked = [say(pool, place, text) for text in ("I go down: 1", "no idea", "1", "2", "2", "1", "2")]
    assert [step["state"] for step in walked] == ["4", "4", "8", "9", "10", "14", "15"]
    assert [step["reward"] for step in walked] == [0, 0, 0, 0, 0, 0, 1] and [step["done"] for step in walked][-2:] == [
        False,
        True,
    ]
    assert walked[0]["messages"] == "(Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"
    assert walked[1]["messages"] == "That is no action. An action is an integer from 0 to 3."


def test_a_seed_gives_gymnasium_s_own_trajectory_in_any_company(pool_of):
    import gymnasium

    pool = pool_of("gymnasium:FrozenLake-v1")
    pool.start()
    seeds = [0, 1, 0, 2, 1]
    places = [future.result()[0] for future in [pool.reset({"prompt": ""}, seed) for seed in seeds]]
    states: list[list[str]] = [[] for _ in seeds]
    for action in (1, 2, 2, 1):
        for place, seen in zip(places, states, strict=True):
            seen.append(say(pool, place, str(action))["state"])
    for seed, seen in zip(seeds, states, strict=True):
        game = gymnasium.make("FrozenLake-v1")
        game.reset(seed=seed)
        assert seen == [str(game.step(action)[0]) for action in (1, 2, 2, 1)]


def test_actions_of_other_spaces_are_json(pool_of):
    pool = pool_of("gymnasium:Pendulum-v1")
    pool.start()
    place, _ = pool.reset({"prompt": ""}, 0).result()
    step = say(pool, place, "[0.5]")
    assert step["reward"] < 0 and len(json.loads(step["messages"])) == 3
    assert "An action is JSON for Box" in say(pool, place, "[7.5]")["messages"]


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        (
            "gymnasium:NoLake-v1",
            {},
            "environment.class: gymnasium cannot make NoLake-v1 with environment.options {}: NameNotFound",
        ),
        ("gymnasium:FrozenLake-v1", {"slippery": False}, "unexpected keyword argument 'slippery'"),
        ("textarena:NoGame-v0", {}, "environment.class: textarena cannot make a game NoGame-v0 for one player"),
        ("textarena:TicTacToe-v0", {}, "textarena cannot make a game TicTacToe-v0 for one player"),
        ("skyrl_gym:nothing", {}, "environment.class: skyrl_gym has no environment nothing"),
        ("skyrl_gym:no_module:Env", {}, "No module named 'no_module'"),
    ],
)
def test_what_a_library_does_not_have_is_refused_in_its_words(pool_of, name, options, sentence):
    with pytest.raises(UserError) as error:
        pool_of(name, options=options).start()
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_a_game_of_textarena_is_played_to_its_reward(pool_of):
    pool = pool_of("textarena:GuessTheNumber-v0")
    pool.start()
    place, first = pool.reset({"prompt": ""}, 5).result()
    assert first[0]["content"].startswith("You are Player 0. You are playing Guess The Number.")
    low, high, texts = 1, 20, []
    for _ in range(6):
        step = say(pool, place, f"I guess [{(low + high) // 2}]")
        if step["done"]:
            break
        texts.append(step["messages"])
        low, high = ((low + high) // 2 + 1, high) if "higher" in step["messages"] else (low, (low + high) // 2 - 1)
    assert step["reward"] == 1.0
    # What the model said, and earlier answers, are not in what it reads.
    assert set(texts) <= {"The target number is higher.", "The target number is lower."} and texts


def test_games_that_share_a_random_state_do_not_share_a_process(pool_of):
    """2048 draws a tile from the process's random state at each move."""
    pool = pool_of("textarena:2048-v0")
    pool.start()
    assert pool.capacity == EnvironmentConfig.max_processes
    alone, _ = pool.reset({"prompt": ""}, 4).result()
    moves = ["[left]", "[up]", "[left]", "[down]", "[right]", "[up]"]
    played = [say(pool, alone, move)["messages"] for move in moves]
    pair = [future.result()[0] for future in [pool.reset({"prompt": ""}, seed) for seed in (4, 9)]]
    boards = [[say(pool, place, move)["messages"] for place in pair] for move in moves]
    assert [board for board, _ in boards] == played
    assert [board for _, board in boards] != played


@pytest.fixture
def counter(tmp_path: Path) -> Path:
    (tmp_path / "counter.py").write_text(COUNTER)
    return tmp_path / "counter.py"


def test_a_class_for_trl_has_its_tools_its_reward_and_its_prompt(pool_of, counter):
    pool = pool_of(f"trl:{counter}:Counter")
    schemas = pool.start()
    assert pool.has_score and not pool.is_replayable
    task = {"prompt": [{"role": "system", "content": "Count."}, {"role": "user", "content": "Go."}], "goal": "5"}
    (place, first), (other, _) = (pool.reset(task, 0).result() for _ in range(2))
    assert first == [{"role": "system", "content": "Count."}, {"role": "user", "content": "Go. Reach 5."}]
    answers = pool.call(place, [("add", {"number": 7}), ("guess", {"numbers": [5, 6]})], 10).result()
    assert [answer.text for answer in answers] == ["The total is 7.", "right wrong"]
    # A trajectory that is cut off has its reward too, from its own object.
    assert pool.score(place).result() == 0.25 and pool.score(other).result() == 0.0
    assert pool.call(place, [("add", {"number": 2, "sign": "minus"})], 10).result()[0].text == "The total is 5."
    assert say(pool, place, "It is done.") == {"messages": [], "reward": 1.0, "done": True, "state": None}
    assert [schema["function"]["name"] for schema in schemas] == ["add", "guess"]


def test_the_tools_of_a_class_for_trl_are_those_that_trl_shows_a_model(pool_of, counter):
    from transformers.utils import get_json_schema
    from trl.trainer import grpo_trainer

    assert "inspect.getmembers(type(instance), predicate=inspect.isfunction)" in inspect.getsource(grpo_trainer)
    spec = spec_from_file_location("counter", counter)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    made = module.Counter()
    theirs = [get_json_schema(getattr(made, name)) for name in ("add", "guess")]
    for schema in theirs:
        schema["function"].pop("return")
    assert pool_of(f"trl:{counter}:Counter").start() == theirs


def test_an_environment_of_skyrl_gym_gives_its_own_rewards(pool_of):
    import skyrl_gym

    pool = pool_of("skyrl_gym:gsm8k_multi_turn", max_turns=3)
    pool.start()
    task = {"prompt": "What is 2 + 2?", "ground_truth": "4", "data_source": "gsm8k", "extra_info": {}}
    library_environment = skyrl_gym.make(
        "gsm8k_multi_turn", extras={"reward_spec": {"ground_truth": "4"}, "max_turns": 3, "extra_info": {}}
    )
    place, first = pool.reset(task, 0).result()
    assert first == library_environment.init(user("What is 2 + 2?"))[0] == user("What is 2 + 2?")
    for text in ("I think so.", "#### 5", "#### 4"):
        mine, theirs = say(pool, place, text), library_environment.step(text)
        assert (mine["messages"], mine["reward"], mine["done"]) == (theirs["observations"], theirs["reward"], theirs["done"])
    assert mine["done"] and mine["reward"] == 1.0


def test_a_class_of_skyrl_gym_needs_no_registration(pool_of):
    pool = pool_of("skyrl_gym:skyrl_gym.envs.gsm8k.env:GSM8kEnv")
    pool.start()
    task = {"prompt": "2 + 2?", "ground_truth": "4", "extra_info": {}}
    place, _ = pool.reset(task, 0).result()
    assert say(pool, place, "#### 4") == {"messages": [], "reward": 1.0, "done": True, "state": None}


@pytest.mark.parametrize("transport", ["stdio", "http"])
def test_tools_of_an_mcp_server_have_a_session_a_trajectory(pool_of, served, tmp_path, transport):
    if transport == "http":
        tool = f"mcp+http://127.0.0.1:{served(SERVER)}/mcp"
    else:
        (tmp_path / "server.py").write_text(SERVER)
        tool = f"mcp:{sys.executable} {tmp_path}/server.py"
    pool = pool_of(None, tools=[tool], step_seconds=20)
    schemas = {schema["function"]["name"]: schema["function"] for schema in pool.start()}
    assert list(schemas) == ["add", "session", "fail", "slow"]
    assert schemas["add"]["description"] == "Add to the total of this server."
    assert schemas["add"]["parameters"]["properties"]["number"]["type"] == "integer"
    assert schemas["add"]["parameters"]["required"] == ["number"]
    assert not pool.is_replayable
    one, two = (pool.reset({}, 0).result()[0] for _ in range(2))
    assert pool.state(one).result() is None
    calls = [("session", {}), ("fail", {"reason": "first\nsecond"}), ("session", {})]
    same, failed, again = pool.call(one, calls, 30).result()
    assert same.text == again.text and not same.is_error
    assert failed.is_error and not failed.is_late and "fail" in failed.text
    (other,) = pool.call(two, calls[:1], 30).result()
    assert other.text != same.text
    # A program of its own keeps what it holds to its trajectory; at one address the server is the same.
    totals = [pool.call(place, [("add", {"number": 2})], 30).result()[0].text for place in (one, two)]
    assert totals == (["total 2", "total 4"] if transport == "http" else ["total 2", "total 2"])
    (late,) = pool.call(one, [("slow", {"seconds": 60})], 1).result()
    assert late.is_error and late.is_late and late.text == "call took longer than 1 s"


def test_the_program_of_an_mcp_server_ends_with_its_trajectory(pool_of, tmp_path):
    (tmp_path / "server.py").write_text(SERVER)
    pool = pool_of(None, tools=[f"mcp:{sys.executable} {tmp_path}/server.py"])
    pool.start()

    def running() -> int:
        listed = subprocess.run(["pgrep", "-f", f"{tmp_path}/server.py"], stdout=subprocess.PIPE, text=True).stdout
        return len(listed.split())

    place, _ = pool.reset({}, 0).result()
    assert running() == 0
    pool.call(place, [("add", {"number": 1})], 30).result()
    assert running() == 1
    pool.leave(place)
    end = time.monotonic() + 20
    while running() and time.monotonic() < end:
        time.sleep(0.05)
    assert running() == 0


def test_an_mcp_server_that_dies_is_an_error_that_the_model_reads(pool_of, tmp_path):
    (tmp_path / "server.py").write_text(SERVER.replace("raise ValueError(reason)", "os._exit(3)"))
    pool = pool_of(None, tools=[f"mcp:{sys.executable} {tmp_path}/server.py"])
    pool.start()
    place, _ = pool.reset({}, 0).result()
    dead, after = (
        pool.call(place, [(name, given)], 30).result()[0] for name, given in (("fail", {"reason": ""}), ("session", {}))
    )
    assert dead.is_error and dead.text.startswith("the server ended with exit code 3")
    assert after.is_error and after.text == "the server has ended"


def test_an_environment_on_an_openenv_server_is_played(pool_of, served):
    port = served(LETTERS)
    pool = pool_of(f"openenv:http://127.0.0.1:{port}", options={"times": 2})
    pool.start()
    (one, first), (two, other) = (pool.reset({"prompt": "Spell."}, seed).result() for seed in (0, 1))
    assert (first, other) == (user("Spell.\n\nsay abab"), user("Spell.\n\nsay cdcd"))
    assert say(pool, one, "a") == {"messages": "left bab", "reward": 1.0, "done": False, "state": "left bab"}
    assert say(pool, two, "x")["reward"] == 0.0
    assert len(say(pool, one, "long")["messages"]) > 70000
    with pytest.raises(EnvironmentFailure, match="no such letter"):
        say(pool, two, "raise")
    assert [say(pool, one, letter)["done"] for letter in "ab"] == [False, True]


def test_a_file_of_functions_for_verl_has_the_tools_that_verl_reads_from_it(pool_of, tmp_path, monkeypatch):
    # Importing verl as a whole imports Ray; its files for tools need transformers and pydantic alone.
    package = ModuleType("verl")
    package.__path__ = list(find_spec("verl").submodule_search_locations)
    monkeypatch.setitem(sys.modules, "verl", package)
    (tmp_path / "functions.py").write_text(VERL_FUNCTIONS)
    from verl.tools.function_tool import load_function_tools_from_path

    theirs = {tool.name: tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True)
              for tool in load_function_tools_from_path(str(tmp_path / "functions.py"))}  # fmt: skip
    for schema in theirs.values():
        schema["function"].pop("return", None)
    ours = pool_of(None, tools=[f"verl:{tmp_path}/functions.py"]).start()
    # verl's model of a schema has no field for what a list holds, and leaves it out.
    assert ours[1]["function"]["parameters"]["properties"]["pages"].pop("items") == {"type": "integer"}
    assert {schema["function"]["name"]: schema for schema in ours} == theirs and len(ours) == 3


@pytest.fixture(scope="module")
def model_files(tmp_path_factory, models) -> tuple[str, str]:
    """(model, tokenizer)."""
    root = tmp_path_factory.mktemp("libraries")
    return str(models("qwen3")), str(make_tokenizer(root / "tokenizer"))


@pytest.mark.parametrize("name", ["gymnasium:FrozenLake-v1", "textarena:GuessTheNumber-v0", "trl:$:Counter",
                                  "skyrl_gym:gsm8k_multi_turn", "openenv:http://127.0.0.1:$"])  # fmt: skip
def test_what_is_trained_is_what_the_engine_read_and_sampled(cluster, model_files, served, counter, name):
    if name.startswith("openenv"):
        name = name.replace("$", str(served(LETTERS)))
    kind, _, options = name.replace("$", str(counter)).rpartition(":")
    sampling = replace(conversations.SAMPLING, stop=tuple("abcdefgh0123456789"))
    ((groups, seen, _),) = cluster.run(conversations.sample, "megatron:d1", (*model_files, kind), options, sampling, 2000)
    seen, rows = {tuple(request.prompt_ids + completion.token_ids): (request, completion) for request, completion in seen}, 0
    for group in groups:
        for one in group.samples:
            context, mask = group.context_of(one), [False] * len(one.token_ids)
            for turn in one.turns:
                request, completion = seen.pop(tuple(context + one.token_ids[: turn.end]))
                assert request.prompt_ids == context + one.token_ids[: turn.begin]
                assert completion.token_ids == one.token_ids[turn.begin : turn.end]
                assert completion.logprobs == one.logprobs[turn.begin : turn.end]
                mask[turn.begin : turn.end] = [True] * (turn.end - turn.begin)
            assert (one.loss_mask or [True] * len(one.token_ids)) == mask
            rows += len(one.turns)
    assert not seen
    assert rows > len(groups) * 3 or kind.startswith("trl")


def test_a_run_walks_the_lake_of_gymnasium_with_a_tool_of_an_mcp_server(tmp_path):
    subprocess.run([sys.executable, EXAMPLES / "frozenlake/rows.py", tmp_path / "data"], check=True)
    (tmp_path / "server.py").write_text(SERVER)
    for command in (
        ["train-tokenizer", "bpe", "--vocab", 300, "--data", tmp_path / "data/train.jsonl", "--out", tmp_path / "tokenizer"],
        [
            "init-model",
            "qwen3",
            "--tokenizer",
            tmp_path / "tokenizer",
            "--hidden",
            32,
            "--layers",
            1,
            "--ffn",
            64,
            "--out",
            tmp_path / "model",
        ],
    ):
        done = fivefold(*command)
        assert done.returncode == 0, done.stderr
    (tmp_path / "run.yaml").write_text(json.dumps({
        "model": {"path": f"{tmp_path}/model"}, "policy": {"dtype": "float32", "optimizer": {"lr": 1e-3}},
        "algorithm": {"name": "grpo", "group_size": 2},
        "data": {"train": [f"{tmp_path}/data/train.jsonl"], "prompts_per_step": 2, "max_prompt_tokens": 8, "max_response_tokens": 4,
                 "max_total_tokens": 400, "chat_template": "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
                 "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>{% endfor %}{% if m.role == "
                 "'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"},
        "environment": {"class": "gymnasium:FrozenLake-v1", "options": {"is_slippery": False}, "python": sys.executable, "max_turns": 3,
                        "tools": [f"mcp:{sys.executable} {tmp_path}/server.py"]},
        "engine": {"sampling": {"stop": ["0", "1", "2", "3"]}},
        "trainer": {"steps": 2, "run_dir": f"{tmp_path}/runs/lake"},
    }))  # fmt: skip
    done = fivefold("train", tmp_path / "run.yaml", f"launch.threads={THREADS}")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = metrics(tmp_path, "lake")
    assert len([row for row in rows if "reward/mean" in row]) == 2
    assert all(row.get("environment/failed", 0) == 0 for row in rows)
