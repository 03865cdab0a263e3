"""Samples that add exactly nothing to the update are not computed, and nothing else changes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from fivefold.algo.aggregate import LEGACY_AGGREGATE
from fivefold.algo.methods import KL, Correction
from fivefold.algo.objective import make_objective
from fivefold.algo.segments import Segments
from fivefold.algo.surrogates import SURROGATES, make_surrogate
from fivefold.algo.term import Progress, Term
from fivefold.build import build_plan
from fivefold.columns import Column
from fivefold.config import RunConfig
from fivefold.config.learners import PolicyConfig
from fivefold.config.roles import Learns
from fivefold.models.families import load_spec
from fivefold.rollout.packing import pack
from fivefold.rollout.stats import BatchPlan, gather_stats
from fivefold.trainer.checks import Bounds, LogprobGate
from fivefold.trainer.minibatches import MiniBatches, without_skipped
from fivefold.trainer.models import Models
from fivefold.trainer.step_work import StepWork
from fivefold.trainer.update_metrics import update_metrics
from fivefold.types import TokenBatch
from tests.support.cluster import Together
from tests.support.drawn_groups import draw_groups
from tests.support.toy import ToyModel
from tests.support.two_steps import BOUNDS, OPTIMIZER

REWARDS = [[1, 0], [0.1] * 2, [0, 1], [1] * 2, *[[0] * 2] * 4]
"""Of groups of two: in the first of two updates two groups have advantages, in the second none has."""
OFF = KL(coef=0.0)
METHODS = {"grpo": {"kl": OFF}, "dapo": {"overlong_buffer": 3}, "gspo": {}, "rloo": {}}
LAYOUTS = ("d1", "d2", "t2", "p2", "c2")


def stats_of(mesh, objective, groups):
    groups_of_rank = mesh.ranks.shard(groups)
    plan = BatchPlan(updates_per_step=2, max_response_tokens=12, skipped=objective.skipped)
    stats = gather_stats(groups_of_rank, mesh.ranks, plan)
    return stats, pack(groups_of_rank, stats, mesh.ranks, plan)


def with_own_denominators(mini):
    """The fault: weights of what is left after samples were skipped."""
    rest = without_skipped(mini)
    tokens, left = mini.batch.update_tokens, rest.batch.update_tokens
    return replace(
        rest,
        batch=rest.batch.with_columns({Column.LOSS_WEIGHTS: rest.batch[Column.LOSS_WEIGHTS] * (tokens / max(left, 1))}),
    )


def trained(mesh, directory, name: str, budget: int, fault: str = ""):
    """(reports, parameters) of four optimizer steps with and without skipping, on the same replicas."""
    from fivefold.megatron.model import MegatronModel
    from fivefold.trainer import learners as learners_module
    from fivefold.trainer.checks import SkipGuard

    objective = make_objective(name, **METHODS[name])
    stats, batch = stats_of(mesh, objective, draw_groups(REWARDS, 8 if budget == 1 else None))
    if fault == "entropy":
        objective = make_objective(name, **METHODS[name], entropy_coef=0.05)
    if fault == "advantage":
        stats.skipped_N[0] = True
    learners_module.without_skipped = with_own_denominators if fault == "denominators" else without_skipped
    policy = PolicyConfig(dtype="float32", tokens_per_micro_batch=budget, optimizer=OPTIMIZER)
    runs = []
    for skipped_N in (stats.skipped_N, None):
        chosen = replace(stats, skipped_N=skipped_N)
        model = MegatronModel(directory, policy, mesh, total_updates=4)
        guard = SkipGuard(mesh.ranks, 0, directory, print)
        learners = {"policy": learners_module.PolicyLearner(objective, MiniBatches(objective, ppo_epochs=2), mesh.ranks)}
        models = Models({"policy": model}, mesh.ranks, guard, learners)
        part = replace(batch)
        models.annotate(part, objective.needs(4), chosen)
        objective.assign_advantages(part, chosen, mesh.ranks)
        work = StepWork(chosen, part, [])
        models.update(Learns.WITH_POLICY, work, Progress())
        runs.append((work.reports["policy"], torch.cat([tensor.flatten().clone() for _, tensor in model.weights()])))
    return runs


@pytest.fixture(scope="module")
def results(cluster, models):
    cases = [(layout, "grpo", 1, "") for layout in LAYOUTS]
    cases += [(layout, name, 1000, "") for layout in ("d1", "d2") for name in METHODS]
    cases += [("d1", "grpo", 1000, fault) for fault in ("entropy", "denominators", "advantage")]
    directory = models("qwen3")
    return Together(cluster, {case: (f"megatron:{case[0]}", trained, directory, *case[1:]) for case in cases})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_skipping_changes_no_bit_of_any_parameter(results, layout):
    """Each sample in a micro-batch of its own and counts of tokens that are powers of two: no sum has another order.

    In the second update all samples are skipped: momentum and weight decay continue.
    """
    for (skipping, parameters), (full, expected) in results[layout, "grpo", 1, ""]:
        assert torch.equal(parameters, expected)
        assert [(r.loss, r.grad_norm) for r in skipping] == [(r.loss, r.grad_norm) for r in full]
        assert [r.sequences for r in skipping] == [4, 0, 4, 0] and [r.sequences for r in full] == [8] * 4
        assert full[2].loss != full[0].loss and full[1].loss == 0


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("layout", ["d1", "d2"])
def test_the_update_of_every_method_is_the_same_without_what_cannot_matter(results, layout, name):
    """To the bounds of the step's own tests: samples lie in other micro-batches, so sums have another order."""
    for (skipping, parameters), (full, expected) in results[layout, name, 1000, ""]:
        assert float((parameters - expected).abs().max()) <= BOUNDS[2]
        for one, other in zip(skipping, full, strict=True):
            assert one.grad_norm == pytest.approx(other.grad_norm, rel=BOUNDS[1], abs=1e-12)
            assert one.loss == pytest.approx(other.loss, rel=BOUNDS[0], abs=1e-7)
            assert one.sequences < other.sequences


