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
        return lambda *args, **kwargs: _Null()


@contextlib.contextmanager
def _null_context(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


class _TorchOnCpu:
    """`torch` as one Megatron-Core module sees it: factories read device="cuda" as the CPU and pin no memory."""

    _FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange")

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        if name not in self._FACTORIES:
            return value

        def factory(*args: Any, **kwargs: Any) -> Any:
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = _CPU
            kwargs.pop("pin_memory", None)
            return value(*args, **kwargs)

        return factory


def _splits_as_numbers(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return the sizes of an all-to-all as numbers: Megatron-Core converts them only when it moves them to the host."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _gather_uneven(original: Any) -> Any:
    """Wrap an all-gather for Gloo, which supports pieces of one size only: pad them to the longest."""

    def gather(tensor: torch.Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return original(tensor, group, output_split_sizes, use_global_buffer)
        longest = max(output_split_sizes)
        padded = tensor.new_zeros(longest, *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        together = tensor.new_empty(group.size() * longest, *tensor.shape[1:])
        torch.distributed.all_gather_into_tensor(together, padded, group=group)
        pieces = together.split(longest)
        return torch.cat([piece[:size] for piece, size in zip(pieces, output_split_sizes, strict=True)])

    return gather


def _reduce_scatter_uneven(original: Any) -> Any:
    """Wrap a reduce-scatter for Gloo, which supports pieces of one size only: sum everything and take this rank's piece."""

    def reduce_scatter(
        tensor: torch.Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return original(tensor, group, input_split_sizes, use_global_buffer)
        summed = tensor.contiguous().clone()
        torch.distributed.all_reduce(summed, group=group)
        return summed.split(list(input_split_sizes))[group.rank()].clone()

    return reduce_scatter


def install() -> None:
    """Let Megatron-Core run on the CPU of this process. Calling it twice is harmless."""
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

    import megatron.core.models.common.embeddings.rope_utils as rope_utils
    import megatron.core.optimizer.clip_grads
    import megatron.core.optimizer.grad_scaler
    import megatron.core.optimizer.optimizer
    import megatron.core.pipeline_parallel.schedules
    import megatron.core.tensor_parallel.mappings as mappings
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher
    import megatron.core.utils

    for module in (
        megatron.core.optimizer.clip_grads,
        megatron.core.optimizer.grad_scaler,
        megatron.core.optimizer.optimizer,
        megatron.core.pipeline_parallel.schedules,
        megatron.core.utils,
        rope_utils,
    ):
        module.torch = _TorchOnCpu()
    mappings._gather_along_first_dim = _gather_uneven(mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = _reduce_scatter_uneven(mappings._reduce_scatter_along_first_dim)
    token_dispatcher.maybe_move_tensor_to_cpu = _splits_as_numbers
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
