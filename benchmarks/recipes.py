"""Runs the recipes of examples/smollm2 one after the other, prints each evaluation as it comes, and writes their curves.

    python benchmarks/recipes.py OUT --model DIR --gsm8k DIR [--recipes words-grpo,gsm8k-grpo] [--seeds 1] [--minutes 8]
    python benchmarks/recipes.py OUT --dry-run                                  # on a CPU, with a tiny model and little data
    python benchmarks/recipes.py OUT --cpu --recipes words-grpo --seeds 2       # `make real`: the model itself on a CPU
    python benchmarks/recipes.py OUT ... --seeds 3 --at-once [--shared-by 6]    # all of them share the GPU, and others too

DIR of --model is what examples/smollm2/get_model.py writes; that of --gsm8k has OpenAI's train.jsonl and test.jsonl.
A recipe whose warm start is not in OUT trains it first, to its end. Another run that is stopped by --minutes saves a
checkpoint, and the same command continues it. A run that evaluates part of the test problems evaluates all of them at its
end. Each run's curve is in OUT/curves/NAME.json: in benchmarks/results/smollm2/, `make docs` draws it. Without git,
FIVEFOLD_COMMIT names the commit.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
HERE = Path(__file__).resolve().parent.parent
EXAMPLES = HERE / "examples/smollm2"
HOME, MODEL = "runs/smollm2", "SmolLM2-135M-Instruct"
"""Directory and model that the recipes name."""
RECIPES = sorted(path.stem for path in EXAMPLES.glob("*.yaml"))
GPUS = {"gsm8k-async": 2}
"""Recipe -> its number of GPUs, if that is not 1."""
DRY = [
    *("trainer.device=cpu", "trainer.steps=4", "trainer.eval_every=2", "trainer.stop_at={}", "trainer.loggers=[console]"),
    *("policy.dtype=float32", "data.max_response_tokens=8", "data.prompts_per_step=4", "eval.max_prompts=8"),
    *("engine.backend=transformers", "launch.threads=1"),
]
DRY_SAMPLING = ["algorithm.group_size=4"]
CPU = [
    *("trainer.device=cpu", "trainer.loggers=[console]", "policy.dtype=float32", "policy.optimizer.warmup_steps=0"),
    *("engine.backend=transformers", "data.max_response_tokens=4", "eval.max_prompts=50"),
]
CPU_OF = {
    "words-sft": [
        *("data.prompts_per_step=16", "trainer.steps=40", "trainer.eval_every=5", "trainer.eval_before_train=false"),
        "trainer.stop_at={val/words/mean@4: 0.2}",
    ],
    "words-grpo": [
        *("data.prompts_per_step=16", "algorithm.group_size=8", "trainer.steps=30", "trainer.eval_every=15"),
        "trainer.stop_at={}",
    ],
}
"""What a CPU changes, where arithmetic in words has numbers below 10."""
RISE = 0.1
"""Least rise of the mean reward from the first to the last fifth of the steps, with --cpu."""
DRY_OF = {
    "gsm8k-dapo": ["algorithm.prompts_per_round=8"],
    "gsm8k-ppo": ["critic.warmup_steps=1"],
    "gsm8k-async": ["launch.allocation=null"],
}
PATIENCE = 60
"""Seconds that a run has to save after SIGTERM."""
LEFT_OUT = {"time/step", "time/eval", "time/save", "time/load"}
"""Stages that are not part of a step, and the step itself."""


MEANS = (
    *("reward/mean", "policy/loss", "reward/frac_reward_zero_std", "rollout/logprob_diff_mean"),
    *("response/length_mean", "throughput/tokens_per_second"),
)
"""Metrics whose mean since the evaluation before is stored with one."""


@dataclass
class Curve:
    """What a run has measured so far, as its file has it."""

    recipe: str
    seed: int
    changes: list[str]
    """Keys that the command line set."""
    hardware: str
    commit: str
    versions: dict[str, str]
    tag: str = ""
    """Name of a trial with other keys than the recipe's."""
    evaluations: list[dict[str, float]] = field(default_factory=list)
    """Step, seconds since the start (of all processes together), accuracies with standard errors, seconds of stages."""
    rewards: list[list[float]] = field(default_factory=list)
    """Step, seconds, mean reward of the step's samples (sft: its loss), seconds of the step."""
    whole: dict[str, float] = field(default_factory=dict)
    """Evaluation of the last checkpoint on all test problems."""
    medians: dict[str, float] = field(default_factory=dict)
    """Metric -> its median over the steps after the second; only beside_trl.py stores medians."""
    peak_gib: float = 0.0

    @property
    def name(self) -> str:
        return "-".join(filter(None, [self.recipe, self.tag, str(self.seed)]))

    @property
    def seconds(self) -> float:
        rows = [row["seconds"] for row in self.evaluations] + [row[1] for row in self.rewards]
        return max(rows, default=0.0)

    def add(self, row: dict[str, Any], seconds: float, since: list[dict[str, Any]]) -> str | None:
        """Take a row of metrics; return the line of an evaluation. A step that is repeated replaces what it was."""
        self.rewards = [kept for kept in self.rewards if kept[0] < row["step"]]
        self.evaluations = [kept for kept in self.evaluations if kept["step"] < row["step"]]
        since.append(row)
        self.peak_gib = max(self.peak_gib, row.get("memory/peak_gb", 0.0))
        if (reward := row.get("reward/mean", row.get("policy/loss"))) is not None:
            self.rewards.append([row["step"], round(seconds, 1), round(reward, 5), round(row.get("time/step", 0.0), 3)])
        scores = _scores(row)
        if not scores:
            return None
        steps = [row for row in since if "time/step" in row]
        since.clear()
        means = {
            name: statistics.fmean(row.get(name, 0.0) for row in steps)
            for name in dict.fromkeys(name for row in steps for name in row if name.startswith("time/"))
        }
        for name in MEANS:
            if values := [row[name] for row in steps if name in row]:
                means[name] = statistics.fmean(values)
        evaluation = {"step": row["step"], "seconds": seconds, **scores, **means}
        self.evaluations.append({name: value if name == "step" else round(value, 5) for name, value in evaluation.items()})
        return f"{self.name}: {described(self.evaluations[-1])}"


