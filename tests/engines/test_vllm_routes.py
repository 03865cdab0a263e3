"""The experts that vLLM says it chose: those that the trainer chooses with the same weights, for every token that was read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fivefold.routes import NO_ROUTE, no_routes
from fivefold.types import Completion, Request, TokenBatch
from tests.engines.test_vllm_engine import FREE, sized, vllm_engine
from tests.support import triton_cpu
from tests.support.engines import PROMPTS, complete, requests
from tests.support.two_steps import LENGTHS, OBJECTIVE, POLICY, whole_batch

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        not triton_cpu.is_there,
        reason="on a CPU vLLM says its routes with triton only: install it, and set TRITON_INTERPRET=1",
    ),
]
__all__ = ["sized"]


def batch_of(asked: list[Request], found: list[Completion], shape) -> TokenBatch:
    """Prompts and responses with the engine's routes and log-probs."""
    tokens, mask, lengths, logprobs, routes = [], [], [], [], []
    for request, one in zip(asked, found, strict=True):
        lengths.append(len(request.prompt_ids) + len(one.token_ids))
        tokens += request.prompt_ids + one.token_ids
        mask += [False] * len(request.prompt_ids) + [True] * len(one.token_ids)
        logprobs += [0.0] * len(request.prompt_ids) + one.logprobs
        assert one.routes_TLK is not None and len(one.routes_TLK) == lengths[-1] - 1
        routes += [one.routes_TLK, no_routes(1, shape)]
    return TokenBatch(
        torch.tensor(tokens), torch.tensor(mask), lengths, temperature=1.0,
        rollout_logprobs_T=torch.tensor(logprobs), routes_TLK=torch.cat(routes),
    )  # fmt: skip


def compared(model, asked: list[Request], found: list[Completion]) -> tuple[float, float, int]:
    """(share of the engine's routes that the trainer chooses too, largest difference of log-probs when they are replayed, how
    many routes there are), on every rank."""
    batch = batch_of(asked, found, model.spec.routes)
    own = replace(batch, routes_TLK=None, records_routes=True)
    model.forward(own)
    known = batch.routes_TLK != NO_ROUTE
    same = batch.routes_TLK.sort(-1).values == own.routes_TLK.sort(-1).values
    gap = (model.forward(batch) - batch.rollout_logprobs_T)[batch.loss_mask_T].abs().max()
    return float(same[known].float().mean()), float(gap), int(known.sum())


def trained_and_sampled(mesh, directory: Path, layout: str):
    """For three optimizer steps what `compared` finds."""
    triton_cpu.interpret()
    from fivefold.engines.weight_sync import weight_sync
    from fivefold.megatron.model import MegatronModel

    model = MegatronModel(directory, POLICY, mesh, total_updates=3)
    own = {"enable_return_routed_experts": True, "enable_prefix_caching": True}
    engine = vllm_engine(mesh, directory, layout, own)
    mine = whole_batch().select(mesh.ranks.shard_of_replica(range(len(LENGTHS))))
    # The last prompt fills a block of the prefix cache: of its second response vLLM reads nothing of it.
    asked = requests(2, FREE, [*PROMPTS, [7 + i % 90 for i in range(150)]])
    results = []
    for _ in range(3):
        weight_sync(model, engine)
        results.append(compared(model, asked, complete(engine, asked)))
        mine = replace(mine, old_logprobs_T=model.forward(mine))
        model.train_step(mine, OBJECTIVE.loss)
    return results


CASES = [("qwen3_moe", "d1", "d1"), ("glm4_moe", "d1", "d1"), ("qwen3_moe", "d2e2", "d1t2")]


@pytest.mark.parametrize(("name", "layout", "engine"), CASES, ids=str)
def test_with_the_same_weights_vllm_and_the_trainer_choose_the_same_experts(cluster, sized, name, layout, engine):
    """In float32, after each of three optimizer steps; glm4_moe has a router of sigmoid with a bias, behind dense layers."""
    for results in cluster.run(trained_and_sampled, f"megatron:{layout}", sized(name), engine):
        for same, gap, count in results:
            assert same == 1 and gap < 1e-5 and count > 2000
