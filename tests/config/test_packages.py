"""Optional packages that are installed and cannot be imported, as real directories on the path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fivefold.config import packages
from fivefold.config.packages import EXTRAS, KERNELS, TRACKERS, import_fault, missing_packages, slower_paths
from fivefold.keys.findings import Findings
from fivefold.plan.check import _check_launch
from tests.plan.test_fit import config

BROKEN = "import a_library_that_is_not_there"


@pytest.fixture(autouse=True)
def _a_cache_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def broken_packages(directory: Path, *names: str) -> None:
    for name in names:
        for part in (directory / name.replace(".", "/"), (directory / name.partition(".")[0])):
            part.mkdir(parents=True, exist_ok=True)
            (part / "__init__.py").touch()
        (directory / name.replace(".", "/") / "__init__.py").write_text(BROKEN)


def test_a_package_whose_import_fails_is_named_with_the_reason_and_not_imported_here(tmp_path: Path, monkeypatch):
    broken_packages(tmp_path, "broken_package", "outer_package.inner")
    (tmp_path / "whole_package.py").touch()
    (tmp_path / "ended_package.py").write_text("import os, sys; print('x'); os.kill(os.getpid(), 9)")
    monkeypatch.syspath_prepend(tmp_path)
    why = "whose import fails: ModuleNotFoundError: No module named 'a_library_that_is_not_there'"
    names = ("whole_package", "broken_package", "outer_package.inner", "absent_package", "absent.inner")
    assert missing_packages(names) == [
        f"broken_package, {why}",
        f"outer_package.inner, {why}",
        "absent_package, not installed here",
        "absent.inner, not installed here",
    ]
    assert not {"whole_package", "broken_package"} & set(sys.modules)


def test_a_successful_import_is_remembered_until_something_else_is_installed(tmp_path, monkeypatch):
    """Each import leaves a line in a file."""
    site, imports = tmp_path / "site", tmp_path / "imports"
    site.mkdir()
    (site / "slow_package.py").write_text(f"print('x', file=open({str(imports)!r}, 'a'))")
    monkeypatch.syspath_prepend(site)

    def count() -> int:
        packages._failed_import.cache_clear()
        assert import_fault("slow_package") is None
        return imports.read_text().count("x")

    assert [count(), count()] == [1, 1]
    (site / "other_package.py").touch()
    assert [count(), count()] == [2, 2]
    packages._failed_import.cache_clear()
    assert import_fault("slow_package", is_fresh=True) is None
    assert imports.read_text().count("x") == 3


def test_an_import_remembered_by_a_command_is_known_to_a_rank(tmp_path, monkeypatch):
    """The first directory of their paths differs: that of the command's script, and a rank's working directory."""
    site, imports = tmp_path / "site", tmp_path / "imports"
    site.mkdir()
    (site / "slow_package.py").write_text(f"print('x', file=open({str(imports)!r}, 'a'))")
    rest = sys.path[1:]
    for first in ("bin", "work"):
        packages._failed_import.cache_clear()
        monkeypatch.setattr(sys, "path", [str(tmp_path / first), str(site), *rest])
        assert import_fault("slow_package") is None
    assert imports.read_text() == "x\n"


def test_an_import_that_failed_is_tried_again(tmp_path, monkeypatch):
    broken_packages(tmp_path, "broken_package")
    monkeypatch.syspath_prepend(tmp_path)
    assert "whose import fails" in str(import_fault("broken_package"))
    packages._failed_import.cache_clear()
    assert "whose import fails" in str(import_fault("broken_package"))


MODULES = sorted({*KERNELS, *(extra.module for extra in EXTRAS), *TRACKERS, "mbridge", "sglang"})


@pytest.mark.parametrize("module", MODULES)
def test_every_optional_package_that_is_broken_is_seen(tmp_path: Path, monkeypatch, module):
    """The real import of a real directory, in place of what may be installed here."""
    broken_packages(tmp_path, module)
    monkeypatch.syspath_prepend(tmp_path)
    assert "a_library_that_is_not_there" in str(import_fault(module))
    lines = [line for line in slower_paths() if line.startswith(module)]
    assert lines == ([f"{module}, {import_fault(module)}: {KERNELS[module]}"] if module in KERNELS else [])


@pytest.mark.parametrize("module", KERNELS)
def test_a_rank_takes_the_slower_path_with_one_line(tmp_path: Path, module):
    broken_packages(tmp_path, module)
    code = f"from fivefold.config.packages import can_import\nprint([can_import({module!r}) for _ in range(3)])"
    path = os.pathsep.join((str(tmp_path), *sys.path))
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.stdout == "[False, False, False]\n", done
    (line,) = done.stderr.splitlines()
    assert line == f"{module}, whose import fails: No module named 'a_library_that_is_not_there': {KERNELS[module]}"


def test_check_names_the_slower_path_of_a_broken_package(tmp_path: Path, monkeypatch):
    broken_packages(tmp_path, "flash_attn.cute", "transformer_engine")
    monkeypatch.syspath_prepend(tmp_path)
    run = config(trainer={"device": "cuda"})
    findings = Findings()
    _check_launch(findings.at("launch"), run.launch, run.trainer.device)
    notes = [note for note in findings.notes if "a_library_that_is_not_there" in note]
    assert len(notes) == 2 and all("slower" in note or "PyTorch" in note for note in notes)