def _scores(row: dict[str, Any]) -> dict[str, float]:
    """Return the accuracies of an evaluation, without the name of its data."""
    names = re.compile(r"val/[^/]+/(accuracy|accuracy_stderr|mean@\d+|stderr@\d+|pass@\d+|truncated_fraction)$")
    return {match[1]: value for name, value in row.items() if value is not None and (match := names.match(name))}


def described(row: dict[str, float]) -> str:
    """Return an evaluation as a line."""
    parts = [f"step {row['step']:4.0f}", f"{row['seconds']:5.0f} s"] if "step" in row else []
    if "accuracy" in row:
        parts.append(f"greedy {row['accuracy']:.4f} ± {row.get('accuracy_stderr', 0):.4f}")
    for name in (name for name in row if name.startswith("mean@")):
        parts.append(f"{name} {row[name]:.4f} ± {row.get(f'stderr@{name[5:]}', 0):.4f}")
    for name, shown in (("reward/mean", "reward"), ("policy/loss", "loss"), ("reward/frac_reward_zero_std", "equal groups")):
        if name in row and not (name == "policy/loss" and "reward/mean" in row):
            parts.append(f"{shown} {row[name]:.4f}")
    if row.get("time/step"):
        stages = {name[5:]: value for name, value in row.items() if name.startswith("time/") and name not in LEFT_OUT}
        shown = ", ".join(f"{name} {value:.2f}" for name, value in stages.items() if value >= 0.005)
        parts.append(f"{row['time/step']:.2f} s a step = {shown}")
        parts.append(f"{row.get('throughput/tokens_per_second', 0):,.0f} tokens/s")
    return "  ".join(parts)


