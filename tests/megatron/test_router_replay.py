"""Experts that are chosen again: on every layout the step of transformers with the same choices, and what is recorded."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fivefold.columns import Column
from fivefold.config.learners import MegatronConfig
from fivefold.routes import NO_ROUTE
from fivefold.types import TokenBatch
from tests.megatron.test_shared_prefix import GROUPS, samples_of
from tests.support.cluster import Together
from tests.support.layout_cases import VPP2, Case
from tests.support.shards import shard_of_replica
from tests.support.tiny_models import DEEPSEEK, MOE
from tests.support.two_steps import (
    BOUNDS,
    LENGTHS,
    OBJECTIVE,
    POLICY,
    ROUTER,
    assert_equal,
    difference,
    policy_of,
    reference_step,
    whole_batch,
)

CASES = [
    Case("d1"),
    Case("d2"),
    Case("t2"),
    Case("p2"),
    Case("c2"),
    Case("d2e2"),
    Case("t2e2"),
    Case("c2e2"),
    Case("(attn:d2t2|ffn:t2e2)"),
    Case("t2c2"),
    Case("p4"),
    Case("p2", VPP2),
    Case("t2p2", VPP2),
    Case("d2p2e2", VPP2),
    Case("p2", {"num_layers_in_first_pipeline_stage": 1}),
    Case("t2p2c2e4", VPP2),
]
MODELS = ("qwen3_moe", "deepseek_v3")
"""A router of softmax, and one of sigmoid with groups, a bias that moves, and a dense layer before it."""
EXPERTS, LAYERS = 8, 4
TOP_K = {"qwen3_moe": MOE["num_experts_per_tok"], "deepseek_v3": DEEPSEEK["num_experts_per_tok"]}
DENSE = {"qwen3_moe": 0, "deepseek_v3": DEEPSEEK["first_k_dense_replace"]}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
RECOMPUTED = {
    "full": FULL,
    "two layers": FULL | {"recompute_num_layers": 2},
    "some": FULL | {"recompute_method": "block", "recompute_num_layers": 3},
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "mlp": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "layernorm", "moe_act"]},
}


def routes_of(name: str, tokens: int = sum(LENGTHS), seed: int = 5) -> torch.Tensor:
    """[T, L, K] different experts for every token and layer, which no router would choose; every ninth token has none."""
    draw = torch.Generator().manual_seed(seed)
    shape = (tokens, LAYERS - DENSE[name], EXPERTS)
    routes_TLK = torch.rand(shape, generator=draw).argsort(-1)[..., : TOP_K[name]].to(torch.int8)
    routes_TLK[::9] = NO_ROUTE
    return routes_TLK


def replaying(routes_TLK: torch.Tensor, lengths: list[int]):
    """Makes transformers' routers take these routes, sample by sample; their weights are written out once more."""

    def adapt(model: Any):
        routers = [m for m in model.modules() if type(m).__name__.lower().endswith("topkrouter")]
        assert len(routers) == routes_TLK.shape[1]
        pieces, turn = routes_TLK.split(lengths), [-1]
        model.register_forward_pre_hook(lambda *_: turn.__setitem__(0, (turn[0] + 1) % len(pieces)))
        for layer, router in enumerate(routers):
            original = router.forward

            def forward(hidden: torch.Tensor, router: Any = router, original: Any = original, layer: int = layer):
                _, _, chosen = original(hidden)
                given = pieces[turn[0]][:, layer].long()
                chosen = torch.where(given < 0, chosen, given)
                logits = F.linear(hidden.reshape(-1, router.hidden_dim).float(), router.weight.float())
                sigmoid = hasattr(router, "e_score_correction_bias")
                scores = (logits.sigmoid() if sigmoid else logits.softmax(-1)).gather(1, chosen)
                weights = scores / scores.sum(-1, keepdim=True) * (router.routed_scaling_factor if sigmoid else 1)
                return logits, weights, chosen

            router.forward = forward
        return lambda: None

    return adapt


