"""The size and the shape of the source have limits, so that one role, one term or one method stays one thing."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from fivefold.algo.methods import METHODS
from fivefold.config.roles import ROLES
from tests.support.words import LONGEST_SUBJECT, long_subject

SOURCE = Path(__file__).resolve().parents[1] / "src" / "fivefold"
LONGEST_CLASS = 250
MOST_FIELDS = 25
LONG_FUNCTION, LONG_FUNCTIONS = 100, 0.001
"""Lines above which a function is long, and the largest share of such functions."""
MOST_NAMING_ONE_ROLE = 8
MOST_NAMING_ONE_TERM = 4
MOST_FILES_OF_A_ROLE = 4
MOST_TAKING_THE_CONFIGURATION = 5
CONFIGURATION_SHARE = 1 / 5
MAY_TAKE_THE_CONFIGURATION = ("config/", "plan/", "build.py")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def sources() -> dict[str, str]:
    return {path.relative_to(SOURCE).as_posix(): path.read_text() for path in sorted(SOURCE.rglob("*.py"))}


@cache
def definitions() -> list[tuple[str, ast.ClassDef | Function]]:
    """Every class and function of the source, each with its file."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    trees = {name: ast.parse(text) for name, text in sources().items()}
    return [(name, node) for name, tree in trees.items() for node in ast.walk(tree) if isinstance(node, kinds)]


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    return ((name, node) for name, node in definitions() if isinstance(node, ast.ClassDef))


def functions() -> Iterator[tuple[str, Function]]:
    return ((name, node) for name, node in definitions() if not isinstance(node, ast.ClassDef))


def lines(node: ast.ClassDef | Function) -> int:
    return node.end_lineno - node.lineno + 1


def is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def is_section(name: str, node: ast.ClassDef) -> bool:
    """Sections of the configuration hold the keys of a YAML file, which stay flat."""
    return name.startswith("config/") and node.name.endswith("Config")


def takes_the_configuration(function: Function) -> bool:
    arguments = function.args
    return any(
        "RunConfig" in re.findall(r"\w+", ast.unparse(argument.annotation))
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        if argument.annotation is not None
    )


def test_no_class_is_longer_than_250_lines():
    assert {f"{name}:{node.name}": lines(node) for name, node in classes() if lines(node) > LONGEST_CLASS} == {}


def test_no_dataclass_has_more_than_25_fields():
    fields = {
        f"{name}:{node.name}": sum(isinstance(statement, ast.AnnAssign) for statement in node.body)
        for name, node in classes()
        if is_dataclass(node) and not is_section(name, node)
    }
    assert {name: number for name, number in fields.items() if number > MOST_FIELDS} == {}
    assert len(fields) > 200


def test_at_most_one_function_in_a_thousand_is_longer_than_100_lines():
    lengths = {f"{name}:{node.name}": lines(node) for name, node in functions()}
    longest = {name: length for name, length in lengths.items() if length > LONG_FUNCTION}
    assert len(longest) <= LONG_FUNCTIONS * len(lengths), longest


def test_one_role_is_named_in_at_most_eight_files():
    naming = [name for name, text in sources().items() if re.search("prm", text, re.IGNORECASE)]
    assert len(naming) <= MOST_NAMING_ONE_ROLE, naming


def test_the_role_of_prime_is_named_in_at_most_four_files_next_to_its_formulas():
    """Its section, its role, how it learns and the line that builds it; columns.py lists what each model fills in."""
    others = {"algo/terms/process_reward.py", "columns.py"}
    naming = {name for name, text in sources().items() if re.search("prm", text, re.IGNORECASE)}
    assert others < naming and len(naming - others) <= MOST_FILES_OF_A_ROLE, naming - others


def test_the_term_of_chord_is_named_in_at_most_four_files():
    """Its own file, the list of terms, the rows of methods, and the objective, which divides an update between two losses."""
    naming = [name for name, text in sources().items() if re.search(r"chord|imitation", text, re.IGNORECASE)]
    assert 0 < len(naming) <= MOST_NAMING_ONE_TERM, naming


def test_at_most_five_further_files_take_the_whole_configuration():
    taking = {name for name, node in functions() if takes_the_configuration(node)}
    assert any(name.startswith("plan/") for name in taking)
    outside = {name for name in taking if not name.startswith(MAY_TAKE_THE_CONFIGURATION)}
    assert len(outside) <= MOST_TAKING_THE_CONFIGURATION, outside


def test_the_configuration_is_at_most_a_fifth_of_the_source():
    lengths = {name: text.count("\n") for name, text in sources().items()}
    length_of_configuration = sum(length for name, length in lengths.items() if name.startswith("config/"))
    assert 0 < length_of_configuration <= CONFIGURATION_SHARE * sum(lengths.values()), length_of_configuration


def test_the_training_loop_names_no_method_and_no_model():
    words = set(re.findall(r"[a-z0-9_]+", sources()["trainer/train.py"].lower()))
    assert {"models", "objective"} <= words
    assert words.isdisjoint({*METHODS, *ROLES}), words & {*METHODS, *ROLES}


@pytest.fixture
def git(tmp_path, monkeypatch) -> Callable[..., None]:
    """Runs git in an empty repository, without the configuration and the variables of this machine."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"):
        monkeypatch.setenv(name, os.devnull)
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "a")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "a@b")

    def run(*words: str | Path) -> None:
        subprocess.run(["git", "-C", tmp_path, *words], check=True, capture_output=True)

    run("init", "--initial-branch", "main", ".")
    return run


def test_a_subject_above_72_letters_is_refused_and_one_of_72_is_not(tmp_path, git):
    assert [*long_subject(tmp_path)] == []
    git("commit", "--allow-empty", "-m", "é" * LONGEST_SUBJECT + "\n\n" + 200 * "x")
    assert [*long_subject(tmp_path)] == []
    git("commit", "--allow-empty", "-m", "é" * (LONGEST_SUBJECT + 1))
    [line] = long_subject(tmp_path)
    assert "at most 72 letters, got 73" in line


def test_merges_may_have_long_subjects(tmp_path, git):
    git("commit", "--allow-empty", "-m", "one")
    git("checkout", "-b", "side")
    git("commit", "--allow-empty", "-m", "two")
    git("checkout", "main")
    git("merge", "--no-ff", "-m", 80 * "x", "side")
    assert [*long_subject(tmp_path)] == []


def test_no_subject_is_refused_without_git_in_a_tarball_or_in_a_shallow_checkout(tmp_path, git, monkeypatch):
    git("commit", "--allow-empty", "-m", 80 * "x")
    git("commit", "--allow-empty", "-m", 80 * "x")
    assert len([*long_subject(tmp_path)]) == 1
    # A tarball that was unpacked in a checkout of something else, and one outside of any.
    (tmp_path / "unpacked").mkdir()
    git("clone", "--depth", "1", f"file://{tmp_path}", tmp_path / "shallow")
    for directory in (tmp_path / "unpacked", tmp_path.parent, tmp_path / "shallow"):
        assert [*long_subject(directory)] == []
    monkeypatch.setenv("PATH", "")
    assert [*long_subject(tmp_path)] == []
