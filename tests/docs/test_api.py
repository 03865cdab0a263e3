"""What a program imports exists, is explained, and costs no torch before it is needed."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

import fivefold
from tests.support.commands import python
from tests.support.whole_runs import make_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", fivefold.__all__)
def test_every_name_is_there_with_a_docstring(name):
    exported = getattr(fivefold, name)
    assert inspect.getdoc(exported) and exported.__module__.startswith("fivefold.")
    assert f"\n## `{name}`\n" in (ROOT / "docs/api.md").read_text()


def test_what_pages_import_from_the_package_is_public():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.S):
            for line in re.findall(r"^from fivefold import .*$", block, re.M):
                [node] = ast.parse(line).body
                assert {alias.name for alias in node.names} <= set(fivefold.__all__), (page, line)


def test_a_configuration_is_checked_without_torch():
    text = "import sys, fivefold; fivefold.check(fivefold.RunConfig.of(model={'path': 'm'})); print('torch' in sys.modules)"
    done = python("-c", text, env={"PYTHONPATH": str(ROOT / "src")})
    assert done.stdout == "False\n", done.stderr


@pytest.mark.slow
def test_the_example_of_the_page_trains(tmp_path):
    """As it stands there, next to a run.yaml."""
    [example, *_] = re.findall(r"```python\n(.*?)```", (ROOT / "docs/api.md").read_text(), re.S)
    make_model(tmp_path)
    (tmp_path / "example.py").write_text(example)
    (tmp_path / "run.yaml").write_text(
        """
model: {path: model}
policy: {dtype: float32}
algorithm: {group_size: 2}
data: {train: [data/train.parquet], prompts_per_step: 2, max_prompt_tokens: 16, max_response_tokens: 4}
reward: {functions: {"example.py:concise": 1.0}}
trainer: {run_dir: run, device: cpu}
launch: {threads: 1}
"""
    )
    done = python("example.py", env={"PYTHONPATH": str(ROOT / "src")}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 10
    assert (tmp_path / "run/checkpoints/latest").read_text() == "step-000010"


@pytest.mark.parametrize("name", [name for name in fivefold.__all__ if inspect.isfunction(getattr(fivefold, name))])
def test_public_functions_have_types_and_an_example(name):
    function = getattr(fivefold, name)
    signature = inspect.signature(function)
    assert signature.return_annotation is not signature.empty
    assert all(parameter.annotation is not parameter.empty for parameter in signature.parameters.values())
    assert "\nExample: `" in inspect.getdoc(function)
