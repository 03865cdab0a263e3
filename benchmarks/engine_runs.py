"""Whole GRPO runs on one GPU whose responses come from an engine's servers, each checked: faults, memory, rates.

    python -m benchmarks.engine_runs --engine sglang --model DIRECTORY --out DIRECTORY [--beside vllm] [--minutes 8]

The task is arithmetic in words (examples/smollm2/words.py). `--device cpu --steps 2` runs the same on a CPU with a small model.
`--set KEY=VALUE` reaches every run, as the arguments that an engine needs on a machine. A line is printed as each run ends.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.harness import Part
from examples.smollm2 import words

TIMES = ("time/", "throughput/", "memory/", "wall")
BOUNDS = {"bfloat16": ("rollout/kl", 1e-2), "float32": ("rollout/logprob_diff_max", 2e-3)}
"""dtype -> metric and its bound: the gate's for bfloat16; in float32 kernels of another order of summation and no TF32."""


def run_of(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": {"path": str(options.model)},
        "policy": {"backend": "megatron:d1", "tokens_per_micro_batch": 8192, "optimizer": {"lr": 1e-5, "warmup_steps": 1}},
        "algorithm": {"name": "grpo", "group_size": 8, "kl": {"coef": 0.0}},
        "engine": {"placement": "server", "memory_fraction": 0.4, "verify_weights_every": 1},
        "data": {
            "train": [str(options.out / "words/train.jsonl")],
            "prompts_per_step": options.prompts,
            "max_prompt_tokens": 64,
            "max_response_tokens": options.response,
        },
        # A response of any form has a reward that differs within its group.
        "reward": {"functions": {f"{options.out / 'reward.py'}:digits": 1.0}},
        "trainer": {"steps": options.steps, "device": options.device, "resume": "never", "loggers": ["console"]},
    }


class Run:
    """A `fivefold train` in a process of its own: its metrics, and the GPU memory of the processes below it over time."""

    def __init__(self, part: Part, options: argparse.Namespace, name: str, *overrides: str) -> None:
        self._part, self._name, self._directory = part, name, options.out / "runs" / name
        log = (options.out / f"{name}.log").open("w")
        words = ["train", str(options.out / "run.yaml"), f"trainer.run_dir={self._directory}", *options.set, *overrides]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fivefold.cli", *words], stdout=log, stderr=subprocess.STDOUT
        )
        self._log, self._began = Path(log.name), time.monotonic()
        self.memory: dict[int, list[int]] = {}
        """Process -> MiB on the GPU at each look."""

    def rows(self) -> list[dict[str, Any]]:
        file = self._directory / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.is_file() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def look(self) -> bool:
        """Note the memory of each process; False once the run has ended or its part has no time left."""
        with contextlib.suppress(FileNotFoundError):
            words = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
            for line in subprocess.run(words, capture_output=True, text=True, check=False).stdout.splitlines():
                pid, used = line.split(",")
                if used.strip().isdecimal():
                    self.memory.setdefault(int(pid), []).append(int(used))
        time.sleep(0.3)
        if self._part.left < 0:
            for each in [*psutil.Process(self._process.pid).children(recursive=True), self._process]:
                each.kill()
        return self._process.poll() is None

    def finish(self) -> list[dict[str, Any]]:
        """Wait for the end; claims that it is a good one."""
        while self.look():
            pass
        rows = self.rows()
        is_whole = self._process.returncode == 0 and all(
            math.isfinite(value) for row in rows for value in row.values() if isinstance(value, float)
        )
        last = "" if is_whole else " / ".join(self._log.read_text().strip().splitlines()[-12:])
        self._part.claim(
            f"{self._name}: whole run of {len(rows)} rows, s", is_whole, last or round(time.monotonic() - self._began)
        )
        return rows

    def kill_server(self) -> str:
        """Kill the process of the servers that has most memory; returns its name."""
        below = psutil.Process(self._process.pid).children(recursive=True)
        served = [
            each for each in below if "fivefold.engines" in " ".join(each.cmdline()) or "sglang" in each.name().lower()
        ]
        victim = max(served, key=lambda each: each.memory_info().rss)
        said = " ".join([victim.name(), *victim.cmdline()[-3:]])
        victim.kill()
        return said[:120]