@pytest.mark.parametrize("fault", ["entropy", "denominators"])
def test_a_bonus_that_is_forgotten_or_a_denominator_taken_later_is_seen(results, fault):
    (((_, parameters), (_, expected)),) = results["d1", "grpo", 1000, fault]
    assert float((parameters - expected).abs().max()) > 100 * BOUNDS[2]


def test_a_sample_that_has_an_advantage_is_never_skipped(results):
    with pytest.raises(RuntimeError, match="has an advantage was to be skipped"):
        _ = results["d1", "grpo", 1000, "advantage"]


def test_metrics_are_those_of_the_tokens_that_are_computed(results):
    (((skipping, _), (full, _)),) = results["d1", "grpo", 1, ""]
    assert skipping[0].metrics["policy/skipped_fraction"] == pytest.approx((11 + 13) / (10 + 11 + 12 + 13))
    assert skipping[1].metrics == {"policy/skipped_fraction": 1.0} and "policy/skipped_fraction" not in full[0].metrics
    # The ratio is 1 before the first update whichever tokens it is the mean of.
    assert skipping[0].metrics["policy/ratio_mean"] == pytest.approx(full[0].metrics["policy/ratio_mean"], rel=1e-5)
    step = update_metrics(skipping, "policy")
    assert step["policy/entropy"] == (skipping[0].metrics["policy/entropy"] + skipping[2].metrics["policy/entropy"]) / 2
    assert step["policy/kl_old_last"] == skipping[2].metrics["policy/kl_old"] > 0


# --- what may be skipped ----------------------------------------------------------------------------------------------


