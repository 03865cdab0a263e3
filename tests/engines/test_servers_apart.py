"""vLLM's servers on devices of their own: every rank sends its part of the weights, and a transfer that is cut costs nothing."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from fivefold.interfaces import EngineState
from tests.engines.test_server_engine import server_of
from tests.engines.test_vllm_engine import SIZES
from tests.support.engines import complete, requests
from tests.support.servers import (
    GREEDY,
    check_what_was_sampled_midway,
    family_of,
    kill_api,
    midway,
    refreshed,
    server_engine,
    three_steps,
    undisturbed,
)
from tests.support.tiny_models import load_tensors, make_model

# Minutes with two servers and two ranks on two cores; test_servers.py has the same transfers without vLLM.
pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model("qwen3_tied", tmp_path_factory.mktemp("model") / "qwen3_tied", **SIZES)


def apart_engine(mesh, directory: Path, logs: Path, messages: list[str], workers: dict[int, int], **changes):
    """`workers`: tensor-parallel workers of the servers that this rank starts, by number."""
    from fivefold.engines.vllm.client import VLLMServer

    # The second listens as it would for ranks of other machines.
    hosts = {1: "127.0.0.1"}
    processes = {
        number: server_of(directory, logs / f"server-{number}.log", count, hosts.get(number))
        for number, count in workers.items()
    }
    return server_engine(mesh, directory, VLLMServer, processes, messages, None, **changes)


def three_servers(mesh, directory: Path, logs: Path):
    """Two of the first rank, one of which has two workers, and one of the second; everything that is tried on them."""
    messages: list[str] = []
    rank, tensors = mesh.ranks.rank, load_tensors(directory)
    engine = apart_engine(mesh, directory, logs, messages, {1: 1} if rank else {0: 2, 2: 1})
    results: dict[str, object] = {"said": messages, **three_steps(mesh, directory, engine)}
    asked = requests(2, GREEDY)
    expected = undisturbed(mesh, directory, tensors, [asked])[0]

    def killed_midway():
        """The weights, while whose transfer the second rank's server is killed."""
        for place, pair in enumerate(tensors.items()):
            if rank and place == len(tensors) // 2:
                kill_api(engine)
            yield pair

    begin = time.monotonic()
    engine.update_weights(killed_midway(), 5)
    results["cut"] = engine.state, sorted(engine._lost), [process.has_ended for process in engine._processes.values()]
    results["seconds"] = time.monotonic() - begin
    refreshed(engine, tensors)
    results["after"] = [[one.token_ids for one in completions] for completions in (complete(engine, asked), expected)]

    wrong = {name: tensor[:-1] if name.endswith("1.mlp.up_proj.weight") else tensor for name, tensor in tensors.items()}
    try:
        engine.update_weights(iter(wrong.items()), 6)
    except RuntimeError as error:
        results["refused"] = str(error)
    processes = family_of(engine)
    engine.close()
    mesh.ranks.barrier()
    results["left"] = [
        process.pid for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    ]
    return results


@pytest.fixture(scope="module")
def three(cluster, model, tmp_path_factory) -> list[dict]:
    return cluster.run(three_servers, "megatron:d2", model, tmp_path_factory.mktemp("logs"), seconds=900)


def test_servers_apart_sample_with_the_weights_of_every_step(three):
    """Two ranks send half of each tensor to four workers; untrained weights would be off by a hundred times the bound."""
    for results in three:
        assert max(results["differences"]) < 1e-5, results["differences"]
        served, other = results["greedy"]
        assert [one.token_ids for one in served] == [one.token_ids for one in other]


def test_a_server_killed_while_it_takes_weights_ends_them_all_at_once(three):
    """No one has half of the new weights, no one waits for the one that is gone."""
    for results in three:
        state, lost, ended = results["cut"]
        assert state is EngineState.LOST and lost == [0, 1, 2] and all(ended)
        assert results["seconds"] < 100
    assert any("3 of 3 servers" in line for line in three[0]["said"]), three[0]["said"]


def test_servers_that_were_ended_so_start_again_with_whole_weights(three):
    for results in three:
        again, expected = results["after"]
        assert again == expected


def test_a_worker_that_cannot_load_a_tensor_ends_the_run_with_its_reason(three):
    for results in three:
        assert "the engine's weights are not those of the policy" in results["refused"]
        assert "up_proj" in results["refused"] or "size" in results["refused"], results["refused"][-500:]


def test_closing_servers_apart_leaves_nothing(three):
    assert [results["left"] for results in three] == [[], []]


def changed_midway(mesh, directory: Path, logs: Path):
    """New weights in the middle of a rollout, staged: what was sampled, and in which order what was done."""
    engine, done = apart_engine(mesh, directory, logs, [], {0: 1}, is_staged=True), []
    ask_each, update = engine._call_all, engine.update_weights

    def noted(name, *arguments):
        done.append(name)
        ask_each(name, *arguments)

    def gathered(weights):
        for place, pair in enumerate(weights):
            done.append(f"tensor {place}")
            yield pair

    engine._call_all, engine.update_weights = noted, lambda weights, version: update(gathered(weights), version)
    sampled = midway(mesh, directory, engine)
    engine.close()
    return sampled, done[done.index("tensor 0", 1) :]


def test_staged_weights_pause_the_servers_when_all_of_them_are_gathered(cluster, model, tmp_path):
    (((completions, under), done),) = cluster.run(changed_midway, "megatron:d1", model, tmp_path)
    check_what_was_sampled_midway(completions, under)
    assert done[-2:] == ["pause", "resume"] and done[:-2] == [f"tensor {place}" for place in range(len(done) - 2)]
