"""What another system has and this run lacks is said each time: engines that are missing, memory, communication, few bits."""

from __future__ import annotations

import pytest

from fivefold_dialects.writer import notes
from tests.dialects import test_areal_data_and_intervals as areal_runs
from tests.dialects import test_dialects as known_runs
from tests.dialects import test_roll_defaults as roll_runs
from tests.dialects import test_trinity_trainer as trinity_runs
from tests.support.dialects import config, translated

INFER, CONFIG = "actor_infer.strategy_args.", "actor_train.strategy_args.strategy_config."
SGLANG = {
    "roll": ([INFER + "strategy_name=sglang"], roll_runs.RUN),
    "areal": ([], areal_runs.RL.replace("vllm:d4", "sglang:d4")),
    "skyrl": ([*known_runs.SKYRL, "generator.inference_engine.backend=sglang"], ""),
    "trinity": (["explorer.rollout_model.engine_type=sglang"], trinity_runs.FSDP),
    **{system: ([*known_runs.GRPO_VERL, "actor_rollout_ref.rollout.name=sglang"], "") for system in ("verl", "siirl")},
}


@pytest.mark.parametrize("system", SGLANG)
def test_each_run_whose_engine_was_sglang_gets_sglang_and_a_note_where_it_is_missing(system):
    words, tree = SGLANG[system]
    (line,) = [note for note in notes(translated(system, *words, tree=tree)) if "SGLang" in note]
    assert "pip install sglang" in line and "vllm" in line
    assert config(system, *words, tree=tree).engine.backend.startswith("sglang:")


def test_megatron_bridge_of_areal_is_that_library_with_a_note_where_it_is_missing(monkeypatch):
    tree = areal_runs.RL.replace("fsdp", "megatron")
    word, lines = "actor.megatron.bridge_type=megatron-bridge", []
    assert config("areal", word, tree=tree).policy.megatron.bridge_type == "megatron-bridge"
    assert config("areal", tree=tree).policy.megatron.bridge_type == "native", "mbridge is AReaL's default"
    for missing in (["megatron.bridge, not installed here"], []):
        monkeypatch.setattr("fivefold_dialects.shared.missing_packages", lambda names, missing=missing: missing)
        lines.append([note for note in notes(translated("areal", word, tree=tree)) if "megatron-bridge" in note])
    ((line,), none) = lines
    assert "docs/bridges.md" in line and "-- policy.megatron.bridge_type=native" in line and none == []


DROPPED = [
    ("roll", "reference.strategy_args.strategy_config.fp8=e4m3", roll_runs.RUN, True),
    ("roll", INFER + "strategy_config.quantization=fp8", roll_runs.RUN, True),
    ("roll", INFER + "strategy_config.kv_cache_dtype=fp8", roll_runs.RUN, True),
    ("roll", INFER + "strategy_config.cpu_offload_gb=8", roll_runs.RUN, False),
    ("areal", "actor.megatron.fp8_config.mode=e4m3", areal_runs.RL, True),
    ("areal", "actor.megatron.fp8_config.param=false", areal_runs.RL, True),
    ("areal", "actor.megatron.exp_avg_dtype=bfloat16", areal_runs.RL, True),
    ("areal", "actor.megatron.ddp.fp8_param_gather=true", areal_runs.RL, True),
    ("areal", "sglang.cpu_offload_gb=4", areal_runs.RL, False),
    ("areal", "vllm.dtype=float16", areal_runs.RL, True),
    ("areal", "recover.no_load_optim=true", areal_runs.RL, True),
    ("trinity", f"{trinity_runs.VERL}actor_rollout_ref.ref.fsdp_config.offload_policy=true", trinity_runs.FSDP, False),
    ("trinity", f"{trinity_runs.VERL}critic.megatron.dtype=float16", trinity_runs.MEGATRON, True),
]
DROPPED += [
    ("skyrl", word, "", changes)
    for word, changes in (
        ("trainer.ref.fsdp_config.cpu_offload=true", False),
        ("trainer.critic.model.fake_int4_qat.enabled=true", True),
    )
]
ACTOR, REF = "actor_rollout_ref.actor.", "actor_rollout_ref.ref."
VERL_PPO = [*known_runs.GRPO_VERL, "algorithm.adv_estimator=gae", "critic.model.path=c", ACTOR + "use_kl_loss=true"]
VERL_PPO += ["actor_rollout_ref.rollout.n=1"]
DROPPED_BY_VERL = [
    (REF + "fsdp_config.offload_policy=true", "fsdp", False),
    (REF + "fsdp_config.param_offload=true", "fsdp", False),
    (REF + "fsdp_config.dtype=float16", "fsdp", True),
    ("critic.fsdp.dtype=float32", "fsdp", True),
    ("critic.model.enable_activation_offload=true", "fsdp", False),
    (REF + "megatron.param_offload=true", "megatron", False),
    (REF + "megatron.dtype=float16", "megatron", True),
    ("critic.megatron.dtype=float16", "megatron", True),
    (ACTOR + "megatron.override_ddp_config.overlap_grad_reduce=true", "megatron", False),
    (ACTOR + "optim.main_grads_dtype=bf16", "megatron", True),
    ("critic.optim.exp_avg_dtype=bf16", "megatron", True),
    (ACTOR + "veomni.enable_fsdp_offload=true", "veomni", False),
    (ACTOR + "veomni.enable_async_activation_offload=true", "veomni", False),
    (ACTOR + "veomni.mixed_precision=false", "veomni", True),
    (ACTOR + "veomni.load_checkpoint_path=/w", "veomni", True),
    (ACTOR + "torchtitan.tensor_parallel_size=2", "torchtitan", False),
    ("reward_model.max_length=512", "fsdp", True),
    (ACTOR + "strategy=fsdp_turbo", "fsdp", True),
    ("reward.reward_model.rollout.quantization=fp8", "fsdp", True),
    ("actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_dtype=fp8", "fsdp", True),
]


