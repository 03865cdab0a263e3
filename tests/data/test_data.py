from __future__ import annotations

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from fivefold.config import ConfigError, RunConfig
from fivefold.data.light_tokenizer import LightTokenizer
from fivefold.data.prepare import prepare
from fivefold.data.prompt_loader import PromptLoader
from fivefold.data.prompts import Reading, load_prompts, render
from fivefold.data.rows import Columns, count_rows, parse_row, read_rows
from fivefold.data.tokenizer import load_tokenizer, train_tokenizer
from fivefold.keys.findings import Findings
from fivefold.plan.data_files import check_data

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    out = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer("char", ["0123456789+= abcdefghijklmnopqrstuvwxyz\n#"], out)
    return load_tokenizer(str(out))


def test_a_run_goes_through_every_prompt_once_an_epoch_in_a_new_order():
    sampler = PromptLoader(list(range(10)), 3, seed=1, shuffle=True)
    assert sampler.steps_per_epoch == 3
    first = [sampler.take(3 * step, 3) for step in range(3)]
    second = [sampler.take(3 * step, 3) for step in range(3, 6)]
    assert len({x for batch in first for x in batch}) == 9
    assert first != second
    assert [sampler.epoch(3 * step) for step in range(6)] == [0, 0, 0, 1, 1, 1]


def test_the_order_is_a_function_of_seed_and_position():
    one, other = (PromptLoader(list(range(50)), 4, seed=3, shuffle=True) for _ in range(2))
    later = [other.take(4 * step, 4) for step in (30, 2, 17)]
    assert later == [one.take(4 * step, 4) for step in (30, 2, 17)]
    assert PromptLoader(list(range(50)), 4, seed=4, shuffle=True).take(8, 4) != later[1]
    assert PromptLoader(list(range(50)), 4, seed=4, shuffle=False).take(4, 4) == [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("rows", "data", "says"),
    [
        (40, {"shuffle": False}, "data.train: the last 12 of 40 prompts are never taken: with data.shuffle: false"),
        (56, {"shuffle": False}, None),
        (40, {}, None),
        (40, {"shuffle": False, "mixture": {"x": 1.0}}, None),
        (1001, {"shuffle": False}, "data.train: up to 27 of the last prompts are never taken"),
    ],
)
def test_check_notes_the_prompts_that_no_step_takes_without_shuffling(tmp_path, rows, data, says):
    row = {"prompt": "1", "data_source": "x", "reward_model": {"ground_truth": "2"}}
    path = write(tmp_path / "a.jsonl", *[row] * rows)
    tree = {"model": {"path": "m"}, "reward": {"functions": {"gsm8k": 1.0}}}
    config = RunConfig.of(tree | {"data": {"train": [path], "prompts_per_step": 28, **data}})
    check_data(findings := Findings(), config, None, None)
    notes = [note for note in findings.notes if "never taken" in note]
    assert (findings.errors, len(notes)) == ([], says is not None) and notes == [note for note in notes if says in note]
    if says is not None and rows == 40:
        loader = PromptLoader(list(range(rows)), 28, 0, False)
        assert sorted(set(loader.take(0, 28 * 9))) == list(range(28))


def test_a_step_larger_than_the_set_is_refused():
    with pytest.raises(ValueError, match="got 4 for 3 prompts"):
        PromptLoader([1, 2, 3], 4, 0, True)


def test_arithmetic_splits_share_no_problem_and_are_right(tmp_path):
    assert prepare("arithmetic", tmp_path, [], 200, seed=0, below=20) == {"train": 200, "test": 64}
    rows = {split: list(read_rows(tmp_path / f"{split}.parquet")) for split in ("train", "test")}
    questions = {split: {row["prompt"][0]["content"] for row in part} for split, part in rows.items()}
    assert not questions["train"] & questions["test"]
    for row in rows["train"]:
        a, b = row["prompt"][0]["content"].rstrip("=").split("+")
        assert row["reward_model"] == {"style": "rule", "ground_truth": str(int(a) + int(b))}
        assert row["response"] == f"#### {int(a) + int(b)}"
    with pytest.raises(ValueError, match="--limit must be at most 336"):
        prepare("arithmetic", tmp_path, [], 400, below=20)


