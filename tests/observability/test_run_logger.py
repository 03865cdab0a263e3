"""What a run shows of itself."""

from __future__ import annotations

from fivefold.observability.run_logger import RunLogger


def test_tensorboard_shows_one_timeline_after_a_run_began_again_from_an_older_step(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for value, steps in ((1.0, range(1, 6)), (2.0, range(3, 5))):
        logger = RunLogger(tmp_path, ["tensorboard"], is_main=True, steps=5)
        for step in steps:
            logger.record({"policy/loss": value})
            logger.end_step(step)
        logger.close()
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(each.step, each.value) for each in board.Scalars("policy/loss")] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]
