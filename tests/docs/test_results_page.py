"""docs/results.md: every number from a file of benchmarks/results/smollm2, and `not measured` where there is none."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from docs.results import DOCS, FILES, RECIPES, drawing, readme, results
from fivefold.config import RunConfig
from fivefold.keys.identity import HARMLESS, Leaf, leaves

ROOT = DOCS.parent


def curve(recipe: str, seed: int = 0, **more: Any) -> dict[str, Any]:
    """A run of three steps with two evaluations."""
    run: dict[str, Any] = {
        "recipe": recipe, "seed": seed, "changes": [], "hardware": "1 x GPU", "commit": "abc1234", "versions": {},
        "evaluations": [evaluation(0, 0.125), evaluation(3, 0.74)], "whole": {}, "peak_gib": 12.34,
        "rewards": [[step, 10.0 * step, 0.1 * step, 1.5] for step in (1, 2, 3)], "file": f"{recipe}-{seed}.json", "tag": "",
    }  # fmt: skip
    return run | more


def evaluation(step: int, share: float) -> dict[str, float]:
    row = {"step": step, "seconds": 40.0 * step, "accuracy": share / 2, "accuracy_stderr": 0.01, "mean@4": share}
    return row | {"stderr@4": 0.02, "time/rollout": 0.5, "throughput/tokens_per_second": 20000.0}


def row_of(page: str, name: str) -> list[str]:
    (line,) = [
        line for line in page.splitlines() if line.startswith((f"| {name} |", f"| [`{name}`]")) and "make real" not in line
    ]
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_a_row_has_the_numbers_of_its_file_and_names_it():
    row = row_of(results("", [curve("words-grpo")]), "words-grpo")
    shares = ["0.0625 ± 0.0100", "0.3700 ± 0.0100", "0.1250 ± 0.0200", "0.7400 ± 0.0200"]
    assert row[:-1] == ["0", "3 of 600", "2.0", "1.50", *shares, "0.200 to 0.200", "12.3"]
    assert row[-1] == "[1 x GPU, abc1234](../benchmarks/results/smollm2/words-grpo-0.json)"


def test_before_is_the_warm_start_on_all_problems_and_after_too():
    part, warm, last = curve("gsm8k-grpo"), curve("gsm8k-sft"), evaluation(3, 0.5)
    row = row_of(results("", [part | {"whole": last}, warm]), "gsm8k-grpo")
    assert row[4:8] == ["0.3700 ± 0.0100", "0.2500 ± 0.0100", "0.7400 ± 0.0200", "0.5000 ± 0.0200"]


def test_a_warm_start_that_was_evaluated_on_part_of_the_problems_says_so():
    warm = curve("gsm8k-sft", changes=["eval.max_prompts=512"])
    page = results("", [curve("gsm8k-grpo") | {"whole": evaluation(3, 0.5)}, warm])
    assert row_of(page, "gsm8k-grpo")[6:8] == ["0.7400 ± 0.0200 (of 512)", "0.5000 ± 0.0200"]


def test_a_rise_is_between_evaluations_of_the_same_problems():
    """In the text above the table, on README's first screen, and in the title of the picture, whose points are of 256."""
    start, warm = evaluation(0, 0.1), curve("gsm8k-sft", changes=["eval.max_prompts=512"])
    run = curve("gsm8k-grpo", evaluations=[start, evaluation(2, 0.3)], whole=evaluation(3, 1.0), hardware="1 x GPU, shared")
    assert "0.1000 to 0.3000 of 256 problems at step 2 with seed 0 (reached" in " ".join(results("", [run, warm]).split())
    begin, end = "<!-- results: begin (written by `make docs`) -->\n", "<!-- results: end -->\n"
    assert "GSM8K: not measured" in " ".join(readme(begin + end, [run, warm]).split())
    shown = " ".join(readme(begin + end, [run, curve("gsm8k-sft")]).split())
    assert "(1 x GPU); share" in shown and "GSM8K: 0.740 to 1.000 with one seed" in shown
    assert 'alt="GSM8K, 256 test problems: share' in shown and "GSM8K, 256 test problems" in drawing("gsm8k", [run])


def test_a_warm_start_is_of_the_same_commit():
    """Seed 1 began with another warm start than the one in the table; its own evaluation is of 256 problems."""
    warm, mine = curve("gsm8k-sft"), curve("gsm8k-grpo", whole=evaluation(3, 0.875))
    other = curve("gsm8k-grpo", 1, whole=evaluation(3, 0.5), commit="def5678")
    text = " ".join(results("", [warm, mine, other]).split())
    assert "0.7400 to 0.8750 at step 3 with seed 0" in text
    assert "0.1250 to 0.7400 of 256 problems at step 3 with seed 1" in text
    begin, end = "<!-- results: begin (written by `make docs`) -->\n", "<!-- results: end -->\n"
    assert "GSM8K: 0.740 to 0.875 with one seed" in " ".join(readme(begin + end, [warm, mine, other]).split())


