"""What tests of engines of servers share."""

from __future__ import annotations

import os
import shutil
import signal
import uuid
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file

from fivefold.columns import Column
from fivefold.engines.sampling import request_seed
from fivefold.engines.servers.server_process import ServerProcess
from fivefold.interfaces import EngineState
from fivefold.types import Completion, Request, Sampling, TokenBatch
from tests.engines.test_vllm_engine import TOKENIZER, difference
from tests.support.engines import PROMPTS, complete, requests
from tests.support.shards import shard_of_replica
from tests.support.tiny_models import load_tensors
from tests.support.two_steps import LENGTHS, OBJECTIVE, POLICY, whole_batch

BUCKET = 1 << 14
"""Bytes: less than the embeddings of the tiny models, more than most of their tensors."""
LONG = Sampling(max_tokens=200)
GREEDY, FREE = Sampling(max_tokens=24, temperature=0.0), Sampling(max_tokens=16)


def one_short_among_endless(wanted: list[Request], longest: int = 240) -> list[Request]:
    """The first ends with its first token, the others not before an abort that follows it: they are as long as can be."""
    endless = Sampling(max_tokens=longest, ignore_eos=True)
    return [replace(request, sampling=replace(endless, max_tokens=longest if request.id else 1)) for request in wanted]


def server_engine(
    mesh,
    directory: Path,
    client,
    processes: dict[int, ServerProcess],
    messages: list[str],
    ranks_per_server: int | None = 1,
    **changes,
):
    """`client`: the class that speaks with a server; `processes`: the servers of this rank, by number."""
    from fivefold.engines.servers.server_engine import ServerEngine

    settings = {"window": 64, "bucket_bytes": BUCKET, "verify_every": 1, "can_sleep": False} | changes
    connect = partial(client, ends={TOKENIZER.eos_token_id}, run=mesh.ranks.broadcast_from_main(uuid.uuid4().hex))
    return ServerEngine(
        directory,
        mesh.ranks,
        mesh.device,
        connect,
        messages.append,
        processes=processes,
        ranks_per_server=ranks_per_server,
        **settings,
    )


def undisturbed(mesh, directory: Path, tensors, calls: list[list[Request]]) -> list[list[Completion]]:
    """By the transformers engine (greedy tokens only)."""
    from fivefold.engines.transformers import TransformersEngine

    engine = TransformersEngine(directory, TOKENIZER, mesh.device, torch.float32, 64)
    engine.update_weights(iter(tensors.items()), 0)
    return [complete(engine, group) for group in calls]


def three_steps(mesh, directory: Path, engine) -> dict[str, object]:
    """What an engine of servers samples before and after each of three optimizer steps, and the greedy tokens of the model."""
    from fivefold.engines.weight_sync import weight_sync
    from fivefold.megatron.model import MegatronModel

    trained = MegatronModel(directory, POLICY, mesh, total_updates=3)
    mine = whole_batch().select(shard_of_replica(mesh.ranks, range(len(LENGTHS))))
    first, drawn, differences = requests(2, FREE, [*PROMPTS, [7 + i % 90 for i in range(150)]]), [], []
    for _ in range(4):
        weight_sync(trained, engine)
        drawn.append(complete(engine, first))
        differences.append(difference(trained, first, drawn[-1]))
        mine = mine.with_columns({Column.OLD_LOGPROBS: trained.forward(mine)})
        trained.train_step(mine, OBJECTIVE.loss)
    tensors, greedy_requests = load_tensors(directory), requests(2, GREEDY)
    engine.update_weights(iter(tensors.items()), 3)
    greedy = complete(engine, greedy_requests), undisturbed(mesh, directory, tensors, [greedy_requests])[0]
    return {"drawn": drawn, "differences": differences, "greedy": greedy}


def kill_api(engine) -> None:
    for process in engine._processes.values():
        os.kill(process._process.pid, signal.SIGKILL)


def family_of(engine) -> list[psutil.Process]:
    """What this rank's servers consist of."""
    return [child for process in engine._processes.values() for child in process._family()]


def refreshed(engine, weights) -> None:
    """As a weight sync does until the servers have the weights."""
    is_sent = False
    while not is_sent:
        engine.restart()
        engine.wake()
        engine.update_weights(iter(weights.items()), 3)
        is_sent = engine.state is EngineState.READY


TURNS, TRAJECTORIES, OBSERVED = 5, 6, 140
"""Turns of a trajectory, trajectories of a rank, and tokens of an observation."""


