from __future__ import annotations

import contextlib
import inspect
import json
import math
import os
import re
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fivefold.config.learners import RewardModelConfig
from fivefold.config.scoring import RewardConfig
from fivefold.interfaces import EngineReplica, EngineState
from fivefold.keys.findings import Findings
from fivefold.reward import forms, maths, rules
from fivefold.reward.choose import ChosenRewards, check_rewards, choose_rewards
from fivefold.reward.cpu_limit import TooLongError, within
from fivefold.reward.pool import RewardPool, cores_of_rank
from fivefold.reward.rules import ground_truth_fault
from fivefold.rollout.stats import BatchPlan, gather_stats, rollout_metrics
from fivefold.rollout.trajectories import Task, Trajectory
from fivefold.types import Completion, Group, Prompt, Sample, Turn, last_sequence
from tests.reward.test_ifeval import INSTRUCTION_TRUTHS
from tests.support.commands import LONGEST, gone, wait_for
from tests.support.hostile_rewards import Answers

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
    ("#### 1e1000", "1", 0),
    ("#### 5,6", "5", 0),
    ("#### 5,6", "56", 0),
    ("#### 5 then #### 5,6", "5", 0),
    ("#### 12,34,567", "1234567", 0),
    ("#### 1,234,567.", "1234567", 1),
    ("#### 18, as", "18", 1),
    ("#### 5.6.7", "5.6", 0),
    (r"\boxed{5,6}", "56", 0),
    (r"\boxed{5 6}", "56", 0),
    (r"\boxed{1\,234}", "1234", 1),
    (r"\boxed{1 234 567}", "1234567", 1),
    (r"\boxed{\$ 1,234.50}", "1234.5", 1),
    ("#### " + "9" * 5000, "9", 0),
    (r"\boxed{1e99999999999999999999}", "5", 0),
    (r"\boxed{e5}", "5", 0),
]


@pytest.mark.parametrize(("response", "truth", "expected"), GSM8K)
def test_gsm8k_reads_the_stated_number(response, truth, expected):
    assert rules.gsm8k(response, truth) == expected


CALCULATIONS = [
    ("1/2", "1"), ("5 1/2", "5"), (r"5\frac{1}{2}", "5"), ("5 * 10", "5"), ("5 x 10", "5"), ("5 × 10", "5"), (r"5 \times 10", "5"), ("5(2)", "5"),
    ("5:30", "5"), ("3^2", "3"), ("3^{2}", "3"), ("10-12", "10"), ("5e3", "5"), ("5, 6", "5"), ("5½", "5"), ("5 * 10 = 50", "5"), ("2 + 3 = 1/2", "1"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "truth"), CALCULATIONS)
def test_gsm8k_takes_no_number_out_of_a_calculation(text, truth):
    assert rules.gsm8k(f"#### {text}", truth) == rules.gsm8k(f"\\boxed{{{text}}}", truth) == 0


@pytest.mark.parametrize("text", [
    "**1234**", "**$1,234**", r"\$1234", "$1{,}234", "1 234", r"1234 \text{ dollars}", r"1234\%", r"\(1234\)", "1234 dollars", "= 1234",
    "1200 + 34 = 1234", "2 * $617 = $1,234 dollars", r"617 \times 2 = 1234",
])  # fmt: skip
def test_gsm8k_reads_a_number_with_its_unit_and_the_right_side_of_an_equation(text):
    assert rules.gsm8k(f"#### {text}", "1234") == rules.gsm8k(f"\\boxed{{{text}}}", "1234") == 1
    assert rules.gsm8k(f"#### {text}", "123") == rules.gsm8k(f"\\boxed{{{text}}}", "123") == 0


def test_gsm8k_reads_the_last_line_that_states_a_number():
    for last in ("**7**", "-$7", r"$\frac{1}{2}$", "7/2"):
        assert rules.gsm8k(f"#### 5\n#### {last}", "5") == 0
    assert rules.gsm8k("#### 5\n#### -$7", "-7") == rules.gsm8k("#### 5\n####", "5") == rules.gsm8k("**#### 5**", "5") == 1
    assert rules.gsm8k("#### Step 1: x = 5\n\\boxed{18}", "18") == rules.gsm8k("#### 18, as 3 * 6 = 18.0", "18") == 1
    assert rules.gsm8k("#### 18 (that is 3 more than 15)", "18") == rules.gsm8k("#### 18/hour", "18") == 1


COUNTDOWN = '{"target": 98, "numbers": [44, 19, 35]}'
EQUATIONS = [
    ("so\n<answer>44 + 19 + 35</answer>", 1.0),
    ("<answer>35*1</answer> <answer>(44+19)+35</answer>", 1.0),
    ("<answer>44 + 19 + 35 = 98</answer>", 0.1),
    ("<answer>44 + 19 - 35</answer>", 0.1),
    ("<answer>44 + 19 + 35 + 0</answer>", 0.1),
    ("<answer>44 + 54</answer>", 0.1),
    ("<answer>__import__('os') or 44+19+35</answer>", 0.1),
    ("<answer>44 / (19 - 19) + 35</answer>", 0.1),
    ("<answer>44 + 19 + 35</answer>\nThat is it.", 0.0),
    ("44 + 19 + 35", 0.0),
    ("<answer></answer>", 0.1),
    ("<answer>" + "(" * 5000 + "44+19+35" + ")" * 5000 + "</answer>", 0.1),
]


@pytest.mark.parametrize(("response", "expected"), EQUATIONS)
def test_countdown_wants_every_number_once_and_the_target(response, expected):
    assert rules.countdown(response, COUNTDOWN) == expected


