"""A RolloutSource is all that a step needs: any of twenty lines trains, with groups of any size, on any owners."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from fivefold.algo import methods
from fivefold.algo.objective import make_objective
from fivefold.columns import Column
from fivefold.config.learners import MegatronConfig, PolicyConfig
from fivefold.interfaces import RolloutSource
from fivefold.rollout.asynchronous import AsyncRollouts
from fivefold.rollout.generation import Generator
from fivefold.rollout.packing import pack
from fivefold.rollout.sources import DynamicSampling
from fivefold.rollout.staleness import Admission, staleness
from fivefold.rollout.stats import BatchPlan, Informative, differ, gather_stats, rollout_metrics
from fivefold.types import Group, Prompt, Sample, Sampling
from tests.support.documented import undocumented
from tests.support.tiny_models import VOCAB as MODEL_VOCAB
from tests.support.toy import CHOICES, LENGTH, ToyModel, ToyTokenizer, target, toy_parts, toy_prompts, toy_run


class InMemory(RolloutSource):
    """Responses drawn from a policy at hand, without an engine or a reward process: a whole RolloutSource."""

    def __init__(self, ranks, policy: ToyModel) -> None:
        self._ranks, self._policy, self._calls = ranks, policy, 0

    def next(self, step: int) -> list[Group]:
        self._calls += 1
        draw = torch.Generator().manual_seed(self._calls)
        logprobs = torch.log_softmax(self._policy.table.detach(), -1)
        groups = []
        for index, prompt in enumerate(toy_prompts()):
            tokens = [torch.multinomial(logprobs[prompt.id, :LENGTH].exp(), 8, True, generator=draw)[:, i] for i in range(8)]
            picked = [[float(logprobs[prompt.id, place, t]) for place, t in enumerate(one)] for one in tokens]
            rewards = [float((one == target(prompt.id)).float().mean()) for one in tokens]
            samples = [
                Sample(one.tolist(), p, "", "answered", step, reward=r)
                for one, p, r in zip(tokens, picked, rewards, strict=True)
            ]
            groups.append(Group(prompt, samples, index=index))
        return self._ranks.shard(groups)

    def state_dict(self) -> dict[str, int]:
        return {"calls": self._calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._calls = state["calls"]


def with_memory(mesh, run_dir: Path):
    policy = ToyModel()
    rows, before, after, _ = toy_run(
        mesh, run_dir, "grpo", methods.Choices(), steps=40, policy=policy, source=InMemory(mesh.ranks, policy)
    )
    return rows, before, after


def test_a_rollout_source_in_memory_trains(cluster, tmp_path):
    ((rows, before, after),) = cluster.run(with_memory, "megatron:d1", tmp_path)
    assert before < 0.3 and after > 0.8, (before, after)
    assert rows[-1]["rollout/logprob_diff_mean"] < 1e-6


def filtered(mesh, run_dir: Path):
    """Dynamic sampling asks whatever source it is given again."""
    policy = ToyModel()
    policy.table.data[:4, :, :] = -30.0
    for prompt in range(4):
        policy.table.data[prompt, :, target(prompt)] = 30.0
    run = toy_parts(mesh, run_dir, "dapo", methods.Choices(), policy, 1)
    source = DynamicSampling(InMemory(mesh.ranks, policy), mesh.ranks, run.logger, groups_per_step=8, max_rounds=5)
    groups = [group for group in source.next(0) if group.is_used]
    return [(group.index, group.prompt.id) for group in groups], source.state_dict()


def test_dynamic_sampling_wraps_any_source(cluster, tmp_path):
    ((groups, state),) = cluster.run(filtered, "megatron:d1", tmp_path)
    assert [index for index, _ in groups] == list(range(8))
    assert {prompt for _, prompt in groups} <= {4, 5, 6, 7}, "the others are always right"
    assert 2 <= state["calls"] <= 5


class Known:
    """Eight groups of four a call, of which two have one right response; 4 and 2 tokens."""

    def __init__(self, ranks) -> None:
        self._ranks, self._calls = ranks, 0

    def next(self, step: int) -> list[Group]:
        self._calls += 1
        groups = []
        for index in range(8):
            rewards = [float(index >= 6 and place == 1) for place in range(4)]
            # Tokens say where they are from: call, group, sample.
            tokens = [[self._calls, index, place, 0][: 2 if reward else 4] for place, reward in enumerate(rewards)]
            samples = [
                Sample(
                    one,
                    [0.0] * len(one),
                    "",
                    "answered",
                    0,
                    reward=reward,
                    correct=reward == 1,
                    reward_parts={"gsm8k": reward},
                )
                for one, reward in zip(tokens, rewards, strict=True)
            ]
            groups.append(Group(Prompt(index, [7], "s", "", ""), samples, index=index))
        return self._ranks.shard(groups)


def dynamic_metrics(mesh, run_dir: Path):
    run = toy_parts(mesh, run_dir / str(mesh.ranks.rank), "dapo", methods.Choices(), ToyModel(), 1)
    source = DynamicSampling(Known(mesh.ranks), mesh.ranks, run.logger, groups_per_step=4, max_rounds=5)
    plan = BatchPlan(1, max_response_tokens=5)
    groups = source.next(0)
    stats = gather_stats(groups, mesh.ranks, plan)
    return rollout_metrics(stats, 0), pack(groups, stats, mesh.ranks, plan).token_ids_T.tolist()


@pytest.mark.parametrize("layout", ["d1", "d2", "t2"])
def test_dynamic_sampling_reports_what_was_sampled_and_what_it_trains_on(cluster, tmp_path, layout):
    """Two calls of eight groups: 64 samples, 4 of them right; the step trains on the 4 groups that have one."""
    results = cluster.run(dynamic_metrics, f"megatron:{layout}", tmp_path)
    for metrics, _ in results:
        expected = {"reward/mean": 4 / 64, "reward/pass@4": 4 / 16, "reward/mean@4": 4 / 64, "reward/solve_none": 12 / 16,
                    "reward/frac_reward_zero_std": 12 / 16, "reward/best": 4 / 16, "reward/gsm8k": 4 / 64,
                    "response/length_mean": (60 * 4 + 4 * 2) / 64}  # fmt: skip
        trained = {"reward/mean": 4 / 16, "reward/pass@4": 1.0, "reward/mean@4": 1 / 4, "reward/solve_none": 0.0,
                   "reward/frac_reward_zero_std": 0.0, "reward/best": 1.0, "reward/gsm8k": 4 / 16,
                   "response/length_mean": (12 * 4 + 4 * 2) / 16}  # fmt: skip
        assert {name: metrics[name] for name in expected} == pytest.approx(expected)
        assert {name: metrics[f"filtered/{name}"] for name in trained} == pytest.approx(trained)
        assert undocumented(metrics) == []
    replicas = results if layout == "d2" else results[:1]
    tokens = [token for _, replica in replicas for token in replica]
    assert len(tokens) == 16 + 12 * 4 + 4 * 2, "only the samples of those groups are packed, each behind its prompt"


def test_groups_may_be_compared_by_the_reward_that_the_method_makes():
    """Two right responses of 10 and 20 tokens, of 20 at most: DAPO's penalty over the last 8 of them tells them apart."""
    objective = make_objective("dapo", overlong_buffer=8.0, overlong_penalty=1.0)
    shape = partial(objective.shaping, max_response_tokens=20)
    long, short, wrong = (
        Sample([0] * tokens, [0.0] * tokens, "", "answered", 0, reward=reward)
        for tokens, reward in ((20, 1.0), (10, 1.0), (10, 0.0))
    )
    assert not differ([long, short]) and differ([long, short], shape)
    assert differ([long, wrong]) and not differ([long, wrong], shape), "1 - 1 is 0"
    assert not differ([short, short], shape)
    assert not differ([short, replace(wrong, reward_failed=True)], shape)


