"""Harness of the benchmarks: parts that are chosen by name, have a time limit, and run on ranks in processes of their
own."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import psutil
import torch
import yaml

from fivefold.layout import ParallelLayout
from fivefold.models.families import load_spec
from tests.support.cluster import Cluster
from tests.support.gpu_models import scratch, write_model
from tests.support.layout_cases import with_backend
from tests.support.zygote import zygote

if TYPE_CHECKING:
    from fivefold.fsdp.mesh import Mesh as FSDPMesh
    from fivefold.megatron.mesh import Mesh

P = ParamSpec("P")
T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[1]


def shortened(message: str) -> str:
    """Return the first lines of a failure that name an exception, which caused the others, and its last two lines."""
    lines = message.strip().splitlines()
    named = [line.strip() for line in lines[:-2] if re.match(r"\s*[\w.]*(Error|Exception)\b", line)]
    return " / ".join([*named[:3], *lines[-2:]])


def hardware(mesh: Mesh) -> str:
    return torch.cuda.get_device_name() if mesh.device.type == "cuda" else "CPU"


def peak_gib(mesh: Mesh | FSDPMesh) -> float:
    """Return the peak of device memory in this process, in GiB, which measures one thing only."""
    return torch.cuda.max_memory_allocated() / 2**30 if mesh.device.type == "cuda" else 0.0


class Part:
    """Running part of a benchmark: it makes models, measures until its time is over, and prints."""

    def __init__(self, cluster: Cluster, gpus: int, root: Path, seconds: float) -> None:
        self._cluster, self.gpus, self._root = cluster, gpus, root
        self._deadline = time.monotonic() + seconds
        self.large = cluster.kind == "cuda"
        self.failed = 0

    @property
    def left(self) -> float:
        """Return the seconds that this part may still take."""
        return self._deadline - time.monotonic()

    def say(self, what: str, value: Any) -> None:
        print(f"{what}: {value if isinstance(value, str) else json.dumps(value)}", flush=True)

    def claim(self, what: str, holds: bool, value: Any) -> None:
        """Print whether a statement about the measurement holds; if one does not, the exit code is 1."""
        self.failed += not holds
        self.say(f"{'ok  ' if holds else 'FAIL'} {what}", value)

    def measure(
        self, what: str, layout: str, function: Callable[Concatenate[Any, P], T], *arguments: P.args, **named: P.kwargs
    ) -> T | None:
        """Run a function on new ranks, so that its peak of memory is measured alone, and return the first rank's result;
        None if it failed."""
        results = self.measure_all(what, layout, function, *arguments, **named)
        return None if results is None else results[0]

    def measure_all(
        self, what: str, layout: str, function: Callable[Concatenate[Any, P], T], *arguments: P.args, **named: P.kwargs
    ) -> list[T] | None:
        """Run a function on new ranks and return the results of all of them, in order."""
        layout = with_backend(layout)
        world, left = ParallelLayout.parse(layout).world_size, self.left
        if self.large and world > self.gpus:
            self.say(what, f"needs {world} GPUs")
        elif left <= 0:
            self.say(what, OVER)
        else:
            try:
                return self._cluster.run(partial(function, **named), layout, *arguments, seconds=left)
            except (RuntimeError, TimeoutError) as error:
                self.claim(what, False, shortened(str(error)))
        return None

    def train(
        self,
        what: str,
        run: Mapping[str, Any],
        wanted: tuple[str, ...],
        environment: Mapping[str, str] = os.environ,
        steps: int | None = None,
    ) -> list[dict[str, Any]]:
        """The rows of a whole run from the command line, of which each is said as it comes, with the keys that begin as
        `wanted`; none if the run fails or the time is over. What it prints goes to a file next to its directory, `.out`.

        `steps`: the run is killed after so many, without a checkpoint, which takes longer than they do for a large model.
        """
        if self.left <= 0:
            self.say(what, OVER)
            return []
        run_dir, printed = Path(run["trainer"]["run_dir"]), 0
        file, output = run_dir.with_name(f"{run_dir.name}.yaml"), run_dir.with_name(f"{run_dir.name}.out")
        file.write_text(yaml.safe_dump(dict(run)))
        paths = os.pathsep.join([f"{ROOT}/src", *filter(None, [environment.get("PYTHONPATH")])])
        command = [sys.executable, "-m", "fivefold.cli", "train", str(file)]
        with output.open("w+") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, env={**environment, "PYTHONPATH": paths})
            try:
                while process.poll() is None and self.left > 0 and printed != steps:
                    time.sleep(1)
                    printed = self._say_steps(what, run_dir / "metrics.jsonl", printed, wanted)
                is_enough, is_running = printed == steps, process.poll() is None
                if is_enough and is_running:
                    for rank in psutil.Process(process.pid).children(recursive=True):
                        rank.kill()
                    process.kill()
            finally:
                process.terminate()
                code = process.wait(60)
        self._say_steps(what, run_dir / "metrics.jsonl", printed, wanted)
        if is_enough or not code:
            return _rows(run_dir / "metrics.jsonl")
        if is_running:
            self.say(what, OVER)
        else:
            self.claim(what, False, output.read_text()[-3000:])
        return []

    def _say_steps(self, what: str, metrics: Path, printed: int, wanted: tuple[str, ...]) -> int:
        rows = _rows(metrics)
        for row in rows[printed:]:
            medians = {
                name: value for name, value in row.items() if name.startswith(wanted) and isinstance(value, int | float)
            }
            rounded = {name: float(f"{value:.4g}") for name, value in medians.items()}
            self.say(f"{what}, step {row['step']}", rounded)
        return len(rows)

    def directory(self, name: str) -> Path:
        """Return an empty directory for the files of this part."""
        path = self._root / name
        path.mkdir()
        return path

    def model(self, name: str, write: Callable[..., None] = write_model) -> Path:
        path = self._root / f"{write.__name__}-{name}"
        if not path.exists():
            begun = path.with_suffix(".part")
            self._cluster.run(write, "megatron:d1", name, begun)
            begun.rename(path)
            if write is write_model:
                self.say(f"model {name}", f"{load_spec(path).parameters / 1e6:,.0f} M parameters")
        return path


def _commit() -> str:
    """Return the commit of this tree; without git, that which FIVEFOLD_COMMIT names."""
    asked = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    in_git = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
    return os.environ.get("FIVEFOLD_COMMIT") or in_git or "unknown"


OVER = "not measured: the time of this part is over"


def _rows(metrics: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []


def run(description: str | None, parts: Mapping[str, Callable[[Part], None]], arguments: list[str] | None = None) -> int:
    """Run the parts that the command line names, or all of them, and return the exit code."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(parts)}; all of them if none is named")
    parser.add_argument("--seconds", type=float, default=240.0, help="that each part has (default: 240)")
    parser.add_argument("--models", type=Path, help="directory that keeps the models (default: none does)")
    parser.add_argument("--dry-run", action="store_true", help="tiny models on ranks of CPUs, also where there are GPUs")
    given = parser.parse_args(arguments)
    # What it has started ends with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if unknown := set(given.parts) - set(parts):
        parser.error(f"there is no part {', '.join(sorted(unknown))}: choose from {', '.join(parts)}")
    gpus = 0 if given.dry_run else torch.cuda.device_count()
    cluster = Cluster("cuda" if gpus else "cpu")
    (name,) = cluster.run(hardware, "megatron:d1")
    versions = f"torch {torch.__version__}; python {sys.version.split()[0]}; commit {_commit()}"
    print(f"hardware: {gpus or 1} x {name}; {versions}", flush=True)
    failed = 0
    try:
        for wanted in given.parts or parts:
            print(f"\n{wanted}: {(parts[wanted].__doc__ or '').strip()}", flush=True)
            with scratch(gpus > 0) if given.models is None else nullcontext(given.models) as root:
                part = Part(cluster, gpus, Path(root), given.seconds)
                try:
                    parts[wanted](part)
                except (RuntimeError, TimeoutError) as error:
                    part.claim(wanted, False, str(error).strip().splitlines()[-1])
                failed += part.failed
    finally:
        zygote.close()
    return 1 if failed else 0
