"""Rows of data files: parquet, jsonl or what `save_to_disk` wrote -> parsed rows, before any tokenizer. No torch here.

A ValueError names the file, the row and the column that cannot be used.
"""

from __future__ import annotations

import json
import re
import resource
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from fivefold.algo.methods import LearnsFrom
from fivefold.config.schema import DataConfig
from fivefold.errors import UserError, shown
from fivefold.files import LONGEST_LINE, read_json_lines, read_json_object
from fivefold.tables import SOURCE

Messages = list[dict[str, Any]]
_LARGEST_ROW, _ROWS, _MEMORY = LONGEST_LINE, 256, 2**31
"""Maximum bytes of a row, number of rows that are unpacked together, and bytes that this may take next to the file's."""
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Columns:
    """Column names of a row. `a.b` is the field b of column a, unless a column has that full name."""

    prompt: str = "prompt"
    response: str = "response"
    messages: str = "messages"
    chosen: str = "chosen"
    rejected: str = "rejected"
    ground_truth: str = "reward_model.ground_truth"
    source: str = "data_source"
    ground_truth_by_source: Mapping[str, str] = field(default_factory=dict)
    query: str | None = None
    system: str | None = None
    tools: str | None = None
    carried: tuple[str, ...] | None = ()
    """Columns that stay with a prompt, because reward functions take them; None: all."""

    @classmethod
    def of(cls, data: DataConfig) -> Columns:
        texts = (data.prompt_key, data.response_key, data.messages_key, data.chosen_key, data.rejected_key)
        further = (data.query_key, data.system_key, data.tools_key)
        return cls(*texts, data.ground_truth_key, data.source_key, data.ground_truth_by_source, *further)


USUAL_COLUMNS = Columns()
TEMPLATE_NAMES = ("messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize",
                  "continue_final_message")  # fmt: skip
"""Chat template arguments that the program sets itself."""
OTHER_NAMES = {
    "prompt_key": ("prompt", "question", "problem", "instruction", "query", "input", "messages"),
    "ground_truth_key": ("reward_model.ground_truth", "ground_truth", "answer", "final_answer", "solution", "target",
                         "label", "output"),
    "response_key": ("response", "completion", "answer", "solution", "output", "target"),
}  # fmt: skip
"""Key of `data` -> names that its column has in public data sets, the most usual first."""
TOOLS_NEED_TEMPLATE = "functions of data.tools_key are written by a chat template: set data.chat_template"


@dataclass(frozen=True)
class Row:
    """Content of a parsed row."""

    messages: Messages
    """Messages of the prompt; for a conversation to imitate, all its messages."""
    source: str
    ground_truth: str
    is_conversation: bool = False
    """Whether `messages` are to be imitated: the assistant's turns carry loss."""
    responses: list[str] = field(default_factory=list)
    """Texts to learn from: the one to imitate, or the chosen and the rejected one."""
    extra: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, Any] = field(default_factory=dict)
    """Columns that reward functions take."""
    is_chat: bool = False
    """Whether the prompt is a list of messages, not a text."""
    tools: list[Any] = field(default_factory=list)
    """Functions that the chat template describes."""

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Chat template arguments that are specific to this row."""
        return {"tools": self.tools} if self.tools else {}


_ANSWER = re.compile(r"####\s*([^#\s].*)")
"""Last line of a solution in GSM8K's form."""
_PART = re.compile(r"(.+)\[(-?\d*):(-?\d*)\]", re.DOTALL)


def part_of(path: Path) -> tuple[Path, slice]:
    """Split `train.parquet[:200]` into the file and a slice: its first 200 rows; `[-100:]` are its last hundred."""
    match = _PART.fullmatch(str(path))
    if match is None:
        return path, slice(None)
    return Path(match[1]), slice(*(int(number) if number else None for number in match.groups()[1:]))


def bounds_of(name: str) -> str:
    """Return the end of a name that selects rows, as `[:200]`; an empty text without one."""
    match = _PART.fullmatch(name)
    return "" if match is None else name[match.end(1) :]


