"""TRL's command lines and YAML: what each is here, or by which name it is refused."""

from __future__ import annotations

import shlex

import pytest
import yaml

from fivefold.config import RunConfig
from fivefold.config.loader import ConfigError
from fivefold.errors import UserError
from fivefold.terminal import plain
from fivefold_dialects import writer
from fivefold_dialects.trl import NO_PROCESSES
from tests.support.dialects import config, translate_words, translated

M = "--model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/DeepMath-103K"
GRPO = f"{M} --reward_funcs accuracy_reward"
DPO = "--model_name_or_path m --dataset_name trl-lib/ultrafeedback_binarized"
SFT = f"{M} --completion_only_loss true"
YAML = "model_name_or_path: m\ndataset_name: a/b\nreward_funcs:\n  - accuracy_reward\n"
ACCEPTED = {
    f"trl grpo {GRPO}": {"algorithm.aggregate": "token-mean", "data.prompts_per_step": 8, "policy.backend": "megatron:d8t1p1"},
    f"trl grpo {GRPO} --num_processes 4": {"data.prompts_per_step": 4, "reward.functions": {"math": 1.0}},
    f"trl grpo {GRPO} --accelerate_config zero2": {"policy.backend": "megatron:d8t1p1"},
    f"accelerate launch --config_file examples/accelerate_configs/deepspeed_zero3.yaml trl/scripts/grpo.py {GRPO}":
        {"policy.backend": "megatron:d8t1p1"},
    f"accelerate launch --num_processes=2 --mixed_precision bf16 -m trl.scripts.grpo {GRPO}": {"data.prompts_per_step": 2},
    f"CUDA_VISIBLE_DEVICES=0,1 accelerate launch --num_processes 2 --num_machines 1 --main_process_port 29501 grpo.py {GRPO}":
        {"data.prompts_per_step": 2},
    f"torchrun --nproc_per_node=4 --nnodes=2 --master_port 29500 grpo.py {GRPO}":
        {"policy.backend": "megatron:d8t1p1", "launch.backend": "ray"},
    f"python -m torch.distributed.run --standalone --nproc_per_node 4 grpo.py {GRPO}": {"data.prompts_per_step": 4},
    f"deepspeed --num_gpus 2 grpo.py {GRPO} --deepspeed zero3.json": {"data.prompts_per_step": 2},
    f"python trl/scripts/grpo.py {GRPO}": {"policy.backend": "megatron:d1t1p1", "data.prompts_per_step": 1},
    f"trl grpo {GRPO} --num_processes 8 --use_vllm --vllm_mode colocate --vllm_tensor_parallel_size 2": {
        "engine.backend": "vllm:d4t2", "engine.memory_fraction": 0.3, "engine.sleep": False,
        "algorithm.rollout_correction.weight": "sequence", "algorithm.rollout_correction.high": 3.0,
    },
    f"trl grpo {GRPO} --use_vllm true --vllm_mode server --vllm_server_host 10.0.0.2 --vllm_server_port 8001":
        {"engine.url": ["http://10.0.0.2:8001"], "engine.backend": "vllm"},
    f"trl grpo {GRPO} --use_vllm --vllm_mode server --vllm_server_base_url http://a:1": {"engine.url": ["http://a:1"]},
    f"trl grpo {GRPO} --use_vllm --vllm_max_model_length 4096 --max_completion_length 1024":
        {"data.max_prompt_tokens": 3072, "data.overlong_prompts": "refuse", "engine.max_model_len": 4096},
    f"trl grpo {M} --reward_funcs rewards.exact my.lib.short --reward_weights 1.0 0.2":
        {"reward.functions": {"rewards.py:exact": 1.0, "my/lib.py:short": 0.2}},
    f"trl grpo {M} --reward_funcs accuracy_reward get_soft_overlong_punishment --max_completion_length 1280":
        {"algorithm.overlong_buffer": 256, "algorithm.overlong_penalty": 1.0, "data.ground_truth_key": "solution"},
    f"trl grpo {M} --reward_model_name_or_path rm --reward_funcs think_format_reward --reward_weights 2 0.5":
        {"reward.model.path": "rm", "reward.model.weight": 2.0, "reward.functions": {"think": 0.5}},
    f"trl grpo {GRPO} --dataset_config main --eval_strategy steps --eval_steps 20 --num_generations_eval 4": {
        "data.train": ["trl-lib/DeepMath-103K:main/train"], "data.val": ["trl-lib/DeepMath-103K:main/test"],
        "trainer.eval_every": 20, "eval.samples": 4,
    },
    f"trl grpo {GRPO} --use_peft --lora_r 32 --lora_alpha 64 --lora_dropout 0 --lora_target_modules q_proj k_proj":
        {"policy.lora.rank": 32, "policy.lora.alpha": 64.0, "policy.lora.target_modules": ["q_proj", "k_proj"]},
    f"trl grpo {GRPO} --use_peft --use_rslora --lora_dropout 0.0": {"policy.lora.alpha": 128.0},
    f"trl grpo {GRPO} --lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs '{{\"min_lr_rate\": 0.1}}'":
        {"policy.optimizer.schedule": "cosine", "policy.optimizer.min_lr": pytest.approx(1e-7)},
    f"trl grpo {GRPO} --no_gradient_checkpointing --no-bf16": {"policy.recompute": "none", "policy.dtype": "float32"},
    f"trl grpo {GRPO} --fp16": {"policy.dtype": "float16"},
    f"trl grpo {GRPO} --report_to wandb --run_name first --logging-steps 1":
        {"trainer.loggers": ["console", "wandb"], "tracking.name": "first"},
    f"trl grpo {GRPO} --generation_kwargs '{{\"stop\": [\"</a>\"], \"min_p\": 0.1}}' --top_k 20":
        {"engine.sampling.stop": ["</a>"], "engine.sampling.min_p": 0.1, "engine.sampling.top_k": 20},
    f"trl grpo {GRPO} --chat_template_kwargs '{{\"enable_thinking\": false}}' 2>&1 | tee log":
        {"data.chat_template_kwargs": {"enable_thinking": False}},
    f"trl grpo {GRPO} --max_steps 300 --save_steps 0.1 --seed 7 --output_dir out --save_total_limit 2":
        {"trainer.steps": 300, "trainer.save_every": 30, "trainer.run_dir": "out", "trainer.keep": 2, "trainer.seed": 7},
    f"trl grpo {GRPO} --optim adamw_torch --weight_decay 0.1 --adam_beta2 0.99 --max_grad_norm 0.2": {
        "policy.optimizer.betas": [0.9, 0.99], "policy.optimizer.weight_decay": 0.1, "policy.optimizer.clip_grad": 0.2,
    },
    f"trl grpo {GRPO} --max_grad_norm null": {"policy.optimizer.clip_grad": 0.0},
    f"trl dpo {DPO}": {"algorithm.name": "dpo", "algorithm.beta": 0.1, "data.max_total_tokens": 1024,
                       "data.prompts_per_step": 64},
    f"accelerate launch --num_processes 2 trl/scripts/dpo.py {DPO} --gradient_accumulation_steps 4 --learning_rate 5e-7 "
    "--per_device_train_batch_size 1 --eval_strategy epoch --loss_type sigmoid --no_remove_unused_columns":
        {"data.prompts_per_step": 8, "trainer.eval_every": "epoch", "policy.optimizer.lr": 5e-7},
    f"trl sft {SFT}": {"algorithm.name": "sft", "data.response_key": "completion", "policy.optimizer.lr": 2e-5},
    f"trl sft {M} --assistant_only_loss --max_length 2048 --num_train_epochs 1":
        {"data.max_total_tokens": 2048, "trainer.epochs": 1, "data.shuffle": None},
}  # fmt: skip
REFUSED = {
    f"trl grpo {GRPO} --loss_type vespo": "loss_type=vespo",
    f"trl grpo {GRPO} --loss_type bnpo": "loss_type=bnpo",
    f"trl grpo {GRPO} --loss_type cispo": "epsilon_high=",
    f"trl grpo {GRPO} --steps_per_generation 4": "loss_type=dapo (the default): 4 updates",
    f"trl grpo {GRPO} --gradient_accumulation_steps 4 --steps_per_generation 2": "steps_per_generation=2",
    f"trl grpo {GRPO} --loss_type grpo --mask_truncated_completions": "mask_truncated_completions=True",
    f"trl grpo {GRPO} --top_entropy_quantile 0.2": "top_entropy_quantile=0.2",
    f"trl grpo {GRPO} --beta 0.1 --sync_ref_model": "sync_ref_model=True",
    f"trl grpo {GRPO} --entropy_coef 0.01": "entropy_coef=0.01",
    f"trl grpo {GRPO} --delta 1.1": "delta=1.1",
    f"trl grpo {GRPO} --multi_objective_aggregation normalize_then_sum": "multi_objective_aggregation=",
    f"trl grpo {GRPO} --use_peft": "lora_dropout=0.05 (the default)",
    f"trl grpo {GRPO} --use_peft --lora_dropout 0 --load_in_4bit": "load_in_4bit=True",
    f"trl grpo {GRPO} --optim paged_adamw_8bit": "optim=paged_adamw_8bit",
    f"trl grpo {GRPO} --lr_scheduler_type polynomial": "lr_scheduler_type=polynomial",
    f"trl grpo {GRPO} --num_train_epochs 0.5": "num_train_epochs=0.5",
    f"trl grpo {GRPO} --model_revision v2": "model_revision=v2",
    f"trl grpo {M}": "reward_funcs=None (the default)",
    f"trl grpo {M} --reward_funcs accuracy": "reward_funcs=accuracy",
    f"trl grpo {GRPO} --resume_from_checkpoint out/checkpoint-500": "resume_from_checkpoint=",
    f"trl grpo {GRPO} --loss_type grpo --gradient_accumulation_steps 2 --steps_per_generation 4 --max_steps 7": "max_steps=7",
    f"trl grpo {GRPO} --num_generatoins 4": "did you mean num_generations?",
    f"trl grpo {GRPO} --dataset_prompt_column problem": "dataset_prompt_column=problem: not a known key of TRL",
    f"trl dpo {DPO} --loss_type sigmoid bco_pair": "loss_type=['sigmoid', 'bco_pair']",
    f"trl dpo {DPO} --loss_type ipo": "loss_type=ipo",
    f"trl dpo {DPO} --num_generations 4": "num_generations=4: not a known key of TRL",
    f"trl sft {M}": "assistant_only_loss=False (the default)",
    f"trl sft {M} --completion_only_loss false": "completion_only_loss=false",
    f"trl sft {SFT} --packing": "packing=True",
    f"trl sft {SFT} --loss_type dft": "loss_type=dft",
    f"trl sft {SFT} --eos_token '<|im_end|>'": "eos_token=",
    f"trl grpo {GRPO} --beta much": "beta must be a number: got",
    f"trl grpo {GRPO} --num_generations 2.5": "num_generations must be a whole number",
    f"trl grpo {GRPO} --use_vllm perhaps": "use_vllm must be true or false",
    f"trl grpo {GRPO} --num_generations 7": "must be whole groups of num_generations = 7",
    f"trl grpo {GRPO} --num_generations 1": "of at least 2",
    f"trl grpo {GRPO} --generation_batch_size 60": "generation_batch_size = 60 must be a multiple of the 64",
    f"trl grpo {GRPO} --generation_batch_size 64 --steps_per_generation 1": "remove one of them",
    f"trl grpo {GRPO} --reward_weights 1 2": "reward_weights must be one for each reward: got 2 for 1",
    f"trl grpo {GRPO} --use_vllm --vllm_tensor_parallel_size 3": "8 GPUs cannot be divided into engines of 3",
    f"trl grpo {GRPO} --accelerate_config zero9": "accelerate_config must be a file with num_processes or one of",
    f"trl grpo {GRPO} --use_peft --lora_dropout 0 --lora_r 0": "lora_r must be above 0",
    f"trl grpo {GRPO} --use_peft --lora_dropout 0 --lora_target_modules '.*_proj'": "a pattern of module names",
    "trl grpo --model_name_or_path m --reward_funcs r.f": "dataset_name must name a data set",
}


