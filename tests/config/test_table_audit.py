"""What a table says of a key must be so: a key that is used is read, a reason that claims equal numbers may claim them.

The runs are those of the other tests of dialects, and words that make functions read what they read only then.
"""

from __future__ import annotations

import pytest

from fivefold.config.dialects.trinity_keys import BUFFER, EXPERTS
from tests.config import test_areal_data_and_intervals as areal_runs
from tests.config import test_areal_releases as old_areal_runs
from tests.config import test_dialects as known_runs
from tests.config import test_roll_defaults as roll_runs
from tests.config import test_trinity_releases as old_trinity_runs
from tests.config import test_trinity_trainer as trinity_runs
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
MORE: dict[str, list[Run]] = {
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
}
"""Words, and YAML where there is some."""


def runs_of(system: str) -> list[Run]:
    found: list[Run] = list(MORE.get(system, []))
    for table in (known_runs.ASKED, known_runs.CHOSEN, known_runs.AHEAD):
        for entry in table.values():
            named = entry[0] if isinstance(entry, tuple) else entry
            if isinstance(named, list) and named and named[0] == system:
                words = named[1:]
                found.append((words[:-1], words[-1]) if words and "\n" in words[-1] else (words, ""))
    return found


@pytest.mark.parametrize("system", ["roll", "trinity", "areal", "skyrl"])
def test_a_key_that_is_said_to_be_used_is_read_by_a_function_in_some_run(system, monkeypatch):
    assert unread(reads_of(system, runs_of(system), monkeypatch)) == {}