def seconds(rows: list[dict[str, Any]], key: str) -> float:
    """Median over the steps after the first two, in which kernels are compiled."""
    found = sorted(row[key] for row in rows[2:] if key in row)
    return round(found[len(found) // 2], 3) if found else math.nan


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if not key.startswith(TIMES)} for row in rows]


def numbers(part: Part, options: argparse.Namespace) -> None:
    """Log-probs against the trainer's in both types of numbers, with weights compared bit for bit after every step."""
    for dtype, (key, bound) in BOUNDS.items():
        if options.device == "cpu" and dtype != "float32":
            continue
        run = Run(part, options, f"{options.engine}-{dtype}", f"policy.dtype={dtype}")
        rows = [row for row in run.finish() if key in row]
        worst = max((row[key] for row in rows), default=math.nan)
        part.claim(f"{options.engine} {dtype}: {key}, largest of {len(rows)} steps, bound {bound}", worst <= bound, worst)
        part.say(f"{options.engine} {dtype}: mean difference", [row["rollout/logprob_diff_mean"] for row in rows])
        for pid, used in run.memory.items():
            part.say(
                f"{options.engine} {dtype}: MiB of process {pid}, last, least and most", [used[-1], min(used), max(used)]
            )
            if max(used) > 10_000:
                part.claim(
                    "memory given back while the policy trains, share", min(used[len(used) // 2 :]) < 0.5 * max(used), ""
                )


def repeated(part: Part, options: argparse.Namespace) -> None:
    """Two runs of one seed, where the engine draws by the request's key."""
    key = ["engine.sglang.enable_deterministic_inference=true"] if options.engine == "sglang" else []
    found = [without_times(Run(part, options, f"{options.engine}-same-{i}", *key).finish()) for i in range(2)]
    rewards = [[row.get("reward/mean") for row in rows] for rows in found]
    part.claim(f"{options.engine}: two runs of one seed draw the same", rewards[0] == rewards[1], rewards)


def killed(part: Part, options: argparse.Namespace) -> None:
    """A server is killed after the first step: every step has its samples, and the run ends well."""
    run = Run(part, options, f"{options.engine}-killed", f"trainer.steps={options.steps + 2}")
    while run.look() and not any(row["step"] == 1 for row in run.rows()):
        pass
    part.say("killed", run.kill_server())
    rows = run.finish()
    steps = [row["step"] for row in rows if row["step"]]
    part.claim("every step is there once after a server was killed", steps == list(range(1, options.steps + 3)), steps)


def rates(part: Part, options: argparse.Namespace) -> None:
    """Seconds of sampling beside the other engine's, with the same number of tokens a response."""
    longer = ["engine.sampling.ignore_eos=true", f"data.max_response_tokens={options.long}", "engine.max_num_seqs=1024"]
    for engine in [options.engine, *options.beside]:
        placed = ["engine.placement=in_process"] if engine == "vllm in ranks" else []
        backend = f"engine.backend={engine.split()[0]}:d1"
        rows = Run(part, options, f"rate-{engine.replace(' ', '-')}", backend, *longer, *placed).finish()
        time_s = seconds(rows, "time/rollout")
        tokens = options.prompts * 8 * options.long
        found = {"rollout s": time_s, "tokens/s": round(tokens / time_s), "sync s": seconds(rows, "time/weight_sync")}
        part.say(f"{engine}: {options.prompts * 8} sequences of {options.long} tokens", found)


PARTS = {"numbers": numbers, "killed": killed, "repeated": repeated, "rates": rates}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=list(PARTS), choices=[*PARTS, []])
    parser.add_argument("--engine", default="sglang", choices=["sglang", "vllm"])
    parser.add_argument("--beside", nargs="*", default=[], help="other engines whose rate is measured")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    for name, value in {"steps": 5, "prompts": 32, "response": 32, "long": 200}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    words.main(options.out / "words", 0)
    (options.out / "reward.py").write_text("def digits(response):\n    return sum(c.isdigit() for c in response) / 32\n")
    (options.out / "run.yaml").write_text(yaml.safe_dump(run_of(options)))
    options.set.append(f"engine.backend={options.engine}:d1")
    failed = 0
    for name in options.parts:
        part = Part.timed(options.minutes * 60 / len(options.parts))
        PARTS[name](part, options)
        failed += part.failed
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
