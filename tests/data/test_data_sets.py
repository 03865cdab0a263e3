"""Data sets that are no files here: of the hub, from Python, and what `save_to_disk` wrote."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from fivefold.checkpoint.fingerprint import Fingerprint
from fivefold.config import RunConfig
from fivefold.config.schema import DataConfig
from fivefold.data.data_sets import HubDataSet, hub_names, with_files
from fivefold.data.prompt_cache import store_prompts
from fivefold.data.prompts import Reading, load_prompts
from fivefold.data.rows import Columns, count_rows, read_rows, source_of
from fivefold.data.tokenizer import load_tokenizer
from fivefold.errors import UserError
from fivefold.launch.run_directory import check_run_directory
from fivefold.plan.check import check
from tests.support.commands import LONGEST
from tests.support.hub import Hub, serving
from tests.support.tiny_models import make_model, make_tokenizer

README = """---
configs:
- config_name: main
  data_files: [{split: train, path: main/train-*}, {split: test, path: main/test-*}]
- config_name: socratic
  data_files: [{split: train, path: socratic/train-*}]
---
"""


def parquet(*rows: dict[str, Any]) -> bytes:
    held = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), held)
    return held.getvalue()


def rows(count: int, mark: str = "1") -> list[dict[str, Any]]:
    return [{"question": f"{mark}+{place}=", "answer": f"#### {place + 1}"} for place in range(count)]


def gsm8k(mark: str = "1") -> dict[str, bytes]:
    return {
        "README.md": README.encode(),
        "main/train-00000-of-00002.parquet": parquet(*rows(3, mark)),
        "main/train-00001-of-00002.parquet": parquet(*rows(2, mark)),
        "main/test-00000-of-00001.parquet": parquet(*rows(1, mark)),
        "socratic/train-00000-of-00001.parquet": parquet(*rows(4, mark)),
    }


@pytest.fixture
def hub():
    with serving() as started:
        yield started


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = make_model("qwen3", tmp_path_factory.mktemp("sets") / "model")
    make_tokenizer(path)
    return path


def environment(home: Path, hub: Hub | None, **more: str) -> dict[str, str]:
    """Variables of a user whose hub is this one; without one, of a machine without a network."""
    proxies = {"HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_TOKEN"}
    inherited = {name: value for name, value in os.environ.items() if name not in proxies}
    endpoint = "http://127.0.0.1:9" if hub is None else hub.url
    of_user = {"HF_HOME": str(home / "hf"), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_TELEMETRY": "1"}
    return {**inherited, **of_user, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, filter(None, sys.path))), **more}


LOCATE = """
import sys
from pathlib import Path
from fivefold.data.data_sets import local_file
from fivefold.errors import UserError
try:
    print(local_file(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4] or None))
except UserError as error:
    print("refused:", error)
"""


def command(variables: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fivefold.cli", *words], env=variables, capture_output=True, text=True, timeout=LONGEST
    )


def locate(home: Path, hub: Hub | None, name: str, key: str = "train", commit: str = "", **variables: str) -> str:
    """What a process of its own is given for a name: the hub's address is read when its client is imported."""
    words = [sys.executable, "-c", LOCATE, name, key, str(home / "cache"), commit]
    done = subprocess.run(words, env=environment(home, hub, **variables), capture_output=True, text=True, timeout=LONGEST)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


# --- names -----------------------------------------------------------------------------------------------------------

NAMES = {
    "trl-lib/DeepMath-103K": ("trl-lib/DeepMath-103K", None, None, None),
    "openai/gsm8k:main/train": ("openai/gsm8k", "main", "train", None),
    "openai/gsm8k/test[:10]": ("openai/gsm8k", None, "test", None),
    "openai/gsm8k:main@refs/convert/parquet": ("openai/gsm8k", "main", None, "refs/convert/parquet"),
    "a/b:c/d@0123[-5:]": ("a/b", "c", "d", "0123"),
    "modelscope:a/b": ("modelscope:a/b", None, None, None),
    "modelscope:a/b:c/d@0123[:5]": ("modelscope:a/b", "c", "d", "0123"),
}
PATHS = (
    "rows",
    "data/train.jsonl",
    "data/train.parquet[:5]",
    "./a/b",
    "../a/b",
    "/a/b",
    "a/b/c/d",
    "a/b:",
    "a/b@",
    "modelscope:a",
    "other:a/b",
)


