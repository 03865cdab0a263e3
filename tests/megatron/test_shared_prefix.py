"""The prompt of a group computed once gives what it gives computed for each sample: log-probs, values, gradients."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fivefold.backend.attention import _Gather
from fivefold.backend.shared_prefix import Piece, Unit, make_pieces, make_units
from fivefold.columns import Column
from fivefold.config import RunConfig
from fivefold.config.learners import PolicyConfig
from fivefold.layout import ParallelLayout
from fivefold.megatron.layers import attention
from fivefold.types import LossOutput, TokenBatch
from tests.megatron.test_attention import POLICY, gradient_sum
from tests.support.cluster import Together
from tests.support.tiny_models import VOCAB, make_classifier

GROUPS = [(5, [3, 6, 2, 9]), (1, [4, 4]), (11, [1, 7, 5]), (8, [6]), (3, [2, 8]), (6, [5, 3, 4])]
"""Tokens of each prompt and of the responses to it."""
SHARED = replace(POLICY, share_prefix=True)
CASES = [
    *(("qwen3", layout) for layout in ("d1", "d2", "t2", "p2")), ("mistral_window", "d1"), ("qwen2_tied", "p2"),
    ("qwen3_moe", "d2t2e4"), ("deepseek_v3", "t2"), ("classifier", "d1"),
]  # fmt: skip
PAIRS = [(5, [3, 6]), (11, [1, 7]), (5, [2, 8]), (2, [4, 4])]
FAULTS = ("counted twice", "leak", "positions")


def samples_of(groups=GROUPS) -> TokenBatch:
    """The samples of these groups; every third has a turn of the user's in its middle, which carries no loss."""
    draw = torch.Generator().manual_seed(4)
    tokens, mask, lengths = [], [], []
    for prompt, responses in groups:
        prompt_ids = torch.randint(0, VOCAB, (prompt,), generator=draw)
        for length in responses:
            mask_of_sample = torch.arange(length) >= 0
            mask_of_sample[2:3] = len(lengths) % 3 != 0
            tokens += [prompt_ids, torch.randint(0, VOCAB, (length,), generator=draw)]
            mask += [torch.zeros(prompt, dtype=torch.bool), mask_of_sample]
            lengths.append(prompt + length)
    loss_mask_T = torch.cat(mask)
    weights_T = torch.randn(2, len(loss_mask_T), generator=draw)
    return TokenBatch(
        torch.cat(tokens),
        loss_mask_T,
        lengths,
        temperature=1.1,
        update_tokens=int(loss_mask_T.sum()),
        columns={Column.LOSS_WEIGHTS: weights_T[0], Column.ADVANTAGES: weights_T[1]},
    )


def weighted(output_T, entropy_T, micro):
    """Other weights for every token, also those of values after the last one."""
    return LossOutput((micro[Column.LOSS_WEIGHTS] * output_T + micro[Column.ADVANTAGES] * entropy_T).sum(), {})


@contextmanager
def planted(fault: str, make_packing):
    """What makes packings with the fault on this rank."""
    forward = attention.PackedAttention.forward

    def once_more(self, query, key, value, *rest, packed_seq_params, **options):
        """The same keys, with twice the gradient where several responses have them."""
        times = torch.bincount(packed_seq_params.key_index, minlength=len(key))
        key = torch.where((times > 1)[:, None, None], 2 * key - key.detach(), key)
        return forward(self, query, key, value, *rest, packed_seq_params=packed_seq_params, **options)

    def changed(lengths, *rest, prefixes, **options):
        if fault == "leak":
            # A response's keys begin at the prompt and reach to the response before it.
            starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
            prefixes = [(b, start - b) if n else (0, 0) for (b, n), start in zip(prefixes, starts, strict=False)]
        packing = make_packing(lengths, *rest, prefixes=prefixes, **options)
        if fault == "positions":
            packing.positions_T = torch.cat([torch.arange(length) for length in lengths])
        return packing

    if fault == "counted twice":
        attention.PackedAttention.forward = once_more
    yield changed
    attention.PackedAttention.forward = forward


