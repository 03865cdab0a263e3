"""Tokenized prompts in an Arrow file that every rank of a machine maps; pages that are not read use no memory."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, overload

import pyarrow as pa

from fivefold.types import DatasetResponse, Prompt

_TOKENS = pa.list_(pa.int32())
_RESPONSE = pa.struct(
    [("token_ids", _TOKENS), ("loss_mask", pa.list_(pa.bool_())), ("text", pa.string()), ("truncated", pa.bool_())]
)
_JSON = ("messages", "extra", "columns")
_TEXTS = ("source", "text", "ground_truth", *_JSON)
SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("token_ids", _TOKENS),
        *((name, pa.string()) for name in _TEXTS),
        ("is_chat", pa.bool_()),
        ("responses", pa.list_(_RESPONSE)),
    ]
)
"""Schema of the file; messages and extra columns are JSON."""
DROPPED = b"dropped"
"""Key in a batch's metadata: number of rows that were too long."""


def to_batch(prompts: Sequence[Prompt]) -> Any:
    """Convert prompts to a record batch."""
    rows = [
        {
            "id": prompt.id,
            "token_ids": prompt.token_ids,
            "source": prompt.source,
            "text": prompt.text,
            "ground_truth": prompt.ground_truth,
            "is_chat": prompt.is_chat,
            **{name: json.dumps(getattr(prompt, name)) for name in _JSON},
            "responses": [vars(response) for response in prompt.responses],
        }
        for prompt in prompts
    ]
    return pa.RecordBatch.from_pylist(rows, SCHEMA)


class StoredPrompts(Sequence[Prompt]):
    """The prompts of a file, each created on access."""

    def __init__(self, path: Path) -> None:
        self._path = path
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        batches = [reader.get_batch_with_custom_metadata(number) for number in range(reader.num_record_batches)]
        self._batches = [batch for batch, _ in batches]
        self._ends = list(accumulate(batch.num_rows for batch in self._batches))
        self.dropped = sum(int(metadata[DROPPED]) for _, metadata in batches)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(f"{self._path} has {len(self)} prompts: got {index}")
        number = bisect_right(self._ends, place)
        batch = self._batches[number]
        (row,) = batch.slice(place - self._ends[number] + batch.num_rows, 1).to_pylist()
        return Prompt(
            **{name: row[name] for name in ("id", "token_ids", "source", "text", "ground_truth", "is_chat")},
            **{name: json.loads(row[name]) for name in _JSON},
            responses=[DatasetResponse(**response) for response in row["responses"]],
        )

    def ground_truths(self) -> Iterator[tuple[int, str, str]]:
        """Yield (id, source, ground truth) of each prompt, without reading the other columns."""
        for batch in self._batches:
            columns = (batch.column(name).to_pylist() for name in ("id", "source", "ground_truth"))
            yield from zip(*columns, strict=True)