def prefix_hits_of_turns(mesh, engine, tensors, block: int) -> tuple[int, float, float]:
    """(tokens in whole blocks that an earlier turn has computed, tokens that the servers have read from their caches since the
    first turns, and those right after new weights), over all ranks and servers; `block`: tokens of a block of the cache."""
    engine.update_weights(iter(tensors.items()), 0)
    stream, rank, endless = engine.stream(), mesh.ranks.rank, replace(FREE, ignore_eos=True)
    contexts = [[5 + 20 * rank + number + i % 80 for i in range(150)] for number in range(TRAJECTORIES)]
    held, computed = 0, [0] * TRAJECTORIES

    def ask(number: int, turn: int) -> None:
        # A turn follows its trajectory's last one at once, whatever the others do.
        nonlocal held
        held += computed[number]
        seed = request_seed((5, rank, number, turn))
        stream.submit([Request(turn * TRAJECTORIES + number, contexts[number], endless, seed, number, turn)])

    def sample(first: int, last: int) -> None:
        for number in range(TRAJECTORIES):
            ask(number, first)
        for completion in stream.completions():
            turn, number = divmod(completion.request_id, TRAJECTORIES)
            contexts[number] += completion.token_ids
            # The last token was sampled and never read.
            computed[number] = (len(contexts[number]) - 1) // block * block
            contexts[number] += [7 + (number + i) % 80 for i in range(OBSERVED)]
            if turn < last:
                ask(number, turn + 1)

    def read(server) -> float:
        # On a busy machine the first call may not be answered in time.
        return next(filter(None, (server.pressure() for _ in range(20)))).prefix_hits

    def hits() -> float:
        mesh.ranks.barrier()
        total = sum(read(server) for server in engine._servers)
        mesh.ranks.barrier()
        return total

    sample(0, 0)
    before = hits()
    sample(1, TURNS - 1)
    between, of_turns = hits(), held
    engine.update_weights(iter(tensors.items()), 1)
    sample(TURNS, TURNS)
    after = hits()
    stream.close()
    return sum(mesh.ranks.gather_objects(of_turns)), between - before, after - between


def midway(mesh, directory: Path, engine, prompts: int = 12):
    """Completions between whose tokens the weights changed, and of every token the log-prob under either weights."""
    from fivefold.megatron.model import MegatronModel

    tensors = load_tensors(directory)
    weights = [{name: tensor * factor for name, tensor in tensors.items()} for factor in (1.0, 1.1)]
    engine.update_weights(iter(weights[0].items()), 4)
    wanted = requests(4, LONG, [[5 + i, 6, 7 + i] for i in range(prompts)])
    # Five are short; the others are still being sampled when weights come, however fast that is.
    sizes = [Sampling(max_tokens=170, ignore_eos=True), Sampling(max_tokens=8, ignore_eos=True)]
    wanted = [replace(request, sampling=sizes[request.id < 5]) for request in wanted]
    completions: dict[int, Completion] = {}
    for completion in engine.generate(wanted):
        completions[completion.request_id] = completion
        if len(completions) == 5:
            engine.update_weights(iter(weights[1].items()), 9)
    under = []
    for number, changed in enumerate(weights):
        path = directory.parent / f"changed-{number}"
        shutil.copytree(directory, path, dirs_exist_ok=True)
        save_file(changed, path / "model.safetensors", metadata={"format": "pt"})
        model = MegatronModel(path, POLICY, mesh)
        under.append([logprobs_of(model, request, completions[request.id]) for request in wanted])
    return [completions[request.id] for request in wanted], under


def logprobs_of(model, request: Request, completion: Completion) -> list[float]:
    tokens = request.prompt_ids + completion.token_ids
    mask = torch.tensor([False] * len(request.prompt_ids) + [True] * len(completion.token_ids))
    return model.forward(TokenBatch(torch.tensor(tokens), mask, [len(tokens)]))[mask].tolist()


def check_what_was_sampled_midway(completions: list[Completion], under: list[list[list[float]]]) -> None:
    """Every token is said to come from the weights that gave it its log-prob, and requests went through both."""
    mixed = [one for one in completions if one.token_versions is not None]
    assert len(mixed) > 5
    for number, one in enumerate(completions):
        versions = one.token_versions or [one.policy_version] * len(one.token_ids)
        assert len(versions) == len(one.token_ids) and versions == sorted(versions)
        assert one.policy_version == versions[0]
        expected = [under[[4, 9].index(version)][number][place] for place, version in enumerate(versions)]
        assert one.logprobs == pytest.approx(expected, abs=1e-5)
