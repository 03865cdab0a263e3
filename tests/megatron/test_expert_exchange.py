"""The exchange of tokens with the ranks that hold their experts, against every expert computed for every token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from fivefold.megatron.mesh import Mesh

EXPERTS, TOP_K, WIDTH, SEED = 8, 3, 5, 3


def routed(rank: int, tokens: int, choices: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """[T, D] tokens of a rank, [T, E] weights and choice, and [T, K] numbers of the chosen experts."""
    generator = torch.Generator().manual_seed(SEED + rank)
    tokens_TD = torch.randn(tokens, WIDTH, generator=generator, dtype=torch.float64)
    scores_TE = torch.rand(tokens, EXPERTS, generator=generator, dtype=torch.float64)
    if choices == "the first experts":
        scores_TE[:, :TOP_K] += 1
    experts_TK = scores_TE.topk(TOP_K).indices
    chosen_TE = torch.zeros(tokens, EXPERTS, dtype=torch.bool).scatter_(1, experts_TK, True)
    return tokens_TD.requires_grad_(), (scores_TE * chosen_TE).requires_grad_(), chosen_TE, experts_TK


def computed(tokens: torch.Tensor, expert: int, etp: int = 1) -> torch.Tensor:
    """An expert's output, or one of `etp` equal parts that sum to it."""
    return torch.sin(tokens * (expert + 1)) / etp


def exchanged(mesh: Mesh, counts: list[int], choices: str) -> tuple[list[float], list[int], int, int]:
    """Largest differences of outputs and gradients from those of all experts on this rank, the tokens that it sent to each
    rank, those that it got, and their rows."""
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    from fivefold.megatron.layers.expert_exchange import ExpertExchange

    with mesh.active():
        groups = get_default_pg_collection()
    exchange, rank, etp = ExpertExchange(EXPERTS, groups), mesh.ranks.rank, groups.expt_tp.size()
    held = EXPERTS // groups.ep.size()
    first = groups.ep.rank() * held
    tokens_TD, weights_TE, chosen_TE, experts_TK = routed(rank, counts[rank], choices)
    dispatched = exchange.dispatch(tokens_TD, weights_TE, chosen_TE, experts_TK)
    parts = dispatched.tokens_MD.split(dispatched.counts_E.tolist())
    outputs = torch.cat([computed(part, first + index, etp) for index, part in enumerate(parts)])
    result = exchange.combine(outputs * dispatched.weights_M[:, None], dispatched)
    of_result = torch.cos(torch.arange(result.numel(), dtype=torch.float64)).view_as(result)
    result.backward(of_result)
    plain_TD, plain_TE, _, _ = routed(rank, counts[rank], choices)
    every = torch.stack([computed(plain_TD, expert) for expert in range(EXPERTS)], 1)
    plain = (every * (plain_TE * chosen_TE)[:, :, None]).sum(1)
    plain.backward(of_result)
    pairs = [(result, plain), (tokens_TD.grad, plain_TD.grad), (weights_TE.grad, plain_TE.grad)]
    apart = [float((ours - theirs).detach().abs().max()) if ours.numel() else 0.0 for ours, theirs in pairs]
    sent = dispatched.splits[0] if dispatched.sent is not None else [counts[rank]]
    return apart, sent, len(dispatched.copies.places_NK), len(dispatched.tokens_MD)


COUNTS = {1: [7], 2: [7, 4], 4: [7, 0, 5, 9]}
LAYOUTS = ["d1", "d2e2", "t2e2", "d4e4", "(attn:d2t2|ffn:t2e2)", "(attn:t2|ffn:t2)"]


@pytest.mark.parametrize("choices", ["random experts", "the first experts"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_and_gradients_are_those_of_all_experts_on_one_rank(cluster, layout, choices):
    world = {"d1": 1, "d4e4": 4, "(attn:d2t2|ffn:t2e2)": 4}.get(layout, 2)
    results = cluster.run(exchanged, f"megatron:{layout}", COUNTS[world], choices)
    for apart, _, _, _ in results:
        assert max(apart) < 1e-12, apart
    # Every choice of a token is one row, of each of the ranks that divide an expert.
    etp = 2 if "ffn:t2" in layout else 1
    assert sum(rows for _, _, _, rows in results) == etp * TOP_K * sum(COUNTS[world])


@pytest.mark.parametrize("layout", ["d2e2", "d4e4"])
def test_a_token_is_sent_once_to_a_rank_that_has_several_of_its_experts(cluster, layout):
    world = int(layout[1])
    held = EXPERTS // world
    results = cluster.run(exchanged, f"megatron:{layout}", COUNTS[world], "random experts")
    for rank, (_, sent, _, _) in enumerate(results):
        _, _, chosen_TE, _ = routed(rank, COUNTS[world][rank], "random experts")
        assert sent == chosen_TE.unflatten(1, (-1, held)).any(2).sum(0).tolist()
        assert sum(sent) <= TOP_K * COUNTS[world][rank]
    assert sum(sum(sent) for _, sent, _, _ in results) < TOP_K * sum(COUNTS[world])
    assert [got for _, _, got, _ in results] == [sum(sent[rank] for _, sent, _, _ in results) for rank in range(world)]


def test_copies_are_in_order_of_key_and_row():
    from fivefold.megatron.layers.expert_exchange import Copies

    keys_NK = torch.tensor([[2, 0], [1, 2], [0, 9]], dtype=torch.int32)
    copies = Copies.by_key(keys_NK, 5)
    assert copies.source_M.tolist() == [0, 2, 1, 0, 1]
    assert copies.places_NK.tolist() == [[3, 0], [2, 4], [1, -1]]
    rows = torch.arange(6.0).view(3, 2).requires_grad_()
    assert copies.of(rows)[:, 0].tolist() == [0, 4, 2, 0, 2]
    summed = copies.sum(copies.of(rows))
    assert torch.equal(summed, rows * torch.tensor([[2.0], [2.0], [1.0]]))
    summed.sum().backward()
    assert rows.grad is not None and rows.grad[:, 0].tolist() == [2, 2, 1]


def test_sums_of_16_bits_are_in_float32():
    """256 and eight times 1: in bfloat16 each addition would round to 256 again."""
    from fivefold.megatron.layers.expert_exchange import Copies

    keys = torch.arange(9, dtype=torch.int32)[None]
    copies = Copies.by_key(keys, 9)
    rows = torch.tensor([[256.0]] + [[1.0]] * 8, dtype=torch.bfloat16)
    assert copies.sum(rows).item() == 264
