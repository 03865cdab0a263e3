"""Adapters before anything starts: what they take, and what of `lora` cannot be, in one sentence each."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fivefold.config import ConfigError, RunConfig
from fivefold.layout import ParallelLayout
from fivefold.models.adapters import CONFIG, TENSORS, LoraSpec, adapter_tensors, peft_config
from fivefold.models.families import load_spec, spec_from_config
from fivefold.models.parameters import Sharding
from fivefold.plan.check import check
from fivefold.plan.efficiency import Efficiencies, load_rates
from fivefold.plan.hardware import Cluster
from fivefold.plan.memory import (
    Sharded,
    adapter_parameters,
    checkpoint_bytes,
    rank_parameters,
    trained_parameters,
    training_flops,
)
from fivefold.plan.roles import memory_of
from fivefold.plan.step_time import Batch, update_time
from tests.support.public_shapes import SHAPES

ALL = LoraSpec(4, 6.0, ("all-linear",))


def faults(model: Path, lora: dict[str, Any], **others: Any) -> str:
    tree = {
        "model": {"path": str(model)},
        "policy": {"dtype": "float32", "lora": lora, **others.pop("policy", {})},
        **others,
    }
    tree["trainer"] = {"device": "cpu", "run_dir": "x", **tree.get("trainer", {})}
    tree.setdefault("data", {"train": ["x.jsonl"], "max_prompt_tokens": 16, "max_response_tokens": 16})
    try:
        return "\n".join(check(RunConfig.of(tree)).errors)
    except ConfigError as error:
        return "\n".join(error.faults)


def write(directory: Path, model: Path, lora: LoraSpec = ALL, **changes: Any) -> Path:
    """Adapters as PEFT has them."""
    spec = load_spec(model)
    save_file({item.hf[0]: torch.zeros(shape) for item, shape in adapter_tensors(spec, lora).items()}, directory / TENSORS)
    (directory / CONFIG).write_text(json.dumps({**peft_config(spec, lora, "m"), **changes}))
    return directory


def test_the_parameters_of_adapters_are_rank_times_the_sizes_of_their_maps(models):
    """Of each map in + out, by hand: four layers of width 64, ffn 96, 8 heads of 16 in 4 groups; experts of 32, 8 a layer."""
    attention = (64 + 128) + 2 * (64 + 64) + (128 + 64)
    assert trained_parameters(load_spec(models("qwen3")), ALL) == 4 * 4 * (attention + 3 * (64 + 96))
    assert trained_parameters(load_spec(models("qwen3_moe")), ALL) == 4 * 4 * (attention + 8 * 3 * (64 + 32))
    only = replace(ALL, target_modules=("q_proj", "v_proj"), exclude_modules=("layers.3.self_attn.q_proj",))
    assert trained_parameters(load_spec(models("qwen3")), only) == 4 * (3 * (64 + 128) + 4 * (64 + 64))


def test_frozen_weights_have_no_gradients_no_moments_and_no_place_in_a_checkpoint(models):
    spec, layout = load_spec(models("qwen3")), ParallelLayout.parse("megatron:d2")
    full, adapted = (Sharded(spec, layout, lora=lora, tokens_per_micro_batch=64).held(2)[0] for lora in (None, ALL))
    trained = trained_parameters(spec, ALL)
    assert (adapted.gradients, adapted.optimizer) == (4 * trained, 12 * trained // 2)
    assert adapted.parameters == 2 * (rank_parameters(spec, layout)[0].total + trained)
    assert adapted.activations == full.activations
    assert checkpoint_bytes(spec, "bfloat16", ALL) == 14 * trained
    # Without the product for the weights' gradients: 4 of 6 operations a parameter and token.
    assert training_flops(spec, 9, 0, ALL) == pytest.approx(training_flops(spec, 9, 0) * 4 / 6)


def is_base(config) -> bool:
    return config.roles["reference"].without_adapters


def test_a_reference_that_is_the_base_takes_no_memory(models):
    tree: dict[str, Any] = {"model": {"path": str(models("qwen3"))}, "algorithm": {"kl": {"coef": 0.1}}}
    tree["policy"] = {"backend": "megatron:d2", "lora": {"rank": 4}}
    config, spec = RunConfig.of(tree), load_spec(models("qwen3"))
    assert is_base(config) and "reference" not in memory_of(config, spec).others and list(config.roles.models) == ["policy"]
    for sections in (
        {"reference": {"backend": "megatron:t2"}},
        {"reference": {"path": "other"}},
        {"policy": {"lora": {"rank": 0}}},
    ):
        assert not is_base(RunConfig.of({**tree, **sections}))
    assert is_base(RunConfig.of({**tree, "reference": {"backend": "megatron:d2"}}))


def test_an_update_of_adapters_takes_less_time_and_no_gradients_of_frozen_experts(models):
    cluster, batch = Cluster("h100-80g", 8), Batch.of(64, 100, 300)
    rates = Efficiencies(load_rates(None), "h100-80g")
    for name in ("qwen3", "qwen3_moe"):
        plain = Sharded(load_spec(models(name)), ParallelLayout.parse("megatron:d8"), tokens_per_micro_batch=4096)
        full, adapted = (update_time(replace(plain, lora=lora), batch, cluster, rates).parts for lora in (None, ALL))
        assert adapted["forward"] == full["forward"] and adapted["backward"] < full["backward"]
        assert adapted["optimizer"] < full["optimizer"] and adapted["data parallel"] < full["data parallel"]


@pytest.mark.parametrize(("lora", "others", "says"), [
    ({"rank": 4, "target_modules": ["q_prj"]}, {}, "policy.lora.target_modules must name linear layers"),
    ({"rank": 4, "exclude_modules": ["lm_head"]}, {}, "policy.lora.exclude_modules must name linear layers"),
    ({"rank": 4, "exclude_modules": ["all-linear"]}, {}, "leaves nothing to train"),
    ({"rank": 4, "target_modules": []}, {}, "policy.lora.target_modules must name linear layers, or all-linear: got []"),
    ({"rank": -1}, {}, "policy.lora.rank must be at least 0"),
    ({"rank": 4, "alpha": 0}, {}, "policy.lora.alpha must be above 0"),
    ({"rank": 4, "dropout": 0.1}, {}, "unknown key 'policy.lora.dropout'"),
    ({"rank": 4, "path": "nowhere"}, {}, "policy.lora.path: no directory nowhere"),
    ({"rank": 4}, {"policy": {"megatron": {"bridge_type": "mbridge"}}}, "policy.megatron.bridge_type must be native with adapters"),
    ({"rank": 4}, {"policy": {"megatron": {"transformer_impl": "auto"}}}, "policy.megatron.transformer_impl must be torch with adapters"),
    ({"rank": 4}, {"policy": {"megatron": {"transformer": {"moe_router_bias_update_rate": 0.1}}}}, "moe_router_bias_update_rate must be left out"),
    ({"rank": 4}, {"trainer": {"accept_changes": ["policy.lora.rank"]}}, "trainer.accept_changes cannot name policy.lora.rank"),
    ({}, {"critic": {"lora": {"rank": 4, "target_modules": ["x"]}}, "algorithm": {"name": "ppo"}}, "critic.lora.target_modules must name"),
])  # fmt: skip
def test_what_adapters_cannot_be_is_a_sentence(models, lora, others, says):
    assert says in faults(models("qwen3"), lora, **others)


def test_some_experts_of_a_layer_alone_are_refused(models):
    messages = faults(models("qwen3_moe"), {"rank": 4, "exclude_modules": ["layers.1.mlp.experts.3.up_proj"]})
    assert "policy.lora.target_modules and exclude_modules must treat all experts of a layer alike" in messages


@pytest.mark.parametrize(("lora", "changes", "says"), [
    ({"rank": 8, "alpha": 6}, {}, "lora.rank must be r of"),
    ({"rank": 4, "alpha": 8}, {}, "lora.alpha must be lora_alpha of"),
    ({"rank": 4, "alpha": 6}, {"use_rslora": True}, "use_rslora must be False"),
    ({"rank": 4, "alpha": 6}, {"modules_to_save": ["lm_head"]}, "modules_to_save must be []"),
    ({"rank": 4, "alpha": 6, "target_modules": ["q_proj"]}, {}, "tensors that lora.target_modules leaves out"),
])  # fmt: skip
def test_adapters_of_another_kind_are_refused(models, tmp_path, lora, changes, says):
    path = write(tmp_path, models("qwen3"), **changes)
    messages = faults(models("qwen3"), {**lora, "path": str(path)})
    assert "policy.lora.path: " in messages and says in messages


@pytest.mark.parametrize(("kl", "notes"), [(0.001, 1), (0.0, 0)])
def test_a_reference_without_the_adapters_that_a_run_starts_from_is_noted(models, tmp_path, kl, notes):
    config = RunConfig.of(
        model={"path": str(models("qwen3"))},
        policy={"dtype": "float32", "lora": {"rank": 4, "path": str(write(tmp_path, models("qwen3")))}},
        algorithm={"kl": {"coef": kl}},
        data={"train": ["x.jsonl"], "max_prompt_tokens": 16, "max_response_tokens": 16},
        trainer={"device": "cpu", "run_dir": "x"},
    )
    assert len([note for note in check(config).notes if "the KL of the first step is not 0" in note]) == notes


def test_adapters_of_another_model_are_refused(models, tmp_path):
    path = write(tmp_path, models("qwen3"), replace(ALL, exclude_modules=("k_proj",)))
    assert "lacks 8 tensors" in faults(models("qwen3"), {"rank": 4, "alpha": 6, "path": str(path)})
    assert "lora" not in faults(models("qwen3"), {"rank": 4, "alpha": 6, "exclude_modules": ["k_proj"], "path": str(path)})


def test_parameters_of_a_rank_are_those_of_its_shards_tensor_by_tensor():
    spec, lora = spec_from_config(SHAPES["Qwen1.5-MoE-A2.7B-Chat"]), LoraSpec(32, 64.0, ("all-linear",))
    layout = ParallelLayout.parse("megatron:(attn:d2p2t2|ffn:d1p2t2e2)")
    dense, experts = [0, 0], [0, 0]
    for tensor, (rows, columns) in adapter_tensors(spec, lora).items():
        stage, is_whole = tensor.layer // 12, tensor.sharding is Sharding.REPLICATE
        if tensor.expert is None:
            dense[stage] += rows * columns // (1 if is_whole else 2)
        elif tensor.expert % 2 == 0:  # one of two ranks' experts
            experts[stage] += rows * columns // (1 if is_whole else 2)
    assert [(part.dense, part.experts) for part in adapter_parameters(spec, lora, layout)] == [
        *zip(dense, experts, strict=True)
    ]


def test_adapters_of_128_experts_are_counted_once_and_not_for_each_layout():
    spec, lora = spec_from_config(SHAPES["Qwen3-30B-A3B"]), LoraSpec(32, 64.0, ("all-linear",))
    begin = time.process_time()
    for layout in [ParallelLayout(dp=dp, tp=tp, ep=ep) for dp in (4, 8, 16, 32) for tp in (1, 2, 4) for ep in (1, 2, 4)]:
        adapter_parameters(spec, lora, layout)
    assert time.process_time() - begin < 5
