"""Work that vLLM's host does not do: a launch for each draw, looking for room that is there, detokenizing, statistics."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fivefold.types import Sampling
from tests.engines.test_engine_processes import config
from tests.engines.test_vllm_engine import SIZES, TOKENIZER
from tests.support.engines import PROMPTS, complete, requests
from tests.support.servers import one_short_among_endless, server_engine
from tests.support.tiny_models import load_tensors, make_model

pytestmark = pytest.mark.vllm

LARGE = 256
"""Tokens of a cache block; vLLM's own choice on a CPU is 128."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model("qwen3", tmp_path_factory.mktemp("model") / "qwen3", **{**SIZES, "max_position_embeddings": 4096})


def in_the_ranks(mesh, directory: Path, run_dir: Path, vllm_options: dict):
    """What the engine of a run was told, and what it samples; `vllm_options`: engine.vllm."""
    from fivefold.build_engine import build_engine

    run = config(directory, run_dir, 1)
    run = replace(run, engine=replace(run.engine, vllm=vllm_options))
    engine = build_engine(run, directory, TOKENIZER, mesh.ranks, mesh.device, lambda line: None)
    engine.update_weights(iter(load_tensors(directory).items()), 0)
    inner = engine._llm.llm_engine
    kinds = set()
    # The last prompt fills several blocks.
    asked = requests(2, Sampling(max_tokens=12), [*PROMPTS, [7 + i % 90 for i in range(150)]])
    completions = {}
    for one in engine.generate(one_short_among_endless(asked)):
        kinds |= {type(state.detokenizer).__name__ for state in inner.output_processor.request_states.values()}
        completions[one.request_id] = one.token_ids[:12], one.logprobs[:12]
        if len(completions) == 1:
            engine.abort()
    drawn = [(one.token_ids, one.logprobs) for one in complete(engine, asked)]
    scheduler, worker = inner.engine_core.engine_core.scheduler, inner.model_executor.driver_worker.worker

    facts = {"block": inner.vllm_config.cache_config.block_size, "statistics": inner.log_stats, "detokenizers": kinds}
    facts["draws"] = type(worker.model_runner.sampler.topk_topp_sampler.forward).__name__
    facts["slots"] = type(scheduler.kv_cache_manager._slots_at_hand).__name__
    engine.close()
    return facts, drawn


