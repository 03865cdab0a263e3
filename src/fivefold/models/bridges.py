"""Models and layouts that the bridges of other projects convert, as `make test-bridges` compares them. No torch here."""

from __future__ import annotations

from fivefold.layout import ParallelLayout
from fivefold.models.spec import ModelSpec

FAMILIES = {
    "mbridge": ("llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "glm4_moe"),
    "megatron-bridge": ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "glm4_moe"),
}
"""`megatron.bridge_type` -> families whose weights it loads and exports like our own tables, bit by bit."""


def bridge_fault(kind: str, spec: ModelSpec, layout: ParallelLayout, virtual_stages: int) -> str | None:
    """Return what must hold for this model and layout to be converted by the bridge `kind`, or None if it does."""
    if spec.stored:
        # Where only fsdp: layouts compute it, check_layout says why.
        return None if layout.backend == "fsdp" or spec.only_fsdp else _entry_fault(kind, spec, layout, virtual_stages)
    if kind == "native":
        return None
    if spec.family not in FAMILIES[kind]:
        return f"must be native for {spec.family}: {kind} converts {', '.join(FAMILIES[kind])}"
    if virtual_stages > 1:
        return f"must be native for virtual stages: got {kind} with {virtual_stages}"
    if kind == "mbridge" and layout.etp not in (1, layout.tp):
        return f"must be native where experts have a t of their own: mbridge converts 1 or {layout.tp}, got {layout.etp}"
    return None


def _entry_fault(kind: str, spec: ModelSpec, layout: ParallelLayout, virtual_stages: int) -> str | None:
    """Return what must hold for a family without a file here to run on this `megatron:` layout, or None if it does."""
    if kind != "megatron-bridge":
        return (
            f"must be megatron-bridge for {spec.family}, which has no file here: got {kind} for {layout}; or write "
            f"fsdp:d{layout.world_size}, which needs no bridge"
        )
    if virtual_stages > 1:
        return f"converts no virtual stages: got {virtual_stages} for {spec.family}, leave them out of megatron.pipeline"
    return None
