"""State that is offloaded between the stages of a step: tensors -> pinned host memory and back, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from fivefold.backend.host_memory import HostMemory, size_of
from fivefold.config.learners import OffloadConfig


class HostCopy:
    """Tensors whose device storage can be freed while their bytes are kept on the host.

    Views stay valid: the storage shrinks to nothing and grows again in place. Copies run in pieces on their own stream, and
    the host does not wait for them. The device's main stream does, so that no byte is reused too early.
    """

    def __init__(self, device: torch.device, bucket_mb: int, keep: bool = True) -> None:
        """Set up copies in pieces of `bucket_mb` MiB; with `keep=False` the content is dropped and comes back undefined."""
        self._device, self._piece, self._keep = device, bucket_mb * 2**20, keep
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._away: list[tuple[torch.UntypedStorage, int]] = []
        self._memory, self._size = HostMemory(0, device), 0

    @property
    def is_away(self) -> bool:
        return bool(self._away)

    def offload(self, tensors: Iterable[Tensor]) -> int:
        """Move the storages of `tensors` to the host; return the bytes that left the device."""
        assert not self._away, "already offloaded"
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors if tensor.numel()}
        self._away = [(storage, storage.nbytes()) for storage in storages.values()]
        if self._keep:
            size = size_of(self._on_device())
            if size != self._size:
                # Copies out of the previous host memory must end before it is freed.
                if self._stream is not None:
                    self._stream.synchronize()
                self._memory = HostMemory(0, self._device)
                self._memory, self._size = HostMemory(size, self._device), size
            with self._side_by_side():
                for on_host, on_device in self._pieces():
                    on_host.copy_(on_device, non_blocking=True)
            self._join()
        for storage, _ in self._away:
            storage.resize_(0)
        return sum(size for _, size in self._away)

    def onload(self) -> None:
        """Bring everything back to the device; does nothing if nothing is offloaded."""
        for storage, size in self._away:
            storage.resize_(size)
        if self._keep and self._away:
            with self._side_by_side():
                for on_host, on_device in self._pieces():
                    on_device.copy_(on_host, non_blocking=True)
            self._join()
        self._away = []

    def _on_device(self) -> list[Tensor]:
        """Return the bytes of each storage on the device."""
        return [torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage) for storage, _ in self._away]

    def _pieces(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Yield (host, device) views of the same bytes, piece by piece."""
        there = self._on_device()
        for on_host, on_device in zip(self._memory.places(there), there, strict=True):
            yield from zip(on_host.split(self._piece), on_device.split(self._piece), strict=True)

    def _side_by_side(self) -> Any:
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def _join(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


class Offload:
    """Offloads the parts of one model that `policy.offload` names."""

    def __init__(self, settings: OffloadConfig, device: torch.device, tensors: Callable[[str], list[Tensor]]) -> None:
        """`tensors` returns the tensors of a part: parameters, optimizer, gradients."""
        self._settings, self._tensors = settings, tensors
        self._parts = {
            "parameters": HostCopy(device, settings.bucket_mb),
            "optimizer": HostCopy(device, settings.bucket_mb),
            # Each update begins by setting gradients to zero: there is nothing to keep.
            "gradients": HostCopy(device, settings.bucket_mb, keep=False),
        }

    def leaving(self, parameters: bool = True) -> list[str]:
        """Return the configured parts that are still on the device; `parameters=False` excludes the parameters."""
        named = [name for name, part in self._parts.items() if getattr(self._settings, name) and not part.is_away]
        return [name for name in named if parameters or name != "parameters"]

    def offload(self, names: Sequence[str]) -> dict[str, int]:
        """Offload these parts (see `leaving`); return the bytes that left the device by part."""
        return {name: self._parts[name].offload(tensors) for name in names if (tensors := self._tensors(name))}

    def onload(self, *names: str) -> None:
        """Bring these parts back to the device, or all parts if none is named."""
        for name in names or self._parts:
            self._parts[name].onload()
