from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import yaml

from tests.support import turns
from tests.support.turns import ROOT, in_turn, run, targets


def test_every_long_target_gets_its_turn_and_every_line_names_a_target():
    assert {in_turn(f"{number:040x}")[0] for number in range(200)} == set(targets())
    assert all(sorted(in_turn(f"{number:040x}")) == sorted(targets()) for number in range(50))
    makefile = (ROOT / "Makefile").read_text()
    assert [line for line in targets() if not re.search(rf"^{line.split()[0]}:", makefile, re.MULTILINE)] == []


def test_the_workflow_runs_only_targets_of_the_makefile():
    workflow = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())
    [job] = workflow["jobs"].values()
    assert job["steps"][-1]["run"] == "make ${{ matrix.target }}"
    known = set(re.findall(r"[\w-]+", " ".join(re.findall(r"^(?!\t)([\w -]+):", (ROOT / "Makefile").read_text(), re.M))))
    assert {row["target"] for row in job["strategy"]["matrix"]["include"]} <= known


def test_every_marker_that_the_suite_leaves_out_is_run_by_a_long_target():
    options = (ROOT / "pyproject.toml").read_text()
    left_out = set(re.findall(r"not (\w+)", re.search(r"^addopts = .*$", options, re.MULTILINE)[0])) - {"gpu"}
    makefile = (ROOT / "Makefile").read_text()
    recipes = {
        line.split()[0]: re.search(rf"^{line.split()[0]}:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)[1] for line in targets()
    }
    chosen = " ".join(marker for recipe in recipes.values() for marker in re.findall(r'-m ("[^"]*"|\w+)', recipe))
    run_by_turns = set(re.findall(r"(?<!not )\b\w+\b", chosen))
    assert left_out <= run_by_turns, left_out - run_by_turns


def test_a_target_that_names_paths_collects_every_file_with_its_marker():
    options = (ROOT / "pyproject.toml").read_text()
    # test-routes repeats one file of test-vllm.
    left_out = set(re.findall(r"not (\w+)", re.search(r"^addopts = .*$", options, re.MULTILINE)[0])) - {"vllm"}
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    sources = {path: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    missed, checked = [], set()
    for marker, words in re.findall(r"-m pytest .*?-m (\w+)\b(.*)$", makefile, re.MULTILINE):
        tops = [path for word in words.split() if word.startswith("tests/") for path in ROOT.glob(word)]
        if marker in left_out and tops:
            checked.add(marker)
            marked = [path for path, text in sources.items() if re.search(rf"\bmark\.{marker}\b", text)]
            missed += [(marker, path) for path in marked if not any(path.is_relative_to(top) for top in tops)]
    assert missed == [] and {"hosts", "browser", "trackers", "kernels", "sglang"} <= checked


def test_attacks_of_a_commit_have_its_own_seed_which_is_printed():
    def line(*words: str, **variables: str) -> str:
        command = ["make", "--dry-run", "--no-print-directory", *words, "test-attacks"]
        environment = {**os.environ, "MAKEFLAGS": "", **variables}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()[-1]

    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert line().startswith(f"SEED={int(commit[:4], 16)} ")
    assert line("SEED=7").startswith("SEED=7 ") and line(SEED="8").startswith("SEED=8 ")
    assert line(GIT_DIR="/nowhere").startswith("SEED=0 "), "a copy without its history"


@pytest.mark.parametrize(
    ("recipe", "seconds", "verdict"),
    [
        ("true", 60, (True, True)),
        ("echo '1 failed'; false", 60, (False, True)),
        ("echo '3 passed'; sleep 600", 3, (True, False)),
        ("echo '1 failed, 3 passed'; sleep 600", 3, (False, False)),
    ],
)
def test_a_target_that_is_cut_off_fails_only_where_a_test_of_it_has_failed(tmp_path, monkeypatch, recipe, seconds, verdict):
    monkeypatch.setattr(turns, "GRACE", 1.0)
    (tmp_path / "Makefile").write_text(f"target:\n\t{recipe}\n")
    assert run("target", seconds, tmp_path) == verdict


@pytest.mark.parametrize(("directory", "mark"), [("tests/cli", ""), ("tests/fsdp", "fsdp")])
def test_parts_together_are_what_is_selected_and_share_no_file(directory, mark):
    """Files without a selected test fill no part: one would have none at all."""

    def collected(part: str) -> list[str]:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "--collect-only",
            "-q",
            "-p",
            "no:xdist",
            "-o",
            "addopts=",
            "-m",
            mark,
            "--part",
            part,
        ]
        done = subprocess.run([*command, directory], cwd=ROOT, capture_output=True, text=True, check=True)
        return [line for line in done.stdout.splitlines() if "::" in line]

    parts = [collected(f"{place}/2") for place in (1, 2)]
    files = [{line.partition("::")[0] for line in part} for part in parts]
    assert all(files) and not files[0] & files[1]
    assert sorted(parts[0] + parts[1]) == sorted(collected("1/1"))
    assert abs(len(files[0]) - len(files[1])) <= 1
