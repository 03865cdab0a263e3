"""vLLM with SmolLM2-135M-Instruct's weights after three updates: greedy tokens and log-probs equal transformers'."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fivefold.columns import Column
from fivefold.config.learners import OptimizerConfig
from fivefold.engines.vllm.arguments import of_model
from fivefold.layout import ParallelLayout
from fivefold.models.config_json import read_config
from fivefold.types import Sampling
from tests.support.engines import complete, own_logits, requests
from tests.support.shards import shard_of_replica
from tests.support.two_steps import LENGTHS, OBJECTIVE, POLICY, whole_batch

pytestmark = [pytest.mark.published, pytest.mark.vllm]

TEXTS = ("What is the capital of France?", "Count from one to ten.", "What is forty-one plus twenty-seven?")
BOUND = 1e-4
"""Logits are near 30, so a last place is 2e-6, and 30 layers add up some ten of them."""


def trained_and_sampled(mesh, directory: Path, out: Path, prompts: list[list[int]], fault: str):
    """Greedy completions by vLLM after three optimizer steps; the trainer's weights are written to `out`."""
    from safetensors.torch import save_file

    from fivefold.engines.vllm.engine import VLLMEngine
    from fivefold.engines.weight_sync import weight_sync
    from fivefold.megatron.model import MegatronModel

    policy = replace(POLICY, optimizer=OptimizerConfig(lr=2e-5, weight_decay=0.0))
    model = MegatronModel(directory, policy, mesh, total_updates=3)
    arguments = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "seed": 0, "enforce_eager": True}
    arguments |= {"kv_cache_memory_bytes": 256 << 20, "skip_tokenizer_init": True} | of_model(read_config(directory), True)
    layout = ParallelLayout.parse("vllm:d1")
    tokenizer = SimpleNamespace(eos_token_id=2)
    engine = VLLMEngine(directory, tokenizer, layout, 0, mesh.device, arguments, verify_every=1, can_sleep=False)
    mine = whole_batch().select(shard_of_replica(mesh.ranks, range(len(LENGTHS))))
    for step in range(3):
        mine = mine.with_columns({Column.OLD_LOGPROBS: model.forward(mine)})
        model.train_step(mine, OBJECTIVE.loss)
        if not fault or step == 0:
            weight_sync(model, engine)
    save_file({name: tensor.clone() for name, tensor in model.weights()}, out / "model.safetensors", {"format": "pt"})
    return complete(engine, requests(1, Sampling(max_tokens=24, temperature=0.0), prompts)), engine.version


@pytest.mark.parametrize("fault", ["", "two syncs are skipped"])
def test_greedy_tokens_and_log_probs_after_three_updates_are_transformers(cluster, smollm2, tmp_path, fault):
    import transformers

    # transformers would round the weights to the type that config.json names.
    config = json.loads((smollm2 / "config.json").read_text()) | {"dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    prompts = [
        tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
        for text in TEXTS
    ]
    ((completions, version),) = cluster.run(trained_and_sampled, "megatron:d1", smollm2, tmp_path, prompts, fault)
    assert version == (1 if fault else 3)
    differences, greedy = [], []
    for prompt, one in zip(prompts, completions, strict=True):
        logits = own_logits(tmp_path, prompt, one.token_ids)
        taken = torch.log_softmax(logits, -1).gather(1, torch.tensor(one.token_ids)[:, None])[:, 0]
        differences.append(float((taken - torch.tensor(one.logprobs)).abs().max()))
        greedy.append(logits.argmax(-1).tolist() == one.token_ids)
    print(differences, [tokenizer.decode(one.token_ids) for one in completions])
    if fault:
        assert max(differences) > 100 * BOUND
    else:
        assert max(differences) < BOUND and all(greedy), differences