_ORACLES: dict[Any, Any] = {}


def oracle(directory: Path, name: str, options: dict[str, Any]):
    key = (name, bool(options))
    if key not in _ORACLES:
        _ORACLES[key] = reference_step(directory, options, replaying(routes_of(name), LENGTHS))
    return _ORACLES[key]


def replayed_step(mesh, directory: Path, policy, base_T, routes_TLK: torch.Tensor, updates: int = 2):
    """The two steps of `megatron_step` with these routes."""
    from fivefold.megatron.model import MegatronModel

    model = MegatronModel(directory, policy, mesh, total_updates=updates)
    batch = whole_batch()
    batch = batch.with_columns(
        {
            Column.OLD_LOGPROBS: base_T + batch[Column.OLD_LOGPROBS],
            Column.REF_LOGPROBS: base_T + batch[Column.REF_LOGPROBS],
            Column.ROUTES: routes_TLK,
        }
    )
    mine = batch.select(shard_of_replica(mesh.ranks, range(len(LENGTHS))))
    reports = [model.train_step(mine, OBJECTIVE.loss) for _ in range(updates)]
    return reports, {name: tensor.clone() for name, tensor in model.weights()}


def recomputing(name: str, how: str):
    return replace(policy_of(name, Case("d1"), 32), megatron=MegatronConfig(transformer=ROUTER | RECOMPUTED[how]))


@pytest.fixture(scope="module")
def steps(cluster, models):
    """Results by (model, case), (model, layout, recomputation)."""

    def call(name: str, layout: str, policy):
        base_T = oracle(models(name), name, ROUTER)[2]
        return f"megatron:{layout}", replayed_step, models(name), policy, base_T, routes_of(name)

    calls = {(name, str(case)): call(name, case.layout, policy_of(name, case, 32)) for name in MODELS for case in CASES}
    for name in MODELS:
        for layout in ("t2e2", "p2"):
            for how in RECOMPUTED:
                calls[name, layout, how] = call(name, layout, recomputing(name, how))
    return Together(cluster, calls)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_replayed_routes_give_the_step_of_transformers_on_every_layout(steps, models, name, case):
    """Two updates with routes that no router would choose, routers' balance and z-losses, and biases that move."""
    assert_equal(steps[name, str(case)], oracle(models(name), name, ROUTER))


@pytest.mark.parametrize("how", RECOMPUTED)
@pytest.mark.parametrize("layout", ["t2e2", "p2"])
@pytest.mark.parametrize("name", MODELS)
def test_layers_that_are_computed_again_take_the_same_routes(steps, models, name, layout, how):
    assert_equal(steps[name, layout, how], oracle(models(name), name, ROUTER))


def test_the_share_of_routes_that_routers_choose_too_is_the_same_on_every_layout(steps):
    metrics_of_runs = [
        report.metrics for case in CASES for reports, _ in steps["qwen3_moe", str(case)] for report in reports[:1]
    ]
    assert 0 < metrics_of_runs[0]["moe/router_agreement"] < 0.5, "routes drawn at random: 2 of 8"
    for metrics in metrics_of_runs:
        names = [name for name in metrics if name.startswith("moe/router_agreement")]
        assert len(names) == LAYERS + 1
        assert [metrics[name] for name in names] == pytest.approx([metrics_of_runs[0][name] for name in names], abs=1e-6)


# --- what is recorded ------------------------------------------------------------------------------------------------


def recorded(mesh, directory: Path, policy, batch: TokenBatch):
    """(routes of this replica's samples, which they are, log-probs without and with them)."""
    from fivefold.megatron.model import MegatronModel

    model = MegatronModel(directory, policy, mesh)
    shard = shard_of_replica(mesh.ranks, range(len(batch.lengths_N)))
    mine = replace(batch.select(shard), records_routes=True)
    before = model.forward(mine)
    assert Column.ROUTES in mine
    return mine[Column.ROUTES], shard, before, model.forward(replace(mine, records_routes=False))