def test_countdown_divides_exactly_and_raises_to_no_power():
    truth = '{"target": 1, "numbers": [1, 3, 3]}'
    assert rules.countdown("<answer>1 / 3 * 3</answer>", truth) == 1.0
    assert rules.countdown("<answer>1 ** 3 ** 3</answer>", truth) == 0.1
    assert ground_truth_fault("countdown", truth) is None
    for wrong in ("1", "{}", '{"target": "x", "numbers": [1]}', '{"target": 1, "numbers": [1.5]}', ""):
        assert "for the reward countdown" in str(ground_truth_fault("countdown", wrong))


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<think>a</think><answer>b</answer>", 1),
        ("well <think>\na\n</think>\n <answer>\nb\n</answer> \n", 1),
        ("<think>a</think><answer>b</answer>\nand more", 1),
        ("<think>a</think> so <answer>b</answer>", -1),
        ("<think>a</think><answer>b</answer> and more", -1),
        ("<think>a</think><answer>b", -1),
        ("</think><answer>b</answer><think>", -1),
        ("<answer>b</answer>", -1),
        ("", -1),
    ],
)
def test_the_form_of_reasoning_and_answer_is_that_of_the_field_s_pattern(response, expected):
    assert rules.think_answer(response, "b") == expected
    pattern = r".*?<think>.*?</think>\s*<answer>.*?</answer>\s*$"
    assert bool(re.match(pattern, response, re.DOTALL | re.MULTILINE)) == (expected > 0)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<think>a</think>b", 0.0), ("x<think></think>", 0.0), ("a", -1.0), ("<think>a", -1.0), ("</think>a<think>", -1.0),
        ("<think>a</think><think>", -1.0), ("<think>a</think>b</think>", -1.0), ("", -1.0),
    ],
)  # fmt: skip
def test_reasoning_stands_once_between_its_tags(response, expected):
    assert rules.think(response, "b") == expected


HOSTILE = ["9^{9^{9^{9}}}", "9**9**9**9", "9^{9\\cdot 9^{9}}", "((((((9^9)^9)^9)^9)^9)^9)^9", "1000000!", "(10!)!", "9^{10!}",
           "10^{100000}", "1e999999999", "9" * 4000, r"\binom{1000000}{500000}", "3!!!!",
           r"[1,9^{9999\cdot9999}]", "9^{99(1+999)}", "9^{0}9^{9999}9^{9999}"]  # fmt: skip
ORDINARY = ["x^2+2x+1", "2^{2023}-1", "3^{3^2}", "e^{x^2}", "e^{2^{x}}", "x^{10}+x^9+x^8+x^7+x^6+x^5", "(2n)!", "5!", "2^{n!}",
            r"\binom{20}{10}", "(-1)^{n(n+1)/2}", "2^{1000+1000}", r"x^{100}+x^{99}+x^{98}", r"2^{3}\cdot 3^{2}\cdot 5^4\cdot 7^{3}", "1000000"]  # fmt: skip


@pytest.mark.parametrize("answer", HOSTILE)
def test_numbers_that_no_one_could_write_out_are_wrong_at_once(answer):
    """Computed, most of these never end, not even by a signal."""
    assert maths.is_large(answer)
    assert rules.math(f"\\boxed{{{answer}}}", "3") == 0
    assert rules.math(f"\\boxed{{{answer}}}", f" {answer}") == 1


@pytest.mark.parametrize("answer", ORDINARY)
def test_ordinary_answers_are_not_taken_for_large(answer):
    assert not maths.is_large(answer)


def scored_with_slow_ones(mesh, number: int):
    """Slow responses, then others: the samples, the order in which they were scored, the metrics of a step of them."""
    pool = RewardPool(RewardConfig(functions={"math": 1.0}, workers=1, wait_seconds=LONGEST))
    pool._slow_seconds = pool._slow_budget = 3.0
    prompt = Prompt(0, [1], "mine", "q", "(x+y+z)^{301}")
    texts = [r"\boxed{(x+y+z)^{300}}"] * number + [r"\boxed{(x+y+z)^{301}}", r"\boxed{x}"] * 4
    samples = [Sample([1], [0.0], text, "answered", 0) for text in texts]
    order: list[int] = []
    try:
        # The trial of a process has the same limit.
        assert pool.start([(prompt, Sample([], [], texts[0], "answered", 0))]) is None
        scoring = [pool.submit(prompt, sample) for sample in samples]
        for place, future in enumerate(scoring):
            future.add_done_callback(lambda _, place=place: order.append(place))
        assert pool.wait(scoring) is None
    finally:
        pool.close()
    return samples, order, rollout_metrics(gather_stats([Group(prompt, samples)], mesh.ranks, BatchPlan()), 0)


@pytest.mark.parametrize("number", [1, 24])
def test_a_response_that_takes_a_built_in_too_long_is_a_0_and_counted_not_failed(cluster, number):
    """Others are scored first, and the step has a limit for all; math-verify would take minutes for each."""
    begin = time.monotonic()
    ((samples, order, metrics),) = cluster.run(scored_with_slow_ones, "megatron:d1", number)
    assert time.monotonic() - begin < LONGEST / 2
    assert [sample.reward for sample in samples] == [0.0] * number + [1.0, 0.0] * 4
    assert [sample.reward_timed_out for sample in samples] == [True] * number + [False] * 8
    assert not any(sample.reward_failed for sample in samples)
    assert order[:8] == list(range(number, number + 8))
    assert (metrics["reward/timeouts"], metrics["reward/failed"]) == (number, 0)


def test_a_built_in_that_runs_too_long_gives_0_and_a_user_s_function_keeps_its_time(user_file, monkeypatch):
    """The process hangs in a call of the kernel until it is ended; the function after it has the sample's time to itself."""
    path = user_file.parent / "hangs.py"
    path.write_text(
        "import time\nfrom fivefold.reward import rules\nfrom dataclasses import replace\n"
        "def hang(response):\n    if 'hang' in response:\n        import signal; signal.signal(signal.SIGPROF, signal.SIG_IGN)\n"
        "        while True: time.sleep(1)\n    return 1.0\n"
        "rules.BUILT_IN['format'] = replace(rules.BUILT_IN['format'], function=hang)\n"
        "def own(response): return 0.5\n"
    )
    pool = RewardPool(RewardConfig(functions={f"{path}:own": 1.0, "format": 1.0}, timeout_seconds=3.0, workers=1))
    pool.weights("mine")
    try:
        assert pool.start([trial()]) is None
        scored = group("ok", "hang", "ok")
        assert score(pool, scored) is None
    finally:
        pool.close()
    assert [(sample.reward, sample.reward_timed_out) for sample in scored.samples] == [
        (1.5, False),
        (0.5, True),
        (1.5, False),
    ]


def of_row(response: str, truth: str) -> dict[str, object]:
    """What a reward process receives of a response."""
    row = {"ground_truth": truth, "prompt": "q", "prompts": "q", "data_source": "mine", "extra_info": {}, "columns": {}}
    return {"response": response, **row}


