"""Translate AReaL's layouts, strings whose form changed with its releases, and its engines to our keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fivefold.layout import ParallelLayout
from fivefold_dialects import shared, trainers
from fivefold_dialects.legacy import areal_spellings as older
from fivefold_dialects.source import Source, UnreadableError


def trainer(source: Source) -> str:
    """Return the section of the model that is trained: `actor`, or `model` in some SFT runs."""
    return "model" if source.keys("model.path") else "actor"


def is_sft(source: Source) -> bool:
    """Return whether the run is SFT: it has no section for generation or rollouts."""
    sampled = source.keys("gconfig.") or source.keys("rollout.")
    return trainer(source) == "model" or (source.text("train_dataset.type") == "sft" and not sampled)


def is_dpo(source: Source) -> bool:
    """Return whether the run is DPO, which learns from the pairs of a data set."""
    return source.text("train_dataset.type") == "dpo" or source.has("actor.beta") or source.has("beta")


def is_sampled(source: Source) -> bool:
    """Return whether the run samples responses: it is neither SFT nor DPO."""
    return not (is_sft(source) or is_dpo(source))


def roles(source: Source) -> tuple[ParallelLayout, ParallelLayout | None]:
    """Return (layout of the trainer, layout of the engine) from the backends of the roles or from allocation_mode."""
    role = trainer(source)
    key = "allocation_mode" if source.text("allocation_mode") else f"{role}.backend"
    ours, theirs = older.allocated(source, source.text(f"{role}.backend") or "", source.text("rollout.backend") or "")
    if is_sft(source):
        ours = older.with_sizes(source, ours)
    return _parsed(ours, key), _parsed(theirs, key) if theirs else None


def _parsed(text: str, key: str) -> ParallelLayout:
    """Return the layout in a text, without its name; Archon, with Megatron's sizes, is Megatron."""
    try:
        return replace(ParallelLayout.parse(older.dotless(text)), name=None)
    except ValueError as error:
        raise UnreadableError(f"{key}: {error}") from None


def is_colocated(source: Source) -> bool:
    """Return whether engine and trainer share GPUs: by `|` between layouts or by their scheduling (rl_trainer.py:395)."""
    targets = {"rollout": "actor", "actor": "rollout"}
    return older.joins(source) or any(
        source.text(f"{role}.scheduling_strategy.type") == "colocation"
        and source.text(f"{role}.scheduling_strategy.target") == target
        for role, target in targets.items()
    )


def steps_ahead(source: Source) -> int:
    """Return how many steps sampling may run ahead; 0 if training waits for rollouts (async_training until 2026)."""
    waits = not is_sampled(source) or not source.flag("async_training")
    return 0 if waits else source.whole("rollout.max_head_offpolicyness") or 0


def ahead(source: Source) -> dict[str, Any]:
    """Return our keys of sampling ahead; consumer_batch_size, the bound's unit, is a step's (staleness_manager.py:93)."""
    taken, step = source.count("rollout.consumer_batch_size"), source.count("train_dataset.batch_size")
    if steps_ahead(source) and taken != step:
        reason = f"a staleness bound in steps of {taken} prompts, where a step takes {step}"
        source.lacks("rollout.consumer_batch_size", f"{reason}: set it to ${{train_dataset.batch_size}}")
    return shared.ahead(steps_ahead(source), "continue", "carry")


def layout(source: Source) -> dict[str, Any]:
    policy, section = trained(source, roles(source)[0]), f"{trainer(source)}.fsdp."
    ours = {"policy.backend": str(policy)}
    if policy.backend == "fsdp":
        ours = trainers.fsdp(source, policy.world_size, section, "offload_params", cp=policy.cp, tp=policy.tp, ep=policy.ep)
    for role, name in (("ref", "reference"), ("critic", "critic")):
        text = source.text(f"{role}.backend") or ""
        if ":" in older.dotless(text):
            other = trained(source, _parsed(text, f"{role}.backend"))
            sizes = {size: getattr(other, size) for size in ("tp", "pp", "cp", "ep", "etp")}
            if source.keys(f"{role}.path"):
                ours |= shared.own_layout(source, f"{role}.backend", name, policy, other.backend, **sizes)
    return ours


def trained(source: Source, layout: ParallelLayout) -> ParallelLayout:
    """Return the layout; the family of a model, which is not read here, decides on t and e of FSDP."""
    if layout.backend == "fsdp" and max(layout.tp, layout.ep) > 1:
        other = replace(layout, backend="megatron")
        source.note(f"{layout} is for the families of docs/fsdp.md; for others `-- policy.backend={other}`")
    return layout


def engine(source: Source) -> dict[str, Any]:
    ours, theirs = roles(source)
    if theirs is None:
        return {}
    places = ("rollout.backend", "allocation_mode")
    name = shared.engine_name(source, next((key for key in places if source.text(key)), places[0]), theirs.backend)
    tp, shares = theirs.tp * theirs.pp, is_colocated(source)
    share = "sglang.mem_fraction_static" if theirs.backend == "sglang" else "vllm.gpu_memory_utilization"
    values: dict[str, Any] = {"engine.memory_fraction": source.number(share)}
    replicas = theirs.dp
    if shares:
        tp = tp if ours.world_size % tp == 0 else 1
        replicas = ours.world_size // tp
        # Leave memory for the trainer on the same GPUs.
        values["engine.memory_fraction"] = min(source.number(share) or 0.5, 0.6)
        if name == "sglang" and steps_ahead(source):
            # Its servers would leave the GPUs while the policy trains, and with them the responses in flight.
            values["engine.sleep"] = False
    values |= shared.engine(ours.world_size if shares else theirs.dp * tp, tp, name=name, is_apart=not shares)
    if theirs.backend == "vllm":
        values["engine.max_num_seqs"] = source.whole("vllm.max_num_seqs")
        if source.flag("vllm.enforce_eager"):
            values["engine.vllm.enforce_eager"] = True
    elif source.flag("sglang.enable_deterministic_inference"):
        values["engine.sglang.enable_deterministic_inference"] = True
    at_once = source.whole("rollout.max_concurrent_rollouts") or source.count("train_dataset.batch_size")
    if (ahead := steps_ahead(source)) and at_once < (ahead + 1) * source.count("train_dataset.batch_size"):
        samples = at_once * source.count("gconfig.n_samples")
        values |= shared.at_once(samples, replicas, values.get("engine.max_num_seqs"))
    return values
