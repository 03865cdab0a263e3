"""Checks that end a run: engine log-probs, precision that the engine's dtype loses of adapters, non-finite updates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from fivefold.columns import Column
from fivefold.distributed.ranks import Ranks
from fivefold.errors import RunError
from fivefold.types import RolloutStats, StepReport, TokenBatch, token_versions

PROBED = 16
"""Samples per replica that are compared if the step trains on none of them."""
NOTABLE = 0.1
"""Share of the adapters' contribution above which its loss is reported."""
SETTLED = 10
"""Updates after which adapters are large enough that the lost share is meaningful."""


class Policy(Protocol):
    @property
    def version(self) -> int: ...


class Scorer(Protocol):
    """Computes the policy's log-probs: the models of a run."""

    @property
    def policy(self) -> Policy: ...

    def annotate(self, batch: TokenBatch, needs: frozenset[Column]) -> None: ...


@dataclass(frozen=True)
class Bounds:
    """Largest distance between engine and trainer log-probs, per token; None: not checked."""

    kl: float | None
    diff: float | None = None


Probe = Callable[[], tuple[TokenBatch, RolloutStats]]
"""Returns a few responses that the engine samples with the current policy weights. Collective."""


class LogprobGate:
    """Ends a run if the engine's and the trainer's log-probs differ; it stays armed until it has compared some tokens.

    The KL divergence is estimated by k3 (http://joschu.net/blog/kl-approx.html) with log ratios bounded to ±1, so that a
    single token with other expert routes is not decisive.
    """

    def __init__(
        self, ranks: Ranks, bounds: Bounds, is_open: bool, log: Callable[[str], None], probe: Probe | None = None
    ) -> None:
        """`is_open`: no comparison, since the responses come from a dataset or a truncated distribution.

        With `probe` the first comparison happens before the first step, for runs whose steps start with older samples.
        """
        self._ranks, self._bounds, self._is_open, self._log, self._probe = ranks, bounds, is_open, log, probe

    @property
    def is_armed(self) -> bool:
        """Whether the check still has to compare some tokens."""
        return not self._is_open

    @property
    def needs(self) -> frozenset[Column]:
        """Columns that the check reads; empty once the check is done."""
        return frozenset({Column.OLD_LOGPROBS}) if self.is_armed else frozenset()

    def probe(self, models: Scorer) -> None:
        """Compare a few responses sampled for this purpose, while the gate is armed; does nothing without a probe.
        Collective."""
        if self._is_open or self._probe is None:
            return
        batch, stats = self._probe()
        models.annotate(batch, self.needs)
        self._compare(batch, batch.loss_mask_T & (token_versions(batch, stats) == models.policy.version))

    def check(self, batch: TokenBatch, stats: RolloutStats, models: Scorer) -> None:
        """Compare, once, the tokens that were sampled with the current policy weights; raises RuntimeError on all ranks.

        If the trainer has computed no log-probs because no sample has an advantage, it computes a few for this. Collective.
        """
        if self._is_open or Column.ROLLOUT_LOGPROBS not in batch:
            return
        fresh_T = batch.loss_mask_T & (token_versions(batch, stats) == models.policy.version)
        if Column.EXPERT in batch:
            fresh_T &= ~batch[Column.EXPERT]
        if stats.skipped_N is None:
            self._compare(batch, fresh_T)
            return
        lengths_N = torch.tensor(batch.lengths_N, dtype=torch.long)
        skipped_T = stats.skipped_N[batch.sample_index_N].repeat_interleave(lengths_N)
        if self._compare(batch, fresh_T & ~skipped_T):
            return
        sample_T = torch.arange(len(lengths_N)).repeat_interleave(lengths_N)
        places = sample_T[fresh_T].unique()[:PROBED].tolist()
        part = batch.select(places)
        part.columns.pop(Column.OLD_LOGPROBS, None)
        models.annotate(part, self.needs)
        self._compare(part, fresh_T[batch.token_index(places)])

    def _compare(self, batch: TokenBatch, chosen_T: torch.Tensor) -> bool:
        """Return whether any replica had tokens to compare; raises RuntimeError if the log-probs of all of them, or of the
        turns with one number, differ too much."""
        gap_T = (batch[Column.OLD_LOGPROBS] - batch[Column.ROLLOUT_LOGPROBS])[chosen_T].double()
        bounded_T = gap_T.clamp(-1, 1)
        gaps_3T = torch.stack([gap_T.abs(), bounded_T.expm1() - bounded_T, torch.ones_like(gap_T)])
        turns, turn_T = 1, torch.zeros_like(batch.token_ids_T)[chosen_T]
        if Column.TURN in batch:
            turn_T = batch[Column.TURN][chosen_T].clamp(min=0)
            turns = 1 + int(self._ranks.all_reduce_max(float(turn_T.max()) if len(turn_T) else 0.0))
        # Row 0 is the sum over all turns, and row k the k-th turn of every trajectory.
        sums_3U = torch.zeros(3, turns, dtype=torch.float64).index_add(1, turn_T, gaps_3T)
        total, divergence, count = self._ranks.all_reduce_sum(torch.stack([gaps_3T.sum(1), *sums_3U.T])).unbind(1)
        if not count[0]:
            return False
        self._is_open = True
        limits = {"engine.max_logprob_kl": self._bounds.kl, "engine.max_logprob_diff": self._bounds.diff}

        def above(row: int) -> list[str]:
            """Return the bounds that the tokens of a row exceed."""
            values = zip((divergence[row] / count[row], total[row] / count[row]), limits.items(), strict=True)
            # NaN is above every bound.
            return [f"{key} = {most:.3g}" for value, (key, most) in values if most is not None and not value <= most]

        numbers = range(1, turns + 1) if turns > 1 else ()
        row = next((number for number in numbers if count[number] and above(number)), 0)
        gap = (
            f"a KL divergence of {divergence[row] / count[row]:.3g} a token, {total[row] / count[row]:.3g} on average, over "
            f"{count[row]:.0f} tokens"
        )
        if not above(row):
            self._log(f"the engine's log-probs agree with the trainer's: {gap}")
            return True
        where = f"from turn {row} on " if row else ""
        raise RunError(
            f"the engine's log-probs differ {where}from the trainer's by {gap}, more than {' and '.join(above(row))}: "
            "training would be off-policy from the start. Look at: the model's weights and RoPE settings (do both read the "
            "same config.json?), the dtype of both, the chat template and special tokens, and tied embeddings. Raise the "
            "bound only if you know the reason."
        )


