"""What vLLM is told of a model next to its config.json."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from fivefold.build_engine import _vllm_arguments
from fivefold.config import RunConfig
from fivefold.models.families import load_spec
from fivefold.plan.memory import CPU_CACHE, ENGINE_GRAPHS
from tests.support.tiny_models import make_model

REST = ["data.train=[prompts.parquet]", "data.prompts_per_step=2", "reward.functions={format: 1.0}", "trainer.steps=1"]
ROUTER = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}


def arguments(directory, device: str, engine=(), **given):
    settings = {
        "model.path": str(directory),
        "engine.backend": "vllm:d1",
        "policy.dtype": "float32",
        **{f"engine.{name}": value for name, value in dict(engine).items()},
        **{f"engine.vllm.{k}": v for k, v in given.items()},
    }
    sets = [f"{name}={json.dumps(value)}" for name, value in settings.items()]
    return _vllm_arguments(RunConfig.from_overrides([*REST, *sets]), directory, torch.device(device))


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    return make_model("deepseek_v3", tmp_path_factory.mktemp("deepseek"))


def test_a_router_that_config_json_does_not_tell_is_told(deepseek):
    """vLLM would take a softmax in place of the sigmoid, and have no correction bias."""
    assert not ROUTER.keys() & json.loads((deepseek / "config.json").read_text()).keys()
    assert arguments(deepseek, "cuda")["hf_overrides"] == ROUTER
    assert arguments(deepseek, "cuda", hf_overrides={"n_group": 1})["hf_overrides"] == {**ROUTER, "n_group": 1}


def test_each_process_has_its_part_of_the_cache_and_of_the_sequences(tmp_path, monkeypatch):
    model = make_model("qwen3", tmp_path / "qwen3")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 << 30))

    def parts(device, processes, **given):
        chosen = arguments(model, device, {"processes": processes, "max_num_seqs": 300}, **given)
        return chosen["max_num_seqs"], chosen.get("kv_cache_memory_bytes"), chosen.get("gpu_memory_utilization")

    weights = 4 * load_spec(model).parameters
    left = (40 << 30) - 4 * (weights + ENGINE_GRAPHS)
    assert parts("cuda", 1) == (300, None, 0.5)
    assert parts("cuda", 4) == (75, left // 4, 0.125)
    assert parts("cuda", 4, kv_cache_memory_bytes=1000) == (75, 250, 0.125)
    # A cache of a given size does not make vLLM ask for 92 % of the device before it starts.
    assert parts("cuda", 1, kv_cache_memory_bytes=1000) == (300, 1000, 0.5)
    assert parts("cpu", 4) == (75, CPU_CACHE // 4, None)
    assert parts("cpu", 1, kv_cache_memory_bytes=1000) == (300, 1000, None)


def test_what_config_json_tells_is_left_to_it(deepseek, tmp_path):
    config = json.loads((deepseek / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | ROUTER))
    assert "hf_overrides" not in arguments(tmp_path, "cuda")


def test_positions_of_latent_attention_are_turned_by_torch_on_a_cpu(deepseek, tmp_path):
    assert arguments(deepseek, "cpu")["compilation_config"] == {"custom_ops": ["-rotary_embedding"]}
    assert "compilation_config" not in arguments(deepseek, "cuda")
    assert "compilation_config" not in arguments(make_model("qwen3", tmp_path / "qwen3"), "cpu")
