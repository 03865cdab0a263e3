"""What `fsdp:` layouts do not support, as sentences. No torch here."""

from __future__ import annotations

from fivefold.config.learners import FSDPConfig, MegatronConfig, PolicyConfig
from fivefold.config.roles import Role
from fivefold.keys.findings import Findings
from fivefold.layout import ParallelLayout

PROVEN = {
    "gemma2": "t", "gemma3_text": "t", "llama": "t", "mistral": "t", "olmo2": "t", "olmo3": "t", "phi3": "t", "qwen2": "t",
    "qwen3": "t", "smollm3": "t", "qwen3_moe": "te", "glm4_moe": "te", "deepseek_v3": "te", "gpt_oss": "te",
    "minimax_m2": "te", "qwen3_next": "te", "qwen3_5_text": "t",
}  # fmt: skip
"""Family (`model_type`) -> dimensions of layouts in which its steps equal those of one process: tests/fsdp.

d, c and replicas are open to all families: log-probs are compared with transformers' at start.
"""


def unproven_fault(family: str, layout: ParallelLayout, unproven: bool) -> str:
    """Return why the model cannot have this `fsdp:` layout, or ""; `unproven` allows any family."""
    proven = PROVEN.get(family, "")
    for letter, size in (("t", layout.tp), ("e", layout.ep)):
        if size > 1 and not unproven and letter not in proven:
            return (
                f"{letter} must be 1: it is not proven for {family}; use d, or set policy.fsdp.unproven: true; got {layout}"
            )
    return ""


def check_fsdp(findings: Findings, role: Role) -> None:
    """Check one model on an `fsdp:` layout; `findings` are at its section."""
    settings, layout, replicas = role.settings, role.layout, role.settings.fsdp.replicas
    if layout.dp % replicas:
        message = f"must divide d: got {replicas} for {layout}; choose one of {_divisors(layout.dp)}"
        findings.error("fsdp.replicas", message)
    elif layout.dp // replicas * layout.tp % layout.ep:
        ranks = layout.dp // replicas * layout.tp
        message = f"must leave whole groups of e: e{layout.ep} must divide the {ranks} ranks of d·t in a copy"
        findings.error("fsdp.replicas", f"{message}; got {replicas} for {layout}")
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
