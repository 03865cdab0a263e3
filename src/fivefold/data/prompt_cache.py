"""Cache of tokenized prompts: files, tokenizer, settings -> StoredPrompts.

A data set is tokenized once per machine: a large one on all its cores, one of a few thousand rows in this process.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from fivefold.data.prompts import Place, PromptSet, Reading, not_empty, numbered_rows
from fivefold.data.rows import count_rows, files_of
from fivefold.data.stored_prompts import DROPPED, SCHEMA, StoredPrompts, to_batch
from fivefold.data.tokenizer import load_tokenizer
from fivefold.files import users_umask

IN_MEMORY = 1_000
"""Maximum rows for which every rank reads and tokenizes by itself, which takes about a second."""
_PROCESS_ROWS = 10_000
"""Rows for which another process is worth its start; a row takes about a millisecond."""
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
"""Suffixes of files next to a tokenizer that it does not read."""
_ABANDONED = 3600.0
"""Age in seconds at which no process is still writing an unfinished file."""
_CHUNK, _FORMAT, _NEWS = 2_000, 4, 100_000

Log = Callable[[str], None]


def is_large(files: Sequence[str], first: int | None = None) -> bool:
    """Whether the files have more than IN_MEMORY rows."""
    rows = 0
    for name in files:
        rows += min(count_rows(Path(name), IN_MEMORY + 1), IN_MEMORY + 1 if first is None else first)
    return rows > IN_MEMORY


def store_prompts(
    files: Sequence[str], tokenizer: tuple[Path, bool], reading: Reading, cache: Path, log: Log, workers: int | None = None
) -> Path:
    """Return the file of the tokenized prompts, and create it if it does not exist.

    `tokenizer`: its directory, and whether its own code may run. The file name depends on the content of the data files and
    of the tokenizer's files, so a change of either creates a new file. Raises ValueError for a row that cannot be used,
    naming it.
    """
    path = cache / f"{_key(files, tokenizer[0], reading)}.arrow"
    if path.is_file():
        log(f"prompts tokenized before are in {path}")
        return path
    with users_umask():
        return _made(path, files, tokenizer, reading, workers or _workers(files), log)


def _workers(files: Sequence[str]) -> int:
    """Return the number of processes for so many rows, at most one per core."""
    cores = len(os.sched_getaffinity(0))
    rows = sum(count_rows(Path(name), cores * _PROCESS_ROWS) for name in files)
    return max(1, min(cores, rows // _PROCESS_ROWS))


def _made(
    path: Path,
    files: Sequence[str],
    tokenizer: tuple[Path, bool],
    reading: Reading,
    workers: int,
    log: Log,
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(".*.arrow.*"):
        # A process that was killed left it; another run may remove it at the same time.
        with suppress(FileNotFoundError):
            if time.time() - left.stat().st_mtime > _ABANDONED:
                left.unlink()
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    log(f"tokenizing {', '.join(files)} on {workers} core{'s' if workers > 1 else ''}, once: {path} keeps the prompts")
    try:
        _write(partial, files, tokenizer, reading, workers, log)
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def open_prompts(path: Path) -> PromptSet:
    """Open the prompts in a file that `store_prompts` created."""
    stored = StoredPrompts(path)
    return PromptSet(stored, stored.dropped)


def _write(path: Path, files: Sequence[str], tokenizer: tuple[Path, bool], reading: Reading, workers: int, log: Log) -> None:
    import pyarrow as pa

    rows = written = 0
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
        for batch, read in _batches(files, tokenizer, reading, workers):
            writer.write_batch(batch, {DROPPED: str(read - batch.num_rows).encode()})
            if (rows + read) // _NEWS > rows // _NEWS:
                log(f"{rows + read:,} rows tokenized")
            rows, written = rows + read, written + batch.num_rows
    not_empty(files, reading, written, rows - written)


def _batches(
    files: Sequence[str], tokenizer: tuple[Path, bool], reading: Reading, workers: int
) -> Iterator[tuple[Any, int]]:
    """Yield (record batch, rows that were read) per chunk, in order."""
    rows = numbered_rows(files)
    chunks = iter(lambda: list(islice(rows, _CHUNK)), [])
    if workers == 1:
        _begin(*tokenizer, reading)
        yield from ((_tokenize(chunk), len(chunk)) for chunk in chunks)
        return
    waiting = deque[tuple[Future[Any], int]]()
    with ProcessPoolExecutor(workers, get_context("spawn"), _begin, (*tokenizer, reading)) as pool:
        for chunk in chunks:
            waiting.append((pool.submit(_tokenize, chunk), len(chunk)))
            # Limit the chunks in flight, so that memory does not grow with the files.
            if len(waiting) > 2 * workers:
                future, read = waiting.popleft()
                yield future.result(), read
        for future, read in waiting:
            yield future.result(), read


_of_process: dict[str, Any] = {}
"""Tokenizer and reading settings of this worker process."""


def _begin(directory: Path, trust_remote_code: bool, reading: Reading) -> None:
    _of_process.update(tokenizer=load_tokenizer(str(directory), trust_remote_code), reading=reading)


def _tokenize(chunk: list[tuple[dict[str, Any], Place]]) -> Any:
    tokenizer, reading = _of_process["tokenizer"], _of_process["reading"]
    read = [reading.prompt_of(row, at, tokenizer) for row, at in chunk]
    return to_batch([prompt for prompt in read if prompt is not None])


def _key(files: Sequence[str], tokenizer: Path, reading: Reading) -> str:
    """Return a hash of everything that the prompts depend on, with the file names: they name the source of rows without
    one."""
    import transformers

    names = [Path(name).name for name in files]
    digest = hashlib.sha256(json.dumps([_FORMAT, transformers.__version__, names, asdict(reading)]).encode())
    for path in [
        *(path for name in files for path in files_of(Path(name))),
        *sorted(path for path in tokenizer.iterdir() if _is_tokenizer_s(path)),
    ]:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "blake2b").digest())
    return digest.hexdigest()[:32]


def _is_tokenizer_s(path: Path) -> bool:
    return path.is_file() and path.suffix not in _WEIGHTS
