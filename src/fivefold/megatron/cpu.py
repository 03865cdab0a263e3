"""A stand-in for the torch.cuda calls that Megatron-Core makes, so that the same code runs on a CPU over Gloo.

`install()` is called only when the device is the CPU; on CUDA nothing is patched.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

_CPU = torch.device("cpu")
_installed = False


class _Null:
    """Stands for a CUDA stream or event: accepts every call and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


@contextlib.contextmanager
def _null_context(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


class _TorchOnCpu:
    """`torch` as one Megatron-Core module sees it: tensor factories take device="cuda" to mean the CPU."""

    _FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange")

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        if name not in self._FACTORIES:
            return value

        def factory(*args: Any, **kwargs: Any) -> Any:
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = _CPU
            return value(*args, **kwargs)

        return factory


def install() -> None:
    """Let Megatron-Core run on the CPU of this process. Doing it twice is harmless."""
    global _installed
    if _installed:
        return
    _installed = True
    cuda: Any = torch.cuda
    cuda.current_device = lambda: _CPU
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats", "set_device", "nvtx"):
        setattr(cuda, name, _Null() if name == "nvtx" else lambda *args, **kwargs: None)
    for name in ("Stream", "Event"):
        setattr(cuda, name, _Null)
    for name in ("current_stream", "default_stream"):
        setattr(cuda, name, lambda *args, **kwargs: _Null())
    cuda.stream = _null_context
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.manual_seed(seed)

    tensor_type = torch.Tensor.type

    def type_as_megatron_reads_it(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # mcore's optimizers compare param.type() with the names of CUDA types.
        name = tensor_type(self, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if isinstance(name, str) and caller.startswith("megatron.core"):
            return name.replace("torch.", "torch.cuda.", 1)
        return name

    tensor: Any = torch.Tensor
    tensor.type = type_as_megatron_reads_it
    tensor.cuda = lambda self, *args, **kwargs: self

    import megatron.core.optimizer.clip_grads
    import megatron.core.optimizer.optimizer
    import megatron.core.pipeline_parallel.schedules
    import megatron.core.tensor_parallel.random as random
    import megatron.core.utils

    for module in (
        megatron.core.optimizer.clip_grads,
        megatron.core.optimizer.optimizer,
        megatron.core.pipeline_parallel.schedules,
        megatron.core.utils,
    ):
        module.torch = _TorchOnCpu()
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