PLAIN_TRUTHS = {"math_any": ['["3"]'], "countdown": [COUNTDOWN], "multiple_choice": ["A"], "multiple_choice_soft": ["A"]}
TRUTHS = {**PLAIN_TRUTHS, "ifeval": INSTRUCTION_TRUTHS, "ifeval_fraction": INSTRUCTION_TRUTHS[:1]}
FUNCTIONS = {name: row.function for name, row in rules.BUILT_IN.items() if row.function and not row.runs_programs}
HOSTILE_TEXTS = (
    "\\boxed{", "{", "}", "\\boxed{}", "#### 1", "####", "#", " ", "\n", "1,111", ",", "$", "\\frac{", "9", "[", "]", "<", "<<", "<<a",
    "<answer>", "</answer>", "<think>", "</think>", "</think> ", "</answer> ", "<answer>1", ".", ". ", ".'", "…", "!", '"', "*", "**",
    "***", "* * *", "******", "-", "'a", "a'", "a-", "A", "Aa", "`", "```", "```json", "a ", "A B ", "P.", "p. p", "answer is", "answer is A",
    "=", "5%", "5% ", "^", "(", "(1+", "+", "44+", "é", "\t", "\r", "\\", "[1,", '{"a":', "yes", "My answer is ", "section 1", "\n\n",
)  # fmt: skip


def cpu_seconds(function, response: str, truth: str) -> float:
    begin = time.process_time()
    with contextlib.suppress(TooLongError):
        within(4.0, lambda: forms.call("built in", function, of_row(response, truth)))
    return time.process_time() - begin


