"""AReaL: YAML and `key=value`, layouts as strings: one for each role today, `allocation_mode` before, with dots before that.

Numbers that only AReaL's code explains were read in AReaL 4aef98d8d (2026-05-21); a note has the place.
"""

from __future__ import annotations

import re
from typing import Any

from fivefold.config.dialects import shared
from fivefold.config.dialects.adapters import adapters, refuse
from fivefold.config.dialects.known import known
from fivefold.config.dialects.shared import EVERY_CHECKPOINT, KERNELS, SHOWN, SPREAD
from fivefold.config.dialects.source import Source, UnreadableError
from fivefold.config.dialects.table import Section, Table, fixed, lacks, slower, to, used
from fivefold.config.dialects.translator import dialect
from fivefold.layout import ParallelLayout

DEFAULTS: dict[str, Any] = {
    "seed": 1,
    "total_train_epochs": 1,
    "cluster.fileroot": "/tmp/areal",  # noqa: S108  # AReaL's default
    "experiment_name": "areal",
    "trial_name": "trial",
    "cluster.n_nodes": 32,
    "cluster.n_gpus_per_node": 8,
    "train_dataset.batch_size": 1,
    "train_dataset.shuffle": True,
    "gconfig.n_samples": 1,
    "gconfig.max_new_tokens": 16384,
    "gconfig.min_new_tokens": 0,
    "gconfig.max_tokens": 32768,
    "gconfig.greedy": False,
    "gconfig.top_p": 1.0,
    "gconfig.temperature": 1.0,
    "gconfig.ignore_eos": False,
    "async_training": True,
    "rollout.max_head_offpolicyness": 0,
    "rollout.consumer_batch_size": 1,
    "rollout.max_concurrent_rollouts": "${rollout.consumer_batch_size}",
    "rollout.backend": "",
    "actor.backend": "",
    "allocation_mode": "",
    "actor.temperature": 1.0,
    "actor.gradient_checkpointing": False,
    "actor.dtype": "bfloat16",
    "actor.ppo_n_minibatches": 4,
    "actor.eps_clip": 0.2,
    "actor.reward_scaling": 1.0,
    "actor.reward_bias": 0.0,
    "actor.reward_clip": 20.0,
    "actor.discount": 1.0,
    "actor.gae_lambda": 1.0,
    "actor.kl_ctl": 0.1,
    "actor.kl_estimator": "k1",
    "actor.sapo_tau_pos": 1.0,
    "actor.sapo_tau_neg": 1.05,
    "actor.importance_sampling_level": "token",
    "actor.recompute_logprob": False,
    "actor.use_decoupled_loss": False,
    "actor.megatron.recompute_granularity": "full",
    "actor.megatron.recompute_method": "uniform",
    "actor.megatron.recompute_num_layers": 1,
    "actor.megatron.use_deterministic_algorithms": False,
    "actor.megatron.bridge_type": "mbridge",
    "critic.eps_clip": 0.5,
    "saver.freq_epochs": None,
    "recover.mode": "disabled",
    "sglang.mem_fraction_static": 0.9,
    "vllm.gpu_memory_utilization": 0.9,
    "vllm.max_num_seqs": 256,
    **{
        f"{role}.{name}": value
        for role in ("actor", "model", "critic")
        for name, value in (("lora_rank", 32), ("lora_alpha", 16))
    },
}
for _role in ("actor", "critic", "model"):
    DEFAULTS |= {
        f"{_role}.optimizer.type": "adam",
        f"{_role}.optimizer.lr": 1e-3,
        f"{_role}.optimizer.weight_decay": 0.01,
        f"{_role}.optimizer.beta1": 0.9,
        f"{_role}.optimizer.beta2": 0.999,
        f"{_role}.optimizer.eps": 1e-8,
        f"{_role}.optimizer.min_lr_ratio": 0.0,
        f"{_role}.optimizer.lr_scheduler_type": "constant",
        f"{_role}.optimizer.warmup_steps_proportion": 0.001,
        f"{_role}.optimizer.gradient_clipping": 1.0,
    }


def trainer(source: Source) -> str:
    """The section of the model that learns: actor, or model in some SFT runs."""
    return "model" if source.keys("model.path") else "actor"


def is_sft(source: Source) -> bool:
    """It imitates the data: neither generation nor rollouts have a section."""
    samples = source.keys("gconfig.") or source.keys("rollout.")
    return trainer(source) == "model" or (source.text("train_dataset.type") == "sft" and not samples)


def roles(source: Source) -> tuple[ParallelLayout, ParallelLayout | None]:
    """(layout of the trainer, layout of the engine), from the strings of the roles or of both."""
    role = trainer(source)
    both = source.text("allocation_mode") or ""
    ours, theirs = source.text(f"{role}.backend") or "", source.text("rollout.backend") or ""
    if both:
        parts = [part.strip() for part in _components(both)]
        engines = [part for part in parts if re.match(r"(sglang|vllm)\b", part)]
        trainers = [part for part in parts if part not in ("cpu", "eval", *engines)]
        theirs = (engines or [theirs])[0]
        ours = _with_backend(trainers[0], ours.partition(":")[0]) if trainers else ours
    try:
        engine = ParallelLayout.parse(_dotless(theirs)) if theirs else None
        return ParallelLayout.parse(_dotless(ours)), engine
    except ValueError as error:
        raise UnreadableError(f"{'allocation_mode' if both else role + '.backend'}: {error}") from None


