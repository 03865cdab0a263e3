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
                Sample([3] * (index + 1), [-0.5] * (index + 1), f"r{index}-{n}", True, 0, reward=float("nan"))
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
    return [[{key: value for key, value in row.items() if key not in ("wall", "reward")} for row in rows] for rows in found]


def test_as_many_samples_are_written_on_every_layout_as_are_asked_for(cluster):
    found = {layout: cluster.run(logged, f"megatron:{layout}", (0, 2, 6, "all")) for layout in LAYOUTS}
    none, none_val, two, two_val, six, six_val, every, every_val = found["d1"][0]
    assert none == none_val == []
    assert [row["response"] for row in two] == ["r0-0", "r1-0"] and [row["kind"] for row in two_val] == ["val"] * 2
    assert [row["group"] for row in six] == [row["group"] for row in six_val] == [0, 1, 2, 4, 5]
    assert [row["response"] for row in every] == [f"r{index}-{n}" for index in (0, 1, 2, 4, 5) for n in range(2)]
    assert [row["response"] for row in every_val] == [row["response"] for row in six]
    for layout, ranks in found.items():
        assert ranks[0] == found["d1"][0], layout
        assert not any(rows for other in ranks[1:] for rows in other), layout