@pytest.mark.parametrize("system", ["verl", "siirl"])
@pytest.mark.parametrize(("word", "engine", "changes_result"), DROPPED_BY_VERL, ids=[row[0] for row in DROPPED_BY_VERL])
def test_what_verls_engines_lose_here_is_said_and_refused_where_numbers_change(system, word, engine, changes_result):
    off = [f"{role}megatron.param_offload=false" for role in (ACTOR, "critic.")]
    words = [*VERL_PPO, f"{ACTOR}strategy={engine}", *off, word]
    (outcome,) = [entry for entry in translated(system, *words).outcomes if entry.key == word.partition("=")[0]]
    assert (outcome.kind, outcome.changes_result) == ("unsupported", changes_result), outcome.reason
    assert "the numbers are the same" not in outcome.reason


@pytest.mark.parametrize(("engine", "section", "critics"), [
    ("fsdp", "fsdp_config.", "fsdp."), ("fsdp", "fsdp_config.", "model.fsdp_config."), ("veomni", "veomni.", "veomni."),
    ("torchtitan", "torchtitan.", "torchtitan."), ("megatron", "megatron.", "megatron."),
])  # fmt: skip
def test_offload_of_every_engine_of_verl_acts_in_policy_and_critic(engine, section, critics):
    words = [f"{ACTOR}{section}param_offload=true", f"critic.{critics}optimizer_offload=true", f"{ACTOR}strategy={engine}"]
    run = config("verl", *VERL_PPO, *words)
    assert (run.policy.offload.parts, run.critic.offload.parts) == ({"parameters"}, {"optimizer"})


def test_a_critic_and_a_reference_of_verl_have_the_options_of_their_own_sections():
    start = "megatron.override_transformer_config."
    words = [f"critic.{start}recompute_granularity=full", f"{REF}{start}moe_router_dtype=fp64"]
    run = config("verl", *VERL_PPO, ACTOR + "strategy=megatron", *words)
    assert (run.policy.recompute, run.critic.recompute) == ("none", "full")
    assert run.reference.megatron.transformer == {"moe_router_dtype": "fp64"} and not run.policy.megatron.transformer


def test_adams_moments_in_sixteen_bits_are_those_of_the_run():
    asked = ["optim.use_precision_aware_optimizer=true", "optim.exp_avg_dtype=bf16"]
    wanted = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "float32"}
    run = config("verl", *VERL_PPO, ACTOR + "strategy=megatron", *(ACTOR + word for word in asked))
    assert run.policy.megatron.optimizer == wanted
    assert config("verl", *known_runs.SFT_VERL, "engine=megatron", *asked).policy.megatron.optimizer == wanted
    assert config("verl", *known_runs.SFT_VERL, "optim=automodel", asked[1]).policy.megatron.optimizer == wanted


def test_an_sft_run_of_verl_has_its_type_of_numbers_and_its_offload():
    run = config("verl", *known_runs.SFT_VERL, "engine.dtype=float16", "engine.optimizer_offload=true")
    assert (run.policy.dtype, run.policy.offload.parts) == ("float16", {"optimizer"})


def test_siirl_starts_no_program_of_verls():
    words = [*known_runs.GRPO_VERL, "-m=verl.trainer.main_ppo"]
    assert any("a program that is not siiRL's" in fault for fault in translated("siirl", *words).refusals)


@pytest.mark.parametrize(("system", "word", "tree", "changes_result"), DROPPED, ids=[row[1] for row in DROPPED])
def test_what_is_dropped_is_said_and_refused_where_numbers_change(system, word, tree, changes_result):
    words = [*known_runs.SKYRL, word] if system == "skyrl" else [word]
    (outcome,) = [entry for entry in translated(system, *words, tree=tree).outcomes if entry.key == word.partition("=")[0]]
    assert (outcome.kind, outcome.changes_result) == ("unsupported", changes_result), outcome.reason
    assert "the numbers are the same" not in outcome.reason


