"""`fivefold plan`: a model and a cluster -> the fastest configurations, as text, JSON and YAML. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from fivefold.config import RunConfig
from fivefold.config.gpus import GPUS
from fivefold.config.roles import further_sections
from fivefold.errors import UserError
from fivefold.hub import model_snapshot
from fivefold.models.families import load_spec
from fivefold.models.spec import ModelSpec
from fivefold.plan.devices import local_gpu_kind
from fivefold.plan.efficiency import Efficiencies, flash_runs_on, load_rates
from fivefold.plan.estimate import Lengths, describe_parts
from fivefold.plan.hardware import Cluster
from fivefold.plan.search import Candidate, Space
from fivefold.plan.tokenizer_files import is_hub_id

_PARTS_LEAST = 0.002
"""Smallest share of a step at which a part is printed."""


@dataclass(frozen=True)
class Proposal:
    """Proposed runs of one workload on one cluster, the fastest first."""

    base: RunConfig
    """Run that the proposals change, with the model's own name."""
    spec: ModelSpec
    cluster: Cluster
    rates: Efficiencies
    lengths: Lengths
    candidates: list[Candidate]
    changes: dict[str, Any]
    """Keys from the command line, which the proposed run also gets."""
    has_file: bool
    """True if the run comes from a file, into which the YAML is pasted; otherwise the YAML is the whole file."""


def propose(
    base: RunConfig,
    cluster: Cluster,
    lengths: Lengths,
    count: int = 3,
    calibration: Path | None = None,
    *,
    changes: dict[str, Any],
    has_file: bool,
) -> Proposal:
    """Return the fastest runs of a model and batch on a cluster; raise ValueError if none fits or the model is unknown.

    `changes` are keys of the base run that are not in its file.
    """
    directory = model_directory(base.model.described_by(base.model.path))
    rates = Efficiencies(load_rates(calibration), cluster.gpu)
    # Sizes are read from the model's files. The search chooses the layouts, so the layouts already set are removed.
    searched = replace(
        _on_policy_layout(base),
        model=replace(base.model, path=str(directory)),
        launch=replace(base.launch, gpu=cluster.gpu, allocation=None),
        trainer=replace(base.trainer, device="auto"),
    )
    spec = load_spec(directory)
    candidates = Space(spec, searched, cluster, rates, lengths).search(count)
    return Proposal(base, spec, cluster, rates, lengths, candidates, changes, has_file)


def _on_policy_layout(config: RunConfig) -> RunConfig:
    """Return the configuration with every model on the policy's layout."""
    for name, section in further_sections(config).items():
        config = _replaced(config, name.split("."), replace(section, backend=None))
    return config


def _replaced(section: Any, path: list[str], value: Any) -> Any:
    """Return `section` with the value at `path` replaced by `value`."""
    inner = value if len(path) == 1 else _replaced(getattr(section, path[0]), path[1:], value)
    return replace(section, **{path[0]: inner})


def base_run(tree: dict[str, Any], changes: dict[str, Any]) -> RunConfig:
    """Return the run to plan: the keys of a file, if there is one, with changes."""
    tree = _merged(tree, changes)
    if not isinstance(tree.get("model"), dict) or "path" not in tree["model"]:
        raise UserError("name the model: --model DIRECTORY, a hub id, or a run's YAML file")
    return RunConfig.from_tree(tree)


def gpu_or_refuse(name: str | None) -> str:
    """Return the GPU's name, or that of this machine's GPU; raise ValueError if neither is known."""
    gpu = name or local_gpu_kind()
    if gpu is None:
        raise UserError(f"this machine has no known GPU: pass --gpu with one of {', '.join(GPUS)}")
    return gpu


def model_directory(model: str) -> Path:
    """Return the directory with the model's config.json; for a hub name, only that file is downloaded."""
    if Path(model).is_dir():
        return Path(model)
    if not is_hub_id(model):
        raise UserError(f"no directory {model}, and no hub id, which is written owner/name: name the model with --model")
    try:
        return model_snapshot(model, ["config.json"])
    except UserError as error:
        raise UserError(f"{error}; a directory with its config.json is enough: --model DIRECTORY") from error


