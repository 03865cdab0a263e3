"""State that is offloaded between the stages of a step: tensors -> pinned host memory and back, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from fivefold.backend.host_memory import HostMemory, aligned
from fivefold.config.learners import OffloadConfig
from fivefold.distributed.threads import in_thread


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
        self._memory: list[tuple[int, Future[HostMemory]]] = []
        """Parts of the host memory, each with its size."""

    @property
    def is_away(self) -> bool:
        return bool(self._away)

    @property
    def capacity(self) -> int:
        """Return the bytes of host memory that are allocated, or being allocated."""
        return sum(size for size, _ in self._memory)

    def prepare(self, tensors: Iterable[Tensor], missing: Iterable[Tensor]) -> None:
        """Start to allocate in a thread what the host memory lacks for `tensors` and for later ones like `missing`."""
        held = self._away or _storages(tensors)
        sizes = [*(size for _, size in held), *(tensor.nbytes for tensor in missing)]
        if self._keep and (lacking := sum(map(aligned, sizes)) - self.capacity) > 0:
            self._allocate(lacking)

    def offload(self, tensors: Iterable[Tensor]) -> int:
        """Move the storages of `tensors` to the host; return the bytes that left the device."""
        assert not self._away, "already offloaded"
        self._away = _storages(tensors)
        if self._keep:
            if self._places() is None:
                # Copies out of the previous host memory must end before it is freed.
                if self._stream is not None:
                    self._stream.synchronize()
                self._memory = []
                self._allocate(sum(aligned(size) for _, size in self._away))
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

    def _allocate(self, size: int) -> None:
        self._memory.append((size, in_thread(lambda: HostMemory(size, self._device), "host memory")))

    def _places(self) -> list[tuple[int, int]] | None:
        """Return the part of the host memory and the offset in it of each storage; None if they do not fit.

        The place of a storage does not depend on parts that are added later.
        """
        used, places = [0] * len(self._memory), []
        for _, size in self._away:
            fitting = (part for part, (most, _) in enumerate(self._memory) if used[part] + aligned(size) <= most)
            if (part := next(fitting, None)) is None:
                return None
            places.append((part, used[part]))
            used[part] += aligned(size)
        return places

    def _pieces(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Yield (host, device) views of the same bytes, piece by piece."""
        places = self._places()
        assert places is not None
        for (storage, size), (part, begin) in zip(self._away, places, strict=True):
            on_host = self._memory[part][1].result().bytes_B[begin : begin + size]
            on_device = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
            yield from zip(on_host.split(self._piece), on_device.split(self._piece), strict=True)

    def _side_by_side(self) -> Any:
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def _join(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


def _storages(tensors: Iterable[Tensor]) -> list[tuple[torch.UntypedStorage, int]]:
    """Return the storages of these tensors, each once, with their bytes."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors if tensor.numel()}
    return [(storage, storage.nbytes()) for storage in storages.values()]


class Offload:
    """Offloads the parts of one model that `policy.offload` names."""

    def __init__(
        self,
        settings: OffloadConfig,
        device: torch.device,
        tensors: Callable[[str], list[Tensor]],
        later_moments: Callable[[], list[Tensor]],
    ) -> None:
        """`tensors` returns the tensors of a part: parameters, optimizer, gradients. `later_moments` returns tensors without
        data, of the sizes of the moments that the optimizer has not created yet."""
        self._settings, self._tensors, self._later_moments = settings, tensors, later_moments
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

    def prepare(self) -> None:
        """Start to allocate in threads the host memory that the next offload lacks, with that of moments to come."""
        for name, part in self._parts.items():
            if getattr(self._settings, name):
                part.prepare(self._tensors(name), self._later_moments() if name == "optimizer" else [])

    def offload(self, names: Sequence[str]) -> dict[str, int]:
        """Offload these parts (see `leaving`); return the bytes that left the device by part."""
        return {name: self._parts[name].offload(tensors) for name in names if (tensors := self._tensors(name))}

    def onload(self, *names: str) -> None:
        """Bring these parts back to the device, or all parts if none is named."""
        for name in names or self._parts:
            self._parts[name].onload()