def test_gsm8k_and_math_have_the_schema_that_verl_users_have(tmp_path):
    source = tmp_path / "train.jsonl"
    source.write_text(json.dumps({"question": "How many?", "answer": "It is\n#### 1,234"}) + "\n")
    problem = tmp_path / "math_train.json"
    problem.write_text(json.dumps([{"problem": "Find x", "answer": "\\frac12", "solution": "so"} for _ in range(40)]))
    assert prepare("gsm8k", tmp_path / "g", [source, source]) == {"train": 1, "test": 1}
    assert prepare("math", tmp_path / "m", [problem], limit=5) == {"train": 5, "test": 2}
    row = next(read_rows(tmp_path / "g/train.parquet"))
    assert {"data_source", "prompt", "ability", "reward_model", "extra_info"} <= set(row)
    assert row["reward_model"]["ground_truth"] == "1234"
    assert row["prompt"][0]["role"] == "user"
    assert row["prompt"][0]["content"].startswith("How many?")
    assert next(read_rows(tmp_path / "m/test.parquet"))["reward_model"]["ground_truth"] == "\\frac12"


def test_rows_whose_answer_is_null_are_left_out_and_named(tmp_path):
    source, messages = tmp_path / "math_train.json", []
    for missing, named in (([1, 3], "rows whose answer is null are left out, 2 in all: 1, 3"), (range(12), ", 8, 9, ...")):
        rows = [{"problem": f"{n}", "answer": None if n in missing else str(n)} for n in range(40)]
        source.write_text(json.dumps(rows))
        written = prepare("math", tmp_path / "out", [source], log=messages.append)
        assert sum(written.values()) == 40 - len(missing) and messages[-1].endswith(named)
        truths = [row["reward_model"]["ground_truth"] for row in read_rows(tmp_path / "out/train.parquet")]
        assert truths[:2] == [str(n) for n in range(40) if n not in missing][:2]
    source.write_text(json.dumps([{"problem": "1", "solution": "2"}]))
    with pytest.raises(ValueError, match="row 0: column 'answer' must be a text: got None; it has problem, solution"):
        prepare("math", tmp_path / "out", [source])


@pytest.mark.skipif(not SHARED.is_dir(), reason="the real files are not beside the checkout")
def test_the_real_gsm8k_is_read_whole_and_its_solutions_earn_their_reward(tmp_path):
    from fivefold.reward.rules import gsm8k

    assert prepare("gsm8k", tmp_path, [SHARED / "gsm8k/train.jsonl", SHARED / "gsm8k/test.jsonl"]) == {
        "train": 7473,
        "test": 1319,
    }
    for row in read_rows(tmp_path / "test.parquet"):
        assert gsm8k(row["response"], row["reward_model"]["ground_truth"]) == 1


def write(path: Path, *rows: object) -> str:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return str(path)


def test_columns_and_parts_of_columns_are_found_by_name(tmp_path, tokenizer):
    """As verl's SFT (extra_info.question), SkyRL (reward_spec.ground_truth), ROLL (ground_truth) and GSM8K itself have them."""
    row = {
        "extra_info": {"question": "1+1=", "answer": "2"},
        "reward_spec": {"ground_truth": "2"},
        "solution": "one more\n#### 2",
    }
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({**row, "a.b": "whole", "a": {"b": "part"}}))

    def read(**names):
        columns = Columns(prompt="extra_info.question", response="extra_info.answer", **names)
        reading = Reading(9, "drop", columns, learns_from="responses", max_response_tokens=9)
        (prompt,) = load_prompts([str(path)], tokenizer, reading).prompts
        return prompt

    assert (read().messages[0]["content"], read().responses[0].text, read().ground_truth) == ("1+1=", "2", "")
    for name, truth in (("reward_spec.ground_truth", "2"), ("solution", "2"), ("a.b", "whole")):
        assert read(ground_truth=name).ground_truth == truth
    with pytest.raises(
        ValueError, match=r"row 0: no ground truth in 'answr'; it has extra_info, .*; set data.ground_truth_key"
    ):
        read(ground_truth="answr")


@pytest.mark.parametrize(
    ("cell", "truth"),
    [
        ("6 * 7 is 42.\n#### 42", "42"),
        ("6 * 7 is 42.\n#### 42  \n\n", "42"),
        ("####42", "42"),
        ("# Answer\n#### Step 1\nAdd 2 and 3.\n#### Step 2\nIt is 5.", ...),
        ("It is 5, not #### 6", ...),
        ("A list\n##### 5", ...),
        ("Nothing\n####", ...),
        (["a", "assert f(1)\n#### 2"], ...),
    ],
)
def test_only_a_solution_whose_last_line_is_its_answer_counts_as_that_answer(cell, truth):
    row = {"prompt": "q", "reference": cell}
    kept = cell if isinstance(cell, str) else json.dumps(cell)
    parsed = parse_row(row, Columns(ground_truth="reference"), "rollouts", "s")
    assert parsed.ground_truth == (kept if truth is ... else truth)