def _dotless(text: str) -> str:
    """`sglang.d4p1m1` of before 2025-11 -> `sglang:d4p1t1`."""
    text = re.sub(r"^\s*(sglang|vllm|fsdp|megatron)\.", r"\1:", text)
    return re.sub(r"m(\d)", r"t\1", text)


def _components(text: str) -> list[str]:
    """Layouts that are joined by + or |; the | between attn and ffn joins nothing."""
    return [part for side in text.split("+") for part in ([side] if "ffn:" in side else side.split("|"))]


def _with_backend(text: str, backend: str) -> str:
    """`d4p2t1` -> `megatron:d4p2t1`: without a name it is fsdp, or Megatron where there are stages or experts."""
    if re.match(r"(fsdp|megatron|archon)\b", text):
        return text
    return f"{backend or ('megatron' if re.search('[pe](?!1)[0-9]', text) else 'fsdp')}:{text}"


def is_colocated(source: Source) -> bool:
    """Engine and trainer share GPUs: layouts joined by |, or one scheduled onto the other (rl_trainer.py:395)."""
    both = source.text("allocation_mode") or ""
    joined = "+" not in both and len(_components(both)) > 1
    targets = {"rollout": "actor", "actor": "rollout"}
    return joined or any(
        source.text(f"{role}.scheduling_strategy.type") == "colocation"
        and source.text(f"{role}.scheduling_strategy.target") == target
        for role, target in targets.items()
    )


def steps_ahead(source: Source) -> int:
    """0 where rollouts are waited for: until 2026 async_training said so."""
    waits = is_sft(source) or not source.flag("async_training")
    return 0 if waits else source.whole("rollout.max_head_offpolicyness") or 0


def ahead(source: Source) -> dict[str, Any]:
    """AReaL's rule counts prompts of consumer_batch_size (staleness_manager.py:93), which must be those of a step."""
    taken, step = source.count("rollout.consumer_batch_size"), source.count("train_dataset.batch_size")
    if steps_ahead(source) and taken != step:
        source.lacks(
            "rollout.consumer_batch_size",
            f"a bound of ages that counts steps of {taken} prompts where a step takes {step}: "
            "say ${train_dataset.batch_size}",
        )
    return shared.ahead(steps_ahead(source), "continue", "carry")


def layout(source: Source) -> dict[str, Any]:
    ours, _ = roles(source)
    policy = _for_megatron(ours)
    found = {"policy.backend": str(policy)}
    others = {"ref": "reference.backend", "critic": "critic.backend"}
    for role, key in others.items():
        text = source.text(f"{role}.backend") or ""
        if ":" in _dotless(text):
            try:
                other = _for_megatron(ParallelLayout.parse(_dotless(text)))
            except ValueError as error:
                raise UnreadableError(f"{role}.backend: {error}") from None
            sizes = {"tp": other.tp, "pp": other.pp, "cp": other.cp, "ep": other.ep, "etp": other.etp}
            if source.keys(f"{role}.path") and (own := shared.own_layout(policy, **sizes)):
                found[key] = own
    return found


def _for_megatron(given: ParallelLayout) -> ParallelLayout:
    return ParallelLayout(dp=given.dp, tp=given.tp, pp=given.pp, cp=given.cp, ep=given.ep, etp=given.etp)


def engine(source: Source) -> dict[str, Any]:
    if is_sft(source):
        return {}
    ours, theirs = roles(source)
    if theirs is None:
        return {}
    tp, shares = theirs.tp * theirs.pp, is_colocated(source)
    share = "sglang.mem_fraction_static" if theirs.backend == "sglang" else "vllm.gpu_memory_utilization"
    found: dict[str, Any] = {"engine.memory_fraction": source.number(share)}
    replicas = theirs.dp
    if shares:
        tp = tp if ours.world_size % tp == 0 else 1
        replicas = ours.world_size // tp
        # The trainer's share of the GPUs must be left.
        found["engine.memory_fraction"] = min(source.number(share) or 0.5, 0.6)
        found["engine.backend"] = shared.engine_layout(ours.world_size, tp)
    else:
        found |= shared.engine_apart(theirs.dp * tp, tp)
    if theirs.backend == "vllm":
        found["engine.max_num_seqs"] = source.whole("vllm.max_num_seqs")
        if source.flag("vllm.enforce_eager"):
            found["engine.vllm.enforce_eager"] = True
    at_once = source.count("rollout.max_concurrent_rollouts")
    if (ahead := steps_ahead(source)) and at_once < (ahead + 1) * source.count("train_dataset.batch_size"):
        samples = at_once * source.count("gconfig.n_samples")
        found |= shared.at_once(samples, replicas, found.get("engine.max_num_seqs"))
    return found


