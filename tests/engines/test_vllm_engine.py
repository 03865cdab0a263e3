"""vLLM in the trainer's ranks, against the trainer and the transformers engine. `make test` runs it with vLLM for CPUs."""

from __future__ import annotations

import gc
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fivefold.columns import Column
from fivefold.config.learners import MegatronConfig
from fivefold.engines.vllm.arguments import of_model
from fivefold.layout import ParallelLayout
from fivefold.models.config_json import read_config
from fivefold.types import Completion, Request, Sampling, TokenBatch
from tests.support.engines import OPTIONS, PROMPTS, SAMPLING, complete, expected_logprobs, named_blocks, requests
from tests.support.layout_cases import VPP2
from tests.support.shards import shard_of_replica
from tests.support.tiny_models import load_tensors, make_model
from tests.support.two_steps import LENGTHS, OBJECTIVE, POLICY, whole_batch

pytestmark = pytest.mark.vllm

SIZES = {"head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
"""vLLM's attention on CPUs has no heads of 16."""
OTHER_SIZES = {
    # Its heads are as wide as the model is.
    "qwen2": {"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 2},
    # The only sizes of latent attention that it has on CPUs are the published ones.
    "deepseek_v3": {
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "head_dim": 64,
        "num_key_value_heads": 4,
    },
}
TOKENIZER = SimpleNamespace(eos_token_id=2)
FREE = Sampling(max_tokens=16)


@pytest.fixture(scope="module")
def sized(tmp_path_factory):
    """name of a variant -> directory of the model with heads that vLLM has."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = make_model(name, tmp_path_factory.mktemp("model") / name, **(SIZES | OTHER_SIZES.get(name, {})))
        return made[name]

    return get


def vllm_engine(mesh, directory: Path, layout: str, overrides=None, **changes):
    """`own`: vLLM's arguments besides the usual."""
    from fivefold.engines.vllm.engine import VLLMEngine

    arguments = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 64, "seed": 0, "enforce_eager": True}
    arguments |= {"kv_cache_memory_bytes": 64 << 20, "skip_tokenizer_init": True} | of_model(read_config(directory), True)
    arguments |= overrides or {}
    parsed = ParallelLayout.parse(f"vllm:{layout}")
    settings = {"verify_every": 1, "can_sleep": False} | changes
    return VLLMEngine(directory, TOKENIZER, parsed, mesh.ranks.rank, mesh.device, arguments, **settings)


def difference(model, asked: list[Request], completions: list[Completion]) -> float:
    """Largest difference of the engine's log-probs to the trainer's, on every rank."""
    lengths, tokens, mask, theirs = [], [], [], []
    for request, one in zip(asked, completions, strict=True):
        lengths.append(len(request.prompt_ids) + len(one.token_ids))
        tokens += request.prompt_ids + one.token_ids
        mask += [False] * len(request.prompt_ids) + [True] * len(one.token_ids)
        theirs += one.logprobs
    batch = TokenBatch(torch.tensor(tokens), torch.tensor(mask), lengths)
    ours = model.forward(batch)[batch.loss_mask_T]
    return float((ours - torch.tensor(theirs)).abs().max())


def trained_and_sampled(mesh, directory: Path, engine_layout: str, pipeline: dict, fault: str):
    """For three optimizer steps: the largest difference of log-probs, and what was sampled."""
    from fivefold.engines.weight_sync import weight_sync
    from fivefold.megatron.model import MegatronModel

    policy = replace(POLICY, megatron=MegatronConfig(pipeline=pipeline))
    model = MegatronModel(directory, policy, mesh, total_updates=3)
    engine = vllm_engine(mesh, directory, engine_layout, verify_every=0 if fault else 1)
    mine = whole_batch().select(shard_of_replica(mesh.ranks, range(len(LENGTHS))))
    # The last prompt fills a block of the prefix cache, which has 128 tokens on a CPU.
    asked = requests(2, FREE, [*PROMPTS, [7 + i % 90 for i in range(150)]])
    sampled, differences = [], []
    for step in range(4):
        if step != 2 or fault != "a sync is skipped":
            if fault == "the prefix cache survives":
                engine._llm.reset_prefix_cache = lambda: True
            weight_sync(model, engine)
        sampled.append(complete(engine, asked))
        differences.append(difference(model, asked, sampled[-1]))
        mine = mine.with_columns({Column.OLD_LOGPROBS: model.forward(mine)})
        model.train_step(mine, OBJECTIVE.loss)
    return differences, sampled


CASES = [
    ("qwen3", "d1", "d1", {}),
    ("qwen3_tied", "t2", "d1t2", {}),
    ("llama", "d2", "d1t2", {}),
    ("qwen3_moe", "d2e2", "d2", {}),
    ("qwen3_moe", "p2", "d1t2", VPP2),
    ("deepseek_v3", "t2", "d1t2", {}),
    # Each of two key/value heads lies on two ranks.
    ("qwen3", "d2t2", "d1t4", {}),
]


@pytest.mark.parametrize(("name", "layout", "engine", "pipeline"), CASES, ids=str)
def test_after_every_step_the_engine_samples_with_the_new_weights(cluster, sized, name, layout, engine, pipeline):
    """Log-probs as the trainer's to 1e-5, a hundred last places; untrained weights would be off by a hundred times that."""
    results = cluster.run(trained_and_sampled, f"megatron:{layout}", sized(name), engine, pipeline, "")
    for differences, sampled in results:
        assert max(differences) < 1e-5, differences
        assert [one.policy_version for one in sampled[3]] == [3] * 10
        assert [one.token_ids for one in sampled[0]] != [one.token_ids for one in sampled[3]]


@pytest.mark.parametrize("fault", ["a sync is skipped", "the prefix cache survives"])
def test_old_weights_and_old_keys_are_seen(cluster, sized, fault):
    ((differences, _),) = cluster.run(trained_and_sampled, "megatron:d1", sized("qwen3"), "d1", {}, fault)
    assert max(differences) > 1e-4, differences


OBSERVATION = [6 + i % 80 for i in range(140)]
"""Longer than a block of the prefix cache, so each turn of a conversation has whole blocks that the one before computed."""


def conversation(mesh, directory: Path, engine, turns_per_update: int) -> list[float]:
    """The difference of log-probs in each of four turns of a conversation; an optimizer step follows so many turns."""
    from fivefold.engines.weight_sync import weight_sync
    from fivefold.megatron.model import MegatronModel

    model = MegatronModel(directory, POLICY, mesh, total_updates=4)
    mine = whole_batch().select(shard_of_replica(mesh.ranks, range(len(LENGTHS))))
    context, differences = [7 + i % 90 for i in range(150)], []
    for turn in range(4):
        if turn % turns_per_update == 0:
            weight_sync(model, engine)
        asked = requests(1, FREE, [context], draw=(5, turn))
        answers = complete(engine, asked)
        differences.append(difference(model, asked, answers))
        context = [*context, *answers[0].token_ids, *OBSERVATION]
        if (turn + 1) % turns_per_update == 0:
            mine = mine.with_columns({Column.OLD_LOGPROBS: model.forward(mine)})
            model.train_step(mine, OBJECTIVE.loss)
    return differences


def conversation_in_the_ranks(mesh, directory: Path, turns_per_update: int, fault: bool) -> list[float]:
    engine = vllm_engine(mesh, directory, "d1", {"max_model_len": 1024}, verify_every=0)
    if fault:
        engine._llm.reset_prefix_cache = lambda: True
    return conversation(mesh, directory, engine, turns_per_update)


@pytest.fixture(scope="module")
def long(tmp_path_factory) -> Path:
    """A model with room for four turns."""
    return make_model("qwen3", tmp_path_factory.mktemp("model") / "long", max_position_embeddings=1024, **SIZES)


def test_a_turn_after_new_weights_reads_nothing_that_old_ones_computed(cluster, long):
    (differences,) = cluster.run(conversation_in_the_ranks, "megatron:d1", long, 1, False)
    assert max(differences) < 1e-5, differences


@pytest.mark.slow
@pytest.mark.parametrize(("turns_per_update", "first"), [(1, 1), (2, 2)])
def test_a_prefix_cache_that_survives_new_weights_shows_in_their_first_turn(cluster, long, turns_per_update, first):
    """Fault injection: turns of the same weights may read what was cached, and the first turn of the next ones differs."""
    (differences,) = cluster.run(conversation_in_the_ranks, "megatron:d1", long, turns_per_update, True)
    assert max(differences[:first]) < 1e-5 and min(differences[first:]) > 1e-4, differences


def without_training(mesh, directory: Path, layout: str, calls: list[list[Request]]):
    """Completions of each call by vLLM with the weights of the files, and by the transformers engine."""
    from fivefold.engines.transformers import TransformersEngine

    engine = vllm_engine(mesh, directory, layout)
    other = TransformersEngine(directory, TOKENIZER, mesh.device, torch.float32, 64)
    for sampler in (engine, other):
        sampler.update_weights(iter(load_tensors(directory).items()), 0)
    return [(complete(engine, asked), complete(other, asked)) for asked in calls]


@pytest.mark.parametrize("name", ["qwen3", "qwen3_tied", "qwen3_moe", "glm4_moe", "mixtral", "qwen2", "deepseek_v3"])
def test_greedy_tokens_equal_the_transformers_engine_s(cluster, sized, name):
    asked = requests(1, Sampling(max_tokens=24, temperature=0.0))
    (((completions, other),),) = cluster.run(without_training, "megatron:d1", sized(name), "d1", [asked])
    assert [one.token_ids for one in completions] == [one.token_ids for one in other]
    for one, same in zip(completions, other, strict=True):
        assert one.logprobs == pytest.approx(same.logprobs, abs=1e-5)
        assert one.finish_reason == same.finish_reason


def test_log_probs_are_those_of_the_distribution_that_was_drawn_from(cluster, sized):
    """Of every option; greedy ones, stop tokens and the end of a response as the transformers engine has them."""
    ends = replace(SAMPLING, stop_token_ids=(8, 9), min_tokens=3, logit_bias=((2, 3.0),))
    calls = [requests(3, replace(SAMPLING, **given)) for given in OPTIONS.values()]
    calls += [requests(8, ends), requests(8, replace(ends, ignore_eos=True))]
    (results,) = cluster.run(without_training, "megatron:d1", sized("qwen3"), "d1", calls)
    for asked, (completions, _) in zip(calls, results, strict=True):
        for request, one in zip(asked, completions, strict=True):
            assert one.logprobs == pytest.approx(expected_logprobs(sized("qwen3"), request, one, 2), abs=5e-5)
            stops = {8, 9} if request.sampling.ignore_eos else {2, *request.sampling.stop_token_ids}
            assert (one.token_ids[-1] in stops) == (one.finish_reason == "stop")
            assert not stops & set(one.token_ids[:-1])
            assert one.finish_reason == "stop" or len(one.token_ids) == 24


def drawn(mesh, directory: Path):
    engine = vllm_engine(mesh, directory, "d1")
    engine.update_weights(iter(load_tensors(directory).items()), 0)
    asked = requests(4, FREE)
    alone = [complete(engine, [request])[0] for request in asked]
    stopped = []
    for completion in engine.generate(requests(4, replace(FREE, logit_bias=((2, 2.0),)))):
        stopped.append(completion)
        engine.abort()
    return complete(engine, asked), complete(engine, asked[::-1])[::-1], alone, stopped, complete(engine, asked)


def test_what_is_drawn_depends_on_the_key_alone_and_abort_leaves_nothing_over(cluster, sized):
    ((whole, backwards, alone, stopped, again),) = cluster.run(drawn, "megatron:d1", sized("qwen3"))
    assert whole == backwards == alone == again
    assert len({tuple(one.token_ids) for one in whole}) == len(whole)
    aborted = [one for one in stopped if one.finish_reason == "abort"]
    assert len(stopped) == 16 and len(aborted) > 8
    assert all(len(one.token_ids) == len(one.logprobs) < 16 for one in aborted)


def cached(mesh, directory: Path, prompt: list[int]) -> list[int]:
    """Tokens of the prompt that each request of a group found in the prefix cache."""
    engine = vllm_engine(mesh, directory, "d1")
    engine.update_weights(iter(load_tensors(directory).items()), 0)
    inner = engine._llm.llm_engine
    numbers_cached: list[int] = []
    step = inner.step

    def watched():
        outputs = step()
        numbers_cached.extend(output.num_cached_tokens for output in outputs)
        return outputs

    inner.step = watched
    complete(engine, requests(4, Sampling(max_tokens=2), [prompt]))
    return sorted(numbers_cached)


def test_the_prompt_of_a_group_is_computed_once(cluster, sized):
    """Blocks have 128 tokens on a CPU; the second of a prompt of 200 is each request's own."""
    prompt = [5 + i % 90 for i in range(200)]
    assert cluster.run(cached, "megatron:d1", sized("qwen3"), prompt) == [[0, 128, 128, 128]]


def fed(mesh, directory: Path, fault: str):
    """The error of a sync in which something goes wrong, and the log-probs after the next one."""
    from fivefold.engines.vllm import extension

    engine, given = vllm_engine(mesh, directory, "d1"), load_tensors(directory)
    engine.update_weights(iter(given.items()), 0)
    before = complete(engine, requests(1, FREE))
    held = extension.held_weights

    def one_bit_off(model):
        for name, tensor in held(model):
            changed = tensor.clone()
            if name.endswith("1.self_attn.qkv_proj.weight"):
                changed[3, 5] = torch.nextafter(changed[3, 5], torch.tensor(9.0))
            yield name, changed

    faulty = dict(given)
    if fault == "a tensor is left out":
        del faulty["model.layers.1.mlp.up_proj.weight"]
    elif fault == "one bit is off":
        extension.held_weights = one_bit_off
    elif fault == "the source fails":
        faulty = {}
    try:
        engine.update_weights(iter(faulty.items()) if faulty else failing(given), 1)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    extension.held_weights = held
    engine.update_weights(iter(given.items()), 2)
    return message, [replace(one, policy_version=0) for one in complete(engine, requests(1, FREE))] == before


def failing(given):
    yield from list(given.items())[:5]
    raise OSError("the other end is gone")


FAULTS = {
    "a tensor is left out": r"RunError: .* 1 of \d+ tensors did not come, the first: \['model.layers.1.mlp.up_proj.weight'\]",
    "one bit is off": r"RunError: .* 1 of \d+ parameters are not what was sent.*layers.1.self_attn.qkv_proj",
    "the source fails": "OSError: the other end is gone",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_weights_that_differ_from_the_policy_are_refused_and_the_next_ones_are_exact(cluster, sized, fault):
    ((message, exact),) = cluster.run(fed, "megatron:d1", sized("qwen3"), fault)
    assert re.match(FAULTS[fault], message, re.DOTALL), message
    assert exact


def closed(mesh, directory: Path):
    engine = vllm_engine(mesh, directory, f"d1t{mesh.layout.world_size}")
    blocks, kept = named_blocks([os.getpid()]), gc.get_freeze_count() > 100_000
    engine.close()
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    return float(total), sorted(block.name for block in blocks if block.exists()), kept, gc.get_freeze_count()


def test_closing_the_engine_keeps_the_trainer_s_groups_and_frees_its_shared_memory(cluster, sized):
    assert cluster.run(closed, "megatron:d2", sized("qwen3")) == [(2.0, [], True, 0)] * 2


def test_scales_of_quantized_weights_are_awaited_from_no_one():
    """vLLM makes them of the weights as they come; it restores a layer to what its files have before."""
    from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

    from fivefold.engines.vllm.extension import WeightReceiver

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    record_metadata_for_reloading(model)
    for layer in model:
        layer.weight = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)
        layer.weight_scale_inv = torch.nn.Parameter(torch.ones(1, 1), requires_grad=False)

    class Receiver(WeightReceiver):
        device = torch.device("cpu")
        vllm_config = SimpleNamespace(model_config=SimpleNamespace(hf_config=SimpleNamespace(tie_word_embeddings=False)))

        def get_model(self):
            return model

    receiver = Receiver()
    receiver.begin_weights(verify=False)
    assert set(receiver._names) == {"0.weight", "0.bias", "1.weight", "1.bias"}
