"""Rows in memory -> files: those of a data set of the hub, and those passed from Python instead of the names of files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from fivefold.errors import UserError

SOURCE = b"fivefold.data_source"
"""Key in a parquet file's metadata: data_source of its rows, if they have none."""
DATA_SETS = ("train", "val", "expert")
"""Keys of `data` that name data sets."""
_ROWS = 1000
Tree = dict[str, Any]


def write_data_set(data_set: Any, path: Path, source: str | None = None) -> None:
    """Write a `datasets.Dataset` as parquet, atomically; `source` is the data_source of rows that have none."""
    import pyarrow.parquet

    def write(partial: Path) -> None:
        schema = data_set.features.arrow_schema.remove_metadata()
        named = schema if source is None else schema.with_metadata({SOURCE: source.encode()})
        with pyarrow.parquet.ParquetWriter(partial, named) as writer:
            for table in _tables(data_set):
                writer.write_table(table.replace_schema_metadata(named.metadata).cast(named))

    _whole(path, write)


def take_rows(tree: Tree) -> tuple[Tree, dict[str, Any]]:
    """Return the tree with a name in the place of rows in `data`, and name -> rows; a name stands for the rows' content."""
    data, rows = tree.get("data"), dict[str, Any]()
    if not isinstance(data, dict):
        return tree, rows

    def named(key: str, value: Any) -> str:
        if isinstance(value, dict):
            splits = ", ".join(map(str, value))
            raise UserError(f"data.{key} must be one split: got a DatasetDict of {splits}; pass one of them")
        name = f"rows-{_digest(value)}/{key}.{'parquet' if _is_data_set(value) else 'jsonl'}"
        rows[name] = value
        return name

    changed = dict(data)
    for key in DATA_SETS:
        value = data.get(key)
        if _is_data_set(value) or _is_list_of_rows(value):
            changed[key] = [named(key, value)]
        elif isinstance(value, list) and any(map(_is_data_set, value)):
            changed[key] = [named(key, part) if _is_data_set(part) else part for part in value]
    return ({**tree, "data": changed} if rows else tree), rows


def write_rows(rows: dict[str, Any], directory: Path) -> dict[str, str]:
    """Write rows from `take_rows` below a directory, unless they are there; return name -> path."""
    for name, value in rows.items():
        if (path := directory / name).is_file():
            continue
        if _is_data_set(value):
            write_data_set(value, path)
        else:
            text = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in value)
            _whole(path, lambda partial, text=text: partial.write_text(text, encoding="utf-8"))  # type: ignore[misc]
    return {name: str(directory / name) for name in rows}


def _whole(path: Path, write: Callable[[Path], Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _is_data_set(value: Any) -> bool:
    """Whether a value is a `datasets.Dataset`, or one of its dictionaries of splits; the library is not imported for it."""
    return hasattr(value, "with_format") and not isinstance(value, type)


def _is_list_of_rows(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(row, dict) for row in value)
        and not any(map(_is_data_set, value))
    )


def _tables(data_set: Any) -> Iterator[Any]:
    yield from data_set.with_format("arrow").iter(batch_size=_ROWS)


def _digest(rows: Any) -> str:
    """Return a hash of the content of rows, which does not depend on the version of a library."""
    rows_of_data: Iterable[Any] = (
        (row for table in _tables(rows) for row in table.to_pylist()) if _is_data_set(rows) else rows
    )
    digest = hashlib.sha256()
    for place, row in enumerate(rows_of_data):
        try:
            text = json.dumps(row, ensure_ascii=False, default=str if _is_data_set(rows) else None)
        except (TypeError, ValueError) as error:
            raise UserError(f"row {place} of data must hold texts, numbers, lists and dicts: {error}") from error
        digest.update(text.encode(errors="surrogatepass") + b"\n")
    return digest.hexdigest()[:12]