def low_rank(source: Source, role: str = "", ours: str = "policy") -> dict[str, Any]:
    start = f"{role or trainer(source)}."
    if not source.flag(start + "use_lora"):
        return {}
    keys = {"rank": "lora_rank", "alpha": "lora_alpha", "targets": "target_modules"}
    refuse(source, start + "peft_type", "other adapters than LoRA", ("lora",))
    return adapters(source, ours, **{name: start + key for name, key in keys.items()})


def model(source: Source) -> dict[str, Any]:
    role = source.under(f"{trainer(source)}.")
    found: dict[str, Any] = {"model.path": shared.path(role, "path")}
    tokenizer = source.text("tokenizer_path")
    if tokenizer and tokenizer != found["model.path"]:
        found["model.tokenizer"] = tokenizer
    if (dtype := role.text("dtype")) not in (None, "bfloat16"):
        if dtype in shared.DTYPES:
            found["policy.dtype"] = shared.DTYPES[dtype]
        else:
            role.lacks("dtype", f"training in {dtype}")
    if role.flag("gradient_checkpointing"):
        found |= (
            shared.recompute(source, "actor.megatron", "policy")
            if roles(source)[0].backend == "megatron"
            else {"policy.recompute": "full"}
        )
    if (virtual := role.whole("megatron.virtual_pipeline_parallel_size") or 1) > 1:
        found["policy.megatron.pipeline.virtual_pipeline_model_parallel_size"] = virtual
    if role.flag("megatron.use_deterministic_algorithms"):
        found["trainer.deterministic"] = True
    if role.text("megatron.bridge_type") == "megatron-bridge":
        role.fixed("megatron.bridge_type", "weights are read by our own tables: the same numbers")
    return found


def longest(source: Source) -> tuple[int, int]:
    """(prompt, response) in tokens."""
    if is_sft(source):
        length = source.whole("train_dataset.max_length") or 1024
        return length, length
    response = source.count("gconfig.max_new_tokens")
    return source.whole("train_dataset.max_length") or max(1, source.count("gconfig.max_tokens") - response), response


def data(source: Source) -> dict[str, Any]:
    prompt, response = longest(source)
    role = source.under(f"{trainer(source)}.")
    budget = role.whole("mb_spec.max_tokens_per_mb")
    found: dict[str, Any] = {
        "data.max_prompt_tokens": prompt,
        "data.max_response_tokens": response,
        "policy.tokens_per_micro_batch": max(budget or 0, prompt + response),
    }
    found |= {"data.prompts_per_step": source.count("train_dataset.batch_size")}
    if is_sft(source):
        return found | {"algorithm.name": "sft", "data.overlong_prompts": "refuse"}
    updates = source.count("actor.ppo_n_minibatches")
    if source.count("train_dataset.batch_size") % updates:
        source.lacks("actor.ppo_n_minibatches", "updates of unequal size: train_dataset.batch_size is no multiple of it")
    return found | {"algorithm.updates_per_step": updates}


def advantage(source: Source) -> dict[str, Any]:
    if is_sft(source):
        return {}
    said, has_critic = source.under("actor."), bool(source.keys("critic."))
    found: dict[str, Any] = {
        "name": "grpo",
        "advantage": "reward",
        "normalize": "none",
        "credit": "response",
        "whiten": False,
    }
    if source.keys("actor.reward_norm."):
        norm = said.under("reward_norm.")
        mean, std = norm.text("mean_level") or "batch", norm.text("std_level")
        if mean != "group" or norm.flag("mean_leave1out"):
            norm.lacks("mean_level", "a mean of rewards other than that of the group")
        found |= {"advantage": "group", "normalize": std or "none"}
    if has_critic:
        found |= {"name": "ppo", "credit": "gae", "gamma": said.number("discount"), "lam": said.number("gae_lambda")}
    elif (said.number("discount"), said.number("gae_lambda")) != (1.0, 1.0):
        # Without values the advantage of a token is the return discounted by both.
        found |= {"credit": "discounted", "gamma": (said.number("discount") or 0.0) * (said.number("gae_lambda") or 0.0)}
    if source.keys("actor.adv_norm.") and said.text("adv_norm.std_level") is not None:
        if (said.text("adv_norm.mean_level"), said.text("adv_norm.std_level")) not in (
            ("batch", "batch"),
            ("group", "batch"),
        ):
            said.lacks("adv_norm.std_level", "advantages normalized in each group")
        elif said.text("adv_norm.mean_level") == "group":
            said.lacks("adv_norm.mean_level", "advantages with the mean of each group over the deviation of the batch")
        else:
            found["whiten"] = True
    if said.number("reward_bias") and found["advantage"] != "group" and not found["whiten"]:
        said.lacks("reward_bias", "a constant added to rewards that nothing takes away again")
    if found["normalize"] == "none" and not found["whiten"] and (said.number("reward_scaling") or 1.0) != 1.0:
        said.lacks(
            "reward_scaling", "a factor of rewards that are not divided by their deviation: weigh them in reward.functions"
        )
    if source.flag("actor.mask_no_eos_with_zero"):
        source.lacks("actor.mask_no_eos_with_zero", "a reward of 0 for responses that were cut off")
    if said.flag("overlong_reward_penalty"):
        found |= {
            "overlong_buffer": said.whole("overlong_tokens"),
            "overlong_penalty": said.number("overlong_penalty_factor"),
        }
    return {f"algorithm.{key}": value for key, value in found.items()}


