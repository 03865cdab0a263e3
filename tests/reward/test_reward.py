from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from fivefold.config.findings import Findings
from fivefold.config.schema import RewardConfig, RewardModelConfig
from fivefold.interfaces import EngineReplica
from fivefold.reward import rules
from fivefold.reward.choose import ChosenRewards, check_rewards, choose_rewards
from fivefold.reward.pool import RewardPool
from fivefold.types import Completion, Group, Prompt, Sample
from tests.support.commands import LONGEST

GSM8K = [
    ("so it is 18.\n#### 18", "18", 1),
    ("#### 1,234", "1234", 1),
    ("#### $1,234.00", "1234", 1),
    ("#### -3", "-3", 1),
    ("#### 18.0", "18", 1),
    ("#### .5", "0.5", 1),
    ("####18", "18", 1),
    ("first #### 4 then #### 5", "5", 1),
    ("first #### 5 then #### 4", "5", 0),
    (r"thus \boxed{42}", "42", 1),
    (r"thus \boxed{42}. #### 41", "42", 0),
    (r"\boxed{\$7}", "7", 1),
    (r"\boxed{1} and \boxed{2}", "2", 1),
    (r"\boxed{3", "3", 0),
    ("the answer is 18", "18", 0),
    ("#### eighteen", "18", 0),
    ("####", "18", 0),
    ("", "18", 0),
    ("#### 180", "18", 0),
    ("#### 18", "18.5", 0),
    ("#### 1e1000", "1", 1),
    ("#### " + "9" * 5000, "9", 0),
]


@pytest.mark.parametrize(("response", "truth", "expected"), GSM8K)
def test_gsm8k_reads_the_stated_number(response, truth, expected):
    assert rules.gsm8k(response, truth) == expected


