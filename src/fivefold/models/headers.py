"""Names, shapes and places of the tensors in a model's files, by their headers. No torch here.

A safetensors file begins with eight bytes, the length of its header, and the header: a JSON object of name -> dtype, shape
and place of its bytes (https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from fivefold.errors import UserError, shown
from fivefold.files import read_json_object

Shape = tuple[int, ...]
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
"""Bytes per number, for the dtypes that parameters are read in."""
_LONGEST_HEADER = 100_000_000


@dataclass(frozen=True)
class TensorHeader:
    """Header entry of one tensor in a file."""

    file: str
    dtype: str
    shape: Shape
    begin: int
    """Offset of its first byte in the file."""
    size: int
    """Size in bytes."""


def tensor_places(directory: Path) -> dict[str, str]:
    """Return the name of each tensor -> the file that holds it; raises ValueError if there is no list of them."""
    if (path := directory / INDEX).is_file():
        places = read_json_object(path).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
            raise UserError(f"{path} must have a weight_map of names to files: got {shown(places)}")
        for file in sorted(set(places.values())):
            if Path(file).name != file or not (directory / file).is_file():
                raise UserError(f"{path} names {shown(file)}, which is not there: download the model again")
        return places
    if (path := directory / SINGLE).is_file():
        return dict.fromkeys(read_headers(path), SINGLE)
    raise UserError(
        f"no {SINGLE} or {INDEX} in {directory}; weights in pickle files (*.bin) are not read: "
        "convert them to safetensors first"
    )


def read_headers(path: Path) -> dict[str, TensorHeader]:
    """Read the tensor headers of one file; raises ValueError if the file is truncated or does not match its header."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _LONGEST_HEADER):
            raise UserError(
                f"{path} is not a complete safetensors file: it has {size} bytes, its header would have {length}"
            )
        header = file.read(length)
    try:
        entries = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a safetensors file: its header is not JSON") from error
    if not isinstance(entries, dict):
        raise UserError(f"{path} is not a safetensors file: its header is {shown(entries)}")
    entries.pop("__metadata__", None)
    headers = {name: _header(path, name, entry, 8 + length) for name, entry in entries.items()}
    end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    if end != size - 8 - length:
        raise UserError(
            f"{path} is cut off or damaged: its tensors take {end} bytes, {size - 8 - length} are there; download it again"
        )
    return headers


def _header(path: Path, name: str, entry: Any, data: int) -> TensorHeader:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        good = isinstance(dtype, str) and all(isinstance(size, int) and size >= 0 for size in (*shape, begin, end))
        # For dtypes that are not read here, only the order of the offsets can be checked.
        good = good and (end - begin == prod(shape) * BYTES[dtype] if dtype in BYTES else begin <= end)
    except (TypeError, KeyError, ValueError):
        good = False
    if not good:
        raise UserError(f"{path}: the header of tensor {name} is damaged: {shown(entry)}")
    return TensorHeader(path.name, dtype, tuple(shape), data + begin, end - begin)


def all_headers(directory: Path) -> dict[str, TensorHeader]:
    """Return the headers of all tensors of a directory by name."""
    headers: dict[str, TensorHeader] = {}
    for file in sorted(set(tensor_places(directory).values())):
        headers |= read_headers(directory / file)
    return headers


def is_stored(directory: Path) -> bool:
    """Whether the directory has tensor files, or a list of them."""
    return (directory / INDEX).is_file() or (directory / SINGLE).is_file()
