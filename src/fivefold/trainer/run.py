"""A run: the built parts, where it stands, and what surrounds the steps (checkpoints, evaluation, records)."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from fivefold.algo import Objective
from fivefold.algo.advantages import AdvantageInputs
from fivefold.algo.values import ValueLoss
from fivefold.checkpoint.manager import RECORDS, Checkpoints, RunState, find_corruption
from fivefold.checkpoint.rng import load_rng, save_rng
from fivefold.data import PromptLoader
from fivefold.distributed.ranks import Ranks
from fivefold.engines.sampling import request_seed
from fivefold.interfaces import Engine, Model
from fivefold.observability.run_logger import RunLogger, cut_after
from fivefold.rollout.batch import expand_to_tokens
from fivefold.rollout.groups import (
    DynamicSampling,
    Rewards,
    RolloutStats,
    compare_with_greedy,
    groups_from_dataset,
    sample_groups,
)
from fivefold.trainer.evaluation import Evaluation
from fivefold.types import Group, Prompt, Sampling, StepReport, TokenBatch


@dataclass(frozen=True)
class Update:
    """One optimizer step's part of a step's samples."""

    samples: slice
    """Place in the table of all samples."""
    own: list[int]
    """Those of this replica, by place among `samples`."""
    own_samples: list[int]
    """The same, by place in this replica's batch."""
    tokens: int
    number: int
    """Counted over the step."""


