"""Checks of the engine for `fivefold check`: packages, layout, memory, servers that already run. No torch here."""

from __future__ import annotations

from pathlib import Path

from fivefold.config import RunConfig
from fivefold.config.engine import EngineConfig
from fivefold.config.learners import PolicyConfig
from fivefold.config.machine import on_gpus
from fivefold.config.schema import LaunchConfig
from fivefold.config.scoring import RewardConfig
from fivefold.engines.servers.probe import check_servers
from fivefold.engines.sglang import probe as sglang
from fivefold.engines.sglang.arguments import check_sglang, refusals, why_responses_must_end
from fivefold.engines.vllm import probe as vllm
from fivefold.engines.vllm.arguments import check_vllm, installed_version, names_versions, returns_routes
from fivefold.errors import UserError
from fivefold.keys.findings import Findings
from fivefold.layout import ParallelLayout
from fivefold.models.config_json import read_config
from fivefold.models.spec import ModelSpec
from fivefold.plan.devices import device_of
from fivefold.plan.memory import BYTES, CPU_CACHE, ENGINE_GRAPHS
from fivefold.plan.tokenizer_files import is_hub_id

CACHE_SIZES = {"vllm": "kv_cache_memory_bytes", "sglang": "max_total_tokens"}
"""Engine -> its argument for the size of the cache."""


def check_engine(findings: Findings, config: RunConfig, spec: ModelSpec | None) -> None:
    """Check that the engine is installed, accepts its arguments and supports its layout."""
    engine, section, has_gpus = config.engine, findings.at("engine"), on_gpus(config.launch, config.trainer.device)
    try:
        layout = engine.layout
    except UserError:
        return
    if spec is not None:
        for key, tokens in (("stop_token_ids", engine.sampling.stop_token_ids), ("logit_bias", engine.sampling.logit_bias)):
            outside = [token for token in tokens if not 0 <= token < spec.vocab]
            message = f"must name tokens of the vocabulary, 0 to {spec.vocab - 1}: got {outside[:3]}"
            section.require(not outside, f"sampling.{key}", message)
    if engine.kind == "sglang" and not config.algorithm.offline:
        for key, reason in refusals(engine.sampling):
            section.error(f"sampling.{key}", reason)
    rollout = config.rollout
    # Without either, a step finishes all its requests: none is in flight when weights change.
    is_ahead = rollout.max_staleness is not None and (rollout.max_staleness > 0 or rollout.tail != "wait")
    goes_on = engine.is_server and is_ahead and rollout.interrupt == "continue"
    if layout is not None:
        if engine.kind == "sglang":
            check_sglang(section, engine.sglang, layout)
            if goes_on and (why := why_responses_must_end()):
                findings.error("rollout.interrupt", f"must be finish or abort: {why}")
        else:
            check_vllm(section, engine.vllm)
            if config.policy.router_replay == "R3" and (lacks := returns_routes(has_gpus)):
                message = f"must be left out or R2, or engine.backend transformers: {lacks}"
                findings.error("policy.router_replay", message)
            findings.at("rollout").require(
                not (goes_on and engine.sampling.stop) or names_versions(),
                "interrupt",
                ": continue with engine.sampling.stop needs vLLM 0.32: older ones get a second request for the rest of "
                f"responses and see no stop string that begins before; {installed_version()} is installed: finish or abort",
            )
        if engine.own_arguments.get("quantization") and engine.verify_weights_every:
            section.ignore("verify_weights_every", "what a quantized engine holds has other bits than what it was given")
        if spec is not None:
            before = len(section.errors)
            _check_layout(section, layout, spec)
            if len(section.errors) == before:
                _check_cache(section, config, spec)
        # Seen with vLLM 0.32: its CPU kernel for experts reads out of bounds when experts are sharded.
        section.require(
            layout.ep == 1 or has_gpus,
            "backend",
            f": experts are divided on GPUs only; leave the e of {layout} out",
        )
    if engine.url and spec is not None:
        probe = sglang if engine.kind == "sglang" else vllm
        model = read_config(Path(config.model.described_by(config.model.path)))
        check_servers(section, engine.url, probe.describe, probe.COMMAND, model, config.max_sequence_tokens)
    if engine.backend == "transformers" and not config.algorithm.offline and installed_version() is not None:
        section.note(f"vLLM {installed_version()} is installed and samples several times as fast: engine.backend: vllm:...")
    if engine.is_apart and has_gpus and engine.memory_fraction == EngineConfig().memory_fraction:
        section.note(
            f"the servers have GPUs of their own and take {engine.memory_fraction:.0%} of them: "
            "engine.memory_fraction up to 0.9 gives them a larger cache"
        )
    if not config.algorithm.offline and engine.sampling.is_changed:
        section.note(
            "engine.sampling draws from a part of the distribution: log-probs of the engine are those of that part, and the "
            "first step's comparison with the trainer's is left out"
        )


def check_judge(findings: Findings, reward: RewardConfig, launch: LaunchConfig) -> None:
    """Check that the judge's servers can be started; `findings` are at `reward.judge`."""
    if findings.errors or reward.judge_layout is None:
        return
    if reward.judge_layout.backend == "sglang":
        check_sglang(findings, {}, reward.judge_layout)
    else:
        check_vllm(findings, {})
    model = str(reward.judge.model)
    message = f": no directory {model}, and no hub id, which is written owner/name"
    findings.require(Path(model).is_dir() or is_hub_id(model), "model", message)
    message = ": servers on GPUs of their own are not placed on a Ray cluster: start them elsewhere and name them in url"
    findings.require(launch.backend != "ray", "backend", message)


