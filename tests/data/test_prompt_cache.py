"""Large data sets: tokenized once, by several processes, into a file; the prompts are those that are read one by one."""

from __future__ import annotations

import json
import math
import os
from contextlib import redirect_stdout
from datetime import date
from io import StringIO
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from fivefold.build import build_data
from fivefold.config import RunConfig
from fivefold.data import prompt_cache
from fivefold.data.prompt_cache import is_large, open_prompts, store_prompts
from fivefold.data.prompts import Reading, load_prompts
from fivefold.data.tokenizer import load_tokenizer, train_tokenizer


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer("char", ["0123456789+-= abcdefghijklmnopqrstuvwxyz\n"], out)
    return out


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(prompt_cache, "_CHUNK", 7)
    monkeypatch.setattr(prompt_cache, "IN_MEMORY", 20)


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rows(count: int) -> list[dict]:
    return [
        {
            "prompt": [{"role": "user", "content": f"{i}+{i}=" + "0" * (30 * (i % 5 == 3))}],
            "data_source": f"source-{i % 3}",
            "reward_model": {"ground_truth": str(2 * i)},
            "extra_info": {"index": i, "tags": ["a", None, 1.5]},
            "response": f"{2 * i}",
            "chosen": "yes",
            "rejected": "no",
        }
        for i in range(count)
    ]


@pytest.mark.parametrize(("learns_from", "workers"), [("rollouts", 2), ("responses", 1), ("pairs", 1)])
def test_stored_prompts_are_those_that_are_read_one_by_one(tmp_path, directory, learns_from, workers):
    files = [write(tmp_path / "a.jsonl", rows(30)), write(tmp_path / "b.jsonl", rows(11))]
    reading = Reading(20, learns_from=learns_from, need_responses=learns_from != "rollouts", max_response_tokens=1)
    messages: list[str] = []
    assert is_large(files) and not is_large(files[1:]) and not is_large(files, first=5)
    path = store_prompts(files, (directory, False), reading, tmp_path / "cache", messages.append, workers=workers)
    stored, listed = open_prompts(path), load_prompts(files, load_tokenizer(str(directory)), reading)
    assert list(stored.prompts) == listed.prompts
    assert stored.dropped == listed.dropped == 8
    assert stored.prompts[-2:] == listed.prompts[-2:] and stored.prompts[-1] == listed.prompts[-1]
    assert list(stored.ground_truths()) == list(listed.ground_truths())
    with pytest.raises(IndexError):
        stored.prompts[len(listed.prompts)]


@pytest.mark.parametrize("count", [5, 25])
@pytest.mark.parametrize(
    ("value", "says"),
    [
        (math.nan, None),
        ([("a", 1)], None),
        (date(2026, 1, 1), "row 3: column 'extra_info' must hold texts, numbers, lists and mappings: .* date "),
        (b"a", "row 3: column 'extra_info' must hold texts, numbers, lists and mappings: .* bytes "),
    ],
)
def test_a_value_is_taken_or_refused_alike_in_small_and_large_data_sets(tmp_path, directory, count, value, says):
    file, reading = tmp_path / "a.parquet", Reading(60)
    kind = pyarrow.map_(pyarrow.string(), pyarrow.int64()) if isinstance(value, list) else None
    values = pyarrow.array([value if place == 3 else None for place in range(count)], kind)
    extra = pyarrow.StructArray.from_arrays([values], ["value"])
    columns = {name: [row[name] for row in rows(count)] for name in ("prompt", "reward_model")}
    pyarrow.parquet.write_table(pyarrow.table({**columns, "extra_info": extra}), file)
    assert is_large([str(file)]) == (count > 20)

    def load():
        if not is_large([str(file)]):
            return load_prompts([str(file)], load_tokenizer(str(directory)), reading).prompts
        return open_prompts(store_prompts([str(file)], (directory, False), reading, tmp_path, print, workers=1)).prompts

    if says is not None:
        with pytest.raises(ValueError, match=says):
            load()
    else:
        assert json.dumps(load()[3].extra) == json.dumps({"value": value})


