"""Each tracker's own library, offline: what its own reader finds is what metrics.jsonl has, also of a run that was killed."""

from __future__ import annotations

import json
import sqlite3
import time
from pathlib import Path

import pytest

from fivefold.checkpoint.checkpoints import Checkpoints
from fivefold.observability.trackers.state import State
from tests.support.tracked import metrics_of, read_wandb, take_steps
from tests.support.whole_runs import left_in

pytestmark = pytest.mark.trackers


def killed_and_resumed(run_dir: Path, name: str, **environment: str) -> dict[str, dict[int, float]]:
    """Killed after step 6, resumed after step 4, ended after step 8; what metrics.jsonl has."""
    take_steps(run_dir, [name], 1, 6, killed="itself", **environment)
    Checkpoints(run_dir, keep=1).set_aside(4)
    output = take_steps(run_dir, [name], 5, 8, **environment)
    assert f"{name}:" not in output
    expected = metrics_of(run_dir)
    assert sorted(expected["reward/mean"]) == list(range(1, 9))
    assert expected["reward/mean"][5] == 5 / 3 + 5, "written by the resumed run"
    return expected


def test_wandb_has_what_the_run_wrote(tmp_path):
    expected = killed_and_resumed(tmp_path / "r", "wandb")
    metrics, about = read_wandb(tmp_path / "r")
    assert metrics == expected
    assert about["ids"] == {State.read(tmp_path / "r", "wandb").id}
    assert (about["project"], about["name"], about["group"]) == ("sums", "first try", "tries")
    assert about["tags"] == {"small", "cpu"}
    step, table = about["tables"][0]
    row = dict(zip(table["columns"], table["data"][0], strict=True))
    assert (step, row["response"], row["reward"]) == (2, "<b>2</b>\n|two| \u2028", None)
    assert {step for step, _ in about["tables"]} == {2, 4, 6, 8}


def test_wandb_gets_again_what_was_lost_with_its_process(tmp_path):
    """Its offline file is written when it is closed: a machine that goes down takes all of it away."""
    run_dir = tmp_path / "r"
    take_steps(run_dir, ["wandb"], 1, 6, killed="all")
    assert read_wandb(run_dir)[0] == {}
    Checkpoints(run_dir, keep=1).set_aside(4)
    take_steps(run_dir, ["wandb"], 5, 8)
    metrics, about = read_wandb(run_dir)
    assert metrics == metrics_of(run_dir) and len(about["ids"]) == 1


@pytest.mark.parametrize("name", ["wandb", "mlflow", "swanlab", "trackio"])
def test_no_tracker_leaves_files_in_the_directory_for_temporary_ones(tmp_path, temporary, name):
    """Neither where the run ends nor where it is killed; what stays where its processes are killed too goes with the next."""
    where = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db", "TRACKIO_DIR": str(tmp_path / "trackio")}
    take_steps(tmp_path / "r", [name], 1, 4, killed="itself", **where)
    take_steps(tmp_path / "r", [name], 5, 8, **where)
    assert left_in(temporary) == []
    take_steps(tmp_path / "r", [name], 9, 10, killed="all", **where)
    take_steps(tmp_path / "r", [name], 11, 12, **where)
    assert left_in(temporary) == []


def test_mlflow_has_what_the_run_wrote(tmp_path):
    import mlflow

    store = f"sqlite:///{tmp_path}/mlflow.db"
    where = {"MLFLOW_TRACKING_URI": store, "MLFLOW_ARTIFACT_ROOT": str(tmp_path)}
    expected = killed_and_resumed(tmp_path / "r", "mlflow", **where)
    client = mlflow.MlflowClient(store)
    experiment = client.get_experiment_by_name("sums")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("first try", "FINISHED")
    assert run.data.tags.items() >= {"group": "tries", "tag.small": "true", "tag.cpu": "true"}.items()
    assert run.data.params["policy.optimizer.lr"] == "1e-06"
    for name, values in expected.items():
        points = client.get_metric_history(run.info.run_id, name.replace("@", "_at_"))
        # Later points of a step come over earlier ones.
        assert {point.step: point.value for point in sorted(points, key=lambda point: point.timestamp)} == values, name
    tables = {file.path for file in client.list_artifacts(run.info.run_id, "samples")}
    assert tables == {f"samples/step-{step:06d}.json" for step in (2, 4, 6, 8)}
    table = json.loads(Path(client.download_artifacts(run.info.run_id, "samples/step-000002.json")).read_text())
    assert dict(zip(table["columns"], table["data"][0], strict=True))["response"] == "<b>2</b>\n|two| \u2028"


