"""The score of a whole trajectory, whatever its end."""

from __future__ import annotations

import pytest

from tests.rollout.test_conversations import sample
from tests.support.tiny_models import make_tokenizer

CODE = """
class Counts:
    def reset(self, task, seed):
        self.turns = 0
        return "a"

    def step(self, message):
        self.turns += 1
        return {"messages": "b", "reward": 0.25, "done": self.turns == 3}

    def score(self):
        return 10.0 * self.turns
"""


@pytest.mark.parametrize(("max_turns", "end", "reward"), [(5, "done", 30.75), (2, "turns", 20.5)])
def test_a_trajectory_has_its_score_once_whatever_its_end(cluster, models, tmp_path, max_turns, end, reward):
    (tmp_path / "envs.py").write_text(CODE)
    files = str(models("qwen3")), str(make_tokenizer(tmp_path / "tokenizer")), str(tmp_path / "envs.py")
    ((groups, _, _),) = cluster.run(scored_sample, "megatron:d1", files, max_turns)
    ended = [one for group in groups for one in group.samples if one.end == end]
    assert ended and all(one.reward == reward for one in ended)
    # One that a limit of tokens cuts off has the score of the turns that the environment saw.
    others = [one for group in groups for one in group.samples if one.end != end]
    assert all(one.reward == 10.25 * (len(one.turns) - (one.end == "length")) for one in others)


def scored_sample(mesh, files, max_turns: int):
    return sample(mesh, files, "Counts", max_turns=max_turns)