def test_in_the_ranks_nothing_is_detokenized_or_counted_and_blocks_are_as_asked(cluster, model, tmp_path):
    """Other blocks sample the same tokens, with log-probs that are as close as float32 is."""
    ((usual, drawn),) = cluster.run(in_the_ranks, "megatron:d1", model, tmp_path, {})
    ((large, same),) = cluster.run(in_the_ranks, "megatron:d1", model, tmp_path, {"block_size": LARGE})
    assert usual["block"] != large["block"] == LARGE
    for facts in (usual, large):
        assert facts["statistics"] is False and facts["detokenizers"] == {"IncrementalDetokenizer"}
        assert facts["draws"] == "KeyedSampler" and facts["slots"] == "SlotsAtHand"
    assert [tokens for tokens, _ in same] == [tokens for tokens, _ in drawn]
    for (_, one), (_, other) in zip(same, drawn, strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def test_vllms_sampler_draws_as_we_tell_it_and_hands_over_log_probs(monkeypatch):
    """vLLM calls our sampler, and on a CPU its own loop still draws the tokens."""
    from vllm.v1.sample.sampler import Sampler

    from fivefold.engines.vllm import draws

    def drawn(sampler) -> torch.Tensor:
        generators = {row: torch.Generator().manual_seed(row) for row in range(40)}
        tokens, _ = sampler.topk_topp_sampler(logits.clone(), generators, None, torch.full((40,), 0.9))
        return tokens

    logits, asked = torch.randn(40, 50), []
    by_vllm = drawn(Sampler("processed_logprobs"))
    runner = SimpleNamespace(sampler=Sampler("processed_logprobs"), speculative_config=None)
    first = draws.keyed_sampler(runner, 0)
    assert draws.keyed_sampler(runner, 0) is first, "once is enough"
    monkeypatch.setattr(draws, "serve", lambda probs: asked.append(probs.shape))
    tokens = drawn(runner.sampler)
    assert torch.equal(tokens, by_vllm) and asked == [(40, 50)]
    (same, bits), left = first.take(), first.take()
    probs = logits.softmax(-1)
    _, wanted = Sampler("processed_logprobs").topk_topp_sampler(logits.clone(), {}, None, torch.full((40,), 0.9))
    assert torch.equal(same.long(), tokens.long()) and left is None
    assert torch.equal(bits.view(torch.float32), wanted.gather(1, tokens.long()[:, None])[:, 0])
    assert (bits.view(torch.float32) > probs.gather(1, tokens.long()[:, None])[:, 0].log()).any(), "top-p is in them"
    for other in (SimpleNamespace(sampler=object()), SimpleNamespace(sampler=runner.sampler, speculative_config=object())):
        assert draws.keyed_sampler(other, 0) is None


def in_a_small_cache(mesh, directory: Path, run_dir: Path, is_checked: bool):
    """What requests sample that fill a cache until some are preempted, and how many of vLLM's calls for slots needed none.

    `is_checked`: vLLM itself allocates, and each call that would have been left out is compared with what it did.
    """
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    from fivefold.build_engine import build_engine
    from fivefold.engines.vllm.slots import SlotsAtHand, at_hand

    counts = dict.fromkeys(("calls", "left out", "vLLM's own", "preempted", "wrong"), 0)
    vllms_own = KVCacheManager.allocate_slots

    def state(manager, blocks, name: str) -> tuple:
        held = [(block.block_id, block.ref_cnt, block.block_hash) for block in blocks.req_to_blocks.get(name, ())]
        return held, blocks.num_cached_block.get(name), manager.block_pool.get_num_free_blocks()

    def own(self, request, tokens, *arguments, **named):
        counts["vLLM's own"] += 1
        return vllms_own(self, request, tokens, *arguments, **named)

    def checked(self, request, tokens, *arguments, **named):
        slots, (blocks,) = SlotsAtHand.of(self), self.coordinator.single_type_managers
        # Waiting requests have further arguments.
        left_out = set(named) <= {"num_lookahead_tokens"} and slots.suffice(request, tokens)
        before = state(self, blocks, request.request_id)
        result = vllms_own(self, request, tokens, *arguments, **named)
        counts["left out"] += left_out
        after = state(self, blocks, request.request_id)
        counts["wrong"] += left_out and (result is not slots.none or after != before)
        return result

    shown = checked if is_checked else at_hand(own)

    def counted(self, request, *arguments, **named):
        counts["calls"] += 1
        counts["preempted"] = max(counts["preempted"], request.num_preemptions)
        return shown(self, request, *arguments, **named)

    counted.vllms_own = vllms_own
    KVCacheManager.allocate_slots = counted
    run = config(directory, run_dir, 1)
    run = replace(
        run, engine=replace(run.engine, vllm={"block_size": 32, "num_gpu_blocks_override": 40, "max_num_seqs": 32})
    )
    engine = build_engine(run, directory, TOKENIZER, mesh.ranks, mesh.device, lambda line: None)
    engine.update_weights(iter(load_tensors(directory).items()), 0)
    # Some begin with the same blocks, some end where a block ends.
    prompts = [[7 + i % 90 for i in range(length)] for length in (1, 5, 31, 32, 33, 63, 64, 65, 95, 96, 100)]
    drawn = [(one.token_ids, one.logprobs) for one in complete(engine, requests(3, Sampling(max_tokens=70), prompts))]
    engine.close()
    return drawn, counts


def test_a_request_that_has_room_is_left_as_vllm_leaves_it(cluster, model, tmp_path):
    """Every call for slots that is left out gives what vLLM gives, and changes nothing; preempted requests are among them."""
    ((drawn, counts),) = cluster.run(in_a_small_cache, "megatron:d1", model, tmp_path, False)
    ((wanted, checked),) = cluster.run(in_a_small_cache, "megatron:d1", model, tmp_path, True)
    assert checked["wrong"] == 0 and checked["preempted"] > 0 and checked["left out"] > 0.8 * checked["calls"]
    assert counts["vLLM's own"] == counts["calls"] - checked["left out"] and counts["calls"] == checked["calls"]
    assert drawn == wanted


def test_the_schedulers_of_servers_look_for_room_in_the_same_way():
    """vLLM spawns the process of a server's scheduler, which runs the program's module again under this name."""
    program = (
        "import runpy; runpy.run_module('fivefold.engines.vllm.serve', run_name='__mp_main__')\n"
        "from vllm.v1.core.kv_cache_manager import KVCacheManager\n"
        "print(callable(KVCacheManager.allocate_slots.vllms_own))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["True"], done.stderr


def as_a_server(mesh, directory: Path, log: Path, options: dict):
    """What a server says of itself before, while and after it samples for a run; `options`: vLLM's arguments."""
    from fivefold.engines.servers.http import ask
    from fivefold.engines.vllm.arguments import TAKE
    from fivefold.engines.vllm.client import VLLMServer
    from fivefold.engines.vllm.probe import answers
    from fivefold.engines.vllm.serve import server_process

    arguments = {"model": str(directory), "dtype": "float32", "max_model_len": 4096, "max_num_seqs": 64, "seed": 0}
    arguments |= {"kv_cache_memory_bytes": 64 << 20, "skip_tokenizer_init": True, **options}
    processes = {0: server_process(arguments, torch.device("cpu"), 1, log, answers)}
    engine = server_engine(mesh, directory, VLLMServer, processes, [])
    (server,) = engine._servers
    results: dict[str, object] = {"before": server.progress()}
    engine.update_weights(iter(load_tensors(directory).items()), 0)
    asked = requests(2)
    results["sampled"] = sum(len(one.token_ids) for one in complete(engine, asked))
    results["after"] = server.progress()
    during, lengths = [], []
    for one in engine.generate(one_short_among_endless(asked, 4000)):
        lengths.append(len(one.token_ids))
        if not during:
            for _ in range(3):
                during.append(server.progress())
                time.sleep(0.3)
            engine.abort()
    results["during"] = during
    results["statistics"] = "vllm:generation_tokens_total" in ask(server.address, "GET", "/metrics").text
    run = server._run
    scanned = ask(server.address, "POST", TAKE, {"run": run}).json()["scanned"]
    results["scanned"] = [scanned, *server._call("take", run)]
    engine.close()
    return results


@pytest.mark.slow
def test_a_server_counts_tokens_itself_without_statistics_and_freezes_what_it_holds(cluster, model, tmp_path):
    ((results,),) = [cluster.run(as_a_server, "megatron:d1", model, tmp_path / "log", {})]
    assert results["statistics"] is False
    assert results["before"] == 0 and results["after"] == results["sampled"] > 0
    first, *_, last = results["during"]
    assert results["after"] < first < last, "the number grows while no response ends"
    assert len(results["scanned"]) == 2 and max(results["scanned"]) < 200, results["scanned"]


@pytest.mark.slow
def test_a_user_may_keep_a_server_s_statistics(cluster, model, tmp_path):
    ((results,),) = [cluster.run(as_a_server, "megatron:d1", model, tmp_path / "log", {"disable_log_stats": False})]
    assert results["statistics"] is True and results["after"] == results["sampled"]
