"""Reference and critic on layouts of their own, on the policy's ranks: the same PPO updates as with one process."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.algo.advantages import AdvantageInputs
from fivefold.algo.objective import make_objective
from fivefold.algo.terms.kl import KL
from fivefold.algo.values import ValueLoss
from fivefold.columns import Column
from fivefold.config.learners import MegatronConfig
from fivefold.layout import ParallelLayout
from tests.support.layout_cases import VPP2
from tests.support.shards import shard_of_replica
from tests.support.tiny_models import make_classifier
from tests.support.two_steps import BOUNDS, LENGTHS, MAX_RESPONSE, POLICY, PROMPTS, whole_batch

PPO = make_objective("ppo", gamma=0.95, lam=0.9, kl=KL(coef=0.5))
REWARDS = [1.0, 0, 0, 1, 0.5, 0, 1, 0]
FINISHED = [True, False, True, True, True, True, False, True]
UPDATES = [[0, 1, 2, 3, 4], [5, 6, 7]]
"""Samples of each: a replica of four gets none of some."""


@dataclass(frozen=True)
class Case:
    policy: str
    reference: str
    critic: str
    model: str = "qwen3"
    pipeline: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By role."""
    first: dict[str, int] = field(default_factory=dict)
    """The first rank, by role; left out where it is 0."""

    def __str__(self) -> str:
        return "-".join(
            layout + (" vpp" if role in self.pipeline else "") + (f"@{self.first[role]}" if role in self.first else "")
            for role, layout in [("policy", self.policy), ("reference", self.reference), ("critic", self.critic)]
        ) + ("" if self.model == "qwen3" else f" {self.model}")  # fmt: skip

    def layout(self, role: str) -> ParallelLayout:
        return ParallelLayout.parse(f"megatron:{getattr(self, role)}")

    @property
    def world_size(self) -> int:
        return max(self.first.get(role, 0) + self.layout(role).world_size for role in ("policy", "reference", "critic"))


CASES = [
    Case("d2", "t2", "p2"),
    Case("t2", "d2", "c2"),
    Case("p2", "d2", "t2", pipeline={"policy": VPP2}),
    Case("c2", "p2", "d2", pipeline={"reference": VPP2}),
    Case("d4", "t2p2", "d2t2"),
    Case("d2t2", "d4", "t2p2", pipeline={"critic": VPP2}),
    Case("t2p2", "d4", "d2c2", pipeline={"policy": VPP2}),
    Case("d2p2", "t2c2", "d4"),
    Case("t2p2e2", "d4e4", "d4e2", "qwen3_moe", {"policy": VPP2}),
    Case("d4e4", "t2p2e2", "(attn:d2t2|ffn:t2e2)", "qwen3_moe"),
]
APART = [
    Case("d1", "d1", "d1", first={"reference": 1}),
    Case("d1", "d1", "d1", first={"critic": 1}),
    Case("d2", "d1", "d1", first={"reference": 2, "critic": 3}),
    Case("d1", "t2", "d1", first={"reference": 1, "critic": 3}),
    Case("d1", "d1", "d2", first={"reference": 3, "critic": 1}),
    Case("d2", "t2", "d2", first={"reference": 2, "critic": 2}),
    Case("t2", "d2", "p2", first={"critic": 2}),
    Case("p2", "p2", "c2", first={"reference": 2}, pipeline={"policy": VPP2}),
    Case("d2p2", "t2", "d2", first={"reference": 4, "critic": 4}, pipeline={"policy": VPP2}),
    Case("t2", "d2e2", "d2e2", "qwen3_moe", first={"reference": 2, "critic": 2}),
    Case("t2p2e2", "d2e2", "d4e2", "qwen3_moe", {"policy": VPP2}, {"reference": 4}),
]
"""Some models on ranks of their own; the last one is the pair of ROLL's example, with disjoint devices, in small."""
EIGHT = [
    Case("t2p2e2", "d4e4", "d4e2", "qwen3_moe", {"policy": VPP2}, {"reference": 4, "critic": 4}),
    Case("d2t2p2e4", "d8e4", "d4p2e4", "qwen3_moe", {"policy": VPP2}),
    Case("d8", "t2p2c2", "d2t2p2", pipeline={"reference": VPP2}),
]


