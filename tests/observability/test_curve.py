"""The SVG of a run's curve: each label shows its line's own color and pattern, and the axis has a name."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from fivefold.errors import UserError
from fivefold.observability.curve import figure
from fivefold.observability.run_logger import append_json

SVG = "{http://www.w3.org/2000/svg}"


def test_a_chart_of_no_metric_says_which_there_are(tmp_path):
    append_json(tmp_path / "metrics.jsonl", {"step": 1, "loss": 0.5})
    with pytest.raises(UserError, match=r"^name a metric, or a pattern as 'val/\*'; there are loss, step$"):
        figure(tmp_path)
    with pytest.raises(UserError, match=f"^no metric los or kl in {tmp_path}; there are loss, step$"):
        figure(tmp_path, "los", "kl")


def test_labels_show_the_pattern_of_their_lines_and_no_two_are_alike(tmp_path):
    for step in (1, 2, 3):
        append_json(tmp_path / "metrics.jsonl", {"step": step, **{f"m{number}": number * step for number in range(9)}})
    svg = figure(tmp_path, "m*", title="nine").svg
    tree = ElementTree.fromstring(svg)
    looks = [
        [(line.get("stroke"), line.get("stroke-dasharray")) for line in tree.iter(SVG + tag) if line.get("stroke")]
        for tag in ("line", "polyline")
    ]
    assert looks[0] == looks[1] and len(set(looks[0])) == 9
    assert "step" in [text.text for text in tree.iter(SVG + "text")]
    assert re.search(r"m8 24<", svg)
