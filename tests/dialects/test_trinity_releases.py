"""Trinity-RFT's older releases: what their configurations become here, by hand."""

from __future__ import annotations

import pytest
import yaml

from fivefold.config.dialect import Translation
from fivefold_dialects.trinity import join, translate
from tests.support.dialects import config, translated

GSM8K_OF_2025_04 = """
data: {dataset_path: d.jsonl, train_split: train, eval_split: test, format_config: {prompt_key: q, response_key: a}, total_epochs: 2, batch_size: 96, default_workflow_type: math_workflow, db_url: '', dj_process_desc: easy ones}
model: {model_path: m, max_prompt_tokens: 256, max_response_tokens: 1024, checkpoint_path: runs/x}
cluster: {node_num: 1, gpu_per_node: 8}
buffer: {max_retry_times: 3, train_dataset: {name: b, storage_type: queue, path: 'sqlite:///b.db'}}
explorer: {engine_type: vllm_async, engine_num: 2, runner_num: 32, tensor_parallel_size: 1, temperature: 0.6, repeat_times: 8, use_ray: false, backend: nccl, max_waiting_steps: 4, enforce_eager: true}
synchronizer: {sync_method: online, sync_iteration_interval: 2}
trainer:
  algorithm_type: ppo
  sft_warmup_iteration: 0
  eval_interval: 50
  trainer_config:
    actor_rollout_ref:
      actor: {alg_type: ppo, tau: 0.0, use_kl_loss: true, kl_loss_coef: 0.002, kl_loss_type: low_var_kl, entropy_coeff: 0.003, clip_ratio: 0.1, ppo_mini_batch_size: 128, optim: {lr: 2.0e-6}}
      rollout: {name: vllm, n: 8, use_fire_sampling: false}
    critic: {ppo_mini_batch_size: 128}
    reward_model: {enable: false}
    algorithm: {adv_estimator: grpo, gamma: 0.9, kl_penalty: kl, kl_ctrl: {type: fixed, kl_coef: 0.005}}
    trainer: {save_freq: 100}
monitor: {project: p, name: n, cache_root_dir: ''}
"""
"""As Trinity-RFT's examples/grpo_gsm8k was with its second file at 8795012."""


def numbers_of(tree: str) -> dict[str, object]:
    """What a run of Trinity-RFT comes to, by our names."""
    run = config("trinity", tree=tree)
    method = run.algorithm.resolved
    return {
        "prompts": run.data.prompts_per_step, "group": run.algorithm.group_size, "updates": run.algorithm.updates_per_step,
        "method": run.algorithm.name, "kl": (method.kl.place, method.kl.estimator, method.kl.coef),
        "clip": (method.clip_low, method.clip_high, method.dual_clip), "entropy": method.entropy_coef,
        "temperature": run.engine.sampling.temperature, "lr": run.policy.optimizer.lr, "dp": run.layout.dp,
        "lengths": (run.data.max_prompt_tokens, run.data.max_response_tokens), "save": run.trainer.save_every,
        "eval": (run.trainer.eval_every, run.trainer.eval_before_train), "run_dir": run.trainer.run_dir,
    }  # fmt: skip


def test_trinitys_first_schema_is_the_run_that_it_was():
    """Named by verl's second file: the advantage, the loss's numbers and the KL; the ratio was bounded once."""
    assert numbers_of(GSM8K_OF_2025_04) == {
        "prompts": 192, "group": 8, "updates": 2, "method": "grpo", "kl": ("loss", "k3", 0.002), "clip": (0.1, 0.1, None),
        "entropy": 0.003, "temperature": 0.6, "lr": 2e-6, "dp": 6, "lengths": (256, 1024), "save": 50, "eval": (25, False),
        "run_dir": "runs/x",
    }  # fmt: skip
    translation = translated("trinity", tree=GSM8K_OF_2025_04)
    assert {outcome.key for outcome in translation.outcomes if outcome.kind == "unknown"} == set()
    assert "data.batch_size" in {outcome.key for outcome in translation.outcomes}, "keys have the names that were written"
    greedy = translated("trinity", tree=GSM8K_OF_2025_04.replace("temperature: 0.6, ", "")).tree
    assert greedy["engine"]["sampling"]["temperature"] == 0.0
    pairs = GSM8K_OF_2025_04.replace("algorithm_type: ppo", "algorithm_type: dpo").replace("data: {", "mode: train\ndata: {")
    assert translated("trinity", tree=pairs).tree["algorithm"]["updates_per_step"] == 2


def test_trinitys_kl_was_in_the_reward_until_2025_06_where_it_was_not_in_the_loss():
    tree = GSM8K_OF_2025_04.replace("use_kl_loss: true", "use_kl_loss: false")
    assert numbers_of(tree)["kl"] == ("reward", "k1", 0.005)
    opmd = tree.replace("algorithm_type: ppo", "algorithm_type: opmd").replace("alg_type: ppo, tau: 0.0", "tau: 4.0")
    algorithm = config("trinity", tree=opmd).algorithm.resolved
    assert (algorithm.surrogate, algorithm.tau, algorithm.kl.place, algorithm.advantage) == ("opmd", 4.0, "reward", "group")


