"""Trinity-RFT's page about its Megatron-LM backend: its YAML, its settings and its commands, with the sizes of a toy."""

from __future__ import annotations

import tomllib
from importlib.metadata import metadata

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from docs.documents import ROOT
from tests.documents.pages import (
    SETTINGS,
    check_change,
    check_commands,
    for_a_toy,
    make_run,
    read_yaml,
    settings,
    text,
    train,
)
from tests.eras.eras import nested

PAGE = "trinity-rft-megatron-backend"
ROLES = ("actor", "ref", "critic")
WITHIN = {"actor_rollout_ref": [], "critic": [], "actor": ["actor_rollout_ref"], "ref": ["actor_rollout_ref"], "megatron": ROLES,
          "override_transformer_config": ["megatron"]}  # fmt: skip
REST = """
project: page
name: trinity
checkpoint_root_dir: {root}/runs
algorithm: {{algorithm_type: ppo, repeat_times: 2}}
model: {{model_path: {root}/model, max_prompt_tokens: 440, max_response_tokens: 8}}
cluster: {{node_num: 1, gpu_per_node: 3}}
buffer:
  total_steps: 2
  batch_size: 4
  explorer_input:
    taskset: {{name: t, storage_type: file, path: {root}/rows.jsonl, format: {{prompt_key: question, response_key: truth}}}}
    default_workflow_type: math_workflow
explorer: {{rollout_model: {{engine_num: 1, tensor_parallel_size: 1}}}}
synchronizer: {{sync_method: nccl, sync_interval: 1}}
trainer: {{trainer_type: verl, trainer_strategy: megatron, save_interval: 2}}
"""
"""The rest of a run, which the page leaves to its quick start."""
COMMANDS = {
    "git clone": ["trinity-4", "trinity-8"], "conda create": ["trinity-3"], "conda activate": ["trinity-3"],
    "python3.10 -m venv": ["trinity-2", "trinity-4"], "source .venv": ["trinity-4"], "pip install -e": ["trinity-5"],
    "pip install flash-attn": ["trinity-6"], "pip install -v": ["trinity-7"], "docker build": ["trinity-8"], "docker run": ["trinity-10"],
}  # fmt: skip
"""How a command of the page begins -> the rows of docs/documents.md that answer it."""


def printed() -> dict[str, object]:
    """The settings of the page's YAML, below the section that they stand in since 2025-06."""
    page = text(PAGE)
    section = read_yaml(page[page.index("actor_rollout_ref:") : page.index("Training Mixture-of-Experts")], WITHIN)
    return {f"trainer.trainer_config.{key}": value for key, value in section.items()}


@pytest.mark.parametrize(("family", "bridge"), [("qwen3", "native"), ("qwen3_moe", "mbridge")])
def test_the_page_s_yaml_trains_actor_reference_and_critic_in_small(tmp_path, family, bridge):
    """Every key of the page: two tensor-parallel ranks for each model, all layers computed again, and an engine of its own;
    for experts with `use_mbridge: true`, as the page recommends."""
    # Trinity's system prompt has 400 characters, which are tokens here.
    make_run(tmp_path, family, max_position_embeddings=512)
    tree = yaml.safe_load(REST.format(root=tmp_path))
    by_mbridge = {key: True for key in printed() if key.endswith("use_mbridge") and bridge == "mbridge"}
    tree["trainer"] |= nested(printed() | by_mbridge)["trainer"]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    rows, run, told = train(tmp_path, "page/trinity", "trinity", "--config", tmp_path / "run.yaml", *for_a_toy(tmp_path))
    assert "0 not supported" in told and [row["step"] for row in rows if "policy/loss" in row] == [1, 2]
    assert all(row["critic/loss"] > 0 for row in rows if "policy/loss" in row)
    # What a model leaves out is the policy's.
    models = [run[role] for role in ("policy", "reference", "critic")]
    assert {model["backend"] or run["policy"]["backend"] for model in models} == {"megatron:d1t2p1"}
    assert (run["engine"]["placement"], run["policy"]["recompute"]) == ("apart", "full")
    assert run["critic"]["recompute"] in (None, "full")
    assert run["policy"]["megatron"]["bridge_type"] == bridge


def test_the_settings_that_are_changed_are_those_of_the_page():
    assert {key: pair[0] for key, pair in SETTINGS["trinity"]["flips"].items()} == printed()


@pytest.mark.parametrize("key", settings("trinity"))
def test_every_setting_of_the_page_acts_or_the_report_says_why_not(key):
    check_change("trinity", key)


def test_every_command_of_the_page_has_its_row():
    check_commands(PAGE, "trinity", COMMANDS)


def test_the_package_says_which_python_it_needs_and_that_is_none_below():
    needed = SpecifierSet(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"])
    assert "3.11" in needed and "3.10" not in needed
    # What a wheel's metadata say is what pip compares.
    assert SpecifierSet(metadata("fivefold")["Requires-Python"]) == needed
