"""The interfaces in a few lines: a table of logits that learns, an engine that draws from it, and a run made of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fivefold.algo import methods
from fivefold.algo.choices import Choices
from fivefold.algo.terms.process_reward import ProcessReward
from fivefold.columns import Column
from fivefold.engines.sampling import request_seed, sample_token, uniform
from fivefold.engines.turns import Turns
from fivefold.interfaces import EngineReplica, EngineState
from fivefold.reward.pool import Scoring
from fivefold.types import Completion, DatasetResponse, LossFn, Prompt, Request, Sample, Sampling, StepReport, TokenBatch

PROMPTS, LENGTH, VOCAB = 8, 3, 12


class ToyModel:
    """Log-probs (or values) of a response token by its prompt and place: nothing but a table."""

    def __init__(self, value_head: bool = False, lr: float = 0.1) -> None:
        self.table = torch.zeros(PROMPTS, LENGTH + 1, 1 if value_head else VOCAB, requires_grad=True)
        self.version, self._value_head = 0, value_head
        self._adam = torch.optim.Adam([self.table], lr=lr)

    def _output(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """(log-probs or values, entropies) of every token; prompts are one token, their number."""
        place_T = batch.positions_T
        prompt_T = batch.token_ids_T[torch.arange(len(place_T)) - place_T]
        if self._value_head:
            return self.table[prompt_T, place_T, 0], torch.zeros(len(place_T))
        logp_TV = torch.log_softmax(self.table[prompt_T, (place_T - 1).clamp(min=0)] / batch.temperature, -1)
        logprobs_T = logp_TV.gather(1, batch.token_ids_T[:, None])[:, 0]
        return logprobs_T * batch.loss_mask_T, -(logp_TV.exp() * logp_TV).sum(-1) * batch.loss_mask_T

    def forward(self, batch: TokenBatch) -> Tensor:
        return self._output(batch)[0].detach()

    def train_step(self, batch: TokenBatch, loss_fn: LossFn) -> StepReport:
        """Two micro-batches, one step."""
        self._adam.zero_grad()
        sums: dict[str, float] = {}
        loss, half = 0.0, len(batch.lengths_N) // 2
        for samples in (range(half), range(half, len(batch.lengths_N))):
            part = batch.select(list(samples))
            share = loss_fn(*self._output(part), part)
            share.loss.backward()
            loss += float(share.loss)
            for name, value in [*share.sums.items(), *share.maxima.items()]:
                sums[name] = sums.get(name, 0.0) + float(value)
        assert self.table.grad is not None
        norm = float(self.table.grad.norm())
        self._adam.step()
        self.version += 1
        return StepReport(loss, norm, 0.1, sums, 2, len(batch.token_ids_T), len(batch.lengths_N))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        yield "table", self.table.detach()

    def verify(self) -> None: ...
    def offload(self, parameters: bool = True) -> dict[str, int]:
        return {}

    def prepare_offload(self) -> None: ...
    def onload(self) -> None: ...
    def snapshot(self, copies: bool):
        return lambda path: []

    def load(self, path: Path) -> None: ...


class ToyEngine:
    """Draws LENGTH tokens from the table."""

    restarts = 0

    def __init__(self, replica: EngineReplica | None = None) -> None:
        self.replica = replica or EngineReplica(0, 1)
        self.state, self.version = EngineState.ABSENT, 0

    def update_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        ((_, table),) = weights
        self.table, self.state, self.version = table.clone(), EngineState.READY, version

    def generate(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """The last request first: what comes back goes by its number."""
        for request in reversed(requests):
            tokens, logprobs = [], []
            for place in range(LENGTH):
                logits = self.table[request.prompt_ids[0], place][None]
                token, logprob = sample_token(logits, uniform(torch.tensor([request.seed]), place), request.sampling)
                tokens.append(int(token))
                logprobs.append(float(logprob))
            yield Completion(request.id, tokens, logprobs, "stop", self.version)

    def stream(self):
        return Turns(self)

    def look_after(self) -> None: ...
    def abort(self) -> None: ...
    def sleep(self) -> None: ...
    def wake(self) -> None: ...
    def restart(self) -> None: ...
    def close(self) -> None: ...


class ToyTokenizer:
    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return str(token_ids)


def scored(error: str | None = None) -> Scoring:
    """What scoring gives that is done."""
    future: Scoring = Future()
    future.set_result(error)
    return future


class ToyScorer:
    """The share of tokens that are the prompt's own."""

    def submit(self, prompt: Prompt, *sequences: Sample) -> Scoring:
        (sample,) = sequences
        sample.reward = sum(token == target(prompt.id) for token in sample.token_ids) / LENGTH
        sample.reward_parts = {"own": sample.reward}
        sample.correct = sample.reward >= 1
        return scored()

    def wait(self, scoring: Sequence[Scoring]) -> str | None:
        return next((future.result() for future in scoring if future.result() is not None), None)

    def close(self) -> None: ...


def target(prompt: int) -> int:
    return (5 * prompt + 1) % VOCAB


def toy_prompts() -> list[Prompt]:
    """With a right and a wrong response to learn from."""
    prompts = []
    for i in range(PROMPTS):
        responses = [
            DatasetResponse([token] * LENGTH, [True] * LENGTH, "") for token in (target(i), (target(i) + 1) % VOCAB)
        ]
        prompts.append(Prompt(i, [i], "toy", str(i), "", responses=responses))
    return prompts