def test_prompts_may_be_kept_by_their_mean_reward_and_their_longest_response():
    """Against the filter of PRIME's recipe, written out: a mean beyond a bound, or a response as good as cut, is left out."""

    def group(rewards: list[float], lengths: list[int]) -> list[Sample]:
        return [Sample([0] * n, [0.0] * n, "", "answered", 0, reward=r) for r, n in zip(rewards, lengths, strict=True)]

    keeps = Informative(low=0.2, high=0.8, max_tokens=18)
    for right in range(6):
        for longest in (5, 18, 19, 20):
            rewards, lengths = [1.0] * right + [0.0] * (5 - right), [3, longest, 4, 2, 1]
            accuracy = sum(rewards) / 5
            left_out = accuracy > 0.8 or accuracy < 0.2 or max(lengths) >= 20 - 1
            assert keeps(group(rewards, lengths)) == (not left_out), (right, longest)
    assert Informative(low=0.2)(group([1.0, 1.0], [1, 1])) and not Informative(high=0.8)(group([1.0, 1.0], [1, 1]))
    assert Informative(max_tokens=2)(group([1.0, 0.0], [2, 2])) and not Informative(max_tokens=1)(group([1.0, 0.0], [2, 2]))
    failed = [replace(sample, reward_failed=True) for sample in group([0.0, 0.0], [1, 1])]
    assert keeps(group([1.0], [1]) * 1 + group([0.0], [1]) + failed) and not keeps(failed)


