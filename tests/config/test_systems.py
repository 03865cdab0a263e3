"""One run of each other system starts here; `make test-dialects` has the rest."""

from __future__ import annotations

import pytest

from fivefold.config.loader import read_mapping
from tests.support.commands import fivefold
from tests.support.dialects import config

SIZES = ["data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=16", "actor_rollout_ref.rollout.n=5"]
VERL = ["data.train_files=d.parquet", "actor_rollout_ref.model.path=m", "algorithm.adv_estimator=grpo", *SIZES]
RUNS = {
    "verl": (VERL, ""),
    "siirl": (VERL, ""),
    "skyrl": (
        ["data.train_data=[d.parquet]", "trainer.policy.model.path=m", "trainer.placement.policy_num_gpus_per_node=8",
         "generator.inference_engine.num_engines=8"], "",
    ),
    "trl": (
        ["-m=grpo", "model_name_or_path=m", "dataset_name=a/b", "reward_funcs=rewards.exact", "num_processes=8"], "",
    ),
    "roll": (
        [],
        """
        pretrain: m
        rollout_batch_size: 8
        num_return_sequences_in_group: 8
        adv_estimator: grpo
        actor_train:
          training_args: {per_device_train_batch_size: 1, gradient_accumulation_steps: 8}
          data_args: {file_name: [d.jsonl]}
          device_mapping: list(range(0,8))
        actor_infer: {strategy_args: {strategy_name: vllm}}
        """,
    ),
    "areal": (
        [],
        """
        experiment_name: a
        trial_name: b
        actor: {path: m, backend: "megatron:d4", kl_ctl: 0.0}
        rollout: {backend: "vllm:d4"}
        train_dataset: {path: d.jsonl, type: rl, batch_size: 16}
        gconfig: {n_samples: 4}
        """,
    ),
    "trinity": (
        [],
        """
        algorithm: {algorithm_type: grpo, repeat_times: 8}
        model: {model_path: m, max_prompt_tokens: 256, max_response_tokens: 256}
        cluster: {node_num: 1, gpu_per_node: 8}
        buffer: {batch_size: 64, explorer_input: {taskset: {path: d.jsonl}}}
        explorer: {rollout_model: {engine_num: 4}}
        """,
    ),
}  # fmt: skip


@pytest.mark.parametrize("system", RUNS)
def test_a_run_of_each_system_is_a_run_of_ours(system):
    words, tree = RUNS[system]
    assert config(system, *words, tree=tree).model.path == "m"


def test_convert_writes_a_yaml_that_we_read():
    done = fivefold("convert", "--from", "verl", *VERL)
    assert read_mapping(done.stdout, "run.yaml")["algorithm"]["name"] == "grpo"
