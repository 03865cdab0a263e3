"""Groups of drawn tokens, as an engine samples them for the tiny models."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fivefold.types import Group, Prompt, Sample
from tests.support.tiny_models import VOCAB


def draw_groups(rewards: Sequence[Sequence[float]], response_tokens: int | None = None) -> list[Group]:
    """Groups with those rewards, of one prompt each; of 3 to 10 response tokens where no number is given."""
    draw = torch.Generator().manual_seed(5)

    def tokens(count: int) -> list[int]:
        return torch.randint(0, VOCAB, (count,), generator=draw).tolist()

    groups = []
    for index, rewards_of_group in enumerate(rewards):
        prompt = Prompt(index, tokens(2 + index), "s", "", "")
        lengths = [response_tokens or 3 + (5 * index + 3 * place) % 8 for place in range(len(rewards_of_group))]
        samples = [
            Sample(tokens(length), [-2.0] * length, "", "answered", 0, reward=float(reward))
            for length, reward in zip(lengths, rewards_of_group, strict=True)
        ]
        groups.append(Group(prompt, samples, index=index))
    return groups
