"""What a Hugging Face `config.json` says of a model: directory -> ModelShape. No torch here."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fivefold.layout import ParallelLayout, PipelineSplit

DENSE_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
MOE_FAMILIES = ("qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe")
FAMILIES = DENSE_FAMILIES + MOE_FAMILIES

VOCABULARY_MULTIPLE = 128
"""The vocabulary is padded to a multiple of this on every layout, so that a checkpoint does not depend on tp."""

LLAMA3_FIXED = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Megatron-Core's llama3 RoPE has these numbers built in; a model with others would be computed wrongly."""


@dataclass(frozen=True)
class MoESpec:
    """The mixture-of-experts layers of a model."""

    num_experts: int
    top_k: int
    """Experts of a token."""
    ffn: int
    layers: tuple[bool, ...]
    """For each layer whether it has experts; the others are dense."""
    shared_ffn: int = 0
    """Size of the shared experts together; 0 without."""
    shared_gate: bool = False
    """The shared expert's output is weighted by a sigmoid of its own."""
    sigmoid: bool = False
    """Scores are sigmoids, corrected by a bias for the choice (DeepSeek-V3); otherwise a softmax."""
    normalize: bool = True
    """The chosen experts' weights sum to 1."""
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    """Factor of the routed experts' weights."""


@dataclass(frozen=True)
class MLASpec:
    """Multi-head latent attention (DeepSeek-V2, eq. 9-19)."""

    q_rank: int | None
    """Width that queries pass through, or None for a plain projection."""
    kv_rank: int
    qk_nope: int
    qk_rope: int
    v_dim: int


@dataclass(frozen=True)
class YarnSpec:
    """YaRN RoPE scaling as DeepSeek-V3 uses it."""

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float