def test_trinitys_second_schema_has_its_names_in_the_buffer():
    """global_config, of 2025-05: the type tells of the advantage, and a model that may think does not."""
    tree = """
global_config: {total_epochs: 1, batch_size: 96, eval_interval: 50, algorithm_type: grpo}
model: {model_path: m, max_prompt_tokens: 256, max_response_tokens: 1024, checkpoint_path: ''}
cluster: {node_num: 1, gpu_per_node: 8}
buffer:
  explorer_input: {taskset: {path: d.jsonl, format: {prompt_key: q}, rollout_args: {repeat_times: 4, temperature: 0.7}}}
explorer: {engine_num: 2, tensor_parallel_size: 1}
synchronizer: {sync_method: nccl, sync_interval: 1}
trainer: {save_interval: 7, trainer_config: {algorithm: {adv_estimator: gae}}}
monitor: {project: p, name: n}
"""
    numbers = numbers_of(tree)
    assert (numbers["prompts"], numbers["group"], numbers["method"], numbers["temperature"]) == (96, 4, "grpo", 0.7)
    assert (numbers["kl"], numbers["save"]) == (("reward", "k1", 0.001), 7)
    assert config("trinity", tree=tree).data.chat_template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize(("tree", "refusal"), [
    (GSM8K_OF_2025_04.replace("adv_estimator: grpo", "adv_estimator: gae"), "several updates of the critic"),
    (GSM8K_OF_2025_04.replace("adv_estimator: grpo", "adv_estimator: remax"), "the advantage remax"),
    (GSM8K_OF_2025_04.replace("sft_warmup_iteration: 0", "sft_warmup_iteration: 5"), "SFT before sampling begins"),
    (GSM8K_OF_2025_04.replace("sft_warmup_iteration: 0", "get_exp_strategy: LFU"), "samples in another order"),
    (GSM8K_OF_2025_04.replace("prompt_key: q,", "prompt_key: q, workflow_key: w,"), "columns that choose the workflow or the reward"),
    (GSM8K_OF_2025_04.replace("batch_size: 96", "batch_sice: 96"), "data.batch_sice"),
])  # fmt: skip
def test_what_trinitys_first_schema_asks_beyond_ours_is_refused(tree, refusal):
    assert any(refusal in text for text in translated("trinity", tree=tree).refusals)


def test_the_ratio_of_trinity_is_bounded_twice_since_2025_11_only():
    tree = "\n".join((
        "algorithm: {algorithm_type: grpo, repeat_times: 8}", "model: {model_path: m, max_model_len: 2048}",
        "cluster: {node_num: 1, gpu_per_node: 8}", "explorer: {rollout_model: {engine_num: 4}}",
        "buffer: {batch_size: 96, explorer_input: {taskset: {path: d.jsonl}}}",
    ))  # fmt: skip
    assert numbers_of(tree)["clip"] == (0.2, 0.2, 3.0)
    older = tree.replace("explorer: {", "explorer: {runner_num: 32, ")
    assert numbers_of(older)["clip"] == (0.2, 0.2, None)
    by_name: Translation = translate(yaml.safe_load(tree), [], {}, "2025-11")
    assert by_name.tree["algorithm"].get("dual_clip") is None and by_name.tree["data"]["chat_template_kwargs"]


def test_trinitys_engine_said_how_long_samples_are_until_2025_09():
    tree = "\n".join((
        "algorithm: {algorithm_type: grpo, repeat_times: 8}", "model: {model_path: m, max_prompt_tokens: 100}",
        "cluster: {node_num: 1, gpu_per_node: 8}",
        "explorer: {runner_num: 8, rollout_model: {engine_num: 4, max_prompt_tokens: 1024, max_response_tokens: 20480}}",
        "buffer: {batch_size: 96, explorer_input: {taskset: {path: d.jsonl}}}",
    ))  # fmt: skip
    assert numbers_of(tree)["lengths"] == (1024, 20480)
    assert numbers_of(tree.replace("runner_num: 8, ", ""))["lengths"] == (100, 20480)


def test_the_two_files_of_trinity_may_leave_empty_what_the_other_says():
    joined = join(
        [{"mode": "explore", "model": {"path": "a/"}, "x": "1"}, {"mode": "train", "model": {"path": "a"}, "x": ""}]
    )
    assert (joined["x"], joined["mode"]) == ("1", "explore and train")
    with pytest.raises(ValueError, match=r"must have the same model\.path"):
        join([{"mode": "explore", "model": {"path": "a"}}, {"mode": "train", "model": {"path": "b"}}])
