"""Responses of an expert next to what is sampled: CHORD (2508.11408), against loops and on every layout."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fivefold.algo import methods
from fivefold.algo.methods import KL, Choices, Correction, Imitation
from fivefold.algo.objective import Objective, make_objective
from fivefold.algo.term import Progress
from fivefold.columns import Column
from fivefold.config.learners import PolicyConfig
from fivefold.config.roles import Learns
from fivefold.interfaces import RolloutSource
from fivefold.rollout.packing import pack
from fivefold.rollout.stats import BatchPlan, gather_stats, rollout_metrics
from fivefold.trainer.minibatches import MiniBatches
from fivefold.types import Group, Prompt, Sample
from tests.support.cluster import Together
from tests.support.commands import fivefold
from tests.support.tiny_models import VOCAB
from tests.support.toy import LENGTH, ToyModel, target, toy_parts
from tests.support.two_steps import OPTIMIZER
from tests.support.whole_runs import REWARD, assert_same, make_model, metrics

WEIGHT, FINAL, WARMUP, DECAY = 0.6, 0.1, 2, 3
SCHEDULE = {1: 0.3, 2: 0.6, 3: 0.1 + 0.5 * 0.75, 4: 0.1 + 0.5 * 0.25, 5: 0.1, 50: 0.1}
"""μ by hand: half of 0.6, then from 0.6 to 0.1 along (1 + cos(π k/3)) / 2 = 1, 3/4, 1/4, 0."""
EXPERT = Imitation(WEIGHT, FINAL, WARMUP, DECAY, "phi", "seq-mean-token-mean")
CHOICES = Choices(
    expert=EXPERT, aggregate="token-mean", kl=KL(estimator="k2", coef=0.2), overlong_filter=True, difficulty_high=0.9,
    rollout_correction=Correction(old_logprobs_from="engine"),
)  # fmt: skip
LAYOUTS = ("d1", "d2", "t2", "p2", "c2")


def make_groups() -> list[Group]:
    """Two optimizer steps, each of two groups of three and two of an expert's, which is truncated or has reward 1."""
    draw = torch.Generator().manual_seed(7)

    def tokens(count: int) -> list[int]:
        return torch.randint(0, VOCAB, (count,), generator=draw).tolist()

    groups = []
    for index in range(8):
        prompt, is_expert = Prompt(index, tokens(2 + index % 3), "s", "", ""), index % 4 >= 2
        samples = []
        for place in range(1 if is_expert else 3):
            length = 2 + (3 * index + 2 * place) % 5
            logprobs = [] if is_expert else (-4 * torch.rand(length, generator=draw)).tolist()
            finished = not is_expert or index == 2
            reward = 1.0 if is_expert else float((index + place) % 3 == 0)
            samples.append(
                Sample(
                    tokens(length), logprobs, "", "answered" if finished else "length", 0 if is_expert else 5, reward=reward
                )
            )
        groups.append(Group(prompt, samples, index=index, is_expert=is_expert))
    return groups


def by_hand(groups: list[Group], logprobs: list[list[float]], refs: list[list[float]], update: int):
    """(loss, its gradient by token) of the samples of an update, whose log-probs are given: loops over tokens."""
    mu, low, high = SCHEDULE[update], 0.2, 0.2
    samples = [(group, sample) for group in groups for sample in group.samples]
    sampled = sum(len(sample.token_ids) for group, sample in samples if not group.is_expert)
    experts = sum(group.is_expert for group, _ in samples)
    total, gradients = 0.0, []
    for (group, sample), now, ref in zip(samples, logprobs, refs, strict=True):
        gradients_of_sample = []
        if group.is_expert:
            for logp in now:
                p = math.exp(logp)
                weight = mu / experts / len(now)
                total -= weight * p * (1 - p) * logp
                gradients_of_sample.append(-weight * p * (1 - p))
        else:
            rewards = [other.reward for other in group.samples]
            advantage = (sample.reward - statistics.fmean(rewards)) / (statistics.stdev(rewards) + 1e-6)
            for logp, old, base in zip(now, sample.logprobs, ref, strict=True):
                ratio = math.exp(logp - old)
                clipped = min(max(ratio, 1 - low), 1 + high)
                is_clipped = clipped * advantage < ratio * advantage
                weight = (1 - mu) / sampled
                total -= weight * (clipped if is_clipped else ratio) * advantage
                gradient = 0.0 if is_clipped else -weight * ratio * advantage
                # The penalty is one of what was sampled, and not weighted by μ.
                total += 0.2 * (logp - base) ** 2 / 2 / sampled
                gradients_of_sample.append(gradient + 0.2 * (logp - base) / sampled)
        gradients.append(gradients_of_sample)
    return total, gradients


