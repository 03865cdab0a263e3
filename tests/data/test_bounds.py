"""Data files that would take the memory of a machine are refused by file and row."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fivefold.data.bounded_template import BoundedTemplate
from fivefold.data.rows import read_rows

LIMITED = """
import resource, sys
from pathlib import Path
import pyarrow, pyarrow.parquet
from fivefold.data.rows import read_rows

resource.setrlimit(resource.RLIMIT_AS, (3 * 2**30, 3 * 2**30))
try:
    for row in read_rows(Path(sys.argv[1])):
        pass
except ValueError as error:
    print(error)
"""


FLIPPED = """
import sys
from pathlib import Path
import pyarrow, pyarrow.parquet
from fivefold.data.rows import read_rows

path = Path(sys.argv[1])
whole = path.read_bytes()
counts = {"read": 0, "refused": 0}
for place in range(len(whole)):
    for change in (1, 128):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ change]) + whole[place + 1 :])
        try:
            list(read_rows(path))
            counts["read"] += 1
        except ValueError as error:
            assert str(path) in str(error), error
            counts["refused"] += 1
print(counts["read"] > 0 and counts["refused"] > 0)
"""


def read_with_3_gib(path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_a_small_parquet_file_that_unpacks_to_gigabytes_is_refused_by_row(tmp_path):
    path = tmp_path / "bomb.parquet"
    large = pa.DictionaryArray.from_arrays(pa.array([0, 0] + [1] * 40, pa.int32()), pa.array(["a", "b" * 50_000_000]))
    pq.write_table(pa.table({"prompt": large}), path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 10_000
    assert read_with_3_gib(path) == f"{path}, row 2: a row must take at most 16 MiB: it unpacks to 48 MiB"


def many_times(text: str, counts: list[int]) -> pa.ListArray:
    """Lists that name one stored text so many times."""
    names = pa.DictionaryArray.from_arrays(pa.array([0] * sum(counts), pa.int32()), pa.array([text]))
    return pa.ListArray.from_arrays(pa.array([0, *itertools.accumulate(counts)], pa.int32()), names)


@pytest.mark.parametrize("stores_type", [True, False])
def test_a_row_that_names_one_text_many_times_is_refused_by_row(tmp_path, stores_type):
    """Its size only shows while it is unpacked, and the rows before it are unpacked with it."""
    path = tmp_path / "bomb.parquet"
    table = pa.table({"prompt": many_times("b" * 10_000_000, [1, 0, 1, 250, 1])})
    pq.write_table(table, path, compression="zstd", store_schema=stores_type)
    assert path.stat().st_size < 2_000
    refusal = f"{path}, row 3: a row must take at most 16 MiB: it unpacks to more than 2,048 MiB"
    assert subprocess.run(
        [sys.executable, "-c", LIMITED.replace("3 * 2**30", "12 * 2**30"), str(path)],
        capture_output=True, text=True, timeout=300, check=True,
    ).stdout.strip() == refusal  # fmt: skip
    pq.write_table(table.slice(0, 3), path, store_schema=stores_type)
    assert [len(row["prompt"]) for row in read_rows(path)] == [1, 0, 1]


def test_a_saved_row_that_names_one_text_many_times_is_refused_by_row(tmp_path):
    path = tmp_path / "data.arrow"
    table = pa.table({"prompt": many_times("b" * 1_000_000, [1, 0, 40, 1])})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": path.name}]}))
    assert read_with_3_gib(tmp_path) == f"{tmp_path}, row 2: a row must take at most 16 MiB: it unpacks to 38 MiB"


def test_texts_that_are_stored_once_are_read_within_every_kind_of_column(tmp_path):
    texts = pa.array(["a", "b", "a", None]).dictionary_encode()
    pairs = pa.StructArray.from_arrays([texts, pa.array([1, 2, 3, 4])], ["x", "y"])
    columns = {
        "text": texts.slice(0, 2),
        "list": pa.ListArray.from_arrays(pa.array([0, 1, 4], pa.int32()), pairs),
        "large": pa.LargeListArray.from_arrays(pa.array([0, 2, 4], pa.int64()), texts),
        "fixed": pa.FixedSizeListArray.from_arrays(pairs, 2),
        "map": pa.MapArray.from_arrays(pa.array([0, 2, 4], pa.int32()), pa.array(list("abcd")), texts),
    }
    table = pa.table(columns)
    path = tmp_path / "data.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": path.name}]}))
    assert list(read_rows(tmp_path)) == table.to_pylist()


def test_a_parquet_file_with_a_flipped_bit_is_read_or_refused_by_its_name(tmp_path):
    """Pyarrow ends the process where it is asked for the sizes of a column whose statistics are damaged."""
    path = tmp_path / "flipped.parquet"
    rows = [{"prompt": [{"role": "user", "content": f"{n}+1="}], "ground_truth": str(n + 1)} for n in range(4)]
    pq.write_table(pa.Table.from_pylist(rows), path)
    done = subprocess.run(
        [sys.executable, "-c", FLIPPED, str(path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr[-2000:]


def test_an_arrow_file_with_a_flipped_bit_is_read_or_refused_by_its_name(tmp_path):
    """Arrow trusts the offsets and lengths of a file: of 1,500 damaged ones, 98 ended the process."""
    rows = [{"prompt": [{"role": "user", "content": f"{n}+1="}], "ground_truth": str(n + 1)} for n in range(4)]
    table = pa.Table.from_pylist(rows)
    path = tmp_path / "data.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": path.name}]}))
    done = subprocess.run(
        [sys.executable, "-c", FLIPPED.replace("read_rows(path)", "read_rows(path.parent)"), str(path)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr[-2000:]


def test_a_line_of_a_gigabyte_is_refused_by_its_number(tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"prompt": "1 + 1?"}) + "\n")
    with path.open("r+b") as file:
        file.seek(2**30)
        file.write(b"\n")
    assert read_with_3_gib(path) == f"{path}, line 2 must have at most 16 MiB: it is longer"


@pytest.mark.parametrize(
    "line", ['{"prompt": "a", "prompt": "b"}', '{"prompt": "a", "extra_info": {"x": 1, "y": 2, "x": 1}}']
)
def test_a_row_that_has_a_key_twice_is_refused_by_its_number(tmp_path, line):
    path = tmp_path / "twice.jsonl"
    path.write_text('{"prompt": "a"}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"twice.jsonl, line 2 is not JSON: the key '(prompt|x)' is given twice"):
        list(read_rows(path))


@pytest.mark.parametrize("size", [1, 1000])
def test_rows_of_parquet_come_in_their_order_whatever_their_groups(tmp_path, size):
    path = tmp_path / "rows.parquet"
    rows = [
        {"prompt": [{"role": "user", "content": "x" * 5000 + str(n)}], "reward_model": {"ground_truth": str(n)}}
        for n in range(2500)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=size)
    assert list(read_rows(path)) == rows


DOUBLED = "{% set a = FIRST %}" + "{% set a = NEXT %}" * 40 + "{{ a }}"


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("{{ lipsum(n=300000) | length }}", "1 s"),
        ("{{ ([1] | slice(100000000) | list) | length }}", "1 (s|GiB)"),
        ("{{ [1] | batch(900000000, 1) | list | length }}", "1 GiB"),
        ("{{ ('a' | center(2000000000)) | length }}", "1 GiB"),
        ("{{ 'a'.ljust(2000000000) }}", "1 GiB"),
        ("{{ '%2000000000d' % 1 }}", "1 GiB"),
        ("{{ '%2000000000d' | format(1) }}", "1 GiB"),
        ("{{ '{:2000000000}'.format(1) }}", "1 GiB"),
        ("{% for i in range(100000) %}{{ 'a' * 99999 }}{% endfor %}", "1 (s|GiB)"),
        (DOUBLED.replace("FIRST", "'a'").replace("NEXT", "a ~ a"), "1 (s|GiB)"),
        (DOUBLED.replace("FIRST", "[1]").replace("NEXT", "[a, a]"), "1 (s|GiB)"),
        ("{{ ('a' | center(90000000)) }}", "(1 s|64 Mi letters)"),
    ],
)
def test_a_chat_template_takes_no_more_time_and_memory_than_its_limits(text, limit):
    with pytest.raises(ValueError, match=f"^it (takes|writes) more than {limit} for one conversation$"):
        BoundedTemplate(text, seconds=1).render()


def test_a_template_that_took_too_long_for_one_conversation_renders_the_next():
    template = BoundedTemplate("{{ lipsum(n=n) | length > 1 }}", seconds=1)
    for _ in range(2):
        with pytest.raises(ValueError, match="it takes more than 1 s"):
            template.render(n=300000)
        assert template.render(n=1) == "True"


def test_a_chat_template_leaves_no_process():
    template = BoundedTemplate("{{ a }}")
    process = template._process
    assert template.render(a="\ud800\n") == "\ud800\n" and process.poll() is None
    del template
    assert process.returncode == -signal.SIGKILL
