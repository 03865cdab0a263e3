"""vLLM as servers: weights from the trainer, requests spread over two of them, and servers that are killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import psutil
import pytest
import torch

from fivefold.interfaces import EngineState
from fivefold.models.config_json import read_config
from fivefold.types import Completion
from tests.engines.test_vllm_engine import SIZES
from tests.support.engines import OPTIONS, SAMPLING, complete, expected_logprobs, requests
from tests.support.servers import (
    GREEDY,
    LONG,
    check_what_was_sampled_midway,
    family_of,
    kill_api,
    midway,
    one_short_among_endless,
    refreshed,
    server_engine,
    three_steps,
    undisturbed,
)
from tests.support.tiny_models import load_tensors, make_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ARGUMENTS = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 64, "seed": 0, "kv_cache_memory_bytes": 64 << 20}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model("qwen3_tied", tmp_path_factory.mktemp("model") / "qwen3_tied", **SIZES)


def server_of(directory: Path, log: Path, tensor_parallel: int = 1, host: str | None = None, **more):
    from fivefold.engines.vllm.probe import answers
    from fivefold.engines.vllm.serve import server_process

    arguments = {
        "model": str(directory),
        "tensor_parallel_size": tensor_parallel,
        **ARGUMENTS,
        "skip_tokenizer_init": True,
        **more,
    }
    arguments["max_model_len"] = read_config(directory)["max_position_embeddings"]
    return server_process(arguments, torch.device("cpu"), tensor_parallel, log, answers, host)


def vllm_engine(mesh, directory: Path, logs: Path, log: list[str], tp: int = 1, arguments=MappingProxyType({}), **changes):
    """`arguments`: vLLM's besides the usual."""
    from fivefold.engines.vllm.client import VLLMServer

    rank, processes = mesh.ranks.rank, {}
    if not changes.get("addresses") and rank % tp == 0:
        processes = {rank // tp: server_of(directory, logs / f"server-{rank}.log", tp, **arguments)}
    return server_engine(mesh, directory, VLLMServer, processes, log, tp, **changes)


def changed_midway(mesh, directory: Path, address: str):
    return midway(mesh, directory, vllm_engine(mesh, directory, Path(), [], addresses=[address]))


def cut_midway(mesh, directory: Path, address: str):
    """The same with answers as older releases give them, which do not say which weights have sampled what."""
    engine = vllm_engine(mesh, directory, Path(), [], addresses=[address])
    engine._names_versions = False
    (server,) = engine._servers
    generate = server.generate

    async def unnamed(*asked):
        async for answer in generate(*asked):
            yield (*answer[:4], None, None)

    server.generate = unnamed
    return midway(mesh, directory, engine)


def two_servers(mesh, directory: Path, logs: Path):
    """Everything that is tried on the same two servers, by name: they take half a minute to start."""
    log: list[str] = []
    engine = vllm_engine(mesh, directory, logs, log)
    results: dict[str, object] = {"said": log, **three_steps(mesh, directory, engine)}
    rank, tensors = mesh.ranks.rank, load_tensors(directory)

    cut = requests(1, replace(SAMPLING, **OPTIONS["all"]))
    results["cut"] = list(zip(cut, complete(engine, cut), strict=True))

    # Each rank's own requests, twelve prompts of it.
    mine_to_ask = [replace(one, seed=one.seed + rank) for one in requests(4, LONG, [[5 + i, 6, 7 + i] for i in range(12)])]
    whole = complete(engine, mine_to_ask)
    assert engine._lost == set()

    def shared_loads():
        seen, router = [0, 0], engine._router
        ask = router._ask

        async def noted(asked):
            seen[asked.number] += len(asked.requests)
            await ask(asked)

        router._ask = noted
        again = complete(engine, mine_to_ask)
        del router._ask
        return seen, again == whole

    results["loads"] = shared_loads()

    def with_deaths(deadly_ranks) -> list[Completion]:
        """Complete the requests while servers are killed as soon as something has come."""
        arrived: dict[int, Completion] = {}
        while True:
            for completion in engine.generate([one for one in mine_to_ask if one.id not in arrived]):
                assert completion.request_id not in arrived
                if completion.finish_reason == "lost":
                    continue
                if not arrived and rank in deadly_ranks:
                    kill_api(engine)
                arrived[completion.request_id] = completion
            if engine.state is EngineState.READY:
                break
            refreshed(engine, tensors)
        return [arrived[one.id] for one in mine_to_ask]

    results["one killed"] = with_deaths({1}) == whole, sorted(engine._lost)
    refreshed(engine, tensors)
    results["restarted"] = complete(engine, mine_to_ask) == whole, sorted(engine._lost), len(engine._servers)
    results["both killed"] = with_deaths({0, 1}) == whole, sorted(engine._lost)

    stopped = []
    for completion in engine.generate(one_short_among_endless(mine_to_ask)):
        stopped.append(completion)
        if len(stopped) == 1:
            engine.abort()
    results["aborted"] = stopped
    faulty = dict(tensors)
    del faulty["model.layers.1.mlp.up_proj.weight"]
    try:
        engine.update_weights(iter(faulty.items()), 4)
    except RuntimeError as error:
        results["left out"] = str(error)
    engine.update_weights(iter(tensors.items()), 3)
    results["after"] = complete(engine, mine_to_ask) == whole
    processes = family_of(engine)
    engine.close()
    mesh.ranks.barrier()
    results["left"] = [
        process.pid for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    ]
    return results


@pytest.fixture(scope="module")
def both(cluster, model, tmp_path_factory) -> list[dict]:
    return cluster.run(two_servers, "megatron:d2", model, tmp_path_factory.mktemp("logs"), seconds=900)


def test_after_every_step_the_servers_sample_with_the_new_weights(both):
    """Log-probs as the trainer's to 1e-5, a hundred last places; untrained weights would be off by a hundred times that."""
    for results in both:
        assert max(results["differences"]) < 1e-5, results["differences"]
        assert [one.policy_version for one in results["drawn"][3]] == [3] * 10
        assert [one.token_ids for one in results["drawn"][0]] != [one.token_ids for one in results["drawn"][3]]


def test_greedy_tokens_of_servers_equal_the_transformers_engine_s(both):
    for results in both:
        served, other = results["greedy"]
        assert [one.token_ids for one in served] == [one.token_ids for one in other]
        for one, same in zip(served, other, strict=True):
            assert one.logprobs == pytest.approx(same.logprobs, abs=1e-5)
            assert one.finish_reason == same.finish_reason


def test_log_probs_of_servers_are_those_of_the_distribution_that_was_drawn_from(both, model):
    """With every option at once, as they go through JSON."""
    for results in both:
        for request, one in results["cut"]:
            assert one.logprobs == pytest.approx(expected_logprobs(model, request, one, 2), abs=5e-5)


def test_requests_are_spread_over_the_servers_and_draw_what_their_keys_say(both):
    for results in both:
        loads, same = results["loads"]
        assert sum(loads) == 48 and min(loads) >= 16, loads
        assert same


def test_a_server_killed_while_it_samples_costs_no_sample_and_counts_none_twice(both):
    """The other one samples them again, as the key of each request says."""
    for results in both:
        assert results["one killed"] == (True, [1])


def test_a_server_that_was_lost_is_there_again_with_the_next_weights(both):
    for results in both:
        assert results["restarted"] == (True, [], 2)
    assert any("1 of 2 servers" in line for line in both[0]["said"]), both[0]["said"]


def test_where_no_server_is_left_they_are_started_again_in_the_middle_of_a_rollout(both):
    for results in both:
        assert results["both killed"] == (True, [])


def test_abort_gives_what_there_is(both):
    for results in both:
        stopped = results["aborted"]
        assert sorted(one.request_id for one in stopped) == list(range(48))
        aborted = [one for one in stopped if one.finish_reason == "abort"]
        # On a busy machine the context may be full before the word arrives.
        assert aborted and {one.finish_reason for one in stopped if one.request_id != 0} <= {"abort", "length"}
        assert all(len(one.token_ids) == len(one.logprobs) for one in stopped)
        assert all(len(one.token_ids) < 240 for one in aborted)


def test_servers_refuse_weights_that_are_not_whole_and_take_the_next_ones(both):
    for results in both:
        assert "1 of" in results["left out"] and "up_proj" in results["left out"]
        assert results["after"]


def test_closing_an_engine_of_servers_ends_them(both):
    assert [results["left"] for results in both] == [[], []]


def over_a_process_group(mesh, directory: Path, address: str):
    """Sampled by servers that are there already, and by the transformers engine."""
    tensors, asked = load_tensors(directory), requests(2, GREEDY)
    engine = vllm_engine(mesh, directory, Path(), [], addresses=[address])
    changed = {name: tensor * 1.01 for name, tensor in tensors.items()}
    calls = []
    for weights in (changed, tensors):
        engine.update_weights(iter(weights.items()), 0)
        calls.append((complete(engine, asked), undisturbed(mesh, directory, weights, [asked])[0]))
    return calls


def ends_midway(mesh, directory: Path, address: str, note: Path):
    """A sender is killed in the middle of a transfer; the run is noted under whose name the server can be asked."""
    tensors = load_tensors(directory)
    engine = vllm_engine(mesh, directory, Path(), [], addresses=[address])

    def cut():
        for place, pair in enumerate(tensors.items()):
            if place == len(tensors) // 2 and mesh.ranks.rank == 1:
                note.write_text(engine._servers[0]._run)
                os.kill(os.getpid(), signal.SIGKILL)
            yield pair

    engine.update_weights(iter(tensors.items()), 0)
    engine.update_weights(cut(), 1)


def asked_directly(address: str, run: str) -> str:
    """Why the server samples nothing for this run."""
    from fivefold.engines.vllm.client import VLLMServer

    async def ask() -> list:
        return [one async for one in VLLMServer(address, set(), run).generate("direct", [5, 6], GREEDY, [(0, 0)])]

    with pytest.raises(RuntimeError) as refused:
        asyncio.run(ask())
    return str(refused.value)


def taken_over(mesh, directory: Path, address: str):
    """What a server gives a run after another one was killed in the middle of a sync, and what it says to the other."""
    tensors, asked, errors = load_tensors(directory), requests(2, GREEDY), []
    first = vllm_engine(mesh, directory, Path(), [], addresses=[address])
    first.update_weights(iter(tensors.items()), 0)
    first._servers[0].pause()
    first._servers[0].begin_weights(False)
    second = vllm_engine(mesh, directory, Path(), [], addresses=[address])
    second.update_weights(iter(tensors.items()), 0)
    samples = complete(second, asked), undisturbed(mesh, directory, tensors, [asked])[0]
    for call in (lambda: complete(first, asked), lambda: first.update_weights(iter(tensors.items()), 1)):
        try:
            call()
        except RuntimeError as error:
            errors.append(str(error))
    return samples, errors, complete(second, asked) == samples[0]


def test_servers_that_run_already_get_weights_over_a_process_group(cluster, model, tmp_path):
    """Two tensor-parallel workers of a server that another user has started; `fivefold check` looks at it before.

    A server that got half of new weights from a run that was killed samples for no one before it has whole ones. In the
    middle of a rollout requests are kept, and continue with the new weights. A server belongs to the run that came last,
    whatever the one before has left.
    """
    from fivefold.distributed.ports import free_port
    from fivefold.engines.arguments import flags
    from fivefold.engines.servers.probe import check_servers
    from fivefold.engines.vllm.arguments import ON_CPU
    from fivefold.engines.vllm.probe import COMMAND, answers, describe
    from fivefold.keys.findings import Findings
    from fivefold.models.config_json import read_config

    address = f"http://127.0.0.1:{(port := free_port())}"
    given = {"model": str(model), "tensor_parallel_size": 2, **ARGUMENTS, "enforce_eager": True, "port": port}
    command = [sys.executable, "-m", "fivefold.engines.vllm.serve", *flags(given, says_no=True)]
    with (tmp_path / "log").open("wb") as log:
        served = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | ON_CPU | {"TORCH_COMPILE_DISABLE": "1"})
    try:
        while not answers(address):
            assert served.poll() is None, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.2)
        config, errors = read_config(model), []
        for expected, longest in ((config, 256), (config, 300), (config | {"vocab_size": 7}, 256)):
            check_servers(findings := Findings(), [address], describe, COMMAND, expected, longest)
            errors.append(findings.errors)
        assert errors[0] == []
        assert "300 tokens: its maximum is 256" in errors[1][0]
        assert "holds another model than model.path: {'vocab_size': 131} != {'vocab_size': 7}" in errors[2][0]
        results = cluster.run(over_a_process_group, "megatron:d2", model, address)
        with pytest.raises(RuntimeError):
            cluster.run(ends_midway, "megatron:d2", model, address, note := tmp_path / "run")
        half = asked_directly(address, note.read_text())
        ((midway, under),) = cluster.run(changed_midway, "megatron:d1", model, address)
        ((cut, under_cut),) = cluster.run(cut_midway, "megatron:d1", model, address)
        ((taken, refused, undisturbed_after),) = cluster.run(taken_over, "megatron:d1", model, address)
    finally:
        served.kill()
        served.wait()
    assert "this server has incomplete weights" in half, half
    assert len(refused) == 2 and all("another run has taken this server" in error for error in refused), refused
    assert undisturbed_after
    for calls in [*results, [taken]]:
        for served_ones, other in calls:
            assert [one.token_ids for one in served_ones] == [one.token_ids for one in other]
            for one, same in zip(served_ones, other, strict=True):
                assert one.logprobs == pytest.approx(same.logprobs, abs=1e-5)
    check_what_was_sampled_midway(midway, under)
    check_what_was_sampled_midway(cut, under_cut)