def loss(source: Source) -> dict[str, Any]:
    if is_sft(source):
        return {}
    said = source.under("actor.")
    low, high = said.number("eps_clip"), said.number("eps_clip_higher")
    found: dict[str, Any] = {
        "surrogate": "ppo_clip",
        "clip_low": low,
        "clip_high": low if high is None else high,
        "aggregate": "token-mean",
        "importance_sampling_level": said.text("importance_sampling_level"),
        "dual_clip": said.number("c_clip"),
        "entropy_coef": 0.0,
    }
    if said.flag("use_sapo_loss"):
        found |= {
            "surrogate": "sapo",
            "clip_low": None,
            "clip_high": None,
            "dual_clip": None,
            "temperature_positive": said.number("sapo_tau_pos"),
            "temperature_negative": said.number("sapo_tau_neg"),
        }
    return {f"algorithm.{key}": value for key, value in found.items()}


def kl(source: Source) -> dict[str, Any]:
    if is_sft(source):
        return {}
    coef = source.number("actor.kl_ctl")
    if not coef:
        return {"algorithm.kl.coef": 0.0}
    if not source.keys("ref."):
        source.lacks(
            "actor.kl_ctl",
            "a KL without a reference, where AReaL takes the log-prob itself off the reward (actor.py:192): "
            "set it to 0 or configure ref",
        )
        return {}
    name = source.text("actor.kl_estimator") or "k1"
    return {
        "algorithm.kl.coef": coef,
        "algorithm.kl.place": "reward",
        "algorithm.kl.estimator": shared.ESTIMATORS.get(name, name),
    }


def correction(source: Source) -> dict[str, Any]:
    if is_sft(source):
        return {}
    said = source.under("actor.")
    found: dict[str, Any] = {}
    if not said.flag("use_decoupled_loss"):
        if not said.flag("recompute_logprob"):
            found["old_logprobs_from"] = "engine"
        return {f"algorithm.rollout_correction.{key}": value for key, value in found.items()}
    if (method := said.text("prox_logp_method")) == "metrics":
        said.fixed("prox_logp_method", "log-probs are computed; estimates of them are only shown (actor.py:745)")
    elif method not in (None, "recompute"):
        said.lacks("prox_logp_method", f"log-probs that are estimated ({method}) instead of computed")
    if (cap := said.number("behav_imp_weight_cap") or said.number("behave_imp_weight_cap")) is not None:
        found = {"weight": "token", "high": cap, "outside": "mask"}
    if source.keys("actor.rejection_sampling."):
        rule = said.under("rejection_sampling.")
        if (rule.text("metric") or "ratio") != "ratio":
            rule.lacks("metric", "rejection by an estimate of the KL")
        level, action = rule.text("level") or "token", rule.text("action") or "mask"
        if level == "sequence" and (rule.text("agg") or "mean") != "mean":
            rule.lacks("agg", "another mean over a sequence than the geometric one")
        found = {
            "weight": "token" if level == "token" else "geometric",
            "low": rule.number("lower"),
            "high": rule.number("upper"),
            "outside": "mask" if action == "mask" else "truncate",
        }
    if (bound := said.number("m2_threshold")) is not None:
        found["reject_divergence"] = {"second_moment": bound}
    return {f"algorithm.rollout_correction.{key}": value for key, value in found.items()}


def optimizer(source: Source, role: str = "", ours: str = "policy.optimizer") -> dict[str, Any]:
    said = source.under(f"{role or trainer(source)}.optimizer.")
    style = said.text("lr_scheduler_type") or "constant"
    if style not in ("constant", "linear", "cosine"):
        said.lacks("lr_scheduler_type", f"the schedule {style}")
        style = "constant"
    found: dict[str, Any] = {
        "lr": said.number("lr"),
        "weight_decay": said.number("weight_decay"),
        "eps": said.number("eps"),
        "clip_grad": said.number("gradient_clipping"),
        "betas": [said.number("beta1"), said.number("beta2")],
        "schedule": style,
        "warmup_steps": said.number("warmup_steps_proportion"),
        "schedule_per": "step",
        "warmup_from": 0,
    }
    if style != "constant":
        found["min_lr"] = (said.number("min_lr_ratio") or 0.0) * (found["lr"] or 0.0)
    return {f"{ours}.{key}": value for key, value in found.items()}


