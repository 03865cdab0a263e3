"""Families without a file here, trained through Megatron-Bridge: transformers and torch are the oracle."""

from __future__ import annotations

import json
import shutil
from copy import copy
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fivefold.config.learners import MegatronConfig
from fivefold.errors import UserError
from tests.megatron.test_bridges import through
from tests.megatron.test_hugging_face import hf_numbers
from tests.support.cluster import Together
from tests.support.commands import fivefold
from tests.support.tiny_models import BRIDGED_VARIANTS, load_tensors, make_model
from tests.support.two_steps import BOUNDS, POLICY, assert_equal, difference, expected, megatron_step, run_step
from tests.support.whole_runs import assert_same, kill_run, train, write_run
from tests.support.whole_runs import make_model as make_run_model

pytestmark = pytest.mark.bridges

LAYOUTS = ("d1", "t2", "p2", "c2", "d2")
BRIDGED = replace(POLICY, megatron=MegatronConfig(bridge_type="megatron-bridge"))


@pytest.fixture(scope="module")
def runs(cluster, models):
    """(log-probs, export) and (reports, weights after two steps), by (what, model, layout)."""
    calls = {}
    for name in BRIDGED_VARIANTS:
        for layout in LAYOUTS:
            backend = f"megatron:{layout}"
            calls["load", name, layout] = backend, through, "megatron-bridge", models(name)
            calls["steps", name, layout] = backend, megatron_step, models(name), BRIDGED, expected(models(name))[2]
    return Together(cluster, calls)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", BRIDGED_VARIANTS)
def test_log_probs_and_export_equal_transformers(runs, models, name, layout):
    expected_T, _, state = hf_numbers(models(name))
    for logprobs_T, weights in runs["load", name, layout]:
        assert (logprobs_T - expected_T).abs().max() <= 2e-5
        assert set(weights) == set(state)
        for key, tensor in weights.items():
            assert tensor.dtype == state[key].dtype and tensor.equal(state[key]), key


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", BRIDGED_VARIANTS)
def test_two_steps_equal_transformers_and_torch(runs, models, name, layout):
    """Biases and norms without weight decay; their gradients summed over the ranks that split a sequence."""
    assert_equal(runs["steps", name, layout], expected(models(name)))


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("name", BRIDGED_VARIANTS)
def test_recomputed_layers_take_the_same_steps(cluster, models, name, recompute):
    policy = replace(BRIDGED, recompute=recompute, tokens_per_micro_batch=32)
    assert_equal(run_step(cluster, "megatron:t2p2", models(name), policy), expected(models(name)))


OLDER = {
    "nemotron": {"rope_theta": 5000.0, "partial_rotary_factor": 0.5},
    "gemma": {"rope_theta": 5000.0, "rope_scaling": None, "hidden_act": "gelu", "hidden_activation": None},
}
"""Keys of published config.json files, which transformers 4 wrote."""


@pytest.mark.parametrize("name", BRIDGED_VARIANTS)
def test_the_spelling_of_published_models_is_the_same_model(cluster, models, tmp_path, name):
    directory = tmp_path / "model"
    shutil.copytree(models(name), directory)
    config = json.loads((directory / "config.json").read_text())
    for key in ("rope_parameters", "tie_word_embeddings"):
        del config[key]
    config |= OLDER[name]
    (directory / "config.json").write_text(json.dumps(config))
    [(logprobs_T, _)] = cluster.run(through, "megatron:d1", "megatron-bridge", directory)
    assert (logprobs_T - hf_numbers(models(name))[0]).abs().max() <= 2e-5


def test_every_bridged_family_is_proven():
    from fivefold.models.bridged import READERS

    assert set(BRIDGED_VARIANTS) == set(READERS)


def in_16_bits(mesh, directory: Path):
    from fivefold.megatron.model import MegatronModel

    MegatronModel(directory, replace(BRIDGED, dtype="bfloat16"), mesh, total_updates=1)


@pytest.mark.parametrize("name", BRIDGED_VARIANTS)
def test_rounding_in_16_bits_passes_the_check_at_start(cluster, models, name):
    cluster.run(in_16_bits, "megatron:t2", models(name))