def test_overlong_prompts_are_dropped_and_counted_or_refused(tmp_path, tokenizer):
    file = write(tmp_path / "a.jsonl", {"prompt": "1+1="}, {"prompt": "123456789+1="}, {"prompt": "2+2="})
    loaded = load_prompts([file], tokenizer, Reading(6))
    assert ([prompt.id for prompt in loaded.prompts], loaded.dropped) == ([0, 2], 1)
    with pytest.raises(ValueError, match=r"row 1: the prompt has 13 tokens, data.max_prompt_tokens is 6"):
        load_prompts([file], tokenizer, Reading(6, "refuse"))
    with pytest.raises(ValueError, match="no prompts left"):
        load_prompts([file], tokenizer, Reading(2))


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"question": "x"}, "no column 'prompt'; it has question; set data.prompt_key"),
        ({"prompt": 3}, "a prompt is a text or a list of messages"),
        ({"prompt": [{"content": "x"}]}, "a prompt is a text or a list of messages"),
        ("{broken", "line 1 is not JSON"),
    ],
)
def test_a_bad_row_is_named(tmp_path, tokenizer, row, says):
    with pytest.raises(ValueError, match=says):
        load_prompts([write(tmp_path / "a.jsonl", row)], tokenizer, Reading(9))


@pytest.mark.parametrize(
    ("learns_from", "row", "says"),
    [
        (
            "responses",
            {"prompt": "1"},
            "learning from responses needs a text in column 'response' or a conversation in column 'messages'",
        ),
        ("pairs", {"prompt": "1", "chosen": "2"}, "learning from pairs needs columns 'chosen' and 'rejected'"),
        ("responses", {"messages": [{"role": "user", "content": "1"}]}, "needs an assistant's turn"),
        (
            "pairs",
            {
                "chosen": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}],
                "rejected": [{"role": "user", "content": "3"}, {"role": "assistant", "content": "4"}],
            },
            "must differ in their last turn only",
        ),
    ],
)
def test_a_row_without_what_is_learned_is_refused(tmp_path, tokenizer, learns_from, row, says):
    with pytest.raises(ValueError, match=says):
        given(tmp_path, tokenizer, learns_from, row)


def given(tmp_path, tokenizer, learns_from, row, limit=50):
    file = write(tmp_path / "a.jsonl", row)
    reading = Reading(50, learns_from=learns_from, need_responses=True, max_response_tokens=limit)
    loaded = load_prompts([file], tokenizer, reading)
    return loaded.prompts[0]


def test_a_pair_is_read_from_texts_turns_or_whole_conversations(tmp_path, tokenizer):
    user, good, bad = (
        {"role": role, "content": text} for role, text in [("user", "1+1="), ("assistant", "2"), ("assistant", "33")]
    )
    rows = [
        {"prompt": "1+1=", "chosen": "2", "rejected": "33"},
        {"prompt": [user], "chosen": [good], "rejected": [bad]},
        {"chosen": [user, good], "rejected": [user, bad]},
    ]
    prompts = [given(tmp_path, tokenizer, "pairs", row) for row in rows]
    for prompt in prompts:
        assert tokenizer.decode(prompt.token_ids) == "1+1=\n"
        assert [one.text for one in prompt.responses] == ["2", "33"]
        assert [one.token_ids for one in prompt.responses] == [
            [*tokenizer.encode(text), tokenizer.eos_token_id] for text in ("2", "33")
        ]


