"""Translate SkyRL: its `key=value` settings, and the Hydra keys of the older package skyrl-train (PR #223 and later).

skyrl_algorithm.py translates the method, skyrl_model.py the models, this file the rest of RL. Behavior that only SkyRL's
code defines was read in SkyRL a9564572e (2026-08-21); comments and notes cite the place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from fivefold_dialects import shared, skyrl_sft
from fivefold_dialects.known import known
from fivefold_dialects.legacy import skyrl as legacy
from fivefold_dialects.skyrl_algorithm import METHOD, constant_scale
from fivefold_dialects.skyrl_model import CHOICES, FIELDS, low_rank, optimizer, policy
from fivefold_dialects.source import Source, UnreadableError, typed
from fivefold_dialects.system import System
from fivefold_dialects.table import Derived, Table, load, table, when

_ALGORITHM, _POLICY, _ENGINE = "trainer.algorithm.", "trainer.policy.", "generator.inference_engine."
_MEGATRON = _POLICY + "megatron_config."
_COLOCATED = "trainer.placement.colocate_all"
FLASHRL = "main_dapo_flashrl"
_URLS = (_ENGINE + "external_server_urls", _ENGINE + "remote_urls", "generator.remote_inference_engine_urls")
"""Keys with the addresses of servers that already run; the oldest keys have host:port."""
_PAIR = re.compile(r"([A-Za-z_]\w*)\s*:\s*('[^']*'|\"[^\"]*\"|[^,{}]+)")


def gpus(source: Source) -> int:
    return source.count("trainer.placement.policy_num_nodes") * source.count("trainer.placement.policy_num_gpus_per_node")


def program_of(source: Source) -> str:
    return (source.text("-m") or "main_base").rpartition(".")[2]


def program(source: Source) -> dict[str, Any]:
    name, programs = program_of(source), load("skyrl")["programs"]
    for example, (key, function) in programs["examples"].items():
        if example != name and source.text(key) == function:
            source.lacks(key, f"the function {function}: SkyRL registers it in the program {example} only, not in {name}")
    if name == FLASHRL:
        note = "FlashRL's engine samples with weights in fp8, also for int8"
        source.note(f"{note}: vLLM computes them from the policy's in each step")
        return {"engine.vllm.quantization": "fp8"}
    if name not in (*programs["trained"], *programs["examples"]):
        other = "a program other than main_base: it may do things that no key shows"
        source.lacks("-m", programs["others"].get(name, other))
    return {}


def template(source: Source) -> dict[str, Any]:
    """Return our key of the chat template's variables, which may be single keys or one text `{name:value}`."""
    start = "generator.chat_template_kwargs"
    ours = {key.removeprefix(f"{start}."): source.value(key) for key in source.keys(f"{start}.")}
    if source.has(start) and (written := source.raw(start)) not in (None, "null", "{}", {}):
        pairs = written if isinstance(written, dict) else dict(_PAIR.findall(str(written)))
        if not pairs:
            raise UnreadableError(f"{start} must be a mapping: got {written!r}")
        ours |= {name: typed(value) if isinstance(value, str) else value for name, value in pairs.items()}
    return {"data.chat_template_kwargs": ours} if ours else {}


def steps_ahead(source: Source) -> int:
    """Return how many steps the program samples ahead: as configured in main_fully_async, 1 in main_async, otherwise 0."""
    name = program_of(source)
    if name.endswith("fully_async") or source.flag("trainer.fully_async.enabled"):
        return source.count("trainer.fully_async.max_staleness_steps")
    return 1 if name == "main_async" else 0


def ahead(source: Source) -> dict[str, Any]:
    if not (steps := steps_ahead(source)):
        return {}
    if source.flag(_COLOCATED):
        source.lacks(_COLOCATED, "asynchronous training on shared GPUs, which SkyRL refuses: set it to false")
    if program_of(source) == "main_async" and not source.flag("trainer.fully_async.enabled"):
        return shared.ahead(steps, "finish")
    if source.count("trainer.train_batch_size") != source.count("trainer.policy_mini_batch_size"):
        reason = "which fully asynchronous training refuses: set both to the same number"
        source.lacks("trainer.policy_mini_batch_size", f"another number than train_batch_size, {reason}")
    return shared.ahead(steps, "continue", "carry")


def longest(source: Source) -> int:
    """Return the length of the longest sequence: turns begin with at most max_input_length tokens."""
    limit = source.whole("generator.max_input_length") if environment(source) else None
    prompt = limit or source.count("trainer.max_prompt_length")
    return prompt + source.count("generator.sampling_params.max_generate_length")


def micro_batch(source: Source) -> dict[str, Any]:
    budget = source.whole("trainer.max_tokens_per_microbatch") or -1
    count = 1 if budget > 0 else source.count("trainer.micro_train_batch_size_per_gpu")
    return {"policy.tokens_per_micro_batch": max(budget, count * longest(source))}


def megatron(source: Source, role: str = "policy") -> str:
    """Return the section of Megatron-Core of a model; "" with FSDP."""
    if source.text("trainer.strategy") != "megatron":
        return ""
    return f"megatron_config.{role}." if legacy.megatron(source) else f"trainer.{role}.megatron_config."


