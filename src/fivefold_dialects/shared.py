"""Functions of a Source for several systems: conversions of values, options of Megatron-Core, layouts."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

from fivefold.config.engine import EngineConfig
from fivefold.config.mcore_options import is_option, refusal, section_of, without_effect
from fivefold.config.packages import BRIDGES, missing_packages
from fivefold.layout import ParallelLayout
from fivefold_dialects.source import Source, UnreadableError
from fivefold_dialects.table import fields, load, spelled_out, table

_KINDS = ("estimators", "dtypes", "aggregates")
_NAMES: list[dict[str, str]] = [spelled_out(load("shared")[kind]) for kind in _KINDS]
ESTIMATORS, DTYPES, AGGREGATES = _NAMES
"""Names in other systems of KL estimators, data types, and (in verl) how the loss is averaged -> our names."""
TEXTS: dict[str, str] = load("shared")["texts"]
"""Sentences for users of several systems."""


def without_critic(source: Source, key: str, most: int) -> dict[str, Any]:
    """Return no keys; refuse a warm-up of more than `most`, since a run without a critic would learn nothing in it."""
    if (source.whole(key) or 0) > most:
        source.lacks(key, TEXTS["frozen"])
    return {}


def epochs_and_steps(source: Source) -> dict[str, Any]:
    """Return our keys of a verl run's length: its epochs, or its steps if these end earlier."""
    steps, epochs = source.whole("trainer.total_training_steps") or 0, source.count("trainer.total_epochs")
    return {"trainer.epochs": epochs} | ({"trainer.steps": steps, "trainer.ends_with_data": True} if steps > 0 else {})


def response_tokens(source: Source) -> int:
    """Return the longest response of a verl run: the engine's own limit, which is the data's if it is left out."""
    return source.whole("actor_rollout_ref.rollout.response_length") or source.count("data.max_response_length")


_MODULES: Mapping[str, str] = load("shared")["modules"]
"""Modules of Megatron-Core -> Hugging Face's names of the linear layers that each consists of."""
_OF_A_PATTERN = frozenset("*$|()[]^\\+?")


def modules(source: Source, key: str) -> list[str] | None:
    """Return the names of linear layers from a list or a text with commas; None if there are none or they form a pattern."""
    names = [name.strip() for text in source.texts(key) for name in text.split(",") if name.strip()]
    if any(_OF_A_PATTERN & set(name) for name in names):
        source.lacks(key, "a pattern of module names: name the linear layers, as q_proj, k_proj")
        return None
    return list(dict.fromkeys(ours for name in names for ours in _MODULES.get(name, name).split())) or None


def adapters(source: Source, ours: str, system: str, group: str = "adapters") -> dict[str, Any]:
    """Return our keys of the adapters of model `ours`, by a group of fields of the system; empty if it has no adapters."""
    values = fields(system, {"modules": modules})[group](source)
    return {f"{ours}.lora.{name}": value for name, value in values.items()} if (values.get("rank") or 0) > 0 else {}


