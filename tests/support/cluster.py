"""Ranks for tests, forked from a process that paid for the imports: nothing leaks from one start of ranks into another."""

from __future__ import annotations

import gc
import os
import select
import socket
import time
import traceback
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fivefold.distributed.ports import free_port
from fivefold.layout import ParallelLayout
from tests.support.zygote import THREADS, close_all_but, end_all, fork, receive, send, show_gpus, zygote

if TYPE_CHECKING:
    import torch

Call = tuple[Any, ...]
"""A function at the top of a test module, and its arguments after the mesh."""
LONGEST = 600.0
"""Seconds without an answer after which ranks are taken to hang: many times what the longest call needs on a busy machine."""


def _device(kind: str, rank: int) -> torch.device:
    """The CPU, or this rank's own GPU."""
    import torch

    if kind == "cpu":
        return torch.device("cpu")
    show_gpus()
    # As the launcher sets it: Megatron-Core overlaps communication with computation by the order of kernels on one queue.
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    torch.cuda.set_device(rank)
    # Some installations turn it on, and float32 would have 10 bits.
    torch.backends.cuda.matmul.allow_tf32 = False
    return torch.device("cuda", rank)


def _rank(kind: str, calls: Sequence[Call], layout: ParallelLayout, rank: int, port: int, answers: socket.socket) -> None:
    try:
        import torch
        from torch.utils._pytree import tree_map_only

        from fivefold.distributed.ranks import Ranks
        from fivefold.fsdp import mesh as fsdp_mesh
        from fivefold.megatron import mesh as megatron_mesh

        # On GPUs a rank has its cores, as the launcher gives them; CPU tests run next to each other.
        torch.set_num_threads(THREADS if kind == "cpu" else max(1, (os.cpu_count() or 1) // layout.world_size))
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(layout.world_size))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        device = _device(kind, rank)
        megatron_mesh.init_process_group(device, timeout_minutes=LONGEST / 60)
        place = Ranks(layout, LONGEST / 60)
        mesh: Any
        if layout.backend == "fsdp":
            mesh = fsdp_mesh.build_mesh(place, device)
        else:
            mesh = megatron_mesh.build_mesh(place, device, seed=0, timeout_minutes=LONGEST / 60)
        for function, *arguments in calls:
            # The caller may not touch the GPU.
            send(answers, (True, tree_map_only(torch.Tensor, torch.Tensor.cpu, function(mesh, *arguments))))
            if kind == "cuda":
                # A model and its optimizer refer to each other: without this the next call would find the memory taken.
                gc.collect()
                torch.cuda.empty_cache()
    except BaseException:
        send(answers, (False, traceback.format_exc()))
    # A rank that ends takes away what others may still be reading: all of them wait until they are ended together.
    answers.recv(1)


def _lead(kind: str, calls: Sequence[Call], layout: ParallelLayout, seconds: float, files: list[int]) -> None:
    """Start the ranks of a layout and send, call by call, all ranks' results or (kind of error, text), which is the last."""
    result = socket.socket(fileno=files[0])
    port = free_port()
    pids: list[int] = []
    ranks: list[socket.socket] = []
    for rank in range(layout.world_size):
        ours, theirs = socket.socketpair()

        def body(rank: int = rank, theirs: socket.socket = theirs) -> None:
            close_all_but([theirs.fileno()])
            _rank(kind, calls, layout, rank, port, theirs)

        pids.append(fork(body))
        theirs.close()
        ranks.append(ours)
    answers: list[list[Any]] = [[] for _ in ranks]
    failure: tuple[type[Exception], str] | None = None
    passed_on = 0
    deadline = time.monotonic() + seconds
    while passed_on < len(calls) and failure is None:
        waiting = [pipe for pipe, got in zip(ranks, answers, strict=True) if len(got) < len(calls)]
        ready, _, _ = select.select(waiting, [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            late = [rank for rank, got in enumerate(answers) if len(got) == passed_on]
            failure = (TimeoutError, f"ranks {late} of {layout} gave no result in {seconds} s")
        for pipe in ready:
            rank = ranks.index(pipe)
            try:
                (good, value), _ = receive(pipe)
            except (EOFError, ConnectionResetError):
                good, value = False, "it ended without a result"
            if good:
                answers[rank].append(value)
            elif failure is None:
                failure = (RuntimeError, f"rank {rank} of {layout} failed:\n{value}")
        while passed_on < len(calls) and all(len(got) > passed_on for got in answers):
            send(result, [got[passed_on] for got in answers])
            passed_on += 1
            deadline = time.monotonic() + seconds
    for pid in pids:
        end_all(pid)
        os.waitpid(pid, 0)
    if failure is not None:
        send(result, failure)


class Cluster:
    """Runs `function(mesh, *arguments)` on every rank of a layout; functions live at the top of a test module.

    What they return is sent to this process: tensors on the CPU.
    """

    def __init__(self, kind: str = "cpu") -> None:
        self.kind = kind
        """Of the ranks' devices, `cpu` or `cuda`; rank n takes the n-th GPU."""

    def run(self, function: Callable[..., Any], layout: str, *arguments: Any, seconds: float = LONGEST) -> list[Any]:
        """The results of all ranks, in order."""
        (outcome,) = self.run_all(layout, [(function, *arguments)], seconds)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def run_all(self, layout: str, calls: Sequence[Call], seconds: float = LONGEST) -> list[list[Any] | Exception]:
        """The results of several calls, one after another on the same ranks, in place of each what ended it.

        A call that fails ends its ranks, and those after it get new ones.
        """
        results: list[list[Any] | Exception] = []
        while len(results) < len(calls):
            results += self._start(calls[len(results) :], ParallelLayout.parse(layout), seconds)
        return results

    def _start(self, calls: Sequence[Call], layout: ParallelLayout, seconds: float) -> list[list[Any] | Exception]:
        """The results up to the first failure."""
        for last in (False, False, False, False, True):
            ours, theirs = socket.socketpair()
            with ours:
                pid = zygote.fork(_lead, (self.kind, calls, layout, seconds), [theirs.fileno()])
                theirs.close()
                results: list[list[Any] | Exception] = []
                while len(results) < len(calls):
                    try:
                        answer, _ = receive(ours)
                    except EOFError:
                        answer = (RuntimeError, f"what started the ranks of {layout} ended without a result")
                    results.append(answer[0](answer[1]) if isinstance(answer, tuple) else answer)
                    if isinstance(answer, tuple):
                        break
            zygote.reap(pid, seconds)
            # Another process may take the port between the moment it was found free and the moment it is used.
            if last or not (isinstance(results[-1], Exception) and "EADDRINUSE" in str(results[-1])):
                break
        return results


class Together:
    """Calls of many tests by name, `(layout, function, *arguments)` each: all of a layout run in one start of its ranks.

    They run when the first of them is asked for; one that fails raises where it is asked for and spares the others.
    """

    def __init__(self, cluster: Cluster, calls: Mapping[Hashable, Call]) -> None:
        self._cluster, self._calls = cluster, calls
        self._results: dict[Hashable, list[Any] | Exception] = {}

    def __getitem__(self, name: Hashable) -> list[Any]:
        """The results of all ranks, in order."""
        if name not in self._results:
            layout = self._calls[name][0]
            names = [other for other, call in self._calls.items() if call[0] == layout]
            results = self._cluster.run_all(layout, [self._calls[other][1:] for other in names])
            self._results |= zip(names, results, strict=True)
        result = self._results[name]
        if isinstance(result, Exception):
            raise result
        return result
