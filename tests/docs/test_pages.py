"""What pages print to be copied: YAML loads, commands parse, rows are read, the first run runs."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.generate import DOCS
from fivefold.cli import _parser
from fivefold.config import RunConfig
from fivefold.config.engine import IN_RANKS
from fivefold.config.loader import override
from fivefold.config.scoring import RewardConfig
from fivefold.data.prompts import Reading, load_prompts
from fivefold.data.rows import Columns, parse_row
from fivefold.data.tokenizer import load_tokenizer, make_model, train_tokenizer
from fivefold.layout import ParallelLayout
from fivefold.layout.parallel import ENGINES
from fivefold.plan.check import check
from fivefold.reward.choose import columns_read
from fivefold.reward.pool import RewardPool
from fivefold.types import Prompt, Sample
from tests.support.commands import fivefold
from tests.support.whole_runs import metrics

PAGES = [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("coming-from/*.md"))]
TASKS = ("data", "rewards", "multi-gpu", "memory", "lora", "engines", "async", "evaluation", "tracking", "resume", "export")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
COMMAND = re.compile(r"^ *(?:\$ )?(fivefold .*)$", re.M)


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(page.read_text()) if kind == language]


def commands(page: Path) -> list[list[str]]:
    """The words of each command of a page, without its comment and where its output goes."""
    lines = [line for line in page.read_text().splitlines() if re.match(r"(    |fivefold |    \$ )", line)]
    matches = COMMAND.findall("\n".join(lines))
    parts = [part.partition(" > ")[0] for line in matches for part in line.split(" && ")]
    return [shlex.split(part, comments=True) for part in parts if part.startswith("fivefold ")]


def whole(part: dict[str, Any]) -> dict[str, Any]:
    """What a page prints, in a run that has everything else: a model, data, and as many ranks as the engine."""
    tree = {"model": {"path": "m"}, "data": {"train": ["x.jsonl"]}}
    tree |= {key: tree.get(key, {}) | value for key, value in part.items()}
    engine = tree.get("engine", {})
    if ":" in engine.get("backend", "") and engine.get("placement") != "apart" and "policy" not in tree:
        tree["policy"] = {"backend": f"megatron:d{ParallelLayout.parse(engine['backend']).world_size}"}
    return tree


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem != "extending"], ids=lambda page: page.stem)
def test_every_yaml_block_is_a_part_of_a_configuration(page):
    for part in map(yaml.safe_load, blocks(page, "yaml")):
        # The rows of methods.md are a part of `algorithm`, and have a test of their own.
        if page.stem != "methods" or {"algorithm", "reward"} & set(part):
            RunConfig.of(whole(part))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_has_the_options_and_keys_that_it_prints(page):
    for words in commands(page):
        if {"--from", "...", "--version"} & set(words) or "clip_hihg" in words[-1]:
            continue
        options, rest = _parser().parse_known_args(words[1:])
        words_of_run = [*getattr(options, "overrides", []), *rest]
        if "=" in (getattr(options, "config", None) or ""):
            words_of_run.append(options.config)
        assert all("=" in word for word in words_of_run), words
        RunConfig.of(whole(override({}, words_of_run)))


@pytest.mark.parametrize("task", TASKS)
def test_the_page_of_a_task_begins_with_a_block_to_copy(task):
    lines = (DOCS / f"{task}.md").read_text().splitlines()[2:9]
    assert any(line.startswith(("```", "    ")) for line in lines), lines


def sections(page: Path) -> dict[str, list[tuple[str, str]]]:
    """Heading -> (language, text) of each block below it."""
    parts = re.split(r"^##+ (.*)$", page.read_text(), flags=re.M)
    return dict(zip(parts[1::2], map(BLOCK.findall, parts[2::2]), strict=True))


DATA_ROWS = {
    "RL with a ground truth": (2, ["42", "42"]),
    "RL without a ground truth": (1, [""]),
    "RL from several sources": (2, ["42", '{"inputs": [""], "outputs": ["42"]}']),
    "RL with further columns": (1, [""]),
    "Environments and tools": (2, ["", "42"]),
    "SFT": (4, []),
    "DPO": (2, []),
    "Chat template, system prompt, thinking models": (1, ["42"]),
}
"""Section of the page about data -> how many rows it prints, and the ground truths that rewards get."""
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
TURNS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ {'name': "
    "c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""A template with ends of turns and calls, as environments and tools need it."""


@pytest.fixture(scope="module")
def bytes_model(tmp_path_factory):
    """A tiny model whose tokenizer reads every text, with a chat template."""
    directory = tmp_path_factory.mktemp("bytes")
    train_tokenizer("bpe", ["a"], directory / "tokenizer")
    make_model("qwen3", str(directory / "tokenizer"), directory / "model", hidden=16, layers=1, heads=2, kv_heads=1, ffn=16,
               positions=1024, tied=True, seed=0)  # fmt: skip
    (directory / "model/chat_template.jinja").write_text(TEMPLATE)
    return directory / "model"


def test_every_row_of_the_data_page_has_a_test():
    assert [
        title
        for title, blocks_of_section in sections(DOCS / "data.md").items()
        if any(kind == "json" for kind, _ in blocks_of_section)
    ] == [*DATA_ROWS]