def test_swanlab_has_what_the_run_wrote(tmp_path):
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    expected = killed_and_resumed(tmp_path / "r", "swanlab")
    metrics: dict[str, dict[int, float]] = {}
    ids, tables = set(), set()
    for path in sorted((tmp_path / "r/swanlab").glob("run-*/*.swanlab"), key=lambda path: path.stat().st_mtime):
        ids.add(path.stem.removeprefix("run-"))
        reader = DataStoreReader()
        reader.open(path)
        for data in reader:
            record = Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "scalar":
                metrics.setdefault(record.scalar.key, {})[record.scalar.step] = record.scalar.value.number
            elif record.WhichOneof("record_type") == "media":
                tables.add((record.media.key, record.media.step))
    assert metrics == expected
    assert ids == {State.read(tmp_path / "r", "swanlab").id}
    assert tables == {("samples", step) for step in (2, 4, 6, 8)}


def test_trackio_has_what_the_run_wrote(tmp_path):
    expected = killed_and_resumed(tmp_path / "r", "trackio", TRACKIO_DIR=str(tmp_path / "trackio"))
    metrics: dict[str, dict[int, float]] = {}
    tables = {}
    with sqlite3.connect(tmp_path / "trackio/sums.db") as database:
        rows = list(database.execute("select run_id, run_name, step, metrics from metrics order by id"))
    for _, _, step, content in rows:
        row = json.loads(content)
        if "samples" in row:
            tables[step] = row["samples"]["_value"]
            continue
        for name, value in row.items():
            metrics.setdefault(name, {})[step] = value
    assert metrics == expected
    assert len({run_id for run_id, *_ in rows}) == 1
    assert rows[0][1] == f"first try-{State.read(tmp_path / 'r', 'trackio').id[:6]}"
    assert tables.keys() == {2, 4, 6, 8} and tables[2][0]["response"] == "<b>2</b>\n|two| \u2028"


@pytest.mark.parametrize("name", ["wandb", "mlflow", "swanlab", "trackio"])
def test_a_server_that_is_not_there_does_not_delay_a_run(tmp_path, name):
    """With keys that are none, which stand in no file afterwards."""
    key = "0123456789abcdef0123456789abcdef01234567"
    away = {
        "WANDB_API_KEY": key, "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_MODE": "online",
        "MLFLOW_TRACKING_URI": f"http://someone:{key}@127.0.0.1:9",
        "SWANLAB_API_KEY": key, "SWANLAB_API_HOST": "http://127.0.0.1:9", "SWANLAB_MODE": "online",
        "TRACKIO_SERVER_URL": "http://127.0.0.1:9", "TRACKIO_WRITE_TOKEN": key, "TRACKIO_DIR": str(tmp_path / "trackio"),
    }  # fmt: skip
    begin = time.monotonic()
    output = take_steps(tmp_path / "r", [name], 1, 3, seconds=2, offline=False, **away)
    assert time.monotonic() - begin < 15
    if name != "trackio":
        # Trackio keeps what it cannot send, and sends it later.
        assert f"{name}: 3 of 3 steps were not sent" in output
    assert sorted(metrics_of(tmp_path / "r")["reward/mean"]) == [1, 2, 3]
    files = [path for path in (tmp_path / "r").rglob("*") if path.is_file()]
    assert not [path for path in files if key.encode() in path.read_bytes()] and key not in output