def words(command):
    return translate_words("trl", shlex.split(command), {})


def valued(command):
    translation = words(command)
    assert translation.refusals == []
    RunConfig.of(translation.tree)
    return {line.key: line.value for line in translation.lines}


@pytest.mark.parametrize(("command", "says"), ACCEPTED.items())
def test_a_command_of_trl_is_the_run_that_it_starts(command, says):
    values = valued(command)
    assert {key: values.get(key) for key in says} == says


@pytest.mark.parametrize(("command", "says"), REFUSED.items())
def test_what_would_be_another_run_of_trl_is_refused_by_name(command, says):
    assert any(says in sentence for sentence in words(command).refusals), words(command).refusals


@pytest.mark.parametrize(("command", "says"), [
    ("trl kto --dataset_name a/b", "must be one of grpo, dpo, sft; got 'kto'"),
    ("accelerate launch my_training.py --beta 0.1", "got 'my_training'"),
    ("trl grpo --config missing.yaml", "no configuration file at missing.yaml"),
    ("", "no setting of TRL"),
    ("model_name_or_path=m max_length=9", "the settings fit dpo and sft: begin with the program"),
])  # fmt: skip
def test_a_command_that_is_no_run_of_trl_is_a_sentence(command, says):
    with pytest.raises(UserError, match=says):
        words(command)


