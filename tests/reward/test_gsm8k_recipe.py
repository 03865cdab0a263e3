"""GSM8K as examples/smollm2 prepares it: solutions without notes that still earn the reward, and the easier problems."""

from __future__ import annotations

import json

import pytest

from examples.smollm2 import gsm8k
from fivefold.reward.maths import gsm8k as reward

SOLUTION = "He sprints 3*3=<<3*3=9>>9 times\nSo he runs 9*60=$<<9*60=540>>540\n#### 540"


def written(tmp_path, solutions: list[str]) -> dict[str, list[dict[str, str]]]:
    for split in ("train", "test"):
        rows = [{"question": f"{place}?", "answer": solution} for place, solution in enumerate(solutions)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert gsm8k.main(tmp_path / "out", [tmp_path / "train.jsonl", tmp_path / "test.jsonl"]) == 0
    files = sorted((tmp_path / "out").glob("*.jsonl"))
    return {file.stem: [json.loads(line) for line in file.read_text().splitlines()] for file in files}


def test_a_solution_has_no_notes_and_earns_the_reward(tmp_path):
    for rows in written(tmp_path, [SOLUTION]).values():
        (row,) = rows
        assert row["response"] == "He sprints 3*3=9 times\nSo he runs 9*60=$540\n#### 540"
        assert reward(row["response"], row["reward_model"]["ground_truth"]) == 1
        assert row["prompt"][0]["content"].startswith("0?") and "####" in row["prompt"][0]["content"]


def test_easy_problems_are_the_training_problems_of_few_calculations(tmp_path):
    solutions = ["".join(f"<<{n}={n}>>{n} " for n in range(count)) + "#### 1" for count in range(6)]
    rows = written(tmp_path, solutions)
    assert [row["extra_info"]["index"] for row in rows["easy"]] == list(range(gsm8k.MOST_CALCULATIONS + 1))
    assert len(rows["train"]) == len(rows["test"]) == 6


def test_a_source_that_is_not_there_is_one_sentence(tmp_path, capsys):
    assert gsm8k.main(tmp_path / "out", [tmp_path / "none.jsonl"]) == 2
    assert capsys.readouterr().err == f"gsm8k: no source file at {tmp_path}/none.jsonl\n"


@pytest.mark.parametrize("note", ["<<1+1=2>>", "<<>>", "<<(2*3)/4=1.5>>"])
def test_a_note_is_taken_out_whole(note):
    assert gsm8k.plain({"response": f"a {note}b"})["response"] == "a b"
