"""The check at start refuses families whose packed sequences fsdp does not compute as transformers does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fsdp.test_model import model_on
from tests.support.fsdp import policy_of
from tests.support.tiny_models import make_model

INDEXED = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "index_topk": 48,
    "index_n_heads": 4,
    "index_head_dim": 16,
}


def start(mesh, directory: Path):
    """Build the model, and return the windows that its layers have after the check."""
    model = model_on(mesh, directory, policy_of("d1"))
    return {module.sliding_window for module in model.modules() if getattr(module, "sliding_window", None)}


@pytest.fixture(name="variant")
def _variant(monkeypatch, tmp_path):
    """Make a model of a family that other tests do not have."""
    from tests.support import tiny_models

    def make(prefix: str, **changes) -> Path:
        monkeypatch.setitem(tiny_models.OTHER_VARIANTS, prefix, (prefix, {"pad_token_id": None, **changes}))
        return make_model(prefix, tmp_path / prefix)

    return make


def test_a_window_that_only_masks_have_is_refused_though_it_is_wide(cluster, variant):
    directory = variant("Phimoe", num_local_experts=4, sliding_window=48)
    with pytest.raises(RuntimeError, match=r"PackingError: .*first in layer 0, .*fsdp does not support phimoe"):
        cluster.run(start, "fsdp:d1", directory)


def test_a_window_over_all_positions_is_no_window(cluster, variant):
    """Published models of the family have one."""
    cluster.run(start, "fsdp:d1", variant("Phimoe", num_local_experts=4, sliding_window=256, max_position_embeddings=256))


def test_a_wide_window_that_layers_have_is_kept_after_the_check(cluster, variant):
    directory = variant("Cohere2", head_dim=16, sliding_window=48)
    assert cluster.run(start, "fsdp:d1", directory) == [{48}]


def test_a_layer_that_ends_in_an_error_is_refused_with_the_family(cluster, variant):
    directory = variant("DeepseekV32", **INDEXED)
    says = r"PackingError: fsdp does not support deepseek_v32 as transformers .* computes it: TypeError: 'NoneType' object"
    with pytest.raises(RuntimeError, match=says):
        cluster.run(start, "fsdp:d1", directory)
