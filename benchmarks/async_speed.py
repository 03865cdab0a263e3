"""Steps in turns next to steps whose samples were drawn ahead, on the same GPUs and the same long-tailed responses.

`python benchmarks/async_speed.py [PART ...] [--seconds N]`: every part (`PARTS` below), or those named, each for N
seconds at most. Whole runs of the command line with vLLM; lengths are a log-normal distribution's by each request's own
limit, as in `async_simulation.py`. On a CPU a tiny model on two ranks and two servers, for a look at the script.
"""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch

from benchmarks.engine_speed import write_data
from benchmarks.harness import Part, run
from fivefold.types import Request

LONGEST = 4096 if torch.cuda.is_available() else 48
STEPS, WARM, LAST = 10, 3, 2
"""In all; left out of the mean at the beginning, and at the end, when engines have nothing more to sample."""

RUN = """
model: {{path: {model}, tokenizer: {root}/tokenizer}}
policy: {{backend: "megatron:{policy}", tokens_per_micro_batch: 16384, optimizer: {{lr: 1.0e-6}}, offload: {offload},
  skip_zero_advantage: false}}
engine: {{backend: "{engine}", memory_fraction: {fraction}, max_logprob_diff: 0.1, sampling: {{ignore_eos: true}}, {placed}}}
rollout: {rollout}
algorithm: {{name: grpo, group_size: 8, kl: {{coef: 0}}}}
data:
  {{train: [{root}/data/train.parquet], prompts_per_step: {prompts}, max_prompt_tokens: 64, max_response_tokens: {longest}}}
reward: {{functions: {{format: 1.0}}}}
trainer: {{run_dir: {run_dir}, steps: {steps}, device: {device}, save_every: 0, loggers: [console]}}
"""

AWAY = "{parameters: true, gradients: true, optimizer: true}"


def length_of(seed: int) -> int:
    """Of a response: log-normal, median 0.11 of the longest, mean 0.17."""
    draw = random.Random(seed)
    return max(1, min(LONGEST, int(LONGEST * 0.11 * math.exp(draw.gauss(0.0, 1.0)))))


def rank(config: str) -> int:
    """One rank of a run whose requests have limits of their own."""
    original = Request.__init__

    def limited(self: Request, id: int, prompt_ids: list[int], sampling: Any, seed: int, *turn: Any, **named: Any) -> None:
        if sampling.max_tokens == LONGEST:
            # A request for the rest of a response has its limit.
            sampling = replace(sampling, max_tokens=length_of(seed))
        original(self, id, prompt_ids, sampling, seed, *turn, **named)

    Request.__init__ = limited  # type: ignore[method-assign]
    from fivefold.cli import main

    return main(["train", config])


def steps_of(part: Part, what: str, policy: str, engine: str, rollout: str, placed: str, fraction: float) -> None:
    """Print steps, and their mean without the first ones and the last."""
    model = part.model("qwen3_1.7b")
    root = model.parent
    write_data(root)
    run_dir = root / what.replace(" ", "-").replace(",", "")
    apart = "apart" in placed
    text = RUN.format(
        model=model, root=root, policy=policy, engine=engine, rollout=rollout, placed=placed, fraction=fraction,
        offload="{}" if apart or not part.large else AWAY, run_dir=run_dir, steps=STEPS, longest=LONGEST,
        prompts=16 * part.gpus if part.large else 4, device="cuda" if part.large else "cpu",
    )  # fmt: skip
    run_dir.with_suffix(".yaml").write_text(text)
    ranks = math.prod(int(number) for number in policy.replace("d", " ").replace("t", " ").split())
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), __file__, "rank"]
    printed: list[dict[str, float]] = []
    with run_dir.with_suffix(".out").open("w+") as out:
        process = subprocess.Popen([sys.executable, *command, str(run_dir.with_suffix(".yaml"))], stdout=out, stderr=out)
        try:
            while process.poll() is None and part.left > 0:
                time.sleep(1)
                say_new(part, what, run_dir / "metrics.jsonl", printed)
        finally:
            process.terminate()
            process.wait(60)
    say_new(part, what, run_dir / "metrics.jsonl", printed)
    if len(printed) <= WARM + LAST:
        return part.claim(what, False, run_dir.with_suffix(".out").read_text()[-3000:])
    counted = printed[WARM:-LAST]
    seconds = sum(row["time/step"] for row in counted) / len(counted)
    tokens = sum(row["throughput/tokens_per_second"] * row["time/step"] for row in counted) / len(counted) / seconds
    part.say(f"{what}: a step", {"seconds": round(seconds, 2), "tokens_per_second": round(tokens), "steps": len(counted)})


WANTED = ("time/", "async/", "throughput/tokens_per_second", "throughput/train_tokens", "response_length/mean")


def say_new(part: Part, what: str, metrics: Path, printed: list[dict[str, float]]) -> None:
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    for row in rows[len(printed) :]:
        numbers = {
            key: float(f"{row[key]:.4g}") for key in row if key.startswith(WANTED) and isinstance(row[key], int | float)
        }
        part.say(f"{what}, step {row['step']}", numbers)
        printed.append(row)


def turns(part: Part) -> None:
    """Qwen3-1.7B's shape: all GPUs sample and train in turns."""
    everything = f"d{part.gpus}" if part.large else "d2"
    steps_of(part, "in turns", everything, f"vllm:{everything}", "{}", "mode: in_process", 0.5 if part.large else 0.1)


def ahead(part: Part) -> None:
    """Qwen3-1.7B's shape: one half of the GPUs samples at most two steps ahead of the other, which trains."""
    beside(part, "two steps ahead", "{max_staleness: 2}")


def ahead_finish(part: Part) -> None:
    """The same; responses in flight are finished before an engine takes new weights."""
    beside(part, "two steps ahead, finish", "{max_staleness: 2, interrupt: finish}")


def beside(part: Part, what: str, rollout: str) -> None:
    half = f"d{part.gpus // 2}" if part.large else "d2"
    steps_of(part, what, half, f"vllm:{half}", rollout, "placement: apart", 0.8 if part.large else 0.1)


PARTS: dict[str, Callable[[Part], None]] = {"turns": turns, "ahead": ahead, "ahead-finish": ahead_finish}

if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        sys.exit(rank(sys.argv[2]))
    # Ranks find functions by the name of their module.
    from benchmarks import async_speed

    sys.exit(run(async_speed.__doc__, async_speed.PARTS))
