"""Warnings of a run about its own metrics: each is caused in a real run of the loop, which stores and prints it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from fivefold.algo import methods
from fivefold.config.schema import WarningsConfig
from fivefold.observability.run_view import RunView
from fivefold.observability.warnings import RULES, WARNINGS, Facts, Look, Warnings, holding
from fivefold.types import Sampling
from tests.support.toy import ToyEngine, ToyModel, ToyScorer, ToyTokenizer, scored, target, toy_parts, toy_prompts


def warned(mesh, run_dir, *, choices=methods.Choices(), policy=None, steps=4, change=None, facts=Facts(5, 8), **more):  # noqa: B008
    """Rows of every warning of a run, and what it printed; `change` gets the run before it begins."""
    from fivefold.trainer.train import train

    run = toy_parts(mesh, run_dir, "grpo", choices, policy or ToyModel(), steps, **more)
    lines: list[str] = []
    run.logger.log = lambda text, level="quiet": lines.append(text)
    run.logger.warnings = Warnings(WarningsConfig(), facts)
    if change is not None:
        change(run)
    train(run)
    file = run_dir / WARNINGS
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    return rows, [text for text in lines if text.startswith("warning")]


def forms(source: str) -> tuple[str, ...]:
    return ("####", "\\boxed")


FACTS = Facts(5, 8, True, forms, ["toy"])


def equal_rewards(mesh, run_dir):
    """A policy that always gives the same wrong response to a prompt."""
    policy = ToyModel()
    for prompt in range(len(policy.table)):
        policy.table.data[prompt, :, (target(prompt) + 3) % policy.table.shape[-1]] = 30.0
    choices = methods.Choices(kl=methods.KL(coef=0.0))
    return warned(mesh, run_dir, choices=choices, policy=policy, steps=12, facts=FACTS, change=with_forms)


def with_forms(run):
    """Let the run count the responses with the form of its reward."""
    object.__setattr__(run, "plan", replace(run.plan, forms=forms))


def test_equal_rewards_are_said_after_the_first_step_then_every_tenth(cluster, tmp_path):
    ((rows, printed),) = cluster.run(equal_rewards, "megatron:d1", tmp_path)
    assert [row["step"] for row in rows if row["rule"] == "equal_rewards"] == list(range(1, 13))
    assert len(printed) == 2 and len(set(printed)) == 1
    assert printed[0] == (
        "warning  all 8 samples of every group had the same reward: no gradient; 0% of responses were cut off at "
        "data.max_response_tokens = 5; none contained #### or \\boxed{}; ask for #### or \\boxed{} in data.system_prompt"
    )
    # `watch` and the report show those of the latest step.
    assert RunView(tmp_path).warnings == [printed[0].removeprefix("warning  ")]


def at_the_limit(mesh, run_dir):
    generate = ToyEngine.generate

    def cut(self, requests):
        for completion in generate(self, requests):
            yield replace(completion, finish_reason="length") if completion.request_id % 8 else completion

    ToyEngine.generate = cut
    return warned(mesh, run_dir)


def test_responses_at_the_limit_are_said_with_their_share_and_the_key(cluster, tmp_path):
    ((rows, printed),) = cluster.run(at_the_limit, "megatron:d1", tmp_path)
    assert {row["rule"] for row in rows} == {"truncated"}
    assert printed == ["warning  88% of responses were cut off at data.max_response_tokens = 5: raise it"]


def collapse(mesh, run_dir):
    return warned(mesh, run_dir, policy=ToyModel(lr=1.0), steps=20)


def often_clipped(mesh, run_dir):
    return warned(mesh, run_dir, choices=methods.Choices(clip_low=1e-4, clip_high=1e-4), steps=2, ppo_epochs=8)


def far_from_the_reference(mesh, run_dir):
    return warned(mesh, run_dir, choices=methods.Choices(kl=methods.KL(coef=1e-6)), policy=ToyModel(lr=1.0), steps=20)


def without_new_weights(mesh, run_dir):
    """An engine that keeps the weights of the fourth version."""
    update = ToyEngine.update_weights

    def forget(self, weights, version):
        if version < 4:
            update(self, weights, version)
        self.version = version

    ToyEngine.update_weights = forget
    return warned(mesh, run_dir, policy=ToyModel(lr=0.3), steps=8)


@pytest.mark.parametrize(
    ("cause", "rule", "text"),
    [
        (
            collapse,
            "entropy_drop",
            "of the first step's 2.48: responses to a prompt become alike; raise algorithm.clip_high",
        ),
        (often_clipped, "clip_fraction", "of tokens have a clipped ratio"),
        (far_from_the_reference, "kl", "nats a token: the policy leaves its reference; raise algorithm.kl.coef"),
        (without_new_weights, "engine_diff", "set algorithm.rollout_correction"),
    ],
)
def test_what_goes_wrong_in_a_run_is_said_with_the_key_to_change(cluster, tmp_path, cause, rule, text):
    ((rows, printed),) = cluster.run(cause, "megatron:d1", tmp_path)
    of_rule = [row for row in rows if row["rule"] == rule]
    assert of_rule and text in of_rule[0]["text"], rows
    assert f"warning  {of_rule[0]['text']}" in printed


def without_a_correct_response(mesh, run_dir):
    from fivefold.reward.manager import RewardManager
    from fivefold.rollout.generation import Generator
    from fivefold.trainer.evaluation import Evaluation, EvaluationSet

    class Zero(ToyScorer):
        def submit(self, prompt, sample):
            sample.reward, sample.correct = 0.0, False
            return scored()

    def change(run):
        prompts = EvaluationSet(toy_prompts(), 0, Sampling(max_tokens=5, temperature=0.0), Sampling(max_tokens=5))
        generator = Generator(run.engine, ToyTokenizer(), RewardManager(Zero(), run.ranks), run.logger)
        plan = replace(run.plan, forms=forms)
        run.trainer.evaluation = Evaluation(prompts, generator, run.objective, run.ranks, run.logger, plan)

    return warned(mesh, run_dir, steps=1, change=change, facts=FACTS, eval_before_train=True)


def test_an_evaluation_without_a_correct_response_is_said(cluster, tmp_path):
    ((rows, printed),) = cluster.run(without_a_correct_response, "megatron:d1", tmp_path)
    assert [(row["step"], row["rule"]) for row in rows] == [(0, "evaluation"), (1, "evaluation")]
    assert printed == [
        "warning  no greedy responses to toy were correct; 0% of responses were cut off at data.max_response_tokens = 5; "
        "none contained #### or \\boxed{}; ask for #### or \\boxed{} in data.system_prompt"
    ]
    (first, _) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert first["val/toy/form_fraction"] == 0 and first["val/toy/truncated_fraction"] == 0


def test_a_run_that_learns_says_nothing(cluster, tmp_path):
    assert cluster.run(warned, "megatron:d1", tmp_path) == [([], [])]


def test_what_an_evaluation_shows_holds_until_the_next_one():
    warnings = Warnings(facts=FACTS)
    wrong, right = ({"val/toy/accuracy": value, "val/toy/reward": value} for value in (0.0, 0.5))
    results = [warnings.of(step, row) for step, row in enumerate([wrong, *[{}] * 11, right, {}])]
    assert [bool(rows) for rows, _ in results] == [True] * 12 + [False] * 2
    assert [step for step, (_, printed) in enumerate(results) if printed] == [0, 10]


WRONG = {
    "reward/frac_reward_zero_std": 1.0, "reward/mean": 0.0, "reward/min": 0.0, "reward/max": 0.0, "policy/grad_norm": 0.0,
    "val/a/b/accuracy": 0.0, "val/a/b/reward": 0.0, "policy/entropy": 0.01, "policy/clip_fraction": 0.9,
    "policy/kl_reference": 3.0, "rollout/logprob_diff_mean": 0.4, "response/truncated_fraction": 1.0,
}  # fmt: skip


@pytest.mark.parametrize("rule", [rule.name for rule in RULES])
def test_each_warning_can_be_switched_off_alone_and_all_of_them_together(rule):
    look = Look(WRONG, {"policy/entropy": 1.0, "rollout/logprob_diff_mean": 0.02}, Facts(5, 8))
    every = {rule_of_table.name for rule_of_table in RULES}
    assert rule in holding(look, replace(WarningsConfig(), **dict.fromkeys(every - {rule})))
    assert rule not in holding(look, replace(WarningsConfig(), **{rule: None}))
    assert Warnings(WarningsConfig(enabled=False)).of(1, WRONG) == ([], [])


def test_a_resumed_run_compares_with_the_first_step_of_the_whole_run(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 0, "val/a/accuracy": 0.5}\n{"step": 1, "policy/entropy": 2.0}\n')
    warnings = Warnings()
    warnings.resume(file)
    (row,) = warnings.of(7, {"policy/entropy": 0.1})[0]
    assert row["rule"] == "entropy_drop" and "5% of the first step's 2" in row["text"]


def test_methods_that_compare_the_whole_step_need_different_rewards_in_it():
    facts = Facts(5, 8, compares_groups=False)
    config, row = (
        WarningsConfig(),
        {"reward/frac_reward_zero_std": 1.0, "reward/mean": 0.5, "reward/min": 0.0, "reward/max": 1.0},
    )
    assert holding(Look(row, {}, facts), config) == {}
    sentences = holding(Look({**row, "reward/max": 0.0, "reward/mean": 0.0}, {}, facts), config)
    assert sentences["equal_rewards"].startswith("all samples of the step had the same reward, 0; ")


def test_numbers_that_are_not_finite_reach_no_threshold():
    nothing = dict.fromkeys(WRONG, float("nan"))
    assert holding(Look(nothing, nothing, Facts()), WarningsConfig()) == {}


def test_a_kl_penalty_alone_is_not_taken_for_a_gradient_of_the_rewards():
    row = {**WRONG, "policy/grad_norm": 0.2}
    assert (
        "same reward: no gradient from rewards; " in holding(Look(row, {}, Facts(5, 8)), WarningsConfig())["equal_rewards"]
    )


def test_every_warning_stands_on_the_page_and_names_keys_that_there_are():
    page = (Path(__file__).parents[2] / "docs/troubleshooting.md").read_text()
    assert [rule.name for rule in RULES if f"| `{rule.name}` |" not in page] == []
    look = Look(WRONG, {"policy/entropy": 1.0, "rollout/logprob_diff_mean": 0.02}, Facts(5, 8))
    reference = (Path(__file__).parents[2] / "docs/configuration.md").read_text()
    for rule in RULES:
        sentence = rule.sentence(look, 0.5)
        keys = re.findall(r"\b(?:algorithm|data|policy|rollout|reward)\.(?:[a-z_]+\.)*([a-z_]+)", sentence)
        assert keys and all(f"`{key}`" in reference or f"## algorithm.{key}" in reference for key in keys), sentence


@pytest.mark.parametrize(
    ("formed", "remedy"),
    [(1.0, "look at samples.jsonl: more steps or a higher policy.optimizer.lr may be needed"), (0.0, "data.system_prompt")],
)
def test_a_run_on_responses_is_not_told_to_change_rewards(formed, remedy):
    row = {"val/toy/accuracy": 0.0, "val/toy/form_fraction": formed, "val/toy/truncated_fraction": 0.0}
    facts = Facts(forms=lambda source: ("####",), offline=True)
    _, (text,) = Warnings(facts=facts).of(0, row)
    assert text.endswith(remedy) and "reward" not in text


def test_trajectories_that_are_cut_off_name_the_limits_of_turns_too():
    row = {"response/truncated_fraction": 0.9, "reward/mean": 0.5}
    for facts, end_of_sentence in (
        (Facts(5, 8), "cut off at data.max_response_tokens = 5: raise it"),
        (
            Facts(5, 8, has_turns=True),
            "as trajectory/end_* shows: raise environment.max_turns, data.max_response_tokens or data",
        ),
    ):
        assert end_of_sentence in holding(Look(row, {}, facts), WarningsConfig())["truncated"]
