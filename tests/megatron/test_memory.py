"""What a step leaves on the device when it is done, counted without Python's collector of cycles."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from tests.support.gpu_models import build, random_batch
from tests.support.shards import shard_of_replica
from tests.support.tiny_models import make_model
from tests.support.two_steps import OBJECTIVE


def left_by_steps(mesh, directory: Path, pipeline: dict) -> tuple[list[int], list[tuple[int, int]]]:
    """Micro-batches that are there when each loss is computed; (micro-batches, tensors) after a pass and three steps."""
    from fivefold.backend.micro_batches import MicroBatch
    from fivefold.config.learners import MegatronConfig

    model = build(mesh, directory, "float32", 64, megatron=MegatronConfig(pipeline=pipeline))
    batch = random_batch(12, 24, model.spec.vocab).select(shard_of_replica(mesh.ranks, range(12)))

    def there(*kinds: type) -> int:
        return sum(isinstance(thing, kinds) for thing in gc.get_objects())

    during, behind = [], []

    def loss(*given):
        during.append(there(MicroBatch))
        return OBJECTIVE.loss(*given)

    gc.collect()
    gc.disable()
    try:
        for work in (model.forward, *3 * [lambda mine: model.train_step(mine, loss)]):
            work(batch)
            behind.append((there(MicroBatch), there(torch.Tensor)))
    finally:
        gc.enable()
    return during, behind


@pytest.mark.parametrize(
    ("layout", "pipeline", "most"), [("d1", {}, 1), ("p2", {}, 2), ("p2", {"virtual_pipeline_model_parallel_size": 2}, 4)]
)
def test_micro_batches_are_freed_when_they_are_done_and_not_by_a_collection(cluster, tmp_path, layout, pipeline, most):
    """No more are there than a stage has in flight: here of six."""
    make_model("qwen3", tmp_path)
    for during, behind in cluster.run(left_by_steps, f"megatron:{layout}", tmp_path, pipeline):
        assert max(during, default=0) <= most, during
        assert [micro for micro, _ in behind] == [0, 0, 0, 0]
        # The first step makes the optimizer's state.
        assert behind[2][1] == behind[3][1], behind
