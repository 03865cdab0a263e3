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


def apart_engine(mesh, directory: Path, logs: Path, said: list[str], workers: dict[int, int], **changes):
    """`workers`: tensor-parallel workers of the servers that this rank starts, by number."""
    from fivefold.engines.vllm.client import VLLMServer

    # The second listens as it would for ranks of other machines.
    hosts = {1: "127.0.0.1"}
    processes = {
        number: server_of(directory, logs / f"server-{number}.log", count, hosts.get(number))
        for number, count in workers.items()
    }
    return server_engine(mesh, directory, VLLMServer, processes, said, None, **changes)


def three_servers(mesh, directory: Path, logs: Path):
    """Two of the first rank, one of which has two workers, and one of the second; everything that is tried on them."""
    said: list[str] = []
    rank, tensors = mesh.ranks.rank, load_tensors(directory)
    engine = apart_engine(mesh, directory, logs, said, {1: 1} if rank else {0: 2, 2: 1})
    found: dict[str, object] = {"said": said, **three_steps(mesh, directory, engine)}
    asked = requests(2, GREEDY)
    whole = undisturbed(mesh, directory, tensors, [asked])[0]

    def killed_midway():
        """The weights, while whose transfer the second rank's server is killed."""
        for place, pair in enumerate(tensors.items()):
            if rank and place == len(tensors) // 2:
                kill_api(engine)
            yield pair

    begin = time.monotonic()
    engine.update_weights(killed_midway(), 5)
    found["cut"] = engine.state, sorted(engine._lost), [process.has_ended for process in engine._processes.values()]
    found["seconds"] = time.monotonic() - begin
    refreshed(engine, tensors)
    found["after"] = [[one.token_ids for one in each] for each in (complete(engine, asked), whole)]

    wrong = {name: tensor[:-1] if name.endswith("1.mlp.up_proj.weight") else tensor for name, tensor in tensors.items()}
    try:
        engine.update_weights(iter(wrong.items()), 6)
    except RuntimeError as error:
        found["refused"] = str(error)
    processes = family_of(engine)
    engine.close()
    mesh.ranks.barrier()
    found["left"] = [each.pid for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    return found


@pytest.fixture(scope="module")
def three(cluster, model, tmp_path_factory) -> list[dict]:
    return cluster.run(three_servers, "megatron:d2", model, tmp_path_factory.mktemp("logs"), seconds=900)


def test_servers_apart_sample_with_the_weights_of_every_step(three):
    """Two ranks send half of each tensor to four workers; untrained weights would be off by a hundred times the bound."""
    for found in three:
        assert max(found["differences"]) < 1e-5, found["differences"]
        served, other = found["greedy"]
        assert [one.token_ids for one in served] == [one.token_ids for one in other]


def test_a_server_killed_while_it_takes_weights_ends_them_all_at_once(three):
    """No one has half of the new weights, no one waits for the one that is gone."""
    for found in three:
        state, lost, ended = found["cut"]
        assert state is EngineState.LOST and lost == [0, 1, 2] and all(ended)
        assert found["seconds"] < 100
    assert any("3 of 3 servers" in line for line in three[0]["said"]), three[0]["said"]


def test_servers_that_were_ended_so_start_again_with_whole_weights(three):
    for found in three:
        again, whole = found["after"]
        assert again == whole


def test_a_worker_that_cannot_load_a_tensor_ends_the_run_with_its_reason(three):
    for found in three:
        assert "the engine's weights are not those of the policy" in found["refused"]
        assert "up_proj" in found["refused"] or "size" in found["refused"], found["refused"][-500:]


def test_closing_servers_apart_leaves_nothing(three):
    assert [found["left"] for found in three] == [[], []]


def changed_midway(mesh, directory: Path, logs: Path):
    """New weights in the middle of a rollout, staged: what was sampled, and in which order what was done."""
    engine, done = apart_engine(mesh, directory, logs, [], {0: 1}, is_staged=True), []
    each, update = engine._each, engine.update_weights

    def noted(name, *arguments):
        done.append(name)
        each(name, *arguments)

    def gathered(weights):
        for place, pair in enumerate(weights):
            done.append(f"tensor {place}")
            yield pair

    engine._each, engine.update_weights = noted, lambda weights, version: update(gathered(weights), version)
    found = midway(mesh, directory, engine)
    engine.close()
    return found, done[done.index("tensor 0", 1) :]


def test_staged_weights_pause_the_servers_when_all_of_them_are_gathered(cluster, model, tmp_path):
    (((completions, under), done),) = cluster.run(changed_midway, "megatron:d1", model, tmp_path)
    check_what_was_sampled_midway(completions, under)
    assert done[-2:] == ["pause", "resume"] and done[:-2] == [f"tensor {place}" for place in range(len(done) - 2)]
