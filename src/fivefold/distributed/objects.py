"""Exchanges small objects between ranks as JSON: names, numbers and messages. Nothing that a peer sends is unpickled."""

from __future__ import annotations

import io
import json
import pickle
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import is_dataclass
from enum import Enum
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

T = TypeVar("T")


def all_gather_json(value: T, group: dist.ProcessGroup) -> list[T]:
    """Returns the value of every member, on every member. JSON has no tuples: they arrive as lists."""
    return [json.loads(row_B.numpy().tobytes()) for row_B in all_gather_rows(_encoded(value), group)]


def broadcast_json(value: T | None, source: int, group: dist.ProcessGroup | None) -> T:
    """Returns the value of rank `source` of the world on every member of `group`, the source included; without a group, on
    all ranks."""
    bytes_B = _encoded(value) if dist.get_rank() == source else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor(len(bytes_B))
    dist.broadcast(size, source, group=group)
    if dist.get_rank() != source:
        bytes_B = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(bytes_B, source, group=group)
    return json.loads(bytes_B.numpy().tobytes())  # type: ignore[no-any-return]


def all_gather_rows(rows_NF: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Gathers tensors whose first dimensions differ: two collectives, the second padded to the longest tensor."""
    size = group.size()
    if size == 1:
        return [rows_NF]
    counts = torch.zeros(size, dtype=torch.long)
    dist.all_gather_into_tensor(counts, torch.tensor([len(rows_NF)]), group=group)
    longest = int(counts.max())
    padded = rows_NF.new_zeros(longest, *rows_NF.shape[1:])
    padded[: len(rows_NF)] = rows_NF
    everyone = rows_NF.new_empty(size * longest, *rows_NF.shape[1:])
    dist.all_gather_into_tensor(everyone, padded, group=group)
    pieces = everyone.split(longest) if longest else [padded] * size
    return [rows[:count] for rows, count in zip(pieces, counts.tolist(), strict=True)]


def unpickle_plain_values_only() -> None:
    """Restrict torch's object collectives, which Megatron-Core calls, to plain values in this process.

    Plain values are None, numbers, strings, bytes, lists, tuples, dictionaries, tensors, and their shapes and dtypes. A
    pickle that names another class or a function is refused.
    """
    distributed_c10d._unpickler = _PlainUnpickler


_libraries: set[str] = set()
"""Packages whose record types are accepted too."""


def take_records_of(library: str) -> None:
    """Let the object collectives also build dataclasses, enumerations and named tuples of the package `library`."""
    _libraries.add(library)


def _storage(content: bytes) -> Any:
    """Return a tensor's storage; torch.storage._load_from_bytes, which its pickle names, would unpickle anything."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


_TENSORS = {
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch.storage", "_load_from_bytes"): _storage,
    ("collections", "OrderedDict"): OrderedDict,
}
"""Functions and classes by which a pickle builds a tensor. Ranks of vLLM send handles of shared memory as tensors."""


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _TENSORS:
            return _TENSORS[module, name]
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            # Megatron's bridges exchange shapes and dtypes.
            return getattr(torch, name)
        # Only loaded modules are searched: a pickle must not import anything.
        wanted = getattr(sys.modules.get(module), name, None) if module.partition(".")[0] in _libraries else None
        if isinstance(wanted, type) and (is_dataclass(wanted) or issubclass(wanted, Enum | tuple)):
            return wanted
        raise pickle.UnpicklingError(
            f"ranks exchange plain values only: {module}.{name} came from another rank; a library that sends objects cannot "
            "be used in a run of several ranks"
        )

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError(f"ranks exchange plain values only: a reference to {pid!r} came from another rank")


def _encoded(value: Any) -> Tensor:
    _check_plain(value)
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _check_plain(value: Any) -> None:
    """Raises TypeError if JSON would silently change the value."""
    parts: Sequence[Any] = value if isinstance(value, list | tuple) else ()
    if isinstance(value, dict):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"keys of what ranks exchange must be texts: got {wrong[0]!r}")
        parts = list(value.values())
    elif not parts and not isinstance(value, str | int | float | list | tuple | None):
        raise TypeError(f"ranks exchange None, numbers, texts, lists and dictionaries: got {type(value).__name__}")
    for part in parts:
        _check_plain(part)
