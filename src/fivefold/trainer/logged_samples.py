"""Groups and the batch of a step -> its rows of samples.jsonl on the main rank, the same on every layout.

A number takes the first sample of that many first groups of the step. `all` takes all samples of all groups. Each then has
everything that its advantages and its share of the loss in the step's first updates are computed from.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fivefold.algo.objective import Objective
from fivefold.columns import Column
from fivefold.data.dialog import Dialog
from fivefold.distributed.ranks import Ranks
from fivefold.rollout.stats import scored
from fivefold.trainer.models import Models
from fivefold.trainer.step_work import StepWork
from fivefold.trainer.transcripts import advantages_of, transcript
from fivefold.types import Group, Prompt, RolloutStats, Sample, TokenBatch, by_trajectory

Row = dict[str, Any]
_RENAMED = {Column.FIRST_LOGPROBS: "old_logprobs"}
"""Columns of a batch that are written under another name."""
_OF_TRAINED = ("old_logprobs", "ref_logprobs")
"""Columns of a row that are null for samples that the policy's passes skip."""


@dataclass(frozen=True)
class LoggedSamples:
    """Selects the samples to log and collects their rows."""

    count: int | Literal["all"]
    ranks: Ranks
    dialog: Dialog | None = None
    """Reads the turns of trajectories, which are then written to transcripts.jsonl too; None if responses have one turn."""

    def rows(
        self, step: int, groups: list[Group], kind: Literal["train", "val"], stats: RolloutStats | None = None
    ) -> list[Row]:
        """Return the rows on the main rank, without the columns that the updates add later. Collective.

        `stats`: those of the step, if it trains on the groups. A row with the key `transcript` begins a trajectory.
        """
        if not self.count:
            return []
        chosen = [group for group in sorted(groups, key=lambda group: group.index) if group.samples]
        is_audit = self.count == "all" and kind == "train"
        if isinstance(self.count, int):
            indices = torch.tensor([group.index for group in chosen[: self.count]], dtype=torch.long)
            first = set(torch.cat(self.ranks.all_gather_world(indices)).sort().values[: self.count].tolist())
            chosen = [group for group in chosen if group.index in first]
        transcripts = self._transcripts(groups, chosen, stats)
        rows = [
            _row(step, kind, group, sample)
            | ({} if number else _group_numbers(group))
            | (_what_was_sampled(group, number, sample) if is_audit else {})
            | transcripts.get(id(sample), {})
            for group in chosen
            for number, sample in enumerate(group.samples if is_audit else group.samples[:1])
        ]
        return sorted(self._gather(rows), key=lambda row: (row["group"], row.get("sample", 0)))

    def _transcripts(self, groups: list[Group], chosen: list[Group], stats: RolloutStats | None) -> dict[int, Row]:
        """Return what each trajectory of these groups adds to the row of its first sequence, by the sample's id."""
        if self.dialog is None:
            return {}
        used = sorted((group for group in groups if group.is_used), key=lambda group: group.index)
        places = [] if stats is None else (stats.rank_N == self.ranks.rank).nonzero()[:, 0].tolist()
        rows = {id(sample): place for sample, place in zip(scored(used), places, strict=False)}
        transcripts = {}
        for group in chosen:
            trajectories = by_trajectory(group.samples)
            for number, sequences in enumerate(trajectories if self.count == "all" else trajectories[:1]):
                written = transcript(group, number, sequences, [rows.get(id(sample)) for sample in sequences], self.dialog)
                transcripts[id(sequences[0])] = {"transcript": written}
        return transcripts

    def note_logprobs(self, batch: TokenBatch, stats: RolloutStats, models: Models) -> None:
        """Store the log-probs before the step's updates in the batch, if no other component computes them. Collective."""
        if self.count == "all" and Column.OLD_LOGPROBS not in batch:
            copy = replace(batch)
            models.annotate(copy, frozenset({Column.OLD_LOGPROBS}), stats)
            batch[Column.FIRST_LOGPROBS] = copy[Column.OLD_LOGPROBS]

    def complete(self, work: StepWork, objective: Objective) -> None:
        """Add the inputs and results of the step's updates to the rows. Collective."""
        # All ranks of a replica have the same tokens.
        leads = self.ranks.holds and self.ranks.replica.rank() == 0
        if self.count and work.stats.turns is not None:
            sequences = [one for row in work.rows if "transcript" in row for one in row["transcript"]["sequences"]]
            wanted = [one["row"] for one in sequences if one["row"] is not None]
            wanted = self.ranks.broadcast_from_main(wanted if self.ranks.is_main else None)
            advantages = dict(self._gather(list(advantages_of(work.batch, work.stats, wanted)) if leads else []))
            for one in sequences:
                one["advantages"] = advantages.get(one["row"])
        if self.count != "all":
            return
        columns = dict(self._gather(list(_columns(work.batch, work.stats, objective)) if leads else []))
        learned = [row for row in work.rows if row.get("used") and not row["failed"]]
        for number, row in enumerate(learned):
            update = int(work.stats.minibatch_N[number])
            reports = work.reports["policy"]
            report = reports[update] if update < len(reports) else None
            row |= {"update": update, "update_loss": report.loss if report else None}
            row["tokens"] |= columns[number]

    def _gather(self, rows: list[Any]) -> list[Any]:
        """Gather the rows of all ranks on the main rank."""
        return [row for part in self.ranks.gather_bytes(json.dumps(rows).encode()) for row in json.loads(part)]


