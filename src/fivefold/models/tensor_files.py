"""Checks the tensor files of a model directory by their headers: complete, and those of this model. No torch here."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from fivefold.errors import UserError
from fivefold.files import read_json_object
from fivefold.models.families import is_of_mtp, mtp_parameters_of, parameters_of
from fivefold.models.headers import BYTES, INDEX, SINGLE, TensorHeader, read_headers, tensor_places
from fivefold.models.parameters import EMBEDDING, OUTPUT, VALUE_HEAD
from fivefold.models.shapes import file_shapes
from fivefold.models.spec import ModelSpec

_COMPARED = 2**22
"""Number of bytes of two tensors to compare at a time."""
_NOT_PARAMETERS = ("rotary_emb.inv_freq",)


def find_mtp_tensors(directory: Path, spec: ModelSpec) -> dict[str, str]:
    """Return the name of each multi-token prediction tensor -> its file, which may be missing if only an index names it."""
    if (path := directory / INDEX).is_file():
        places = read_json_object(path).get("weight_map") or {}
    else:
        places = dict.fromkeys(read_headers(directory / SINGLE) if (directory / SINGLE).is_file() else {}, SINGLE)
    return {name: file for name, file in places.items() if is_of_mtp(name, spec)}


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
        stored = headers[name]
        if stored.dtype not in BYTES:
            raise UserError(
                f"{directory / stored.file}: {name} is stored as {stored.dtype}, parameters are read from "
                f"{', '.join(BYTES)}: take the model without quantization"
            )
        if shape is not None and stored.shape != shape:
            raise UserError(
                f"{directory / stored.file}: {name} must have the shape {shape} of config.json: got {stored.shape}"
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


def _check_names(directory: Path, placed: set[str], stored: set[str], wanted: Collection[str], spec: ModelSpec) -> None:
    # A value head may be new.
    needed = set(wanted) - set(VALUE_HEAD.hf)
    # Some tied models store the shared weight a second time; a critic does not use it.
    extra = {name for name in placed - set(wanted) if not _is_left_out(name, spec)} - set(OUTPUT.hf)
    if missing := sorted(needed - placed):
        raise UserError(f"{directory} lacks {len(missing)} tensors of a {spec.family} model, the first: {missing[:3]}")
    if absent := sorted(placed - stored):
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
