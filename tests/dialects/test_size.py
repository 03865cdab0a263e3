"""The dialects' source stays small: what is new is a row of a table before it is a function."""

from __future__ import annotations

import ast
from pathlib import Path

import fivefold_dialects

HERE = Path(fivefold_dialects.__file__).parent
LIMIT, LIMIT_OF_TRL = 6_550, 600
LONGEST = 60
"""Most lines of a function."""


def lines(paths: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def test_the_python_of_the_dialects_without_older_releases_stays_below_its_limit():
    today = [path for path in HERE.rglob("*.py") if "legacy" not in path.parts]
    of_trl = [path for path in today if path.name.startswith("trl")]
    assert len(of_trl) > 1
    assert lines(of_trl) <= LIMIT_OF_TRL
    assert lines(today) - lines(of_trl) <= LIMIT


def test_the_architecture_page_names_both_limits():
    page = (HERE.parents[1] / "docs/architecture.md").read_text()
    sentence = page.partition("The Python without `legacy/`")[2].partition("test_size.py")[0]
    assert f"at most {LIMIT:,} lines" in sentence and f"not counted among them, {LIMIT_OF_TRL} " in sentence


def test_no_function_of_the_dialects_is_long():
    lengths = {
        f"{path.name}: {node.name}": node.end_lineno - node.lineno + 1
        for path in HERE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None
    }
    assert {name: count for name, count in lengths.items() if count > LONGEST} == {}


def test_only_older_releases_read_the_forks_of_rllm_and_rollpacker():
    today = list(HERE.glob("*.py"))
    named = [path.name for path in today if any(word in path.read_text().lower() for word in ("rllm", "rollpacker"))]
    assert named == []
