"""Signatures of reward functions: TRL's, verl's and ours, found by the names of parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fivefold.build import start_reward_pool
from fivefold.config import RunConfig
from fivefold.config.scoring import RewardConfig
from fivefold.data.prompts import Reading, load_prompts
from fivefold.data.rows import Columns
from fivefold.data.tokenizer import load_tokenizer
from fivefold.keys.findings import Findings
from fivefold.plan.check import check
from fivefold.reward.choose import check_rewards, columns_read
from fivefold.reward.pool import RewardPool
from fivefold.types import Prompt, Sample
from tests.support.hostile_rewards import ENDLESS, Rewards
from tests.support.tiny_models import make_model, make_tokenizer

CHAT = [{"role": "user", "content": "1+1="}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = make_model("qwen3", tmp_path_factory.mktemp("forms") / "model")
    make_tokenizer(path)
    return path


def prompts_of(
    tmp_path: Path, model: Path, code: str, *rows: dict[str, Any], **data: str
) -> tuple[RewardConfig, list[Prompt]]:
    (tmp_path / "mine.py").write_text(code)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = RewardConfig(functions={f"{tmp_path}/mine.py:f": 1.0}, workers=1)
    reading = Reading(64, columns=Columns(carried=columns_read(config), **data))
    return config, list(load_prompts([str(tmp_path / "rows.jsonl")], load_tokenizer(str(model)), reading).prompts)


def rewards(config: RewardConfig, prompts: list[Prompt], *texts: str) -> list[Sample]:
    """One response to each prompt, scored in a process of its own."""
    pool = RewardPool(config)
    samples = [Sample([5, 6], [0.0, 0.0], text, "answered", 0) for text in texts]
    try:
        scoring = [pool.submit(prompt, sample) for prompt, sample in zip(prompts, samples, strict=True)]
        assert (error := pool.wait(scoring)) is None, error
    finally:
        pool.close()
    return samples


ROW = {
    "prompt": "1+1=",
    "answer": 2,
    "difficulty": [1, "easy"],
    "reward_model": {"ground_truth": "two"},
    "extra_info": {"a": 1},
}
CHAT_ROW = {**ROW, "prompt": CHAT}
CASES = {
    "TRL: lengths": ("def f(completions, **kwargs): return [float(len(each)) for each in completions]", ROW, "yes", 3.0),
    "TRL: messages": ("def f(completions, **kwargs): return [float(len(each[0]['content'])) for each in completions]", CHAT_ROW,
                      "yes", 3.0),
    "TRL: roles": ("def f(completions, **kw): return [float(each == [{'role': 'assistant', 'content': 'x'}]) for each in completions]",
                   CHAT_ROW, "x", 1.0),
    "TRL: a column": ("def f(prompts, completions, answer): return [float(c == str(a) and p == '1+1=') for p, c, a in "
                      "zip(prompts, completions, answer)]", ROW, "2", 1.0),
    "TRL: prompts as messages": (f"def f(prompts, completions, answer): return [float(p == {CHAT!r}) for p in prompts]", CHAT_ROW,
                                 "2", 1.0),
    "TRL: all columns": ("def f(completions, **kw): return [float(kw['answer'] == [2] and kw['difficulty'] == [[1, 'easy']] and "
                         "'prompt' not in kw and kw['prompts'] == ['1+1='])]", ROW, "2", 1.0),
    "TRL: a coroutine": ("async def f(completions, answer, **kw): return [float(c == str(a)) for c, a in zip(completions, answer)]",
                         ROW, "2", 1.0),
    "TRL: tokens": ("def f(completions, completion_ids): return [float(len(each)) for each in completion_ids]", ROW, "2", 2.0),
    "TRL: our truth": ("def f(completions, ground_truth): return [float(t == 'two') for t in ground_truth]", ROW, "2", 1.0),
    "TRL: a column of our truth's name": ("def f(completions, ground_truth): return [float(t == 7) for t in ground_truth]",
                                          {**ROW, "ground_truth": 7}, "2", 1.0),
    "TRL: an array": ("import numpy\ndef f(completions): return numpy.array([0.25])", ROW, "2", 0.25),
    "verl": ("def f(data_source, solution_str, ground_truth, extra_info=None): return {'score': float((data_source, solution_str, "
             "ground_truth, extra_info) == ('rows', 'x', 'two', {'a': 1})), 'acc': 3}", ROW, "x", 1.0),
    "ours: a column": ("def f(response, answer, difficulty): return float((response, answer, difficulty) == ('x', 2, [1, 'easy']))",
                       ROW, "x", 1.0),
    "ours: all columns": ("def f(response, **kw): return float(kw['answer'] == 2 and kw['extra_info'] == {'a': 1})", ROW, "x", 1.0),
    "ours: a column does not hide the response": ("def f(response, completion): return float(response == completion == 'x')",
                                                  {**ROW, "response": "no", "completion": "no"}, "x", 1.0),
    "ours: nor with all columns": ("def f(response, **kw): return float(response == kw['prompt'][:1] == '1')",
                                   {**ROW, "response": "no"}, "1", 1.0),
    "no truth": ("def f(completion): return 0.5", {"prompt": "1+1="}, "x", 0.5),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_function_gets_what_its_parameters_name(tmp_path, model, name):
    code, row, text, reward = CASES[name]
    config, prompts = prompts_of(tmp_path, model, code, row)
    (sample,) = rewards(config, prompts, text)
    assert sample.reward == reward


def test_only_columns_that_a_function_may_take_stay_with_a_prompt(tmp_path, model):
    def columns(code: str) -> set[str]:
        (prompt,) = prompts_of(tmp_path, model, code, ROW)[1]
        return set(prompt.columns)

    assert columns("def f(response, ground_truth, prompt, extra_info): ...") == set()
    assert columns("def f(response, answer): ...") == {"answer"}
    assert columns("def f(completions, prompts, answer): ...") == {"answer"}
    every = {"answer", "difficulty", "reward_model", "extra_info"}
    assert columns("def f(completions, **kwargs): ...") == every == columns("def g(response): ...\nf = g\n")
    assert columns("def d(f): return f\n@d\ndef f(response): ...") == every


def test_a_function_of_lists_that_returns_none_does_not_apply_and_counts_nowhere(tmp_path, model):
    code = (
        "def f(completions, task): return [None if t != 'math' else 1.0 for t in task]\n"
        "def g(completions, task): return [0.5 if t == 'code' else None for t in task]\n"
    )
    config, prompts = prompts_of(tmp_path, model, code, *({"prompt": "q", "task": task} for task in ("math", "code")))
    both = RewardConfig(functions={f"{tmp_path}/mine.py:{name}": 2.0 for name in "fg"}, workers=1)
    first, second = rewards(both, prompts, "x", "x")
    assert (first.reward, list(first.reward_parts.values()), first.correct) == (2.0, [1.0], True)
    assert (second.reward, list(second.reward_parts.values()), second.correct) == (1.0, [0.5], False)
    pool, sample = RewardPool(config), Sample([], [], "x", "answered", 0)
    error = pool.wait([pool.submit(prompts[1], sample)])
    pool.close()
    assert sample.reward_failed and "is None, which says that it does not apply" in error


RESULTS = {
    "def f(completions): return 1.0": "must return a list with a number, or None, for each of them: got 1.0",
    "def f(completions): return [1.0, 2.0]": "got [1.0, 2.0] for a list of one",
    "def f(completions): return 'x'": "got 'x' for a list of one",
    "def f(response): return None": "must return a number or {'score': number}: got None; is a `return` missing?",
    "def f(response): return [1.0]": "must return a number or {'score': number}: got [1.0]",
    "def f(response): return '1.0'": "must return a number or {'score': number}: got '1.0'",
    "def f(response): return {'reward': 1.0}": "must return a number or {'score': number}: got {'reward': 1.0}",
    "def f(completions): return (1.0 for _ in completions)": "must return a list with a number, or None, for each of them",
    "def f(completions): return ['1.0']": "must return a list with a number, or None, for each of them: got ['1.0']",
    "def wrong(answr): ...\nf = wrong": "is not offered: got answr; it is called with one response, and its parameters may be response",
    "def f(completions): raise OSError('no server')": "OSError: no server",
}  # fmt: skip


@pytest.mark.parametrize("code", RESULTS)
def test_a_failing_trial_call_ends_the_run_before_it_samples(tmp_path, model, code):
    config, prompts = prompts_of(tmp_path, model, code, ROW)
    pool = RewardPool(config)
    with pytest.raises(
        ValueError, match="a reward function failed on a trial, in which the response was the ground"
    ) as error:
        start_reward_pool(pool, prompts, print)
    pool.close()
    assert RESULTS[code] in str(error.value)


def test_whatever_a_function_returns_is_a_finite_number_or_fails_its_own_sample(tmp_path):
    """Each value once, in one of the three forms; those that end with the time limit are left to the attacks."""
    attacks = Rewards(tmp_path)
    try:
        faults = [attacks(number)[1] for number, value in enumerate(attacks.values) if value not in ENDLESS]
    finally:
        attacks.close()
    assert [fault for fault in faults if fault] == [] and len(faults) > 60


def test_a_reward_that_is_not_a_number_is_no_sign_of_lists_that_matter(tmp_path, model):
    """NaN is unequal to itself."""
    _, prompts = prompts_of(tmp_path, model, "def f(completions): return [float('nan') for _ in completions]", ROW)
    pool = RewardPool(RewardConfig(functions={f"{tmp_path}/mine.py:f": 1.0}, workers=1))
    start_reward_pool(pool, prompts, print)
    assert pool.forms == [f"{tmp_path}/mine.py:f(completions) is called with lists of one element, as TRL calls it"]
    pool.close()


def test_the_line_at_the_start_says_how_each_function_is_called(tmp_path, model):
    code = (
        "def f(completions, answer, **kwargs): return [0.0] * len(completions)\n"
        "def g(response): return 1\n"
        "def h(completions): return [float(len(c) - max(map(len, completions))) for c in completions]\n"
    )
    _, prompts = prompts_of(tmp_path, model, code, ROW)
    messages: list[str] = []
    pool = RewardPool(RewardConfig(functions={f"{tmp_path}/mine.py:{name}": 1.0 for name in "fgh"}, workers=1))
    prompts[0].columns["answer"] = 2
    start_reward_pool(pool, prompts, messages.append)
    pool.close()
    mine = f"reward   {tmp_path}/mine.py"
    assert messages == [
        f"{mine}:f(completions, answer, **) is called with lists of one element, as TRL calls it",
        f"{mine}:g(response) is called with one response",
        f"{mine}:h(completions) is called with lists of one element, as TRL calls it",
        f"{mine}:h gives other rewards when its lists have two elements: a reward that compares responses with each other is "
        "not supported",
    ]


REFUSED = {
    "def f(completions, response): ...": "is not offered: got response; it is called with lists of one element, as TRL calls it, "
    "and its parameters may be completions, prompts, completion_ids, ground_truth, data_source, extra_info, the columns of its "
    "row (prompt, answer, difficulty, reward_model)",
    "def f(completions, trainer_state): ...": "is not offered: got trainer_state",
    "async def f(solution, *, label): ...": "is not offered: got solution, label; it is called with one response, and its "
    "parameters may be response, completion, solution_str, ground_truth, data_source, extra_info, prompt, the columns",
    "def f(prompts, response): ...": "is not offered: got prompts",
    "def f(response, reward_router_address): ...": "is not offered: got reward_router_address",
    "def f(response, /): ...": "must take its parameters by name: got response before a `/`",
    "if True:\n    def f(wrong): ...": "is not offered: got wrong",
    "def f(response): ...\ndef f(wrong): ...": "is not offered: got wrong",
}  # fmt: skip
ACCEPTED = (
    "def f(response, ground_truth, extra=1, *rest, **kw): ...",
    "def f(completion): ...",
    "def f(solution_str, data_source, ground_truth, extra_info=None): ...",
    "def f(): ...",
    "def g(wrong):\n    def f(wrong): ...\ndef f(prompt): ...",
    "def f(completions, **kwargs): ...",
    "def f(prompts, completions, answer): ...",
    "def f(response, difficulty): ...",
    "def f(completions, trainer_state=None): ...",
)


def checked(tmp_path: Path, model: Path, code: str, *rows: dict[str, Any], **sections: Any) -> Findings:
    (tmp_path / "mine.py").write_text(code)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {
        "train": [str(tmp_path / "rows.jsonl")],
        "prompts_per_step": 1,
        "max_prompt_tokens": 32,
        "max_response_tokens": 32,
    }
    tree: dict[str, Any] = {
        "model": {"path": str(model)},
        "policy": {"dtype": "float32"},
        "data": {**data, **sections.pop("data", {})},
        "reward": {"functions": {f"{tmp_path}/mine.py:f": 1.0}},
        "trainer": {"device": "cpu", "run_dir": str(tmp_path / "run")},
    }
    return check(RunConfig.of(tree | sections))


@pytest.mark.parametrize("code", [*REFUSED, *ACCEPTED])
def test_check_refuses_what_cannot_bind_and_names_what_is_offered(tmp_path, model, code):
    findings = checked(tmp_path, model, code, ROW)
    says = REFUSED.get(code)
    assert bool(findings.errors) == (says is not None), findings.errors
    assert says is None or says in findings.errors[0], findings.errors


def test_a_function_that_cannot_be_passed_names_is_found_without_data(tmp_path):
    (tmp_path / "mine.py").write_text("def f(response, /): ...")
    findings = Findings(section="reward")
    check_rewards(findings, RewardConfig(functions={f"{tmp_path}/mine.py:f": 1.0}))
    assert findings.errors[0].startswith("reward.functions: reward") and "response before a `/`" in findings.errors[0]


def test_a_row_that_lacks_a_column_which_a_function_takes_is_named(tmp_path, model):
    findings = checked(tmp_path, model, "def f(completions, answer): ...", ROW, {"prompt": "2+2="})
    assert "rows.jsonl, row 1: reward" in findings.errors[0] and "got answer" in findings.errors[0]


def test_prompts_alone_are_enough_for_a_reward_without_a_truth(tmp_path, model):
    for code in ("def f(completions, **kwargs): ...", "def f(response): ..."):
        assert checked(tmp_path, model, code, {"prompt": "1+1="}).errors == []


def test_a_truth_that_is_taken_and_nowhere_given_is_reported_with_its_column(tmp_path, model):
    code = "def f(data_source, solution_str, ground_truth, extra_info=None): ..."
    says = "takes ground_truth, which is empty in every row: set data.ground_truth_key"
    for row, end in (({"prompt": "1+1=", "solution": "2"}, ": solution"), ({"prompt": "1+1="}, "")):
        findings = checked(tmp_path, model, code, row)
        assert findings.errors == [] and [note for note in findings.notes if note.endswith(f"{says}{end}")], findings.notes
    for other, row in (
        (code, ROW),
        ("def f(completions, ground_truth): ...", {"prompt": "1+1=", "ground_truth": "2"}),
        ("def f(response): ...", {"prompt": "1+1="}),
    ):
        assert not [note for note in checked(tmp_path, model, other, row).notes if "takes ground_truth" in note]


FORMS = {
    "gsm8k": ("1+1=", "2", "do not ask for #### or \\boxed{}"),
    "math": ("1+1=", "2", "do not ask for \\boxed{}"),
    "multiple_choice": ("1+1=", "A", None),
    "verl_math_dapo": ("1+1= #### and \\boxed{}", "2", "do not ask for Answer:"),
}


@pytest.mark.parametrize("name", FORMS)
def test_prompts_that_do_not_ask_for_the_form_which_the_reward_reads_are_reported(tmp_path, model, name):
    prompt, truth, says = FORMS[name]
    rows = [{"prompt": prompt, "reward_model": {"ground_truth": truth}}] * 3
    reward = {"functions": {name: 1.0}}
    (notes,) = [
        [note for note in checked(tmp_path, model, "", *rows, reward=reward).notes if "prompts do not ask for" in note],
    ]
    assert len(notes) == (says is not None)
    if says is None:
        return
    assert f"data.train: 3 of the first 3 prompts {says}, where the reward {name} reads the answer (the first: " in notes[0]
    data = {"system_prompt": "#### \\boxed{} Answer:"}
    assert not any("do not ask" in note for note in checked(tmp_path, model, "", *rows, reward=reward, data=data).notes)


def test_a_look_at_prompts_ends_after_a_hundred_and_most_must_lack_the_form(tmp_path, model):
    asks, lacks = (
        {"prompt": text, "reward_model": {"ground_truth": "2"}} for text in ("1+1= Write #### before the sum.", "1+1=")
    )
    reward = {"functions": {"gsm8k": 1.0}}
    notes = checked(tmp_path, model, "", *[lacks] * 60, *[asks] * 900, reward=reward).notes
    assert any("60 of the first 100 prompts" in note for note in notes)
    notes = checked(tmp_path, model, "", *[lacks] * 50, *[asks] * 900, reward=reward).notes
    assert not any("do not ask" in note for note in notes)


def test_a_message_about_an_empty_truth_names_the_column_that_may_hold_it(tmp_path, model):
    findings = checked(tmp_path, model, "", {"prompt": "1+1=", "solution": "2"}, reward={"functions": {"math": 1.0}})
    assert "must not be empty for the reward math: got ''; set data.ground_truth_key: solution" in findings.errors[0]
