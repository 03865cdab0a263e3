"""Runs that are started by the commands of other systems."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from fivefold.config import RunConfig
from tests.support.commands import fivefold
from tests.support.whole_runs import assert_same, make_model, metrics

# The script of siiRL's page with its own variables; the numbers are those of a toy, and `hf` samples where there is no vLLM.
SCRIPT = r"""
#!/usr/bin/env bash
export HYDRA_FULL_ERROR=1
export ALG=grpo
export TRAIN_DATA_PATH=$HOME/data/train.parquet
export TEST_DATA_PATH=$HOME/data/test.parquet
export MODEL_PATH=$HOME/model
export TRAIN_BATCH_SIZE_PER_NODE=4
export PPO_MINI_BATCH_SIZE_PER_NODE=2
export PPO_MICRO_BATCH_SIZE_PER_GPU=2
export MAX_PROMPT_LENGTH=16
export MAX_RESPONSE_LENGTH=8
export ACTOR_REF_TP=1
export ACTOR_REF_PP=2
export N_GPUS_PER_NODE=${N_GPUS_PER_NODE:-8}
export NNODES=${PET_NNODES:-1}
timestamp=$(date +"%Y%m%d_%H%M%S")
export CKPT_PATH=$HOME/runs/siirl
export TENSORBOARD_DIR=$HOME/tensorboard/dlc_${NNODES}_$timestamp
export TRAIN_BATCH_SIZE=$(($TRAIN_BATCH_SIZE_PER_NODE * $NNODES))
export PPO_MINI_BATCH_SIZE=$(($PPO_MINI_BATCH_SIZE_PER_NODE * $NNODES))
TRAINING_CMD=(
    python3 -m siirl.main_dag
    algorithm.adv_estimator=\$ALG
    data.train_files=\$TRAIN_DATA_PATH
    data.val_files=\$TEST_DATA_PATH
    data.train_batch_size=\$TRAIN_BATCH_SIZE
    data.max_prompt_length=\$MAX_PROMPT_LENGTH
    data.max_response_length=\$MAX_RESPONSE_LENGTH
    actor_rollout_ref.model.path=\$MODEL_PATH
    actor_rollout_ref.model.enable_gradient_checkpointing=True
    # --- Megatron Backend Configuration ---
    actor_rollout_ref.actor.strategy=megatron
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=\$ACTOR_REF_TP
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=\$ACTOR_REF_PP
    actor_rollout_ref.actor.megatron.sequence_parallel=True
    actor_rollout_ref.actor.megatron.use_distributed_optimizer=True
    actor_rollout_ref.actor.megatron.param_dtype=bfloat16
    actor_rollout_ref.actor.megatron.param_offload=False
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=\$PPO_MINI_BATCH_SIZE
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=\$PPO_MICRO_BATCH_SIZE_PER_GPU
    actor_rollout_ref.actor.grad_clip=1.0
    actor_rollout_ref.rollout.name=hf
    actor_rollout_ref.rollout.n=2
    trainer.logger=['console']
    trainer.n_gpus_per_node=\$N_GPUS_PER_NODE
    trainer.nnodes=\$NNODES
    trainer.save_freq=30
    trainer.test_freq=-1
    trainer.total_training_steps=2
    trainer.resume_mode=auto
    trainer.max_actor_ckpt_to_keep=5
    trainer.default_local_dir=\$CKPT_PATH
    trainer.val_before_train=False
)
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("systems")
    # Heads of 32, which vLLM on CPUs has attention for.
    make_model(root, hidden=64, heads=2)
    (root / "run.sh").write_text(SCRIPT)
    sums = [
        {"prompt": f"{a}+{b}=", "ground_truth": str(a + b), "answer": str(a + b), "tag": "t"}
        for a in range(8)
        for b in range(8)
    ]
    (root / "data/sums.jsonl").write_text("\n".join(map(json.dumps, sums)))
    skyrl_rows = [
        {"prompt": [{"role": "user", "content": row["prompt"]}], "reward_spec": {"ground_truth": row["answer"]}}
        for row in sums
    ]
    (root / "data/skyrl.jsonl").write_text("\n".join(map(json.dumps, skyrl_rows)))
    return root