def test_yaml_that_cannot_be_read_is_a_sentence(tmp_path):
    for text, says in (("a: [", "not valid YAML"), ("- a\n", "must hold a mapping")):
        (tmp_path / "c.yaml").write_text(text)
        with pytest.raises(ConfigError, match=says):
            words(f"trl grpo --config {tmp_path}/c.yaml")


def test_words_come_over_the_yaml_and_ours_over_both(tmp_path):
    (tmp_path / "c.yaml").write_text(YAML + "num_processes: 2\nbeta: 0.1\nlearning_rate: 1.0e-5\nenv: {A: b}\n")
    by_name = valued(f"trl grpo --config {tmp_path}/c.yaml --beta 0.2 -- policy.optimizer.lr=3.0e-6")
    assert (by_name["algorithm.kl.coef"], by_name["data.prompts_per_step"]) == (0.2, 2)
    assert by_name["policy.optimizer.lr"] == 3e-6
    alone = valued(f"{tmp_path}/c.yaml")
    assert alone["algorithm.kl.coef"] == 0.1, "the program is known by its keys"


def test_a_script_is_read_with_its_variables_and_the_files_that_it_writes(tmp_path):
    (tmp_path / "run.sh").write_text(f"""\
export WANDB_PROJECT=x
MODEL=${{MODEL:-Qwen/Qwen3-0.6B}}
cat > run.yaml <<EOF
{YAML}num_generations: 4
EOF
pip install trl
CUDA_VISIBLE_DEVICES=2 trl vllm-serve --model $MODEL &
ACCELERATE_LOG_LEVEL=info accelerate launch --num_processes $GPUS \\
    trl/scripts/grpo.py --config run.yaml --model_name_or_path $MODEL \\
    --learning_rate 1e-5 > out.log 2>&1
python evaluate.py --model out
""")
    translation = translate_words("trl", [str(tmp_path / "run.sh")], {}, {"GPUS": "2"})
    assert translation.refusals == []
    lines = {line.key: line.value for line in translation.lines}
    assert (lines["model.path"], lines["data.prompts_per_step"], lines["policy.optimizer.lr"]) == (
        "Qwen/Qwen3-0.6B",
        4,
        1e-5,
    )
    (tmp_path / "other.sh").write_text("echo hello\n")
    with pytest.raises(ConfigError, match="no command that starts a program of TRL"):
        words(f"{tmp_path}/other.sh")