# --- injected faults: each must be seen at start or by the comparison of steps ----------------------------------------


def changed(name: str, value: Any) -> None:
    """Change one setting of the layers that Megatron-Bridge describes; ranks are processes of their own."""
    from fivefold.megatron import model

    original = model.architecture_of

    def other(*given):
        architecture = original(*given)
        if name == "embedding_scale":
            return replace(architecture, embedding_scale=value)
        return replace(architecture, settings={**architecture.settings, name: value})

    model.architecture_of = other


def gamma_not_centred(mesh, *arguments):
    changed("layernorm_zero_centered_gamma", False)
    return megatron_step(mesh, *arguments)


def other_activation(mesh, *arguments):
    changed("activation_func", torch.nn.functional.relu)
    return megatron_step(mesh, *arguments)


def embeddings_not_scaled(mesh, *arguments):
    changed("embedding_scale", None)
    return megatron_step(mesh, *arguments)


def whole_heads_rotated(mesh, *arguments):
    from fivefold.megatron import model

    original = model.load_spec
    model.load_spec = lambda *given: replace(original(*given), rotary_fraction=1.0)
    return megatron_step(mesh, *arguments)


def sequences_leak(mesh, *arguments):
    from fivefold.backend.packing import make_packing
    from fivefold.megatron.layers import attention

    original = attention.attend
    attention.attend = lambda query, key, value, packing, *rest: original(
        query, key, value, make_packing([len(query)], query.device), *rest
    )
    return megatron_step(mesh, *arguments)


def biases_of_norms_not_summed(mesh, *arguments):
    from fivefold.megatron.layers.norm import LayerNorm

    original = LayerNorm.__init__

    def unmarked(self, *given, **kwargs):
        original(self, *given, **kwargs)
        self.bias.sequence_parallel = False

    LayerNorm.__init__ = unmarked
    return megatron_step(mesh, *arguments)


@pytest.mark.parametrize(
    ("fault", "layout", "name", "dtype"),
    [
        (gamma_not_centred, "d1", "nemotron", "float32"),
        (gamma_not_centred, "t2", "gemma", "bfloat16"),
        (other_activation, "p2", "gemma", "float32"),
        (embeddings_not_scaled, "d2", "gemma", "float32"),
        (whole_heads_rotated, "d1", "nemotron", "float32"),
        (sequences_leak, "d1", "nemotron", "bfloat16"),
    ],
)
def test_the_check_at_start_sees_other_layers(cluster, models, fault, layout, name, dtype):
    with pytest.raises(RuntimeError, match=r"LogProbError: log-probs of this .* must be those that transformers computes"):
        run_step(cluster, f"megatron:{layout}", models(name), replace(BRIDGED, dtype=dtype), fault)


def test_gradients_of_biases_that_are_not_summed_are_seen(cluster, models):
    results = run_step(cluster, "megatron:t2", models("nemotron"), BRIDGED, biases_of_norms_not_summed)
    differences = difference(results, expected(models("nemotron")))
    assert any(value > 10 * bound for value, bound in zip(differences, BOUNDS, strict=True)), differences


# --- what Megatron-Bridge describes and our layers do not compute -----------------------------------------------------


def refusals(mesh, directory: Path) -> tuple[list[str], list[str]]:
    """(fields of the provider with another value that are refused by name, fields that are taken)."""
    from fivefold.megatron.bridge.external import import_bridge
    from fivefold.megatron.bridge.provider import architecture_of
    from fivefold.models.families import load_spec

    library, spec = import_bridge("megatron-bridge"), load_spec(directory)
    usual = library.AutoBridge.from_hf_pretrained(directory).to_megatron_provider(load_weights=False)
    refused, taken = [], []
    for name in [one.name for one in fields(usual)]:
        provider = copy(usual)
        setattr(provider, name, "another value")
        opened = SimpleNamespace(to_megatron_provider=lambda load_weights, provider=provider: provider)
        library.AutoBridge.from_hf_pretrained = lambda *_, opened=opened, **__: opened
        try:
            architecture_of(directory, spec)
        except UserError as error:
            assert f"{name}='another value', which our layers do not: write an fsdp: layout" in str(error)
            refused.append(name)
        else:
            taken.append(name)
    return refused, taken