def said(*texts: str) -> list[dict]:
    """Messages of user and assistant, as `u: 1`; s and t are system and tool."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": roles[text[0]], "content": text[3:]} for text in texts]


Q, MORE = said("u: 1"), said("u: 1", "a: 2", "u: 3")


@pytest.mark.parametrize(
    ("prompt", "before", "read"),
    [
        ("1", [], Q),
        ("1", Q, Q),
        ("1", MORE, MORE),
        ("1", MORE[1:], MORE),
        ("1", [*said("s: 0"), *MORE], [*said("s: 0"), *MORE]),
        ([*said("s: 0"), *Q], Q, [*said("s: 0"), *Q]),
        (MORE, MORE[2:], MORE),
        (MORE, said("t: 4"), [*MORE, *said("t: 4")]),
        ([{**Q[0], "name": None}], [{**Q[0], "tool_calls": None}], Q),
        ("1", said("u: 2"), "before the response must be the prompt or follow it"),
        (MORE, Q, "before the response must be the prompt or follow it"),
    ],
)
def test_messages_before_a_response_are_the_prompt_or_follow_it(tmp_path, prompt, before, read):
    for learns_from, keys in (("responses", ["response"]), ("pairs", ["chosen", "rejected"])):
        responses = {key: [*before, *said(f"a: {key}")] for key in keys}
        row = {"prompt": prompt, **responses}
        with nullcontext() if isinstance(read, list) else pytest.raises(ValueError, match=f"'{keys[0]}': .*{read}"):
            parsed = parse_row(row, Columns(), learns_from, "s")
            texts = [{"role": message["role"], "content": message["content"]} for message in parsed.messages]
            assert (texts, parsed.responses) == (read, keys)


@pytest.mark.parametrize(
    ("learns_from", "row", "says"),
    [
        ("responses", {"prompt": "1", "response": said("a: 2", "u: 3")}, "of the assistant: got .*'user', 'content': '3'"),
        ("pairs", {"chosen": said("u: 1", "u: 2"), "rejected": said("u: 1", "u: 3")}, "'chosen': the last message is the"),
        (
            "pairs",
            {"prompt": "1", "chosen": said("a: 2", "u: 3", "a: 4"), "rejected": said("a: 3", "u: 3", "a: 5")},
            "must differ in their last turn only",
        ),
        ("pairs", {"prompt": "1", "chosen": said("a: 2", "u: 3", "a: 4"), "rejected": "5"}, "in their last turn only"),
    ],
)
def test_responses_of_another_role_or_after_other_messages_are_refused_by_row(tmp_path, tokenizer, learns_from, row, says):
    """In training and in the check, where a good row stands before it."""
    tokenizer.save_pretrained(tmp_path)
    good = {"prompt": "1", "response": "2", "chosen": "2", "rejected": "3"}
    path = write(tmp_path / "a.jsonl", good, row)
    reading = Reading(50, learns_from=learns_from, need_responses=True, max_response_tokens=50)
    with pytest.raises(ValueError, match=f"row 1: .*{says}"):
        load_prompts([path], tokenizer, reading)
    tree = {"model": {"path": "m"}, "algorithm": {"name": {"responses": "sft", "pairs": "dpo"}[learns_from]}}
    findings = Findings()
    check_data(findings, RunConfig.of(tree | {"data": {"train": [path]}}), LightTokenizer.load(tmp_path), None)
    assert re.search(f"row 1: .*{says}", findings.errors[0])


def test_only_the_assistant_s_turns_of_a_conversation_are_learned(tmp_path, tokenizer):
    import copy

    turns = [("user", "1+1="), ("assistant", "2"), ("user", "plus 3"), ("assistant", "5")]
    row = {"messages": [{"role": role, "content": text} for role, text in turns]}
    templated = copy.deepcopy(tokenizer)
    # As in most templates a turn ends with the end token and a line break, which the model does not say.
    templated.chat_template = (
        "{% for m in messages %}{{ m.role }} {{ m.content }}" + tokenizer.eos_token + "\n{% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    end = tokenizer.eos_token
    for words, prompt_text, learned in (
        (tokenizer, "1+1=\n", ["2" + end, "5" + end]),
        (templated, f"user 1+1={end}\nassistant ", ["2" + end, "5" + end]),
    ):
        prompt = given(tmp_path, words, "responses", row)
        assert tokenizer.decode(prompt.token_ids) == prompt_text
        (response,) = prompt.responses
        spans, inside = [], False
        for token, learns in zip(response.token_ids, response.loss_mask, strict=True):
            if learns and not inside:
                spans.append([])
            inside = learns
            if learns:
                spans[-1].append(token)
        assert [tokenizer.decode(span) for span in spans] == learned
        assert response.loss_mask[-1]
        conversation = tokenizer.decode(prompt.token_ids + response.token_ids)
        if words is templated:
            assert templated.apply_chat_template(row["messages"], tokenize=False).startswith(conversation)
    cut = given(tmp_path, tokenizer, "responses", row, limit=3).responses[0]
    assert len(cut.token_ids) == 3 and cut.truncated


ENDS = {
    "{{ m.content }}<|pad|>\n": "<|pad|>",
    "{{ m.content }}<|end|>\n": "<|end|>",
    "{{ m.content }}<|pad|>\n<|end|>": "<|pad|>\n<|end|>",
    "{{ m.content }}<|end|><|pad|>\n": "<|end|>",
    "{{ m.content }}<|end|>###": "<|end|>",
}
"""How a template writes a turn -> what is learned of its end; the tokenizer's end token is `<|end|>`."""


