"""samples.jsonl has the rows that the configuration says on every layout, whichever rank has sampled them."""

from __future__ import annotations

import json

import pytest
import torch

from fivefold.algo.objective import make_objective
from fivefold.columns import Column
from fivefold.data.chat_template import ChatTemplate
from fivefold.data.dialog import Dialog
from fivefold.observability.run_logger import RunLogger
from fivefold.rollout.packing import pack
from fivefold.rollout.stats import BatchPlan, gather_stats
from fivefold.trainer.logged_samples import LoggedSamples
from fivefold.trainer.step_work import StepWork
from fivefold.trainer.transcripts import transcript
from fivefold.types import Group, Prompt, Sample, Turn

LAYOUTS = ["d1", "d2", "t2", "c2", "p2", "d2t2"]


def logged(mesh, counts):
    """Rows of six groups of two, dealt to the ranks as a rollout deals them; the fourth has no samples."""
    groups = [
        Group(
            Prompt(9 - index, [1, 2], "s", f"p{index}", "t"),
            [
                Sample([3] * (index + 1), [-0.5] * (index + 1), f"r{index}-{n}", "answered", 0, reward=index + n / 10)
                for n in range(2)
            ]
            if index != 3
            else [],
            index=index,
        )
        for index in range(6)
    ]
    groups_of_rank = mesh.ranks.shard(groups)[::-1]
    logged_rows = [
        LoggedSamples(count, mesh.ranks).rows(1, groups_of_rank, kind) for count in counts for kind in ("train", "val")
    ]
    return [[{key: value for key, value in row.items() if key != "wall"} for row in rows] for rows in logged_rows]


def test_as_many_samples_are_written_on_every_layout_as_are_asked_for(cluster):
    by_layout = {layout: cluster.run(logged, f"megatron:{layout}", (0, 2, 6, "all")) for layout in LAYOUTS}
    none, none_val, two, two_val, six, six_val, every, every_val = by_layout["d1"][0]
    assert none == none_val == []
    assert [row["response"] for row in two] == ["r0-0", "r1-0"] and [row["kind"] for row in two_val] == ["val"] * 2
    assert [row["group"] for row in six] == [row["group"] for row in six_val] == [0, 1, 2, 4, 5]
    assert [row["response"] for row in every] == [f"r{index}-{n}" for index in (0, 1, 2, 4, 5) for n in range(2)]
    assert [row["response"] for row in every_val] == [row["response"] for row in six]
    # Rewards and lengths of the whole group, once for each group.
    assert [row["group_rewards"] for row in two] == [[0.0, 0.1], [1.0, 1.1]]
    assert [row["group_lengths"] for row in every if "group_lengths" in row] == [
        [index + 1] * 2 for index in (0, 1, 2, 4, 5)
    ]
    assert all(("group_rewards" in row) == (row["sample"] == 0) for row in every)
    for layout, ranks in by_layout.items():
        assert ranks[0] == by_layout["d1"][0], layout
        assert not any(rows for other in ranks[1:] for rows in other), layout


def asked(mesh):
    """Rows of a conversation, and of a prompt without messages."""
    messages = [{"role": role, "content": text} for role, text in (("system", "Be brief."), ("user", "Hello"), ("assistant", "Hi"),
                                                                   ("user", "3+4?"), ("assistant", "It is"))]  # fmt: skip
    prompts = Prompt(0, [1], "s", "<|im_start|>system...", "7", messages=messages), Prompt(1, [1], "s", "3+4=", "7")
    groups = [Group(prompt, [Sample([3], [-0.5], "7", "answered", 0, reward=1.0)], index=prompt.id) for prompt in prompts]
    return LoggedSamples(2, mesh.ranks).rows(1, groups, "train")


def test_the_question_of_a_row_is_the_last_user_message_not_the_template(cluster):
    (rows,) = cluster.run(asked, "megatron:d1")
    assert [(row["question"], row["prompt"]) for row in rows] == [("3+4?", "<|im_start|>system..."), ("3+4=", "3+4=")]


class Letters:
    """A tokenizer whose tokens are letters."""

    def decode(self, token_ids, skip_special_tokens):
        return "".join(chr(96 + token) for token in token_ids)


