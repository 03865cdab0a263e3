"""ROLL's page about its Megatron backend: its two blocks, its parameters and its settings, with the sizes of a toy."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from tests.documents.pages import SETTINGS, check_change, for_a_toy, make_run, read_yaml, settings, text, train
from tests.eras.eras import nested

PAGE = "roll-megatron-strategy"
WORKERS = ("actor_train", "reference")
WITHIN = {
    **dict.fromkeys(WORKERS, ()),
    **dict.fromkeys(("model_args", "training_args", "strategy_args", "device_mapping", "infer_batch_size"), WORKERS),
    "strategy_config": ("strategy_args",),
}
REST = """
exp_name: page
pretrain: {root}/model
output_dir: {root}/runs/page
max_steps: 2
rollout_batch_size: 4
num_return_sequences_in_group: 2
prompt_length: 32
response_length: 8
adv_estimator: grpo
use_kl_loss: true
kl_loss_coef: 0.001
save_steps: 100
rewards: {{math_rule: {{worker_cls: roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker, tag_included: [sums]}}}}
actor_train: {{data_args: {{file_name: ["{root}/roll.jsonl"]}}}}
actor_infer: {{strategy_args: {{strategy_name: vllm}}, num_gpus_per_worker: 2, device_mapping: "list(range(0,4))"}}
"""
"""The rest of a run, which the page leaves out."""
SMALL = {
    "actor_train.training_args.gradient_accumulation_steps": 1,
    "actor_train.strategy_args.strategy_config.tensor_model_parallel_size": 1,
    "actor_train.strategy_args.strategy_config.virtual_pipeline_model_parallel_size": 2,
    "actor_train.strategy_args.strategy_config.expert_model_parallel_size": 2,
    "actor_train.device_mapping": "list(range(0,4))",
    "reference.strategy_args.strategy_config.expert_model_parallel_size": 2,
    "reference.device_mapping": "list(range(0,4))",
}


def printed() -> dict[str, object]:
    """The settings of the page's two blocks of YAML."""
    page = text(PAGE)
    blocks = re.findall(r"^((?:actor_train|reference):\n.*?)\n\n", page, re.MULTILINE | re.DOTALL)
    return {key: value for block in blocks for key, value in read_yaml(block, WITHIN).items()}


def test_the_page_s_two_blocks_train_in_small(tmp_path):
    """Experts, virtual stages and layers that are computed again in the actor, and a layout of its own in the reference."""
    make_run(tmp_path, "qwen3_moe")
    rows = [{"prompt": f"{a}+{b}=", "ground_truth": str(a + b), "tag": "sums"} for a in range(8) for b in range(8)]
    (tmp_path / "roll.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tree = yaml.safe_load(REST.format(root=tmp_path))
    small_settings = nested({**printed(), **SMALL})
    small_settings["actor_train"] |= tree["actor_train"]
    (tmp_path / "page.yaml").write_text(yaml.safe_dump(tree | small_settings))
    rows, run, told = train(
        tmp_path, "page", "roll", "--config_path", tmp_path, "--config_name", "page", *for_a_toy(tmp_path)
    )
    assert "0 not supported" in told and [row["step"] for row in rows] == [1, 2]
    assert rows[0]["policy/kl_reference"] < 1e-3, "the reference is the policy before its first update"
    assert run["policy"]["backend"] == "megatron:d2t1p2e2" and run["reference"]["backend"].startswith("megatron:d4t1p1")
    megatron = run["policy"]["megatron"]
    assert megatron["pipeline"]["virtual_pipeline_model_parallel_size"] == 2
    assert megatron["transformer"]["recompute_modules"] == ["moe"] and megatron["transformer"]["moe_grouped_gemm"] is True
    assert (run["algorithm"]["updates_per_step"], run["policy"]["optimizer"]["weight_decay"]) == (4, 0)


def test_the_settings_that_are_changed_are_those_of_the_page():
    assert {key: pair[0] for key, pair in SETTINGS["roll"]["flips"].items() if key in printed()} == printed()
    # What the page explains besides its examples; a section is no setting.
    named = set(re.findall(r"^ +(?:•|\d\.) (\w+):", text(PAGE), re.MULTILINE)) - {"strategy_config"}
    assert named - {key.rpartition(".")[2] for key in SETTINGS["roll"]["flips"]} == set()


@pytest.mark.parametrize("key", settings("roll"))
def test_every_setting_of_the_page_acts_or_the_report_says_why_not(key):
    check_change("roll", key)