def test_a_secret_of_the_environment_does_not_get_into_a_run(tmp_path):
    (tmp_path / "run.sh").write_text(f"trl grpo {GRPO} --run_name $MY_TOKEN --report_to wandb\n")
    translation = translate_words("trl", [str(tmp_path / "run.sh")], {"MY_TOKEN": "abc123"})
    assert "abc123" not in str(translation)
    assert "MY_TOKEN" in translation.refusals[0]


def test_a_file_of_accelerate_says_how_many_processes_there_are(tmp_path):
    (tmp_path / "a.yaml").write_text(
        "num_processes: 16\nnum_machines: 2\nmixed_precision: bf16\ndeepspeed_config: {zero_stage: 3}\n"
    )
    for command in (f"accelerate launch --config_file {tmp_path}/a.yaml grpo.py {GRPO}",
                    f"trl grpo {GRPO} --accelerate_config {tmp_path}/a.yaml"):  # fmt: skip
        values = valued(command)
        assert (values["policy.backend"], values["launch.backend"]) == ("megatron:d16t1p1", "ray")
    (tmp_path / "a.yaml").write_text("num_processes: 4\nparallelism_config: {parallelism_config_cp_size: 2}\n")
    assert "parallelism_config_cp_size=2" in words(f"trl grpo {GRPO} --accelerate_config {tmp_path}/a.yaml").refusals[0]