@pytest.mark.parametrize("name", FUNCTIONS)
def test_time_of_a_built_in_grows_with_the_text_and_no_faster(name):
    """Eight times the text takes eight times the time, and 64 times where a part of it is quadratic."""
    rules.resolve(name)
    slow = []
    for truth in TRUTHS.get(name, ["3"]):
        plain = cpu_seconds(FUNCTIONS[name], "some words. " * 5000, truth)
        for piece in HOSTILE_TEXTS:
            for end in ("", " x", "\n</answer>]"):
                short, long = (piece * (count // len(piece)) + end for count in (8000, 64_000))
                seconds = cpu_seconds(FUNCTIONS[name], long, truth)
                if seconds > 0.3 + 20 * plain and seconds > 20 * cpu_seconds(FUNCTIONS[name], short, truth):
                    # Again: other processes on a core cost this one its caches.
                    seconds = min(cpu_seconds(FUNCTIONS[name], long, truth) for _ in range(3))
                if seconds > 0.3 + 20 * plain and seconds > 20 * cpu_seconds(FUNCTIONS[name], short, truth):
                    slow.append((truth[:60], piece, end, seconds))
    assert slow == []


def test_a_built_in_reward_is_a_number_for_any_answer(tmp_path):
    """Digits such as `²` and `①` are no decimals: `int` refuses them. benchmarks/attacks.py makes more of them."""
    answers = Answers(tmp_path)
    assert [fault for number in range(2500) if (fault := answers(number)[1])] == []


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_built_in_that_is_prepared_imports_nothing_on_a_response_s_time(name):
    """Or the first response of a process would have 0 for the time that imports take."""
    (truth, *_) = TRUTHS.get(name, ["3"])
    code = (
        "import sys\nfrom fivefold.reward import forms, rules\n"
        f"function = rules.resolve({name!r})\nbefore = set(sys.modules)\n"
        f"forms.call({name!r}, function, {of_row(chr(92) + 'boxed{3}', truth)!r})\n"
        "print(sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LONGEST)
    assert done.stdout == "[]\n", done


RELATIONS = (
    "\\equiv", ":=", "\\coloneqq", "\\iff", "\\Leftrightarrow", "\\leftrightarrow", "\\Longleftrightarrow", "\\therefore", "\\sim", "\\simeq",
    "\\cong", "\\doteq", "\\mapsto", "\\longmapsto", "\\hookrightarrow", "\\bowtie", "\\vdash", "\\dots", "≔", "≡", "⇔", ".",
)  # fmt: skip
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
    (r"\boxed{6=5}", "5", 0),
    (r"\boxed{6==5}", "5", 0),
    (r"\boxed{5=6=5}", "5", 0),
    (r"\boxed{6\to 5}", "5", 0),
    (r"\boxed{6\Rightarrow 5}", "5", 0),
    *((f"\\boxed{{6{sign} 5}}", "5", 0) for sign in RELATIONS),
    *((f"so $6{sign} 5$.", "5", 0) for sign in RELATIONS if sign != "."),
    ("6=5", "5", 0),
    (r"Thus $x = (2,\infty)$.", r"(2,\infty)", 1),
    (r"Thus $x = \frac{270}7\text{ degrees}$.", r"\frac{270}7\text{ degrees}", 1),
    ("so $7=6=5$ in all", "5", 0),
    ("so $x=2+3=5$ in all", "5", 1),
    ("2 + 2 = 4, so the answer is 5.", "5", 1),
    ("It is 1,000 + 234 = 1,234.", "1234", 1),
    (r"\boxed{\gcd(10, 15) = \lfloor 5.3 \rfloor = 5}", "5", 1),
    (r"\boxed{\mathbb{R}\setminus\{3\}}", r"(-\infty,3)\cup(3,\infty)", 1),
    (r"\boxed{\theta = 30^{\circ}}", "30", 1),
    (r"\boxed{x=5}", "5", 1),
    (r"\boxed{x_6=5}", "5", 1),
    (r"\boxed{2+3=5}", "5", 1),
    (r"\boxed{\frac{10}{2}=5}", "5", 1),
    (r"\boxed{x = \frac{1}{3} = 0.33}", r"\frac{1}{3}", 0),
    (r"\boxed{x = 0.33 = \frac{1}{3}}", r"\frac{1}{3}", 1),
    ("5%" * 480, "5", 0),
    *((piece * 480, "5", 0) for piece in ("5% ", "5 % ", "5°", "5;", "5a", "$5$", "5%\n5", "5=")),
    ("111,111,111,111,111,111,111", "1" * 21, 1),
    ("\\boxed{" + "5%" * 480 + "}", "5", 0),
    ("it is 5%", "5", 1),
    (r"\boxed{5\%}", "5", 1),
    (r"\boxed{[1,9^{9999\cdot9999}]}", "5", 0),
    (r"\boxed{25 \text{ cm²}}", "25", 1),
    ("The area is 25 cm², so the answer is 25", "25", 1),
    (r"\boxed{②}", "2", 0),
]


@pytest.mark.parametrize(("response", "truth", "expected"), MATH)
def test_math_compares_mathematically(response, truth, expected):
    assert rules.math(response, truth) == expected


STATEMENTS = [
    (r"\boxed{x = 2 \text{ or } x = 3}", "2,3", 1),
    (r"\boxed{x=2 \quad \text{and} \quad y=3}", "2,3", 1),
    (r"\boxed{x_1=2, x_2=3}", "2, 3", 1),
    (r"\boxed{x=2,\ y=3}", "(2,3)", 1),
    (r"\boxed{\{x=2, x=3\}}", r"\{2,3\}", 1),
    ("so $x=2, x=3$.", "2,3", 1),
    (r"\boxed{x=-2, x=2}", r"\pm 2", 1),
    (r"\boxed{x=2, x=4}", "2,3", 0),
    (r"\boxed{x=7=2, x=3}", "2,3", 0),
    (r"\boxed{6=5, x=5}", "5", 0),
    (r"\boxed{7 = 10{,}000}", "10,000", 0),
    (r"\boxed{P(X=2) = \frac38}", r"\frac{3}{8}", 1),
    (r"so $P(X=2) = \frac38$.", r"\frac{3}{8}", 1),
    (r"\boxed{\sum_{n=1}^{5} 3 = 15}", "15", 1),
    (r"\boxed{P(X=2) = 4 = 5}", "5", 0),
    *(
        (f"\\boxed{{{text}}}", "5", 0)
        for text in ("(6=5)", r"\{6=5\}", "(6=5", "6)=5", "(x=6=5)", "(6=5)+0=5", r"\mathbf{6=5}")
    ),
    (r"\boxed{x=5.}", "5", 1),
]


@pytest.mark.parametrize(("response", "truth", "expected"), STATEMENTS)
def test_math_reads_several_values_and_conditions_in_brackets(response, truth, expected):
    assert rules.math(response, truth) == expected


BOLD = [
    ("The answer is **5**.", 1), ("**Answer:** 5", 1), ("so ***5***", 1), ("**2 * 3 = 6**, so **x = 5** in all", 1), ("**7**\n\n**5**", 1),
    (r"\boxed{**5**}", 1), ("The answer is **6**.", 0), ("**6 = 5**", 0),
]  # fmt: skip


@pytest.mark.parametrize(("response", "expected"), BOLD)
def test_math_reads_bold_answers(response, expected):
    assert rules.math(response, "5") == expected


@pytest.mark.parametrize("answer", ["2**3**2", "9**9**9", "(2)**3**2", "9 ** 9 ** 9", "**9**9**9**", "x = **9**9**9"])
def test_powers_in_stars_are_not_taken_for_bold(answer):
    assert maths.is_large(maths._BOLD.sub(r"\2", answer))
    assert rules.math(f"so {answer}", "512") == 0


@pytest.mark.parametrize(
    ("response", "solutions", "expected"),
    [
        (r"so \boxed{1/2}", [r"\boxed{3}", r"it is \boxed{0.5}"], 1.0),
        (r"so \boxed{1/2}", [r"\frac{1}{2}"], 1.0),
        (r"so \boxed{1/2}", [r"\boxed{3}", r"\boxed{4}"], 0.0),
    ],
)
def test_one_of_several_solutions_is_enough(response, solutions, expected):
    assert rules.resolve("math_any")(response, json.dumps(solutions)) == expected
    assert ground_truth_fault("math_any", json.dumps(solutions)) is None
    assert "JSON list of solutions" in ground_truth_fault("math_any", "1/2") and ground_truth_fault("math_any", "[]")


def test_format_asks_for_a_stated_answer_only():
    assert [rules.format(text, "") for text in ("#### 3", r"\boxed{x}", "3", r"\boxed{ }")] == [1, 1, 0, 0]
    assert rules.format(r"\boxed{1e99999999999999999999}", "") == 1


def test_a_truth_whose_exponent_no_decimal_holds_is_refused_in_a_sentence():
    assert "must be a number" in str(ground_truth_fault("gsm8k", "1e99999999999999999999"))


def test_the_letter_after_the_last_answer_is_counts_whatever_the_letters_before_it():
    assert rules.multiple_choice("İİİ answer is B", "B") == 1
    assert rules.multiple_choice("The answer is A, no: the Answer Is C, not D", "C") == 1


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
    return Group(prompt, [Sample([1], [0.0], text, "answered", 0) for text in texts])


def score(pool: RewardPool, *groups: Group) -> str | None:
    """The first error."""
    return pool.wait([pool.submit(scored.prompt, sample) for scored in groups for sample in scored.samples])


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(USER)
    return path


def test_a_reward_that_hangs_raises_dies_or_eats_memory_costs_its_sample_only(user_file):
    pool = RewardPool(RewardConfig(functions={f"{user_file}:shout": 2.0}, timeout_seconds=5.0, workers=2))
    # One hangs permanently; the others need a thousandth of the time limit, also where the machine is busy.
    scored = group("ok", "hang", "raise", "exit", "memory", "nan", "infinite", "fine")
    score(pool, scored)
    pool.close()
    assert [sample.reward for sample in scored.samples if not sample.reward_failed] == [1.0, 2.0]
    assert all(math.isnan(sample.reward) and not sample.correct for sample in scored.samples if sample.reward_failed)
    assert [sample.reward_failed for sample in scored.samples] == [False, True, True, True, True, True, True, False]


def test_the_first_error_is_kept_with_the_function_s_traceback(user_file):
    pool = RewardPool(RewardConfig(functions={f"{user_file}:shout": 1.0}, workers=1))
    error = score(pool, group("ok", "raise", "nan"))
    assert "Traceback" in error and "mine.py" in error
    assert "RuntimeError: as asked" in error
    assert "must be finite" in score(pool, group("ok", "nan"))
    assert score(pool, group("ok")) is None
    pool.close()


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), MemoryError(), ValueError("bad"), RuntimeError()])
@pytest.mark.parametrize("workers", [1, 2])
def test_whatever_goes_wrong_in_the_pool_fails_the_sample_and_is_shown(user_file, monkeypatch, workers, error):
    """It used to end the thread: samples stayed at 0, none of them counted as failed."""
    pool = RewardPool(RewardConfig(functions={f"{user_file}:shout": 1.0}, workers=workers))

    def fail(self, request, seconds):
        raise error

    monkeypatch.setattr("fivefold.reward.pool._Worker.ask", fail)
    scored = group("ok", "fine")
    assert type(error).__name__ in score(pool, scored)
    assert [sample.reward_failed for sample in scored.samples] == [True, True]
    monkeypatch.undo()
    score(pool, scored)
    assert [sample.reward for sample in scored.samples] == [0.5, 1.0]
    pool.close()


