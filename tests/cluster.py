"""Ranks for tests: one process pays for the imports and forks the ranks of each run, so nothing leaks between runs."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import pickle
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import psutil

from fivefold.distributed.ports import free_port
from fivefold.layout import ParallelLayout


def _send(pipe: Connection, value: Any) -> None:
    # Plain pickle: a Connection's own would hand tensors over in shared memory of a process that is about to end.
    pipe.send_bytes(pickle.dumps(value))


def _receive(pipe: Connection) -> Any:
    return pickle.loads(pipe.recv_bytes())


def _end(pid: int) -> None:
    """Kill a process and what it started: saving a checkpoint leaves helpers behind that would stay for ever."""
    process = psutil.Process(pid)
    for one in [*process.children(recursive=True), process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()


def _rank(function: Callable[..., Any], layout: ParallelLayout, rank: int, port: int, arguments: Any) -> Any:
    import torch

    from fivefold.distributed.ranks import Ranks
    from fivefold.megatron import mesh as megatron_mesh

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(layout.world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    device = torch.device("cpu")
    megatron_mesh.init_process_group(device, timeout_minutes=2)
    mesh = megatron_mesh.build_mesh(Ranks(layout), device, seed=0, timeout_minutes=2)
    result = function(mesh, *arguments)
    megatron_mesh.destroy()
    return result


def _zygote(commands: Connection) -> None:
    import warnings

    warnings.simplefilter("ignore")
    import torch
    import transformers  # noqa: F401

    import fivefold.megatron.model  # noqa: F401

    torch.set_num_threads(1)
    while True:
        try:
            function, layout, seconds, arguments = _receive(commands)
        except EOFError:
            return
        port = free_port()
        children: dict[Connection, tuple[int, int]] = {}
        for rank in range(layout.world_size):
            ours, theirs = mp.Pipe(duplex=False)
            pid = os.fork()
            if pid == 0:
                try:
                    _send(theirs, (True, _rank(function, layout, rank, port, arguments)))
                except BaseException:
                    _send(theirs, (False, traceback.format_exc()))
                theirs.close()
                _end(os.getpid())
            theirs.close()
            children[ours] = (rank, pid)
        results: dict[int, Any] = {}
        failure: tuple[type[Exception], str] | None = None
        deadline = time.monotonic() + seconds
        while len(results) < layout.world_size and failure is None:
            pending = [pipe for pipe, (rank, _) in children.items() if rank not in results]
            ready = wait(pending, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                late = [rank for rank, _ in children.values() if rank not in results]
                failure = (TimeoutError, f"ranks {late} of {layout} gave no result in {seconds} s")
            for pipe in ready:
                rank = children[pipe][0]
                try:
                    good, value = _receive(pipe)
                except EOFError:
                    good, value = False, "it ended without a result"
                if good:
                    results[rank] = value
                elif failure is None:
                    failure = (RuntimeError, f"rank {rank} of {layout} failed:\n{value}")
        for pipe, (_, pid) in children.items():
            _end(pid)
            os.waitpid(pid, 0)
            pipe.close()
        _send(commands, failure if failure else [results[rank] for rank in range(layout.world_size)])


class Cluster:
    """Runs `function(mesh, *arguments)` on every rank of a layout; functions live at the top of a test module."""

    def __init__(self) -> None:
        self._commands: Connection | None = None
        self._process: Any = None

    def run(self, function: Callable[..., Any], layout: str, *arguments: Any, seconds: float = 240) -> list[Any]:
        """The results of all ranks, in order."""
        if self._commands is None:
            context = mp.get_context("spawn")
            self._commands, theirs = context.Pipe()
            self._process = context.Process(target=_zygote, args=(theirs,))
            self._process.start()
            theirs.close()
        for _ in range(5):
            _send(self._commands, (function, ParallelLayout.parse(layout), seconds, arguments))
            answer = _receive(self._commands)
            # Another process may take the port between the moment it was found free and the moment it is used.
            if not (isinstance(answer, tuple) and "EADDRINUSE" in answer[1]):
                break
        if isinstance(answer, tuple):
            raise answer[0](answer[1])
        return answer

    def close(self) -> None:
        if self._commands is not None:
            self._commands.close()
            self._process.join()
            self._commands = None
