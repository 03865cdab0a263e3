"""benchmarks/recipes.py: a curve has what the metrics say, also if its run was stopped and continues."""

from __future__ import annotations

import json
import math

import pytest

from benchmarks.recipes import MODEL, RISE, Bench, Curve, _scores, grown, risen

ABOUT = {"hardware": "1 x GPU", "commit": "abc1234", "versions": {}}


def curve(recipe: str = "words-grpo") -> Curve:
    return Curve(recipe, 0, [], **ABOUT)


def step(number: int, reward: float, **more: float) -> dict[str, float]:
    return {
        "step": number,
        "reward/mean": reward,
        "time/step": 2.0,
        "time/rollout": 1.5,
        "memory/peak_gb": 3.0 + number,
    } | more


def test_an_evaluation_has_the_means_since_the_one_before():
    run, since = curve(), list[dict[str, float]]()
    scores = {
        "val/words/accuracy": 0.5,
        "val/words/accuracy_stderr": 0.1,
        "val/words/mean@4": 0.25,
        "val/words/stderr@4": 0.05,
    }
    assert run.add({"step": 0, **scores}, 30.0, since) is not None
    assert run.add(step(1, 0.1), 32.0, since) is None
    line = run.add(step(2, 0.3, **{"time/step": 4.0}, **scores), 36.0, since)
    assert line is not None and "mean@4 0.2500 ± 0.0500" in line and "3.00 s a step = rollout 1.50" in line
    last = run.evaluations[-1]
    assert (last["step"], last["seconds"], last["reward/mean"], last["accuracy"], last["time/step"]) == (2, 36, 0.2, 0.5, 3)
    assert run.rewards == [[1, 32.0, 0.1, 2.0], [2, 36.0, 0.3, 4.0]] and run.peak_gib == 5


def test_a_run_that_continues_keeps_its_curve_and_its_seconds(tmp_path):
    bench = Bench(tmp_path, 1, False, False, {}, ABOUT)
    (tmp_path / "curves").mkdir()
    first = bench.curve("words-grpo", 0)
    first.add(step(7, 0.5), 81.0, [])
    bench.write(first)
    again = bench.curve("words-grpo", 0)
    assert again.rewards == first.rewards and again.seconds == 81.0
    assert json.loads((tmp_path / "curves/words-grpo-0.json").read_text())["rewards"] == [[7, 81.0, 0.5, 2.0]]


def test_a_curve_says_on_how_many_gpus_its_recipe_runs(tmp_path):
    for sharing in ("", ", shared by 3 runs"):
        bench = Bench(tmp_path, 1, False, False, {}, ABOUT | {"hardware": f"1 x GPU{sharing}"})
        hardware = [bench.new_curve(recipe, 0).hardware for recipe in ("gsm8k-grpo", "gsm8k-async")]
        assert hardware == [f"1 x GPU{sharing}", f"2 x GPU{sharing}"]


def test_a_step_that_is_repeated_after_a_kill_counts_once():
    run = curve()
    for number, reward in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.4)):
        run.add(step(number, reward), 10.0 * number, [])
    assert [row[:3:2] for row in run.rewards] == [[1, 0.1], [2, 0.4]]


def test_a_warm_start_that_others_need_is_trained_to_its_end(tmp_path):
    class Recorded(Bench):
        def run(self, curve, path, run_dir, seed):
            limits.append((curve.recipe, self.minutes))
            return True

        def command(self, name, words, seconds):
            (tmp_path / "words/warm" / MODEL).mkdir(parents=True)
            return ""

    limits: list[tuple[str, float]] = []
    (tmp_path / "words").mkdir()
    bench = Recorded(tmp_path, 5, True, False, {}, ABOUT)
    bench.write_recipes()
    bench.train("words-grpo", 0)
    assert limits == [("words-sft", math.inf), ("words-grpo", 5)]


def test_a_line_that_is_being_written_waits_for_its_end(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert grown(path, 0) == ([], 0)
    path.write_text('{"step": 1}\n{"step"')
    rows, seen = grown(path, 0)
    assert rows == [{"step": 1}]
    path.write_text('{"step": 1}\n{"step": 2}\n')
    assert grown(path, seen)[0] == [{"step": 2}]


def test_only_accuracies_and_their_errors_are_scores():
    row = {
        "val/gsm8k/accuracy": 0.5,
        "val/gsm8k/mean@4": 0.2,
        "val/loss": 1.0,
        "val/gsm8k/reward": 0.5,
        "val/gsm8k/pass@4": None,
    }
    assert _scores(row) == {"accuracy": 0.5, "mean@4": 0.2}


@pytest.mark.parametrize(("last", "well"), [(0.2 + RISE, True), (0.2 + RISE - 0.02, False)])
def test_every_seed_must_rise(last, well):
    runs = [curve(), curve(), curve("words-sft")]
    for run, end in zip(runs, (0.9, last, 0.0), strict=True):
        run.rewards = [[float(n), 0.0, 0.2 if n < 5 else end, 1.0] for n in range(10)]
    assert risen(runs) is well
