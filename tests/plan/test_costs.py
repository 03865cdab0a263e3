"""Arithmetic of the time model against what torch counts, and parameters against what is published."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fivefold.layout import ParallelLayout
from fivefold.models.families import load_spec, spec_from_config
from fivefold.plan.costs import Tokens, Work, head_work, layer_work, ranks_of_token
from fivefold.plan.memory import training_flops
from tests.support.public_shapes import SHAPES

ONE, LENGTH = ParallelLayout(), 48


def flops(work: list[Work], *kinds: str) -> float:
    return sum(one.amount for one in work if one.kind in kinds)


def layout(text: str) -> ParallelLayout:
    return ParallelLayout.parse(f"megatron:{text}")


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_arithmetic_is_what_torch_counts_of_the_model_in_transformers(models, name):
    """Forward and backward of one sequence; torch counts the whole square of attention, of which causality needs half."""
    import torch
    import transformers
    from torch.utils.flop_counter import FlopCounterMode

    spec = load_spec(models(name))
    model = transformers.AutoModelForCausalLM.from_pretrained(models(name), attn_implementation="eager")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    with FlopCounterMode(display=False) as forward:
        output = model(torch.arange(LENGTH)[None] % spec.vocab).logits
    with FlopCounterMode(display=False) as backward:
        output.sum().backward()
    tokens = Tokens(LENGTH, LENGTH)
    ways = [head_work(spec, ONE, tokens)]
    ways += [layer_work(spec, ONE, tokens, spec.has_experts(layer)) for layer in range(spec.layers)]
    ahead, back = ([one for way in ways for one in way[place]] for place in (0, 1))
    products = flops(ahead, "gemm", "grouped_gemm")
    assert products + 2 * flops(ahead, "attention_forward") == pytest.approx(forward.get_total_flops(), rel=0.01)
    # The head's product is made again in backward; flash attention makes its square again: 5 products of it instead of 4.
    again = flops(ways[0][0], "gemm")
    attention = 2 * flops(back, "attention_backward") * 4 / 5
    counted = flops(back, "gemm", "grouped_gemm") - again + attention
    assert counted == pytest.approx(backward.get_total_flops(), rel=0.02)


def test_arithmetic_is_that_of_the_throughput_that_runs_report():
    """6 a parameter and token, 6 a layer, width and length: both homes count alike."""
    spec = spec_from_config(SHAPES["Qwen3-8B"])
    tokens = Tokens(1000, 500)
    work = [one for way in layer_work(spec, ONE, tokens, False) for one in way] * spec.layers
    work += [one for way in head_work(spec, ONE, tokens) for one in way]
    head = 2 * 1000 * spec.vocab * spec.hidden
    counted = flops(work, "gemm") - head + 3 / 3.5 * flops(work, "attention_forward", "attention_backward")
    assert counted == pytest.approx(training_flops(spec, 1000, 500), rel=1e-3)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen3-0.6B", 0.596),
        ("Qwen3-1.7B", 1.721),
        ("Qwen3-8B", 8.191),
        ("Qwen3-30B-A3B", 30.53),
        ("Qwen3-235B-A22B", 235.1),
    ],
)
def test_published_models_have_their_published_parameters(name, billions):
    assert spec_from_config(SHAPES[name]).parameters / 1e9 == pytest.approx(billions, rel=1e-3)


@pytest.mark.parametrize("text", ["t4", "c4", "t2c2"])
def test_a_layer_s_products_are_divided_over_the_ranks_of_a_replica(text):
    spec = spec_from_config(SHAPES["Qwen3-8B"])
    one_rank, part = (layer_work(spec, placed, Tokens(8192, 2048), False) for placed in (ONE, layout(text)))
    for kind in ("gemm", "attention_forward", "attention_backward"):
        for way in (0, 1):
            assert flops(part[way], kind) == pytest.approx(flops(one_rank[way], kind) / 4), kind


@pytest.mark.parametrize("text", ["d4e4", "t4e4", "(attn:t4|ffn:t4)", "(attn:t4|ffn:t2e2)"])
def test_routed_tokens_cost_a_rank_the_same_on_every_layout_of_experts(text):
    """Each replica of d4 has a fourth of the tokens; how many meet at one expert is what differs."""
    spec = spec_from_config(SHAPES["Qwen3-30B-A3B"])
    parsed = layout(text)
    (one_rank, _), (part, _) = (layer_work(spec, placed, Tokens(8192 / placed.dp, 2048), True) for placed in (ONE, parsed))
    assert flops(part, "grouped_gemm") == pytest.approx(flops(one_rank, "grouped_gemm") / 4)
    sizes = {one.size for one in part if one.kind == "grouped_gemm"}
    assert sizes == {8192 * 8 / 128 / (4 if parsed.dp == 4 and parsed.ep == 1 else 1)}


@pytest.mark.parametrize(("text", "share"), [("d4", 1), ("d4e4", 1 / 4), ("t4e4", 1 / 4), ("(attn:t4|ffn:t2e2)", 1 / 4)])
def test_each_micro_batch_adds_the_gradients_of_all_experts_of_a_rank(text, share):
    """However few tokens it has: ten bytes for each of gate, up and down."""
    spec = spec_from_config(SHAPES["Qwen3-30B-A3B"])
    for count in (8192, 16384):
        ahead, back = layer_work(spec, layout(text), Tokens(count, 2048), True)
        assert flops(ahead, "gradients") == 0
        assert flops(back, "gradients") == pytest.approx(10 * 3 * 2048 * 768 * 128 * share)


@pytest.mark.parametrize("text", ["d4", "d2e2", "d4e4", "d8e8", "d16e16", "(attn:t4|ffn:t2e2)", "(attn:t4|ffn:t4)"])
def test_a_token_goes_once_to_each_rank_that_has_one_of_its_experts(text):
    """The mean over random choices of 8 of 128 experts, with four standard errors."""
    import torch

    spec, parsed = spec_from_config(SHAPES["Qwen3-30B-A3B"]), layout(text)
    chosen = torch.rand(20000, 128, generator=torch.Generator().manual_seed(1)).topk(8, 1).indices
    needed = torch.zeros(20000, parsed.ep).scatter_(1, chosen // (128 // parsed.ep), 1.0).sum(1) * parsed.etp
    error = float(needed.std()) / 20000**0.5
    assert ranks_of_token(spec.moe, parsed) == pytest.approx(float(needed.mean()), abs=4 * error + 1e-9)


def test_tokens_are_copied_for_their_ranks_and_experts_and_summed_each_way():
    """In numbers of D: a copy is read and written; a sum reads what it adds, and writes one."""
    spec = spec_from_config(SHAPES["Qwen3-30B-A3B"])
    dense, gathered = replace(spec, moe=None), ParallelLayout.parse("fsdp:d4e4")
    cases = ((layout("d4"), 0), (layout("d4e4"), 3.62901), (layout("d128e128"), 8.0), (layout("(attn:t4|ffn:t4)"), 4))
    for parsed, ranks in (*cases, (gathered, 0)):
        to_ranks, to_experts = 2 * ranks, 2 * 8 * parsed.etp
        from_experts, from_ranks = 8 * parsed.etp + (ranks or 1), ranks + 1 if ranks else 0
        more = to_ranks + to_experts + from_experts + from_ranks
        for way in (0, 1):
            with_experts = flops(layer_work(spec, parsed, Tokens(8192, 2048), True)[way], "elementwise")
            without = flops(layer_work(dense, parsed, Tokens(8192, 2048), False)[way], "elementwise")
            expected = more * 8192 / parsed.tp * 2048 * 2
            assert with_experts - without == pytest.approx(expected, rel=1e-4), (parsed, way)


def test_a_sliding_window_bounds_what_a_token_sees():
    spec = replace(spec_from_config(SHAPES["Qwen3-8B"]), sliding_window=256)
    near, far = (
        flops(layer_work(spec, ONE, Tokens(8192, length), False)[0], "attention_forward") for length in (4096, 8192)
    )
    assert near == far == 4 * 8192 * 256 * 4096