@dataclass(frozen=True)
class ModelSpec:
    """Sizes and choices of a decoder-only transformer that decide its parameters and its mathematics."""

    family: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    rope_linear_factor: float | None
    """Positions are divided by this (linear RoPE scaling), or None."""
    rope_llama3_factor: float | None
    """`factor` of llama3 RoPE scaling, or None."""
    sliding_window: int | None
    """Tokens a query sees, itself included, or None for all before it."""
    qkv_bias: bool
    qk_norm: bool
    tied: bool
    """The output layer shares the embedding's weight."""
    rotary_fraction: float = 1.0
    """Share of a head's dimensions that RoPE turns."""
    moe: MoESpec | None = None
    mla: MLASpec | None = None
    yarn: YarnSpec | None = None
    value_head: bool = False
    """It ends in one number a token instead of a distribution: a critic or a reward model."""

    @property
    def padded_vocab(self) -> int:
        return -(-self.vocab // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer's attention and its two norms."""
        norms = 2 * self.hidden
        if self.mla is not None:
            part = self.mla
            q_out, kv_out = self.heads * (part.qk_nope + part.qk_rope), self.heads * (part.qk_nope + part.v_dim)
            q = self.hidden * q_out if part.q_rank is None else part.q_rank * (self.hidden + 1 + q_out)
            kv = self.hidden * (part.kv_rank + part.qk_rope) + part.kv_rank * (1 + kv_out)
            return q + kv + self.heads * part.v_dim * self.hidden + norms
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        bias = q + 2 * kv if self.qkv_bias else 0
        return self.hidden * (q + 2 * kv) + q * self.hidden + bias + norms + (2 * self.head_dim if self.qk_norm else 0)

    def has_experts(self, layer: int) -> bool:
        return self.moe is not None and self.moe.layers[layer]

    def expert_parameters(self, layer: int) -> int:
        """Parameters of all routed experts of a layer."""
        if self.moe is None or not self.moe.layers[layer]:
            return 0
        return self.moe.num_experts * 3 * self.hidden * self.moe.ffn

    def shared_parameters(self, layer: int) -> int:
        """Parameters of a layer that every token passes: all but the routed experts."""
        if self.moe is None or not self.moe.layers[layer]:
            return self.attention_parameters + 3 * self.hidden * self.ffn
        part = self.moe
        router = part.num_experts * self.hidden
        return (
            self.attention_parameters + router + 3 * self.hidden * part.shared_ffn + (self.hidden if part.shared_gate else 0)
        )

    def active_parameters(self, layer: int) -> int:
        """Parameters of a layer that take part in one token."""
        active = self.expert_parameters(layer)
        return self.shared_parameters(layer) + (active * self.moe.top_k // self.moe.num_experts if self.moe else 0)

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, tied ones once."""
        embeddings = self.vocab * self.hidden * (1 if self.tied or self.value_head else 2) + (
            self.hidden if self.value_head else 0
        )
        layers = sum(self.shared_parameters(layer) + self.expert_parameters(layer) for layer in range(self.layers))
        return layers + self.hidden + embeddings

    def check_layout(self, layout: ParallelLayout, stages: PipelineSplit | None = None) -> None:
        """Raise ValueError where this model cannot be cut the way `layout` and `stages` ask."""
        cuts = [("attention heads", self.heads, "tp", layout.tp), ("ffn size", self.ffn, "tp", layout.tp)]
        if self.mla is None:
            cuts.append(("key/value heads", self.kv_heads, "tp", layout.tp))
        if self.moe is not None:
            cuts += [
                ("experts", self.moe.num_experts, "ep", layout.ep),
                ("expert ffn size", self.moe.ffn, "etp", layout.etp),
            ]
            cuts.append(("shared expert ffn size", self.moe.shared_ffn, "tp", layout.tp))
        for what, size, dimension, parts in cuts:
            if size % parts:
                raise ValueError(
                    f"{what} must be divisible by {dimension}: got {size} for {dimension}={parts} in {layout}; "
                    f"choose a {dimension} that divides {size}"
                )
        if self.moe is None and (layout.ep > 1 or layout.etp > 1):
            raise ValueError(f"{self.family} has no experts: got ep={layout.ep} etp={layout.etp} in {layout}; leave e out")
        if VOCABULARY_MULTIPLE % layout.tp:
            raise ValueError(
                f"tp must divide {VOCABULARY_MULTIPLE} (the vocabulary of {self.vocab} is padded to {self.padded_vocab}): "
                f"got tp={layout.tp} in {layout}; choose a power of two"
            )
        (stages or PipelineSplit()).split_layers(self.layers, layout)


def read_config(directory: Path) -> dict[str, Any]:
    """The `config.json` of a model directory."""
    path = directory / "config.json"
    if not path.is_file():
        raise ValueError(f"no config.json in {directory}: model.path must be a Hugging Face model directory")
    loaded = json.loads(path.read_text())
    if not isinstance(loaded, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return loaded


def load_spec(directory: str | Path, value_head: bool = False) -> ModelSpec:
    """ModelShape of a Hugging Face model directory; raises ValueError for what is not supported, by its name.

    With `value_head` the model ends in a value head, whatever the directory's own model ends in.
    """
    shape = spec_from_config(read_config(Path(directory)))
    return replace(shape, value_head=True, tied=False) if value_head else shape


def spec_from_config(config: dict[str, Any]) -> ModelSpec:
    """ModelShape of a parsed `config.json`; both transformers 4 and 5 spellings of RoPE are read."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"unknown model family {family!r} (model_type in config.json); supported: {', '.join(FAMILIES)}")
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act must be 'silu' for {family}: got {config['hidden_act']!r}")
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key) and not (family == "glm4_moe" and key == "attention_bias"):
            raise ValueError(f"{key}: true is not supported for {family} (the models of the family do not use it)")
    needed = ["num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"]
    needed += ["max_position_embeddings"] + ([] if family in ("llama", "deepseek_v3") else ["num_key_value_heads"])
    if family == "deepseek_v3":
        needed += ["kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"]
    if family in MOE_FAMILIES:
        needed += ["num_experts_per_tok"] + ([] if family == "mixtral" else ["moe_intermediate_size"])
    if absent := [key for key in needed if config.get(key) is None]:
        raise ValueError(f"config.json of a {family} model must have {', '.join(absent)}")
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    rope = _Rope.read(config)
    return ModelSpec(
        family=str(family),
        layers=int(config["num_hidden_layers"]),
        hidden=hidden,
        ffn=int(config["intermediate_size"]),
        heads=heads,
        kv_heads=heads if family == "deepseek_v3" else int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or (128 if family == "qwen3" else hidden // heads)),
        vocab=int(config["vocab_size"]),
        max_positions=int(config["max_position_embeddings"]),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=rope.theta,
        rope_linear_factor=rope.linear,
        rope_llama3_factor=rope.llama3,
        sliding_window=_sliding_window(config),
        qkv_bias=_qkv_bias(config),
        qk_norm=family in ("qwen3", "qwen3_moe") or (family == "glm4_moe" and bool(config.get("use_qk_norm", False))),
        tied=bool(config.get("tie_word_embeddings", False)),
        rotary_fraction=rope.fraction,
        moe=_experts(config) if family in MOE_FAMILIES else None,
        mla=_latent(config) if family == "deepseek_v3" else None,
        yarn=rope.yarn,
    )


def _qkv_bias(config: dict[str, Any]) -> bool:
    family = config["model_type"]
    if family == "qwen2_moe":
        return bool(config.get("qkv_bias", True))
    return family == "qwen2" or (family == "glm4_moe" and bool(config.get("attention_bias", False)))


def _experts(config: dict[str, Any]) -> MoESpec:
    family, layers = config["model_type"], int(config["num_hidden_layers"])
    count = config.get("n_routed_experts") or config.get("num_local_experts") or config.get("num_experts")
    if count is None:
        raise ValueError(f"config.json of a {family} model must have the number of experts")
    chosen = int(config["num_experts_per_tok"])
    if not 1 <= chosen <= int(count):
        raise ValueError(f"num_experts_per_tok must lie between 1 and the {count} experts: got {chosen}")
    if family == "mixtral":
        if config.get("router_jitter_noise"):
            raise ValueError(
                f"router_jitter_noise must be 0: log-probs would be random; got {config['router_jitter_noise']}"
            )
        return MoESpec(int(count), chosen, int(config["intermediate_size"]), (True,) * layers)
    ffn = int(config["moe_intermediate_size"])
    if family in ("qwen2_moe", "qwen3_moe"):
        dense, every = config.get("mlp_only_layers") or [], int(config.get("decoder_sparse_step", 1))
        which = tuple(layer not in dense and (layer + 1) % every == 0 for layer in range(layers))
        shared = int(config.get("shared_expert_intermediate_size", 5632)) if family == "qwen2_moe" else 0
        normalize = bool(config.get("norm_topk_prob", False))
        return MoESpec(int(count), chosen, ffn, which, shared, shared_gate=bool(shared), normalize=normalize)
    default_groups = (8, 4) if family == "deepseek_v3" else (1, 1)
    groups = int(config.get("n_group") or default_groups[0])
    groups_chosen = int(config.get("topk_group") or default_groups[1])
    if int(count) % groups or groups_chosen > groups or (groups > 1 and chosen % groups_chosen):
        raise ValueError(
            f"experts must divide into n_group groups of which topk_group are chosen, and num_experts_per_tok must be a "
            f"multiple of topk_group: got {count} experts, n_group {groups}, topk_group {groups_chosen}, {chosen} of a token"
        )
    if groups > 1 and chosen // groups_chosen != 2:
        raise ValueError(
            f"groups of experts are scored by their two best (DeepSeek-V3), which Megatron-Core does only where "
            f"num_experts_per_tok / topk_group is 2: got {chosen} / {groups_chosen}"
        )
    if chosen < 2:
        raise ValueError(
            f"num_experts_per_tok must be at least 2 for {family}: Megatron-Core does not normalise a single score"
        )
    if not config.get("norm_topk_prob", True):
        raise ValueError(
            f"norm_topk_prob: false is not supported for {family}: Megatron-Core always normalises sigmoid scores"
        )
    if not config.get("rope_interleave", True):
        raise ValueError("rope_interleave: false is not supported: Megatron-Core's latent attention has it built in")
    first = config.get("first_k_dense_replace")
    dense_layers = int({"deepseek_v3": 3}.get(family, 1) if first is None else first)
    return MoESpec(
        int(count),
        chosen,
        ffn,
        tuple(layer >= dense_layers for layer in range(layers)),
        shared_ffn=int(config.get("n_shared_experts", 1) or 0) * ffn,
        sigmoid=True,
        n_group=groups,
        topk_group=groups_chosen,
        routed_scaling_factor=float(config.get("routed_scaling_factor", 2.5 if family == "deepseek_v3" else 1.0)),
    )


def _latent(config: dict[str, Any]) -> MLASpec:
    rank = config.get("q_lora_rank", 1536)
    return MLASpec(
        q_rank=None if rank is None else int(rank),
        kv_rank=int(config["kv_lora_rank"]),
        qk_nope=int(config["qk_nope_head_dim"]),
        qk_rope=int(config["qk_rope_head_dim"]),
        v_dim=int(config["v_head_dim"]),
    )


@dataclass(frozen=True)
class _Rope:
    theta: float
    fraction: float = 1.0
    linear: float | None = None
    llama3: float | None = None
    yarn: YarnSpec | None = None

    @classmethod
    def read(cls, config: dict[str, Any]) -> _Rope:
        family = config["model_type"]
        rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
        theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
        kind = rope.get("rope_type") or rope.get("type") or "default"
        usual = 0.5 if family == "glm4_moe" else 1.0
        fraction = float(rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or usual)
        if fraction != 1.0 and family != "glm4_moe":
            raise ValueError(f"partial_rotary_factor must be 1 for {family}: got {fraction}")
        if kind == "default":
            return cls(theta, fraction)
        if kind == "linear" and family != "deepseek_v3":
            return cls(theta, fraction, linear=float(rope["factor"]))
        if kind == "llama3" and family != "deepseek_v3":
            for key, fixed in LLAMA3_FIXED.items():
                if float(rope.get(key, fixed)) != fixed:
                    raise ValueError(f"llama3 RoPE scaling is supported with {key}={fixed:g} only: got {rope[key]}")
            return cls(theta, fraction, llama3=float(rope["factor"]))
        if kind == "yarn" and family == "deepseek_v3":
            return cls(theta, fraction, yarn=_yarn(rope, config))
        known = "default, yarn" if family == "deepseek_v3" else "default, linear, llama3"
        raise ValueError(f"RoPE variant {kind!r} is not supported for {family}; supported: {known}")


def _yarn(rope: dict[str, Any], config: dict[str, Any]) -> YarnSpec:
    if rope.get("attention_factor") is not None or not rope.get("truncate", True):
        raise ValueError("yarn RoPE scaling is supported without attention_factor and with truncate: true only")
    if rope.get("factor") is None or not rope.get("mscale") or not rope.get("mscale_all_dim"):
        raise ValueError("yarn RoPE scaling of a deepseek_v3 model must have factor, mscale and mscale_all_dim")
    return YarnSpec(
        factor=float(rope["factor"]),
        original_positions=int(rope.get("original_max_position_embeddings") or config["max_position_embeddings"]),
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        mscale=float(rope["mscale"]),
        mscale_all_dim=float(rope["mscale_all_dim"]),
    )


def _sliding_window(config: dict[str, Any]) -> int | None:
    family, layers = config["model_type"], int(config["num_hidden_layers"])
    if family in ("llama", "deepseek_v3", "glm4_moe"):
        return None
    if family in ("mistral", "mixtral"):
        window = config.get("sliding_window", 4096 if family == "mistral" else None)
        return None if window is None else int(window)
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
    if window is None:
        return None
    if family in MOE_FAMILIES:
        raise ValueError(f"use_sliding_window: true is not supported for {family}; the published models have it off")
    kinds = config.get("layer_types") or [
        "sliding_attention" if layer >= int(config.get("max_window_layers", 28)) else "full_attention"
        for layer in range(layers)
    ]
    if set(kinds) == {"full_attention"}:
        return None
    if set(kinds) != {"sliding_attention"}:
        raise ValueError(
            f"a mixture of attention kinds over the layers is not supported: {kinds.count('sliding_attention')} of "
            f"{len(kinds)} layers have a sliding window; set use_sliding_window to false in config.json to train without"
        )
    return int(window)