def learned(mesh, directory: Path):
    """(losses, metrics, parameters) of two steps of two updates on the same samples, and of the first by hand."""
    from fivefold.megatron.model import MegatronModel
    from fivefold.trainer import models as module
    from fivefold.trainer.checks import Bounds, LogprobGate, SkipGuard
    from fivefold.trainer.learners import PolicyLearner
    from fivefold.trainer.step_work import StepWork

    objective = Objective.of(methods.resolve("grpo", CHOICES))
    groups = mesh.ranks.shard(make_groups())
    plan = BatchPlan(updates_per_step=2, max_response_tokens=12, skipped=objective.skipped)
    stats = gather_stats(groups, mesh.ranks, plan)
    batch = pack(groups, stats, mesh.ranks, plan)
    policy = PolicyConfig(dtype="float32", tokens_per_micro_batch=24, optimizer=OPTIMIZER)
    model = MegatronModel(directory, policy, mesh, total_updates=4)
    reference = MegatronModel(directory, policy, mesh)
    guard = SkipGuard(mesh.ranks, 0, directory, print)
    learners = {"policy": PolicyLearner(objective, MiniBatches(objective), mesh.ranks)}
    models = module.Models({"policy": model, "reference": reference}, mesh.ranks, guard, learners)
    models.annotate(batch, objective.needs(2) | {Column.OLD_LOGPROBS}, stats)
    # An expert's log-probs, which no engine has given, would end the run here.
    engine = batch.with_columns(
        {
            Column.ROLLOUT_LOGPROBS: torch.where(
                batch[Column.EXPERT], batch[Column.ROLLOUT_LOGPROBS], batch[Column.OLD_LOGPROBS]
            )
        }
    )
    LogprobGate(mesh.ranks, Bounds(1e-12), False, print).check(engine, replace(stats, version_N=stats.version_N * 0), models)
    objective.assign_advantages(batch, stats, mesh.ranks)
    rows = {
        row: (piece.tolist(), ref.tolist())
        for row, place in zip(batch.sample_index_N, range(len(batch.lengths_N)), strict=True)
        for index in [batch.token_index([place])]
        for inside in [index[batch.loss_mask_T[index]]]
        for piece, ref in [(batch[Column.OLD_LOGPROBS][inside], batch[Column.REF_LOGPROBS][inside])]
    }
    work = StepWork(stats, batch, [])
    for step in range(2):
        work.reports["policy"], done = [], work.reports["policy"]
        models.update(Learns.WITH_POLICY, work, Progress(step))
        work.reports["policy"] = [*done, *work.reports["policy"]]
    parameters = torch.cat([tensor.flatten().clone() for _, tensor in model.weights()])
    return rows, work.reports["policy"], parameters, rollout_metrics(stats, 7), stats.scoring.group_size


@pytest.fixture(scope="module")
def results(cluster, models):
    directory = models("qwen3")
    return Together(cluster, {layout: (f"megatron:{layout}", learned, directory) for layout in LAYOUTS})


def test_the_share_of_the_expert_rises_and_falls_along_a_cosine():
    imitation = Objective.of(methods.resolve("chord", CHOICES)).imitation
    assert imitation is not None
    assert {update: imitation.share(update) for update in SCHEDULE} == pytest.approx(SCHEDULE)
    steady = Objective.of(methods.resolve("chord")).imitation
    assert steady is not None and (steady.share(1), steady.share(1000), steady.token_weight) == (0.1, 0.1, "phi")


def test_the_loss_of_sampled_and_experts_responses_equals_the_loop(results):
    """Each side has denominators of its own; responses that are cut off or too easy are left out of what was sampled only."""
    rows = {row: numbers for result in results["d2"] for row, numbers in result[0].items()}
    groups = make_groups()
    logprobs, refs = ([rows[row][side] for row in range(len(rows))] for side in range(2))
    half = sum(len(group.samples) for group in groups[:4])
    expected, _ = by_hand(groups[:4], logprobs[:half], refs[:half], 1)
    for layout in LAYOUTS:
        assert results[layout][0][1][0].loss == pytest.approx(expected, rel=1e-4), layout
    assert expected != pytest.approx(by_hand(groups[:4], logprobs[:half], refs[:half], 2)[0], rel=1e-2)


def gradient(mesh, logprobs: list[list[float]], refs: list[list[float]]):
    """(loss, its gradient by token, metrics) of one update in the second step, with these log-probs of policy and reference."""
    objective, groups = Objective.of(methods.resolve("grpo", CHOICES)), make_groups()[:4]
    stats = gather_stats(groups, mesh.ranks, plan := BatchPlan(max_response_tokens=12))
    batch = pack(groups, stats, mesh.ranks, plan)

    def on_tokens(rows: list[list[float]]) -> torch.Tensor:
        values_T = torch.zeros(len(batch.token_ids_T), dtype=torch.float64)
        values_T[batch.loss_mask_T] = torch.tensor([value for row in rows for value in row], dtype=torch.float64)
        return values_T

    batch[Column.REF_LOGPROBS], now_T = on_tokens(refs).float(), on_tokens(logprobs).requires_grad_()
    objective.assign_advantages(batch, stats, mesh.ranks)
    (mini,) = MiniBatches(objective)(batch, stats, step=1)
    output = objective.loss(now_T, torch.zeros(len(now_T)), mini.batch)
    output.loss.backward()
    assert now_T.grad is not None and not now_T.grad[~batch.loss_mask_T].any()
    return output.loss.item(), now_T.grad[batch.loss_mask_T], {name: float(value) for name, value in output.sums.items()}


