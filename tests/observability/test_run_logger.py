"""Lines of a run in the terminal: the seconds of a step and of an evaluation, and the bar of a resumed run."""

from __future__ import annotations

import io
import re
import sys
import time

from fivefold.observability.run_logger import LEVELS, RunLogger


def test_the_line_of_step_0_has_the_seconds_of_its_evaluation(tmp_path, capsys):
    logger = RunLogger(tmp_path, ["console"], is_main=True, steps=5)
    with logger.stage("eval"), logger.stage("reward"):
        time.sleep(0.2)
    logger.record({"val/a/accuracy": 0.5})
    logger.end_step(0)
    with logger.stage("step"):
        pass
    logger.end_step(1)
    first, second = capsys.readouterr().out.splitlines()
    # Scoring is a stage of its own in the metrics; the line has all of the evaluation.
    match = re.fullmatch(r"step 0 \| val/a/accuracy 0.5 \| evaluation ([\d.]+) s", first)
    assert match is not None and float(match[1]) >= 0.2
    assert second == "step 1 | 0.0 s"


def test_the_bar_of_a_resumed_run_starts_at_its_step(tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    logger = RunLogger(tmp_path, ["console"], is_main=True, steps=40)
    logger.begin(30)
    logger.close()
    assert "30/40" in terminal.getvalue()


def test_verbosity_decides_what_the_terminal_shows_and_the_log_file_has_it_all(tmp_path, capsys):
    shown = {}
    for verbosity in LEVELS:
        logger = RunLogger(tmp_path, ["console"], True, 5, verbosity=verbosity, log_file=f"{verbosity}.log")
        logger.log("saved x")
        with logger.stage("rollout"):
            pass
        logger.record({"reward/mean": 0.5})
        logger.end_step(1)
        logger.close()
        shown[verbosity] = capsys.readouterr().out
    assert shown["quiet"] == "saved x\n"
    assert "step 1 | reward 0.5" in shown["normal"] and "stage rollout" not in shown["normal"]
    assert "stage rollout" in shown["debug"] and "GB" in shown["debug"]
    for verbosity in LEVELS:
        lines = (tmp_path / "logs" / f"{verbosity}.log").read_text().splitlines()
        assert [re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", "", line).split()[0] for line in lines] == [
            "saved",
            "stage",
            "step",
        ]
