"""The generated pages are those of the code, and every name in them is explained."""

from __future__ import annotations

import re
import textwrap
import tomllib
from typing import Annotated, Any, Literal

import pytest

from docs.generate import DOCS, _ranges, _type, pages
from fivefold.keys.ranges import above, within
from fivefold.observability.metrics import METRICS, PLACEHOLDERS, find
from fivefold.reward.rules import BUILT_IN
from tests.support.documented import undocumented


@pytest.mark.parametrize("path", sorted(pages()), ids=lambda path: path.name)
def test_the_page_is_current(path):
    assert path.read_text() == pages()[path](), f"{path} is not what the code says: run `make docs`"


def test_every_key_is_explained():
    rows = [line.split(" | ") for line in (DOCS / "configuration.md").read_text().splitlines() if line.startswith("| `")]
    assert len(rows) > 120
    assert [row[0] for row in rows if len(row) == 5 and row[-1].strip(" |") == ""] == []


def test_types_and_ranges_are_those_of_the_annotation():
    assert _type(list[Literal["a", "b"]] | None) == "list of `a`, `b` or null"
    assert _type(dict[str, dict[str, float]]) == "mapping of names to mappings of names to numbers"
    assert _ranges(Annotated[int, above(0)] | None) == "above 0"
    assert _ranges(list[Annotated[float, within("[0, 1)")]]) == "in [0, 1)"


def test_names_of_metrics_are_found_and_others_are_not():
    known = [
        "reward/mean",
        "reward/pass@8",
        "reward/my.py:score",
        "reward/environment/speed",
        "endpoint/retries",
        "endpoint/overridden",
        "endpoint/unread",
        "tools/read-file/calls",
        "val/gsm8k/accuracy",
        "moe/load_max/layer_07",
        "time/step",
    ]
    assert undocumented([*known, *(f"reward/{name}" for name in BUILT_IN)]) == []
    strange = ["policy/new", "reward/new", "reward/pass@x", "time/new", "val/new"]
    assert undocumented([*strange, *known]) == strange
    row = find("val/gsm8k/pass@4")
    assert row is not None and row.name == "val/<source>/pass@<k>"


def test_every_metric_has_one_row_and_a_sentence():
    names = [metric.name for section in METRICS.values() for metric in section]
    assert len(names) == len(set(names))
    assert all(metric.meaning.endswith(".") for section in METRICS.values() for metric in section)


def test_the_page_of_metrics_says_what_each_placeholder_stands_for():
    page = (DOCS / "metrics.md").read_text()
    for name, placeholder in PLACEHOLDERS.items():
        assert f"| `{name}` | {placeholder.stands_for} |\n" in page
    used = {name for section in METRICS.values() for metric in section for name in re.findall(r"<\w+>", metric.name)}
    assert used == {*PLACEHOLDERS}


def test_the_loop_of_the_architecture_page_is_the_loop():
    loop = (DOCS / "architecture.md").read_text().split("```python\n")[1].split("```")[0]
    assert textwrap.indent(loop, "    ") in (DOCS.parent / "src/fivefold/trainer/train.py").read_text()


def contract(name: str) -> dict[str, Any]:
    contracts = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (chosen,) = [row for row in contracts if row["name"].startswith(name)]
    return chosen


def test_the_architecture_page_has_every_room_and_their_import_order():
    page = (DOCS / "architecture.md").read_text()
    rooms, order = (page.partition(f"## {title}\n")[2].partition("\n## ")[0] for title in ("Rooms", "Import order"))
    levels = [set(re.findall(r"\w+", level)) for level in contract("imports point down")["layers"]]
    assert [set(re.findall(r"\w+", level)) for level in order.partition("A room")[0].split("->")] == levels
    assert set().union(*levels) - set(re.findall(r"`(\w+)(?:/|\.py)", rooms)) == set()


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_pages_name_every_door_by_which_transformers_enters(page):
    doors = {line.split(" -> ")[0].removeprefix("fivefold.") for line in contract("transformers")["ignore_imports"]}
    paths = {door.replace(".**", ".").replace(".", "/") + ("" if door.endswith("**") else ".py") for door in doors}
    (sentence,) = re.findall(r"transformers\s+by\s(.*?)\sonly", (DOCS.parent / page).read_text(), re.S)
    assert {*re.findall(r"`(.*?)`", sentence)} == paths


OTHERS = [DOCS.parent / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "examples/README.md")]


@pytest.mark.parametrize("page", [*OTHERS, *sorted(DOCS.rglob("*.md"))], ids=lambda path: path.name)
def test_links_to_files_hold(page):
    for link in re.findall(r"(?:\]\(|src=\")([^)\"\s]+)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert path.startswith("http") or target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.M)
            assert anchor in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in headings}, link


def test_files_that_pages_name_exist():
    """`room/file.py` in prose is a file of the package, of the tests or of the repository."""
    root = DOCS.parent
    for page in [root / "README.md", *DOCS.glob("*.md")]:
        for name in re.findall(r"`((?:\w+/)+\w+\.(?:py|yaml|md))`", page.read_text()):
            assert any(
                (base / name).exists()
                for base in (root, root / "src", root / "src/fivefold", root / "src/fivefold/megatron")
            ), (
                page,
                name,
            )