@dataclass(frozen=True)
class Bench:
    """Where runs are written, and how long each may take."""

    out: Path
    minutes: float
    dry: bool
    cpu: bool
    changes: dict[str, list[str]]
    """Recipe -> keys that the command line sets."""
    about: dict[str, Any]
    tag: str = ""
    stopping: threading.Event = field(default_factory=threading.Event)
    """Set by SIGTERM: the time of all runs is over."""
    failures: list[str] = field(default_factory=list)
    """Names of runs that have failed."""

    def write_recipes(self) -> None:
        """Write the recipes, with files in `out`."""
        for name in RECIPES:
            path = self.recipe(name)
            path.parent.mkdir(exist_ok=True)
            begun = path.with_suffix(f".{os.getpid()}")
            begun.write_text((EXAMPLES / f"{name}.yaml").read_text().replace(HOME, str(self.out)))
            begun.replace(path)

    def recipe(self, name: str) -> Path:
        return self.out / "recipes" / f"{name}.yaml"

    def warm(self, task: str) -> Path:
        """Return the directory of a task's warm start, which its recipe trains if it is not there."""
        path = self.out / task / "warm" / MODEL
        if not self.tag:
            # No run can begin before its end, however long that takes.
            replace(self, minutes=math.inf).train(f"{task}-sft", 0)
        if self.stopping.is_set():
            sys.exit(128 + signal.SIGTERM)
        if not path.is_dir():
            sys.exit(f"there is no warm start: {task}-sft has not come to its end")
        return path

    def train(self, name: str, seed: int) -> Curve:
        """Run a recipe until it ends or its time is over; the last checkpoint is then evaluated on all test problems.

        Of several commands that need a warm start, the first trains it and the others wait.
        """
        task, kind = name.split("-", 1)
        path, curve = self.recipe(name), self.curve(name, seed)
        if self.stopping.is_set():
            return curve
        run_dir = self.out / task / curve.name.removeprefix(f"{task}-")
        # A warm start that is there is that of the runs that follow; one with a tag is measured only.
        if kind != "sft":
            self.warm(task)
        elif not self.tag:
            warm = self.out / task / "warm" / MODEL
            with alone(self.out / task / "warm.lock"):
                if warm.is_dir():
                    print(f"\n{curve.name}: {warm} is there", flush=True)
                elif not self.stopping.is_set():
                    # Half a warm start would be one to every command that follows.
                    if self.run(curve, path, run_dir, seed):
                        self.command(curve.name, ["export", str(run_dir), str(warm)], 300)
                    self.write(curve)
            return curve
        self.run(curve, path, run_dir, seed)
        if kind != "sft" and not self.stopping.is_set() and curve.evaluations and "max_prompts" in path.read_text():
            changes = [] if self.dry else ["eval.max_prompts=null"]
            printed = self.command(curve.name, ["eval", str(run_dir), *changes], 400)
            curve.whole = _scores(json.loads(printed)) if printed else {}
            print(f"{curve.name}: all test problems  {described(curve.whole)}", flush=True)
        self.write(curve)
        return curve

    def run(self, curve: Curve, path: Path, run_dir: Path, seed: int) -> bool:
        """Run a recipe until it ends or its time is over; return whether it has come to its end."""
        changes = [*curve.changes, f"trainer.run_dir={run_dir}", f"trainer.seed={seed}", "trainer.resume=auto"]
        print(f"\n{curve.name}: {' '.join(curve.changes) or 'as in its file'}", flush=True)
        return self.follow(curve, run_dir, [*FIVEFOLD, "train", str(path), *changes])

    def follow(self, curve: Curve, run_dir: Path, command: list[str]) -> bool:
        """Run a command; print and store what it measures; return whether it has come to its end. SIGTERM at the end of its
        time lets it save."""
        metrics, before, since = run_dir / "metrics.jsonl", curve.seconds, list[dict[str, Any]]()
        seen, ends = metrics.stat().st_size if metrics.exists() else 0, time.monotonic() + 60 * self.minutes
        stopped = False
        with (self.out / f"{curve.name}.log").open("a") as log:
            began = time.time()
            process = subprocess.Popen(command, stdout=log, stderr=log, cwd=HERE, env=environment())
            try:
                while True:
                    ended = process.poll() is not None
                    rows, seen = grown(metrics, seen)
                    for row in rows:
                        if line := curve.add(row, before + row["wall"] - began, since):
                            print(line, flush=True)
                            self.write(curve)
                    if ended:
                        break
                    if self.stopping.is_set():
                        ends = min(ends, time.monotonic())
                    if time.monotonic() > ends + PATIENCE:
                        process.kill()
                    elif time.monotonic() > ends and not stopped:
                        print(f"{curve.name}: its time is over", flush=True)
                        process.terminate()
                        stopped = True
                    time.sleep(0.5)
            finally:
                if process.poll() is None:
                    process.kill()
        # A program that does not handle SIGTERM, such as TRL's side, ends by it.
        if process.returncode not in (0, 128 + signal.SIGTERM, -signal.SIGTERM):
            self.failed(curve.name, process.returncode)
        return process.returncode == 0 and not stopped

    def command(self, name: str, words: list[str], seconds: float) -> str:
        """Return the output of a command of fivefold; an empty text if it failed or took too long."""
        with (self.out / f"{name}.log").open("a") as log:
            try:
                done = subprocess.run(
                    [*FIVEFOLD, *words], stdout=subprocess.PIPE, stderr=log, text=True, timeout=seconds, check=False,
                    cwd=HERE, env=environment(),
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                self.failed(name, f"{words[0]} took more than {seconds:g} s")
                return ""
        if done.returncode:
            self.failed(name, done.returncode)
        return "" if done.returncode else done.stdout

    def failed(self, name: str, code: object) -> None:
        self.failures.append(name)
        log = (self.out / f"{name}.log").read_text().splitlines()
        print(f"FAIL {name}: {code}\n  " + "\n  ".join(log[-25:]), flush=True)

    def new_curve(self, name: str, seed: int) -> Curve:
        """Return the curve of a run that has not begun."""
        dry = DRY if name.endswith("-sft") else DRY + DRY_SAMPLING + DRY_OF.get(name, [])
        mode = dry if self.dry else CPU + CPU_OF[name] if self.cpu else []
        changes = [*mode, *self.changes.get(name, [])]
        about = self.about | {"hardware": self.about["hardware"].replace("1 x ", f"{GPUS.get(name, 1)} x ", 1)}
        name = f"{name}-cpu" if self.cpu else name
        return Curve(name, seed, changes, **about, tag=self.tag)

    def curve(self, name: str, seed: int) -> Curve:
        """Return the curve of a run that continues, or a new one."""
        curve = self.new_curve(name, seed)
        if (path := self.file(curve)).exists():
            before = json.loads(path.read_text())
            curve.evaluations, curve.rewards, curve.peak_gib = before["evaluations"], before["rewards"], before["peak_gib"]
            curve.whole = before["whole"]
        return curve

    def file(self, curve: Curve) -> Path:
        return self.out / "curves" / f"{curve.name}.json"

    def write(self, curve: Curve) -> None:
        path = self.file(curve)
        path.parent.mkdir(exist_ok=True)
        fields = [f"{json.dumps(key)}: {_lines(value)}" for key, value in vars(curve).items()]
        path.write_text("{\n" + ",\n".join(fields) + "\n}\n")


def _lines(value: Any) -> str:
    """Return JSON with one row of a list per line."""
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in value) + "\n]"
    return json.dumps(value)


