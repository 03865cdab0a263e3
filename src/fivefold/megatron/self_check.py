"""At start, for a family without a table here: are our log-probs those of transformers?

Its layers follow a description by Megatron-Bridge. A part of it that were wrong or missing would only change the numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fivefold.backend.self_check import Gap, check_batch, logprobs_of_files
from fivefold.distributed.objects import all_gather_json, broadcast_json
from fivefold.errors import RunError, first_line
from fivefold.megatron.mesh import Mesh
from fivefold.models.spec import ModelSpec
from fivefold.types import TokenBatch


class LogProbError(RunError):
    """Raised when this layout's log-probs are not those of transformers."""


def check_logprobs(
    directory: Path, forward: Callable[[TokenBatch], Tensor], spec: ModelSpec, dtype: torch.dtype, mesh: Mesh
) -> None:
    """Raise LogProbError on all ranks if `forward` on this layout differs from transformers on the files. Collective."""
    batch, ranks = check_batch(spec.vocab), mesh.ranks
    ours_T = forward(batch)
    answer: Any = None
    if ranks.leads:
        try:
            answer = logprobs_of_files(directory, batch, dtype, mesh.device).tolist()
        except Exception as error:
            answer = f"{type(error).__name__}: {first_line(error)}"
    answer = broadcast_json(answer, ranks.first, ranks.members)
    if isinstance(answer, str):
        raise LogProbError(f"transformers cannot compute this {spec.family} model, with which ours is compared: {answer}")
    gap = Gap.between(ours_T, torch.tensor(answer), dtype)
    if not all(all_gather_json(gap.is_rounding, ranks.members)):
        raise LogProbError(
            f"log-probs of this {spec.family} model must be those that transformers computes, within {gap.bound} "
            f"({gap.measure}): they are off by {gap.value:.2g} on {mesh.layout}. Megatron-Bridge describes other layers: "
            f"write fsdp:d{mesh.layout.world_size}"
        )
