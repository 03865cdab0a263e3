"""AReaL: YAML and `key=value`, layouts as strings: one for each role today, `allocation_mode` before, with dots before that.

Numbers that only AReaL's code explains were read in AReaL 4aef98d8d (2026-05-21); a note has the place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from fivefold.config.dialects import areal_legacy, areal_legacy_sft, areal_releases, shared
from fivefold.config.dialects.areal_method import advantage, correction, critic, kl, loss, low_rank, optimizer
from fivefold.config.dialects.areal_placement import ahead, engine, is_dpo, is_sampled, is_sft, layout, roles, trainer
from fivefold.config.dialects.areal_rows import SECTIONS, files_of, is_gsm8k
from fivefold.config.dialects.known import known
from fivefold.config.dialects.shared import EVERY_CHECKPOINT
from fivefold.config.dialects.source import Source
from fivefold.config.dialects.table import Table
from fivefold.config.dialects.translator import dialect

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
    **{
        f"{role}.megatron.recompute_{name}": value
        for role in ("actor", "model")
        for name, value in (("granularity", "full"), ("method", "uniform"), ("num_layers", 1))
    },
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
            shared.recompute(source, f"{trainer(source)}.megatron", "policy")
            if roles(source)[0].backend == "megatron"
            else {"policy.recompute": "full"}
        )
    if (virtual := role.whole("megatron.virtual_pipeline_parallel_size") or 1) > 1:
        found["policy.megatron.pipeline.virtual_pipeline_model_parallel_size"] = virtual
    if source.flag("rollout.return_routed_experts"):
        found |= shared.replayed("R3")
    if role.flag("megatron.use_deterministic_algorithms"):
        found["trainer.deterministic"] = True
    if role.text("megatron.bridge_type") == "megatron-bridge":
        role.fixed("megatron.bridge_type", "weights are read by our own tables: the same numbers")
    return found


def longest(source: Source) -> tuple[int, int]:
    """(prompt, response) in tokens."""
    if not is_sampled(source):
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
        # Of a pair both are computed together.
        "policy.tokens_per_micro_batch": max(budget or 0, (prompt + response) * (2 if is_dpo(source) else 1)),
    }
    found |= {"data.prompts_per_step": source.count("train_dataset.batch_size")}
    if is_dpo(source):
        return found | {"algorithm.name": "dpo", "algorithm.updates_per_step": 1, "data.apply_chat_template": False}
    if is_sft(source):
        found |= {"algorithm.name": "sft", "data.overlong_prompts": "refuse"}
        if is_gsm8k(source.text("train_dataset.path")):
            # The question's text itself, and the solution right after it.
            found |= {"data.prompt_key": "extra_info.question", "data.apply_chat_template": False}
        return found
    updates = source.count("actor.ppo_n_minibatches")
    if source.count("train_dataset.batch_size") % updates:
        source.lacks("actor.ppo_n_minibatches", "updates of unequal size: train_dataset.batch_size is no multiple of it")
    return found | {"algorithm.updates_per_step": updates}


def first_rows(source: Source) -> dict[str, Any]:
    """The first rows of the training data, where a branch's program takes no more."""
    count = (source.whole("max_train_samples") if source.has("max_train_samples") else None) or 0
    files = files_of("train")(source, "train_dataset.path") or []
    return {"data.train": [f"{files[0]}[:{count}]"]} if count > 0 and files else {}


def sampling(source: Source) -> dict[str, Any]:
    if not is_sampled(source):
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


def interval(source: Source, start: str) -> int | Literal["epoch"]:
    """Steps between two events, or `epoch`; 0 is never. AReaL has all of several intervals, here it is one of them."""
    said = source.under(start)
    steps, epochs = said.whole("freq_steps") or 0, said.whole("freq_epochs") or 0
    if epochs > 1 or (epochs and steps):
        reason = "besides freq_steps" if steps else f"every {epochs} epochs: each of them, or so many freq_steps"
        said.lacks("freq_epochs", reason, changes_result=False)
    if said.has("freq_secs") and said.number("freq_secs"):
        said.lacks("freq_secs", "seconds between checkpoints or evaluations: say freq_steps", changes_result=False)
    return steps or ("epoch" if epochs else 0)


def run(source: Source) -> dict[str, Any]:
    place = "/".join(
        filter(None, (source.text("cluster.fileroot"), source.text("experiment_name"), source.text("trial_name")))
    )
    steps = source.whole("total_train_steps")
    mode = (source.text("recover.mode") or "disabled").lower()
    found_again = mode not in ("disabled", "off")
    return {
        "trainer.run_dir": place,
        "trainer.seed": source.whole("seed"),
        "trainer.keep": EVERY_CHECKPOINT,
        "trainer.resume": "auto" if found_again else "never",
        "trainer.epochs": source.count("total_train_epochs"),
        "trainer.steps": steps,
        "trainer.save_every": interval(source, "saver.") or (interval(source, "recover.") if found_again else 0),
        "trainer.eval_every": interval(source, "evaluator.") if source.text("valid_dataset.path") else 0,
        "trainer.eval_before_train": source.flag("evaluator.eval_before_train"),
    }


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
    first_rows,
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
    versions=areal_releases.DEFAULTS,
    release_of=areal_releases.release_of,
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
LEGACY = Table(
    "AReaL",
    areal_legacy.SECTIONS,
    (*areal_legacy.METHOD, model, data, sampling, run, tracked),
    areal_legacy.DEFAULTS,
    elsewhere=dict.fromkeys(TABLE.exact) | DEFAULTS | areal_legacy.TODAY,
)
LEGACY_SFT = Table(
    "AReaL",
    areal_legacy_sft.SECTIONS,
    (*areal_legacy_sft.METHOD, model, data, run, tracked),
    areal_legacy_sft.DEFAULTS,
    elsewhere=dict.fromkeys(TABLE.exact) | DEFAULTS | areal_legacy_sft.TODAY,
)
OTHER_TABLES = (LEGACY, LEGACY_SFT)


def table_of(settings: Mapping[str, Any]) -> Table:
    """The table of the program that the settings are of."""
    if areal_legacy_sft.is_legacy_sft(settings):
        return LEGACY_SFT
    if areal_legacy.is_legacy(settings):
        return LEGACY
    return TABLE


translate = dialect(table_of)
