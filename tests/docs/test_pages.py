"""What pages print to be copied: YAML loads, commands parse, rows are read, the first run runs."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.generate import DOCS
from fivefold.cli import _parser
from fivefold.config import RunConfig
from fivefold.config.loader import override
from fivefold.data.rows import Columns, check_responses, parse_row
from fivefold.layout import ParallelLayout
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
    found = COMMAND.findall("\n".join(lines))
    parts = [part.partition(" > ")[0] for line in found for part in line.split(" && ")]
    return [shlex.split(part, comments=True) for part in parts if part.startswith("fivefold ")]


def whole(own: dict[str, Any]) -> dict[str, Any]:
    """What a page prints, in a run that has everything else: a model, data, and as many ranks as the engine."""
    tree = {"model": {"path": "m"}, "data": {"train": ["x.jsonl"]}}
    tree |= {key: tree.get(key, {}) | value for key, value in own.items()}
    engine = tree.get("engine", {})
    if ":" in engine.get("backend", "") and engine.get("placement") != "apart" and "policy" not in tree:
        tree["policy"] = {"backend": f"megatron:d{ParallelLayout.parse(engine['backend']).world_size}"}
    return tree


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem != "extending"], ids=lambda page: page.stem)
def test_every_yaml_block_is_a_part_of_a_configuration(page):
    for own in map(yaml.safe_load, blocks(page, "yaml")):
        # The rows of methods.md are a part of `algorithm`, and have a test of their own.
        if page.stem != "methods" or {"algorithm", "reward"} & set(own):
            RunConfig.of(whole(own))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_has_the_options_and_keys_that_it_prints(page):
    for words in commands(page):
        if {"--from", "...", "--version"} & set(words) or "clip_hihg" in words[-1]:
            continue
        options, rest = _parser().parse_known_args(words[1:])
        given = [*getattr(options, "overrides", []), *rest]
        if "=" in (getattr(options, "config", None) or ""):
            given.append(options.config)
        assert all("=" in word for word in given), words
        RunConfig.of(whole(override({}, given)))


@pytest.mark.parametrize("task", TASKS)
def test_the_page_of_a_task_begins_with_a_block_to_copy(task):
    lines = (DOCS / f"{task}.md").read_text().splitlines()[2:9]
    assert any(line.startswith(("```", "    ")) for line in lines), lines


ROWS = {"RL": ("rollouts", 2), "SFT": ("responses", 3), "DPO": ("pairs", 2)}
"""What learns -> what a row must have, and how many rows the page prints."""


def test_every_row_of_the_data_page_is_read_as_the_page_says():
    rows = [json.loads(line) for block in blocks(DOCS / "data.md", "json") for line in block.splitlines()]
    kinds = [kind for kind, count in ROWS.values() for _ in range(count)]
    for row, learns_from in zip(rows, kinds, strict=True):
        found = parse_row(row, Columns(), learns_from, "train")
        check_responses(found, Columns(), learns_from, list(row))
        assert "6" in str(found.messages) or "prime" in str(found.messages)
    with_truth, without = (parse_row(row, Columns(), "rollouts", "train") for row in rows[:2])
    assert (with_truth.source, with_truth.ground_truth) == ("openai/gsm8k", "42")
    assert (without.source, without.ground_truth) == ("train", "")


def test_the_columns_of_the_data_page_are_columns():
    [block] = [text for text in blocks(DOCS / "data.md", "yaml") if "prompt_key" in text]
    names = yaml.safe_load(block)["data"]
    tree = {"model": {"path": "m"}, "data": {"train": ["x.jsonl"], **names}}
    columns = Columns.of(RunConfig.of(tree).data)
    row = {"question": "q", "answer": "so #### 42", "tag": "t", "input": "more", "instructions": "be brief", "functions": []}
    found = parse_row(row, columns, "rollouts", "train")
    assert (found.source, found.ground_truth) == ("t", "42")
    assert [message["content"] for message in found.messages] == ["be brief", "q\nmore"]


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


def test_methods_that_stand_for_loss_types_of_trl_are_methods():
    part = TRL.read_text().partition("## GRPO")[2].partition("| key of TRL")[0]
    named = re.findall(r"`(\{name: .*?\})`", part)
    assert len(named) >= 7
    for text in named:
        RunConfig.of(whole({"algorithm": yaml.safe_load(text)}))
