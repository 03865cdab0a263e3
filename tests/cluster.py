"""Ranks for tests: a pool of processes that outlives one test, so that imports are paid once."""

from __future__ import annotations

import multiprocessing as mp
import os
import socket
import time
import traceback
from multiprocessing.connection import wait
from typing import Any, Callable

from fivefold.layout import ParallelLayout


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _rank_main(pipe: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import warnings

    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            function, layout, rank, port, arguments = pipe.recv()
        except EOFError:
            return
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(layout.world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
        from fivefold.megatron import mesh as megatron_mesh

        device = torch.device("cpu")
        try:
            megatron_mesh.init_process_group(device, timeout_minutes=2)
            mesh = megatron_mesh.build_mesh(layout, device, seed=0, timeout_minutes=2)
            result = function(mesh, *arguments)
            megatron_mesh.destroy()
            pipe.send((True, result))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


class Cluster:
    """Runs `function(mesh, *arguments)` on every rank of a layout; functions live at the top of a test module."""

    def __init__(self) -> None:
        self._workers: list[tuple[Any, Any]] = []

    def run(self, function: Callable[..., Any], layout: str, *arguments: Any, seconds: float = 240) -> list[Any]:
        """The results of all ranks, in order."""
        parsed = ParallelLayout.parse(layout)
        context = mp.get_context("spawn")
        while len(self._workers) < parsed.world_size:
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank_main, args=(theirs,), daemon=True)
            process.start()
            self._workers.append((process, ours))
        port = free_port()
        used = self._workers[: parsed.world_size]
        for rank, (_, pipe) in enumerate(used):
            pipe.send((function, parsed, rank, port, arguments))
        results: dict[int, Any] = {}
        deadline = time.monotonic() + seconds
        while len(results) < len(used):
            pending = {pipe: rank for rank, (_, pipe) in enumerate(used) if rank not in results}
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                raise TimeoutError(f"ranks {sorted(pending.values())} of {layout} gave no result in {seconds} s")
            for pipe in ready:
                good, value = pipe.recv()
                if not good:
                    self.close()
                    raise RuntimeError(f"rank {pending[pipe]} of {layout} failed:\n{value}")
                results[pending[pipe]] = value
        return [results[rank] for rank in range(len(used))]

    def close(self) -> None:
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
            process.join()
        self._workers = []