def test_what_was_tokenized_is_taken_again_until_something_changes(tmp_path, directory):
    data, cache = write(tmp_path / "a.jsonl", rows(10)), tmp_path / "cache"

    def store(limit=20, tokenizer=directory) -> tuple[Path, str]:
        messages: list[str] = []
        return store_prompts([data], (tokenizer, False), Reading(limit), cache, messages.append, workers=1), messages[0]

    path, message = store()
    assert message.startswith(f"tokenizing {data} on 1 core, once")
    assert store() == (path, f"prompts tokenized before are in {path}")
    assert store(21)[0] != path
    other = tmp_path / "tokenizer"
    train_tokenizer("char", ["0123456789+-= ABC"], other)
    assert store(tokenizer=other)[0] != path
    write(tmp_path / "a.jsonl", rows(11))
    changed, message = store()
    assert changed != path and "once" in message
    assert sorted(cache.iterdir()) == sorted({path, changed, *cache.glob("*.arrow")})


def read_by_runs(mesh, directory: Path, data: str, caches: list[Path]) -> list[tuple[list, str]]:
    """For each cache, the prompts that a rank of a run reads, and what it prints."""
    prompt_cache.IN_MEMORY = 20
    tokenizer, read = load_tokenizer(str(directory)), []
    for cache in caches:
        config = RunConfig.of(model={"path": str(directory)}, data={"train": [data], "cache_dir": str(cache)})
        with redirect_stdout(StringIO()) as printed:
            training, _ = build_data(config, tokenizer, directory, mesh.ranks)
        read.append((list(training.prompts), printed.getvalue()))
    return read


@pytest.mark.slow
def test_a_run_whose_cache_cannot_be_written_tokenizes_without_one(cluster, tmp_path, directory):
    data, file = write(tmp_path / "a.jsonl", rows(25)), tmp_path / "file"
    file.touch()
    caches = [tmp_path / "cache", file / "cache"]
    (((stored, first), (read, second)),) = cluster.run(read_by_runs, "megatron:d1", directory, data, caches)
    assert read == stored and len(read) == 25
    assert "keeps the prompts" in first and list((tmp_path / "cache").iterdir())
    assert second.startswith("every rank tokenizes ") and "file/cache'; set data.cache_dir to another directory" in second


def test_what_a_killed_process_left_is_removed_and_what_another_writes_is_not(tmp_path, directory):
    data, cache = write(tmp_path / "a.jsonl", rows(25)), tmp_path / "cache"
    cache.mkdir()
    abandoned, in_use = cache / ".a.arrow.1", cache / ".b.arrow.2"
    abandoned.touch()
    in_use.touch()
    os.utime(abandoned, (0, 0))
    path = store_prompts([data], (directory, False), Reading(20), cache, print, workers=1)
    assert sorted(cache.iterdir()) == sorted([in_use, path])


@pytest.mark.parametrize(("rows", "processes"), [(1_001, 1), (19_999, 1), (20_000, 2), (10**6, 100)])
def test_a_process_tokenizes_at_least_ten_thousand_rows(monkeypatch, rows, processes):
    monkeypatch.setattr(prompt_cache, "count_rows", lambda path, enough: min(rows, enough))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(128)))
    assert prompt_cache._workers(["a.jsonl"]) == processes


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"question": "x"}, r"a\.jsonl, row 25: no column 'prompt'"),
        ({"prompt": "1" * 60}, r"a\.jsonl, row 25: the prompt has 61 tokens, data\.max_prompt_tokens is 40"),
    ],
)
def test_a_bad_row_of_a_large_set_is_named_and_leaves_no_file(tmp_path, directory, row, says):
    data = write(tmp_path / "a.jsonl", [*rows(25), row, *rows(9)])
    with pytest.raises(ValueError, match=says):
        store_prompts([data], (directory, False), Reading(40, "refuse"), tmp_path / "cache", print, workers=1)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_set_whose_prompts_are_all_too_long_is_refused(tmp_path, directory):
    data = write(tmp_path / "a.jsonl", rows(25))
    with pytest.raises(ValueError, match=r"no prompts left in .*: 25 were longer than 2 tokens"):
        store_prompts([data], (directory, False), Reading(2), tmp_path / "cache", print, workers=1)
