"""Prefix caches of vLLM's servers: turns find what earlier ones computed, and nothing of old weights stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.test_server_engine import vllm_engine
from tests.engines.test_vllm_engine import SIZES, conversation
from tests.support.servers import TRAJECTORIES, prefix_hits_of_turns
from tests.support.tiny_models import load_tensors, make_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def conversations_with_a_server(mesh, directory: Path, logs: Path) -> list[list[float]]:
    """Return log-prob differences of one conversation, first as it is, then with a server that keeps its prefix cache."""
    engine = vllm_engine(mesh, directory, logs, [], verify_every=0)
    as_it_is = conversation(mesh, directory, engine, 1)
    (server,) = engine._servers
    post = server._post
    server._post = lambda path, **given: Answer if path == "/reset_prefix_cache" else post(path, **given)
    with_fault = conversation(mesh, directory, engine, 1)
    engine.close()
    return [as_it_is, with_fault]


class Answer:
    content = b""


def test_a_server_that_keeps_its_prefix_cache_shows_in_the_first_turn_of_new_weights(cluster, tmp_path):
    long = make_model("qwen3_tied", tmp_path / "long", max_position_embeddings=1024, **SIZES)
    ((as_it_is, with_fault),) = cluster.run(conversations_with_a_server, "megatron:d1", long, tmp_path, seconds=600)
    assert max(as_it_is) < 1e-5, as_it_is
    assert min(with_fault[1:]) > 1e-4, with_fault


BLOCK = 128
"""Tokens of a block of vLLM's prefix cache on a CPU."""


def trajectories_on_servers(mesh, directory: Path, logs: Path, picks_another: bool) -> tuple[int, float, float]:
    """Return the counts of `prefix_hits_of_turns` for an engine with one server for each rank.

    `picks_another`: fault injection, turns go to a server that does not hold their prefix.
    """
    # As a run with an environment starts its servers.
    engine = vllm_engine(mesh, directory, logs, [], arguments={"disable_log_stats": False}, verify_every=0)
    if picks_another:
        places, count = engine._router._places, len(engine._servers)
        get = places.get
        places.get = lambda of, request: None if (number := get(of, request)) is None else (number + 1) % count
    counted = prefix_hits_of_turns(mesh, engine, load_tensors(directory), BLOCK)
    engine.close()
    return counted


@pytest.mark.parametrize(("servers", "picks_another"), [(2, False), (2, True), (4, False)])
def test_servers_hold_the_prefix_of_the_turns_that_they_are_sent_until_new_weights(
    cluster, tmp_path, servers, picks_another
):
    """At least 95 % of what an earlier turn has computed is read from the cache; without the place of a trajectory, less."""
    long = make_model("qwen3_tied", tmp_path / "long", max_position_embeddings=1024, **SIZES)
    (held, between, after), *_ = cluster.run(
        trajectories_on_servers, f"megatron:d{servers}", long, tmp_path, picks_another, seconds=900
    )
    # Turns 2 to 5 follow 1, 2, 3 and 4 blocks.
    assert held == servers * TRAJECTORIES * BLOCK * (1 + 2 + 3 + 4)
    assert (between >= 0.95 * held) != picks_another, between / held
    assert after == 0, "the cache of old weights is gone"
    print(f"{between / held:.1%} of {held} prefix tokens were read from the caches of {servers} servers")
