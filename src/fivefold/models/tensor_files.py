"""Checks the tensor files of a model directory by their headers: complete, and those of this model. No torch here.

A safetensors file begins with eight bytes, the length of its header, and the header: a JSON object of name -> dtype, shape
and place of its bytes (https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from fivefold.errors import UserError, shown
from fivefold.files import read_json_object
from fivefold.models.families import is_of_mtp, mtp_parameters_of, parameters_of
from fivefold.models.parameters import EMBEDDING, OUTPUT, VALUE_HEAD
from fivefold.models.shapes import Shape, file_shapes
from fivefold.models.spec import ModelSpec

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
"""Bytes per number, for the dtypes that parameters are read in."""
_LONGEST_HEADER = 100_000_000
_COMPARED = 2**22
"""Number of bytes of two tensors to compare at a time."""
_NOT_PARAMETERS = ("rotary_emb.inv_freq",)


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


def find_mtp_tensors(directory: Path, spec: ModelSpec) -> dict[str, str]:
    """Return the name of each multi-token prediction tensor -> its file, which may be missing if only an index names it."""
    if (path := directory / INDEX).is_file():
        places = read_json_object(path).get("weight_map") or {}
    else:
        places = dict.fromkeys(read_headers(directory / SINGLE) if (directory / SINGLE).is_file() else {}, SINGLE)
    return {name: file for name, file in places.items() if is_of_mtp(name, spec)}


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
    found = {name: _header(path, name, entry, 8 + length) for name, entry in entries.items()}
    end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    if end != size - 8 - length:
        raise UserError(
            f"{path} is cut off or damaged: its tensors take {end} bytes, {size - 8 - length} are there; download it again"
        )
    return found


def _header(path: Path, name: str, entry: Any, data: int) -> TensorHeader:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        good = isinstance(dtype, str) and all(isinstance(size, int) and size >= 0 for size in (*shape, begin, end))
        # For dtypes that are not read here, only the order of the offsets can be checked.
        good = good and (end - begin == prod(shape) * _BYTES[dtype] if dtype in _BYTES else begin <= end)
    except (TypeError, KeyError, ValueError):
        good = False
    if not good:
        raise UserError(f"{path}: the header of tensor {name} is damaged: {shown(entry)}")
    return TensorHeader(path.name, dtype, tuple(shape), data + begin, end - begin)


def check_tensor_files(directory: Path, spec: ModelSpec, has_mtp: bool = False) -> None:
    """Raise ValueError if files are damaged, or if tensors are missing, extra, or in another shape or an unsupported dtype.

    With `has_mtp` the multi-token prediction layers are required too.
    """
    places = tensor_places(directory)
    headers: dict[str, TensorHeader] = {}
    for file in sorted(set(places.values())):
        headers |= read_headers(directory / file)
    wanted = {
        name: shape
        for parameter in parameters_of(spec) + (mtp_parameters_of(spec) if has_mtp else [])
        for name, shape in zip(parameter.hf, file_shapes(spec, parameter), strict=True)
    }
    _check_names(directory, set(places), set(headers), wanted, spec)
    for name, shape in wanted.items():
        if name not in headers:
            continue
        found = headers[name]
        if found.dtype not in _BYTES:
            raise UserError(
                f"{directory / found.file}: {name} is stored as {found.dtype}, parameters are read from "
                f"{', '.join(_BYTES)}: take the model without quantization"
            )
        if shape is not None and found.shape != shape:
            raise UserError(
                f"{directory / found.file}: {name} must have the shape {shape} of config.json: got {found.shape}"
            )
    if spec.tied and not spec.value_head:
        _check_tied(directory, headers)


def _check_tied(directory: Path, headers: dict[str, TensorHeader]) -> None:
    """Raise ValueError if files hold a head that differs from the embedding although config.json says that they are tied."""
    head, embedding = (headers.get(row.hf[0]) for row in (OUTPUT, EMBEDDING))
    if head is None or embedding is None:
        return
    same = (head.dtype, head.shape) == (embedding.dtype, embedding.shape)
    if not same or not _are_equal(directory, head, embedding):
        held = "other numbers" if same else f"{head.dtype} of {head.shape} instead of {embedding.dtype} of {embedding.shape}"
        raise UserError(
            f"{directory / head.file}: tie_word_embeddings in config.json is true, so {OUTPUT.hf[0]} must be left out or be "
            f"equal to {EMBEDDING.hf[0]}: it holds {held}; transformers computes with both, so set tie_word_embeddings to "
            "false, or remove the head"
        )


def _are_equal(directory: Path, one: TensorHeader, other: TensorHeader) -> bool:
    """Whether two tensors of one dtype and shape have the same bytes."""
    with (directory / one.file).open("rb") as first, (directory / other.file).open("rb") as second:
        first.seek(one.begin)
        second.seek(other.begin)
        left = one.size
        while left:
            count = min(left, _COMPARED)
            if first.read(count) != second.read(count):
                return False
            left -= count
    return True


def _check_names(directory: Path, placed: set[str], there: set[str], wanted: Collection[str], spec: ModelSpec) -> None:
    # A value head may be new.
    needed = set(wanted) - set(VALUE_HEAD.hf)
    # Some tied models store the shared weight a second time; a critic does not use it.
    extra = {name for name in placed - set(wanted) if not _is_left_out(name, spec)} - set(OUTPUT.hf)
    if missing := sorted(needed - placed):
        raise UserError(f"{directory} lacks {len(missing)} tensors of a {spec.family} model, the first: {missing[:3]}")
    if absent := sorted(placed - there):
        raise UserError(f"{directory / INDEX} names {len(absent)} tensors that no file holds, the first: {absent[:3]}")
    if extra:
        raise UserError(
            f"{directory} holds {len(extra)} tensors that a {spec.family} model of its config.json does not have, "
            f"the first: {sorted(extra)[:3]}"
        )


def _is_left_out(name: str, spec: ModelSpec) -> bool:
    """Whether a tensor is left out: a computed buffer, or part of a multi-token prediction layer, which the model does not
    use."""
    return is_of_mtp(name, spec) or name.endswith(_NOT_PARAMETERS)