def _bounds(path: Path) -> tuple[Path, int, int | None]:
    """(file, first row, row after the last; None: until the end)."""
    file, part = part_of(path)
    begin, end = part.start or 0, part.stop
    if begin < 0 or (end or 0) < 0:
        begin, end, _ = part.indices(_count(file, sys.maxsize))
    return file, begin, None if end is None else max(begin, end)


def count_rows(path: Path, enough: int) -> int:
    """Return the number of rows of a file or of a part of it; for a jsonl file the count stops at `enough`."""
    file, begin, end = _bounds(path)
    count = _count(file, begin + enough)
    return max(0, (count if end is None else min(count, end)) - begin)


def files_of(path: Path) -> list[Path]:
    """Return the files whose content the rows of a data file, or of a part of it, come from."""
    file = part_of(path)[0]
    return sorted(file.glob("*.arrow")) if file.is_dir() else [file]


def _count(path: Path, enough: int) -> int:
    if path.is_dir():
        return sum(batch.num_rows for _, batch in _saved_batches(path))
    if path.suffix == ".parquet":
        with _parquet(path) as file:
            return int(file.metadata.num_rows)
    return sum(1 for _ in islice(read_json_lines(path), enough))


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a parquet or jsonl file, of a directory that `save_to_disk` wrote, or of a part of these."""
    if not (file := part_of(path)[0]).exists():
        raise UserError(f"no data file at {file}")
    file, begin, end = _bounds(path)
    yield from islice(_rows_of(file), begin, end)


def _rows_of(path: Path) -> Iterator[dict[str, Any]]:
    if path.is_dir():
        yield from _saved_rows(path)
    elif path.suffix == ".parquet":
        yield from _read_parquet(path)
    elif path.suffix in (".jsonl", ".json"):
        yield from (row for _, row in read_json_lines(path, unique=True))
    else:
        raise UserError(f"{path}: data files end in .parquet or .jsonl")


def source_of(path: Path) -> str:
    """Return the data_source of rows that have none: the file's name, or the id of the hub's data set in it."""
    file = part_of(path)[0]
    named = None
    if file.suffix == ".parquet" and file.is_file():
        with _parquet(file) as opened:
            named = (opened.schema_arrow.metadata or {}).get(SOURCE)
    return file.stem if named is None else str(named, "utf-8")


def _saved_rows(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a directory that `Dataset.save_to_disk` wrote."""
    import pyarrow

    number = 0
    for file, stored in _saved_batches(directory):
        try:
            # Arrow trusts offsets and lengths: those of a damaged file would end the process.
            stored.validate(full=True)

            def batches(first: int, size: int, stored: Any = stored) -> Iterator[Any]:
                return (stored.slice(place, size) for place in range(first, stored.num_rows, size))

            for row in _unpack(directory, batches, _ROWS, number):
                number += 1
                yield row
        except (pyarrow.ArrowException, UnicodeDecodeError, OverflowError, SystemError) as error:
            raise UserError(f"{file} cannot be read as Arrow, it may be damaged: {error}") from error


def _saved_batches(directory: Path) -> Iterator[tuple[Path, Any]]:
    """Yield the files of such a directory with their record batches; state.json lists them."""
    import pyarrow

    if (splits := directory / "dataset_dict.json").is_file():
        names = ", ".join(str(directory / str(name)) for name in read_json_object(splits).get("splits", ()))
        raise UserError(f"{directory} holds several splits: name one of {names}")
    if not (state := directory / "state.json").is_file():
        raise UserError(f"{directory} is a directory without state.json, which `Dataset.save_to_disk` writes: name a file")
    listed = read_json_object(state).get("_data_files")
    files = [item.get("filename") for item in listed if isinstance(item, dict)] if isinstance(listed, list) else [None]
    for name in files:
        if not isinstance(name, str) or Path(name).name != name or not (file := directory / name).is_file():
            raise UserError(f"{state} must list the Arrow files next to it in _data_files: got {shown(name)}")
        try:
            with pyarrow.memory_map(str(file)) as source:
                for stored in pyarrow.ipc.open_stream(source):
                    yield file, stored
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(f"{file} cannot be read as Arrow, it may be cut off: {error}") from error


