"""Reads the weights of a directory, each rank its own shards, and compares names and shapes with the files' headers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from fivefold.errors import UserError
from fivefold.fsdp.packed_model import VALUE_HEAD
from fivefold.fsdp.parameters import LocalTensor
from fivefold.models.headers import TensorHeader, all_headers
from fivefold.tensors import check_finite

_OUTPUT = "lm_head.weight"


def read_weights(directory: Path, tensors: Iterable[LocalTensor], unread: Iterable[str] = ()) -> bool:
    """Fill the tensors of this rank from the files; return whether the value head was left at 0, as files have none.

    `unread` are patterns of names that transformers ignores in files. Raises UserError if files and model differ.
    """
    headers, tensors = all_headers(directory), list(tensors)
    compare_headers(directory, headers, tensors, unread)
    opened: dict[str, Any] = {}
    value_head_is_new = VALUE_HEAD not in headers and any(tensor.name == VALUE_HEAD for tensor in tensors)
    for tensor in tensors:
        for stored, box, view in tensor.pieces(tensor.values):
            if stored.name not in headers:
                assert stored.name == VALUE_HEAD
                view.zero_()
                continue
            file = headers[stored.name].file
            if file not in opened:
                opened[file] = safe_open(directory / file, framework="pt")
            places = tuple(slice(a, a + n) for a, n in zip(box.offset, box.size, strict=True))
            values = opened[file].get_slice(stored.name)[places] if places else opened[file].get_tensor(stored.name)
            check_finite(stored.name, values, str(directory))
            view.copy_(values)
    return value_head_is_new


def compare_headers(
    directory: Path, headers: dict[str, TensorHeader], tensors: Iterable[LocalTensor], unread: Iterable[str]
) -> None:
    """Raise UserError with the names if the model does not have exactly the tensors of the files, in their shapes."""
    shapes = {file.name: file.shape for tensor in tensors for file in tensor.files}
    has_value_head = VALUE_HEAD in shapes
    missing = [name for name in shapes if name not in headers and name != VALUE_HEAD]
    allowed = {_OUTPUT, VALUE_HEAD} if has_value_head else {_OUTPUT, VALUE_HEAD} - set(shapes)
    patterns = [re.compile(pattern) for pattern in (*unread, r"rotary_emb\.inv_freq")]
    extra = [
        name
        for name in headers
        if name not in shapes and name not in allowed and not any(pattern.search(name) for pattern in patterns)
    ]
    other = [
        f"{name} {list(headers[name].shape)} instead of {list(shape)}"
        for name, shape in shapes.items()
        if name in headers and headers[name].shape != shape
    ]
    for relation, names in (("lack", missing), ("have no place in the model for", extra), ("have", other)):
        if names:
            raise UserError(
                f"{directory}: the files must have the tensors of the model: they {relation} {', '.join(sorted(names)[:4])}"
                + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            )


@torch.no_grad()
def zero_(tensors: Iterable[LocalTensor]) -> None:
    """Set tensors to 0, which a checkpoint will fill."""
    for tensor in tensors:
        tensor.values.zero_()