def test_a_name_has_owner_name_configuration_split_and_revision():
    for name, parts in NAMES.items():
        parsed = HubDataSet.parse(name)
        assert (parsed.repository, parsed.config, parsed.split, parsed.revision) == parts
        assert parsed.name == name.partition("[")[0]
    assert [name for name in PATHS if HubDataSet.parse(name) is not None] == []


def test_what_is_here_is_no_name_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner/name").mkdir(parents=True)
    assert HubDataSet.parse("owner/name") is None and HubDataSet.parse("owner/name[:3]") is None
    data = DataConfig(train=["owner/name", "a/b", "x.jsonl"], val=["a/b/test"])
    assert list(hub_names(data)) == [("train", "a/b"), ("val", "a/b/test")]


@pytest.mark.skipif(importlib.util.find_spec("modelscope_hub") is not None, reason="ModelScope's client is installed")
def test_a_data_set_of_modelscope_without_its_client_says_what_to_install(tmp_path, hub):
    says = "refused: 'modelscope:a/b' needs modelscope, not installed here: pip install 'fivefold[modelscope]'"
    assert locate(tmp_path, hub, "modelscope:a/b") == says and hub.requests == []


def test_a_part_of_a_data_set_stays_a_part_of_its_file():
    data = DataConfig(train=["a/b[:3]", "x.jsonl[1:]"], val=["a/b"])
    changed = with_files(data, {"a/b[:3]": Path("/c/b.parquet"), "a/b": Path("/c/test.parquet")})
    assert (changed.train, changed.val) == (["/c/b.parquet[:3]", "x.jsonl[1:]"], ["/c/test.parquet"])


# --- the hub ---------------------------------------------------------------------------------------------------------


def test_a_data_set_of_the_hub_becomes_a_file_of_its_commit_once(tmp_path, hub):
    pytest.importorskip("datasets")
    commit = hub.push("openai/gsm8k", gsm8k())
    path = Path(locate(tmp_path, hub, "openai/gsm8k:main/train"))
    assert path == tmp_path / f"cache/hub/openai--gsm8k/{commit}/main/train.parquet"
    assert list(read_rows(path)) == rows(3) + rows(2) and source_of(path) == "openai/gsm8k"
    assert list(read_rows(Path(f"{path}[3:]"))) == rows(2) and source_of(Path(f"{path}[3:]")) == "openai/gsm8k"
    before = len(hub.downloads("openai/gsm8k"))
    # The split that is usual for training, another one, and the commit by itself: nothing is downloaded again.
    assert locate(tmp_path, hub, "openai/gsm8k:main") == str(path)
    assert locate(tmp_path, hub, f"openai/gsm8k:main/train@{commit}") == str(path)
    assert count_rows(Path(locate(tmp_path, hub, "openai/gsm8k:main/test", "val")), 9) == 1
    assert len(hub.downloads("openai/gsm8k")) == before


def test_a_commit_stays_the_one_that_was_read_and_a_name_takes_the_latest(tmp_path, hub):
    pytest.importorskip("datasets")
    first = hub.push("a/b", {"train.parquet": parquet(*rows(2))})
    old = locate(tmp_path, hub, "a/b")
    second = hub.push("a/b", {"train.parquet": parquet(*rows(2, "5"))})
    new = locate(tmp_path, hub, "a/b")
    assert (first in old, second in new) == (True, True)
    assert list(read_rows(Path(new))) == rows(2, "5") and list(read_rows(Path(old))) == rows(2)
    # A run that resumes has the commit of its checkpoint, whatever the hub has by then; so has a machine that lost its cache.
    assert locate(tmp_path, hub, "a/b", commit=first) == old
    Path(old).unlink()
    assert locate(tmp_path, hub, "a/b", commit=first) == old and list(read_rows(Path(old))) == rows(2)


