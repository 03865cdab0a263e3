"""Checks of tensors that are read from files."""

from __future__ import annotations

import torch
from torch import Tensor

from fivefold.errors import UserError


@torch.no_grad()
def check_finite(name: str, values: Tensor, where: str) -> None:
    """Raise ValueError if a tensor that was read has a number that is not finite."""
    if not values.is_floating_point() or not values.numel():
        return
    # aminmax finds NaN and infinities in two passes without a copy of the tensor.
    if all(bool(torch.isfinite(end)) for end in torch.aminmax(values)):
        return
    nan, infinite = int(values.isnan().sum()), int(values.isinf().sum())
    raise UserError(
        f"{where}: every weight must be a finite number: {name} holds {nan} NaN and {infinite} infinite ones of "
        f"{values.numel()}; take the model from before it diverged, or download it again"
    )
