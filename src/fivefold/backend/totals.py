"""Results of an update: the outputs of its micro-batches -> loss and metrics of the whole batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.types import LossOutput


@dataclass(frozen=True)
class Gradients:
    """Results of a forward-backward over the whole batch, apart from the gradients."""

    totals: Totals | None
    """Loss and metrics of this replica; None except on the last pipeline stage."""
    micro_batches: int
    tokens: int
    """Number of tokens that all replicas computed, without padding."""
    sequences: int


@dataclass(frozen=True)
class Totals:
    """Loss and metrics of a replica's micro-batches, still on the device: reading them waits for the device."""

    names: list[str]
    sums: Tensor
    """float64: the loss, then the summed metrics."""
    highest: list[str]
    maxima: Tensor

    @classmethod
    def of(cls, outputs: list[LossOutput]) -> Totals:
        """Combine the outputs of all micro-batches."""
        names, highest = sorted(outputs[0].sums), sorted(outputs[0].maxima)
        rows = [torch.stack([output.loss] + [output.sums[name] for name in names]) for output in outputs]
        sums = torch.stack(rows).double().sum(0)
        maxima = [torch.stack([output.maxima[name] for output in outputs]).double().amax() for name in highest]
        return cls(names, sums, highest, torch.stack(maxima) if highest else sums[:0])

    def reduce(self, replicas: dist.ProcessGroup) -> tuple[float, dict[str, float]]:
        """Reduce over replicas with at most two collectives, whatever the number of metrics; return loss and metrics."""
        sums, maxima = self.sums.cpu(), self.maxima.cpu()
        dist.all_reduce(sums, group=replicas)
        if self.highest:
            dist.all_reduce(maxima, dist.ReduceOp.MAX, group=replicas)
        metrics = zip(self.names + self.highest, sums[1:].tolist() + maxima.tolist(), strict=True)
        return float(sums[0]), dict(metrics)
