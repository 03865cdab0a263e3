"""Checks that end a run: the engine's log-probs at the first step, updates that are not finite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from fivefold.distributed.ranks import Ranks
from fivefold.types import RolloutStats, StepReport, TokenBatch, token_versions


class LogprobGate:
    """Ends the run at its first step if the engine's log-probs are not the trainer's."""

    def __init__(self, ranks: Ranks, max_diff: float, is_open: bool, log: Callable[[str], None]) -> None:
        """`is_open`: nothing is to be compared, the responses come from a dataset or from a cut distribution."""
        self._ranks, self._max_diff, self._is_open, self._log = ranks, max_diff, is_open, log

    @property
    def needs(self) -> frozenset[str]:
        """Fields of the batch that the check reads, as long as it was not made."""
        return frozenset() if self._is_open else frozenset({"old_logprobs_T"})

    def check(self, batch: TokenBatch, stats: RolloutStats, version: int) -> None:
        """Compare once the tokens sampled by weights of this version; raises RuntimeError on all ranks. Collective."""
        if self._is_open or batch.rollout_logprobs_T is None:
            return
        assert batch.old_logprobs_T is not None
        lengths_N = torch.tensor(batch.lengths_N, dtype=torch.long)
        compared_T = fresh_T = batch.loss_mask_T & (token_versions(batch, stats) == version)
        if batch.expert_T is not None:
            compared_T = fresh_T = fresh_T & ~batch.expert_T
        if stats.skipped_N is not None:
            # The trainer has no log-probs of what it does not train on.
            compared_T = fresh_T & ~stats.skipped_N[batch.sample_index_N].repeat_interleave(lengths_N)
        gap_T = (batch.old_logprobs_T - batch.rollout_logprobs_T)[compared_T].abs().double()
        counts = torch.tensor([len(gap_T), fresh_T.sum()], dtype=torch.float64)
        total, count, fresh = self._ranks.all_reduce_sum(torch.cat([gap_T.sum()[None], counts])).tolist()
        if fresh and not count:
            # Nothing of it is trained on: a later step is compared.
            return
        self._is_open = True
        if not count:
            # A run that resumes ahead of its engine: later steps are no different.
            self._log("the engine's log-probs were not compared with the trainer's: older weights have sampled the step")
            return
        mean = total / count
        if not mean <= self._max_diff:
            raise RuntimeError(
                f"the engine's log-probs differ from the trainer's by {mean:.3g} per token on average, more than "
                f"engine.max_logprob_diff = {self._max_diff:.3g}: training would be off-policy from the start. "
                "Look at: the model's weights and RoPE settings (do both read the same config.json?), the dtype of both, "
                "the chat template and special tokens, and tied embeddings. Raise the bound only if you know the reason."
            )


class SkipGuard:
    """Ends the run after too many updates in a row that had to be skipped, with the batch saved."""

    def __init__(self, ranks: Ranks, max_skipped: int, run_dir: Path, log: Callable[[str], None]) -> None:
        self._ranks, self._max_skipped, self._run_dir, self._log = ranks, max_skipped, run_dir, log
        self._skipped: dict[str, int] = {}

    def check(self, report: StepReport, batch: TokenBatch, name: str, step: int) -> None:
        """Count a skipped update of the model `name`; `step` counts from 0. Raises RuntimeError on all ranks."""
        if report.overflowed:
            # How the scale is found that float16 holds: no fault of the step.
            self._log(f"{name}'s update skipped: gradients overflow float16 at a loss scale of {report.loss_scale:g}")
            return
        skipped = self._skipped[name] = self._skipped.get(name, 0) + 1 if report.skipped else 0
        if report.skipped:
            self._log(f"{name}'s update skipped: loss {report.loss}, gradient norm {report.grad_norm} ({skipped} in a row)")
        if skipped > self._max_skipped:
            directory = self._run_dir / "failed" / f"step-{step + 1:06d}"
            directory.mkdir(parents=True, exist_ok=True)
            batch.save(directory / f"rank-{self._ranks.rank}.safetensors")
            self._ranks.barrier()
            raise RuntimeError(
                f"{skipped} updates of the {name} in a row had a loss or gradient that was not finite "
                f"(trainer.guard.max_skipped = {self._max_skipped}); parameters are as after the last good one. "
                f"Each rank's last batch is in {directory}"
            )