def engine_cache(config: RunConfig, spec: ModelSpec) -> int | None:
    """Return the bytes of vLLM's or SGLang's KV cache on each device, over all processes that share it; None for another
    engine, or if GPUs are unknown."""
    engine = config.engine
    if engine.layout is None:
        return None
    if isinstance(chosen := engine.own_arguments.get(CACHE_SIZES[engine.kind]), int):
        return chosen if engine.kind == "vllm" else chosen * token_bytes(engine, config.policy, spec)
    if not on_gpus(config.launch, config.trainer.device):
        return CPU_CACHE
    if (device := device_of(config)) is None:
        return None
    weights = spec.parameters * BYTES[engine.dtype or config.policy.dtype] // engine.layout.tp
    return cache_next_to(engine, device.bytes, weights)


def cache_next_to(engine: EngineConfig, device_bytes: int, weights: int) -> int:
    """Return the bytes that `memory_fraction` of a device leaves for the cache, after the weights and graphs of each
    process."""
    return int(engine.memory_fraction * device_bytes) - engine.process_count * (weights + ENGINE_GRAPHS)


def _check_cache(findings: Findings, config: RunConfig, spec: ModelSpec) -> None:
    """Check that the KV cache can hold one sequence."""
    engine, cache = config.engine, engine_cache(config, spec)
    assert engine.layout is not None
    longest = engine.max_model_len or config.max_sequence_tokens
    needed, size = token_bytes(engine, config.policy, spec) * longest, CACHE_SIZES[engine.kind]
    share = f" in each of {engine.process_count} processes" if engine.process_count > 1 else ""
    key = f"{engine.kind}.{size}" if size in engine.own_arguments else "memory_fraction"
    findings.require(
        cache is None or cache // engine.process_count >= needed,
        key,
        f"leaves {max(0, cache or 0) // engine.process_count / 2**20:,.2f} MiB for keys and values{share}, one sequence of "
        f"{longest} tokens needs {needed / 2**20:,.2f}; "
        "raise it, more t in engine.backend, or a smaller engine.max_model_len",
    )


def token_bytes(engine: EngineConfig, policy: PolicyConfig, spec: ModelSpec) -> int:
    """Return the bytes of one token's keys and values on each tensor-parallel rank."""
    assert engine.layout is not None
    return spec.kv_numbers_per_token * BYTES[engine.dtype or policy.dtype] // min(engine.layout.tp, spec.kv_heads)


def _check_layout(findings: Findings, layout: ParallelLayout, spec: ModelSpec) -> None:
    """Report parts of the model that engines cannot shard by this layout; key/value heads may also be copied."""
    sizes = [("attention heads", spec.heads, "t", layout.tp)]
    if spec.moe is None:
        sizes.append(("ffn size", spec.ffn, "t", layout.tp))
        findings.require(layout.ep == 1, "backend", f": {spec.family} has no experts: leave the e of {layout} out")
    else:
        sizes.append(("experts", spec.moe.num_experts, "e", layout.ep))
        sizes.append(("expert ffn size", spec.moe.ffn, "t", layout.tp // layout.ep))
    for part, size, letter, parts in sizes:
        message = f": {part} must be divisible by {letter}: got {size} for {layout}; "
        message += f"choose {'an' if letter == 'e' else 'a'} {letter} that divides {size}"
        findings.require(size % parts == 0, "backend", message)
    if spec.mla is None and spec.kv_heads % layout.tp and layout.tp % spec.kv_heads:
        findings.error(
            "backend", f": {spec.kv_heads} key/value heads can be neither divided by nor copied to {layout.tp} ranks"
        )


def report_engine(section: Findings, engine: EngineConfig, has_gpus: bool) -> None:
    """Report keys of the engine that belong to another engine, or that act on GPUs only."""
    usual, is_cpu = EngineConfig(), not has_gpus
    others = {"vllm": "it is vLLM's", "sglang": "it is SGLang's"}
    others.pop(engine.kind, None)
    if engine.kind == "transformers":
        others |= dict.fromkeys(("memory_fraction", "max_model_len", "verify_weights_every"), "it is vLLM's and SGLang's")
    for name, whose in others.items():
        if getattr(engine, name) != getattr(usual, name):
            section.ignore(name, f"{whose}, and engine.backend is {engine.kind}")
    if engine.stall_seconds != usual.stall_seconds and (engine.kind != "vllm" or not engine.is_server):
        section.ignore("stall_seconds", "only servers of vLLM say how many tokens they have sampled")
    if engine.url:
        for name in ("memory_fraction", "max_model_len", "sleep", "dtype", engine.kind, "mode"):
            if getattr(engine, name) != getattr(usual, name):
                section.ignore(name, "the servers of engine.url were started with what they have")
    elif is_cpu and engine.memory_fraction != usual.memory_fraction:
        section.ignore(
            "memory_fraction",
            "on a CPU the cache has 1 GiB, or what engine.vllm.kv_cache_memory_bytes or engine.sglang.max_total_tokens say",
        )
    if is_cpu and engine.kind == "vllm" and not engine.url and engine.vllm.get("enable_chunked_prefill"):
        section.at("vllm").ignore("enable_chunked_prefill", "vLLM cannot split a prompt and draw with a seed on a CPU")
    if engine.is_apart and engine.sleep != usual.sleep:
        section.ignore("sleep", "the servers have devices of their own, which no model shares")
    elif is_cpu and not engine.url and engine.sleep != usual.sleep:
        section.ignore("sleep", "on a CPU there is nothing to leave")
