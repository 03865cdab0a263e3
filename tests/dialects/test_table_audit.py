"""What a table says of a key must be so: a key that is used is read, a reason that claims equal numbers may claim them.

The runs are those of the other tests of dialects, and words that make functions read what they read only then.
"""

from __future__ import annotations

import re

import pytest

from fivefold.config.dialect import find_system
from fivefold_dialects import SYSTEMS
from fivefold_dialects.table import Row
from fivefold_dialects.trinity_keys import BUFFER, EXPERTS
from tests.dialects import test_areal_data_and_intervals as areal_runs
from tests.dialects import test_areal_releases as old_areal_runs
from tests.dialects import test_dialects as known_runs
from tests.dialects import test_prime_dialect as prime_runs
from tests.dialects import test_roll_defaults as roll_runs
from tests.dialects import test_trinity_releases as old_trinity_runs
from tests.dialects import test_trinity_trainer as trinity_runs
from tests.support.dialect_reads import reads_of, unread

Run = tuple[list[str], str]
_FIRST = old_trinity_runs.GSM8K_OF_2025_04
_DIST = [
    word
    for start in (trinity_runs.ACTOR, trinity_runs.REFERENCE, trinity_runs.CRITIC)
    for word in (f"{start}megatron.use_dist_checkpointing=true", f"{start}megatron.dist_checkpointing_path=/w")
]
_LORA_SKYRL = [f"trainer.{role}.model.lora.rank=8" for role in ("policy", "critic")]
_SKYRL_PPO = ["trainer.algorithm.advantage_estimator=gae", "trainer.critic.model.path=c"]
_TRACKED = "track_with=wandb"
_ACTOR, _REF = "actor_rollout_ref.actor.", "actor_rollout_ref.ref."
_VERL_PPO = [*known_runs.GRPO_VERL, "algorithm.adv_estimator=gae", "critic.model.path=c", _ACTOR + "use_kl_loss=true"]
_VERL_PPO += ["actor_rollout_ref.rollout.n=1", "algorithm.use_kl_in_reward=true"]
_MEGATRON = _ACTOR + "strategy=megatron"
_POOL = ["reward_model.enable=True", "reward_model.model.path=j", "reward_model.enable_resource_pool=True"]
_POOL += ["reward_model.nnodes=1", "reward_model.n_gpus_per_node=8"]
_ANY_VERL: list[list[str]] = [
    [*_VERL_PPO, "actor_rollout_ref.model.lora_rank=8", "critic.model.lora_rank=8", "trainer.logger=wandb"],
    [*_VERL_PPO, _MEGATRON, "actor_rollout_ref.model.lora.rank=8", "critic.model.lora.rank=8"],
    [*known_runs.GRPO_VERL, "actor_rollout_ref.model.mtp.enable=true", "actor_rollout_ref.model.mtp.enable_train=true"],
    [
        *(word for word in _VERL_PPO if "reward" not in word),
        _MEGATRON,
        *(f"{role}megatron.use_dist_checkpointing=true" for role in (_ACTOR, _REF, "critic.", "reward_model.")),
        *(f"{role}megatron.override_transformer_config.recompute_granularity=full" for role in (_REF, "critic.")),
        _ACTOR + "optim.lr_decay_style=cosine",
        _ACTOR + "optim.use_precision_aware_optimizer=true",
        *_POOL[:2],
    ],
    *(
        [*_VERL_PPO, f"{_ACTOR}strategy={name}", _ACTOR + "optim.lr_scheduler_type=cosine"]
        for name in ("fsdp", "veomni", "torchtitan")
    ),
    *(
        [*_VERL_PPO, _ACTOR + "strategy=mindspeed", f"{_ACTOR}mindspeed.{name}.x=1"]
        for name in ("mcore_kwargs", "llm_kwargs")
    ),
    *([*_VERL_PPO, f"{role}use_dynamic_bsz=true"] for role in (_ACTOR, "critic.")),
    [*_VERL_PPO, "trainer.resume_mode=resume_path"],
    [*_VERL_PPO, "global_profiler.steps=[2]", _ACTOR + "profiler.enable=true"],
    [*known_runs.GRPO_VERL, "algorithm.filter_groups.enable=true"],
    [
        *known_runs.GRPO_VERL,
        "algorithm.rollout_is=true",
        "algorithm.rollout_is_threshold=2",
        "algorithm.rollout_is_mode=mask",
    ],
    [
        *known_runs.GRPO_VERL,
        "algorithm.rollout_correction.rollout_rs=token",
        "algorithm.rollout_correction.rollout_rs_threshold=2",
    ],
    [*known_runs.GRPO_VERL, _ACTOR + "policy_loss.loss_mode=sapo"],
    *([*known_runs.GRPO_VERL, f"algorithm.rollout_correction.{word}"] for word in ("rollout_is=token", "bypass_mode=true")),
    *(
        [*known_runs.GRPO_VERL, "reward_model.reward_manager=dapo", f"{start}.enable=true", f"{start}.len=9"]
        for start in (
            "reward.reward_kwargs.overlong_buffer_cfg",
            "reward_model.reward_kwargs.overlong_buffer_cfg",
            "reward_model.overlong_buffer",
            "custom_reward_function.overlong_buffer",
        )
    ),
    [*known_runs.GRPO_VERL, *_POOL],
    [*known_runs.GRPO_VERL, *_POOL, "custom_reward_function.path=f.py", "reward_model.rollout.name=vllm"],
    [*known_runs.ASKED_MODEL, "reward.reward_model.rollout.name=vllm"],
]
"""Runs of verl's main_ppo, which siiRL's are too."""
_PLAIN_SFT = [*known_runs.SFT_VERL, "data.use_dynamic_bsz=false"]
MORE: dict[str, list[Run]] = {
    "verl": [
        *((words, "") for words in _ANY_VERL),
        (prime_runs.SCRIPT, ""),
        ([*known_runs.GRPO_VERL, "actor_rollout_ref.rollout.name=vllm"], ""),
        ([*_PLAIN_SFT, "model.lora_rank=8", "model.mtp.enable=true", "model.mtp.enable_train=true"], ""),
        ([*_PLAIN_SFT, "engine=megatron", "model.lora.rank=8", "optim.lr_decay_style=cosine"], ""),
        ([*_PLAIN_SFT, "engine=automodel", "optim.lr_scheduler_type=cosine"], ""),
        ([*_PLAIN_SFT, "optim=veomni"], ""),
        ([*_PLAIN_SFT, "optim=torchtitan"], ""),
        ([*_PLAIN_SFT, "trainer.resume_mode=resume_path", "trainer.logger=wandb"], ""),
        (["-m=verl.trainer.fsdp_sft_trainer", *_PLAIN_SFT], ""),
    ],
    "siirl": [
        *((words, "") for words in _ANY_VERL),
        ([*known_runs.GRPO_VERL, "algorithm.adv_estimator=cpgd"], ""),
    ],
    "roll": [
        ([], known_runs.DOMAINS_ROLL),
        (
            ["reward_norm=group", "reward_scale=true"],
            roll_runs.RUN.replace("adv_estimator: grpo", "adv_estimator: reinforce"),
        ),
        (["use_pg_clip_range=true", "add_token_level_kl=true", "target_kl=0.1", _TRACKED], roll_runs.RUN),
        (["difficulty_mask=true", "validation.data_args.file_name=v.jsonl"], roll_runs.RUN),
        (["adv_estimator=gae", "reward_pretrain=m", "actor_train.model_args.lora_target=q_proj"], roll_runs.RUN),
        (["actor_train.use_dynamic_batching_in_train=true"], roll_runs.RUN),
        (["actor_train.strategy_args.strategy_name=deepspeed_train"], roll_runs.RUN),
        (
            [
                "adv_estimator=gae",
                *(f"{role}.strategy_args.strategy_name=megatron_infer" for role in ("critic", "reference")),
                "use_kl_loss=true",
            ],
            roll_runs.RUN,
        ),
        (["sft_train.model_args.lora_target=q_proj", "sft_train.use_dynamic_batching_in_train=true"], roll_runs.SFT),
        (["sft_train.strategy_args.strategy_name=deepspeed_train"], roll_runs.SFT),
    ],
    "trinity": [
        ([], _FIRST),
        (_DIST, trinity_runs.MEGATRON),
        (["algorithm.optimizer.lr_scheduler_type=cosine", *_DIST[:1]], trinity_runs.MEGATRON),
        (
            [f"{trinity_runs.CRITIC}optim.lr_decay_style=cosine", f"{trinity_runs.ACTOR}optim.lr_decay_style=cosine"],
            trinity_runs.MEGATRON,
        ),
        ([f"{trinity_runs.CRITIC}use_dynamic_bsz=false", "trainer.use_dynamic_bsz=false"], trinity_runs.FSDP),
        (["monitor.monitor_type=wandb", "trainer.use_dynamic_bsz=true"], trinity_runs.FSDP),
        (
            [f"{start}megatron.tensor_model_parallel_size=2" for start in (trinity_runs.REFERENCE, trinity_runs.CRITIC)],
            trinity_runs.MEGATRON,
        ),
        (["algorithm.algorithm_type=mix", "buffer.train_batch_size=256"], trinity_runs.FSDP),
        (["algorithm.algorithm_type=mix", f"{EXPERTS}format.prompt_type=plaintext"], trinity_runs.FSDP),
        ([BUFFER + "replay_buffer.enable=true"], trinity_runs.FSDP),
        ([BUFFER + "use_priority_queue=true"], trinity_runs.FSDP),
        ([], trinity_runs.FSDP.replace("trainer: {", "trainer: {ppo_max_token_len_per_gpu: 9000, ")),
        (
            [],
            _FIRST.replace("use_kl_loss: true, ", "")
            .replace("adv_estimator: grpo", "adv_estimator: gae")
            .replace("fixed", "adaptive"),
        ),
        ([], _FIRST.replace("algorithm_type: ppo", "algorithm_type: opmd").replace("tau: 0.0", "opmd_baseline: logavgexp")),
    ],
    "areal": [
        ([], known_runs.AREAL_SYNC),
        ([], known_runs.AREAL_ASYNC),
        (["wandb.mode=online", "actor.optimizer.lr_scheduler_type=cosine"], known_runs.AREAL_SYNC),
        ([], known_runs.AREAL_SYNC.replace("sglang.d4p1m1", "vllm.d4p1m1")),
        (["wandb.mode=online", "model.optimizer.lr_scheduler_type=cosine"], old_areal_runs.IMITATION),
        (["model.bf16=false"], old_areal_runs.IMITATION),
        ([], areal_runs.SFT.replace("actor:", "model:")),
        (["actor.use_lora=true", "actor.use_sapo_loss=true", "actor.overlong_reward_penalty=true"], areal_runs.RL),
        (["model.use_lora=true", "model.gradient_checkpointing=true"], areal_runs.SFT.replace("actor:", "model:")),
        (["actor.optimizer.lr_scheduler_type=cosine", "rollout.scheduling_strategy.type=colocation"], areal_runs.RL),
        (["actor.scheduling_strategy.type=colocation"], areal_runs.RL),
        (["model.optimizer.lr_scheduler_type=cosine"], areal_runs.SFT.replace("actor:", "model:")),
        (["train_dataset.type=dpo"], areal_runs.RL),
        (["actor.gradient_checkpointing=true", "recover.mode=auto", "stats_logger.wandb.mode=online"], areal_runs.RL),
    ],
    "skyrl": [
        ([*known_runs.SFT_SKYRL, "model.lora.rank=8", "logger=wandb", "use_sequence_packing=true"], ""),
        ([word.replace("strategy=megatron", "strategy=fsdp") for word in known_runs.SFT_SKYRL], ""),
        ([word for word in known_runs.SFT_SKYRL if not word.startswith("num_steps")], ""),
        ([*known_runs.SKYRL, *_LORA_SKYRL, *_SKYRL_PPO], ""),
        ([*known_runs.SKYRL, "trainer.logger=wandb", "data.val_data=['v']", "trainer.ref.model.path=r"], ""),
        *(
            ([*known_runs.SKYRL, f"trainer.algorithm.policy_loss_type={name}"], "")
            for name in ("cispo", "sapo", "clip_cov", "kl_cov", "dppo")
        ),
        *(
            ([*known_runs.SKYRL, f"trainer.algorithm.off_policy_correction.{word}"], "")
            for word in (
                "tis_ratio_type=token",
                "tis_ratio_type=sequence",
                "sequence_mask_metric=geometric",
                "sequence_mask_metric=product",
            )
        ),
        ([*known_runs.SKYRL, "trainer.algorithm.use_tis=true", "trainer.strategy=megatron"], ""),
        ([*known_runs.SKYRL, "trainer.algorithm.loss_reduction=seq_mean_token_sum_norm"], ""),
        (
            [
                *known_runs.SKYRL,
                "trainer.algorithm.overlong_buffer.len=100",
                "trainer.algorithm.overlong_buffer.enable=true",
            ],
            "",
        ),
        ([*known_runs.SKYRL, "generator.eval_sampling_params.temperature=0.6", "data.val_data=['v']"], ""),
    ],
    "trl": [
        ([f"-m={name}", "model_name_or_path=m", *words, "eval_strategy=steps", "use_peft=true"], "")
        for name in ("grpo", "dpo", "sft")
        for words in (
            ["dataset_name=a/b", "report_to=wandb", "bf16=false", "lr_scheduler_type=cosine_with_min_lr"],
            ["datasets=[{path: a/b}]", "use_vllm=true", "loss_type=sapo", "max_completion_length=64"],
            [
                "dataset_name=a/b",
                "use_vllm=true",
                "vllm_mode=server",
                "entropy_coef=0.1",
                "beta=0.1",
                "evaluation_strategy=no",
            ],
        )
    ],
}
"""Words, and YAML where there is some."""