@dataclass
class Run:
    ranks: Ranks
    logger: RunLogger
    policy: Model
    reference: Model | None
    critic: Model | None
    engine: Engine | None
    objective: Objective
    value_loss: ValueLoss
    critic_warmup: int
    """Steps in which only the critic learns."""
    sampler: PromptLoader[Prompt]
    given: bool
    """The responses stand in the data (sft, dpo); otherwise the engine samples."""
    samples_per_comparison: int
    """Consecutive samples that the loss compares: 2 for pairs."""
    group_size: int
    refill: DynamicSampling | None
    sampling: Sampling
    rewards: Rewards
    evaluation: Evaluation | None
    checkpoints: Checkpoints
    run_dir: Path
    steps: int
    seed: int
    updates_per_step: int
    epochs: int
    max_logprob_diff: float
    save_every: int
    eval_every: int
    eval_before_train: bool
    stop_at: dict[str, float]
    samples_per_step: int
    """Samples written to samples.jsonl each step."""
    resume: str
    flops: Callable[[int, float], float]
    """Tokens and mean length of a sequence -> floating-point operations of training on them."""
    stop_requested: Callable[[], bool]
    guard_every: int
    max_skipped: int
    profile_steps: list[int]
    profile_this_rank: bool
    resolved_config: str
    step: int = 0
    """Steps finished."""
    position: int = 0
    """Prompts taken from the sampler."""
    interrupted: bool = False
    reports: list[StepReport] = field(default_factory=list)
    """Of the policy's updates of this step."""
    critic_reports: list[StepReport] = field(default_factory=list)
    _skipped: dict[str, int] = field(default_factory=dict)
    """Updates skipped in a row, of the policy and of the critic."""
    _saved: int = -1
    _checked: bool = False
    _last_metrics: dict[str, float] = field(default_factory=dict)

    # --- before the first step ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Resume where a checkpoint says so; evaluate before the first step."""
        self._resume()
        if self.ranks.is_main:
            (self.run_dir / "run.yaml").write_text(self.resolved_config)
        if self.step == 0 and self.eval_before_train and self.evaluation is not None:
            self.evaluate(self.evaluation)
            self._last_metrics = self.logger.end_step(0)

    def _resume(self) -> None:
        found: Path | None = None
        if self.ranks.is_main and self.resume == "auto":
            found = self.checkpoints.latest(self.logger.log)
        elif self.ranks.is_main and self.resume != "never":
            found = Path(self.resume)
            if faults := find_corruption(found):
                raise ValueError(f"trainer.resume: checkpoint {found} cannot be used: {faults}")
        found = self.ranks.broadcast_from_main(found)
        if found is None:
            self._set_aside()
            return
        state = RunState.read(found)
        if state.seed != self.seed:
            raise ValueError(
                f"trainer.seed must be that of the checkpoint to go on with the same samples: {self.seed} != {state.seed}"
            )
        with self.logger.stage("load"):
            for name, model in self._learners.items():
                if not (found / name).is_dir():
                    raise ValueError(f"trainer.resume: checkpoint {found} has no {name}: it was written by another method")
                model.load(found / name)
        assert self.policy.version == state.version, "the checkpoint's optimizer steps and its schedule differ"
        load_rng(found / "rng", self.ranks)
        self.step = self._saved = state.step
        self.position = state.position
        if self.objective.kl_target is not None:
            self.objective = replace(self.objective, kl_coef=state.kl_coef)
        self._set_aside()
        if self.ranks.is_main:
            for name in RECORDS:
                cut_after(self.run_dir / name, state.step)
        self.logger.log(f"resumed after step {state.step} from {found} (written on {state.layout})")

    def _set_aside(self) -> None:
        """A directory has one timeline: what lies behind the step at which this run begins makes room."""
        if self.ranks.is_main and (aside := self.checkpoints.set_aside(self.step)):
            self.logger.log(f"began after step {self.step}: newer checkpoints and records of before are now in {aside}")

    # --- parts of a step ---------------------------------------------------------------------------------------------

    def sync_weights(self) -> Engine:
        """The engine, sampling with the policy's newest weights."""
        assert self.engine is not None
        if self.engine.version != self.policy.version:
            with self.logger.stage("weight_sync"):
                self.engine.update_weights(self.policy.weights(), self.policy.version)
        return self.engine

    @property
    def _learners(self) -> dict[str, Model]:
        """The models that are trained and saved, by the name of their part of a checkpoint."""
        return {"policy": self.policy} | ({} if self.critic is None else {"critic": self.critic})

    def collect(self) -> list[Group]:
        """This replica's groups of the step with their rewards."""
        self.reports, self.critic_reports = [], []
        if self.given:
            return groups_from_dataset(self.ranks, self._next(self.sampler.per_step))
        if self.refill is None:
            return self._sample(self.sampler.per_step, 0)
        groups, metrics = self.refill.collect(self.sampler.per_step, self.ranks, self._sample)
        self.logger.record(metrics)
        if metrics["dynamic_sampling/zero_variance_used"]:
            self.logger.log(
                f"after {self.refill.rounds} rounds only {metrics['dynamic_sampling/kept_fraction']:.0%} of "
                f"{metrics['dynamic_sampling/prompts']:.0f} prompts had responses of different reward: "
                f"{metrics['dynamic_sampling/zero_variance_used']:.0f} without a signal fill up the step"
            )
        return groups

    def _next(self, count: int) -> list[Prompt]:
        self.position += count
        return self.sampler.take(self.position - count, count)

    def _sample(self, count: int, number: int) -> list[Group]:
        """The replica's scored groups of the next `count` prompts, in round `number` of the step."""
        prompts = self._next(count)
        # A prompt that comes again in a later round of the same step draws other responses.
        sampling = replace(self.sampling, step=self.step + (number << 32))
        engine = self.sync_weights()
        self._make_room()
        with self.logger.stage("rollout"):
            groups = sample_groups(engine, self.ranks, prompts, self.group_size, sampling)
        with self.logger.stage("reward"):
            groups = self.rewards.scored(self.ranks, groups)
        if self.objective.needs_greedy:
            with self.logger.stage("greedy"):
                compare_with_greedy(engine, self.ranks, self.rewards, prompts, groups, sampling)
        return groups

    def _make_room(self) -> None:
        """Let learning models leave the device, as far as the configuration says so."""
        for model in self._learners.values():
            model.offload()

    @property
    def needs_old_logprobs(self) -> bool:
        """The trainer's log-probs before the first update are wanted, or the very first step is to be checked."""
        if self.given:
            return False
        return self.objective.needs_old_logprobs(self.updates_per_step * self.epochs) or not self._checked

    def check_logprobs(self, batch: TokenBatch) -> None:
        """Stop at the first step if the engine's log-probs are not the trainer's."""
        if self._checked or batch.rollout_logprobs_T is None:
            return
        assert batch.old_logprobs_T is not None
        gap_T = (batch.old_logprobs_T - batch.rollout_logprobs_T)[batch.loss_mask_T].abs()
        sums = self.ranks.all_gather_replicas([(float(gap_T.double().sum()), len(gap_T))])
        mean = sum(total for total, _ in sums) / max(1, sum(count for _, count in sums))
        self._checked = True
        if not mean <= self.max_logprob_diff:
            raise RuntimeError(
                f"the engine's log-probs differ from the trainer's by {mean:.3g} a token on average, more than "
                f"engine.max_logprob_diff = {self.max_logprob_diff:.3g}: training would be off-policy from the start. "
                "Look at: the model's weights and RoPE settings (do both read the same config.json?), the dtype of both, "
                "the chat template and special tokens, and tied embeddings. Raise the bound only if you know the reason."
            )

    def own(self, values_N: Tensor) -> Tensor:
        """This replica's entries of a number a sample of the whole step."""
        groups = values_N.view(self.sampler.per_step, -1)
        return groups[self.ranks.coords.dp :: self.ranks.layout.dp].reshape(-1)

    def gather(self, own_N: Tensor) -> Tensor:
        """A number a sample of the whole step, from every replica's own."""
        per_prompt = own_N.view(-1, self.samples_per_prompt)
        return torch.tensor(self.ranks.all_gather_replicas(per_prompt.tolist()), dtype=torch.float64).view(-1)

    def total(self, sums: Tensor) -> Tensor:
        """The sum over replicas."""
        return self.ranks.all_reduce_sum(sums)

    @property
    def samples_per_prompt(self) -> int:
        return self.samples_per_comparison if self.given else self.group_size

    def scores(self, table: RolloutStats) -> AdvantageInputs:
        """What the step's advantages are made of."""
        limit = self.sampling.max_tokens
        return AdvantageInputs(
            rewards_N=self.objective.shape_rewards(table.rewards_N, table.response_lengths_N, limit),
            group_N=table.group_N,
            lengths_N=table.response_lengths_N,
            greedy_rewards_N=table.greedy_rewards_N,
        )

    def updates(self, table: RolloutStats) -> Iterator[Update]:
        """The step's samples cut into optimizer steps, by whole prompts in their order, `epochs` times."""
        per_prompt, dp, place = table.samples_per_prompt, self.ranks.layout.dp, self.ranks.coords.dp
        prompts = self.sampler.per_step // self.updates_per_step
        for epoch in range(self.epochs):
            for number, first in enumerate(range(0, self.sampler.per_step, prompts)):
                chosen = slice(first * per_prompt, (first + prompts) * per_prompt)
                mine = [prompt for prompt in range(first, first + prompts) if prompt % dp == place]
                yield Update(
                    samples=chosen,
                    own=[(prompt - first) * per_prompt + i for prompt in mine for i in range(per_prompt)],
                    own_samples=[prompt // dp * per_prompt + i for prompt in mine for i in range(per_prompt)],
                    tokens=int(table.response_lengths_N[chosen].sum()),
                    number=epoch * self.updates_per_step + number,
                )

    def part(self, batch: TokenBatch, table: RolloutStats, update: Update) -> TokenBatch:
        """This replica's tokens of one update, with their weights in its loss."""
        part = replace(batch.select(update.own_samples), update_tokens=update.tokens)
        lengths_N, finished_N = table.response_lengths_N[update.samples], table.finished_N[update.samples]
        weights_N = self.objective.weights(lengths_N, self.sampling.max_tokens, finished_N)
        weights_T = expand_to_tokens(weights_N[update.own], part)
        return replace(part, loss_weights_T=weights_T, per_micro_batch=self.objective.per_micro_batch)

    def marked(self, part: TokenBatch, update: Update) -> TokenBatch:
        """The part with the tokens that the surrogate chose among all of the update, the same on every layout."""
        marks = self.objective.token_selector
        if marks is None:
            return part
        # Before the first update the policy is the old one; later its own log-probs are wanted.
        now_T = part.old_logprobs_T if update.number == 0 else None
        now_T = self.policy.forward(part) if now_T is None else now_T
        assert part.advantages_T is not None
        rows_3T = torch.stack([now_T, self.objective.old_logprobs(now_T, part), part.advantages_T])
        sizes = [int(part.loss_mask_T[part.token_index([i])].sum()) for i in range(len(update.own))]
        # A view would travel with the storage of all.
        rows = [piece.clone() for piece in rows_3T[:, part.loss_mask_T].split(sizes, 1)]
        everyone = sorted(
            self.ranks.all_gather_replicas(list(zip(update.own, rows, strict=True))), key=lambda piece: piece[0]
        )
        values_3S = torch.cat([piece for _, piece in everyone], 1)
        key = torch.Generator().manual_seed(request_seed([self.seed, self.step, update.number]))
        now_S, old_S, advantages_S = values_3S
        found_S = marks.select_tokens(now_S, old_S, advantages_S, torch.rand(len(now_S), generator=key))
        found = found_S.split([piece.shape[1] for _, piece in everyone])
        by_sample = dict(zip([place for place, _ in everyone], found, strict=True))
        selected_T = torch.zeros_like(part.loss_mask_T)
        if sum(sizes):
            selected_T[part.loss_mask_T] = torch.cat([by_sample[place] for place in update.own])
        if update.number == 0:
            # The policy is the old one: the loss then compares it with itself, and not with the rounding of another pass,
            # whose sign is all that the gradient of |log ratio| sees.
            part = replace(part, old_logprobs_T=None)
        return replace(part, selected_T=selected_T)

    def reference_logprobs(self, batch: TokenBatch) -> Tensor:
        """The reference's log-probs; its parameters wait on the host between steps where the configuration says so."""
        assert self.reference is not None
        logprobs_T = self.reference.forward(batch)
        self.reference.offload()
        return logprobs_T

    @property
    def policy_learns(self) -> bool:
        """The critic's warm-up is over, or there is none."""
        return self.critic is None or self.step >= self.critic_warmup

    def critic_step(self, batch: TokenBatch) -> None:
        """One optimizer step of the critic."""
        assert self.critic is not None
        report = self.critic.train_step(batch, self.value_loss)
        self.critic_reports.append(replace(report, metrics=self.value_loss.finalize_metrics(report.metrics)))
        self._guard(report, batch, "critic")

    def train_step(self, batch: TokenBatch) -> None:
        """One optimizer step of the policy."""
        report = self.policy.train_step(batch, self.objective.loss)
        self.reports.append(replace(report, metrics=self.objective.finalize_metrics(report.metrics)))
        self._guard(report, batch, "policy")

    def _guard(self, report: StepReport, batch: TokenBatch, who: str) -> None:
        """After too many updates in a row that had to be skipped, the run ends with the batch saved."""
        skipped = self._skipped[who] = self._skipped.get(who, 0) + 1 if report.skipped else 0
        if report.skipped:
            self.logger.log(
                f"{who}'s update skipped: loss {report.loss}, gradient norm {report.grad_norm} ({skipped} in a row)"
            )
        if skipped > self.max_skipped:
            directory = self.run_dir / "failed" / f"step-{self.step + 1:06d}"
            directory.mkdir(parents=True, exist_ok=True)
            batch.save(directory / f"rank-{self.ranks.rank}.safetensors")
            self.ranks.barrier()
            raise RuntimeError(
                f"{skipped} updates of the {who} in a row had a loss or gradient that was not finite "
                f"(trainer.guard.max_skipped = {self.max_skipped}); parameters are as after the last good one. "
                f"Each rank's last batch is in {directory}"
            )

    @contextmanager
    def profiled(self) -> Iterator[None]:
        """A torch profiler trace of the steps and ranks that the configuration names."""
        step = self.step
        if step + 1 not in self.profile_steps or not self.profile_this_rank:
            yield
            return
        with torch.profiler.profile() as profiler:
            yield
        directory = self.run_dir / "trace"
        directory.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(directory / f"step-{step + 1:06d}-rank-{self.ranks.rank}.json"))

    # --- after a step ------------------------------------------------------------------------------------------------

    def finish_step(self, groups: list[Group], table: RolloutStats) -> None:
        """Record the step, evaluate and save when it is time, and see whether the run should stop."""
        self.step += 1
        record = self.logger.record
        record(
            table.metrics(sampled=not self.given)
            | {"epoch": float(self.sampler.epoch(self.position - self.sampler.per_step))}
        )
        if self.reports:
            found = _combine(self.reports, "policy")
            if self.objective.kl_target is not None:
                record({"policy/kl_coef": self.objective.kl_coef})
                self.objective = self.objective.with_adapted_kl(found["policy/kl_reference"], len(table.rewards_N))
            record(found)
        if self.critic_reports:
            record(_combine(self.critic_reports, "critic"))
        if self.guard_every and self.step % self.guard_every == 0:
            with self.logger.stage("verify"):
                for model in self._learners.values():
                    model.verify()
        record(self._throughput())
        self.logger.samples([_sample_row(self.step, groups, i) for i in range(min(self.samples_per_step, len(groups)))])
        last = self.step == self.steps
        if self.evaluation is not None and ((self.eval_every and self.step % self.eval_every == 0) or last):
            found = self.evaluate(self.evaluation)
            if self.stop_at and all(found.get(name, -math.inf) >= value for name, value in self.stop_at.items()):
                self.logger.log(f"reached {self.stop_at} after step {self.step}")
                self.steps, last = self.step, True
        self._last_metrics = self.logger.end_step(self.step)
        self.interrupted = self.ranks.any(self.stop_requested())
        if last or self.interrupted or (self.save_every and self.step % self.save_every == 0):
            self.save()

    def evaluate(self, evaluation: Evaluation) -> dict[str, float]:
        """Evaluate the policy as it is, and record what was found."""
        metrics, groups = self.measure(evaluation)
        shown = min(self.samples_per_step, len(groups))
        self.logger.samples([_sample_row(self.step, groups, i) | {"kind": "val"} for i in range(shown)])
        self.logger.record(metrics)
        return metrics

    def measure(self, evaluation: Evaluation) -> tuple[dict[str, float], list[Group]]:
        """(metrics, this replica's greedy groups) of the policy as it is."""
        metrics: dict[str, float] = {}
        groups: list[Group] = []
        if evaluation.given:
            with self.logger.stage("eval"):
                metrics |= evaluation.losses(self.policy, self.reference, self.objective, self.ranks)
        if evaluation.generate:
            engine = self.sync_weights()
            self._make_room()
            with self.logger.stage("eval"):
                found, groups = evaluation.run(engine, self.ranks, self.rewards)
            metrics |= found
        return metrics, groups

    def save(self) -> None:
        """Write a checkpoint of the run as it stands, unless there is one."""
        if self._saved == self.step:
            return
        state = RunState(
            step=self.step,
            version=self.policy.version,
            seed=self.seed,
            layout=str(self.ranks.layout),
            position=self.position,
            kl_coef=self.objective.kl_coef,
            reward_mean=self._last_metrics.get("reward/mean"),
        )

        def fill(directory: Path) -> None:
            if self.ranks.is_main:
                (directory / "run.yaml").write_text(self.resolved_config)
            save_rng(directory / "rng", self.ranks)
            for name, model in self._learners.items():
                if self.ranks.is_main:
                    (directory / name).mkdir()
                self.ranks.barrier()
                model.save(directory / name)

        with self.logger.stage("save"):
            path = self.checkpoints.write(state, self.ranks.is_main, self.ranks.barrier, fill)
        self._saved = self.step
        self.logger.log(f"saved {path}")

    def close(self) -> None:
        """End the reward processes and the displays."""
        self.rewards.scorer.close()
        self.logger.close()

    def finish(self) -> None:
        """The end of a run that reached its last step."""
        self.logger.log(f"finished {self.steps} steps in {self.run_dir}")

    def _throughput(self) -> dict[str, float]:
        times = self.logger.times
        memory = {"memory/peak_gb": self.ranks.all_reduce_max(_peak_bytes()) / 2**30}
        tokens = sum(report.tokens for report in self.reports)
        if not tokens:
            return memory
        sequences = sum(report.sequences for report in self.reports)
        flops = self.flops(tokens, tokens / max(1, sequences))
        return memory | {
            "throughput/tokens_per_second": tokens / times["step"],
            "throughput/samples_per_second": sequences / times["step"],
            "throughput/train_tokens_per_second": tokens / times["train"],
            "throughput/tflops_per_gpu": flops / times["train"] / self.ranks.layout.world_size / 1e12,
        }


