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
from fivefold.checkpoint import Checkpoints, RunState, damage
from fivefold.data import Sampler
from fivefold.evaluate import Evaluation
from fivefold.observe.observer import Observer, cut_after
from fivefold.ranks import Ranks
from fivefold.rng import load_rng, save_rng
from fivefold.rollout import SampleTable, Scorer, sample_groups
from fivefold.surfaces import Engine, Model
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


@dataclass
class Run:
    ranks: Ranks
    observer: Observer
    policy: Model
    reference: Model | None
    engine: Engine | None
    objective: Objective
    sampler: Sampler[Prompt]
    given: Callable[[list[Prompt]], list[Group]] | None
    """Groups that stand in the data (sft), for this rank's part of the prompts; otherwise the engine samples."""
    group_size: int
    sampling: Sampling
    scorer: Scorer
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
    eval_before: bool
    stop_at: dict[str, float]
    samples_per_step: int
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
    interrupted: bool = False
    _skipped: int = 0
    """Updates skipped in a row."""
    _saved: int = -1
    _checked: bool = False
    _last_metrics: dict[str, float] = field(default_factory=dict)

    # --- before the first step ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Resume where a checkpoint says so; evaluate before the first step."""
        self._resume()
        if self.ranks.is_main:
            (self.run_dir / "run.yaml").write_text(self.resolved_config)
        if self.step == 0 and self.eval_before and self.evaluation is not None:
            self.evaluate()
            self._last_metrics = self.observer.end_step(0)

    def _resume(self) -> None:
        found: Path | None = None
        if self.ranks.is_main and self.resume == "auto":
            found = self.checkpoints.newest(self.observer.say)
        elif self.ranks.is_main and self.resume != "never":
            found = Path(self.resume)
            if faults := damage(found):
                raise ValueError(f"trainer.resume: checkpoint {found} cannot be used: {faults}")
        found = self.ranks.from_main(found)
        if found is None:
            if self.ranks.is_main:
                for name in ("metrics.jsonl", "samples.jsonl", "trace/stages.jsonl"):
                    (self.run_dir / name).unlink(missing_ok=True)
            return
        state = RunState.read(found)
        if state.seed != self.seed:
            raise ValueError(
                f"trainer.seed must be that of the checkpoint to go on with the same samples: {self.seed} != {state.seed}"
            )
        with self.observer.stage("load"):
            self.policy.load(found / "policy")
        assert self.policy.version == state.version, "the checkpoint's optimizer steps and its schedule differ"
        load_rng(found / "rng", self.ranks)
        self.step = self._saved = state.step
        if self.ranks.is_main:
            for name in ("metrics.jsonl", "samples.jsonl", "trace/stages.jsonl"):
                cut_after(self.run_dir / name, state.step)
        self.observer.say(f"resumed after step {state.step} from {found} (written on {state.layout})")

    # --- parts of a step ---------------------------------------------------------------------------------------------

    def sync_weights(self) -> Engine:
        """The engine, sampling with the policy's newest weights."""
        assert self.engine is not None
        if self.engine.version != self.policy.version:
            with self.observer.stage("weight_sync"):
                self.engine.update_weights(self.policy.weights(), self.policy.version)
        return self.engine

    def collect(self, prompts: list[Prompt], step: int) -> list[Group]:
        """Groups of this rank's part of the prompts."""
        if self.given is not None:
            return self.given(prompts)
        sampling = replace(self.sampling, step=step)
        engine = self.sync_weights()
        self.policy.offload()
        return sample_groups(engine, self.ranks, prompts, self.group_size, sampling)

    def score(self, groups: list[Group]) -> None:
        """Give sampled groups their rewards; given ones have theirs."""
        if self.given is None:
            self.scorer.score(groups)

    @property
    def must_know_old_logprobs(self) -> bool:
        """Several updates a step compare with the log-probs before the first; the very first step is checked."""
        if self.given is not None:
            return False
        several = self.updates_per_step * self.epochs > 1
        return (several and self.objective.surrogate.needs_old_logprobs) or not self._checked

    def check_logprobs(self, batch: TokenBatch) -> None:
        """Stop at the first step if the engine's log-probs are not the trainer's."""
        if self._checked or batch.rollout_logprobs_T is None:
            return
        assert batch.old_logprobs_T is not None
        gap_T = (batch.old_logprobs_T - batch.rollout_logprobs_T)[batch.loss_mask_T].abs()
        sums = self.ranks.gather_all([(float(gap_T.double().sum()), len(gap_T))])
        mean = sum(total for total, _ in sums) / max(1, sum(count for _, count in sums))
        self._checked = True
        if not mean <= self.max_logprob_diff:
            raise RuntimeError(
                f"the engine's log-probs differ from the trainer's by {mean:.3g} a token on average, more than "
                f"engine.max_logprob_diff = {self.max_logprob_diff:.3g}: training would be off-policy from the start. "
                "Look at: the model's weights and RoPE settings (do both read the same config.json?), the dtype of both, "
                "the chat template and special tokens, and tied embeddings. Raise the bound only if you know the reason."
            )

    def own(self, values_N: Tensor, update: Update | None = None) -> Tensor:
        """This replica's entries of a number a sample, of the whole step or of one update."""
        if update is not None:
            return values_N[update.own]
        groups = values_N.view(self.sampler.per_step, -1)
        return groups[self.ranks.place.dp :: self.ranks.layout.dp].reshape(-1)

    def updates(self, table: SampleTable) -> Iterator[Update]:
        """The step's samples cut into optimizer steps, by whole prompts in their order, `epochs` times."""
        per_prompt, dp, place = table.samples_per_prompt, self.ranks.layout.dp, self.ranks.place.dp
        prompts = self.sampler.per_step // self.updates_per_step
        for _ in range(self.epochs):
            for first in range(0, self.sampler.per_step, prompts):
                chosen = slice(first * per_prompt, (first + prompts) * per_prompt)
                mine = [prompt for prompt in range(first, first + prompts) if prompt % dp == place]
                yield Update(
                    samples=chosen,
                    own=[(prompt - first) * per_prompt + i for prompt in mine for i in range(per_prompt)],
                    own_samples=[prompt // dp * per_prompt + i for prompt in mine for i in range(per_prompt)],
                    tokens=int(table.response_lengths_N[chosen].sum()),
                )

    def reference_logprobs(self, batch: TokenBatch) -> Tensor:
        """The reference's log-probs; its parameters wait on the host between steps where the configuration says so."""
        assert self.reference is not None
        logprobs_T = self.reference.forward(batch)
        self.reference.offload()
        return logprobs_T

    def train_step(self, batch: TokenBatch) -> StepReport:
        """One optimizer step; after too many in a row that had to be skipped, the run ends with the batch saved."""
        report = self.policy.train_step(batch, self.objective.loss)
        self._skipped = self._skipped + 1 if report.skipped else 0
        if report.skipped:
            self.observer.say(
                f"update skipped: loss {report.loss}, gradient norm {report.grad_norm} ({self._skipped} in a row)"
            )
        if self._skipped > self.max_skipped:
            directory = self.run_dir / "failed" / f"step-{self.step + 1:06d}"
            directory.mkdir(parents=True, exist_ok=True)
            batch.save(directory / f"rank-{self.ranks.rank}.safetensors")
            self.ranks.barrier()
            raise RuntimeError(
                f"{self._skipped} updates in a row had a loss or gradient that was not finite (trainer.guard.max_skipped "
                f"= {self.max_skipped}); parameters are as after the last good one. Each rank's last batch is in {directory}"
            )
        return report

    @contextmanager
    def profiled(self, step: int) -> Iterator[None]:
        """A torch profiler trace of the steps and ranks that the configuration names."""
        if step + 1 not in self.profile_steps or not self.profile_this_rank:
            yield
            return
        with torch.profiler.profile() as profiler:
            yield
        directory = self.run_dir / "trace"
        directory.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(directory / f"step-{step + 1:06d}-rank-{self.ranks.rank}.json"))

    # --- after a step ------------------------------------------------------------------------------------------------

    def finish_step(self, step: int, groups: list[Group], table: SampleTable, reports: list[StepReport]) -> None:
        """Record the step, evaluate and save when it is time, and see whether the run should stop."""
        self.step = step + 1
        record = self.observer.record
        record(table.metrics() | {"epoch": float(self.sampler.epoch(step))})
        record(_combine(reports))
        if self.guard_every and self.step % self.guard_every == 0:
            with self.observer.stage("verify"):
                self.policy.verify()
        record(self._throughput(reports))
        self.observer.samples([_sample_row(self.step, groups, i) for i in range(min(self.samples_per_step, len(groups)))])
        last = self.step == self.steps
        if self.evaluation is not None and ((self.eval_every and self.step % self.eval_every == 0) or last):
            found = self.evaluate()
            if self.stop_at and all(found.get(name, -math.inf) >= value for name, value in self.stop_at.items()):
                self.observer.say(f"reached {self.stop_at} after step {self.step}")
                self.steps, last = self.step, True
        self._last_metrics = self.observer.end_step(self.step)
        self.interrupted = self.ranks.any(self.stop_requested())
        if last or self.interrupted or (self.save_every and self.step % self.save_every == 0):
            self.save()

    def evaluate(self) -> dict[str, float]:
        """Evaluate the policy as it is."""
        assert self.evaluation is not None
        engine = self.sync_weights()
        self.policy.offload()
        with self.observer.stage("eval"):
            metrics, groups = self.evaluation.run(engine, self.ranks, self.scorer)
        self.observer.record(metrics)
        rows = [_sample_row(self.step, groups, i) | {"kind": "val"} for i in range(min(self.samples_per_step, len(groups)))]
        self.observer.samples(rows)
        return metrics

    def save(self) -> None:
        """Write a checkpoint of the run as it stands, unless there is one."""
        if self._saved == self.step:
            return
        state = RunState(
            step=self.step,
            version=self.policy.version,
            seed=self.seed,
            layout=str(self.ranks.layout),
            reward_mean=self._last_metrics.get("reward/mean"),
        )

        def fill(directory: Path) -> None:
            if self.ranks.is_main:
                (directory / "run.yaml").write_text(self.resolved_config)
            save_rng(directory / "rng", self.ranks)
            self.policy.save(directory / "policy")

        with self.observer.stage("save"):
            path = self.checkpoints.write(state, self.ranks.is_main, self.ranks.barrier, fill)
        self._saved = self.step
        self.observer.say(f"saved {path}")

    def close(self) -> None:
        """End the reward processes and the displays."""
        self.scorer.close()
        self.observer.close()

    def finish(self) -> None:
        """The end of a run that reached its last step."""
        self.observer.say(f"finished {self.steps} steps in {self.run_dir}")

    def _throughput(self, reports: list[StepReport]) -> dict[str, float]:
        times = self.observer.times
        tokens = sum(report.tokens for report in reports)
        sequences = sum(report.sequences for report in reports)
        flops = self.flops(tokens, tokens / max(1, sequences))
        memory = _peak_bytes()
        return {
            "throughput/tokens_per_second": tokens / times["step"],
            "throughput/samples_per_second": sequences / times["step"],
            "throughput/train_tokens_per_second": tokens / times["train"],
            "throughput/tflops_per_gpu": flops / times["train"] / self.ranks.layout.world_size / 1e12,
            "memory/peak_gb": self.ranks.maximum(memory) / 2**30,
        }


def _combine(reports: list[StepReport]) -> dict[str, float]:
    """Metrics of a step's updates: the mean, for maxima the largest; how far the rollout was is told by the first."""
    combined = {}
    good = [report for report in reports if not report.skipped] or reports
    for name in reports[0].metrics:
        values = [report.metrics[name] for report in good]
        if name.startswith("rollout/"):
            combined[name] = values[0]
        elif name.endswith("_max"):
            combined[name] = max(values)
        else:
            combined[name] = math.fsum(values) / len(values)
    return {
        **combined,
        "policy/loss": math.fsum(report.loss for report in good) / len(good),
        "policy/grad_norm": math.fsum(report.grad_norm for report in good) / len(good),
        "policy/lr": good[-1].lr,
        "policy/skipped_updates": float(sum(report.skipped for report in reports)),
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