def test_an_evaluation_of_part_of_the_problems_says_so_and_is_compared_with_its_like():
    row = row_of(results("", [curve("gsm8k-grpo"), curve("gsm8k-sft", evaluations=[evaluation(9, 0.5)])]), "gsm8k-grpo")
    assert row[6:8] == ["0.1250 ± 0.0200 (of 256)", "0.7400 ± 0.0200 (of 256)"]
    page = results("", [curve("gsm8k-grpo")])
    assert "0.1250 to 0.7400 of 256 problems at step 3" in " ".join(page.split())
    begin, end = "<!-- results: begin (written by `make docs`) -->\n", "<!-- results: end -->\n"
    assert "0.74" not in readme(begin + end, [curve("gsm8k-grpo")])


def test_a_run_that_was_stopped_early_says_so_and_that_its_goal_is_not_reached():
    """By its steps and the accuracy that its recipe stops at; in the table, above it, and on README's first screen."""
    page = " ".join(results("", [curve("words-grpo")]).split())
    assert "from below 0.2 to above 0.7. Measured: 0.1250 to 0.7400 at step 3 with seed 0 (reached: the run was" in page
    low = [evaluation(0, 0.0725), evaluation(3, 0.232)]
    page = " ".join(results("", [curve("words-grpo", evaluations=low)]).split())
    assert "0.0725 to 0.2320 at step 3 with seed 0 (not reached yet: the run was stopped after 3 of 600 steps)." in page
    page = results("", [curve("words-grpo", evaluations=low, changes=["trainer.steps=3"])])
    assert row_of(page, "words-grpo")[1] == "3" and "seed 0 (not reached)." in " ".join(page.split())
    # The accuracy that ends the run ends it before its last step.
    ended = curve("words-grpo", evaluations=[evaluation(0, 0.125), evaluation(3, 0.8)])
    assert row_of(results("", [ended]), "words-grpo")[1] == "3"
    begin, end = "<!-- results: begin (written by `make docs`) -->\n", "<!-- results: end -->\n"
    shown = readme(begin + end, [curve("words-grpo", evaluations=low)])
    assert "0.072 to 0.232 with one seed, stopped after 3 of 600 steps" in " ".join(shown.split())
    later = curve("words-grpo", seed=1, evaluations=low, rewards=[[step, 9.0, 0.1, 3.0] for step in range(5)])
    for runs, sentence in (
        ([curve("words-grpo", evaluations=low), later], "with 2 seeds, stopped after 3-5 of 600 steps"),
        ([later, ended], "with 2 seeds, 1 of them stopped after 5 of 600 steps"),
    ):
        assert sentence in " ".join(readme(begin + end, runs).split())


def test_a_trial_is_listed_with_its_keys_and_is_no_result():
    page = results("", [curve("words-grpo", tag="slow", changes=["policy.optimizer.lr=1e-6"])])
    assert row_of(page, "words-grpo")[0] == "not measured"
    assert "| `words-grpo` | `policy.optimizer.lr=1e-6` | 3 of 600 | 1.50 | 0.1250 ± 0.0200 | 0.7400 ± 0.0200 |" in page


def test_what_has_no_file_is_not_measured():
    page = results("", [])
    assert all(row_of(page, name)[0] == "not measured" for name in [*RECIPES, "Fivefold", "TRL"])
    assert not any(character.isdigit() for name in RECIPES for cell in row_of(page, name) for character in cell)
    assert drawing("words", []) is None
    begin, end = "<!-- results: begin (written by `make docs`) -->\n", "<!-- results: end -->\n"
    shown = readme(f"a\n{begin}old\n{end}b\n", [])
    assert shown.startswith(f"a\n{begin}") and shown.endswith(f"{end}b\n") and "old" not in shown
    assert " ".join(shown.split()).count("not measured") == 2 and "<img" not in shown


def test_the_two_sides_are_compared_by_their_median_steps():
    theirs = curve("beside-trl", rewards=[[step, 9.0, 0.1, 6.0] for step in (1, 2, 3)], medians={"time/rollout": 0.5})
    page = results("", [curve("beside-fivefold"), theirs])
    assert "SmolLM2-135M: a step of Fivefold takes 0.25 of TRL's time on 1 x GPU (abc1234)." in page
    # A stage that was not timed has no number.
    assert row_of(page, "TRL")[:5] == ["SmolLM2-135M", "0", "6.00", "0.50", ""]