def test_processes_that_begin_together_download_once(tmp_path, hub):
    pytest.importorskip("datasets")
    hub.push("a/b", {"train.parquet": parquet(*rows(2))})
    with ThreadPoolExecutor(3) as pool:
        commits = set(pool.map(lambda _: locate(tmp_path, hub, "a/b"), range(3)))
    assert len(commits) == 1 and len(hub.downloads("a/b")) == 1


def test_without_a_network_the_cache_has_what_was_read_before(tmp_path, hub):
    pytest.importorskip("datasets")
    hub.push("a/b", {"train.parquet": parquet(*rows(2)), "test.parquet": parquet(*rows(1))})
    path = locate(tmp_path, hub, "a/b")
    assert locate(tmp_path, None, "a/b") == path == locate(tmp_path, hub, "a/b", HF_HUB_OFFLINE="1")
    # Our own cache is gone: that of `datasets` has the same commit.
    Path(path).unlink()
    (tmp_path / "cache/hub/a--b/refs/main").unlink()
    assert locate(tmp_path, None, "a/b") == path


def test_without_a_network_a_data_set_of_the_hub_is_refused_in_one_line(tmp_path, model):
    pytest.importorskip("datasets")
    words = ["init", str(tmp_path / "run.yaml"), "--model", str(model), "--data", "a/b:c", "--gpus", "0", "--yes"]
    done = command(environment(tmp_path, None), *words)
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch(r"fivefold: 'a/b' is neither .* the hub gives: it does not answer, and its cache .*\n", done.stderr)


SAYS = {
    ("openai/none", "train"): "there is none of this name, or it is private (then set HF_TOKEN to a token that may read it)",
    ("openai/gated", "train"): "/datasets/openai/gated, then set HF_TOKEN to a token of that account",
    ("openai/gsm8k:main@v9", "train"): "it has no revision 'v9'",
    ("openai/gsm8k", "train"): "must name one of its configurations: openai/gsm8k:main, openai/gsm8k:socratic",
    ("openai/gsm8k:mian", "train"): "must name one of its configurations: openai/gsm8k:main, openai/gsm8k:socratic",
    ("openai/gsm8k:main/dev", "train"): "openai/gsm8k:main has no split 'dev': name one of openai/gsm8k:main/train, openai/",
    ("openai/gsm8k:main", "val"): "openai/gsm8k:main has several splits: name one of openai/gsm8k:main/train, openai/gsm8k:",
    ("openai/code", "train"): "'openai/code' is neither a file here nor a data set that the hub gives: ",
}  # fmt: skip


def test_what_the_hub_does_not_have_is_said_in_one_sentence(tmp_path, hub):
    pytest.importorskip("datasets")
    hub.push("openai/gsm8k", gsm8k())
    hub.push("openai/code", {"code.py": b"raise SystemExit('run')"})
    hub.push("openai/gated", {"train.parquet": parquet(*rows(1))})
    hub.gated.add("datasets/openai/gated")
    for (name, key), says in SAYS.items():
        message = locate(tmp_path, hub, name, key)
        assert message.startswith("refused: ") and says in message, (name, message)
        if "neither a file here" in message:
            config = ", 'main'" if ":main" in name else ""
            assert f"load_dataset('{name.partition(':')[0].partition('@')[0]}'{config}, split='train'" in message