def critic(source: Source) -> dict[str, Any]:
    if trainer(source) == "model" or not source.keys("critic."):
        return {}
    if (value := source.whole("critic.ppo_n_minibatches")) is not None and value != source.whole("actor.ppo_n_minibatches"):
        source.lacks("critic.ppo_n_minibatches", "the critic learns in the policy's updates")
    found: dict[str, Any] = {
        "critic.path": shared.path(source, "critic.path"),
        "critic.value_clip": source.number("critic.eps_clip"),
    }
    same = source.has("critic.optimizer")
    found |= low_rank(source, "critic", "critic")
    return found | optimizer(source, "actor" if same else "critic", "critic.optimizer")


def sampling(source: Source) -> dict[str, Any]:
    if is_sft(source):
        return {}
    said = source.under("gconfig.")
    if said.flag("greedy"):
        said.lacks("greedy", "training on greedy responses")
    if source.number("actor.temperature") != said.number("temperature"):
        source.lacks("actor.temperature", "another temperature of the trainer's log-probs than of sampling")
    found: dict[str, Any] = {
        "temperature": said.number("temperature"),
        "top_p": said.number("top_p"),
        "min_tokens": said.whole("min_new_tokens"),
        "ignore_eos": said.flag("ignore_eos") or None,
    }
    kept = said.whole("top_k") or 0
    # A bound above every vocabulary is none.
    found["top_k"] = 0 if kept < 0 or kept >= 1_000_000 else kept
    if said.items("stop_token_ids"):
        found["stop_token_ids"] = [int(token) for token in said.items("stop_token_ids")]
    if said.items("stop"):
        found["stop"] = said.texts("stop")
    return {f"engine.sampling.{key}": value for key, value in found.items()} | {
        "algorithm.group_size": said.count("n_samples")
    }


def run(source: Source) -> dict[str, Any]:
    place = "/".join(
        filter(None, (source.text("cluster.fileroot"), source.text("experiment_name"), source.text("trial_name")))
    )
    steps = source.whole("total_train_steps")
    mode = (source.text("recover.mode") or "disabled").lower()
    found: dict[str, Any] = {
        "trainer.run_dir": place,
        "trainer.seed": source.whole("seed"),
        "trainer.keep": EVERY_CHECKPOINT,
        "trainer.resume": "never" if mode in ("disabled", "off") else "auto",
        "trainer.epochs": source.count("total_train_epochs"),
        "trainer.steps": steps,
        "trainer.save_every": source.whole("saver.freq_steps") or 0,
        "trainer.eval_every": (source.whole("evaluator.freq_steps") or 0) if source.text("valid_dataset.path") else 0,
        "trainer.eval_before_train": source.flag("evaluator.eval_before_train"),
    }
    for key in ("saver.freq_epochs", "evaluator.freq_epochs", "saver.freq_secs", "evaluator.freq_secs"):
        if source.has(key) and source.number(key):
            source.lacks(key, "epochs or seconds between checkpoints and evaluations: say freq_steps", changes_result=False)
    return found


_BEFORE = "AReaL before 2025-08, whose trainer was another program: write the keys of today"

