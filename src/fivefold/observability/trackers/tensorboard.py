"""TensorBoard: event files under RUN/tensorboard or trainer.tensorboard_dir.

If a resumed run repeats a step, TensorBoard hides the earlier point."""

from __future__ import annotations

from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from fivefold.observability.trackers.tracker import TrackedRun


class TensorboardTracker:
    settles = 0.0

    def start(self, run: TrackedRun) -> tuple[str, str | None]:
        chosen = run.config.get("trainer", {}).get("tensorboard_dir")
        self._writer = EventFileWriter(str(chosen or run.run_dir / "tensorboard"))
        self._writer.add_event(Event(step=run.first_step, session_log=SessionLog(status=SessionLog.START)))
        return run.id, None

    def log(self, step: int, wall: float, metrics: dict[str, float]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(step, wall, values)

    def samples(self, step: int, wall: float, columns: list[str], rows: list[list[Any]]) -> None:
        texts = ["\n".join(_row(columns, row)).encode() for row in rows]
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=len(texts))])
        tensor = TensorProto(dtype=DT_STRING, string_val=texts, tensor_shape=shape)
        text = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        self._write(step, wall, [Summary.Value(tag="samples", metadata=text, tensor=tensor)])

    def _write(self, step: int, wall: float, values: list[Any]) -> None:
        self._writer.add_event(Event(step=step, wall_time=wall, summary=Summary(value=values)))
        self._writer.flush()

    def finish(self, is_good: bool) -> None:
        self._writer.close()


def _row(columns: list[str], row: list[Any]) -> list[str]:
    """Return a row as Markdown, in which indented lines are shown verbatim."""
    lines = []
    for name, value in zip(columns, row, strict=True):
        text = "" if value is None else str(value)
        lines.append(f"**{name}**\n\n" + "\n".join(f"    {line}" for line in text.split("\n")) + "\n")
    return lines


def make() -> TensorboardTracker:
    return TensorboardTracker()