def test_the_gradient_of_sampled_and_experts_responses_equals_the_loop(cluster):
    groups, draw = make_groups()[:4], torch.Generator().manual_seed(3)
    lengths = [len(sample.token_ids) for group in groups for sample in group.samples]
    logprobs, refs = ([(-2 * torch.rand(length, generator=draw)).tolist() for length in lengths] for _ in range(2))
    ((loss, gradients_T, metrics),) = cluster.run(gradient, "megatron:d1", logprobs, refs)
    expected, gradients = by_hand(groups, logprobs, refs, 2)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert torch.allclose(
        gradients_T, torch.tensor([value for row in gradients for value in row], dtype=torch.float64), atol=1e-7
    )
    for name, is_expert in (("expert/logprob_mean", True), ("policy/logprob_mean", False)):
        rows = zip([group.is_expert for group in groups for _ in group.samples], logprobs, strict=True)
        values = [value for values, row in rows if values == is_expert for value in row]
        assert metrics[name] == pytest.approx(statistics.fmean(values), rel=1e-6), name


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_an_expert_is_imitated_alike_on_every_layout(results, layout):
    _, reports, parameters, metrics, group_size = results[layout][0]
    _, expected, expected_parameters, numbers, size = results["d1"][0]
    assert [r.loss for r in reports] == pytest.approx([r.loss for r in expected], rel=1e-4)
    assert [r.grad_norm for r in reports] == pytest.approx([r.grad_norm for r in expected], rel=1e-4)
    assert torch.allclose(parameters, expected_parameters, atol=2e-5) and (metrics, group_size) == (numbers, size)
    for name in ("expert/logprob_mean", "policy/ratio_mean", "policy/kl_reference", "policy/logprob_mean"):
        assert [r.metrics[name] for r in reports] == pytest.approx([r.metrics[name] for r in expected], rel=1e-4), name


def test_metrics_are_those_of_what_was_sampled(results):
    """An expert has reward 1, no log-probs and version 0; groups of it would make the usual group one of a single sample."""
    _, _, _, metrics, group_size = results["d1"][0]
    rewards = [sample.reward for group in make_groups() if not group.is_expert for sample in group.samples]
    assert group_size == 3 and metrics["reward/mean"] == pytest.approx(statistics.fmean(rewards))
    assert (
        metrics["rollout/staleness_max"] == 2 and "reward/pass@3" in metrics and metrics["response/truncated_fraction"] == 0
    )


class Counted:
    """A queue of the toy's prompts, each with its wrong response to imitate."""

    def __init__(self) -> None:
        self.position = 0

    def take(self, count: int) -> list[Prompt]:
        from tests.support.toy import toy_prompts

        prompts = toy_prompts()
        self.position += count
        taken = [prompts[place % len(prompts)] for place in range(self.position - count, self.position)]
        return [replace(prompt, responses=prompt.responses[1:]) for prompt in taken]

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def imitated(mesh, run_dir: Path, weight: float):
    """(share of the table's most likely tokens that are the rewarded ones, the expert's), places of the first groups."""
    from fivefold.rollout.sources import ExpertRollouts
    from fivefold.trainer.train import train

    policy = ToyModel()
    choices = Choices(expert=Imitation(weight=weight, token_weight="none"), kl=KL(coef=0.0))
    run = toy_parts(mesh, run_dir, "chord", choices, policy, 40)
    source = ExpertRollouts(run.rollouts, Counted(), mesh.ranks, groups=8, per_step=4, updates=2)
    run.trainer.rollouts = source
    groups = []

    class Watched(RolloutSource):
        def next(self, step):
            groups.append(source.next(step))
            return groups[-1]

        state_dict, load_state_dict = source.state_dict, source.load_state_dict

    run.trainer.rollouts = Watched()
    train(replace(run, rollouts=run.trainer.rollouts))
    chosen = policy.table.detach()[:, :LENGTH].argmax(-1)
    rewarded = torch.tensor([target(prompt) for prompt in range(len(chosen))])[:, None]
    last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    shares = [float((chosen == tokens).double().mean()) for tokens in (rewarded, (rewarded + 1) % policy.table.shape[-1])]
    return shares, [(group.index, group.is_expert) for group in sorted(groups[0], key=lambda group: group.index)], last


