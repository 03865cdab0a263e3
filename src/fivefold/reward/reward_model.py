"""Reward model: whole responses -> scores, by a value head at the last token."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from fivefold.distributed.ranks import Ranks
from fivefold.interfaces import Model
from fivefold.types import MODEL_PART, Group, Prompt, Sample, TokenBatch, by_trajectory, last_sequence


def scored_part(tokens: list[int], pad: int | None) -> list[int]:
    """Return a text up to its last token that is not `pad`, at which transformers' classifiers score it."""
    last = next((place for place in reversed(range(len(tokens))) if tokens[place] != pad), 0)
    return tokens[: last + 1]


class ModelReward:
    """Adds a sequence classifier's score to rewards; `encode` returns the tokens that the classifier reads."""

    def __init__(
        self, model: Model, ranks: Ranks, encode: Callable[[Prompt, Sample], list[int]], weight: float, max_tokens: int
    ) -> None:
        self._model, self._ranks, self._encode, self._weight, self._max_tokens = model, ranks, encode, weight, max_tokens

    def score(self, groups: list[Group]) -> str | None:
        """Add the scores of this rank's groups, and return the error of the first sample that failed. Collective.

        A sample fails if its text is longer than the model's positions, or if its score is not finite. The score of a
        trajectory is that of the sequence with its last turn.
        """
        trajectories = [(group.prompt, sequences) for group in groups for sequences in by_trajectory(group.samples)]
        texts = [self._encode(prompt, last_sequence(sequences)) for prompt, sequences in trajectories]
        readable = [i for i, tokens in enumerate(texts) if len(tokens) <= self._max_tokens]
        scores = dict(zip(readable, self._scores([texts[i] for i in readable]), strict=True))
        first_error = None
        for i, (_, sequences) in enumerate(trajectories):
            score = scores.get(i, math.nan)
            if math.isfinite(score):
                for sample in sequences:
                    sample.reward_parts[MODEL_PART] = score
                    sample.reward += self._weight * score
                continue
            for sample in sequences:
                sample.reward, sample.reward_failed = math.nan, True
            first_error = first_error or (
                f"the reward model gave {score}"
                if i in scores
                else f"a text of {len(texts[i])} tokens is longer than the reward model's {self._max_tokens} positions"
            )
        return first_error

    def _scores(self, texts: list[list[int]]) -> list[float]:
        """Return the value at the end of each text; the ranks of a replica compute all their texts together."""
        own_tokens = torch.tensor([token for text in texts for token in text], dtype=torch.long)
        own_lengths = torch.tensor([len(text) for text in texts], dtype=torch.long)
        tokens_T = torch.cat(self._ranks.all_gather_within_replica(own_tokens))
        lengths = self._ranks.all_gather_within_replica(own_lengths)
        lengths_N = torch.cat(lengths)
        # Without response tokens, only the value at the end of each text is computed.
        batch = TokenBatch(tokens_T, torch.zeros(len(tokens_T), dtype=torch.bool), [int(length) for length in lengths_N])
        values_T = self._model.forward(batch)
        self._model.offload()
        ends_N = lengths_N.cumsum(0) - 1
        first = sum(len(one) for one in lengths[: self._ranks.replica.rank()])
        return [float(value) for value in values_T[ends_N[first : first + len(texts)]]]
