"""FlashAttention 4 over packed sequences, from the package flash-attn-4, which pip installs without compilation.

It is twice as fast on an H200 as the FlashAttention 2 that comes with PyTorch (`benchmarks/results/`).
"""

from __future__ import annotations

import warnings
from functools import cache

import torch
from torch import Tensor

from fivefold.config.gpus import FLASH_CAPABILITY
from fivefold.config.packages import FLASH, can_import
from fivefold.distributed.compiler_caches import kept_flash_attention

# The compiler of its kernels says so of an argument that they do not have, with a name of a thousand letters.
warnings.filterwarnings("ignore", message=r"Argument \w+ \(position \d+\) cannot be converted to a JitArgument")


@cache
def _available(device: torch.device) -> bool:
    """Whether flash-attn-4 can be imported and supports this GPU."""
    major, minor = torch.cuda.get_device_capability(device)
    if major + minor / 10 < FLASH_CAPABILITY:
        return False
    with kept_flash_attention(f"sm{major}{minor}"):
        return can_import(FLASH)


def takes(query: Tensor, value: Tensor) -> bool:
    """Whether flash-attn-4 has a forward and a backward for such tensors."""
    widths = (query.shape[2], value.shape[2])
    half = query.dtype in (torch.bfloat16, torch.float16)
    shaped = (widths[0] == widths[1] and widths[0] in (64, 96, 128)) or widths == (192, 128)
    return query.is_cuda and half and shaped and _available(query.device)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: tuple[Tensor, Tensor],
    most: tuple[int, int],
    window: int | None,
    scale: float,
) -> Tensor:
    """[T, H, D] causal attention of each piece of queries to its keys; the queries are the last of the keys.

    `ends`: [B + 1] int32 cumulative lengths of the pieces of queries and of keys; `window`: number of keys before its own
    that a token sees.
    """
    from flash_attn.cute import flash_attn_varlen_func

    result = flash_attn_varlen_func(
        query,
        key,
        value,
        cu_seqlens_q=ends[0],
        cu_seqlens_k=ends[1],
        max_seqlen_q=most[0],
        max_seqlen_k=most[1],
        softmax_scale=scale,
        causal=window is None,
        window_size=(None, None) if window is None else (window, 0),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    output: Tensor = result[0] if isinstance(result, tuple) else result
    return output
