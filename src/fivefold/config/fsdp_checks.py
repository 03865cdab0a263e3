"""What `fsdp:` layouts do not support, as sentences. No torch here."""

from __future__ import annotations

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
    if layout.ep > 1:
        message = f": expert parallelism is not built for fsdp: got {layout}; leave e out, or use megatron:"
        findings.error("backend", message)
    if role.section.megatron not in (None, MegatronConfig()):
        message = f"is for megatron: layouts, and {layout} has no Megatron-Core: leave it out"
        findings.error("megatron", message)
    for key, is_good, message_if_not in (
        ("lora.rank", not settings.lora.rank, "adapters are not built for fsdp: use megatron:, or 0"),
        ("mtp.train", not settings.mtp.train, "multi-token prediction is not built for fsdp: use megatron:, or false"),
        (
            "router_replay",
            settings.router_replay is None or role.name != "policy",
            "router replay is not built for fsdp: use megatron:",
        ),
        (
            "router_balance",
            settings.router_balance == "none" or not role.is_learner,
            "balance losses of routers are not built for fsdp: use megatron:, or none",
        ),
        ("recompute", settings.recompute != "selective", "must be none or full with fsdp: got selective"),
    ):
        findings.require(is_good, key, message_if_not)


def report_unused(findings: Findings, settings: PolicyConfig, uses_fsdp: bool) -> None:
    """Report options of fsdp without effect; `findings` are at the policy's section."""
    usual = FSDPConfig()
    for name, value in vars(settings.fsdp).items():
        if not uses_fsdp and value != getattr(usual, name):
            findings.ignore(f"fsdp.{name}", "no model has an fsdp: layout")


def _divisors(number: int) -> str:
    return ", ".join(str(part) for part in range(1, number + 1) if number % part == 0)