def test_files_with_high_numbers_and_none_left_are_no_zeros(user_file):
    """`select` knows the numbers below 1024 only; where no file can be opened, no process can be started."""
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    pool = RewardPool(RewardConfig(functions={f"{user_file}:shout": 1.0}, workers=1))
    try:
        scored = group("ok")
        score(pool, scored)
        assert [sample.reward for sample in scored.samples] == [0.5]
        for worker in pool._workers:
            worker.kill()
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(held) + 1, before[1]))
        try:
            error = score(pool, scored)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert scored.samples[0].reward_failed and "Too many open files" in error
    finally:
        for file in held:
            os.close(file)
        pool.close()


TROUBLE = """
import os, signal, subprocess, sys, time
from dataclasses import dataclass
from neighbour import LENGTH  # next to this file

@dataclass
class Found:
    score: float

calls = 0
def trouble(response, ground_truth):
    global calls
    calls += 1
    if response == "fork": os.fork()
    if response == "fork and die" and os.fork(): os._exit(1)
    if response == "daemon":
        if not os.fork():
            time.sleep(1000)
    if response == "stdin" and (sys.stdin.read() or input()): return 7
    if response == "stdout": os.write(1, b'{"id": 1, "values": {}}' + chr(10).encode() * 9)
    if response == "exit": sys.exit(0)
    if response == "exit at once": os._exit(0)
    if response == "segfault": os.kill(os.getpid(), signal.SIGSEGV)
    if response == "stop": os.kill(os.getpid(), signal.SIGSTOP)
    if response == "close": os.closerange(0, 100)
    if response == "endless output": os.system("head -c 10000000 /dev/zero")
    if response == "answers itself":
        for file in range(3, 200):
            try: os.write(file, b'{"id": 0, "values": {}}' + chr(10).encode())
            except OSError: pass
    if response == "bad JSON":
        for file in range(3, 200):
            try: os.write(file, b'}{' + chr(10).encode())
            except OSError: pass
    if response == "nothing": return None
    if response == "text": return "high"
    if response == "mapping": return {"reward": 1}
    if response == "huge": return 10 ** 400
    if response == "environment": return float(any("SECRET" in name for name in os.environ))
    if response == "calls": return calls
    return Found(LENGTH).score
"""
SCORED = {"ok": 0.5, "fork": 0.5, "stdout": 0.5, "endless output": 0.5, "environment": 0.0, "daemon": 0.5}
FAIL = {
    "fork and die": "ended",
    "stdin": "EOFError",
    "exit": "SystemExit: 0",
    "exit at once": "ended with exit code 0",
    "segfault": "ended by SIGSEGV",
    "stop": "no reward within",
    "close": "ended with exit code 1",
    "answers itself": "not the answer",
    "bad JSON": "no exchange with the reward process",
    "nothing": "got None; is a `return` missing?",
    "text": "must return a number or {'score': number}: got 'high'",
    "mapping": "must return a number or {'score': number}: got {'reward': 1}",
    "huge": "OverflowError",
}