def layout(source: Source) -> dict[str, Any]:
    recomputes = source.flag("trainer.gradient_checkpointing")
    ours = policy(source, gpus(source), megatron(source), _POLICY, recomputes=recomputes)
    ours |= optimizer(source, _POLICY, "policy", constant_scale(source), megatron(source))
    if source.flag(_COLOCATED) and source.flag(_POLICY + "optimizer_config.offload_after_step"):
        ours["policy.offload.optimizer"] = True
    return ours


def uses_reference(source: Source) -> bool:
    return source.flag(_ALGORITHM + "use_kl_loss") or source.flag(_ALGORITHM + "use_kl_in_reward")


def reference(source: Source) -> dict[str, Any]:
    """Return our keys of the reference's layout with Megatron-Core; report its options that are not the policy's."""
    path = {"reference.path": source.path("trainer.ref.model.path")}
    if not megatron(source):
        return path
    section, of_policy = source.under(megatron(source, "ref")), source.under(megatron(source))
    for key in (*section.keys("model_config_kwargs"), *section.keys("transformer_config_kwargs.")):
        if (value := section.value(key)) not in ({}, of_policy.value(key)) and "recompute" not in key:
            section.lacks(key, f"a reference with {value}, where the policy has {of_policy.value(key)}")
    policy_layout = shared.world_layout(gpus(source), **shared.parallel_sizes(of_policy))
    return path | shared.role_layout(section, "reference", policy_layout)


def uses_critic(source: Source) -> bool:
    return source.text(_ALGORITHM + "advantage_estimator") == "gae"


def critic(source: Source) -> dict[str, Any]:
    learns = optimizer(source, "trainer.critic.", "critic")
    return FIELDS["critic"](source) | learns | low_rank(source, "trainer.critic.", "critic")


def sampling(source: Source) -> dict[str, Any]:
    limit, prompt = source.whole("generator.max_input_length"), source.count("trainer.max_prompt_length")
    if limit is not None and limit < prompt:
        source.lacks("generator.max_input_length", f"less than trainer.max_prompt_length = {prompt}, which SkyRL refuses")
    return FIELDS["sampling"](source.under("generator.sampling_params."))


def evaluation(source: Source) -> dict[str, Any]:
    """Return our keys of sampling in evaluation: greedy, or by SamplingParams' defaults once it has a key of its own."""
    chosen, response = source.under("generator.eval_sampling_params."), "generator.sampling_params.max_generate_length"
    has_defaults = chosen.keys("") and not legacy.is_before_2026_04(source)
    if has_defaults and not chosen.has("max_generate_length") and source.count(response) != 1024:
        source.note("SkyRL ends responses in evaluation at 1024 tokens, the default of eval_sampling_params")
    temperature = chosen.number("temperature", 1.0 if has_defaults else 0.0)
    return FIELDS["evaluation"](source) | {"eval.temperature": temperature} if temperature else {"eval.samples": 0}


def servers(source: Source) -> list[str]:
    """Return the addresses of engines that already run; empty if the program starts the engines."""
    key = legacy.of_engine(source, "run_engines_locally")
    if not (source.has(key) and not source.flag(key)) and not source.has(_URLS[0]):
        return []
    named = [url for name in _URLS if source.has(name) for url in source.texts(name)]
    if not named:
        raise UnreadableError(f"{key}=false needs the addresses of engines: {_URLS[0]}")
    return [url if "://" in url else f"http://{url}" for url in named]


def engine(source: Source) -> dict[str, Any]:
    def key(name: str) -> str:
        return legacy.of_engine(source, name)

    tp, ep, pp, dp = (source.whole(key(f"{of}_parallel_size")) or 1 for of in ("tensor", "expert", "pipeline", "data"))
    replicas = source.count(key("num_engines")) * dp
    # Engines that are sharded over pipeline stages in SkyRL use tensor parallelism here.
    tp, ep = tp * pp, ep if ep == tp * pp else 1
    is_colocated, backend = source.flag(_COLOCATED), source.text(key("backend"))
    if urls := servers(source):
        if is_colocated:
            source.lacks(_COLOCATED, "engines that already run elsewhere cannot share the policy's GPUs: set it to false")
        if (backend or "vllm") not in ("vllm", "sglang"):
            source.lacks(key("backend"), f"servers of {backend}: known here are vllm and sglang")
        return {"engine.backend": backend or "vllm", "engine.url": urls}
    if is_colocated and replicas * tp != gpus(source):
        source.lacks(key("num_engines"), f"engines on {replicas * tp} GPUs, colocated with a policy on {gpus(source)}")
    values: dict[str, Any] = {
        "engine.memory_fraction": source.number(key("gpu_memory_utilization")),
        "engine.max_num_seqs": source.whole(key("max_num_seqs")),
    }
    ours = shared.engine_name(source, key("backend"), backend)
    values |= shared.engine(replicas * tp, tp, ep, ours, is_apart=not is_colocated)
    if backend == "vllm":
        for name in ("enforce_eager", "enable_prefix_caching", "enable_chunked_prefill", "max_num_batched_tokens"):
            if source.has(key(name)):
                read = source.whole if name == "max_num_batched_tokens" else source.flag
                values[f"engine.vllm.{name}"] = read(key(name))
    workers = source.whole("trainer.fully_async.num_parallel_generation_workers") or 0
    if steps_ahead(source) and 0 < workers < (steps_ahead(source) + 1) * source.count("trainer.train_batch_size"):
        samples = workers * source.count("generator.n_samples_per_prompt")
        values |= shared.at_once(samples, replicas, values["engine.max_num_seqs"])
    return values