MATH = [
    (r"so \boxed{\frac{1}{2}}", r"\frac{1}{2}", 1),
    (r"so \boxed{0.5}", r"\frac{1}{2}", 1),
    (r"so \boxed{\dfrac12}", r"\frac{1}{2}", 1),
    (r"\boxed{\left( 3, \frac{\pi}{2} \right)}", r"\left( 3, \frac{\pi}{2} \right)", 1),
    (r"\boxed{x^2+2x+1}", r"(x+1)^2", 1),
    (r"\boxed{2} no, \boxed{3}", "3", 1),
    (r"\boxed{3} no, \boxed{2}", "3", 0),
    (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", 1),
    ("no answer at all", "3", 0),
    (r"\boxed{}", "3", 0),
    (r"\boxed{\frac{1}{", "3", 0),
]


@pytest.mark.parametrize(("response", "truth", "expected"), MATH)
def test_math_compares_mathematically(response, truth, expected):
    assert rules.math(response, truth) == expected


def test_format_asks_for_a_stated_answer_only():
    assert [rules.format(text, "") for text in ("#### 3", r"\boxed{x}", "3", r"\boxed{ }")] == [1, 1, 0, 0]


USER = """
import os, time
def shout(response, ground_truth):
    print("noise on stdout")
    if "hang" in response:
        while True: time.sleep(1)
    if "raise" in response: raise RuntimeError("as asked")
    if "exit" in response: os._exit(3)
    if "memory" in response: bytearray(1 << 40)
    if "nan" in response: return float("nan")
    if "infinite" in response: return float("-inf")
    return 0.25 * len(response)
def like_verl(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 1.0 if extra_info["index"] == 7 and data_source == "mine" else 0.0}
"""


def group(*texts: str) -> Group:
    prompt = Prompt(0, [1], "mine", "q", "t", extra={"index": 7})
    return Group(prompt, [Sample([1], [0.0], text, True, 0) for text in texts])


def score(pool: RewardPool, *groups: Group) -> None:
    for scored in groups:
        for sample in scored.samples:
            pool.submit(scored.prompt, sample)
    pool.wait()


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(USER)
    return path


def test_a_reward_that_hangs_raises_dies_or_eats_memory_costs_its_sample_only(user_file):
    pool = RewardPool(RewardConfig(functions={f"{user_file}:shout": 2.0}, timeout_seconds=5.0, workers=2))
    # One hangs for ever; the others need a thousandth of the time limit, also where the machine is busy.
    scored = group("ok", "hang", "raise", "exit", "memory", "nan", "infinite", "fine")
    score(pool, scored)
    pool.close()
    assert [sample.reward for sample in scored.samples] == [1.0, 0, 0, 0, 0, 0, 0, 2.0]
    assert [sample.reward_failed for sample in scored.samples] == [False, True, True, True, True, True, True, False]


def test_the_first_error_is_kept_with_the_function_s_traceback(user_file):
    pool = RewardPool(RewardConfig(functions={f"{user_file}:shout": 1.0}))
    score(pool, group("ok", "raise", "nan"))
    assert "Traceback" in pool.first_error and "mine.py" in pool.first_error
    assert "RuntimeError: as asked" in pool.first_error
    score(pool, group("ok", "nan"))
    assert "must be finite" in pool.first_error
    score(pool, group("ok"))
    assert pool.first_error is None
    pool.close()


@pytest.mark.parametrize("workers", [1, 2])
def test_an_exception_in_a_scoring_thread_is_raised(user_file, monkeypatch, workers):
    """It used to end the thread: samples stayed at 0, none of them counted as failed."""
    pool = RewardPool(RewardConfig(functions={f"{user_file}:shout": 1.0}, workers=workers))

    def fail(self, request):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("fivefold.reward.pool._Worker.ask", fail)
    with pytest.raises(OSError, match="Too many open files"):
        score(pool, group("ok", "fine"))
    pool.close()


def scored_on_two_ranks(mesh, functions: dict[str, float], texts: list[list[str]], max_failed: float):
    from fivefold.reward.manager import RewardManager

    said: list[str] = []
    pool = RewardPool(RewardConfig(functions=functions))
    try:
        groups = [group(*texts[mesh.ranks.rank])]
        manager = RewardManager(pool, mesh.ranks, max_failed=max_failed, log=said.append)
        for sample in groups[0].samples:
            manager.submit(groups[0].prompt, sample)
        manager.finish(groups)
    except RuntimeError as error:
        return str(error), said
    finally:
        pool.close()
    return [sample.reward for sample in groups[0].samples], said


def test_too_many_failures_end_the_run_on_every_rank_with_the_traceback(cluster, user_file):
    """One of four fails, on one rank only: every rank ends, or the others would wait for it."""
    texts = [["ok", "ok"], ["ok", "raise"]]
    for found, _ in cluster.run(scored_on_two_ranks, "megatron:d2", {f"{user_file}:shout": 1.0}, texts, 0.2):
        assert "reward of 1 of 4 samples failed" in found and "RuntimeError: as asked" in found
        assert "reward.max_failed = 0.2" in found


def test_few_failures_are_shown_and_the_run_goes_on(cluster, user_file):
    texts = [["ok", "ok"], ["ok", "raise"]]
    found = cluster.run(scored_on_two_ranks, "megatron:d2", {f"{user_file}:shout": 1.0}, texts, 0.25)
    assert [rewards for rewards, _ in found] == [[0.5, 0.5], [0.5, 0.0]]
    assert "RuntimeError: as asked" in found[0][1][0]


def test_several_rewards_are_weighted_and_verl_s_signature_is_understood(user_file):
    pool = RewardPool(RewardConfig(by_source={"mine": {f"{user_file}:like_verl": 1.0, "format": 0.5}}))
    scored = group("#### 1", "nothing")
    score(pool, scored)
    pool.close()
    assert [sample.reward for sample in scored.samples] == [1.5, 1.0]
    assert scored.samples[0].reward_parts == {f"{user_file}:like_verl": 1.0, "format": 1.0}


def test_reward_processes_end_when_the_trainer_is_gone(user_file):
    pool = RewardPool(RewardConfig(functions={"gsm8k": 1.0}))
    score(pool, group("#### 1"))
    process = pool._workers[0]._process
    process.stdin.close()
    assert process.wait(timeout=LONGEST) == 0
    assert not os.path.exists(f"/proc/{process.pid}")


@pytest.mark.parametrize(
    ("functions", "says"),
    [
        ({}, "no reward is known for data_source 'mine'"),
        ({"gsm9k": 1.0}, "unknown reward 'gsm9k'; built in: gsm8k, math, format"),
        ({"none.py:f": 1.0}, "no file at none.py"),
    ],
)
def test_a_reward_that_cannot_be_found_is_refused(functions, says):
    with pytest.raises(ValueError, match=says):
        choose_rewards(RewardConfig(functions=functions), "mine")


def test_a_file_without_the_function_is_refused_before_it_runs(user_file):
    with pytest.raises(ValueError, match="defines no nothing"):
        choose_rewards(RewardConfig(functions={f"{user_file}:nothing": 1.0}), "mine")


def test_with_a_reward_model_no_function_is_chosen_by_itself():
    judged = RewardConfig(model=RewardModelConfig(path="somewhere"))
    assert choose_rewards(judged, "gsm8k") == ChosenRewards({}, None) == choose_rewards(judged, "never heard of")
    both = choose_rewards(RewardConfig(functions={"gsm8k": 0.0}, model=judged.model), "any")
    assert both == ChosenRewards({"gsm8k": 0.0}, "gsm8k")
    groups = [group("#### 18")]
    pool = RewardPool(judged)
    score(pool, *groups)
    pool.close()
    (sample,) = groups[0].samples
    assert (sample.reward, sample.reward_parts, sample.reward_failed) == (0.0, {}, False)
    assert not sample.correct


# --- which reward decides whether a response is correct --------------------------------------------------------------


def accuracy_of(functions: dict[str, float], **more) -> str | None:
    return choose_rewards(RewardConfig(functions=functions, **more), "mine").accuracy


def in_both_orders(functions: dict[str, float]) -> list[dict[str, float]]:
    return [functions, dict(reversed(functions.items()))]


@pytest.mark.parametrize("functions", in_both_orders({"format": 0.1, "math": 1.0}))
def test_a_reward_that_takes_a_ground_truth_is_the_accuracy_in_either_order(functions):
    assert accuracy_of(functions) == "math"


@pytest.mark.parametrize("names", in_both_orders({"first": 0, "second": 1}))
def test_a_user_s_function_with_a_ground_truth_is_the_accuracy_without_being_run(tmp_path, names):
    path = tmp_path / "mine.py"
    path.write_text("def first(response): ...\nasync def second(response, *, ground_truth=None): ...\nraise RuntimeError\n")
    assert accuracy_of({f"{path}:{name}": 1.0 for name in names}) == f"{path}:second"


@pytest.mark.parametrize("functions", in_both_orders({"gsm8k": 0.1, "math": 1.0}))
def test_of_several_rewards_with_a_ground_truth_the_first_by_name_is_the_accuracy(functions):
    assert accuracy_of(functions) == "gsm8k"
    assert accuracy_of(functions, accuracy="math") == "math"


@pytest.mark.parametrize("names", in_both_orders({"brief": 0, "tidy": 1}))
def test_without_a_ground_truth_the_first_by_name_is_the_accuracy(tmp_path, names):
    path = tmp_path / "mine.py"
    path.write_text("def tidy(response): ...\nbrief = tidy\n")
    assert accuracy_of({f"{path}:{name}": 1.0 for name in names}) == f"{path}:brief"


def test_each_source_has_its_own_accuracy():
    for own in in_both_orders({"format": 0.1, "math": 1.0}):
        config = RewardConfig(functions={"gsm8k": 1.0, "format": 0.2}, by_source={"hard": own, "neat": {"format": 1.0}})
        chosen = [choose_rewards(config, source).accuracy for source in ("hard", "neat", "any")]
        assert chosen == ["math", "format", "gsm8k"]
        named = replace(config, accuracy="format")
        assert {choose_rewards(named, source).accuracy for source in ("hard", "neat", "any")} == {"format"}
        only_one = replace(config, accuracy="math")
        assert [choose_rewards(only_one, source).accuracy for source in ("hard", "neat", "any")] == chosen


def test_an_accuracy_that_no_source_uses_is_refused():
    with pytest.raises(ValueError, match=r"reward.accuracy must be one of .* in use, format, math: got 'gsm8k'; add it"):
        accuracy_of({"format": 0.1, "math": 1.0}, accuracy="gsm8k")
    findings = Findings(section="reward")
    check_rewards(findings, RewardConfig(functions={"math": 1.0, "gsm9k": 1.0}, accuracy="format"))
    assert [error.split(" ")[0] for error in findings.errors] == ["reward.functions:", "reward.accuracy"]


class Says:
    """An engine and its tokenizer with one response to every prompt."""

    version, replica = 0, EngineReplica(0, 1)

    def generate(self, requests):
        return iter([Completion(request.id, [1], [0.0], "stop", 0) for request in requests])

    def decode(self, token_ids, skip_special_tokens):
        return r"\boxed{4}"

    def sleep(self): ...


def evaluated(mesh, run_dir: Path, functions: dict[str, float]) -> dict[str, float]:
    from fivefold.algo import make_objective
    from fivefold.algo.values import ValueLoss
    from fivefold.observability.run_logger import RunLogger
    from fivefold.reward.manager import RewardManager
    from fivefold.rollout.generation import Generator
    from fivefold.rollout.stats import BatchPlan
    from fivefold.trainer.checks import SkipGuard
    from fivefold.trainer.evaluation import Evaluation, EvaluationSet
    from fivefold.trainer.models import Models
    from fivefold.types import Sampling
    from tests.support.toy import ToyModel

    prompts = [Prompt(i, [1], "mine", "q", truth) for i, truth in enumerate("4445")]
    pool, objective = RewardPool(RewardConfig(functions=functions)), make_objective("grpo")
    rewards, logger = RewardManager(pool, mesh.ranks), RunLogger(run_dir, [], is_main=False, steps=1)
    chosen = EvaluationSet(prompts, 2, greedy=Sampling(8), sampled=Sampling(8))
    guard = SkipGuard(mesh.ranks, 0, run_dir, print)
    models = Models(ToyModel(), None, None, objective, ValueLoss(0.5), mesh.ranks, guard)
    try:
        generator = Generator(Says(), Says(), rewards, logger)
        return Evaluation(chosen, generator, objective, mesh.ranks, logger, BatchPlan()).measure(models)[0]
    finally:
        pool.close()


def test_accuracy_does_not_depend_on_the_order_of_the_functions(cluster, tmp_path):
    """Every response states an answer; three of four answers are right."""
    runs = [
        cluster.run(evaluated, "megatron:d1", tmp_path, each)[0] for each in in_both_orders({"format": 0.1, "math": 1.0})
    ]
    assert runs[0] == runs[1]
    assert (runs[0]["val/mine/accuracy"], runs[0]["val/mine/pass@2"]) == (0.75, 0.75)
    assert runs[0]["val/mine/reward"] == pytest.approx(0.85)