def updates(source: Source, step: str, update: str) -> dict[str, int]:
    """Return our keys of a step's prompts and updates, from the keys with the prompts of a step and of an update."""
    prompts, mini = source.count(step), source.count(update)
    if not 0 < mini <= prompts:
        raise UnreadableError(f"{update} = {mini} must be in 1 to {step} = {prompts}")
    if prompts % mini:
        source.lacks(update, f"updates of unequal size: {step} = {prompts} is no multiple of it")
    return {"data.prompts_per_step": prompts, "algorithm.updates_per_step": prompts // mini}


def parallel_sizes(section: Source) -> dict[str, int]:
    """Return tp, pp, cp, ep and etp by Megatron's names; by default experts are split over tp as other weights are."""
    ours = {
        short: section.whole(f"{name}_parallel_size") or 1
        for short, name in (("tp", "tensor_model"), ("pp", "pipeline_model"), ("cp", "context"), ("ep", "expert_model"))
    }
    return ours | {"etp": section.whole("expert_tensor_parallel_size") or (ours["tp"] if ours["ep"] > 1 else 1)}


def ulysses(*sections: Source) -> int:
    """Return the context-parallel size: the largest of Ulysses in these sections."""
    return max(section.whole("ulysses_sequence_parallel_size") or 1 for section in sections)


def penalties(source: Source, loss: dict[str, Any], reward: dict[str, Any], moving: str) -> dict[str, Any]:
    """Return our keys of the KL in the loss and of the KL in the reward; each argument is empty if its KL is off.
    With both, no coefficient can adapt: then the key `moving`, which turns this on, is reported as not supported."""
    if loss and reward:
        if "target" in {**loss, **reward}:
            source.lacks(moving, "two KL penalties, one with an adaptive coefficient")
        ours = {**loss, "place": "loss", "reward_coef": reward["coef"], "reward_estimator": reward["estimator"]}
    elif loss or reward:
        ours = {**(loss or reward), "place": "loss" if loss else "reward"}
    else:
        ours = {"coef": 0.0}
    return {f"algorithm.kl.{key}": value for key, value in ours.items()}


VIRTUAL = "virtual_pipeline_model_parallel_size"


def estimator(source: Source, key: str, usual: str) -> str:
    """Return our name of the KL estimator in the key."""
    return ESTIMATORS[source.one_of(key, ESTIMATORS, "estimator", usual)]


def virtual_stages(section: Source, ours: str, key: str = VIRTUAL) -> dict[str, int]:
    """Return our key of a model's virtual pipeline stages per rank; empty for one."""
    count = section.whole(key) or 1
    return {f"{ours}.megatron.pipeline.{VIRTUAL}": count} if count > 1 else {}


def dtype(source: Source, key: str) -> str | None:
    """Return PyTorch's name of a data type; None if the key is left out or is auto."""
    if (name := source.text(key)) in (None, "auto"):
        return None
    if name not in DTYPES:
        source.lacks(key, f"numbers of the type {name}: known here are {', '.join(DTYPES)}")
    return DTYPES.get(str(name), "bfloat16")


def engine_name(source: Source, key: str, name: str | None) -> str:
    """Return our name of the engine in the key, vllm or sglang; add a note if SGLang is not installed."""
    if name == "trtllm":
        reason = "TensorRT-LLM: vLLM samples instead, from the same distribution, with other kernels"
        source.lacks(key, reason, changes_result=False)
    if name != "sglang":
        return "vllm"
    if missing_packages(("sglang",)):
        source.note(
            f"{key}: SGLang is not installed here, and `train` needs it: pip install sglang (docs/engines.md), or set "
            "engine.backend to the same layout of vllm"
        )
    return "sglang"


def bridge(source: Source, key: str, kind: str, ours: str, lacks: str | None) -> dict[str, Any]:
    """Return our key of the library that loads and exports a model; report that our tables do it where it `lacks` a part."""
    if lacks is not None:
        source.fixed(key, f"our own tables load and export the same bits: {kind} has no {lacks}")
        return {}
    if missing_packages(BRIDGES[kind]):
        source.note(
            f"{source.prefix}{key}: {kind} is not installed here, and `train` needs it: docs/bridges.md has the line that "
            f"installs it; `-- {ours}.megatron.bridge_type=native` loads the same weights without it"
        )
    return {f"{ours}.megatron.bridge_type": kind}


def world_layout(
    world: int, backend: str = "megatron", /, *, tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, etp: int = 1
) -> ParallelLayout:
    """Return the layout of `world` GPUs with these sizes; raise UnreadableError if the GPUs do not divide into it."""
    replica = tp * pp * cp
    if world < 1 or world % replica:
        raise UnreadableError(f"{world} GPUs cannot be divided into replicas of t{tp}·p{pp}·c{cp} = {replica}")
    try:
        return ParallelLayout(backend, dp=world // replica, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp)
    except ValueError as error:
        raise UnreadableError(str(error)) from None


def engine_layout(world: int, tp: int, ep: int = 1, name: str = "vllm") -> str:
    """Return an engine's layout over `world` GPUs, as `vllm:d4t2`."""
    if world % tp:
        raise UnreadableError(f"{world} GPUs cannot be divided into engines of {tp}")
    return f"{name}:d{world // tp}t{tp}" + (f"e{ep}" if ep > 1 else "")


def engine(world: int, tp: int, ep: int = 1, name: str = "vllm", *, is_apart: bool) -> dict[str, Any]:
    """Return our keys of an engine over `world` GPUs, the policy's or, if it is apart, its own."""
    return {"engine.backend": engine_layout(world, tp, ep, name), "engine.placement": "apart" if is_apart else None}


def own_layout(
    source: Source, key: str, name: str, policy: ParallelLayout, backend: str = "megatron", /, **sizes: int
) -> dict[str, Any]:
    """Return our key of another model's layout on the policy's ranks; empty if it is the same, or if the ranks do not divide
    into the sizes of the source's `key`, which is reported."""
    try:
        layout = world_layout(policy.world_size, backend, **sizes)
    except UnreadableError as error:
        source.lacks(key, f"{error}; the model uses the policy's layout", changes_result=False)
        return {}
    return {} if layout.is_same(policy) else {f"{name}.backend": str(layout)}


def role_layout(megatron: Source, name: str, policy: ParallelLayout) -> dict[str, Any]:
    """Return our keys of another model's layout by its section of Megatron-Core; empty if it sets no size."""
    keys = [key for key in megatron.keys("") if key.endswith("_parallel_size") and key != VIRTUAL]
    ours = own_layout(megatron, keys[0], name, policy, **parallel_sizes(megatron)) if keys else {}
    return ours | (virtual_stages(megatron, name) if ours else {})


def own_options(options: Mapping[str, Any], of_policy: Mapping[str, Any], ours: str, trains: bool = True) -> dict[str, Any]:
    """Return our keys of a model's own options; empty if they are equal to the policy's, which it has by default.
    A model that does not train needs no options of recomputation, gradients and optimizer."""
    rest = ("recompute", ".ddp.", ".optimizer.")
    of_policy = {f"{ours}{key.removeprefix('policy')}": value for key, value in of_policy.items()}
    if not trains:
        both = (options, of_policy)
        options, of_policy = ({key: of[key] for key in of if not any(part in key for part in rest)} for of in both)
    if options == of_policy:
        return {}
    values: dict[str, Any] = {f"{ours}.recompute": "none"} if trains else {}
    if any(".megatron." in key for key in of_policy) and not any(".megatron." in key for key in options):
        # An empty section; without it the model would have the policy's options.
        values[f"{ours}.megatron.transformer"] = {}
    return {**values, **options}


def ahead(steps: float, interrupt: str, tail: str = "wait") -> dict[str, Any]:
    """Return our keys of sampling `steps` steps ahead of the trainer; empty for 0."""
    return {"rollout.max_staleness": steps, "rollout.interrupt": interrupt, "rollout.tail": tail} if steps > 0 else {}


def at_once(samples: int, replicas: int, usual: int | None) -> dict[str, int]:
    """Return engine.max_num_seqs so that at most `samples` are in flight; `usual` is the configured bound, if any."""
    return {"engine.max_num_seqs": min(max(1, -(-samples // replicas)), usual or EngineConfig().max_num_seqs)}


_OPTIONS = table({"name": "Megatron-Core", **load("shared")})
"""Fields of TransformerConfig, and of MindSpeed's, that have no effect or are not supported."""
_RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")


def megatron_options(source: Source, start: str, ours: str) -> dict[str, Any]:
    """Return the fields of TransformerConfig under `start` as keys of section `ours`; report fields that we set as fixed."""
    values: dict[str, Any] = {}
    options = source.under(f"{start}.")
    for name in options.keys(""):
        value = options.value(name)
        if name not in _RECOMPUTE and value is not None:
            option(options, name, name, value, ours, values)
    return values


_AS_HERE: dict[str, dict[str, Any]] = load("shared")["as_here"]


def options_of(kind: str, options: Source, ours: str, but: Container[str] = ()) -> dict[str, Any]:
    """Return fields of Megatron-Core's ddp or optimizer options, except `but`, as keys of section `ours`; report others."""
    values: dict[str, Any] = {}
    for name in (name for name in options.keys("") if name not in but and options.value(name) is not None):
        value, reason = options.value(name), refusal(kind, name)
        is_here = DTYPES.get(str(value), value) == _AS_HERE[kind].get(name, False)
        if not is_option(kind, name):
            options.lacks(name, f"Megatron-Core's {kind} options have no {name}")
        elif reason is not None and not is_here:
            changes_result = kind == "optimizer" or name.startswith("fp8")
            options.lacks(name, reason.replace("{section}", ours), changes_result=changes_result)
        elif reason is not None:
            options.fixed(name, "off")
        elif (reason := without_effect(kind, name)) is not None:
            options.fixed(name, reason)
        else:
            values[f"{ours}.megatron.{kind}.{name}"] = value
    return values


PARTS = {"parameters": "param", "gradients": "grad", "optimizer": "optimizer"}
"""Parts of a model that can be offloaded -> their names in verl."""


def offload(source: Source, section: str, ours: str) -> dict[str, Any]:
    """Return our keys of the parts of a model that verl's options of a section offload to the host."""
    return {f"{ours}.offload.{part}": True for part, name in PARTS.items() if source.flag(f"{section}{name}_offload")}


def replayed(mode: str | None) -> dict[str, Any]:
    """Return our keys of replaying the experts' routing: R2, R3 or None for off."""
    if mode != "R3":
        return {"policy.router_replay": mode}
    # In the trainer's ranks vLLM returns the routes of a replica to one rank only; other systems use servers as well.
    return {"policy.router_replay": mode, "engine.mode": "server"}


def option(source: Source, key: str, name: str, value: Any, ours: str, values: dict[str, Any]) -> None:
    """Put one field of TransformerConfig into `values`, or report why it has no effect or is not supported."""
    section = section_of(name)
    reason = refusal(section, name)
    if row := _OPTIONS.row(name):
        is_off = row.form == "fixed" or row.is_off(value)
        source.fixed(key, row.note if row.form == "fixed" else "off") if is_off else source.lacks(key, row.note)
    elif name == "moe_token_dispatcher_type" and value == "flex":
        source.lacks(key, "flex needs the package deep_ep; alltoall sends the same tokens", changes_result=False)
    elif name == "moe_enable_routing_replay" and value:
        source.lacks(key, "replaying the sampler's routing")
    elif name in ("batch_p2p_comm", "deallocate_pipeline_outputs") and value:
        source.fixed(key, "on wherever the stages allow it")
    elif (reason := reason or without_effect(section, name)) is not None:
        source.fixed(key, reason.replace("{section}", ours.removesuffix(".megatron")))
    elif not is_option(section, name):
        source.lacks(key, f"Megatron-Core {section} options have no {name}")
    else:
        values[f"{ours}.{section}.{name}"] = value


def moments(optim: Source, *, are_read: bool) -> dict[str, Any]:
    """Return our keys of the data types of Adam's moments, from the section `optim` of Megatron-Core or Automodel."""
    if not are_read:
        return {}
    ours = {name: DTYPES.get(optim.text(name) or "float32") for name in ("exp_avg_dtype", "exp_avg_sq_dtype")}
    for name in (name for name, value in ours.items() if value not in ("float32", "bfloat16")):
        optim.lacks(name, f"moments of the type {optim.text(name)}: known here are float32 and bfloat16")
    if set(ours.values()) == {"float32"}:
        return {}
    options = {**ours, "use_precision_aware_optimizer": True}
    return {f"policy.megatron.optimizer.{name}": value for name, value in options.items()}


def megatron_weights(
    source: Source, directory: str | None, roles: Iterable[tuple[str, str, str, bool]], has_reference: bool
) -> dict[str, Any]:
    """Return our keys of models whose weights are a Megatron-Core checkpoint; `directory` is the policy's Hugging Face one.
    Each of `roles` has our key of the model's path, its section, the key of its directory, and whether the model is used."""
    values: dict[str, Any] = {}
    for ours, section, key, is_there in roles:
        megatron = source.under(f"{section}megatron.")
        if not (megatron.flag("use_dist_checkpointing") and is_there):
            continue
        values[ours] = megatron.path("dist_checkpointing_path")
        if values[ours] is None:
            megatron.lacks("use_dist_checkpointing", "a checkpoint without dist_checkpointing_path, which must name it")
        if source.path(key) not in (None, directory):
            reason = "a Megatron-Core checkpoint of another model than the policy, whose config.json is model.config"
            megatron.lacks("use_dist_checkpointing", reason)
    if values and has_reference:
        values.setdefault("reference.path", directory)
    return {**values, "model.config": directory} if values else {}


def recompute(source: Source, start: str, ours: str) -> dict[str, Any]:
    """Return our key `recompute` for Megatron-Core's recompute_* options, or the options if it has no such value."""
    granularity = source.text(f"{start}.recompute_granularity")
    method, layers = source.text(f"{start}.recompute_method"), source.whole(f"{start}.recompute_num_layers")
    modules = source.texts(f"{start}.recompute_modules")
    if granularity is None:
        return {}
    if granularity == "full":
        options = {"method": method or "uniform", "num_layers": layers or 1}
        is_usual = options == {"method": "uniform", "num_layers": 1}
    else:
        options, is_usual = {"modules": modules}, modules in ([], ["core_attn"])
    if is_usual:
        return {f"{ours}.recompute": "full" if granularity == "full" else "selective"}
    options = {"granularity": granularity, **options}
    return {f"{ours}.megatron.transformer.recompute_{name}": value for name, value in options.items()}
