"""The process reward model: two updates and the advantages made of its rewards against transformers, on every kind of layout,
the policy's or its own, on the policy's ranks or others."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.algo.methods import ProcessReward
from fivefold.algo.objective import make_objective
from fivefold.algo.term import Progress
from fivefold.columns import Column
from fivefold.config.roles import Learns
from fivefold.layout import ParallelLayout
from fivefold.types import RolloutStats
from tests.support.shards import shard_of_replica
from tests.support.tiny_models import load_tensors
from tests.support.two_steps import BOUNDS, GROUP, LENGTHS, OPTIMIZER, POLICY, PROMPTS, whole_batch

BETA, COEF, OUTCOME = 0.5, 3.0, 2.0
REWARDS = [1.0, 0, 0, 1, 0, 0, 1, 0]
UPDATES = [[0, 1, 2, 3], [4, 5, 6, 7]]


@dataclass(frozen=True)
class Case:
    policy: str
    prm: str
    first: int = 0
    """Rank where the process reward model begins."""
    update: str = "before"
    loss: str = "ce"
    reference: str = "initial"

    def __str__(self) -> str:
        apart, rest = f"@{self.first}" if self.first else "", (self.update, self.loss, self.reference)
        usual = ("before", "ce", "initial")
        return f"{self.policy}-{self.prm}{apart}" + "".join(f" {x}" for x, y in zip(rest, usual, strict=True) if x != y)

    def layout(self, role: str) -> ParallelLayout:
        return ParallelLayout.parse(f"megatron:{getattr(self, role)}")

    @property
    def world_size(self) -> int:
        return max(self.layout("policy").world_size, self.first + self.layout("prm").world_size)


CASES = [
    Case("d1", "d1"), Case("d2", "d2"), Case("t2", "t2"), Case("p2", "p2"), Case("c2", "c2"),
    Case("d2", "t2"), Case("t2", "p2"), Case("p2", "c2"), Case("c2", "d2"),
    Case("d1", "d1", 1), Case("d2", "t2", 2), Case("d1", "d2", 1),
    Case("d1", "d1", update="after"), Case("d2", "t2", update="after"),
    Case("d1", "d1", update="after", loss="dpo"), Case("t2", "d2", update="after", loss="dpo"),
    Case("d1", "d1", reference="policy"), Case("p2", "t2", reference="policy"),
]  # fmt: skip


def stats_of() -> RolloutStats:
    whole = torch.zeros(len(LENGTHS), dtype=torch.long)
    return RolloutStats(
        group_N=torch.arange(len(LENGTHS)) // GROUP, rewards_N=torch.tensor(REWARDS, dtype=torch.float64),
        response_lengths_N=torch.tensor(LENGTHS) - torch.tensor(PROMPTS), prompt_lengths_N=torch.tensor(PROMPTS),
        lengths_N=torch.tensor(LENGTHS), finished_N=whole == 0, correct_N=torch.tensor(REWARDS) > 0,
        repetition_N=whole.double(), version_N=whole, versions_differ=False, rank_N=whole, minibatch_N=whole, owner_N=whole,
        max_response_tokens=32, has_logprobs=True,
    )  # fmt: skip


def objective_of(update: str, loss: str, reference: str):
    chosen: dict[str, Any] = {"update": update, "loss": loss, "reference": reference}
    return make_objective("prime", process_reward=ProcessReward(coef=COEF, outcome_coef=OUTCOME, beta=BETA, **chosen))


def learned(mesh, case: Case, directory: Path, other: Path):
    """What the loop does with the model: annotate, its updates, advantages."""
    from fivefold.backends import Meshes
    from fivefold.distributed.redealing import on_replicas_of
    from fivefold.megatron.model import MegatronModel
    from fivefold.trainer.checks import SkipGuard
    from fivefold.trainer.learners import ProcessRewardLearner
    from fivefold.trainer.models import Models
    from fivefold.trainer.step_work import StepWork

    settings = replace(POLICY, tokens_per_micro_batch=32)
    meshes = Meshes(mesh.ranks.on_layout(case.layout("policy")), mesh.device, 0, 10)
    ranks, objective, stats = meshes.ranks, objective_of(case.update, case.loss, case.reference), stats_of()

    def model(role: str, directory: Path, first: int, **options: Any):
        role_mesh, there = meshes.of(case.layout(role), first)
        return on_replicas_of(
            ranks, None if there is None else MegatronModel(directory, settings, there, **options), role_mesh
        )

    prm = model("prm", directory, case.first, total_updates=2, updates_per_step=2)
    is_policy = case.reference == "policy"
    by_role = {"prm": prm, "prm.reference": model("policy", other, 0) if is_policy else model("prm", other, case.first)}
    learner, guard = (
        ProcessRewardLearner(objective.process, ranks, "prm", updates_per_step=2),
        SkipGuard(ranks, 0, directory, print),
    )
    models = Models(by_role, ranks, guard, {"prm": learner})
    mine = shard_of_replica(ranks, range(len(LENGTHS)))
    batch = whole_batch().select(mine)
    models.annotate(batch, objective.needs(1), stats)
    work = StepWork(stats, batch, [])
    models.update(Learns.BEFORE_ADVANTAGES, work, Progress())
    objective.assign_advantages(batch, stats, ranks)
    whole_T = torch.zeros(sum(LENGTHS))
    whole_T[whole_batch().token_index(mine)] = batch[Column.ADVANTAGES]
    prm.verify()
    state = {name: tensor.clone() for name, tensor in prm.weights()}
    numbers = [(report.loss, report.grad_norm) for report in work.reports["prm"]]
    return numbers, ranks.all_reduce_sum(whole_T), state, work.reports["prm"][-1].metrics["prm/pair_accuracy"]


def oracle(directory: Path, other: Path, tmp: Path, update: str, loss: str):
    """The same with transformers, torch.optim.AdamW and loops; temperature 1 whatever the policy samples by."""
    import transformers

    load = transformers.AutoModelForCausalLM.from_pretrained
    model, compared = load(directory).float(), load(other).float()
    decay, plain = ([p for p in model.parameters() if (p.ndim > 1) == matrix] for matrix in (True, False))
    groups = [{"params": decay, "weight_decay": OPTIMIZER.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=OPTIMIZER.lr, betas=tuple(OPTIMIZER.betas), eps=OPTIMIZER.eps)
    ids, starts = whole_batch().token_ids_T, [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]

    def logprobs(of, i: int) -> torch.Tensor:
        tokens = ids[starts[i] : starts[i] + LENGTHS[i]]
        logp = torch.log_softmax(of(tokens[None]).logits[0], -1)
        return logp[PROMPTS[i] - 1 : -1].gather(1, tokens[PROMPTS[i] :, None])[:, 0]

    def ratios() -> list[list[float]]:
        with torch.no_grad():
            return [(logprobs(model, i) - logprobs(compared, i)).tolist() for i in range(len(LENGTHS))]

    before, numbers = ratios(), []
    for rows in UPDATES:
        total = torch.zeros(())
        for i in rows:
            score = BETA * (logprobs(model, i) - logprobs(compared, i).detach()).sum()
            if loss == "dpo":
                others = [BETA * sum(before[j]) for j in rows if REWARDS[j] != REWARDS[i]]
                score = score - statistics.fmean(others)
            total = total - torch.log(torch.sigmoid(score if REWARDS[i] else -score)) / len(rows)
        adam.zero_grad()
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_grad)
        adam.step()
        numbers.append((total.item(), norm.item()))
    rewarding = ratios() if update == "before" else before
    rewards = [[BETA * q for q in scores_of_tokens[:-1]] + [0.0] for scores_of_tokens in rewarding]
    largest = max(abs(sum(rewards_of_sample[t:])) for rewards_of_sample in rewards for t in range(len(rewards_of_sample)))
    rewards = [[r / (largest + 1e-6) for r in rewards_of_sample] for rewards_of_sample in rewards]
    advantages = []
    for i, rewards_of_sample in enumerate(rewards):
        members = [j for j in range(len(LENGTHS)) if j // GROUP == i // GROUP]
        baseline = sum(statistics.fmean(rewards[j]) for j in members) / (GROUP - 1)
        gains = [COEF * (r * GROUP / (GROUP - 1) - baseline) for r in rewards_of_sample]
        gains[-1] += OUTCOME * (REWARDS[i] - statistics.fmean(REWARDS[j] for j in members if j != i))
        advantages += [sum(gains[t:]) for t in range(len(gains))]
    mean, deviation = statistics.fmean(advantages), statistics.stdev(advantages)
    whole_T = torch.zeros(sum(LENGTHS))
    whole_T[whole_batch().loss_mask_T] = torch.tensor([(a - mean) / deviation for a in advantages])
    scores = [sum(scores_of_tokens) for scores_of_tokens in rewarding]
    pairs = [(i, j) for rows in UPDATES for i in rows for j in rows if REWARDS[i] > REWARDS[j]]
    model.save_pretrained(tmp)
    return numbers, whole_T, load_tensors(tmp), statistics.fmean(scores[i] > scores[j] for i, j in pairs)


@pytest.fixture(scope="module")
def expected(models, tmp_path_factory):
    # Weights that are not the policy's and those of the policy are the same file here.
    return cache(
        lambda update, loss: oracle(models("qwen3"), models("llama"), tmp_path_factory.mktemp("oracle"), update, loss)
    )


ADVANTAGE_BOUND = 1e-5
"""A log-prob differs by 1e-6; a return sums up to twenty of them, times β and the coefficient, over the largest return (about
3 β) and the deviation of all (about 1): 20 · 1e-6 / 3 at worst."""


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_updates_and_the_advantages_equal_those_of_transformers(cluster, models, expected, case):
    numbers, whole_T, state, pairs = expected(case.update, case.loss)
    seen = set()
    # A start of its own: groups of a case's layouts last as long as their process.
    results = cluster.run(learned, f"megatron:d{case.world_size}", case, models("qwen3"), models("llama"))
    for reports, advantages_T, weights, accuracy in results:
        for (loss, norm), (expected_loss, expected_norm) in zip(reports, numbers, strict=True):
            assert loss == pytest.approx(expected_loss, rel=BOUNDS[0])
            assert norm == pytest.approx(expected_norm, rel=BOUNDS[1])
        assert float((advantages_T - whole_T).abs().max()) < ADVANTAGE_BOUND
        # A rank has all of the model or nothing.
        assert set(weights) in (set(state), set())
        assert all(float((tensor - state[name]).abs().max()) <= BOUNDS[2] for name, tensor in weights.items())
        assert accuracy == pytest.approx(pairs)
        seen |= set(weights)
    assert seen == set(state)