def runs_of(system: str) -> list[Run]:
    runs: list[Run] = list(MORE.get(system, []))
    for table in (known_runs.ASKED, known_runs.CHOSEN, known_runs.AHEAD):
        for entry in table.values():
            named = entry[0] if isinstance(entry, tuple) else entry
            if isinstance(named, list) and named and named[0] == system:
                words = named[1:]
                runs.append((words[:-1], words[-1]) if words and "\n" in words[-1] else (words, ""))
    return runs


@pytest.mark.parametrize("system", ["roll", "trinity", "areal", "skyrl", "verl", "siirl", "trl"])
def test_a_key_that_is_said_to_be_used_is_read_by_a_function_in_some_run(system, monkeypatch):
    assert unread(reads_of(system, runs_of(system), monkeypatch)) == {}


# --- reasons ---------------------------------------------------------------------------------------------------------

SAME = re.compile(
    r"numbers are the same|numbers agree|no number|nothing|changes? the numbers|changes? log-probs|the same number|same samples"
    r"|same distribution|the policy's (settings|layout)|the sums are those"
)
"""How a reason says that a key changes no number."""
MAY_CLAIM = {
    "other kernels of the same formula: numbers agree up to rounding",
    "how state is spread over GPUs: the numbers are the same",
    "no cut into micro-batches changes the numbers",
    "no cut changes the numbers",
    "no cut and no kernel changes the numbers",
    "no cut changes log-probs",
    "how FSDP shards: the sums are those of data-parallel Megatron-Core",
    "how other strategies shard: the sums are those of data-parallel Megatron-Core",
    "the actor's strategy is that of all models: it changes no number",
    "the policy's key says it for all models: it changes no number",
    "each of the trainer's steps is one update: the order in it changes nothing",
    "how the worker is run: the critic has the policy's settings",
    "how the worker is run: the model only computes, by the policy's settings",
    "it has the policy's settings",
    "it has the policy's layout",
    "the reference has the policy's settings, and only computes",
    "the reference learns nothing",
    "how the engine serves: the same distribution is sampled",
    "how vLLM serves: the same distribution is sampled",
    "the reference computes as the policy does; no cut changes the numbers",
    "how requests are scheduled: the same samples are requested",
    "always on with tensor parallelism: the same numbers up to rounding",
    "how the same number is computed",
    "nothing that was sampled is encoded again; the reader of calls is chosen by the chat template",
    "each update has its own prompts: their order in it changes nothing",
    "sequences are always packed: nothing is padded",
    "tokens are always balanced over replicas: the numbers are the same",
}
ACTS = re.compile(
    r"offload|overlap|fp8|fp4|int8|quant|kv_cache|aux_loss|z_loss|dropout|capacity|precision_aware|speculative|deepep"
    r"|(^|_)dtype$"
)
"""What costs memory, time or digits: in the name of a key that no such reason may stand for."""
WHOLE = {
    "changes what is shown, not what is learned",
    "how data are read",
    "where Trinity keeps samples",
    "how processes are started",
    "how engines are reached",
    "empty",
    "how the worker is run",
    "the engine receives the whole weights",
    "how weights travel to the engine",
    "how requests are spread",
    "all models share the policy's GPUs",
    "all models of the trainer share the policy's GPUs",
    "the layout says how many GPUs; how they are started is launch's",
    "evaluation is greedy here: for samples set eval.samples",
    "operators on data run on a server, which is only used if its URL is set (launcher.py)",
    "verl's own data, reward model and sampler, which Trinity never starts",
    "DeepSpeed becomes data-parallel Megatron-Core, which shards the optimizer",
    "a reward model next to the environment's rewards, which no later release has",
    "siiRL reads it nowhere on the path of language models",
    "R2 and R3 keep routes with the samples, and read no file",
    "how rollouts are stored between sampling and training",
    "how rewards are computed side by side",
    "the reference learns nothing",
    "the reference has the policy's settings, and only computes",
    "it has the policy's layout",
    "a checkpoint has the whole state; `fivefold export` writes Hugging Face's form",
}
"""Reasons that are true of a whole section, whatever its keys are: a wildcard may stand for the keys of such a section."""
BEHIND_A_SWITCH = re.compile(r"read (with|by) [^:;,]+ only")
"""The other reason that may be one of a whole section."""
TABLES = {system: find_system(system).tables for system in SYSTEMS}


