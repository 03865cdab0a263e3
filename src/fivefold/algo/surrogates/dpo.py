"""Surrogate that compares the two responses of a pair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fivefold.algo.segments import Segments
from fivefold.algo.surrogate import Metrics, Surrogate
from fivefold.keys.ranges import above, within
from fivefold.lazy import Tensor, torch


@dataclass(frozen=True)
class DPO(Surrogate):
    """log σ(β (log-ratio of the chosen - of the rejected response)), ratios to the reference: DPO (2305.18290) equation 7.

    Samples come in pairs, the chosen one first; each token holds the value of its pair. With label smoothing s it is (1 - s)
    log σ(m) + s log σ(-m) (conservative DPO).
    """

    name = "dpo"
    ratio_reference = "reference"
    levels = ()
    pairs = True
    reports = (
        ("policy/accuracy", "fraction", "dpo: pairs whose chosen response has the higher implicit reward."),
        ("policy/margin", "reward", "dpo: implicit reward of the chosen less that of the rejected response."),
        ("policy/reward_chosen", "reward", "dpo: β · log-ratio to the reference of the chosen responses."),
        ("policy/reward_rejected", "reward", "dpo: the same of the rejected responses."),
    )
    beta: Annotated[float, above(0)] = 0.1
    """β of DPO."""
    label_smoothing: Annotated[float, within("[0, 0.5)")] = 0.0
    """Share of pairs that DPO assumes to be labeled the wrong way round."""

    def _margin(self, log_ratio_T: Tensor, samples: Segments) -> Tensor:
        pairs = samples.sums(log_ratio_T).view(-1, 2)
        return (self.beta * (pairs[:, 0] - pairs[:, 1])).repeat_interleave(2)

    def __call__(self, log_ratio_T: Tensor, logprobs_T: Tensor, advantages_T: Tensor, samples: Segments) -> Tensor:
        margin_N = self._margin(log_ratio_T, samples)
        value_N = (1 - self.label_smoothing) * torch.nn.functional.logsigmoid(
            margin_N
        ) + self.label_smoothing * torch.nn.functional.logsigmoid(-margin_N)
        return value_N[samples.sample_T]

    def metrics(self, log_ratio_T: Tensor, advantages_T: Tensor, samples: Segments) -> Metrics:
        margin_N = self._margin(log_ratio_T, samples)
        rewards_N = self.beta * samples.sums(log_ratio_T)
        chosen_N = torch.arange(len(margin_N), device=margin_N.device) % 2 == 0
        metrics = {
            "policy/accuracy": (margin_N > 0).float(),
            "policy/margin": margin_N,
            # Each sample of a pair has half of the pair's weight.
            "policy/reward_chosen": torch.where(chosen_N, 2 * rewards_N, 0.0),
            "policy/reward_rejected": torch.where(chosen_N, 0.0, 2 * rewards_N),
        }
        return {name: value_N[samples.sample_T] for name, value_N in metrics.items()}
