"""What changes a step's time, and in which direction: facts that hold whatever the rates are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.plan_accuracy import FASTER_HOST, OTHER_HOST, ROLLOUTS, UPDATES, places, second_chunk, sharded
from fivefold.config import RunConfig
from fivefold.layout import ParallelLayout, PipelineSplit
from fivefold.models.families import spec_from_config
from fivefold.plan.efficiency import Efficiencies
from fivefold.plan.estimate import Lengths, needs_old_logprobs, step_estimate
from fivefold.plan.hardware import Cluster
from fivefold.plan.measured import MEASURED
from fivefold.plan.memory import Sharded
from fivefold.plan.rollout_time import Requests, Sampler, rollout_time
from fivefold.plan.step_time import Batch, update_time
from tests.support.public_shapes import SHAPES

H200 = "h200-141g"
RATES = Efficiencies(MEASURED, H200)
SPEC = spec_from_config(SHAPES["Qwen3-8B"])
BATCH = Batch.of(512, 512, 1536)


def update(text: str = "d8", spec=SPEC, batch=BATCH, node: int = 8, **settings):
    layout = ParallelLayout.parse(f"megatron:{text}")
    model = Sharded(spec, layout, **{"tokens_per_micro_batch": 16384, **settings})
    return update_time(model, batch, Cluster(H200, layout.world_size, min(node, layout.world_size)), RATES)


def test_twice_the_replicas_take_half_the_time_but_for_what_they_exchange():
    one, two = update("d2t4"), update("d4t4", node=4)
    ratio = two.total / one.total
    assert 0.5 < ratio < 0.6
    assert two.parts["forward"] == pytest.approx(one.parts["forward"] / 2, rel=0.01)
    assert two.parts["data parallel"] > one.parts["data parallel"] > 0


def test_recomputation_costs_a_forward_and_gives_memory():
    none, selective, full = (update(recompute=kind) for kind in ("none", "selective", "full"))
    assert none.parts["recomputation"] == 0 < selective.parts["recomputation"] < full.parts["recomputation"]
    # But for the last product of each layer, which only the next one reads, and the head, which is made again anyhow.
    assert 0.55 * none.parts["forward"] < full.parts["recomputation"] < none.parts["forward"]
    held = [
        Sharded(SPEC, ParallelLayout(dp=8), PipelineSplit(), kind, 16384).held(2)[0].activations for kind in ("none", "full")
    ]
    assert held[1] < held[0] / 4


@pytest.mark.parametrize("text", ["d8", "d2t4"])
def test_full_recomputation_leaves_out_what_only_the_next_layer_reads(text):
    """Of 36 layers the product of 12288 with 4096, and one scatter of four."""
    none, full = update(text), update(text, recompute="full")
    tp = ParallelLayout.parse(f"megatron:{text}").tp
    product = 2 * none.micro_batch_tokens * 12288 * 4096 / tp / RATES.rate("gemm", min(4096, 12288 / tp))
    head = 2 * 151936 * 4096 * none.micro_batch_tokens * BATCH.predicted / tp
    logits = 4 * 151936 * none.micro_batch_tokens * BATCH.predicted / tp / RATES.rate("head_forward")
    around = none.micro_batches * (head / RATES.rate("gemm", 4096) + logits)
    layers = none.parts["forward"] - around
    left = layers - 36 * none.micro_batches * product
    assert full.parts["recomputation"] == pytest.approx(left, rel=0.01)
    assert full.parts["tensor parallel"] == pytest.approx(2.75 / 2 * none.parts["tensor parallel"], rel=0.05)


def test_a_bubble_shrinks_with_micro_batches_and_with_virtual_stages():
    few, many = (update("d2p4", tokens_per_micro_batch=size) for size in (65536, 8192))
    assert many.parts["bubble"] < few.parts["bubble"] / 4
    virtual = update("d2p4", stages=PipelineSplit(virtual_pipeline_model_parallel_size=3))
    assert virtual.parts["bubble"] == pytest.approx(update("d2p4").parts["bubble"] / 3, rel=0.1)
    assert virtual.parts["pipeline"] > update("d2p4").parts["pipeline"]
    assert update("d8").parts["bubble"] == 0


def test_a_last_stage_with_the_vocabulary_and_fewer_layers_is_faster():
    lighter = PipelineSplit(num_layers_in_first_pipeline_stage=20, num_layers_in_last_pipeline_stage=16)
    assert update("d4p2", stages=lighter).total < update("d4p2").total


def test_small_micro_batches_wait_for_the_host():
    small = spec_from_config(SHAPES["Qwen3-0.6B"])
    assert update("d1", small, tokens_per_micro_batch=2048).parts["waiting for the host"] > 0
    assert update("d1", small, tokens_per_micro_batch=16384).parts["waiting for the host"] == 0


def test_tensor_parallelism_over_two_nodes_is_slow():
    near, far = update("t8", node=8), update("t8", node=4)
    assert far.parts["tensor parallel"] > 1.5 * near.parts["tensor parallel"]


def test_a_value_head_costs_less_than_a_vocabulary():
    critic = replace(SPEC, value_head=True, tied=False)
    assert 0.7 < update(spec=critic).total / update().total < 0.95


def sampler(spec=SPEC, tp: int = 1, **changes) -> Sampler:
    return Sampler(spec, tp, 1, **{"max_num_seqs": 256, "cache_bytes": 60e9, **changes})


def test_requests_that_do_not_fit_the_cache_wait():
    requests = Requests(1024, 8, 512, 2048, 2048)
    wide, narrow = (rollout_time(sampler(cache_bytes=size), requests, 4, RATES).total for size in (100e9, 10e9))
    assert narrow > 1.5 * wide
    assert sampler(cache_bytes=10e9).room(2560) == int(10e9 / (2560 * 147456))


def test_a_long_tail_decodes_alone():
    """As many tokens take longer where a few responses are much longer than the others."""
    even, tail = (Requests(256, 8, 128, 512, longest) for longest in (512, 4096))
    assert sum(tail.lengths()) / len(tail.lengths()) == pytest.approx(512, rel=0.1)
    times = [rollout_time(sampler(), requests, 1, RATES) for requests in (even, tail)]
    assert times[1].total > 2 * times[0].total


def test_processes_share_the_host_s_work_and_each_reads_the_weights():
    """Each prepares its part of the sequences; the GPU computes their steps one after another, and reads more slowly."""
    one, two = sampler(max_num_seqs=1024), sampler(max_num_seqs=1024, processes=2)
    (host, gpu), (host_2, gpu_2) = (one_sampler.step_seconds(1024, 200, RATES) for one_sampler in (one, two))
    half, arithmetic = sampler(max_num_seqs=512), one.arithmetic(1024, RATES)
    assert host_2 == half.step_seconds(512, 200, RATES)[0] < host / 2
    read = (gpu - arithmetic) * RATES.rate("decode_memory") + one._weights(512)
    assert gpu_2 == pytest.approx(arithmetic + read / RATES.rate("shared_decode_memory"))
    small = replace(SPEC, layers=8)
    requests = Requests(1024, 8, 100, 200, 200)
    times = [rollout_time(sampler(small, max_num_seqs=1024, processes=n), requests, 1, RATES).total for n in (1, 2)]
    assert times[1] < 0.7 * times[0]


def test_few_tokens_choose_few_experts():
    """Decoding one sequence reads 8 of 128 experts, decoding 256 nearly all."""
    spec = spec_from_config(SHAPES["Qwen3-30B-A3B"])
    read = [sampler(spec)._weights(sequences) for sequences in (1, 256)]
    experts = 2 * sum(spec.expert_parameters(layer) for layer in range(spec.layers))
    assert read[1] - read[0] == pytest.approx(experts * (1 - 8 / 128), rel=1e-3)


def run(**sections) -> RunConfig:
    data = {"train": ["x"], "prompts_per_step": 64, "max_prompt_tokens": 1024, "max_response_tokens": 3072}
    base = {
        "engine": {"backend": "vllm:d8"},
        "policy": {"backend": "megatron:d8"},
        "algorithm": {"kl": {"coef": 0}},
        "data": data,
    }
    return RunConfig.of(model={"path": "here"}, launch={"gpu": H200}, **{**base, **sections})


def step(config: RunConfig, gpus: int = 8):
    return step_estimate(config, SPEC, Cluster(H200, gpus, 8), RATES, Lengths.of(config.data))


def test_a_step_has_the_parts_that_its_method_has():
    plain = step(run())
    assert {"rollout", "forward", "backward", "optimizer", "weight sync"} <= set(plain.parts)
    assert "log-probs" not in plain.parts and "offload" not in plain.parts
    assert plain.seconds == pytest.approx(sum(plain.parts.values()))
    assert step(run(algorithm={"kl": {"coef": 0.1}})).parts["log-probs"] == pytest.approx(
        step(run(algorithm={"kl": {"coef": 0}, "updates_per_step": 4})).parts["log-probs"]
    )
    ppo = step(run(algorithm={"name": "ppo", "kl": {"coef": 0}}))
    assert {"values"} <= set(ppo.parts) or "critic" not in ppo.parts
    moved = step(run(policy={"backend": "megatron:d8", "offload": {"optimizer": True}}))
    assert moved.parts["offload"] == pytest.approx(2 * plain.memory.optimizer / 50e9)
    assert "rollout" not in step(run(algorithm={"name": "sft"}, engine={})).parts


def test_a_step_with_dynamic_sampling_samples_all_prompts_of_its_first_round():
    dapo = {"name": "dapo", "overlong_buffer": 0}
    one, twice, fewer = (step(run(algorithm=dapo | {"prompts_per_round": round_})) for round_ in (64, 128, 32))
    data = {"train": ["x"], "prompts_per_step": 128, "max_prompt_tokens": 1024, "max_response_tokens": 3072}
    assert twice.parts["rollout"] == step(run(algorithm={"name": "grpo"}, data=data)).parts["rollout"] > one.parts["rollout"]
    assert fewer.parts["rollout"] == one.parts["rollout"]
    assert twice.parts["forward"] == one.parts["forward"], "it learns from those of a step"
    ahead = {"engine": {"backend": "vllm:d4", "placement": "apart"}, "policy": {"backend": "megatron:d4"}}
    ahead |= {"rollout": {"max_staleness": 1}}
    streams = [step(run(algorithm=dapo | {"prompts_per_round": round_}, **ahead)).seconds for round_ in (64, 128)]
    assert streams[0] == streams[1], "without rounds"


@pytest.mark.parametrize(
    ("algorithm", "needed"),
    [
        ({"name": "grpo", "kl": {"coef": 0}}, False),
        ({"name": "grpo", "updates_per_step": 2}, True),
        ({"name": "grpo", "updates_per_step": 2, "rollout_correction": {"old_logprobs_from": "engine"}}, False),
        ({"name": "grpo", "kl": {"coef": 0.1, "place": "reward"}}, True),
        ({"name": "ppo", "ppo_epochs": 2}, True),
        ({"name": "rloo", "updates_per_step": 2}, False),
    ],
)
def test_old_log_probs_are_counted_where_the_objective_asks_for_them(algorithm, needed):
    from fivefold.algo.objective import Objective
    from fivefold.columns import Column

    config = run(algorithm=algorithm)
    objective = Objective.of(config.algorithm.resolved)
    wanted = Column.OLD_LOGPROBS in objective.needs(config.algorithm.updates)
    assert needs_old_logprobs(config.algorithm, config.policy) is needed is wanted


def test_an_engine_apart_samples_during_training_only_within_the_staleness_bound():
    apart = {"engine": {"backend": "vllm:d4", "placement": "apart"}, "policy": {"backend": "megatron:d4"}}
    waits, ahead = step(run(**apart)), step(run(**apart, rollout={"max_staleness": 1}))
    assert "rollout" not in waits.overlapped and ahead.overlapped["rollout"] > 0
    assert ahead.seconds == pytest.approx(waits.seconds - ahead.overlapped["rollout"])


def test_a_reference_on_ranks_of_its_own_computes_next_to_the_policy():
    sections = {"algorithm": {"kl": {"coef": 0.1}, "updates_per_step": 2}, "policy": {"backend": "megatron:d4"}}
    servers = {"engine": {"backend": "vllm:d4", "mode": "server"}}
    together, apart = step(run(**sections, **servers)), step(run(**sections, **servers, reference={"first_rank": 4}))
    # Two passes of the same length, of which the step waits for one.
    assert apart.overlapped["log-probs"] == pytest.approx(apart.parts["log-probs"])
    assert apart.parts["log-probs"] == pytest.approx(together.parts["log-probs"] / 2)
    assert apart.seconds == pytest.approx(together.seconds - apart.overlapped["log-probs"])


def test_the_model_keeps_to_what_was_recorded():
    """The bounds of benchmarks/plan_accuracy.py: time of all but one or two of the rows, all memory, every rollout."""
    errors = []
    for row in UPDATES:
        model, batch, cluster = sharded(row)
        time = update_time(model, batch, cluster, Efficiencies(MEASURED, H200, row.has_flash), 1.0)
        errors.append(time.total / row.seconds - 1)
        held = replace(model, tokens_per_micro_batch=int(time.micro_batch_tokens))
        gib = max(sum(vars(stage).values()) for stage in held.held(2)) / 2**30
        gib += second_chunk(held) if row.older_head else 0.0
        assert gib == pytest.approx(row.gib, rel=0.08), row
    assert sum(abs(error) <= 0.15 for error in errors) >= max(12, len(errors) - 2)
    for row in ROLLOUTS:
        assert (rate := row.predicted(RATES)) == pytest.approx(row.measured(rate), rel=row.bound), row


def test_the_memory_of_one_long_recomputed_sequence_is_as_measured_on_an_h200():
    """At its peak a layer that was just recomputed is on the device together with the gradients of its output, gate and up.

    These gradients take 3.5 GiB with 131,072 tokens.
    """
    rows = [row for row in UPDATES if row.tokens == row.budget == 131072]
    assert [row.layout for row in rows] == ["d1", "c2"]
    for row in rows:
        (stage,) = sharded(row)[0].held(2)
        assert sum(vars(stage).values()) / 2**30 == pytest.approx(row.gib, rel=0.02), row


def test_every_rollout_is_predicted_within_15_percent_on_the_host_that_set_the_rates():
    """On others a few of 1,024 sequences are further away, by up to the third by which hosts differ, or with four processes; on
    the fastest host everything that the host decides is sampled faster than predicted."""
    errors = [(row, (rate := row.predicted(RATES)) / row.measured(rate) - 1) for row in ROLLOUTS]
    assert all(abs(error) <= row.bound for row, error in errors)
    away = [row for row, error in errors if abs(error) > 0.15 and row.bound < FASTER_HOST]
    assert all(row.bound >= OTHER_HOST["bound"] and row.count == 1024 for row in away) and len(away) == 6
    assert all(error < 0.06 for row, error in errors if row.bound == FASTER_HOST and row.processes < 4)


def test_a_sequence_costs_the_host_more_the_more_there_are():
    """So one process of 1,024 sequences is slower than one of 256, and two of 512 are more than twice as fast as it."""
    few, many, two = [
        row.predicted(RATES) for row in ROLLOUTS if (row.model, row.logprobs, row.group) == ("135M", "none", 1)
    ]
    assert many < few and two > 2 * many


def test_the_measured_best_is_among_the_predicted_first_three():
    """Of those that were measured it is the first; of all that fit, most of which no one measured, among three."""
    places_of_rows = list(places(RATES))
    assert len(places_of_rows) == 3
    for place in places_of_rows:
        assert place.number(place.measured) == 1, place
        assert place.number(place.fitting) <= 3, place
