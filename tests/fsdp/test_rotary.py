"""RoPE whose frequencies depend on a sequence's length, against transformers' model on each sequence alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fivefold.config.learners import PolicyConfig
from fivefold.types import TokenBatch
from tests.fsdp.test_model import model_on
from tests.support.fsdp import policy_of
from tests.support.tiny_models import VOCAB, make_model

LENGTHS = [100, 62, 20, 70]
"""With two context-parallel ranks the second is padded to 64, which is above the bound of 62 that it does not exceed."""
PROMPT = 10
LONGROPE = {
    "original_max_position_embeddings": 62,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 62,
        "short_factor": [1.0, 1.05, 1.1, 1.2],
        "long_factor": [1.5, 3.0, 8.0, 20.0],
    },
}
DYNAMIC = {
    "max_position_embeddings": 62,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
}


def group() -> TokenBatch:
    """Return responses of several lengths to one prompt."""
    generator = torch.Generator().manual_seed(5)
    prompt_T = torch.randint(0, VOCAB, (PROMPT,), generator=generator)
    pieces = [torch.randint(0, VOCAB, (length,), generator=generator) for length in LENGTHS]
    for piece_T in pieces:
        piece_T[:PROMPT] = prompt_T
    return TokenBatch(torch.cat(pieces), torch.cat([torch.arange(length) >= PROMPT for length in LENGTHS]), LENGTHS)


def logprobs(mesh, directory: Path, policy: PolicyConfig):
    return model_on(mesh, directory, policy).forward(group())


@torch.no_grad()
def logprobs_alone(directory: Path) -> torch.Tensor:
    """Compute log-probs of the responses by a new model for each, since `dynamic` keeps the longest sequence's numbers."""
    import transformers

    from fivefold.backend.self_check import logprobs_alone

    batch, results = group(), []
    for ids_T in batch.token_ids_T.split(LENGTHS):
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").float()
        results.append(logprobs_alone(model.eval(), ids_T))
    return torch.cat(results) * batch.loss_mask_T


@pytest.mark.parametrize(("name", "rope"), [("phi3", LONGROPE), ("smollm3", DYNAMIC)], ids=["longrope", "dynamic"])
def test_each_packed_sequence_is_rotated_by_its_own_length(cluster, tmp_path, name, rope):
    """In one micro-batch, on any number of context-parallel ranks, and where a group would share its prompt."""
    directory = make_model(name, tmp_path / name, **rope)
    theirs_T = logprobs_alone(directory)
    for layout, share in (("d1", False), ("d1", True), ("c2", False)):
        policy = policy_of(layout, budget=1000, share_prefix=share)
        for ours_T in cluster.run(logprobs, f"fsdp:{layout}", directory, policy):
            differences = [float(part_T.abs().max()) for part_T in (ours_T - theirs_T).split(LENGTHS)]
            assert max(differences) < 1e-5, (layout, share, differences)