def profile(source: Source) -> dict[str, Any]:
    """Return our keys of the steps that SkyRL's profiler records, by the schedule of torch.profiler."""
    for profiler in (source.under(start + "torch_profiler_config.") for start in (_POLICY, _MEGATRON)):
        if profiler.flag("enable"):
            first, wait, warmup = (profiler.whole(name) or 0 for name in ("skip_first", "wait", "warmup"))
            active, repeat = (profiler.whole(name) or 1 for name in ("active", "repeat"))
            if active * repeat > 10_000:
                raise UnreadableError(f"{profiler.prefix}active x repeat is at most 10000: got {active} x {repeat}")
            begins = [first + wait + warmup + cycle * (wait + warmup + active) for cycle in range(repeat)]
            steps = [begin + step for begin in begins for step in range(1, active + 1)]
            return {"trainer.profile.steps": steps, "trainer.profile.ranks": [*map(int, profiler.numbers("ranks"))] or None}
    return {}


def changed_config(source: Source) -> dict[str, Any]:
    """Return our key of values that replace those in config.json."""
    changed = source.mapping(f"{_POLICY}model_config_kwargs") | source.mapping(f"{_MEGATRON}model_config_kwargs")
    return {f"model.overrides.{name}": value for name, value in changed.items()}


def router_replay(source: Source) -> dict[str, Any]:
    key, by_engine = _MEGATRON + "moe_enable_routing_replay", source.flag(_ENGINE + "enable_return_routed_experts")
    if source.text("trainer.strategy") != "megatron" or not source.flag(key):
        return {}
    if not by_engine:
        source.lacks(key, "R3 without the engine's enable_return_routed_experts, which SkyRL refuses too")
    return shared.replayed("R3")


def environment(source: Source) -> str | None:
    """Return the environment of SkyRL-gym that takes several turns; None for those that end after the first."""
    chosen = CHOICES["environment.env_class"].names.get(source.text("environment.env_class") or "", {})
    return chosen.get("environment.class")  # type: ignore[no-any-return]


def turns(source: Source) -> dict[str, Any]:
    if environment(source) is None:
        return {}
    if is_step_wise := source.flag("generator.step_wise_trajectories"):
        FIELDS["step_wise"](source)
    return FIELDS["turns"](source) | {
        "environment.history": "template" if is_step_wise else "append",
        "environment.max_observation_tokens": longest(source),
        "data.max_total_tokens": longest(source),
        "engine.mode": None if servers(source) else "server",
    }


def rewards(source: Source) -> dict[str, Any]:
    chosen = CHOICES["environment.env_class"]
    if chosen.name(source) == "aime" and source.text(_ALGORITHM + "advantage_estimator") in ("gae", "reinforce++"):
        source.lacks(chosen.key, "rewards of -1 and 1, of which only the difference is kept here")
    return dict(chosen.read(source))


def run(source: Source) -> dict[str, Any]:
    mode = (source.text("trainer.resume_mode") or "none").lower()
    return {
        "trainer.resume": {"latest": "auto", "none": "never"}.get(mode, source.text("trainer.resume_path")),
        "trainer.eval_every": source.interval("trainer.eval_interval") if source.items("data.val_data") else 0,
    }


def router(source: Source, key: str) -> str | None:
    return source.text(key) if (source.whole(_MEGATRON + "expert_model_parallel_size") or 1) > 1 else None


BATCH = partial(shared.updates, step="trainer.train_batch_size", update="trainer.policy_mini_batch_size")
DERIVED: tuple[Derived, ...] = (
    *(*METHOD, program, template, ahead, BATCH, layout, micro_batch, partial(low_rank, section=_POLICY), run, profile),
    *(*when(uses_reference, reference), *when(uses_critic, critic), FIELDS["adapters_of_megatron"], sampling, engine),
    *(router_replay, FIELDS["evaluated"], evaluation, rewards, turns, changed_config, FIELDS["tracking"]),
)
TABLE = table(
    "skyrl", DERIVED, {"router": router}, load("legacy/skyrl"), release_of=legacy.release_of, known=known("skyrl"),
    elsewhere={legacy.TOKEN_MEAN: "token-mean"},
)  # fmt: skip
SFT = table("skyrl_sft", skyrl_sft.DERIVED, known=known("skyrl"))


def table_of(settings: Mapping[str, Any]) -> Table:
    """Return the table for these settings: that of RL or of SFT."""
    return SFT if skyrl_sft.looks_like(settings) else TABLE


translate = System("skyrl", (TABLE, SFT), table_of, ("ppo_base_config",))