def as_tree(proposal: Proposal, candidate: Candidate) -> dict[str, Any]:
    """Return the keys to paste: the chosen ones, or the whole run if there was no file."""
    base, config = proposal.base, candidate.config
    policy, engine = config.policy, config.engine
    chosen: dict[str, Any] = {
        "backend": policy.backend,
        "recompute": policy.recompute,
        "tokens_per_micro_batch": policy.tokens_per_micro_batch,
    }
    if policy.offload != base.policy.offload:
        chosen["offload"] = {name: getattr(policy.offload, name) for name in ("parameters", "gradients", "optimizer")}
    if policy.megatron.pipeline != base.policy.megatron.pipeline:
        chosen["megatron"] = {"pipeline": policy.megatron.pipeline}
    tree: dict[str, Any] = {"policy": chosen}
    if not base.algorithm.offline and not engine.url:
        tree["engine"] = {"backend": engine.backend, "memory_fraction": engine.memory_fraction}
        if engine.placement != base.engine.placement or engine.is_apart:
            tree["engine"]["placement"] = engine.placement
        if engine.mode != base.engine.mode:
            tree["engine"]["mode"] = engine.mode
        if engine.processes != base.engine.processes:
            tree["engine"]["processes"] = engine.processes
    tree["launch"] = {"gpu": proposal.cluster.gpu} | ({} if base.launch.allocation is None else {"allocation": None})
    for name, section in further_sections(base).items():
        if section.backend is not None:
            *parents, last = name.split(".")
            node = tree
            for parent in parents:
                node = node.setdefault(parent, {})
            node[last] = {"backend": None}
    run: dict[str, Any] = {}
    if not proposal.has_file:
        data, algorithm = base.data, base.algorithm
        bounds = ("train", "prompts_per_step", "max_prompt_tokens", "max_response_tokens")
        run = {
            "model": {"path": base.model.path},
            "data": {name: getattr(data, name) for name in bounds},
            "algorithm": {"name": algorithm.name, "group_size": algorithm.group_size},
        }
    return _merged(_merged(run, proposal.changes), tree)


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merge both trees; where a key is in both, `above` wins."""
    merged = dict(below)
    for key, value in above.items():
        inner = merged.get(key)
        merged[key] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged


def as_yaml(proposal: Proposal, candidate: Candidate) -> str:
    """Return the keys to paste, as YAML text."""
    return yaml.safe_dump(as_tree(proposal, candidate), sort_keys=False, default_flow_style=None, width=110)


def as_json(proposal: Proposal) -> dict[str, Any]:
    """Return everything as a mapping for programs: seconds, bytes, and the keys to paste."""
    rows = []
    for one in proposal.candidates:
        estimate = one.estimate
        rows.append(
            {
                "seconds": estimate.seconds,
                "tokens_per_second": estimate.tokens_per_second,
                "cost_per_million_tokens": estimate.cost_per_million(proposal.cluster),
                "parts": estimate.parts,
                "overlapped": estimate.overlapped,
                "memory": {name: {**parts, "total": sum(parts.values())} for name, parts in estimate.memory.phases.items()},
                "micro_batches": estimate.micro_batches,
                "limit": estimate.limit,
                "run": as_tree(proposal, one),
            }
        )
    return {"cluster": vars(proposal.cluster), "lengths": vars(proposal.lengths), "runs": rows}


def describe(proposal: Proposal) -> str:
    """Describe the best runs with their times, memory and YAML."""
    cluster, lengths, config, spec = proposal.cluster, proposal.lengths, proposal.base, proposal.spec
    nodes = -(-cluster.gpus // cluster.node_gpus)
    lines = [
        f"model    {config.model.path}: {spec.family}, {spec.parameters / 1e9:,.2f} billion parameters",
        f"cluster  {cluster.gpus} x {cluster.gpu}, {nodes} node{'s' if nodes > 1 else ''}",
        f"step     {config.samples_per_step} samples, prompts of {lengths.prompt:.0f} and responses of "
        f"{lengths.response:.0f} tokens on average",
        f"rates    {_origin(proposal)}",
    ]
    for number, one in enumerate(proposal.candidates, 1):
        lines += ["", *_describe(proposal, number, one)]
    return "\n".join(lines)


def _origin(proposal: Proposal) -> str:
    """Describe the source of the rates."""
    gpu, rates = proposal.cluster.gpu, proposal.rates
    attention = ', attention of flash-attn-4 (pip install "fivefold[flash]")' if flash_runs_on(gpu) else ""
    if rates.measured_here:
        return f"measured on {gpu}{attention}"
    others = sorted({hardware for hardware in rates.sources.values() if hardware != gpu})
    scaled = f"measured on {', '.join(others)}, scaled by the data sheets{attention}"
    return f"{scaled}: `fivefold plan --calibrate` on {gpu} replaces them"


def _describe(proposal: Proposal, number: int, candidate: Candidate) -> list[str]:
    config, estimate = candidate.config, candidate.estimate
    engine = "" if config.algorithm.offline else f", {config.engine.backend} {config.engine.placement}"
    engine += f", {config.engine.process_count} processes" if config.engine.process_count > 1 else ""
    cost = estimate.cost_per_million(proposal.cluster)
    price = "" if cost is None else f", {cost:.3g} a million tokens"
    overlap = ", ".join(f"{name} {seconds:.2f}" for name, seconds in estimate.overlapped.items() if seconds >= 0.005)
    return [
        f"{number}. {config.policy.backend}{engine}: {estimate.seconds:.1f} s a step, "
        f"{estimate.tokens_per_second:,.0f} tokens/s{price}",
        f"time     {describe_parts(estimate, _PARTS_LEAST)}",
        *([f"overlap  {overlap}"] if overlap else []),
        "memory   " + "\n         ".join(estimate.memory.table()),
        f"limit    {estimate.limit}",
        "",
        as_yaml(proposal, candidate).rstrip(),
    ]
