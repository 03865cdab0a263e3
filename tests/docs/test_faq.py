"""The answers of docs/faq.md are what the commands that it prints answer."""

from __future__ import annotations

import json
import random
import re

import pytest

from docs.faq import GPUS, MODELS, WAYS
from docs.generate import DOCS
from fivefold.cli import main
from tests.support.public_shapes import write_shape

PAGE = (DOCS / "faq.md").read_text()


def cells() -> dict[tuple[str, str, str], tuple[int, str, int]]:
    """(model, what learns, GPU) -> number of GPUs, layout, seconds."""
    runs = {}
    for line in re.findall(r"^\| (Qwen.*) \|$", PAGE, re.M):
        model, way, *shown = line.split(" | ")
        for gpu, cell in zip(GPUS, shown, strict=True):
            number, layout, seconds = re.fullmatch(r"(\d+): (\w+), (\d+) s", cell).groups()
            runs[model, way, gpu] = int(number), layout, int(seconds)
    return runs


def plan(capsys, *arguments: object) -> tuple[int, str]:
    code = main(["plan", *map(str, arguments)])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


LARGEST = [("Qwen3-30B-A3B", way, "h100-80g") for way in WAYS]
PLANNED = sorted({*LARGEST, *random.Random(29).sample(sorted(cells()), 6)})
"""Cells that a test plans by the command; test_generated_pages.py computes all of them."""


@pytest.mark.parametrize(("model", "way", "gpu"), PLANNED, ids=str)
def test_the_plan_command_finds_the_run_of_a_cell_and_none_on_half_its_gpus(capsys, monkeypatch, tmp_path, model, way, gpu):
    monkeypatch.setattr("sys.argv", ["fivefold"])
    directory = write_shape(tmp_path / "m", model)
    number, layout, seconds = cells()[model, way, gpu]
    keys = [f"policy.lora.rank={WAYS[way]['lora']['rank']}"] if WAYS[way] else []
    words = ["--model", directory, "--gpu", gpu]
    code, printed = plan(capsys, *words, "--gpus", number, "--top", 1, "--json", *keys)
    assert code == 0, printed
    [run] = json.loads(printed)["runs"]
    assert (run["run"]["policy"]["backend"], round(run["seconds"])) == (f"megatron:{layout}", seconds)
    if number > 1:
        code, printed = plan(capsys, *words, "--gpus", number // 2, *keys)
        assert code != 0 and f"it fits {number} of them" in printed


def test_every_cell_has_a_number_and_larger_gpus_need_no_more_of_them():
    table = cells()
    assert len(table) == len(MODELS) * len(WAYS) * len(GPUS)
    for model in MODELS:
        for way in WAYS:
            numbers = [table[model, way, gpu][0] for gpu in GPUS]
            assert numbers == sorted(numbers, reverse=True)
        assert all(table[model, "LoRA, rank 32", gpu][0] <= table[model, "all weights", gpu][0] for gpu in GPUS)


def test_the_page_says_what_a_step_of_the_table_is():
    from fivefold.config import RunConfig
    from fivefold.plan.estimate import Lengths

    config = RunConfig.from_tree({"model": {"path": "m"}})
    lengths = Lengths.of(config.data)
    assert config.algorithm.name == "grpo" and lengths.prompt == lengths.response
    assert f"{config.samples_per_step} samples a step, prompts and responses of {lengths.response:.0f} tokens" in PAGE
