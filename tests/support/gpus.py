"""The cluster of tests that need GPUs: its ranks have one each, and a test of more than there are is skipped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fivefold.layout import ParallelLayout
from tests.support.cluster import LONGEST, Call, Cluster
from tests.support.gpu_models import write_classifier, write_model


def count() -> int:
    """GPUs that are there; NVML answers, so that this process takes no memory on them."""
    import torch

    return torch.cuda.device_count()


class GPUs(Cluster):
    """A `Cluster` of GPUs, or of CPUs with tiny models for a look at the tests themselves."""

    @property
    def large(self) -> bool:
        """The sizes are those of GPUs."""
        return self.kind == "cuda"

    def require(self, layout: str) -> None:
        """Skip the test unless there is a GPU for each rank of the layout."""
        world = ParallelLayout.parse(layout).world_size
        if self.large and world > count():
            pytest.skip(f"{layout} needs {world} GPUs: found {count()}")

    def run_all(self, layout: str, calls: Sequence[Call], seconds: float = LONGEST) -> list[list[Any] | Exception]:
        self.require(layout)
        return super().run_all(layout, calls, seconds)

    def make_models(self, root: Path) -> dict[str, Path]:
        """The models of the GPU tests by name, written below `root` by a rank that has a GPU."""
        paths = {name: root / name for name in ("qwen3", "qwen3_moe", "deepseek_v3", "qwen3_0.6b", "critic")}
        calls: list[Call] = [(write_model, name, path) for name, path in paths.items() if name != "critic"]
        for outcome in self.run_all("megatron:d1", [*calls, (write_classifier, "qwen3", paths["critic"])]):
            if isinstance(outcome, Exception):
                raise outcome
        return paths