def _read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow

    number = 0
    with _parquet(path) as file:
        for group in range(file.metadata.num_row_groups):

            def batches(first: int, size: int, group: int = group) -> Iterator[Any]:
                return islice(file.iter_batches(size, row_groups=[group], use_threads=False), first // size, None)

            try:
                for row in _unpack(path, batches, _ROWS, number):
                    number += 1
                    yield row
            except (pyarrow.ArrowException, OSError, UnicodeDecodeError, OverflowError) as error:
                raise UserError(f"{path} cannot be read as parquet, it may be damaged: {error}") from error


def _unpack(path: Path, batches: Callable[[int, int], Iterator[Any]], size: int, number: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of `batches(first, size)`, which yields batches of so many rows from the row `first` on.

    Raises ValueError for a row that is too large. A list that names one stored text a thousand times unpacks to gigabytes,
    which shows only while it is unpacked: where memory is used up, rows are unpacked again one by one. `number` is the
    number of the first row in the file.
    """
    first, left = number, batches(0, size)
    memory = sum(file.stat().st_size for file in files_of(path)) + _MEMORY
    while True:
        try:
            with _bounded_memory(memory):
                if (batch := next(left, None)) is None:
                    return
                batch = _plain(batch)
                _check_sizes(path, batch, number)
                rows = batch.to_pylist()
        except MemoryError:
            if size == 1:
                raise _too_large(path, number, f"more than {_MEMORY // 2**20:,} MiB") from None
            size, left = 1, batches(number - first, 1)
            continue
        number += len(rows)
        yield from rows


@contextmanager
def _bounded_memory(size: int) -> Iterator[None]:
    """Let the system refuse this process more than `size` further bytes of memory within this block."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    # The first number is the process's memory in pages.
    most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + size
    resource.setrlimit(resource.RLIMIT_AS, (min([most, *(limit for limit in before if limit >= 0)]), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _plain(batch: Any) -> Any:
    """Return a batch with dictionary-encoded columns, those within lists and structs too, decoded to their values."""
    import pyarrow

    types = [_plain_type(column.type) for column in batch.columns]
    columns = [
        column if column.type.equals(plain) else column.cast(plain)
        for column, plain in zip(batch.columns, types, strict=True)
    ]
    return pyarrow.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _plain_type(of: Any) -> Any:
    """Return an Arrow type without dictionaries."""
    import pyarrow

    is_of = pyarrow.types
    if is_of.is_dictionary(of):
        return _plain_type(of.value_type)
    if is_of.is_struct(of):
        return pyarrow.struct([field.with_type(_plain_type(field.type)) for field in of])
    if is_of.is_list(of) or is_of.is_large_list(of):
        make = pyarrow.list_ if is_of.is_list(of) else pyarrow.large_list
        return make(of.value_field.with_type(_plain_type(of.value_type)))
    if is_of.is_fixed_size_list(of):
        return pyarrow.list_(of.value_field.with_type(_plain_type(of.value_type)), of.list_size)
    if is_of.is_map(of):
        return pyarrow.map_(_plain_type(of.key_type), _plain_type(of.item_type))
    return of


def _check_sizes(path: Path, batch: Any, first: int) -> None:
    """Raise ValueError for a row of a batch that is too large; `first` is the number of the batch's first row."""
    if batch.nbytes <= _LARGEST_ROW:
        return
    for place in range(batch.num_rows):
        if (size := batch.slice(place, 1).nbytes) > _LARGEST_ROW:
            raise _too_large(path, first + place, f"{size / 2**20:,.0f} MiB")


def _too_large(path: Path, row: int, size: str) -> UserError:
    return UserError(f"{path}, row {row}: a row must take at most {_LARGEST_ROW // 2**20} MiB: it unpacks to {size}")


def _parquet(path: Path) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as parquet, it may be cut off: {error}") from error


def parse_row(row: dict[str, Any], columns: Columns, learns_from: LearnsFrom, source: str) -> Row:
    """Parse a row; `source` is its data_source if the row names none. Raises ValueError naming the column."""
    messages, is_conversation, responses = _read_texts(row, columns, learns_from)
    named_source = _cell(row, columns.source)
    if named_source is not None and not isinstance(named_source, (str, int)):
        raise UserError(f"column {columns.source!r} must be a text: got {shown(named_source)}")
    source, given_prompt = source if named_source is None else str(named_source), _cell(row, columns.prompt)
    parsed = Row(
        messages,
        source,
        _ground_truth(row, columns.ground_truth_by_source.get(source, columns.ground_truth)),
        is_conversation,
        responses,
        _as_json(_mapping(row, "extra_info"), "extra_info"),
        _carried(row, columns),
        isinstance(given_prompt, list) or (isinstance(given_prompt, str) and _json_messages(given_prompt) is not None),
        _tools(row, columns.tools),
    )
    return with_system_prompt(parsed, _optional_text(row, columns.system))


def _carried(row: dict[str, Any], columns: Columns) -> dict[str, Any]:
    """Return the columns that stay with the prompt; those that JSON cannot hold are left out unless they are named."""
    if columns.carried is None:
        names = [str(name) for name in row if name not in (columns.prompt, columns.messages)]
    else:
        names = [name for name in columns.carried if name in row]
    carried = {}
    for name in names:
        try:
            carried[name] = _as_json(row[name], name)
        except UserError:
            if columns.carried is not None:
                raise
    return carried


def _as_json(value: Any, column: str) -> Any:
    """Return a value as JSON holds it, since large data sets are stored as JSON; raises ValueError if JSON cannot."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"column {column!r} must hold texts, numbers, lists and mappings: {error}") from error


def with_system_prompt(row: Row, text: str | None) -> Row:
    """Return the row with `text` as its system message, unless the row begins with a system or developer message."""
    if text is None or row.messages[0]["role"] in ("system", "developer"):
        return row
    return replace(row, messages=[{"role": "system", "content": text}, *row.messages])


def check_kept(messages: Messages, text: str, render: Callable[[Messages], str]) -> None:
    """Raise UserError if a chat template drops the last message of a prompt: `text` is the same with another one."""
    last = messages[-1]
    content = str(last["content"])
    if content.strip() not in text and render([*messages[:-1], {**last, "content": f"{content}."}]) == text:
        raise UserError(
            f"the chat template drops the last message of the prompt, the {shown(last['role'])} message "
            f"{shown(content)}, so the model would never read it: correct the template, or set data.chat_template"
        )


def text_of(row: Row) -> str:
    """Return the text of a prompt that needs no template; raises ValueError for a prompt of several messages."""
    if row.is_conversation or len(row.messages) != 1 or row.messages[0]["role"] != "user":
        raise UserError("a prompt of messages needs data.apply_chat_template: true")
    return str(row.messages[0]["content"])


def _read_texts(row: dict[str, Any], columns: Columns, learns_from: LearnsFrom) -> tuple[Messages, bool, list[str]]:
    """(messages, whether they are a conversation to imitate, responses to learn from)."""
    if learns_from == "responses" and (conversation := _cell(row, columns.messages)) is not None:
        messages = as_messages(conversation, columns.messages)
        roles = [message["role"] for message in messages]
        if roles[0] == "assistant" or "assistant" not in roles:
            raise UserError(
                f"column {columns.messages!r}: a conversation to imitate needs an assistant's turn after another one"
            )
        return messages, True, []
    named = {"rollouts": (), "responses": (columns.response,), "pairs": (columns.chosen, columns.rejected)}[learns_from]
    cells = [_cell(row, name) for name in named]
    if (prompt := _cell(row, columns.prompt)) is not None:
        messages = _with_query(as_messages(prompt, columns.prompt), row, columns)
    elif learns_from == "pairs" and all(isinstance(side, list) and len(side) > 1 for side in cells):
        messages = []
    elif learns_from == "responses" and isinstance(row.get("instruction"), str) and isinstance(row.get("output"), str):
        return _of_alpaca(row), True, []
    else:
        raise UserError(_no_column(row, columns.prompt, "prompt_key"))
    read = [_response(cell, name, messages) for name, cell in zip(named, cells, strict=True) if cell is not None]
    if read:
        (messages, _), *others = read
        if any(_filled(messages) != _filled(other) for other, _ in others):
            raise UserError(f"{columns.chosen!r} and {columns.rejected!r} must differ in their last turn only")
    if not any(message["content"].strip() for message in messages):
        raise UserError(f"column {columns.prompt!r}: the prompt is empty: got {shown(messages)}")
    return messages, False, [text for _, text in read] if len(read) == len(named) else []


def _with_query(messages: Messages, row: dict[str, Any], columns: Columns) -> Messages:
    """Return a prompt's messages, with the row's query appended to the last one on a new line."""
    if columns.query is None:
        return messages
    if columns.query not in row:
        raise UserError(f"no column {columns.query!r}; it has {', '.join(map(str, row))}; set data.query_key")
    query = _optional_text(row, columns.query)
    last = messages[-1]
    return messages if query is None else [*messages[:-1], {**last, "content": f"{last['content']}\n{query}"}]


def _optional_text(row: dict[str, Any], column: str | None) -> str | None:
    """Return the text of a column that a row may leave empty; None if it is empty."""
    text = None if column is None else _cell(row, column)
    if text is None or text == "":
        return None
    if not isinstance(text, str):
        raise UserError(f"column {column!r} must be a text: got {shown(text)}")
    _check_text(text, str(column))
    return text


def _tools(row: dict[str, Any], column: str | None) -> list[Any]:
    """Return the functions of a row, given as a list or as JSON of a list."""
    tools = None if column is None else _cell(row, column)
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError as error:
            raise UserError(f"column {column!r} must be a list of functions, or JSON of one: {error}") from error
    if tools is not None and not isinstance(tools, list):
        raise UserError(f"column {column!r} must be a list of functions, or JSON of one: got {shown(tools)}")
    return tools or []


def check_responses(row: Row, columns: Columns, learns_from: LearnsFrom, names: list[str]) -> None:
    """Raise ValueError if a row with the columns `names` lacks the responses to learn from."""
    wanted = {"rollouts": 0, "responses": 1, "pairs": 2}[learns_from]
    if row.is_conversation or len(row.responses) == wanted:
        return
    needs = {
        "responses": f"a text in column {columns.response!r} or a conversation in column {columns.messages!r}",
        "pairs": f"columns {columns.chosen!r} and {columns.rejected!r}",
    }[learns_from]
    other = key_for(names, "response_key") if learns_from == "responses" else None
    hint = f"set {other}" if other else "data.*_key name others"
    raise UserError(f"learning from {learns_from} needs {needs}; it has {', '.join(names)}; {hint}")


def key_for(names: Collection[str], key: str) -> str | None:
    """Return `data.KEY: COLUMN` for the first column of a usual name, or None."""
    column = next((name for name in OTHER_NAMES[key] if name in names), None)
    return None if column is None else f"data.{key}: {column}"


def _no_column(row: dict[str, Any], name: str, key: str) -> str:
    names = [str(column) for column in row]
    return f"no column {name!r}; it has {', '.join(names)}; set {key_for(names, key) or f'data.{key}'}"


def _of_alpaca(row: dict[str, Any]) -> Messages:
    """Return the conversation of an Alpaca row: the instruction with the optional input, then the output."""
    question = "\n\n".join(text for text in (row["instruction"], row.get("input")) if text).strip()
    if not question:
        raise UserError("column 'instruction': the prompt is empty")
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": row["output"]}]
    return as_messages(messages, "instruction")


def as_messages(prompt: Any, column: str) -> Messages:
    """Convert a text, messages or JSON messages in a text to messages; raises ValueError for anything else."""
    if isinstance(prompt, str) and (messages := _json_messages(prompt)) is not None:
        prompt = messages
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise UserError(
            f"column {column!r}: a prompt is a text or a list of messages with role and content, got {shown(prompt)}"
        )
    for place, message in enumerate(prompt):
        if not isinstance(message, dict) or not {"role", "content"} <= set(message):
            raise UserError(
                f"column {column!r}: a prompt is a text or a list of messages with role and content, "
                f"got {shown(message)} at {place}"
            )
        if message["role"] not in ROLES:
            raise UserError(
                f"column {column!r}: the role of a message is one of {', '.join(ROLES)}: got {shown(message['role'])}"
            )
        if not isinstance(message["content"], str):
            raise UserError(f"column {column!r}: the content of a message must be a text: got {shown(message['content'])}")
        _check_text(message["content"], column)
    kept: Messages = _as_json(prompt, column)
    return kept


def _json_messages(text: str) -> list[dict[str, Any]] | None:
    """Parse messages that a text holds as JSON; None for any other text, which a user may also write in brackets."""
    if not text.startswith("[{") or '"role"' not in text:
        return None
    try:
        messages = json.loads(text)
    except ValueError:
        return None
    are_messages = all(isinstance(message, dict) and {"role", "content"} <= set(message) for message in messages)
    return messages if are_messages else None


def _response(value: Any, column: str, prompt: Messages) -> tuple[Messages, str]:
    """(messages before it, text) of a response given as a text, or as messages whose last one is the response.

    Those before the last one belong to the prompt: they repeat it, with more around it or without its beginning, or follow
    it.
    """
    if isinstance(value, str):
        _check_text(value, column)
        return prompt, value
    if not isinstance(value, list):
        raise UserError(f"column {column!r}: a response is a text or a list of messages, got {shown(value)}")
    *turns, last = as_messages(value, column)
    if last["role"] != "assistant":
        raise UserError(f"column {column!r}: the last message is the response, of the assistant: got {shown(last)}")
    before, given = _filled(turns), _filled(prompt)
    if given[len(given) - len(before) :] == before:
        return prompt, last["content"]
    if any(before[place : place + len(given)] == given for place in range(len(before))):
        return turns, last["content"]
    if turns[0]["role"] in ("assistant", "tool"):
        return [*prompt, *turns], last["content"]
    raise UserError(
        f"column {column!r}: the messages before the response must be the prompt or follow it: got {shown(turns)} for the "
        f"prompt {shown(prompt)}"
    )


def _filled(messages: Messages) -> Messages:
    """Return messages without the keys that parquet adds because other messages have them."""
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def _check_text(text: str, column: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"column {column!r}: the text holds half a character, {text[error.start]!r}, which no tokenizer reads"
        ) from error


def _mapping(row: dict[str, Any], column: str) -> dict[str, Any]:
    mapping = row.get(column)
    if mapping is None:
        return {}
    if not isinstance(mapping, dict):
        raise UserError(f"column {column!r} must be a mapping: got {shown(mapping)}")
    return dict(mapping)


def _cell(row: dict[str, Any], name: str) -> Any:
    """Return the value of a column, or for `a.b` the field b of column a; None if missing."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _ground_truth(row: dict[str, Any], name: str) -> str:
    """Return the ground truth as a text; in a custom column, the answer of a solution whose last line is `#### answer`
    (GSM8K)."""
    if name == Columns.ground_truth:
        return _as_text(_mapping(row, "reward_model").get("ground_truth"))
    value = _cell(row, name)
    if value is None:
        raise UserError(f"no ground truth in {name!r}; it has {', '.join(map(str, row))}; set data.ground_truth_key")
    last_line = value.rstrip().rpartition("\n")[2] if isinstance(value, str) else ""
    answer = _ANSWER.fullmatch(last_line)
    return _as_text(value) if answer is None else answer[1]


def _as_text(ground_truth: Any) -> str:
    """Convert a ground truth to the text that rewards receive: None is empty, lists and mappings are JSON."""
    if ground_truth is None:
        return ""
    if isinstance(ground_truth, (list, dict)):
        return json.dumps(ground_truth, ensure_ascii=False, default=str)
    return str(ground_truth)
