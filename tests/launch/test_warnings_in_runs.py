"""Whole runs that learn nothing say so: on the terminal, in the run's directory, in watch and in the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.commands import fivefold
from tests.support.whole_runs import make_model, train, write_run

RUN = """
policy: {backend: "megatron:d1", tokens_per_micro_batch: 64}
algorithm: {name: grpo, group_size: 4, kl: {coef: 0}}
data: {val: [$ROOT/data/test.parquet], prompts_per_step: 8, max_response_tokens: 4}
eval: {max_prompts: 6}
trainer: {steps: 2, eval_every: never}
"""
SENTENCE = (
    "all 4 samples of every group had the same reward: no gradient; 100% of responses were cut off at "
    "data.max_response_tokens = 4; none contained #### or \\boxed{}; raise data.max_response_tokens"
)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("warned")
    make_model(root)
    write_run(root, RUN)
    return root


@pytest.mark.parametrize("ahead", [[], ["rollout.max_staleness=1"]], ids=["in turn", "ahead"])
def test_a_run_whose_rewards_are_all_0_says_why_it_learns_nothing(root, ahead):
    name = f"zero-{len(ahead)}"
    # No end of a response within the limit, and no answer in it.
    words = ["reward.functions={gsm8k: 1.0}", "engine.sampling.min_tokens=4", *ahead]
    rows, output = train(root, name, *words)
    assert f"warning  {SENTENCE}\n" in output, output
    assert "warning  no greedy responses to arithmetic were correct; 100% of responses were cut off" in output
    assert rows[-1]["policy/grad_norm"] == 0 and rows[-1]["response/form_fraction"] == 0
    stored = [json.loads(line) for line in (root / f"runs/{name}/warnings.jsonl").read_text().splitlines()]
    assert [(row["step"], row["rule"]) for row in stored if row["rule"] == "equal_rewards"] == [
        (1, "equal_rewards"), (2, "equal_rewards"),
    ]  # fmt: skip
    # The second step is not the tenth: its row is stored, and its line is not printed again.
    assert output.count(SENTENCE) == 1
    watched = fivefold("watch", root / "runs" / name, "--once")
    assert SENTENCE in " ".join(watched.stdout.split()), watched.stdout
    assert fivefold("report", root / "runs" / name).returncode == 0
    data = (root / f"runs/{name}/report.html").read_text().partition('id="data">')[2].partition("</script>")[0]
    assert SENTENCE in json.loads(data)["runs"][0]["warnings"]


def test_the_warnings_of_a_run_are_switched_off_by_their_keys(root):
    words = ["reward.functions={gsm8k: 1.0}", "engine.sampling.min_tokens=4", "trainer.steps=1"]
    _, output = train(root, "no-rule", *words, "trainer.warnings={equal_rewards: null, evaluation: null, truncated: null}")
    assert "warning" not in output
    _, output = train(root, "none", *words, "trainer.warnings.enabled=false")
    assert "warning" not in output and not (root / "runs/none/warnings.jsonl").exists()
