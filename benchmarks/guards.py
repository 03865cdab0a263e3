"""Measure what the guards of a run cost: signs of life and places within a step, and checksums while a checkpoint is loaded.

    python benchmarks/guards.py step [--steps 40]                 # no GPU; a minute
    python benchmarks/guards.py sums [--passes 3]                 # no GPU; 13 GB of memory, 5 GB of disk in TMPDIR

`step` trains a tiny model on two ranks, d2, and adds up what the guards take: CPU time of their threads, which hold
Python's lock meanwhile, and calls of the main thread. Neither depends on the model's size, so the shortest step that was
recorded on a GPU stands next to them. `sums` saves 12 layers of Qwen3-0.6B's shape with the state of their
optimizer, then loads them with and without checking the sums, in turns; `checkpoint_speed.py` does so on GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from benchmarks.checkpoint_speed import Measured, saved, without_sums
from fivefold.summed_files import BLOCK, sum_of
from tests.support.cluster import Cluster
from tests.support.commands import Command
from tests.support.gpu_models import build, random_batch, sizes, timed
from tests.support.two_steps import OBJECTIVE
from tests.support.whole_runs import make_model, write_run
from tests.support.zygote import zygote

if TYPE_CHECKING:
    from fivefold.megatron.mesh import Mesh

RUN = """
policy: {backend: "megatron:d2", tokens_per_micro_batch: 64}
algorithm: {name: grpo, group_size: 4, updates_per_step: 2}
data: {prompts_per_step: 8, max_response_tokens: 12}
trainer: {steps: $STEPS, eval_every: never, save_every: 0}
launch: {threads: 1}
"""
LAYERS = 12
"""Number of layers of the model that `sums` saves and loads."""
SHORTEST_STEP = 0.184
"""Seconds of the shortest step that was recorded on a GPU: SFT of SmolLM2-135M on one H100."""


# --- a step ------------------------------------------------------------------------------------------------------------


class Spent:
    """Calls and seconds of guards in this process."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = defaultdict(int)
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside = threading.local()
        readings = [time.thread_time() for _ in range(1000)]
        self._empty = (readings[-1] - readings[0]) / len(readings)
        """Seconds that reading the clock takes, which are not the guards'."""

    def wrap(self, owner: Any, name: str, kind: str) -> None:
        """Count the calls of a function and their CPU time; of calls within each other the outer one counts."""
        function = getattr(owner, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            if getattr(self._inside, "is_counted", False):
                return function(*arguments, **options)
            self._inside.is_counted, began = True, time.thread_time()
            try:
                return function(*arguments, **options)
            finally:
                self.seconds[kind] += time.thread_time() - began - self._empty
                self.calls[kind] += 1
                self._inside.is_counted = False

        setattr(owner, name, counted)


def watch(out: str) -> None:
    """Count the guards in each rank, which writes what it counted at its end."""
    from fivefold.distributed import heartbeat, objects, pulse
    from fivefold.launch import rank

    spent, real = Spent(), rank._run
    for name in ("begin", "item", "check_items", "check"):
        spent.wrap(heartbeat.Heartbeat, name, "places")
    spent.wrap(heartbeat.Heartbeat, "_exchange", "heartbeat thread")
    spent.wrap(objects, "_encoded", "JSON of messages")

    within_stage = pulse.Stages.within

    @contextmanager
    def within(self: pulse.Stages, name: str) -> Iterator[None]:
        began = time.thread_time()
        with within_stage(self, name):
            spent.seconds["stages"] += time.thread_time() - began
            yield
        spent.calls["stages"] += 1

    pulse.Stages.within = within  # type: ignore[method-assign]

    def run(*arguments: Any) -> int:
        began = time.monotonic()
        try:
            return real(*arguments)
        finally:
            seconds = time.monotonic() - began
            for thread in threading.enumerate():
                if thread.name == "pulse":
                    used = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]
                    spent.seconds["pulse thread"] = int(used) / 1e9
            counted = {"wall": seconds, "calls": spent.calls, "seconds": spent.seconds}
            Path(f"{out}-{os.environ['RANK']}.json").write_text(json.dumps(counted))

    rank._run = run  # type: ignore[assignment]


