"""GPU memory that another process may map, by direct CUDA calls.

torch counts the users of its shared tensors in files, which outlive processes that are killed.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from fivefold.errors import RunError

_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * 64),)


@cache
def _runtime() -> ctypes.CDLL:
    """Returns the CUDA runtime that torch has loaded into this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.rpartition(" ")[2]
        if Path(path).name.startswith("libcudart"):
            library = ctypes.CDLL(path)
            library.cudaIpcOpenMemHandle.argtypes = (ctypes.POINTER(ctypes.c_void_p), _Handle, ctypes.c_uint)
            library.cudaGetErrorString.restype = ctypes.c_char_p
            return library
    raise RuntimeError("torch has loaded no CUDA runtime into this process")


def _call(name: str, *arguments: object) -> None:
    code = getattr(_runtime(), name)(*arguments)
    if code:
        raise RunError(f"{name}: {_runtime().cudaGetErrorString(code).decode()}")


class _Memory:
    """Bytes at an address, in the form that torch accepts without a copy."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}


def allocate(size: int, device: torch.device) -> tuple[Tensor, str]:
    """Returns [size] bytes on `device` outside torch's cache, and the handle by which another process maps them."""
    address, handle = ctypes.c_void_p(), _Handle()
    with torch.cuda.device(device):
        _call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(size))
        _call("cudaIpcGetMemHandle", ctypes.byref(handle), address)
        return torch.as_tensor(_Memory(address.value or 0, size), device=device), bytes(handle.reserved).hex()


def free(memory: Tensor) -> None:
    """Frees the memory that `allocate` returned; it must not be read afterwards."""
    with torch.cuda.device(memory.device):
        _call("cudaFree", ctypes.c_void_p(memory.data_ptr()))


def attach(handle: str, size: int, device: torch.device) -> Tensor:
    """Returns [size] bytes that another process has allocated on the same GPU."""
    address, opened = ctypes.c_void_p(), _Handle()
    ctypes.memmove(opened.reserved, bytes.fromhex(handle), 64)
    with torch.cuda.device(device):
        _call("cudaIpcOpenMemHandle", ctypes.byref(address), opened, _LAZY_PEER_ACCESS)
        return torch.as_tensor(_Memory(address.value or 0, size), device=device)


def detach(memory: Tensor) -> None:
    """Unmaps the memory that `attach` returned."""
    with torch.cuda.device(memory.device):
        _call("cudaIpcCloseMemHandle", ctypes.c_void_p(memory.data_ptr()))