@pytest.fixture
def trouble_file(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setenv("MY_SECRET", "do not show")
    path = tmp_path / "trouble.py"
    path.write_text(TROUBLE)
    (tmp_path / "neighbour.py").write_text("LENGTH = 0.5")
    return path


def test_a_function_that_does_what_it_should_not_fails_its_own_sample_only(trouble_file):
    """With one process, so that what a function leaves over would be met by the next sample."""
    pool = RewardPool(RewardConfig(functions={f"{trouble_file}:trouble": 1.0}, workers=1, timeout_seconds=2.0))
    try:
        for response, says in FAIL.items():
            scored = group(response)
            error = score(pool, scored)
            assert scored.samples[0].reward_failed, response
            assert says in error, (response, error)
            scored = group(*SCORED)
            error = score(pool, scored)
            assert error is None, (response, error)
            assert {sample.text: sample.reward for sample in scored.samples} == SCORED, response
    finally:
        pool.close()


def test_a_sample_whose_process_someone_kills_is_scored_by_another_one_once(tmp_path):
    """The function kills its own process: the first time only, as the kernel may for lack of memory, or every time."""
    first = tmp_path / "first"
    path = tmp_path / "killed.py"
    path.write_text(
        "import os, pathlib, signal\n"
        "def killed(response):\n"
        "    first = pathlib.Path(response)\n"
        "    if not first.exists():\n"
        "        if first.name == 'first': first.touch()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return 0.5\n"
    )
    pool = RewardPool(RewardConfig(functions={f"{path}:killed": 1.0}, workers=1))
    try:
        scored = group(str(first))
        assert score(pool, scored) is None
        assert (scored.samples[0].reward, scored.samples[0].reward_failed) == (0.5, False)
        scored = group(str(tmp_path / "always"))
        assert "ended by SIGKILL" in (score(pool, scored) or "")
        assert scored.samples[0].reward_failed
    finally:
        pool.close()


def test_a_reward_process_that_is_killed_while_it_starts_is_started_again(tmp_path):
    path = tmp_path / "killed.py"
    path.write_text(
        "import os, pathlib, signal\n"
        f"first = pathlib.Path({str(tmp_path / 'first')!r})\n"
        "if not first.exists():\n"
        "    first.touch()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "def killed(response):\n"
        "    return 0.5\n"
    )
    pool = RewardPool(RewardConfig(functions={f"{path}:killed": 1.0}, workers=1))
    try:
        assert pool.start([trial()]) is None
        scored = group("text")
        assert score(pool, scored) is None
        assert scored.samples[0].reward == 0.5
    finally:
        pool.close()


def test_named_variables_of_the_environment_are_passed_on(trouble_file):
    name = f"{trouble_file}:trouble"
    pool = RewardPool(RewardConfig(functions={name: 1.0}, environment=["MY_SECRET"], workers=1))
    scored = group("environment")
    score(pool, scored)
    pool.close()
    assert scored.samples[0].reward == 1.0
    findings = Findings(section="reward")
    check_rewards(findings, RewardConfig(functions={name: 1.0}, environment=["MY_SECRET", "NOT_SET"]))
    assert findings.errors == ["reward.environment names variables that are set here: got 'NOT_SET'"]


def trial(text: str = "ok"):
    first = group(text)
    return first.prompt, first.samples[0]


def test_every_function_is_called_once_before_the_first_sample(trouble_file):
    """Also in a process that takes the place of one that was killed."""
    pool = RewardPool(RewardConfig(functions={f"{trouble_file}:trouble": 1.0}, workers=1))
    pool.weights("mine")
    assert pool.start([trial()]) is None
    for text in ("calls", "segfault", "calls"):
        scored = group(text)
        error = score(pool, scored)
        assert text == "segfault" or scored.samples[0].reward == 2.0
    assert "RuntimeError" not in (error or "")
    pool.close()


def test_a_trial_reports_what_a_function_raises_and_refuses_one_that_does_not_load(tmp_path, user_file):
    pool = RewardPool(RewardConfig(functions={f"{user_file}:shout": 1.0}, workers=1))
    pool.weights("mine")
    assert "RuntimeError: as asked" in pool.start([trial("raise")])
    pool.close()
    path = tmp_path / "broken.py"
    path.write_text("import not_there\ndef broken(response): ...\n")
    pool = RewardPool(RewardConfig(functions={f"{path}:broken": 1.0}, workers=1))
    pool.weights("mine")
    with pytest.raises(ValueError, match=r"(?s)do not start:.*No module named 'not_there'"):
        pool.start([trial()])
    pool.close()


def test_rewards_that_take_too_long_together_end_with_the_wait(tmp_path):
    """Sixty samples that hang for as long as they may would take a minute in one process."""
    path = tmp_path / "slow.py"
    path.write_text("import time\ndef slow(response): time.sleep(1000)\n")
    config = RewardConfig(functions={f"{path}:slow": 1.0}, workers=1, timeout_seconds=1.0, wait_seconds=1.5)
    pool, begin = RewardPool(config), time.monotonic()
    scored = group(*["x"] * 60)
    score(pool, scored)
    assert time.monotonic() - begin < 30
    assert all(sample.reward_failed for sample in scored.samples)
    # The next step has its own time.
    assert "no reward within 1 s" in score(pool, group("x"))
    pool.close()


def test_samples_are_scored_by_as_many_processes_as_the_rank_has_cores(tmp_path, monkeypatch):
    """Each of four samples waits until all four are being scored."""
    path = tmp_path / "together.py"
    path.write_text(
        "import os, time\n"
        "def together(response, ground_truth):\n"
        f"    open({str(tmp_path)!r} + '/at-' + response, 'w').close()\n"
        f"    while sum(name.startswith('at-') for name in os.listdir({str(tmp_path)!r})) < 4: time.sleep(0.01)\n"
        "    return 1\n"
    )
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(8))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert cores_of_rank() == 4
    pool = RewardPool(RewardConfig(functions={f"{path}:together": 1.0}, timeout_seconds=LONGEST))
    scored = group("1", "2", "3", "4")
    score(pool, scored)
    pool.close()
    assert [sample.reward for sample in scored.samples] == [1.0] * 4


def test_no_one_waits_for_a_process_that_starts_where_another_is_free_sooner(tmp_path):
    """Every process but the first hangs while it imports; the first takes longer a sample than others wait for it."""
    path = tmp_path / "slow.py"
    path.write_text(
        "import os, time\n"
        "try:\n"
        f"    os.mkdir({str(tmp_path / 'first')!r})\n"
        "except FileExistsError:\n"
        "    time.sleep(1000)\n"
        "def slow(response):\n"
        "    time.sleep(0.3)\n"
        "    return 1\n"
    )
    pool = RewardPool(RewardConfig(functions={f"{path}:slow": 1.0}, workers=3))
    scored = group(*"abcdef")
    assert pool.start([(scored.prompt, scored.samples[0])]) is None
    scoring = [pool.submit(scored.prompt, sample) for sample in scored.samples]
    assert [future.result(timeout=LONGEST) for future in scoring] == [None] * 6
    assert not pool._asleep, "nobody has waited, so this says nothing"
    pool.close()
    assert [sample.reward for sample in scored.samples] == [1.0] * 6


def test_rewards_read_what_the_model_said_in_the_order_of_its_turns(tmp_path):
    """A sub-agent's sequence has the turn between two turns of the main one, whose observations are not the model's."""
    path, calls = tmp_path / "mine.py", tmp_path / "calls"
    path.write_text(
        "import json\n"
        "def mine(completions, completion_ids):\n"
        f"    json.dump([completions[0][0]['content'], completion_ids[0]], open({str(calls)!r}, 'w'))\n"
        "    return [1.0]\n"
    )
    held = Trajectory(Task(Prompt(0, [1], "s", "", ""), 0, 0, (), 0))
    for context, token, text in (([1], 5, "I ask."), ([2], 6, "It is 7."), ([1, 5, 9, 9], 7, "It is 42.")):
        sequence = held.extend_or_begin(context)
        held.sampled(sequence, Completion(0, [token], [-0.5], "stop", 0), text, None, 0.0)
    samples = held.samples()
    assert [[turn.number for turn in sample.turns] for sample in samples] == [[0, 2], [1]]
    pool = RewardPool(RewardConfig(functions={f"{path}:mine": 1.0}, workers=1))
    for sequences, text, tokens in (
        (samples, "I ask.\nIt is 7.\nIt is 42.", [5, 6, 7]),
        (samples[:1], "I ask.\nIt is 42.", [5, 7]),
    ):
        assert pool.wait([pool.submit(Prompt(0, [1], "s", "q", "t"), *sequences)]) is None
        assert json.loads(calls.read_text()) == [text, tokens]
    pool.close()
    assert last_sequence(samples) is samples[0]


