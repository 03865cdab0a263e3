"""Runs that are killed at random moments, resumed on other layouts and killed again, against the run that nobody touched.

`python -m tests.support.kills [COUNT [SEED]]` kills so often (100 when left out) and prints what became of it.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.commands import Command, children_of, gone, is_free, wait_for
from tests.support.whole_runs import REWARD, assert_same, make_model, metrics
from tests.support.zygote import THREADS, zygote

STEPS = 8
RUN = """
model: {{path: {root}/model}}
policy: {{dtype: float32, tokens_per_micro_batch: 64, optimizer: {{lr: 1.0e-3, eps: 1.0e-4, warmup_steps: 2}}}}
data: {{train: [{root}/data/train.parquet], val: [{root}/data/test.parquet], prompts_per_step: 4, max_prompt_tokens: 16, max_response_tokens: 12}}
reward: {{functions: {{"{root}/reward.py:digits": 1.0}}, workers: 1}}
eval: {{max_prompts: 6}}
trainer: {{run_dir: {root}/runs/base, steps: {steps}, eval_every: 3, save_every: 2, loggers: [console], device: cpu}}
launch: {{threads: {threads}}}
"""
METHODS = {
    "GRPO": "algorithm={name: grpo, group_size: 2, kl: {coef: 0.1}}",
    "PPO": "algorithm={name: ppo, updates_per_step: 1}",
    "DAPO": "algorithm={name: dapo, group_size: 2}",
}
HALF = "with half a step kept, as it said"
"""Of a run that was asked to end between a critic's and the policy's update."""
LAYOUTS = ("d1", "d2", "t2", "p2")


@dataclass(frozen=True)
class Fault:
    """Something that is done to a run at a moment of its life."""

    harm: Callable[[Command], None]
    when: Callable[[Path, random.Random], Callable[[], bool]]
    """The directory of the run -> whether the moment has come."""


def _at_any_moment(_: Path, draw: random.Random) -> Callable[[], bool]:
    moment = time.monotonic() + draw.uniform(0, 5)
    return lambda: time.monotonic() > moment


def _while_it_saves(run: Path, draw: random.Random) -> Callable[[], bool]:
    step = draw.choice(range(2, STEPS, 2))
    return (run / f"checkpoints/.step-{step:06d}.partial").exists


def _launcher(process: Command) -> None:
    process.kill()


def _rank(process: Command) -> None:
    ranks = list(psutil.Process(process.pid).children())
    if ranks:
        random.choice(ranks).kill()


def _asked(process: Command) -> None:
    process.send_signal(signal.SIGTERM)


FAULTS = {
    "launcher killed": Fault(_launcher, _at_any_moment),
    "launcher killed while it saves": Fault(_launcher, _while_it_saves),
    "rank killed": Fault(_rank, _at_any_moment),
    "rank killed while it saves": Fault(_rank, _while_it_saves),
    "SIGTERM": Fault(_asked, _at_any_moment),
}


def flip_a_byte(run: Path, draw: random.Random) -> bool:
    """In a file of the newest checkpoint, where there is an older one to resume from; whether it was done."""
    found = sorted((run / "checkpoints").glob("step-*"))
    if len(found) < 2:
        return False
    path = draw.choice([path for path in found[-1].rglob("*") if path.is_file() and path.stat().st_size])
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1
    path.write_bytes(bytes(content))
    return True


def main() -> None:
    count, seed = int(sys.argv[1]) if len(sys.argv) > 1 else 100, int(sys.argv[2]) if len(sys.argv) > 2 else 0
    random.seed(seed)
    draw, done, runs = random.Random(seed), Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        make_model(root)
        (root / "reward.py").write_text(REWARD)
        (root / "run.yaml").write_text(RUN.format(root=root, threads=THREADS, steps=STEPS))
        bases = {method: _whole(root, f"base-{method}", choice) for method, choice in METHODS.items()}
        while sum(done.values()) < count:
            method = draw.choice(sorted(METHODS))
            name = f"{method}-{sum(runs.values())}"
            is_exact = _abused(root, name, METHODS[method], draw, done, count)
            if is_exact:
                assert_same(metrics(root, name), bases[method])
            runs[method if is_exact else HALF] += 1
            said = "as the run that nobody touched" if is_exact else HALF
            print(f"{sum(done.values())} faults, {name}: {said}", flush=True)
    for fault, times in sorted(done.items()):
        print(f"{times:4} x {fault}")
    print(f"{sum(runs.values())} runs finished: {', '.join(f'{times} {each}' for each, times in sorted(runs.items()))};")
    print("all but those that kept half a step have the metrics of the run that nobody touched")
    zygote.close()


def _whole(root: Path, name: str, choice: str) -> list[dict[str, float]]:
    done = Command("train", root / "run.yaml", f"trainer.run_dir={root}/runs/{name}", choice).finish()
    assert done.returncode == 0, done.stderr
    return metrics(root, name)


def _abused(root: Path, name: str, choice: str, draw: random.Random, done: Counter[str], count: int) -> bool:
    """A run until it has finished, with faults as long as there are some left; whether it says that it is exact."""
    run, is_exact = root / "runs" / name, True
    while True:
        policy, in_background = draw.choice(LAYOUTS), draw.choice(["true", "false"])
        alike = [layout for layout in LAYOUTS if layout[1:] == policy[1:]]
        layouts = {"policy": policy, "reference": draw.choice(alike), "critic": draw.choice(alike)}
        overrides = [
            f"trainer.run_dir={run}",
            choice,
            *(f"{role}.backend=megatron:{own}" for role, own in layouts.items()),
            f"trainer.async_save={in_background}",
        ]
        process = Command("train", root / "run.yaml", *overrides)
        what = draw.choice(sorted(FAULTS)) if sum(done.values()) < count else ""
        if what:
            has_come = FAULTS[what].when(run, draw)
            while process.poll() is None and not has_come():
                time.sleep(0.002)
        if what and process.poll() is None:
            everyone = children_of(process.pid)
            FAULTS[what].harm(process)
            done[what] += 1
            process.wait(120)
            is_exact = is_exact and "were taken and stay" not in "".join(process.communicate())
            wait_for(lambda pids=everyone: gone(pids))
            wait_for(lambda: is_free(run))
            if draw.random() < 0.2 and flip_a_byte(run, draw):
                done["a byte of the newest checkpoint flipped"] += 1
            continue
        ended = process.finish()
        assert ended.returncode == 0, (overrides, ended)
        return is_exact


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
