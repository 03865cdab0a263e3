"""Values that the critic computes before each update: every update is a step of its own, on samples of the same weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fivefold.algo.methods import Choices, Correction
from fivefold.algo.term import Progress
from fivefold.columns import Column
from fivefold.config.roles import Learns
from fivefold.rollout.packing import pack
from fivefold.rollout.stats import gather_stats
from fivefold.trainer.step_work import StepWork
from tests.support.toy import ToyModel, toy_parts

GAMMA, LAM, CLIP, RATE = 0.9, 0.8, 0.5, 0.1
CHOICES = Choices(gamma=GAMMA, lam=LAM, rollout_correction=Correction(old_logprobs_from="engine"))


class SharedCritic(ToyModel):
    """A value by place alone, so that what one update learns moves the values of the next."""

    def _output(self, batch):
        return self.table[0, batch.positions_T, 0], torch.zeros(len(batch.positions_T))


def one_step(mesh, run_dir: Path, per_update: bool):
    """A step of two updates: (its samples by update, advantages by sample of this replica, the critic's table)."""
    run = toy_parts(mesh, run_dir, "ppo", CHOICES, ToyModel(), 1, values_per_update=per_update)
    critic, objective = SharedCritic(value_head=True), run.objective
    models = replace(
        run.models, by_role={**run.models.by_role, "critic": critic}, learners={"critic": run.models.learners["critic"]}
    )
    # So that values differ from the start, and the first update moves them.
    critic.table.data += torch.arange(critic.table.numel()).view_as(critic.table).sin() / 2
    start = critic.table.detach().clone()
    run.engine.update_weights(models.policy.weights(), 0)
    groups = run.rollouts.next(0)
    stats = gather_stats(groups, mesh.ranks, run.plan)
    batch = pack(groups, stats, mesh.ranks, run.plan)
    models.annotate(batch, objective.needs(run.plan.updates_per_step), stats)
    objective.assign_advantages(batch, stats, mesh.ranks)
    models.update(Learns.WITH_POLICY, StepWork(stats, batch, []), Progress())
    rows = []
    for place, row in enumerate(batch.sample_index_N):
        index_T = batch.token_index([place])
        inside_T = index_T[batch.loss_mask_T[index_T]]
        reward, update = float(stats.rewards_N[row]), int(stats.minibatch_N[row])
        rows.append((row, update, reward, batch[Column.ADVANTAGES][inside_T].tolist()))
    return rows, start, critic.table.detach().clone()


def expected(rows, table: torch.Tensor, updates: list[list[tuple]]) -> tuple[dict[int, list[float]], torch.Tensor]:
    """By hand, update after update: values, GAE from the end, whitening over its tokens, one step of Adam on the value loss."""
    table = table.clone().requires_grad_()
    adam, advantages_by_row = torch.optim.Adam([table], lr=RATE), {}
    for samples in updates:
        advantages, returns, olds = {}, {}, {}
        for row, _, reward, tokens in samples:
            values = [float(table[0, place, 0].detach()) for place in range(len(tokens))]
            behind, gae, ahead = 0.0, [], 0.0
            for place in reversed(range(len(tokens))):
                earned = reward if place == len(tokens) - 1 else 0.0
                gae.insert(0, earned + GAMMA * behind - values[place] + GAMMA * LAM * ahead)
                behind, ahead = values[place], gae[0]
            advantages[row] = gae
            returns[row], olds[row] = [a + v for a, v in zip(gae, values, strict=True)], values
        flat = torch.tensor([value for gae in advantages.values() for value in gae], dtype=torch.float64)
        mean, deviation = flat.mean(), flat.std(correction=1)
        advantages_by_row |= {row: [float((value - mean) / deviation) for value in gae] for row, gae in advantages.items()}
        loss = torch.zeros(())
        for row, _, _, tokens in samples:
            for place in range(len(tokens)):
                value, goal, old = table[0, place, 0], returns[row][place], olds[row][place]
                near = value.clamp(old - CLIP, old + CLIP)
                loss = loss + 0.5 * torch.maximum((value - goal) ** 2, (near - goal) ** 2) / len(flat)
        adam.zero_grad()
        loss.backward()
        adam.step()
    return advantages_by_row, table.detach()


@pytest.mark.parametrize("layout", ["d1", "d2"])
def test_values_of_an_update_are_those_of_the_critic_that_the_one_before_has_left(cluster, tmp_path, layout):
    replicas = cluster.run(one_step, f"megatron:{layout}", tmp_path, True)
    rows = [row for rows_of_replica, _, _ in replicas for row in rows_of_replica]
    updates = [[row for row in rows if row[1] == number] for number in (0, 1)]
    assert all(updates)
    if layout == "d2":
        # Each replica of the toy has a critic of its own, which sums over no one: only the first update is the same.
        updates = updates[:1]
    advantages, table = expected(rows, replicas[0][1], updates)
    for row, number, *_, advantage in rows:
        if number < len(updates):
            assert advantage == pytest.approx(advantages[row], rel=1e-4, abs=1e-5)
    if layout == "d1":
        torch.testing.assert_close(replicas[0][2], table, rtol=1e-4, atol=1e-5)


def test_otherwise_they_are_those_of_the_step(cluster, tmp_path):
    ((rows, start, _),) = cluster.run(one_step, "megatron:d1", tmp_path, False)
    together, _ = expected(rows, start, [rows])
    assert all(advantage == pytest.approx(together[row], rel=1e-4, abs=1e-5) for row, *_, advantage in rows)
