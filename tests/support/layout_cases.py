"""Layouts that must all compute the same step: dense and mixture-of-experts, at world sizes up to 8."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

VPP2 = {"virtual_pipeline_model_parallel_size": 2}


@dataclass(frozen=True)
class Case:
    layout: str
    """Without the backend."""
    pipeline: dict[str, Any] = field(default_factory=dict)
    sequence_parallel: bool = True
    ci: bool = False
    """Part of `make test`; these cover every pair of dimensions."""

    def __str__(self) -> str:
        short = {"virtual_pipeline_model_parallel_size": "vpp", "pipeline_model_parallel_layout": "cut"}
        extra = "".join(f" {short.get(key, key)}={value}" for key, value in self.pipeline.items())
        return self.layout + extra + ("" if self.sequence_parallel else " nosp")


# The tiny models have 4 layers, 8 heads in 4 groups and 8 experts.
ANY = [
    Case("d1", ci=True),
    Case("d2", ci=True),
    Case("t2", ci=True),
    Case("p2", ci=True),
    Case("c2", ci=True),
    Case("d4"),
    Case("t4"),
    Case("p4", ci=True),
    Case("c4", ci=True),
    Case("d2t2", ci=True),
    Case("d2p2"),
    Case("d2c2", ci=True),
    Case("t2p2", ci=True),
    Case("t2c2", ci=True),
    Case("p2c2", ci=True),
    Case("d8"),
    Case("c8"),
    Case("d2t2p2"),
    Case("d2t2c2"),
    Case("d2p2c2"),
    Case("t2p2c2"),
    Case("t4c2"),
    Case("t2c4"),
    Case("t4p2"),
    Case("d2t4"),
    Case("d2p4"),
    Case("t2p4"),
    Case("p4c2"),
    Case("p2", VPP2, ci=True),
    Case("p2", {**VPP2, "microbatch_group_size_per_vp_stage": 3}, ci=True),
    Case("d2p2", VPP2, ci=True),
    Case("t2p2", VPP2, ci=True),
    Case("p2c2", VPP2, ci=True),
    Case("t2p2c2", VPP2),
    Case("p2", {"num_layers_in_first_pipeline_stage": 1}, ci=True),
    Case("t2p2", {"num_layers_in_last_pipeline_stage": 1}),
    Case("p3", {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}),
    Case("p2", {"pipeline_model_parallel_layout": "Et|tttL"}),
    Case("p4", {"pipeline_model_parallel_layout": "E|tt|tt|L"}),
    Case("p2c2", {"pipeline_model_parallel_layout": "E|tt|t|tL"}),
    Case("t2p2", {"variable_seq_lengths": False}, ci=True),
    Case("p2c2", {"variable_seq_lengths": False, **VPP2}),
]
DENSE = [*ANY, Case("t2", sequence_parallel=False, ci=True), Case("t2p2c2", sequence_parallel=False)]
MOE = [
    *ANY,
    Case("d2e2", ci=True),
    Case("d4e4"),
    Case("d4e2", ci=True),
    Case("t2e2", ci=True),
    Case("t4e4"),
    Case("c2e2", ci=True),
    Case("(attn:t2|ffn:t2)", ci=True),
    Case("(attn:d2|ffn:t2)"),
    Case("(attn:d2t2|ffn:t2e2)", ci=True),
    Case("(attn:c2t2|ffn:t2e2)", ci=True),
    Case("(attn:c4|ffn:t2e2)"),
    Case("c2t2e4"),
    Case("d2p2e2", ci=True),
    Case("t2p2e2"),
    Case("d2p2e2", VPP2, ci=True),
    Case("t2p2e2", VPP2),
    Case("(attn:t2p2|ffn:t2p2)", VPP2, ci=True),
    Case("t2p2c2e4"),
    Case("t2p2c2e4", VPP2),
    Case("(attn:d2t2c2|ffn:t2e2)"),
    Case("(attn:d1p2t2c2|ffn:d1p2t1e4)"),
    Case("d8e8"),
    Case("d8e4"),
    Case("d2t4e8"),
    Case("d2p4e2"),
]
MODELS = {"qwen3": DENSE, "qwen3_moe": MOE, "deepseek_v3": MOE}


def with_backend(layout: str) -> str:
    """The layout, on Megatron-Core if it names no backend: `d2`, or `(attn:d2t2|ffn:t2e2)`."""
    return layout if re.match("[a-z]+:", layout) else f"megatron:{layout}"
