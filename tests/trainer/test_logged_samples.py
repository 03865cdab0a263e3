"""samples.jsonl has the rows that the configuration says on every layout, whichever rank has sampled them."""

from __future__ import annotations

from fivefold.trainer.logged_samples import LoggedSamples
from fivefold.types import Group, Prompt, Sample

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
    own = mesh.ranks.shard(groups)[::-1]
    found = [LoggedSamples(count, mesh.ranks).rows(1, own, kind) for count in counts for kind in ("train", "val")]
    return [[{key: value for key, value in row.items() if key != "wall"} for row in rows] for rows in found]


def test_as_many_samples_are_written_on_every_layout_as_are_asked_for(cluster):
    found = {layout: cluster.run(logged, f"megatron:{layout}", (0, 2, 6, "all")) for layout in LAYOUTS}
    none, none_val, two, two_val, six, six_val, every, every_val = found["d1"][0]
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
    for layout, ranks in found.items():
        assert ranks[0] == found["d1"][0], layout
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