@pytest.mark.parametrize("times", [1, 2])
def test_a_trajectory_of_several_sequences_is_scored_once_and_the_same_again(tmp_path, times):
    """A turn that two sequences contain counts once, and the weight of the environment's rewards is not applied twice."""
    path, calls = tmp_path / "mine.py", tmp_path / "calls"
    path.write_text(
        f"def mine(response):\n    open({str(calls)!r}, 'a').write(response + ';')\n    return float(response == 'a\\nb\\nc')\n"
    )
    pool = RewardPool(RewardConfig(functions={"environment": 0.5, f"{path}:mine": 2.0}, workers=1))
    first = Sample(
        [5, 6], [-0.5] * 2, "a\nb", "done", 0, trajectory=0, turns=(Turn(0, 0, 1, given=0.25), Turn(1, 1, 2, given=1.0))
    )
    second = Sample(
        [5, 7], [-0.5] * 2, "c", "done", 0, trajectory=0, turns=(Turn(0, 0, 1, given=0.25), Turn(2, 1, 2, given=0.5))
    )
    prompt = Prompt(0, [1], "mine", "q", "t")
    for _ in range(times):
        assert pool.wait([pool.submit(prompt, first, second)]) is None
    pool.close()
    assert calls.read_text() == "a\nb\nc;" * times
    for sample in (first, second):
        assert sample.reward == 0.5 * 1.75 + 2.0 and not sample.reward_failed
        assert sample.reward_parts == {"environment": 1.75, f"{path}:mine": 1.0}
    assert [turn.reward for turn in first.turns + second.turns] == [0.125, 0.5, 0.125, 0.25]


@pytest.mark.parametrize("given", [(1e300, -1e300), (math.inf, 0.0), (math.nan, 0.0), (1e38, 0.0)])
def test_a_reward_of_an_environment_that_float32_does_not_hold_fails_its_trajectory(given):
    """Each turn has its reward checked, since their sum may be an ordinary number."""
    pool = RewardPool(RewardConfig(functions={"environment": 1.0}, workers=1))
    turns = tuple(Turn(number, number, number + 1, given=value) for number, value in enumerate(given))
    sample = Sample([5, 6], [-0.5] * 2, "a", "done", 0, trajectory=0, turns=turns)
    error = pool.wait([pool.submit(Prompt(0, [1], "mine", "q", "t"), sample)])
    pool.close()
    assert "a reward must be finite, and at most 1e+37" in error and sample.reward_failed


