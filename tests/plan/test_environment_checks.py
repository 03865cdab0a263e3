"""What `check` says of the section `environment`: one sentence with the key, what must hold and the cure."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from fivefold.config import ConfigError, RunConfig, dump_yaml
from fivefold.plan.check import check
from tests.support.tiny_models import make_tokenizer

CODE = '''
class Game:
    async def reset(self, task, seed): ...
    async def step(self, message): ...

def add(a: int, b: int) -> int:
    """Add."""

def bare(a, b: int): ...

async def agent(task, base_url, api_key): ...

def two(task, base_url): ...
class Board:
    def reset(self, **row): ...
    def put(self, row, column: int) -> str: ...

class Counter:
    def reset(self, **row): ...
    def add(self, number: int) -> str: ...
    def get_reward(self): ...

number = 3

def raw(a: bytes) -> int: ...
def deep(a: "list[int | tuple[int]]") -> int: ...
def star(*numbers: int): ...
def rest(a: int, **more): ...
def unnamed(a: int, /): ...
Side = Literal["left", "right"]
def good(a: list[Side] | None, b: "dict[str, int]" = {}, c: Optional[str] = None) -> bytes: ...

class Half:
    def reset(self, task, seed): ...
    state = None

class Stated(Half):
    def step(self, message): ...
    def state(self): ...

class Derived(nosuchbase.Game): ...

renamed = Game
'''
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ {'name': c.function.name, "
    "'arguments': c.function.arguments} | tojson }}</tool_call>{% endfor %}<|end|>{% endfor %}"
)


@pytest.fixture(scope="module")
def root(tmp_path_factory, models) -> Path:
    root = tmp_path_factory.mktemp("environment")
    make_tokenizer(root / "tokenizer")
    (root / "model").symlink_to(models("qwen3"))
    (root / "envs.py").write_text(CODE)
    (root / "broken.py").write_text("def (:\nclass Game: ...\n")
    (root / "missing.py").write_text("import json, nosuchlib.part\n" + CODE)
    (root / "optional.py").write_text("import tools, pytest\ntry:\n    import nosuchlib\nexcept ImportError: ...\n" + CODE)
    (root / "tools.py").write_text('@function_tool("add")\ndef plus(a: int): ...\n\n@other\ndef minus(a): ...\n')
    (root / "tools.yaml").write_text("tools: [{class_name: a.B, tool_schema: {function: {name: add}}}]")
    (root / "rows.jsonl").write_text(json.dumps({"prompt": "a", "data_source": "s", "ground_truth": ""}) + "\n")
    return root


def tree(root: Path, **sections: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "model": {"path": f"{root}/model", "tokenizer": f"{root}/tokenizer"},
        "policy": {"dtype": "float32"},
        "data": {"train": [f"{root}/rows.jsonl"], "max_prompt_tokens": 16, "max_response_tokens": 16, "prompts_per_step": 1,
                 "chat_template": TEMPLATE, "ground_truth_key": "ground_truth"},
        "environment": {"class": f"{root}/envs.py:Game"},
        "trainer": {"steps": 1, "run_dir": f"{root}/run"},
    }  # fmt: skip
    return {name: usual.get(name, {}) | sections.get(name, {}) for name in (*usual, *sections)}


def errors_of(root: Path, **sections: Any) -> list[str]:
    try:
        return check(RunConfig.of(json.loads(json.dumps(tree(root, **sections)).replace("$", str(root))))).errors
    except ConfigError as error:
        return error.faults


def test_a_good_environment_is_taken(root):
    assert errors_of(root) == []
    assert errors_of(root, environment={"tools": ["$/envs.py:add", "$/envs.py:good"]}) == []
    for name in ("envs.py:renamed", "envs.py:Derived", "optional.py:Game"):
        assert errors_of(root, environment={"class": f"$/{name}"}) == []
    assert (
        errors_of(root, environment={"class": None, "tools": ["$/envs.py:add"]}, reward={"functions": {"format": 1.0}}) == []
    )


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"environment": {"class": "gymnasium:CartPole-v1"}}, "environment.class needs the package gymnasium, which"),
        ({"environment": {"class": "textarena:Wordle-v0"}}, "environment.class needs the package textarena, which"),
        ({"environment": {"class": "skyrl_gym:gsm8k"}}, "environment.class needs the package skyrl-gym, which"),
        ({"environment": {"class": "openenv:http://127.0.0.1:9"}}, "environment.class: the OpenEnv server at http://127.0.0.1:9 must"),
        ({"environment": {"class": "atari:Pong"}}, "environment.class must be path/to/file.py:Class or one of gymnasium:ID"),
        ({"environment": {"class": "trl:nowhere.py:Game"}}, "environment.class: no file at nowhere.py"),
        ({"environment": {"class": "trl:$/envs.py:Board"}}, "environment.class: the argument 'row' of put needs an annotation"),
        ({"environment": {"class": "trl:$/envs.py:Counter", "tools": ["$/envs.py:add"]}}, "one tool of each name: got add twice"),
        ({"environment": {"class": "nowhere.py:Game"}}, "environment.class: no file at nowhere.py"),
        ({"environment": {"class": "$/envs.py:Other"}}, "envs.py defines no class Other"),
        ({"environment": {"class": "$/envs.py:Half"}}, "environment.class: Half must have a method step"),
        ({"environment": {"class": "$/envs.py:Stated"}}, "environment.class: Stated must have both methods state and restore"),
        ({"environment": {"class": "$/broken.py:Game"}}, "broken.py is not valid Python: invalid syntax (broken.py, line 1)"),
        ({"environment": {"class": "$/missing.py:Game"}}, "missing.py imports nosuchlib, which "),
        ({"environment": {"tools": ["$/missing.py:add"]}}, "environment.tools: "),
        ({"environment": {"tools": ["$/broken.py:add"]}}, "environment.tools: "),
        ({"environment": {"tools": ["verl:$/broken.py"]}}, "broken.py is not valid Python"),
        ({"environment": {"class": None, "agent": "$/missing.py:agent"}}, "environment.agent: "),
        ({"environment": {"class": None, "agent": "$/broken.py:agent"}}, "environment.agent: "),
        ({"environment": {"tools": ["$/envs.py:raw"]}}, "the argument 'a' of raw must be str, int, float, bool, list, dict, Literal or None"),
        ({"environment": {"tools": ["$/envs.py:deep"]}}, "got 'list[int | tuple[int]]'"),
        ({"environment": {"tools": ["$/envs.py:star"]}}, "the tool star takes arguments by name: got *numbers; name each argument"),
        ({"environment": {"tools": ["$/envs.py:rest"]}}, "the tool rest takes arguments by name: got **more"),
        ({"environment": {"tools": ["$/envs.py:unnamed"]}}, "the tool unnamed takes arguments by name: got a, /"),
        ({"environment": {"class": None, "agent": "$/envs.py:agent"}, "algorithm": {"name": "gigpo"}},
         "algorithm.turn_coef must be 0 with environment.agent: gigpo compares turns"),
        ({"environment": {"class": None, "agent": "$/envs.py:agent", "endpoint": {"port": 65535}}, "data": {"prompts_per_step": 2},
          "policy": {"backend": "megatron:d2"}}, "environment.endpoint.port must be at most 65534: got 65535, and the 2 ranks"),
        ({"environment": {"tools": ["add"]}}, "environment.tools must be path/to/file.py:function, mcp:COMMAND, mcp+http://"),
        ({"environment": {"tools": ["mcp:no-such-server"]}}, "environment.tools: the MCP server mcp:no-such-server must answer: the "
         "server ended with exit code 127"),
        ({"environment": {"tools": ["mcp:sleep 100"], "reset_seconds": 1}}, "mcp:sleep 100 must answer: no answer within 1 s"),
        ({"environment": {"tools": ["mcp+http://127.0.0.1:9/mcp"]}}, "environment.tools: the MCP server mcp+http://127.0.0.1:9/mcp "
         "must answer: [Errno 111] Connection refused"),
        ({"environment": {"tools": ["verl:nowhere.py"]}}, "environment.tools must name a file for verl as verl:FILE.py or verl:FILE.yaml"),
        ({"environment": {"tools": ["verl:$/envs.py"]}}, "envs.py must have functions with the decorator function_tool"),
        ({"environment": {"tools": ["verl:$/tools.py", "$/envs.py:add"]}}, "one tool of each name: got add twice"),
        ({"environment": {"tools": ["verl:$/tools.yaml", "$/envs.py:add"]}}, "one tool of each name: got add twice"),
        ({"environment": {"tools": ["$/envs.py:sub"]}}, "defines no sub"),
        ({"environment": {"tools": ["$/envs.py:bare"]}}, "the argument 'a' of bare needs an annotation"),
        ({"environment": {"tools": ["$/envs.py:add", "$/envs.py:add"]}}, "must have one tool of each name: got add twice"),
        ({"environment": {"python": "no-such-python"}}, "environment.python must be a Python interpreter"),
        ({"environment": {"variables": ["NO_SUCH_VARIABLE"]}}, "environment.variables names variables that are set here"),
        ({"environment": {"max_turns": 0}}, "environment.max_turns must be in [1, 10000]: got 0"),
        ({"environment": {"agent": "$/envs.py:agent"}}, "environment.agent must be left out with environment.class"),
        ({"environment": {"class": None, "tools": ["$/envs.py:add"], "agent": "$/envs.py:agent"}}, "must be left out with environment.tools"),
        ({"environment": {"class": None, "agent": "nowhere.py:run"}}, "no file at nowhere.py"),
        ({"environment": {"class": None, "agent": "$/envs.py:other"}}, "defines no other"),
        ({"environment": {"class": None, "agent": "$/envs.py:two"}}, "is called with (task, base_url, api_key): "),
        ({"environment": {"class": None, "agent": "no-such-program --fast"}}, "or a command of this machine: got 'no-such-program"),
        ({"environment": {"class": None, "agent": "sh -c 'x"}}, "cannot be read: No closing quotation"),
        ({"environment": {"class": None, "agent": "sh", "endpoint": {"host": "no such host"}}}, "environment.endpoint.host must be an address"),
        ({"environment": {"class": None, "agent": "sh", "endpoint": {"port": 80}}}, "environment.endpoint.port must be in [1024, 65535]: got 80"),
        ({"data": {"apply_chat_template": False}}, "data.apply_chat_template must be true with environment"),
        ({"data": {"tools_key": "tools"}, "environment": {"tools": ["$/envs.py:add"]}}, "data.tools_key must be left out"),
        ({"data": {"max_total_tokens": 16}}, "data.max_total_tokens must be above data.max_response_tokens = 16"),
        ({"data": {"max_total_tokens": 9999}}, "data.max_total_tokens = 9999 is more than the"),
        ({"data": {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}}, "no token at which the engine stops"),
        ({"data": {"chat_template": "{% for m in messages %}{{ m.content }}<|end|>{{ loop.index }}{% endfor %}"}}, "depends on that turn or its"),
        ({"data": {"chat_template": TEMPLATE.replace("<tool_call>", "[").replace("</tool_call>", "]")},
          "environment": {"tools": ["$/envs.py:add"]}}, "no parser reads the tool calls that the template writes"),
        ({"data": {"chat_template": "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"},
          "environment": {"tools": ["$/envs.py:add"]}}, "the template leaves out tool calls"),
        ({"engine": {"backend": "vllm:d1t2"}, "policy": {"backend": "megatron:d2"}}, "engine.mode must be server with environment"),
        ({"environment": {"same_start": False}, "policy": {"share_prefix": True}}, "environment.same_start must be true"),
        (
            {"environment": {"history": "template"}, "algorithm": {"name": "prime"}},
            "algorithm.process_reward.coef must be 0 with environment.agent or environment.history: template",
        ),
        ({"environment": {"class": None}, "reward": {"functions": {"environment": 1.0}}}, "without environment.class or environment.agent"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_in_one_sentence(root, sections, sentence):
    faults = errors_of(root, **sections)
    assert any(sentence in fault for fault in faults), faults


def test_keys_without_a_class_or_tools_have_no_effect(root):
    findings = check(
        RunConfig.of(tree(root, environment={"class": None, "max_turns": 3}, reward={"functions": {"format": 1.0}}))
    )
    reason = "none of environment.class, environment.tools and environment.agent is set"
    assert ("environment.max_turns", reason) in findings.ignored


def agent_of(root: Path, **settings: Any) -> Any:
    return check(RunConfig.of(tree(root, environment={"class": None, "agent": f"{root}/envs.py:agent", **settings})))


def test_an_agent_is_taken_and_its_reward_counts(root):
    findings = agent_of(root, max_observation_tokens=64)
    assert findings.errors == [] and not [note for note in findings.notes if "endpoint" in note]
    assert ("environment.max_observation_tokens", "environment.agent decides what the model reads") in findings.ignored
    assert RunConfig.of(tree(root, environment={"class": None, "agent": "sh -c true"})).reward.functions == {
        "environment": 1.0
    }


def test_an_endpoint_that_others_reach_is_noted_and_a_port_in_use_is_refused(root):
    (note,) = [note for note in agent_of(root, endpoint={"host": "0.0.0.0"}).notes if "endpoint" in note]
    assert "0.0.0.0 is not a loopback address" in note
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (error,) = agent_of(root, endpoint={"port": port}).errors
        # A run for other machines may have the port there.
        there = agent_of(root, endpoint={"port": port, "host": "0.0.0.0"})
    sentence = "environment.endpoint.port: port {} of {} cannot be used: Address already in use; take another"
    assert sentence.format(port, "127.0.0.1") in error
    assert there.errors == [] and sentence.format(port, "0.0.0.0") in there.missing[0]
    ignored = dict(check(RunConfig.of(tree(root, environment={"endpoint": {"port": 2000}}))).ignored)
    assert ignored["environment.endpoint"] == "environment.agent is not set"


def test_keys_that_the_kind_of_a_class_takes_no_notice_of_are_said(root):
    findings = check(RunConfig.of(tree(root, environment={"class": f"{root}/envs.py:Game", "options": {"size": 4}})))
    assert [key for key, _ in findings.ignored] == ["environment.options"]
    for others in ({"tools": [f"{root}/envs.py:add"]}, {"agent": f"{root}/envs.py:agent"}):
        settings = {"class": None, "options": {"size": 4}, **others}
        functions = {"functions": {"format": 1.0}} if "tools" in others else {}
        findings = check(RunConfig.of(tree(root, environment=settings, reward=functions)))
        assert [key for key, _ in findings.ignored] == ["environment.options"]
    findings = check(RunConfig.of(tree(root, environment={"max_parallel_calls": 3})))
    assert [key for key, _ in findings.ignored] == ["environment.max_parallel_calls"]
    settings = {"class": f"trl:{root}/envs.py:Counter", "max_parallel_calls": 3}
    assert check(RunConfig.of(tree(root, environment=settings))).ignored == []
    findings = check(RunConfig.of(tree(root, environment={"class": "textarena:Wordle-v0", "per_worker": 8})))
    assert ("environment.per_worker", "an environment of textarena has a process of its own") in findings.ignored


def test_the_missing_library_is_that_of_the_named_interpreter(root):
    python = os.path.realpath(sys.executable)
    (fault,) = errors_of(root, environment={"class": "gymnasium:CartPole-v1", "python": python})
    assert f"which {python} cannot import (ModuleNotFoundError: No module named 'gymnasium'): install it there, or" in fault
    assert "\n" not in fault


def test_a_template_that_drops_earlier_thinking_is_noted_with_turn_and_role(root):
    drops = (
        "{% for m in messages %}{{ m.role }} {% if loop.last or m.role != 'assistant' %}{{ m.content }}{% else %}"
        "{{ m.content.split('</think>')[-1] }}{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
    )
    findings = check(RunConfig.of(tree(root, data={"chat_template": drops, "max_prompt_tokens": 64})))
    assert findings.errors == []
    notes = findings.notes
    (note,) = [note for note in notes if note.startswith("environment")]
    assert "from turn 2 on, the assistant's turn 1" in note


def test_a_template_that_renders_turns_again_is_noted_with_what_it_changes(root):
    text = (
        "{% for m in messages %}{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}<|end|>"
        "{% endfor %}"
    )
    for template, sentence in (
        (text, "from turn 2 on, the assistant's turn 1"),
        (TEMPLATE, "append would give the same contexts"),
    ):
        environment = {"class": f"{root}/envs.py:Game", "history": "template"}
        findings = check(RunConfig.of(tree(root, environment=environment, data={"chat_template": template})))
        (note,) = [note for note in findings.notes if note.startswith("environment")]
        assert findings.errors == [] and note.startswith("environment.history: template: ") and sentence in note


def test_rewards_of_the_class_count_unless_another_weight_is_given(root):
    assert RunConfig.of(tree(root)).reward.functions == {"environment": 1.0}
    both = RunConfig.of(
        tree(root, reward={"functions": {"environment": 0.5, "format": 1.0}, "by_source": {"s": {"think": 1.0}}})
    )
    assert both.reward.functions == {"environment": 0.5, "format": 1.0}
    assert both.reward.by_source == {"s": {"environment": 1.0, "think": 1.0}}
    assert RunConfig.of(tree(root, environment={"class": None})).reward.functions == {}


def test_a_configuration_with_a_class_is_read_back_as_it_was(root, tmp_path):
    config = RunConfig.of(tree(root))
    (tmp_path / "run.yaml").write_text(dump_yaml(config))
    assert f"class: {root}/envs.py:Game" in (tmp_path / "run.yaml").read_text()
    assert RunConfig.from_yaml(tmp_path / "run.yaml") == RunConfig.restore(tmp_path / "run.yaml") == config
