"""vLLM in the trainer's ranks, against the trainer and the transformers engine. `make test` runs it with vLLM for CPUs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fivefold.config.schema import MegatronConfig
from fivefold.engines.sampling import request_seed
from fivefold.layout import ParallelLayout
from fivefold.types import Completion, Request, Sampling, TokenBatch
from tests.support.layout_cases import VPP2
from tests.support.tiny_models import make_model
from tests.support.two_steps import LENGTHS, OBJECTIVE, POLICY, whole_batch

pytestmark = pytest.mark.vllm

SIZES = {"head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
"""vLLM's attention on CPUs has no heads of 16."""
PROMPTS = [list(range(5, 5 + n)) for n in (3, 9, 1, 5)]
TOKENIZER = SimpleNamespace(eos_token_id=2)
FREE = Sampling(max_tokens=16)


@pytest.fixture(scope="module")
def sized(tmp_path_factory):
    """name of a variant -> directory of the model with heads that vLLM has."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = make_model(name, tmp_path_factory.mktemp("model") / name, **SIZES)
        return made[name]

    return get


def requests(count: int, sampling: Sampling, prompts=PROMPTS) -> list[Request]:
    return [
        Request(i * count + k, prompt, sampling, request_seed((5, i, k)))
        for i, prompt in enumerate(prompts)
        for k in range(count)
    ]


def vllm_engine(mesh, directory: Path, layout: str, **changes):
    from fivefold.engines.vllm.engine import VLLMEngine

    arguments = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 64, "seed": 0, "enforce_eager": True}
    arguments |= {"kv_cache_memory_bytes": 64 << 20, "skip_tokenizer_init": True}
    parsed = ParallelLayout.parse(f"vllm:{layout}")
    settings = {"verify_every": 1, "can_sleep": False} | changes
    return VLLMEngine(directory, TOKENIZER, parsed, mesh.ranks.rank, mesh.device, arguments, **settings)


def complete(engine, asked: list[Request]) -> list[Completion]:
    found = {completion.request_id: completion for completion in engine.generate(asked)}
    assert len(found) == len(asked)
    return [found[request.id] for request in asked]


def difference(model, asked: list[Request], found: list[Completion]) -> float:
    """Largest difference of the engine's log-probs to the trainer's, on every rank."""
    lengths = [len(request.prompt_ids) + len(one.token_ids) for request, one in zip(asked, found, strict=True)]
    tokens, mask, theirs = [], [], []
    for request, one in zip(asked, found, strict=True):
        tokens += request.prompt_ids + one.token_ids
        mask += [False] * len(request.prompt_ids) + [True] * len(one.token_ids)
        theirs += one.logprobs
    batch = TokenBatch(torch.tensor(tokens), torch.tensor(mask), lengths)
    own = model.forward(batch)[batch.loss_mask_T]
    return float((own - torch.tensor(theirs)).abs().max())


def trained_and_sampled(mesh, directory: Path, engine_layout: str, pipeline: dict, fault: str):
    """For three optimizer steps: the largest difference of log-probs, and what was sampled."""
    from fivefold.engines.weight_sync import weight_sync
    from fivefold.megatron.model import MegatronModel

    policy = replace(POLICY, megatron=MegatronConfig(pipeline=pipeline))
    model = MegatronModel(directory, policy, mesh, total_updates=3)
    engine = vllm_engine(mesh, directory, engine_layout, verify_every=0 if fault else 1)
    mine = whole_batch().select(mesh.ranks.shard_of_replica(range(len(LENGTHS))))
    # The last prompt fills a block of the prefix cache, which has 128 tokens on a CPU.
    asked = requests(2, FREE, [*PROMPTS, [7 + i % 90 for i in range(150)]])
    found, differences = [], []
    for step in range(4):
        if step != 2 or fault != "a sync is skipped":
            if fault == "the prefix cache survives":
                engine._llm.reset_prefix_cache = lambda: True
            weight_sync(model, engine)
        found.append(complete(engine, asked))
        differences.append(difference(model, asked, found[-1]))
        mine = replace(mine, old_logprobs_T=model.forward(mine))
        model.train_step(mine, OBJECTIVE.loss)
    return differences, found


CASES = [
    ("qwen3", "d1", "d1", {}),
    ("qwen3_tied", "t2", "d1t2", {}),
    ("llama", "d2", "d1t2", {}),
    ("qwen3_moe", "d2e2", "d2", {}),
    ("qwen3_moe", "p2", "d1t2", VPP2),
]


@pytest.mark.parametrize(("name", "layout", "engine", "pipeline"), CASES, ids=str)
def test_after_every_step_the_engine_samples_with_the_new_weights(cluster, sized, name, layout, engine, pipeline):
    """Log-probs as the trainer's to 1e-5, a hundred last places; untrained weights would be off by a hundred times that."""
    results = cluster.run(trained_and_sampled, f"megatron:{layout}", sized(name), engine, pipeline, "")
    for differences, found in results:
        assert max(differences) < 1e-5, differences
        assert [one.policy_version for one in found[3]] == [3] * 10
        assert [one.token_ids for one in found[0]] != [one.token_ids for one in found[3]]


@pytest.mark.parametrize("fault", ["a sync is skipped", "the prefix cache survives"])
def test_old_weights_and_old_keys_are_seen(cluster, sized, fault):
    ((differences, _),) = cluster.run(trained_and_sampled, "megatron:d1", sized("qwen3"), "d1", {}, fault)
    assert max(differences) > 1e-4, differences
