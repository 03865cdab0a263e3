"""Columns that add to a prompt: its query, its own system message, the functions of its chat template."""

from __future__ import annotations

import json

import pytest

from fivefold.config import RunConfig
from fivefold.data.light_tokenizer import LightTokenizer
from fivefold.data.prompts import Reading, load_prompts
from fivefold.data.rows import Columns
from fivefold.data.tokenizer import load_tokenizer, train_tokenizer
from fivefold.keys.findings import Findings
from fivefold.plan.data_files import check_data

TEMPLATE = (
    "{% if tools %}{% for t in tools %}<{{ t.name }}>{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    out = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer("char", ['0123456789+= abcdefghijklmnopqrstuvwxyz\n#<>;:{}[]"_'], out)
    return out


def written(tmp_path, *rows):
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prompts_of(directory, tmp_path, *rows, template=TEMPLATE, learns_from="responses", **columns):
    reading = Reading(64, columns=Columns(**columns), learns_from=learns_from, max_response_tokens=64, template=template)
    return load_prompts([written(tmp_path, *rows)], load_tokenizer(str(directory)), reading).prompts


def checked(directory, tmp_path, *rows, **data):
    """Errors of the check before a run."""
    files = {"train": [written(tmp_path, *rows)], "prompts_per_step": 1, **data}
    config = RunConfig.of({"model": {"path": "m"}, "algorithm": {"name": "sft"}, "data": files})
    findings = Findings()
    check_data(findings, config, LightTokenizer.load(directory), None)
    return [str(error) for error in findings.errors]


def test_a_query_follows_the_prompt_on_a_line_of_its_own(directory, tmp_path):
    rows = [{"ask": "add", "more": "1+1", "answer": "2"}, {"ask": "say 3", "more": None, "answer": "3"}]
    prompts = prompts_of(directory, tmp_path, *rows, prompt="ask", query="more", response="answer")
    assert [prompt.text for prompt in prompts] == ["u:add\n1+1;a:", "u:say 3;a:"]
    assert [prompt.messages[-1]["content"] for prompt in prompts] == ["add\n1+1", "say 3"]


def test_a_query_column_that_is_not_there_is_refused_before_the_run(directory, tmp_path):
    row = {"prompt": "add", "response": "2"}
    with pytest.raises(ValueError, match=r"no column 'more'; it has prompt, response; set data\.query_key"):
        prompts_of(directory, tmp_path, row, query="more")
    assert "set data.query_key" in checked(directory, tmp_path, row, query_key="more")[0]


def test_a_row_s_own_system_message_comes_before_that_of_the_configuration(directory, tmp_path):
    turns = [{"role": "system", "content": "mine"}, {"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    rows = [{"messages": turns, "rule": "not read"}, {"messages": turns[1:], "rule": "be brief"}, {"messages": turns[1:]}]
    reading = Reading(64, columns=Columns(system="rule"), learns_from="responses", max_response_tokens=64,
                      template=TEMPLATE, system_prompt="usual")  # fmt: skip
    prompts = load_prompts([written(tmp_path, *rows)], load_tokenizer(str(directory)), reading).prompts
    assert [prompt.text for prompt in prompts] == ["s:mine;u:1;a:", "s:be brief;u:1;a:", "s:usual;u:1;a:"]


def test_functions_of_a_row_reach_its_chat_template_in_training_and_in_the_check(directory, tmp_path):
    turns = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    rows = [{"messages": turns, "tools": tools} for tools in ([{"name": "f"}], '[{"name": "g"}]', "", None)]
    prompts = prompts_of(directory, tmp_path, *rows, tools="tools")
    assert [prompt.text for prompt in prompts] == ["<f>u:1;a:", "<g>u:1;a:", "u:1;a:", "u:1;a:"]
    assert checked(directory, tmp_path, *rows, tools_key="tools", chat_template=TEMPLATE) == []
    assert LightTokenizer.load(directory).with_template(TEMPLATE, "t").render(turns[:1], kwargs={"tools": rows[0]["tools"]})[
        :3
    ] == ("<f>")


@pytest.mark.parametrize(
    ("tools", "template", "says"),
    [
        ('{"name": "f"}', TEMPLATE, "must be a list of functions, or JSON of one"),
        ("[f", TEMPLATE, "must be a list of functions, or JSON of one"),
        ([{"name": "f"}], None, "are written by a chat template"),
    ],
)
def test_functions_that_would_be_lost_are_refused(directory, tmp_path, tools, template, says):
    row = {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}], "tools": tools}
    with pytest.raises(ValueError, match=says):
        prompts_of(directory, tmp_path, row, template=template, tools="tools")
    assert says in checked(directory, tmp_path, row, tools_key="tools", chat_template=template)[0]
