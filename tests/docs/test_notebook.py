"""The notebook of the examples, run as a reader runs it."""

from __future__ import annotations

import os
import re
import resource
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples/quickstart.ipynb"


def cpu_seconds() -> float:
    """CPU time of all processes that this one has started and that have ended, with theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_the_notebook_is_kept_without_outputs():
    nbformat = pytest.importorskip("nbformat")
    cells = nbformat.read(NOTEBOOK, 4).cells
    assert any(cell.source.startswith("%%writefile") for cell in cells)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


@pytest.mark.slow
def test_the_notebook_trains_and_shows_its_curve(tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    # The commands in its cells are those of the environment that runs the tests.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    # Within pytest, ipykernel does not show what processes of a cell print.
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    notebook = nbformat.read(NOTEBOOK, 4)
    before = cpu_seconds()
    nbclient.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    # Seconds of all its processes, which a busy machine hardly changes: a reader with one core waits as long.
    spent = cpu_seconds() - before
    assert 10 < spent < 300
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    text = "".join(output.get("text", "") for output in outputs)
    assert "\x1b" not in text and "step 60 | reward" in text
    first, last = map(float, re.findall(r"60 steps: (\S+) -> (\S+)", text)[0])
    assert last > first + 0.15
    assert any("image/svg+xml" in output.get("data", {}) for output in outputs)
    assert (tmp_path / "quickstart/grpo/report.html").is_file()