class AdapterGuard:
    """Reports at every weight sync which share of the adapters' contribution the engine's dtype loses; ends a run if too
    large."""

    def __init__(
        self,
        measure: Callable[[], float | None] | None,
        ranks: Ranks,
        max_lost: float | None,
        dtype: str,
        record: Callable[[dict[str, float]], None],
        log: Callable[[str], None],
    ) -> None:
        """`measure` returns that share on the policy's `ranks`, or None if adapters add nothing; it is None on others."""
        self._measure, self._ranks, self._max_lost, self._dtype = measure, ranks, max_lost, dtype
        self._record, self._log = record, log

    def check(self, version: int) -> None:
        """Check the weights that were last sent to the engine; raises RuntimeError on all ranks. Collective."""
        lost: float | None = self._ranks.broadcast_from_leader(None if self._measure is None else self._measure())
        if lost is None:
            return
        self._record({"rollout/lora_lost": lost})
        if lost <= NOTABLE:
            return
        message = (
            f"{lost:.0%} of what the adapters add is lost in the engine's {self._dtype} after {version} updates: it samples "
            "from another policy than the one that learns"
        )
        self._log(message)
        if self._max_lost is not None and version >= SETTLED and lost > self._max_lost:
            raise RunError(
                f"{message}. policy.lora.max_lost = {self._max_lost:g} ends the run: set policy.dtype and engine.dtype: "
                "bfloat16, which has small numbers too, so that nothing is lost on average"
            )


class SkipGuard:
    """Ends the run after too many consecutive skipped updates, and saves the batch."""

    def __init__(self, ranks: Ranks, max_skipped: int, run_dir: Path, log: Callable[[str], None]) -> None:
        self._ranks, self._max_skipped, self._run_dir, self._log = ranks, max_skipped, run_dir, log
        self._skipped: dict[str, int] = {}

    def check(self, report: StepReport, batch: TokenBatch, name: str, step: int) -> None:
        """Count a skipped update of the model `name`; `step` counts from 0. Raises RuntimeError on all ranks."""
        if report.overflowed:
            # The loss scale for float16 is still being searched; this is not a fault of the step.
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
            raise RunError(
                f"{skipped} updates of the {name} in a row had a loss or gradient that was not finite "
                f"(trainer.guard.max_skipped = {self._max_skipped}); parameters are as after the last good one. "
                f"Each rank's last batch is in {directory}"
            )
