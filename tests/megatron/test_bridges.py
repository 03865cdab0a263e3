"""mbridge and Megatron-Bridge against our own tables: what they load and export is equal bit by bit.

Megatron-Bridge runs without Transformer Engine and Triton, which it only imports: stand-ins take their places.
"""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from fivefold.config.learners import MegatronConfig, PolicyConfig
from fivefold.errors import UserError
from fivefold.models.bridges import FAMILIES
from tests.megatron.test_hugging_face import sample_batch
from tests.support.cluster import Together
from tests.support.tiny_models import load_tensors

pytestmark = pytest.mark.bridges

DENSE = {"qwen3": "qwen3", "qwen2_tied": "qwen2", "llama3_rope": "llama", "mistral": "mistral"}
EXPERTS = {name: name for name in ("qwen3_moe", "qwen2_moe", "deepseek_v3", "glm4_moe")}
CASES = [
    (kind, name, layout)
    for names, layouts in ((DENSE, ("d1", "t2", "p2")), (EXPERTS, ("d1", "t2", "p2", "d2e2")))
    for name, family in names.items()
    for kind in FAMILIES
    if family in FAMILIES[kind]
    for layout in layouts
]
CASES += [(kind, "qwen3_moe", layout) for kind in FAMILIES for layout in ("(attn:t2|ffn:t2)", "t2e2", "d2p2e2")]


def through(mesh, kind: str, directory: Path):
    """(log-probs, exported weights) of a rank's model that `kind` has loaded."""
    from fivefold.megatron.model import MegatronModel

    options = MegatronConfig(bridge_type=kind)
    model = MegatronModel(directory, PolicyConfig(dtype="float32", tokens_per_micro_batch=48, megatron=options), mesh)
    return model.forward(sample_batch()), {name: tensor.clone() for name, tensor in model.weights()}


@pytest.fixture(scope="module")
def runs(cluster, models):
    """Results by (kind, model, layout)."""
    wanted = {*CASES, *(("native", name, layout) for _, name, layout in CASES)}
    return Together(
        cluster,
        {(kind, name, layout): (f"megatron:{layout}", through, kind, models(name)) for kind, name, layout in sorted(wanted)},
    )


@pytest.mark.parametrize(("kind", "name", "layout"), CASES)
def test_a_bridge_loads_and_exports_the_same_bits_as_our_tables(runs, models, kind, name, layout):
    expected = load_tensors(models(name))
    for (logprobs_T, weights), (expected_T, ours) in zip(
        runs[kind, name, layout], runs["native", name, layout], strict=True
    ):
        assert torch.equal(logprobs_T, expected_T)
        assert set(weights) == set(ours)
        for key, tensor in weights.items():
            assert tensor.dtype == expected[key].dtype and torch.equal(tensor, expected[key]), key


def test_every_family_that_a_bridge_converts_is_compared():
    assert {(kind, {**DENSE, **EXPERTS}[name]) for kind, name, _ in CASES} == {
        (kind, family) for kind, families in FAMILIES.items() for family in families
    }


def without(mesh, directory: Path, left_out: str) -> str:
    """The error of a model whose files, as Megatron-Bridge sees them, lack a tensor."""
    from fivefold.megatron.bridge.external import _PaddedFiles

    keys = _PaddedFiles.keys
    with patch.object(_PaddedFiles, "get_all_keys", lambda files: [name for name in keys(files) if name != left_out]):
        try:
            through(mesh, "megatron-bridge", directory)
        except UserError as error:
            return str(error)
    return ""


def test_a_parameter_that_a_bridge_leaves_unset_ends_the_load_with_its_name(cluster, models):
    [message] = cluster.run(without, "megatron:d1", models("qwen3"), "model.layers.2.self_attn.o_proj.weight")
    assert "decoder.layers.2.self_attention.linear_proj.weight holds 8192 NaN" in message
