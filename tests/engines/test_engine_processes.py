"""Several of vLLM's processes in one replica: the samples of one process, the same weights in all of them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml

from fivefold.config import RunConfig
from fivefold.types import Sampling
from tests.engines.test_vllm_engine import SIZES, TOKENIZER, difference
from tests.support.draws import rarity
from tests.support.engines import PROMPTS, complete, requests
from tests.support.shards import shard_of_replica
from tests.support.tiny_models import VOCAB, load_tensors, make_model, make_tokenizer
from tests.support.two_steps import LENGTHS, OBJECTIVE, POLICY, whole_batch

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

FREE = Sampling(max_tokens=16)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model("qwen3", tmp_path_factory.mktemp("model") / "qwen3", **SIZES)


def config(
    model: Path, run_dir: Path, processes: int | str, dtype: str = "float32", max_num_seqs: int = 32, **engine: str
) -> RunConfig:
    (run_dir / "rows.jsonl").write_text('{"prompt": "1+1=", "ground_truth": "2"}\n' * 8)
    return RunConfig.of(
        model={"path": str(model)},
        policy={"dtype": dtype, "backend": "megatron:d1"},
        engine={"backend": "vllm:d1", "processes": processes, "max_num_seqs": max_num_seqs, "max_model_len": 256, **engine},
        data={"train": [str(run_dir / "rows.jsonl")], "max_prompt_tokens": 32, "max_response_tokens": 32},
        reward={"functions": {"format": 1.0}},
        trainer={"device": "cpu", "run_dir": str(run_dir), "seed": 0},
    )


def built_by_auto(mesh, model: Path, run_dir: Path):
    """A run with `auto` for H200s, as it is built on this machine: its processes, run.yaml, summary and a few samples."""
    from fivefold.build import build_run
    from fivefold.plan import efficiency
    from fivefold.plan.efficiency import write_calibration
    from fivefold.plan.measured import Rate

    # With a slower sync than an H200's, four processes gain too little of a step over two.
    efficiency.CALIBRATION = run_dir / "calibration.json"
    write_calibration(efficiency.CALIBRATION, [Rate("wake", 0, 1.6e6, "h200-141g", "here")], "today")
    made = config(model, run_dir, "auto")
    changed = {
        "model": replace(made.model, tokenizer=str(make_tokenizer(run_dir / "words"))),
        "data": replace(made.data, prompts_per_step=64),
        "algorithm": replace(made.algorithm, group_size=8),
        "engine": replace(made.engine, max_num_seqs=512),
        "launch": replace(made.launch, gpu="h200-141g"),
        "trainer": replace(made.trainer, device="auto", steps=1, log_file=str(run_dir / "log")),
    }
    (run_dir / "rows.jsonl").write_text('{"prompt": "1+1=", "ground_truth": "2"}\n' * 64)
    run = build_run(replace(made, **changed), mesh.ranks, mesh.device, None)
    try:
        run.models.sync(run.engine)
        drawn = complete(run.engine, requests(4, FREE))
        return sorted(run.engine._processes), run.trainer.resolved_config, (run_dir / "log").read_text(), len(drawn)
    finally:
        run.close()


def to_the_first(deliver, delivery):
    return deliver(replace(delivery, servers={0: delivery.servers[0]}))


def sampled(mesh, made: RunConfig, directory: Path, fault: bool):
    """For three optimizer steps: what was sampled, the difference to the trainer's log-probs, and which server had what.

    `fault`: the last weights do not reach the last process, without any error.
    """
    from fivefold.build_engine import build_engine
    from fivefold.engines.weight_sync import weight_sync
    from fivefold.megatron.model import MegatronModel

    trained = MegatronModel(directory, POLICY, mesh, total_updates=3)
    mine = whole_batch().select(shard_of_replica(mesh.ranks, range(len(LENGTHS))))
    engine = build_engine(made, directory, TOKENIZER, mesh.ranks, mesh.device, lambda line: None)
    asked, drawn, differences, servers = requests(4, FREE, [*PROMPTS, [9, 8, 7]]), [], [], []
    if made.engine.processes > 1:
        router = engine._router
        ask = router._ask

        async def noted(one):
            servers.append((one.number, sorted(request.id for request in one.requests)))
            await ask(one)

        router._ask = noted
    try:
        for step in range(3):
            if fault and step == 2:
                engine._sender.deliver = partial(to_the_first, engine._sender.deliver)
            weight_sync(trained, engine)
            drawn.append(complete(engine, asked))
            differences.append(difference(trained, asked, drawn[-1]))
            trained.train_step(mine, OBJECTIVE.loss)
    finally:
        engine.close()
    return [[(one.token_ids, one.logprobs) for one in step] for step in drawn], differences, servers


@pytest.fixture(scope="module")
def two(cluster, model, tmp_path_factory):
    made = config(model, tmp_path_factory.mktemp("run"), 2)
    ((results),) = cluster.run(sampled, "megatron:d1", made, model, False, seconds=900)
    return results


def test_samples_do_not_depend_on_the_number_of_processes(cluster, model, tmp_path, two):
    """The same tokens and log-probs in float32, in the ranks by one process and by two processes next to them."""
    ((one, differences, _),) = cluster.run(sampled, "megatron:d1", config(model, tmp_path, 1), model, False)
    drawn, differences_two, _ = two
    assert one == drawn
    assert max(differences + differences_two) < 1e-5
    assert one[0] != one[2]


def test_the_responses_to_a_prompt_stay_in_one_process_and_both_work(two):
    _, _, servers = two
    assert {number for number, _ in servers} == {0, 1}
    assert all(ids == list(range(ids[0], ids[0] + 4)) and ids[0] % 4 == 0 for _, ids in servers)
    assert len(servers) == 3 * 5


def test_auto_is_decided_when_the_run_is_built_and_run_yaml_has_the_number(cluster, model, tmp_path):
    ((processes, text, log, drawn),) = cluster.run(built_by_auto, "megatron:d1", model, tmp_path, seconds=900)
    assert processes == [0, 1] and drawn == 16
    assert yaml.safe_load(text)["engine"]["processes"] == 2
    assert "as 2 servers each on the policy's ranks" in log and "engine.processes: auto is 2: a step takes" in log


def test_two_processes_on_a_device_of_their_own_sample_what_one_does(cluster, model, tmp_path, two):
    """Each gets the same weights from the trainer's rank, in a process group of its own."""
    made = config(model, tmp_path, 2, placement="apart")
    ((drawn, differences, servers),) = cluster.run(sampled, "megatron:d1", made, model, False, seconds=900)
    assert drawn == two[0] and max(differences) < 1e-5
    assert {number for number, _ in servers} == {0, 1}