def test_rows_of_a_mixture_are_those_of_all_its_entries():
    tree = """
    datasets:
      - {path: a/b, name: main, split: train_sft, columns: [prompt]}
      - {path: c/d}
      - {path: json, data_files: [x.jsonl, y.jsonl]}
    """
    run = config("trl", "-m=grpo", "model_name_or_path=m", "reward_funcs=r.f", tree=tree)
    assert run.data.train == ["a/b:main/train_sft", "c/d", "x.jsonl", "y.jsonl"]
    (refused,) = translated("trl", "-m=grpo", "model_name_or_path=m", "reward_funcs=r.f",
                            tree="datasets: [{path: a/b, fraction: 0.5}]").refusals  # fmt: skip
    assert "fraction of a/b" in refused
    assert "list of mappings" in translated("trl", "-m=grpo", "model_name_or_path=m", tree="datasets: [a/b]").refusals[0]


def test_what_differs_is_said_and_only_where_it_differs():
    notes = words(f"trl grpo {M} --reward_funcs accuracy_reward think_format_reward --use_vllm --vllm_mode server").notes
    for text in ("1e-4", "chat template", "accuracy_reward is `math`", "think_format_reward is `think`", "docs/engines.md"):
        assert sum(text in sentence for sentence in notes) == 1
    assert NO_PROCESSES in notes
    quiet = words(f"trl grpo {M} --reward_funcs r.f --scale_rewards none --num_processes 4").notes
    assert len(quiet) == 1, "a prompt that is plain text"


@pytest.mark.parametrize("key", ["push_to_hub", "activation_offloading", "dataset_streaming"])
def test_what_changes_no_number_of_trl_is_said_and_the_run_starts(key):
    (outcome,) = [entry for entry in words(f"trl grpo {GRPO} --{key}").outcomes if entry.key == key]
    assert (outcome.kind, outcome.changes_result) == ("unsupported", False)


@pytest.mark.parametrize("path", ["\u202e", "models/\u202eqwen", "a\u00a0b", "models/é"])
def test_a_path_that_a_terminal_does_not_show_is_the_same_in_the_printed_run_yaml(path):
    translation = translate_words("trl", ["sft", "--model_name_or_path", path], {})
    assert yaml.safe_load(plain(writer.write(translation, "trl")))["model"]["path"] == path