def several_turns() -> list[Group]:
    """Three groups of two trajectories: two turns in one sequence, and two sequences of one turn."""
    groups = []
    for index in range(3):
        one = Sample(
            [3, 4, 9, 5], [-0.5, -1.0, 0.0, -2.0], "", "turns", 0, loss_mask=[True, True, False, True], trajectory=0
        )
        one.turns = (Turn(0, 0, 2, 0.5, "s", "stop", 1.5), Turn(1, 3, 4, finish="length"))
        first = Sample([6], [-0.25], "", "done", 0, trajectory=1, turns=(Turn(0, 0, 1),))
        other = Sample([7], [-0.75], "", "done", 0, prompt_ids=[1, 2, 8], trajectory=1, turns=(Turn(1, 0, 1),))
        other.break_cause = "template"
        one.reward, first.reward, other.reward = 0.0, 1.0, 1.0
        groups.append(Group(Prompt(index, [1, 2], "s", "ab", ""), [one, first, other], index=index))
    return groups


def transcripts(mesh, counts, run_dir):
    """The rows of transcripts.jsonl and samples.jsonl that the main rank writes for each number of samples."""
    files_by_count = []
    for count in counts:
        objective, groups = make_objective("dr_grpo"), mesh.ranks.shard(several_turns())
        stats = gather_stats(groups, mesh.ranks, BatchPlan(max_response_tokens=9))
        batch = pack(groups, stats, mesh.ranks, BatchPlan())
        objective.assign_advantages(batch, stats, mesh.ranks)
        batch[Column.OLD_LOGPROBS] = torch.zeros(len(batch.token_ids_T))
        logged = LoggedSamples(count, mesh.ranks, Dialog(ChatTemplate(Letters(), {}, frozenset())))
        work = StepWork(stats, batch, logged.rows(1, groups, "train", stats))
        logged.complete(work, objective)
        directory = run_dir / f"{count}-{mesh.ranks.rank}"
        directory.mkdir()
        RunLogger(directory, [], mesh.ranks.is_main, 1).samples(work.rows)
        names = ("transcripts.jsonl", "samples.jsonl")
        texts = [(directory / name).read_text() if (directory / name).exists() else "" for name in names]
        files_by_count.append([[json.loads(line) for line in text.splitlines()] for text in texts])
    return files_by_count


@pytest.mark.parametrize("layout", ["d1", "d2", "t2"])
def test_transcripts_have_every_turn_with_its_tokens_and_advantages(cluster, tmp_path, layout):
    (two, two_samples), (every, samples) = cluster.run(transcripts, f"megatron:{layout}", (2, "all"), tmp_path)[0]
    assert [(row["group"], row["trajectory"]) for row in two] == [(0, 0), (1, 0)] and len(two_samples) == 2
    assert [(row["group"], row["trajectory"]) for row in every] == [
        (index, number) for index in range(3) for number in range(2)
    ]
    assert not any("transcript" in row for row in samples) and samples[0]["group_rewards"] == [0.0, 1.0]
    (sequence,) = two[1]["sequences"]
    assert sequence["texts"] == ["c", "d", "i", "e"] and sequence["context_text"] == "ab" and sequence["break"] is None
    assert sequence["mask"] == [True, True, False, True] and sequence["logprobs"] == [-0.5, -1.0, None, -2.0]
    assert sequence["advantages"] == [-0.5, -0.5, 0.0, -0.5]
    assert [(turn["text"], turn["reward"], turn["seconds"], turn["finish"], turn["calls"]) for turn in sequence["turns"]] == [
        ("cd", 0.5, 1.5, "stop", []), ("e", 0.0, 0.0, "length", [])
    ]  # fmt: skip
    first, other = every[1]["sequences"]
    assert other["break"] == {"cause": "template", "at": 2, "held": "f", "now": "h"}
    assert first["advantages"] == other["advantages"] == [0.5] and every[1]["end"] == "done"


def test_a_transcript_of_data_has_no_log_probs():
    group = several_turns()[0]
    one = group.samples[0]
    one.logprobs = []
    (sequence,) = transcript(group, 0, [one], [0], Dialog(ChatTemplate(Letters(), {}, frozenset())))["sequences"]
    assert sequence["logprobs"] == [None] * 4 and sequence["texts"] == ["c", "d", "i", "e"]


def test_responses_of_one_turn_have_no_transcript(cluster, tmp_path):
    (rows,) = cluster.run(asked, "megatron:d1")
    assert not any("transcript" in row for row in rows)
