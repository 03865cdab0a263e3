"""Runs of several machines from other systems' configurations, and settings of ours that follow `--`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fivefold.config import ConfigError, RunConfig
from fivefold_dialects import writer
from tests.support.dialects import HOME, translate_words

VERL = ["data.train_files=/d/a.parquet", "actor_rollout_ref.model.path=m", "actor_rollout_ref.rollout.name=vllm"]
AREAL = [
    "experiment_name=e",
    "trial_name=t",
    "actor.path=m",
    "actor.backend=megatron:d8",
    "rollout.backend=vllm:d8",
    "train_dataset.path=d.parquet",
]
SKYRL = ["data.train_data=['/d/a.parquet']", "trainer.policy.model.path=m", "trainer.placement.policy_num_gpus_per_node=8",
         "generator.inference_engine.num_engines=8", "generator.inference_engine.run_engines_locally=true"]  # fmt: skip
ROLL = [
    "adv_estimator=grpo",
    "pretrain=m",
    "actor_train.device_mapping=list(range(0,{}))",
    "actor_infer.device_mapping=list(range(0,{}))",
]


def roll(count):
    return [word.format(count) for word in ROLL]


@pytest.mark.parametrize(("system", "words", "backend"), [
    ("verl", [*VERL, "trainer.nnodes=2"], "ray"),
    ("verl", [*VERL, "trainer.nnodes=$NODES"], "ray"),
    ("verl", [*VERL, "trainer.nnodes=1"], None),
    ("verl", VERL, None),
    ("verl", ["model.path=m", "data.train_files=a.parquet", "optim.lr=1e-5", "trainer.nnodes=2"], "ray"),
    ("siirl", [*VERL, "trainer.nnodes=4"], "ray"),
    ("areal", [*AREAL, "scheduler.type=ray"], "ray"),
    ("areal", [*AREAL, "scheduler.type=local", "cluster.n_nodes=1"], None),
    ("areal", [*AREAL, "cluster.n_nodes=2"], "ray"),
    ("areal", AREAL, None),
    ("skyrl", [*SKYRL, "trainer.placement.policy_num_nodes=2"], "ray"),
    ("skyrl", SKYRL, None),
    ("roll", roll(16), "ray"),
    ("roll", roll(8), None),
    ("roll", [*roll(8), "num_gpus_per_node=4"], "ray"),
    ("trinity", ["mode=both", "cluster.node_num=2", "cluster.gpu_per_node=8"], "ray"),
    ("trinity", ["mode=both", "cluster.node_num=1", "cluster.gpu_per_node=8"], None),
])  # fmt: skip
def test_a_configuration_of_several_machines_is_placed_by_ray(system, words, backend):
    translation = translate_words(system, words, {**HOME, "NODES": "3"})
    assert translation.tree.get("launch", {}).get("backend") == backend
    if backend:
        (line,) = [line for line in translation.lines if line.key == "launch.backend"]
        assert line.sources and all("launch.backend" in translation.keys[key] for key in line.sources)


@pytest.mark.parametrize(("system", "words", "nodes", "per_node"), [
    ("verl", [*VERL, "trainer.nnodes=2", "trainer.n_gpus_per_node=4"], 2, 4),
    ("verl", [*VERL, "trainer.nnodes=2"], 2, None),
    ("verl", VERL, None, None),
    ("verl", ["python3", "-m", "recipe.one_step_off_policy.main_ppo", *VERL, "trainer.nnodes=2"], None, None),
    ("verl", ["model.path=m", "data.train_files=a.parquet", "optim.lr=1e-5", "trainer.n_gpus_per_node=4"], None, 4),
    ("siirl", [*VERL, "trainer.nnodes=4", "trainer.n_gpus_per_node=8"], 4, 8),
    ("areal", [*AREAL, "cluster.n_nodes=2", "cluster.n_gpus_per_node=8"], 2, 8),
    ("areal", AREAL, None, None),
    ("skyrl", [*SKYRL, "trainer.placement.policy_num_nodes=2"], 2, 8),
    ("roll", [*roll(16), "num_gpus_per_node=8"], 2, 8),
    ("roll", [*roll(4), "num_gpus_per_node=8"], 1, 4),
    ("trinity", ["mode=both", "cluster.node_num=2", "cluster.gpu_per_node=8"], 2, 8),
])  # fmt: skip
def test_numbers_of_machines_and_of_their_gpus_become_those_of_launch(system, words, nodes, per_node):
    translation = translate_words(system, words, HOME)
    launch = translation.tree.get("launch", {})
    assert (launch.get("nodes"), launch.get("gpus_per_node")) == (nodes, per_node)
    for line in translation.lines:
        if line.key in ("launch.nodes", "launch.gpus_per_node"):
            assert line.sources and all(line.key in translation.keys[key] for key in line.sources)


def test_a_layout_of_other_gpus_than_the_cluster_s_is_refused_with_both_numbers():
    from fivefold.keys.findings import Findings
    from fivefold.plan.hosts import check_hosts

    words = [*AREAL, "cluster.n_nodes=1", "cluster.n_gpus_per_node=8", "train_dataset.batch_size=4"]
    findings = Findings()
    check_hosts(findings, RunConfig.of(translate_words("areal", words, HOME).tree))
    (error,) = findings.errors
    assert "1 host of 8 GPUs have 8, too few for layouts that take 16 (8 for ranks, 8 for servers)" in error


def test_areal_s_registry_of_names_and_its_file_roots_are_reported_with_their_reason():
    words = [*AREAL, "cluster.fileroot=/s", "cluster.name_resolve.type=nfs", "cluster.name_resolve.nfs_record_root=/n",
             "saver.fileroot=/s"]  # fmt: skip
    translation = translate_words("areal", words, HOME)
    assert translation.tree["trainer"]["run_dir"] == "/s/e/t" and "trainer.run_dir" in translation.keys["cluster.fileroot"]
    assert all(
        "ranks meet at MASTER_ADDR" in translation.keys[f"cluster.name_resolve.{key}"] for key in ("type", "nfs_record_root")
    )
    assert "written under trainer.run_dir" in translation.keys["saver.fileroot"]


def test_ranks_that_torchrun_has_started_are_joined_whatever_the_number_of_machines():
    joined = {**HOME, "RANK": "0", "WORLD_SIZE": "16", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert translate_words("verl", [*VERL, "trainer.nnodes=2"], joined).tree["launch"] == {"nodes": 2}


def test_machines_of_a_pytorch_job_are_counted_by_pet_and_placed_by_ray():
    """A PyTorchJob sets RANK and WORLD_SIZE to a machine's number and the number of machines, as siiRL's script reads them."""
    job = {**HOME, "RANK": "0", "WORLD_SIZE": "4", "PET_NNODES": "4", "PET_NODE_RANK": "0"}
    script = [*VERL, "trainer.nnodes=$PET_NNODES", "trainer.n_gpus_per_node=8"]
    assert translate_words("siirl", script, job).tree["launch"] == {"nodes": 4, "gpus_per_node": 8, "backend": "ray"}


def test_settings_of_ours_follow_two_dashes():
    words = [
        *VERL,
        "trainer.total_epochs=3",
        "--",
        "launch.backend=ray",
        "trainer.epochs=5",
        "engine.sampling={temperature: 0.5}",
    ]
    translation = translate_words("verl", words, HOME)
    run = RunConfig.of(translation.tree)
    assert (run.launch.backend, run.trainer.epochs, run.engine.sampling.temperature) == ("ray", 5, 0.5)
    text = writer.write(translation, "verl")
    assert "  backend: ray                                                # after --" in text
    assert text.count("  epochs:") == 1


def test_a_function_of_a_file_may_be_named_after_two_dashes():
    words = [
        *VERL,
        "--",
        'reward={"functions": {"/my/reward.py:score": 1.0}}',
        "engine.vllm={seed: 3}",
        "engine.vllm.dtype=auto",
    ]
    translation = translate_words("verl", words, HOME)
    assert translation.tree["reward"]["functions"] == {"/my/reward.py:score": 1.0}
    assert {"seed": 3, "dtype": "auto"}.items() <= translation.tree["engine"]["vllm"].items()


def test_keys_in_a_section_of_ours_take_the_place_of_what_was_translated():
    translation = translate_words("verl", [*VERL, "trainer.nnodes=2", "--", "launch={backend: local, threads: 4}"], HOME)
    assert translation.tree["launch"] == {"nodes": 2, "backend": "local", "threads": 4}


def test_a_key_of_ours_before_two_dashes_is_refused_with_its_place():
    translation = translate_words("verl", [*VERL, "launch.backend=ray"], HOME)
    assert translation.refusals == [
        "launch.backend=ray: a key of fivefold, not of verl: write it after --, as in -- launch.backend=..."
    ]


@pytest.mark.parametrize("word", ["nothing.of.ours=1", "trainer.epochs"])
def test_what_follows_two_dashes_must_be_a_key_of_ours_with_a_value(word):
    with pytest.raises(ConfigError, match=r"settings after -- must be|written key=value"):
        translate_words("verl", [*VERL, "--", word], HOME)


def test_the_command_line_takes_settings_of_ours_after_two_dashes(tmp_path):
    words = ["convert", "--from", "verl", *VERL, "--", "launch.backend=ray", "trainer.steps=7"]
    done = subprocess.run(
        [sys.executable, "-m", "fivefold.cli", *words], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert "backend: ray" in done.stdout and "steps: 7" in done.stdout


def test_a_judge_on_servers_of_its_own_keeps_ray_away_with_a_line():
    judge = ["judge_model_type=inference", "worker_cls=roll.pipeline.rlvr.rewards.llm_judge_reward_worker.LLMJudgeRewardWorker",
             "judge_prompt=Qwen2.5-7B-Instruct-RLVR-prompt", "model_args.model_name_or_path=j", "device_mapping=list(range(8,16))",
             "strategy_args.strategy_name=hf_infer", "tag_included=[RLVR]"]  # fmt: skip
    translation = translate_words("roll", [*roll(16), *(f"rewards.llm_judge.{word}" for word in judge)], HOME)
    assert translation.tree["reward"]["judge"]["backend"].startswith("vllm:") and "launch" not in translation.tree
    assert any("start the run with torchrun" in note for note in translation.notes)
    # Its GPUs are more than those that the configuration counts, as ROLL's judge borrows the policy's.
    words = [*roll(16), "num_gpus_per_node=8", *(f"rewards.llm_judge.{word}" for word in judge)]
    assert "launch" not in translate_words("roll", words, HOME).tree
