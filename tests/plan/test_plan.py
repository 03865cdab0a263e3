"""The estimate before a run: parameters of every rank, and what is where when."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fivefold.layout import ParallelLayout, PipelineSplit
from fivefold.models.families import load_spec
from fivefold.plan.memory import (
    LOGITS_BYTES,
    Other,
    Sharded,
    backward_numbers,
    estimate_memory,
    kept_numbers,
    rank_parameters,
)


@pytest.mark.parametrize(
    "name", ["qwen3", "qwen3_tied", "qwen3_moe", "qwen3_moe_sparse", "qwen2_moe", "deepseek_v3", "glm4_moe"]
)
@pytest.mark.parametrize(
    ("layout", "pipeline"),
    [
        ("d1", {}),
        ("t2", {}),
        ("d2t2p2", {}),
        ("p2", {"virtual_pipeline_model_parallel_size": 2}),
        ("p2", {"num_layers_in_first_pipeline_stage": 1}),
        ("p3", {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}),
    ],
)
def test_the_ranks_together_hold_the_model(models, name, layout, pipeline):
    spec, parsed = load_spec(models(name)), ParallelLayout.parse(f"megatron:{layout}")
    parts = rank_parameters(spec, parsed, PipelineSplit.of(pipeline))
    held = sum(part.dense * parsed.tp + part.experts for part in parts)
    padding = (spec.padded_vocab - spec.vocab) * spec.hidden * (1 if spec.tied and parsed.pp == 1 else 2)
    # A pipeline keeps a tied embedding at both ends; the final norm is not counted.
    twice = spec.vocab * spec.hidden if spec.tied and parsed.pp > 1 else 0
    expected = spec.parameters - spec.hidden + padding + twice
    assert abs(held - expected) <= parsed.tp * parsed.pp


def estimate(spec, layout, **changes):
    recompute = changes.pop("recompute", "none")
    parsed = ParallelLayout.parse(f"megatron:{layout}")
    settings = {
        "dtype": "bfloat16", "engine_sequences": 4, "max_sequence_tokens": 128, "others": {"reference": Other(Sharded(spec, parsed))},
    }  # fmt: skip
    policy = Sharded(spec, parsed, recompute=recompute, tokens_per_micro_batch=1024)
    return estimate_memory(policy, **{**settings, **changes})


def test_each_dimension_divides_what_it_shards(models):
    spec = load_spec(models("qwen3_moe"))
    one = estimate(spec, "d1")
    assert estimate(spec, "d4").optimizer == one.optimizer // 4
    assert estimate(spec, "t2e2").parameters < one.parameters * 0.6
    assert estimate(spec, "c2").parameters == one.parameters
    assert estimate(spec, "c2").activations == pytest.approx(one.activations / 2, rel=0.01)
    # Experts over two ranks that were replicas: their parameters halve, what all share does not.
    parts, one_rank = (
        rank_parameters(spec, ParallelLayout.parse("megatron:d2e2"))[0],
        rank_parameters(spec, ParallelLayout())[0],
    )
    assert (parts.dense, parts.experts) == (one_rank.dense, one_rank.experts // 2)
    assert estimate(spec, "d1", recompute="full").activations < one.activations


def test_a_model_on_ranks_of_its_own_fills_these_and_not_the_policy_s(models):
    spec, large = load_spec(models("qwen3")), load_spec(models("qwen3_moe"))
    without = estimate(spec, "d2", others={}, engine_sequences=0)
    reference = Sharded(spec, ParallelLayout.parse("megatron:d2"))
    apart = estimate(spec, "d2", others={"reference": Other(reference, first_rank=2)}, engine_sequences=0)
    assert {name: sum(parts.values()) for name, parts in apart.phases.items()} == {
        name: sum(parts.values()) for name, parts in without.phases.items()
    }
    assert estimate(spec, "d2", engine_sequences=0).total == without.total + apart.parameters
    # A hundred times as wide, and waiting on the host where it would share its ranks.
    wide = Sharded(replace(large, hidden=100 * large.hidden), ParallelLayout())
    waiting = frozenset({"parameters"})
    fullest = estimate(spec, "d2", others={"reference": Other(wide, 2, waiting)}, offload=waiting)
    assert (fullest.parameters, fullest.engine) == (0, 0)
    assert fullest.total == fullest.others["reference"].resident == wide.held(2)[0].parameters > without.total


def test_the_head_s_chunks_are_those_of_the_layer(models):
    """One of them where there are many tokens, in plain PyTorch three; without a head a layer's backward pass needs most."""
    from fivefold.backend.log_probs import CHUNK_ELEMENTS, KERNEL_CHUNK_ELEMENTS

    spec, layout = load_spec(models("qwen3")), ParallelLayout()
    for kernels, chunks, tokens in ((True, KERNEL_CHUNK_ELEMENTS, 10**8), (False, 3 * CHUNK_ELEMENTS, 10**6)):
        with_head, without = (
            Sharded(replace(spec, value_head=value_head), layout, tokens_per_micro_batch=tokens, kernels=kernels).held(2)[0]
            for value_head in (False, True)
        )
        around, of_a_layer = 4 * tokens * 2 * spec.hidden if kernels else 0, tokens * 2 * backward_numbers(spec, 0)
        assert with_head.activations - without.activations == 4 * chunks + around - of_a_layer > 0
    plain = Sharded(spec, layout, tokens_per_micro_batch=1024, kernels=False).held(2)[0]
    assert plain.activations > Sharded(spec, layout, tokens_per_micro_batch=1024).held(2)[0].activations