def _combine(reports: list[StepReport], who: str) -> dict[str, float]:
    """Metrics of a step's updates: the mean, for maxima the largest; how far the rollout was is told by the first."""
    combined = {}
    good = [report for report in reports if not report.skipped] or reports
    for name in reports[0].metrics:
        values = [report.metrics[name] for report in good]
        told = f"critic/{name}" if who == "critic" and name.startswith("moe/") else name
        if name.startswith("rollout/"):
            combined[told] = values[0]
        elif name.endswith("_max"):
            combined[told] = max(values)
        else:
            combined[told] = math.fsum(values) / len(values)
    if "policy/kl_old" in combined:
        combined["policy/kl_old_last"] = good[-1].metrics["policy/kl_old"]
    return {
        **combined,
        f"{who}/loss": math.fsum(report.loss for report in good) / len(good),
        f"{who}/grad_norm": math.fsum(report.grad_norm for report in good) / len(good),
        f"{who}/lr": good[-1].lr,
        f"{who}/skipped_updates": float(sum(report.skipped for report in reports)),
    }


def _sample_row(step: int, groups: list[Group], index: int) -> dict[str, object]:
    group = groups[index]
    sample = group.samples[0]
    return {
        "step": step,
        "kind": "train",
        "source": group.prompt.source,
        "prompt_id": group.prompt.id,
        "prompt": group.prompt.text,
        "response": sample.text,
        "ground_truth": group.prompt.ground_truth,
        "reward": sample.reward,
        "reward_parts": sample.reward_parts,
        "response_tokens": len(sample.token_ids),
        "finished": sample.finished,
        "wall": time.time(),
    }


def _peak_bytes() -> float:
    """Largest memory this rank has held: on the GPU where there is one."""
    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
