"""The experts that vLLM says it chose: those that the trainer chooses with the same weights, for every token that was read."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from fivefold.columns import Column
from fivefold.models.families import load_spec
from fivefold.routes import NO_ROUTE, no_routes
from fivefold.types import Completion, Request, TokenBatch
from tests.engines.test_server_engine import ARGUMENTS
from tests.engines.test_vllm_engine import FREE, sized, vllm_engine
from tests.support import triton_cpu
from tests.support.engines import PROMPTS, complete, requests
from tests.support.servers import LONG, server_engine
from tests.support.shards import shard_of_replica
from tests.support.two_steps import LENGTHS, OBJECTIVE, POLICY, whole_batch

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        not triton_cpu.is_there,
        reason="on a CPU vLLM says its routes with triton only: install it, and set TRITON_INTERPRET=1",
    ),
]
__all__ = ["sized"]


def batch_of(asked: list[Request], completions: list[Completion], shape) -> TokenBatch:
    """Prompts and responses with the engine's routes and log-probs."""
    tokens, mask, lengths, logprobs, routes = [], [], [], [], []
    for request, one in zip(asked, completions, strict=True):
        lengths.append(len(request.prompt_ids) + len(one.token_ids))
        tokens += request.prompt_ids + one.token_ids
        mask += [False] * len(request.prompt_ids) + [True] * len(one.token_ids)
        logprobs += [0.0] * len(request.prompt_ids) + one.logprobs
        assert one.routes_TLK is not None and len(one.routes_TLK) == lengths[-1] - 1
        routes += [one.routes_TLK, no_routes(1, shape)]
    return TokenBatch(
        torch.tensor(tokens),
        torch.tensor(mask),
        lengths,
        temperature=1.0,
        columns={Column.ROLLOUT_LOGPROBS: torch.tensor(logprobs), Column.ROUTES: torch.cat(routes)},
    )


def compared(model, asked: list[Request], completions: list[Completion]) -> tuple[float, float, int]:
    """(share of the engine's routes that the trainer chooses too, largest difference of log-probs when they are replayed, how
    many routes there are), on every rank."""
    batch = batch_of(asked, completions, model.spec.routes)
    recorded = replace(batch.with_columns({Column.ROUTES: None}), records_routes=True)
    model.forward(recorded)
    known = batch[Column.ROUTES] != NO_ROUTE
    same = batch[Column.ROUTES].sort(-1).values == recorded[Column.ROUTES].sort(-1).values
    gap = (model.forward(batch) - batch[Column.ROLLOUT_LOGPROBS])[batch.loss_mask_T].abs().max()
    return float(same[known].float().mean()), float(gap), int(known.sum())


def trained_and_sampled(mesh, directory: Path, site: Path | None):
    """For three optimizer steps what `compared` finds, in this rank or with a server."""
    from fivefold.engines.weight_sync import weight_sync
    from fivefold.megatron.model import MegatronModel

    model = MegatronModel(directory, POLICY, mesh, total_updates=3)
    engine = in_process(mesh, directory) if site is None else as_server(mesh, directory, site)
    mine = whole_batch().select(shard_of_replica(mesh.ranks, range(len(LENGTHS))))
    # The last prompt fills a block of the prefix cache: of its second response vLLM reads nothing of it.
    asked = requests(2, FREE, [*PROMPTS, [7 + i % 90 for i in range(150)]])
    results = []
    try:
        for _ in range(3):
            weight_sync(model, engine)
            results.append(compared(model, asked, complete(engine, asked)))
            mine = mine.with_columns({Column.OLD_LOGPROBS: model.forward(mine)})
            model.train_step(mine, OBJECTIVE.loss)
        if site is not None:
            results.append(interrupted(model, engine))
    finally:
        engine.close()
    return results


def in_process(mesh, directory: Path):
    triton_cpu.interpret()
    return vllm_engine(mesh, directory, "d1", {"enable_return_routed_experts": True, "enable_prefix_caching": True})


def as_server(mesh, directory: Path, site: Path):
    from fivefold.engines.vllm.client import VLLMServer
    from fivefold.engines.vllm.probe import answers
    from fivefold.engines.vllm.serve import server_process

    # Python runs a module of this name wherever it starts.
    (site / "sitecustomize.py").write_text("from tests.support import triton_cpu\ntriton_cpu.interpret()\n")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    arguments = {"model": str(directory), **ARGUMENTS, "skip_tokenizer_init": True}
    arguments |= {"enable_return_routed_experts": True, "enable_prefix_caching": True}
    process = server_process(arguments, mesh.device, 1, site / "server.log", answers)
    client = partial(VLLMServer, routes=load_spec(directory).routes)
    return server_engine(mesh, directory, client, {0: process}, [])


def interrupted(model, engine) -> list[tuple[int, int, int]]:
    """(tokens, versions, routes) of responses that new weights continue with."""
    from fivefold.engines.weight_sync import weight_sync

    asked = requests(2, LONG)
    stream = engine.stream()
    stream.submit(asked)
    time.sleep(2)
    weight_sync(model, engine)
    completions = {}
    while len(completions) < len(asked):
        for completion in stream.arrived(1.0):
            completions[completion.request_id] = completion
    stream.close()
    return [
        (
            len(request.prompt_ids) + len(one.token_ids),
            len(set(one.token_versions or [one.policy_version])),
            len(one.routes_TLK),
        )
        for request, one in ((request, completions[request.id]) for request in asked)
    ]


@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe"])
def test_with_the_same_weights_vllm_and_the_trainer_choose_the_same_experts(cluster, sized, name):
    """In float32, after each of three optimizer steps; glm4_moe has a router of sigmoid with a bias, after dense layers."""
    (results,) = cluster.run(trained_and_sampled, "megatron:d1", sized(name), None)
    for same, gap, count in results:
        assert same == 1 and gap < 1e-5 and count > 1000


def test_routes_come_from_a_server_too_and_of_responses_that_continue(cluster, sized, tmp_path):
    (results,) = cluster.run(trained_and_sampled, "megatron:d1", sized("qwen3_moe"), tmp_path)
    for same, gap, count in results[:-1]:
        assert same == 1 and gap < 1e-5 and count > 1000
    assert {versions for _, versions, _ in results[-1]} == {1, 2} or all(versions == 2 for _, versions, _ in results[-1])
    for tokens, _, routes in results[-1]:
        assert routes == tokens - 1