def test_another_models_shape_is_compared_with_itself_and_has_no_accuracy():
    shaped = {"tag": "Qwen3-1.7B", "evaluations": []}
    theirs = [
        curve("beside-trl", rewards=[[step, 9.0, 0.1, end] for step in (1, 2, 3)], **of)
        for end, of in ((6.0, {}), (3.0, shaped))
    ]
    page = results("", [curve("beside-fivefold"), curve("beside-fivefold", **shaped), *theirs])
    assert "SmolLM2-135M: a step of Fivefold takes 0.25 of" in page
    assert "Qwen3-1.7B's shape: a step of Fivefold takes 0.50 of" in page
    (row,) = [line for line in page.splitlines() if line.startswith("| TRL | Qwen3-1.7B's shape | 0 | 3.00 |")]
    assert "±" not in row


def test_sides_on_different_machines_or_commits_are_not_compared():
    theirs = curve("beside-trl", rewards=[[step, 9.0, 0.1, 6.0] for step in (1, 2, 3)])
    for other in ({"hardware": "1 x other"}, {"commit": "def5678"}):
        assert "of TRL's time" not in results("", [curve("beside-fivefold", **other), theirs])
        page = results("", [curve("beside-fivefold", **other), curve("beside-fivefold", 1), theirs])
        assert "a step of Fivefold takes 0.25 of TRL's time on 1 x GPU (abc1234)." in page


def test_sides_that_shared_a_gpu_have_their_rewards_and_no_time():
    def run(side: str, seed: int, reward: float, steps: int) -> dict[str, Any]:
        # A run's steps after the fourth must not count: others do not have them.
        rewards = [[step, 9.0, reward * (2 < step < 5), 6.0] for step in range(1, steps + 1)]
        return curve(f"beside-{side}", seed, rewards=rewards, tag="at-once")

    page = results(
        "", [run("fivefold", 0, 0.3, 8), run("fivefold", 1, 0.5, 8), run("trl", 0, 0.2, 4), run("trl", 1, 0.9, 1)]
    )
    assert "| | seed | steps | reward: steps 1 to 2 | 3 to 4 |" in page.replace("|  |", "| |")
    assert "| Fivefold | 1 | 8 | 0.0000 | 0.5000 | 0.1250 ± 0.0200 | 0.7400 ± 0.0200 | [1 x GPU, abc1234]" in page
    assert "Mean reward of steps 3 to 4: Fivefold's 2 seeds 0.4000 ± 0.1000." in page
    assert "of TRL's time" not in page and row_of(page.partition("| TRL | 0")[0], "TRL")[0] == "not measured"
    assert "`beside-" not in page


def test_the_picture_has_a_curve_for_each_run_but_the_warm_start():
    svg = drawing("words", [curve("words-sft"), curve("words-grpo"), curve("words-grpo", 1)])
    assert svg.count("<polyline") == 2 and "grpo, seed 1 0.74" in svg


@pytest.mark.parametrize("path", sorted(FILES.glob("*.json")), ids=lambda path: path.stem)
def test_a_result_names_its_hardware_and_commit(path):
    result = json.loads(path.read_text())
    assert result["hardware"] and result["commit"] not in ("", "unknown")
    # Another model's shape is timed only.
    assert result["evaluations"] or result["medians"]
    name = "-".join(filter(None, [result["recipe"], result.get("tag"), str(result["seed"])]))
    # Runs of another commit began with a warm start of their own.
    assert path.stem in (name, f"{name}-{result['commit']}")


def counted(recipe: Path, changes: list[str]) -> list[Leaf]:
    """The keys of a recipe, without those of the engine that do not count when a run is resumed."""
    keys = leaves(RunConfig.from_yaml(recipe, changes))
    return [key for key in keys if not (key.counts is HARMLESS and key.key.startswith("engine."))]


@pytest.mark.parametrize("path", sorted(FILES.glob("*.json")), ids=lambda path: path.stem)
def test_a_result_is_of_the_recipe_as_it_is_now(path, tmp_path):
    """Its recipe at its commit with its keys is what a row of this name promises, and what running it again would train.

    Keys of the engine that do not count when a run is resumed, such as `engine.processes`, may have other values by now.
    """
    result = json.loads(path.read_text())
    name = f"examples/smollm2/{result['recipe'].removesuffix('-cpu')}.yaml"
    done = subprocess.run(
        ["git", "show", f"{result['commit']}:{name}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode or result.get("tag"):
        pytest.skip("no recipe, another one, or no history")
    (then := tmp_path / "then.yaml").write_text(done.stdout)
    assert counted(then, result["changes"]) == counted(ROOT / name, result["changes"])