def _row(step: int, kind: str, group: Group, sample: Sample) -> Row:
    """Return the human-readable columns; a failed reward is null."""
    return {
        "step": step,
        "kind": kind,
        "group": group.index,
        "source": group.prompt.source,
        "prompt_id": group.prompt.id,
        "prompt": group.prompt.text,
        "question": _question(group.prompt),
        "response": sample.text,
        "ground_truth": group.prompt.ground_truth,
        "reward": sample.reward,
        "reward_parts": sample.reward_parts,
        "response_tokens": sample.loss_tokens,
        "finished": sample.finished,
        "wall": time.time(),
    }


def _question(prompt: Prompt) -> str:
    """Return the last user message, or the prompt's text if there is none."""
    questions = [message["content"] for message in prompt.messages if message["role"] == "user"]
    return str(questions[-1]) if questions else prompt.text


def _group_numbers(group: Group) -> Row:
    """Return rewards and lengths of all trajectories of a group, for the row of its first sample."""
    trajectories = by_trajectory(group.samples)
    return {
        "group_rewards": [sequences[0].reward for sequences in trajectories],
        "group_lengths": [sum(sample.loss_tokens for sample in sequences) for sequences in trajectories],
    }


def _what_was_sampled(group: Group, number: int, sample: Sample) -> Row:
    return {
        "sample": number,
        "used": group.is_used,
        "expert": group.is_expert,
        "correct": sample.correct,
        "failed": sample.reward_failed,
        "policy_version": sample.policy_version,
        "greedy_reward": group.greedy_reward,
        "greedy_length": group.greedy_length,
        "tokens": {
            "prompt": group.context_of(sample),
            "response": sample.token_ids,
            "mask": [True] * len(sample.token_ids) if sample.loss_mask is None else sample.loss_mask,
            "versions": sample.token_versions or [sample.policy_version] * len(sample.token_ids),
        },
    }


def _columns(batch: TokenBatch, stats: RolloutStats, objective: Objective) -> Iterator[tuple[int, Row]]:
    """Yield (stats row, columns with one number per response token) for each sample of a batch.

    Values have one more number: one before each token, and one after the last.
    """
    columns = {
        _RENAMED.get(column, column.value.removesuffix("_T")): batch[column]
        for column in Column
        if column in batch and batch[column].is_floating_point()
    }
    if (weights := objective.gradient.first_correction(batch)) is not None:
        columns["correction_weights"], columns["correction_kept"] = weights
    end = 0
    for row, length in zip(batch.sample_index_N, batch.lengths_N, strict=True):
        begin, end = end + int(stats.prompt_lengths_N[row]), end + length
        is_skipped = stats.skipped_N is not None and bool(stats.skipped_N[row])
        yield (
            row,
            {
                name: None if is_skipped and name in _OF_TRAINED else _part(name, column_T, begin, end)
                for name, column_T in columns.items()
            },
        )


def _part(name: str, column_T: Tensor, begin: int, end: int) -> list[float]:
    return column_T[begin - (name == "values") : end].tolist()