def one_round(mesh, run_dir: Path):
    """(rewards of what was used, of what was not, whether each was wanted) of one round of eight prompts for three."""
    from fivefold.rollout.sources import DynamicSampling

    run = toy_parts(mesh, run_dir, "grpo", methods.Choices(), ToyModel(), 1, group_size=4)
    run.engine.update_weights(ToyModel().weights(), 0)
    wanted = Informative(low=0.05, high=0.2)
    source = DynamicSampling(run.rollouts, mesh.ranks, run.logger, groups_per_step=3, max_rounds=1, informative=wanted)
    return [(group.index, group.is_used, wanted(group.samples)) for group in source.next(0)]


@pytest.mark.parametrize("layout", ["d1", "d2"])
def test_one_round_keeps_first_what_is_wanted_and_fills_up_with_others(cluster, tmp_path, layout):
    groups = sorted(group for rank in cluster.run(one_round, f"megatron:{layout}", tmp_path) for group in rank)
    assert [index for index, *_ in groups] == list(range(8))
    assert [is_used for _, is_used, _ in groups] == [True] * 3 + [False] * 5
    # What is wanted stands before what is not.
    wanted = [is_wanted for *_, is_wanted in groups]
    assert wanted == sorted(wanted, reverse=True) and 0 < sum(wanted) < 8


def twice(mesh, run_dir: Path):
    """Tokens of each group: of two prompts, and of the same with the first one again."""
    run = toy_parts(mesh, run_dir, "grpo", methods.Choices(), ToyModel(), 1)
    run.engine.update_weights(ToyModel().weights(), 0)
    first, second = toy_prompts()[:2]
    generator = Generator(run.engine, ToyTokenizer(), run.rewards, run.logger)
    tokens = []
    for prompts in ([first, second], [first, second, first]):
        groups = generator.sample(prompts, 8, Sampling(max_tokens=5), (3, 0))
        tokens.append([[sample.token_ids for sample in group.samples] for group in groups])
    return tokens


def test_a_prompt_that_comes_twice_in_a_round_draws_other_responses_the_second_time(cluster, tmp_path):
    ((once, again),) = cluster.run(twice, "megatron:d1", tmp_path)
    assert again[:2] == once, "what the others draw stays the same"
    assert not [tokens for tokens in again[2] if tokens in again[0]], (
        "of 12^3 responses no two of these sixteen are the same"
    )


class Unequal(RolloutSource):
    """Another source's groups with some samples left out: eight, seven, six, five of them."""

    def __init__(self, source) -> None:
        self._source = source

    def next(self, step: int) -> list[Group]:
        return [replace(group, samples=group.samples[: 8 - group.index % 4]) for group in self._source.next(step)]

    def state_dict(self):
        return self._source.state_dict()


def unequal_runs(mesh, run_dir: Path):
    """The mean reward of each step, for every method that samples."""
    from fivefold.trainer.train import train

    rewards_by_method = {}
    for name in sorted(name for name, method in methods.METHODS.items() if not method.offline):
        run = toy_parts(mesh, run_dir / name, name, CHOICES.get(name, methods.Choices()), ToyModel(), 40)
        run.trainer.rollouts = Unequal(run.rollouts)
        train(replace(run, rollouts=run.trainer.rollouts))
        lines = (run_dir / name / "metrics.jsonl").read_text().splitlines()
        rewards_by_method[name] = [json.loads(line)["reward/mean"] for line in lines]
    return rewards_by_method


@pytest.mark.slow
def test_unequal_groups_train_with_every_objective(cluster, tmp_path):
    (rewards_by_method,) = cluster.run(unequal_runs, "megatron:d1", tmp_path)
    assert {"grpo", "ppo", "gigpo"} <= rewards_by_method.keys()
    for name, rewards in rewards_by_method.items():
        assert rewards[0] < 0.3 and sum(rewards[-5:]) / 5 > 0.5, (name, rewards)


# --- owners on Megatron-Core -----------------------------------------------------------------------------------------

POLICY = PolicyConfig(
    dtype="float32", tokens_per_micro_batch=64,
    # With the distributed optimizer each replica would keep a part of the gradient only.
    megatron=MegatronConfig(ddp={"use_distributed_optimizer": False}),
)  # fmt: skip


