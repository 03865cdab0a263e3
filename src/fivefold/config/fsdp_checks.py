"""What `fsdp:` layouts do not support, as sentences. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import reduce
from typing import Any

from fivefold.config.learners import FSDPConfig, MegatronConfig
from fivefold.config.roles import Role, Roles
from fivefold.keys.findings import Findings
from fivefold.layout import ParallelLayout

PROVEN = {
    "gemma2": "t", "gemma3_text": "t", "llama": "t", "mistral": "t", "olmo2": "t", "olmo3": "t", "phi3": "t", "qwen2": "t",
    "qwen3": "t", "smollm3": "t", "qwen3_moe": "te", "glm4_moe": "te", "deepseek_v3": "te", "gpt_oss": "te",
    "minimax_m2": "te", "qwen3_next": "te", "qwen3_5_text": "t", "qwen3_5_moe_text": "te",
}  # fmt: skip
"""Family (`model_type`) -> dimensions of layouts in which its steps equal those of one process: tests/fsdp.

d, c and replicas are open to all families: log-probs are compared with transformers' at start.
"""

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
    """Check one model on an `fsdp:` layout, under the keys that its settings have."""
    settings, layout, replicas = role.settings, role.layout, role.settings.fsdp.replicas
    if layout.dp % replicas:
        message = f"must divide d: got {replicas} for {layout}; choose one of {_divisors(layout.dp)}"
        findings.error(role.key_of("fsdp.replicas"), message)
    elif layout.dp // replicas * layout.tp % layout.ep:
        ranks = layout.dp // replicas * layout.tp
        message = f"must leave whole groups of e: e{layout.ep} must divide the {ranks} ranks of d·t in a copy"
        findings.error(role.key_of("fsdp.replicas"), f"{message}; got {replicas} for {layout}")
    if settings.fsdp.cpu_adam and settings.offload.parts:
        findings.ignore(
            role.key_of("offload"), f"with {role.key_of('fsdp.cpu_adam')} this state is in host memory all the time"
        )
    if role.section.megatron not in (None, MegatronConfig()):
        message = f"is for megatron: layouts, and {layout} has no Megatron-Core: leave it out"
        findings.error(role.key_of("megatron"), message)
    # Other models than the policy have its settings, and use these three only where they learn.
    unread = {"router_replay"} if role.name != "policy" else set()
    unread |= set() if role.is_learner else {"router_balance", "recompute"}
    for key, (what, off) in NOT_BUILT.items():
        value = reduce(getattr, key.split("."), settings)
        message = f": {what} not built for fsdp: use megatron:, or {json.dumps(off)}"
        findings.require(key in unread or value == off, role.key_of(key), message)
    is_built = settings.recompute != "selective" or "recompute" in unread
    findings.require(is_built, role.key_of("recompute"), "must be none or full with fsdp: got selective")


def report_unused(findings: Findings, roles: Roles) -> None:
    """Report settings of a backend that no model which reads them has."""
    usual, trainers = FSDPConfig(), {role.layout.backend for role in roles.models.values()}
    read = {role.key_of("fsdp") for role in roles.models.values() if role.layout.backend == "fsdp"}
    for role in roles.models.values():
        key = f"{role.section_key}.fsdp"
        for name, value in vars(role.section.fsdp or usual).items():
            if key not in read and value != getattr(usual, name):
                findings.ignore(f"{key}.{name}", "no model that reads it has an fsdp: layout")
    if not roles["policy"].settings.sequence_parallel and trainers == {"fsdp"}:
        findings.ignore("policy.sequence_parallel", "fsdp: layouts have none")


def _divisors(number: int) -> str:
    return ", ".join(str(part) for part in range(1, number + 1) if number % part == 0)
