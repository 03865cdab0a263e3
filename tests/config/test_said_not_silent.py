"""What another system has and this run lacks is said each time: engines that are replaced, memory, communication, few bits."""

from __future__ import annotations

import pytest

from fivefold.config.dialects.writer import notes
from tests.config import test_areal_data_and_intervals as areal_runs
from tests.config import test_dialects as known_runs
from tests.config import test_roll_defaults as roll_runs
from tests.config import test_trinity_trainer as trinity_runs
from tests.support.dialects import config, translated

INFER, CONFIG = "actor_infer.strategy_args.", "actor_train.strategy_args.strategy_config."
SGLANG = {
    "roll": ([INFER + "strategy_name=sglang"], roll_runs.RUN),
    "areal": ([], areal_runs.RL.replace("vllm:d4", "sglang:d4")),
    "skyrl": ([*known_runs.SKYRL, "generator.inference_engine.backend=sglang"], ""),
    "trinity": (["explorer.rollout_model.engine_type=sglang"], trinity_runs.FSDP),
}


@pytest.mark.parametrize("system", SGLANG)
def test_each_run_whose_engine_was_sglang_is_told_that_vllm_samples(system):
    words, tree = SGLANG[system]
    (line,) = [note for note in notes(translated(system, *words, tree=tree)) if "SGLang" in note]
    assert "vLLM samples instead" in line
    assert config(system, *words, tree=tree).engine.backend.startswith("vllm")


DROPPED = [
    ("roll", CONFIG + "overlap_grad_reduce=true", roll_runs.RUN, False),
    ("roll", CONFIG + "optimizer_cpu_offload=true", roll_runs.RUN, False),
    ("roll", "reference.strategy_args.strategy_config.fp8=e4m3", roll_runs.RUN, True),
    ("roll", INFER + "strategy_config.quantization=fp8", roll_runs.RUN, True),
    ("roll", INFER + "strategy_config.kv_cache_dtype=fp8", roll_runs.RUN, True),
    ("roll", INFER + "strategy_config.cpu_offload_gb=8", roll_runs.RUN, False),
    ("areal", "actor.megatron.fp8_config.mode=e4m3", areal_runs.RL, True),
    ("areal", "actor.megatron.fp8_config.param=false", areal_runs.RL, True),
    ("areal", "actor.megatron.ddp.overlap_grad_reduce=true", areal_runs.RL, False),
    ("areal", "actor.megatron.exp_avg_dtype=bfloat16", areal_runs.RL, True),
    ("areal", "actor.megatron.ddp.fp8_param_gather=true", areal_runs.RL, True),
    ("areal", "sglang.cpu_offload_gb=4", areal_runs.RL, False),
    ("areal", "vllm.dtype=float16", areal_runs.RL, True),
    ("areal", "recover.no_load_optim=true", areal_runs.RL, True),
    ("trinity", f"{trinity_runs.VERL}actor_rollout_ref.actor.fsdp_config.offload_policy=true", trinity_runs.FSDP, False),
    ("trinity", f"{trinity_runs.VERL}critic.megatron.dtype=float16", trinity_runs.MEGATRON, True),
]
DROPPED += [
    ("skyrl", word, "", changes)
    for word, changes in (
        ("trainer.policy.fsdp_config.cpu_offload=true", False),
        ("trainer.policy.megatron_config.ddp_config.overlap_grad_reduce=true", False),
        ("trainer.policy.megatron_config.ddp_config.grad_reduce_in_fp32=false", True),
        ("trainer.critic.model.fake_int4_qat.enabled=true", True),
    )
]


@pytest.mark.parametrize(("system", "word", "tree", "changes_result"), DROPPED, ids=[row[1] for row in DROPPED])
def test_what_is_dropped_is_said_and_refused_where_numbers_change(system, word, tree, changes_result):
    words = [*known_runs.SKYRL, word] if system == "skyrl" else [word]
    (outcome,) = [each for each in translated(system, *words, tree=tree).outcomes if each.key == word.partition("=")[0]]
    assert (outcome.kind, outcome.changes_result) == ("unsupported", changes_result), outcome.reason
    assert "the numbers are the same" not in outcome.reason


def test_areals_offload_and_background_checkpoints_act():
    found = config("areal", "actor.offload=true", "actor.megatron.async_save=true", tree=areal_runs.RL)
    assert found.policy.offload.parts == {"parameters", "optimizer"} and found.trainer.async_save
