"""The tests that docs/documents.yaml names are collected by pytest."""

from __future__ import annotations

import subprocess
import sys

from docs.documents import ROOT, documents

ROWS = [row for _, rows in documents().values() for row in rows]


def test_every_test_that_a_row_names_is_collected():
    named = {test for row in ROWS for test in row.tests}
    files = sorted({test.partition("::")[0] for test in named})
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=",
    ]
    done = subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True)
    collected = {line.partition("[")[0].strip() for line in done.stdout.splitlines() if "::" in line}
    assert named - collected == set(), done.stdout[-2000:] + done.stderr[-2000:]