def test_what_is_offloaded_is_not_there_while_responses_are_sampled(models):
    spec = load_spec(models("qwen3"))
    everything = frozenset({"parameters", "gradients", "optimizer"})
    reference = Other(Sharded(spec, ParallelLayout.parse("megatron:d1")), offload=everything)
    stays, leaves = estimate(spec, "d1"), estimate(spec, "d1", offload=everything, others={"reference": reference})
    assert set(stays.sampling) == {
        "engine",
        "cache",
        "parameters",
        "reference",
        "gradients",
        "optimizer",
    }
    assert {name for name, size in leaves.sampling.items() if size} == {"engine", "cache"}
    assert stays.training["reference"] > 0 and not leaves.training["reference"]
    assert leaves.total < stays.total


def test_an_engine_that_sleeps_takes_memory_only_while_it_samples(models):
    spec = load_spec(models("qwen3"))
    sleeps, stays = estimate(spec, "t2"), estimate(spec, "t2", engine_sleeps=False)
    assert "engine" not in sleeps.training and stays.training["engine"] == sleeps.sampling["engine"] > 0
    cut = estimate(spec, "t2", engine_shards=2)
    assert (cut.engine, cut.cache) == (sleeps.engine // 2, sleeps.cache // 2)


def test_the_policy_s_optimizer_is_not_there_while_the_critic_learns(models):
    spec = load_spec(models("qwen3"))
    both = estimate(
        spec,
        "d1",
        others={"critic": Other(Sharded(load_spec(models("qwen3"), value_head=True), ParallelLayout()), learns=True)},
        offload=frozenset({"optimizer"}),
    )
    assert "optimizer" in both.training and "optimizer" not in both.training_of("critic")
    assert {"parameters", "gradients"} <= set(both.training_of("critic"))


def test_a_critic_and_a_reward_model_take_their_place(models):
    """Qwen3 in bfloat16: 2 bytes a parameter, 4 of gradient, 12 of Adam; a value head in the place of the output layer."""
    spec = load_spec(models("qwen3"))
    values = load_spec(models("qwen3"), value_head=True)
    assert values.parameters == spec.parameters - spec.vocab * spec.hidden + spec.hidden
    both = estimate(
        spec,
        "d1",
        others={
            "critic": Other(Sharded(values, ParallelLayout()), 0, frozenset({"gradients", "optimizer"}), learns=True),
            "reward.model": Other(Sharded(values, ParallelLayout())),
        },
    )
    count = rank_parameters(values, ParallelLayout())[0].total
    assert both.training_of("critic")["critic"] == 18 * count
    assert both.training["critic"] == 2 * count, "its gradients and optimizer are not there while the policy learns"
    assert both.sampling["critic"] == both.sampling["reward model"] == 2 * count


def test_a_pass_of_many_sequences_is_a_phase_with_one_layer_s_activations(models):
    """2 bytes each of 2 x 64 numbers a token that enter and leave a layer and of those inside; the critic's state as it waits."""
    spec, values = load_spec(models("qwen3")), load_spec(models("qwen3"), value_head=True)
    tokens = 10**6
    inside = kept_numbers(spec, 0, kernels=True)
    critic = Sharded(values, ParallelLayout.parse("megatron:t2"), tokens_per_micro_batch=64, tokens_per_forward=tokens)
    leaving = frozenset({"parameters", "optimizer"})
    policy = Sharded(spec, critic.layout, tokens_per_micro_batch=64, tokens_per_forward=tokens)
    memory = estimate_memory(
        policy, dtype="bfloat16", engine_sequences=0, max_sequence_tokens=128, offload=leaving,
        others={"critic": Other(critic, 0, leaving, learns=True), "reference": Other(replace(policy, tokens_per_forward=0))},
    )  # fmt: skip
    count = rank_parameters(values, critic.layout)[0].total
    one = memory.phases["a pass of the critic"]
    assert one["activations"] == tokens * (2 * spec.hidden + inside)
    assert one["critic"] == (2 + 4) * count, "its optimizer is on the host"
    assert (one["gradients"], one["reference"]) == (memory.gradients, 2 * rank_parameters(spec, critic.layout)[0].total)
    policy_pass = memory.phases["a pass without gradient"]
    logits = min(LOGITS_BYTES, 4 * tokens // 2 * spec.padded_vocab) + tokens * 3 * spec.hidden
    assert policy_pass["activations"] == tokens * 2 * spec.hidden + max(logits, tokens * inside)
    assert set(policy_pass) == {"parameters", "activations", "critic", "reference", "gradients"}
    assert "a pass of the reference" not in memory.phases and "a pass without gradient" not in estimate(spec, "d1").phases


def test_a_process_reward_model_is_counted_with_what_it_is_compared_with(models):
    """18 bytes a parameter that it trains and 2 of the other; while the policy learns those that were not offloaded."""
    spec = load_spec(models("qwen3"))
    one = Sharded(spec, ParallelLayout(), tokens_per_micro_batch=64)
    count = rank_parameters(spec, ParallelLayout())[0].total
    compared = Other(Sharded(spec, ParallelLayout()), compared_by="prm")
    stays = estimate(spec, "d1", others={"prm": Other(one, learns=True), "prm.reference": compared})
    assert stays.training_of("prm")["prm"] == stays.training["prm"] == stays.sampling["prm"] == (18 + 2) * count
    everything = frozenset({"parameters", "gradients", "optimizer"})
    leaves = estimate(spec, "d1", others={"prm": Other(one, 0, everything, learns=True), "prm.reference": compared})
    assert leaves.training_of("prm")["prm"] == 18 * count and leaves.training["prm"] == leaves.sampling["prm"] == 0


def test_each_model_is_counted_by_its_own_layout_on_the_fullest_ranks(models):
    """Of two stages the first of the policy has the embedding, the last one the output layer; a whole reference is everywhere."""
    spec, values = load_spec(models("qwen3")), load_spec(models("qwen3"), value_head=True)
    staged, copied = ParallelLayout.parse("megatron:p2"), ParallelLayout.parse("megatron:d2")
    critic = Other(Sharded(values, copied, tokens_per_micro_batch=64), learns=True)
    memory = estimate(spec, "p2", others={"reference": Other(Sharded(spec, copied)), "critic": critic})
    assert memory.others["reference"].resident == 2 * rank_parameters(spec, copied)[0].total
    # 2 bytes a parameter and 4 of gradient; 12 of Adam over two replicas.
    assert memory.others["critic"].state == (2 + 4 + 12 // 2) * rank_parameters(values, copied)[0].total
    assert 0 < memory.others["critic"].activations < memory.activations
    # The critic's first stage, with the embedding, lies where a policy and a reference of one stage are as large as anywhere.
    other = estimate(spec, "d2", others={"critic": Other(Sharded(values, staged, tokens_per_micro_batch=1024), learns=True)})
    assert (
        other.others["critic"].state
        == 18 * rank_parameters(values, staged)[0].total
        > 18 * rank_parameters(values, staged)[1].total
    )