def updates(mesh, case: Case, directory: Path, reference_directory: Path, critic_directory: Path):
    """Reference log-probs and values of the whole batch, reports, parameters: what the loop computes of two updates."""
    from fivefold.backends import Meshes
    from fivefold.distributed.redealing import on_replicas_of
    from fivefold.megatron.model import MegatronModel

    def settings(role: str):
        return replace(POLICY, tokens_per_micro_batch=48, megatron=MegatronConfig(pipeline=case.pipeline.get(role, {})))

    meshes = Meshes(mesh.ranks.on_layout(case.layout("policy")), mesh.device, 0, 10)
    ranks = meshes.ranks

    def model(role: str, directory: Path, **settings_of_model: Any):
        role_mesh, there = meshes.of(case.layout(role), case.first.get(role, 0))
        made = None if there is None else MegatronModel(directory, settings(role), there, **settings_of_model)
        return on_replicas_of(ranks, made, role_mesh)

    policy = model("policy", directory, total_updates=2)
    reference = model("reference", reference_directory)
    critic = model("critic", critic_directory, total_updates=2, value_head=True)
    mine = shard_of_replica(ranks, range(len(LENGTHS)))
    batch = whole_batch().select(mine)
    batch = batch.with_columns(
        {
            Column.OLD_LOGPROBS: policy.forward(batch) + batch[Column.OLD_LOGPROBS],
            Column.REF_LOGPROBS: reference.forward(batch),
            Column.VALUES: critic.forward(batch),
        }
    )
    responses = torch.tensor(LENGTHS) - torch.tensor(PROMPTS)
    scores = AdvantageInputs(torch.tensor(REWARDS), torch.arange(8), responses)
    advantages_T, returns_T = PPO.advantages(batch, scores, torch.tensor(FINISHED), ranks)
    reports = []
    for rows in UPDATES:
        weights_N = torch.zeros(len(LENGTHS)).double()
        weights_N[rows] = PPO.loss_weights(responses[rows], MAX_RESPONSE).double()
        whole = replace(
            batch.with_columns(
                {
                    Column.ADVANTAGES: advantages_T,
                    Column.RETURNS: returns_T,
                    Column.LOSS_WEIGHTS: batch.expand_to_tokens(weights_N[mine]),
                }
            ),
            update_tokens=int(responses[rows].sum()),
        )
        part = whole.select([place for place, row in enumerate(mine) if row in rows])
        reports += [critic.train_step(part, ValueLoss(0.3)), policy.train_step(part, PPO.loss)]
    numbers_2T = torch.zeros(2, sum(LENGTHS))
    numbers_2T[:, whole_batch().token_index(mine)] = torch.stack([batch[Column.REF_LOGPROBS], batch[Column.VALUES]])
    numbers_2T = ranks.all_reduce_sum(numbers_2T)
    state = {f"policy.{name}": tensor.clone() for name, tensor in policy.weights()}
    state |= {f"critic.{name}": tensor.clone() for name, tensor in critic.weights()}
    critic.verify()
    assert (policy.version, critic.version) == (2, 2)
    return numbers_2T, [(report.loss, report.grad_norm) for report in reports], state


@pytest.fixture(scope="module")
def directories(models, tmp_path_factory):
    """model -> directories of policy, reference and critic, which have weights of their own."""
    made: dict[str, tuple[Path, Path, Path]] = {}

    def get(name: str) -> tuple[Path, Path, Path]:
        if name not in made:
            reference = "llama" if name == "qwen3" else "qwen2_moe"
            made[name] = (models(name), models(reference), make_classifier(tmp_path_factory.mktemp("critic"), name))
        return made[name]

    return get


@pytest.fixture(scope="module")
def run(cluster, directories):
    """Results of all ranks of a case, which gets a start of its own: groups of its layouts last as long as their process."""
    return lambda case: cluster.run(updates, f"megatron:d{case.world_size}", case, *directories(case.model))


@pytest.fixture(scope="module")
def one_process(run):
    """Of a model, made once."""
    return cache(lambda model: run(Case("d1", "d1", "d1", model))[0])


def differences(results, one_process) -> tuple[float, float, float, float]:
    """Largest difference of any rank: log-probs and values, relative losses, relative norms, parameters."""
    numbers, reports, state = one_process
    scale = max(abs(loss) for loss, _ in reports)
    found_numbers, losses, norms, parameters = [], [], [], []
    assert {name for *_, own_state in results for name in own_state} == set(state)
    for own_numbers, own_reports, own_state in results:
        # A rank has all of a model or nothing.
        assert {name.split(".")[0] for name in state.keys() - own_state.keys()} <= {"policy", "critic"} - {
            name.split(".")[0] for name in own_state
        }
        found_numbers.append(float((own_numbers - numbers).abs().max()))
        losses += [abs(ours[0] - report[0]) / scale for ours, report in zip(own_reports, reports, strict=True)]
        norms += [abs(ours[1] - report[1]) / report[1] for ours, report in zip(own_reports, reports, strict=True)]
        parameters += [float((tensor - state[name]).abs().max()) for name, tensor in own_state.items()]
    return max(found_numbers), max(losses), max(norms), max(parameters)


def check(run, one_process, case: Case) -> None:
    one = one_process(case.model)
    assert one[0].abs().amax(1).min() > 0.3
    sizes = differences(run(case), one)
    print(case, " ".join(f"{value:.1e}" for value in sizes))
    for value, bound in zip(sizes, (4e-6, *BOUNDS), strict=True):
        assert value <= bound


@pytest.mark.parametrize("case", CASES, ids=str)
def test_updates_are_those_of_one_process_whatever_layouts_reference_and_critic_have(run, one_process, case):
    check(run, one_process, case)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case.world_size > 4), id=str(case)) for case in APART]
)
def test_updates_equal_one_process_for_any_ranks_of_reference_and_critic(run, one_process, case):
    check(run, one_process, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", EIGHT, ids=str)
def test_updates_are_those_of_one_process_on_eight_ranks(run, one_process, case):
    check(run, one_process, case)
