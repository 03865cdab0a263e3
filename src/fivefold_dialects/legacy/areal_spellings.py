"""Read how releases of AReaL from 2025 on spelled layouts (`allocation_mode`, dots) and the weights of tokens."""

from __future__ import annotations

import re
from typing import Any

from fivefold_dialects.source import Source

LEVELS = {"token": "token", "sequence": "geometric"}
OUTSIDE = {"mask": "mask", "clamp": "truncate", "truncate": "truncate"}
_UNBOUNDED = 1e9


def allocated(source: Source, ours: str, theirs: str) -> tuple[str, str]:
    """Return the texts (layout of the trainer, layout of the engine), which allocation_mode replaces if it is set."""
    if not (both := source.text("allocation_mode")):
        return ours, theirs
    parts = [part.strip() for part in _components(both)]
    engines = [part for part in parts if re.match(r"(sglang|vllm)\b", part)]
    trainers = [part for part in parts if part not in ("cpu", "eval", *engines)]
    return _with_backend(trainers[0], ours.partition(":")[0]) if trainers else ours, (engines or [theirs])[0]


def with_sizes(source: Source, layout: str) -> str:
    """Return an SFT layout with sizes: in 2025-07 it had none, because torchrun alone set the number of GPUs."""
    if not layout or ":" in dotless(layout):
        return layout
    return f"{layout}:d{(source.whole('cluster.n_nodes') or 1) * (source.whole('cluster.n_gpus_per_node') or 1)}"


def joins(source: Source) -> bool:
    """Return whether allocation_mode joins layouts by `|`: engine and trainer share their GPUs."""
    both = source.text("allocation_mode") or ""
    return "+" not in both and len(_components(both)) > 1


def dotless(text: str) -> str:
    """Return `sglang.d4p1m1`, as written before 2025-11, as `sglang:d4p1t1`; Archon, with Megatron's sizes, is Megatron."""
    text = re.sub(r"^\s*(sglang|vllm|fsdp|megatron)\.", r"\1:", re.sub(r"^\s*archon\b", "megatron", text))
    return re.sub(r"m(\d)", r"t\1", text)


def _components(text: str) -> list[str]:
    """Return the layouts that `+` or `|` join; the `|` between attn and ffn belongs to one layout."""
    return [part for side in text.split("+") for part in ([side] if "ffn:" in side else side.split("|"))]


def _with_backend(text: str, backend: str) -> str:
    """Return a layout with its backend: `d4p2t1` is `megatron:d4p2t1` with stages or experts, otherwise fsdp."""
    if re.match(r"(fsdp|megatron|archon)\b", text):
        return text
    return f"{backend or ('megatron' if re.search('[pe](?!1)[0-9]', text) else 'fsdp')}:{text}"


def behaviour(source: Source) -> dict[str, Any]:
    """Return our keys of the weight of every token that AReaL had until 2026-04-20.

    Until 2026-03 it had no bound by default; then it was masked above 5 or bounded by behave_imp_weight_mode
    (compute_behave_imp_weight of 550656f3d). allocation_mode is a key from before 2026-03-24, mostly without a bound.
    """
    actor = source.under("actor.")
    older, cap = actor.number("behav_imp_weight_cap"), actor.number("behave_imp_weight_cap")
    mode = actor.text("behave_imp_weight_mode")
    if older is None and cap is None and mode is None and not source.text("allocation_mode"):
        return {}
    if mode == "disabled":
        return {}
    level, _, action = (mode or "token_mask").partition("_")
    if level not in LEVELS or action not in OUTSIDE:
        actor.lacks("behave_imp_weight_mode", f"weights by {mode}")
        return {}
    high = older if cap is None else cap
    if high is None:
        high = 5.0 if mode and not actor.has("behave_imp_weight_cap") else _UNBOUNDED
    return {"weight": LEVELS[level], "high": high, "outside": OUTSIDE[action]}
