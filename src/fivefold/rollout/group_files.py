"""Groups that wait for training <-> safetensors files, one per rank, which any number of ranks can read.

Every field of `Sample` is a column. Lists of numbers and tensors are concatenated into a tensor with the field's name. All
other fields are the bytes of a JSON object in a tensor: a file header is limited to 100 MB, and texts may be longer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fivefold.errors import UserError
from fivefold.files import writing
from fivefold.rollout.trajectories import Part
from fivefold.types import Prompt, Sample, Turn

_JSON = "fields.json"
"""Name of the tensor with the JSON bytes; no field has a dot in its name."""
_WRITTEN: dict[str, Callable[[Any], Any]] = {"turns": lambda turns: [vars(turn) for turn in turns]}
"""Field -> its value as JSON has it, for fields that JSON would change."""
_READ: dict[str, Callable[[Any], Any]] = {"turns": lambda turns: tuple(Turn(**turn) for turn in turns)}
"""Field -> its value from what `_WRITTEN` gave."""
_REPLACED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "finished": ("end", lambda finished: "answered" if finished else "length")
}
"""Field of files from before environments -> (the field that replaced it, that field's value). Fields that were added since
have their defaults."""


def write_groups(
    path: Path,
    groups: Mapping[int, list[Sample]],
    scored: Collection[int],
    parts: Sequence[Part] = (),
    counts: Mapping[int, Mapping[str, float]] = {},
    prompts: Mapping[int, str] = {},
) -> None:
    """Write samples by the place of their group in the run, and trajectories of groups that are not complete.

    `scored`: places of the groups that have all their rewards; `counts`: events of a group's trajectories, by its place;
    `prompts`: digest of a group's prompt, by its place.
    """
    samples = [sample for group in (*groups.values(), *(part.samples for part in parts)) for sample in group]
    tensors: dict[str, Tensor] = {}
    lengths: dict[str, list[int | None]] = {}
    lists: list[str] = []
    others: dict[str, list[Any]] = {}
    for name in (item.name for item in fields(Sample)):
        column = [_WRITTEN.get(name, _same)(getattr(sample, name)) for sample in samples]
        if any(value is not None for value in column) and all(value is None or _is_long(value) for value in column):
            tensors[name] = _joined([value for value in column if value is not None])
            lengths[name] = [None if value is None else len(value) for value in column]
            lists += [name] if any(isinstance(value, list) for value in column) else []
        else:
            others[name] = column
    described = {
        "groups": {place: len(group) for place, group in groups.items()},
        "scored": sorted(scored),
        "parts": [[part.place, part.number, len(part.samples), part.record] for part in parts],
        "counts": dict(counts),
        "prompts": dict(prompts),
        "lengths": lengths,
        "lists": lists,
        "others": others,
    }
    text = json.dumps(described)
    assert repr(json.loads(text)["others"]) == repr(others), "a field of Sample holds what JSON would change"
    tensors[_JSON] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    with writing(path):
        save_file(tensors, path)


Read: TypeAlias = tuple[dict[int, list[Sample]], set[int], list[Part], dict[int, dict[str, float]], dict[int, str]]


def read_groups(path: Path) -> Read:
    """Read the files of `write_groups`; raises ValueError if another version of the program wrote them."""
    with safe_open(path, framework="pt") as file:
        is_needed = {item.name: item.default is item.default_factory is MISSING for item in fields(Sample)}
        described = json.loads(file.get_tensor(_JSON).numpy().tobytes()) if _JSON in file.keys() else {}  # noqa: SIM118
        columns, lengths = described.get("others", {}), described.get("lengths", {})
        for name, (successor, read) in _REPLACED.items():
            if name in columns:
                columns[successor] = list(map(read, columns.pop(name)))
        written = columns.keys() | lengths.keys()
        if not written <= is_needed.keys() or any(is_needed[name] for name in is_needed.keys() - written):
            raise UserError(f"{path} was written by another version of fivefold")
        for name in lengths:
            columns[name] = _split(file.get_tensor(name), lengths[name], name in described["lists"])
        columns |= {name: map(read, columns[name]) for name, read in _READ.items() if name in columns}
    samples = (Sample(**dict(zip(columns, values, strict=True))) for values in zip(*columns.values(), strict=True))
    groups = {int(place): [next(samples) for _ in range(count)] for place, count in described["groups"].items()}
    parts = [
        Part(place, number, [next(samples) for _ in range(count)], record)
        for place, number, count, record in described.get("parts", ())
    ]
    counts = {int(place): events for place, events in described.get("counts", {}).items()}
    prompts = {int(place): digest for place, digest in described.get("prompts", {}).items()}
    return groups, set(described["scored"]), parts, counts, prompts


def digest_of(prompt: Prompt) -> str:
    """Return a hash of what a prompt's responses are sampled and scored from."""
    parts = (prompt.token_ids, prompt.source, prompt.text, prompt.ground_truth)
    return hashlib.sha256(repr(parts).encode(errors="surrogatepass")).hexdigest()[:16]


def _same(value: Any) -> Any:
    return value


def _is_long(value: Any) -> bool:
    """Whether the value is a tensor or a list of numbers, which have about one entry per token."""
    return isinstance(value, Tensor) or (isinstance(value, list) and all(isinstance(entry, int | float) for entry in value))


def _joined(values: list[Any]) -> Tensor:
    if any(isinstance(value, Tensor) for value in values):
        return torch.cat(values)
    numbers = list(chain.from_iterable(values))
    kinds = {type(number) for number in numbers}
    dtype = torch.bool if kinds == {bool} else torch.int64 if kinds <= {int} else torch.float64
    return torch.tensor(numbers, dtype=dtype)


def _split(joined: Tensor, lengths: list[int | None], as_lists: bool) -> Iterable[Any]:
    """Yield the values that `_joined` concatenated."""
    pieces = iter(joined.split([length for length in lengths if length is not None]))
    for length in lengths:
        # Copy, because a view would keep the tensors of all samples in memory.
        yield None if length is None else next(pieces).tolist() if as_lists else next(pieces).clone()