def rows(**changes) -> SimpleNamespace:
    """Stats of three groups of three: equal rewards whose mean is rounded, different ones, and equal ones, one cut off."""

    class Stats(SimpleNamespace):
        trajectory_of_N = torch.arange(9)

        def __len__(self) -> int:
            return 9

        @property
        def trajectories(self) -> Stats:
            return self

    base = {
        "rewards_N": torch.tensor([0.1] * 3 + [0, 1, 0] + [1.0] * 3, dtype=torch.float64),
        "group_N": torch.arange(9) // 3,
        "response_lengths_N": torch.tensor([3, 4, 5] * 3),
        "finished_N": torch.tensor([True] * 5 + [False] + [True] * 3),
        "greedy_rewards_N": None,
        "expert_N": None,
        "max_response_tokens": 9,
    }
    return Stats(**base | changes)


EQUAL = [True] * 3 + [False] * 3 + [True] * 3


@pytest.mark.parametrize(
    "name", ["grpo", "dr_grpo", "gspo", "cispo", "sapo", "rloo", "opo", "gpg", "gmpo", "opmd", "rec", "dppo", "maxrl"]
)
def test_groups_of_equal_rewards_are_skipped(name):
    assert make_objective(name, kl=OFF).skipped(rows()).tolist() == EQUAL


def test_a_truncated_response_without_reward_has_no_advantage_and_still_counts():
    """Groups of three, of which the second differs: rewards 0, 0.25, 1 of mean 5/12. How a response ended says it, not how
    many of its tokens carry loss: the first of the second group has 4 of 9, and the last of all ended with its 9th."""
    lengths, rewards = [9, 9, 9, 4, 9, 4, 2, 9, 9], [1.0] * 3 + [0.0, 0.25, 1.0] + [0.0] * 3
    stats = rows(
        response_lengths_N=torch.tensor(lengths),
        rewards_N=torch.tensor(rewards, dtype=torch.float64),
        finished_N=torch.tensor([False, False, False, False, False, True, True, False, True]),
    )
    objective = make_objective("dr_grpo", overlong_zero=True)
    advantages = objective.compared(objective.inputs(stats)).tolist()
    assert advantages == pytest.approx([0, 0, 0, 0, 0.25 - 5 / 12, 1 - 5 / 12, 0, 0, 0])
    assert objective.skipped(stats).tolist() == [True] * 4 + [False] * 2 + [True] * 3
    plain = make_objective("dr_grpo")
    assert plain.compared(plain.inputs(stats)).tolist()[3] == pytest.approx(-5 / 12)


@pytest.mark.parametrize("shaping", [{"overlong_buffer": 4}, {"reward_shift": -0.5}])
def test_a_truncated_response_without_reward_is_known_before_rewards_are_shaped(shaping):
    stats = rows(
        response_lengths_N=torch.tensor([3, 4, 5, 3, 4, 9, 3, 4, 5]),
        rewards_N=torch.tensor([0.0] * 4 + [0.25, 0.0] + [0.5, 1.0, 1.0], dtype=torch.float64),
    )
    objective = make_objective("dr_grpo", overlong_zero=True, **shaping)
    assert objective.compared(objective.inputs(stats))[5] == 0


def test_a_sample_without_weight_is_skipped_whatever_its_advantage_is():
    assert make_objective("dr_grpo", overlong_filter=True).skipped(rows()).tolist() == [*EQUAL[:5], True, *EQUAL[6:]]
    # With a penalty in the loss only those: they have no weight in it either.
    skipped_N = make_objective("grpo", overlong_filter=True, kl=KL(coef=0.1)).skipped(rows())
    assert skipped_N.tolist() == [False] * 5 + [True] + [False] * 3


@pytest.mark.parametrize("weights", ["loss", "penalty"])
def test_a_term_of_the_loss_keeps_every_sample_on_which_it_can_act(weights):
    @dataclass(frozen=True)
    class Everywhere(Term):
        def loss(self, tokens):
            return tokens.logprobs_T

    Everywhere.weights = weights
    plain = make_objective("dr_grpo")
    objective = replace(plain, terms=(*plain.terms, Everywhere()))
    assert plain.skipped(rows()).any() and not objective.skipped(rows()).any()
    # The expert's cross-entropy is 0 on every sampled response.
    chord = make_objective("chord", kl=OFF)
    assert chord.imitation.is_active and chord.skipped(rows()).tolist() == EQUAL


