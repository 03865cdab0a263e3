"""verl: Hydra's keys of `verl.trainer.main_ppo` and the recipes over it, and of its SFT trainers.

verl_rows.py has what becomes of each key, verl_algorithm.py what several of them say of the method; here is the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fivefold.config.dialects import mtp, shared, verl_async, verl_older, verl_prime, verl_sft
from fivefold.config.dialects.adapters import of_verl
from fivefold.config.dialects.known import known
from fivefold.config.dialects.shared import EVERY_CHECKPOINT
from fivefold.config.dialects.source import Source, UnreadableError
from fivefold.config.dialects.table import Table
from fivefold.config.dialects.translator import dialect
from fivefold.config.dialects.verl_algorithm import (
    SPPO,
    advantage,
    correction,
    dynamic_sampling,
    estimator,
    kl,
    loss,
    overlong,
)
from fivefold.config.dialects.verl_defaults import DEFAULTS
from fivefold.config.dialects.verl_rows import SECTIONS

_A, _R, _M, _C = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model.", "critic."

PROGRAMS = (
    "verl.trainer.main_ppo",
    "recipe.dapo.main_dapo",
    "recipe.dapo.src.main_dapo",
    "verl.trainer.main_ppo_sync",
    "recipe.transfer_queue.main_ppo",
    "verl.experimental.transfer_queue.main_ppo",
    "recipe.entropy.main_entropy",
    SPPO,
    verl_prime.PROGRAM,
    "siirl.main_dag",
    "siirl.client.main_dag",
)
"""Programs whose configuration says all of what they do."""


OTHER_PROGRAMS = {
    "verl.trainer.main_ppo_pipeline": "rLLM's updates by mini-batches as they are sampled, the longest responses first, one "
    "of which is left for the next step",
}
"""Programs that are refused, with what they do besides their keys."""
OWN_REWARDS = {"recipe.entropy.main_entropy": "recipe/entropy/reward_score/__init__.py:_default_compute_score"}
"""Programs with a reward function of their own for all data, and its place beside verl."""


def is_megatron(source: Source) -> bool:
    """The actor trains with Megatron-Core: by its strategy, or by the configuration that it starts from."""
    for key in (_A + "strategy", "model_engine"):
        if source.has(key) and (chosen := source.text(key)) is not None:
            return chosen in ("megatron", "mindspeed")
    named = [source.text("--config-name") or "", *source.texts("defaults")]
    return any("megatron" in name for name in named) or source.text(_A + "strategy") == "megatron"


def gpus(source: Source) -> int:
    """Of the trainer."""
    of_node = "n_training_gpus_per_node" if verl_async.is_rllm(source) else "n_gpus_per_node"
    return source.count("trainer.nnodes") * source.count(f"trainer.{of_node}")


def program(source: Source) -> dict[str, Any]:
    name = source.text("-m")
    if name is not None and name not in (*PROGRAMS, *verl_async.DEFAULTS):
        usual = "another program than verl.trainer.main_ppo: it may do what no key says"
        source.lacks("-m", OTHER_PROGRAMS.get(name, usual))
    elsewhere = "GPUs of their own for sampling, of another program than one_step_off_policy and fully_async_policy"
    if not verl_async.is_separate(source) and source.has(_R + "nnodes") and source.whole(_R + "nnodes"):
        source.lacks(_R + "nnodes", elsewhere)
    if not verl_async.is_apart(source) and source.has("rollout.nnodes") and source.whole("rollout.nnodes"):
        source.lacks("rollout.nnodes", elsewhere)
    return verl_async.ahead(source)


def layout(source: Source) -> dict[str, Any]:
    if not is_megatron(source):
        cp = source.whole(_A + "ulysses_sequence_parallel_size") or 1
        if source.has(_A + "fsdp_config.ulysses_sequence_parallel_size"):
            cp = max(cp, source.whole(_A + "fsdp_config.ulysses_sequence_parallel_size") or 1)
        return {"policy.backend": str(shared.world_layout(gpus(source), cp=cp))}
    sizes = shared.parallel_sizes(source.under(_A + "megatron."))
    return {"policy.backend": str(shared.world_layout(gpus(source), **sizes))}


def megatron(source: Source) -> dict[str, Any]:
    if not is_megatron(source):
        return {}
    section = source.under(_A + "megatron.")
    found: dict[str, Any] = {"policy.sequence_parallel": section.flag("sequence_parallel")}
    virtual = section.whole("virtual_pipeline_model_parallel_size")
    if virtual is not None and virtual > 1:
        found["policy.megatron.pipeline.virtual_pipeline_model_parallel_size"] = virtual
    found |= shared.megatron_options(source, _A + "megatron.override_transformer_config", "policy.megatron")
    return found


def router_replay(source: Source) -> dict[str, Any]:
    """R3 where both trainer and engine are asked for it; verl fails where it is one of them, or R2 beside the engine."""
    mode, by_engine = None, source.flag(_R + "enable_rollout_routing_replay")
    for key in (f"{_A}{part}router_replay.mode" for part in ("megatron.", "veomni.", "")):
        said = source.text(key)
        if said in (None, "disabled"):
            continue
        if not is_megatron(source) and "veomni" not in key:
            source.fixed(key, "read by Megatron and VeOmni only")
        elif said not in ("R2", "R3"):
            source.lacks(key, f"the mode {said} of router replay: known here are R2 and R3")
        elif (said == "R3") != by_engine:
            source.lacks(key, f"{said} with rollout.enable_rollout_routing_replay: {by_engine}, with which verl fails")
        elif mode is None:
            mode = said
    return shared.replayed(mode)


def dtypes(source: Source) -> dict[str, Any]:
    """Of the policy, and of the engine where it is another; bfloat16 where nothing is said."""
    trainers = (
        ("megatron.dtype",) if is_megatron(source) else ("fsdp_config.dtype", "fsdp_config.mixed_precision.param_dtype")
    )
    found = {_R + "dtype": "bfloat16"}
    for key in (*(_A + name for name in trainers), _R + "dtype"):
        if source.has(key) and (name := source.text(key)) not in (None, "auto"):
            if name not in shared.DTYPES:
                source.lacks(key, f"numbers of the type {name}: known here are {', '.join(shared.DTYPES)}")
            found[key] = shared.DTYPES.get(str(name), "bfloat16")
    engine = found.pop(_R + "dtype")
    policy = next(iter(found.values()), "bfloat16")
    if source.text(_R + "dtype") == "auto":
        engine = policy
    return {"policy.dtype": None if policy == "bfloat16" else policy, "engine.dtype": None if engine == policy else engine}


def memory(source: Source) -> dict[str, Any]:
    """Recomputation and offload."""
    if is_megatron(source):
        found = shared.recompute(source, _A + "megatron.override_transformer_config", "policy")
        parts = {"parameters": "param", "gradients": "grad", "optimizer": "optimizer"}
        found |= {
            f"policy.offload.{part}": True for part, name in parts.items() if source.flag(f"{_A}megatron.{name}_offload")
        }
        optimizer = source.under(_A + "optim.override_optimizer_config.")
        for key in optimizer.keys(""):
            if optimizer.value(key) is None:
                continue
            if key not in (
                "optimizer_cpu_offload",
                "optimizer_offload_fraction",
                "overlap_cpu_optimizer_d2h_h2d",
                "use_precision_aware_optimizer",
            ):
                optimizer.lacks(key, "another setting of Megatron's optimizer: policy.megatron.optimizer has its fields")
            else:
                value = optimizer.value(key)
                if value not in (False, None) and optimizer.flag("optimizer_cpu_offload") | (key.startswith("use_")):
                    found[f"policy.megatron.optimizer.{key}"] = float(value) if key.endswith("fraction") else value
        return found
    found = {"policy.recompute": "full"} if source.flag(_M + "enable_gradient_checkpointing") else {}
    if source.flag(_A + "fsdp_config.param_offload"):
        found["policy.offload.parameters"] = True
    if source.flag(_A + "fsdp_config.optimizer_offload"):
        found["policy.offload.optimizer"] = True
    return found


def longest(source: Source) -> int:
    return source.count("data.max_prompt_length") + source.count("data.max_response_length")


def micro_batch(source: Source) -> dict[str, Any]:
    """A token budget as it is, times the ranks that share a sequence; a number of sequences at their longest."""
    tokens = longest(source)
    if source.flag(_A + "use_dynamic_bsz"):
        shared_by = _A + ("megatron.context_parallel_size" if is_megatron(source) else "ulysses_sequence_parallel_size")
        budget = source.count(_A + "ppo_max_token_len_per_gpu") * (source.whole(shared_by) or 1)
        return {"policy.tokens_per_micro_batch": max(budget, tokens)}
    sequences = source.whole(_A + "ppo_micro_batch_size_per_gpu")
    if sequences is None and (total := source.whole(_A + "ppo_micro_batch_size")) is not None:
        sequences = max(1, total // gpus(source))
    return {"policy.tokens_per_micro_batch": (sequences or 1) * tokens}


def batch(source: Source) -> dict[str, Any]:
    if verl_async.is_fully_async(source):
        return verl_async.batch(source)
    prompts, mini = source.count("data.train_batch_size"), source.count(_A + "ppo_mini_batch_size")
    if not 0 < mini <= prompts:
        raise UnreadableError(f"{_A}ppo_mini_batch_size = {mini} must be in 1 to data.train_batch_size = {prompts}")
    updates, rest = divmod(prompts, mini)
    if rest:
        source.lacks(
            _A + "ppo_mini_batch_size", f"updates of unequal size: data.train_batch_size = {prompts} is no multiple of it"
        )
    found = {"data.prompts_per_step": prompts, "algorithm.updates_per_step": updates}
    return verl_async.separate_batch(source, found) if verl_async.is_separate(source) else found


def optimizer(source: Source, role: str = _A, ours: str = "policy.optimizer") -> dict[str, Any]:
    said = source.under(role + "optim.")
    uses_megatron = is_megatron(source)
    found: dict[str, Any] = {"lr": said.number("lr"), "weight_decay": said.number("weight_decay")}
    if not uses_megatron:
        # verl does not hand betas to Megatron's optimizer, whose own are 0.9 and 0.999.
        found["betas"] = [float(beta) for beta in said.items("betas")]
        found["eps"] = said.number("eps")
        # The newer engine reads optim.clip_grad, the older workers grad_clip: whichever is set.
        set_there = said.has("clip_grad") and not source.has(role + "grad_clip")
        found["clip_grad"] = said.number("clip_grad") if set_there else source.number(role + "grad_clip")
    else:
        found |= {"betas": [0.9, 0.999], "clip_grad": said.number("clip_grad")}
        found["warmup_init_lr"] = said.number("lr_warmup_init") or None
    style = (
        said.text("lr_decay_style") if uses_megatron else said.text("warmup_style") or said.text("lr_scheduler_type")
    ) or "constant"
    if style not in ("constant", "linear", "cosine"):
        said.lacks("lr_decay_style" if uses_megatron else "lr_scheduler_type", f"the schedule {style}")
        style = "constant"
    found["schedule"] = style
    found |= {"schedule_per": "step", "warmup_from": 0}
    if style != "constant":
        lowest = said.number("min_lr") if uses_megatron else (said.number("min_lr_ratio") or 0) * (found["lr"] or 0)
        found["min_lr"] = lowest
        if uses_megatron and (steps := said.whole("lr_decay_steps")):
            found["decay_steps"] = steps
    steps = said.whole("lr_warmup_steps")
    if steps is None or steps < 0 or (uses_megatron and steps == 0):
        found["warmup_steps"] = said.number("lr_warmup_steps_ratio") or 0
    else:
        found["warmup_steps"] = steps
    if verl_async.is_fully_async(source) or verl_async.is_separate(source):
        found |= verl_async.schedule(source, style, found["warmup_steps"])
    return {f"{ours}.{key}": value for key, value in found.items()}


def megatron_checkpoints(source: Source) -> dict[str, Any]:
    """Weights of policy and reference that are not those of the Hugging Face directory."""
    if not is_megatron(source):
        return {}
    weights: dict[str, Any] = {}
    directory = shared.path(source, _M + "path")
    has_reference = source.flag(_A + "use_kl_loss") or source.flag("algorithm.use_kl_in_reward")
    roles = [
        ("model.path", _A, _M + "path", True),
        ("reference.path", "actor_rollout_ref.ref.", _M + "path", has_reference),
        ("critic.path", _C, _C + "model.path", estimator(source) == "gae"),
        ("reward.model.path", "reward_model.", "reward_model.model.path", source.flag("reward_model.enable")),
    ]
    for ours, role, describing, is_there in roles:
        if not (source.flag(f"{role}megatron.use_dist_checkpointing") and is_there):
            continue
        weights[ours] = source.text(f"{role}megatron.dist_checkpointing_path")
        if shared.path(source, describing) != directory:
            source.lacks(
                f"{role}megatron.use_dist_checkpointing",
                f"weights in Megatron-Core's form of another model than {_M}path, whose config.json is model.config here",
            )
    if not weights:
        return {}
    if has_reference and "reference.path" not in weights:
        weights["reference.path"] = directory
    return {**weights, "model.config": directory}


def low_rank(source: Source) -> dict[str, Any]:
    return of_verl(source, _M, "policy", is_megatron(source))


def further_tokens(source: Source) -> dict[str, Any]:
    return mtp.of_verl(source, _M)


def critic(source: Source) -> dict[str, Any]:
    if estimator(source) != "gae":
        return {}
    said = source.under(_C)
    found: dict[str, Any] = {
        "critic.path": shared.path(source, "critic.model.path"),
        "critic.value_clip": said.number("cliprange_value"),
    }
    found |= optimizer(source, _C, "critic.optimizer")
    found |= of_verl(source, "critic.model.", "critic", is_megatron(source))
    for key, of_actor in (("ppo_mini_batch_size", _A), ("ppo_epochs", _A), ("loss_agg_mode", _A)):
        if said.raw(key) is not None and str(said.raw(key)) != str(source.raw(of_actor + key)):
            said.lacks(key, "the critic learns in the policy's updates")
    if (warmup := source.whole("trainer.critic_warmup") or 0) > 1:
        found["critic.warmup_steps"] = warmup - 1
    if said.flag("use_dynamic_bsz") and (budget := said.whole("ppo_max_token_len_per_gpu")):
        found["critic.tokens_per_micro_batch"] = max(budget, longest(source))
    elif sequences := said.whole("ppo_micro_batch_size_per_gpu"):
        found["critic.tokens_per_micro_batch"] = sequences * longest(source)
    if not is_megatron(source):
        found["critic.recompute"] = "full" if said.flag("model.enable_gradient_checkpointing") else "none"
        parts = {"parameters": "model.fsdp_config.param_offload", "optimizer": "model.fsdp_config.optimizer_offload"}
    else:
        parts = {
            name: f"megatron.{key}_offload"
            for name, key in (("parameters", "param"), ("gradients", "grad"), ("optimizer", "optimizer"))
        }
    return found | {f"critic.offload.{part}": True for part, key in parts.items() if said.flag(key)}


def sampling(source: Source) -> dict[str, Any]:
    said = source.under(_R)
    return {
        "engine.sampling.temperature": said.number("temperature"),
        "engine.sampling.top_p": said.number("top_p"),
        "engine.sampling.top_k": max(0, said.whole("top_k") or 0),
    }


def engine(source: Source) -> dict[str, Any]:
    said, name = source.under(_R), source.text(_R + "name") or "vllm"
    if name == "hf":
        return {"engine.backend": "transformers"}
    tp, ep = said.whole("tensor_model_parallel_size") or 1, said.whole("expert_parallel_size") or 1
    ep, is_apart, world = ep if ep == tp else 1, verl_async.is_apart(source), gpus(source)
    if is_apart:
        world = verl_async.engine_gpus(source)
        placed = shared.engine_apart(world, tp, ep)
    else:
        placed = {"engine.backend": shared.engine_layout(world, tp, ep)}
    found: dict[str, Any] = {
        **placed,
        "engine.memory_fraction": said.number("gpu_memory_utilization"),
        "engine.max_num_seqs": said.whole("max_num_seqs"),
    }
    found |= verl_async.in_flight(source, world // tp, said.whole("max_num_seqs"))
    if (form := said.text("quantization")) is not None:
        if form != "fp8":
            said.lacks("quantization", f"sampling with weights quantized as {form}: known here is fp8")
        found["engine.vllm.quantization"] = "fp8_per_block"
    if (length := said.whole("max_model_len")) is not None:
        found["engine.max_model_len"] = max(length, longest(source))
    if verl_async.is_colocated(source):
        # Responses go on while the policy trains, so the engine stays.
        found |= {"engine.mode": "server", "engine.sleep": False}
    elif said.has("free_cache_engine") and not is_apart:
        found["engine.sleep"] = said.flag("free_cache_engine")
    if name == "vllm":
        options: dict[str, Any] = {"enforce_eager": said.flag("enforce_eager") or None}
        for key in ("enable_chunked_prefill", "enable_prefix_caching"):
            options[key] = said.flag(key) if said.has(key) else None
        options["max_num_batched_tokens"] = (
            said.whole("max_num_batched_tokens") if said.has("max_num_batched_tokens") else None
        )
        found |= {f"engine.vllm.{key}": value for key, value in options.items()}
    return found


def evaluation(source: Source) -> dict[str, Any]:
    said = source.under(_R + "val_kwargs.")
    if source.has(_R + "n_val") or source.has(_R + "val_temperature"):
        # rLLM's verl, which knows no val_kwargs: its top_p is a number of the code.
        temperature = source.number(_R + "val_temperature") if source.has(_R + "val_temperature") else 0.6
        if not temperature:
            return {"eval.samples": 0}
        return {
            "eval.samples": source.count(_R + "n_val") if source.has(_R + "n_val") else 8,
            "eval.temperature": temperature,
            "eval.top_p": 0.95,
        }
    if not said.flag("do_sample"):
        return {"eval.samples": 0}
    if (said.whole("top_k") or 0) > 0:
        said.lacks("top_k", "top-k in evaluation")
    if not said.number("temperature"):
        return {"eval.samples": 0}
    return {
        "eval.samples": said.whole("n"),
        "eval.temperature": said.number("temperature"),
        "eval.top_p": said.number("top_p"),
    }


def rewards(source: Source) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for start in ("reward.custom_reward_function.", "custom_reward_function."):
        if (file := source.text(start + "path")) is not None:
            found["reward.functions"] = {f"{file}:{source.text(start + 'name') or 'compute_score'}": 1.0}
    if "reward.functions" not in found and (own := OWN_REWARDS.get(source.text("-m") or "")) is not None:
        found["reward.functions"] = {own: 1.0}
    named = "reward_model.model_path" if source.has("reward_model.model_path") else "reward_model.model.path"
    for enabled, model in (
        ("reward_model.enable", named),
        ("reward.reward_model.enable", "reward.reward_model.model_path"),
    ):
        if verl_prime.is_prime(source):
            # The model there is one that learns, and rewards tokens.
            break
        if source.flag(enabled):
            pool = source.under(enabled.removesuffix("enable"))
            if "reward.functions" in found:
                found |= asked_by_functions(source, pool, model)
                continue
            found["reward.model.path"] = shared.path(source, model)
            if pool.flag("enable_resource_pool"):
                found["reward.model.backend"] = f"megatron:d{pool.count('nnodes') * pool.count('n_gpus_per_node')}"
                found["reward.model.first_rank"] = gpus(source)
                if source.text("actor_rollout_ref.rollout.name") != "hf":
                    found["engine.mode"] = "server"
    managers = ("reward.reward_manager.name", "reward_model.reward_manager", "reward_manager.name")
    for key in (*managers, "reward_model.reward_manager.name"):
        name = source.text(key)
        if source.has(key) and name not in (None, "naive", "dapo", "prime", "batch"):
            source.lacks(key, f"the reward manager {name}")
    return found


def asked_by_functions(source: Source, pool: Source, model: str) -> dict[str, Any]:
    """Servers of a model that a reward function asks; verl hands it their address and tokenizer (reward_manager/dapo.py)."""
    engine = pool.text("rollout.name")
    if not pool.flag("enable_resource_pool"):
        pool.lacks("enable", "a model that a reward function asks, on the policy's GPUs: say enable_resource_pool")
        return {}
    if engine not in ("vllm", "sglang"):
        pool.lacks("rollout.name", f"servers of {engine} that a reward function asks: known here are vllm and sglang")
        return {}
    layout = shared.engine_layout(
        pool.count("nnodes") * pool.count("n_gpus_per_node"), pool.whole("rollout.tensor_model_parallel_size") or 1
    )
    return {
        "reward.judge.functions_ask": True,
        "reward.judge.model": shared.path(source, model),
        "reward.judge.backend": layout.replace("vllm", engine),
        "reward.judge.memory_fraction": pool.number("rollout.gpu_memory_utilization"),
        "reward.judge.max_model_len": pool.whole("rollout.max_model_len"),
        # There a function has all the time that it takes.
        "reward.timeout_seconds": 3600.0,
        "reward.wait_seconds": 3600.0,
    }


def overlong_prompts(source: Source) -> dict[str, Any]:
    if source.flag("data.filter_overlong_prompts"):
        return {"data.overlong_prompts": "drop"}
    # Where prompts would be cut off or refused, the run is refused if there is such a prompt: nothing is cut silently.
    return {"data.overlong_prompts": "refuse"}


def template(source: Source) -> dict[str, Any]:
    start = "data.apply_chat_template_kwargs."
    found = {key.removeprefix(start): source.value(key) for key in source.keys(start)}
    return {"data.chat_template_kwargs": found} if found else {}


def run(source: Source) -> dict[str, Any]:
    mode = (source.text("trainer.resume_mode") or "auto").lower()
    resume = {"auto": "auto", "disable": "never", "off": "never"}.get(mode)
    if mode == "resume_path":
        resume = source.text("trainer.resume_from_path")
    elif resume is None:
        source.lacks("trainer.resume_mode", f"{mode}: known here are auto, disable, resume_path")
    keep = source.whole("trainer.max_actor_ckpt_to_keep")
    return {"trainer.resume": resume, "trainer.keep": keep if keep and keep > 0 else EVERY_CHECKPOINT}


def length_of_run(source: Source) -> dict[str, Any]:
    if verl_async.is_fully_async(source):
        return {"trainer.steps": verl_async.steps(source)}
    steps = source.whole("trainer.total_training_steps")
    return {"trainer.steps": steps} if steps and steps > 0 else {"trainer.epochs": source.count("trainer.total_epochs")}


def evaluation_interval(source: Source) -> dict[str, Any]:
    if source.text(key := verl_async.evaluation_key(source)) == "after_each_epoch":
        source.lacks(key, "evaluation after each epoch: say a number of steps", changes_result=False)
        return {}
    found = {"trainer.eval_every": shared.interval(source, key) if source.items("data.val_files") else 0}
    return found | shared.validation_rows(source, "data.val_max_samples")


def profiler(source: Source) -> dict[str, Any]:
    asked = any(source.flag(f"actor_rollout_ref.{role}.profiler.enable") for role in ("actor", "rollout", "ref"))
    if (steps := source.items("global_profiler.steps")) and asked and source.text("global_profiler.tool") == "torch":
        return {"trainer.profile.steps": [int(step) for step in steps]}
    return {}


tracked = shared.tracked("trainer.logger", "trainer.project_name", "trainer.experiment_name")

DERIVED = (
    program,
    advantage,
    loss,
    kl,
    correction,
    overlong,
    dynamic_sampling,
    batch,
    overlong_prompts,
    template,
    layout,
    megatron,
    low_rank,
    further_tokens,
    dtypes,
    memory,
    micro_batch,
    optimizer,
    critic,
    sampling,
    engine,
    router_replay,
    evaluation,
    rewards,
    megatron_checkpoints,
    run,
    length_of_run,
    evaluation_interval,
    profiler,
    tracked,
    verl_prime.prime,
    verl_older.older,
    verl_older.rows,
)

TABLE = Table(
    "verl",
    SECTIONS,
    DERIVED,
    DEFAULTS,
    known=known("verl"),
    command=(
        "`fivefold train --from verl KEY=VALUE ...`: the arguments of `python3 -m verl.trainer.main_ppo` as "
        "they are, `--config-name` "
        "included, or the script that has them: `fivefold train --from verl run.sh`."
    ),
    loses=("tools, several turns, images",),
    gains=(
        "a batch vocabulary that is printed before the run starts",
        "numbers that no layout, no micro-batch and no number of GPUs changes",
        "checkpoints that any layout resumes",
        "every key that is read, or refused",
    ),
)


OTHER_TABLES = (verl_sft.TABLE,)
_PROGRAMS = verl_async.DEFAULTS | {verl_prime.PROGRAM: verl_prime.DEFAULTS}
_OWN_DEFAULTS = {program: replace(TABLE, defaults=DEFAULTS | own) for program, own in _PROGRAMS.items()}
"""Tables of programs whose configuration has other defaults."""


def table_of(settings: Mapping[str, Any]) -> Table:
    """The table of a program's settings: PPO's, or that of the SFT trainers."""
    is_rl = any(key.startswith(("actor_rollout_ref.", "algorithm.")) for key in settings)
    if (own := _OWN_DEFAULTS.get(str(settings.get("-m")))) is not None:
        return own
    return TABLE if is_rl or not verl_sft.looks_like(settings) else verl_sft.TABLE


translate = dialect(table_of)