@cache
def chosen_by_transformers(directory: Path, groups: Any = None) -> torch.Tensor:
    """[T, L, K] sorted, of transformers' routers."""
    import transformers

    batch = whole_batch() if groups is None else samples_of(GROUPS)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory).float()
    outputs: dict[Any, list[torch.Tensor]] = {}
    for module in model.modules():
        if type(module).__name__.lower().endswith("topkrouter"):
            module.register_forward_hook(lambda module, _, output: outputs.setdefault(module, []).append(output[2]))
    with torch.no_grad():
        for tokens in batch.token_ids_T.split(batch.lengths_N):
            model(tokens[None])
    return torch.stack([torch.cat(calls) for calls in outputs.values()], 1).sort(-1).values


@pytest.fixture(scope="module")
def records(cluster, models):
    """Results by (model, case), and by layout of the batch whose prompts are shared."""
    calls: dict[Any, Any] = {
        (name, str(case)): (f"megatron:{case.layout}", recorded, models(name), policy_of(name, case, 32), whole_batch())
        for name in MODELS
        for case in CASES
    }
    shared = replace(POLICY, tokens_per_micro_batch=48, share_prefix=True)
    for layout in ("d1", "d2t2e4", "p2"):
        calls["shared", layout] = (f"megatron:{layout}", recorded, models("qwen3_moe"), shared, samples_of(GROUPS))
    return Together(cluster, calls)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_the_routes_that_are_recorded_are_those_of_transformers_on_every_layout(records, models, name, case):
    pieces = chosen_by_transformers(models(name)).split(LENGTHS)
    for routes_TLK, shard, before_T, after_T in records[name, str(case)]:
        assert routes_TLK.dtype == torch.int8
        assert torch.equal(routes_TLK.sort(-1).values.long(), torch.cat([pieces[sample] for sample in shard]))
        # The same numbers in the same order of summation.
        assert torch.equal(before_T, after_T)


@pytest.mark.parametrize("layout", ["d1", "d2t2e4", "p2"])
def test_routes_of_a_shared_prompt_are_recorded_for_every_sample(records, models, layout):
    batch = samples_of(GROUPS)
    pieces = chosen_by_transformers(models("qwen3_moe"), "shared").split(batch.lengths_N)
    for routes_TLK, shard, before_T, after_T in records["shared", layout]:
        assert torch.equal(routes_TLK.sort(-1).values.long(), torch.cat([pieces[sample] for sample in shard]))
        assert torch.equal(before_T, after_T)


# --- replay against none ---------------------------------------------------------------------------------------------


def with_and_without(mesh, directory: Path, policy, base_T):
    """Weights after an update with routes that were recorded just before it, and without any."""
    from fivefold.megatron.model import MegatronModel

    weights = []
    for replays in (True, False):
        model = MegatronModel(directory, policy, mesh, total_updates=1)
        batch = whole_batch().select(shard_of_replica(mesh.ranks, range(len(LENGTHS))))
        batch = replace(batch, records_routes=replays)
        model.forward(batch)
        assert (Column.ROUTES in batch) == replays
        report = model.train_step(replace(batch, records_routes=False), OBJECTIVE.loss)
        assert report.metrics.get("moe/router_agreement") == (1.0 if replays else None)
        weights.append({name: tensor.clone() for name, tensor in model.weights()})
    return weights


@pytest.mark.parametrize("layout", ["d1", "t2e2", "c2"])
@pytest.mark.parametrize("name", MODELS)
def test_replay_with_the_weights_that_recorded_changes_no_bit(cluster, models, name, layout):
    policy = policy_of(name, Case(layout), 32)
    for replayed, plain in cluster.run(with_and_without, f"megatron:{layout}", models(name), policy, torch.zeros(1)):
        assert all(torch.equal(replayed[key], plain[key]) for key in plain)


# --- injected faults: each must be seen by the comparison above -------------------------------------------------------