def toy_parts(
    mesh: Any, run_dir: Path, name: str, choices: Choices, policy: ToyModel, steps: int, source: Any = None, *,
    updates_per_step: int = 2, ppo_epochs: int = 1, critic_warmup: int = 0, group_size: int = 8, groups_per_step: int = 8,
    max_rounds: int = 3, values_per_update: bool = False, **trainer: Any,
) -> Any:  # fmt: skip
    """A run of the real parts around the toy model; `source` takes the place of the method's own rollouts."""
    from fivefold.algo.objective import Objective
    from fivefold.algo.values import ValueLoss
    from fivefold.checkpoint.fingerprint import Fingerprint
    from fivefold.config.schema import GuardConfig, TrainerConfig
    from fivefold.data.prompt_loader import PromptLoader
    from fivefold.observability.run_logger import RunLogger
    from fivefold.reward.manager import RewardManager
    from fivefold.rollout.generation import Generator
    from fivefold.rollout.sources import DatasetRollouts, DynamicSampling, EngineRollouts, PromptQueue
    from fivefold.rollout.stats import BatchPlan
    from fivefold.trainer.checks import Bounds, LogprobGate, SkipGuard
    from fivefold.trainer.learners import CriticLearner, PolicyLearner, ProcessRewardLearner
    from fivefold.trainer.minibatches import MiniBatches
    from fivefold.trainer.models import Models
    from fivefold.trainer.run import Run
    from fivefold.trainer.trainer import Trainer

    ranks, chosen = mesh.ranks, methods.resolve(name, choices)
    method = methods.METHODS[name]
    objective, offline, pairs = Objective.of(chosen), method.offline, method.samples_per_comparison == 2
    prompts = toy_prompts()
    if offline:
        prompts = [replace(prompt, responses=prompt.responses[: 2 if pairs else 1]) for prompt in prompts]
    logger = RunLogger(run_dir, [], is_main=True, steps=steps)
    queue = PromptQueue(PromptLoader(prompts, groups_per_step, seed=1, shuffle=True), logger)
    rewards = RewardManager(ToyScorer(), ranks)
    engine = None if offline else ToyEngine(EngineReplica(ranks.turn, ranks.layout.world_size))
    if source is None and offline:
        source = DatasetRollouts(queue, ranks, groups_per_step)
    elif source is None:
        assert engine is not None
        source = EngineRollouts(
            Generator(engine, ToyTokenizer(), rewards, logger), queue, logger, Sampling(max_tokens=5), seed=3,
            group_size=group_size, prompts_per_call=groups_per_step, with_greedy=objective.needs_greedy,
        )  # fmt: skip
        if chosen.dynamic_sampling:
            source = DynamicSampling(source, ranks, logger, groups_per_step=groups_per_step, max_rounds=max_rounds)
    minibatches = MiniBatches(objective, ppo_epochs)
    by_role: dict[str, Any] = {"policy": policy}
    learners: dict[str, Any] = {}
    if Column.REF_LOGPROBS in objective.needs(1):
        by_role["reference"] = ToyModel()
    if objective.process.is_active:
        by_role |= {"prm": ToyModel(lr=0.05), "prm.reference": ToyModel()}
        learners["prm"] = ProcessRewardLearner(objective.process, ranks, "prm")
    if Column.VALUES in objective.needs(1):
        by_role["critic"] = ToyModel(value_head=True)
        learners["critic"] = CriticLearner(objective, minibatches, ranks, ValueLoss(), values_per_update)
    learners["policy"] = PolicyLearner(objective, minibatches, ranks, seed=3, first_step=critic_warmup)
    models = Models(by_role, ranks, SkipGuard(ranks, 0, run_dir, print), learners, stage=logger.stage)
    settings: dict[str, Any] = {"eval_before_train": False, "logged_samples_per_step": 0, "resume": "never"}
    config = TrainerConfig(seed=3, **(settings | {"guard": GuardConfig(every=0)} | trainer))
    plan = BatchPlan(
        updates_per_step, 2 if pairs else 1, max_response_tokens=5, sampled=not offline, skipped=objective.skipped
    )
    return Run(
        ranks=ranks, logger=logger, models=models, engine=engine, rewards=rewards, rollouts=source, objective=objective,
        plan=plan, updates=updates_per_step * ppo_epochs, gate=LogprobGate(ranks, Bounds(1e-6), offline, logger.log),
        trainer=Trainer(
            config, run_dir, steps, 1, ranks, logger, models, objective, source, None, plan, flops=lambda tokens, length: 1.0,
            resolved_config="", fingerprint=Fingerprint(),
        ),
    )  # fmt: skip


def toy_run(mesh, run_dir: Path, name: str, choices: Choices, steps: int = 60, policy: ToyModel | None = None,
            source=None, **changes: Any):  # fmt: skip
    """(rewards of each step, of the policy before and after) of a run with the toy model and the real loop."""
    from fivefold.trainer.train import train

    policy = policy or ToyModel()
    run = toy_parts(mesh, run_dir, name, choices, policy, steps, source, **changes)

    def sampled() -> float:
        engine, total = ToyEngine(), 0.0
        engine.update_weights(policy.weights(), 0)
        requests = [
            Request(32 * prompt.id + k, prompt.token_ids, Sampling(max_tokens=5), request_seed((99, 0, prompt.id, k)))
            for prompt in toy_prompts()
            for k in range(32)
        ]
        for completion in engine.generate(requests):
            total += sum(token == target(completion.request_id // 32) for token in completion.token_ids) / LENGTH
        return total / len(requests)

    before = sampled()
    train(run)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return rows, before, sampled(), run


CHOICES = {
    # Its bounds are made for long responses of large models, which move by less than a toy does.
    "gspo": Choices(clip_low=0.1, clip_high=0.1),
    # Its responses are right in part long before one is right as a whole.
    "prime": Choices(process_reward=ProcessReward(target="reward")),
}