SECTIONS = (
    Section.of(
        "Placement",
        used(
            "actor.backend model.backend allocation_mode",
            "policy.backend",
            "fsdp:d4 becomes megatron:d4. Names, dots (sglang.d4p1m1), `+eval` and the order of letters are read.",
        ),
        used(
            "rollout.backend",
            "engine.backend",
            "On GPUs of its own, behind the trainer's; with | in allocation_mode or a scheduling_strategy that colocates "
            "the two, on the trainer's. sglang becomes vLLM.",
        ),
        used(
            "rollout.scheduling_strategy.type rollout.scheduling_strategy.target actor.scheduling_strategy.type "
            "actor.scheduling_strategy.target",
            "engine.placement engine.backend",
        ),
        used(
            "rollout.max_head_offpolicyness rollout.consumer_batch_size async_training",
            "rollout",
            "The same number and the same rule: at most (k + v + 1) x consumer_batch_size prompts are given out when v "
            "steps are done (staleness_manager.py:93), so consumer_batch_size must be train_dataset.batch_size. Responses "
            "go on under new weights: interrupt: continue. A step takes the oldest prompts that are complete "
            "(workflow_executor.py:591): tail: carry. What takes longer than k steps AReaL uses all the same, older than k; "
            "here its prompt is sampled again.",
        ),
        used(
            "rollout.max_concurrent_rollouts",
            "engine.max_num_seqs",
            "Prompts in flight at once, consumer_batch_size when left out: samples of each replica here, where that is less "
            "than what may be given out. Without staleness it changes nothing.",
        ),
        used(
            "critic.backend ref.backend",
            "reference.backend critic.backend",
            "On the policy's ranks. The policy's where it is left out, or where the ranks cannot be divided so.",
        ),
        fixed(
            "critic.scheduling_* ref.scheduling_* **.scheduling_spec **.scheduling_strategy.* **.scheduling_strategy",
            "all models of the trainer share the policy's GPUs",
        ),
        fixed(
            "cluster.n_nodes cluster.n_gpus_per_node cluster.name_resolve.* cluster.cluster_name scheduler.* "
            "scheduler launcher launcher.** enable_offload",
            "the layout says how many GPUs; how they are started is launch's",
        ),
        fixed(
            "rollout.queue_size "
            "rollout.enable_rollout_tracing rollout.dump_to_file rollout.fileroot rollout.tokenizer_path "
            "rollout.setup_timeout rollout.request_* rollout.pause_grace_period "
            "rollout.check_trajectory_format rollout.experiment_name rollout.trial_name rollout._version "
            "rollout.model "
            "rollout.routing_strategy rollout.poll_interval rollout.*_api_key rollout.api_url",
            "how requests are spread",
        ),
        fixed("rollout.use_lora", "the engine is given the merged weights"),
        lacks("rollout.return_routed_experts", "the routing of experts", [False]),
        fixed("rollout.agent.** rollout.openai.**", "read by agents only"),
    ),
    Section.of(
        "Model and training",
        used("actor.path model.path", "model.path"),
        used("tokenizer_path", "model.tokenizer"),
        used("actor.dtype model.dtype", "policy.dtype"),
        used(
            "actor.gradient_checkpointing model.gradient_checkpointing actor.megatron.recompute_* "
            "model.megatron.recompute_*",
            "policy.recompute policy.megatron.transformer",
        ),
        used("*.megatron.virtual_pipeline_parallel_size", "policy.megatron.pipeline"),
        used("*.megatron.use_deterministic_algorithms", "trainer.deterministic"),
        used(
            "*.megatron.bridge_type",
            "policy.megatron.bridge_type",
            "mbridge is AReaL's default; weights are read by our own tables: the same numbers.",
        ),
        lacks("*.megatron.fp8_config *.archon.fp8_config.mode", "training in 8 bits", ["disabled"]),
        fixed("*.megatron.** *.fsdp.** *.archon.**", SPREAD),
        used(
            "actor.mb_spec.max_tokens_per_mb model.mb_spec.max_tokens_per_mb",
            "policy.tokens_per_micro_batch",
            "At least the longest prompt and response.",
        ),
        fixed(
            "**.mb_spec.* *.pad_to_maximum *.weight_update_mode *.offload *.attn_impl *.use_kernels "
            "*.grad_reduce_dtype *.enable_tree_training",
            "no cut and no kernel changes the numbers",
        ),
        fixed("*.disable_dropout", "there is no dropout"),
        lacks("*.init_from_scratch", "weights that are drawn", [False]),
        fixed(
            "*.is_critic *.experiment_name *.trial_name *._version *.log_level *.admin_api_key "
            "*.request_timeout *.setup_timeout",
            "AReaL's own bookkeeping",
        ),
        *(
            used(f"{role}.{theirs}", f"{ours}.lora.{part}", note)
            for role, ours in (("actor", "policy"), ("model", "policy"), ("critic", "critic"))
            for theirs, part, note in (
                ("use_lora", "rank", ""),
                ("lora_rank", "rank", "32 when left out."),
                ("lora_alpha", "alpha", ""),
                ("target_modules", "target_modules", "All linear maps where there are none."),
                ("peft_type", "rank", "Others than lora are refused."),
            )
        ),
        lacks("*.use_lora", "adapters of another model", [False]),
        fixed("*.lora_rank *.lora_alpha *.target_modules *.peft_type", "read with use_lora only"),
        *(
            row
            for role in ("actor", "model")
            for rows in (
                used(f"{role}.optimizer.lr", "policy.optimizer.lr"),
                used(f"{role}.optimizer.weight_decay", "policy.optimizer.weight_decay"),
                used(f"{role}.optimizer.eps", "policy.optimizer.eps"),
                used(f"{role}.optimizer.beta1 {role}.optimizer.beta2", "policy.optimizer.betas"),
                used(f"{role}.optimizer.gradient_clipping", "policy.optimizer.clip_grad"),
                used(f"{role}.optimizer.lr_scheduler_type", "policy.optimizer.schedule"),
                used(f"{role}.optimizer.min_lr_ratio", "policy.optimizer.min_lr"),
                used(
                    f"{role}.optimizer.warmup_steps_proportion",
                    "policy.optimizer.warmup_steps",
                    "A share of the run, in steps of the run from rate 0 on: the schedule moves once a step.",
                ),
            )
            for row in rows
        ),
        lacks("*.optimizer.type", "another optimizer than AdamW", ["adam", "adamw"]),
        fixed("*.optimizer.hysteresis *.optimizer.*loss_scale* *.optimizer.offload *.optimizer", "read in float16 only"),
        used("total_train_epochs", "trainer.epochs"),
        used("total_train_steps", "trainer.steps"),
        lacks("total_train_n_seqs", "a bound by sequences: say total_train_steps"),
    ),
    Section.of(
        "PPO",
        used(
            "actor.ppo_n_minibatches",
            "algorithm.updates_per_step",
            "AReaL balances tokens between updates, here each has as many prompts.",
        ),
        used("actor.eps_clip actor.eps_clip_higher", "algorithm.clip_low algorithm.clip_high"),
        used("actor.c_clip", "algorithm.dual_clip"),
        used(
            "actor.use_sapo_loss actor.sapo_tau_pos actor.sapo_tau_neg",
            "algorithm.surrogate algorithm.temperature_positive algorithm.temperature_negative",
        ),
        used("actor.importance_sampling_level", "algorithm.importance_sampling_level"),
        lacks("actor.beta actor.loss_type", "DPO's trainer: use algorithm.name: dpo"),
        lacks(
            "econfig.** tir.** workflow eval_workflow agent_run_args.** reward_fn_path agent_builder_path "
            "export_style max_tokens_per_trajectory",
            "agents",
        ),
        used(
            "actor.m2_threshold",
            "algorithm.rollout_correction.reject_divergence",
            "Read with use_decoupled_loss. AReaL leaves out tokens in each micro-batch and divides by those that stay "
            "(actor.py:769), here as in the paper (2510.01161): among the whole update, and by all of its tokens.",
        ),
        used(
            "actor.reward_norm.mean_level actor.reward_norm.std_level actor.reward_norm.mean_leave1out",
            "algorithm.advantage algorithm.normalize",
            "Unbiased deviation, ε 1e-5 there and 1e-6 here.",
        ),
        fixed(
            "actor.reward_norm.group_size actor.adv_norm.group_size actor.group_size actor.max_new_tokens "
            "actor.reward_norm actor.adv_norm",
            "gconfig says it",
        ),
        lacks("actor.reward_norm.std_unbiased actor.adv_norm.std_unbiased", "a biased deviation", [True]),
        fixed("actor.reward_norm.eps actor.adv_norm.eps", "ε is 1e-6"),
        used(
            "actor.adv_norm.mean_level actor.adv_norm.std_level",
            "algorithm.whiten",
            "batch and batch: mean 0 and variance 1 over all tokens of the step.",
        ),
        used(
            "actor.reward_bias actor.reward_scaling",
            "algorithm.normalize",
            "Of no effect behind reward_norm, which takes away a constant and a factor.",
        ),
        fixed("actor.reward_clip", "20 by default: no reward of a rule is beyond it"),
        used("actor.discount actor.gae_lambda", "algorithm.gamma algorithm.lam"),
        used(
            "actor.kl_ctl actor.kl_estimator",
            "algorithm.kl",
            "0.1 when left out, in the reward, of the old log-probs (actor.py:192): refused without a reference.",
        ),
        used(
            "actor.recompute_logprob actor.use_decoupled_loss actor.behav_imp_weight_cap "
            "actor.behave_imp_weight_cap actor.rejection_sampling.* actor.prox_logp_method",
            "algorithm.rollout_correction",
            "Without recompute_logprob the old log-probs are the engine's. What is masked keeps its place in "
            "the denominator (functional.py:459), as here.",
        ),
        used(
            "actor.overlong_reward_penalty actor.overlong_tokens actor.overlong_penalty_factor",
            "algorithm.overlong_buffer algorithm.overlong_penalty",
        ),
        used("actor.mask_no_eos_with_zero", "algorithm.overlong_filter"),
        lacks("actor.dynamic_sampling dynamic_bs", "AReaL's own filter of groups", [False]),
        used(
            "actor.temperature",
            "engine.sampling.temperature",
            "It divides the trainer's logits: the same as gconfig.temperature, as here.",
        ),
        fixed("actor.log_agent_*", SHOWN),
        used(
            "critic.path critic.optimizer critic.optimizer.* critic.eps_clip critic.ppo_n_minibatches",
            "critic.path critic.optimizer critic.value_clip",
        ),
        fixed("critic.**", "it has the policy's settings"),
        fixed("ref.**", "the reference has the policy's settings, and only computes"),
        lacks("teacher.**", "learning from a teacher"),
    ),
    Section.of(
        "Generation",
        used("gconfig.n_samples", "algorithm.group_size"),
        used(
            "gconfig.max_new_tokens gconfig.max_tokens train_dataset.max_length",
            "data.max_prompt_tokens data.max_response_tokens",
        ),
        used(
            "gconfig.temperature gconfig.top_p gconfig.top_k gconfig.min_new_tokens gconfig.stop_token_ids "
            "gconfig.stop gconfig.ignore_eos gconfig.greedy",
            "engine.sampling",
        ),
        fixed("gconfig.skip_special_tokens gconfig.lora_name", "tokens are scored as they were sampled"),
        lacks("gconfig.frequency_penalty gconfig.use_beam_search", "another way of sampling", [0, 0.0, False]),
        fixed("eval_gconfig eval_gconfig.**", "evaluation is greedy here: eval.samples asks for more"),
        used(
            "sglang.mem_fraction_static vllm.gpu_memory_utilization",
            "engine.memory_fraction",
            "At most 0.6 where the trainer shares the GPUs.",
        ),
        used("vllm.max_num_seqs", "engine.max_num_seqs"),
        used("vllm.enforce_eager", "engine.vllm"),
        fixed("sglang.** vllm.**", KERNELS),
    ),
    Section.of(
        "Data and run",
        to(
            "train_dataset.path",
            "data.train",
            shared.files,
            "A name on the hub is to be written as parquet first: `fivefold data gsm8k`.",
        ),
        to("valid_dataset.path", "data.val", shared.files),
        used("train_dataset.batch_size", "data.prompts_per_step"),
        to("train_dataset.shuffle", "data.shuffle", shared.flag),
        fixed(
            "train_dataset.type valid_dataset.** train_dataset.pin_memory train_dataset.num_workers "
            "train_dataset.num_dataset_workers train_dataset.drop_last train_dataset.setup_timeout "
            "train_dataset.scheduling_spec.**",
            "how data are read",
        ),
        lacks("train_dataset.split", "another part of a data set of the hub", ["train"]),
        lacks("train_dataset.dataset_kwargs train_dataset.dataset_kwargs.**", "arguments of a data set's code"),
        used("seed", "trainer.seed"),
        used("experiment_name trial_name cluster.fileroot", "trainer.run_dir tracking.project tracking.name"),
        used("stats_logger.wandb.mode stats_logger.swanlab.mode", "trainer.loggers tracking.offline"),
        used("stats_logger.tensorboard.path", "trainer.loggers"),
        used("stats_logger.*.project stats_logger.*.name stats_logger.wandb.group stats_logger.wandb.tags", "tracking"),
        fixed("stats_logger.*.api_key", "the tracker's own variable has the key: none stands in our files"),
        used("saver.freq_steps", "trainer.save_every"),
        used("evaluator.freq_steps", "trainer.eval_every"),
        used("evaluator.eval_before_train", "trainer.eval_before_train"),
        used("recover.mode", "trainer.resume"),
        slower(
            "recover.freq_* saver.freq_* evaluator.freq_*",
            "epochs or seconds between checkpoints and evaluations: say freq_steps",
        ),
        fixed(
            "saver.* evaluator.* recover.* stats_logger.** perf_tracer perf_tracer.** memory_profiler memory_profiler.**",
            SHOWN,
        ),
        used("-m", "algorithm.name"),
        fixed("--config-name --config-path", "how the program is started"),
    ),
    Section.of(
        "Before 2025-08",
        lacks(
            "ppo.** dataset.** exp_ctrl.** actor.type._class ref.type._class actor.sglang.** actor.bf16 "
            "ref.bf16 *_inf.** *_train.** group_size group_adv_norm rw_type mask_too_long "
            "max_head_offpolicyness success_rate_* n_nodes n_gpus_per_node mode n_rollout_workers cpus_per_* "
            "mem_per_* cache_clear_freq shuffle_dataset flush_request_timeout",
            _BEFORE,
        ),
        fixed(
            "wandb.mode wandb.entity wandb.project wandb.name wandb.job_type wandb.group wandb.notes wandb.tags "
            "wandb.config tensorboard.path ray_temp_path torch_cache_mysophobia recover_mode recover_retries recover_after "
            "metric_discovery_port",
            SHOWN,
        ),
    ),
)


