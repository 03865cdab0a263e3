"""Defines names that Megatron-Core 0.16.1 uses although only Transformer Engine defines them."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import megatron.core.tensor_parallel.random as random
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils


def _no_context(*args: Any, **kwargs: Any) -> nullcontext[None]:
    return nullcontext()


def define() -> None:
    """Define the missing names; if Transformer Engine is installed, nothing changes."""
    vars(moe_utils).setdefault("te_general_gemm", None)
    # Recomputation without output treats every call as fp8 and checks whether fp8 is on.
    vars(random).setdefault("FP8GlobalStateManager", SimpleNamespace(is_fp8_enabled=lambda: False))
    vars(random).setdefault("activation_recompute_forward", _no_context)
    vars(random).setdefault("fp8_autocast", _no_context)
    if not isinstance(multi_latent_attention.TELinear, type):
        # A mock stands in place of the class, and Megatron-Core takes it for the real one.
        multi_latent_attention.HAVE_TE = False