def another_layer(routes_TLK):
    return routes_TLK.roll(1, 1)


def shifted_by_a_token(routes_TLK):
    return routes_TLK.roll(1, 0)


def another_sample(routes_TLK):
    """Samples 2 and 3 have exchanged theirs, as far as both are long."""
    starts = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
    (one, _), (two, _) = list(pairwise(starts))[2], list(pairwise(starts))[3]
    changed = routes_TLK.clone()
    changed[one : one + 5], changed[two : two + 5] = routes_TLK[two : two + 5], routes_TLK[one : one + 5]
    return changed


def without_routes(routes_TLK):
    return torch.full_like(routes_TLK, NO_ROUTE)


def recomputed_without_replay(mesh, *arguments):
    """Layers that are computed again ask the router."""
    from megatron.core.tensor_parallel.random import is_checkpointing

    from fivefold.backend.routing import Choice

    original = Choice.__init__

    def init(self, routes_TK):
        original(self, None if is_checkpointing() and torch.is_grad_enabled() else routes_TK)
        self.agreement = lambda real_T: torch.zeros(2)

    Choice.__init__ = init
    return replayed_step(mesh, *arguments)


def weights_of_the_routers_choice(mesh, *arguments):
    """Experts that are replayed get the weights of those that the router would choose."""
    from fivefold.backend.routing import Choice

    original = Choice.get_replay_topk

    def get(self, scores_TE, topk, *given):
        _, taken_TK = original(self, scores_TE, topk, *given)
        return scores_TE.topk(topk).values, taken_TK

    Choice.get_replay_topk = get
    return replayed_step(mesh, *arguments)


def routers_do_not_learn(mesh, *arguments):
    from fivefold.backend.routing import Choice

    original = Choice.get_replay_topk

    def get(self, scores_TE, *given):
        return original(self, scores_TE.detach(), *given)

    Choice.get_replay_topk = get
    return replayed_step(mesh, *arguments)


@pytest.mark.parametrize("fault", [another_layer, shifted_by_a_token, another_sample, without_routes])
@pytest.mark.parametrize("name", MODELS)
def test_other_routes_are_seen(cluster, models, name, fault):
    expected = oracle(models(name), name, ROUTER)
    arguments = models(name), policy_of(name, Case("t2e2"), 32), expected[2], fault(routes_of(name))
    differences = difference(cluster.run(replayed_step, "megatron:t2e2", *arguments), expected)
    assert max(value / bound for value, bound in zip(differences, BOUNDS, strict=True)) > 100


@pytest.mark.parametrize("fault", [recomputed_without_replay, weights_of_the_routers_choice, routers_do_not_learn])
def test_faults_of_replay_are_seen(cluster, models, fault):
    expected = oracle(models("qwen3_moe"), "qwen3_moe", ROUTER)
    arguments = models("qwen3_moe"), recomputing("qwen3_moe", "full"), expected[2], routes_of("qwen3_moe")
    differences = difference(cluster.run(fault, "megatron:d1", *arguments), expected)
    assert max(value / bound for value, bound in zip(differences, BOUNDS, strict=True)) > 100


def test_a_route_that_names_an_expert_twice_is_the_router_s_choice():
    """An engine's rows of an aborted response can be zeros: a token goes to no expert twice."""
    from fivefold.backend.routing import Choice

    scores_TE = torch.tensor([[0.1, 0.9, 0.5, 0.2]] * 4)
    choice = Choice(torch.tensor([[3, 0], [0, 0], [-1, -1], [-1, 3]], dtype=torch.int8))
    scores_TK, taken_TK = choice.get_replay_topk(scores_TE, 2, None, None, lambda scores, topk, **_: scores.topk(topk))
    assert taken_TK.tolist() == [[3, 0], [1, 2], [1, 2], [1, 2]] == choice.taken_TK.tolist()
    assert torch.equal(scores_TK, scores_TE.gather(1, taken_TK))