def test_without_the_library_or_a_network_a_line_says_how_to_write_a_file(tmp_path, hub):
    line = "python -c \"from datasets import load_dataset; load_dataset('a/b', 'c', split='train').to_parquet('train.parquet')\""
    hub.push("a/b", {"train.parquet": parquet(*rows(2))})
    (tmp_path / "none/datasets").mkdir(parents=True)
    (tmp_path / "none/datasets/__init__.py").write_text("raise ModuleNotFoundError('No module', name='datasets')")
    path = os.pathsep.join([str(tmp_path / "none"), *map(os.path.abspath, filter(None, sys.path))])
    message = locate(tmp_path, hub, "a/b:c/train", PYTHONPATH=path)
    assert (
        "a data set of the hub needs datasets, not installed here: pip install 'fivefold[datasets]', or run where" in message
    )
    assert line in message
    pytest.importorskip("datasets")
    message = locate(tmp_path, None, "a/b:c/train", HF_HUB_OFFLINE="1")
    assert "that the hub gives: HF_HUB_OFFLINE is set, and its cache in " in message and line in message


def configured(tmp_path: Path, model: Path, train: list[str], **sections: Any) -> dict[str, Any]:
    data = {"prompts_per_step": 2, "max_prompt_tokens": 32, "max_response_tokens": 8, "cache_dir": str(tmp_path / "cache")}
    keys = {"prompt_key": "question", "ground_truth_key": "answer"}
    return {
        "model": {"path": str(model)},
        "policy": {"dtype": "float32"},
        "reward": {"functions": {"gsm8k": 1.0}},
        "data": {"train": train, **data, **keys, **sections.pop("data", {})},
        "trainer": {"device": "cpu", "run_dir": str(tmp_path / "run"), "steps": 1, **sections.pop("trainer", {})},
        **sections,
    }


@pytest.mark.slow
def test_a_run_reads_a_data_set_of_the_hub_and_resumes_with_its_commit(tmp_path, hub, model):
    pytest.importorskip("datasets")
    first = hub.push("openai/gsm8k", gsm8k())
    train, val = ["openai/gsm8k:main[:4]"], ["openai/gsm8k:main/test"]
    tree = configured(
        tmp_path, model, train, data={"val": val}, algorithm={"group_size": 2}, trainer={"save_every": 1, "eval_every": 1}
    )
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    run = ["train", str(tmp_path / "run.yaml")]
    done = command(environment(tmp_path, hub), *run)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "4 prompts" in done.stdout and not (tmp_path / "hub").exists()
    state = json.loads((tmp_path / "run/checkpoints/step-000001/state.json").read_text())
    assert state["commits"] == {train[0]: first, val[0]: first}
    held = state["fingerprint"]["data.train"]
    assert held["files"] == train and held["content"][0].endswith("[:4]")
    hub.push("openai/gsm8k", gsm8k("7"))
    done = command(environment(tmp_path, hub), *run, "trainer.steps=2")
    assert done.returncode == 0, done.stderr + done.stdout
    state = json.loads((tmp_path / "run/checkpoints/step-000002/state.json").read_text())
    assert state["commits"] == {train[0]: first, val[0]: first} and state["fingerprint"]["data.train"] == held


def test_init_finds_the_columns_of_a_data_set_of_the_hub_and_its_test_split(tmp_path, hub, model):
    pytest.importorskip("datasets")
    hub.push("openai/gsm8k", gsm8k())
    words = [
        "init",
        str(tmp_path / "run.yaml"),
        "--model",
        str(model),
        "--data",
        "openai/gsm8k:main",
        "--gpus",
        "0",
        "--yes",
    ]
    variables = environment(tmp_path, hub, HOME=str(tmp_path))
    done = command(variables, *words)
    assert done.returncode == 0, done.stderr
    data = yaml.safe_load((tmp_path / "run.yaml").read_text())["data"]
    assert (data["train"], data["val"]) == (["openai/gsm8k:main"], ["openai/gsm8k:main/test"])
    assert (data["prompt_key"], data["ground_truth_key"]) == ("question", "answer")
    assert done.stdout.splitlines()[-1] == f"next     fivefold train {tmp_path / 'run.yaml'}"
    done = command(variables, "check", str(tmp_path / "run.yaml"))
    assert done.returncode == 0 and "5 of the first 5 prompts do not ask for #### or" in done.stdout