def step(steps: int) -> None:
    """Print the time of the guards in each step, and its share of the shortest step on a GPU."""
    # Another process imports the hook by its module.
    from benchmarks import guards

    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        make_model(root)
        write_run(root, RUN.replace("$STEPS", str(steps)))
        done = Command("train", root / "run.yaml", hook=partial(guards.watch, str(root / "spent"))).finish()
        assert done.returncode == 0, done.stdout + done.stderr
        seconds = statistics.median(row["time/step"] for row in metrics_with_times(root))
        paths = sorted(root.glob("spent-*.json"))
        assert len(paths) == 2, "a rank did not write what it counted"
        for path in paths:
            spent = json.loads(path.read_text())
            threads = sum(spent["seconds"].get(f"{name} thread", 0.0) for name in ("heartbeat", "pulse")) / spent["wall"]
            marks = {kind: spent["seconds"][kind] / steps for kind in ("places", "stages", "JSON of messages")}
            print(f"{path.stem}: {steps} steps of {1e3 * seconds:.0f} ms")
            print(f"  threads: {100 * threads:.3f} % of a core (heartbeat and pulse, twice a second)")
            for kind, taken in marks.items():
                print(f"  {kind}: {spent['calls'][kind] / steps:.0f} calls a step, {1e6 * taken:.0f} us")
            share = threads + sum(marks.values()) / SHORTEST_STEP
            print(f"  together: {100 * share:.2f} % of a step of {SHORTEST_STEP} s")
    zygote.close()


def metrics_with_times(root: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (root / "runs/base/metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "time/step" in row]


# --- sums --------------------------------------------------------------------------------------------------------------


def sums(passes: int) -> None:
    """Print the seconds in which the same checkpoint is loaded with and without its sums."""
    import transformers

    from benchmarks import guards

    with tempfile.TemporaryDirectory() as directory:
        family, settings = sizes(large=True)["qwen3_0.6b"]
        config = getattr(transformers, f"{family}Config")(**settings | {"num_hidden_layers": LAYERS})
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(f"{directory}/model")
        Cluster("cpu").run(guards.load, "megatron:d1", Path(directory), passes)
    zygote.close()


def load(mesh: Mesh, root: Path, passes: int) -> None:
    """Save a model with the state of its optimizer, then load it with and without checking sums, in turns."""
    model = build(mesh, root / "model", "bfloat16", tokens=64)
    model.train_step(random_batch(4, 16, model.spec.vocab), OBJECTIVE.loss)
    with saved(Measured(mesh), root) as begin:
        path = begin(model, False).finish(wait=True)
        assert path is not None
        size = sum(file.stat().st_size for file in path.rglob("*.safetensors"))
        model.load(path / "policy")
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for number in range(passes):
            for checks in (False, True) if number % 2 else (True, False):
                with nullcontext() if checks else without_sums():
                    seconds[checks].append(timed(mesh, lambda: model.load(path / "policy"))[0])
                print(f"{'with' if checks else 'without'} sums: {seconds[checks][-1]:.2f} s, "
                      f"{size / seconds[checks][-1] / 1e9:.2f} GB/s", flush=True)  # fmt: skip
    block = bytearray(BLOCK)
    began = time.perf_counter()
    for _ in range(500):
        sum_of(block)
    rate = 500 * len(block) / (time.perf_counter() - began)
    medians = {checks: statistics.median(taken) for checks, taken in seconds.items()}
    added = 100 * (medians[True] / medians[False] - 1)
    print(f"{size / 1e9:.1f} GB: sums add {added:.1f} % (medians of {passes} passes); a sum alone has {rate / 1e9:.1f} GB/s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="of step, sums; both if none is named")
    parser.add_argument("--steps", type=int, default=40, help="of the run (default: 40)")
    parser.add_argument("--passes", type=int, default=3, help="with and without sums (default: 3)")
    chosen = parser.parse_args()
    parts: dict[str, Callable[[], None]] = {
        "step": partial(step, chosen.steps),
        "sums": partial(sums, chosen.passes),
    }
    if unknown := set(chosen.parts) - set(parts):
        parser.error(f"there is no part {', '.join(sorted(unknown))}: choose from {', '.join(parts)}")
    for name in chosen.parts or parts:
        parts[name]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
