"""What `fsdp:` layouts do not support, as sentences. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import reduce
from typing import Any

from fivefold.config.learners import FSDPConfig, MegatronConfig, PolicyConfig
from fivefold.config.roles import Role
from fivefold.keys.findings import Findings
from fivefold.layout import ParallelLayout

PROVEN_TENSOR_PARALLEL = frozenset(
    {
        "gemma2", "gemma3_text", "llama", "mistral", "olmo2", "olmo3", "phi3", "qwen2", "qwen3", "smollm3",
    }
)  # fmt: skip
"""Families (`model_type`) whose steps with t equal those of one process: tests/fsdp/test_step_equality.py."""

NOT_BUILT: Mapping[str, tuple[str, Any]] = {
    "lora.rank": ("adapters are", 0),
    "mtp.train": ("multi-token prediction is", False),
    "router_replay": ("router replay is", None),
    "router_balance": ("balance losses of routers are", "none"),
}
"""Key of a model that only `megatron:` layouts have -> what it turns on, and the value that turns it off."""


def not_built(key: str, value: Any) -> str:
    """Return what `fsdp:` layouts lack if the section of a model has this value, or ""."""
    if key.startswith("megatron."):
        return f"{key}, an option of Megatron-Core,"
    what, off = NOT_BUILT.get(key, ("", value))
    return "" if value == off else what.rpartition(" ")[0]


def tensor_parallel_fault(family: str, layout: ParallelLayout, unproven: bool) -> str:
    """Return why the model cannot be tensor-parallel in this `fsdp:` layout, or ""; `unproven` allows any family."""
    if layout.tp == 1 or unproven or family in PROVEN_TENSOR_PARALLEL:
        return ""
    return f"t must be 1: it is not proven for {family}; use d, or set policy.fsdp.unproven: true; got {layout}"


def check_fsdp(findings: Findings, role: Role) -> None:
    """Check one model on an `fsdp:` layout; `findings` are at its section."""
    settings, layout, replicas = role.settings, role.layout, role.settings.fsdp.replicas
    findings.require(
        layout.dp % replicas == 0,
        "fsdp.replicas",
        f"must divide d: got {replicas} for {layout}; choose one of {_divisors(layout.dp)}",
    )
    if settings.fsdp.cpu_adam and settings.offload.parts:
        findings.ignore("offload", "with fsdp.cpu_adam this state is in host memory all the time")
    if layout.ep > 1:
        message = f": expert parallelism is not built for fsdp: got {layout}; leave e out, or use megatron:"
        findings.error("backend", message)
    if role.section.megatron not in (None, MegatronConfig()):
        message = f"is for megatron: layouts, and {layout} has no Megatron-Core: leave it out"
        findings.error("megatron", message)
    # Other models than the policy have its settings, and use these two only where they learn.
    unread = {"router_replay"} if role.name != "policy" else set()
    unread |= set() if role.is_learner else {"router_balance"}
    for key, (what, off) in NOT_BUILT.items():
        value = reduce(getattr, key.split("."), settings)
        message = f"{what} not built for fsdp: use megatron:, or {json.dumps(off)}"
        findings.require(key in unread or value == off, key, message)
    findings.require(settings.recompute != "selective", "recompute", "must be none or full with fsdp: got selective")


def report_unused(findings: Findings, settings: PolicyConfig, uses_fsdp: bool) -> None:
    """Report options of fsdp without effect; `findings` are at the policy's section."""
    usual = FSDPConfig()
    for name, value in vars(settings.fsdp).items():
        if not uses_fsdp and value != getattr(usual, name):
            findings.ignore(f"fsdp.{name}", "no model has an fsdp: layout")


def _divisors(number: int) -> str:
    return ", ".join(str(part) for part in range(1, number + 1) if number % part == 0)