def rows(system: str) -> list[Row]:
    return [row for table in TABLES[system] for section in table.sections for row in section.rows]


@pytest.mark.parametrize("system", TABLES)
def test_only_reasons_that_are_listed_claim_that_a_key_changes_no_number(system):
    claimed = {row.note for row in rows(system) if row.form == "fixed" and SAME.search(row.note)}
    assert claimed - MAY_CLAIM == set()


@pytest.mark.parametrize("system", TABLES)
def test_offload_overlap_and_fewer_bits_are_never_said_to_change_no_number(system):
    silent = []
    for table in TABLES[system]:
        for key in sorted({*table.known.names, *table.exact}):
            row = table.row(key)
            if row is not None and row.form == "fixed" and SAME.search(row.note) and ACTS.search(key.rpartition(".")[2]):
                silent.append((key, row.key))
    assert silent == []


@pytest.mark.parametrize("system", TABLES)
def test_no_wildcard_calls_keys_fixed_that_the_system_has_one_by_one(system):
    """Keys whose name a wildcard leaves open; whole sections that nothing of a run reads are listed by their reason."""
    swallowed = {
        (row.key, row.note)
        for table in TABLES[system]
        for key in table.known.names
        if (row := table.row(key)) is not None
        and row.form == "fixed"
        and "*" in row.key.rpartition(".")[2]
        and row.note not in WHOLE
        and not BEHIND_A_SWITCH.fullmatch(row.note)
    }
    assert swallowed == set()
