"""MLflow, in the store that MLFLOW_TRACKING_URI names. A step that a resumed run repeats is a later point."""

from __future__ import annotations

import os
import posixpath
import re
from typing import Any

import mlflow
from mlflow.entities import Metric, Param
from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH, MAX_PARAMS_TAGS_PER_BATCH

from fivefold.observability.trackers.tracker import TrackedRun, flat


class MlflowTracker:
    settles = 0.0

    def start(self, run: TrackedRun) -> tuple[str, str | None]:
        # MLflow's client retries for minutes before it reports that the server is not reachable; we retry ourselves.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        self._client = mlflow.MlflowClient()
        if run.is_resumed:
            self._id = self._client.get_run(run.id).info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return self._id, None
        experiment = self._client.get_experiment_by_name(run.project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(run.project)
        labels = {f"tag.{tag}": "true" for tag in run.tags} | ({"group": run.group} if run.group else {})
        self._id = self._client.create_run(number, run_name=run.name, tags=labels).info.run_id
        params = [Param(_name(key), str(value)[:MAX_PARAM_VAL_LENGTH]) for key, value in flat(run.config).items()]
        for first in range(0, len(params), MAX_PARAMS_TAGS_PER_BATCH):
            self._client.log_batch(self._id, params=params[first : first + MAX_PARAMS_TAGS_PER_BATCH])
        return self._id, None

    def log(self, step: int, wall: float, metrics: dict[str, float]) -> None:
        moment = int(wall * 1000)
        self._client.log_batch(self._id, [Metric(_name(name), value, moment, step) for name, value in metrics.items()])

    def samples(self, step: int, wall: float, columns: list[str], rows: list[list[Any]]) -> None:
        table = {name: [row[place] for row in rows] for place, name in enumerate(columns)}
        self._client.log_table(self._id, table, f"samples/step-{step:06d}.json")

    def finish(self, is_good: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if is_good else "FAILED")


def _name(name: str) -> str:
    """Return a name with the characters that MLflow allows, written like a path."""
    return posixpath.normpath(re.sub(r"[^\w\-./ :]", "_", name.replace("@", "_at_"), flags=re.ASCII)).lstrip("/.")


def make() -> MlflowTracker:
    return MlflowTracker()