def test_a_script_of_siirl_trains_as_its_translation_does(root):
    """The page's own way, with the cluster's variables given; the other run is of the YAML that convert writes."""
    given = ("--env", f"HOME={root}", "--env=N_GPUS_PER_NODE=2")
    done = fivefold("train", "--from", "siirl", root / "run.sh", *given)
    assert done.returncode == 0, done.stderr
    assert "of siirl's keys 29 translated, 4 fixed here, 0 not supported, 0 unknown" in done.stdout
    rows = metrics(root, "siirl")
    assert [row["step"] for row in rows] == [1, 2]
    written = yaml.safe_load((root / "runs/siirl/run.yaml").read_text())
    assert (written["policy"]["backend"], written["algorithm"]["updates_per_step"]) == ("megatron:d1t1p2", 2)
    converted = fivefold("convert", "--from=siirl", root / "run.sh", *given)
    assert converted.returncode == 0 and "  path: " in converted.stdout
    (root / "converted.yaml").write_text(converted.stdout)
    ran, written = RunConfig.restore(root / "runs/siirl/logs/requested.yaml"), RunConfig.from_yaml(root / "converted.yaml")
    # What the method brings by itself is not written, and the script names its logs after the time.
    timed = replace(written.trainer, tensorboard_dir=ran.trainer.tensorboard_dir)
    assert (
        replace(ran, algorithm=written.algorithm) == replace(written, trainer=timed)
        and ran.algorithm.resolved == written.algorithm.resolved
    )
    again = fivefold("train", root / "converted.yaml", f"trainer.run_dir={root}/runs/converted")
    assert again.returncode == 0, again.stderr
    assert_same(metrics(root, "converted"), rows)


TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ {'name': c.function.name, "
    "'arguments': c.function.arguments} | tojson }}</tool_call>{% endfor %}{{ eos_token }}{% endfor %}"
)
TOOL = """
from verl.tools.function_tool import function_tool

@function_tool
def plus(a: int, b: int) -> str:
    \"\"\"Add.

    Args:
        a: A number.
        b: A number.
    \"\"\"
    return str(a + b)
"""
TOOLS = """
tools:
  - class_name: own_tools.Answer
    config: {type: native}
    tool_schema:
      type: function
      function:
        name: answer
        description: Answer.
        parameters: {type: object, properties: {answer: {type: string, description: A number.}}, required: [answer]}
"""
OWN = """
from verl.tools.base_tool import BaseTool

class Answer(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        return "well", 0.0, {}
"""