@pytest.mark.parametrize(("weight", "winner"), [(0.95, 1), (0.05, 0)])
def test_the_policy_comes_to_the_expert_or_to_the_reward_by_the_weight(cluster, tmp_path, weight, winner):
    """The expert says what the reward does not want; each of two optimizer steps has four groups of the one, two of the other."""
    ((shares, order, last),) = cluster.run(imitated, "megatron:d1", tmp_path, weight)
    assert shares[winner] > 0.9 and shares[1 - winner] < 0.1
    assert order == [(index, index % 6 >= 4) for index in range(12)]
    assert last["expert/logprob_mean"] < 0 and not any(math.isnan(value) for value in last.values())


@pytest.mark.parametrize(
    ("name", "choices", "reason"),
    [
        ("ppo", {}, "credit: gae"),
        ("reinforce_plus_plus_baseline", {}, "whiten"),
        ("clip_cov", {}, "clip_cov chooses tokens"),
        ("m2po", {}, "rollout_correction chooses tokens"),
        ("remax", {}, "greedy_baseline"),
        ("otb", {}, "credit: discounted"),
        ("sppo", {}, "step_log_mean_exp compares all rewards"),
        ("sft", {}, "learns from responses in the data alone"),
        ("grpo", {"kl": KL(coef=0.1, place="reward")}, "a KL in the reward"),
        ("grpo", {"aggregate": "micro-batch-token-mean"}, "is for all of the loss"),
        ("grpo", {"expert": Imitation(weight=0.5, final_weight=0.1)}, "decay_updates, which must be above 0"),
    ],
)
def test_what_has_no_meaning_with_an_expert_is_refused(name, choices, reason):
    with pytest.raises(ValueError, match=reason):
        make_objective(name, **{"expert": Imitation(weight=0.5), **choices})


RUN = """
model: {{path: {root}/model}}
policy: {{backend: "megatron:d1", dtype: float32, tokens_per_micro_batch: 2048, optimizer: {{lr: 1.0e-2}}}}
algorithm: {{name: chord, group_size: 4, updates_per_step: 2, expert: {{weight: 0.9, final_weight: 0.5, decay_updates: 12, token_weight: none}}}}
data:
  train: [{root}/data/train.parquet]
  expert: [{root}/expert.jsonl]
  expert_per_step: 8
  prompts_per_step: 8
  max_prompt_tokens: 16
  max_response_tokens: 8
  system_prompt: "1"
reward: {{functions: {{"{root}/reward.py:digits": 1.0}}}}
trainer: {{run_dir: {root}/runs/whole, steps: 6, save_every: 3, loggers: [console]}}
"""


def test_a_run_with_an_expert_resumes_with_the_same_numbers_on_another_layout(tmp_path):
    """The system prompt is one of what is sampled: the expert's rows stay as they stand."""
    make_model(tmp_path)
    (tmp_path / "reward.py").write_text(REWARD)
    rows = [{"prompt": f"{a}+{b}=", "response": "+++"} for a in range(5) for b in range(5)]
    (tmp_path / "expert.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "run.yaml").write_text(RUN.format(root=tmp_path))
    first = fivefold("train", tmp_path / "run.yaml")
    assert first.returncode == 0, first.stderr
    rows_of_first = metrics(tmp_path, "whole")
    assert rows_of_first[-1]["expert/logprob_mean"] > -1 > -2 > rows_of_first[0]["expert/logprob_mean"]
    # 8 of 25 responses a step: the fourth step begins the second time.
    assert [row["expert/epoch"] for row in rows_of_first] == [0, 0, 0, 1, 1, 1]
    begun = f"trainer.run_dir={tmp_path}/runs/resumed"
    for arguments in (("trainer.steps=3",), ("trainer.steps=6", "policy.backend=megatron:d2")):
        done = fivefold("train", tmp_path / "run.yaml", begun, *arguments)
        assert done.returncode == 0, done.stderr
    assert_same(metrics(tmp_path, "resumed"), rows_of_first, rel=2e-3)
    for wrong, reason in (
        ("data.expert_per_step=9", "must be a multiple of algorithm.updates_per_step"),
        ("data.expert_per_step=26", "must not be larger than the expert's responses: got 26 for 25"),
        ("data.response_key=answer", "expert.jsonl, row 0"),
        ("data.expert=[]", "must name files of responses"),
        ("algorithm.name=grpo algorithm.expert={}", "needs algorithm.expert.weight"),
        ("rollout.max_staleness=1", "must be left out with algorithm.expert"),
    ):
        refused = fivefold("check", tmp_path / "run.yaml", *wrong.split())
        assert refused.returncode != 0 and reason in refused.stdout + refused.stderr, (wrong, refused.stdout, refused.stderr)