def tracked(source: Source) -> dict[str, Any]:
    """A tracker is off unless its mode says otherwise; project and name are those of the experiment where it has none."""
    at = "stats_logger."
    modes = {name: source.text(f"{at}{name}.mode") or "disabled" for name in ("wandb", "swanlab")}
    asked = [name for name, mode in modes.items() if mode in ("online", "offline", "cloud", "local", "shared")]
    board = ["tensorboard"] if source.text(at + "tensorboard.path") else []
    if not asked:
        return {"trainer.loggers": ["console", *board]}
    own = source.under(f"{at}{asked[0]}.")
    return {
        "trainer.loggers": ["console", *board, *asked],
        "tracking.project": own.text("project") or source.text("experiment_name"),
        "tracking.name": own.text("name") or source.text("trial_name"),
        "tracking.group": own.text("group"),
        "tracking.tags": own.texts("tags") or None,
        "tracking.offline": all(modes[name] in ("offline", "local") for name in asked) or None,
    }


DERIVED = (
    ahead,
    layout,
    engine,
    model,
    low_rank,
    data,
    advantage,
    loss,
    kl,
    correction,
    optimizer,
    critic,
    sampling,
    run,
    tracked,
)

TABLE = Table(
    "AReaL",
    SECTIONS,
    DERIVED,
    DEFAULTS,
    versions={"2025-11": {"gconfig.max_tokens": 65536}},
    known=known("areal"),
    command=(
        "`fivefold train --from areal --config run.yaml KEY=VALUE ...`, as `python3 "
        "examples/math/gsm8k_rl.py --config run.yaml`; layout "
        "strings with or without quotes."
    ),
    loses=("agents",),
    gains=(
        "a KL without a reference is refused instead of being taken of the log-prob itself",
        "the same layout strings, and layouts that are checked against the model before anything starts",
        "a bound of ages that holds for every token: AReaL uses what is older and was slow",
    ),
)

translate = dialect(TABLE)