# --- directories -----------------------------------------------------------------------------------------------------


def saved(directory: Path, *parts: list[dict[str, Any]]) -> Path:
    """A directory as `Dataset.save_to_disk` writes it."""
    directory.mkdir(parents=True)
    names = [f"data-{place:05d}-of-{len(parts):05d}.arrow" for place in range(len(parts))]
    for name, part in zip(names, parts, strict=True):
        table = pa.Table.from_pylist(part)
        with pa.OSFile(str(directory / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=100)
    (directory / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return directory


def test_a_directory_of_save_to_disk_is_read_like_a_file(tmp_path):
    path = saved(tmp_path / "sets/train", rows(150), rows(7, "3"))
    every = rows(150) + rows(7, "3")
    assert list(read_rows(path)) == every and count_rows(path, 9) == 157 and source_of(path) == "train"
    assert (
        list(read_rows(Path(f"{path}[148:152]"))) == every[148:152] and list(read_rows(Path(f"{path}[-1:]"))) == every[-1:]
    )
    assert source_of(Path(f"{path}[:3]")) == "train"


def test_what_save_to_disk_of_the_library_wrote_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    chosen = datasets.Dataset.from_list(rows(40)).select([3, 1, 30])
    chosen.save_to_disk(tmp_path / "one", num_shards=2)
    assert list(read_rows(tmp_path / "one")) == [rows(40)[place] for place in (3, 1, 30)]
    datasets.DatasetDict(train=chosen, test=chosen.select([0])).save_to_disk(tmp_path / "all")
    assert count_rows(tmp_path / "all/test", 9) == 1
    with pytest.raises(UserError, match=f"holds several splits: name one of {tmp_path}/all/train, {tmp_path}/all/test"):
        list(read_rows(tmp_path / "all"))


def test_a_damaged_directory_is_refused_with_the_file(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty is a directory without state.json, which `Dataset.save_to_disk` writes"):
        list(read_rows(tmp_path / "empty"))
    path = saved(tmp_path / "train", rows(9))
    file = path / "data-00000-of-00001.arrow"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=r"data-00000-of-00001\.arrow cannot be read as Arrow, it may be cut off"):
        list(read_rows(path))
    for listed in ("../train/x.arrow", "gone.arrow", None):
        (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": listed}]}))
        with pytest.raises(UserError, match="must list the Arrow files next to it in _data_files: got"):
            list(read_rows(path))


def test_a_changed_file_of_a_directory_makes_other_prompts_and_another_run(tmp_path, model):
    path = saved(tmp_path / "train", rows(5))
    config = RunConfig.of(configured(tmp_path, model, [str(path)]))
    assert check(config).errors == []

    def stored() -> Path:
        reading = Reading(32, columns=Columns.of(config.data))
        return store_prompts([str(path)], (model, False), reading, tmp_path / "prompts", lambda line: None, workers=1)

    before, before_change = Fingerprint.of(config, 1, {}).values, stored()
    assert Fingerprint.of(config, 1, {}).compare(before).refused == [] and stored() == before_change
    for file in path.iterdir():
        file.unlink()
    path.rmdir()
    saved(path, rows(5, "4"))
    (text,) = Fingerprint.of(config, 1, {}).compare(before).refused
    assert text.startswith("data.train: ") and stored() != before_change


def test_another_part_of_a_file_is_another_data_set(tmp_path, model):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(9)))

    def values(part: str) -> Fingerprint:
        return Fingerprint.of(RunConfig.of(configured(tmp_path, model, [f"{tmp_path}/rows.jsonl{part}"])), 1, {})

    assert values("[:4]").compare(values("[:4]").values).refused == []
    for other in ("[:5]", "", "[4:]"):
        assert len(values("[:4]").compare(values(other).values).refused) == 1


# --- from Python -----------------------------------------------------------------------------------------------------


def from_python(tmp_path: Path, model: Path, train: Any, **data: Any) -> RunConfig:
    tree = configured(tmp_path, model, [], data=data)
    tree["data"]["train"] = train
    return RunConfig.of(tree)


def test_rows_from_python_are_a_file_of_the_run_and_of_its_fingerprint(tmp_path, model):
    config = from_python(tmp_path, model, rows(4), val=rows(1, "2"))
    (train,), (val,) = config.data.train, config.data.val
    assert list(read_rows(Path(train))) == rows(4) and list(read_rows(Path(val))) == rows(1, "2")
    assert Path(train).parent.parent == tmp_path / "run/data" and source_of(Path(train)) == "train"
    check_run_directory(config.run_dir)
    assert [path.stat().st_mode & 0o777 for path in (config.run_dir, Path(train).parent, Path(train))] == [
        0o700,
        0o700,
        0o600,
    ]
    assert check(config).errors == []
    before = Fingerprint.of(config, 1, {}).values
    again, other = (
        from_python(tmp_path, model, rows(4), val=rows(1, "2")),
        from_python(tmp_path, model, rows(5), val=rows(1, "2")),
    )
    assert again == config and Fingerprint.of(again, 1, {}).compare(before).refused == []
    (text,) = Fingerprint.of(other, 1, {}).compare(before).refused
    assert text.startswith("data.train: ")


def test_rows_of_different_columns_keep_their_own(tmp_path, model):
    """A table would have taken the columns of the first row, or given all rows the columns of all."""
    written = [{"question": "1+1=", "answer": 2}, {"question": "2+2=", "answer": "4", "extra_info": {"a": None}}]
    config = from_python(tmp_path, model, written)
    assert list(read_rows(Path(config.data.train[0]))) == written


def test_a_run_directory_without_a_name_depends_on_the_rows(tmp_path, model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trees = [configured(tmp_path, model, [], data={"train": rows(count)}, trainer={"run_dir": None}) for count in (4, 4, 5)]
    first, again, other = map(RunConfig.of, trees)
    assert first == again and first.run_dir != other.run_dir
    assert first.run_dir.parent == Path("runs") and Path(first.data.train[0]).is_relative_to(first.run_dir)


def test_a_dataset_from_python_is_written_as_parquet(tmp_path, model):
    datasets = pytest.importorskip("datasets")
    chosen = datasets.Dataset.from_list(rows(30)).select(range(20, 5, -5))
    config = from_python(tmp_path, model, chosen)
    (train,) = config.data.train
    assert train.endswith("/train.parquet") and list(read_rows(Path(train))) == [rows(30)[place] for place in (20, 15, 10)]
    assert from_python(tmp_path, model, chosen.select([0, 1, 2])) == config
    (tmp_path / "more.jsonl").write_text(json.dumps(rows(1)[0]))
    both = from_python(tmp_path, model, [chosen, str(tmp_path / "more.jsonl")])
    assert both.data.train == [train, str(tmp_path / "more.jsonl")] and check(both).errors == []
    tokenizer = load_tokenizer(str(model))
    assert len(load_prompts(both.data.train, tokenizer, Reading(32, columns=Columns.of(both.data))).prompts) == 4
    with pytest.raises(
        ValueError, match=r"data\.train must be one split: got a DatasetDict of train, test; pass one of them"
    ):
        from_python(tmp_path, model, datasets.DatasetDict(train=chosen, test=chosen))


def test_rows_that_no_file_can_hold_are_refused(tmp_path, model):
    with pytest.raises(ValueError, match="row 1 of data must hold texts, numbers, lists and dicts: Object of type set"):
        from_python(tmp_path, model, [{"question": "a"}, {"question": {"b"}}])
    with pytest.raises(ValueError, match=r"data.train\[0\] must be text, got"):
        from_python(tmp_path, model, [rows(1)])
    assert not (tmp_path / "run").exists()