@pytest.mark.parametrize("written", ENDS)
def test_a_turn_ends_with_the_special_token_that_the_template_writes(tmp_path, tokenizer, written):
    import copy

    templated = copy.deepcopy(tokenizer)
    templated.chat_template = (
        f"{{% for m in messages %}}{{{{ m.role }}}} {written}{{% endfor %}}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    talk = said("u: 1", "a: 2 <|unknown|> 3", "u: 4", "a: 5")
    prompt = given(tmp_path, templated, "responses", {"messages": talk}, 100)
    (response,) = prompt.responses
    text = templated.decode([*prompt.token_ids, *response.token_ids])
    assert templated.apply_chat_template(talk, tokenize=False).startswith(text)
    learned = [token for token, learns in zip(response.token_ids, response.loss_mask, strict=True) if learns]
    assert templated.decode(learned) == f"2 <|unknown|> 3{ENDS[written]}5{ENDS[written]}"


@pytest.mark.parametrize(
    ("template", "content", "end"),
    [
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "2", "\n<|end|>"),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "2<|unknown|>", "\n<|end|>"),
        (None, "2<|pad|>", "<|end|>"),
    ],
)
def test_a_turn_that_no_template_ends_gets_the_end_token(tmp_path, tokenizer, template, content, end):
    """A special token at the end of the content is not the end of the turn: the template did not write it."""
    import copy

    templated = copy.deepcopy(tokenizer)
    templated.chat_template = template
    (response,) = given(tmp_path, templated, "responses", {"messages": said("u: 1", f"a: {content}")}).responses
    assert (tokenizer.decode(response.token_ids), all(response.loss_mask)) == (content + end, True)
    templated.save_pretrained(tmp_path)
    assert LightTokenizer.load(tmp_path).turn_end(said("u: 1", f"a: {content}"), {}) == tokenizer.eos_token_id


@pytest.mark.parametrize("learned_turns", ["all", "last"])
def test_check_notes_a_learned_end_of_turn_that_ends_no_sampled_response(tmp_path, tokenizer, learned_turns):
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}<|pad|>\n{% endfor %}")
    light, (pad, end) = LightTokenizer.load(tmp_path), tokenizer.convert_tokens_to_ids(["<|pad|>", "<|end|>"])
    talk = write(tmp_path / "talk.jsonl", *[{"messages": said("u: 1", "a: 2", "u: 3", "a: 4")}] * 40)
    pair = write(tmp_path / "pair.jsonl", *[{"prompt": "1", "response": "2"}] * 40)

    def look(path: str, ends: list[int], stops: tuple[int, ...] = ()) -> Findings:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        tree = {"model": {"path": str(tmp_path)}, "algorithm": {"name": "sft"}, "eval": {"generate": False}}
        data = {"train": [path], "learned_turns": learned_turns}
        config = RunConfig.of(tree | {"data": data, "engine": {"sampling": {"stop_token_ids": list(stops)}}})
        check_data(findings := Findings(), config, light, None)
        return findings

    note = f"turns to learn end with <|pad|> of the chat template, token {pad}, which ends no sampled response ([{end}] do)"
    assert [note in line for line in look(talk, [end]).notes] == [False, True]
    assert "is also the pad token of the tokenizer" in look(talk, [end]).notes[0]
    for findings in (look(talk, [pad, end]), look(talk, [pad]), look(talk, [end], (pad,)), look(pair, [end])):
        assert findings.errors == [] and not any("turns to learn" in line for line in findings.notes)
    assert f"every response to learn ends with token {end}" in look(pair, [pad]).errors[0]


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path, tokenizer):
    import copy

    forgetful = copy.deepcopy(tokenizer)
    forgetful.chat_template = (
        "{% for m in messages %}{% if loop.last or m.role == 'user' %}{{ m.content }}{% endif %}#{% endfor %}"
        "{% if add_generation_prompt %}={% endif %}"
    )
    turns = [("user", "1"), ("assistant", "2"), ("user", "3"), ("assistant", "4")]
    with pytest.raises(ValueError, match="changes earlier turns"):
        given(tmp_path, forgetful, "responses", {"messages": [{"role": role, "content": text} for role, text in turns]})


