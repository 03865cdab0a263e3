"""A reward model: whole responses -> scores, by a value head at the last token."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fivefold.interfaces import Model
from fivefold.types import MODEL_PART, Group, Prompt, Sample, TokenBatch


class ModelReward:
    """Adds a sequence classifier's score to the rewards of a replica's samples; `encode` gives the tokens it reads."""

    def __init__(self, model: Model, encode: Callable[[Prompt, Sample], list[int]], weight: float, max_tokens: int) -> None:
        self._model, self._encode, self._weight, self._max_tokens = model, encode, weight, max_tokens

    def score(self, groups: list[Group]) -> None:
        """Add the scores; a text longer than the model's positions counts as failed. Called on all ranks of a replica."""
        samples = [(group.prompt, sample) for group in groups for sample in group.samples]
        texts = [self._encode(prompt, sample) for prompt, sample in samples]
        whole = [i for i, tokens in enumerate(texts) if len(tokens) <= self._max_tokens]
        batch = TokenBatch(
            token_ids_T=torch.tensor([token for i in whole for token in texts[i]], dtype=torch.long),
            loss_mask_T=torch.zeros(sum(len(texts[i]) for i in whole), dtype=torch.bool),
            lengths_N=[len(texts[i]) for i in whole],
        )
        # Without response tokens the value at the end of each text is the only one that is wanted.
        values_T = self._model.forward(batch)
        self._model.offload()
        ends_N = torch.tensor(batch.lengths_N, dtype=torch.long).cumsum(0) - 1
        scores = dict(zip(whole, values_T[ends_N].tolist(), strict=True))
        for i, (_, sample) in enumerate(samples):
            sample.reward_parts[MODEL_PART] = scores.get(i, 0.0)
            sample.reward += self._weight * scores.get(i, 0.0)
            sample.reward_failed |= i not in scores
