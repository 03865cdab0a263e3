"""Run the measurements that need GPUs one after the other, each in a process of its own with a time limit.

    python benchmarks/all_on_gpus.py OUT --model DIR --gsm8k DIR [--seconds 1500] [JOB ...]
    python benchmarks/all_on_gpus.py --list

DIR of --model is what examples/smollm2/get_model.py writes, that of --gsm8k has OpenAI's train.jsonl and test.jsonl. Without
names, all jobs for which there are enough GPUs run, in the order of the table below. A job begins only if at least half of
its time is left, and gets no more than what is left; the last lines say what was not measured. Each job's output goes to
OUT/NAME.txt and, with its name in front, to the terminal. SIGTERM and Ctrl-C end the job that runs with all that it started.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
_GRACE = 20.0
"""Seconds in which a job may end by itself after SIGTERM."""


@dataclass(frozen=True)
class Job:
    """A measurement: its command, where OUT, MODEL and GSM8K stand for directories, its GPUs and its longest time."""

    name: str
    gpus: int
    seconds: float
    command: str


_RECIPES = "benchmarks/recipes.py OUT/recipes --model MODEL --gsm8k GSM8K"
_TRL = "benchmarks/beside_trl.py OUT/recipes --model MODEL --gsm8k GSM8K"
_SHAPE = f"{_TRL} --shape Qwen3-1.7B"
_LIMIT = "benchmarks/engine_limit.py --model MODEL --seconds 700 --group-seconds 200"
JOBS = (
    Job("gpu-tests", 1, 400, "-m pytest -n 0 -m gpu --timeout 300 -v"),
    Job("kernels", 1, 200, "-m pytest -n 0 -m kernels -q tests/megatron"),
    Job("fsdp-one", 1, 150, "benchmarks/fsdp_speed.py one --seconds 140"),
    Job("engine-small", 1, 720, f"{_LIMIT} small-alone-2 small-servers-2 small-ours small-servers-4 small-alone"),
    Job("engine-large", 1, 720, f"{_LIMIT} large-alone-2 large-servers-2 large-ours large-alone"),
    Job("gsm8k-sft", 1, 260, f"{_RECIPES} --recipes gsm8k-sft --minutes 4"),
    Job("trl-small", 1, 560, f"{_TRL} --steps 10 --eval-every 10 --minutes 4.5"),
    Job("curves", 1, 1000, f"{_RECIPES} --recipes words-grpo,gsm8k-grpo --seeds 3 --at-once --minutes 10"),
    Job("trl-curves", 1, 600, f"{_TRL} --steps 10 --eval-every 10 --seeds 3 --at-once --minutes 9"),
    Job("trl-1.7b", 1, 500, f"{_SHAPE} --steps 6 --minutes 4"),
    Job("trl-turns", 1, 620, f"{_SHAPE} --steps 4 --minutes 5 --turns 16 --tool-seconds 0.05 --set data.prompts_per_step=8"),
    Job("mixtures", 1, 300, "benchmarks/engine_speed.py families --seconds 290"),
    Job("attention", 1, 120, "benchmarks/start_up.py attention --seconds 110"),
    Job("start-up-1.7b", 1, 420, "benchmarks/start_up.py 1.7b --seconds 410"),
    Job(
        "quickstart",
        1,
        1800,
        "benchmarks/quickstart.py OUT/quickstart --model MODEL --source GSM8K/train.jsonl GSM8K/test.jsonl",
    ),
    *(
        Job(recipe, 1, 1200, f"{_RECIPES} --recipes {recipe} --minutes 19")
        for recipe in ("words-grpo", "gsm8k-grpo", "gsm8k-dapo", "gsm8k-ppo", "gsm8k-lora")
    ),
    Job("start-up-8b", 2, 400, "benchmarks/start_up.py 8b --seconds 390"),
    Job("sync-8b-fsdp", 2, 300, "benchmarks/start_up.py 8b-fsdp --seconds 290"),
    Job("fsdp-two", 2, 500, "benchmarks/fsdp_speed.py two weights largest --seconds 160"),
    Job("role-layouts", 2, 500, "benchmarks/role_layouts.py --seconds 120"),
    Job("experts", 2, 300, "benchmarks/training_speed.py experts-model --seconds 290"),
    Job("small", 1, 300, "benchmarks/training_speed.py small --seconds 290"),
    Job("groups", 1, 200, "benchmarks/training_speed.py groups offload --seconds 90"),
    # Without a second GPU it measures one alone.
    Job("long", 1, 300, "benchmarks/training_speed.py long --seconds 290"),
    Job("sglang", 2, 600, "benchmarks/sglang_servers.py --seconds 100"),
    Job("gsm8k-async", 2, 1200, f"{_RECIPES} --recipes gsm8k-async --minutes 19"),
)


def run(job: Job, out: Path, seconds: float, places: dict[str, str]) -> str:
    """Run a job for at most so many seconds, show its output as it comes, and return how it ended."""
    command = [sys.executable, *(_placed(word, places) for word in job.command.split())]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with (out / f"{job.name}.txt").open("w") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
            env=environment, errors="replace",
        )  # fmt: skip
        assert process.stdout is not None
        is_late = threading.Event()

        def stop() -> None:
            is_late.set()
            end(process)

        limit = threading.Timer(seconds, stop)
        limit.start()
        try:
            for line in process.stdout:
                log.write(line)
                print(f"{job.name}: {line}", end="", flush=True)
            code = process.wait()
        finally:
            limit.cancel()
            limit.join()
            end(process)
    return "cut off at its limit" if is_late.is_set() else "ended well" if code == 0 else f"failed with exit code {code}"


def _placed(word: str, places: dict[str, str]) -> str:
    head, slash, tail = word.partition("/")
    return places[head] + slash + tail if head in places else word


def end(process: subprocess.Popen[str]) -> None:
    """End a job with all that it started: SIGTERM, and SIGKILL for what is left after a grace."""
    try:
        processes = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    process.terminate()
    _, left = psutil.wait_procs(processes, timeout=_GRACE)
    for one in left:
        one.kill()
    psutil.wait_procs(left, timeout=_GRACE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, help="directory for the output of each job")
    parser.add_argument("jobs", nargs="*", metavar="JOB", help="names of the jobs to run (default: all)")
    parser.add_argument("--model", default="", help="directory of SmolLM2-135M-Instruct")
    parser.add_argument("--gsm8k", default="", help="directory of GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--seconds", type=float, default=1500.0, help="for all jobs together (default: 1500)")
    parser.add_argument("--gpus", type=int, help="number of GPUs (default: those that are there)")
    parser.add_argument("--list", action="store_true", help="print the jobs and end")
    chosen = parser.parse_intermixed_args()
    if chosen.list or chosen.out is None:
        for job in JOBS:
            print(f"{job.name:16} {job.gpus} GPU{'s' if job.gpus > 1 else ' '} {job.seconds:6.0f} s  {job.command}")
        return 0 if chosen.list else parser.error("name a directory for the output, or --list")
    if unknown := set(chosen.jobs) - {job.name for job in JOBS}:
        parser.error(f"there is no job {', '.join(sorted(unknown))}: --list prints them")
    places = {"OUT": str(chosen.out.resolve()), "MODEL": chosen.model, "GSM8K": chosen.gsm8k}
    selected = [job for job in JOBS if not chosen.jobs or job.name in chosen.jobs]
    for place, option in (("MODEL", "--model"), ("GSM8K", "--gsm8k")):
        if not places[place] and any(place in job.command for job in selected):
            parser.error(f"{option} is needed by {', '.join(job.name for job in selected if place in job.command)}")
    gpus = _gpus() if chosen.gpus is None else chosen.gpus
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    chosen.out.mkdir(parents=True, exist_ok=True)
    deadline, endings = time.monotonic() + chosen.seconds, {}
    for job in selected:
        left = deadline - time.monotonic()
        if job.gpus > gpus:
            endings[job.name] = f"not measured: needs {job.gpus} GPUs, {gpus} are there"
        elif left < job.seconds / 2:
            endings[job.name] = f"not measured: {max(0.0, left):.0f} of its {job.seconds:.0f} s were left"
        else:
            began = time.monotonic()
            endings[job.name] = run(job, chosen.out, min(left, job.seconds), places)
            endings[job.name] += f" after {time.monotonic() - began:.0f} s"
        print(f"{job.name}: {endings[job.name]}", flush=True)
    print("\n" + "\n".join(f"{name:16} {ending}" for name, ending in endings.items()))
    return 0 if all(ending.startswith("ended well") for ending in endings.values()) else 1


def _gpus() -> int:
    asked = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    return int(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)


if __name__ == "__main__":
    sys.exit(main())