def test_arguments_of_verl_with_tools_of_both_kinds_train_as_they_are(root, monkeypatch):
    """verl itself is not installed; the model has not learned to call, so trajectories end with their first turns."""
    (root / "tools.py").write_text(TOOL)
    (root / "tools.yaml").write_text(TOOLS)
    (root / "own_tools.py").write_text(OWN)
    monkeypatch.chdir(root)
    multi = "actor_rollout_ref.rollout.multi_turn."
    done = fivefold(
        "train", "--from", "verl", f"data.train_files={root}/data/train.parquet", "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.model.path={root}/model", "actor_rollout_ref.rollout.name=hf", "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4", "actor_rollout_ref.rollout.n=2", "trainer.logger=console",
        "data.max_prompt_length=16", "data.max_response_length=8", "trainer.n_gpus_per_node=1", "trainer.total_training_steps=1",
        "trainer.val_before_train=False", f"trainer.default_local_dir={root}/runs/tools", f"{multi}enable=True",
        f"{multi}max_assistant_turns=3", f"{multi}tool_config_path={root}/tools.yaml",
        f"{multi}function_tool_path={root}/tools.py", "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent",
        "--", f"data.chat_template={json.dumps(TEMPLATE)}",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 not supported, 0 unknown" in done.stdout
    ran = RunConfig.restore(root / "runs/tools/logs/requested.yaml")
    assert ran.environment.tools == [f"verl:{root}/tools.yaml", f"verl:{root}/tools.py"]
    assert metrics(root, "tools")[-1]["turns/mean"] >= 1


def test_arguments_of_skyrl_train_as_they_are(root):
    done = fivefold(
        "train", "--from", "skyrl", f"data.train_data=['{root}/data/skyrl.jsonl']", "trainer.algorithm.advantage_estimator=grpo",
        f"trainer.policy.model.path={root}/model", "trainer.placement.colocate_all=true", "trainer.strategy=fsdp2",
        "trainer.placement.policy_num_gpus_per_node=1", "generator.inference_engine.num_engines=1", "trainer.train_batch_size=4",
        "trainer.policy_mini_batch_size=2", "trainer.max_prompt_length=16", "generator.sampling_params.max_generate_length=8",
        "generator.n_samples_per_prompt=2", "trainer.logger=console", "trainer.max_training_steps=1", f"trainer.ckpt_path={root}/runs/skyrl",
    )  # fmt: skip
    # Everything is said but for vLLM, which is not on this machine or trains as any other run does.
    assert done.returncode == 0 or "engine.backend: vLLM is not installed" in done.stderr, done.stderr
    assert "0 unknown" in done.stdout


def test_a_command_of_trl_with_its_yaml_as_they_are(root):
    rows = [{"prompt": [{"role": "user", "content": f"{a}+{a}="}], "solution": f"${2 * a}$"} for a in range(8)]
    (root / "data/trl.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (root / "grpo.yaml").write_text(f"""\
        model_name_or_path: {root}/model
        datasets: [{{path: json, data_files: [{root}/data/trl.jsonl]}}]
        reward_funcs: [accuracy_reward]
        per_device_train_batch_size: 4
        max_completion_length: 8
        """)
    done = fivefold(
        "train", "--from", "trl", "trl", "grpo", "--config", root / "grpo.yaml", "--num_processes", "1", "--max_steps", "4",
        "--num_generations", "2", "--gradient_accumulation_steps", "2", "--steps_per_generation", "4", "--loss_type", "grpo",
        "--use_cpu", "--no_bf16", "--output_dir", root / "runs/trl", "--", "data.max_prompt_tokens=16",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "0 not supported, 0 unknown" in done.stdout
    written = yaml.safe_load((root / "runs/trl/run.yaml").read_text())
    assert (written["data"]["prompts_per_step"], written["algorithm"]["updates_per_step"]) == (8, 2)
    assert [row["step"] for row in metrics(root, "trl")] == [1, 2], "four optimizer steps are two rollouts"


AREAL_PAGE = """
experiment_name: x
trial_name: y
rollout: {{backend: "sglang:d1", max_head_offpolicyness: 0}}
gconfig: {{n_samples: 2, max_new_tokens: 8}}
actor:
  backend: "megatron:d1"
  path: m
  ppo_n_minibatches: 2
  recompute_logprob: true
  optimizer: {{lr: 1.0e-6}}
  reward_norm: {{mean_level: group, std_level: group}}
train_dataset: {{path: {root}/data/train.parquet, batch_size: 4, max_length: 16}}
total_train_steps: 1
cluster: {{fileroot: {root}/runs}}
"""
ROLL_PAGE = """
exp_name: page
pretrain: {root}/model
output_dir: {root}/runs/roll
max_steps: 2
rollout_batch_size: 4
num_return_sequences_in_group: 2
prompt_length: 16
response_length: 8
adv_estimator: grpo
save_steps: 100
rewards: {{math_rule: {{worker_cls: roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker}}}}
actor_train:
  model_args: {{disable_gradient_checkpointing: false, dtype: bf16, model_type: ~}}
  training_args: {{learning_rate: 1.0e-6, weight_decay: 0, per_device_train_batch_size: 1, gradient_accumulation_steps: 2, warmup_steps: 20}}
  data_args: {{file_name: ["{root}/data/sums.jsonl"]}}
  strategy_args:
    strategy_name: megatron_train
    strategy_config: {{tensor_model_parallel_size: 1, pipeline_model_parallel_size: 2, use_distributed_optimizer: true, sequence_parallel: true}}
  device_mapping: list(range(0,2))
actor_infer: {{strategy_args: {{strategy_name: hf_infer}}, device_mapping: "list(range(0,2))"}}
reference:
  strategy_args: {{strategy_name: megatron_infer, strategy_config: {{tensor_model_parallel_size: 1, pipeline_model_parallel_size: 2}}}}
  device_mapping: list(range(0,2))
"""
TRINITY_PAGE = """
project: page
name: trinity
checkpoint_root_dir: {root}/runs
algorithm: {{algorithm_type: grpo, repeat_times: 2}}
model: {{model_path: {root}/model, max_prompt_tokens: 420, max_response_tokens: 8}}
cluster: {{node_num: 1, gpu_per_node: 2}}
buffer:
  total_steps: 1
  batch_size: 4
  explorer_input:
    taskset: {{name: t, storage_type: file, path: {root}/data/sums.jsonl, format: {{prompt_key: prompt, response_key: answer}}}}
    default_workflow_type: math_workflow
explorer: {{rollout_model: {{engine_num: 1, tensor_parallel_size: 1}}}}
synchronizer: {{sync_method: nccl, sync_interval: 1}}
trainer:
  trainer_config:
    actor_rollout_ref:
      actor:
        strategy: megatron
        megatron:
          tensor_model_parallel_size: 1
          pipeline_model_parallel_size: 1
          expert_model_parallel_size: 1
          param_offload: false
          use_mbridge: false
          use_dist_checkpointing: false
          override_transformer_config: {{recompute_granularity: full, recompute_method: uniform, recompute_num_layers: 1}}
"""


def test_the_configuration_of_rolls_page_trains_by_its_own_command(root):
    """`--config_path DIRECTORY --config_name NAME`, as examples/start_rlvr_pipeline.py takes them."""
    (root / "roll.yaml").write_text(ROLL_PAGE.format(root=root))
    done = fivefold("train", "--from", "roll", "--config_path", root, "--config_name", "roll")
    assert done.returncode == 0, done.stderr
    assert "0 not supported, 0 unknown" in done.stdout
    assert [row["step"] for row in metrics(root, "roll")] == [1, 2]


@pytest.mark.parametrize(("system", "text", "words"), [
    ("areal", AREAL_PAGE, [
        "scheduler.type=ray", "experiment_name=megatron-moe-gsm8k-grpo", "trial_name=trial-0", "rollout.backend=sglang:d1",
        "actor.backend=megatron:(attn:d1p1t1c1|ffn:d1p1t1e1)", "cluster.n_nodes=1", "cluster.n_gpus_per_node=2", "actor.path={root}/model",
        "actor.megatron.use_deterministic_algorithms=True", "actor.kl_ctl=0",
    ]),
    ("trinity", TRINITY_PAGE, []),
])  # fmt: skip
@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="states what keeps it from starting without vLLM")
def test_nothing_but_a_missing_engine_keeps_the_pages_own_command_from_starting(root, system, text, words):
    engine = "SGLang" if system == "areal" else "vLLM"
    (root / f"{system}.yaml").write_text(text.format(root=root))
    given = [word.replace("{root}", str(root)) for word in words]
    done = fivefold("train", "--from", system, "--config", root / f"{system}.yaml", *given)
    assert "0 unknown" in done.stdout, done.stderr
    faults = [line.strip() for line in done.stderr.splitlines() if line.strip().startswith("error")]
    # AReaL's page has scheduler.type=ray.
    faults = [line for line in faults if "launch.backend: ray needs ray" not in line]
    # AReaL's page asks for SGLang, and gets it.
    assert len(faults) == 1 and f"{engine} is not installed" in faults[0] and "pip install" in faults[0], done.stderr


def test_a_run_that_would_be_another_does_not_start(root):
    words = [
        "--from",
        "verl",
        f"data.train_files={root}/data/train.parquet",
        f"actor_rollout_ref.model.path={root}/model",
        "actor_rollout_ref.rollout.name=hf",
    ]
    words += [
        f"trainer.default_local_dir={root}/runs/refused",
        "actor_rollout_ref.actor.megatron.qat.enable=True",
        "trainer.loger=console",
    ]
    for command in ("train", "check"):
        done = fivefold(command, *words)
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert "actor_rollout_ref.actor.megatron.qat.enable=True: training for a quantized model" in done.stderr
        assert "trainer.loger=console: not a known key of verl: did you mean trainer.logger?" in done.stderr
    assert not (root / "runs/refused").exists()


def test_an_incomplete_conversion_exits_2_and_its_file_runs_only_once_accepted(root):
    words = [
        "--from",
        "verl",
        "data.train_files=d.parquet",
        "actor_rollout_ref.model.path=m",
        "trainer.default_local_dir=r",
        "trainer.logger=[console,clearml]",
    ]
    quantized = "actor_rollout_ref.actor.megatron.qat.enable=True"
    assert fivefold("convert", *words).returncode == 0
    refused = fivefold("convert", *words, quantized)
    sentence = f"{quantized}: training for a quantized model"
    assert refused.returncode == 2 and f"refused  {sentence}" in refused.stderr
    tree = yaml.safe_load(refused.stdout)
    assert next(iter(tree)) == "refused" and len(tree["refused"]) == 1 and tree["refused"][0].startswith(sentence)
    (root / "refused.yaml").write_text(refused.stdout)
    for command in ("check", "train"):
        done = fivefold(command, root / "refused.yaml")
        assert done.returncode == 2 and "delete the key `refused`" in done.stderr and sentence in done.stderr
    del tree["refused"]
    lenient = fivefold("convert", "--no-strict", *words, quantized)
    assert lenient.returncode == 0 and yaml.safe_load(lenient.stdout) == tree
    strict = fivefold("convert", "--strict", *words)
    assert strict.returncode == 2 and "refused:" not in strict.stdout
    assert "trainer.logger = [console,clearml]: clearml: metrics are in metrics.jsonl" in strict.stdout


def test_from_names_a_system(root):
    for arguments, says in (
        (("train", "--from", "vurl", "a.b=1"), "must be one of areal, roll, siirl"),
        (("convert", "a.yaml"), "convert needs --from"),
        (("train",), "name the YAML file"),
    ):
        done = fivefold(*arguments)
        assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr
