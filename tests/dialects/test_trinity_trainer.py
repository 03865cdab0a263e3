"""What Trinity-RFT's trainer reads of verl's keys: numbers, layouts, memory and weights of policy, reference and critic.

By hand, from the wheels trinity-rft 0.1.0 to 0.6.0 (verl_config.py, synchronize_config; fsdp_workers.py; megatron_workers.py).
"""

from __future__ import annotations

import pytest

from fivefold.config.dialect import find_dialect
from fivefold.config.loader import read_mapping
from fivefold.config.roles import roles_of
from tests.support.dialects import HOME, config, translated

VERL = "trainer.trainer_config."
ACTOR, REFERENCE, CRITIC = f"{VERL}actor_rollout_ref.actor.", f"{VERL}actor_rollout_ref.ref.", f"{VERL}critic."
FSDP = """
algorithm: {algorithm_type: ppo}
model: {model_path: m, critic_model_path: m, max_prompt_tokens: 256, max_response_tokens: 256}
cluster: {node_num: 1, gpu_per_node: 8}
buffer: {batch_size: 16, train_batch_size: 16, explorer_input: {taskset: {path: d.parquet}, default_workflow_type: math_workflow}}
explorer: {rollout_model: {engine_num: 4}}
trainer: {save_interval: 10, trainer_strategy: fsdp, trainer_config: {}}
"""
MEGATRON = FSDP.replace("trainer_strategy: fsdp", "trainer_strategy: megatron")


def critic_of(*words: str, tree: str = FSDP, release: str = "") -> dict[str, object]:
    translation = find_dialect("trinity")(read_mapping(tree, "f"), list(words), HOME, release)
    assert translation.refusals == []
    critic = translation.tree["critic"]
    return {**critic["optimizer"], "value_clip": critic["value_clip"]}


def test_trinity_s_critic_has_a_low_rate_and_clipped_values_by_default():
    optimizer = critic_of()
    assert (optimizer["lr"], optimizer["value_clip"], optimizer["weight_decay"], optimizer["clip_grad"]) == (
        1e-6,
        0.0,
        0.01,
        1.0,
    )
    assert (optimizer["betas"], optimizer["schedule"], optimizer["warmup_steps"]) == ([0.9, 0.999], "constant", 0)
    newer = critic_of(release="2026-06")
    assert (newer["lr"], newer["value_clip"]) == (1e-5, 0.5), "0.6.0 with verl 0.8 (trainer/verl/config.py)"
    assert config("trinity", tree=FSDP).critic.value_clip == 0.0


@pytest.mark.parametrize(
    ("tree", "words", "expected"),
    [
        (FSDP, ["optim.betas=[0.8, 0.9]", "optim.weight_decay=0.1"], {"betas": [0.8, 0.9], "weight_decay": 0.1}),
        (FSDP, ["optim.lr_warmup_steps=7"], {"warmup_steps": 7}),
        (FSDP, ["optim.lr_warmup_steps_ratio=0.2"], {"warmup_steps": 0.2}),
        (
            FSDP,
            ["optim.lr=1e-4", "optim.lr_scheduler_type=cosine", "optim.min_lr_ratio=0.5"],
            {"schedule": "cosine", "min_lr": 5e-5},
        ),
        (FSDP, ["grad_clip=3.0", "optim.clip_grad=9.0"], {"clip_grad": 3.0}),
        (MEGATRON, ["grad_clip=3.0", "optim.clip_grad=9.0"], {"clip_grad": 9.0}),
        (
            MEGATRON,
            ["optim.lr=1e-4", "optim.lr_decay_style=linear", "optim.min_lr=2e-5", "optim.lr_decay_steps=50"],
            {"schedule": "linear", "min_lr": 2e-5, "decay_steps": 50},
        ),
        (
            MEGATRON,
            ["optim.lr=1e-4", "optim.lr_warmup_steps=5"],
            {"warmup_init_lr": pytest.approx(1e-6), "schedule": "constant"},
        ),
        (MEGATRON, ["optim.lr_warmup_steps=5", "optim.lr_warmup_init=3e-7"], {"warmup_init_lr": 3e-7}),
    ],
)
def test_each_key_of_trinitys_critic_optimizer_acts(tree, words, expected):
    assert critic_of(*(CRITIC + word for word in words), tree=tree).items() >= expected.items()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([CRITIC + "optim.optimizer=sgd"], "another optimizer than AdamW"),
        ([CRITIC + "ppo_epochs=2"], "the critic is trained in the policy's updates"),
        ([ACTOR + "ppo_epochs=2"], "the critic is trained in the policy's updates"),
        ([CRITIC + "model.override_config.num_hidden_layers=2"], "changes of config.json"),
        ([f"{VERL}actor_rollout_ref.model.override_config.rope_theta=1e6"], "changes of config.json"),
        ([ACTOR + "load_weight=false"], "models that begin with random weights"),
        ([ACTOR + "optim.override_optimizer_config.eps=1e-6"], "other settings of the optimizer"),
        ([f"{VERL}actor_rollout_ref.model.mtp.enable=true"], "multi-token prediction"),
        ([ACTOR + "router_replay.mode=R2"], "replaying the routing of experts"),
        ([CRITIC + "loss_agg_mode=seq-mean-token-mean"], "another mean of the critic's loss"),
    ],
)
def test_verls_keys_that_act_below_trinity_and_that_we_lack_are_refused(words, reason):
    assert [text for text in translated("trinity", *words, tree=FSDP).refusals if reason in text]


def test_trinity_takes_each_batch_as_often_as_ppo_epochs_says():
    both = [ACTOR + "ppo_epochs=3", CRITIC + "ppo_epochs=3"]
    assert config("trinity", *both, tree=FSDP).algorithm.ppo_epochs == 3


def test_trinitys_warmup_style_is_the_schedule_and_comes_over_lr_scheduler_type():
    words = ["algorithm.optimizer.warmup_style=cosine", "algorithm.optimizer.lr_scheduler_type=constant"]
    assert config("trinity", *words, tree=FSDP).policy.optimizer.schedule == "cosine"
    older = critic_of(CRITIC + "optim.warmup_style=cosine", release="2025-11")
    assert older["schedule"] == "cosine"
    assert critic_of(CRITIC + "optim.warmup_style=cosine")["schedule"] == "constant", "verl's workers ceased to read it"


def test_trinitys_gradient_bound_is_the_one_that_its_strategy_reads():
    words = ["algorithm.optimizer.clip_grad=0.3", "trainer.grad_clip=0.7"]
    assert config("trinity", *words, tree=FSDP).policy.optimizer.clip_grad == 0.7
    assert config("trinity", *words, tree=MEGATRON).policy.optimizer.clip_grad == 0.3
    assert config("trinity", *words, ACTOR + "grad_clip=0.1", tree=FSDP).policy.optimizer.clip_grad == 0.1


def test_weights_in_megatrons_form_are_those_that_trinity_names(tmp_path):
    words = [f"{start}megatron.use_dist_checkpointing=true" for start in (ACTOR, CRITIC)]
    words += [f"{start}megatron.dist_checkpointing_path=/nowhere/{name}" for start, name in ((ACTOR, "p"), (CRITIC, "c"))]
    run = config("trinity", *words, tree=MEGATRON)
    assert (run.model.path, run.critic.path, run.reference.path, run.model.config) == (
        "/nowhere/p",
        "/nowhere/c",
        "m",
        "m",
    )
    of_reference = [
        f"{REFERENCE}megatron.use_dist_checkpointing=true",
        f"{REFERENCE}megatron.dist_checkpointing_path=/nowhere/r",
    ]
    assert config("trinity", *words, *of_reference, tree=MEGATRON).reference.path == "/nowhere/r"
    unset = translated("trinity", words[0], tree=MEGATRON)
    assert "a checkpoint without dist_checkpointing_path" in unset.refusals[0]
    off = config("trinity", words[2], tree=MEGATRON)
    assert off.model.path == "m", "the path is read with use_dist_checkpointing only"


def test_layouts_of_trinitys_reference_and_critic_are_their_own():
    size = "megatron.tensor_model_parallel_size"
    words = [f"{ACTOR}{size}=2", f"{REFERENCE}{size}=4", f"{CRITIC}{size}=1"]
    run = config("trinity", *words, tree=MEGATRON)
    assert (str(run.layout), run.reference.backend, run.critic.backend) == (
        "megatron:d2t2p1",
        "megatron:d1t4p1",
        "megatron:d4t1p1",
    )
    cut = translated("trinity", f"{CRITIC}{size}=3", tree=MEGATRON)
    (outcome,) = [entry for entry in cut.outcomes if entry.key == f"{CRITIC}{size}"]
    assert "cannot be divided" in outcome.reason and not outcome.changes_result


def test_offload_and_recomputation_of_trinitys_critic_are_its_own():
    words = [f"{CRITIC}megatron.{part}_offload=true" for part in ("param", "optimizer")]
    words += [f"{CRITIC}megatron.override_transformer_config.recompute_granularity=full"]
    run = config("trinity", *words, tree=MEGATRON)
    assert run.critic.offload.parts == {"parameters", "optimizer"} and run.policy.offload.parts == frozenset()
    assert (run.critic.recompute, run.policy.recompute) == ("full", "none")
    options = [f"{ACTOR}megatron.override_transformer_config.moe_router_dtype=fp64"]
    other = config("trinity", *options, tree=MEGATRON)
    assert other.policy.megatron.transformer and other.critic.settings(other.policy).megatron.transformer == {}
    plain = config("trinity", f"{CRITIC}model.enable_gradient_checkpointing=false", tree=FSDP)
    assert (plain.critic.recompute, plain.policy.recompute) == ("none", "full")
    without = config("trinity", f"{VERL}actor_rollout_ref.model.enable_gradient_checkpointing=false", tree=FSDP)
    assert (without.critic.recompute, without.policy.recompute) == ("full", "none")


def test_mbridge_of_trinity_loads_policy_and_reference_and_our_tables_what_it_lacks():
    asked, ours = f"{ACTOR}megatron.use_mbridge=true", "policy.megatron.bridge_type"
    kl = ["algorithm.kl_loss_fn=k2", "algorithm.kl_loss_fn_args.kl_coef=0.01"]
    run = config("trinity", asked, *kl, tree=MEGATRON)
    of_reference = run.reference.settings(run.policy).megatron.bridge_type
    assert (run.policy.megatron.bridge_type, of_reference, roles_of(run)["critic"].settings.megatron.bridge_type) == (
        "mbridge", "native", "native",
    )  # fmt: skip
    both = config("trinity", asked, asked.replace(ACTOR, REFERENCE), *kl, tree=MEGATRON)
    assert roles_of(both)["reference"].settings.megatron.bridge_type == "mbridge"
    for words, lacks in (
        ([f"{CRITIC}megatron.use_mbridge=true"], "value heads"),
        ([asked, "model.lora_configs=[{name: a}]"], "adapters"),
        (
            [asked, f"{ACTOR}megatron.use_dist_checkpointing=true", f"{ACTOR}megatron.dist_checkpointing_path=/c"],
            "checkpoints",
        ),
    ):
        translation = translated("trinity", *words, tree=MEGATRON)
        (line,) = {outcome.reason for outcome in translation.outcomes if outcome.key == words[0].partition("=")[0]}
        assert f"mbridge has no {lacks}" in line and ours not in [line_of_run.key for line_of_run in translation.lines]


def test_a_reference_that_only_trinity_moves_to_the_host_is_said():
    translation = translated("trinity", f"{REFERENCE}megatron.param_offload=true", tree=MEGATRON)
    (outcome,) = [entry for entry in translation.outcomes if entry.key == f"{REFERENCE}megatron.param_offload"]
    assert outcome.kind == "unsupported" and not outcome.changes_result


def test_options_of_megatrons_gradients_are_translated():
    run = config("trinity", f"{ACTOR}megatron.override_ddp_config.grad_reduce_in_fp32=false", tree=MEGATRON)
    assert run.policy.megatron.ddp == {"grad_reduce_in_fp32": False}


def test_references_in_verls_second_file_begin_at_its_own_root(tmp_path):
    second = tmp_path / "verl.yaml"
    second.write_text(
        "actor_rollout_ref: {actor: {ppo_max_token_len_per_gpu: 9000}}\n"
        "critic: {ppo_max_token_len_per_gpu: '${actor_rollout_ref.actor.ppo_max_token_len_per_gpu}'}\n"
    )
    tree = FSDP.replace("trainer_config: {}", f"trainer_config_path: {second}")
    assert config("trinity", tree=tree).critic.tokens_per_micro_batch == 9000
