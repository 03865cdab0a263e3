"""SGLang as servers, on a CPU with stand-ins for its compiled parts (tests/support/sglang_cpu): `make test-sglang`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from fivefold.engines.sglang.arguments import why_responses_must_end
from fivefold.interfaces import Pressure
from fivefold.types import Completion, Request, Sampling
from tests.engines.test_vllm_engine import OTHER_SIZES, SIZES
from tests.support import whole_runs
from tests.support.engines import SAMPLING, complete, named_blocks, own_logits, requests
from tests.support.servers import (
    GREEDY,
    TRAJECTORIES,
    check_what_was_sampled_midway,
    family_of,
    kill_api,
    midway,
    one_short_among_endless,
    prefix_hits_of_turns,
    refreshed,
    server_engine,
    three_steps,
    undisturbed,
)
from tests.support.tiny_models import load_tensors, make_model

pytestmark = pytest.mark.sglang

LONG = Sampling(max_tokens=30, temperature=0.0, ignore_eos=True)
CUT = {"top_k": 9, "top_p": 0.9, "min_p": 0.05, "logit_bias": ((7, 2.0),)}
ON_CPU = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "sleep_on_idle": True,
}
"""What needs no compiled kernel."""
ARGUMENTS = {"dtype": "float32", "context_length": 256, "max_running_requests": 64, "max_total_tokens": 16384}


def server_of(directory: Path, log: Path, tensor_parallel: int, **more):
    from fivefold.engines.sglang.probe import answers
    from fivefold.engines.sglang.serve import server_process

    arguments = {"model_path": str(directory), "tp_size": tensor_parallel, **ARGUMENTS, **ON_CPU, **more}
    return server_process(arguments, torch.device("cpu"), tensor_parallel, log, answers)


def sglang_engine(
    mesh, directory: Path, logs: Path, messages: list[str], tensor_parallel: int = 1, can_sleep: bool = False, **arguments
):
    from fivefold.engines.sglang.client import SGLangServer

    rank = mesh.ranks.rank
    processes = (
        {rank // tensor_parallel: server_of(directory, logs / f"server-{rank}.log", tensor_parallel, **arguments)}
        if rank % tensor_parallel == 0
        else {}
    )
    return server_engine(mesh, directory, SGLangServer, processes, messages, tensor_parallel, can_sleep=can_sleep)


def one_server(mesh, directory: Path, logs: Path):
    """A model of another family: greedy tokens, and those of changed weights."""
    engine, tensors = (
        sglang_engine(mesh, directory, logs, [], tensor_parallel=mesh.ranks.layout.world_size),
        load_tensors(directory),
    )
    asked, calls = requests(2, GREEDY), []
    for factor in (1.0, 1.01):
        weights = {name: tensor * factor for name, tensor in tensors.items()}
        engine.update_weights(iter(weights.items()), 0)
        calls.append((complete(engine, asked), undisturbed(mesh, directory, weights, [asked])[0]))
    engine.close()
    return calls


def two_servers(mesh, directory: Path, logs: Path):
    """Everything that is tried on the same two servers, by name."""
    messages: list[str] = []
    engine = sglang_engine(mesh, directory, logs, messages)
    results: dict[str, object] = {"said": messages, **three_steps(mesh, directory, engine)}
    rank, tensors = mesh.ranks.rank, load_tensors(directory)
    cut = requests(1, replace(SAMPLING, **CUT))
    results["cut"] = list(zip(cut, complete(engine, cut), strict=True))

    # Of every length, so that many run when the first has ended.
    mine_to_ask = [
        replace(one, sampling=replace(LONG, max_tokens=LONG.max_tokens + 3 * one.id))
        for one in requests(4, LONG, [[5 + i + rank, 6, 7 + i] for i in range(12)])
    ]
    undisturbed_completions = complete(engine, mine_to_ask)
    arrived: dict[int, Completion] = {}
    for completion in engine.generate(mine_to_ask):
        assert completion.request_id not in arrived
        if not arrived and rank == 1:
            kill_api(engine)
        arrived[completion.request_id] = completion
    tokens = [one.token_ids for one in undisturbed_completions]
    results["one killed"] = [arrived[one.id].token_ids for one in mine_to_ask] == tokens, sorted(engine._lost)
    refreshed(engine, tensors)
    results["restarted"] = [one.token_ids for one in complete(engine, mine_to_ask)] == tokens, sorted(engine._lost)

    stopped = []
    for completion in engine.generate(one_short_among_endless(mine_to_ask)):
        stopped.append(completion)
        if len(stopped) == 1:
            engine.abort()
    results["aborted"] = stopped
    for name, wrong in {
        "left out": {name: tensor for name, tensor in tensors.items() if "1.mlp.up_proj" not in name},
        "unknown": {**tensors, "model.layers.7.nothing.weight": torch.zeros(3)},
    }.items():
        try:
            engine.update_weights(iter(wrong.items()), 4)
        except RuntimeError as error:
            results[name] = str(error)
    engine.update_weights(iter(tensors.items()), 3)
    results["after"] = [one.token_ids for one in complete(engine, mine_to_ask)] == tokens
    processes = family_of(engine)
    blocks = named_blocks(process.pid for process in processes)
    engine.close()
    mesh.ranks.barrier()
    results["left"] = [
        process.pid for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    ] + [block for block in blocks if block.exists()]
    return results


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model("qwen3_tied", tmp_path_factory.mktemp("model") / "qwen3_tied", **SIZES)


@pytest.fixture(scope="module")
def both(cluster, model, tmp_path_factory) -> list[dict]:
    return cluster.run(two_servers, "megatron:d2", model, tmp_path_factory.mktemp("logs"), seconds=900)


def test_after_every_step_the_servers_sample_with_the_new_weights(both):
    for results in both:
        assert max(results["differences"]) < 1e-5, results["differences"]
        assert [one.policy_version for one in results["drawn"][3]] == [3] * 10
        assert [one.token_ids for one in results["drawn"][0]] != [one.token_ids for one in results["drawn"][3]]


def assert_equal_tokens(served: list[Completion], other: list[Completion]) -> None:
    assert [one.token_ids for one in served] == [one.token_ids for one in other]
    for one, same in zip(served, other, strict=True):
        assert one.logprobs == pytest.approx(same.logprobs, abs=1e-5)
        assert one.finish_reason == same.finish_reason


def test_greedy_tokens_of_servers_equal_the_transformers_engine_s(both):
    for results in both:
        assert_equal_tokens(*results["greedy"])


@pytest.mark.parametrize(
    ("family", "layout"), [("qwen3", "megatron:t2"), ("qwen2", "megatron:d1"), ("llama", "megatron:d1")]
)
def test_other_families_and_tensor_parallel_ranks_sample_the_same_tokens(cluster, tmp_path, family, layout):
    directory = make_model(family, tmp_path / family, **OTHER_SIZES.get(family, SIZES))
    for calls in cluster.run(one_server, layout, directory, tmp_path, seconds=900):
        for served, other in calls:
            assert_equal_tokens(served, other)


def cut_logprobs(model: Path, request: Request, one: Completion) -> list[float]:
    """As SGLang cuts: top_p and min_p of the whole distribution, not of what top_k has left."""
    sampling, logits_TV = request.sampling, own_logits(model, request.prompt_ids, one.token_ids)
    for token, bias in sampling.logit_bias:
        logits_TV[:, token] += bias
    probs_TV, order_TV = (logits_TV / sampling.temperature).softmax(-1).sort(-1, descending=True)
    is_kept_TV = (probs_TV.cumsum(-1) - probs_TV <= sampling.top_p) & (probs_TV >= probs_TV[:, :1] * sampling.min_p)
    is_kept_TV[:, sampling.top_k :] = False
    kept_TV = probs_TV * is_kept_TV
    logprobs_TV = (kept_TV / kept_TV.sum(-1, keepdim=True)).log()
    return logprobs_TV[order_TV == torch.tensor(one.token_ids)[:, None]].tolist()


def test_log_probs_are_those_of_the_distribution_that_was_drawn_from(both, model):
    for results in both:
        for request, one in results["cut"]:
            assert one.logprobs == pytest.approx(cut_logprobs(model, request, one), abs=5e-5)


def test_a_server_killed_while_it_samples_costs_no_sample_and_counts_none_twice(both):
    for results in both:
        assert results["one killed"] == (True, [1])
        assert results["restarted"] == (True, [])


def test_abort_gives_what_there_is(both):
    for results in both:
        stopped = results["aborted"]
        assert sorted(one.request_id for one in stopped) == list(range(48))
        aborted = [one for one in stopped if one.finish_reason == "abort"]
        # On a busy machine the context may be full before the word arrives.
        assert aborted and {one.finish_reason for one in stopped if one.request_id != 0} <= {"abort", "length"}
        assert all(len(one.token_ids) == len(one.logprobs) for one in stopped)
        assert all(len(one.token_ids) < 240 for one in aborted)


def test_weights_that_are_not_whole_or_not_the_model_s_are_refused(both):
    """SGLang itself takes both without a word."""
    for results in both:
        assert "1 of" in results["left out"] and "up_proj" in results["left out"]
        assert "1 tensors have no parameter to be compared with" in results["unknown"]
        assert results["after"]


def test_closing_an_engine_of_servers_ends_them(both):
    assert [results["left"] for results in both] == [[], []]


def slept(mesh, directory: Path, logs: Path):
    """The tokens before a sleep, after it, and after the server was killed and the engine slept once more."""
    messages: list[str] = []
    engine, tensors = sglang_engine(mesh, directory, logs, messages, can_sleep=True), load_tensors(directory)
    asked, calls = requests(2, LONG), []
    for is_killed in (False, False, True):
        if is_killed:
            kill_api(engine)
            complete(engine, asked)
        engine.sleep()
        refreshed(engine, tensors)
        calls.append([one.token_ids for one in complete(engine, asked)])
    engine.close()
    return calls, engine.restarts, messages


def test_a_server_that_is_killed_before_its_engine_sleeps_starts_once_more(cluster, model, tmp_path):
    ((calls, restarts, messages),) = cluster.run(slept, "megatron:d1", model, tmp_path, seconds=900)
    assert calls[0] == calls[1] == calls[2] != []
    assert restarts == 1, messages


def sampled_midway(mesh, directory: Path, logs: Path):
    return midway(mesh, directory, sglang_engine(mesh, directory, logs, []))


def test_requests_continue_with_weights_that_change_in_the_middle(cluster, model, tmp_path):
    if why_responses_must_end() is not None:
        # `check` refuses such a run; servers that run already can be of such a release.
        with pytest.raises(
            RuntimeError, match=r"keeps keys of the old weights: requests are running \(before 0\.5\.21 SGLang"
        ):
            cluster.run(sampled_midway, "megatron:d1", model, tmp_path, seconds=900)
        return
    ((completions, under),) = cluster.run(sampled_midway, "megatron:d1", model, tmp_path, seconds=900)
    check_what_was_sampled_midway(completions, under)


AT_ONCE, CAPACITY = 4, 8192
"""Requests that the server samples at once, and tokens that its cache holds."""


def under_pressure(mesh, directory: Path, logs: Path):
    """Return what a router reads of an SGLang server: without requests, with three times as many as it samples at once, and
    after them; then its prefix hits, and what it reads once the server has ended."""
    arguments = {"context_length": 1024, "max_running_requests": AT_ONCE, "max_total_tokens": CAPACITY}
    engine = sglang_engine(mesh, directory, logs, [], **arguments)
    tensors = load_tensors(directory)
    engine.update_weights(iter(tensors.items()), 0)
    (server,) = engine._servers
    idle, stream, readings = server.pressure(), engine.stream(), []
    endless = replace(LONG, max_tokens=400)
    stream.submit([Request(number, [5 + number] * 100, endless, 0, number) for number in range(3 * AT_ONCE)])
    while stream.pending:
        list(stream.arrived(0.1))
        if (reading := stream.pressure()) is not None:
            readings.append(reading)
    stream.close()
    idle_again, counted = server.pressure(), prefix_hits_of_turns(mesh, engine, tensors, 1)
    engine.close()
    return idle, readings, idle_again, counted, server.pressure()


def test_servers_report_how_full_they_are_and_which_prefixes_they_held(cluster, tmp_path):
    long = make_model("qwen3_tied", tmp_path / "long", max_position_embeddings=1024, **SIZES)
    ((idle, readings, idle_again, (held, between, after), ended),) = cluster.run(
        under_pressure, "megatron:d1", long, tmp_path, seconds=900
    )
    assert idle == Pressure(0.0, 0)
    assert max(reading.queued for reading in readings) == 2 * AT_ONCE
    most = AT_ONCE * 500 / CAPACITY
    assert 0.5 * most < max(reading.kv_used for reading in readings) <= most
    assert (idle_again.kv_used, idle_again.queued, idle_again.prefix_tokens) == (0.0, 0, 3 * AT_ONCE * 100)
    # Turns 2 to 5 follow contexts whose last token was sampled and not read.
    assert held == TRAJECTORIES * (165 + 321 + 477 + 633)
    assert between >= 0.95 * held and after == 0, (between / held, after)
    assert ended is None


RUN = """
policy: {backend: "megatron:d2", tokens_per_micro_batch: 512}
engine: {backend: "sglang:d2", sglang: $ON_CPU}
algorithm: {name: grpo, group_size: 4}
data: {prompts_per_step: 8, max_response_tokens: 12}
trainer: {steps: 3, device: cpu}
"""


def test_a_whole_run_samples_with_sglang_what_the_trainer_computes(tmp_path):
    whole_runs.make_model(tmp_path, hidden=64, heads=2)
    whole_runs.write_run(tmp_path, RUN.replace("$ON_CPU", json.dumps(ON_CPU)))
    rows, _ = whole_runs.train(tmp_path, "base")
    assert [row["step"] for row in rows][-1] == 3
    assert all(row["rollout/logprob_diff_max"] < 1e-4 for row in rows if row["step"])