def model_groups() -> list[Group]:
    draw = torch.Generator().manual_seed(11)

    def tokens(low: int, high: int) -> list[int]:
        return torch.randint(0, MODEL_VOCAB, (int(torch.randint(low, high, (), generator=draw)),), generator=draw).tolist()

    groups = []
    for index, size in enumerate([4, 2, 3, 4]):
        responses = [tokens(1, 20) for _ in range(size)]
        samples = [
            Sample(one, [0.0] * len(one), "", "answered", 0, reward=float(torch.rand((), generator=draw)))
            for one in responses
        ]
        groups.append(Group(Prompt(index, tokens(1, 9), "s", "", ""), samples, index=index))
    return groups


def gradients(mesh, directory: Path, dealings: int, step_groups: Callable[[], list[Group]] = model_groups):
    """(owners, gradient) on rank 0 of the step's two optimizer steps, with samples dealt in several ways."""
    from fivefold.megatron import step
    from fivefold.megatron.bridge import WeightStream
    from fivefold.megatron.chunks import named_weights
    from fivefold.megatron.model import MegatronModel
    from fivefold.trainer.minibatches import MiniBatches

    model = MegatronModel(directory, POLICY, mesh, total_updates=1)
    # For PPO's ratio to matter the old log-probs are not the policy's own.
    objective = make_objective("grpo", kl=methods.KL(coef=0.0))
    stream = WeightStream(
        lambda: {name: tensor.main_grad for name, tensor in named_weights(model._chunks).items()}, model.spec, mesh, 64
    )
    outcomes = []
    for number in range(dealings):
        weight = torch.rand(13, generator=torch.Generator().manual_seed(number)).double()
        plan = BatchPlan(2, max_response_tokens=20, work=(lambda n: n.double()) if number == 0 else (lambda n, w=weight: w))
        groups = mesh.ranks.shard(step_groups())
        stats = gather_stats(groups, mesh.ranks, plan)
        batch = pack(groups, stats, mesh.ranks, plan)
        batch[Column.OLD_LOGPROBS] = model.forward(batch) + 0.1 * torch.sin(batch.token_ids_T.float()) * batch.loss_mask_T
        batch.columns.pop(Column.ROLLOUT_LOGPROBS, None)
        objective.assign_advantages(batch, stats, mesh.ranks)
        for mini in MiniBatches(objective)(batch, stats):
            for ddp in model._models:
                ddp.train()
                ddp.zero_grad_buffer()
            with mesh.active():
                done = step.forward_backward(model._models, model._finalize, mini.batch, objective.loss, model._batching, [])
            row = torch.cat([tensor.flatten() for _, tensor in sorted(stream())]).clone()
            loss, _ = step.loss_and_metrics(done, mesh)
            outcomes.append((stats.owner_N.tolist(), loss, row if mesh.ranks.is_main else None))
    return outcomes


@pytest.fixture(scope="module")
def one_rank(cluster, models):
    return cluster.run(gradients, "megatron:d1", models("qwen3"), 1)[0]


@pytest.mark.parametrize("layout", ["d2", "d4", "t2", "c2", "p2"])
def test_samples_that_changed_owners_give_the_same_gradient(cluster, models, one_rank, layout):
    """Relative to the gradient's norm: sums in another order differ by sixteen of float32's roundings at most."""
    outcomes = cluster.run(gradients, f"megatron:{layout}", models("qwen3"), 3)[0]
    owners = [owner for owner, *_ in outcomes[::2]]
    if layout.startswith("d"):
        assert owners[0] != owners[1] != owners[2]
    for number, (_, loss, gradient) in enumerate(outcomes):
        _, expected_loss, expected = one_rank[number % 2]
        assert loss == pytest.approx(expected_loss, abs=1e-6)
        assert expected.norm() > 1e-2
        assert (gradient - expected).norm() <= 16 * torch.finfo(torch.float32).eps * expected.norm()


def versions_of_a_step_done_anew(mesh, run_dir: Path):
    """The third step's first update of two was taken when the run was asked to end."""
    run = toy_parts(mesh, run_dir, "grpo", methods.Choices(), ToyModel(), 9)
    generator, loader = run.rollouts._generator, run.rollouts._prompts._loader
    ahead = AsyncRollouts(generator, loader, run.logger, Sampling(max_tokens=5), Admission(2, 8, 9), seed=3, group_size=4)
    unused = [[place, 1 + (place >= 32)] for place in range(24, 40)]
    ahead.load_state_dict({"position": 40, "unused": unused, "versions": [[1, 2], [2, 4]]})
    run.engine.version = 5
    ahead.begin(2, lambda: None)
    return ahead.state_dict()["versions"]


def test_what_was_sampled_before_a_step_that_is_done_again_is_no_older_than_the_step(cluster, tmp_path):
    (versions,) = cluster.run(versions_of_a_step_done_anew, "megatron:d1", tmp_path)
    assert [staleness(versions, version, 4) for version in (2, 4, 5)] == [3, 2, 2]
