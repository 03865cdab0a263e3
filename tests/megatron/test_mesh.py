"""Megatron-Core's globals: those of the layout whose model is working, and none outside."""

from __future__ import annotations

import time

import pytest

from fivefold.layout import ParallelLayout
from tests.support.cluster import LONGEST


def sizes() -> tuple[int, int, int]:
    from megatron.core import parallel_state as state

    return (
        state.get_tensor_model_parallel_world_size(),
        state.get_pipeline_model_parallel_world_size(),
        state.get_data_parallel_world_size(),
    )


def one_after_another(mesh):
    from megatron.core import parallel_state as state
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    from fivefold.backends import Meshes

    meshes = Meshes(mesh.ranks, mesh.device, 0, 10)
    (_, policy_mesh), (_, other) = meshes.of(mesh.layout), meshes.of(ParallelLayout.parse("megatron:p2t2"))
    assert meshes.of(ParallelLayout.parse("megatron[critic]:t2p2"))[1] is other is not policy_mesh
    assert meshes.of(ParallelLayout.parse("megatron[policy]:d4"))[1] is policy_mesh
    with pytest.raises(AssertionError, match="not initialized"):
        sizes()
    with policy_mesh.active():
        buffer, draws = state.get_global_memory_buffer(), get_cuda_rng_tracker()
        state.set_virtual_pipeline_model_parallel_world_size(7)
        assert sizes() == (1, 1, 4)
        with other.active(), other.active():
            assert sizes() == (2, 2, 1)
            assert state.get_virtual_pipeline_model_parallel_world_size() is None
            assert state.get_global_memory_buffer() is buffer and get_cuda_rng_tracker() is not draws
            assert other.tp is state.get_tensor_model_parallel_group()
        assert sizes() == (1, 1, 4)
    with pytest.raises(KeyError), other.active():
        raise KeyError
    with pytest.raises(AssertionError, match="not initialized"):
        sizes()
    with policy_mesh.active():
        assert state.get_virtual_pipeline_model_parallel_world_size() == 7, "what a model sets is there when it works again"
    for _ in other.iterate(range(3)):
        with pytest.raises(AssertionError, match="not initialized"):
            sizes()
    assert list(other.iterate(sizes() for _ in range(2))) == [(2, 2, 1)] * 2
    begin = time.process_time()
    for _ in range(1000):
        with policy_mesh.active():
            pass
    return time.process_time() - begin


def test_each_layout_s_groups_are_there_while_it_is_active_and_no_others(cluster):
    # 40 microseconds of its own time were seen; what else the machine does is not counted.
    assert min(cluster.run(one_after_another, "megatron:d4")) < 0.2


def timeouts(mesh) -> set[float]:
    """Minutes, of all process groups that there are once every kind was made: of the world, of ranks, of two layouts."""
    from torch.distributed import distributed_c10d

    from fivefold.backends import Meshes

    Meshes(mesh.ranks, mesh.device, 0, 7).of(ParallelLayout.parse("megatron:p2t2"))
    mesh.ranks.whole_group()
    mesh.ranks.consecutive(2)
    groups = list(distributed_c10d._world.pg_map)
    assert len(groups) > 20
    return {group._get_backend(mesh.device).options._timeout.total_seconds() / 60 for group in groups}


def test_every_group_waits_as_long_as_the_run_says_and_none_as_long_as_libraries_do(cluster):
    assert cluster.run(timeouts, "megatron:t2e2d2") == [{7, LONGEST / 60}] * 4
