"""torch profiler traces of the steps and ranks that the configuration names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from fivefold.config.schema import ProfileConfig


@contextmanager
def profiled(config: ProfileConfig, run_dir: Path, rank: int, step: int) -> Iterator[None]:
    """Trace this step, counted from 1, into `run_dir`/trace if the configuration names it and this rank."""
    if step not in config.steps or rank not in config.ranks:
        yield
        return
    with torch.profiler.profile() as profiler:
        yield
    directory = run_dir / "trace"
    directory.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(directory / f"step-{step:06d}-rank-{rank}.json"))
