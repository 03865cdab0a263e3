"""R2: every optimizer step of a batch sends its tokens where the weights before the first of them did."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fivefold.algo.objective import make_objective
from fivefold.algo.term import Progress
from fivefold.algo.terms.kl import KL
from fivefold.columns import Column
from fivefold.config import RunConfig
from fivefold.config.learners import OptimizerConfig, PolicyConfig
from fivefold.config.roles import Learns
from fivefold.models.families import load_spec
from fivefold.plan.estimate import needs_old_logprobs
from fivefold.rollout.packing import pack
from fivefold.rollout.stats import BatchPlan, gather_stats
from fivefold.routes import NO_ROUTE
from fivefold.trainer.minibatches import MiniBatches, without_skipped
from tests.support.cluster import Together
from tests.support.drawn_groups import draw_groups

LAYOUTS = ("d1", "d2", "t2e2", "p2", "c2")
REWARDS = [[1, 0], [0.1] * 2, [0, 1], [1] * 2, [0, 1], [1, 0], [0] * 2, [1, 0]]
"""Of groups of two; those with equal rewards are left out of the policy's passes."""
POLICY = PolicyConfig(
    dtype="float32",
    tokens_per_micro_batch=40,
    # Fast enough that routers come to choose others.
    optimizer=OptimizerConfig(lr=3e-2, eps=1e-3, clip_grad=1.0),
)
UPDATES, EPOCHS = 2, 2


