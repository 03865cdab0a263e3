"""docs/documents.md: every row has a mark, and evidence that is there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from docs.documents import IN_PART, REFUSED, ROOT, WORKS, Row, documents

ROWS = [row for _, rows in documents().values() for row in rows]
COUNTS = {"siirl": 37, "trinity": 23, "roll": 26, "areal": 18, "skyrl": 34}


@cache
def functions_of(file: str) -> set[str]:
    """Functions of a file that pytest collects."""
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def faults(row: Row) -> list[str]:
    """What a row lacks, one sentence each."""
    wrong = [test for test in row.tests if not (ROOT / test.partition("::")[0]).is_file()]
    wrong += [
        test
        for test in row.tests
        if test not in wrong and test.partition("::")[2] not in functions_of(test.partition("::")[0])
    ]
    problems = [f"{test} is no test" for test in wrong]
    for file, words in row.results:
        path = ROOT / file
        if not path.is_file() or words not in path.read_text():
            problems.append(f"{file} does not have the words {words}")
    if not row.evidence:
        problems.append("no evidence")
    if row.mark == WORKS and not row.results and all("_on_gpus.py" in test for test in row.tests):
        problems.append("tests on GPUs alone, without a result of them")
    if row.unproven and row.refused:
        problems.append("in part and refused at once")
    return problems


def test_every_thing_that_the_pages_describe_has_one_row():
    assert [row.id for row in ROWS] == [f"{system}-{n}" for system, count in COUNTS.items() for n in range(1, count + 1)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_every_mark_has_evidence_that_is_there(row):
    assert faults(row) == []


@pytest.mark.parametrize(("changes", "says"), [
    ({"evidence": []}, "no evidence"),
    ({"evidence": ["docs/test_documents_page.py::test_of_nothing"]}, "is no test"),
    ({"evidence": ["docs/no_such_file.py::test_of_nothing"]}, "is no test"),
    ({"evidence": [{"plan-accuracy.txt": "9B on a laptop"}]}, "does not have the words"),
    ({"evidence": [{"no-such-file.txt": "8B"}]}, "does not have the words"),
    ({"evidence": ["megatron/test_layouts_on_gpus.py::test_options_take_the_same_two_updates"]}, "without a result"),
    ({"unproven": "a", "refused": "b"}, "at once"),
])  # fmt: skip
def test_a_mark_without_its_evidence_is_seen(changes, says):
    sound = {"evidence": ["docs/test_documents_page.py::test_a_mark_without_its_evidence_is_seen"]}
    assert faults(Row("x-1", "a", "b", **sound)) == []
    assert any(says in fault for fault in faults(Row("x-1", "a", "b", **{**sound, **changes})))


def test_the_head_of_the_page_counts_its_rows():
    page = Path(ROOT / "docs/documents.md").read_text()
    marks = re.findall(rf"^\| \w+-\d+ \|.*?\| ({WORKS}|{IN_PART}: [^|]+|{REFUSED}: [^|]+) \|", page, re.MULTILINE)
    assert len(marks) == len(ROWS)
    counted = [sum(mark.startswith(kind) for mark in marks) for kind in (WORKS, IN_PART, REFUSED)]
    head = re.search(r"(\d+) work, (\d+) work in part, (\d+) are refused", page)
    assert head is not None and [int(number) for number in head.groups()] == counted
