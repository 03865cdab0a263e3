"""Replaces norms, gates and rotations of transformers' layers by fused operations, where they compute the usual formulas.

Each class is tried on random numbers in float32: another family's may have the same name and add 1 to a weight, or turn
neighbors instead of halves. Those stay as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.fsdp.current import current

_ROTATION = "apply_rotary_pos_emb"
_SIZE = 8


def fuse(model: Any) -> None:
    """Let packed sequences take the fused operations; transformers' own stay for a sequence by itself."""
    for module in model.modules():
        kind: Any = type(module)
        activation: Any = type(getattr(module, "act_fn", None))
        if kind.__name__.endswith("RMSNorm") and is_usual_norm(kind):
            module.forward = _norm(module, module.forward)
        elif hasattr(module, "gate_proj") and is_usual_gate(kind, activation):
            module.forward = _gate(module, module.forward)
        names = vars(sys.modules[kind.__module__])
        rotation = names.get(_ROTATION)
        if rotation is not None and not hasattr(rotation, "usual") and is_usual_rotation(rotation):
            names[_ROTATION] = _rotation(rotation)


@cache
def is_usual_norm(kind: Any) -> bool:
    """Return whether a class divides by the root of the mean square and multiplies by its weight."""
    states, weight = _random(3, _SIZE), _random(_SIZE, seed=1)
    try:
        norm = kind(_SIZE, eps=0.1)
        norm.weight.data = weight
        usual = F.rms_norm(states, (_SIZE,), weight, norm.variance_epsilon)
        return _equal(norm(states), usual)
    except (TypeError, AttributeError, RuntimeError, ValueError):
        return False


@cache
def is_usual_gate(kind: Any, activation: Any) -> bool:
    """Return whether a class computes down(silu(gate) · up) of its three products."""
    gate, up = _random(3, _SIZE), _random(3, _SIZE, seed=1)
    products = {"gate_proj": lambda _: gate, "up_proj": lambda _: up, "down_proj": lambda x: x}
    try:
        stand_in = SimpleNamespace(**products, act_fn=activation())
        return _equal(kind.forward(stand_in, gate), F.silu(gate) * up)
    except (TypeError, AttributeError, RuntimeError, ValueError):
        return False


@cache
def is_usual_rotation(rotation: Callable[..., Any]) -> bool:
    """Return whether a function turns the halves of all elements of each head of [1, heads, T, D]."""
    query, key = _random(1, 3, 2, _SIZE), _random(1, 1, 2, _SIZE, seed=1)
    cosines, sines = _random(1, 2, _SIZE, seed=2), _random(1, 2, _SIZE, seed=3)
    try:
        results = rotation(query, key, cosines, sines)
        return all(
            _equal(
                result, x * cosines[:, None] + torch.cat([-x[..., _SIZE // 2 :], x[..., : _SIZE // 2]], -1) * sines[:, None]
            )
            for result, x in zip(results, (query, key), strict=True)
        )
    except (TypeError, AttributeError, RuntimeError, ValueError):
        return False


def _norm(module: Any, original: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def forward(hidden_states: Tensor) -> Tensor:
        weight = module.weight
        if current() is None or weight.dtype != hidden_states.dtype:
            return original(hidden_states)
        return F.rms_norm(hidden_states, (hidden_states.shape[-1],), weight, module.variance_epsilon)

    return forward


def _gate(module: Any, original: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        if current() is None or not x.is_cuda:
            return original(x)
        from fivefold.backend.kernels.swiglu import gated

        down: Tensor = module.down_proj(gated(module.gate_proj(x), module.up_proj(x)))
        return down

    return forward


def _rotation(original: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    def rotation(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *options: Any, **named: Any) -> tuple[Tensor, Tensor]:
        is_usual = not options and not named and len(q) == 1 and cos.shape[-1] == q.shape[-1]
        if current() is None or not q.is_cuda or not is_usual:
            return original(q, k, cos, sin, *options, **named)
        from fivefold.backend.kernels.rotate import rotate

        # Heads come first here and last in memory, where attention takes them from.
        rotated = [rotate(states[0].transpose(0, 1), cos[0], sin[0]).transpose(0, 1)[None] for states in (q, k)]
        return rotated[0], rotated[1]

    rotation.usual = True  # type: ignore[attr-defined]
    return rotation


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _equal(computed: Tensor, usual: Tensor) -> bool:
    return computed.shape == usual.shape and torch.allclose(computed, usual, rtol=1e-5, atol=1e-6)
