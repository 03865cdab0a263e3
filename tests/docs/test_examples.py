from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from docs.examples import EXAMPLES, GPU, OTHERS, RECIPES, with_stand_ins
from fivefold.config import RunConfig
from fivefold.data.tokenizer import train_tokenizer
from fivefold.models.families import load_spec
from fivefold.plan.check import check
from fivefold.plan.roles import memory_of
from tests.support.public_shapes import write_headers, write_shape

ROOT = EXAMPLES.parent
RUNS = sorted(path for path in ROOT.glob("examples/**/*.yaml") if path.parent.name != "kubernetes")


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_every_example_is_a_valid_configuration(path):
    RunConfig.from_yaml(path)


def test_the_readme_s_configuration_is_valid(tmp_path):
    block = (ROOT / "README.md").read_text().split("```yaml\n")[1].split("```")[0]
    (tmp_path / "run.yaml").write_text(block)
    config = RunConfig.from_yaml(tmp_path / "run.yaml")
    assert (config.layout.dp, config.layout.tp, config.samples_per_step) == (2, 4, 1024)


def test_the_readme_s_estimate_of_its_example_is_the_one_of_check(models):
    page = " ".join((ROOT / "README.md").read_text().split())
    training, sampling = re.findall(r"estimates (\S+) GiB for training and (\S+) GiB for sampling", page)[0]
    config = with_stand_ins("qwen3-0.6b-gsm8k.yaml", models)
    memory = memory_of(config, load_spec(config.model.path))
    totals = {name: sum(parts.values()) / 2**30 for name, parts in memory.phases.items()}
    assert (training, sampling) == (f"{totals['training']:.1f}", f"{totals['sampling']:.1f}")
    # The page about memory shows the table.
    assert {*memory.table()} <= {line[13:] for line in (ROOT / "docs/memory.md").read_text().splitlines()}
    [change] = re.findall(r"`(policy.tokens_per_micro_batch=\d+)` fits 24 GB", page)
    notes = check(with_stand_ins("qwen3-0.6b-gsm8k.yaml", models, change, "launch.gpu=rtx4090-24g")).notes
    assert any(note.startswith("it fits rtx4090-24g") for note in notes)
    assert not any(note.startswith("memory is tight") for note in notes)


def test_the_siirl_page_s_arithmetic_comes_out():
    config = RunConfig.from_yaml(ROOT / "examples/qwen3-8b-grpo-megatron.yaml")
    assert config.layout.world_size == 8
    assert config.samples_per_step == 1024
    assert config.samples_per_step // config.algorithm.updates_per_step == 128


NOT_HERE = ("needs ray, not installed", "is not installed; `pip install")
"""What a machine for tests lacks: Ray and the engines."""


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Callable[[str], Path]:
    """Directories that stand for published models: their sizes, the headers of their weights, a small tokenizer."""
    root = tmp_path_factory.mktemp("models")

    def write(model: str) -> Path:
        directory = root / model
        if not directory.is_dir():
            write_shape(directory, directory.name, eos_token_id=1, bos_token_id=1)
            write_headers(directory)
            train_tokenizer("char", ["1+=user asnt"], directory)
        return directory

    return write


def rows() -> list[dict[str, Any]]:
    """Rows that every method reads: a prompt with its ground truth, a response, a pair."""
    row = {"prompt": "1+1=", "data_source": "openai/gsm8k", "reward_model": {"ground_truth": "11"}}
    return [row | {"response": "11", "chosen": "11", "rejected": "1"}] * 2000


@pytest.mark.parametrize("name", RECIPES)
def test_check_accepts_every_recipe_and_estimates_what_its_row_says(tmp_path, monkeypatch, models, name):
    monkeypatch.chdir(ROOT)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows())))
    files = [f"data.{kind}=[{tmp_path}/rows.jsonl]" for kind in ("train", "val")]
    findings = check(with_stand_ins(name, models, *files, f"trainer.run_dir={tmp_path}/run"))
    assert [error for error in findings.errors if not any(part in error for part in NOT_HERE)] == []
    assert findings.ignored == []
    [(held, room)] = re.findall(rf"it fits {GPU}: about ([\d.]+) of ([\d.]+) GiB", "\n".join(findings.notes))
    [row] = [line for line in (EXAMPLES / "README.md").read_text().splitlines() if f"({name})" in line]
    assert f"| {held} |" in row and float(held) < float(room)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_that_samples_does_so_with_vllm(name):
    config = RunConfig.from_yaml(EXAMPLES / name)
    assert not config.may_generate or config.engine.kind == "vllm"


def test_every_example_has_a_row():
    files = {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.*") if path.suffix != ".pyc" and path.is_file()}
    parts = {"own_reward.py", "verl/run_qwen3_8b.sh", "gsm8k_tiny.yaml", "ray/sums.yaml", "README.md"}
    parts |= {f"demo/{name}" for name in ("sft.yaml", "grpo.yaml", "sums.py")}
    parts |= {f"smollm2/{name}" for name in ("get_model.py", "words.py", "gsm8k.py")}
    parts |= {f"guessing/{name}" for name in ("envs.py", "grpo.yaml", "rows.py")}
    parts |= {f"frozenlake/{name}" for name in ("envs.py", "grpo.yaml", "rows.py")}
    parts |= {"agent/agent.py", "agent/grpo.yaml"}
    parts |= {f"calculator/{name}" for name in ("tools.py", "sft.yaml", "grpo.yaml", "rows.py")}
    assert files - parts == {*RECIPES, *OTHERS}