@pytest.mark.parametrize("placement", ["colocated", "apart"])
def test_one_of_two_processes_on_old_weights_is_seen(cluster, model, tmp_path, two, placement):
    made = config(model, tmp_path, 2, placement=placement)
    ((drawn, differences, _),) = cluster.run(sampled, "megatron:d1", made, model, True, seconds=900)
    assert max(differences[:2]) < 1e-5 and differences[2] > 1e-4, differences
    wrong = [place for place, pair in enumerate(zip(drawn[2], two[0][2], strict=True)) if pair[0] != pair[1]]
    assert 0 < len(wrong) < len(drawn[2]), "the other process has the new weights"


COUNT = 1024
"""Responses to each prompt."""


def rounded(mesh, made: RunConfig, directory: Path, samplings: list[Sampling]):
    """First two tokens of each response with weights in bfloat16, one list for each sampling, with random keys of its own."""
    from fivefold.build_engine import build_engine

    engine = build_engine(made, directory, TOKENIZER, mesh.ranks, mesh.device, lambda line: None)
    try:
        engine.update_weights(iter(load_tensors(directory).items()), 0)
        completions = [
            complete(engine, requests(COUNT, sampling, [[9, 8, 7]], (5, key))) for key, sampling in enumerate(samplings)
        ]
    finally:
        engine.close()
    return [[one.token_ids for one in responses] for responses in completions]


def rarity_of_difference(first: list[list[int]], second: list[list[int]], place: int) -> float:
    """Chance that two samples of one distribution differ so much at a position; tokens that are rare count as one."""
    counts = torch.stack(
        [torch.bincount(torch.tensor(responses)[:, place], minlength=VOCAB) for responses in (first, second)]
    ).double()
    common = counts.sum(0) >= 10
    counts = torch.cat([counts[:, common], counts[:, ~common].sum(1, keepdim=True)], 1)
    means = counts.sum(1, keepdim=True) * counts.sum(0, keepdim=True) / counts.sum()
    return rarity(float(((counts - means) ** 2 / means.clamp(min=1e-9)).sum()), counts.shape[1] - 1)


def test_the_distribution_in_bfloat16_does_not_depend_on_the_number_of_processes(cluster, model, tmp_path):
    """Where a batch rounds, a process of half the requests may draw other tokens, but not from another distribution.

    On a CPU a row is rounded alike in every batch, so that the same keys draw the same tokens."""
    plain, warm = (Sampling(max_tokens=2, ignore_eos=True, temperature=temperature) for temperature in (0.4, 1.0))
    answers = []
    for processes in (1, 2):
        (tmp_path / str(processes)).mkdir()
        made = config(model, tmp_path / str(processes), processes, "bfloat16", 256)
        (answer,) = cluster.run(rounded, "megatron:d1", made, model, [plain, plain, warm], seconds=900)
        answers.append(answer)
    one, two = answers
    assert one == two
    for place in range(2):
        # The second sampling has other keys than the first, so that their tokens are independent of each other.
        assert rarity_of_difference(one[0], two[1], place) > 1e-4
        assert rarity_of_difference(one[1], two[0], place) > 1e-4
        assert rarity_of_difference(one[0], two[2], place) < 1e-4, "another temperature is seen"