@pytest.mark.parametrize(
    "choices",
    [
        {"kl": KL(coef=0.1)},
        {"entropy_coef": 0.01},
        {"whiten": True},
        {"credit": "gae"},
        {"baseline_shift": -0.1},
        {"surrogate": "rec", "likelihood_coef": 0.1},
        {"surrogate": "rec", "proximal_coef": 0.1},
        {"surrogate": "cpgd", "drift_coef": 0.001},
        {"surrogate": "clip_cov"},
        {"surrogate": "kl_cov"},
        {"rollout_correction": Correction(reject_divergence={"second_moment": 0.04})},
        {"aggregate": LEGACY_AGGREGATE},
        {"kl": KL(coef=0.1, place="reward")},
        {"kl": KL(coef=0.1, target=0.1)},
        {"advantage": "reward", "normalize": "none", "credit": "discounted", "gamma": 1.0, "token_baseline": True},
        {
            "advantage": "reward", "normalize": "none", "credit": "discounted", "gamma": 1.0, "token_baseline": True,
            "overlong_filter": True,
        },
    ],
)  # fmt: skip
def test_nothing_is_skipped_where_a_sample_without_advantage_adds_something(choices):
    skipped_N = make_objective("grpo", **{"kl": OFF, **choices}).skipped(rows())
    assert skipped_N is None or not skipped_N.any()


def test_of_functions_of_the_user_s_nothing_is_assumed(tmp_path):
    (tmp_path / "own.py").write_text("def f(log_ratio_T, logprobs_T, advantages_T, samples):\n    return advantages_T\n")
    for axis in ("surrogate", "advantage", "importance_sampling_level"):
        assert make_objective("grpo", kl=OFF, **{axis: f"{tmp_path}/own.py:f"}).skipped(rows()) is None


@pytest.mark.parametrize("name", SURROGATES)
def test_a_surrogate_s_row_says_whether_it_vanishes_with_the_advantage(name):
    """The formula, on random numbers: value and gradient of a sample without advantages, and what it changes in others."""
    row, draw = SURROGATES[name], torch.Generator().manual_seed(0)
    samples = Segments(torch.arange(12) % 6 > 0, [6, 6], selected_T=torch.arange(12) % 3 == 0)
    advantages_T = torch.randn(12, generator=draw) * torch.tensor([0.0, 1.0]).repeat_interleave(6)

    def computed(surrogate, scale: float):
        noise_T = torch.randn(12, generator=torch.Generator().manual_seed(1))
        noise_T = noise_T * torch.tensor([scale, 0.3]).repeat_interleave(6)
        logprobs_T = (noise_T - 2).requires_grad_()
        value_T = surrogate(logprobs_T + 2.1, logprobs_T, advantages_T, samples)
        (gradient_T,) = torch.autograd.grad(value_T.sum(), logprobs_T)
        return value_T.detach(), gradient_T

    def is_nothing(surrogate) -> bool:
        (value_T, gradient_T), (other_T, other_gradient_T) = computed(surrogate, 0.3), computed(surrogate, 3.0)
        same = torch.equal(value_T[6:], other_T[6:]) and torch.equal(gradient_T[6:], other_gradient_T[6:])
        return same and not any(values[:6].any() for values in (value_T, gradient_T, other_T, other_gradient_T))

    surrogate = make_surrogate(name)
    assert row.vanishes == (is_nothing(surrogate) and not surrogate.selects)
    for key in row.unless:
        assert not is_nothing(make_surrogate(name, **{key: 0.5}))


# --- who computes what ------------------------------------------------------------------------------------------------