def computed(mesh, directory: Path, budget: int, fault: str = "", pairs: bool = False):
    """(log-probs or values, loss, gradients, tokens that were computed) with and without shared prefixes."""
    from fivefold.megatron.model import MegatronModel

    policy = replace(SHARED, tokens_per_micro_batch=budget)
    head = directory.name == "classifier"
    model = MegatronModel(directory, policy, mesh, total_updates=20, value_head=head)
    assert model._batching.share_prefix
    whole = replace(samples_of(PAIRS), samples_per_comparison=2) if pairs else samples_of()
    shard = whole.select([n for n in range(len(whole.lengths_N)) if (n // 4) % mesh.layout.dp == mesh.ranks.coords.dp])
    results, make_packing = [], model._batching.make_packing
    for share in (True, False):
        with planted(fault if share else "", make_packing) as changed:
            model._batching = replace(model._batching, share_prefix=share, make_packing=changed)
            output_T = model.forward(shard)
            report = model.train_step(shard, weighted)
        results.append((output_T, report.loss, gradient_sum(model), report.tokens))
    return results


@pytest.fixture(scope="module")
def results_of(cluster, models, tmp_path_factory):
    classifier = make_classifier(tmp_path_factory.mktemp("model") / "classifier")

    def call(name: str, layout: str, *arguments):
        return (f"megatron:{layout}", computed, classifier if name == "classifier" else models(name), *arguments)

    calls = {(*case, 24): call(*case, 24) for case in CASES}
    calls["qwen3", "d1", 500] = call("qwen3", "d1", 500)
    calls |= {fault: call("qwen3", "d1", 500, fault) for fault in FAULTS}
    calls["pairs"] = call("qwen3", "d1", 24, "", True)
    return Together(cluster, calls)


def gaps(shared, alone) -> tuple[float, float, float]:
    """Differences of log-probs (largest), loss (relative) and gradient (relative to its norm)."""
    (output_T, loss, gradient, _), (other_T, other_loss, other_gradient, _) = shared, alone
    relative = float((gradient - other_gradient).norm() / other_gradient.norm())
    return float((output_T - other_T).abs().max()), abs(loss - other_loss) / abs(other_loss), relative


@pytest.mark.parametrize(("name", "layout", "budget"), [*((*case, 24) for case in CASES), ("qwen3", "d1", 500)])
def test_a_shared_prompt_gives_the_log_probs_and_gradients_of_one_for_each_sample(results_of, name, layout, budget):
    """Float32's rounding apart: sums over a micro-batch have another order. A budget of 24 splits groups."""
    for shared, alone in results_of[name, layout, budget]:
        output, loss, gradient = gaps(shared, alone)
        assert output <= 4e-6 and loss <= 4e-6 and gradient <= 1e-6
        assert shared[3] < alone[3] == sum(samples_of().lengths_N)


def test_pairs_that_are_compared_share_their_prompt_and_stay_together(results_of):
    (shared, alone), *_ = results_of["pairs"]
    assert max(gaps(shared, alone)) <= 4e-6 and shared[3] < alone[3]


@pytest.mark.parametrize(("fault", "place"), [("counted twice", 2), ("leak", 0), ("positions", 0)])
def test_a_prefix_that_counts_once_too_often_or_a_mask_that_leaks_is_seen(results_of, fault, place):
    """Counted twice the log-probs are right and only the gradient is not."""
    (shared, alone), *_ = results_of[fault]
    differences = gaps(shared, alone)
    assert differences[place] > 1e-2
    assert fault != "counted twice" or differences[0] <= 4e-6


def test_gradients_of_keys_that_many_pieces_have_are_summed_in_float32():
    """In bfloat16 a sum of ones would end at 256."""
    rows = torch.ones(2, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    _Gather.apply(rows, torch.tensor([0] * 300 + [1])).sum().backward()
    assert rows.grad.flatten().tolist() == [300, 1]


# --- who shares -------------------------------------------------------------------------------------------------------


def test_sharing_a_long_prompt_among_eight_long_responses_saves_44_percent_of_tokens():
    batch = samples_of([(1000, [1000] * 8)] * 2)
    units = make_units(batch, budget=16384, share=True)
    assert [unit.samples for unit in units] == [list(range(8)), list(range(8, 16))]
    assert 1 - sum(sum(unit.computed(batch.lengths_N)) for unit in units) / sum(batch.lengths_N) == 0.4375
    assert make_units(batch, 16384, share=False) == [Unit([sample]) for sample in range(16)]


def test_a_group_beyond_the_budget_is_split_and_each_part_computes_the_prompt():
    batch = samples_of([(4, [5, 6, 7, 8]), (9, [2, 3])])
    units = make_units(batch, budget=20, share=True)
    assert [(unit.samples, unit.prefix) for unit in units] == [([0, 3], 4), ([1, 2], 4), ([4, 5], 9)]
    # The longest alone is beyond it: it fills a micro-batch by itself, whole.
    assert Unit([3]) in make_units(batch, budget=11, share=True)


def test_what_is_computed_of_a_unit():
    assert make_pieces([8, 9, 7], [Unit([3, 1], prefix=5), Unit([2])]) == [
        Piece(0, 5, copies=(8,)), Piece(5, 3, prefix=0), Piece(13, 4, prefix=0), Piece(17, 7),
    ]  # fmt: skip


def test_samples_without_a_token_that_carries_loss_are_computed_whole():
    batch = samples_of([(4, [3, 3]), (2, [2, 2])])
    batch.loss_mask_T[:14] = False
    assert make_units(batch, budget=100, share=True) == [Unit([0]), Unit([1]), Unit([2, 3], prefix=2)]


def test_where_prefixes_cannot_be_shared_they_are_not():
    policy = PolicyConfig(share_prefix=True)
    assert policy.shares_prefix_on(ParallelLayout.parse("megatron:d2t2p2"))
    assert not policy.shares_prefix_on(ParallelLayout.parse("megatron:c2"))


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ({"backend": "megatron:c2"}, "so c1"),
        ({"megatron": {"transformer": {"moe_z_loss_coeff": 0.1}}}, "routers' losses"),
        ({"megatron": {"transformer_impl": "auto"}}, "transformer_impl: torch"),
    ],
)
def test_what_cannot_share_prefixes_is_refused(policy, reason):
    RunConfig.of(model={"path": "here"}, policy={"share_prefix": True})
    with pytest.raises(ValueError, match=f"policy.share_prefix .*{reason}"):
        RunConfig.of(model={"path": "here"}, policy={"share_prefix": True, **policy})
