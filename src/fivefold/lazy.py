"""PyTorch, imported when the first formula computes: keys, rules and tables stand next to formulas and load without it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
    from torch import Tensor as Tensor
else:

    class _Torch:
        """Stands for the module `torch` and imports it on first use."""

        def __getattr__(self, name: str) -> Any:
            return getattr(import_module("torch"), name)

    torch, Tensor = _Torch(), Any