def dealt(mesh):
    """Of two replicas the tokens that each computes; of each pair the better response alone has an advantage."""
    objective = make_objective("grpo", advantage="pass_at_k", kl=OFF)
    groups = draw_groups(REWARDS, 8)
    for group in groups:
        group.samples[0].reward, group.samples[1].reward = 1.0, 0.0
    stats, batch = stats_of(mesh, objective, groups)
    # As `annotate` leaves it: no log-probs of what is skipped.
    kept_T = ~stats.skipped_N[batch.sample_index_N].repeat_interleave(torch.tensor(batch.lengths_N))
    batch[Column.OLD_LOGPROBS] = batch[Column.ROLLOUT_LOGPROBS] * kept_T
    gate, other = (LogprobGate(mesh.ranks, Bounds(1e-6), is_open=False, log=print) for _ in range(2))
    scored: list[int] = []

    def annotate(part, needs):
        scored.append(len(part.lengths_N))
        part[Column.OLD_LOGPROBS] = part[Column.ROLLOUT_LOGPROBS].clone()

    models = SimpleNamespace(policy=SimpleNamespace(version=0), annotate=annotate)
    gate.check(batch, stats, models)
    assert not scored
    other.check(batch, replace(stats, skipped_N=torch.ones_like(stats.skipped_N)), models)
    computed = [without_skipped(mini).batch.lengths_N for mini in mini_batches(objective, batch, stats, mesh)]
    return [sum(lengths) for lengths in computed], gate.needs | other.needs, scored == [len(batch.lengths_N)]


def mini_batches(objective, batch, stats, mesh):
    objective.assign_advantages(batch, stats, mesh.ranks)
    return MiniBatches(objective)(batch, stats)


def test_the_replicas_share_what_is_computed_and_the_gate_compares_it(cluster):
    (first, needs, is_scored), (second, *_) = cluster.run(dealt, "megatron:d2")
    for one, other in zip(first, second, strict=True):
        assert abs(one - other) < 0.15 * (one + other)
    # Of a step that trains on nothing some samples are computed for the gate.
    assert not needs and is_scored


class Recorder(ToyModel):
    """A toy model that keeps what it was asked for."""

    def forward(self, batch):
        self.asked = batch.sample_index_N
        return super().forward(batch)


def test_what_is_not_trained_on_gets_no_log_probs():
    batch = TokenBatch(torch.tensor([1, 2, 3, 4, 5, 6]), torch.tensor([False, True, True] * 2), [3, 3], [0, 4])
    model = Recorder()
    models = Models({"policy": model}, ranks=None, guard=None)
    expected = model.forward(batch)
    models.annotate(batch, frozenset({Column.OLD_LOGPROBS}), SimpleNamespace(skipped_N=~torch.tensor(EQUAL)))
    assert model.asked == [0] and torch.equal(batch[Column.OLD_LOGPROBS], torch.cat([expected[:3], torch.zeros(3)]))
    models.annotate(batch, frozenset({Column.OLD_LOGPROBS}))
    assert torch.equal(batch[Column.OLD_LOGPROBS], expected)


@pytest.mark.parametrize(
    ("policy", "skipped"),
    [
        ({}, EQUAL),
        ({"skip_zero_advantage": False}, None),
        ({"megatron": {"transformer": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01}}}, None),
        ({"megatron": {"transformer": {"moe_z_loss_coeff": 0.01}}}, None),
        ({"megatron": {"transformer": {"moe_router_bias_update_rate": 0.01}}}, None),
    ],
)
def test_with_routers_that_look_at_every_token_nothing_is_skipped(models, policy, skipped):
    config = RunConfig.of(model={"path": "here"}, algorithm={"name": "gspo"}, policy=policy)
    plan = build_plan(config, load_spec(models("qwen3_moe")), make_objective("gspo"))
    skipped_N = plan.skipped(rows())
    assert (None if skipped_N is None else skipped_N.tolist()) == skipped