def test_a_trajectory_whose_reward_fails_has_failed_in_all_its_sequences(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def mine(response):\n    raise ValueError('no')\n")
    pool = RewardPool(RewardConfig(functions={f"{path}:mine": 1.0}, workers=1))
    sequences = [Sample([5], [-0.5], text, "done", 0, reward=1.0, trajectory=0) for text in "ab"]
    assert "no" in pool.wait([pool.submit(Prompt(0, [1], "mine", "q", "t"), *sequences)])
    pool.close()
    assert all(sample.reward_failed and math.isnan(sample.reward) for sample in sequences)


def test_a_pool_is_closed_at_once_while_samples_wait_for_processes(tmp_path):
    """Every call hangs by then, the trial of a process that starts too: a caller that waited must start none."""
    path, marks = tmp_path / "hanging.py", tmp_path / "marks"
    marks.mkdir()
    path.write_text(
        "import os, time\n"
        "def hanging(response):\n"
        f"    if os.path.exists({str(tmp_path / 'hang')!r}):\n"
        f"        open({str(marks)!r} + f'/{{os.getpid()}}', 'w').close()\n"
        "        time.sleep(1000)\n"
        "    return 1\n"
    )
    pool = RewardPool(RewardConfig(functions={f"{path}:hanging": 1.0}, workers=4, timeout_seconds=LONGEST))
    scored = group(*"abcdefgh")
    assert pool.start([(scored.prompt, scored.samples[0])]) is None
    (tmp_path / "hang").touch()
    scoring = [pool.submit(scored.prompt, sample) for sample in scored.samples]
    # One is asked, three start and call the function once.
    wait_for(lambda: len(list(marks.iterdir())) == 4)
    begin = time.monotonic()
    pool.close()
    assert time.monotonic() - begin < 100
    assert all(future.done() for future in scoring)


def test_nothing_of_a_reward_process_is_left_when_the_pool_is_closed(tmp_path):
    path = tmp_path / "children.py"
    path.write_text(
        "import os, subprocess\n"
        "def children(response):\n"
        f"    open({str(tmp_path)!r} + '/pid', 'w').write(str(subprocess.Popen(['sleep', '1000']).pid))\n"
        "    return 1\n"
    )
    pool = RewardPool(RewardConfig(functions={f"{path}:children": 1.0}, workers=1))
    score(pool, group("x"))
    child = int((tmp_path / "pid").read_text())
    assert not gone([child])
    pool.close()
    wait_for(lambda: gone([child]))


def scored_while_sampling(mesh, tmp_path: Path) -> list[float]:
    from fivefold.observability.run_logger import RunLogger
    from fivefold.reward.manager import RewardManager
    from fivefold.rollout.generation import Generator
    from fivefold.types import Sampling

    path = tmp_path / "mark.py"
    path.write_text(f"def mark(response):\n    open({str(tmp_path / 'scored')!r}, 'w').close()\n    return 1\n")

    class Waits(Says):
        """Its second response comes when the first one has been scored."""

        def generate(self, requests):
            yield Completion(requests[0].id, [1], [0.0], "stop", 0)
            wait_for((tmp_path / "scored").exists)
            yield Completion(requests[1].id, [1], [0.0], "stop", 0)

    pool = RewardPool(RewardConfig(functions={f"{path}:mark": 1.0}, workers=1))
    logger = RunLogger(tmp_path, [], is_main=False, steps=1)
    try:
        generator = Generator(Waits(), Says(), RewardManager(pool, mesh.ranks), logger)
        (sampled,) = generator.sample([Prompt(0, [1], "mine", "q", "t")], 2, Sampling(1), (0,))
        return [sample.reward for sample in sampled.samples]
    finally:
        pool.close()


def test_scoring_begins_while_others_are_still_sampled(cluster, tmp_path):
    assert cluster.run(scored_while_sampling, "megatron:d1", tmp_path) == [[1.0, 1.0]]


def scored_on_two_ranks(mesh, functions: dict[str, float], texts: list[list[str]], max_failed: float):
    from fivefold.reward.manager import RewardManager

    messages: list[str] = []
    pool = RewardPool(RewardConfig(functions=functions))
    try:
        groups = [group(*texts[mesh.ranks.rank])]
        manager = RewardManager(pool, mesh.ranks, max_failed=max_failed, log=messages.append)
        manager.finish(groups, [manager.submit(groups[0].prompt, [sample]) for sample in groups[0].samples])
    except RuntimeError as error:
        return str(error), messages
    finally:
        pool.close()
    return [sample.reward for sample in groups[0].samples], messages


def test_too_many_failures_end_the_run_on_every_rank_with_the_traceback(cluster, user_file):
    """One of four fails, on one rank only: every rank ends, or the others would wait for it."""
    texts = [["ok", "ok"], ["ok", "raise"]]
    for outcome, _ in cluster.run(scored_on_two_ranks, "megatron:d2", {f"{user_file}:shout": 1.0}, texts, 0.2):
        assert "reward of 1 of 4 samples failed" in outcome and "RuntimeError: as asked" in outcome
        assert "reward.max_failed = 0.2" in outcome


def test_few_failures_are_shown_and_the_run_continues(cluster, user_file):
    texts = [["ok", "ok"], ["ok", "raise"]]
    outcomes = cluster.run(scored_on_two_ranks, "megatron:d2", {f"{user_file}:shout": 1.0}, texts, 0.25)
    assert [rewards for rewards, _ in outcomes] == [[0.5, 0.5], [0.5, pytest.approx(math.nan, nan_ok=True)]]
    assert "RuntimeError: as asked" in outcomes[0][1][0]


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
    worker = pool._workers[-1]
    worker._messages.close()
    assert worker._process.wait(timeout=LONGEST) == 0
    assert not os.path.exists(f"/proc/{worker._process.pid}")


@pytest.mark.parametrize(
    ("functions", "says"),
    [
        ({}, "no reward is known for data_source 'mine'"),
        ({"gsm9k": 1.0}, "unknown reward 'gsm9k'; built in: gsm8k, math, math_any, format"),
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


def test_the_response_has_three_names(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def f(response, completion, solution_str): return response == completion == solution_str == 'ok'\n")
    pool, scored = RewardPool(RewardConfig(functions={f"{path}:f": 1.0}, workers=1)), group("ok")
    assert score(pool, scored) is None and scored.samples[0].reward == 1.0
    pool.close()


def test_every_built_in_that_needs_a_truth_takes_one():
    """And the sources choose what they chose."""
    for name, row in rules.BUILT_IN.items():
        takes = row.function is None or "ground_truth" in inspect.signature(row.function).parameters
        assert takes or not row.needs_truth, name
        assert row.needs_truth or row.fault_of_truth is None, name
        assert rules.takes_ground_truth(name) == row.needs_truth
    without = {name for name, row in rules.BUILT_IN.items() if not row.needs_truth}
    assert without == {"format", "think", "think_answer", "repetition", "environment"}
    assert rules.SOURCES["openai/gsm8k"] == "gsm8k" and rules.SOURCES["aime"] == "math" and rules.SOURCES["taco"] == "code"


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
    for weights in in_both_orders({"format": 0.1, "math": 1.0}):
        config = RewardConfig(functions={"gsm8k": 1.0, "format": 0.2}, by_source={"hard": weights, "neat": {"format": 1.0}})
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

    state, version, replica = EngineState.READY, 0, EngineReplica(0, 1)

    def generate(self, requests):
        return iter([Completion(request.id, [1], [0.0], "stop", 0) for request in requests])

    def decode(self, token_ids, skip_special_tokens):
        return r"\boxed{4}"

    def sleep(self): ...


def evaluated(mesh, run_dir: Path, functions: dict[str, float]) -> dict[str, float]:
    from fivefold.algo.objective import make_objective
    from fivefold.observability.run_logger import RunLogger
    from fivefold.reward.manager import RewardManager
    from fivefold.rollout.generation import Generator
    from fivefold.rollout.stats import BatchPlan
    from fivefold.trainer.checks import SkipGuard
    from fivefold.trainer.evaluation import Evaluation, EvaluationSet
    from fivefold.trainer.models import Models
    from fivefold.types import Sampling
    from tests.support.toy import ToyModel

    prompts = [Prompt(i, [1], "mine", "q", truth, extra={"is": i > 0}) for i, truth in enumerate("4445")]
    pool, objective = RewardPool(RewardConfig(functions=functions)), make_objective("grpo")
    rewards, logger = (
        RewardManager(pool, mesh.ranks, max_failed=0.25, log=lambda text: None),
        RunLogger(run_dir, [], is_main=False, steps=1),
    )
    chosen = EvaluationSet(prompts, 2, greedy=Sampling(8), sampled=Sampling(8))
    guard = SkipGuard(mesh.ranks, 0, run_dir, print)
    models = Models({"policy": ToyModel()}, mesh.ranks, guard)
    try:
        generator = Generator(Says(), Says(), rewards, logger)
        return Evaluation(chosen, generator, objective, mesh.ranks, logger, BatchPlan()).measure(models)[0]
    finally:
        pool.close()


def test_accuracy_does_not_depend_on_the_order_of_the_functions(cluster, tmp_path):
    """Every response states an answer; three of four answers are right."""
    runs = [
        cluster.run(evaluated, "megatron:d1", tmp_path, weights)[0]
        for weights in in_both_orders({"format": 0.1, "math": 1.0})
    ]
    assert runs[0] == runs[1]
    assert (runs[0]["val/mine/accuracy"], runs[0]["val/mine/pass@2"]) == (0.75, 0.75)
    assert runs[0]["val/mine/reward"] == pytest.approx(0.85)


def test_evaluation_measures_the_samples_whose_reward_is_known(cluster, tmp_path):
    """Right, right, wrong, and one that no one could score: no 2 of 4, but 2 of 3."""
    path = tmp_path / "some.py"
    path.write_text(
        "def some(response, ground_truth, extra_info):\n    assert ground_truth != '5'\n    return extra_info['is']\n"
    )
    (metrics,) = cluster.run(evaluated, "megatron:d1", tmp_path, {f"{path}:some": 1.0})
    assert (
        metrics["val/mine/accuracy"]
        == metrics["val/mine/reward"]
        == metrics["val/mine/mean@2"]
        == metrics["val/mine/pass@2"]
        == 2 / 3
    )
