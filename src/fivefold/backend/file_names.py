"""Which tensors of the files a parameter of transformers holds: names in headers -> FileTensor by parameter.

In memory transformers joins what files have apart: the experts of a layer are stacked, gate on top of up. Its own tables say
how, and are read here as data.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming

from fivefold.backend.sharded_files import Shape
from fivefold.errors import UserError


@dataclass(frozen=True)
class FileTensor:
    """A tensor in the model's files, and its place in the parameter that transformers keeps it in."""

    name: str
    shape: Shape
    expert: int | None = None
    """Index in the first dimension of a parameter that stacks experts."""
    begin: int = 0
    """First row of this tensor within a parameter that joins several."""

    def of(self, whole: Tensor) -> Tensor:
        """Return the part of a whole parameter that this tensor is; a view."""
        if self.expert is not None:
            whole = whole[self.expert]
        return whole if whole.shape == self.shape else whole[self.begin : self.begin + self.shape[0]]


Files: TypeAlias = dict[str, tuple[FileTensor, ...]]


def tensors_in_files(model: Any, shapes: Mapping[str, Shape], names: Iterable[str]) -> Files:
    """Return the tensors that each parameter or buffer of a model of transformers holds.

    `shapes` are those of whole parameters by their names in memory, `names` those in the files. A tensor that the files lack
    has the name that it would have there.
    """
    tables = get_model_conversion_mapping(model)
    renamings = [table for table in tables if isinstance(table, WeightRenaming)]
    converters = [table for table in tables if isinstance(table, WeightConverter)]
    joined: dict[str, dict[str, str]] = {}
    """Parameter -> the pattern of a tensor that it joins -> one such tensor."""
    by_parameter: dict[str, WeightConverter] = {}
    plain: dict[str, str] = {}
    for name in names:
        renamed = name
        for renaming in renamings:
            renamed, _ = renaming.rename_source_key(renamed)
        for converter in converters:
            memory, pattern = converter.rename_source_key(renamed)
            if pattern is not None and memory in shapes:
                joined.setdefault(memory, {})[pattern] = name
                by_parameter[memory] = converter
                break
        else:
            plain[renamed if renamed in shapes else name] = name
    files: Files = {}
    for memory, shape in shapes.items():
        if memory in joined:
            files[memory] = _joined(memory, shape, by_parameter[memory], joined[memory])
        else:
            files[memory] = (FileTensor(plain.get(memory, memory), shape),)
    return files


def _joined(memory: str, shape: Shape, converter: WeightConverter, examples: Mapping[str, str]) -> tuple[FileTensor, ...]:
    """Return the tensors of a parameter that stacks experts, and in each of them joins one tensor for each pattern."""
    operations = [(type(operation), getattr(operation, "dim", None)) for operation in converter.operations]
    patterns = converter.source_patterns
    if operations not in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)]):
        made = ", ".join(kind.__name__ for kind, _ in operations)
        raise UserError(
            f"transformers may only stack the files' tensors by expert: got {made} for {memory}; with megatron: and vLLM or "
            "SGLang, families that have a file here do not depend on it"
        )
    rows = shape[1] // len(patterns)
    tensors = []
    for expert in range(shape[0]):
        for number, pattern in enumerate(patterns):
            example = examples.get(pattern)
            name = f"{memory} ({pattern})" if example is None else _of_expert(example, expert, memory)
            tensors.append(FileTensor(name, (rows, *shape[2:]), expert, number * rows))
    return tuple(tensors)


def _of_expert(example: str, expert: int, memory: str) -> str:
    """Return the name of an expert's tensor; its number is the first that the parameter's name has not."""
    numbers = list(re.finditer(r"(?<=\.)\d+(?=\.)", example))
    place = numbers[len(re.findall(r"(?<=\.)\d+(?=\.)", memory))]
    return f"{example[: place.start()]}{expert}{example[place.end() :]}"