def test_areals_offload_and_background_checkpoints_act():
    run = config("areal", "actor.offload=true", "actor.megatron.async_save=true", tree=areal_runs.RL)
    assert run.policy.offload.parts == {"parameters", "optimizer"} and run.trainer.async_save


MEG = "trainer.policy.megatron_config."
MEGATRON = [*known_runs.SKYRL, "trainer.strategy=megatron"]
AREAL = areal_runs.RL.replace("fsdp", "megatron")
CARRIED = [
    ("roll", CONFIG + "overlap_grad_reduce=true", "ddp", {"overlap_grad_reduce": True}),
    ("roll", CONFIG + "ddp_bucket_size=5000", "ddp", {"bucket_size": 5000}),
    ("roll", CONFIG + "optimizer_cpu_offload=true", "optimizer", {"optimizer_cpu_offload": True}),
    ("areal", "actor.megatron.ddp.overlap_grad_reduce=true", "ddp", {"overlap_grad_reduce": True}),
    ("areal", "actor.megatron.ddp.grad_reduce_in_fp32=false", "ddp", {"grad_reduce_in_fp32": False}),
    ("areal", "actor.megatron.ddp.bucket_size=5000", "ddp", {"bucket_size": 5000}),
    ("skyrl", MEG + "ddp_config.overlap_grad_reduce=true", "ddp", {"overlap_grad_reduce": True}),
    ("skyrl", MEG + "ddp_config.grad_reduce_in_fp32=false", "ddp", {"grad_reduce_in_fp32": False}),
    ("skyrl", MEG + "optimizer_config_kwargs.optimizer_cpu_offload=true", "optimizer", {"optimizer_cpu_offload": True}),
]
_RUNS = {"roll": ([], roll_runs.RUN), "areal": ([], AREAL), "skyrl": (MEGATRON, "")}


@pytest.mark.parametrize(("system", "word", "section", "options"), CARRIED)
def test_options_of_communication_and_of_the_optimizers_place_are_carried(system, word, section, options):
    words, tree = _RUNS[system]
    key = f"policy.megatron.{section}.{next(iter(options))}"
    (line,) = [line for line in translated(system, *words, word, tree=tree).lines if line.key == key]
    assert line.value == options[key.rpartition(".")[2]] and word.partition("=")[0] in line.sources


def test_a_sharding_strategy_of_megatron_fsdp_is_named_with_what_to_use():
    word = MEG + "ddp_config.data_parallel_sharding_strategy=optim_grads_params"
    (line,) = [note for note in notes(translated("skyrl", *MEGATRON, word)) if "sharding_strategy" in note]
    assert "use_distributed_optimizer" in line and "policy.offload" in line


def test_infer_batch_size_of_each_role_of_roll_acts_where_batches_are_not_dynamic():
    words = ["actor_train.infer_batch_size=2", "reference.infer_batch_size=4"]
    run = config("roll", *words, tree=roll_runs.RUN)
    assert (run.policy.sequences_per_forward, run.reference.sequences_per_forward) == (2, 4)
    dynamic = config("roll", *words, "actor_train.use_dynamic_batching_in_infer=true", tree=roll_runs.RUN)
    assert dynamic.policy.sequences_per_forward is None


def test_skyrls_profiler_and_changes_of_config_json_act():
    profiler = "trainer.policy.torch_profiler_config."
    words = [
        profiler + "enable=true",
        profiler + "skip_first=1",
        profiler + "warmup=1",
        profiler + "active=2",
        profiler + "repeat=2",
    ]
    run = config("skyrl", *MEGATRON, *words, profiler + "ranks=[0,1]", MEG + "model_config_kwargs.rope_theta=5000.0")
    assert run.trainer.profile.steps == [3, 4, 6, 7] and run.trainer.profile.ranks == [0, 1]
    assert run.model.overrides == {"rope_theta": 5000.0}
    assert config("skyrl", *MEGATRON, profiler + "enable=false").trainer.profile.steps == []
    (refusal,) = translated("skyrl", *MEGATRON, *words, profiler + "repeat=1000000").refusals
    assert "active x repeat is at most 10000: got 2 x 1000000" in refusal


def test_flashrls_int8_becomes_fp8_with_a_line():
    words = ["-m=examples.flash_rl.main_dapo_flashrl", *known_runs.SKYRL]
    assert config("skyrl", *words).engine.vllm["quantization"] == "fp8"
    (line,) = [note for note in notes(translated("skyrl", *words)) if "FlashRL" in note]
    assert "int8" in line and "fp8" in line
