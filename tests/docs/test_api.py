"""What a program imports exists, is explained, and costs no torch before it is needed."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

import fivefold
from tests.support.commands import python

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", fivefold.__all__)
def test_every_name_is_there_with_a_docstring(name):
    found = getattr(fivefold, name)
    assert inspect.getdoc(found) and found.__module__.startswith("fivefold.")
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
