"""Trajectories of several turns -> rows of transcripts.jsonl, with every token that the engine read or sampled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fivefold.columns import Column
from fivefold.data.dialog import Dialog
from fivefold.types import Group, RolloutStats, Sample, TokenBatch


def transcript(
    group: Group, number: int, sequences: Sequence[Sample], rows: Sequence[int | None], dialog: Dialog
) -> dict[str, Any]:
    """Return what trajectory `number` of a group read and sampled; `rows` are its sequences' rows in the step's stats."""
    first = sequences[0]
    header = {
        "trajectory": number,
        "reward": first.reward,
        "reward_parts": first.reward_parts,
        "failed": first.reward_failed,
        "end": first.end,
    }
    held: list[int] | None = None
    written = []
    for sample, row in zip(sequences, rows, strict=True):
        context = group.context_of(sample)
        mask = [True] * len(sample.token_ids) if sample.loss_mask is None else sample.loss_mask
        # Responses of data were sampled by no engine.
        logprobs: Sequence[float | None] = sample.logprobs or [None] * len(mask)
        one = {
            "row": row,
            "break": None if held is None else _break(sample, held, context, dialog),
            "context": context,
            "context_text": _text(context, dialog),
            "tokens": sample.token_ids,
            "texts": [_text([token], dialog) for token in sample.token_ids],
            "mask": mask,
            "logprobs": [value if is_learned else None for value, is_learned in zip(logprobs, mask, strict=True)],
            "turns": [
                vars(turn)
                | {
                    "text": dialog.text(sample.token_ids[turn.begin : turn.end]),
                    "calls": [vars(call) for call in dialog.read(sample.token_ids[turn.begin : turn.end]).calls],
                }
                for turn in sample.turns
            ],
        }
        held = context + sample.token_ids
        written.append(one)
    return {**header, "sequences": written}


def advantages_of(batch: TokenBatch, stats: RolloutStats, rows: Sequence[int]) -> Iterator[tuple[int, list[float]]]:
    """Yield (row, advantage of each token after the context) for those of the rows that the batch has."""
    wanted, end = set(rows), 0
    for row, length in zip(batch.sample_index_N, batch.lengths_N, strict=True):
        begin, end = end + int(stats.prompt_lengths_N[row]), end + length
        if row in wanted:
            yield row, batch[Column.ADVANTAGES][begin:end].tolist()


def _break(sample: Sample, held: Sequence[int], context: Sequence[int], dialog: Dialog) -> dict[str, Any]:
    """Return why a sequence begins, and the first token in which its context differs from the tokens held before."""
    shared = min(len(held), len(context))
    at = next((place for place in range(shared) if held[place] != context[place]), shared)
    texts = {name: _text(tokens[at : at + 1], dialog) for name, tokens in (("held", held), ("now", context))}
    return {"cause": sample.break_cause, "at": at, **texts}


def _text(tokens: Sequence[int], dialog: Dialog) -> str:
    return dialog.template.decode(tokens)
