"""SkyRL's pull request that brought Megatron: the keys that it shows, with the sizes of a toy."""

from __future__ import annotations

import re

import pytest

from tests.documents.pages import check_change, for_a_toy, make_run, settings, text, train

PAGE = "skyrl-pr223-megatron-tp-pp"
KEYS = re.compile(
    r"^(expert_tensor_parallel_size|average_in_collective|data_parallel_sharding_strategy|seed): \S+$", re.MULTILINE
)


def test_the_megatron_settings_of_the_page_train_in_small(tmp_path):
    """GRPO with tensor and pipeline parallelism, a reference, and engines on the same processes."""
    make_run(tmp_path)
    assert "Initial Megatron TP + PP Support" in text(PAGE)
    megatron = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "context_parallel_size": 1, "expert_model_parallel_size": 1,
                "expert_tensor_parallel_size": 1}  # fmt: skip
    sizes = [
        f"trainer.{role}.megatron_config.{key}={value}" for role in ("policy", "ref") for key, value in megatron.items()
    ]
    rows, run, told = train(
        tmp_path, "page", "skyrl", f"data.train_data=['{tmp_path}/rows.jsonl']", f"data.val_data=['{tmp_path}/rows.jsonl']",
        "environment.env_class=gsm8k", "trainer.algorithm.advantage_estimator=grpo", f"trainer.policy.model.path={tmp_path}/model",
        "trainer.strategy=megatron", "trainer.placement.colocate_all=true", "trainer.placement.policy_num_gpus_per_node=4", *sizes,
        "trainer.policy.megatron_config.ddp_config.grad_reduce_in_fp32=true",
        "trainer.policy.megatron_config.ddp_config.average_in_collective=true", "trainer.seed=42", "trainer.train_batch_size=4",
        "trainer.policy_mini_batch_size=2", "trainer.max_prompt_length=32", "generator.sampling_params.max_generate_length=8",
        "generator.n_samples_per_prompt=2", "generator.inference_engine.num_engines=2", "generator.inference_engine.backend=vllm",
        "generator.inference_engine.tensor_parallel_size=2", "generator.inference_engine.run_engines_locally=true",
        "trainer.logger=console", "trainer.eval_interval=-1", "trainer.eval_before_train=false", "trainer.max_training_steps=2",
        f"trainer.ckpt_path={tmp_path}/runs/page", *for_a_toy(tmp_path),
    )  # fmt: skip
    assert "0 not supported" in told and [row["step"] for row in rows if "policy/loss" in row] == [1, 2]
    assert (run["policy"]["backend"], run["engine"]["backend"], run["trainer"]["seed"]) == (
        "megatron:d1t2p2",
        "vllm:d2t2",
        42,
    )
    assert rows[0]["policy/entropy"] > 0 and rows[0]["policy/kl_reference"] < 1e-3


def test_the_settings_that_are_changed_are_those_of_the_page():
    shown = {line.partition(":")[0] for line in re.findall(KEYS.pattern.replace("(", "(?:"), text(PAGE), re.MULTILINE)}
    assert shown == {"expert_tensor_parallel_size", "average_in_collective", "data_parallel_sharding_strategy", "seed"}
    assert shown <= {key.rpartition(".")[2] for key in settings("skyrl")}


@pytest.mark.parametrize("key", settings("skyrl"))
def test_every_setting_of_the_page_acts_or_the_report_says_why_not(key):
    check_change("skyrl", key)