def test_a_chat_template_is_used_where_there_is_one(tokenizer):
    import copy

    plain = render([{"role": "user", "content": "1+1="}], tokenizer)
    assert plain[1] == "1+1=\n"
    templated = copy.deepcopy(tokenizer)
    templated.chat_template = (
        "{% for m in messages %}#{{ m.content }}#{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    assert render([{"role": "user", "content": "1+1="}], templated)[1] == "#1+1=#="


def test_tokenizers_write_back_what_they_read(tmp_path):
    texts = ["Hello, wörld!\nA second line.", "12+34= #### 46"]
    for kind in ("char", "bpe"):
        train_tokenizer(kind, texts, tmp_path / kind, 400)
        tokenizer = load_tokenizer(str(tmp_path / kind))
        for text in texts:
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_system_prompt_stands_before_prompts_that_have_none_of_their_own(tmp_path, tokenizer):
    turns = [{"role": "system", "content": "mine"}, {"role": "user", "content": "1+1="}]
    rows = [{"prompt": "1+1="}, {"prompt": turns}]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reading = Reading(max_prompt_tokens=64, columns=Columns(), system_prompt="be brief")
    prompts = load_prompts([str(tmp_path / "d.jsonl")], tokenizer, reading).prompts
    assert [prompt.text for prompt in prompts] == ["be brief\n1+1=\n", "mine\n1+1=\n"]
    assert prompts[0].messages[0] == {"role": "system", "content": "be brief"}
    assert tokenizer.decode(prompts[0].token_ids) == "be brief\n1+1=\n"


def test_variables_reach_the_chat_template_in_training_and_in_the_check(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path)
    template = (
        "{% for m in messages %}#{{ m.content }}#{% endfor %}"
        "{% if add_generation_prompt %}={% endif %}{% if not enable_thinking | default(true) %}+{% endif %}"
    )
    (tmp_path / "chat_template.jinja").write_text(template)
    theirs, ours = load_tokenizer(str(tmp_path)), LightTokenizer.load(tmp_path)
    messages = [{"role": "user", "content": "1+1="}]
    for kwargs, text in (({}, "#1+1=#="), ({"enable_thinking": True}, "#1+1=#="), ({"enable_thinking": False}, "#1+1=#=+")):
        assert render(messages, theirs, kwargs)[1] == ours.render(messages, kwargs=kwargs) == text
    (tmp_path / "d.jsonl").write_text(json.dumps({"prompt": "1+1="}) + "\n")
    reading = Reading(max_prompt_tokens=64, template_kwargs={"enable_thinking": False})
    assert load_prompts([str(tmp_path / "d.jsonl")], theirs, reading).prompts[0].text == "#1+1=#=+"


def test_a_configured_chat_template_replaces_the_tokenizer_s_in_training_and_check(tmp_path, tokenizer):
    """Also where the tokenizer has none; a conversation to imitate goes through it too."""
    turns = [{"role": "user", "content": "1+1="}]
    template = "{% for message in messages %}{{ message.role + message.content + mark }}{% endfor %}"
    (tmp_path / "d.jsonl").write_text(json.dumps({"prompt": "1+1="}) + "\n")
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": [*turns, {"role": "assistant", "content": "2"}]}) + "\n")
    reading = Reading(max_prompt_tokens=64, template_kwargs={"mark": "="}, template=template)
    for tokenizer_template in (None, "own {{ messages[0].content }}"):
        tokenizer.save_pretrained(tmp_path)
        if tokenizer_template is not None:
            (tmp_path / "chat_template.jinja").write_text(tokenizer_template)
        theirs, light = load_tokenizer(str(tmp_path)), LightTokenizer.load(tmp_path).with_template(template, "the template")
        assert load_prompts([str(tmp_path / "d.jsonl")], theirs, reading).prompts[0].text == "user1+1=="
        assert light.render(turns, kwargs={"mark": "="}) == "user1+1=="
        learning = replace(reading, learns_from="responses", max_response_tokens=64)
        (prompt,) = load_prompts([str(tmp_path / "c.jsonl")], theirs, learning).prompts
        response = theirs.decode(prompt.responses[0].token_ids)
        assert (prompt.text, response) == ("user1+1==", f"assistant2={theirs.eos_token}")


def test_a_template_of_the_configuration_that_is_none_is_named(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "d.jsonl").write_text(json.dumps({"prompt": "1+1="}) + "\n")
    data = {"train": [str(tmp_path / "d.jsonl")], "chat_template": "{% for message in messages %}"}
    config, findings = RunConfig.of({"model": {"path": "m"}, "data": data}), Findings()
    check_data(findings, config, LightTokenizer.load(tmp_path), None)
    assert "the chat template of data.chat_template is not valid" in findings.errors[0]


@pytest.mark.parametrize(
    ("kwargs", "template", "says"),
    [
        ({"enable_thinking": False}, None, "variables of a chat template, which the tokenizer has not"),
        ({"messages": []}, "{{ messages[0].content }}", "cannot name what the prompt itself says: got messages"),
        ({"enable_thinking": False}, "{{ messages[0].content }}", None),
    ],
)
def test_variables_that_no_template_reads_or_that_are_not_free_are_refused(tmp_path, tokenizer, kwargs, template, says):
    tokenizer.save_pretrained(tmp_path)
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    row = {"prompt": "1+1=", "data_source": "arithmetic", "reward_model": {"ground_truth": "2"}}
    (tmp_path / "d.jsonl").write_text((json.dumps(row) + "\n") * 40)
    data = {"train": [str(tmp_path / "d.jsonl")], "chat_template_kwargs": kwargs}
    config, findings = RunConfig.of({"model": {"path": "m"}, "data": data}), Findings()
    check_data(findings, config, LightTokenizer.load(tmp_path), None)
    assert findings.errors == [] if says is None else says in findings.errors[0]


@pytest.mark.parametrize(
    ("template", "kept"),
    [
        ("{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}answer:", False),
        ("{% for m in messages %}{{ m.content | replace(' a', 'b') }}{% endfor %}", True),
    ],
)
def test_a_chat_template_that_drops_the_prompt_is_refused_in_training_and_check(tmp_path, tokenizer, template, kept):
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    prompt = [{"role": "system", "content": "1"}, {"role": "user", "content": " a+1="}]
    row = {"prompt": prompt, "data_source": "arithmetic", "reward_model": {"ground_truth": "2"}}
    (tmp_path / "d.jsonl").write_text((json.dumps(row) + "\n") * 40)
    config = RunConfig.of({"model": {"path": "m"}, "data": {"train": [str(tmp_path / "d.jsonl")]}})
    findings = Findings()
    check_data(findings, config, LightTokenizer.load(tmp_path), None)
    fault = "the chat template drops the last message of the prompt, the 'user' message ' a+1='"
    assert any(fault in error for error in findings.errors) is not kept
    with nullcontext() if kept else pytest.raises(ValueError, match=re.escape(fault)):
        load_prompts([str(tmp_path / "d.jsonl")], load_tokenizer(str(tmp_path)), Reading(max_prompt_tokens=64))


def test_messages_may_stand_in_a_column_as_json(tmp_path, tokenizer):
    """ROLL's data sets have them so; a text that only begins like it stays the user's."""
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1="}]
    for cell, text in ((json.dumps(turns), "be brief\n1+1=\n"), ("[{a", "[{a\n"), ('[{"role": 1}]', '[{"role": 1}]\n')):
        (tmp_path / "d.jsonl").write_text(json.dumps({"messages": cell}) + "\n")
        reading = Reading(max_prompt_tokens=64, columns=Columns(prompt="messages"))
        assert load_prompts([str(tmp_path / "d.jsonl")], tokenizer, reading).prompts[0].text == text


def test_a_prompt_that_is_rendered_already_is_read_as_it_stands(tmp_path, tokenizer):
    """Neither the template nor a line break after it; what needs a template is refused, when the run is checked too."""
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("<{{ messages[0].content }}>")
    row = {"prompt": "1+1=", "data_source": "arithmetic", "reward_model": {"ground_truth": "2"}}
    for prompt, fault in (("1+1=", None), ([{"role": "user", "content": "1"}] * 2, "a prompt of messages needs")):
        path = tmp_path / f"{fault is None}.jsonl"
        path.write_text((json.dumps(row | {"prompt": prompt}) + "\n") * 40)
        reading = Reading(max_prompt_tokens=64, apply_chat_template=False)
        data = {"train": [str(path)], "apply_chat_template": False}
        config, findings = RunConfig.of({"model": {"path": "m"}, "data": data}), Findings()
        check_data(findings, config, LightTokenizer.load(tmp_path), None)
        if fault is None:
            (loaded, *_) = load_prompts([str(path)], tokenizer, reading).prompts
            assert (loaded.text, loaded.token_ids) == ("1+1=", tokenizer.encode("1+1=")) and findings.errors == []
        else:
            assert fault in findings.errors[0]
            with pytest.raises(ValueError, match=fault):
                load_prompts([str(path)], tokenizer, reading)


@pytest.mark.parametrize("part", ["[:3]", "[2:]", "[-2:]", "[1:-1]", "[:0]", "[5:2]", "[:-100]", "[3:100]", ""])
def test_a_part_of_a_file_is_that_of_a_list_of_its_rows(tmp_path, part):
    rows = [{"prompt": f"{n}+1=", "data_source": "arithmetic"} for n in range(7)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    numbers = [int(text) if text else None for text in part.strip("[]").split(":")] if part else []
    expected = rows[slice(*numbers)] if part else rows
    for name in ("a.jsonl", "a.parquet"):
        path = Path(f"{tmp_path / name}{part}")
        assert list(read_rows(path)) == expected
        assert count_rows(path, 100) == len(expected) and min(1, count_rows(path, 1)) == min(1, len(expected))
    with pytest.raises(ValueError, match=r"no data file at .*b\.jsonl$"):
        list(read_rows(tmp_path / "b.jsonl[:3]"))


def test_the_last_turn_is_learned_with_what_the_template_writes_after_it(tmp_path, tokenizer):
    """Rows of Alpaca's form too: by hand, the text after the generation prompt, end token and line break included."""
    import copy

    templated, end = copy.deepcopy(tokenizer), tokenizer.eos_token
    templated.chat_template = (
        "{% for m in messages %}{{ m.role }} {{ m.content }}" + end + "\n{% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    turns = [("user", "1+1="), ("assistant", "2"), ("user", "plus 3"), ("assistant", "5")]
    talk = {"messages": [{"role": role, "content": text} for role, text in turns]}
    for row, question, learned in (
        (talk, f"user 1+1={end}\nassistant 2{end}\nuser plus 3{end}\nassistant ", f"5{end}\n"),
        ({"instruction": "add ", "input": "1 1", "output": "2"}, f"user add \n\n1 1{end}\nassistant ", f"2{end}\n"),
        ({"instruction": " add 1 1 ", "input": "", "output": "2"}, f"user add 1 1{end}\nassistant ", f"2{end}\n"),
    ):
        (tmp_path / "d.jsonl").write_text(json.dumps(row) + "\n")
        reading = Reading(200, learns_from="responses", need_responses=True, max_response_tokens=200, learned_turns="last")
        (prompt,) = load_prompts([str(tmp_path / "d.jsonl")], templated, reading).prompts
        (response,) = prompt.responses
        assert (prompt.text, templated.decode(response.token_ids), all(response.loss_mask)) == (question, learned, True)
        length = len(prompt.token_ids) + len(response.token_ids)
        for total in (length, length - 1, len(prompt.token_ids) + 1, len(prompt.token_ids)):
            cut = replace(reading, max_total_tokens=total)
            try:
                (shorter,) = load_prompts([str(tmp_path / "d.jsonl")], templated, cut).prompts
            except ValueError as error:
                assert total == len(prompt.token_ids) and "no prompts left" in str(error)
                continue
            assert shorter.responses[0].token_ids == response.token_ids[: total - len(prompt.token_ids)]
            assert shorter.responses[0].truncated == (total < length)


def test_a_bound_of_both_together_is_for_responses_of_the_data(tmp_path):
    data = {"train": ["d.jsonl"], "val": ["d.jsonl"], "max_total_tokens": 100}
    tree = {"model": {"path": "m"}, "data": data, "algorithm": {"name": "sft"}}
    with pytest.raises(ConfigError, match=r"set eval\.generate to false"):
        RunConfig.of(tree)
    assert RunConfig.of(tree | {"eval": {"generate": False}}).max_sequence_tokens == 100
    assert RunConfig.of(tree | {"algorithm": {"name": "grpo"}}).max_sequence_tokens == 1024