FIVEFOLD = [sys.executable, "-m", "fivefold.cli"]


def environment() -> dict[str, str]:
    path = [str(HERE / "src"), str(HERE), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path)), "PYTHONUNBUFFERED": "1"}


def grown(path: Path, seen: int) -> tuple[list[dict[str, Any]], int]:
    """Return the whole lines of a growing file after `seen` bytes, and where they end."""
    if not path.exists():
        return [], seen
    with path.open("rb") as file:
        file.seek(seen)
        whole, newline, _ = file.read().rpartition(b"\n")
    return [json.loads(line) for line in whole.splitlines()], seen + len(whole) + len(newline)


def described_machine() -> dict[str, Any]:
    import torch

    def version(name: str) -> str:
        from importlib import metadata

        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return "not installed"

    gpus = torch.cuda.device_count()
    commit = os.environ.get("FIVEFOLD_COMMIT") or subprocess.run(
        ["git", "-C", str(HERE), "rev-parse", "--short=7", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()  # fmt: skip
    return {
        "hardware": f"1 x {torch.cuda.get_device_name(0)}" if gpus else f"CPU, {os.cpu_count()} cores",
        "commit": commit or "unknown",
        "versions": {name: version(name) for name in ("torch", "vllm", "transformers", "megatron-core")},
    }


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Wait until no other command holds this lock, and hold it."""
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another command that holds {path}", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def at_once(work: Callable[..., T], items: list[tuple[Any, ...]], together: bool) -> list[T]:
    """Return what `work` returns for each item: all at once if `together`, otherwise one after the other."""
    with ThreadPoolExecutor(len(items) if together else 1) as pool:
        return list(pool.map(lambda item: work(*item), items))


def shares(runs: int) -> list[str]:
    """Return the keys that runs change if so many of them are on this GPU at once."""
    import torch

    keys = [f"launch.threads={max(1, (os.cpu_count() or 1) // runs)}"]
    if torch.cuda.is_available():
        cache = torch.cuda.get_device_properties(0).total_memory // (4 * runs)
        # vLLM measures what it may take, and what it gives back, by the free memory of the whole GPU.
        keys += ["engine.sleep=false", "engine.processes=1", f"engine.memory_fraction={0.5 / runs:.3f}"]
        keys += [f"engine.vllm={{kv_cache_memory_bytes: {cache}}}"]
    return keys


def write_data(out: Path, model: Path | None, gsm8k: Path | None, dry: bool, cpu: bool = False) -> None:
    """Put the data of both tasks and the model where the recipes look for them."""
    run = [sys.executable, str(EXAMPLES / "words.py"), str(out / "words"), *(["0", "10"] if cpu else [])]
    subprocess.run(run, check=True, env=environment(), cwd=HERE, stdout=subprocess.DEVNULL)
    if dry and gsm8k is None:
        gsm8k = out / "source"
        gsm8k.mkdir()
        for split, first in (("train", 0), ("test", 64)):
            rows = [{"question": f"{n} and 7?", "answer": f"<<{n}+7={n + 7}>>{n + 7}\n#### {n + 7}"} for n in range(64)]
            (gsm8k / f"{split}.jsonl").write_text("\n".join(json.dumps(row) for row in rows[first // 4 :]))
    if gsm8k is not None:
        run = [sys.executable, str(EXAMPLES / "gsm8k.py"), str(out / "gsm8k")]
        files = [str(gsm8k / f"{split}.jsonl") for split in ("train", "test")]
        subprocess.run([*run, *files], check=True, env=environment(), cwd=HERE, stdout=subprocess.DEVNULL)
    if dry:
        train = [str(out / task / "train.jsonl") for task in ("words", "gsm8k")]
        for words in (
            ["train-tokenizer", "bpe", "--vocabulary", "512", "--data", *train, "--out", str(out / "tokenizer")],
            ["init-model", "llama", "--tokenizer", str(out / "tokenizer"), "--positions", "1024", "--out", str(out / MODEL)],
        ):
            subprocess.run([*FIVEFOLD, *words], check=True, env=environment(), cwd=HERE, stdout=subprocess.DEVNULL)
        (out / MODEL / "chat_template.jinja").write_text(
            "{% for turn in messages %}{{ turn['content'] + '\\n' }}{% endfor %}"
        )
    elif model is not None:
        (out / MODEL).symlink_to(model.resolve())
    else:
        subprocess.run(
            [sys.executable, str(EXAMPLES / "get_model.py"), str(out / MODEL)], check=True, env=environment(), cwd=HERE
        )


def table(curves: list[Curve]) -> str:
    """Return the first and the last evaluation of each run, and the last on all test problems."""
    lines = []
    for curve in curves:
        if not curve.evaluations:
            lines.append(f"{curve.name}: not measured")
            continue
        steps = statistics.median([row[3] for row in curve.rewards] or [0.0])
        speed = f"{curve.seconds:.0f} s, {steps:.2f} s a step, {curve.peak_gib:.1f} GiB"
        rows = {"first": curve.evaluations[0], "last": curve.evaluations[-1], "all test problems": curve.whole}
        lines += [
            f"{curve.name}: {len(curve.rewards)} steps, {speed}",
            *(f"  {name:17}  {described(row)}" for name, row in rows.items() if row),
        ]
    return "\n".join(lines)


def risen(curves: list[Curve]) -> bool:
    """Print how the mean reward of each run that samples has changed from the first to the last fifth of its steps."""
    rises = {}
    for curve in curves:
        if "-sft" not in curve.recipe:
            rewards = [row[2] for row in curve.rewards] or [0.0]
            fifth = max(1, len(rewards) // 5)
            first, last = statistics.fmean(rewards[:fifth]), statistics.fmean(rewards[-fifth:])
            rises[curve.name] = last - first
            print(f"{curve.name}: mean reward of the first {fifth} steps {first:.3f}, of the last {last:.3f}", flush=True)
    return all(rise >= RISE for rise in rises.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, help="directory of the model")
    parser.add_argument("--gsm8k", type=Path, help="directory with train.jsonl and test.jsonl")
    parser.add_argument("--recipes", default="words-sft,words-grpo,gsm8k-sft,gsm8k-grpo", help=f"of {', '.join(RECIPES)}")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds of each recipe; a warm start has one")
    parser.add_argument("--first-seed", type=int, default=0, help="the lowest of them: several commands can share a GPU")
    parser.add_argument("--at-once", action="store_true", help="run all recipes and seeds at once, on one GPU")
    parser.add_argument("--shared-by", type=int, metavar="N", help="runs on the GPU, if other commands have some there too")
    parser.add_argument("--minutes", type=float, default=8.0, help="of each training but a warm start")
    parser.add_argument("--set", action="append", default=[], metavar="RECIPE:KEY=VALUE", help="change a key of a recipe")
    parser.add_argument("--tag", default="", help="name of a trial with --set: files of its own next to the recipe's")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--cpu", action="store_true", help=f"the small version, whose reward must rise by {RISE}")
    options = parser.parse_args()
    wanted = options.recipes.split(",")
    if unknown := set(wanted) - set(RECIPES):
        parser.error(f"there is no recipe {', '.join(sorted(unknown))}: choose from {', '.join(RECIPES)}")
    if options.cpu and not set(wanted) <= set(CPU_OF):
        parser.error(f"--cpu is for {', '.join(CPU_OF)}: got {options.recipes}")
    if not (options.dry_run or options.cpu) and options.model is None:
        parser.error("--model must name the directory that examples/smollm2/get_model.py writes, unless --dry-run is given")
    if not options.dry_run and options.gsm8k is None and any(name.startswith("gsm8k") for name in wanted):
        parser.error("--gsm8k must name the directory with train.jsonl and test.jsonl")
    changes: dict[str, list[str]] = {}
    for setting in options.set:
        name, colon, change = setting.partition(":")
        if not colon or name not in RECIPES or "=" not in change:
            parser.error(f"--set is written RECIPE:KEY=VALUE with one of {', '.join(RECIPES)}: got {setting}")
        changes.setdefault(name, []).append(change)
    first, last = options.first_seed, options.first_seed + options.seeds
    runs = [(name, seed) for name in wanted for seed in ([0] if name.endswith("-sft") else range(first, last))]
    least = len(runs) if options.at_once else 1
    sharing = least if options.shared_by is None else options.shared_by
    if sharing < least:
        parser.error(f"--shared-by must count the {least} of this command too: got {sharing}")
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    about = described_machine()
    if sharing > 1:
        about["hardware"] += f", shared by {sharing} runs"
        changes = {name: [*shares(sharing), *changes.get(name, [])] for name in RECIPES}
    print(f"{about['hardware']}; commit {about['commit']}; {about['versions']}", flush=True)
    bench = Bench(out, options.minutes, options.dry_run, options.cpu, changes, about, options.tag)
    signal.signal(signal.SIGTERM, lambda *_: bench.stopping.set())
    with alone(out / "data.lock"):
        bench.write_recipes()
        if not (out / MODEL).exists():
            write_data(out, options.model, options.gsm8k, options.dry_run, options.cpu)
    curves = at_once(bench.train, runs, options.at_once)
    print(f"\n{table(curves)}", flush=True)
    well = all(curve.evaluations for curve in curves) and not bench.failures
    if options.cpu:
        well = risen(curves) and well
        for run_dir in sorted(out.glob("words/grpo-cpu-*")):
            print(bench.command("report", ["report", str(run_dir)], 120).strip(), flush=True)
    return 128 + signal.SIGTERM if bench.stopping.is_set() else 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