def test_no_field_of_a_provider_is_dropped_silently(cluster, models):
    from fivefold.megatron.bridge.provider import _ACTING, _WITHOUT_EFFECT

    [(refused, taken)] = cluster.run(refusals, "megatron:d1", models("nemotron"))
    assert set(taken) <= _WITHOUT_EFFECT.union(_ACTING)
    assert {"softmax_type", "window_size", "qk_layernorm", "num_moe_experts", "layernorm_epsilon", "kv_channels"} <= set(
        refused
    )


def unproven(mesh, directory: Path) -> str:
    """The refusal of a family that is not among the proven ones, as if it were."""
    from fivefold.megatron.bridge.provider import architecture_of
    from fivefold.models.families import load_spec

    try:
        architecture_of(directory, load_spec(directory))
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gemma2", "attn_logit_softcapping=2.0"),
        ("gemma2", "layers of Gemma2ModelProvider.provide"),
        ("gpt_oss", "softmax_type='learnable'"),
        ("gemma3", "megatron-bridge cannot convert a gemma3_text model"),
    ],
)
def test_layers_that_only_megatron_bridge_has_are_named(cluster, models, name, says):
    [message] = cluster.run(unproven, "megatron:d1", models(name))
    assert says in message and message.endswith(": write an fsdp: layout")


def test_a_tensor_that_megatron_bridge_would_ignore_is_named(cluster, models, tmp_path):
    from safetensors.torch import save_file

    directory = tmp_path / "model"
    shutil.copytree(models("nemotron"), directory)
    state = load_tensors(directory) | {"model.layers.1.self_attn.o_proj.bias": torch.zeros(64)}
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RuntimeError, match=r"no place for 1 tensors of this nemotron model, the first: .*o_proj.bias"):
        cluster.run(through, "megatron:d1", "megatron-bridge", directory)


# --- whole runs -------------------------------------------------------------------------------------------------------

RUN = """
model: {path: $MODEL}
policy: {backend: "megatron:d1", tokens_per_micro_batch: 64, megatron: {bridge_type: megatron-bridge}}
algorithm: {name: grpo, group_size: 2, kl: {coef: 0.05, place: loss}}
data: {prompts_per_step: 8, max_response_tokens: 12}
trainer: {steps: 3, save_every: 2}
"""


def begin_run(root: Path, name: str) -> Path:
    """Write a run of a tiny model; its directory."""
    make_run_model(root)
    directory = make_model(name, root / name, vocab_size=64, num_hidden_layers=2)
    for file in (root / "model").glob("*token*"):
        shutil.copy(file, directory / file.name)
    write_run(root, RUN.replace("$MODEL", str(directory)))
    return directory


def test_a_run_samples_with_the_weights_of_every_step_and_exports(tmp_path):
    directory = begin_run(tmp_path, "gemma")
    rows, output = train(tmp_path, "base", "policy.backend=megatron:d1p2", "trainer.steps=2")
    assert "gemma, " in output
    assert all(row["policy/grad_norm"] > 0 and row["rollout/logprob_diff_mean"] < 1e-4 for row in rows), rows
    done = fivefold("export", tmp_path / "runs/base", tmp_path / "exported")
    assert done.returncode == 0, done.stderr
    state, exported = load_tensors(directory), load_tensors(tmp_path / "exported")
    assert {key: tensor.shape for key, tensor in exported.items()} == {key: tensor.shape for key, tensor in state.items()}
    assert not all(tensor.equal(state[key]) for key, tensor in exported.items())


def test_a_killed_run_resumes_on_another_layout_with_the_same_numbers(tmp_path):
    begin_run(tmp_path, "nemotron")
    rows, _ = train(tmp_path, "base")
    kill_run(tmp_path, "killed", 2, "policy.backend=megatron:d1t2")
    assert_same(train(tmp_path, "killed", "policy.backend=megatron:d1p2")[0], rows)