def chosen_at_first(directory: Path) -> list[torch.Tensor]:
    """[T, L, K] by sample, what the routers of transformers' model choose."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory).float()
    routes: dict[int, list[torch.Tensor]] = {}
    routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    for layer, router in enumerate(routers):
        router.register_forward_hook(lambda _, __, output, layer=layer: routes.setdefault(layer, []).append(output[2]))
    samples = [(group.prompt.token_ids + sample.token_ids) for group in draw_groups(REWARDS) for sample in group.samples]
    with torch.no_grad():
        for token_ids in samples:
            model(torch.tensor([token_ids]))
    return [torch.stack([routes[layer][place] for layer in routes], 1).to(torch.int8) for place in range(len(samples))]


def updated(mesh, directory: Path, routes: list[torch.Tensor], budget: int, run_dir: Path, mode: str = "R2"):
    """(metrics of each optimizer step, parameters) of a step by `Models`, and of one whose routes are given."""
    from fivefold.megatron.model import MegatronModel
    from fivefold.trainer.checks import SkipGuard
    from fivefold.trainer.learners import PolicyLearner
    from fivefold.trainer.models import Models
    from fivefold.trainer.step_work import StepWork, read_work

    objective = make_objective("grpo", kl=KL(coef=0.0))
    groups = mesh.ranks.shard(draw_groups(REWARDS))
    plan = BatchPlan(updates_per_step=UPDATES, max_response_tokens=12, skipped=objective.skipped)
    stats = gather_stats(groups, mesh.ranks, plan)
    batch = pack(groups, stats, mesh.ranks, plan)
    policy = replace(POLICY, tokens_per_micro_batch=budget)
    minibatches, guard = MiniBatches(objective, ppo_epochs=EPOCHS), SkipGuard(mesh.ranks, 0, directory, print)

    model = MegatronModel(directory, policy, mesh, total_updates=UPDATES * EPOCHS)
    learners = {"policy": PolicyLearner(objective, minibatches, mesh.ranks)}
    models = Models({"policy": model}, mesh.ranks, guard, learners, updates=UPDATES * EPOCHS, router_replay=mode)
    models.annotate(batch, objective.needs(UPDATES * EPOCHS), stats)
    objective.assign_advantages(batch, stats, mesh.ranks)
    if Column.ROUTES in batch:
        lost_N = [bool((piece == NO_ROUTE).all()) for piece in batch[Column.ROUTES].split(batch.lengths_N)]
        assert lost_N == stats.skipped_N[batch.sample_index_N].tolist(), "routes of all that is computed, and no others"
    replayed = batch.with_columns({Column.ROUTES: torch.cat([routes[row] for row in batch.sample_index_N])})
    # A checkpoint between optimizer steps keeps them.
    run_dir.mkdir(exist_ok=True)
    StepWork(stats, batch, []).writer(mesh.ranks, {})(run_dir)
    mesh.ranks.barrier()
    work = read_work(run_dir, mesh.ranks, plan)
    models.update(Learns.WITH_POLICY, work, Progress())
    reports = work.reports["policy"]

    other = MegatronModel(directory, policy, mesh, total_updates=UPDATES * EPOCHS)
    expected = []
    for mini in minibatches(replayed, stats):
        expected.append(other.train_step(without_skipped(mini).batch, objective.loss))
    weights = [torch.cat([tensor.flatten().clone() for _, tensor in trained.weights()]) for trained in (model, other)]
    return [[report.metrics for report in reports_of_model] for reports_of_model in (reports, expected)], weights


@pytest.fixture(scope="module")
def steps(cluster, models, tmp_path_factory):
    directory, root = models("qwen3_moe"), tmp_path_factory.mktemp("work")
    routes = chosen_at_first(directory)
    cases = {(layout, "R2"): 40 for layout in LAYOUTS} | {("d1", None): 40, ("d2", None): 40}
    return Together(
        cluster,
        {
            (layout, mode): (f"megatron:{layout}", updated, directory, routes, budget, root / f"{layout}-{mode}", mode)
            for (layout, mode), budget in cases.items()
        },
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_update_takes_the_routes_of_the_weights_before_the_first(steps, layout):
    """Against updates that are given what transformers' routers choose at first; layouts divide the batch in other ways."""
    for (metrics, expected), (parameters, wanted) in steps[layout, "R2"]:
        shares = [metrics_of_update["moe/router_agreement"] for metrics_of_update in metrics]
        assert shares == pytest.approx(
            [metrics_of_update["moe/router_agreement"] for metrics_of_update in expected], abs=1e-6
        )
        # The second epoch sees other routers.
        assert shares[0] == 1 and max(shares[1:]) < 0.98
        # What stands in one order or another is summed in it: three steps of lr from there.
        torch.testing.assert_close(parameters, wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("layout", ["d1", "d2"])
def test_without_it_later_updates_are_others(steps, layout):
    for (metrics, _), (parameters, wanted) in steps[layout, None]:
        assert not any("router_agreement" in name for name in metrics[0])
        assert float((parameters - wanted).abs().max()) > 1e-3


def run(**sections) -> RunConfig:
    return RunConfig.of(model={"path": "here"}, **sections)


def test_r2_needs_more_than_one_update_to_act():
    config = run(policy={"router_replay": "R2"}, algorithm={"name": "grpo", "updates_per_step": 1})
    assert any("policy.router_replay" in line and "one optimizer step" in line for line in ignored(config))
    assert not ignored(run(policy={"router_replay": "R2"}, algorithm={"name": "grpo", "updates_per_step": 2}))


def ignored(config: RunConfig) -> list[str]:
    from fivefold.config.validate import validate

    return [" ".join(line) for line in validate(config).ignored]


def test_the_estimate_counts_the_pass_that_records():
    method = {"name": "grpo", "updates_per_step": 2, "rollout_correction": {"old_logprobs_from": "engine"}}
    replaying, plain = run(policy={"router_replay": "R2"}, algorithm=method), run(algorithm=method)
    assert needs_old_logprobs(replaying.algorithm, replaying.policy)
    assert not needs_old_logprobs(plain.algorithm, plain.policy)


def test_a_model_without_experts_is_refused(models):
    from fivefold.keys.findings import Findings
    from fivefold.plan.check import _check_spec

    config = RunConfig.of(model={"path": str(models("qwen3"))}, policy={"router_replay": "R2"})
    findings = Findings()
    _check_spec(findings, config, config.roles["policy"], load_spec(models("qwen3")))
    assert any("policy.router_replay" in error and "no routers" in error for error in map(str, findings.errors))