@pytest.mark.parametrize("title", DATA_ROWS)
def test_every_row_of_the_data_page_is_read_with_the_keys_next_to_it(tmp_path, monkeypatch, bytes_model, title):
    monkeypatch.chdir(tmp_path)
    [code] = [text for text in blocks(DOCS / "rewards.md", "python") if "def concise" in text]
    Path("rewards.py").write_text(code)
    for file, name in (("envs.py", "class Guess"), ("tools.py", "def multiply")):
        [code] = [text for text in blocks(DOCS / "environments.md", "python") if name in text]
        Path(file).write_text(code)
    blocks_of_section = sections(DOCS / "data.md")[title]
    count, truths = DATA_ROWS[title]
    prompts: list[Prompt] = []
    for (kind, text), (next_kind, following) in zip(blocks_of_section, [*blocks_of_section[1:], ("", "")], strict=True):
        if kind != "json":
            continue
        Path("rows.jsonl").write_text(text)
        tree = yaml.safe_load(following) if next_kind == "yaml" else {}
        tree = tree | {"model": {"path": str(bytes_model)}, "trainer": {"device": "cpu"}}
        tree["data"] = {**tree.get("data", {}), "train": ["rows.jsonl"], "prompts_per_step": 1}
        if "environment" in tree:
            tree["data"]["chat_template"] = TURNS
        config = RunConfig.of(tree)
        findings = check(config)
        assert findings.errors == [] and not any("do not ask" in note for note in findings.notes), findings
        assert not [key for key, _ in findings.ignored if not key.startswith("reward.by_source")]
        learns = config.algorithm.method.learns_from
        columns = replace(Columns.of(config.data), carried=columns_read(config.reward))
        reading = Reading(512, columns=columns, learns_from=learns, need_responses=learns != "rollouts", max_response_tokens=99,
                          template_kwargs=config.data.chat_template_kwargs, system_prompt=config.data.system_prompt)  # fmt: skip
        prompts += load_prompts(["rows.jsonl"], load_tokenizer(str(bytes_model)), reading).prompts
    assert len(prompts) == count
    if truths:
        assert [prompt.ground_truth for prompt in prompts] == truths
    else:
        assert all(prompt.responses for prompt in prompts)
    if "further" in title:
        assert prompts[0].columns == {"level": 1, "solution": ["2", "3", "5", "7"]} and prompts[0].is_chat
    if "system" in title:
        assert prompts[0].messages[0]["content"] == "Multiply, then answer in \\boxed{}."


def test_own_rewards_on_the_page_are_called_as_it_says(tmp_path):
    [code] = [text for text in blocks(DOCS / "rewards.md", "python") if "def concise" in text]
    (tmp_path / "rewards.py").write_text(code)
    pool = RewardPool(RewardConfig(functions={f"{tmp_path}/rewards.py:{name}": 1.0 for name in ("concise", "in_solutions")}))
    prompt = Prompt(0, [1], "s", "q", "", [{"role": "user", "content": "q"}], columns={"solution": ["2", "3"]}, is_chat=True)
    samples = [Sample([1], [0.0], text, "answered", 0) for text in ("3", "4")]
    assert pool.wait([pool.submit(prompt, sample) for sample in samples]) is None
    pool.close()
    assert [sample.reward for sample in samples] == [1.0 - 0.001, -0.001]


def test_the_columns_of_the_data_page_are_columns():
    [block] = [text for text in blocks(DOCS / "data.md", "yaml") if "query_key" in text]
    names = yaml.safe_load(block)["data"]
    tree = {"model": {"path": "m"}, "data": {"train": ["x.jsonl"], **names}}
    columns = Columns.of(RunConfig.of(tree).data)
    row = {
        "question": "q",
        "answer": "so\n#### 42",
        "tag": "t",
        "input": "more",
        "instructions": "be brief",
        "functions": [],
    }
    parsed = parse_row(row, columns, "rollouts", "train")
    assert (parsed.source, parsed.ground_truth) == ("t", "42")
    assert [message["content"] for message in parsed.messages] == ["be brief", "q\nmore"]


@pytest.mark.slow
def test_the_commands_of_the_first_run_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [block] = blocks(DOCS / "first-run.md", "sh")
    for line in block.splitlines():
        name, *words = shlex.split(line)
        done = fivefold(*words)
        assert name == "fivefold" and done.returncode == 0, done.stderr
    assert [row["step"] for row in metrics(tmp_path, "first")] == [0, 1, 2]
    assert (tmp_path / "runs/first/report.html").is_file()


TRL = DOCS / "coming-from" / "trl.md"


def test_the_page_of_trl_lacks_nothing_that_the_page_of_environments_offers():
    page = TRL.read_text()
    [missing] = re.findall(r"^What is missing here: (.*)$", page, re.M)
    for name, line in (("tools", "environment.tools"), ("environments", "environment.class: trl:FILE.py:CLASS")):
        assert f"`{line}`" in page.replace("\n", " ") and name not in missing
    assert "`trl:FILE.py:CLASS`" in (DOCS / "environments.md").read_text()


def test_the_comparison_names_every_engine_of_ours():
    [row] = re.findall(r"^\| engines \| (.*?) \|", (DOCS / "comparison.md").read_text(), re.M)
    assert {name for name in (*IN_RANKS, *ENGINES) if name not in row.lower()} == set()


def test_methods_that_stand_for_loss_types_of_trl_are_methods():
    part = TRL.read_text().partition("## GRPO")[2].partition("| key of TRL")[0]
    named = re.findall(r"`(\{name: .*?\})`", part)
    assert len(named) >= 7
    for text in named:
        RunConfig.of(whole({"algorithm": yaml.safe_load(text)}))
